"""One turn of the event loop, from the first publish to the last byte sent.

While the loop reads from its sockets, topics gather publishes, channels that have something to
deliver are added here, and so are outboxes that have something to send. `run()` does the rest, in
this order:

1. append what each topic has gathered, with one write;
2. answer the publishers (`answer`), so that they prepare their next messages meanwhile;
3. deliver on the channels that have messages and ready clients;
4. bound the memory of ephemeral topics;
5. flush the outboxes;
6. stay awake for a moment, because replies are on their way (`stay_awake`).

The broker knows no socket and no event loop, so the server plugs in `wake`, `answer` and
`stay_awake`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from nsparq.broker.ephemeral import bound_memory

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

DELIVERY_PARTS: Final = 4
DELIVERY_MESSAGES: Final = 500
"""A turn stops delivering when it has delivered this many messages and has served one in
DELIVERY_PARTS of the channels. The next turn serves the others."""


class Outgoing(Protocol):
    """Something that gathers frames during a turn."""

    def flush(self) -> None:
        """Send them."""

    def fail(self, error: Exception) -> None:
        """flush() has raised."""


class Turn:
    """The work for the end of the present turn."""

    def __init__(self, broker: Broker, wake: Callable[[], object]) -> None:
        """`wake` has run() called at the end of the present turn of the event loop."""
        self.wake = wake
        self.answer: Callable[[], None] = lambda: None
        self.should_wait: Callable[[], bool] | None = None
        """Asked before a turn ends: whether more publishers are about to send."""
        self.stay_awake: Callable[[], None] = lambda: None
        self.is_scheduled = False
        """Whether run() is about to be called, or is running."""
        self.outboxes: list[Outgoing] = []
        """To be flushed at the end of the turn."""
        self._broker = broker
        self._topics: dict[Topic, None] = {}
        self._channels: dict[Channel, None] = {}

    def add_topic(self, topic: Topic) -> None:
        """The topic has gathered publishes."""
        self._topics[topic] = None
        if not self.is_scheduled:
            self.is_scheduled = True
            self.wake()

    def add_channel(self, channel: Channel) -> None:
        """The channel may have something to deliver."""
        self._channels[channel] = None
        if not self.is_scheduled:
            self.is_scheduled = True
            self.wake()

    def schedule(self) -> None:
        """Have run() called, for outboxes and OKs. Callers look at `is_scheduled` first."""
        self.is_scheduled = True
        self.wake()

    def forget_topic(self, topic: Topic) -> None:
        self._topics.pop(topic, None)

    def forget_channel(self, channel: Channel) -> None:
        self._channels.pop(channel, None)

    def run(self, may_wait: bool = False) -> None:
        """End the turn, or put its end off if that is allowed. An error in one topic or channel
        does not end the turn of the others."""
        # Everything added from here on is served below, or left for another turn.
        self.is_scheduled = True
        if may_wait and self.should_wait is not None and self.should_wait():
            self.wake()
            return
        broker, memory = self._broker, self._broker.ephemeral_memory
        topics, self._topics = self._topics, {}
        try:
            for topic in topics:
                try:
                    topic.publishing.flush()
                except Exception:
                    logger.exception("%s: internal error while publishing", topic)
            self.answer()

            # Deliver. If that is a lot, on a part of the channels: then messages published and
            # finished meanwhile are delivered together with the rest. So deliveries get larger and
            # fewer the more there is to do.
            now_ns = broker.monotonic_ns()
            channels, self._channels = self._channels, {}
            part = -(-len(channels) // DELIVERY_PARTS)
            waiting = iter(channels)
            delivered = 0
            for number, channel in enumerate(waiting, 1):
                broker.upkeep.changed.add(channel.topic)
                try:
                    delivered += channel.delivery.pump(now_ns)
                except Exception:
                    logger.exception("%s: internal error while delivering", channel)
                    broker.upkeep.retry(channel)
                if number >= part and delivered >= DELIVERY_MESSAGES:
                    break
            # The next turn begins with those that are left.
            self._channels = dict.fromkeys(waiting) | self._channels

            for topic in topics:
                try:
                    if topic.bound is not None:
                        topic.bound.apply()
                except Exception:
                    logger.exception("%s: internal error while bounding its memory", topic)
            if memory.size_bytes > memory.limit_bytes:
                bound_memory(broker.topics, memory)
        finally:
            self.is_scheduled = False
            if self._topics or self._channels:
                self.schedule()
        outboxes, self.outboxes = self.outboxes, []
        for outbox in outboxes:
            try:
                outbox.flush()
            except Exception as error:
                outbox.fail(error)
        self.stay_awake()
