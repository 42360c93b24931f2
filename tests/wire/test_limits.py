"""Limits that follow from others, and the defaults that clients know."""

from __future__ import annotations

import pytest

from nsparq.wire.limits import DEFAULT_HEARTBEAT_MS, DEFAULT_OUTPUT_BUFFER_SIZE, MAX_LINE, Limits


@pytest.mark.parametrize(("body", "count"), [(5_242_880, 1_048_575), (5000, 999), (9, 1), (8, 0), (4, 0)])
def test_as_many_messages_as_fit_a_body_with_one_byte_each(body: int, count: int) -> None:
    assert Limits(max_body_size=body).max_mpub_count == count


def test_the_defaults_are_those_of_nsqd() -> None:
    limits = Limits()
    assert (limits.max_msg_size, limits.max_body_size) == (1024 * 1024, 5 * 1024 * 1024)
    assert (limits.max_rdy_count, limits.max_req_timeout_ms) == (2500, 3_600_000)
    assert (limits.msg_timeout_ms, limits.max_msg_timeout_ms) == (60_000, 900_000)
    assert (limits.max_heartbeat_interval_ms, DEFAULT_HEARTBEAT_MS) == (60_000, 30_000)
    assert (limits.max_output_buffer_size, DEFAULT_OUTPUT_BUFFER_SIZE) == (65_536, 16_384)
    assert (limits.min_output_buffer_timeout_ms, limits.output_buffer_timeout_ms) == (25, 250)
    assert (limits.max_output_buffer_timeout_ms, limits.max_deflate_level) == (30_000, 6)
    assert MAX_LINE == 16_384
