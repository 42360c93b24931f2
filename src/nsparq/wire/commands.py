"""Commands of a client: one value per command, or per run of like commands.

They are tuples, because those are made fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nsparq.errors import ClientError
from nsparq.packed import PackedBodies
from nsparq.wire.identify import Identity


class Identify(NamedTuple):
    identity: Identity


class Auth(NamedTuple):
    secret: bytes


class Subscribe(NamedTuple):
    topic: str
    channel: str


class Publish(NamedTuple):
    """PUB, DPUB (with its delay) or MPUB: `verb` says which, for the error text."""

    verb: str
    topic: str
    bodies: PackedBodies
    defer_ms: int = 0
    counts: Sequence[int] = ()
    """For a run of PUBs or MPUBs to one topic: the number of messages of each. Each gets its own
    answer."""


@dataclass(frozen=True, slots=True)
class Ready:
    count: int


class Finish(NamedTuple):
    """A run of FINs. Clients send them back to back, and they are executed as one command."""

    spans: list[tuple[int, int]]
    """Consecutive ids: the first, and the one after the last. In the order of the commands."""


class Requeue(NamedTuple):
    id: int
    timeout_ms: int


class Touch(NamedTuple):
    id: int


class StartClose(NamedTuple):
    """CLS."""


class Refusal(NamedTuple):
    """The command is answered with this error. The broker does nothing."""

    error: ClientError


Command = Identify | Auth | Subscribe | Publish | Ready | Finish | Requeue | Touch | StartClose | Refusal
