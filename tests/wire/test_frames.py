"""Frames: size and type in front of the data."""

from __future__ import annotations

import pytest

from nsparq.wire.frames import CLOSE_WAIT, ERROR, HEARTBEAT, MESSAGE, OK, RESPONSE, encode_frame


def test_a_frame_is_its_size_its_type_and_the_data_in_big_endian() -> None:
    assert encode_frame(ERROR, b"E_INVALID x") == b"\x00\x00\x00\x0f\x00\x00\x00\x01E_INVALID x"


def test_the_size_counts_the_type_and_not_itself() -> None:
    frame = encode_frame(RESPONSE, bytes(300))
    assert int.from_bytes(frame[:4], "big") == 304 == len(frame) - 4


def test_a_frame_may_be_empty() -> None:
    assert encode_frame(RESPONSE, b"") == b"\x00\x00\x00\x04\x00\x00\x00\x00"


def test_the_types_have_the_numbers_of_the_protocol() -> None:
    assert (RESPONSE, ERROR, MESSAGE) == (0, 1, 2)


@pytest.mark.parametrize(
    ("frame", "data"), [(OK, b"OK"), (CLOSE_WAIT, b"CLOSE_WAIT"), (HEARTBEAT, b"_heartbeat_")]
)
def test_ready_made_answers_are_responses(frame: bytes, data: bytes) -> None:
    assert frame == encode_frame(RESPONSE, data)
