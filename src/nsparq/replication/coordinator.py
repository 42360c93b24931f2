"""What replication needs of a coordinator: one record that changes by compare-and-set, and a sign
of life of the primary.

A primary's sign of life only decides *when* another node tries to take over. Whether it may is
decided by the record.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from nsparq.errors import NsparqError
from nsparq.replication.membership import Membership


class NoAnswer(NsparqError):
    """The coordinator does not answer. A request may have been carried out, or may be later."""


class Found(NamedTuple):
    """The coordinator's record."""

    membership: Membership
    version: int
    """Grows with every change of the record."""


class State(NamedTuple):
    """What a node sees of its cluster."""

    found: Found | None
    """None if there is no record yet."""
    alive: str
    """Name of the primary that gave a sign of life last; empty if that is too long ago."""


class Coordinator(Protocol):
    """The record of one cluster. All calls raise NoAnswer."""

    async def observe(self) -> State:
        """Never an older state than another node has seen. Raises ValueError if this version does
        not know the form of the record."""

    async def compare_and_set(self, version: int, wanted: Membership) -> Found | None:
        """Replace the record that has this version; 0 if there must be none. Gives the new record,
        or None if the record has another version."""

    async def keep_alive(self, name: str) -> None:
        """A sign of life of the primary. It holds for the time that the coordinator was made
        with."""

    async def release(self) -> None:
        """End the sign of life at once: for a stop, and for a planned switch-over."""

    def close(self) -> None: ...
