"""Redrive: puts dead letters back into the channel that they came from.

A message returns under its own number, id and publish time, without attempts and failures. If the
log does not have it any more, its body goes into the channel's file of carried-over messages.

The state of the channel says which letters were put back, so the record and the messages are in the
same checkpoint. A message is delivered only after that checkpoint is on disk. So a crash at any
moment neither loses a letter nor puts one back twice.

A redrive reads the letters part by part, in a thread, up to the end that the topic had when it
began. A file beside the letters says how far it has come, and the next start of nsqd continues
there. Letters that were put back after the file was written are known by the channel's state.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nsparq.broker.letters import Letter, LetterFilter, OfOrigin, Origin, Part, locate_letters, read_letters
from nsparq.errors import NsparqError
from nsparq.storage.checked_json import encode_json, read_json
from nsparq.storage.number_ranges import NumberRanges

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.carried_over import CarryJob
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

REDRIVE_FILE: Final = "redrive.json"
PART_BYTES: Final = 8 << 20
"""Bytes of letters that are read at a time."""
MAX_WAITING: Final = 250_000
"""A redrive waits while its channel has so many messages to send again. It bounds the memory, and
the time that a checkpoint takes."""
BURST_S: Final = 2.0
"""A redrive that was held up makes up for at most so many seconds of its rate."""

RUNNING: Final = "running"
FINISHED: Final = "finished"
CANCELLED: Final = "cancelled"

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

_Indexes = npt.NDArray[np.int64]


class RedriveRunning(NsparqError):
    """The topic has a redrive that has not ended."""


def states_of(broker: Broker, name: str, origin: Origin, letters: list[Letter]) -> _Indexes:
    """The state of each letter of topic `name` that came from `origin`, as an index into STATES."""
    topic = broker.topics.get(origin[0])
    channel = topic.channels.get(origin[1]) if topic is not None else None
    for state, applies in (
        (NO_CHANNEL, channel is None),
        (NOT_KEPT, channel is not None and not channel.is_durable),
        (OWNED, channel is not None and channel.owner != ""),
    ):
        if applies:
            return np.full(len(letters), STATES.index(state))
    assert channel is not None
    numbers, sequences, stamps = (
        np.fromiter(map(itemgetter(column), letters), np.int64, len(letters)) for column in range(3)
    )
    found = np.zeros(len(letters), np.int64)
    policy = channel.retries.policy
    if policy is not None and policy.expire_after:
        is_old = stamps < broker.age_ns() - int(policy.expire_after * 1e9)
        found[is_old] = STATES.index(EXPIRED)
    found[_are_unfinished(channel, sequences)] = STATES.index(UNFINISHED)
    if (redriven := channel.dead_letters.redriven.get(name)) is not None:
        found[redriven.holds(numbers)] = STATES.index(REDRIVEN)
    # Of several letters of a message, only the first can be put back.
    ready = np.flatnonzero(found == STATES.index(READY))
    firsts = np.unique(sequences[ready], return_index=True)[1]
    found[np.delete(ready, firsts)] = STATES.index(UNFINISHED)
    return found


def _are_unfinished(channel: Channel, sequences: _Indexes) -> npt.NDArray[np.bool_]:
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
    left_out: list[int]
    """Numbers of the channel's other letters in the part."""
    gone: list[Letter] = field(default_factory=list)
    """Those whose messages the log does not have any more."""
    carrying: CarryJob | None = None

    def gone_from_log(self) -> list[Letter]:
        """Letters whose messages the log does not have any more."""
        log = self.channel.topic.log
        numbers = np.array([letter.sequence for letter in self.letters], np.int64)
        is_gone = numbers < log.start
        for low, high in log.gaps.ranges:
            is_gone |= (low <= numbers) & (numbers < high)
        return [self.letters[index] for index in np.flatnonzero(is_gone).tolist()]

    def add(self, name: str, part: Part, log_start: int) -> None:
        """Count the messages as unfinished, and record their letters. A range ends where a letter
        of the channel was left out; letters of other channels do not end it."""
        unfinished, letters = self.channel.unfinished, self.channel.dead_letters
        unfinished.redriven += [letter.sequence for letter in self.letters]
        numbers = np.array([letter.number for letter in self.letters], np.int64)
        bounds = np.array([part.start - 1, *sorted(self.left_out), part.next], np.int64)
        after = np.unique(np.searchsorted(bounds, numbers))
        known = letters.redriven.get(name, NumberRanges()).without_before(log_start)
        # A new value: a checkpoint may be reading the old one.
        letters.redriven = {**letters.redriven, name: known.with_ranges(bounds[after - 1] + 1, bounds[after])}


@dataclass(slots=True)
class Progress:
    """What a redrive has done so far. It is kept on disk."""

    filter: LetterFilter
    rate: float
    """Messages per second; 0 for no limit."""
    start: int
    end: int
    position: int
    """Letters before this are done."""
    state: str = RUNNING
    began_ns: int = 0
    """Wall time."""
    ended_ns: int = 0
    letters: int = 0
    """Dead letters looked at."""
    foreign: int = 0
    """Messages looked at that are not dead letters of nsqd."""
    redriven: int = 0
    """Letters put back by this redrive."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Letters that match and were not put back, by state."""


class Redrive:
    """The redrive of one dead-letter topic: under way, or the last one."""

    def __init__(self, topic: Topic, progress: Progress) -> None:
        self._topic = topic
        self._broker = topic.broker
        self.progress = progress
        self.waits_for = ""
        """Why it does not go on at the moment."""
        self._is_busy = False
        """Whether a part is being worked on."""
        self._is_looping = False
        self._credit = progress.rate
        """Messages that the rate allows now."""
        self._counted_ns = self._broker.monotonic_ns()
        self._crowded: Channel | None = None
        """A channel that had MAX_WAITING messages to send again."""
        self._saving: set[Channel] = set()
        """Channels whose state must get on disk before the part is done."""
        if self.is_running:
            topic.holds[self] = progress.position

    @property
    def is_running(self) -> bool:
        return self.progress.state == RUNNING

    def cancel(self) -> None:
        """End it. The part that is being worked on is completed. Raises OSError."""
        if self.is_running:
            self._end(CANCELLED)

    # parts

    def proceed(self) -> None:
        """Called about once a second, and when a part is done: start on parts until a thread works
        on one, or nothing can be done now."""
        if self._is_looping:
            return
        self._is_looping = True
        try:
            while self._can_start():
                self._start_part()
        finally:
            self._is_looping = False

    def retry(self) -> None:
        """Called about once a second."""
        now_ns, rate = self._broker.monotonic_ns(), self.progress.rate
        self._credit = min(self._credit + rate * (now_ns - self._counted_ns) / 1e9, max(1.0, rate * BURST_S))
        self._counted_ns = now_ns
        for channel in [*self._saving]:
            self._save(channel)
        self.waits_for = ""
        self.proceed()

    def _can_start(self) -> bool:
        if not self.is_running or self._is_busy or self.waits_for or self._topic.is_exiting:
            return False
        if self.progress.position >= self.progress.end:
            self._finish()
            return False
        crowded = self._crowded
        if crowded is not None and not crowded.is_exiting and len(crowded.unfinished.requeued) >= MAX_WAITING:
            self.waits_for = f"{crowded} has {MAX_WAITING:,} messages to send again"
            return False
        self._crowded = None
        return not self.progress.rate or self._credit >= 1

    def _start_part(self) -> None:
        progress = self.progress
        self._is_busy = True
        start, end = max(progress.position, self._topic.log.start), progress.end
        limit = int(self._credit) if progress.rate else None
        try:
            ranges = locate_letters(self._topic, start, end, PART_BYTES)
        except OSError as error:
            self._hold_up(f"cannot read dead letters: {error}")
            return
        part: Part | None = None

        def read() -> None:
            nonlocal part
            part = read_letters(ranges, start, end, progress.filter, limit)

        def done(error: OSError | None) -> None:
            if part is None:
                self._hold_up(f"cannot read dead letters: {error or 'internal error'}")
            else:
                for place, lost in part.lost:
                    self._topic.log.note_lost(place, lost)
                self._choose(part)

        self._broker.try_in_background(read, done)

    def _hold_up(self, reason: str) -> None:
        """Try the part again later."""
        self._is_busy = False
        self.waits_for = reason
        self._broker.health.set(f"redrive of {self._topic}: {reason}", f"redrive {self._topic}")

    def _choose(self, part: Part) -> None:
        """Decide which letters go back. Messages that the logs do not have are written first."""
        if not self._may_work():
            return
        skipped: Counter[str] = Counter()
        chosen: list[Chosen] = []
        for origin, found in part.origins.items():
            if found.matching:
                one = self._choose_of(origin, found, skipped)
                chosen += [] if one is None else [one]
        for one in chosen:
            if len(one.channel.unfinished.requeued) >= MAX_WAITING:
                self._crowded, self._is_busy = one.channel, False
                return
            one.gone = one.gone_from_log()
            if one.channel.unfinished.redriven or (one.gone and one.channel.carried_over.is_running):
                self._is_busy = False
                self.waits_for = f"{one.channel} is busy"
                return
        jobs: list[CarryJob] = []
        for one in chosen:
            # The log must not remove messages before they count as unfinished.
            one.channel.topic.holds[one] = one.channel.topic.log.start
            if one.gone:
                one.carrying = one.channel.carried_over.begin_redrive(one.gone)
                jobs.append(one.carrying)
        done = partial(self._carried, part, chosen, skipped)

        def carry() -> None:
            for job in jobs:
                job.run()

        if jobs:
            self._broker.in_background(carry, done)
        else:
            done()

    def _choose_of(self, origin: Origin, found: OfOrigin, skipped: Counter[str]) -> Chosen | None:
        states = states_of(self._broker, self._topic.name, origin, found.matching)
        ready = states == STATES.index(READY)
        for index, count in enumerate(np.bincount(states, minlength=len(STATES)).tolist()):
            if count and STATES[index] != READY:
                skipped[STATES[index]] += count
        if not ready.any():
            return None
        channel = self._broker.topics[origin[0]].channels[origin[1]]
        if ready.all():
            return Chosen(channel, origin, found.matching, found.others)
        # Those put back before are in a range already, and do not end the new one.
        is_left_out = ~ready & (states != STATES.index(REDRIVEN))
        left_out = [found.matching[index].number for index in np.flatnonzero(is_left_out).tolist()]
        letters = [found.matching[index] for index in np.flatnonzero(ready).tolist()]
        return Chosen(channel, origin, letters, found.others + left_out)

    def _carried(self, part: Part, chosen: list[Chosen], skipped: Counter[str]) -> None:
        """The channels have the messages. Count them as unfinished, and write the states."""
        failed: OSError | None = None
        for one in chosen:
            del one.channel.topic.holds[one]
            if one.carrying is not None:
                one.channel.carried_over.end(one.carrying)
                failed = failed or one.carrying.error
        if failed is not None:
            self._hold_up(f"cannot write messages: {failed}")
            return
        if not self._may_work():
            return
        if any(one.carrying is not None for one in chosen) and self._has_changed(chosen):
            self._is_busy = False
            self.proceed()
            return
        for one in chosen:
            one.add(self._topic.name, part, self._topic.log.start)
        self._saving = {one.channel for one in chosen}
        progress = self.progress
        progress.letters += part.letters
        progress.foreign += part.foreign
        put_back = sum(len(one.letters) for one in chosen)
        progress.redriven += put_back
        self._credit -= put_back
        for state, count in skipped.items():
            progress.skipped[state] = progress.skipped.get(state, 0) + count
        progress.position = part.next
        for one in chosen:
            self._save(one.channel)
        if not chosen:
            self._part_done()

    def _has_changed(self, chosen: list[Chosen]) -> bool:
        """Whether a letter cannot be put back any more, because of a seek or a deletion while the
        messages were written. Then the part is to be done again."""
        return any(
            one.channel.is_exiting or states_of(self._broker, self._topic.name, one.origin, one.letters).any()
            for one in chosen
        )

    def _save(self, channel: Channel) -> None:
        if channel.is_exiting:
            self._saved(channel, True)
        else:
            self._broker.upkeep.checkpoint_now(channel, partial(self._saved, channel))

    def _saved(self, channel: Channel, is_on_disk: bool) -> None:
        """The messages of a channel may be sent once its state is on disk. If that fails, retry()
        tries again."""
        if channel not in self._saving or not (is_on_disk or channel.is_exiting):
            return
        self._saving.remove(channel)
        if not channel.is_exiting:
            channel.unfinished.release_redriven()
            channel.mark_changed()
            self._broker.next_turn.add_channel(channel)
        if not self._saving:
            self._part_done()

    def _part_done(self) -> None:
        self._is_busy = False
        self._broker.health.set(None, f"redrive {self._topic}")
        if self.is_running:
            self._topic.holds[self] = self.progress.position
            if self.progress.position < self.progress.end:
                self._try_write()
        self.proceed()

    def _may_work(self) -> bool:
        if self._topic.is_exiting:
            self._is_busy = False
        return self._is_busy

    # its end

    def _finish(self) -> None:
        try:
            self._end(FINISHED)
        except OSError as error:
            self._hold_up(f"cannot write {REDRIVE_FILE}: {error}")
            return
        progress = self.progress
        logger.info(
            "%s: a redrive has ended: %d letters put back, %d skipped",
            self._topic, progress.redriven, sum(progress.skipped.values()),
        )  # fmt: skip

    def _end(self, state: str) -> None:
        before = self.progress.state, self.progress.ended_ns
        self.progress.state, self.progress.ended_ns = state, self._broker.wall_ns()
        try:
            self.write()
        except OSError:
            self.progress.state, self.progress.ended_ns = before
            raise
        self._topic.holds.pop(self, None)

    # on disk

    def _try_write(self) -> None:
        """If this fails, the next start looks at some letters again."""
        try:
            self.write()
        except OSError as error:
            logger.warning("%s: cannot write %s: %s", self._topic, REDRIVE_FILE, error)

    def write(self) -> None:
        """Raises OSError."""
        fields = asdict(self.progress) | {"filter": self.progress.filter.stored()}
        assert self._topic.directory is not None
        path = self._topic.directory / REDRIVE_FILE
        self._broker.files.add_version(path, b"\n" + encode_json(fields) + b"\n")
        if self._topic.is_synchronous:
            self._broker.changes.sync_soon(self._topic.directory)


class Redrives:
    """The redrives of all dead-letter topics, one for each."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._redrives: dict[Topic, Redrive] = {}

    def find(self, topic: Topic) -> Redrive | None:
        """The redrive under way, or the last one."""
        return self._redrives.get(topic)

    def start(self, topic: Topic, wanted: LetterFilter, rate: float = 0.0) -> Redrive:
        """The topic must be kept on disk. Raises RedriveRunning or OSError."""
        known = self._redrives.get(topic)
        if known is not None and known.is_running:
            raise RedriveRunning(f"{topic} has a redrive that has not ended")
        topic.publishing.flush()
        start, end = topic.log.start, topic.log.end
        redrive = Redrive(topic, Progress(wanted, rate, start, end, start, began_ns=self._broker.wall_ns()))
        try:
            redrive.write()
        except OSError:
            topic.holds.pop(redrive, None)
            raise
        self._redrives[topic] = redrive
        redrive.proceed()
        return redrive

    def continue_all(self) -> None:
        """A round of upkeep."""
        for topic, redrive in [*self._redrives.items()]:
            if self._broker.topics.get(topic.name) is not topic:
                del self._redrives[topic]
            else:
                try:
                    redrive.retry()
                except Exception:
                    # It must not stop the upkeep of everything else.
                    logger.exception("%s: internal error in a redrive", topic)

    def load(self) -> None:
        """At the start: continue what the last run has begun. The topics must be loaded."""
        for topic in self._broker.topics.values():
            if topic.directory is None:
                continue
            path = topic.directory / REDRIVE_FILE
            try:
                progress = _read(self._broker, path)
            except (ValueError, TypeError, KeyError) as error:
                logger.error("%s is damaged (%s): start the redrive again if it had not ended", path, error)
                topic.corrupt_files += 1
                continue
            if progress is not None:
                self._redrives[topic] = Redrive(topic, progress)


def _read(broker: Broker, path: Path) -> Progress | None:
    fields: dict[str, Any] | None = read_json(broker.files, path)
    if fields is None:
        return None
    return Progress(**fields | {"filter": LetterFilter(**fields["filter"])})
