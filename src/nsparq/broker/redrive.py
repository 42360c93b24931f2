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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.letters import LetterFilter, Part, locate_letters, read_letters
from nsparq.broker.redrive_choice import Chosen, choose
from nsparq.errors import NsparqError
from nsparq.storage.checked_json import encode_json, read_json

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


class RedriveRunning(NsparqError):
    """The topic has a redrive that has not ended."""


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
        self.topic = topic
        self._broker = topic.broker
        self.progress = progress
        self.waits_for = ""
        """Why it does not go on at the moment."""
        self.is_busy = False
        """Whether a part is being worked on. It is completed after the end, too."""
        self._is_looping = False
        self._credit = progress.rate
        """Messages that the rate allows now."""
        self._counted_ns = self._broker.monotonic_ns()
        self._crowded: Channel | None = None
        """A channel that had MAX_WAITING messages to send again."""
        self._saving: set[Channel] = set()
        """Channels whose state must get on disk before the part is done."""
        self._unsaved: set[Channel] = set()
        """Those of them whose state was not written, and that nobody is writing."""
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
        for channel in [*self._unsaved]:
            self._save(channel)
        self.waits_for = ""
        self.proceed()

    def _can_start(self) -> bool:
        if not self.is_running or self.is_busy or self.waits_for or self.topic.is_exiting:
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
        self.is_busy = True
        start, end = max(progress.position, self.topic.log.start), progress.end
        limit = int(self._credit) if progress.rate else None
        try:
            ranges = locate_letters(self.topic, start, end, PART_BYTES)
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
                    self.topic.log.note_lost(place, lost)
                self._choose(part)

        archive = self._broker.archive if any(place.is_remote for place in ranges) else None
        self._broker.try_in_background(read, done, None if archive is None else archive.in_background)

    def _hold_up(self, reason: str) -> None:
        """Try the part again later, unless the redrive has ended or its topic was deleted."""
        self.is_busy = False
        if self.is_running and not self.topic.is_exiting:
            self.waits_for = reason
            self._broker.health.set(f"{self}: {reason}", f"redrive {self.topic}")

    def _choose(self, part: Part) -> None:
        """Decide which letters go back. Messages that the logs do not have are written first."""
        if not self._may_work():
            return
        skipped: Counter[str] = Counter()
        chosen: list[Chosen] = []
        for origin, found in part.origins.items():
            if found.matching:
                one = choose(self._broker, self.topic.name, origin, found, skipped)
                chosen += [] if one is None else [one]
        for one in chosen:
            if len(one.channel.unfinished.requeued) >= MAX_WAITING:
                self._crowded, self.is_busy = one.channel, False
                return
            if one.channel.unfinished.redriven or (one.gone and one.channel.carried_over.is_running):
                self.is_busy = False
                self.waits_for = f"{one.channel} is busy"
                return
        jobs: list[CarryJob] = []
        for one in chosen:
            # The log must not remove messages before they count as unfinished.
            one.channel.topic.holds[one] = one.channel.topic.log.start
            if one.gone:
                one.carrying = one.channel.carried_over.begin_redrive(one.gone, one.gone_columns)
                jobs.append(one.carrying)
        done = partial(self._carried, part, chosen, skipped)

        def carry() -> None:
            for job in jobs:
                job.run()

        if jobs:
            self._broker.in_background(carry, done)
        else:
            done()

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
        name = self.topic.name
        if any(one.carrying is not None for one in chosen) and any(
            one.channel.unfinished.redriven or one.has_changed(self._broker, name) for one in chosen
        ):
            # The part is to be done again: after a seek or a deletion, or because messages of
            # another redrive wait for their checkpoint. It must not release these ones as well.
            self.is_busy = False
            self.proceed()
            return
        for one in chosen:
            one.add(name, part, self.topic.log.start)
        self._saving = {one.channel for one in chosen}
        self._unsaved = self._saving.copy()
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

    def _save(self, channel: Channel) -> None:
        # One write at a time: a later one would replace it before a slow disk gets to it.
        self._unsaved.discard(channel)
        if channel.is_exiting:
            self._saved(channel, True)
        else:
            self._broker.upkeep.checkpoint_now(channel, partial(self._saved, channel))

    def _saved(self, channel: Channel, is_on_disk: bool) -> None:
        """The messages of a channel may be sent once its state is on disk. If that fails, retry()
        tries again."""
        if channel not in self._saving:
            return
        if not (is_on_disk or channel.is_exiting):
            self._unsaved.add(channel)
            return
        self._saving.remove(channel)
        if not channel.is_exiting:
            channel.unfinished.release_redriven()
            channel.mark_changed()
            self._broker.next_turn.add_channel(channel)
        if not self._saving:
            self._part_done()

    def _part_done(self) -> None:
        self.is_busy = False
        if self.topic.is_exiting:
            return
        self._broker.health.set(None, f"redrive {self.topic}")
        if self.is_running:
            self.topic.holds[self] = self.progress.position
            if self.progress.position < self.progress.end:
                self._try_write()
        self.proceed()

    def _may_work(self) -> bool:
        if self.topic.is_exiting:
            self.is_busy = False
        return self.is_busy

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
            self.topic, progress.redriven, sum(progress.skipped.values()),
        )  # fmt: skip

    def _end(self, state: str) -> None:
        before = self.progress.state, self.progress.ended_ns
        self.progress.state, self.progress.ended_ns = state, self._broker.wall_ns()
        try:
            self.write()
        except OSError:
            self.progress.state, self.progress.ended_ns = before
            raise
        self.topic.holds.pop(self, None)
        self.waits_for = ""
        self._broker.health.set(None, f"redrive {self.topic}")

    # on disk

    def _try_write(self) -> None:
        """If this fails, the next start looks at some letters again."""
        try:
            self.write()
        except OSError as error:
            logger.warning("%s: cannot write %s: %s", self.topic, REDRIVE_FILE, error)

    def write(self) -> None:
        """Raises OSError."""
        fields = asdict(self.progress) | {"filter": self.progress.filter.stored()}
        assert self.topic.directory is not None
        path = self.topic.directory / REDRIVE_FILE
        self._broker.files.add_version(path, b"\n" + encode_json(fields) + b"\n")
        if self.topic.is_synchronous:
            self._broker.changes.sync_soon(self.topic.directory)

    def __str__(self) -> str:
        return f"redrive of {self.topic}"


class Redrives:
    """The redrives of all dead-letter topics, one for each."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._redrives: dict[Topic, Redrive] = {}
        self._left: list[Redrive] = []
        """Redrives that another one has replaced, or whose topic was deleted. The states of their
        last part may have to be written again."""

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
        if known is not None:
            self._left.append(known)
        self._redrives[topic] = redrive
        redrive.proceed()
        return redrive

    def continue_all(self) -> None:
        """A round of upkeep."""
        for topic in [one for one in self._redrives if self._broker.topics.get(one.name) is not one]:
            self._left.append(self._redrives.pop(topic))
        self._left = [redrive for redrive in self._left if redrive.is_busy]
        for redrive in [*self._redrives.values(), *self._left]:
            try:
                redrive.retry()
            except Exception:
                # It must not stop the upkeep of everything else.
                logger.exception("%s: internal error", redrive)

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
