"""The JSON API beyond NSQ's: overview, history, messages, replay, pipelines."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nsparq.admin.change.messages import DEFAULT_COUNT, MAX_BODY, MAX_COUNT, STATES
from nsparq.admin.change.replay import BadTarget, parse_target
from nsparq.admin.collect.history import RANGES, Table
from nsparq.admin.show.api import parse_body
from nsparq.admin.show.endpoints import FORBIDDEN, NOT_THERE, UPSTREAM, change, look, object_of
from nsparq.admin.show.routing import path_values
from nsparq.http.api import JSON_TYPE, ApiError, Endpoint, Param, Request, Response, Result

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["MoreApi", "more_endpoints"]

_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_RANGE: Final = Param(
    name="range",
    help="`now` (every poll), `hours` (a point a minute), `day` (ten minutes), `week` (two hours)",
    schema={"type": "string", "enum": [*RANGES]},
)


class MoreApi:
    """The handlers of one nsqadmin."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._watch = admin.watch

    # Overview and history

    async def overview(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        watch = self._watch
        totals = watch.totals.latest(()) or {}
        found = {
            "polled": round(watch.polled_s, 3),
            "interval": round(watch.interval_s, 3),
            "topics": len(watch.channels_of),
            "channels": sum(map(len, watch.channels_of.values())),
            "nodes": len(watch.nodes),
            "messages": watch.message_count,
            "totals": {name: _figure(value) for name, value in totals.items()},
            "problems": [one.as_json() for one in self._admin.problems()],
            "errors": watch.errors,
            "history_bytes": watch.history_bytes,
        }
        return cached(request, found)

    def history(self, request: Request) -> Response:
        return self._points(request, self._watch.totals, ())

    def topic_history(self, request: Request) -> Response:
        return self._points(request, self._watch.topics, tuple(path_values(request)))

    def channel_history(self, request: Request) -> Response:
        return self._points(request, self._watch.channels, tuple(path_values(request)))

    def node_history(self, request: Request) -> Response:
        return self._points(request, self._watch.nodes_table, tuple(path_values(request)))

    def pipeline_history(self, request: Request) -> Response:
        return self._points(request, self._admin.pipelines.history, tuple(path_values(request)))

    def client_history(self, request: Request) -> Response:
        return self._points(request, self._watch.clients, tuple(path_values(request)))

    def _points(self, request: Request, table: Table, key: tuple[str, ...]) -> Response:
        wanted = request.parameters.get("range", RANGES[0])
        if wanted not in RANGES:
            raise ApiError(400, "INVALID_ARG_RANGE")
        resolution = RANGES.index(wanted)
        points = table.points(key, resolution)
        columns = np.where(np.isfinite(points.values), points.values.astype(np.float64), np.nan).T
        values = {
            name: [None if math.isnan(one) else float(f"{one:.6g}") for one in column.tolist()]
            for name, column in zip(table.figures, columns, strict=True)
        }
        found = {"step": table.step_s(resolution), "times": points.times, "values": values}
        return cached(request, found)

    # Messages

    async def peek_topic(self, request: Request) -> Result:
        (topic,) = path_values(request)
        return await self._peek(request, topic, "")

    async def peek_channel(self, request: Request) -> Result:
        topic, channel = path_values(request)
        return await self._peek(request, topic, channel)

    async def _peek(self, request: Request, topic: str, channel: str) -> Result:
        parameters = request.parameters
        able, found = await self._admin.operations.peek(
            topic,
            channel,
            node=parameters.get("node", ""),
            count=_number(request, "count", DEFAULT_COUNT),
            start=_number(request, "from", -1) if "from" in parameters else None,
            state=parameters.get("state", ""),
        )
        words = parameters.get("q", "")
        return {
            "messages": [one.as_json() for one in found.messages if not words or one.contains(words)],
            "missing": found.missing,
            "unable": [node.address for node in able.unable],
            "errors": able.errors + found.errors,
        }

    async def publish(self, request: Request) -> Result:
        (topic,) = path_values(request)
        body = parse_body(request)
        encoded, text = body.get("body_base64"), body.get("body")
        try:
            content = (
                base64.b64decode(encoded, validate=True) if encoded is not None else (text or "").encode()
            )
        except (binascii.Error, ValueError, TypeError, AttributeError):
            raise ApiError(400, "INVALID_BODY") from None
        node, defer_ms = body.get("node", ""), body.get("defer_ms", 0)
        if not isinstance(node, str) or type(defer_ms) is not int:
            raise ApiError(400, "INVALID_BODY")
        where = await self._admin.operations.publish(
            self._admin.guard.actor(request), topic, content, node=node, defer_ms=defer_ms
        )
        return {"message": "", "node": where}

    async def copy(self, request: Request) -> Result:
        (topic,) = path_values(request)
        body = parse_body(request)
        wanted = body.get("messages")
        if not isinstance(wanted, list):
            raise ApiError(400, "INVALID_BODY")
        try:
            chosen = [(str(one["node"]), int(one["sequence"])) for one in wanted]
        except (LookupError, TypeError, ValueError):
            raise ApiError(400, "INVALID_BODY") from None
        to, unwrap = _target(body)
        copied = await self._admin.operations.copy(
            self._admin.guard.actor(request),
            self._admin.guard.access(request),
            topic,
            chosen,
            to=to,
            unwrap=unwrap,
        )
        return {"message": "", "copied": copied}

    async def move(self, request: Request) -> Result:
        topic, channel = path_values(request)
        body = parse_body(request)
        count = body.get("count", 0)
        if type(count) is not int or count < 0:
            raise ApiError(400, "INVALID_BODY")
        to, unwrap = _target(body)
        moved, left = await self._admin.operations.move(
            self._admin.guard.actor(request),
            self._admin.guard.access(request),
            topic,
            channel,
            to=to,
            unwrap=unwrap,
            count=count,
        )
        return {"message": "", "moved": moved, "left": left}

    # Replay

    async def replay(self, request: Request) -> Result:
        topic, channel = path_values(request)
        body = parse_body(request)
        to, when, dry_run = body.get("to", ""), body.get("time", ""), body.get("dry_run", True)
        if not isinstance(to, str) or not isinstance(when, str) or not isinstance(dry_run, bool):
            raise ApiError(400, "INVALID_BODY")
        try:
            target = parse_target(to or ("time" if when else ""), when)
        except BadTarget as error:
            raise ApiError(400, "INVALID_TARGET", reason=str(error)) from error
        operations = self._admin.operations
        if dry_run:
            plans = await operations.plan(topic, channel, target)
        else:
            actor = self._admin.guard.actor(request)
            plans = await operations.replay(actor, topic, channel, target)
        return {"message": "", "done": not dry_run, "nodes": [plan.as_json() for plan in plans]}

    def pipelines(self, request: Request) -> Result:
        return {"pipelines": self._admin.pipelines.found}


def cached(request: Request, value: Any) -> Response:
    """With a tag by which a browser that asks again is told that nothing has changed."""
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = (("ETag", tag), ("Cache-Control", "no-cache"))
    if request.header("If-None-Match") == tag:
        return Response(status=304, headers=headers)
    return Response(body=body, content_type=JSON_TYPE, headers=headers)


def _figure(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _number(request: Request, name: str, default: int) -> int:
    value = request.parameters.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit()) or len(value) > 19:
        raise ApiError(400, f"INVALID_ARG_{name.upper()}")
    return int(value)


def _target(body: dict[str, Any]) -> tuple[str, bool]:
    to, unwrap = body.get("to", ""), body.get("unwrap", True)
    if not isinstance(to, str) or not isinstance(unwrap, bool):
        raise ApiError(400, "INVALID_BODY")
    return to, unwrap


def more_endpoints(api: MoreApi) -> list[Endpoint]:
    history = {
        "group": "Overview and history",
        "params": (_RANGE,),
        "success": "`times` in Unix seconds, and `values` by figure; null where nothing is known. No times "
        "of what was never seen, or has only just come",
        "errors": ((400, "INVALID_ARG_RANGE"),),
    }
    messages: dict[str, Any] = {
        "group": "Messages",
        "permission": "subscribe",
        "success": "the messages; `unable` names nodes that cannot show any",
    }
    peek_params = (
        Param(name="node", help="only of this one"),
        Param(name="count", help=f"how many of each node (default {DEFAULT_COUNT}, at most {MAX_COUNT})"),
        Param(name="q", help="only those that contain this text"),
    )
    target = {"to": _TEXT, "unwrap": {"type": "boolean"}}
    return [
        look(
            "/api/overview",
            api.overview,
            "What needs a person, the worst first; and the totals.",
            group="Overview and history",
        ),
        look("/api/history", api.history, "Figures of the whole cluster over time.", **history),
        look("/api/history/topics/{topic}", api.topic_history, "Figures of a topic over time.", **history),
        look(
            "/api/history/topics/{topic}/{channel}",
            api.channel_history,
            "Figures of a channel over time.",
            **history,
        ),
        look("/api/history/nodes/{node}", api.node_history, "Figures of a node over time.", **history),
        look(
            "/api/history/clients/{topic}/{channel}/{node}/{client}",
            api.client_history,
            "Figures of one consumer over time, by its address.",
            **history,
        ),
        look(
            "/api/history/pipelines/{runner}/{pipeline}",
            api.pipeline_history,
            "Figures of a pipeline over time, by the address of its runner.",
            **history,
        ),
        look(
            "/api/messages/{topic}",
            api.peek_topic,
            "Messages of a topic, without consuming them, the newest first.",
            params=(*peek_params, Param(name="from", help="sequence number to begin at; with `node`")),
            errors=NOT_THERE,
            **messages,
        ),
        look(
            "/api/messages/{topic}/{channel}",
            api.peek_channel,
            "Messages that a channel holds, without consuming them.",
            params=(*peek_params, Param(name="state", help=f"only {', '.join(STATES)}")),
            errors=NOT_THERE,
            **messages,
        ),
        change(
            "POST",
            "/api/messages/{topic}",
            api.publish,
            "Publish a message, to the node given or to the first that has the topic.",
            {"body": _TEXT, "body_base64": _TEXT, "node": _TEXT, "defer_ms": _COUNT},
            group="Messages",
            permission="publish",
            max_body=2 * MAX_BODY,
            errors=(FORBIDDEN, (400, "INVALID_TOPIC"), (400, "MSG_EMPTY"), (400, "INVALID_BODY"), UPSTREAM),
        ),
        change(
            "POST",
            "/api/copy/{topic}",
            api.copy,
            "Publish messages of a topic once more.",
            {"messages": {"type": "array", "items": object_of(node=_TEXT, sequence=_COUNT)}, **target},
            group="Messages",
            details="To the topic `to`; of dead letters, unless `unwrap` is false, what they hold, and "
            "without `to` to the topic that it came from. They stay where they are. This takes `subscribe` "
            "for the topic too, and `publish` for where they go.",
            errors=(FORBIDDEN, (400, "INVALID_BODY"), (400, "NOTHING_CHOSEN"), (409, "…"), *NOT_THERE),
        ),
        change(
            "POST",
            "/api/move/{topic}/{channel}",
            api.move,
            "Publish what a channel holds elsewhere, and finish it there.",
            {**target, "count": _COUNT},
            group="Messages",
            details="Only of a channel without consumers. A failure in between leaves messages in both "
            "places. `left` says how many are still there: ask again. It also takes `subscribe` for the "
            "channel, and `publish` for where they go.",
            errors=(FORBIDDEN, (400, "INVALID_BODY"), (409, "…"), (501, "NOT_SUPPORTED"), *NOT_THERE),
        ),
        change(
            "POST",
            "/api/replay/{topic}/{channel}",
            api.replay,
            "Move a channel in its topic's log; unless `dry_run` is false, only say what that would do.",
            {
                "to": {"type": "string", "enum": ["start", "end", "time"]},
                "time": _TEXT,
                "dry_run": {"type": "boolean"},
            },
            group="Replay",
            details="A time is an RFC 3339 one, Unix seconds, or a duration ago such as `90m`. `again` "
            "counts messages that are delivered again, `skipped` those that are not delivered any more.",
            errors=(FORBIDDEN, (400, "INVALID_TARGET"), (409, "…"), (501, "NOT_SUPPORTED"), *NOT_THERE),
        ),
        look(
            "/api/pipelines",
            api.pipelines,
            "Spark pipelines, as their runners tell.",
            group="Pipelines",
        ),
    ]
