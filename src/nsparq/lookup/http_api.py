"""nsqlookupd's HTTP API.

`python -m nsparq.lookup.http_api --markdown` prints the reference page in docs/reference.
`--openapi` prints the document that the daemon serves.
"""

from __future__ import annotations

import asyncio
import logging
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
    endpoints_of,
)
from nsparq.http.describe import openapi, print_description
from nsparq.http.metrics import Exposition, add_process
from nsparq.lookup import answers
from nsparq.lookup.registry import Registry
from nsparq.names import is_valid_name
from nsparq.version import NSQ_VERSION, __version__

logger = logging.getLogger(__name__)

WILDCARD: Final = "*"
"""NSQ takes this for every topic, even to delete. It is not a valid name, and we refuse it."""

SLICE: Final = 200
"""Entries of /debug to make before the event loop runs other work."""

TOPIC: Final = Param(name="topic", help="name of the topic", required=True)
CHANNEL: Final = Param(name="channel", help="name of the channel", required=True)
TOPIC_ERRORS: Final = ((400, "MISSING_ARG_TOPIC"), (400, "INVALID_ARG_TOPIC"))
CHANNEL_ERRORS: Final = (*TOPIC_ERRORS, (400, "MISSING_ARG_CHANNEL"), (400, "INVALID_ARG_CHANNEL"))

_TEXT: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
_TEXTS: Final = {"type": "array", "items": _TEXT}
_PRODUCER: Final[dict[str, Any]] = {
    **dict.fromkeys(("remote_address", "hostname", "broadcast_address", "version"), _TEXT),
    **dict.fromkeys(("topology_zone", "topology_region"), _TEXT),
    **dict.fromkeys(("tcp_port", "http_port"), _INTEGER),
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

Parameters go into the query string, also for POST; of a repeated one the first counts. Errors are
`{"message":"CODE"}`; an unknown path is 404 `NOT_FOUND`, a wrong method 405 `METHOD_NOT_ALLOWED`.
Lists have no particular order."""


class LookupApi(Api):
    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], int],
        check_host: Callable[[Request], None] | None = None,
        connections: Callable[[], int] = lambda: 0,
    ) -> None:
        """`connections` gives the number of TCP connections."""
        self._registry = registry
        self._clock = clock
        self._connections = connections
        super().__init__(
            title="nsqlookupd", version=NSQ_VERSION, endpoints=endpoints_of(self), check_host=check_host
        )

    @Endpoint(
        group="Discovery",
        method="GET",
        path="/lookup",
        summary="Get the nsqds and channels of a topic.",
        details="Only nsqds that are active and not tombstoned for the topic. The list may be empty. "
        "404 means that no nsqd has registered the topic and nobody has created it here.",
        params=(TOPIC,),
        success="channels and producers",
        success_schema=_object({"channels": _TEXTS, "producers": _list(_PRODUCER)}),
        errors=(*TOPIC_ERRORS, (404, "TOPIC_NOT_FOUND")),
    )
    def lookup(self, request: Request) -> Result:
        found = self._registry.lookup_json(_topic(request), self._clock())
        if found is None:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return _json(found)

    @Endpoint(
        group="Discovery",
        method="GET",
        path="/topics",
        summary="List the names of all topics, with or without producers.",
        success="the names",
        success_schema=_object({"topics": _TEXTS}),
    )
    def topics(self, request: Request) -> Result:
        return _json(self._registry.topics_json())

    @Endpoint(
        group="Discovery",
        method="GET",
        path="/channels",
        summary="List the names of a topic's channels.",
        details="For an unknown topic the list is empty.",
        params=(TOPIC,),
        success="the names",
        success_schema=_object({"channels": _TEXTS}),
        errors=TOPIC_ERRORS,
    )
    def channels(self, request: Request) -> Result:
        return _json(self._registry.channels_json(_topic(request)))

    @Endpoint(
        group="Discovery",
        method="GET",
        path="/nodes",
        summary="List all active nsqds with their topics.",
        details="`tombstones` is parallel to `topics`.",
        success="the nsqds",
        success_schema=_object({"producers": _list(_NODE)}),
    )
    def nodes(self, request: Request) -> Result:
        return _json(self._registry.nodes_json(self._clock()))

    @Endpoint(
        group="Topics and channels",
        method="POST",
        path="/topic/create",
        summary="Add a topic.",
        details="No nsqd is told. Not an error if the topic exists.",
        params=(TOPIC,),
        errors=TOPIC_ERRORS,
    )
    def create_topic(self, request: Request) -> None:
        topic = _valid(request, "topic")
        logger.info("DB: adding topic(%s)", topic)
        self._registry.create(topic)

    @Endpoint(
        group="Topics and channels",
        method="POST",
        path="/topic/delete",
        summary="Remove a topic with its channels and producers.",
        details="No nsqd is told. An nsqd that registers the topic again adds it again. Not an error if the "
        "topic is unknown.",
        params=(TOPIC,),
        errors=TOPIC_ERRORS,
    )
    def delete_topic(self, request: Request) -> None:
        topic = _topic(request)
        logger.info("DB: removing topic(%.100s)", topic)
        self._registry.delete_topic(topic)

    @Endpoint(
        group="Topics and channels",
        method="POST",
        path="/topic/tombstone",
        summary="Hide an nsqd from lookups of a topic for `--tombstone-lifetime`.",
        details="Call this before you delete the topic on that nsqd, so that no consumer finds it there in "
        "between. Not an error if the nsqd is unknown.",
        params=(
            TOPIC,
            Param(name="node", help="the nsqd, as `broadcast_address:http_port`", required=True),
        ),
        errors=(*TOPIC_ERRORS, (400, "MISSING_ARG_NODE")),
    )
    def tombstone(self, request: Request) -> None:
        topic = _topic(request)
        node = _given(request, "node")
        logger.info("DB: setting tombstone for producer@%.100s of topic(%.100s)", node, topic)
        self._registry.tombstone(topic, node, self._clock())

    @Endpoint(
        group="Topics and channels",
        method="POST",
        path="/channel/create",
        summary="Add a channel and its topic.",
        details="An nsqd creates the channel when it next creates the topic.",
        params=(TOPIC, CHANNEL),
        errors=CHANNEL_ERRORS,
    )
    def create_channel(self, request: Request) -> None:
        topic, channel = _valid(request, "topic"), _valid(request, "channel")
        logger.info("DB: adding channel(%s) in topic(%s)", channel, topic)
        self._registry.create(topic, channel)

    @Endpoint(
        group="Topics and channels",
        method="POST",
        path="/channel/delete",
        summary="Remove a channel with its producers.",
        params=(TOPIC, CHANNEL),
        errors=(*CHANNEL_ERRORS, (404, "CHANNEL_NOT_FOUND")),
    )
    def delete_channel(self, request: Request) -> None:
        topic, channel = _valid(request, "topic"), _valid(request, "channel")
        if not self._registry.delete_channel(topic, channel):
            raise ApiError(404, "CHANNEL_NOT_FOUND")
        logger.info("DB: removing channel(%s) from topic(%s)", channel, topic)

    @Endpoint(
        group="The daemon",
        method="GET",
        path="/ping",
        summary="Check that the daemon answers.",
        success="`OK`",
        success_type=TEXT_TYPE,
        success_schema={"type": "string", "const": "OK"},
    )
    def ping(self, request: Request) -> Response:
        return Response(body=b"OK", content_type=TEXT_TYPE, nsq_header=False)

    @Endpoint(
        group="The daemon",
        method="GET",
        path="/info",
        summary="Get the version of NSQ that the daemon is compatible with.",
        success="an object",
        success_schema=_object({"version": _TEXT}),
    )
    def info(self, request: Request) -> Result:
        return {"version": NSQ_VERSION}

    @Endpoint(
        group="The daemon",
        method="GET",
        path="/debug",
        summary="List all registrations with their producers, by `category:topic:channel`.",
        details="Times are in nanoseconds. The answer may be large.",
        success="an object of lists",
        success_schema={"type": "object", "additionalProperties": {"type": "array"}},
    )
    async def debug(self, request: Request) -> Result:
        entries: list[bytes] = []
        for number, entry in enumerate(self._registry.debug_entries(), 1):
            entries.append(entry)
            if number % SLICE == 0:
                await asyncio.sleep(0)
        return _json(answers.debug(entries))

    @Endpoint(
        group="The daemon",
        method="GET",
        path="/metrics",
        summary="Get the figures for Prometheus.",
        success="the text exposition format",
        success_type="text/plain",
    )
    def metrics(self, request: Request) -> Response:
        registry, now_ns = self._registry, self._clock()
        out = Exposition()
        labels = f'{{version="{__version__}",nsq_version="{NSQ_VERSION}"}}'
        out.add("nsqlookupd_info", "gauge", "version of the daemon", 1, labels)
        for name, help_text, value in (
            ("connections", "TCP connections", self._connections()),
            ("producers", "nsqds that are connected", len(registry.producers)),
            ("active_producers", "nsqds that lookups return", registry.count_active(now_ns)),
            ("topics", "topics", len(registry.topics)),
            ("channels", "channels of all topics", sum(map(len, registry.channels.values()))),
            ("registrations", "topics and channels of each nsqd, summed", registry.count_registrations()),
        ):
            out.add(f"nsqlookupd_{name}", "gauge", help_text, value)
        add_process(out)
        return out.response()

    @Endpoint(
        group="The daemon",
        method="GET",
        path="/openapi.json",
        summary="Get the OpenAPI document of this API.",
        success="an OpenAPI 3.1 document",
        success_type=JSON_TYPE,
    )
    def openapi(self, request: Request) -> Result:
        return openapi(self)


def _json(body: bytes) -> Response:
    return Response(body=body, content_type=JSON_TYPE)


def _given(request: Request, name: str) -> str:
    value = request.parameters.get(name)
    if value is None:
        raise ApiError(400, f"MISSING_ARG_{name.upper()}")
    return value


def _topic(request: Request) -> str:
    """Any text but the wildcard. An invalid name is just not found."""
    topic = _given(request, "topic")
    if topic == WILDCARD:
        raise ApiError(400, "INVALID_ARG_TOPIC")
    return topic


def _valid(request: Request, name: str) -> str:
    value = _given(request, name)
    if not is_valid_name(value.encode("utf-8", "surrogateescape")):
        raise ApiError(400, f"INVALID_ARG_{name.upper()}")
    return value


def describe() -> Api:
    """The API without a daemon."""
    registry = Registry(inactive_timeout_ns=1, tombstone_lifetime_ns=1, max_registrations=1)
    return LookupApi(registry, lambda: 0)


if __name__ == "__main__":
    print_description("nsparq.lookup.http_api", describe, INTRODUCTION)
