"""The table of the endpoints for many topics at a time: see topics_api for the handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from nsparq.http.api import JSON_TYPE, Endpoint, Param
from nsparq.server.arguments import CHANNEL, OWNER
from nsparq.server.schemas import COUNT, INT, NAME, SEQUENCE, TEXT, YES_NO, obj
from nsparq.server.topics_api import MAX_WAIT_MS

if TYPE_CHECKING:
    from nsparq.server.topics_api import TopicsApi

MAX_BODY: Final = 8 << 20

_CHANNEL_ERRORS: Final = ((400, "MISSING_ARG_CHANNEL"), (400, "INVALID_ARG_CHANNEL"))
_PLACE: Final = {
    "type": "array",
    "prefixItems": [TEXT, SEQUENCE],
    "minItems": 2,
    "maxItems": 2,
    "items": False,
}
_REFUSED: Final = obj({"message": TEXT, "status": INT})


def _by_topic(value: Any) -> dict[str, Any]:
    return obj({"topics": {"type": "object", "propertyNames": NAME, "additionalProperties": value}})


_DESCRIBED: Final = obj(
    {
        "incarnation": TEXT,
        "earliest": COUNT,
        "latest": COUNT,
        "visible": COUNT,
        "messages": COUNT,
        "bytes": COUNT,
        "channel": {"type": "string", "enum": ["missing", "there", "paused"]},
        "owner": TEXT,
        "state": COUNT,
    }
)
_MOVED: Final = obj({"cursor": COUNT, "depth": COUNT}, {"created": YES_NO})


def topics_endpoints(api: TopicsApi) -> list[Endpoint]:
    return [
        Endpoint(
            group="The log",
            method="POST",
            path="/topics/positions",
            handler=api.positions,
            summary="Where the logs of many topics begin and end, and what a channel of theirs does.",
            details="As `/topic/positions`, without the times, and for each topic `channel`: `missing`, "
            "`there` or `paused`, and its `owner`. `state` is a number that changes with anything said "
            "here. Send it back with the next request, in place of `null`: topics that are as they were are "
            "then left out. A topic that does not exist is `null`, and its state is 0.",
            params=(
                Param(name="channel", help="the channel to look at", schema=NAME),
                Param(
                    name="wait",
                    help="milliseconds to wait for a publish, if nothing has changed yet (default 0, at most "
                    f"{MAX_WAIT_MS}); other changes are found when the time is up",
                    schema={"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS},
                ),
            ),
            permission="subscribe",
            topics=api.topics,
            keeps_body=True,
            body_help='the states that are known, or null: `{"topics": {"orders": null}}`',
            body_type="application/json",
            body_schema=_by_topic({"type": ["integer", "null"]}),
            max_body=MAX_BODY,
            success="an object by topic, of those whose state is another one",
            success_type=JSON_TYPE,
            success_schema=_by_topic({"anyOf": [_DESCRIBED, {"type": "null"}]}),
            errors=((400, "INVALID_ARG_CHANNEL"), (400, "INVALID_ARG_WAIT"), (400, "INVALID_BODY")),
        ),
        Endpoint(
            group="The log",
            method="POST",
            path="/channels/commit",
            handler=api.commit,
            summary="Finish everything of a channel of many topics that lies before sequence numbers.",
            details="As `/channel/commit` for each of them. What is refused has a `message` and a `status`.",
            params=(CHANNEL, OWNER),
            permission="subscribe",
            topics=api.topics,
            keeps_body=True,
            body_help='incarnation and first number not done: `{"topics": {"orders": ["9865…", 17]}}`',
            body_type="application/json",
            body_schema=_by_topic(_PLACE),
            max_body=MAX_BODY,
            success="by topic, the channel's cursor and depth afterwards, or why it was refused",
            success_type=JSON_TYPE,
            success_schema=_by_topic({"anyOf": [_MOVED, _REFUSED]}),
            errors=(*_CHANNEL_ERRORS, (400, "INVALID_ARG_OWNER"), (400, "INVALID_BODY")),
        ),
        Endpoint(
            group="The log",
            method="POST",
            path="/channels/seek",
            handler=api.seek,
            summary="Move a channel of many topics to sequence numbers; created where it is missing.",
            details="As `/channel/seek` for each of them. What is refused has a `message` and a `status`.",
            params=(CHANNEL, OWNER),
            permission="admin",
            topics=api.topics,
            keeps_body=True,
            body_help='incarnation and sequence number: `{"topics": {"orders": ["9865…", 17]}}`',
            body_type="application/json",
            body_schema=_by_topic(_PLACE),
            max_body=MAX_BODY,
            success="by topic, the channel's cursor and depth afterwards and whether it was created; or why "
            "it was refused",
            success_type=JSON_TYPE,
            success_schema=_by_topic({"anyOf": [_MOVED, _REFUSED]}),
            errors=(*_CHANNEL_ERRORS, (400, "INVALID_ARG_OWNER"), (400, "INVALID_BODY")),
        ),
    ]
