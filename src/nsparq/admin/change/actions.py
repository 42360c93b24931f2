"""NSQ's changes: create, delete, pause, unpause, empty, tombstone. On which daemons, and in which
order.

Actions.run() is the frame of every change, also of those in operations.py: it writes a line to the
log, whether the change worked or not, and sends a notification if it did something.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from nsparq.admin.collect.cluster import Changed, Cluster, Found, NotFound, Unreachable
from nsparq.admin.collect.upstream import BadStatus, RequestFailed, Upstream
from nsparq.admin.security import Access, Actor
from nsparq.fetch import without_secrets
from nsparq.http.api import ApiError
from nsparq.names import is_valid_name
from nsparq.tasks import cancel_all

__all__ = ["ACTIONS", "Actions", "Forbidden", "Notifier", "audit", "check_topic"]

logger = logging.getLogger(__name__)

ACTIONS: Final = ("pause", "unpause", "empty")
MAX_WAITING: Final = 1000
"""Notifications that wait for a slow endpoint. Further ones are dropped, with a line in the log."""
FINISH_S: Final = 10.0
"""Time at shutdown to finish the changes under way."""
DRAIN_S: Final = 2.0
"""Time at shutdown to send the notifications that wait."""


class Forbidden(ApiError):
    """The user may not do this. Creating it writes the audit line."""

    def __init__(self, action: str, actor: Actor, **names: str) -> None:
        audit(action, actor, "refused", **names)
        super().__init__(403, "FORBIDDEN")


class Actions:
    """Each method returns a warning, or an empty text if everything worked. Raises ApiError."""

    def __init__(self, cluster: Cluster, notifier: Notifier) -> None:
        self._cluster = cluster
        self._notifier = notifier
        self._under_way: set[asyncio.Task[str]] = set()

    async def run(
        self,
        action: str,
        actor: Actor,
        work: Callable[[], Awaitable[list[str]]],
        outcome: Callable[[], str] | None = None,
        /,
        **names: str,
    ) -> str:
        """Make a change, log it and notify. `work` returns what failed on some daemons; `outcome`
        describes for the log what was done.

        The change goes on if the caller is cancelled: a client that leaves must not end it
        half-way, nor keep it out of the log."""
        return await self._to_the_end(self._run(action, actor, work, outcome, names))

    async def _to_the_end(self, change: Coroutine[Any, Any, str]) -> str:
        task = asyncio.create_task(change)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for the changes under way, for at most FINISH_S."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=FINISH_S)
            await cancel_all([*self._under_way])

    async def _run(
        self,
        action: str,
        actor: Actor,
        work: Callable[[], Awaitable[list[str]]],
        outcome: Callable[[], str] | None,
        names: Mapping[str, str],
    ) -> str:
        try:
            errors = await work()
        except ApiError as error:
            audit(action, actor, f"failed - {error.code}", **names)
            raise
        except asyncio.CancelledError:
            audit(action, actor, "failed - nsqadmin stops", **names)
            raise
        message = Found(None, errors).message
        done = f"done, {outcome()}" if outcome is not None else "done"
        self._report(action, actor, f"{done}; {message}" if message else done, **names)
        return message

    def _report(self, action: str, actor: Actor, outcome: str, **names: str) -> None:
        audit(action, actor, outcome, **names)
        self._notifier.notify(action, actor, names)

    async def create(self, actor: Actor, access: Access, topic: str, channel: str = "") -> str:
        """Creating a channel of a new topic also needs the permission for the topic."""
        check_topic(topic)
        if channel and not _is_valid(channel):
            raise ApiError(400, "INVALID_CHANNEL")
        if not access.may("admin", topic) and not await self._exists(topic):
            raise Forbidden("create_topic", actor, topic=topic)

        async def work() -> list[str]:
            cluster = self._cluster
            if not cluster.lookupds:
                return await self._create_on_nsqds(topic, channel)
            made = await cluster.post_to_lookupds("/topic/create", topic=topic)
            errors = made.errors
            if channel:
                further = await cluster.post_to_lookupds("/channel/create", topic=topic, channel=channel)
                errors += further.errors
            if not made.value:
                raise Unreachable("nsqlookupd", errors)
            if channel:
                producers = await cluster.producers(topic)
                done = await cluster.post_to_nodes(
                    producers.value, "/channel/create", topic=topic, channel=channel
                )
                errors += producers.errors + done.errors
            return errors

        async def create() -> str:
            message = await self.run("create_topic", actor, work, topic=topic)
            if channel:
                done = f"done; {message}" if message else "done"
                self._report("create_channel", actor, done, topic=topic, channel=channel)
            return message

        return await self._to_the_end(create())

    async def _exists(self, topic: str) -> bool:
        try:
            await self._cluster.producers(topic)
        except NotFound:
            return False
        return True

    async def _create_on_nsqds(self, topic: str, channel: str) -> list[str]:
        """Without nsqlookupds, on each nsqd of --nsqd-http-address."""
        nodes = await self._cluster.nodes()
        done = await self._cluster.post_to_nodes(nodes.value, "/topic/create", topic=topic)
        if done.done and channel:
            more = await self._cluster.post_to_nodes(
                nodes.value, "/channel/create", topic=topic, channel=channel
            )
            done = Changed(more.done, done.errors + more.errors, [])
        if not done.done:
            raise Unreachable("nsqd", nodes.errors + done.errors)
        return nodes.errors + done.errors

    async def delete(self, actor: Actor, topic: str, channel: str = "") -> str:
        """On the nsqlookupds first, so that they send no consumer there meanwhile. If it is missing
        somewhere, that is a warning."""
        kind, names = _kind(topic, channel)

        async def work() -> list[str]:
            producers = await self._cluster.producers(topic)
            lookupds = await self._cluster.post_to_lookupds(f"/{kind}/delete", **names)
            nodes = await self._cluster.post_to_nodes(producers.value, f"/{kind}/delete", **names)
            if not nodes.done and len(nodes.errors) > len(nodes.missing):
                raise Unreachable("nsqd", nodes.errors)
            return producers.errors + lookupds.errors + nodes.errors

        return await self.run(f"delete_{kind}", actor, work, **names)

    async def change(self, actor: Actor, action: str, topic: str, channel: str = "") -> str:
        """Pause, unpause or empty."""
        if action not in ACTIONS:
            raise ApiError(400, "INVALID_ACTION")
        kind, names = _kind(topic, channel)

        async def work() -> list[str]:
            producers = await self._cluster.having(topic)
            done = await self._cluster.post_to_nodes(producers.value, f"/{kind}/{action}", **names)
            if not done.done:
                if done.missing and len(done.missing) == len(done.errors):
                    raise NotFound(f"{kind.upper()}_NOT_FOUND")
                raise Unreachable("nsqd", done.errors)
            return producers.errors + done.errors

        return await self.run(f"{action}_{kind}", actor, work, **names)

    async def tombstone(self, actor: Actor, topic: str, address: str) -> str:
        """Remove a topic from an nsqd. nsqlookupds hide it first, so that no consumer comes
        back."""
        check_topic(topic)

        async def work() -> list[str]:
            node, errors = await self._cluster.node(address)
            lookupds = await self._cluster.post_to_lookupds("/topic/tombstone", topic=topic, node=address)
            done = await self._cluster.post_to_nodes([node], "/topic/delete", topic=topic)
            if not done.done and not done.missing:
                raise Unreachable("nsqd", done.errors)
            return errors + lookupds.errors + done.errors

        return await self.run("tombstone_topic_producer", actor, work, topic=topic, node=address)

    async def switch_over(self, actor: Actor, address: str) -> str:
        """Let a follower of this primary take over."""

        async def work() -> list[str]:
            node, errors = await self._cluster.node(address)
            try:
                await self._cluster.ask(node, "POST", "/replication/switch_over")
            except BadStatus as error:
                if error.code in ("NOT_REPLICATED", "NOT_POSSIBLE", "NOT_PRIMARY"):
                    raise ApiError(409, error.code) from error
                raise Unreachable("nsqd", [str(error)]) from error
            except RequestFailed as error:
                raise Unreachable("nsqd", [str(error)]) from error
            return errors

        return await self.run("switch_over", actor, work, node=address)


def _kind(topic: str, channel: str) -> tuple[str, dict[str, str]]:
    if channel:
        return "channel", {"topic": topic, "channel": channel}
    return "topic", {"topic": topic}


def check_topic(name: str) -> None:
    """Raises ApiError."""
    if not _is_valid(name):
        raise ApiError(400, "INVALID_TOPIC")


def _is_valid(name: str) -> bool:
    return is_valid_name(name.encode("utf-8", "replace"))


# The log


def audit(action: str, actor: Actor, outcome: str, **names: str) -> None:
    """One line in the log for each action. Names are quoted and line breaks removed, so that no
    user and no daemon can forge a line."""
    shown = " ".join(f"{name}={_quoted(value)}" for name, value in names.items() if value)
    logger.info(
        "AUDIT: %s %s user=%s from=%s: %s",
        action,
        shown,
        _quoted(actor.user),
        _quoted(actor.remote_address),
        "".join(character if character.isprintable() else " " for character in outcome),
    )


def _quoted(value: str) -> str:
    return json.dumps(value[:200])


# Notifications


class Notifier:
    """Sends each change to --notification-http-endpoint, in the background, one at a time.

    Without an endpoint it does nothing. If the endpoint cannot be reached, that is a line in the
    log; NSQ's nsqadmin exits. start() and close() once each.
    """

    def __init__(self, upstream: Upstream, endpoint: str) -> None:
        self._upstream = upstream
        self._endpoint = endpoint
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._endpoint:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send the notifications that wait, for at most DRAIN_S."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._waiting.join()
        except TimeoutError:
            logger.warning("notifications: %d dropped at shutdown", self._waiting.qsize())
        await cancel_all([task])

    def notify(self, action: str, actor: Actor, names: dict[str, str]) -> None:
        if self._task is None:
            return
        content: dict[str, Any] = {"action": action, "topic": names.get("topic", "")}
        content |= {name: value for name in ("channel", "node") if (value := names.get(name))}
        content["timestamp"] = int(time.time())
        if actor.user:
            content["user"] = actor.user
        content |= {
            "remote_ip": actor.remote_address,
            "user_agent": actor.user_agent,
            "url": actor.url,
            "via": socket.gethostname(),
        }
        try:
            self._waiting.put_nowait(json.dumps(content).encode())
        except asyncio.QueueFull:
            topic = content["topic"]
            logger.error("notifications: the endpoint is too slow; %s of topic %s is dropped", action, topic)

    async def _run(self) -> None:
        while True:
            body = await self._waiting.get()
            try:
                await self._upstream.exchange("POST", self._endpoint, body, content_type="application/json")
            except Exception as error:
                # Whatever it is, the next one may arrive.
                logger.warning("notifications: %s: %s", without_secrets(self._endpoint), error)
            finally:
                self._waiting.task_done()
