"""Dead letters that nsqd wrote, on all nodes that have their topic, and putting them back into the
channels that they came from. Needs nsparq's own nsqd."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from nsparq.admin.change.actions import Forbidden, check_topic
from nsparq.admin.collect.fields import as_object, number, real, text
from nsparq.admin.collect.merge import Node
from nsparq.admin.collect.messages import reason
from nsparq.admin.collect.upstream import BadStatus, RequestFailed
from nsparq.admin.security import Access, Actor
from nsparq.dead_letter_groups import Groups, merge_groups
from nsparq.http.api import ApiError

if TYPE_CHECKING:
    from nsparq.admin.change.operations import Support
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["FEATURE", "DeadLetters", "FoundLetters", "RedriveProgress"]

FEATURE: Final = "/dead_letters"
REDRIVE: Final = "/dead_letters/redrive"
MAX_REQUESTS: Final = 20
"""Requests to one node for a page; each looks at 32 MiB of letters."""


@dataclass(slots=True)
class FoundLetters:
    """The letters of all nodes that match a filter."""

    groups: Groups = field(default_factory=dict)
    letters: int = 0
    """Letters looked at."""
    foreign: int = 0
    """Messages that are not dead letters of nsqd."""
    is_complete: bool = True
    """Whether all letters were looked at."""

    @property
    def ready(self) -> dict[str, int]:
        """How many letters can be put back, by the topic that they came from."""
        found: dict[str, int] = {}
        for (topic, _, _), group in self.groups.items():
            if count := group["states"]["ready"]:
                found[topic] = found.get(topic, 0) + count
        return found


@dataclass(frozen=True, slots=True)
class RedriveProgress:
    """The redrive on one node: under way, or the last one."""

    node: str
    state: str
    redriven: int
    skipped: Mapping[str, int]
    share: float
    """How much of the letters it has looked at, from 0 to 1."""
    rate: float
    waits_for: str


class DeadLetters:
    """Raises ApiError."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._cluster = admin.cluster

    async def read(self, topic: str, wanted: Mapping[str, str]) -> tuple[Support, FoundLetters]:
        """The letters that match, by channel and reason, with the newest of each."""
        nodes = await self._admin.operations.nodes_with(topic, FEATURE)
        found = FoundLetters()
        for node, outcome in zip(
            nodes.able,
            await asyncio.gather(*(self._scan(node, topic, wanted, found) for node in nodes.able)),
            strict=True,
        ):
            if outcome:
                nodes.errors.append(f"{node.address}: {outcome}")
        return nodes, found

    async def _scan(self, node: Node, topic: str, wanted: Mapping[str, str], found: FoundLetters) -> str:
        """Adds the letters of a node. Returns what went wrong, or an empty text."""
        start: int | None = 0
        try:
            for _ in range(MAX_REQUESTS):
                query = {"topic": topic, "start": str(start), **wanted}
                part = await self._cluster.get(node, FEATURE, **query)
                merge_groups(found.groups, part["groups"], 1)
                found.letters += number(part, "letters")
                found.foreign += number(part, "foreign")
                start = part["next"]
                if start is None:
                    return ""
        except RequestFailed as error:
            return "" if isinstance(error, BadStatus) and error.code == "TOPIC_NOT_FOUND" else reason(error)
        except (TypeError, KeyError, ValueError, AttributeError):
            return "an answer that nsqadmin does not understand"
        found.is_complete = False
        return ""

    async def progress(self, topic: str) -> list[RedriveProgress]:
        """The redrives of a topic. Nodes that had none are left out."""
        nodes = await self._admin.operations.nodes_with(topic, FEATURE)
        found = []
        for node in nodes.able:
            try:
                found.append(_progress_of(node, await self._cluster.get(node, REDRIVE, topic=topic)))
            except RequestFailed:
                # It has had no redrive, or read() reports the error.
                continue
        return found

    async def redrive(
        self, actor: Actor, access: Access, topic: str, origin: str, wanted: Mapping[str, str], rate: str
    ) -> str:
        """Start it on all nodes. Returns a warning, or an empty text."""
        check_topic(origin)
        if not access.may("admin", origin):
            raise Forbidden("redrive", actor, topic=topic, origin=origin)
        query = {**wanted, "topic": topic, "origin_topic": origin, "rate": rate or "0"}
        return await self._on_all("redrive", actor, REDRIVE, query, topic=topic, origin=origin)

    async def cancel(self, actor: Actor, topic: str) -> str:
        return await self._on_all("cancel_redrive", actor, f"{REDRIVE}/cancel", {"topic": topic}, topic=topic)

    async def _on_all(
        self, action: str, actor: Actor, path: str, query: Mapping[str, str], **names: str
    ) -> str:
        nodes = await self._admin.operations.nodes_with(query["topic"], FEATURE)
        nodes.require()

        async def work() -> list[str]:
            errors, done = [], 0
            for node in nodes.able:
                try:
                    await self._cluster.ask(node, "POST", path, **query)
                    done += 1
                except RequestFailed as error:
                    if isinstance(error, BadStatus) and error.code in (
                        "TOPIC_NOT_FOUND",
                        "REDRIVE_NOT_FOUND",
                    ):
                        continue
                    errors.append(f"{node.address}: {reason(error)}")
            if errors and not done:
                raise ApiError(409, "; ".join(errors))
            return nodes.errors + errors

        return await self._admin.actions.run(action, actor, work, **names)


def _progress_of(node: Node, answer: Any) -> RedriveProgress:
    fields = as_object(answer)
    start, end, position = (number(fields, name) for name in ("start", "end", "position"))
    skipped = as_object(fields.get("skipped"))
    return RedriveProgress(
        node.address,
        text(fields, "state"),
        number(fields, "redriven"),
        {name: number(skipped, name) for name in skipped},
        min(1.0, max(0.0, (position - start) / (end - start))) if end > start else 1.0,
        real(fields, "rate") or 0.0,
        text(fields, "waits_for"),
    )
