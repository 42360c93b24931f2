"""The cluster of copies that an nsqd belongs to, as the nsqd describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nsparq.admin.collect.fields import number, objects, text, texts

__all__ = ["Follower", "Replicated"]


@dataclass(frozen=True, slots=True)
class Follower:
    name: str
    is_in_sync: bool
    is_joining: bool
    bytes_behind: int

    @property
    def state(self) -> str:
        return "in sync" if self.is_in_sync else "joining" if self.is_joining else "catching up"


@dataclass(frozen=True, slots=True)
class Replicated:
    """The answer of one node. Only a primary knows its followers."""

    cluster: str
    name: str
    role: str
    epoch: int
    primary: str
    in_sync: tuple[str, ...]
    followers: tuple[Follower, ...]
    problems: tuple[str, ...]

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Replicated | None:
        """None if the node is in no cluster."""
        if not text(fields, "cluster"):
            return None
        followers = [
            Follower(
                text(one, "name"),
                one.get("is_in_sync") is True,
                one.get("is_joining") is True,
                number(one, "bytes_behind"),
            )
            for one in objects(fields, "followers")
        ]
        return cls(
            cluster=text(fields, "cluster"),
            name=text(fields, "node"),
            role=text(fields, "role"),
            epoch=number(fields, "epoch"),
            primary=text(fields, "primary"),
            in_sync=tuple(texts(fields, "in_sync")),
            followers=tuple(followers),
            problems=tuple(texts(fields, "problems")),
        )

    @property
    def is_primary(self) -> bool:
        return self.role == "primary"

    @property
    def can_switch_over(self) -> bool:
        return self.is_primary and len(self.in_sync) > 1
