"""A connected client as the broker sees it: its RDY, its messages in flight, and how to send to
it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nsparq.wire.identify import Identity
from nsparq.wire.server import INIT

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.runs import Run


class Secured(Protocol):
    """Facts about the TLS connection of a client."""

    cipher_suite: str
    version: str
    negotiated_protocol: str
    common_name: str


class Granted(Protocol):
    """The identity that AUTH has given to a client."""

    @property
    def identity(self) -> str: ...
    @property
    def identity_url(self) -> str: ...


class Client:
    """One connection. The server keeps `is_writable` and `state` up to date.

    It has more than 20 attributes because most of them are counters that /stats shows.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        address: str,
        send: Callable[[bytes | memoryview], None],
        close: Callable[[], None],
        connect_s: int,
    ) -> None:
        self.identify(identity)
        self.address = address
        self.send = send
        self.close = close
        self.connect_s = connect_s
        self.state = INIT
        self.ready_count = 0
        self.in_flight = 0
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
        self.publish_counts: Counter[str] = Counter()
        self.channel: Channel | None = None
        self.runs: set[Run] = set()
        """Deliveries with unanswered messages."""
        self.is_writable = True
        """False while the client does not read what it was sent."""
        self.distance = 2
        """Distance of the client: see Channel._distance."""
        self.is_queued = False
        """Whether the client is in its channel's line of ready clients."""
        self.tls: Secured | None = None
        self.grant: Granted | None = None

    def identify(self, identity: Identity) -> None:
        """IDENTIFY, or the defaults before it."""
        self.identity = identity
        self.msg_timeout_ns = identity.msg_timeout_ms * 1_000_000

    @property
    def capacity(self) -> int:
        """How many more messages the client may have. RDY limits how many are in flight."""
        return self.ready_count - self.in_flight if self.is_writable else 0
