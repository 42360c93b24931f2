"""A topic's retention and durability. change/settings.py does the work."""

from __future__ import annotations

from typing import Final

from nsparq.admin.change.settings import NAMES, BadSetting, parse_setting
from nsparq.admin.routing import path_values
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


class Settings(Handlers):
    @look(
        "/api/settings/{topic}",
        "A topic's retention and durability on each node, and how far back its log reaches.",
        group=GROUP,
        success="`nodes`; `own` names the settings that are the topic's own",
        errors=NOT_THERE,
    )
    async def settings(self, request: Request) -> Result:
        (topic,) = path_values(request)
        nodes, found = await self._admin.settings.read(topic)
        return {
            "nodes": [one.as_json() for one in found],
            "unable": [node.address for node in nodes.unable],
            "errors": nodes.errors,
        }

    @change(
        "PUT",
        "/api/settings/{topic}",
        "Change a topic's retention and durability on all nodes that have it.",
        {"retention_age": TEXT, "retention_bytes": TEXT, "durability": TEXT},
        group=GROUP,
        details="`retention_age` such as `7d` or `24h`, `retention_bytes` such as `10GB`, `durability` `os`, "
        "`fsync` or `memory`. An empty text restores the node's flag.",
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
