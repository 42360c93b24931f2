"""Finds topics, channels, nodes and consumers by a part of their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from nsparq.admin.collect.cluster import Cluster, Unreachable
from nsparq.admin.collect.merge import objects, text
from nsparq.admin.collect.watch import Watch

__all__ = ["FoundClient", "Results", "search"]

MAX_FOUND: Final = 50
"""Results of each kind."""
_NAMES: Final = ("client_id", "hostname", "remote_address", "user_agent", "auth_identity")


@dataclass(frozen=True, slots=True)
class FoundClient:
    """A consumer, and where it is connected."""

    topic: str
    channel: str
    node: str
    hostname: str
    address: str
    user_agent: str


@dataclass(slots=True)
class Results:
    """At most MAX_FOUND of each; `counts` has how many there are."""

    topics: list[str] = field(default_factory=list)
    channels: list[tuple[str, str]] = field(default_factory=list)
    nodes: list[tuple[str, str]] = field(default_factory=list)
    """Address and host name."""
    clients: list[FoundClient] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not any(self.counts.values())


async def search(cluster: Cluster, watch: Watch, words: str) -> Results:
    """`topic/channel` finds channels of a topic."""
    wanted = words.lower()
    topics = [name for name in watch.channels_of if wanted in name.lower()]
    channels = [
        (topic, name)
        for topic, names in watch.channels_of.items()
        for name in names
        if wanted in name.lower() or ("/" in wanted and wanted in f"{topic}/{name}".lower())
    ]
    nodes = [
        (address, state.node.hostname)
        for address, state in watch.nodes.items()
        if wanted in address.lower() or wanted in state.node.hostname.lower()
    ]
    clients, errors = await _clients(cluster, watch, wanted)
    found = {"topics": len(topics), "channels": len(channels), "nodes": len(nodes), "clients": len(clients)}
    return Results(
        topics[:MAX_FOUND], channels[:MAX_FOUND], nodes[:MAX_FOUND], clients[:MAX_FOUND], found, errors
    )


async def _clients(cluster: Cluster, watch: Watch, wanted: str) -> tuple[list[FoundClient], list[str]]:
    """The polls keep no names of consumers, so the nodes are asked."""
    nodes = [state.node for state in watch.nodes.values() if not state.error]
    if not nodes:
        return [], []
    try:
        stats = await cluster.stats(nodes, clients=True)
    except Unreachable as error:
        return [], [str(error)]
    found = [
        FoundClient(
            text(topic, "topic_name"),
            text(channel, "channel_name"),
            one.node.address,
            text(client, "hostname"),
            text(client, "remote_address"),
            text(client, "user_agent"),
        )
        for one in stats.value
        for topic in one.topics
        for channel in objects(topic, "channels")
        for client in objects(channel, "clients")
        if any(wanted in text(client, name).lower() for name in _NAMES)
    ]
    return found, stats.errors
