"""What nsqadmin does beyond NSQ's: publishing, bringing messages back, replay. For pages and the API alike.

Each is checked, written to the log and notified as the changes of NSQ's are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from nsparq.admin.change import messages
from nsparq.admin.change.actions import Refused, check_topic, upstream_error
from nsparq.admin.change.actor import Actor
from nsparq.admin.change.replay import Plan, seek
from nsparq.admin.collect.cluster import NotFound, Unreachable
from nsparq.admin.collect.merge import Node
from nsparq.admin.collect.upstream import AskFailed
from nsparq.admin.security import Access
from nsparq.http.api import ApiError

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["PEEK", "SEEK", "Able", "Operations"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

PEEK, SEEK = "/topic/peek", "/channel/seek"
"""Features by the path that they need."""
MAX_MOVES: Final = 20
"""Rounds of a move in one request: what is left is told, and can be asked for again."""


class Able(NamedTuple):
    """The nodes that have a topic, and those of them that can do something."""

    all: list[Node]
    able: list[Node]
    unable: list[Node]
    errors: list[str]
    """Of nodes that did not answer: nobody knows whether they can."""

    def require(self) -> None:
        """Raise ApiError unless a node is able."""
        if not self.able and self.errors:
            raise upstream_error(Unreachable("nsqd", self.errors))
        if not self.able:
            raise ApiError(501, "NOT_SUPPORTED")


class Operations:
    """Raises ApiError."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._cluster = admin.cluster
        self._moving = asyncio.Lock()
        """Two moves of one channel would pause and resume it in each other's way."""

    async def nodes_with(self, topic: str, feature: str) -> Able:
        try:
            found = await self._cluster.producers(topic)
        except NotFound as error:
            raise ApiError(404, error.code) from error
        except Unreachable as error:
            raise upstream_error(error) from error
        sorted_out = Able(found.value, [], [], [*found.errors])
        for node in found.value:
            try:
                has_it = feature in await self._admin.watch.features(node)
            except AskFailed as error:
                sorted_out.errors.append(f"{node.address}: {error}")
            else:
                (sorted_out.able if has_it else sorted_out.unable).append(node)
        return sorted_out

    async def peek(
        self,
        topic: str,
        channel: str = "",
        *,
        node: str = "",
        count: int = messages.DEFAULT_COUNT,
        start: int | None = None,
        state: str = "",
    ) -> tuple[Able, messages.Peeked]:
        able = await self.nodes_with(topic, PEEK)
        chosen = [one for one in able.able if not node or one.address == node]
        found = await messages.peek(
            self._cluster, chosen, topic, channel, count=count, start=start, state=state
        )
        return able, found

    async def publish(
        self, actor: Actor, topic: str, body: bytes, *, node: str = "", defer_ms: int = 0
    ) -> str:
        """Where it was published. Without a node: on the first that has the topic."""
        check_topic(topic)
        if not body:
            raise ApiError(400, "MSG_EMPTY")
        target = await self._node_for(topic, node)

        async def run() -> list[str]:
            try:
                await messages.publish(self._cluster, target, topic, body, defer_ms=defer_ms)
            except messages.MessagesFailed as error:
                raise ApiError(502, f"UPSTREAM_ERROR: {error}") from error
            return []

        await self._admin.actions.other(
            "publish", actor, run, lambda: f"{len(body)} bytes", topic=topic, node=target.address
        )
        return target.address

    async def _node_for(self, topic: str, address: str) -> Node:
        try:
            if address:
                return (await self._cluster.node(address))[0]
            try:
                having = (await self._cluster.producers(topic)).value
            except NotFound:
                having = []
            nodes = having or (await self._cluster.nodes()).value
        except NotFound as error:
            raise ApiError(404, error.code) from error
        except Unreachable as error:
            raise upstream_error(error) from error
        if not nodes:
            raise ApiError(404, "NO_PRODUCERS")
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
        """Publish messages, named by node and sequence number, once more. How many."""
        by_node: dict[str, list[int]] = {}
        for address, sequence in sequences:
            by_node.setdefault(address, []).append(sequence)
        if not by_node:
            raise ApiError(400, "NOTHING_CHOSEN")
        # The copy may go where the user can read it.
        if not access.may("subscribe", topic):
            raise Refused("copy_messages", actor, topic=topic, to=to)
        able = await self.nodes_with(topic, PEEK)
        target = self._target(access, topic, to, unwrap)
        copied = 0

        async def run() -> list[str]:
            nonlocal copied
            for node in able.able:
                if wanted := by_node.get(node.address):
                    work = messages.copy(self._cluster, node, topic, wanted, target)
                    copied += await self._tell(work, copied, "published")
            return []

        await self._admin.actions.other(
            "copy_messages", actor, run, lambda: f"{copied} published", topic=topic, to=to
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
    ) -> tuple[int, int]:
        """Publish what the channel holds elsewhere, and finish it. How many were moved, how many are left.
        With `count` so many at the most of each node."""
        if not access.may("subscribe", topic, channel):
            raise Refused("move_messages", actor, topic=topic, channel=channel, to=to)
        able = await self.nodes_with(topic, PEEK)
        able.require()
        target = self._target(access, topic, to, unwrap)
        moved = left = 0

        async def run() -> list[str]:
            nonlocal moved, left
            for node in able.able:
                wanted = count or MAX_MOVES * messages.MOVED_AT_ONCE
                remaining = 0
                for _ in range(MAX_MOVES):
                    work = messages.move(self._cluster, node, topic, channel, target, wanted)
                    done, remaining = await self._tell(work, moved, "moved")
                    moved += done
                    wanted -= done
                    if not remaining or wanted <= 0 or not done:
                        break
                left += remaining
            return []

        async with self._moving:
            await self._admin.actions.other(
                "move_messages",
                actor,
                run,
                lambda: f"{moved} moved, {left} left",
                topic=topic,
                channel=channel,
                to=to,
            )
        return moved, left

    def _target(self, access: Access, topic: str, to: str, unwrap: bool) -> messages.Target:
        if to:
            check_topic(to)
        if to == topic:
            raise ApiError(400, "SAME_TOPIC")
        return messages.Target(to, unwrap, topic, lambda name: access.may("publish", name))

    async def _tell(self, work: Awaitable[T], before: int, what: str) -> T:
        """A failure also says how many had been done before it."""
        try:
            return await work
        except messages.MessagesFailed as error:
            done = f"{before:,} were {what}, then: " if before else ""
            raise ApiError(409, f"{done}{error}") from error

    async def plan(self, topic: str, channel: str, target: dict[str, str]) -> list[Plan]:
        """What going there would do."""
        able = await self.nodes_with(topic, SEEK)
        return await seek(self._cluster, able.able, topic, channel, target, dry_run=True)

    async def replay(self, actor: Actor, topic: str, channel: str, target: dict[str, str]) -> list[Plan]:
        able = await self.nodes_with(topic, SEEK)
        able.require()
        plans: list[Plan] = []

        async def run() -> list[str]:
            plans.extend(await seek(self._cluster, able.able, topic, channel, target, dry_run=False))
            errors = [f"{plan.node}: {plan.error}" for plan in plans if plan.error]
            if len(errors) == len(plans):
                raise ApiError(409, "; ".join(errors))
            return errors

        place = " ".join(f"{name}={value}" for name, value in target.items())
        await self._admin.actions.other(
            "seek_channel",
            actor,
            run,
            lambda: f"{sum(p.again for p in plans)} again, {sum(p.skipped for p in plans)} skipped",
            topic=topic,
            channel=channel,
            place=place,
        )
        return plans
