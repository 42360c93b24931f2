"""Finds topics, channels, nodes and consumers of the last poll by a part of their names. Asks
nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from nsparq.admin.collect.watch import Watch

__all__ = ["FoundClient", "Results", "search"]

MAX_FOUND: Final = 50
"""Results of each kind."""


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

    @property
    def is_empty(self) -> bool:
        return not any(self.counts.values())


def search(watch: Watch, words: str) -> Results:
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
    clients = [*_clients(watch, wanted)]
    found = {"topics": len(topics), "channels": len(channels), "nodes": len(nodes), "clients": len(clients)}
    return Results(topics[:MAX_FOUND], channels[:MAX_FOUND], nodes[:MAX_FOUND], clients[:MAX_FOUND], found)


def _clients(watch: Watch, wanted: str) -> Iterator[FoundClient]:
    for state in watch.nodes.values():
        for (topic, channel, node, address), names in state.parts.client_names.items():
            if any(wanted in name.lower() for name in (address, *names)):
                yield FoundClient(topic, channel, node, names[0], address, names[1])
