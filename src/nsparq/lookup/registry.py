"""All topics, channels and nsqds that nsqlookupd knows, in memory. No sockets, and time is an
argument.

A registration is the name of a topic, or of a channel in a topic, with the nsqds that have it. It
stays when they are gone, because a name without producers is an answer, too. Topics and channels
are registered separately, so a channel may be known without its topic.

The cost of a response depends on its own size only: names lead to their registrations, and the JSON
of a producer and of a node is cached until something in it changes.
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
"""Names without producers to remember. With more, the one without producers for the longest time is
dropped. NSQ keeps them all, so a peer that registers ever new names can fill its memory."""

NEVER: Final = 0
"""The tombstone time of a producer without a tombstone."""


class Registration:
    """A topic, or a channel of one, and its producers."""

    __slots__ = ("channel", "producers", "topic")

    def __init__(self, topic: str, channel: str) -> None:
        self.topic = topic
        self.channel = channel
        """Empty for the topic itself."""
        self.producers: dict[Producer, int] = {}
        """The time of each producer's tombstone, or NEVER."""


class Producer:
    """One nsqd while it is connected."""

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
        """By topic. Each topic is in `topics`, and no set is empty."""
        self.registrations = 0
        """Number of its topics and channels."""
        self.json: Final = answers.producer(peer)
        self.node_json = b""
        """Its part of /nodes. Empty if something has changed."""
        self.node_until_ns = 0
        """When a tombstone in node_json ends."""


class Registry:
    """Registrations and producers. Names must be valid, unless a method says otherwise."""

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
        """Limit for each producer."""
        self.max_unused = max_unused
        self.producers: dict[Producer, None] = {}
        self._by_cluster: dict[str, Producer] = {}
        """The producer of each cluster of replicated nsqds."""
        self.topics: dict[str, Registration] = {}
        self.channels: dict[str, dict[str, Registration]] = {}
        """By topic. No dictionary is empty."""
        self._unused: OrderedDict[Registration, None] = OrderedDict()
        """Registrations without producers, oldest first."""
        self._topics_json = b""
        self._nodes_json = b""
        """Cached responses. Empty if something has changed."""
        self._nodes_until_ns = 0

    # Producers

    def replaced_by(self, peer: PeerInfo) -> Producer | None:
        """The producer of the same cluster that this one takes the place of: only one node of a
        cluster serves. Raises FatalClientError if a later one is known."""
        earlier = self._by_cluster.get(peer.cluster)
        if earlier is not None and earlier.peer.epoch > peer.epoch:
            raise FatalClientError(
                "E_INVALID",
                f"IDENTIFY epoch {peer.epoch} of the cluster has ended: {earlier.peer.epoch} is known",
            )
        return earlier

    def identify(self, peer: PeerInfo, now_ns: int) -> Producer:
        """What replaced_by() gives must have been removed."""
        producer = Producer(peer, now_ns)
        self.producers[producer] = None
        if peer.cluster:
            self._by_cluster[peer.cluster] = producer
        self._nodes_json = b""
        return producer

    def ping(self, producer: Producer, now_ns: int) -> None:
        if now_ns - producer.last_update_ns > self.inactive_timeout_ns:
            self._nodes_json = b""  # it was inactive
        producer.last_update_ns = now_ns

    def remove(self, producer: Producer) -> None:
        """Its connection has ended. The names stay, even ephemeral ones."""
        for registration in [*producer.topics]:
            self._remove_from_topic(producer, registration)
        del self.producers[producer]
        if self._by_cluster.get(producer.peer.cluster) is producer:
            del self._by_cluster[producer.peer.cluster]
        self._nodes_json = b""

    def count_active(self, now_ns: int) -> int:
        """Producers that lookups return."""
        return sum(now_ns - one.last_update_ns <= self.inactive_timeout_ns for one in self.producers)

    def count_registrations(self) -> int:
        return sum(one.registrations for one in self.producers)

    def register(self, producer: Producer, topic: str, channel: str = "") -> bool:
        """Add the producer to the topic, and to the channel if one is given. Gives whether that
        changed anything. Raises FatalClientError if the producer has too many registrations."""
        known = self._find(topic, channel)
        if known is not None and producer in known.producers:
            return False
        if producer.registrations >= self.max_registrations:
            raise FatalClientError("E_INVALID", "REGISTER too many registrations")
        for registration in self._get_or_create(topic, channel):
            if producer not in registration.producers:
                self._link(producer, registration)
        return True

    def unregister(self, producer: Producer, topic: str, channel: str = "") -> bool:
        """Remove the producer from the channel, or from the topic and all its channels. Gives
        whether it was there. An ephemeral name without producers is dropped."""
        registration = self._find(topic, channel)
        if registration is None:
            return False
        was_there = producer in registration.producers
        if was_there:
            if channel:
                self._remove_from(producer, registration)
            else:
                self._remove_from_topic(producer, registration)
        if not registration.producers and is_ephemeral(channel or topic):
            self._drop(registration)
        return was_there

    # Names

    def create(self, topic: str, channel: str = "") -> None:
        """Add names without producers."""
        for _ in self._get_or_create(topic, channel):
            pass

    def delete_topic(self, topic: str) -> None:
        """Remove the topic and all its channels. The name may be any text."""
        for registration in [*self.channels.get(topic, {}).values()]:
            self._drop(registration)
        if topic in self.topics:
            self._drop(self.topics[topic])

    def delete_channel(self, topic: str, channel: str) -> bool:
        """Gives whether the channel existed."""
        registration = self.channels.get(topic, {}).get(channel)
        if registration is None:
            return False
        self._drop(registration)
        return True

    def tombstone(self, topic: str, node: str, now_ns: int) -> int:
        """Hide the producers at `broadcast_address:http_port` from lookups of the topic for a
        while. Gives their number."""
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

    # Responses, as JSON

    def lookup_json(self, topic: str, now_ns: int) -> bytes | None:
        """The topic's channels and active producers. None if the topic is unknown."""
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
        """All active producers with their topics and tombstones."""
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

    def debug_entries(self) -> Iterator[bytes]:
        """The entries of /debug, sorted. Empty for a registration without producers. The registry
        may change between two of them."""
        # Nearly all entries of a producer have the same text.
        plain: dict[Producer, bytes] = {}

        def shown(producer: Producer, tombstoned_ns: int) -> bytes:
            if tombstoned_ns != NEVER:
                return answers.debug_producer(producer.peer, producer.last_update_ns, tombstoned_ns)
            if producer not in plain:
                plain[producer] = answers.debug_producer(producer.peer, producer.last_update_ns, NEVER)
            return plain[producer]

        for key, producers in self._entries():
            yield answers.debug_entry(key, [shown(*entry) for entry in producers.items()])

    def _entries(self) -> Iterator[tuple[str, dict[Producer, int]]]:
        for topic in sorted(self.channels, key=_as_in_keys):
            for channel in sorted(self.channels.get(topic, ())):
                found = self.channels.get(topic, {}).get(channel)
                yield f"channel:{topic}:{channel}", {} if found is None else found.producers
        yield "client::", dict.fromkeys(self.producers, NEVER)
        for topic in sorted(self.topics, key=_as_in_keys):
            found = self.topics.get(topic)
            yield f"topic:{topic}:", {} if found is None else found.producers

    # Bookkeeping

    def _get_or_create(self, topic: str, channel: str) -> Iterator[Registration]:
        """The registrations of channel (if given) and topic. Missing ones are created."""
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

    def _find(self, topic: str, channel: str) -> Registration | None:
        return self.channels.get(topic, {}).get(channel) if channel else self.topics.get(topic)

    def _link(self, producer: Producer, registration: Registration) -> None:
        registration.producers[producer] = NEVER
        producer.registrations += 1
        self._unused.pop(registration, None)
        if registration.channel:
            producer.channels.setdefault(registration.topic, set()).add(registration)
        else:
            producer.topics[registration] = None
            self._node_changed(producer)

    def _remove_from_topic(self, producer: Producer, registration: Registration) -> None:
        # A producer of a channel is also one of its topic, so these are all its channels.
        for channel in producer.channels.pop(registration.topic, ()):
            self._remove_from(producer, channel)
        self._remove_from(producer, registration)

    def _remove_from(self, producer: Producer, registration: Registration) -> None:
        del registration.producers[producer]
        self._unlink(producer, registration)
        if not registration.producers:
            self._add_unused(registration)

    def _unlink(self, producer: Producer, registration: Registration) -> None:
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
            self._drop(next(iter(self._unused)))

    def _drop(self, registration: Registration) -> None:
        for producer in registration.producers:
            self._unlink(producer, registration)
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


def _as_in_keys(topic: str) -> str:
    return f"{topic}:"
