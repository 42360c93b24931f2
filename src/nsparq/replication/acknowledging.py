"""When a change is safe: on the disks of all nodes that may take over.

A primary acknowledges a change when every node of the in-sync set has confirmed it. A node that
does not answer is taken out of the set first, by compare-and-set, and only then do acknowledgements
go on without it. So a primary that is cut off can acknowledge nothing: it reaches neither the node
nor, if another node has taken over, its record. No clock is needed for that.

A node that joins must confirm from then on. It comes into the set when it has everything that was
acknowledged before. While a change of the set is under way, or nobody knows whether it has
happened, nodes of the old set and of the new one must confirm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from nsparq.errors import NsparqError
from nsparq.replication.membership import Membership

Done = Callable[[Exception | None], None]
"""Called with None once a change is safe, or with the error."""


class Progress(NamedTuple):
    """What a follower has confirmed."""

    made: int
    """Changes that it has made. It may still have to sync some."""
    synced: int
    """Changes that it has made, with all syncs among them."""


NOTHING: Final = Progress(0, 0)
ChangeSet = Callable[[Membership], None]
"""Asks the coordinator to replace the record that the primary knows by this one. The answer comes
as set_changed() or set_unchanged()."""


class Fenced(NsparqError):
    """Another node is primary, or may be."""

    def __init__(self, reason: str = "another node has taken over") -> None:
        super().__init__(f"{reason}; this node acknowledges nothing any more")


class Acknowledging:
    """The changes of a primary that wait for its followers, in one thread."""

    def __init__(self, membership: Membership, change_set: ChangeSet) -> None:
        self.membership = membership
        """As the coordinator has it, as far as this node knows."""
        self.error: Exception | None = None
        """Why nothing is acknowledged any more."""
        self._wanted: Membership | None = None
        """The record that the coordinator was asked for and may have by now."""
        self._change_set = change_set
        self._recorded = 0
        self._confirmed: dict[str, Progress] = {}
        """Of each connected follower."""
        self._copies = dict(membership.copies)
        """Ids of the copies of these nodes. Whose copy is needed keeps its id."""
        self._caught_up: set[str] = set()
        """Followers that are in the set, or are about to be."""
        self._acknowledged = self._acknowledged_syncs = 0
        """Changes and syncs that were acknowledged, or may have been."""
        self._waiting: deque[tuple[int, Done]] = deque()
        self._awaited_syncs: list[tuple[int, Done]] = []
        self._required = self._find_required()
        """Followers that may take over, and must confirm."""
        self._is_settled = False
        """Whether the set stays as it is, whatever is confirmed."""
        self._safe = 0
        """Changes that were safe when that was looked at last."""

    # changes

    def recorded(self, number: int) -> None:
        """The primary has made so many changes."""
        self._recorded = number

    def when_safe(self, done: Done) -> None:
        """Call `done` once all changes so far are safe."""
        self._waiting.append((self._recorded, done))
        if self._recorded <= self._safe or not self._required or self.error is not None:
            self._acknowledge()

    def when_synced(self, number: int, done: Done) -> None:
        """Call `done` once all syncs among the first `number` changes are made everywhere."""
        self._awaited_syncs.append((number, done))
        self._acknowledge()

    @property
    def is_fenced(self) -> bool:
        """Whether another node has taken over, or may have."""
        return isinstance(self.error, Fenced)

    @property
    def is_changing(self) -> bool:
        """Whether the coordinator has been asked for another set, and has not answered."""
        return self._wanted is not None

    @property
    def safe(self) -> Progress:
        """What every node that may take over has confirmed."""
        progress = [self._confirmed.get(name, NOTHING) for name in self._required]
        if len(progress) == 1:
            return progress[0]
        made = min([one.made for one in progress], default=self._recorded)
        return Progress(made, min([one.synced for one in progress], default=self._recorded))

    def _find_required(self) -> frozenset[str]:
        names = self.membership.in_sync | self._caught_up
        if self._wanted is not None:
            names |= self._wanted.in_sync
        return names - {self.membership.primary}

    def may_take_over(self, name: str) -> bool:
        """Whether the node is in the set, or may be. Its data path is needed then, even if it is
        behind."""
        return name in self._required

    def needs_other_copy(self, name: str, copy: str) -> bool:
        """Whether this node may take over with another copy than this one."""
        return self.may_take_over(name) and self._copies[name] != copy

    def _acknowledge(self) -> None:
        if self.error is not None:
            waiting = [*self._waiting, *self._awaited_syncs]
            self._waiting.clear()
            self._awaited_syncs.clear()
            for _, done in waiting:
                done(self.error)
            return
        made, synced = self.safe
        self._safe = made
        while self._waiting and self._waiting[0][0] <= made:
            self._acknowledged, done = self._waiting.popleft()
            done(None)
        if self._awaited_syncs:
            ended = [one for one in self._awaited_syncs if one[0] <= synced]
            self._awaited_syncs = [one for one in self._awaited_syncs if one[0] > synced]
            for number, done in ended:
                self._acknowledged_syncs = max(number, self._acknowledged_syncs)
                done(None)

    def progress_of(self, name: str) -> Progress:
        """What a follower has confirmed."""
        return self._confirmed.get(name, NOTHING)

    def refuse(self, error: Exception) -> None:
        """Acknowledge nothing any more: everybody who waits, or will, gets the error."""
        self.error = self.error or error
        self._acknowledge()

    # followers

    def confirmed(self, name: str, progress: Progress) -> None:
        """A follower has got so far."""
        self._confirmed[name] = progress
        if self._is_settled:
            self._acknowledge()
        else:
            self._adjust()

    def caught_up(self, name: str, copy: str, progress: Progress) -> None:
        """A follower with this copy has got so far, and follows from there on."""
        self._copies[name] = copy
        self._caught_up.add(name)
        self._confirmed[name] = progress
        self._adjust()

    def lost(self, name: str) -> None:
        """A follower does not answer any more."""
        self._caught_up.discard(name)
        self._confirmed.pop(name, None)
        self._adjust()

    # the set

    def _adjust(self) -> None:
        """Ask for the set as it should be, unless an answer is awaited."""
        complete = [name for name in self._caught_up if self._has_all(self._confirmed[name])]
        should_be = (self.membership.in_sync & self._caught_up) | {self.membership.primary, *complete}
        if self._wanted is None and self.error is None and should_be != self.membership.in_sync:
            self._wanted = self.membership.with_copies({name: self._copies[name] for name in should_be})
            self._change_set(self._wanted)
        self._required = self._find_required()
        self._is_settled = self._caught_up | {self.membership.primary} == self.membership.in_sync
        self._acknowledge()

    def _has_all(self, progress: Progress) -> bool:
        """Whether a follower has everything that was acknowledged."""
        return progress.made >= self._acknowledged and progress.synced >= self._acknowledged_syncs

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
