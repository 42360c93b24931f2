"""A topic's own retention, durability and archive, on all nodes that have it. Needs nsparq's own
nsqd."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nsparq.admin.collect.fields import as_object, number, real, text
from nsparq.admin.collect.messages import reason
from nsparq.admin.collect.upstream import BadStatus, RequestFailed
from nsparq.admin.security import Actor
from nsparq.errors import NsparqError
from nsparq.flags import parse_duration
from nsparq.http.api import ApiError

if TYPE_CHECKING:
    from nsparq.admin.change.operations import Support
    from nsparq.admin.daemon import Nsqadmin

__all__ = [
    "DURABILITIES",
    "FEATURE",
    "BadSetting",
    "NodeSettings",
    "Settings",
    "error_reason",
    "parse_age",
    "parse_setting",
]

FEATURE: Final = "/topic/settings"
DURABILITIES: Final = ("os", "fsync", "memory")
AGES: Final = ("retention_age", "archive_retention_age")
SIZES: Final = ("retention_bytes", "archive_retention_bytes", "archive_local_bytes")
NAMES: Final[tuple[str, ...]] = (*AGES, *SIZES, "durability", "archive")
_DAYS: Final = re.compile(r"([0-9]{1,6})\s*d(ays?)?")
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([kKMGT]?)i?B?")
_POWER: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


class BadSetting(NsparqError):
    """Not a value of a setting. The text is for the user."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What applies to a topic on one node, and how far back its log reaches."""

    node: str
    retention_age_s: float
    retention_bytes: int
    durability: str
    archive: Mapping[str, Any]
    """Its settings of the archive by name; empty if the node has none."""
    own: frozenset[str]
    """Settings that the topic has itself. The node's flags decide the others."""
    messages: int = 0
    size: int = 0
    first_ns: int = 0
    last_ns: int = 0

    @property
    def keeps_finished(self) -> bool:
        return bool(self.retention_age_s or self.retention_bytes)

    def as_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "retention_age": self.retention_age_s,
            "retention_bytes": self.retention_bytes,
            "durability": self.durability,
            **self.archive,
            "own": sorted(self.own),
            "messages": self.messages,
            "bytes": self.size,
            "first_timestamp": self.first_ns,
            "last_timestamp": self.last_ns,
        }


class Settings:
    """Raises ApiError."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._cluster = admin.cluster

    async def read(self, topic: str) -> tuple[Support, list[NodeSettings]]:
        nodes = await self._admin.operations.nodes_with(topic, FEATURE)
        found = []
        for node in nodes.able:
            try:
                answer = await self._cluster.get(node, FEATURE, topic=topic)
                places = await self._cluster.get(node, "/topic/positions", topic=topic)
            except RequestFailed as error:
                nodes.errors.append(f"{node.address}: {reason(error)}")
                continue
            found.append(_settings_of(node.address, answer, places))
        return nodes, found

    async def change(self, actor: Actor, topic: str, changes: Mapping[str, Any]) -> str:
        """Returns a warning, or an empty text. None as a value restores the node's flag."""
        nodes = await self._admin.operations.nodes_with(topic, FEATURE)
        nodes.require()
        body = json.dumps(changes).encode()

        async def work() -> list[str]:
            errors = []
            for node in nodes.able:
                try:
                    await self._cluster.ask(node, "PUT", FEATURE, body, topic=topic)
                except RequestFailed as error:
                    errors.append(f"{node.address}: {error_reason(error)}")
            if len(errors) == len(nodes.able):
                raise ApiError(409, "; ".join(errors))
            return nodes.errors + errors

        outcome = ", ".join(f"{name} {value}" for name, value in changes.items())
        return await self._admin.actions.run("change_settings", actor, work, lambda: outcome, topic=topic)


def parse_setting(name: str, value: str) -> Any:
    """A setting as people write it: `7d`, `24h`, `10 GB`. None for an empty text: the node's flag.
    Raises BadSetting."""
    wanted = value.strip()
    if not wanted:
        return None
    if name in AGES:
        return parse_age(wanted)
    if name in SIZES:
        if size := _SIZE.fullmatch(wanted):
            return round(float(size[1]) * 1000 ** _POWER[size[2]])
        raise BadSetting(f"{wanted!r} is not a size; enter one such as 10GB or 500MB, or 0")
    if name == "archive":
        if wanted in ("true", "false"):
            return wanted == "true"
        raise BadSetting(f"archive is true or false, not {wanted!r}")
    if wanted not in DURABILITIES:
        raise BadSetting(f"durability is one of {', '.join(DURABILITIES)}, not {wanted!r}")
    return wanted


def parse_age(wanted: str) -> float:
    """Seconds of a duration, which may be in days. Raises BadSetting."""
    if days := _DAYS.fullmatch(wanted):
        return int(days[1]) * 86400.0
    try:
        if (seconds := parse_duration(wanted)) >= 0:
            return seconds
    except ValueError:
        pass
    raise BadSetting(f"{wanted!r} is not a duration; enter one such as 7d, 24h or 30m, or 0")


def _settings_of(address: str, answer: Any, places: Any) -> NodeSettings:
    fields, log = as_object(answer), as_object(places)
    applied = as_object(fields.get("effective"))
    return NodeSettings(
        address,
        real(applied, "retention_age") or 0.0,
        number(applied, "retention_bytes"),
        text(applied, "durability"),
        _archive(applied),
        frozenset(name for name in NAMES if fields.get(name) is not None),
        number(log, "messages"),
        number(log, "bytes"),
        number(log, "first_timestamp"),
        number(log, "last_timestamp"),
    )


def _archive(applied: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(applied.get("archive"), bool):
        return {}
    return {
        "archive": applied["archive"],
        "archive_retention_age": real(applied, "archive_retention_age") or 0.0,
        "archive_retention_bytes": number(applied, "archive_retention_bytes"),
        "archive_local_bytes": number(applied, "archive_local_bytes"),
    }


def error_reason(error: Exception) -> str:
    """nsqd's own words, if it has some."""
    if isinstance(error, BadStatus):
        try:
            fields = as_object(json.loads(error.body))
        except ValueError:
            fields = {}
        if found := text(fields, "reason"):
            return found
    return reason(error)
