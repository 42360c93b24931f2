"""The changes that nsqadmin makes: on which daemons, in which order, and what is said about the outcome.

Every one is written to the log, whether it worked or not, and notified if it did something.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from nsparq.admin.change.actor import Actor
from nsparq.admin.change.notify import Notifier
from nsparq.admin.collect.cluster import Changed, Cluster, Found, NotFound, Unreachable
from nsparq.admin.collect.merge import Node
from nsparq.admin.security import Access
from nsparq.http.api import ApiError
from nsparq.names import is_valid_name

__all__ = ["ACTIONS", "Actions", "Refused", "audit", "check_channel", "check_topic", "upstream_error"]

logger = logging.getLogger(__name__)

ACTIONS: Final = ("pause", "unpause", "empty")


class Refused(ApiError):
    """What was asked for is not permitted, and the log says so already."""

    def __init__(self, action: str, actor: Actor, **names: str) -> None:
        audit(action, actor, "refused", **names)
        super().__init__(403, "FORBIDDEN")


class Actions:
    """Each method answers with what is to be said beside success: nothing, or a warning. Raises ApiError."""

    def __init__(self, cluster: Cluster, notifier: Notifier) -> None:
        self._cluster = cluster
        self._notifier = notifier

    async def create(self, actor: Actor, access: Access, topic: str, channel: str = "") -> str:
        """A channel is created with its topic, if there is none: that takes the right to the whole topic."""
        check_topic(topic)
        if channel:
            check_channel(channel)
        if not access.may("admin", topic) and not await self._exists(topic):
            raise Refused("create_topic", actor, topic=topic)

        async def run() -> list[str]:
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

        message = await self._run("create_topic", actor, run, topic=topic)
        if channel:
            self._told("create_channel", actor, "done", topic=topic, channel=channel)
        return message

    async def _exists(self, topic: str) -> bool:
        try:
            await self._cluster.producers(topic)
        except NotFound:
            return False
        except Unreachable as error:
            raise upstream_error(error) from error
        return True

    async def _create_on_nsqds(self, topic: str, channel: str) -> list[str]:
        """There is no nsqlookupd to tell: each nsqd that we were given gets it."""
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

    async def delete_topic(self, actor: Actor, topic: str) -> str:
        async def run() -> list[str]:
            producers = await self._cluster.producers(topic)
            return await self._delete(producers, "topic", topic=topic)

        return await self._run("delete_topic", actor, run, topic=topic)

    async def delete_channel(self, actor: Actor, topic: str, channel: str) -> str:
        async def run() -> list[str]:
            producers = await self._cluster.producers(topic)
            return await self._delete(producers, "channel", topic=topic, channel=channel)

        return await self._run("delete_channel", actor, run, topic=topic, channel=channel)

    async def _delete(self, producers: Found[list[Node]], kind: str, **names: str) -> list[str]:
        """On the nsqlookupds first, so that no consumer is sent there in between. What is not there is
        not an error, but said."""
        told = await self._cluster.post_to_lookupds(f"/{kind}/delete", **names)
        done = await self._cluster.post_to_nodes(producers.value, f"/{kind}/delete", **names)
        if not done.done and len(done.errors) > len(done.missing):
            raise Unreachable("nsqd", done.errors)
        return producers.errors + told.errors + done.errors

    async def change_topic(self, actor: Actor, action: str, topic: str) -> str:
        _check_action(action)
        return await self._change(actor, action, "topic", topic=topic)

    async def change_channel(self, actor: Actor, action: str, topic: str, channel: str) -> str:
        _check_action(action)
        return await self._change(actor, action, "channel", topic=topic, channel=channel)

    async def _change(self, actor: Actor, action: str, kind: str, **names: str) -> str:
        async def run() -> list[str]:
            producers = await self._cluster.producers(names["topic"])
            if not producers.value:
                raise NotFound("NO_PRODUCERS")
            done = await self._cluster.post_to_nodes(producers.value, f"/{kind}/{action}", **names)
            if not done.done:
                if done.missing and len(done.missing) == len(done.errors):
                    raise NotFound(f"{kind.upper()}_NOT_FOUND")
                raise Unreachable("nsqd", done.errors)
            return producers.errors + done.errors

        return await self._run(f"{action}_{kind}", actor, run, **names)

    async def tombstone(self, actor: Actor, topic: str, address: str) -> str:
        """Take the topic off one nsqd: hidden from lookups first, so that no consumer goes back to it."""
        check_topic(topic)

        async def run() -> list[str]:
            node, errors = await self._cluster.node(address)
            told = await self._cluster.post_to_lookupds("/topic/tombstone", topic=topic, node=address)
            done = await self._cluster.post_to_nodes([node], "/topic/delete", topic=topic)
            if not done.done and not done.missing:
                raise Unreachable("nsqd", done.errors)
            return errors + told.errors + done.errors

        return await self._run("tombstone_topic_producer", actor, run, topic=topic, node=address)

    async def other(
        self,
        action: str,
        actor: Actor,
        run: Callable[[], Awaitable[list[str]]],
        came_of_it: Callable[[], str],
        **names: str,
    ) -> str:
        """A change that NSQ's does not have, run and told like the others, with what came of it."""
        return await self._run(action, actor, run, came_of_it, **names)

    async def _run(
        self,
        action: str,
        actor: Actor,
        run: Callable[[], Awaitable[list[str]]],
        came_of_it: Callable[[], str] | None = None,
        /,
        **names: str,
    ) -> str:
        try:
            errors = await run()
        except NotFound as error:
            audit(action, actor, f"failed - {error}", **names)
            raise ApiError(404, error.code) from error
        except Unreachable as error:
            audit(action, actor, f"failed - {error}", **names)
            raise upstream_error(error) from error
        except ApiError as error:
            audit(action, actor, f"failed - {error.code}", **names)
            raise
        message = Found(None, errors).message
        done = f"done, {came_of_it()}" if came_of_it is not None else "done"
        self._told(action, actor, f"{done}; {message}" if message else done, **names)
        return message

    def _told(self, action: str, actor: Actor, outcome: str, **names: str) -> None:
        audit(action, actor, outcome, **names)
        self._notifier.notify(
            action,
            actor,
            topic=names.get("topic", ""),
            channel=names.get("channel", ""),
            node=names.get("node", ""),
        )


def audit(action: str, actor: Actor, outcome: str, **names: str) -> None:
    """One line for each action. What users and daemons chose can neither look like something else nor begin
    another line."""
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


def check_topic(name: str) -> None:
    if not is_valid_name(name.encode("utf-8", "replace")):
        raise ApiError(400, "INVALID_TOPIC")


def check_channel(name: str) -> None:
    if not is_valid_name(name.encode("utf-8", "replace")):
        raise ApiError(400, "INVALID_CHANNEL")


def _check_action(action: str) -> None:
    if action not in ACTIONS:
        raise ApiError(400, "INVALID_ACTION")


def upstream_error(error: Unreachable) -> ApiError:
    return ApiError(502, f"UPSTREAM_ERROR: {error}")
