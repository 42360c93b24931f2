"""What the archive costs: requests to an S3 store, counted, and money for a million messages.

    python -m benchmarks.macro.archive_requests --size 200 --put-price 0.005 --get-price 0.0004

nsqd archives some full log files to an S3 server, and a consumer and a batch of the Spark source,
without Spark, read them back; a proxy counts the requests by kind. The prices are those of your
store: per thousand requests, and per gigabyte and month. Reading and writing from the same region
is free of charge for bytes in most stores; add your price if it is not.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from typing import Any

from benchmarks.macro.report import print_facts
from nsparq.testing import Broker, run_broker
from tests.spark.source.support import read_batch
from tests.support import wait_until
from tests.support.s3 import run_s3
from tests.support.s3_front import S3Front

PUTS = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "ListObjectsV2")
"""Requests that stores charge as writes; lists are among them."""
GETS = ("GetObject", "HeadObject")
BATCH = 500


def archive_stats(broker: Broker) -> dict[str, Any]:
    found: dict[str, Any] = broker.stats("t")["topics"][0]["archive"]
    return found


def publish(broker: Broker, options: argparse.Namespace) -> int:
    """Until so many files are archived. Gives the messages."""
    body, count = b"x" * options.size, 0
    while True:
        archive = archive_stats(broker) if count else {"segments": 0, "waiting_segments": 0}
        if archive["segments"] + archive["waiting_segments"] >= options.files:
            break
        broker.publish("t", *[body] * BATCH)
        count += BATCH
    wait_until(lambda: archive_stats(broker)["waiting_segments"] == 0, 600)
    return count


def counted(front: S3Front) -> Counter[str]:
    found, front.counts = front.counts, Counter()
    return found


def row(name: str, counts: Counter[str], files: int) -> tuple[str, str]:
    kinds = ", ".join(f"{counts[kind] / files:g} {kind}" for kind in (*PUTS, *GETS) if counts[kind])
    return name, kinds or "none"


def price(counts: Counter[str], options: argparse.Namespace) -> float:
    """Of requests, in the currency of the prices."""
    puts, gets = (sum(counts[kind] for kind in kinds) for kinds in (PUTS, GETS))
    return float(puts * options.put_price + gets * options.get_price) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.macro.archive_requests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--files", type=int, default=4, metavar="N", help="log files (%(default)s)")
    parser.add_argument(
        "--segment", type=int, default=100 << 20, metavar="BYTES", help="of a log file (%(default)s)"
    )
    parser.add_argument("--size", type=int, default=200, metavar="BYTES", help="of a body (%(default)s)")
    parser.add_argument("--put-price", type=float, default=0.005, help="of 1000 writes (%(default)s)")
    parser.add_argument("--get-price", type=float, default=0.0004, help="of 1000 reads (%(default)s)")
    parser.add_argument("--storage-price", type=float, default=0.023, help="per GB and month (%(default)s)")
    options = parser.parse_args()
    with run_s3("lake") as settings, S3Front(settings["AWS_ENDPOINT_URL"]) as front:
        os.environ.update(settings, AWS_ENDPOINT_URL=front.url)
        flags = {"max_bytes_per_file": options.segment, "archive_local_bytes": 1, "archive_bandwidth": 0}
        with run_broker(archive="s3://lake/nsq", mem_queue_size=1, **flags) as broker:
            broker.create("t", "c")
            messages = publish(broker, options)
            files, size = archive_stats(broker)["segments"], archive_stats(broker)["bytes"]
            written = counted(front)
            end = broker._daemon.broker.topics["t"].log.segments[files - 1].end
            what = {"nsqd": broker.http_address, "endingPosition": f'{{"t": {end}}}'}
            read = read_batch(archive="s3://lake/nsq", **what)
            by_spark = counted(front)
            read_batch(**what)
            by_nsqd = counted(front)
    million = 1e6 / len(read)
    money = {
        "requests to archive": price(written, options),
        "requests to read by Spark": price(by_spark, options),
        "requests to read by nsqd": price(by_nsqd, options),
        "storage for a month": size / 1e9 * options.storage_price,
    }
    print_facts(
        [
            ("messages published, archived", f"{messages:,}, {len(read):,}"),
            ("log files archived", files),
            ("bytes in the store for a message", f"{size / len(read):.1f}"),
            row("requests for a file: archive it", written, files),
            row("requests for a file: Spark reads it", by_spark, files),
            row("requests for a file: nsqd reads it back", by_nsqd, files),
            *((f"a million messages, {name}", f"{cost * million:.6f}") for name, cost in money.items()),
        ]
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
