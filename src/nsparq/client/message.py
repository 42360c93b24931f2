"""A message in the hands of a consumer. It can be answered once, from any thread."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from nsparq.client.rdy import Signal

if TYPE_CHECKING:
    from nsparq.client.connection import Connection
    from nsparq.client.consumer import Consumer

__all__ = ["Message", "Reject", "Requeue"]

MAX_DELAY_S: Final = 1e9
"""What fits the numbers of every broker. They cut delays down to their own limit."""


class Requeue(Exception):
    """Raised by a handler that wants its message back: after `delay` seconds, or as long as the number of
    attempts suggests. Without `backoff` the consumer goes on as if nothing had happened."""

    def __init__(self, delay: float | None = None, *, backoff: bool = True) -> None:
        super().__init__("requeue")
        if delay is not None:
            check_delay(delay)
        self.delay, self.backoff = delay, backoff


class Reject(Exception):
    """Raised by a handler that will never manage its message, however often it comes. It is given up at once,
    as it would be after the last attempt: `on_give_up` and `dead_letter` get it, and it is finished."""


class Message:
    """Finished when its handler returns, requeued when that raises; or answered by hand, anywhere."""

    __slots__ = (
        "_connection",
        "_consumer",
        "attempts",
        "auto_response",
        "body",
        "id",
        "is_answered",
        "timestamp_ns",
        "touched",
    )

    def __init__(
        self,
        consumer: Consumer,
        connection: Connection,
        message_id: bytes,
        body: bytes,
        timestamp_ns: int,
        attempts: int,
        now: float,
    ) -> None:
        self._consumer = consumer
        self._connection = connection
        self.id = message_id
        """16 hex digits."""
        self.body = body
        self.timestamp_ns = timestamp_ns
        """When it was published."""
        self.attempts = attempts
        """Deliveries, this one included."""
        self.is_answered = False
        """Or its connection is gone: then it is another's, and an answer of ours has no effect."""
        self.auto_response = True
        """Set to False in a handler that will answer later, from elsewhere."""
        self.touched = now
        """When its timeout began, on the event loop's clock."""

    @property
    def address(self) -> str:
        """Of the nsqd that it came from."""
        return self._connection.address

    def json(self) -> Any:
        return json.loads(self.body)

    def finish(self) -> None:
        """It is done with."""
        self._consumer.answer(self, Signal.RESUME, None)

    def requeue(self, delay: float | None = None, *, backoff: bool = True) -> None:
        """Send it again, to whoever is ready: after `delay` seconds, or as long as its attempts suggest."""
        if delay is None:
            delay = self._consumer.config.requeue_delay(self.attempts)
        else:
            check_delay(delay)
        signal = Signal.BACKOFF if backoff else Signal.CONTINUE
        self._consumer.answer(self, signal, delay)

    def touch(self) -> None:
        """It takes longer: count its timeout anew. Consumers do this by themselves unless told otherwise."""
        self._consumer.touch(self)

    def __repr__(self) -> str:
        # As it stands in logs: what is in the body is not theirs to know.
        shown = self.id.decode("ascii", "backslashreplace")
        return f"<Message {shown} attempts={self.attempts} {len(self.body)} bytes>"


def check_delay(seconds: float) -> None:
    """Raises ValueError. The broker would end the connection over it."""
    if not 0 <= seconds <= MAX_DELAY_S:
        raise ValueError(f"a message cannot be delayed by {seconds} seconds")
