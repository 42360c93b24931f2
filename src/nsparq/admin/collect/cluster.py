"""The cluster: requests to all nsqlookupds and nsqds at once, and their answers merged.

nsqlookupds know the topics and the nsqds that have them; without nsqlookupds every nsqd is asked.
If some daemons fail, the result has the others' answers and a list of errors. It is an error only
if all fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

from nsparq.addresses import heard_address
from nsparq.admin.collect.fields import objects, text, texts
from nsparq.admin.collect.merge import (
    Node,
    NodeStats,
    channel_total,
    mark_out_of_date,
    node_channel,
    node_topic,
    topic_total,
)
from nsparq.admin.collect.upstream import (
    Answer,
    BadStatus,
    RequestFailed,
    Secret,
    SecretWithheld,
    Upstream,
    with_query,
)
from nsparq.http.api import ApiError
from nsparq.secret_scope import SecretScope

__all__ = ["Cluster", "Found", "NotFound", "Recalled", "Unreachable"]

T = TypeVar("T")
S = TypeVar("S")

LOOKUPD: Final = "nsqlookupd"
NSQD: Final = "nsqd"
ONE_NAME: Final = "both announce"
"""In the error for two nsqds with the same address."""
NOT_PRIMARY: Final = "NOT_PRIMARY"
"""The code of a node that follows the primary of its cluster."""


class Unreachable(ApiError):
    """No daemon of a kind gave a usable answer."""

    def __init__(self, kind: str, errors: Sequence[str]) -> None:
        self.reason = f"failed to query any {kind}: " + "\n".join(errors)
        super().__init__(502, f"UPSTREAM_ERROR: {self.reason}")
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return self.reason


class NotFound(ApiError):
    """There is no such topic, channel or node. The code is NSQ's."""

    def __init__(self, code: str) -> None:
        super().__init__(404, code)


class Recalled(NamedTuple):
    """An nsqd, as the last poll left it."""

    node: Node
    error: str
    """Why it did not answer the poll; empty if it did."""


class Found(NamedTuple, Generic[T]):
    """A result, and the errors of the daemons whose answers are missing in it."""

    value: T
    errors: list[str]

    @property
    def message(self) -> str:
        """As NSQ words it."""
        return "WARNING: " + "; ".join(self.errors) if self.errors else ""


class Cluster:
    """`lookupds` may change while it is in use."""

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
        """For nsqds that may have it: see _secret_for()."""
        self._scope = SecretScope(secret_for)
        self.recall: Callable[[str], Iterable[Recalled]] = lambda topic: ()
        """The nsqds that had the topic at the last poll; every nsqd if it is empty. nsqlookupd no
        longer lists an nsqd that has lost the connection to it, and that nsqd still has its
        topics."""

    # Topics and nodes

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
        """Topics that only nsqlookupd knows, and their channels. Raises Unreachable."""
        if not self.lookupds:
            return Found({}, [])
        topics, nodes = await asyncio.gather(self.topics(), self.nodes())
        # Two requests to each nsqlookupd; NSQ's nsqadmin asks about every topic.
        produced = {name for node in nodes.value for name, is_dead in node.topics if not is_dead}
        names = [name for name in topics.value if name not in produced]
        channels = await self._each(names, self._channels, "")
        errors = list(dict.fromkeys(topics.errors + nodes.errors + channels.errors))
        return Found(dict(channels.value), errors)

    async def _channels(self, topic: str) -> tuple[str, list[str]]:
        found = await self._ask_lookupds("/channels", topic=topic)
        return topic, sorted({name for answer in found.value for name in texts(answer, "channels")})

    async def nodes(self) -> Found[list[Node]]:
        """Every nsqd. Only nsqlookupds report its topics: see nodes_with_topics(). Raises
        Unreachable."""
        if not self.lookupds:
            return await self._configured_nodes()
        found = await self._each(self.lookupds, self._nodes_of, LOOKUPD)
        merged: dict[str, Node] = {}
        errors = [*found.errors]
        for nodes in found.value:
            for node in nodes:
                known = merged.get(node.tcp_address)
                if known is not None and known.hostname != node.hostname:
                    errors.append(_one_name(known.hostname, node.hostname, node.tcp_address))
                merged[node.tcp_address] = node if known is None else known.joined(node)
        everyone = sorted(merged.values(), key=lambda node: (node.hostname, node.address))
        return Found(mark_out_of_date(everyone), list(dict.fromkeys(errors)))

    async def nodes_with_topics(self) -> Found[list[Node]]:
        """Without nsqlookupds every nsqd is asked for its stats too. Raises Unreachable."""
        nodes = await self.nodes()
        if self.lookupds:
            return nodes
        stats = await self.stats(nodes.value)
        described = {one.node.address: one.node for one in stats.value}
        found = [described.get(node.address, node) for node in nodes.value]
        return Found(found, nodes.errors + stats.errors)

    async def _nodes_of(self, lookupd: str) -> list[Node]:
        answer = await self.upstream.get_json(f"http://{lookupd}/nodes")
        return [Node.parse(one, lookupd) for one in objects(_object(answer), "producers")]

    async def producers(self, topic: str) -> Found[list[Node]]:
        """The nsqds that have the topic; none for an inactive topic. Raises NotFound,
        Unreachable."""
        if not self.lookupds:
            stats = await self._stats_of_configured(topic=topic)
            having = [one.node for one in stats.value if any(_is_named(t, topic) for t in one.topics)]
            if not having:
                # An nsqd that did not answer may have it.
                raise Unreachable(NSQD, stats.errors) if stats.errors else NotFound("TOPIC_NOT_FOUND")
            return Found(having, stats.errors)
        found = await self._each(self.lookupds, lambda lookupd: self._lookup(lookupd, topic), LOOKUPD)
        known = [nodes for nodes in found.value if nodes is not None]
        merged = {node.tcp_address: node for nodes in known for node in nodes}
        unlisted = await self._unlisted(topic, merged)
        errors = found.errors + unlisted.errors
        if not known and not unlisted.value:
            raise Unreachable(LOOKUPD, errors) if errors else NotFound("TOPIC_NOT_FOUND")
        return Found([*merged.values(), *unlisted.value], errors)

    async def _unlisted(self, topic: str, listed: Collection[str]) -> Found[list[Node]]:
        """The nsqds that have the topic although no nsqlookupd lists them. The errors name them,
        too."""

        async def ask(one: Recalled) -> Node | None:
            if one.error:
                raise RequestFailed(f"{one.node.address}: {one.error}")
            answer = await self.get(one.node, "/stats", format="json", topic=topic, include_clients="false")
            return (
                one.node if any(_is_named(its, topic) for its in objects(_object(answer), "topics")) else None
            )

        recalled = [one for one in self.recall(topic) if one.node.tcp_address not in listed]
        found = await self._each(recalled, ask, "")
        having = [node for node in found.value if node is not None]
        unlisted = [f"{node.address} has the topic, but no nsqlookupd lists it" for node in having]
        return Found(having, unlisted + found.errors)

    async def having(self, topic: str) -> Found[list[Node]]:
        """The nsqds that have the topic, at least one. Raises NotFound, Unreachable."""
        found = await self.producers(topic)
        if not found.value:
            raise Unreachable(NSQD, found.errors) if found.errors else NotFound("NO_PRODUCERS")
        return found

    async def _lookup(self, lookupd: str, topic: str) -> list[Node] | None:
        """None if this nsqlookupd does not know the topic."""
        try:
            answer = await self.upstream.get_json(f"http://{lookupd}/lookup", topic=topic)
        except BadStatus as error:
            if error.status == 404:
                return None
            raise
        return [Node.parse(one, lookupd) for one in objects(_object(answer), "producers")]

    async def node(self, address: str) -> tuple[Node, list[str]]:
        """The nsqd of this address, and errors of others. Raises NotFound, Unreachable."""
        found = await self.nodes()
        for node in found.value:
            if node.address == address:
                return node, found.errors
        for one in self.recall(""):
            if one.node.address == address:
                return one.node, [*found.errors, f"no nsqlookupd lists {address}"]
        raise Unreachable(LOOKUPD, found.errors) if found.errors else NotFound("NODE_NOT_FOUND")

    # Statistics

    async def topic(self, name: str) -> Found[dict[str, Any]]:
        """A topic over all nodes, as NSQ's nsqadmin answers it. Raises NotFound, Unreachable."""
        stats = await self._stats_of_producers(name)
        now_s = time.time()
        parts = [
            node_topic(one.node, topic, now_s)
            for one in stats.value
            for topic in one.topics
            if _is_named(topic, name)
        ]
        if not parts and stats.errors:
            raise Unreachable(NSQD, stats.errors)
        return Found(topic_total(name, parts), stats.errors)

    async def channel(self, topic: str, name: str) -> Found[dict[str, Any]]:
        """A channel over all nodes, as NSQ's nsqadmin answers it. Raises NotFound, Unreachable."""
        stats = await self._stats_of_producers(topic, name, clients=True)
        now_s = time.time()
        parts = [
            node_channel(one.node, topic, channel, now_s, clients=True)
            for one in stats.value
            for its_topic in one.topics
            if _is_named(its_topic, topic)
            for channel in objects(its_topic, "channels")
            if text(channel, "channel_name") == name
        ]
        if not parts:
            # A node that did not answer may have it.
            raise Unreachable(NSQD, stats.errors) if stats.errors else NotFound("CHANNEL_NOT_FOUND")
        return Found(channel_total(topic, name, parts), stats.errors)

    async def node_stats(self, address: str) -> Found[NodeStats]:
        """The /stats of one nsqd. Raises NotFound, Unreachable."""
        node, errors = await self.node(address)
        stats = await self.stats([node], clients=True)
        return Found(stats.value[0], errors + stats.errors)

    async def _stats_of_producers(
        self, topic: str, channel: str = "", *, clients: bool = False
    ) -> Found[list[NodeStats]]:
        producers = await self.having(topic)
        stats = await self.stats(producers.value, topic=topic, channel=channel, clients=clients)
        return Found(stats.value, producers.errors + stats.errors)

    async def stats(
        self, nodes: Iterable[Node], *, topic: str = "", channel: str = "", clients: bool = False
    ) -> Found[list[NodeStats]]:
        """The /stats of each of the nsqds. Raises Unreachable."""
        wanted = {"topic": topic, "channel": channel}
        query = {name: value for name, value in wanted.items() if value}
        query |= {"include_clients": str(clients).lower(), "include_mem": "false"}

        async def ask(node: Node) -> NodeStats:
            try:
                answer = await self.get(node, "/stats", format="json", **query)
            except BadStatus as error:
                if error.code != NOT_PRIMARY:
                    raise
                # It keeps a copy of another node's data, and serves nothing itself.
                answer = {"replication": await self.get(node, "/replication")}
            return NodeStats.parse(node, _object(answer))

        return await self._each(nodes, ask, NSQD)

    # Requests to one nsqd

    async def get(self, node: Node, path: str, **query: str) -> Any:
        """Raises RequestFailed."""
        return (await self.ask(node, "GET", path, **query)).json()

    async def ask(
        self, node: Node, method: str, path: str, body: bytes | None = None, /, **query: str
    ) -> Answer:
        """A request to an nsqd, with the secret if the node may have it. Raises RequestFailed."""
        url = with_query(f"{_url(node)}{path}", query)
        try:
            return await self.upstream.ask(method, url, body, secret=self._secret_for(node))
        except SecretWithheld as error:
            raise RequestFailed(
                f"{node.address} requires a secret, and nsqadmin has none for it: --auth-secret is sent only "
                "to nodes named by --nsqd-http-address or --auth-secret-for, and to nodes with a certificate "
                "of --http-client-tls-root-ca-file"
            ) from error

    def _secret_for(self, node: Node) -> Secret:
        """Anybody can register a node at nsqlookupd, so that alone does not earn the secret."""
        is_ours = bool(node.configured) or self._scope.covers(node.broadcast_address, node.http_port)
        return Secret(self._secret, needs_proof=not is_ours)

    async def _stats_of_configured(self, topic: str = "") -> Found[list[NodeStats]]:
        nodes = await self._configured_nodes()
        found = await self.stats(nodes.value, topic=topic)
        return Found(found.value, nodes.errors + found.errors)

    async def _configured_nodes(self) -> Found[list[Node]]:
        found = await self._each(self.nsqds, self._ask_info, NSQD)
        merged: dict[str, Node] = {}
        errors = [*found.errors]
        for node in found.value:
            known = merged.setdefault(node.address, node)
            if (known.hostname, known.start_time) != (node.hostname, node.start_time):
                errors.append(_one_name(known.configured, node.configured, node.address))
        return Found(mark_out_of_date(merged.values()), errors)

    async def _ask_info(self, address: str) -> Node:
        answer = await self.upstream.ask("GET", f"http://{address}/info", secret=Secret(self._secret))
        return replace(Node.parse(_object(answer.json())), configured=address)

    # Changes

    async def post_to_lookupds(self, path: str, **query: str) -> Found[list[str]]:
        """Returns the nsqlookupds that did it, and errors of the others."""

        async def post(lookupd: str) -> str:
            await self.upstream.ask("POST", f"http://{lookupd}{path}?{urlencode(query)}")
            return lookupd

        return await self._each(self.lookupds, post, "")

    async def post_to_nodes(self, nodes: Iterable[Node], path: str, **query: str) -> Changed:
        """Errors are part of the result."""
        missing: list[str] = []

        async def post(node: Node) -> str:
            try:
                await self.ask(node, "POST", path, **query)
            except BadStatus as error:
                if error.status == 404:
                    missing.append(error.code)
                raise
            return node.address

        found = await self._each(nodes, post, "")
        return Changed(found.value, found.errors, missing)

    # Requests to several

    async def _ask_lookupds(self, path: str, **query: str) -> Found[list[Mapping[str, Any]]]:
        async def ask(lookupd: str) -> Mapping[str, Any]:
            return _object(await self.upstream.get_json(f"http://{lookupd}{path}", **query))

        return await self._each(self.lookupds, ask, LOOKUPD)

    async def _each(self, of: Iterable[S], ask: Callable[[S], Awaitable[T]], kind: str) -> Found[list[T]]:
        """All at once. With `kind`, raises Unreachable if all fail."""
        asked: Collection[S] = [*of]
        values: list[T] = []
        errors: list[str] = []
        for outcome in await asyncio.gather(*(ask(one) for one in asked), return_exceptions=True):
            if isinstance(outcome, RequestFailed | Unreachable):
                errors.append(str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                values.append(outcome)
        if kind and errors and not values:
            raise Unreachable(kind, errors)
        return Found(values, errors)


class Changed(NamedTuple):
    """The outcome of a change on several nsqds."""

    done: list[str]
    """Addresses of the nsqds where it worked."""
    errors: list[str]
    missing: list[str]
    """NSQ's codes, of those errors that say that the topic or channel is not there."""


def _one_name(first: str, second: str, address: str) -> str:
    return (
        f"{first} and {second} {ONE_NAME} {address}: only one of them is shown; give each nsqd its own "
        "--broadcast-address"
    )


def _object(answer: Any) -> Mapping[str, Any]:
    if not isinstance(answer, dict):
        raise RequestFailed("the response is not from an NSQ daemon")
    return answer


def _url(node: Node) -> str:
    """The URL of its HTTP API. Raises RequestFailed for an invalid address."""
    if node.configured:
        return f"http://{node.configured}"
    address = heard_address(node.broadcast_address, node.http_port)
    if address is None:
        raise RequestFailed(f"{node.address}: nsqlookupd reports an invalid address")
    return f"http://{address}"


def _is_named(topic: Mapping[str, Any], name: str) -> bool:
    return topic.get("topic_name") == name
