"""The Spark program that is killed: numbered messages from a topic to Parquet files, to a Delta
table, to another topic, through the ready-made pipelines that archive topics and keep them as a
table, and through pipelines into databases and with upserts.

python -m tests.soak.exactly_once_driver FILE, with the arguments in FILE (see `Arguments`). A query
that fails, because a process that it needs was killed, is started again from its checkpoint. When a
line comes on standard input the queries are stopped; what is in Parquet files, read through Spark,
is then put in a file.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import pyarrow.feather
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nsparq.pipeline.execute import queries
from nsparq.pipeline.write.file_sink import FORMAT
from nsparq.spark.session.build import build_session, register
from tests.soak.exactly_once_publisher import DIGITS

READY_MADE = ("archive", "table")
SINKS = ("parquet", "delta", "topic", *READY_MADE, "delta-pipeline", "delta-upsert", "jdbc", "jdbc-upsert")
NUMBER = f"cast(substring(cast(body as string), 1, {DIGITS}) as long) number"


TIMES = "times"
"""How often an upsert has counted a number."""
PIPELINES = {
    "delta-pipeline": 'delta = "{result}/table"',
    "delta-upsert": 'delta = "{result}/table", key = ["number"]',
    "jdbc": 'jdbc = "{url}", table = "numbers", batch_column = "batch"',
    "jdbc-upsert": 'jdbc = "{url}", table = "numbers", key = ["number"]',
}
"""What their sinks are. An upsert replaces a row that comes twice, so these count the messages."""
PIPELINE = """
[nsq]
nsqlookupd = ["{lookupd}"]
[run]
checkpoint = "{result}"
[pipeline.{name}]
source = {{ topic = "{topic}", channel = "{channel}", max_rows_per_trigger = {max_rows}{source} }}
sql = "SELECT {columns} FROM input{grouping}"
output_mode = "{mode}"
trigger = "500ms"
sink = {{ {sink}{more} }}
"""


@dataclass(frozen=True)
class Sink:
    """A query of its own."""

    kind: str
    """One of `SINKS`."""
    channel: str
    result: str
    """A directory, or a topic."""
    checkpoint: str
    numbers: str
    """The file for what was found in a directory."""


@dataclass(frozen=True)
class Arguments:
    master: str
    conf: dict[str, str | None]
    sinks: list[dict[str, str]]
    lookupd: str
    topic: str
    max_rows: int
    failures: str
    """A file: each failure of a query is a line of it."""
    source: str = ""
    """More keys of a pipeline's source, as TOML that begins with a comma."""
    delta: str = ""
    """The same of the sink `delta-pipeline`."""


class Program:
    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._is_over = threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        arguments = self._arguments
        spark = build_session("exactly once", master=arguments.master, ui_port=None, conf=arguments.conf)
        sinks = [Sink(**fields) for fields in arguments.sinks]
        threads = [threading.Thread(target=self._serve, args=(spark, sink), daemon=True) for sink in sinks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self._is_over.is_set():
            raise SystemExit("a query cannot be started")
        for sink in sinks:
            if sink.kind in ("delta-pipeline", "delta-upsert"):
                save(deltalake.DeltaTable(f"{sink.result}/table").to_pyarrow_table(), Path(sink.numbers))
            elif sink.kind in PIPELINES:
                save(spark.read.jdbc(database(sink), "numbers").toArrow(), Path(sink.numbers))
            elif sink.kind == "delta":
                save(deltalake.DeltaTable(sink.result).to_pyarrow_table(), Path(sink.numbers))
            elif sink.kind == "table":
                files = deltalake.DeltaTable(sink.result).file_uris()
                save_numbers(spark.read.parquet(*files), Path(sink.numbers), True)
            elif sink.kind != "topic":
                save_numbers(spark.read.parquet(sink.result), Path(sink.numbers), sink.kind == "archive")
        spark.stop()

    def _listen(self) -> None:
        if sys.stdin.readline():
            self._is_over.set()

    def _serve(self, spark: SparkSession, sink: Sink) -> None:
        register(spark)
        if sink.kind in READY_MADE:
            self._ready_made(spark, sink)
        elif sink.kind in PIPELINES:
            self._pipeline(spark, sink)
        else:
            self._query(spark, sink)

    def _query(self, spark: SparkSession, sink: Sink) -> None:
        while not self._is_over.is_set():
            query = self._start(spark, sink)
            say(f"{sink.kind}: started")
            while query.isActive and not self._is_over.wait(0.1):
                pass
            failure = query.exception()
            query.stop()
            if failure is not None:
                self._note(sink, str(failure))

    def _start(self, spark: SparkSession, sink: Sink) -> StreamingQuery:
        arguments = self._arguments
        rows = (
            spark.readStream.format("nsq")
            .option("nsqlookupd", arguments.lookupd)
            .option("topic", arguments.topic)
            .option("channel", sink.channel)
            .option("maxRowsPerTrigger", arguments.max_rows)
            .load()
            .selectExpr(NUMBER, "node", "offset")
        )
        if sink.kind == "parquet":
            writer = rows.writeStream.format("parquet").option("path", sink.result)
        elif sink.kind == "delta":
            queries.register(spark)
            writer = rows.writeStream.format(FORMAT).options(table="delta", path=sink.result)
        else:
            # Each row says where it comes from, so that one that is there twice can be explained.
            bodies = rows.selectExpr("cast(concat_ws(' ', number, node, offset) as binary) body")
            writer = (
                bodies.writeStream.format("nsq")
                .option("nsqlookupd", arguments.lookupd)
                .option("topic", sink.result)
                .option("delivery", "exactly-once")
            )
        return writer.option("checkpointLocation", sink.checkpoint).start()

    def _ready_made(self, spark: SparkSession, sink: Sink) -> None:
        from nsparq.pipeline.file import ready_made

        arguments = self._arguments
        topics = ready_made.Topics(nsq={"nsqlookupd": [arguments.lookupd]}, topics=[arguments.topic])
        output = Path(sink.result)
        if sink.kind == "archive":
            text = ready_made.archive(topics, output, trigger="500ms", compact=4, channel=sink.channel)
        else:
            checkpoint = f"{output}/_nsparq/checkpoint"
            text = ready_made.table(
                topics, str(output), checkpoint, trigger="500ms", compact=4, channel=sink.channel
            )
        self._run(spark, sink, text, output / f"{sink.kind}.toml")

    def _pipeline(self, spark: SparkSession, sink: Sink) -> None:
        arguments, is_upsert = self._arguments, sink.kind.endswith("-upsert")
        text = PIPELINE.format(
            name=sink.kind,
            lookupd=arguments.lookupd,
            result=sink.result,
            topic=arguments.topic,
            channel=sink.channel,
            max_rows=arguments.max_rows,
            columns=f"{NUMBER}, " + (f"count(*) AS {TIMES}" if is_upsert else "_node node, _offset `offset`"),
            grouping=" GROUP BY 1" if is_upsert else "",
            mode="append" if sink.kind == "delta-pipeline" else "update",
            source=arguments.source,
            sink=PIPELINES[sink.kind].format(result=sink.result, url=database(sink)),
            more=arguments.delta if sink.kind == "delta-pipeline" else "",
        )
        self._run(spark, sink, text, Path(sink.result) / "pipeline.toml")

    def _run(self, spark: SparkSession, sink: Sink, text: str, path: Path) -> None:
        from nsparq.pipeline.execute import runner
        from nsparq.pipeline.execute.progress import State
        from nsparq.pipeline.file.reading import parse

        file = parse(text, path)
        failures = 0

        def watch(status: Any) -> None:
            nonlocal failures
            (figures,) = status.pipelines
            if figures.failures > failures:
                failures = figures.failures
                self._note(sink, figures.error)

        while not self._is_over.is_set():
            say(f"{sink.kind}: started")
            status = runner.run(spark, file, self._is_over, watch=watch)
            if status.pipelines[0].state is State.FAILED:
                self._note(sink, f"for good: {status.pipelines[0].error}")

    def _note(self, sink: Sink, failure: str) -> None:
        say(f"{sink.kind}: failed: {failure}")
        with Path(self._arguments.failures).open("a") as file:
            file.write(json.dumps([sink.kind, failure]) + "\n")


def database(sink: Sink) -> str:
    """Derby in the JVM of the driver: no other process can open it."""
    return f"jdbc:derby:{sink.result}/database;create=true"


def save_numbers(frame: DataFrame, path: Path, is_raw: bool) -> None:
    if is_raw:
        frame = frame.selectExpr(NUMBER, "node", "offset")
    save(frame.toArrow(), path)


def save(rows: pyarrow.Table, path: Path) -> None:
    pyarrow.feather.write_feather(rows, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Program(Arguments(**json.loads(Path(sys.argv[1]).read_text()))).run()
