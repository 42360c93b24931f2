"""One turn of the event loop, from the first publish to the last byte sent.

While the loop reads from its sockets, topics gather what is published, and channels that have something to
deliver are added here. `run()` does the rest, in this order:

1. gather: put the rest off for a moment if more publishers are about to send (`should_wait`);
2. append what each topic has gathered, with one write;
3. answer the publishers (`answer`), which prepare their next messages meanwhile;
4. deliver on the channels that have messages and ready clients;
5. bound the memory of ephemeral topics;
6. flush: send the frames that connections have gathered (`flush`).

The broker knows no socket, so the server plugs in `wake`, `should_wait`, `answer` and `flush`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nsparq.broker.ephemeral import bound_memory

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

DELIVERY_PARTS: Final = 4
DELIVERY_MESSAGES: Final = 500
"""A turn stops delivering when so many messages have been delivered, and one in DELIVERY_PARTS of the
channels has had its part. The next turn goes on with the others."""


class Turn:
    """What is to be done at the end of the present turn."""

    def __init__(self, broker: Broker, wake: Callable[[], None]) -> None:
        """`wake` has run() called at the end of the present turn of the event loop."""
        self.should_wait: Callable[[], bool] = lambda: False
        self.answer: Callable[[], None] = lambda: None
        self.flush: Callable[[], None] = lambda: None
        self.is_running = False
        """Whether run() is under way: what is added to be sent is then flushed at its end."""
        self._broker = broker
        self._wake = wake
        self._is_scheduled = False
        self._topics: dict[Topic, None] = {}
        self._channels: dict[Channel, None] = {}

    def add_topic(self, topic: Topic) -> None:
        """The topic has gathered publishes."""
        self._topics[topic] = None
        self.schedule()

    def add_channel(self, channel: Channel) -> None:
        """The channel may have something to deliver."""
        self._channels[channel] = None
        self.schedule()

    def schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._wake()

    def forget_topic(self, topic: Topic) -> None:
        self._topics.pop(topic, None)

    def forget_channel(self, channel: Channel) -> None:
        self._channels.pop(channel, None)

    def run(self) -> None:
        """End the turn, or put its end off."""
        if self.should_wait():
            self._wake()
            return
        self.finish()

    def finish(self) -> None:
        """End the turn now."""
        # What is added from here on is delivered below, or left for another turn at the end.
        self._is_scheduled = self.is_running = True
        topics, self._topics = self._topics, {}
        try:
            for topic in topics:
                self._guard(topic, topic.publishing.flush)
            self.answer()
            self._deliver(self._broker.monotonic_ns())
            for topic in topics:
                if topic.bound is not None:
                    self._guard(topic, topic.bound.apply)
            bound_memory(self._broker.topics, self._broker.ephemeral_memory)
        finally:
            self._is_scheduled = self.is_running = False
            if self._topics or self._channels:
                self.schedule()
        self.flush()

    def _guard(self, topic: Topic, step: Callable[[], None]) -> None:
        """An internal error in one topic must not cost the others their turn."""
        try:
            step()
        except Exception:
            logger.exception("%s: internal error at the end of a turn", topic)

    def _deliver(self, now_ns: int) -> None:
        """Deliver on the channels that have something to deliver. Where that is much, on a part of them: what
        is published and finished meanwhile then goes with the rest, and deliveries get larger and fewer as
        there is more to do."""
        channels, self._channels = self._channels, {}
        part = -(-len(channels) // DELIVERY_PARTS)
        waiting = iter(channels)
        delivered = 0
        for number, channel in enumerate(waiting, 1):
            self._broker.upkeep.note_changed(channel.topic)
            try:
                delivered += channel.delivery.pump(now_ns)
            except Exception:
                logger.exception("%s: internal error while delivering", channel)
                self._broker.upkeep.retry(channel)
            if number >= part and delivered >= DELIVERY_MESSAGES:
                break
        if left := dict.fromkeys(waiting):
            # They are the first of the next turn, before those that have just been served.
            self._channels = left | self._channels
