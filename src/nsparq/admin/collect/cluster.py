"""The cluster, as its nsqlookupds and nsqds tell it: all are asked at once, and their answers put together.

With nsqlookupds they know the topics and who has them; with nsqds alone each is asked itself. Where some fail
the rest counts, and what failed is told along with it; only if all fail there is no result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

from nsparq.addresses import heard_address
from nsparq.admin.collect.merge import Node, NodeStats, mark_out_of_date, number, objects, text, texts
from nsparq.admin.collect.upstream import Answer, AskFailed, Refused, Secret, Upstream, Withheld, with_query
from nsparq.errors import NsparqError
from nsparq.secret_scope import SecretScope

__all__ = ["Cluster", "Found", "NotFound", "Unreachable"]

T = TypeVar("T")
S = TypeVar("S")

LOOKUPD: Final = "nsqlookupd"
NSQD: Final = "nsqd"


class Unreachable(NsparqError):
    """Nobody could be asked."""

    def __init__(self, kind: str, errors: Sequence[str]) -> None:
        super().__init__(f"failed to query any {kind}: " + "\n".join(errors))
        self.errors = tuple(errors)


class NotFound(NsparqError):
    """There is no such thing; the text is NSQ's code for it."""

    @property
    def code(self) -> str:
        return str(self)


class Found(NamedTuple, Generic[T]):
    """What was found, and why it may not be all."""

    value: T
    errors: list[str]

    @property
    def message(self) -> str:
        """As NSQ words it."""
        return "WARNING: " + "; ".join(self.errors) if self.errors else ""


class Cluster:
    """Asks the daemons. `lookupds` may change while it is in use."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        lookupds: Iterable[str],
        nsqds: Iterable[str],
        secret: str = "",
        secret_for: Iterable[str] = (),
    ) -> None:
        self.upstream = upstream
        self.lookupds = tuple(lookupds)
        self.nsqds = tuple(nsqds)
        self._secret = secret
        """What nsqds are shown that we may show it to: see _secret_for()."""
        self._scope = SecretScope(secret_for)

    # What there is

    async def topics(self) -> Found[list[str]]:
        """Names, sorted. Raises Unreachable."""
        if self.lookupds:
            found = await self._ask_lookupds("/topics")
            names = {name for answer in found.value for name in texts(answer, "topics")}
        else:
            stats = await self._stats_of_configured()
            names = {text(topic, "topic_name") for one in stats.value for topic in one.topics}
            found = Found([], stats.errors)
        return Found(sorted(names), found.errors)

    async def inactive(self) -> Found[dict[str, list[str]]]:
        """Topics that no nsqd has, and their channels. Raises Unreachable."""
        if not self.lookupds:
            return Found({}, [])
        topics, nodes = await asyncio.gather(self.topics(), self.nodes())
        # Two questions to each nsqlookupd; NSQ's asks about every topic.
        produced = {name for node in nodes.value for name, is_dead in node.topics if not is_dead}
        names = [name for name in topics.value if name not in produced]
        channels = await self._each(names, self._channels, "")
        errors = list(dict.fromkeys(topics.errors + nodes.errors + channels.errors))
        return Found(dict(channels.value), errors)

    async def _channels(self, topic: str) -> tuple[str, list[str]]:
        found = await self._ask_lookupds("/channels", topic=topic)
        return topic, sorted({name for answer in found.value for name in texts(answer, "channels")})

    async def nodes(self) -> Found[list[Node]]:
        """Every nsqd, with its topics. Raises Unreachable."""
        if not self.lookupds:
            return await self._configured_nodes(with_topics=True)
        found = await self._each(self.lookupds, self._nodes_of, LOOKUPD)
        merged: dict[str, Node] = {}
        for nodes in found.value:
            for node in nodes:
                known = merged.get(node.tcp_address)
                merged[node.tcp_address] = node if known is None else _merged(known, node)
        everyone = sorted(merged.values(), key=lambda node: (node.hostname, node.address))
        return Found(mark_out_of_date(everyone), found.errors)

    async def _nodes_of(self, lookupd: str) -> list[Node]:
        said = await self.upstream.get_json(f"http://{lookupd}/nodes")
        return [_node(one, lookupd) for one in objects(_object(said), "producers")]

    async def producers(self, topic: str) -> Found[list[Node]]:
        """The nsqds that have the topic; none, if it is known all the same. Raises NotFound, Unreachable."""
        if not self.lookupds:
            stats = await self._stats_of_configured(topic=topic)
            having = [one.node for one in stats.value if any(_is_named(t, topic) for t in one.topics)]
            if not having:
                # Those that did not answer may have it.
                raise Unreachable(NSQD, stats.errors) if stats.errors else NotFound("TOPIC_NOT_FOUND")
            return Found(having, stats.errors)
        found = await self._each(self.lookupds, lambda lookupd: self._lookup(lookupd, topic), LOOKUPD)
        known = [nodes for nodes in found.value if nodes is not None]
        if not known:
            if found.errors:
                raise Unreachable(LOOKUPD, found.errors)
            raise NotFound("TOPIC_NOT_FOUND")
        merged = {node.tcp_address: node for nodes in known for node in nodes}
        return Found([*merged.values()], found.errors)

    async def _lookup(self, lookupd: str, topic: str) -> list[Node] | None:
        """None where the topic is not known."""
        try:
            said = await self.upstream.get_json(f"http://{lookupd}/lookup", topic=topic)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise
        return [_node(one, lookupd) for one in objects(_object(said), "producers")]

    async def node(self, address: str) -> tuple[Node, list[str]]:
        """The nsqd of this name, and what failed on the way. Raises NotFound, Unreachable."""
        found = await self.nodes()
        for node in found.value:
            if node.address == address:
                return node, found.errors
        raise NotFound("NODE_NOT_FOUND")

    # Figures

    async def stats(
        self, nodes: Iterable[Node], *, topic: str = "", channel: str = "", clients: bool = False
    ) -> Found[list[NodeStats]]:
        """What each of the nsqds says about itself. Raises Unreachable."""
        wanted = {"topic": topic, "channel": channel}
        query = {name: value for name, value in wanted.items() if value}
        query |= {"include_clients": str(clients).lower(), "include_mem": "false"}

        async def ask(node: Node) -> NodeStats:
            said = await self.get(node, "/stats", format="json", **query)
            return NodeStats.parse(node, _object(said))

        return await self._each(nodes, ask, NSQD)

    # Asking one nsqd

    async def get(self, node: Node, path: str, **query: str) -> Any:
        """Raises AskFailed."""
        return (await self.ask(node, "GET", path, **query)).json()

    async def ask(
        self, node: Node, method: str, path: str, body: bytes | None = None, /, **query: str
    ) -> Answer:
        """Every request to an nsqd goes through here, with the secret if it may have it. Raises AskFailed."""
        url = with_query(f"{_url(node)}{path}", query)
        try:
            return await self.upstream.ask(method, url, body, secret=self._secret_for(node))
        except Withheld as error:
            raise AskFailed(
                f"{node.address} asks for a secret, and nsqadmin has none for it: --auth-secret is sent only "
                "to nodes that --nsqd-http-address or --auth-secret-for names, and to those with a "
                "certificate of --http-client-tls-root-ca-file"
            ) from error

    def _secret_for(self, node: Node) -> Secret:
        """Anybody can register a node at nsqlookupd. So it takes more than that to be shown the secret."""
        is_ours = bool(node.configured) or self._scope.covers(node.broadcast_address, node.http_port)
        return Secret(self._secret, needs_proof=not is_ours)

    async def _stats_of_configured(self, topic: str = "") -> Found[list[NodeStats]]:
        nodes = await self._configured_nodes()
        found = await self.stats(nodes.value, topic=topic)
        return Found(found.value, nodes.errors + found.errors)

    async def _configured_nodes(self, *, with_topics: bool = False) -> Found[list[Node]]:
        found = await self._each(self.nsqds, self._introduce, NSQD)
        nodes = mark_out_of_date({node.address: node for node in found.value}.values())
        if not with_topics:
            return Found(nodes, found.errors)
        stats = await self.stats(nodes)
        topics = {one.node.address: one.topics for one in stats.value}
        complete = [
            replace(node, topics=tuple((text(t, "topic_name"), False) for t in topics.get(node.address, ())))
            for node in nodes
        ]
        return Found(complete, found.errors + stats.errors)

    async def _introduce(self, address: str) -> Node:
        said = await self.upstream.ask("GET", f"http://{address}/info", secret=Secret(self._secret))
        return replace(_node(_object(said.json()), ""), configured=address)

    # Changes

    async def post_to_lookupds(self, path: str, **query: str) -> Found[list[str]]:
        """Those that did it. Raises nothing: what failed is told."""

        async def post(lookupd: str) -> str:
            await self.upstream.ask("POST", f"http://{lookupd}{path}?{urlencode(query)}")
            return lookupd

        return await self._each(self.lookupds, post, "")

    async def post_to_nodes(self, nodes: Iterable[Node], path: str, **query: str) -> Changed:
        """Have each of the nsqds do it. What failed is told."""
        missing: list[str] = []

        async def post(node: Node) -> str:
            try:
                await self.ask(node, "POST", path, **query)
            except Refused as refused:
                if refused.status == 404:
                    missing.append(refused.code)
                raise
            return node.address

        found = await self._each(nodes, post, "")
        return Changed(found.value, found.errors, missing)

    # Asking several

    async def _ask_lookupds(self, path: str, **query: str) -> Found[list[Mapping[str, Any]]]:
        async def ask(lookupd: str) -> Mapping[str, Any]:
            return _object(await self.upstream.get_json(f"http://{lookupd}{path}", **query))

        return await self._each(self.lookupds, ask, LOOKUPD)

    async def _each(self, of: Iterable[S], ask: Callable[[S], Awaitable[T]], kind: str) -> Found[list[T]]:
        """Ask about each, all at once. With `kind`, raises Unreachable if no answer comes."""
        asked: Collection[S] = [*of]
        values: list[T] = []
        errors: list[str] = []
        for outcome in await asyncio.gather(*(ask(one) for one in asked), return_exceptions=True):
            if isinstance(outcome, AskFailed | Unreachable):
                errors.append(str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                values.append(outcome)
        if kind and errors and not values:
            raise Unreachable(kind, errors)
        return Found(values, errors)


class Changed(NamedTuple):
    """What came of a change on several nsqds."""

    done: list[str]
    """Where it worked."""
    errors: list[str]
    missing: list[str]
    """NSQ's codes for what was not there, of those among the errors that say so."""


def _object(said: Any) -> Mapping[str, Any]:
    if not isinstance(said, dict):
        raise AskFailed("the answer is not what NSQ would say")
    return said


def _url(node: Node) -> str:
    """Where its HTTP API is. Raises AskFailed for a node that cannot be anywhere."""
    if node.configured:
        return f"http://{node.configured}"
    address = heard_address(node.broadcast_address, node.http_port)
    if address is None:
        raise AskFailed(f"{node.address}: nsqlookupd names an nsqd at an address that cannot be")
    return f"http://{address}"


def _is_named(topic: Mapping[str, Any], name: str) -> bool:
    return topic.get("topic_name") == name


def _node(said: Mapping[str, Any], lookupd: str) -> Node:
    names = texts(said, "topics")
    tombstones = said.get("tombstones")
    dead = [one is True for one in tombstones] if isinstance(tombstones, list) else []
    dead += [False] * (len(names) - len(dead))
    remote = text(said, "remote_address")
    return Node(
        # Very old ones said `address` alone.
        broadcast_address=text(said, "broadcast_address") or text(said, "address"),
        hostname=text(said, "hostname"),
        tcp_port=number(said, "tcp_port"),
        http_port=number(said, "http_port"),
        version=text(said, "version"),
        remote_address=remote,
        remote_addresses=(f"{lookupd}/{remote}",) if lookupd else (),
        topics=tuple(sorted(zip(names, dead, strict=False))),
        topology_zone=text(said, "topology_zone"),
        topology_region=text(said, "topology_region"),
    )


def _merged(known: Node, other: Node) -> Node:
    """Of one nsqd, what two nsqlookupds say. Tombstoned by either is tombstoned."""
    topics = dict(known.topics)
    for name, is_dead in other.topics:
        topics[name] = topics.get(name, False) or is_dead
    return replace(
        known,
        remote_addresses=known.remote_addresses + other.remote_addresses,
        topics=tuple(sorted(topics.items())),
    )
