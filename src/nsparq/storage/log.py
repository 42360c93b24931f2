"""The log of a topic, as the broker sees it: messages under consecutive sequence numbers.

DiskLog keeps the messages in files and the newest also in memory. MemoryLog, for ephemeral
topics, keeps them in memory alone. The broker uses both through `Log`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol

from nsparq.storage.batch import Batch
from nsparq.storage.gaps import Gaps
from nsparq.storage.log_range import LogRange, Lost, OffsetAhead, OffsetGone, TimeSearch
from nsparq.storage.log_sync import Sync
from nsparq.storage.segment import Segment

EPOCH_BITS: Final = 12
"""A log opened after a crash continues at the clock's millisecond, shifted by this many bits. These
numbers cannot have been used before, even where the disk lost the last of them, as long as a topic
takes under four million messages a second. 42 bits of milliseconds last until 2109."""

Group = tuple[Sequence[bytes], int]
"""Bodies that are appended as one batch, and their due time; 0 for none."""


class Durability(Enum):
    """When a publish is acknowledged: once the system has it, the disk has it, or memory has it."""

    OS = "os"
    FSYNC = "fsync"
    MEMORY = "memory"


class LogSettings(NamedTuple):
    """The daemon's options that a log needs."""

    durability: Durability = Durability.OS
    segment_bytes: int = 100 << 20
    memory_messages: int = 10_000
    retention_s: float = 0
    retention_bytes: int = 0
    has_archive: bool = False
    """Whether the daemon has an archive."""
    is_archived: bool = False
    """Whether sealed segments go to an archive. None leaves the disk before it is there."""
    archive_local_bytes: int = 0
    """Archived segments leave the disk beyond this size, even if channels need them; 0 means no
    limit."""
    archive_retention_s: float = 0
    archive_retention_bytes: int = 0
    """How long the archive keeps segments that no channel needs; 0 means no limit."""


class LogPositions(NamedTuple):
    """The reach of a log, in numbers and in time."""

    earliest: int
    """The first sequence number that can be read."""
    latest: int
    """The sequence number of the next message."""
    first_ns: int
    """Publish time of the earliest message; 0 if there is none."""
    last_ns: int
    """The latest publish time; 0 if there is no message."""
    size_bytes: int = 0
    """On disk, and in the archive if only that has them."""


class TopicPositions(NamedTuple):
    """The extent of a topic's log."""

    incarnation: str
    """Names the log: a topic deleted and created again has another, and its numbers mean other
    messages."""
    earliest: int
    """The first sequence number that can be read."""
    latest: int
    """The sequence number of the next message."""
    first_ns: int
    """When the earliest message was published; 0 if there is none."""
    last_ns: int
    """The latest publish time; 0 if there is no message."""
    size_bytes: int
    """On disk, and in the archive if only that has them."""
    messages: int


class Log(Protocol):
    """What both kinds of log do."""

    gaps: Gaps
    """Sequence numbers without a message."""
    lost: Gaps
    """Sequence numbers that were on disk in an earlier run and are missing now."""
    end: int
    """The sequence number of the next message."""

    @property
    def start(self) -> int:
        """The oldest sequence number that can be read."""

    @property
    def memory_start(self) -> int:
        """Every message from here to the end is in memory."""

    @property
    def disk_end(self) -> int:
        """End of the messages on disk; 0 if there are none."""

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""

    @property
    def corrupt_batches(self) -> int:
        """Damaged places found so far."""

    @property
    def corrupt_messages(self) -> int:
        """Messages lost to damage so far."""

    # messages

    def append(self, groups: Sequence[Group], now_ns: int, tag: int = 0) -> list[Batch]:
        """Append each group as one batch: all of them or, if this raises, none."""

    def read(self, sequence: int, *, wait: bool = False) -> Batch | None:
        """The batch that holds `sequence`, or else the first one after it; None at the end.

        Raises Cold if the bytes are not in memory and `wait` is false. Damaged batches are
        logged, counted and skipped.
        """

    def count(self, start: int, end: int) -> int:
        """Number of messages between two sequence numbers."""

    def deferred_since(self, sequence: int, due_after: int = 0) -> list[tuple[int, int]]:
        """Sequence number and due time of every deferred message from `sequence` on, in order.
        Leaves out messages due at `due_after` or before."""

    def hold(self, size_bytes: int) -> None:
        """Count bytes that channels keep in memory for this log; negative when they free them."""

    # ranges

    def positions(self) -> LogPositions: ...

    def locate(self, sequence: int, max_bytes: int) -> LogRange:
        """Whole batches from the one with `sequence` on, or a little before it, up to about
        `max_bytes`. The range is empty at the log's end. Raises OffsetGone or OffsetAhead."""

    def note_lost(self, found: LogRange, lost: Sequence[Lost]) -> None:
        """Log and count damage that a reader of a range found, once for each place."""

    def search_time(self, timestamp_ns: int) -> TimeSearch:
        """A search for the first message published at or after a time."""

    # files

    def persist(self) -> None:
        """Write and sync everything, and write the index that makes the next start quick. Raises
        WriteFailed; then it can be called again. A thread may call it if nobody else uses the
        log."""

    def close(self) -> None:
        """persist(), then free the memory. The log can still be used."""

    def discard(self) -> None:
        """Free memory and close files. The files on disk stay."""

    def release_files(self) -> bool:
        """Close the files of an idle topic; they open again when needed. False if a sync still
        needs them."""

    def change_settings(self, settings: LogSettings) -> None:
        """Raises WriteFailed, with nothing changed."""

    # syncing

    @property
    def committed(self) -> int:
        """End of the messages that are as safe as they get: on disk, for a log that has files."""

    @property
    def unsynced(self) -> int:
        """Messages written since the last fsync began."""

    @property
    def is_syncing(self) -> bool: ...

    @property
    def doubtful(self) -> Sequence[Segment]:
        """Segments whose fsync failed: see Segment.is_doubtful."""

    def begin_sync(self) -> Sync | None:
        """The fsync that commits all messages written so far; run() it in a thread, then call
        end_sync(). None if this log has no files. Raises OSError."""

    def end_sync(self, sync: Sync) -> None:
        """Note the outcome."""

    def sync_since(self, sequence: int) -> None:
        """At the start after a crash: sync the messages from this sequence number on, and wait for
        it. They may be nowhere but in the system's memory. Segments whose fsync fails become
        doubtful."""

    # removing

    def sealed_segments(self) -> list[Segment]:
        """All segments but the one that messages are appended to."""

    @property
    def archived_end(self) -> int:
        """End of the messages that are only in an archive; the log's start if there are none."""

    @property
    def has_aging_segments(self) -> bool:
        """Whether segments wait for the age at which retention removes them, here or in an
        archive."""

    def trim(self, low: int, now_s: float, start_low: int = sys.maxsize) -> list[Segment]:
        """Drop messages before `low`, which no reader needs, unless retention keeps them. Archived
        segments may stay in the log without their file, but not those from `start_low` on. Gives
        the segments whose files the caller must remove."""


def check_reach(log: Log, sequence: int) -> None:
    """Raises OffsetGone or OffsetAhead for a sequence number outside the log."""
    if sequence < log.start:
        raise OffsetGone(sequence, log.start)
    if sequence > log.end:
        raise OffsetAhead(sequence, log.end)
