"""What the tests of log mode share: a query without Spark, which calls the reader as Spark does."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import Filter
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from nsparq.spark.datasource import SCHEMA, NsqDataSource
from nsparq.spark.options import NsqOptions, Use
from nsparq.spark.source.stream import LogPartition, LogStreamReader

Offset = dict[str, Any]
Logs = dict[str, dict[str, list[Any]]]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(start, start + count)]


def options(use: Use = Use.LOG_STREAM, **given: Any) -> NsqOptions:
    given = {"topic": "t", **({"channel": "c"} if use is Use.LOG_STREAM else {}), **given}
    return NsqOptions.parse({name: str(value) for name, value in given.items() if value is not None}, use)


class FakeClock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def copied(value: Any) -> Any:
    """As it arrives in a task."""
    return pickle.loads(pickle.dumps(value))


def _to_rows(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    return pa.Table.from_batches(batches).to_pylist() if batches else []


class Query:
    """A stream and its checkpoint. Its sink takes each batch once, as a file sink does."""

    def __init__(self, schema: StructType = SCHEMA, **given: Any) -> None:
        given = {"topic": "t", "channel": "c", "discoveryInterval": "50ms", "retryFor": "5s", **given}
        self.given = {name: str(value) for name, value in given.items() if value is not None}
        self.schema = schema
        self.offsets: list[Offset] = []
        """The offset log."""
        self.committed = 0
        """Entries of the commit log."""
        self.rows: list[dict[str, Any]] = []
        """What is in the sink."""
        self.limit: ReadLimit | None = None
        self.rows_of_driver: list[pa.RecordBatch] | None = None
        """What the driver has read of the last batch, if it was small."""
        self._initial: Offset = {}
        self._reader: LogStreamReader | None = None

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def reader(self) -> LogStreamReader:
        if self._reader is None:
            self.start()
        assert self._reader is not None
        return self._reader

    def start(self, *, available_now: bool = False, **changed: Any) -> Query:
        """A new run, from the checkpoint."""
        self.stop()
        self.given |= {name: str(value) for name, value in changed.items()}
        reader = NsqDataSource(self.given).streamReader(self.schema)
        assert isinstance(reader, LogStreamReader)
        self._reader = reader
        if available_now:
            reader.prepareForTriggerAvailableNow()
        if self.committed < len(self.offsets):
            self._run()
        elif not self.offsets:
            self._initial = reader.initialOffset()
        return self

    def stop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.stop()

    @property
    def offset(self) -> Offset:
        """The last."""
        return self.offsets[-1] if self.offsets else self._initial

    @property
    def at(self) -> Logs:
        """Where it stands."""
        logs: Logs = self.offset["logs"]
        return logs

    def plan(self) -> bool:
        """Ask how far the next batch goes, and write it down. False if there is nothing."""
        reader = self.reader
        start = self.offset
        end = reader.latestOffset(start, self.limit or reader.getDefaultReadLimit())
        reader.reportLatestOffset()
        if end == start:
            return False
        logs = end["logs"]
        assert [*logs] == sorted(logs) and all([*nodes] == sorted(nodes) for nodes in logs.values())
        self.offsets.append(end)
        if self.committed:
            reader.commit(self.offsets[self.committed - 1])
        return True

    def step(self) -> int | None:
        """One trigger: the rows of its batch; None if there was none."""
        return self._run() if self.plan() else None

    def _run(self) -> int:
        start = self.offsets[-2] if len(self.offsets) > 1 else self._initial
        parts = self.partitions(start, self.offsets[-1])
        rows = [row for part in parts for row in self.read(part)]
        if self.rows_of_driver is not None:
            assert _to_rows(self.rows_of_driver) == rows
        self.rows += rows
        self.committed = len(self.offsets)
        return len(rows)

    def partitions(self, start: Offset, end: Offset) -> Sequence[Any]:
        """As Spark plans a batch: it also fetches the rows that the reader has read already."""
        parts = self.reader.partitions(start, end)
        is_read = isinstance(self.reader, _SimpleStreamReaderWrapper)
        self.rows_of_driver = [*self.reader.getCache(start, end)] if is_read else None
        return parts

    def read(self, part: Any) -> list[dict[str, Any]]:
        assert isinstance(part, LogPartition)
        return _to_rows([*copied(self.reader).read(copied(part))])

    def drain(self, batches: int = 100) -> Query:
        """Until there is nothing more for a moment."""
        while batches and self.step() is not None:
            batches -= 1
        return self

    def run_until(self, rows: int, triggers: int = 30) -> Query:
        while len(self.rows) < rows:
            self.step()
            triggers -= 1
            assert triggers, f"{len(self.rows)} rows: {self.at}"
        return self

    @property
    def bodies(self) -> list[bytes]:
        return [row["body"] for row in self.rows]


def read_batch(
    schema: StructType = SCHEMA, *, filters: Sequence[Filter] = (), **given: Any
) -> list[dict[str, Any]]:
    """What spark.read would give, before Spark tests rows itself."""
    given = {"topic": "t", "retryFor": "5s", **given}
    source = NsqDataSource({name: str(value) for name, value in given.items() if value is not None})
    reader = source.reader(schema)
    if filters:
        reader.pushFilters([*filters])
    parts = [copied(part) for part in reader.partitions()]
    batches = [batch for part in parts for batch in copied(reader).read(part)]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def bodies(rows: Iterable[dict[str, Any]]) -> list[bytes]:
    return [row["body"] for row in rows]
