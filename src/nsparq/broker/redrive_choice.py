"""Decides which dead letters can go back to their channel, and says why others cannot.

All letters of an origin are judged together, with arrays. Only the event loop may call this.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nsparq.broker.letters import Letter, OfOrigin, Origin, Part
from nsparq.storage.number_ranges import NumberRanges, Numbers

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.carried_over import CarryJob
    from nsparq.broker.channel import Channel

READY: Final = "ready"
REDRIVEN: Final = "redriven"
NO_CHANNEL: Final = "no_channel"
NOT_KEPT: Final = "not_kept"
OWNED: Final = "owned"
UNFINISHED: Final = "unfinished"
EXPIRED: Final = "expired"
STATES: Final = (READY, REDRIVEN, NO_CHANNEL, NOT_KEPT, OWNED, UNFINISHED, EXPIRED)
"""What can become of a letter: READY can be put back, and the others cannot. Its channel is gone,
ephemeral, or of a Spark query; or the channel still has the message; or it would expire at once."""


class Columns(NamedTuple):
    """Letters as arrays."""

    numbers: Numbers
    sequences: Numbers
    timestamps_ns: Numbers

    @classmethod
    def of(cls, letters: list[Letter]) -> Columns:
        names = map(Letter._fields.index, ("number", "sequence", "timestamp_ns"))
        return cls(*(np.fromiter(map(itemgetter(name), letters), np.int64, len(letters)) for name in names))

    def only(self, chosen: npt.NDArray[np.bool_]) -> Columns:
        return Columns(*(column[chosen] for column in self))


def states_of(broker: Broker, name: str, origin: Origin, letters: Columns) -> Numbers:
    """The state of each letter of topic `name` that came from `origin`, as an index into STATES."""
    numbers, sequences, stamps = letters
    topic = broker.topics.get(origin[0])
    channel = topic.channels.get(origin[1]) if topic is not None else None
    for state, applies in (
        (NO_CHANNEL, channel is None),
        (NOT_KEPT, channel is not None and not channel.is_durable),
        (OWNED, channel is not None and channel.owner != ""),
    ):
        if applies:
            return np.full(len(numbers), STATES.index(state))
    assert channel is not None
    found = np.zeros(len(numbers), np.int64)
    policy = channel.retries.policy
    if policy is not None and policy.expire_after:
        is_old = stamps < broker.age_ns() - int(policy.expire_after * 1e9)
        found[is_old] = STATES.index(EXPIRED)
    found[_are_unfinished(channel, sequences)] = STATES.index(UNFINISHED)
    if (redriven := channel.dead_letters.redriven.get(name)) is not None:
        found[redriven.holds(numbers)] = STATES.index(REDRIVEN)
    # Of several letters of a message, only the first can be put back.
    ready = np.flatnonzero(found == STATES.index(READY))
    ready = ready[np.argsort(sequences[ready], kind="stable")]
    found[ready[1:][np.diff(sequences[ready]) == 0]] = STATES.index(UNFINISHED)
    return found


def _are_unfinished(channel: Channel, sequences: Numbers) -> npt.NDArray[np.bool_]:
    """Which messages the channel still has, or will deliver."""
    found = sequences >= channel.cursor.position
    for low, high in channel.cursor.skips.ranges:
        found &= ~((low <= sequences) & (sequences < high))
    waiting = set(sequences.tolist()).intersection(channel.unfinished)
    if waiting:
        found |= np.isin(sequences, np.fromiter(waiting, np.int64))
    return found


@dataclass(slots=True, eq=False)
class Chosen:
    """Letters of a part that go back to one channel."""

    channel: Channel
    origin: Origin
    letters: list[Letter]
    columns: Columns
    left_out: list[int]
    """Numbers of the channel's other letters in the part."""
    carrying: CarryJob | None = None
    """Writes the messages that the log does not have any more."""
    gone: list[Letter] = field(init=False)
    """The letters of those."""
    gone_columns: Columns = field(init=False)

    def __post_init__(self) -> None:
        log, sequences = self.channel.topic.log, self.columns.sequences
        is_gone = sequences < log.start
        for low, high in log.gaps.ranges:
            is_gone |= (low <= sequences) & (sequences < high)
        self.gone = [self.letters[index] for index in np.flatnonzero(is_gone).tolist()]
        self.gone_columns = self.columns.only(is_gone)

    def has_changed(self, broker: Broker, name: str) -> bool:
        """Whether a letter of topic `name` cannot be put back any more, because of a seek or a
        deletion meanwhile."""
        return self.channel.is_exiting or bool(states_of(broker, name, self.origin, self.columns).any())

    def add(self, name: str, part: Part, log_start: int) -> None:
        """Count the messages as unfinished, and record their letters. A range ends where a letter
        of the channel was left out; letters of other channels do not end it."""
        unfinished, letters = self.channel.unfinished, self.channel.dead_letters
        unfinished.redriven += self.columns.sequences.tolist()
        bounds = np.array([part.start - 1, *sorted(self.left_out), part.next], np.int64)
        after = np.searchsorted(bounds, self.columns.numbers)
        after = after[np.diff(after, prepend=0) > 0]
        known = letters.redriven.get(name, NumberRanges()).without_before(log_start)
        # A new value: a checkpoint may be reading the old one.
        letters.redriven = {**letters.redriven, name: known.with_ranges(bounds[after - 1] + 1, bounds[after])}


def choose(
    broker: Broker, name: str, origin: Origin, found: OfOrigin, skipped: Counter[str]
) -> Chosen | None:
    """The letters of topic `name` that can go back to `origin`. Counts the others in `skipped`."""
    letters, columns = found.matching, Columns.of(found.matching)
    states = states_of(broker, name, origin, columns)
    is_ready = states == STATES.index(READY)
    for index, count in enumerate(np.bincount(states, minlength=len(STATES)).tolist()):
        if count and STATES[index] != READY:
            skipped[STATES[index]] += count
    if not is_ready.any():
        return None
    # Those put back before are in a range already, and do not end the new one.
    is_left_out = ~is_ready & (states != STATES.index(REDRIVEN))
    left_out = found.others + columns.numbers[is_left_out].tolist()
    if not is_ready.all():
        letters = [letters[index] for index in np.flatnonzero(is_ready).tolist()]
        columns = columns.only(is_ready)
    return Chosen(broker.topics[origin[0]].channels[origin[1]], origin, letters, columns, left_out)
