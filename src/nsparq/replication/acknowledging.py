"""When a change is safe: on the disks of all nodes that may take over.

A primary acknowledges a change when every node of the in-sync set has confirmed it. A node that
does not answer is taken out of the set first, by compare-and-set, and only then do acknowledgements
go on without it. So a primary that is cut off can acknowledge nothing: it reaches neither the node
nor, if another node has taken over, its record. No clock is needed for that.

A node that joins must confirm from then on. It comes into the set when it has everything that was
acknowledged before. While a change of the set is under way, or nobody knows whether it has happened,
nodes of the old set and of the new one must confirm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nsparq.errors import NsparqError
from nsparq.replication.membership import Membership

Done = Callable[[Exception | None], None]
"""Called with None once a change is safe, or with the error."""
ChangeSet = Callable[[Membership], None]
"""Asks the coordinator to replace the record that the primary knows by this one. The answer comes
as set_changed() or set_unchanged()."""


class Fenced(NsparqError):
    """Another node is primary."""

    def __init__(self) -> None:
        super().__init__("another node has taken over; this one acknowledges nothing any more")


class Acknowledging:
    """The changes of a primary that wait for its followers, in one thread."""

    def __init__(self, membership: Membership, change_set: ChangeSet) -> None:
        self.membership = membership
        """As the coordinator has it, as far as this node knows."""
        self._error: Exception | None = None
        """Why nothing is acknowledged any more."""
        self._wanted: Membership | None = None
        """The record that the coordinator was asked for and may have by now."""
        self._change_set = change_set
        self._recorded = 0
        self._confirmed: dict[str, int] = {}
        """Changes that each connected follower has made."""
        self._caught_up: set[str] = set()
        """Followers that are in the set, or are about to be."""
        self._acknowledged = 0
        """Changes that were acknowledged, or may have been."""
        self._waiting: deque[tuple[int, Done]] = deque()

    # changes

    def recorded(self, number: int) -> None:
        """The primary has made so many changes."""
        self._recorded = number

    def when_safe(self, done: Done) -> None:
        """Call `done` once all changes so far are safe."""
        self._waiting.append((self._recorded, done))
        self._acknowledge()

    @property
    def is_fenced(self) -> bool:
        """Whether another node has taken over."""
        return isinstance(self._error, Fenced)

    @property
    def safe(self) -> int:
        """The number of changes that every node which may take over has made."""
        return min([self._confirmed.get(name, 0) for name in self._required()], default=self._recorded)

    def _required(self) -> frozenset[str]:
        names = self.membership.in_sync | self._caught_up
        if self._wanted is not None:
            names |= self._wanted.in_sync
        return names - {self.membership.primary}

    def may_take_over(self, name: str) -> bool:
        """Whether the node is in the set, or may be. Its data path is needed then, even if it is
        behind."""
        return name in self._required()

    def _acknowledge(self) -> None:
        if self._error is not None:
            while self._waiting:
                self._waiting.popleft()[1](self._error)
            return
        safe = self.safe
        while self._waiting and self._waiting[0][0] <= safe:
            self._acknowledged, done = self._waiting.popleft()
            done(None)

    def confirmed_by(self, name: str) -> int:
        """The number of changes that a follower has made."""
        return self._confirmed.get(name, 0)

    def refuse(self, error: Exception) -> None:
        """Acknowledge nothing any more: everybody who waits, or will, gets the error."""
        self._error = self._error or error
        self._acknowledge()

    # followers

    def confirmed(self, name: str, number: int) -> None:
        """A follower has made so many changes."""
        self._confirmed[name] = number
        self._adjust()

    def caught_up(self, name: str, number: int) -> None:
        """A follower has made so many changes, and follows from there on."""
        self._caught_up.add(name)
        self._confirmed[name] = number
        self._adjust()

    def lost(self, name: str) -> None:
        """A follower does not answer any more."""
        self._caught_up.discard(name)
        self._confirmed.pop(name, None)
        self._adjust()

    # the set

    def _adjust(self) -> None:
        """Ask for the set as it should be, unless an answer is awaited."""
        complete = [name for name in self._caught_up if self._confirmed[name] >= self._acknowledged]
        should_be = (self.membership.in_sync & self._caught_up) | {self.membership.primary, *complete}
        if self._wanted is None and self._error is None and should_be != self.membership.in_sync:
            self._wanted = self.membership.with_in_sync(should_be)
            self._change_set(self._wanted)
        self._acknowledge()

    def set_changed(self) -> None:
        """The coordinator has the record that was asked for."""
        assert self._wanted is not None
        self.membership, self._wanted = self._wanted, None
        self._adjust()

    def set_unchanged(self, found: Membership) -> None:
        """The coordinator has this record instead."""
        self._wanted = None
        if (found.epoch, found.primary) == (self.membership.epoch, self.membership.primary):
            self.membership = found
            self._adjust()
        else:
            self.refuse(Fenced())
