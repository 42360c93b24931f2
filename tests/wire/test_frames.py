"""Frames: size and type in front of the data."""

from __future__ import annotations

from nsparq.wire.frames import CLOSE_WAIT, ERROR, HEARTBEAT, MESSAGE, OK, RESPONSE, encode_frame


def test_a_frame_is_its_size_its_type_and_the_data_in_big_endian() -> None:
    assert encode_frame(ERROR, b"E_INVALID x") == b"\x00\x00\x00\x0f\x00\x00\x00\x01E_INVALID x"


def test_the_types_have_the_numbers_of_the_protocol() -> None:
    assert (RESPONSE, ERROR, MESSAGE) == (0, 1, 2)


def test_ready_made_answers_are_responses() -> None:
    answers = {OK: b"OK", CLOSE_WAIT: b"CLOSE_WAIT", HEARTBEAT: b"_heartbeat_"}
    assert [*answers] == [encode_frame(RESPONSE, data) for data in answers.values()]
