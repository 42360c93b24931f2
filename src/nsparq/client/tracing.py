"""How producers and consumers are traced: `Config(tracing=…)`. `nsparq.integrations.opentelemetry`
has an implementation. Without one, no step of a publish or of a handler knows of tracing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nsparq.client.message import Message
    from nsparq.client.producer import Producer

__all__ = ["Tracing"]


class Tracing(Protocol):
    """Gets every producer, handler and loop when it is made."""

    def trace_producer(self, producer: Producer) -> None:
        """Replace `publish` and `publish_many` of a new producer."""

    def trace_handler(
        self, handle: Callable[[Any], Awaitable[Any]], topic: str, channel: str
    ) -> Callable[[Any], Awaitable[Any]]:
        """The handler to call instead: it gets a message, or a list of them."""

    def received(self, message: Message, topic: str, channel: str) -> None:
        """A loop over messages has got one."""

    def failed(self, error: Exception) -> None:
        """The present handler has failed for the last time: its message becomes a dead letter."""
