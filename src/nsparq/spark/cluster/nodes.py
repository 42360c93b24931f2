"""Finds the nsqd and their topics: by asking nsqlookupd, or at addresses given by the user.

A node's name is what nsqlookupd calls it, `broadcast address:HTTP port`. An nsqd whose address was
given reports the same name in /info. So a query can change from one way of finding nodes to the
other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from typing import Any, Final, NamedTuple, TypeVar

from nsparq.addresses import heard_address
from nsparq.errors import NsparqError
from nsparq.fetch import without_secrets
from nsparq.spark.cluster.api import Client, valid_answer
from nsparq.spark.cluster.http_client import Access, Refused, Unreachable, base_url
from nsparq.spark.options import NsqOptions

__all__ = ["Cluster", "Found", "Node", "identify", "known_nodes"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREADS: Final = 64
MAX_LOOKUPS: Final = 4
"""With more topics than this, one request for all nodes replaces one lookup per topic."""


class Node(NamedTuple):
    name: str
    """Its name in offsets and rows: `host:http_port`."""
    url: str
    tcp_address: str
    """`host:port` for NSQ's TCP protocol; empty if unknown."""
    is_given: bool = False
    """The user gave the address of this nsqd (option nsqd)."""
    cluster: str = ""
    """The nodes of a replicated nsqd have this in common; empty if it is not replicated, or
    unknown."""
    is_serving: bool = True
    """False for a node that only keeps a copy."""


class Found(NamedTuple):
    """One look at the cluster. A missing node may be gone, or just unreachable."""

    nodes: dict[str, Node]
    """By name."""
    topics: dict[str, frozenset[str]]
    """Names of the nodes that have a topic, by topic. For topics named in the options they include
    all nodes whose address was given, whether these have the topic yet or not."""
    failures: list[str]
    answers: int

    @property
    def is_complete(self) -> bool:
        return not self.failures


NodeTopics = list[tuple[Node, Sequence[str]]]
"""Nodes, and the wanted topics that each has."""


class Cluster:
    """Asks nsqlookupd and nsqd, all at the same time, over connections that stay open.

    Only one thread may use it. A daemon that is away is not an error; its absence is logged when it
    begins and when it ends.
    """

    def __init__(self, options: NsqOptions) -> None:
        self._options = options
        self._is_wanted = options.topic_filter()
        self._access = Access.of(options)
        self._lookupds = [Client(address, self._access) for address in options.nsqlookupd]
        self._given = [base_url(address) for address in options.nsqd]
        self._identified: dict[str, Node] = {}
        """Nodes whose address was given, by URL, as they last identified themselves."""
        self._clients: dict[str, Client] = {}
        self._away: set[str] = set()

    def close(self) -> None:
        for client in (*self._lookupds, *self._clients.values()):
            client.close()

    def abort(self) -> None:
        """Break off requests of another thread. Close the cluster afterwards."""
        for client in (*self._lookupds, *[*self._clients.values()]):
            client.abort()

    def client(self, node: Node) -> Client:
        return self._client(node.url)

    def _client(self, url: str) -> Client:
        if url not in self._clients:
            self._clients[url] = Client(url, self._access)
        return self._clients[url]

    def look(self) -> Found:
        """The nodes that can be found now, and their wanted topics."""
        nodes: dict[str, Node] = {}
        topics: dict[str, set[str]] = {topic: set() for topic in self._options.wanted_topics}
        failures: list[str] = []
        requests: list[tuple[str, str, Callable[[], NodeTopics]]] = [
            *((one.url, "nsqlookupd", partial(self._ask_lookupd, one)) for one in self._lookupds),
            *((url, "nsqd", partial(self._ask_nsqd, url)) for url in self._given),
        ]
        answers = _in_parallel([ask for *_, ask in requests])
        for (url, kind, _), answer in zip(requests, answers, strict=True):
            if isinstance(answer, NsparqError):
                failures.append(str(answer))
                self._note_absent(url, kind, answer)
                if url in self._identified:
                    # It keeps the name that it had.
                    nodes[self._identified[url].name] = self._identified[url]
                continue
            self._note_present(url)
            for node, names in answer:
                # A given address is one that we can reach, so it has precedence.
                if node.is_given or node.name not in nodes:
                    nodes[node.name] = node
                for topic in names:
                    topics.setdefault(topic, set()).add(node.name)
        found = {topic: frozenset(names) for topic, names in topics.items()}
        return Found(nodes, found, failures, len(requests) - len(failures))

    def _ask_nsqd(self, url: str) -> NodeTopics:
        node = self._identify(url)
        pattern = self._options.topics_pattern
        if pattern is None:
            return [(node, self._options.wanted_topics)]
        topics = self.client(node).stats()
        with valid_answer():
            return [(node, [*filter(pattern.fullmatch, (str(one["topic_name"]) for one in topics))])]

    def _ask_lookupd(self, lookupd: Client) -> NodeTopics:
        options = self._options
        if options.topics_pattern is None and len(options.wanted_topics) <= MAX_LOOKUPS:
            return [
                (node, [topic])
                for topic in options.wanted_topics
                for one in lookupd.lookup(topic)
                if (node := _node_of(one))
            ]
        found = lookupd.nodes()
        with valid_answer():
            return [
                (node, [*filter(self._is_wanted, _topics_of(one))])
                for one in found
                if (node := _node_of(one))
            ]

    def nodes(self) -> list[Node]:
        """All nsqd, whatever topics they have. Raises Unreachable if no daemon answers."""
        found: dict[str, Node] = {}
        failures: list[Exception] = []
        requests: list[Callable[[], list[Node]]] = [
            *(partial(known_nodes, lookupd) for lookupd in self._lookupds),
            *(partial(lambda url: [self._identify(url)], url) for url in self._given),
        ]
        for answer in _in_parallel(requests):
            if isinstance(answer, NsparqError):
                failures.append(answer)
                continue
            for node in answer:
                if node.is_given or node.name not in found:
                    found[node.name] = node
        for failure in failures:
            logger.warning("%s", failure)
        if not found and failures:
            raise Unreachable(f"no nsqd could be found: {failures[0]}") from failures[0]
        return [found[name] for name in sorted(found)]

    def announce(self, topic: str, channel: str) -> None:
        """Create a channel on all nsqlookupd. An nsqd that gets the topic later then creates the
        channel with the topic, before its first message. Failures are logged only."""
        for lookupd in self._lookupds:
            try:
                lookupd.create_channel(topic, channel)
            except (Unreachable, Refused) as error:
                logger.info("nsqlookupd does not register the channel %s/%s: %s", topic, channel, error)

    def _identify(self, url: str) -> Node:
        """Asks each time: another nsqd may have the address now."""
        node = self._identified[url] = identify(self._client(url))._replace(url=url, is_given=True)
        return node

    def _note_absent(self, url: str, kind: str, error: NsparqError) -> None:
        if url not in self._away:
            self._away.add(url)
            logger.warning("%s does not answer; trying again: %s", kind, error)

    def _note_present(self, url: str) -> None:
        if url in self._away:
            self._away.discard(url)
            logger.info("%s answers again", without_secrets(url))


def identify(client: Client) -> Node:
    """An nsqd by its own report. Without the permission to see that, its name is its address."""
    try:
        node = _node_of(client.info())
    except Refused as refused:
        if refused.status not in (401, 403):
            raise
        node = None
    return node or Node(without_secrets(client.url).partition("://")[2], client.url, "")


def known_nodes(lookupd: Client) -> list[Node]:
    return [node for one in lookupd.nodes() if (node := _node_of(one))]


def _in_parallel(requests: Sequence[Callable[[], T]]) -> list[T | Unreachable | Refused]:
    """The result or the error of each. A daemon that hangs does not delay the others."""

    def result(request: Callable[[], T]) -> T | Unreachable | Refused:
        try:
            return request()
        except (Unreachable, Refused) as error:
            return error

    if len(requests) < 2:
        return [result(request) for request in requests]
    with ThreadPoolExecutor(min(len(requests), THREADS), "nsq-look") as threads:
        return [*threads.map(result, requests)]


def _topics_of(producer: dict[str, Any]) -> list[str]:
    """Topics of an nsqd in nsqlookupd's /nodes, without those that have a tombstone."""
    topics, tombstones = producer.get("topics") or (), producer.get("tombstones") or ()
    return [str(topic) for topic, is_leaving in zip_longest(topics, tombstones) if topic and not is_leaving]


def _node_of(producer: dict[str, Any]) -> Node | None:
    """From an entry of nsqlookupd, or from nsqd's /info. None if the address is invalid. Raises
    Unreachable."""
    host = producer.get("broadcast_address")
    name = heard_address(host, producer.get("http_port"))
    if name is None:
        logger.warning("an nsqd with an invalid address: %.200r", producer)
        return None
    replication = producer.get("replication") or {}
    with valid_answer():
        return Node(
            name,
            f"http://{name}",
            heard_address(host, producer.get("tcp_port")) or "",
            cluster=str(replication.get("cluster", "")),
            is_serving=replication.get("role", "primary") == "primary",
        )
