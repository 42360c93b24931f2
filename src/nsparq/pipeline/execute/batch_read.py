"""Messages as a table, not a stream: for `nsparq pipeline stats` and `replay`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from nsparq.headers import encode_headers, without_origin
from nsparq.pipeline.decode.formats import HEADERS
from nsparq.pipeline.decode.messages import good_rows
from nsparq.pipeline.errors import PipelineError, in_words
from nsparq.pipeline.execute.replay import Message, committed
from nsparq.pipeline.file.reading import parse
from nsparq.pipeline.file.ready_made import Topics
from nsparq.pipeline.file.spec import INPUT, Decode, PipelineFile
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Refused, Unreachable
from nsparq.spark.cluster.nodes import Cluster
from nsparq.spark.columns import SCHEMA
from nsparq.spark.options import NsqOptions, Use


def file_of(topics: Topics) -> PipelineFile:
    """A pipeline file with the settings for the session and the addresses. Raises SpecError."""
    text = f"""{topics.toml()}
[spark]
ui_port = 0
[pipeline.batch]
source = {topics.source()}
sink = "noop"
"""
    return parse(text, "nsparq.toml")


def messages(spark: SparkSession, file: PipelineFile, until: str = "") -> DataFrame:
    """The messages that nsqd has, with the columns of format `raw`. Raises PipelineError."""
    given = file.pipelines[0].sources[0].options
    options = {**file.nsq, **{name: value for name, value in given.items() if name != "channel"}}
    if until:
        options["endingPosition"] = until
    try:
        found = spark.read.format("nsq").options(**options).load()
    except PySparkException as error:
        raise PipelineError(in_words(error)) from error
    return good_rows(found, Decode(format="raw", headers=True), StructType(), bad="fail")


def archived(spark: SparkSession, directory: Path, topics: Topics, until: str = "") -> DataFrame:
    """The messages of an archive, with the same columns. Raises PipelineError."""
    try:
        found = spark.read.parquet(str(directory))
    except PySparkException as error:
        raise PipelineError(f"{directory}: {in_words(error)}") from error
    if "body" not in found.columns:
        raise PipelineError(f"{directory}: the files have no column 'body', so this is not an archive")
    # Spark takes the columns of one file, and older files have no headers.
    of_message = [one for one in SCHEMA.fields if one.name in {*found.columns, HEADERS}]
    found = spark.read.schema(StructType(of_message)).parquet(str(directory))
    if "topic" in found.columns:
        topic = F.col("topic").cast("string")
        wanted = topic.rlike(f"^(?:{topics.pattern})$") if topics.pattern else topic.isin(*topics.topics)
        found = found.where(wanted)
    if "timestamp" in found.columns:
        if topics.start != "earliest":
            found = found.where(F.col("timestamp") >= F.lit(topics.start).cast("timestamp"))
        if until:
            found = found.where(F.col("timestamp") < F.lit(until).cast("timestamp"))
    order = [name for name in ("timestamp", "node", "offset") if name in found.columns]
    return found.select("body", *(F.col(name).alias(f"_{name}") for name in (*order, HEADERS)))


def query(spark: SparkSession, rows: DataFrame, sql: str) -> DataFrame:
    rows.createOrReplaceTempView(INPUT)
    try:
        return spark.sql(sql)
    except PySparkException as error:
        raise PipelineError(in_words(error)) from error
    finally:
        spark.catalog.dropTempView(INPUT)


def messages_of(rows: DataFrame) -> Iterator[Message]:
    """Header blocks and bodies in the order of publishing, as far as the columns show it; always in
    the same order."""
    order = [name for name in ("_timestamp", "_node", "_offset") if name in rows.columns]
    ordered = rows.sort(*order) if order else rows
    for row in ordered.select("body", "_headers").toLocalIterator(prefetchPartitions=True):
        yield encode_headers(without_origin(row._headers or {})), bytes(row.body)


@contextmanager
def nsqd_for(file: PipelineFile, address: str, name: str) -> Iterator[Client]:
    """The nsqd to publish a replay to: the one at `address`, or the one that has a part of the
    replay `name` from an earlier run, or any. Raises PipelineError, Unreachable."""
    given = {key: value for key, value in file.nsq.items() if not address or key != "nsqlookupd"}
    options = NsqOptions.parse(given | ({"nsqd": address} if address else {}), Use.SINK_BATCH)
    access, cluster = Access.of(options), Cluster(options)
    try:
        urls = [node.url for node in cluster.nodes()]
    finally:
        cluster.close()
    if not urls:
        raise PipelineError("no nsqd answers")
    with Client(next((url for url in urls if name and _knows(url, access, name)), urls[0]), access) as client:
        yield client


def _knows(url: str, access: Access, name: str) -> bool:
    with Client(url, access) as client:
        try:
            return committed(client, name) is not None
        except (Refused, Unreachable):
            return False
