"""nsqlookupd's HTTP API: the table of its endpoints, and what stands behind each.

`python -m nsparq.lookup.http_api --markdown` prints the checked-in reference page, `--openapi` the
description that the daemon serves.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Final

from nsparq.http.api import (
    JSON_TYPE,
    TEXT_TYPE,
    Api,
    ApiError,
    Endpoint,
    Param,
    Request,
    Response,
    Result,
)
from nsparq.http.describe import markdown, openapi
from nsparq.lookup.registry import Registry
from nsparq.names import is_valid_name
from nsparq.version import NSQ_VERSION

logger = logging.getLogger(__name__)

WILDCARD: Final = "*"
"""NSQ takes this for every topic, even where it deletes; no name can be spelled so."""

TOPIC: Final = Param(name="topic", help="name of the topic", required=True)
CHANNEL: Final = Param(name="channel", help="name of the channel", required=True)
TOPIC_ERRORS: Final = ((400, "MISSING_ARG_TOPIC"), (400, "INVALID_ARG_TOPIC"))
CHANNEL_ERRORS: Final = (*TOPIC_ERRORS, (400, "MISSING_ARG_CHANNEL"), (400, "INVALID_ARG_CHANNEL"))

_TEXT: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
_TEXTS: Final = {"type": "array", "items": _TEXT}
_PRODUCER: Final[dict[str, Any]] = {
    "remote_address": _TEXT,
    "hostname": _TEXT,
    "broadcast_address": _TEXT,
    "tcp_port": _INTEGER,
    "http_port": _INTEGER,
    "version": _TEXT,
    "topology_zone": _TEXT,
    "topology_region": _TEXT,
}
_NODE: Final[dict[str, Any]] = {
    **_PRODUCER,
    "tombstones": {"type": "array", "items": {"type": "boolean"}},
    "topics": _TEXTS,
}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties}


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": _object(item)}


INTRODUCTION: Final = """\
# HTTP API of nsqlookupd

Generated from the source by `make docs`; do not edit.

Parameters stand in the query, also of a POST; of a repeated one the first counts. Errors are
`{"message":"CODE"}`; a path that is not listed is 404 `NOT_FOUND`, a wrong method 405
`METHOD_NOT_ALLOWED`. Lists come in no particular order."""


class HttpApi:
    """The handlers of one nsqlookupd."""

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], int],
        check_host: Callable[[Request], None] | None = None,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self.api = Api(
            title="nsqlookupd", version=NSQ_VERSION, endpoints=self._endpoints(), check_host=check_host
        )

    def _endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                group="Discovery",
                method="GET",
                path="/lookup",
                handler=self._lookup,
                summary="Where a topic is produced, and its channels.",
                details="Only nsqds that are active and not tombstoned for the topic; none is an empty list. "
                "404 means that no nsqd has registered the topic and nobody has created it here.",
                params=(TOPIC,),
                success="channels and producers",
                success_type=JSON_TYPE,
                success_schema=_object({"channels": _TEXTS, "producers": _list(_PRODUCER)}),
                errors=(*TOPIC_ERRORS, (404, "TOPIC_NOT_FOUND")),
            ),
            Endpoint(
                group="Discovery",
                method="GET",
                path="/topics",
                handler=lambda _: _json(self._registry.topics_json()),
                summary="The names of all topics, produced at present or not.",
                success="the names",
                success_type=JSON_TYPE,
                success_schema=_object({"topics": _TEXTS}),
            ),
            Endpoint(
                group="Discovery",
                method="GET",
                path="/channels",
                handler=lambda request: _json(self._registry.channels_json(_topic(request))),
                summary="The names of a topic's channels.",
                details="Of a topic that is not known: an empty list.",
                params=(TOPIC,),
                success="the names",
                success_type=JSON_TYPE,
                success_schema=_object({"channels": _TEXTS}),
                errors=TOPIC_ERRORS,
            ),
            Endpoint(
                group="Discovery",
                method="GET",
                path="/nodes",
                handler=lambda _: _json(self._registry.nodes_json(self._clock())),
                summary="Every nsqd that is active, with its topics.",
                details="`tombstones` runs parallel to `topics`.",
                success="the nsqds",
                success_type=JSON_TYPE,
                success_schema=_object({"producers": _list(_NODE)}),
            ),
            Endpoint(
                group="Topics and channels",
                method="POST",
                path="/topic/create",
                handler=self._create_topic,
                summary="Make a topic known.",
                details="An nsqd is not told. Fine if it exists.",
                params=(TOPIC,),
                errors=TOPIC_ERRORS,
            ),
            Endpoint(
                group="Topics and channels",
                method="POST",
                path="/topic/delete",
                handler=self._delete_topic,
                summary="Forget a topic, its channels and who has them.",
                details="An nsqd is not told, and comes back when it registers anew. Fine if there is none.",
                params=(TOPIC,),
                errors=TOPIC_ERRORS,
            ),
            Endpoint(
                group="Topics and channels",
                method="POST",
                path="/topic/tombstone",
                handler=self._tombstone,
                summary="Hide an nsqd from lookups of a topic, for `--tombstone-lifetime`.",
                details="To be called before the topic is deleted on that nsqd, so that no consumer finds it "
                "there in between. Fine if there is no such nsqd.",
                params=(
                    TOPIC,
                    Param(name="node", help="the nsqd, as `broadcast_address:http_port`", required=True),
                ),
                errors=(*TOPIC_ERRORS, (400, "MISSING_ARG_NODE")),
            ),
            Endpoint(
                group="Topics and channels",
                method="POST",
                path="/channel/create",
                handler=self._create_channel,
                summary="Make a channel known, and its topic.",
                details="An nsqd creates it when it next creates the topic.",
                params=(TOPIC, CHANNEL),
                errors=CHANNEL_ERRORS,
            ),
            Endpoint(
                group="Topics and channels",
                method="POST",
                path="/channel/delete",
                handler=self._delete_channel,
                summary="Forget a channel and who has it.",
                params=(TOPIC, CHANNEL),
                errors=(*CHANNEL_ERRORS, (404, "CHANNEL_NOT_FOUND")),
            ),
            Endpoint(
                group="The daemon",
                method="GET",
                path="/ping",
                handler=lambda _: Response(body=b"OK", content_type=TEXT_TYPE, nsq_header=False),
                summary="Whether the daemon is well.",
                success="`OK`",
                success_type=TEXT_TYPE,
                success_schema={"type": "string", "const": "OK"},
            ),
            Endpoint(
                group="The daemon",
                method="GET",
                path="/info",
                handler=lambda _: {"version": NSQ_VERSION},
                summary="The version of NSQ that it speaks as.",
                success="an object",
                success_type=JSON_TYPE,
                success_schema=_object({"version": _TEXT}),
            ),
            Endpoint(
                group="The daemon",
                method="GET",
                path="/debug",
                handler=lambda _: _json(self._registry.debug_json()),
                summary="Every registration with its producers, by `category:topic:channel`.",
                details="Times are in nanoseconds. As large as all there is to know.",
                success="an object of lists",
                success_type=JSON_TYPE,
                success_schema={"type": "object", "additionalProperties": {"type": "array"}},
            ),
            Endpoint(
                group="The daemon",
                method="GET",
                path="/openapi.json",
                handler=lambda _: openapi(self.api),
                summary="This API, described for programs.",
                success="an OpenAPI 3.1 document",
                success_type=JSON_TYPE,
            ),
        ]

    def _lookup(self, request: Request) -> Result:
        found = self._registry.lookup_json(_topic(request), self._clock())
        if found is None:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return _json(found)

    def _create_topic(self, request: Request) -> None:
        topic = _valid(request, "topic")
        logger.info("DB: adding topic(%s)", topic)
        self._registry.create(topic)

    def _delete_topic(self, request: Request) -> None:
        topic = _topic(request)
        logger.info("DB: removing topic(%.100s)", topic)
        self._registry.delete_topic(topic)

    def _tombstone(self, request: Request) -> None:
        topic = _topic(request)
        node = _given(request, "node")
        logger.info("DB: setting tombstone for producer@%.100s of topic(%.100s)", node, topic)
        self._registry.tombstone(topic, node, self._clock())

    def _create_channel(self, request: Request) -> None:
        topic, channel = _valid_names(request)
        logger.info("DB: adding channel(%s) in topic(%s)", channel, topic)
        self._registry.create(topic, channel)

    def _delete_channel(self, request: Request) -> None:
        topic, channel = _valid_names(request)
        if not self._registry.delete_channel(topic, channel):
            raise ApiError(404, "CHANNEL_NOT_FOUND")
        logger.info("DB: removing channel(%s) from topic(%s)", channel, topic)


def _json(body: bytes) -> Response:
    return Response(body=body, content_type=JSON_TYPE)


def _given(request: Request, name: str) -> str:
    value = request.parameters.get(name)
    if value is None:
        raise ApiError(400, f"MISSING_ARG_{name.upper()}")
    return value


def _topic(request: Request) -> str:
    """Any text but the wildcard: a name that cannot be is merely not found."""
    topic = _given(request, "topic")
    if topic == WILDCARD:
        raise ApiError(400, "INVALID_ARG_TOPIC")
    return topic


def _valid_names(request: Request) -> tuple[str, str]:
    return _valid(request, "topic"), _valid(request, "channel")


def _valid(request: Request, name: str) -> str:
    value = _given(request, name)
    if not is_valid_name(value.encode("utf-8", "surrogateescape")):
        raise ApiError(400, f"INVALID_ARG_{name.upper()}")
    return value


def describe() -> Api:
    """The API without a daemon behind it."""
    registry = Registry(inactive_timeout_ns=1, tombstone_lifetime_ns=1, max_registrations=1)
    return HttpApi(registry, lambda: 0).api


if __name__ == "__main__":
    import json

    pages = {
        "--markdown": lambda: markdown(describe(), INTRODUCTION),
        "--openapi": lambda: json.dumps(openapi(describe()), indent=2) + "\n",
    }
    if len(sys.argv) != 2 or sys.argv[1] not in pages:
        sys.exit(f"usage: python -m nsparq.lookup.http_api {'|'.join(pages)}")
    sys.stdout.write(pages[sys.argv[1]]())
