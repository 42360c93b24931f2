"""Which messages are touched, and what an E_TOUCH error costs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

from nsparq.client.config import Config
from nsparq.client.consume.in_flight import TOUCH_SHARE, InFlight
from nsparq.client.consume.rdy import Distribution
from nsparq.client.message import Message
from tests.support import aio


def run(work: Coroutine[Any, Any, None]) -> None:
    # Nothing here is real, so time is simulated too.
    aio.run(work, timeless=True)


class FakeConnection:
    msg_timeout = 60.0
    is_closing = False

    def __init__(self) -> None:
        self.in_flight = 0
        self.last_message = 0.0
        self.written: list[bytes] = []

    def write(self, command: bytes) -> None:
        self.written.append(command)


class CountedId(bytes):
    """An id that counts how often somebody looks at it."""

    looks = 0

    def __hash__(self) -> int:
        CountedId.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedId.looks += 1
        return super().__eq__(other)

    def decode(self, *arguments: str) -> str:
        CountedId.looks += 1
        return super().decode(*arguments)


class World:
    def __init__(self, *connections: FakeConnection, auto_touch: bool = True) -> None:
        config = Config()
        self.connections: Any = {str(number): one for number, one in enumerate(connections)}
        self.in_flight = InFlight(
            config, Distribution(config), lambda _: None, lambda _: None, auto_touch=auto_touch
        )
        self.in_flight.start(self.connections)
        self.in_flight.schedule_touch()

    def add(self, connection: FakeConnection, count: int) -> list[Message]:
        received = [(0, 1, CountedId(b"%016x" % number), b"body", b"") for number in range(count)]
        return self.in_flight.add(connection, received)  # type: ignore[arg-type]

    def fail(self, connection: FakeConnection, message: Message) -> None:
        text = f"E_TOUCH_FAILED TOUCH {message.id.decode()} failed ID not in flight"
        self.in_flight.touch_failed(connection, text)  # type: ignore[arg-type]


def touches(connection: FakeConnection) -> int:
    count = sum(command.startswith(b"TOUCH") for command in connection.written)
    connection.written.clear()
    return count


async def next_touches() -> None:
    """A little longer than until each message was touched once more."""
    await asyncio.sleep(FakeConnection.msg_timeout / TOUCH_SHARE + 1)


def test_a_failed_touch_costs_the_same_however_many_messages_are_in_flight() -> None:
    async def main() -> None:
        connection = FakeConnection()
        world = World(connection)
        messages = world.add(connection, 1000)
        await next_touches()
        assert touches(connection) == 1000
        CountedId.looks = 0
        for message in messages:
            world.fail(connection, message)
        assert CountedId.looks < 10 * len(messages)
        await next_touches()
        assert touches(connection) == 0
        world.in_flight.stop_touching()

    run(main())


def test_a_failed_touch_concerns_one_message_of_its_connection() -> None:
    async def main() -> None:
        one, other = FakeConnection(), FakeConnection()
        world = World(one, other)
        messages = world.add(one, 3)
        world.add(other, 3)
        await next_touches()
        assert (touches(one), touches(other)) == (3, 3)
        world.fail(one, messages[1])
        await next_touches()
        assert (touches(one), touches(other)) == (2, 3)
        world.in_flight.stop_touching()

    run(main())


def test_a_touch_by_hand_that_failed_is_not_repeated() -> None:
    async def main() -> None:
        connection = FakeConnection()
        world = World(connection)
        (message,) = world.add(connection, 1)
        message.touch()
        world.fail(connection, message)
        assert touches(connection) == 1
        await next_touches()
        assert touches(connection) == 0
        world.in_flight.stop_touching()

    run(main())


@pytest.mark.parametrize("text", ["E_TOUCH_FAILED", "E_TOUCH_FAILED TOUCH", "E_TOUCH_FAILED a b c \udcff"])
def test_an_error_without_an_id_is_ignored(text: str) -> None:
    async def main() -> None:
        connection = FakeConnection()
        world = World(connection)
        world.add(connection, 1)
        world.in_flight.touch_failed(connection, text)  # type: ignore[arg-type]
        await next_touches()
        assert touches(connection) == 1
        world.in_flight.stop_touching()

    run(main())


@pytest.mark.parametrize("auto_touch", [True, False])
@pytest.mark.parametrize("is_lost", [True, False], ids=["connection lost", "answered"])
def test_a_message_that_was_touched_is_not_kept(auto_touch: bool, is_lost: bool) -> None:
    async def main() -> None:
        connection = FakeConnection()
        world = World(connection, auto_touch=auto_touch)
        (message,) = world.add(connection, 1)
        message.touch()
        await next_touches()
        if is_lost:
            world.connections.clear()
            world.in_flight.drop(connection)  # type: ignore[arg-type]
        else:
            message.finish()
            await next_touches()
        del message
        left = [one for one in gc.get_objects() if isinstance(one, Message) and one._connection is connection]
        assert left == []
        world.in_flight.stop_touching()

    run(main())
