"""Message frames: built for a whole batch at once, patched for a redelivery.

 0      4      8           16         18                34
 +------+------+-----------+----------+-----------------+------ … ------+
 | size | 2    | timestamp | attempts | id, 16 hex      | body          |
 +------+------+-----------+----------+-----------------+------ … ------+

To a client that asked for headers, a message with headers goes as type 3:

 0      4      8           16         18                34           38
 +------+------+-----------+----------+-----------------+------------+------ … ------+------ … ------+
 | size | 3    | timestamp | attempts | id, 16 hex      | block size | header block  | body          |
 +------+------+-----------+----------+-----------------+------------+------ … ------+------ … ------+

An id is the node id in the top 10 bits and the topic's sequence number in the other 54, so that a
FIN finds its message by arithmetic.
"""

from __future__ import annotations

import struct
from array import array
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from nsparq.packed import PackedBodies
from nsparq.wire.frames import MESSAGE, MESSAGE_WITH_HEADERS

SEQUENCE_BITS: Final = 54
FRAME_OVERHEAD: Final = 34
"""Bytes of a message frame that are not its body."""

_ATTEMPTS_AT = 16
_HEAD = struct.Struct(">iiqH")
_ATTEMPTS = struct.Struct(">H")
_BLOCK_SIZE = struct.Struct(">I")
_RECORD = np.dtype(
    [("size", ">u4"), ("type", ">u4"), ("timestamp", ">i8"), ("attempts", ">u2"), ("id", "S16")]
)
_FEW = 8
"""For fewer messages plain Python is faster than array operations."""

Timestamps = int | npt.NDArray[np.int64]
"""One publish time for the whole batch, or one for each message."""


Frames = tuple[bytes, "array[int]"]
"""The frames of consecutive messages end to end, and their offsets: an array of type "q" in which
frame i is from offsets[i] to offsets[i + 1]."""


def build_frames(
    first_id: int,
    timestamps_ns: Timestamps,
    lengths: array[int],
    data: bytes,
    block_lengths: array[int] | None = None,
    blocks: bytes = b"",
) -> Frames:
    """First-delivery frames (attempts = 1) of the messages whose bodies lie end to end in `data`,
    with their header blocks if these are given. kernel.build_frames does the same."""
    count = len(lengths)
    if count < _FEW or block_lengths is not None:
        if block_lengths is None:
            block_lengths = array("I", [0]) * count
        headers = PackedBodies(block_lengths, blocks)
        return _build_one_by_one(first_id, timestamps_ns, PackedBodies(lengths, data), headers)
    sizes = np.frombuffer(lengths, np.uint32)
    heads = np.empty(count, _RECORD)
    heads["size"] = sizes + (FRAME_OVERHEAD - 4)
    heads["type"] = MESSAGE
    heads["timestamp"] = timestamps_ns
    heads["attempts"] = 1
    ids = np.arange(first_id, first_id + count, dtype=np.uint64).astype(">u8")
    heads["id"] = np.frombuffer(ids.tobytes().hex().encode(), "S16")
    ends = np.cumsum(sizes, dtype=np.int64)
    body_ends = ends.tolist()
    if count and body_ends[-1] != len(data):
        raise ValueError("lengths do not add up")
    pieces: list[bytes] = [b""] * (2 * count)
    pieces[0::2] = heads.view("V34").tolist()
    pieces[1::2] = [data[a:b] for a, b in zip([0, *body_ends], body_ends, strict=False)]
    ends += np.arange(FRAME_OVERHEAD, FRAME_OVERHEAD * (count + 1), FRAME_OVERHEAD)
    return b"".join(pieces), array("q", [0, *ends.tolist()])


def _build_one_by_one(
    first_id: int, timestamps_ns: Timestamps, bodies: PackedBodies, headers: PackedBodies
) -> Frames:
    if sum(bodies.lengths) != len(bodies.data) or sum(headers.lengths) != len(headers.data):
        raise ValueError("lengths do not add up")
    if len(bodies) != len(headers):
        raise ValueError("lengths do not add up")
    frames = []
    for index, (body, block) in enumerate(zip(bodies[:], headers[:], strict=True)):
        stamp_ns = timestamps_ns if isinstance(timestamps_ns, int) else int(timestamps_ns[index])
        kind, data = MESSAGE, body
        if block:
            kind, data = MESSAGE_WITH_HEADERS, _BLOCK_SIZE.pack(len(block)) + block + body
        head = _HEAD.pack(len(data) + FRAME_OVERHEAD - 4, kind, stamp_ns, 1)
        frames.append(b"%b%016x%b" % (head, first_id + index, data))
    return b"".join(frames), array("q", accumulate(map(len, frames), initial=0))


def with_attempts(frame: bytes, attempts: int) -> bytes:
    """The same frame as delivery number `attempts`, which is 16 bits wide and wraps."""
    return frame[:_ATTEMPTS_AT] + _ATTEMPTS.pack(attempts & 0xFFFF) + frame[_ATTEMPTS_AT + 2 :]
