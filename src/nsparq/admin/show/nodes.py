"""The pages of the nodes.

A node may have thousands of topics, and its whole /stats takes long to make and to read. So the
page of a node chooses the topics to show from the last poll, and asks the node for those alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nsparq.admin.collect.cluster import Found, Unreachable
from nsparq.admin.collect.fields import text
from nsparq.admin.collect.gather import Parts
from nsparq.admin.collect.merge import Node, node_topic
from nsparq.admin.collect.watch import NodeState
from nsparq.admin.routing import path_values
from nsparq.admin.show.order import Order, Paging
from nsparq.http.api import Request, Response

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["NodePages"]

MAX_NODES: Final = 200
"""Nodes on one page."""
MAX_TOPICS: Final = 20
MAX_ROWS: Final = 400
"""Rows of topics, channels and consumers on the page of a node."""


class _Topic(NamedTuple):
    """A topic of a node, at the last poll."""

    name: str
    depth: float
    message_count: float


class NodePages:
    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._watch = admin.watch

    async def all(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        words = request.parameters.get("q", "").strip()
        rows = [
            (state, self._watch.nodes_table.latest((address,)) or {})
            for address, state in self._watch.nodes.items()
            if words.lower() in f"{state.node.hostname} {address}".lower()
        ]
        columns: dict[str, Callable[[Any], Any]] = {
            "name": lambda row: row[0].node.address,
            "version": lambda row: row[0].node.version,
            "topics": lambda row: len(row[0].node.topics),
            **{figure: _figure(figure) for figure in self._watch.nodes_table.figures},
        }
        order = Order(request, columns)
        return self._admin.pages.render(
            request,
            "nodes.html",
            paging=Paging(request, order.sorted(rows), MAX_NODES),
            order=order,
            words=words,
            lookupds=self._admin.cluster.lookupds,
            has_clusters=any(state.replication for state in self._watch.nodes.values()),
        )

    async def one(self, request: Request) -> Response:
        (address,) = path_values(request)
        await self._watch.wait_for_first()
        state = self._watch.nodes.get(address)
        if state is None:
            # It has registered since the last poll, or there is no such node.
            node, errors = await self._admin.cluster.node(address)
            state = NodeState(node)
        else:
            errors = [] if state.left_s is None else [f"no nsqlookupd lists {address}"]
        words = request.parameters.get("q", "").strip()
        columns: dict[str, Callable[[_Topic], Any]] = {
            "name": lambda topic: topic.name.lower(),
            "depth": lambda topic: topic.depth,
            "message_count": lambda topic: topic.message_count,
        }
        order = Order(request, columns)
        wanted = (topic for topic in _topics(state.parts) if words.lower() in topic.name.lower())
        paging = Paging(request, order.sorted(wanted), MAX_TOPICS)
        found = await self._ask(state.node, [topic.name for topic in paging.rows])
        return self._admin.pages.render(
            request,
            "node.html",
            node=address,
            messages=state.parts.topic_counts.sum(),
            words=words,
            order=order,
            paging=paging,
            topics=[*_within(found.value, MAX_ROWS)],
            message=Found(None, errors + found.errors).message,
            state=state,
            rates=self._watch.nodes_table.latest((address,)) or {},
        )

    async def _ask(self, node: Node, names: list[str]) -> Found[list[dict[str, Any]]]:
        """These topics of the node, with channels and consumers. Raises Unreachable if it does not
        answer."""
        cluster = self._admin.cluster
        answers = await asyncio.gather(
            *(cluster.stats([node], topic=name, clients=True) for name in names), return_exceptions=True
        )
        now_s = time.time()
        found: list[dict[str, Any]] = []
        errors: list[str] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, Unreachable):
                errors += answer.errors
            elif isinstance(answer, BaseException):
                raise answer
            else:
                topics = (topic for one in answer.value for topic in one.topics)
                found += [
                    node_topic(node, one, now_s, clients=True)
                    for one in topics
                    if text(one, "topic_name") == name
                ]
        if errors and not found:
            raise Unreachable("nsqd", [*dict.fromkeys(errors)])
        return Found(found, [*dict.fromkeys(errors)])


def _topics(parts: Parts) -> Iterator[_Topic]:
    for (name,), depth, counts in zip(parts.topics, parts.topic_depths, parts.topic_counts, strict=True):
        yield _Topic(name, float(depth), float(counts[0]))


def _figure(name: str) -> Callable[[tuple[Any, Mapping[str, float]]], Any]:
    """A figure of the polls, of a row that has a node and its figures."""
    return lambda row: row[1].get(name)


def _within(topics: Iterable[dict[str, Any]], rows: int) -> Iterator[dict[str, Any]]:
    """As many topics, with their channels and consumers, as fit into `rows`; at least one."""
    for topic in topics:
        yield topic
        rows -= 1 + sum(1 + len(channel["clients"] or ()) for channel in topic["channels"])
        if rows <= 0:
            return
