"""Kills while the past of a topic moves into an object store, and Spark reads it from there into a
table.

    python -m tests.soak.history --kills 100 --seed 1

Two nsqd archive their log files to an S3 server and remove them from the disk as soon as they are
there. A pipeline reads the archive and live messages into a Delta table, whose files are joined
meanwhile. nsqd, the driver, executors, Python workers and the store are killed at random moments
and come back; the objects of the store survive, as those of a real one. A second topic has an
archive that soon forgets, so objects are removed all the time.

In the end every message must be in the table once and in the log once, and after the time that
docs/internals/archive.md promises (shortened by flags of nsqd) the store must have no object that
the latest manifests do not name. Exit status 1 if not, or if it gets stuck.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path

import numpy as np

from nsparq.archive.restore import find_manifests
from nsparq.archive.store import Store
from nsparq.storage.manifest import ROOT, index_key, manifest_key, segment_key
from tests.soak.exactly_once import TOPIC, Options, Run, Say, _numbers, say
from tests.soak.exactly_once_publisher import Publisher
from tests.soak.support import MARK, Cluster, clock, free_ports, read_log, table
from tests.support import ConnectionClosed, wait_until
from tests.support.s3 import run_s3

VICTIMS = ("driver", "executor", "worker", "nsqd", "store")
FLEETING = "fleeting"
"""The topic whose archive forgets."""
URL = "s3://lake/nsq"
IDLE_S = 60.0
"""How often nsqd looks at a topic that nobody uses."""
SLACK_S = 120.0
"""How much longer than promised the end may take: a safety net for a busy machine."""


class StoreProcess:
    """The part of the store that is killed. It always has the same address."""

    def __init__(self, endpoint: str) -> None:
        (self._port,) = free_ports(1)
        self._endpoint = endpoint
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.support.s3_front", str(self._port), self._endpoint]
        # It outlives the run: the store is looked at afterwards.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(command, env=environment)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None


class HistoryRun(Run):
    def __init__(
        self,
        options: Options,
        directory: Path,
        say: Say,
        *,
        compact: int,
        unknown_s: float,
        interval_s: float,
    ) -> None:
        super().__init__(options, directory, say)
        self._compact, self._unknown_s, self._interval_s = compact, unknown_s, interval_s
        self._fleeting: list[Publisher] = []
        self._is_over = threading.Event()
        self._forgetting = threading.Thread(target=self._forget, daemon=True)
        self.figures: list[tuple[str, int]] = []
        self.wrong: list[str] = []
        with ExitStack() as stack:
            settings = stack.enter_context(run_s3("lake"))
            self.store = StoreProcess(settings["AWS_ENDPOINT_URL"])
            stack.callback(self.store.kill)
            # For nsqd, the driver and the executors, which inherit them.
            os.environ.update(settings, AWS_ENDPOINT_URL=self.store.url)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    # setting up

    def _make_cluster(self) -> Cluster:
        return Cluster(
            self.directory,
            archive=URL,
            archive_local_bytes=1,
            archive_unknown_age=self._unknown_s,
            archive_collect_interval=self._interval_s,
            max_bytes_per_file=100_000,
            mem_queue_size=100,
            sync_timeout=0.2,
            checkpoint_interval=0.2,
        )

    def _create_topics(self) -> None:
        super()._create_topics()
        for node in self.cluster.serving:
            node.http("POST", "/topic/create", topic=FLEETING)
            node.http("POST", "/channel/create", topic=FLEETING, channel="nobody")
            node.http("PUT", "/topic/settings", b'{"archive_retention_bytes": 300000}', topic=FLEETING)

    def _keys(self) -> dict[str, str]:
        compact = f", compact = {self._compact}" if self._compact else ""
        return {"source": f', archive = "{URL}"', "delta": compact}

    def _publishers(self) -> list[Publisher]:
        self._forgetting.start()
        for index, node in enumerate(self.cluster.nodes):
            address = str(node.flags["http_address"])
            one = Publisher([address], FLEETING, index, 2, self.options.rate / 4)
            one.name = f"fleeting-{index}"  # also of the producer of its transactions
            one.start()
            self._fleeting.append(one)
        return super()._publishers()

    def _kill(self, victim: str) -> bool:
        if victim != "store":
            return super()._kill(victim)
        done = self.store.alive() and self._kill_daemon(self.store)
        self.say(f"{clock()} {'killed' if done else 'missed'} store")
        self.report.kills[victim] += done
        return done

    # the end

    def _forget(self) -> None:
        """Finishes the messages of the second topic, whose archive may then drop them."""
        while not self._is_over.wait(1.0):
            for node in self.cluster.nodes:
                with suppress(OSError, ConnectionClosed, AssertionError):  # it is killed, or starts
                    node.http("POST", "/channel/empty", topic=FLEETING, channel="nobody")

    def _catch_up(self) -> None:
        for one in self._fleeting:
            one.stop()
        self._is_over.set()
        self._forgetting.join()
        super()._catch_up()

    def _compare(self, publishers: list[Publisher]) -> None:
        super()._compare(publishers)
        self.say(f"{clock()} reads the log, and waits for the store to be tidy")
        self._compare_log(publishers)
        self._compare_objects()

    def _compare_log(self, publishers: list[Publisher]) -> None:
        """Everything is still in the log, most of it in the archive alone."""
        certain = _numbers(one for publisher in publishers for one in publisher.certain)
        uncertain = _numbers(one for publisher in publishers for one in publisher.uncertain)
        found = np.array(
            [int(body[:12]) for node in self.cluster.serving for body in read_log(node, TOPIC)], np.int64
        )
        distinct, counts = np.unique(found, return_counts=True)
        lost = np.setdiff1d(certain, distinct)
        strange = np.setdiff1d(distinct, np.concatenate([certain, uncertain]))
        self.figures += [("messages in the log", len(found)), ("lost from the log", len(lost))]
        for what, numbers in (("lost", lost), ("twice", distinct[counts > 1]), ("strange", strange)):
            if len(numbers):
                self.wrong.append(f"{len(numbers)} messages are {what} in the log: {numbers[:5].tolist()}")
        archives = [
            topic["archive"]
            for node in self.cluster.serving
            for topic in node.stats(TOPIC)["topics"]
            if topic["topic_name"] == TOPIC
        ]
        self.figures.append(("log files in the archive", sum(one["segments"] for one in archives)))
        on_disk = sum(
            len([*node.data_path.glob(f"topics/{TOPIC}.topic/*.log")]) for node in self.cluster.nodes
        )
        self.figures.append(("log files on disk", on_disk))

    def _compare_objects(self) -> None:
        store = Store(URL)
        promised_s = self._unknown_s + self._interval_s + IDLE_S

        def unknown() -> list[str]:
            named = set()
            for manifest in find_manifests(store):
                named.add(manifest_key(manifest.place, manifest.number))
                for entry in manifest.segments:
                    named |= {segment_key(manifest.place, entry), index_key(manifest.place, entry)}
            return [one.key for one in store.list(ROOT) if one.key not in named]

        before = time.monotonic()
        with suppress(AssertionError):
            wait_until(lambda: not unknown(), promised_s + SLACK_S, interval=1.0)
        left = unknown()
        self.figures += [
            ("objects in the store", sum(1 for _ in store.list(ROOT))),
            ("unknown objects", len(left)),
            (f"seconds until there was none, of {promised_s:g}", round(time.monotonic() - before)),
        ]
        if left:
            kinds = Counter(key.split("/")[-2] for key in left)
            self.wrong.append(f"objects that no manifest names: {dict(kinds)}, such as {left[:3]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.history",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="at least (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=inf, metavar="N", help="of killing, at most (%(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=1000.0, metavar="N", help="messages a second (%(default)g)"
    )
    parser.add_argument("--master", default="standalone", help="as for exactly_once (%(default)s)")
    parser.add_argument("--victims", default=",".join(VICTIMS), metavar="LIST", help="%(default)s")
    parser.add_argument(
        "--compact", type=int, default=4, metavar="N", help="join so many files of the table; 0: never"
    )
    parser.add_argument(
        "--unknown-age", type=float, default=20.0, metavar="S", help="of nsqd, in seconds (%(default)g)"
    )
    parser.add_argument(
        "--collect-interval", type=float, default=10.0, metavar="S", help="of nsqd, in seconds (%(default)g)"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--directory", type=Path, help="where everything is kept")
    given = parser.parse_args(arguments)
    victims = tuple(given.victims.split(","))
    if not set(VICTIMS).issuperset(victims):
        parser.error(f"--victims: there are {', '.join(VICTIMS)}")
    if given.master.startswith("local["):
        victims = tuple(name for name in victims if name != "executor")
    options = Options(
        sinks=("delta-pipeline",),
        kills=given.kills,
        most_seconds=given.minutes * 60,
        rate=given.rate,
        master=given.master,
        victims=victims,
        max_rows=20_000,
        seed=given.seed,
        outages_s=(3.0, 10.0),
    )
    directory = given.directory or Path(tempfile.mkdtemp(prefix="nsparq-history-"))
    directory.mkdir(exist_ok=True, parents=True)
    say(f"{options}\nin {directory}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    run = HistoryRun(
        options,
        directory.resolve(),
        say,
        compact=given.compact,
        unknown_s=given.unknown_age,
        interval_s=given.collect_interval,
    )
    is_right = False
    try:
        report = run.run()
        is_right = report.is_exact and not run.wrong
        say(f"{report}\n-- the log and the store\n{table(run.figures)}")
        for text in run.wrong:
            say(text)
    except AssertionError as error:
        say(str(error))
    finally:
        run.close()
    say(f"{'as it should be' if is_right else 'NOT as it should be'}; seed {options.seed}")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
