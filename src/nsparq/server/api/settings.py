"""GET and PUT /topic/settings: a topic's own retention and durability."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

from nsparq.flags import parse_duration
from nsparq.http.api import ApiError, Endpoint, Request, Result
from nsparq.server.api.parameters import TOPIC, TOPIC_ERRORS, find_topic, obj

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

_SETTINGS: Final = obj(
    {
        "retention_age": {"type": ["number", "null"]},
        "retention_bytes": {"type": ["integer", "null"]},
        "durability": {"type": ["string", "null"]},
        "effective": {"type": "object"},
    }
)
_CHANGES: Final = {
    "type": "object",
    "properties": {
        "retention_age": {
            "anyOf": [
                {"type": ["number", "null"], "minimum": 0},
                {"type": "string", "pattern": "^[0-9]{1,9}(ms|s|m|h)$"},
            ]
        },
        "retention_bytes": {"type": ["integer", "null"], "minimum": 0},
        "durability": {"enum": ["os", "fsync", "memory", None]},
    },
    "additionalProperties": False,
}


class SettingsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd

    @Endpoint(
        method="GET",
        path="/topic/settings",
        summary="Get a topic's own settings. Null means that the daemon's flag applies.",
        params=(TOPIC,),
        permission="read",
        success="the settings, and those in effect; ages in seconds",
        success_schema=_SETTINGS,
        errors=TOPIC_ERRORS,
    )
    def read(self, request: Request) -> Result:
        return _settings_of(find_topic(self._nsqd.broker, request))

    @Endpoint(
        method="PUT",
        path="/topic/settings",
        summary="Change a topic's settings. A restart keeps them.",
        details="A JSON object with any of `retention_age` (seconds, or a duration such as `24h`), "
        "`retention_bytes`, `durability` (`os`, `fsync`, `memory`). Null restores the daemon's flag.",
        params=(TOPIC,),
        permission="admin",
        body_help="a JSON object",
        body_type="application/json",
        body_schema=_CHANGES,
        max_body=64 << 10,
        success="the settings, and those in effect",
        success_schema=_SETTINGS,
        errors=(*TOPIC_ERRORS, (400, "INVALID_SETTINGS")),
    )
    async def change(self, request: Request) -> Result:
        topic = find_topic(self._nsqd.broker, request)
        try:
            wanted = json.loads(request.body)
            if not isinstance(wanted, dict):
                raise ValueError("not an object")
            age = wanted.get("retention_age")
            if isinstance(age, str):
                wanted["retention_age"] = _parse_age(age)
            topic.change_settings(wanted)
        except (ValueError, OverflowError, RecursionError) as error:
            raise ApiError(400, "INVALID_SETTINGS", reason=str(error)) from error
        changed = _settings_of(topic)
        await self._nsqd.durable(topic)
        return changed


def _parse_age(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        raise ValueError(f"retention_age must be a duration such as 24h, not {text!r}") from None


def _settings_of(topic: Topic) -> dict[str, Any]:
    options = topic.broker.options
    own = dataclasses.asdict(topic.settings)
    flags = {
        "retention_age": options.retention_age,
        "retention_bytes": options.retention_bytes,
        "durability": options.durability,
    }
    if topic.is_ephemeral:
        flags = {"retention_age": 0.0, "retention_bytes": 0, "durability": "memory"}
    effective = {name: flags[name] if value is None else value for name, value in own.items()}
    return {**own, "effective": effective}
