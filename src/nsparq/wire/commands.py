"""What a client said: one value per command, or per run of like commands."""

from __future__ import annotations

from dataclasses import dataclass

from nsparq.errors import ClientError
from nsparq.wire.identify import Identity


@dataclass(frozen=True, slots=True)
class Identify:
    identity: Identity


@dataclass(frozen=True, slots=True)
class Auth:
    secret: bytes


@dataclass(frozen=True, slots=True)
class Subscribe:
    topic: str
    channel: str


@dataclass(frozen=True, slots=True)
class Publish:
    """PUB, DPUB (with its delay) or MPUB: `verb` says which, for the error text."""

    verb: str
    topic: str
    bodies: list[bytes]
    defer_ms: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    count: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A run of FINs: clients send them back to back, and they are handled as one."""

    spans: list[tuple[int, int]]
    """Consecutive ids: first, and the one after the last. In the order of the commands."""


@dataclass(frozen=True, slots=True)
class Requeue:
    id: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Touch:
    id: int


@dataclass(frozen=True, slots=True)
class StartClose:
    """CLS."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The command is answered with this error without troubling the broker; nothing else happens."""

    error: ClientError


Command = Identify | Auth | Subscribe | Publish | Ready | Finish | Requeue | Touch | StartClose | Refusal
