"""NSQ's changing endpoints: create, delete, pause, empty, tombstone. See change/actions.py."""

from __future__ import annotations

from typing import Final

from nsparq.admin.routing import path_values, topic_and_channel
from nsparq.admin.show.api.table import (
    FORBIDDEN,
    NOT_THERE,
    TEXT,
    UPSTREAM,
    Handlers,
    change,
    parse_body,
    text_field,
)
from nsparq.http.api import ApiError, Request, Result

__all__ = ["Changes"]

_ACTION: Final = {"action": {"type": "string", "enum": ["pause", "unpause", "empty"]}}


class Changes(Handlers):
    @change(
        "POST",
        "/api/topics",
        "Create a topic, or a channel and its topic.",
        {"topic": TEXT, "channel": TEXT},
        checks_names=True,
        details="On every nsqlookupd; a channel also on the nsqds that have the topic. Without "
        "nsqlookupds on every nsqd.",
        errors=(FORBIDDEN, (400, "INVALID_TOPIC"), (400, "INVALID_CHANNEL"), UPSTREAM),
    )
    async def create(self, request: Request) -> Result:
        body = parse_body(request)
        topic, channel = text_field(body, "topic"), text_field(body, "channel")
        access = self._access(request)
        # The guard could not check the names: they are in the body.
        access.check("admin", topic, channel)
        return {"message": await self._admin.actions.create(self._actor(request), access, topic, channel)}

    @change(
        "POST",
        "/api/topics/{topic}",
        "Pause, unpause or empty a topic on every nsqd that has it.",
        _ACTION,
        errors=(FORBIDDEN, (400, "INVALID_ACTION"), *NOT_THERE),
    )
    @change(
        "POST",
        "/api/topics/{topic}/{channel}",
        "Pause, unpause or empty a channel on every nsqd that has it.",
        _ACTION,
        errors=(FORBIDDEN, (400, "INVALID_ACTION"), *NOT_THERE, (404, "CHANNEL_NOT_FOUND")),
    )
    async def pause_or_empty(self, request: Request) -> Result:
        topic, channel = topic_and_channel(request)
        action = text_field(parse_body(request), "action")
        return {"message": await self._admin.actions.change(self._actor(request), action, topic, channel)}

    @change(
        "DELETE",
        "/api/topics/{topic}",
        "Delete a topic: on every nsqlookupd, then on every nsqd that has it.",
        errors=(FORBIDDEN, (404, "TOPIC_NOT_FOUND"), UPSTREAM),
    )
    @change(
        "DELETE",
        "/api/topics/{topic}/{channel}",
        "Delete a channel: on every nsqlookupd, then on every nsqd that has its topic.",
        errors=(FORBIDDEN, (404, "TOPIC_NOT_FOUND"), UPSTREAM),
    )
    async def delete(self, request: Request) -> Result:
        topic, channel = topic_and_channel(request)
        return {"message": await self._admin.actions.delete(self._actor(request), topic, channel)}

    @change(
        "DELETE",
        "/api/nodes/{node}",
        "Remove a topic from a node: tombstone it on every nsqlookupd, then delete it on the node.",
        {"topic": TEXT},
        checks_names=True,
        errors=(FORBIDDEN, (400, "INVALID_BODY"), (400, "INVALID_TOPIC"), (404, "NODE_NOT_FOUND"), UPSTREAM),
    )
    async def tombstone(self, request: Request) -> Result:
        (node,) = path_values(request)
        try:
            topic = text_field(parse_body(request), "topic")
        except ApiError:
            raise ApiError(400, "INVALID_BODY") from None
        self._access(request).check("admin", topic)
        return {"message": await self._admin.actions.tombstone(self._actor(request), topic, node)}

    @change(
        "POST",
        "/api/nodes/{node}",
        "Let a follower take over from a node that is the primary of its cluster: a planned switch-over.",
        {"action": {"type": "string", "enum": ["switch_over"]}},
        errors=(
            FORBIDDEN,
            (400, "INVALID_ACTION"),
            (404, "NODE_NOT_FOUND"),
            (409, "NOT_POSSIBLE"),
            (409, "NOT_PRIMARY"),
            (409, "NOT_REPLICATED"),
            UPSTREAM,
        ),
    )
    async def switch_over(self, request: Request) -> Result:
        (node,) = path_values(request)
        if text_field(parse_body(request), "action") != "switch_over":
            raise ApiError(400, "INVALID_ACTION")
        return {"message": await self._admin.actions.switch_over(self._actor(request), node)}
