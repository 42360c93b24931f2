"""What replication needs of a coordinator: one record that changes by compare-and-set, and a sign of
life of the primary.

A primary's sign of life only decides *when* another node tries to take over. Whether it may is
decided by the record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from nsparq.errors import NsparqError
from nsparq.replication.membership import Membership


class NoAnswer(NsparqError):
    """The coordinator does not answer. A request may have been carried out, or may be later."""


class Found(NamedTuple):
    """The coordinator's record."""

    membership: Membership
    version: int
    """Changes with every change of the record."""


class State(NamedTuple):
    """What a node sees of the others."""

    found: Found | None
    """None if there is no record yet."""
    is_primary_alive: bool


class Coordinator(Protocol):
    """A connection to a coordinator. All calls raise NoAnswer."""

    async def read(self) -> Found | None:
        """The record; None if there is none. Never an older one than another node has seen."""

    async def compare_and_set(self, version: int, wanted: Membership) -> Found | None:
        """Replace the record with this version; 0 if there must be none. Gives the new record, or
        None if the record has another version."""

    async def keep_alive(self, name: str, epoch: int) -> None:
        """The node is alive, as the primary of this epoch. Call it three times in the time after
        which others take it for dead."""

    async def release(self) -> None:
        """End the sign of life at once: for a clean stop and a planned switch-over."""

    def watch(self) -> AsyncIterator[State]:
        """The state now, and again whenever it changes. Ends only with the task that reads it."""

    async def close(self) -> None: ...
