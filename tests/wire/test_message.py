"""Message frames: built for a batch, patched for a redelivery. Every way of building gives the same bytes."""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise

import numpy as np
import pytest

from nsparq.wire.message import (
    FRAME_OVERHEAD,
    SEQUENCE_BITS,
    Frames,
    Timestamps,
    build_frames,
    with_attempts,
)

NOW = 1_700_000_000_123_456_789


def build_from(bodies: list[bytes], first_id: int = 0, timestamps_ns: Timestamps = NOW) -> Frames:
    return build_frames(first_id, timestamps_ns, array("I", map(len, bodies)), b"".join(bodies))


def expected(first_id: int, stamps: list[int], bodies: list[bytes]) -> list[bytes]:
    """The frames after the book: one at a time, nothing shared with the code under test."""
    return [
        struct.pack(">iiqH16s", 30 + len(body), 2, stamp, 1, b"%016x" % (first_id + i)) + body
        for i, (stamp, body) in enumerate(zip(stamps, bodies, strict=True))
    ]


def split(frames: Frames) -> list[bytes]:
    return [frames.buffer[a:b] for a, b in pairwise(frames.offsets)]


# Around the number of messages from which the arrays take over.
COUNTS = [1, 2, 7, 8, 9, 100]


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "first_id",
    [0, 0xABC, (1 << SEQUENCE_BITS) - 1, 1 << 63, 1023 << SEQUENCE_BITS],
    ids=["zero", "small", "end of a node's ids", "top bit", "highest node"],
)
def test_frames_hold_size_type_time_attempts_id_and_body(first_id: int, count: int) -> None:
    bodies = [b"%d" % i * (i + 1) for i in range(count)]
    frames = build_from(bodies, first_id)
    assert split(frames) == expected(first_id, [NOW] * count, bodies)
    assert frames.offsets[0] == 0
    assert frames.offsets[-1] == len(frames.buffer)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("count", COUNTS)
def test_the_last_id_may_be_the_largest_there_is(count: int) -> None:
    frames = build_from([b"x"] * count, (1 << 64) - count)
    assert split(frames)[-1][18:34] == b"ffffffffffffffff"


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("count", COUNTS)
def test_each_message_may_have_its_own_time(count: int) -> None:
    stamps = [NOW + 10**9 * i for i in range(count)]
    bodies = [b"%d" % i for i in range(count)]
    assert split(build_from(bodies, 5, np.array(stamps, np.int64))) == expected(5, stamps, bodies)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("stamp", [-(1 << 63), -1, 0, (1 << 63) - 1])
def test_times_are_signed_64_bit_numbers(stamp: int, count: int) -> None:
    bodies = [b"x"] * count
    assert split(build_from(bodies, 0, stamp)) == expected(0, [stamp] * count, bodies)
    assert split(build_from(bodies, 0, np.full(count, stamp, np.int64))) == expected(
        0, [stamp] * count, bodies
    )


@pytest.mark.usefixtures("build")
def test_no_messages_give_no_frames() -> None:
    assert build_from([]) == Frames(b"", array("q", [0]))
    assert build_from([], 0, np.empty(0, np.int64)) == Frames(b"", array("q", [0]))


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("count", COUNTS)
def test_bodies_may_hold_any_bytes_and_any_length(count: int) -> None:
    bodies = [bytes(range(256)) * i + b"\x00\n" for i in range(count)]
    assert [frame[FRAME_OVERHEAD:] for frame in split(build_from(bodies))] == bodies


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("surplus", [-1, 1], ids=["too little", "too much"])
def test_data_that_does_not_match_its_lengths_is_refused(count: int, surplus: int) -> None:
    # A frame with a wrong size would put the client out of step for good.
    with pytest.raises(ValueError, match="lengths do not add up"):
        build_frames(0, NOW, array("I", [2] * count), bytes(2 * count + surplus))


@pytest.mark.parametrize(("attempts", "raw"), [(1, b"\x00\x01"), (2, b"\x00\x02"), (65535, b"\xff\xff")])
def test_a_redelivery_differs_in_its_attempts_only(attempts: int, raw: bytes) -> None:
    (frame,) = expected(7, [NOW], [b"body"])
    patched = with_attempts(frame, attempts)
    assert patched[16:18] == raw
    assert patched[:16] + b"\x00\x01" + patched[18:] == frame


@pytest.mark.parametrize(("attempts", "shown"), [(65536, 0), (65537, 1), (200_000, 200_000 % 65536)])
def test_attempts_wrap_after_65535(attempts: int, shown: int) -> None:
    (frame,) = expected(7, [NOW], [b"body"])
    assert int.from_bytes(with_attempts(frame, attempts)[16:18], "big") == shown


def test_the_body_begins_behind_the_overhead() -> None:
    (frame,) = expected(7, [NOW], [b"body"])
    assert frame[FRAME_OVERHEAD:] == b"body"
    assert len(frame) == FRAME_OVERHEAD + 4


def test_an_id_holds_a_node_below_1024_and_a_sequence_number() -> None:
    assert 1023 << SEQUENCE_BITS | (1 << SEQUENCE_BITS) - 1 == (1 << 64) - 1
