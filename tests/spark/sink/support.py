"""What the tests of the sink share: writers without Spark, and what has arrived."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from nsparq.spark.options import NsqOptions, Use
from nsparq.spark.sink.writers import NsqStreamWriter, NsqWriter, Task
from nsparq.storage.raw_batch import iter_batches

SCHEMA = StructType().add("body", "binary")
QUERY = "0b5f3c1e-query"


def address(broker: Any) -> str:
    """Of its HTTP API."""
    host, port = broker.http_address
    return f"{host}:{port}"


def options(use: Use, *nsqd: str, **given: Any) -> NsqOptions:
    given = {"topic": "t", "retryFor": "10s", **given}
    if nsqd:
        given["nsqd"] = ",".join(nsqd)
    return NsqOptions.parse({name: str(value) for name, value in given.items()}, use)


def stream_writer(
    *nsqd: str, schema: StructType = SCHEMA, checkpoint: Path | str = "", **given: Any
) -> NsqStreamWriter:
    return NsqStreamWriter(schema, options(Use.SINK_STREAM, *nsqd, **given), False, str(checkpoint))


def batch_writer(*nsqd: str, schema: StructType = SCHEMA, **given: Any) -> NsqWriter:
    return NsqWriter(schema, options(Use.SINK_BATCH, *nsqd, **given), False)


def rows(*bodies: bytes) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array(bodies, pa.binary())})


def run_task(
    monkeypatch: pytest.MonkeyPatch,
    writer: NsqStreamWriter | NsqWriter,
    batches: Iterable[pa.RecordBatch],
    partition: int = 0,
    batch_id: int = 0,
    attempt: int = 0,
) -> WriterCommitMessage:
    """What Spark does on an executor."""
    task = Task(partition, attempt, QUERY, batch_id)
    monkeypatch.setattr(Task, "current", classmethod(lambda cls: task))
    return writer.write(iter(batches))


def run_batch(
    monkeypatch: pytest.MonkeyPatch,
    writer: NsqStreamWriter,
    partitions: Sequence[Sequence[pa.RecordBatch]],
    batch_id: int = 0,
) -> list[WriterCommitMessage]:
    """A whole micro-batch but for its commit."""
    return [
        run_task(monkeypatch, writer, batches, index, batch_id) for index, batches in enumerate(partitions)
    ]


def ask(broker: Any, method: str, path: str, **query: Any) -> Any:
    return json.loads(broker.http(method, path, **query))


def stored(broker: Any, topic: str = "t") -> list[bytes]:
    """Every message that the topic's log holds, in its order."""
    answer = broker.request("GET", f"/topic/positions?{urlencode({'topic': topic})}")
    if answer.status == 404:
        return []
    assert answer.status == 200, answer
    positions = json.loads(answer.body)
    found: list[bytes] = []
    position = positions["earliest"]
    while position < positions["latest"]:
        query = urlencode({"topic": topic, "from": position, "max_bytes": 8 << 20})
        answer = broker.request("GET", f"/topic/read?{query}")
        assert answer.status == 200, answer
        for batch in iter_batches(answer.body):
            found += batch.between(position, positions["latest"]).bodies()
        position = int(answer.header("X-Nsparq-Next"))
    return found


def state(broker: Any, sequence: int, producer: str = f"spark:{QUERY}") -> str:
    found: str = ask(broker, "GET", "/transaction", producer=producer, sequence=sequence)["state"]
    return found


def staged_count(broker: Any) -> int:
    """Transactions that are not committed."""
    producers = ask(broker, "GET", "/transactions")["producers"]
    return sum(len(producer["open"]) for producer in producers)
