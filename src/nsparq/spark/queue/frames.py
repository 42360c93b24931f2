"""Many frames of NSQ's TCP protocol at once: messages as Arrow rows, ids as commands.

4-byte size │ 4-byte type │ 8-byte time │ 2-byte attempts │ 16-byte id │ body        a message
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nsparq.spark.queue.staging import CHUNK_SCHEMA, NO_ROWS

__all__ = ["HEAD_SIZE", "MESSAGE_HEAD", "Taken", "commands", "decode"]

HEAD_SIZE: Final = 8
"""Bytes of size and type."""
MESSAGE_HEAD: Final = 26
"""Bytes of time, attempts and id."""
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
    """Whole frames as rows. `others` has the indexes of frames that are not messages."""
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
    times = np.ascontiguousarray(heads[:, :8]).view(">i8").ravel() // 1000
    attempts = np.ascontiguousarray(heads[:, 8:10]).view(">u2").ravel()
    ids = heads[:, _ID].tobytes()
    places = np.arange(0, (count + 1) * ID_SIZE, ID_SIZE, dtype=np.int32)
    # binary_slice overflows without `stop`.
    bodies = pc.binary_slice(frames, HEAD_SIZE + MESSAGE_HEAD, stop=(1 << 31) - 1)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(times.astype(np.int64)).cast(pa.timestamp("us", tz="UTC")),
            pa.array(attempts.astype(np.int32)),
            pa.StringArray.from_buffers(count, pa.py_buffer(places), pa.py_buffer(ids)),
            bodies,
        ],
        schema=CHUNK_SCHEMA,
    )
    return Taken(rows, ids)
