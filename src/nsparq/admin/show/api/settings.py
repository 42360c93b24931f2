"""A topic's retention, durability and archive, delivery policies, and the order of channels.
change/settings.py and change/policies.py do the work."""

from __future__ import annotations

from typing import Any, Final

from nsparq.admin.change.operations import Support
from nsparq.admin.change.settings import NAMES, BadSetting, parse_setting
from nsparq.admin.routing import path_values, topic_and_channel
from nsparq.admin.show.api.table import (
    FORBIDDEN,
    NOT_THERE,
    TEXT,
    Handlers,
    change,
    look,
    parse_body,
    text_field,
)
from nsparq.http.api import ApiError, Request, Result

__all__ = ["Settings"]

GROUP: Final = "Settings"
_ERRORS: Final = (
    FORBIDDEN,
    (400, "INVALID_SETTINGS"),
    (409, "…"),
    (501, "NOT_SUPPORTED"),
    *NOT_THERE,
    (404, "CHANNEL_NOT_FOUND"),
)
_POLICY_ERRORS: Final = (*_ERRORS, (409, "POLICY_REFUSED"))
_POLICY_HELP: Final = (
    "`policy` is an object with fields as in nsqd's API, or null to remove it. It replaces the whole policy. "
    "If one node refuses it, none gets it."
)


class Settings(Handlers):
    @look(
        "/api/settings/{topic}",
        "A topic's retention, durability and archive on each node, and how far back its log reaches.",
        group=GROUP,
        success="`nodes`; `own` names the settings that are the topic's own",
        errors=NOT_THERE,
    )
    async def settings(self, request: Request) -> Result:
        (topic,) = path_values(request)
        nodes, found = await self._admin.settings.read(topic)
        return _by_node(nodes, [one.as_json() for one in found])

    @change(
        "PUT",
        "/api/settings/{topic}",
        "Change a topic's retention, durability and archive on all nodes that have it.",
        dict.fromkeys(NAMES, TEXT),
        group=GROUP,
        details="Ages such as `7d` or `24h`, sizes such as `10GB`, `durability` `os`, `fsync` or `memory`, "
        "`archive` `true` or `false`. An empty text restores the node's flag.",
        errors=(FORBIDDEN, (400, "INVALID_SETTINGS"), (409, "…"), (501, "NOT_SUPPORTED"), *NOT_THERE),
    )
    async def change_settings(self, request: Request) -> Result:
        (topic,) = path_values(request)
        body = parse_body(request)
        try:
            changes = {name: parse_setting(name, text_field(body, name)) for name in NAMES if name in body}
        except BadSetting as error:
            raise ApiError(400, "INVALID_SETTINGS", reason=str(error)) from error
        if not changes or len(changes) != len(body):
            raise ApiError(400, "INVALID_SETTINGS", reason=f"give some of {', '.join(NAMES)}")
        return {"message": await self._admin.settings.change(self._actor(request), topic, changes)}

    @look(
        "/api/policy/{topic}",
        "A topic's delivery policy on each node.",
        group=GROUP,
        success="`nodes`, each with `policy` and `effective`; null where there is none",
        errors=NOT_THERE,
    )
    @look(
        "/api/policy/{topic}/{channel}",
        "A channel's own delivery policy, and the one in effect, on each node.",
        group=GROUP,
        success="`nodes`, each with `policy` and `effective`; null where there is none",
        errors=NOT_THERE,
    )
    async def policy(self, request: Request) -> Result:
        nodes, found = await self._admin.policies.read(*topic_and_channel(request))
        return _by_node(nodes, [one.as_json() for one in found])

    @change(
        "PUT",
        "/api/policy/{topic}",
        "Set or remove a topic's delivery policy on all nodes that have it.",
        {"policy": {"type": ["object", "null"]}},
        group=GROUP,
        details=_POLICY_HELP,
        errors=_POLICY_ERRORS,
    )
    @change(
        "PUT",
        "/api/policy/{topic}/{channel}",
        "Set or remove a channel's own delivery policy on all nodes that have it.",
        {"policy": {"type": ["object", "null"]}},
        group=GROUP,
        details=_POLICY_HELP,
        errors=_POLICY_ERRORS,
    )
    async def change_policy(self, request: Request) -> Result:
        topic, channel = topic_and_channel(request)
        body = parse_body(request)
        if body.keys() != {"policy"}:
            raise ApiError(400, "INVALID_SETTINGS", reason="give policy: an object, or null to remove it")
        actor, access = self._actor(request), self._access(request)
        message = await self._admin.policies.change(actor, access, topic, channel, body["policy"])
        return {"message": message}

    @look(
        "/api/order/{topic}/{channel}",
        "What a channel is ordered by, on each node.",
        group=GROUP,
        success="`nodes`, each with `ordered_by`; null where the channel has no order",
        errors=NOT_THERE,
    )
    async def order(self, request: Request) -> Result:
        nodes, found = await self._admin.policies.read(*path_values(request))
        return _by_node(nodes, [{"node": one.node, "ordered_by": one.ordered_by} for one in found])

    @change(
        "PUT",
        "/api/order/{topic}/{channel}",
        "Order a channel by a key, or end its order, on all nodes that have it.",
        {"ordered_by": {"type": ["string", "null"]}},
        group=GROUP,
        details="`ordered_by` is a JSON pointer such as `/customer/id`, or `header:` and a name; null ends "
        "the order. If one node refuses it, none changes.",
        errors=(*_ERRORS, (409, "ORDER_REFUSED")),
    )
    async def change_order(self, request: Request) -> Result:
        topic, channel = path_values(request)
        body = parse_body(request)
        if body.keys() != {"ordered_by"}:
            raise ApiError(
                400, "INVALID_SETTINGS", reason="give ordered_by: a text, or null to end the order"
            )
        message = await self._admin.policies.order(self._actor(request), topic, channel, body["ordered_by"])
        return {"message": message}


def _by_node(nodes: Support, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "nodes": found,
        "unable": [node.address for node in nodes.unable],
        "errors": nodes.errors,
    }
