"""Message frames: built for a batch, patched for a redelivery. Every way of building gives the same
bytes."""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from nsparq import kernel
from nsparq.packed import PackedBodies
from nsparq.wire.message import FRAME_OVERHEAD, SEQUENCE_BITS, Frames, Timestamps, build_frames, with_attempts

NOW = 1_700_000_000_123_456_789


def build_from(bodies: list[bytes], first_id: int = 0, timestamps_ns: Timestamps = NOW) -> Frames:
    return build(first_id, timestamps_ns, array("I", map(len, bodies)), b"".join(bodies))


def build(*arguments: Any) -> Frames:
    return (kernel.build_frames or build_frames)(*arguments)


def expected(first_id: int, stamps: list[int], bodies: list[bytes]) -> list[bytes]:
    """The frames by the specification: one at a time, with no code of the module under test."""
    return [
        struct.pack(">iiqH16s", 30 + len(body), 2, stamp, 1, b"%016x" % (first_id + i)) + body
        for i, (stamp, body) in enumerate(zip(stamps, bodies, strict=True))
    ]


def split(frames: Frames) -> list[bytes]:
    buffer, offsets = frames
    return [buffer[a:b] for a, b in pairwise(offsets)]


# Around the number of messages from which arrays are used.
each_count = pytest.mark.parametrize("count", [1, 7, 8, 100])


@pytest.mark.usefixtures("build")
@each_count
def test_frames_hold_size_type_time_attempts_id_and_body(count: int) -> None:
    bodies = [bytes(range(256)) * i + b"\x00\n" for i in range(count)]
    stamps = [NOW + 10**9 * i for i in range(count)]
    # The last of a node's ids, the sign bit, and the last id there is.
    for first_id in (0, (1 << SEQUENCE_BITS) - 1, 1 << 63, (1 << 64) - count):
        frames = build_from(bodies, first_id)
        assert split(frames) == expected(first_id, [NOW] * count, bodies)
        buffer, offsets = frames
        assert (offsets[0], offsets[-1]) == (0, len(buffer))
        each_with_its_time = build_from(bodies, first_id, np.array(stamps, np.int64))
        assert split(each_with_its_time) == expected(first_id, stamps, bodies)


@pytest.mark.usefixtures("build")
@each_count
def test_messages_with_headers_have_frames_of_type_3(count: int) -> None:
    bodies = [b"body %d" % i for i in range(count)]
    blocks = [b"" if i % 3 == 1 else b"\x01a\x00\x01b" * (i + 1) for i in range(count)]
    stamps = [NOW + i for i in range(count)]
    messages = array("I", map(len, bodies)), b"".join(bodies)
    headers = PackedBodies.of(blocks)
    frames = build(7, np.array(stamps, np.int64), *messages, headers.lengths, headers.data)
    content = [
        struct.pack(">I", len(block)) + block + body if block else body
        for body, block in zip(bodies, blocks, strict=True)
    ]
    plain = expected(7, stamps, content)
    assert split(frames) == [
        frame[:7] + (b"\x03" if block else b"\x02") + frame[8:]
        for frame, block in zip(plain, blocks, strict=True)
    ]
    assert with_attempts(split(frames)[0], 5)[16:18] == b"\x00\x05"
    for blocks in ([b""] * (count + 1), [b"x"] * (count + 1)):
        headers = PackedBodies.of(blocks)
        with pytest.raises(ValueError, match="lengths do not add up"):
            build(7, NOW, *messages, headers.lengths, headers.data)


@pytest.mark.usefixtures("build")
@each_count
def test_times_are_signed_64_bit_numbers(count: int) -> None:
    bodies = [b"x"] * count
    for stamp in (-(1 << 63), -1, 0, (1 << 63) - 1):
        frames = expected(0, [stamp] * count, bodies)
        assert split(build_from(bodies, 0, stamp)) == frames
        assert split(build_from(bodies, 0, np.full(count, stamp, np.int64))) == frames


@pytest.mark.usefixtures("build")
def test_no_messages_give_no_frames() -> None:
    assert build_from([]) == (b"", array("q", [0]))
    assert build_from([], 0, np.empty(0, np.int64)) == (b"", array("q", [0]))


@pytest.mark.usefixtures("build")
@each_count
def test_data_that_does_not_match_its_lengths_is_refused(count: int) -> None:
    # After a frame with a wrong size the client could not read any further frame.
    for surplus in (-1, 1):
        with pytest.raises(ValueError, match="lengths do not add up"):
            build(0, NOW, array("I", [2] * count), bytes(2 * count + surplus))


@pytest.mark.parametrize(("attempts", "shown"), [(2, 2), (65535, 65535), (65536, 0), (200_000, 3392)])
def test_a_redelivery_differs_in_its_attempts_only_which_wrap_after_65535(attempts: int, shown: int) -> None:
    (frame,) = expected(7, [NOW], [b"body"])
    patched = with_attempts(frame, attempts)
    assert int.from_bytes(patched[16:18], "big") == shown
    assert patched[:16] + b"\x00\x01" + patched[18:] == frame


def test_the_body_begins_behind_the_overhead() -> None:
    (frame,) = expected(7, [NOW], [b"body"])
    assert frame[FRAME_OVERHEAD:] == b"body"
    assert len(frame) == FRAME_OVERHEAD + 4


def test_an_id_holds_a_node_below_1024_and_a_sequence_number() -> None:
    assert 1023 << SEQUENCE_BITS | (1 << SEQUENCE_BITS) - 1 == (1 << 64) - 1
