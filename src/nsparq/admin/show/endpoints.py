"""The table of nsqadmin's HTTP API.

`python -m nsparq.admin.show.endpoints --markdown` prints the checked-in reference page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from nsparq.admin.show.routing import described
from nsparq.http.api import JSON_TYPE, TEXT_TYPE, Endpoint, Handler, Param, Response

if TYPE_CHECKING:
    from nsparq.admin.collect.graphite import Graphite
    from nsparq.admin.daemon import Nsqadmin
    from nsparq.admin.show.api import JsonApi

__all__ = ["INTRODUCTION", "api_endpoints", "change", "daemon_endpoints", "look", "object_of"]

_TEXT: Final = {"type": "string"}
_MESSAGE: Final = {"type": "object", "required": ["message"], "properties": {"message": _TEXT}}
UPSTREAM: Final = (502, "UPSTREAM_ERROR: …")
NOT_THERE: Final = ((404, "TOPIC_NOT_FOUND"), (404, "NO_PRODUCERS"), UPSTREAM)
FORBIDDEN: Final = (403, "FORBIDDEN")

INTRODUCTION: Final = """\
# HTTP API of nsqadmin

Generated from the source by `make docs`; do not edit.

All paths stand below `--base-path`. Errors are `{"message":"CODE"}`; a path that is not listed is 404
`NOT_FOUND`, a wrong method 405 `METHOD_NOT_ALLOWED`. Where some of the daemons that had to be asked did not
answer, `message` says so in an answer that is otherwise right: `WARNING: …`; where none did, it is a 502. A
node is called `broadcast_address:http_port`, as it announces itself.

A change that a browser sends must carry the token of the page that it comes from (`X-CSRF-Token`); programs
need none."""


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties}


def look(path: str, handler: Handler, summary: str, **more: Any) -> Endpoint:
    return Endpoint(
        **{
            "group": "Topics, channels, nodes",
            "method": "GET",
            "path": path,
            "handler": handler,
            "summary": summary,
            "permission": "read",
            "success": "an object",
            "success_type": JSON_TYPE,
            **more,
        }
    )


def change(
    method: str,
    path: str,
    handler: Handler,
    summary: str,
    body: Mapping[str, Any] | None = None,
    **more: Any,
) -> Endpoint:
    """One that takes a JSON object with these properties, or nothing."""
    taken = {
        "keeps_body": True,
        "body_type": "application/json",
        "body_schema": {"type": "object", "properties": body},
        "body_help": "a JSON object: " + ", ".join(f"`{name}`" for name in body or ()),
    }
    return Endpoint(
        **{
            "group": "Changes",
            **(taken if body is not None else {}),
            "method": method,
            "path": path,
            "handler": handler,
            "summary": summary,
            "permission": "admin",
            "success": "`message`: empty, or a warning about what did not work everywhere",
            "success_type": JSON_TYPE,
            "success_schema": _MESSAGE,
            **more,
        }
    )


_ACTION: Final = {"type": "string", "enum": ["pause", "unpause", "empty"]}


def api_endpoints(api: JsonApi) -> list[Endpoint]:
    """What NSQ's nsqadmin has."""
    return [
        look(
            "/api/topics",
            api.topics,
            "The names of all topics.",
            details="With `inactive=true`: an object of the topics that no nsqd has, with their channels; "
            "nsqlookupds only.",
            params=(Param(name="inactive", help="`true`: only topics without producers"),),
            errors=(UPSTREAM,),
        ),
        look(
            "/api/topics/{topic}",
            api.topic,
            "A topic's figures: in total, on each node, and of its channels.",
            details="`node` is `*` for totals. `paused` is true if it is on any node. A topic that is known, "
            "but that no nsqd has, is 404 `NO_PRODUCERS`.",
            errors=NOT_THERE,
        ),
        look(
            "/api/topics/{topic}/{channel}",
            api.channel,
            "A channel's figures: in total, on each node, and its clients.",
            errors=(*NOT_THERE, (404, "CHANNEL_NOT_FOUND")),
        ),
        look("/api/nodes", api.nodes, "Every nsqd, with its topics.", errors=(UPSTREAM,)),
        look(
            "/api/nodes/{node}",
            api.node,
            "All topics, channels and clients of one nsqd.",
            errors=((404, "NODE_NOT_FOUND"), UPSTREAM),
        ),
        look(
            "/api/counter",
            api.counter,
            "How many messages each channel has had on each node.",
            errors=(UPSTREAM,),
        ),
        change(
            "POST",
            "/api/topics",
            api.create,
            "Create a topic, or a channel and its topic.",
            {"topic": _TEXT, "channel": _TEXT},
            checks_names=True,
            details="On every nsqlookupd; a channel also on the nsqds that have the topic. Without "
            "nsqlookupds on every nsqd.",
            errors=(FORBIDDEN, (400, "INVALID_TOPIC"), (400, "INVALID_CHANNEL"), UPSTREAM),
        ),
        change(
            "POST",
            "/api/topics/{topic}",
            api.change_topic,
            "Pause, unpause or empty a topic on every nsqd that has it.",
            {"action": _ACTION},
            errors=(FORBIDDEN, (400, "INVALID_ACTION"), *NOT_THERE),
        ),
        change(
            "POST",
            "/api/topics/{topic}/{channel}",
            api.change_channel,
            "Pause, unpause or empty a channel on every nsqd that has it.",
            {"action": _ACTION},
            errors=(FORBIDDEN, (400, "INVALID_ACTION"), *NOT_THERE, (404, "CHANNEL_NOT_FOUND")),
        ),
        change(
            "DELETE",
            "/api/topics/{topic}",
            api.delete_topic,
            "Delete a topic: on every nsqlookupd, then on every nsqd that has it.",
            errors=(FORBIDDEN, (404, "TOPIC_NOT_FOUND"), UPSTREAM),
        ),
        change(
            "DELETE",
            "/api/topics/{topic}/{channel}",
            api.delete_channel,
            "Delete a channel: on every nsqlookupd, then on every nsqd that has its topic.",
            errors=(FORBIDDEN, (404, "TOPIC_NOT_FOUND"), UPSTREAM),
        ),
        change(
            "DELETE",
            "/api/nodes/{node}",
            api.tombstone,
            "Take a topic off a node: tombstone it on every nsqlookupd, then delete it there.",
            {"topic": _TEXT},
            checks_names=True,
            errors=(
                FORBIDDEN,
                (400, "INVALID_BODY"),
                (400, "INVALID_TOPIC"),
                (404, "NODE_NOT_FOUND"),
                UPSTREAM,
            ),
        ),
    ]


def daemon_endpoints(admin: Nsqadmin, api: JsonApi, graphite: Graphite) -> list[Endpoint]:
    config_errors = ((403, "FORBIDDEN"), (400, "INVALID_REMOTE_ADDR"), (400, "INVALID_OPTION"))
    found = [
        Endpoint(
            group="The daemon",
            method="GET",
            path="/ping",
            handler=lambda _: Response(body=b"OK", content_type=TEXT_TYPE, nsq_header=False),
            summary="Whether the daemon is there.",
            success="`OK`",
            success_type=TEXT_TYPE,
            success_schema={"type": "string", "const": "OK"},
        ),
        Endpoint(
            group="The daemon",
            method="GET",
            path="/config/{key}",
            handler=api.get_config,
            summary="The value of an option, by its key in the config file.",
            details="From `--allow-config-from-cidr` only. Durations in nanoseconds.",
            permission="read",
            success="a text as it is, anything else as JSON",
            success_type=JSON_TYPE,
            other_types=(TEXT_TYPE,),
            errors=config_errors,
        ),
        Endpoint(
            group="The daemon",
            method="PUT",
            path="/config/{key}",
            handler=api.put_config,
            summary="Change `nsqlookupd_http_addresses` (a JSON list) or `log_level`, until the next start.",
            permission="admin",
            keeps_body=True,
            body_help="the value",
            too_big="INVALID_VALUE",
            success="the new value",
            success_type=JSON_TYPE,
            errors=(*config_errors, (400, "INVALID_VALUE"), (413, "INVALID_VALUE")),
        ),
        look(
            "/api/graphite",
            graphite.rate,
            "The present rate of a metric, from graphite.",
            group="The daemon",
            params=(
                Param(name="metric", help="`rate`", required=True),
                Param(name="target", help="a target of graphite's", required=True),
            ),
            success_schema=object_of(rate=_TEXT),
            errors=((400, "INVALID_ARG_METRIC"), (400, "INVALID_ARG_TARGET"), (500, "INTERNAL_ERROR")),
        ),
        look(
            "/openapi.json",
            lambda _: described(admin.api),
            "This API, described for programs.",
            group="The daemon",
            success="an OpenAPI 3.1 document",
        ),
    ]
    if admin.options.proxy_graphite:
        found.append(
            look(
                "/render",
                graphite.render,
                "Passed on to graphite.",
                group="The daemon",
                success="what graphite says",
                errors=(UPSTREAM,),
            )
        )
    return found


if __name__ == "__main__":
    from nsparq.admin.daemon import describe
    from nsparq.http.describe import markdown

    if sys.argv[1:] != ["--markdown"]:
        sys.exit("usage: python -m nsparq.admin.show.endpoints --markdown")
    sys.stdout.write(markdown(describe(), INTRODUCTION))
