"""Many frames of NSQ's TCP protocol at once: messages as Arrow rows, ids as commands.

4-byte size │ 4-byte type │ 8-byte time │ 2-byte attempts │ 16-byte id │ body        a message

A message with headers has another type, and its header block with a 4-byte size before the body.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nsparq.spark.header_columns import no_maps, to_maps
from nsparq.spark.queue.staging import CHUNK_SCHEMA, NO_ROWS
from nsparq.wire.frames import MESSAGE_WITH_HEADERS

__all__ = ["HEAD_SIZE", "MESSAGE_HEAD", "Taken", "commands", "decode"]

HEAD_SIZE: Final = 8
"""Bytes of size and type."""
MESSAGE_HEAD: Final = 26
"""Bytes of time, attempts and id."""
BLOCK_HEAD: Final = 4
"""Bytes of the size of a header block."""
ID_SIZE: Final = 16
_ID: Final = slice(10, 26)


class Taken(NamedTuple):
    """Messages in the order of their arrival."""

    rows: pa.RecordBatch
    """With CHUNK_SCHEMA."""
    ids: bytes
    """16 bytes each."""


def commands(before: bytes, ids: bytes, after: bytes) -> bytes:
    """The same command for each id."""
    count = len(ids) // ID_SIZE
    lines = np.empty((count, len(before) + ID_SIZE + len(after)), np.uint8)
    lines[:, : len(before)] = np.frombuffer(before, np.uint8)
    lines[:, len(before) : len(before) + ID_SIZE] = np.frombuffer(ids, np.uint8).reshape(count, ID_SIZE)
    lines[:, len(before) + ID_SIZE :] = np.frombuffer(after, np.uint8)
    return lines.tobytes()


def decode(data: bytes, starts: list[int], others: set[int]) -> Taken:
    """Whole frames as rows. `others` has the indexes of frames that are not messages. Raises
    ValueError for header blocks that break the rules."""
    count = len(starts)
    if count == len(others):
        return Taken(NO_ROWS, b"")
    edges = np.empty(count + 1, np.int32)
    edges[:count] = starts
    edges[count] = len(data)
    frames = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(edges), pa.py_buffer(data)])
    begins = edges[:count].astype(np.int64)
    if others:
        messages = np.ones(count, bool)
        messages[list(others)] = False
        frames = frames.filter(pa.array(messages))
        begins = begins[messages]
        count = len(begins)
    raw = np.frombuffer(data, np.uint8)
    heads = raw[begins[:, None] + np.arange(HEAD_SIZE, HEAD_SIZE + MESSAGE_HEAD)]
    has_headers = raw[begins + HEAD_SIZE - 1] == MESSAGE_WITH_HEADERS
    times = np.ascontiguousarray(heads[:, :8]).view(">i8").ravel() // 1000
    attempts = np.ascontiguousarray(heads[:, 8:10]).view(">u2").ravel()
    ids = heads[:, _ID].tobytes()
    places = np.arange(0, (count + 1) * ID_SIZE, ID_SIZE, dtype=np.int32)
    # binary_slice overflows without `stop`.
    bodies = pc.binary_slice(frames, HEAD_SIZE + MESSAGE_HEAD, stop=(1 << 31) - 1)
    maps = no_maps(count)
    if has_headers.any():
        bodies, maps = _without_blocks(bodies, has_headers)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(times.astype(np.int64)).cast(pa.timestamp("us", tz="UTC")),
            pa.array(attempts.astype(np.int32)),
            pa.StringArray.from_buffers(count, pa.py_buffer(places), pa.py_buffer(ids)),
            bodies,
            maps,
        ],
        schema=CHUNK_SCHEMA,
    )
    return Taken(rows, ids)


def _without_blocks(contents: pa.Array, has_headers: npt.NDArray[np.bool_]) -> tuple[pa.Array, pa.Array]:
    """The bodies, and the headers as maps, of messages some of which begin with a header block."""
    offsets = np.frombuffer(contents.buffers()[1], np.int32)[contents.offset :][: len(contents) + 1]
    raw = np.frombuffer(contents.buffers()[2], np.uint8)
    starts, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    places = starts[has_headers]
    if (ends[has_headers] - places < BLOCK_HEAD).any():
        raise ValueError("a message lacks its header block")
    sizes = np.zeros(len(contents), np.int64)
    sizes[has_headers] = raw[places[:, None] + np.arange(BLOCK_HEAD)].view(">u4").ravel()
    blocks = starts + np.where(has_headers, BLOCK_HEAD, 0)
    bodies = blocks + sizes
    if (bodies > ends).any():
        raise ValueError("a header block that is longer than its message")
    # Cut each message into the size, the block and the body; every third piece is a body.
    edges = np.empty(3 * len(contents) + 1, np.int32)
    edges[0:-1:3], edges[1::3], edges[2::3], edges[-1] = starts, blocks, bodies, ends[-1]
    pieces = pa.Array.from_buffers(
        pa.binary(), 3 * len(contents), [None, pa.py_buffer(edges), contents.buffers()[2]]
    )
    numbers = np.arange(0, 3 * len(contents), 3, dtype=np.int32)
    found = pieces.take(pa.array(numbers + 1))
    found_offsets = np.frombuffer(found.buffers()[1], np.int32)[: len(contents) + 1]
    return pieces.take(pa.array(numbers + 2)), to_maps(found_offsets, found.buffers()[2].to_pybytes())
