"""For tests of queue mode: a query without Spark that crashes where a test wants it to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadLimit

from nsparq.spark.datasource import SCHEMA
from nsparq.spark.options import NsqOptions, Use
from nsparq.spark.queue.reader import QueueStreamReader
from nsparq.spark.queue.task import QueuePartition
from tests.support import REFERENCE, TestBroker

TIMEOUT = "3s" if REFERENCE else "30s"
"""Our nsqd requeues messages when their connection ends; others wait for this."""


class Crash(BaseException):
    """The process ends here: nobody catches this."""


def address(broker: TestBroker) -> str:
    """Of its HTTP API."""
    assert isinstance(broker.http_address, tuple)
    host, port = broker.http_address
    return f"{host}:{port}"


def tcp(broker: TestBroker) -> str:
    assert isinstance(broker.address, tuple)
    host, port = broker.address
    return f"{host}:{port}"


def options(*brokers: TestBroker, **given: Any) -> NsqOptions:
    given = {"mode": "queue", "topic": "t", "channel": "c", "messageTimeout": TIMEOUT, **given}
    if brokers:
        given["nsqd"] = ",".join(map(address, brokers))
    return NsqOptions.parse({name: str(value) for name, value in given.items()}, Use.QUEUE_STREAM)


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(start, start + count)]


class Query:
    """Does what Spark does with a stream. Its sink takes each batch once."""

    def __init__(self, directory: Path, *brokers: TestBroker, **given: Any) -> None:
        self.staging = directory / "staging"
        self._options = options(*brokers, **{"staging": self.staging, **given})
        self.offsets: list[dict[str, Any]] = []
        """The offset log."""
        self.committed = 0
        """Entries of the commit log."""
        self.sink: dict[int, list[pa.RecordBatch]] = {}
        self.limit: ReadLimit | None = None
        self.reader: QueueStreamReader | None = None

    def start(self, *, available_now: bool = False) -> QueueStreamReader:
        """A new run, from the checkpoint."""
        self.kill()
        self.reader = QueueStreamReader(SCHEMA, self._options)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        return self.reader

    def kill(self) -> None:
        """What is left of a process that has ended."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.stop()

    def step(self) -> int | None:
        """One trigger: the rows of the batch that it ran; None if there was none."""
        reader = self.reader or self.start()
        if len(self.offsets) == self.committed and not self._plan(reader):
            return None
        batch = len(self.offsets)
        start = self.offsets[-2] if batch > 1 else reader.initialOffset()
        rows = [rows for part in reader.partitions(start, self.offsets[-1]) for rows in reader.read(part)]
        self.sink.setdefault(batch, rows)
        self.before_commit()
        self.committed = batch
        return sum(map(len, rows))

    def _plan(self, reader: QueueStreamReader) -> bool:
        start = self.offsets[-1] if self.offsets else reader.initialOffset()
        end = reader.latestOffset(start, self.limit or reader.getDefaultReadLimit())
        # The first batch is run in any case: Spark has no offset to compare with.
        if end == start and self.offsets:
            return False
        self.offsets.append(end)
        if self.committed:
            reader.commit(self.offsets[self.committed - 1])
        return True

    def before_commit(self) -> None:
        """A place to crash at: the sink has the batch, and the commit log does not know yet."""

    def drain(self, quiet: int = 3) -> None:
        """Run until nothing has come for so many triggers."""
        left = quiet
        while left:
            left = quiet if self.step() is not None else left - 1

    def drain_until(self, bodies: Iterable[bytes], timeout: float = 20.0) -> None:
        """Run until the sink has all of these."""
        wanted, deadline = set(bodies), time.monotonic() + timeout
        while missing := wanted - self.counts().keys():
            assert time.monotonic() < deadline, f"{len(missing)} of {len(wanted)} are missing"
            self.step()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batches in self.sink.values() for rows in batches for row in rows.to_pylist()]

    def counts(self) -> Counter[bytes]:
        """How often each body is in the result."""
        return Counter(
            body.as_py() for batches in self.sink.values() for rows in batches for body in rows.column("body")
        )

    def partition(self, number: int = 0) -> QueuePartition:
        """One of the batch that is the last in the offset log."""
        assert self.reader is not None
        start = self.offsets[-2] if len(self.offsets) > 1 else self.reader.initialOffset()
        found = self.reader.partitions(start, self.offsets[-1])[number]
        assert isinstance(found, QueuePartition)
        return found
