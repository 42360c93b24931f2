"""Turns raw batches of a log into Arrow record batches, thousands of rows at once.

nsqd's batches have any size, often one message. They are joined and cut to record batches of a size
that suits Spark. The compiled kernel copies the bodies once and verifies their checksums at the
same time.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nsparq import kernel
from nsparq.spark.header_columns import no_maps, to_maps
from nsparq.storage.raw_batch import CorruptRange, RawBlocks, iter_batches

__all__ = ["MAX_BYTES", "MAX_ROWS", "RowBuilder", "unpack"]

MAX_ROWS: Final = 10_000
MAX_BYTES: Final = 8 << 20
"""About the limit of a record batch. Only a single message can be larger."""

Longs = npt.NDArray[np.int64]


class Unpacked(NamedTuple):
    """Messages of several batches."""

    heads: Longs
    """A row for each batch: sequence, publish time, due time, count."""
    offsets: bytes
    """Where each body begins and the last one ends, as native 32-bit numbers."""
    data: bytes
    block_offsets: bytes
    """The same for the header blocks; empty if there are none, or nobody wants them."""
    blocks: bytes
    position: int
    """Where the next batch begins in the buffer."""

    def sequences(self) -> Longs:
        counts = self.heads[:, 3]
        ends = np.cumsum(counts)
        return np.repeat(self.heads[:, 0] - (ends - counts), counts) + np.arange(ends[-1], dtype=np.int64)

    def timestamps_us(self) -> Longs:
        return np.repeat(self.heads[:, 1] // 1000, self.heads[:, 3])

    def headers(self) -> pa.Array | None:
        """A map for each message; None if no message has headers. Raises CorruptRange."""
        if not self.blocks:
            return None
        try:
            return to_maps(np.frombuffer(self.block_offsets, np.int32), self.blocks)
        except ValueError as error:
            raise CorruptRange(self.position, int(self.heads[0, 0]), str(error)) from error

    def sizes(self) -> Longs:
        """How many bytes come before each message, and before the end."""
        sizes = np.frombuffer(self.offsets, np.int32).astype(np.int64)
        return sizes + np.frombuffer(self.block_offsets, np.int32) if self.blocks else sizes


def unpack(
    buffer: bytes,
    position: int,
    start: int,
    end: int,
    max_rows: int = MAX_ROWS,
    max_bytes: int = MAX_BYTES,
    *,
    headers: bool = False,
) -> Unpacked | None:
    """The next whole batches between `start` and `end`, if any; with header blocks if `headers`.
    Raises CorruptRange."""
    if kernel.unpack_batches is not None:
        heads, offsets, data, block_offsets, blocks, position = kernel.unpack_batches(
            buffer, position, start, end, max_rows, max_bytes, headers
        )
        if heads:
            table = np.frombuffer(heads, np.int64).reshape(-1, 4)
            return Unpacked(table, offsets, data, block_offsets, blocks, position)
    # Without the kernel. Also where the kernel stopped, to find the reason.
    return _unpack(buffer, position, start, end, max_rows, max_bytes, headers)


def _unpack(
    buffer: bytes, position: int, start: int, end: int, max_rows: int, max_bytes: int, headers: bool
) -> Unpacked | None:
    heads: list[tuple[int, int, int, int]] = []
    bodies: list[RawBlocks] = []
    blocks: list[RawBlocks] = []
    rows = size = 0
    try:
        for batch in iter_batches(memoryview(buffer)[position:]):
            count = len(batch.lengths)
            if batch.base >= end:
                break
            found = batch.headers if headers else None
            block = found or RawBlocks(np.zeros(count, np.uint32), memoryview(b""))
            more = len(batch.data) + len(block.data)
            if heads and (rows + count > max_rows or size + more > max_bytes):
                break
            body = RawBlocks(batch.lengths, batch.data)
            if any(int(one.lengths.sum(dtype=np.int64)) != len(one.data) for one in (body, block)):
                raise CorruptRange(position, batch.base, "the lengths do not add up")
            position += batch.size
            if batch.end <= start:
                continue
            heads.append((batch.base, batch.timestamp_ns, batch.due_ns, count))
            bodies.append(body)
            blocks.append(block)
            rows, size = rows + count, size + more
    except CorruptRange:
        if not heads:
            raise
    if not heads:
        return None
    if size > np.iinfo(np.int32).max:
        raise OverflowError(f"a batch of {size} bytes is too large for a column of Spark")
    found_blocks = _joined(blocks) if any(one.data for one in blocks) else (b"", b"")
    return Unpacked(np.array(heads, np.int64), *_joined(bodies), *found_blocks, position)


def _joined(parts: Sequence[RawBlocks]) -> tuple[bytes, bytes]:
    """Offsets as in Unpacked, and the bytes."""
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets.tobytes(), b"".join([part.data for part in parts])


class RowBuilder:
    """Makes the record batches of one topic on one node, with the columns that a schema names."""

    def __init__(self, schema: pa.Schema, topic: str, node: str, first_id: int) -> None:
        self._schema = schema
        self.reached = 0
        """The number after the last message that was built or left out."""
        # Unsigned, because the node id is in its highest bits.
        self._first_id = np.uint64(first_id)
        known: dict[str, Callable[[_Run], pa.Array]] = {
            "topic": _repeated(topic),
            "node": _repeated(node),
            "offset": lambda run: _primitive(pa.int64(), run.sequences),
            "timestamp": lambda run: _primitive(pa.timestamp("us", "UTC"), run.timestamps_us()),
            "attempts": _zeros(),
            "id": self._ids,
            "headers": lambda run: run.headers(),
            "body": lambda run: run.bodies(),
        }
        self._columns = [known[name] for name in schema.names]
        self._wants_headers = "headers" in schema.names
        self._id_offsets = pa.py_buffer(np.arange(0, 16 * (MAX_ROWS + 1), 16, dtype=np.int32))

    def _ids(self, run: _Run) -> pa.Array:
        ids = (run.sequences.astype(np.uint64) + self._first_id).astype(">u8")
        text = pa.py_buffer(hexlify(ids.tobytes()))
        return pa.Array.from_buffers(pa.string(), len(ids), [None, self._id_offsets, text])

    def build(
        self, buffer: bytes, start: int, end: int, gaps: Sequence[tuple[int, int]] = ()
    ) -> Iterator[pa.RecordBatch]:
        """The messages from `start` to before `end`, without `gaps`. Raises CorruptRange."""
        position = 0
        while (found := unpack(buffer, position, start, end, headers=self._wants_headers)) is not None:
            position = found.position
            sequences, maps = found.sequences(), found.headers()
            for low, high in _runs(sequences, start, end, gaps, found.sizes()):
                run = _Run(sequences[low:high], found, low, maps)
                columns = [make(run) for make in self._columns]
                yield pa.RecordBatch.from_arrays(columns, schema=self._schema)
            self.reached = int(sequences[-1]) + 1


_NO_HEADERS: Final = no_maps(MAX_ROWS)


class _Run(NamedTuple):
    """Consecutive rows."""

    sequences: Longs
    of: Unpacked
    first: int
    """Index of the first row in `of`."""
    maps: pa.Array | None
    """The headers of all rows in `of`."""

    def timestamps_us(self) -> Longs:
        return self.of.timestamps_us()[self.first : self.first + len(self.sequences)]

    def bodies(self) -> pa.Array:
        buffers = [None, pa.py_buffer(self.of.offsets), pa.py_buffer(self.of.data)]
        return pa.Array.from_buffers(pa.binary(), len(self.sequences), buffers, 0, self.first)

    def headers(self) -> pa.Array:
        count = len(self.sequences)
        return _NO_HEADERS.slice(0, count) if self.maps is None else self.maps.slice(self.first, count)


def _runs(
    sequences: Longs, start: int, end: int, gaps: Iterable[tuple[int, int]], sizes: Longs
) -> Iterator[tuple[int, int]]:
    """The rows between `start` and `end` outside of gaps, in pieces of limited size."""
    borders = [int(n) for n in np.searchsorted(sequences, [start, end])]
    for low, high in sorted(gaps):
        inside = np.clip(np.searchsorted(sequences, [low, high]), borders[0], borders[-1]).tolist()
        borders[-1:-1] = inside
    for low, high in zip(borders[::2], borders[1::2], strict=True):
        while low < high:
            # As many as fit, but at least one.
            fitting = int(np.searchsorted(sizes, sizes[low] + MAX_BYTES, "right")) - 1
            stop = min(high, low + MAX_ROWS, max(low + 1, fitting))
            yield low, stop
            low = stop


def _primitive(kind: pa.DataType, values: Longs) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _repeated(text: str) -> Callable[[_Run], pa.Array]:
    """A column with the same text in each row: built once, then sliced."""
    raw = text.encode()
    offsets = np.arange(0, len(raw) * (MAX_ROWS + 1), len(raw), dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(raw * MAX_ROWS)]
    return _sliced(pa.Array.from_buffers(pa.string(), MAX_ROWS, buffers))


def _zeros() -> Callable[[_Run], pa.Array]:
    values = pa.py_buffer(np.zeros(MAX_ROWS, np.int32))
    return _sliced(pa.Array.from_buffers(pa.int32(), MAX_ROWS, [None, values]))


def _sliced(whole: Any) -> Callable[[_Run], pa.Array]:
    return lambda run: whole.slice(0, len(run.sequences))
