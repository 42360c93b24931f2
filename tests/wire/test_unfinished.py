"""The limit on the bytes of unfinished commands, over all connections."""

from __future__ import annotations

import sys

import pytest

from nsparq.errors import FatalClientError
from nsparq.wire.commands import Command, Publish
from nsparq.wire.limits import UNCOUNTED, Limits, Unfinished
from nsparq.wire.server import MAGIC, ServerProtocol
from tests.support import multi, sized
from tests.wire.harness import commands_in

pytestmark = pytest.mark.usefixtures("build")

LIMITS = Limits(max_msg_size=1 << 20, max_body_size=1 << 20)
LARGE = b"x" * 100_000
COMMANDS = {
    "PUB": b"PUB t\n" + sized(LARGE),
    "DPUB": b"DPUB t 5\n" + sized(LARGE),
    "MPUB": b"MPUB t\n" + sized(multi([LARGE[:1000]] * 100)),
    "AUTH": b"AUTH\n" + sized(LARGE),
}
every_command = pytest.mark.parametrize("verb", COMMANDS)


def connected(unfinished: Unfinished) -> ServerProtocol:
    protocol = ServerProtocol(LIMITS, unfinished=unfinished)
    assert receive(protocol, MAGIC) == []
    return protocol


def receive(protocol: ServerProtocol, data: bytes, step: int = 0) -> list[Command]:
    step = step or len(data)
    return [c for at in range(0, len(data), step) for c in commands_in(protocol, data[at : at + step])]


@every_command
def test_an_unfinished_command_counts_until_it_is_complete(verb: str) -> None:
    unfinished = Unfinished(1 << 20)
    protocol = connected(unfinished)
    for step in (0, 70_000, 3_000):
        assert receive(protocol, COMMANDS[verb][:-1], step) == []
        assert len(LARGE) - 1 <= unfinished.size + UNCOUNTED <= len(COMMANDS[verb])
        assert len(receive(protocol, COMMANDS[verb][-1:])) == 1
        assert unfinished.size == 0


@every_command
@pytest.mark.parametrize("step", [0, 3_000])
def test_only_the_command_that_exceeds_the_limit_is_refused(verb: str, step: int) -> None:
    unfinished = Unfinished(120_000)
    parked, refused = connected(unfinished), connected(unfinished)
    assert receive(parked, COMMANDS["MPUB"][:-1], step) == []
    with pytest.raises(FatalClientError) as caught:
        receive(refused, COMMANDS[verb][:-1], step)
    assert str(caught.value) == (
        f"E_{verb}_FAILED {verb} failed unfinished commands of all clients exceed 120000 bytes"
    )
    refused.discard()
    (published,) = receive(parked, COMMANDS["MPUB"][-1:])
    assert isinstance(published, Publish)
    assert len(published.bodies) == 100
    assert unfinished.size == 0


def test_small_commands_are_accepted_beyond_the_limit() -> None:
    unfinished = Unfinished(0)
    protocol = connected(unfinished)
    small = b"MPUB t\n" + sized(multi([b"x" * 1000] * 10)) + b"PUB t\n" + sized(b"x" * 10_000)
    assert len(receive(protocol, small, 100)) == 2


def test_a_command_that_arrives_whole_needs_no_room() -> None:
    protocol = connected(Unfinished(0))
    assert len(receive(protocol, b"".join(COMMANDS.values()))) == len(COMMANDS)


def test_discarded_bytes_do_not_count() -> None:
    unfinished = Unfinished(1 << 20)
    for command in COMMANDS.values():
        protocol = connected(unfinished)
        receive(protocol, command[:-1], 30_000)
        protocol.discard()
        protocol.discard()
    assert unfinished.size == 0


@pytest.mark.parametrize("step", [2, 3_000])
def test_a_body_in_small_pieces_takes_the_memory_of_its_bytes(step: int) -> None:
    protocol = connected(Unfinished(1 << 20))
    receive(protocol, COMMANDS["PUB"][:-1], step)
    assert sum(map(sys.getsizeof, (*protocol._chunks, protocol._chunks))) < 1.1 * len(LARGE)


def test_an_idle_connection_keeps_no_received_bytes() -> None:
    protocol = connected(Unfinished(0))
    receive(protocol, b"NOP\n" * 10_000)
    assert protocol._buffer == b""
    receive(protocol, b"NOP\n" * 10_000 + b"PUB")
    assert protocol._buffer == b"PUB"
