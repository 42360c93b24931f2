"""server.outbox: replies leave in the order of their commands."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from nsparq.server.outbox import MAX_UNANSWERED, Outbox, PendingOks
from nsparq.wire.frames import HEARTBEAT, OK


class FakeTransport:
    """Takes everything that is written."""

    def __init__(self) -> None:
        self.written = b""
        self.socket, self.peer = socket.socketpair()

    def get_extra_info(self, name: str) -> socket.socket:
        return self.socket

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, pieces: list[bytes]) -> None:
        self.written += b"".join(pieces)


class FakeTurn:
    is_scheduled = False

    def __init__(self) -> None:
        self.outboxes: list[Outbox] = []

    def schedule(self) -> None:
        self.is_scheduled = True


@pytest.fixture
def transport() -> Iterator[FakeTransport]:
    transport = FakeTransport()
    yield transport
    transport.socket.close()
    transport.peer.close()


@pytest.fixture
def outbox(transport: FakeTransport) -> Outbox:
    turn: Any = FakeTurn()
    owner: Any = None
    return Outbox(transport, turn, PendingOks(), owner)  # type: ignore[arg-type]  # a fake


def test_a_reply_waits_for_the_publishes_before_it(outbox: Outbox, transport: FakeTransport) -> None:
    outbox.unanswered += 2
    outbox.reply(HEARTBEAT)
    outbox.ok(1)
    outbox.flush()
    assert transport.written == OK
    outbox.ok(1)
    outbox.flush()
    assert transport.written == OK * 2 + HEARTBEAT


def test_a_reply_is_not_lost_if_later_publishes_are_answered_first(
    outbox: Outbox, transport: FakeTransport
) -> None:
    outbox.unanswered += 1
    outbox.reply(HEARTBEAT)
    outbox.unanswered += 3
    outbox.ok(3)
    outbox.ok(1)
    outbox.flush()
    assert transport.written == OK * 3 + HEARTBEAT + OK
    assert outbox.unanswered == 0


def test_replies_that_wait_take_up_room(outbox: Outbox) -> None:
    outbox.unanswered += 1
    for _ in range(MAX_UNANSWERED - 2):
        outbox.reply(HEARTBEAT)
    assert outbox.has_room
    outbox.reply(HEARTBEAT)
    assert not outbox.has_room
    outbox.ok(1)
    assert outbox.has_room
