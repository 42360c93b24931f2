"""Who produces which topic: nsqlookupd's whole state, in memory. No sockets and no clock: `now_ns` is given.

A registration is a name, of a topic or of a channel in a topic, with the nsqds that have it. It outlives
them: a name without producers is an answer too. Topics and channels are registered apart, so a channel may be
known whose topic is not.

An answer costs what it contains, not what there is: names lead to their registrations, and the JSON of a
producer and of a node is made once and kept until something in it changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from nsparq.errors import FatalClientError
from nsparq.lookup import answers
from nsparq.names import is_ephemeral
from nsparq.wire.lookup import PeerInfo

MAX_UNUSED: Final = 100_000
"""Names without producers that are remembered; beyond, the one that has been so the longest is forgotten.
NSQ keeps them all, and a peer that comes and goes under ever new names fills its memory."""

NEVER: Final = 0
"""The tombstone time of a producer that has no tombstone."""


class Registration:
    """A topic, or a channel of one, and its producers."""

    __slots__ = ("channel", "producers", "topic")

    def __init__(self, topic: str, channel: str) -> None:
        self.topic = topic
        self.channel = channel
        """Empty for the topic itself."""
        self.producers: dict[Producer, int] = {}
        """When each was tombstoned here, or NEVER."""


class Producer:
    """One nsqd, for as long as its connection lasts."""

    __slots__ = (
        "channels",
        "json",
        "last_update_ns",
        "node_json",
        "node_until_ns",
        "peer",
        "registrations",
        "topics",
    )

    def __init__(self, peer: PeerInfo, now_ns: int) -> None:
        self.peer = peer
        self.last_update_ns = now_ns
        self.topics: dict[Registration, None] = {}
        self.channels: dict[str, set[Registration]] = {}
        """By topic, each one of `topics`; no set is empty."""
        self.registrations = 0
        """How many topics and channels these are."""
        self.json: Final = answers.producer(peer)
        self.node_json = b""
        """Its part of /nodes; empty when that has to be made anew."""
        self.node_until_ns = 0
        """When a tombstone in node_json ends."""


class Registry:
    """Registrations and producers. A topic or channel name given here is valid, unless said otherwise."""

    def __init__(
        self,
        *,
        inactive_timeout_ns: int,
        tombstone_lifetime_ns: int,
        max_registrations: int,
        max_unused: int = MAX_UNUSED,
    ) -> None:
        self.inactive_timeout_ns = inactive_timeout_ns
        self.tombstone_lifetime_ns = tombstone_lifetime_ns
        self.max_registrations = max_registrations
        """Of one producer."""
        self.max_unused = max_unused
        self.producers: dict[Producer, None] = {}
        self.topics: dict[str, Registration] = {}
        self.channels: dict[str, dict[str, Registration]] = {}
        """By topic; no topic has an empty dictionary."""
        self._unused: OrderedDict[Registration, None] = OrderedDict()
        """Those without producers, the longest so first."""
        self._topics_json = b""
        self._nodes_json = b""
        """Kept until something changes; empty when that has happened."""
        self._nodes_until_ns = 0

    # Producers

    def identify(self, peer: PeerInfo, now_ns: int) -> Producer:
        producer = Producer(peer, now_ns)
        self.producers[producer] = None
        self._nodes_json = b""
        return producer

    def ping(self, producer: Producer, now_ns: int) -> None:
        if now_ns - producer.last_update_ns > self.inactive_timeout_ns:
            self._nodes_json = b""  # it comes back
        producer.last_update_ns = now_ns

    def remove(self, producer: Producer) -> None:
        """Its connection has ended. The names it had stay, ephemeral ones too."""
        for registration in [*producer.topics]:
            self._take_out_of_topic(producer, registration)
        del self.producers[producer]
        self._nodes_json = b""

    def register(self, producer: Producer, topic: str, channel: str = "") -> bool:
        """Add the producer to the topic, and to the channel if there is one. Whether that changed anything.

        Raises FatalClientError when the producer has too many already.
        """
        if self._has(producer, topic, channel):
            return False
        if producer.registrations >= self.max_registrations:
            raise FatalClientError("E_INVALID", "REGISTER too many registrations")
        for registration in self._obtain(topic, channel):
            if producer not in registration.producers:
                self._put_in(producer, registration)
        return True

    def unregister(self, producer: Producer, topic: str, channel: str = "") -> bool:
        """Take the producer out of the channel only, or out of the topic and all its channels. Whether it was
        in it. What was named is forgotten if it is ephemeral and has no producer left."""
        registration = self.channels.get(topic, {}).get(channel) if channel else self.topics.get(topic)
        if registration is None:
            return False
        was_there = producer in registration.producers
        if was_there:
            if channel:
                self._take_out(producer, registration)
            else:
                self._take_out_of_topic(producer, registration)
        if not registration.producers and is_ephemeral(channel or topic):
            self._forget(registration)
        return was_there

    # Names

    def create(self, topic: str, channel: str = "") -> None:
        """Remember the names, without producers."""
        for _ in self._obtain(topic, channel):
            pass

    def delete_topic(self, topic: str) -> None:
        """Forget the topic and all its channels, producers included; any text will do."""
        for registration in [*self.channels.get(topic, {}).values()]:
            self._forget(registration)
        if topic in self.topics:
            self._forget(self.topics[topic])

    def delete_channel(self, topic: str, channel: str) -> bool:
        """Whether it was there."""
        registration = self.channels.get(topic, {}).get(channel)
        if registration is None:
            return False
        self._forget(registration)
        return True

    def tombstone(self, topic: str, node: str, now_ns: int) -> int:
        """Hide the producers at `broadcast_address:http_port` from lookups of the topic, for a while. How
        many they are."""
        registration = self.topics.get(topic)
        if registration is None:
            return 0
        found = [
            producer
            for producer in registration.producers
            if f"{producer.peer.broadcast_address}:{producer.peer.http_port}" == node
        ]
        for producer in found:
            registration.producers[producer] = now_ns
            self._node_changed(producer)
        return len(found)

    # Answers, as JSON

    def lookup_json(self, topic: str, now_ns: int) -> bytes | None:
        """The topic's channels and active producers; None if it is not known."""
        registration = self.topics.get(topic)
        if registration is None:
            return None
        inactive_before = now_ns - self.inactive_timeout_ns
        hidden_after = now_ns - self.tombstone_lifetime_ns
        producers = [
            producer.json
            for producer, tombstoned_ns in registration.producers.items()
            if producer.last_update_ns >= inactive_before
            and (tombstoned_ns == NEVER or tombstoned_ns <= hidden_after)
        ]
        return answers.lookup(self.channels.get(topic, ()), producers)

    def topics_json(self) -> bytes:
        if not self._topics_json:
            self._topics_json = answers.names("topics", self.topics)
        return self._topics_json

    def channels_json(self, topic: str) -> bytes:
        return answers.names("channels", self.channels.get(topic, ()))

    def nodes_json(self, now_ns: int) -> bytes:
        """Every producer that is not inactive, with its topics and their tombstones."""
        if not self._nodes_json or now_ns >= self._nodes_until_ns:
            inactive_before = now_ns - self.inactive_timeout_ns
            nodes = []
            until_ns = now_ns + self.inactive_timeout_ns
            for producer in self.producers:
                if producer.last_update_ns >= inactive_before:
                    nodes.append(self._node_json(producer, now_ns))
                    inactive_ns = producer.last_update_ns + self.inactive_timeout_ns + 1
                    until_ns = min(until_ns, producer.node_until_ns, inactive_ns)
            self._nodes_json = answers.nodes(nodes)
            self._nodes_until_ns = until_ns
        return self._nodes_json

    def _node_json(self, producer: Producer, now_ns: int) -> bytes:
        if not producer.node_json or now_ns >= producer.node_until_ns:
            ends = [
                registration.producers[producer] + self.tombstone_lifetime_ns
                if registration.producers[producer] != NEVER
                else NEVER
                for registration in producer.topics
            ]
            tombstones = [end > now_ns for end in ends]
            topics = [registration.topic for registration in producer.topics]
            producer.node_json = answers.node(producer.json, tombstones, topics)
            producer.node_until_ns = min((end for end in ends if end > now_ns), default=1 << 63)
        return producer.node_json

    def debug_json(self) -> bytes:
        """Every registration that has producers, with all that is known about them."""
        # Nearly all entries of a producer are the same text.
        plain = {
            producer: answers.debug_entry(producer.peer, producer.last_update_ns, NEVER)
            for producer in self.producers
        }
        return answers.debug(
            {
                key: [
                    plain[producer]
                    if tombstoned_ns == NEVER
                    else answers.debug_entry(producer.peer, producer.last_update_ns, tombstoned_ns)
                    for producer, tombstoned_ns in producers.items()
                ]
                for key, producers in self._entries()
            }
        )

    def _entries(self) -> Iterator[tuple[str, dict[Producer, int]]]:
        yield "client::", dict.fromkeys(self.producers, NEVER)
        for registration in self.topics.values():
            yield f"topic:{registration.topic}:", registration.producers
        for channels in self.channels.values():
            for registration in channels.values():
                yield f"channel:{registration.topic}:{registration.channel}", registration.producers

    # Bookkeeping

    def _obtain(self, topic: str, channel: str) -> Iterator[Registration]:
        """The registrations of the channel, if one is named, and of the topic; made if need be."""
        if channel:
            channels = self.channels.setdefault(topic, {})
            registration = channels.get(channel)
            if registration is None:
                registration = channels[channel] = Registration(topic, channel)
                self._add_unused(registration)
            yield registration
        registration = self.topics.get(topic)
        if registration is None:
            registration = self.topics[topic] = Registration(topic, "")
            self._topics_json = b""
            self._add_unused(registration)
        yield registration

    def _has(self, producer: Producer, topic: str, channel: str) -> bool:
        registration = self.channels.get(topic, {}).get(channel) if channel else self.topics.get(topic)
        return registration is not None and producer in registration.producers

    def _put_in(self, producer: Producer, registration: Registration) -> None:
        registration.producers[producer] = NEVER
        producer.registrations += 1
        self._unused.pop(registration, None)
        if registration.channel:
            producer.channels.setdefault(registration.topic, set()).add(registration)
        else:
            producer.topics[registration] = None
            self._node_changed(producer)

    def _take_out_of_topic(self, producer: Producer, registration: Registration) -> None:
        # A producer of a channel is one of its topic too, so these are all.
        for channel in producer.channels.pop(registration.topic, ()):
            self._take_out(producer, channel)
        self._take_out(producer, registration)

    def _take_out(self, producer: Producer, registration: Registration) -> None:
        del registration.producers[producer]
        self._let_go(producer, registration)
        if not registration.producers:
            self._add_unused(registration)

    def _let_go(self, producer: Producer, registration: Registration) -> None:
        producer.registrations -= 1
        if not registration.channel:
            del producer.topics[registration]
            self._node_changed(producer)
        elif channels := producer.channels.get(registration.topic):
            channels.discard(registration)
            if not channels:
                del producer.channels[registration.topic]

    def _add_unused(self, registration: Registration) -> None:
        self._unused[registration] = None
        if len(self._unused) > self.max_unused:
            self._forget(next(iter(self._unused)))

    def _forget(self, registration: Registration) -> None:
        for producer in registration.producers:
            self._let_go(producer, registration)
        self._unused.pop(registration, None)
        if not registration.channel:
            del self.topics[registration.topic]
            self._topics_json = b""
            return
        channels = self.channels[registration.topic]
        del channels[registration.channel]
        if not channels:
            del self.channels[registration.topic]

    def _node_changed(self, producer: Producer) -> None:
        producer.node_json = b""
        self._nodes_json = b""
