"""NSQ's JSON API of nsqadmin: topics, channels, nodes, the counter, and the changes to them.

Every answer is put together from what the daemons say at that moment; see docs/nsqadmin.md for where it says
something better than NSQ's.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

from nsparq.admin.change.actions import audit, upstream_error
from nsparq.admin.collect.cluster import Found, NotFound, Unreachable
from nsparq.admin.collect.merge import (
    Node,
    NodeStats,
    channel_total,
    node_channel,
    node_topic,
    number,
    objects,
    text,
    topic_total,
)
from nsparq.admin.show.config import check_client, get_config, put_config
from nsparq.admin.show.routing import path_values
from nsparq.http.api import ApiError, Request, Result

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["JsonApi", "parse_body"]

logger = logging.getLogger(__name__)


class JsonApi:
    """The handlers of one nsqadmin."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._cluster = admin.cluster
        self._actions = admin.actions

    # Looking

    async def topics(self, request: Request) -> Result:
        try:
            if request.parameters.get("inactive") == "true":
                idle = await self._cluster.inactive()
                topics = {name: channels or None for name, channels in idle.value.items()}
                return {"topics": topics, "message": idle.message}
            found = await self._cluster.topics()
        except Unreachable as error:
            raise _failed(error) from error
        return {"topics": found.value or None, "message": found.message}

    async def topic(self, request: Request) -> Result:
        (name,) = path_values(request)
        found = await self.topic_stats(name)
        return {**found.value, "message": found.message}

    async def topic_stats(self, name: str) -> Found[dict[str, Any]]:
        """Raises ApiError."""
        stats = await self._stats_of_producers(name)
        now_s = time.time()
        parts = [
            node_topic(one.node, topic, now_s)
            for one in stats.value
            for topic in one.topics
            if text(topic, "topic_name") == name
        ]
        return Found(topic_total(name, parts), stats.errors)

    async def channel(self, request: Request) -> Result:
        topic, name = path_values(request)
        found = await self.channel_stats(topic, name)
        return {**found.value, "message": found.message}

    async def channel_stats(self, topic: str, name: str) -> Found[dict[str, Any]]:
        """Raises ApiError."""
        stats = await self._stats_of_producers(topic, name, clients=True)
        now_s = time.time()
        parts = [
            node_channel(one.node, topic, channel, now_s, clients=True)
            for one in stats.value
            for its_topic in one.topics
            if text(its_topic, "topic_name") == topic
            for channel in objects(its_topic, "channels")
            if text(channel, "channel_name") == name
        ]
        if not parts:
            raise ApiError(404, "CHANNEL_NOT_FOUND")
        return Found(channel_total(topic, name, parts), stats.errors)

    async def _stats_of_producers(
        self, topic: str, channel: str = "", *, clients: bool = False
    ) -> Found[list[NodeStats]]:
        try:
            producers = await self._cluster.producers(topic)
            if not producers.value:
                raise ApiError(404, "NO_PRODUCERS")
            stats = await self._cluster.stats(producers.value, topic=topic, channel=channel, clients=clients)
        except NotFound as error:
            raise ApiError(404, error.code) from error
        except Unreachable as error:
            raise _failed(error) from error
        return Found(stats.value, producers.errors + stats.errors)

    async def nodes(self, request: Request) -> Result:
        found = await self._all_nodes()
        return {"nodes": [node.as_json() for node in found.value] or None, "message": found.message}

    async def _all_nodes(self) -> Found[list[Node]]:
        try:
            return await self._cluster.nodes()
        except Unreachable as error:
            raise _failed(error) from error

    async def node(self, request: Request) -> Result:
        (address,) = path_values(request)
        found = await self.node_stats(address)
        return {**found.value, "message": found.message}

    async def node_stats(self, address: str) -> Found[dict[str, Any]]:
        """Raises ApiError."""
        try:
            node, errors = await self._cluster.node(address)
            stats = await self._cluster.stats([node], clients=True)
        except NotFound as error:
            raise ApiError(404, error.code) from error
        except Unreachable as error:
            raise _failed(error) from error
        now_s = time.time()
        topics = [node_topic(node, topic, now_s, clients=True) for topic in stats.value[0].topics]
        value = {
            "node": address,
            "topics": topics or None,
            "total_messages": sum(topic["message_count"] for topic in topics),
            "total_clients": sum(
                channel["client_count"] for topic in topics for channel in topic["channels"]
            ),
        }
        return Found(value, errors + stats.errors)

    async def counter(self, request: Request) -> Result:
        nodes = await self._all_nodes()
        try:
            stats = await self._cluster.stats(nodes.value)
        except Unreachable as error:
            raise _failed(error) from error
        counts = {}
        for one in stats.value:
            address = one.node.address
            for topic in one.topics:
                name = text(topic, "topic_name")
                for channel in objects(topic, "channels"):
                    channel_name = text(channel, "channel_name")
                    counts[f"{name}:{channel_name}:{address}"] = {
                        "node": address,
                        "topic_name": name,
                        "channel_name": channel_name,
                        "message_count": number(channel, "message_count"),
                    }
        return {"stats": counts, "message": Found(None, nodes.errors + stats.errors).message}

    # Changing

    async def create(self, request: Request) -> Result:
        body = parse_body(request)
        topic, channel = _text(body, "topic"), _text(body, "channel")
        self._check(request, topic, channel)
        access = self._admin.guard.access(request)
        return {"message": await self._actions.create(self._actor(request), access, topic, channel)}

    async def change_topic(self, request: Request) -> Result:
        (topic,) = path_values(request)
        action = _text(parse_body(request), "action")
        return {"message": await self._actions.change_topic(self._actor(request), action, topic)}

    async def change_channel(self, request: Request) -> Result:
        topic, channel = path_values(request)
        action = _text(parse_body(request), "action")
        return {"message": await self._actions.change_channel(self._actor(request), action, topic, channel)}

    async def delete_topic(self, request: Request) -> Result:
        (topic,) = path_values(request)
        return {"message": await self._actions.delete_topic(self._actor(request), topic)}

    async def delete_channel(self, request: Request) -> Result:
        topic, channel = path_values(request)
        return {"message": await self._actions.delete_channel(self._actor(request), topic, channel)}

    async def tombstone(self, request: Request) -> Result:
        (node,) = path_values(request)
        try:
            topic = _text(parse_body(request), "topic")
        except ApiError:
            raise ApiError(400, "INVALID_BODY") from None
        self._check(request, topic)
        return {"message": await self._actions.tombstone(self._actor(request), topic, node)}

    def _check(self, request: Request, topic: str, channel: str = "") -> None:
        """What the guard could not know: the body names the topic."""
        self._admin.guard.access(request).check("admin", topic, channel)

    def _actor(self, request: Request) -> Any:
        return self._admin.guard.actor(request)

    # The daemon

    def get_config(self, request: Request) -> Result:
        check_client(request, self._admin.options.allow_config_from_cidr)
        return get_config(self._admin, request.path_value)

    def put_config(self, request: Request) -> Result:
        check_client(request, self._admin.options.allow_config_from_cidr)
        key = request.path_value
        try:
            value = put_config(self._admin, key, request.body)
        except ApiError as error:
            audit("put_config", self._actor(request), f"failed - {error.code}", key=key)
            raise
        audit("put_config", self._actor(request), f"done, it is {value}", key=key)
        return value


def parse_body(request: Request) -> dict[str, Any]:
    """A JSON object, its keys in lower case: Go does not tell the cases apart. Raises ApiError."""
    try:
        parsed = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, str(error) or "too deep") from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    return {name.lower(): value for name, value in parsed.items()}


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ApiError(400, f"{name} must be a string")
    return value


def _failed(error: Unreachable) -> ApiError:
    logger.error("%s", error)
    return upstream_error(error)
