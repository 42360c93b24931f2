"""Shared by the tests of the wire layer: both builds of the inner loops, and conversations as
values."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest

from nsparq import kernel
from nsparq.errors import FatalClientError
from nsparq.packed import PackedBodies
from nsparq.wire.commands import Command, Finish, Publish, Refusal
from nsparq.wire.limits import Limits
from nsparq.wire.server import MAGIC, LineTooLong, ServerProtocol
from tests.support import multi

LIMITS = Limits(max_msg_size=1000, max_body_size=5000, max_rdy_count=2500)
SUB = b"SUB t c\n"
CLS = b"CLS\n"
ID = b"0123456789abcdef"
NUMBER = 0x0123456789ABCDEF

COMPILED: dict[str, Any] = {
    name: getattr(kernel, name)
    for name in (
        "pack_messages",
        "take_publishes",
        "encode_mpub",
        "split_headers",
        "encode_headers",
        "decode_headers",
        "lazy_headers",
        "encode_with_headers",
        "count_numbers",
        "encode_singles",
        "build_frames",
        "decode_messages",
        "decode_fins",
        "open_ring",
        "send_each",
        "read_publishes",
    )
}


def _builds() -> list[Any]:
    if kernel.BUILD == "compiled":
        return ["compiled", "pure"]
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    if os.environ.get("NSPARQ_NO_EXTENSIONS") or not has_compiler:
        return ["pure"]
    missing = pytest.mark.skip(reason="the kernel is not built, although there is a C compiler")
    return [pytest.param("compiled", marks=missing), "pure"]


BUILDS = _builds()
both_builds = pytest.mark.parametrize("build", BUILDS)


@contextmanager
def using(build: str) -> Iterator[None]:
    """Run with the compiled inner loops or without them. The modules read nsparq.kernel at each
    call."""
    for name, function in COMPILED.items():
        setattr(kernel, name, function if build == "compiled" else None)
    try:
        yield
    finally:
        for name, function in COMPILED.items():
            setattr(kernel, name, function)


class CommandList(list[object]):
    """Commands that are equal only if they are of the same type: plain tuples of two types may be
    equal."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, list)
            and list(map(type, self)) == list(map(type, other))
            and [*self] == [*other]
        )

    __hash__ = None  # type: ignore[assignment]  # a list

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return CommandList(found) if isinstance(index, slice) else found


@dataclass
class Outcome:
    """The result of a conversation. A client cannot tell two equal results apart."""

    commands: list[object] = field(default_factory=CommandList)
    """A run of FINs as ("FIN", id) for each id, because their grouping may differ. A Refusal as its
    text."""
    error: str | None = None
    """The text of the fatal error; "line too long" if the connection ends without an error
    frame."""
    completed: int = 0
    state: int = 0

    def take(self, command: object) -> None:
        if isinstance(command, Finish):
            for first, behind in command.spans:
                assert 0 <= first < behind <= 1 << 64, f"not a span: {first:x}-{behind:x}"
                self.commands += (("FIN", number) for number in range(first, behind))
        elif isinstance(command, Publish) and command.counts:
            assert sum(command.counts) == len(command.bodies)
            bodies = iter(command.bodies)
            for count in command.counts:
                own = PackedBodies.of(islice(bodies, count))
                self.commands.append(command._replace(bodies=own, counts=()))
        elif isinstance(command, Refusal):
            self.commands.append(str(command.error))
        else:
            self.commands.append(command)


def converse(pieces: Iterable[bytes], limits: Limits, *, eof: bool = False) -> Outcome:
    """Feed the pieces to a new protocol, as the server does, until the end or the first fatal
    error."""
    protocol = ServerProtocol(limits)
    outcome = Outcome()
    try:
        for piece in pieces:
            for command in commands_in(protocol, piece):
                outcome.take(command)
        if eof:
            protocol.receive_eof()
    except FatalClientError as error:
        outcome.error = str(error)
    except LineTooLong:
        outcome.error = "line too long"
    outcome.completed, outcome.state = protocol.commands, protocol.state
    return outcome


def commands_in(protocol: ServerProtocol, data: bytes) -> Iterator[Command]:
    """The commands that these bytes complete, each before the next is read."""
    command = protocol.next_command(data)
    while command is not None or protocol.has_more:
        if command is not None:
            yield command
        command = protocol.next_command()


def started(limits: Limits, *lines: bytes) -> ServerProtocol:
    """A protocol that has seen the magic and these bytes."""
    protocol = ServerProtocol(limits)
    list(commands_in(protocol, MAGIC + b"".join(lines)))
    return protocol


def one_by_one(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def outcome_of(data: bytes, limits: Limits = LIMITS, *, eof: bool = False) -> Outcome:
    """The result of these bytes after the magic. Checks that it is the same in one piece and byte
    by byte."""
    data = MAGIC + data
    whole = converse([data], limits, eof=eof)
    assert converse(one_by_one(data), limits, eof=eof) == whole
    return whole


def commands(data: bytes, limits: Limits = LIMITS) -> list[object]:
    outcome = outcome_of(data, limits)
    assert outcome.error is None
    return outcome.commands


def refusal(data: bytes, limits: Limits = LIMITS) -> str | None:
    """The fatal error that these bytes end with."""
    return outcome_of(data, limits).error


def error_at_end(data: bytes, limits: Limits = LIMITS) -> str | None:
    """The error if the stream ends after these bytes."""
    assert outcome_of(data, limits).error is None
    return outcome_of(data, limits, eof=True).error


def size(number: int) -> bytes:
    return struct.pack(">i", number)


def mpub(topic: bytes, bodies: list[bytes], declared: int | None = None) -> bytes:
    body = multi(bodies)
    return b"MPUB %s\n" % topic + size(len(body) if declared is None else declared) + body


def fins(*numbers: int) -> bytes:
    return b"".join(b"FIN %016x\n" % number for number in numbers)


def finished(*numbers: int) -> list[object]:
    return [("FIN", number) for number in numbers]


def assert_cost_is_linear(work: Callable[[int], Callable[[], object]], amount: int) -> None:
    """Check that the cost is linear. `work(n)` prepares a job; one of four times the size must take
    far less than sixteen times as long. Measures processor time, in three attempts, because the
    machine may be busy."""
    for _ in range(3):
        small, large = _seconds(work(amount)), _seconds(work(4 * amount))
        if large < 8 * small + 0.05:
            return
    pytest.fail(f"four times the input took {large / small:.1f} times as long: {small:.3f} s, {large:.3f} s")


def _seconds(job: Callable[[], object]) -> float:
    started_at = time.process_time()
    job()
    return time.process_time() - started_at


def feed_slowly(data: bytes, limits: Limits) -> Callable[[], object]:
    """A job that receives one command byte by byte."""
    protocol = started(limits)
    pieces = one_by_one(data)

    def job() -> None:
        found = [command for piece in pieces for command in commands_in(protocol, piece)]
        assert len(found) == 1

    return job
