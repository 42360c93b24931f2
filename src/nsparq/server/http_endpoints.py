"""The table of nsqd's HTTP API: see http_api for the handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsparq.http.api import JSON_TYPE, TEXT_TYPE, Endpoint, Param
from nsparq.http.describe import openapi
from nsparq.server.arguments import CHANNEL, NAMED_CHANNEL_ERRORS, TOPIC
from nsparq.server.config import CHANGEABLE, KEYS, get_config, put_config
from nsparq.server.log_endpoints import log_endpoints
from nsparq.server.schemas import INFO, STATS, TEXT
from nsparq.server.topics_endpoints import topics_endpoints
from nsparq.server.transaction_endpoints import transaction_endpoints

if TYPE_CHECKING:
    from nsparq.server.http_api import HttpApi

_MESSAGE: Final = {"type": "string", "format": "binary", "minLength": 1}

_TOPIC_ERRORS: Final = ((400, "MISSING_ARG_TOPIC"), (400, "INVALID_TOPIC"))


def nsqd_endpoints(api: HttpApi) -> list[Endpoint]:
    options = api.nsqd.options
    return [
        Endpoint(
            group="Publishing",
            method="POST",
            path="/pub",
            handler=api.pub,
            summary="Publish one message.",
            details="Answered when the message is as durable as the daemon is told to make it.",
            params=(
                TOPIC,
                Param(
                    name="defer",
                    help="milliseconds before it is delivered, up to `--max-req-timeout`",
                    schema={"type": "integer", "minimum": 0, "maximum": 3_600_000},
                ),
            ),
            permission="publish",
            keeps_body=True,
            body_help="the message",
            body_schema=_MESSAGE,
            max_body=options.max_msg_size,
            too_big="MSG_TOO_BIG",
            success="`OK`",
            success_type=TEXT_TYPE,
            success_schema={"type": "string", "const": "OK"},
            errors=(
                (400, "MSG_EMPTY"),
                *_TOPIC_ERRORS,
                (400, "INVALID_DEFER"),
                (503, "EXITING"),
                (503, "FSYNC_FAILED"),
            ),
        ),
        Endpoint(
            group="Publishing",
            method="POST",
            path="/mpub",
            handler=api.mpub,
            summary="Publish several messages, all or none.",
            details="One per line, empty lines left out; or, with `binary`, a 32-bit count and then each "
            "message behind its 32-bit size, big endian.",
            params=(
                TOPIC,
                Param(name="binary", help="anything but `false` and `0`: the binary form"),
            ),
            permission="publish",
            keeps_body=True,
            body_help="the messages",
            max_body=options.max_body_size,
            success="`OK`",
            success_type=TEXT_TYPE,
            success_schema={"type": "string", "const": "OK"},
            errors=(
                *_TOPIC_ERRORS,
                (413, "MSG_TOO_BIG"),
                (413, "BAD_BODY"),
                (413, "BAD_MESSAGE"),
                (503, "EXITING"),
                (503, "FSYNC_FAILED"),
            ),
        ),
        _topic_endpoint(api, "create", "Create a topic; fine if it exists.", *_TOPIC_ERRORS),
        _topic_endpoint(
            api,
            "delete",
            "Delete a topic with its channels and messages.",
            _TOPIC_ERRORS[0],
            (404, "TOPIC_NOT_FOUND"),
        ),
        _topic_endpoint(
            api,
            "empty",
            "Drop the messages that no channel has seen.",
            *_TOPIC_ERRORS,
            (404, "TOPIC_NOT_FOUND"),
        ),
        _topic_endpoint(
            api,
            "pause",
            "Stop the flow from a topic to its channels.",
            _TOPIC_ERRORS[0],
            (404, "TOPIC_NOT_FOUND"),
        ),
        _topic_endpoint(api, "unpause", "Let it flow again.", _TOPIC_ERRORS[0], (404, "TOPIC_NOT_FOUND")),
        _channel_endpoint(api, "create", "Create a channel of a topic; fine if it exists."),
        _channel_endpoint(api, "delete", "Delete a channel.", (404, "CHANNEL_NOT_FOUND")),
        _channel_endpoint(
            api,
            "empty",
            "Drop everything a channel holds: waiting, in flight and deferred.",
            (404, "CHANNEL_NOT_FOUND"),
        ),
        _channel_endpoint(api, "pause", "Stop the flow to clients.", (404, "CHANNEL_NOT_FOUND")),
        _channel_endpoint(api, "unpause", "Let it flow again.", (404, "CHANNEL_NOT_FOUND")),
        *transaction_endpoints(api.transactions, options.max_body_size),
        *log_endpoints(api.log),
        *topics_endpoints(api.topics),
        Endpoint(
            group="Watching",
            method="GET",
            path="/ping",
            handler=api.ping,
            summary="Whether the daemon is well.",
            details="500 and `NOK - <reason>`, as plain text, while the disk refuses something.",
            permission="read",
            success="`OK`",
            success_type=TEXT_TYPE,
            success_schema={"type": "string", "const": "OK"},
            errors=((500, "NOK - …"),),
        ),
        Endpoint(
            group="Watching",
            method="GET",
            path="/info",
            handler=api.info,
            summary="Who this is: version, addresses, limits. Durations in nanoseconds.",
            permission="read",
            success="an object",
            success_type=JSON_TYPE,
            success_schema=INFO,
        ),
        Endpoint(
            group="Watching",
            method="GET",
            path="/stats",
            handler=api.stats,
            summary="Topics, channels, clients and producers with their figures.",
            details='An unknown `topic` gives `"topics":null`; a topic without the named channel is left '
            "out.",
            params=(
                Param(name="format", help="`json`; anything else is text"),
                Param(name="topic", help="only this topic"),
                Param(name="channel", help="only this channel"),
                Param(name="include_clients", help="list the clients: `true` (default) or `false`"),
                Param(name="include_mem", help="memory figures too: `true` (default) or `false`"),
            ),
            permission="read",
            success="the figures, as text or as an object",
            success_type=JSON_TYPE,
            success_schema=STATS,
            other_types=(TEXT_TYPE,),
        ),
        Endpoint(
            group="Watching",
            method="GET",
            path="/metrics",
            handler=api.metrics.handle,
            summary="The figures for Prometheus.",
            permission="read",
            success="the text exposition format",
            success_type="text/plain",
        ),
        Endpoint(
            group="Watching",
            method="GET",
            path="/openapi.json",
            handler=lambda _: openapi(api.api),
            summary="This API, described for programs.",
            permission="read",
            success="an OpenAPI 3.1 document",
            success_type=JSON_TYPE,
        ),
        Endpoint(
            group="Configuration",
            method="GET",
            path="/config/{key}",
            path_schema={"type": "string", "enum": sorted(KEYS)},
            handler=lambda request: get_config(api.nsqd, request.path_value),
            summary="The value of an option, by its key in the configuration file.",
            details="Texts as they are, everything else as JSON; durations in nanoseconds.",
            permission="admin",
            success="the value; nothing at all for an empty text",
            success_type=JSON_TYPE,
            other_types=(TEXT_TYPE,),
            errors=((400, "INVALID_OPTION"),),
        ),
        Endpoint(
            group="Configuration",
            method="PUT",
            path="/config/{key}",
            path_schema={"type": "string", "enum": sorted(CHANGEABLE)},
            handler=lambda request: put_config(api.nsqd, request.path_value, request.body),
            summary="Change `nsqlookupd_tcp_addresses` (a JSON list) or `log_level` (a bare word).",
            details="At once, until the daemon stops.",
            permission="admin",
            keeps_body=True,
            body_help="the new value",
            body_type="text/plain",
            body_schema=TEXT | {"minLength": 1},
            max_body=options.max_msg_size,
            too_big="INVALID_VALUE",
            success="the value",
            success_type=JSON_TYPE,
            errors=((400, "INVALID_OPTION"), (400, "INVALID_VALUE"), (413, "INVALID_VALUE")),
        ),
        *api.debug.endpoints(),
    ]


def _topic_endpoint(api: HttpApi, action: str, summary: str, *errors: tuple[int, str]) -> Endpoint:
    return Endpoint(
        group="Topics",
        method="POST",
        path=f"/topic/{action}",
        handler=getattr(api, f"{action}_topic"),
        summary=summary,
        params=(TOPIC,),
        permission="admin",
        errors=errors,
    )


def _channel_endpoint(api: HttpApi, action: str, summary: str, *errors: tuple[int, str]) -> Endpoint:
    return Endpoint(
        group="Channels",
        method="POST",
        path=f"/channel/{action}",
        handler=getattr(api, f"{action}_channel"),
        summary=summary,
        params=(TOPIC, CHANNEL),
        permission="admin",
        errors=(*NAMED_CHANNEL_ERRORS, *errors),
    )
