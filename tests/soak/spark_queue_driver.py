"""The Spark program of spark_queue.py that is killed: numbered messages from a channel to Parquet
files.

python -m tests.soak.spark_queue_driver FILE, with the arguments in FILE (see `Arguments`). A query
that fails, because a process that it needs was killed, is started again from its checkpoint, until
a line comes on standard input.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from nsparq.spark.session.build import build_session
from tests.soak.exactly_once_publisher import DIGITS


@dataclass(frozen=True)
class Arguments:
    master: str
    conf: dict[str, str | None]
    options: dict[str, str]
    """Of the source."""
    result: str
    checkpoint: str
    failures: str
    """A file: each failure of the query is a line of it."""


def start(spark: SparkSession, arguments: Arguments) -> StreamingQuery:
    rows = spark.readStream.format("nsq").options(**arguments.options).load()
    number = f"cast(substring(cast(body as string), 1, {DIGITS}) as long) number"
    writer = rows.selectExpr(number, "node", "id", "attempts").writeStream.format("parquet")
    return writer.option("checkpointLocation", arguments.checkpoint).start(arguments.result)


def main(file: str) -> None:
    arguments = Arguments(**json.loads(Path(file).read_text()))
    is_over = threading.Event()

    def listen() -> None:
        if sys.stdin.readline():
            is_over.set()

    threading.Thread(target=listen, daemon=True).start()
    spark = build_session("queue mode", master=arguments.master, ui_port=None, conf=arguments.conf)
    while not is_over.is_set():
        query = start(spark, arguments)
        while query.isActive and not is_over.wait(0.1):
            pass
        failure = query.exception()
        query.stop()
        if failure is not None:
            with Path(arguments.failures).open("a") as failures:
                failures.write(json.dumps(str(failure)) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
