"""Which nsqd there are and which topics they have, from nsqlookupd or from the addresses given.

A node is named as nsqlookupd names it, `broadcast address:HTTP port`, also where its own address was given:
then it says itself how it is called. So a query may go over from one way of finding nodes to the other.
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
from nsparq.spark.cluster.http_client import Access, Client, Refused, Unreachable, base_url
from nsparq.spark.options import NsqOptions

__all__ = ["Cluster", "Found", "Node"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREADS: Final = 64
FEW: Final = 4
"""More topics than these are not looked up one by one: all nodes with all their topics are one request."""


class Node(NamedTuple):
    """One nsqd."""

    name: str
    """How it is called in offsets and rows: `host:http_port`."""
    url: str
    """Where its HTTP API is."""
    tcp_address: str
    """`host:port` for NSQ's own protocol; empty if unknown."""
    is_given: bool = False
    """Its own address was given, not that of an nsqlookupd that knows it."""


class Found(NamedTuple):
    """What could be seen just now. A node that is missing may be gone, or only not reachable."""

    nodes: dict[str, Node]
    """By name."""
    topics: dict[str, frozenset[str]]
    """Names of the nodes that are said to have it, by topic; for named topics, all nodes whose own address
    was given are among them, whether they have it yet or not."""
    failures: list[str]
    """Why somebody who was asked has not answered."""
    answers: int
    """How many have."""

    @property
    def is_complete(self) -> bool:
        return not self.failures


Topics = list[tuple[Node, Sequence[str]]]
"""What somebody says: nodes, and those of the wanted topics that they have."""


class Cluster:
    """Asks nsqlookupds and nsqds. Keeps a connection to each, so that asking again costs little.

    Used by one thread, which asks all of them side by side. Nobody's absence is an error here; it is logged
    when it begins and when it ends.
    """

    def __init__(self, options: NsqOptions) -> None:
        self._options = options
        self._is_wanted = options.topic_filter()
        self._access = Access.of(options)
        self._lookupds = [Client(address, self._access) for address in options.nsqlookupd]
        self._given = [base_url(address) for address in options.nsqd]
        self._known: dict[str, Node] = {}
        """Nodes whose own addresses were given, by URL, once they have said their names."""
        self._clients: dict[str, Client] = {}
        self._away: set[str] = set()

    def close(self) -> None:
        for client in (*self._lookupds, *self._clients.values()):
            client.close()

    def abort(self) -> None:
        """Break off what another thread is asking. To be closed then."""
        for client in (*self._lookupds, *[*self._clients.values()]):
            client.abort()

    def client(self, node: Node) -> Client:
        """The connection to a node's HTTP API that is kept here."""
        client = self._clients.get(node.url)
        if client is None:
            client = self._clients[node.url] = Client(node.url, self._access)
        return client

    def look(self) -> Found:
        """Who is there now, and which of the wanted topics they have."""
        nodes: dict[str, Node] = {}
        topics: dict[str, set[str]] = {topic: set() for topic in self._options.wanted_topics}
        failures: list[str] = []
        asked: list[tuple[str, str, Callable[[], Topics]]] = [
            *((one.url, "nsqlookupd", partial(self._ask_lookupd, one)) for one in self._lookupds),
            *((url, "nsqd", partial(self._ask_nsqd, url)) for url in self._given),
        ]
        for (url, what, _), answer in zip(asked, _side_by_side([ask for *_, ask in asked]), strict=True):
            if isinstance(answer, NsparqError):
                failures.append(str(answer))
                self._note_absent(url, what, answer)
                # It stays known by the name that it had.
                if url in self._known:
                    nodes[self._known[url].name] = self._known[url]
                continue
            self._note_present(url)
            for node, names in answer:
                # Where its own address was given, that is where we can reach it.
                if node.is_given or node.name not in nodes:
                    nodes[node.name] = node
                for topic in names:
                    topics.setdefault(topic, set()).add(node.name)
        known = {topic: frozenset(names) for topic, names in topics.items()}
        return Found(nodes, known, failures, len(asked) - len(failures))

    def _ask_nsqd(self, url: str) -> Topics:
        node = self._identify(url)
        return [(node, self._topics_of(node))]

    def _ask_lookupd(self, lookupd: Client) -> Topics:
        options = self._options
        if options.topics_pattern is None and len(options.wanted_topics) <= FEW:
            return [
                (node, [topic])
                for topic in options.wanted_topics
                for one in lookupd.lookup(topic)
                if (node := _node_of(one))
            ]
        return [
            (node, [*filter(self._is_wanted, _topics_of(one))])
            for one in lookupd.nodes()
            if (node := _node_of(one))
        ]

    def nodes(self) -> list[Node]:
        """All nsqd, whatever topics they have: where a sink may publish. Raises Unreachable if nobody who
        was asked has answered."""
        found: dict[str, Node] = {}
        failures: list[Exception] = []
        asks: list[Callable[[], list[Node]]] = [
            *(partial(_nodes_of, lookupd) for lookupd in self._lookupds),
            *(partial(self._own_node, url) for url in self._given),
        ]
        for answer in _side_by_side(asks):
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

    def _own_node(self, url: str) -> list[Node]:
        return [self._identify(url)]

    def announce(self, topic: str, channel: str) -> None:
        """Tell all nsqlookupds of a channel: an nsqd that gets the topic later creates it with the topic, and
        so from the first message on. Does what it can."""
        for lookupd in self._lookupds:
            try:
                lookupd.create_channel(topic, channel)
            except (Unreachable, Refused) as error:
                logger.info("nsqlookupd does not take the channel %s/%s: %s", topic, channel, error)

    def _identify(self, url: str) -> Node:
        """How the nsqd at this address is called. Asked each time: another may be there now."""
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = Client(url, self._access)
        try:
            info = client.info()
            node = _node_of(info | {"broadcast_address": info.get("broadcast_address") or ""})
        except Refused as refused:
            if refused.status not in (401, 403):
                raise
            # Without the permission to look it is called by its address.
            node = None
        if node is None:
            name = without_secrets(url).partition("://")[2]
            node = Node(name, url, "")
        node = node._replace(url=url, is_given=True)
        self._known[url] = node
        return node

    def _topics_of(self, node: Node) -> Sequence[str]:
        pattern = self._options.topics_pattern
        if pattern is None:
            return self._options.wanted_topics
        stats = self.client(node).stats()
        return [name for one in stats if pattern.fullmatch(name := str(one["topic_name"]))]

    def _note_absent(self, url: str, what: str, error: NsparqError) -> None:
        if url not in self._away:
            self._away.add(url)
            logger.warning("%s cannot be asked, and is tried again: %s", what, error)

    def _note_present(self, url: str) -> None:
        if url in self._away:
            self._away.discard(url)
            logger.info("%s answers again", without_secrets(url))


def _nodes_of(lookupd: Client) -> list[Node]:
    return [node for one in lookupd.nodes() if (node := _node_of(one))]


def _side_by_side(asks: Sequence[Callable[[], T]]) -> list[T | Unreachable | Refused]:
    """What each of them gives, or why it does not: somebody who hangs does not delay the others as well."""

    def answer(ask: Callable[[], T]) -> T | Unreachable | Refused:
        try:
            return ask()
        except (Unreachable, Refused) as error:
            return error

    if len(asks) < 2:
        return [answer(ask) for ask in asks]
    with ThreadPoolExecutor(min(len(asks), THREADS), "nsq-look") as threads:
        return [*threads.map(answer, asks)]


def _topics_of(producer: dict[str, Any]) -> list[str]:
    """What nsqlookupd's /nodes says an nsqd has, but for what is about to leave it."""
    topics, leaving = producer.get("topics") or (), producer.get("tombstones") or ()
    return [str(topic) for topic, is_leaving in zip_longest(topics, leaving) if topic and not is_leaving]


def _node_of(producer: dict[str, Any]) -> Node | None:
    """From what nsqlookupd, or nsqd's /info, says about an nsqd."""
    host = producer.get("broadcast_address")
    name = heard_address(host, producer.get("http_port"))
    if name is None:
        logger.warning("an nsqd that cannot be: %.200r", producer)
        return None
    return Node(name, f"http://{name}", heard_address(host, producer.get("tcp_port")) or "")
