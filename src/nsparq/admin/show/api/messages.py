"""Messages and replay: peek, publish, copy, move, seek. change/operations.py does the work."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from nsparq.admin.change.messages import MAX_BODY
from nsparq.admin.change.operations import BadTarget, parse_target
from nsparq.admin.collect.filter import BadFilter
from nsparq.admin.collect.messages import DEFAULT_COUNT, MAX_COUNT, STATES
from nsparq.admin.routing import path_values, topic_and_channel
from nsparq.admin.show.api.table import (
    COUNT,
    FORBIDDEN,
    NOT_THERE,
    TEXT,
    UPSTREAM,
    Handlers,
    change,
    look,
    object_of,
    parse_body,
)
from nsparq.admin.show.messages import BadQuery, wanted_of
from nsparq.http.api import ApiError, Param, Request, Result

__all__ = ["Messages"]

GROUP: Final = "Messages"
_PEEK: Final[Mapping[str, Any]] = {
    "group": GROUP,
    "permission": "subscribe",
    "success": "the messages; `older` and `newer` are empty, or for `before` and `after` of the next "
    "request; `scanned` counts the messages that the filter has read; `reasons` counts dead letters; "
    "`unable` names nodes that cannot show messages",
    "errors": ((400, "INVALID_ARG_Q"), (400, "INVALID_TARGET"), *NOT_THERE),
}
_PEEK_PARAMS: Final = (
    Param(name="node", help="only messages of this node"),
    Param(name="count", help=f"number of messages (default {DEFAULT_COUNT}, at most {MAX_COUNT})"),
    Param(
        name="q",
        help="a filter: words, and fields of the JSON body such as `customer.id=17`, `price>5`, `name~tea`",
    ),
    Param(name="after", help="`newer` of another answer: messages from there on"),
)
_TARGET: Final = {"to": TEXT, "unwrap": {"type": "boolean"}}


class Messages(Handlers):
    @look(
        "/api/messages/{topic}",
        "Messages of a topic, without consuming them, the newest first.",
        params=(
            *_PEEK_PARAMS,
            Param(name="before", help="`older` of another answer: messages before it"),
            Param(name="from", help="sequence number to begin at; with `node`"),
            Param(name="time", help="time to begin at, such as `2026-01-31 12:00` or `90m` (ago)"),
        ),
        **_PEEK,
    )
    @look(
        "/api/messages/{topic}/{channel}",
        "Messages that a channel holds, without consuming them.",
        params=(*_PEEK_PARAMS, Param(name="state", help=f"only {', '.join(STATES)}")),
        **_PEEK,
    )
    async def peek(self, request: Request) -> Result:
        topic, channel = topic_and_channel(request)
        parameters = request.parameters
        for name in ("count", "from"):
            _number(request, name, 0)
        try:
            wanted = wanted_of(parameters)
        except BadFilter as error:
            raise ApiError(400, "INVALID_ARG_Q", reason=str(error)) from error
        except BadQuery as error:
            raise ApiError(400, "INVALID_TARGET", reason=str(error)) from error
        nodes, found = await self._admin.operations.browse(
            topic, channel, wanted, node=parameters.get("node", ""), with_reasons=True
        )
        return {
            "messages": [one.as_json() for one in found.messages],
            "older": str(found.older or ""),
            "newer": str(found.newer or ""),
            "scanned": found.scanned,
            "reasons": [asdict(one) for one in found.reasons],
            "missing": found.missing,
            "unable": [node.address for node in nodes.unable],
            "errors": nodes.errors + found.errors,
        }

    @change(
        "POST",
        "/api/messages/{topic}",
        "Publish a message, to the node given or to the first that has the topic.",
        {
            "body": TEXT,
            "body_base64": TEXT,
            "node": TEXT,
            "defer_ms": COUNT,
            "headers": {"type": "object", "additionalProperties": TEXT},
        },
        group=GROUP,
        details="`headers` needs nsparq's own nsqd.",
        permission="publish",
        max_body=2 * MAX_BODY,
        errors=(
            FORBIDDEN,
            (400, "INVALID_TOPIC"),
            (400, "MSG_EMPTY"),
            (400, "INVALID_BODY"),
            (400, "INVALID_HEADERS"),
            (501, "NOT_SUPPORTED"),
            UPSTREAM,
        ),
    )
    async def publish(self, request: Request) -> Result:
        (topic,) = path_values(request)
        body = parse_body(request)
        encoded, plain = body.get("body_base64"), body.get("body") or ""
        try:
            content = base64.b64decode(encoded, validate=True) if encoded is not None else plain.encode()
        except (binascii.Error, ValueError, TypeError, AttributeError):
            raise ApiError(400, "INVALID_BODY") from None
        node, defer_ms = _field(body, "node", ""), _field(body, "defer_ms", 0)
        address = await self._admin.operations.publish(
            self._actor(request),
            topic,
            content,
            node=node,
            defer_ms=defer_ms,
            headers=_field(body, "headers", {}),
        )
        return {"message": "", "node": address}

    @change(
        "POST",
        "/api/copy/{topic}",
        "Publish messages of a topic again.",
        {"messages": {"type": "array", "items": object_of(node=TEXT, sequence=COUNT)}, **_TARGET},
        group=GROUP,
        details="To the topic `to`. Of a dead letter, unless `unwrap` is false, the message inside is "
        "published, and without `to` it goes to the topic that it came from. The messages stay where they "
        "are. This also needs `subscribe` for the topic, and `publish` for the topics that get them.",
        errors=(FORBIDDEN, (400, "INVALID_BODY"), (400, "NOTHING_CHOSEN"), (409, "…"), *NOT_THERE),
    )
    async def copy(self, request: Request) -> Result:
        (topic,) = path_values(request)
        body = parse_body(request)
        wanted = body.get("messages")
        if not isinstance(wanted, list) or not all(map(_names_message, wanted)):
            raise ApiError(400, "INVALID_BODY")
        chosen = [(one["node"], one["sequence"]) for one in wanted]
        copied = await self._admin.operations.copy(
            self._actor(request), self._access(request), topic, chosen, **_target(body)
        )
        return {"message": "", "copied": copied}

    @change(
        "POST",
        "/api/move/{topic}/{channel}",
        "Publish the messages of a channel to another topic, and finish them in the channel.",
        {**_TARGET, "count": COUNT},
        group=GROUP,
        details="Only for a channel without consumers. After a failure half-way, messages are in both "
        "places. `left` is the number of messages still in the channel: ask again. This also needs "
        "`subscribe` for the channel, and `publish` for the topics that get them.",
        errors=(FORBIDDEN, (400, "INVALID_BODY"), (409, "…"), (501, "NOT_SUPPORTED"), *NOT_THERE),
    )
    async def move(self, request: Request) -> Result:
        topic, channel = path_values(request)
        body = parse_body(request)
        count = _field(body, "count", 0)
        if count < 0:
            raise ApiError(400, "INVALID_BODY")
        moved, left, warning = await self._admin.operations.move(
            self._actor(request), self._access(request), topic, channel, count=count, **_target(body)
        )
        return {"message": warning, "moved": moved, "left": left}

    @change(
        "POST",
        "/api/replay/{topic}/{channel}",
        "Move a channel to another position in the topic's log. With `dry_run`, the default, only report "
        "the effect.",
        {
            "to": {"type": "string", "enum": ["start", "end", "time"]},
            "time": TEXT,
            "dry_run": {"type": "boolean"},
        },
        group="Replay",
        details="`time` is an RFC 3339 time, Unix seconds, or a duration ago such as `90m`. `again` counts "
        "messages that are delivered again, `skipped` messages that are no longer delivered.",
        errors=(FORBIDDEN, (400, "INVALID_TARGET"), (409, "…"), (501, "NOT_SUPPORTED"), *NOT_THERE),
    )
    async def replay(self, request: Request) -> Result:
        topic, channel = path_values(request)
        body = parse_body(request)
        to, when, dry_run = _field(body, "to", ""), _field(body, "time", ""), _field(body, "dry_run", True)
        try:
            target = parse_target(to or ("time" if when else ""), when)
        except BadTarget as error:
            raise ApiError(400, "INVALID_TARGET", reason=str(error)) from error
        operations = self._admin.operations
        if dry_run:
            plans, warning = await operations.plan(topic, channel, target)
        else:
            actor = self._actor(request)
            plans, warning = await operations.replay(actor, topic, channel, target)
        return {"message": warning, "done": not dry_run, "nodes": [plan.as_json() for plan in plans]}


def _number(request: Request, name: str, default: int) -> int:
    value = request.parameters.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit()) or len(value) > 19:
        raise ApiError(400, f"INVALID_ARG_{name.upper()}")
    return int(value)


def _names_message(value: Any) -> bool:
    """Whether it has the node and the sequence number of a message."""
    if not isinstance(value, dict):
        return False
    return type(value.get("node")) is str and type(value.get("sequence")) is int


def _field(body: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field of the same type as its default. Raises ApiError."""
    value = body.get(name, default)
    if type(value) is not type(default):
        raise ApiError(400, "INVALID_BODY")
    return value


def _target(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"to": _field(body, "to", ""), "unwrap": _field(body, "unwrap", True)}
