"""A message that a consumer has received. It can be answered once, from any thread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from nsparq.client.consume.rdy import Signal
from nsparq.headers import with_lazy_headers

if TYPE_CHECKING:
    from nsparq.client.connect.connection import Connection
    from nsparq.client.consume.in_flight import InFlight
    from nsparq.wire.client import Received

__all__ = ["Message", "Reject", "Requeue"]

MAX_DELAY_S: Final = 1e9
"""Fits the integers of every broker. Brokers reduce a delay to their own limit."""


class Requeue(Exception):
    """Raise it in a handler to requeue the message: after `delay` seconds, or a delay that grows
    with its attempts. Without `backoff` the consumer does not back off."""

    def __init__(self, delay: float | None = None, *, backoff: bool = True) -> None:
        super().__init__("requeue")
        if delay is not None:
            check_delay(delay)
        self.delay, self.backoff = delay, backoff


class Reject(Exception):
    """Raise it in a handler that can never process the message. The message is given up at once, as
    after its last attempt: `on_give_up` and `dead_letter` get it, and it is finished."""


@with_lazy_headers
class Message:
    """Finished when its handler returns, requeued when it raises, or answered by hand."""

    __slots__ = (
        "_connection",
        "_headers",
        "_in_flight",
        "attempts",
        "auto_response",
        "body",
        "id",
        "is_answered",
        "timestamp_ns",
        "touched",
    )

    timestamp_ns: int
    """When it was published."""
    attempts: int
    """Deliveries, this one included."""
    id: bytes
    """16 hex digits."""
    body: bytes
    headers: Mapping[str, str]
    """Names, in lower case, and values. Empty if the message has no headers."""
    _headers: bytes | Mapping[str, str]
    """Their block, until somebody asks for them."""

    def __init__(self, in_flight: InFlight, connection: Connection, received: Received, now: float) -> None:
        self.timestamp_ns, self.attempts, self.id, self.body, self._headers = received
        self._in_flight = in_flight
        self._connection = connection
        self.is_answered = False
        """Also True when the connection is lost: then an answer has no effect."""
        self.auto_response = True
        """Set it to False in a handler that answers later, from elsewhere."""
        self.touched = now
        """When its timeout began, on the event loop's clock."""

    @property
    def address(self) -> str:
        """Of the nsqd that sent it."""
        return self._connection.address

    def json(self) -> Any:
        """The body, parsed as JSON. Raises ValueError."""
        return json.loads(self.body)

    def finish(self) -> None:
        """The message is done (FIN)."""
        self._answer(Signal.RESUME, None)

    def requeue(self, delay: float | None = None, *, backoff: bool = True) -> None:
        """Send it again (REQ): after `delay` seconds, or a time that grows with its attempts."""
        if delay is None:
            delay = self._in_flight.requeue_delay(self.attempts)
        else:
            check_delay(delay)
        self._answer(Signal.BACKOFF if backoff else Signal.CONTINUE, delay)

    def _answer(self, signal: Signal, delay: float | None) -> None:
        """FIN, or REQ with a delay, with an explicit signal for back-off."""
        self._in_flight.answer(self, signal, delay)

    def touch(self) -> None:
        """Restart its timeout (TOUCH). With `auto_touch` the consumer does it."""
        self._in_flight.touch(self)

    def __repr__(self) -> str:
        # Without the body: this text goes to logs.
        shown = self.id.decode("ascii", "backslashreplace")
        return f"<Message {shown} attempts={self.attempts} {len(self.body)} bytes>"


def check_delay(seconds: float) -> None:
    """Raises ValueError for a delay over which the broker would close the connection."""
    if not 0 <= seconds <= MAX_DELAY_S:
        raise ValueError(f"a message cannot be delayed by {seconds} seconds")
