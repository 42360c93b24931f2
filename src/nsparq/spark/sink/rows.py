"""Turns Arrow batches into chunks to publish, without a Python object for each row.

One join of two Arrow arrays puts each body behind its size, as in an MPUB; requests send slices of
the result. Rows for several topics or with several delays are grouped first.

    4-byte count │ 4-byte size │ body │ 4-byte size │ body │ …          all numbers big endian

With a column `headers`, each message begins with its header block, and the block's size before it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from nsparq.errors import NsparqError
from nsparq.names import VALID_NAME, is_valid_name
from nsparq.spark.header_columns import to_blocks

__all__ = ["Chunk", "Chunks", "RowError", "SchemaError", "SinkColumns"]

SIZE_BYTES: Final = 4
MAX_JOINED: Final = 64 << 20
"""Limit on bytes framed at a time, because Arrow's offsets have 32 bits."""
MAX_WAITING: Final = 16 << 20
"""Limit on bytes in incomplete chunks. Beyond it they are sent as they are."""
MAX_PIECES: Final = 512
"""Limit on buffers for one system call, which accepts 1024."""

_DEFERS: Final = (ByteType, ShortType, IntegerType, LongType, DayTimeIntervalType)
_FIX: Final = "for example df.selectExpr('to_json(struct(*)) AS body')"

Offsets = npt.NDArray[np.int64]


class SchemaError(NsparqError, ValueError):
    """The columns cannot be written as messages. The text names the column and what to do."""

    retry_helps = False


class RowError(NsparqError, ValueError):
    """A row cannot be written as a message. The text names the row."""

    retry_helps = False


class SinkColumns(NamedTuple):
    """Indexes of the columns with body, topic, delay and headers."""

    body: int
    topic: int | None
    defer: int | None
    headers: int | None = None

    @classmethod
    def of(cls, schema: StructType) -> SinkColumns:
        """Raises SchemaError."""
        found: dict[str, int] = {}
        for index, column in enumerate(schema.fields):
            name = column.name.lower()
            if name not in cls._fields:
                raise SchemaError(
                    f"column {column.name!r} cannot be written to NSQ: the columns of a sink are body, "
                    f"topic, defer and headers. Leave it out, or put everything into the body: {_FIX}"
                )
            if name in found:
                raise SchemaError(f"there are two columns {name!r}")
            _check_type(name, column.dataType)
            found[name] = index
        if "body" not in found:
            raise SchemaError(
                f"there is no column 'body', the content of a message: rename a column, or make one, {_FIX}"
            )
        return cls(found["body"], found.get("topic"), found.get("defer"), found.get("headers"))


def _check_type(name: str, kind: DataType) -> None:
    expected = {
        "body": ((BinaryType, StringType), "binary or string", _FIX),
        "topic": ((StringType,), "string", "for example CAST(topic AS STRING)"),
        "defer": (_DEFERS, "whole milliseconds or an interval of days to seconds", "cast it"),
        "headers": ((MapType,), "map<string,string>", "for example map('content-type', 'text/plain')"),
    }
    kinds, words, fix = expected[name]
    if not isinstance(kind, kinds) or (isinstance(kind, MapType) and not _is_of_strings(kind)):
        raise SchemaError(f"column {name!r} is {kind.simpleString()} and must be {words}: {fix}")


def _is_of_strings(kind: MapType) -> bool:
    return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)


class Chunk(NamedTuple):
    """Messages of one topic and one delay, published by one request."""

    topic: str
    defer_ms: int
    messages: int
    pieces: list[memoryview]
    size: int
    has_headers: bool = False
    """Whether each message begins with its header block."""

    @property
    def head(self) -> bytes:
        return struct.pack(">I", self.messages)

    def bodies(self) -> Iterator[bytes]:
        """The messages one by one, for requests that can publish only one."""
        for piece in self.pieces:
            position = 0
            while position < len(piece):
                (size,) = struct.unpack_from(">I", piece, position)
                position += SIZE_BYTES
                yield bytes(piece[position : position + size])
                position += size

    def largest(self) -> int:
        """Bytes of the largest message, for an error text."""
        return max(map(len, self.bodies()))


class _Waiting:
    __slots__ = ("count", "pieces", "size")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.pieces: list[memoryview] = []


class Chunks:
    """Collects rows into chunks. Rows of one topic and one delay keep their order."""

    def __init__(
        self,
        columns: SinkColumns,
        topic: str | None,
        chunk_bytes: int,
        where: str = "",
        refused: re.Pattern[str] | None = None,
    ) -> None:
        """`topic` is for rows without one; `where` names the task in error texts."""
        self._columns = columns
        self._has_headers = columns.headers is not None
        self._refused = refused
        self._topic = topic
        self._chunk_bytes = chunk_bytes
        self._where = where
        self._row = 0
        """Number of rows in earlier batches."""
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._waiting_bytes = 0
        self._valid: set[str] = set()

    def add(self, batch: pa.RecordBatch) -> Iterator[Chunk]:
        """The chunks that are complete now. Raises RowError."""
        if batch.num_rows:
            bodies = self._bodies(batch)
            for rows in _portions(bodies):
                yield from self._add(batch.slice(rows.start, len(rows)), bodies.slice(rows.start, len(rows)))
                self._row += len(rows)

    def finish(self) -> Iterator[Chunk]:
        waiting, self._waiting = self._waiting, {}
        self._waiting_bytes = 0
        for (topic, defer_ms), one in waiting.items():
            if one.count:
                yield Chunk(topic, defer_ms, one.count, one.pieces, one.size, self._has_headers)

    def _add(self, batch: pa.RecordBatch, bodies: pa.Array) -> Iterator[Chunk]:
        codes, groups = self._groups(batch)
        columns = [bodies] if self._columns.headers is None else [self._blocks(batch), bodies]
        if codes is None:
            bounds = [0, batch.num_rows]
        else:
            order = pa.array(np.argsort(codes, kind="stable"))
            columns = [column.take(order) for column in columns]
            bounds = [0, *np.cumsum(np.bincount(codes, minlength=len(groups))).tolist()]
        framed, ends = _framed(*columns)
        for group, low, high in zip(groups, bounds, bounds[1:], strict=False):
            yield from self._cut(group, framed, ends, low, high)
        if self._waiting_bytes > MAX_WAITING:
            yield from self.finish()

    def _cut(
        self, group: tuple[str, int], framed: memoryview, ends: Offsets, low: int, high: int
    ) -> Iterator[Chunk]:
        waiting = self._waiting.setdefault(group, _Waiting())
        while low < high:
            room = self._chunk_bytes - waiting.size
            fits = int(np.searchsorted(ends[low : high + 1], ends[low] + room, "right")) - 1
            if fits <= 0 and not waiting.count:
                fits = 1  # a body larger than `chunk_bytes` gets a chunk of its own
            if fits > 0:
                piece = framed[int(ends[low]) : int(ends[low + fits])]
                waiting.pieces.append(piece)
                waiting.count += fits
                waiting.size += len(piece)
                self._waiting_bytes += len(piece)
                low += fits
            if low < high or waiting.size >= self._chunk_bytes or len(waiting.pieces) >= MAX_PIECES:
                yield Chunk(*group, waiting.count, waiting.pieces, waiting.size, self._has_headers)
                self._waiting_bytes -= waiting.size
                waiting = self._waiting[group] = _Waiting()

    # columns

    def _bodies(self, batch: pa.RecordBatch) -> pa.Array:
        """The bodies as Arrow binary values, checked."""
        column = batch.column(self._columns.body)
        if column.null_count:
            self._refuse(column.is_null(), "the body is null; filter such rows out, or fill in a body")
        large = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
        bodies = column.cast(pa.large_binary() if large else pa.binary())
        empty = pc.equal(pc.binary_length(bodies), 0)
        if pc.any(empty).as_py():
            self._refuse(empty, "the body is empty, and NSQ has no empty messages; filter such rows out")
        return bodies

    def _blocks(self, batch: pa.RecordBatch) -> pa.Array:
        """The header blocks, each behind its size."""

        def refuse(rows: npt.NDArray[np.int64], text: str) -> None:
            raise RowError(f"{self._where}row {self._row + int(rows.min())}: {text}")

        assert self._columns.headers is not None
        return _sized(to_blocks(batch.column(self._columns.headers), refuse))

    def _groups(self, batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64] | None, list[tuple[str, int]]]:
        """The index of each row's group, None if there is only one; and the groups."""
        topics, topic_codes = self._topics(batch)
        defers, defer_codes = self._defers(batch)
        if len(topics) == 1 and len(defers) == 1:
            return None, [(topics[0], defers[0])]
        codes = np.zeros(batch.num_rows, np.int64)
        if topic_codes is not None:
            codes += topic_codes * len(defers)
        if defer_codes is not None:
            codes += defer_codes
        used, codes = np.unique(codes, return_inverse=True)
        groups = [(topics[one // len(defers)], defers[one % len(defers)]) for one in used.tolist()]
        return codes, groups

    def _topics(self, batch: pa.RecordBatch) -> tuple[list[str], npt.NDArray[np.int64] | None]:
        """The distinct topics, and the index of each row's topic; None if all have the first."""
        if self._columns.topic is None:
            assert self._topic is not None
            return [self._topic], None
        column = batch.column(self._columns.topic)
        if column.null_count:
            if self._topic is None:
                self._refuse(column.is_null(), "the topic is null, and option topic is not set")
            column = column.fill_null(self._topic)
        encoded = column.dictionary_encode()
        topics: list[str] = encoded.dictionary.to_pylist()
        for topic in topics:
            if topic not in self._valid:
                if not is_valid_name(topic.encode()):
                    text = f"{topic[:100]!r} is not a valid topic name: {VALID_NAME}"
                    self._refuse(pc.equal(column, topic), text)
                if self._refused is not None and self._refused.fullmatch(topic):
                    text = f"{topic} is a topic that the query itself reads (option refuseTopics)"
                    self._refuse(pc.equal(column, topic), text)
                self._valid.add(topic)
        if len(topics) == 1:
            return topics, None
        return topics, encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)

    def _defers(self, batch: pa.RecordBatch) -> tuple[list[int], npt.NDArray[np.int64] | None]:
        if self._columns.defer is None:
            return [0], None
        column = batch.column(self._columns.defer)
        if pa.types.is_duration(column.type):
            # Rounded up to milliseconds.
            microseconds = column.cast(pa.duration("us")).cast(pa.int64())
            column = pc.divide(pc.add(microseconds, 999), 1000)
        column = column.cast(pa.int64()).fill_null(0)
        negative = pc.less(column, 0)
        if pc.any(negative).as_py():
            self._refuse(negative, "defer is negative")
        values, codes = np.unique(column.to_numpy(zero_copy_only=False), return_inverse=True)
        return values.tolist(), None if len(values) == 1 else codes

    def _refuse(self, wrong: Any, text: str) -> None:
        first = pc.index(wrong, True).as_py()
        raise RowError(f"{self._where}row {self._row + first}: {text}")


def _ends(bodies: pa.Array) -> Offsets:
    """Where each body begins in the data, and where the last one ends."""
    kind = np.int64 if pa.types.is_large_binary(bodies.type) else np.int32
    offsets = np.frombuffer(bodies.buffers()[1], kind)[bodies.offset : bodies.offset + len(bodies) + 1]
    return offsets.astype(np.int64)


def _portions(bodies: pa.Array) -> Iterable[range]:
    """Ranges of rows with at most MAX_JOINED bytes, or of one row."""
    ends = _ends(bodies)
    if ends[-1] - ends[0] <= MAX_JOINED:
        return [range(len(bodies))]
    portions = []
    start = 0
    while start < len(bodies):
        end = max(start + 1, int(np.searchsorted(ends, ends[start] + MAX_JOINED, "right")) - 1)
        portions.append(range(start, end))
        start = end
    return portions


def _framed(*columns: pa.Array) -> tuple[memoryview, Offsets]:
    """The messages, each behind its size, and where each frame begins. A message is the values of
    all columns."""
    joined = _sized(*columns)
    return memoryview(joined.buffers()[2]), _ends(joined)


def _sized(*columns: pa.Array) -> pa.Array:
    """The values of each row behind the size of all of them. Joining Arrow arrays is ten times as
    fast as a mask in NumPy, and five times as fast as a loop over the rows."""
    count = len(columns[0])
    sizes = np.diff(np.sum([_ends(column) for column in columns], axis=0)).astype(">u4")
    positions = np.arange(0, SIZE_BYTES * count + 1, SIZE_BYTES, dtype=np.int32)
    heads = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(positions), pa.py_buffer(sizes)])
    return pc.binary_join_element_wise(heads, *(column.cast(pa.binary()) for column in columns), b"")
