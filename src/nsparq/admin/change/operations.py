"""The changes that NSQ does not have: publish, copy, move and replay. For the pages and the API.

Each is checked, logged and notified in Actions.run(), as NSQ's changes are. A replay moves a
channel to another position in its topic's log; a dry run reports the effect before.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from nsparq.admin.change import messages
from nsparq.admin.change.actions import Forbidden, check_topic
from nsparq.admin.collect.browse import Page, Wanted, browse
from nsparq.admin.collect.cluster import Found, NotFound, Unreachable
from nsparq.admin.collect.fields import as_object, number
from nsparq.admin.collect.merge import Node
from nsparq.admin.collect.upstream import BadStatus, RequestFailed
from nsparq.admin.security import Access, Actor
from nsparq.errors import NsparqError
from nsparq.flags import parse_duration
from nsparq.headers import Headers, encode_headers
from nsparq.http.api import ApiError

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["PEEK", "SEEK", "BadTarget", "Operations", "Plan", "Support", "parse_target"]

T = TypeVar("T")

PEEK, SEEK, HEADERS = "/topic/peek", "/channel/seek", "/dead_letters"
"""Features of nsparq's nsqd, named by a path that came with them."""
MAX_MOVES: Final = 20
"""Rounds of a move in one request. The answer says how many messages are left."""


class Support(NamedTuple):
    """The nodes that have a topic, by whether they support a feature."""

    all: list[Node]
    able: list[Node]
    unable: list[Node]
    errors: list[str]
    """Nodes that did not answer, and why: whether they support it is unknown."""

    def require(self) -> None:
        """Raises ApiError if no node supports the feature."""
        if not self.able and self.errors:
            raise Unreachable("nsqd", self.errors)
        if not self.able:
            raise ApiError(501, "NOT_SUPPORTED")

    def named(self, addresses: Iterable[str]) -> list[Node]:
        """The nodes of these addresses. Raises ApiError if one cannot be asked: a part of the
        chosen messages must not pass for all of them."""
        wanted = {*addresses}
        found = [node for node in self.able if node.address in wanted]
        if missing := wanted - {node.address for node in found}:
            reasons = "; ".join([f"no messages of {', '.join(sorted(missing))}", *self.errors])
            raise ApiError(409, f"nothing was done: {reasons}")
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """The effect of a replay on one node."""

    node: str
    again: int = 0
    """Messages that are delivered again."""
    skipped: int = 0
    """Messages that are no longer delivered."""
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Operations:
    """Raises ApiError."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._cluster = admin.cluster
        self._moving = asyncio.Lock()
        """One move at a time: two moves of one channel would end each other's hold."""

    async def nodes_with(self, topic: str, feature: str) -> Support:
        found = await self._cluster.producers(topic)
        support = Support(found.value, [], [], [*found.errors])
        for node in found.value:
            try:
                is_able = feature in await self._admin.watch.features(node)
            except RequestFailed as error:
                support.errors.append(f"{node.address}: {error}")
            else:
                (support.able if is_able else support.unable).append(node)
        return support

    async def browse(
        self, topic: str, channel: str, wanted: Wanted, *, node: str = "", with_reasons: bool = False
    ) -> tuple[Support, Page]:
        """A page of messages, of one node or of all."""
        nodes = await self.nodes_with(topic, PEEK)
        chosen = [one for one in nodes.able if not node or one.address == node]
        return nodes, await browse(self._cluster, chosen, topic, channel, wanted, with_reasons=with_reasons)

    async def whole(
        self, topic: str, chosen: Iterable[tuple[str, int]]
    ) -> list[tuple[str, int, messages.Stored]]:
        """Whole messages, given by node and sequence number; with both."""
        by_node = _by_node(chosen)
        nodes = await self.nodes_with(topic, PEEK)
        found = []
        for node in nodes.named(by_node):
            wanted = sorted({*by_node[node.address]})
            try:
                read = await messages.read_messages(self._cluster, node, topic, wanted)
            except messages.MessagesFailed as error:
                raise ApiError(409, str(error)) from error
            found += [(node.address, *pair) for pair in zip(wanted, read, strict=True)]
        return found

    async def publish(
        self,
        actor: Actor,
        topic: str,
        body: bytes,
        *,
        node: str = "",
        defer_ms: int = 0,
        headers: Headers | None = None,
    ) -> str:
        """Returns the address of the node. Without `node` it is the first that has the topic."""
        check_topic(topic)
        if not body:
            raise ApiError(400, "MSG_EMPTY")
        try:
            block = encode_headers(headers or {})
        except (ValueError, TypeError) as error:
            raise ApiError(400, "INVALID_HEADERS", reason=str(error)) from error
        target = await self._node_for(topic, node)

        async def work() -> list[str]:
            try:
                if block and HEADERS not in await self._admin.watch.features(target):
                    raise ApiError(501, "NOT_SUPPORTED", reason=f"{target.address} does not know headers")
                await messages.publish(self._cluster, target, topic, body, defer_ms=defer_ms, block=block)
            except RequestFailed as error:
                raise ApiError(502, f"UPSTREAM_ERROR: {target.address}: {error}") from error
            except messages.MessagesFailed as error:
                raise ApiError(502, f"UPSTREAM_ERROR: {error}") from error
            return []

        await self._admin.actions.run(
            "publish", actor, work, lambda: f"{len(body)} bytes", topic=topic, node=target.address
        )
        return target.address

    async def _node_for(self, topic: str, address: str) -> Node:
        if address:
            return (await self._cluster.node(address))[0]
        try:
            nodes = (await self._cluster.producers(topic)).value
        except NotFound:
            nodes = []
        nodes = nodes or (await self._cluster.nodes()).value
        if not nodes:
            raise NotFound("NO_PRODUCERS")
        return nodes[0]

    async def copy(
        self,
        actor: Actor,
        access: Access,
        topic: str,
        sequences: Iterable[tuple[str, int]],
        *,
        to: str,
        unwrap: bool,
    ) -> int:
        """Publish messages, given by node and sequence number, again. Returns how many."""
        by_node = _by_node(sequences)
        # Otherwise a user could copy messages to a topic that they can read.
        if not access.may("subscribe", topic):
            raise Forbidden("copy_messages", actor, topic=topic, to=to)
        nodes = await self.nodes_with(topic, PEEK)
        target = self._target(access, topic, to, unwrap)
        copied = 0

        async def work() -> list[str]:
            nonlocal copied
            for node in nodes.named(by_node):
                copying = messages.copy(self._cluster, node, topic, by_node[node.address], target)
                copied += await self._count_done(copying, copied, "published")
            return []

        await self._admin.actions.run(
            "copy_messages", actor, work, lambda: f"{copied} published", topic=topic, to=to
        )
        return copied

    async def move(
        self,
        actor: Actor,
        access: Access,
        topic: str,
        channel: str,
        *,
        to: str,
        unwrap: bool,
        count: int = 0,
    ) -> tuple[int, int, str]:
        """Publish the channel's messages elsewhere and finish them in the channel. Returns how many
        were moved, how many are left, and a warning that names the nodes that could not be asked.
        `count` is the most from each node; 0 is all."""
        if not access.may("subscribe", topic, channel):
            raise Forbidden("move_messages", actor, topic=topic, channel=channel, to=to)
        nodes = await self.nodes_with(topic, PEEK)
        nodes.require()
        target = self._target(access, topic, to, unwrap)
        moved = left = 0

        async def work() -> list[str]:
            async with self._moving:
                return await move_all()

        async def move_all() -> list[str]:
            nonlocal moved, left
            for node in nodes.able:
                wanted = count or MAX_MOVES * messages.MOVED_AT_ONCE
                remaining = 0
                for _ in range(MAX_MOVES):
                    moving = messages.move(self._cluster, node, topic, channel, target, wanted)
                    done, remaining = await self._count_done(moving, moved, "moved")
                    moved += done
                    wanted -= done
                    if not remaining or wanted <= 0 or not done:
                        break
                left += remaining
            return nodes.errors

        names = {"topic": topic, "channel": channel, "to": to}
        warning = await self._admin.actions.run(
            "move_messages", actor, work, lambda: f"{moved} moved, {left} left", **names
        )
        return moved, left, warning

    def _target(self, access: Access, topic: str, to: str, unwrap: bool) -> messages.Target:
        if to:
            check_topic(to)
        if to == topic:
            raise ApiError(400, "SAME_TOPIC")
        return messages.Target(to, unwrap, topic, lambda name: access.may("publish", name))

    async def _count_done(self, work: Awaitable[T], before: int, done: str) -> T:
        """The error of a failure says how many messages were done before it."""
        try:
            return await work
        except messages.MessagesFailed as error:
            prefix = f"{before:,} were {done}, then: " if before else ""
            raise ApiError(409, f"{prefix}{error}") from error

    async def plan(self, topic: str, channel: str, target: Mapping[str, str]) -> tuple[list[Plan], str]:
        """A dry run of a replay. The warning names the nodes that could not be asked."""
        nodes = await self.nodes_with(topic, SEEK)
        plans = [await self._seek(node, topic, channel, target, dry_run="true") for node in nodes.able]
        return plans, Found(None, nodes.errors).message

    async def replay(
        self, actor: Actor, topic: str, channel: str, target: Mapping[str, str]
    ) -> tuple[list[Plan], str]:
        """The warning names the nodes where it failed."""
        nodes = await self.nodes_with(topic, SEEK)
        nodes.require()
        plans: list[Plan] = []

        async def work() -> list[str]:
            plans.extend([await self._seek(node, topic, channel, target) for node in nodes.able])
            errors = [f"{plan.node}: {plan.error}" for plan in plans if plan.error]
            if len(errors) == len(plans):
                raise ApiError(409, "; ".join(errors))
            return nodes.errors + errors

        warning = await self._admin.actions.run(
            "seek_channel",
            actor,
            work,
            lambda: f"{sum(p.again for p in plans)} again, {sum(p.skipped for p in plans)} skipped",
            topic=topic,
            channel=channel,
            place=" ".join(f"{name}={value}" for name, value in target.items()),
        )
        return plans, warning

    async def _seek(
        self, node: Node, topic: str, channel: str, target: Mapping[str, str], **dry_run: str
    ) -> Plan:
        query = {"topic": topic, "channel": channel, **target, **dry_run}
        try:
            answer = (await self._cluster.ask(node, "POST", "/channel/seek", **query)).json()
        except BadStatus as error:
            missing = {"CHANNEL_NOT_FOUND": "has no such channel", "NOT_FOUND": "does not support replay"}
            return Plan(node.address, error=missing.get(error.code, error.code or str(error)))
        except RequestFailed as error:
            return Plan(node.address, error=str(error))
        fields = as_object(answer)
        return Plan(node.address, number(fields, "again"), number(fields, "skipped"))


def _by_node(chosen: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Sequence numbers by node. Raises ApiError if there are none."""
    by_node: dict[str, list[int]] = {}
    for address, sequence in chosen:
        by_node.setdefault(address, []).append(sequence)
    if not by_node:
        raise ApiError(400, "NOTHING_CHOSEN")
    return by_node


class BadTarget(NsparqError):
    """Not a position to replay from. The text is for the user."""


def parse_target(to: str, when: str = "", *, now_s: float | None = None) -> dict[str, str]:
    """The query that tells nsqd where to move a channel: to the start, the end, or a time.

    A time is an RFC 3339 time, `YYYY-MM-DD HH:MM` in UTC, Unix seconds, or a duration ago such as
    90m. Raises BadTarget.
    """
    if to in ("start", "end"):
        return {"to": to}
    if to != "time":
        raise BadTarget("choose the start, the end, or a time")
    wanted = when.strip()
    if not wanted:
        raise BadTarget("enter a time")
    if re.fullmatch(r"[0-9]{9,10}(\.[0-9]+)?", wanted):
        return {"time": wanted}
    try:
        ago_s = parse_duration(wanted)
        return {"time": f"{(time.time() if now_s is None else now_s) - abs(ago_s):.3f}"}
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(wanted.removesuffix("UTC").strip())
    except ValueError:
        raise BadTarget(f"{wanted!r} is not a time; enter one such as 2026-01-31 12:00 or 90m") from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return {"time": found.isoformat()}
