"""After any sequence of operations, the registry answers like a plain map of entries."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from nsparq.lookup import answers
from nsparq.lookup.registry import Producer, Registry
from nsparq.wire.lookup import PeerInfo
from tests.support.examples import examples

INACTIVE, LIFETIME = 100, 30
TOPICS = st.sampled_from(["a", "b", "t#ephemeral"])
CHANNELS = st.sampled_from(["", "c", "d", "c#ephemeral"])

Key = tuple[str, str, str]


class Entry:
    """A producer under one registration."""

    def __init__(self) -> None:
        self.tombstoned_ns: int | None = None


class RegistryMachine(RuleBasedStateMachine):
    """The model follows NSQ's description: a map from registrations to producers."""

    producers = Bundle("producers")

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(
            inactive_timeout_ns=INACTIVE, tombstone_lifetime_ns=LIFETIME, max_registrations=1000
        )
        self.now = 1
        self.count = 0
        self.model: dict[Key, dict[str, Entry]] = {("client", "", ""): {}}
        self.last_update: dict[str, int] = {}

    def entry(self, key: Key, producer: Producer) -> None:
        self.model.setdefault(key, {}).setdefault(producer.peer.hostname, Entry())

    @rule(target=producers, node=st.sampled_from([1, 2]))
    def identify(self, node: int) -> Producer:
        self.count += 1
        name = f"host{self.count}"
        peer = PeerInfo(remote_address=name, hostname=name, broadcast_address=f"b{node}", http_port=1)
        producer = self.registry.identify(peer, self.now)
        self.entry(("client", "", ""), producer)
        self.last_update[name] = self.now
        return producer

    @rule(producer=producers)
    def ping(self, producer: Producer) -> None:
        self.registry.ping(producer, self.now)
        self.last_update[producer.peer.hostname] = self.now

    @rule(producer=producers, topic=TOPICS, channel=CHANNELS)
    def register(self, producer: Producer, topic: str, channel: str) -> None:
        self.registry.register(producer, topic, channel)
        if channel:
            self.entry(("channel", topic, channel), producer)
        self.entry(("topic", topic, ""), producer)

    @rule(producer=producers, topic=TOPICS, channel=CHANNELS)
    def unregister(self, producer: Producer, topic: str, channel: str) -> None:
        self.registry.unregister(producer, topic, channel)
        named = ("channel", topic, channel) if channel else ("topic", topic, "")
        for key, entries in self.model.items():
            if key == named or (not channel and key[:2] == ("channel", topic)):
                entries.pop(producer.peer.hostname, None)
        if self.model.get(named) == {} and (channel or topic).endswith("#ephemeral"):
            del self.model[named]

    @rule(producer=consumes(producers))
    def disconnect(self, producer: Producer) -> None:
        self.registry.remove(producer)
        for entries in self.model.values():
            entries.pop(producer.peer.hostname, None)

    @rule(topic=TOPICS, channel=CHANNELS)
    def create(self, topic: str, channel: str) -> None:
        self.registry.create(topic, channel)
        if channel:
            self.model.setdefault(("channel", topic, channel), {})
        self.model.setdefault(("topic", topic, ""), {})

    @rule(topic=TOPICS)
    def delete_topic(self, topic: str) -> None:
        self.registry.delete_topic(topic)
        self.model = {key: entries for key, entries in self.model.items() if key[1] != topic}

    @rule(topic=TOPICS, channel=st.sampled_from(["c", "d", "c#ephemeral"]))
    def delete_channel(self, topic: str, channel: str) -> None:
        found = self.registry.delete_channel(topic, channel)
        assert found == (self.model.pop(("channel", topic, channel), None) is not None)

    @rule(topic=TOPICS, node=st.sampled_from([1, 2]))
    def tombstone(self, topic: str, node: int) -> None:
        self.registry.tombstone(topic, f"b{node}:1", self.now)
        for name, entry in self.model.get(("topic", topic, ""), {}).items():
            if any(p.peer.hostname == name and p.peer.broadcast_address == f"b{node}" for p in self.known()):
                entry.tombstoned_ns = self.now

    @rule(step=st.sampled_from([1, 10, LIFETIME, INACTIVE, INACTIVE + 1]))
    def time_passes(self, step: int) -> None:
        self.now += step

    def known(self) -> list[Producer]:
        return [*self.registry.producers]

    def is_active(self, name: str) -> bool:
        return self.now - self.last_update[name] <= INACTIVE

    def is_tombstoned(self, entry: Entry) -> bool:
        return entry.tombstoned_ns is not None and self.now - entry.tombstoned_ns < LIFETIME

    @invariant()
    def answers_agree(self) -> None:
        known_topics = {key[1] for key in self.model if key[0] == "topic"}
        assert set(json.loads(self.registry.topics_json())["topics"]) == known_topics
        for topic in ("a", "b", "t#ephemeral"):
            self.check_topic(topic)
        self.check_nodes()
        self.check_debug()

    def check_topic(self, topic: str) -> None:
        channels = {key[2] for key in self.model if key[:2] == ("channel", topic)}
        assert set(json.loads(self.registry.channels_json(topic))["channels"]) == channels
        found = self.registry.lookup_json(topic, self.now)
        entries = self.model.get(("topic", topic, ""))
        if entries is None:
            assert found is None
            return
        answer: dict[str, Any] = json.loads(found or b"")
        assert set(answer["channels"]) == channels
        assert sorted(producer["hostname"] for producer in answer["producers"]) == sorted(
            name for name, entry in entries.items() if self.is_active(name) and not self.is_tombstoned(entry)
        )

    def check_nodes(self) -> None:
        nodes = json.loads(self.registry.nodes_json(self.now))["producers"]
        assert [node["hostname"] for node in nodes] == [
            name for name in self.model.get(("client", "", ""), {}) if self.is_active(name)
        ]
        for node in nodes:
            assert dict(zip(node["topics"], node["tombstones"], strict=True)) == {
                key[1]: self.is_tombstoned(entries[node["hostname"]])
                for key, entries in self.model.items()
                if key[0] == "topic" and node["hostname"] in entries
            }

    def check_debug(self) -> None:
        found = json.loads(answers.debug(self.registry.debug_entries()))
        assert {key: {entry["hostname"] for entry in entries} for key, entries in found.items()} == {
            ":".join(key): set(entries) for key, entries in self.model.items() if entries
        }

    @invariant()
    def books_are_balanced(self) -> None:
        for producer in self.known():
            assert producer.registrations == len(producer.topics) + sum(map(len, producer.channels.values()))
            assert all(producer.channels.values())


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)
