"""Ranges of a log: found by the index, whole, resumable, and safe to read in a thread."""

from __future__ import annotations

import gc
import os
import random
import threading
from bisect import bisect_left
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from nsparq.errors import CorruptBatch, WriteFailed
from nsparq.storage.log import Durability, Log
from nsparq.storage.log_range import MAX_BATCHES, LogRange, OffsetAhead, OffsetGone
from nsparq.storage.memory_log import MemoryLog
from nsparq.storage.raw_batch import CorruptRange, RawBatch, iter_batches
from nsparq.storage.segment_index import INDEX_EVERY
from tests.support.polling import DEADLINE

from .support import (
    FLOOR,
    NOW_NS,
    FaultyFiles,
    Message,
    append,
    crash,
    encoded,
    fill,
    flip,
    in_all_modes,
    messages_of,
    open_log,
    places,
    segment_files,
    stop,
)

MEMORY = Durability.MEMORY
ROOMY: dict[str, Any] = {"segment_bytes": 400_000, "memory_messages": 50}
"""Several index entries to a segment."""


def messages_in(found: LogRange, data: bytes | None = None) -> list[Message]:
    """The messages that a reader gets from a range."""
    batches = iter_batches(found.read() if data is None else data)
    return [
        Message(batch.base + i, body, batch.timestamp_ns, batch.due_ns)
        for batch in batches
        for i, body in enumerate(batch.bodies())
        if not any(low <= batch.base + i < high for low, high in found.gaps)
    ]


def follow(log: Log, sequence: int, max_bytes: int) -> list[Message]:
    """Everything from `sequence` on, range by range."""
    read: list[Message] = []
    while True:
        found = log.locate(sequence, max_bytes)
        if not found.size:
            assert sequence <= found.next == log.end
            return read
        assert found.next > sequence
        read += [message for message in messages_in(found) if message.sequence >= sequence]
        sequence = found.next


def big_fill(log: Log, batches: int, size: int = 9_000) -> list[Message]:
    """A few messages to a batch, several batches to an index entry."""
    written = []
    for number in range(batches):
        bodies = [b"%d/%d" % (number, i) + b"." * (size // 3) for i in range(3)]
        written += messages_of(log.append([(bodies, 0)], NOW_NS + number))
    return written


# what is in a range


@in_all_modes
@pytest.mark.parametrize("max_bytes", [1, 100_000, 1 << 30])
def test_following_the_ranges_gives_every_message_once_and_in_order(
    tmp_path: Path, durability: Durability, max_bytes: int
) -> None:
    log = open_log(tmp_path, durability=durability, **ROOMY)
    written = big_fill(log, 200)
    log.low = FLOOR
    assert follow(log, FLOOR, max_bytes) == written
    for start in random.Random(1).sample(range(len(written)), 20):
        assert follow(log, written[start].sequence, max_bytes) == written[start:]
    crash(log)


def test_the_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    log = open_log(tmp_path, **ROOMY)
    big_fill(log, 200)
    whole = b"".join(path.read_bytes() for path in segment_files(tmp_path))
    pieces, sequence = [], FLOOR
    while (found := log.locate(sequence, 150_000)).size:
        pieces.append(found.read())
        assert len(pieces[-1]) == found.size
        sequence = found.next
    assert b"".join(pieces) == whole
    crash(log)


def test_a_range_is_no_larger_than_asked_for_unless_one_index_entry_is(tmp_path: Path) -> None:
    log = open_log(tmp_path, **ROOMY)
    written = big_fill(log, 200)
    batch_bytes = places(segment_files(tmp_path)[0])[0].end
    for message in written[:: len(written) // 30]:
        for max_bytes in (1, INDEX_EVERY, 2 * INDEX_EVERY, 200_000, 350_000):
            found = log.locate(message.sequence, max_bytes)
            assert found.size <= max(max_bytes, INDEX_EVERY + batch_bytes)
            assert found.first <= message.sequence < found.next
        # At most one index entry's bytes come before the message.
        entry = log.locate(message.sequence, 1)
        before = sum(len(body) + 60 for s, body, *_ in written if entry.first <= s < message.sequence)
        assert before <= INDEX_EVERY + batch_bytes
    crash(log)


@in_all_modes
def test_a_batch_larger_than_asked_for_comes_whole(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability)
    written = append(log, b"x" * 300_000, b"y" * 300_000) + append(log, b"z")
    assert follow(log, FLOOR, 1000) == written
    crash(log)


@in_all_modes
def test_locating_reads_nothing_and_opens_one_file(tmp_path: Path, durability: Durability) -> None:
    files = CountingFiles()
    log = open_log(tmp_path, files=files, durability=durability, segment_bytes=1 << 30)
    big_fill(log, 300)
    files.calls.clear()
    ranges = [log.locate(sequence, 100_000) for sequence in range(FLOOR, log.end, 10)]
    assert files.calls["read"] == files.calls["read_cached"] == 0
    assert files.calls["open_read"] == (0 if durability is MEMORY else 1)
    assert len(ranges) == 90
    crash(log)


def test_a_reader_that_follows_the_log_gets_only_what_is_new(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, b"first")
    sequence = log.locate(FLOOR, 1 << 20).next
    for number in range(20):
        assert log.locate(sequence, 1 << 20).size == 0
        written = append(log, b"%d" % number) + append(log, b"and more")
        found = log.locate(sequence, 1 << 20)
        assert messages_in(found) == written
        sequence = found.next
    crash(log)


def test_deferred_messages_come_with_their_time(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([([b"a"], 0), ([b"later"], 77), ([b"b"], 0)], NOW_NS)
    assert [message.due_ns for message in messages_in(log.locate(FLOOR, 1000))] == [0, 77, 0]
    crash(log)


def test_a_closed_log_that_is_opened_again_has_the_same_ranges(tmp_path: Path) -> None:
    log = open_log(tmp_path, **ROOMY)
    written = big_fill(log, 200)
    before = log.locate(written[100].sequence, 100_000)
    clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end, **ROOMY)
    after = log.locate(written[100].sequence, 100_000)
    assert (after.first, after.next, after.size, after.read()) == (
        before.first,
        before.next,
        before.size,
        before.read(),
    )
    assert follow(log, FLOOR, 100_000) == written
    crash(log)


# where there is nothing


@in_all_modes
def test_a_removed_number_and_a_future_number_are_different_errors(
    tmp_path: Path, durability: Durability
) -> None:
    log = open_log(tmp_path, durability=durability, **ROOMY)
    written = big_fill(log, 200)
    log.reader_low = lambda: log.end
    for segment in log.trim(written[-1].sequence, 0):
        segment.remove()
    if durability is not MEMORY:
        assert FLOOR < log.start <= written[-1].sequence
    with pytest.raises(OffsetGone) as gone:
        log.locate(log.start - 1, 1000)
    assert (gone.value.sequence, gone.value.earliest) == (log.start - 1, log.start)
    with pytest.raises(OffsetAhead) as ahead:
        log.locate(log.end + 1, 1000)
    assert (ahead.value.sequence, ahead.value.latest) == (log.end + 1, log.end)
    end = log.locate(log.end, 1000)
    assert (end.first, end.next, end.size, end.read()) == (log.end, log.end, 0, b"")
    assert follow(log, log.start, 1000) == [m for m in written if m.sequence >= log.start]
    crash(log)


def test_an_empty_log_is_at_its_end(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert log.locate(FLOOR, 1000).size == 0
    with pytest.raises(OffsetGone):
        log.locate(FLOOR - 1, 1000)
    assert log.positions()[:4] == (FLOOR, FLOOR, 0, 0)
    crash(log)


def test_a_gap_between_segments_is_skipped(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = append(log, b"before the crash")
    crash(log)
    log = open_log(tmp_path, epoch=FLOOR + 5000)
    written += append(log, b"after it")
    assert written[1].sequence == FLOOR + 5000
    assert follow(log, FLOOR, 1000) == written
    found = log.locate(FLOOR + 1, 1000)
    assert (found.first, messages_in(found)) == (FLOOR + 5000, written[1:])
    crash(log)


def test_emptied_messages_are_named_although_their_bytes_are_there(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = fill(log, 10)
    log.gaps.add(FLOOR + 4, FLOOR + 9)
    found = log.locate(FLOOR, 1 << 20)
    assert found.gaps == ((FLOOR + 4, FLOOR + 9),)
    assert follow(log, FLOOR, 1 << 20) == written[:4] + written[9:]
    # Asked for from inside the gap: nothing comes twice.
    assert follow(log, FLOOR + 5, 1 << 20) == written[9:]
    crash(log)


def test_only_the_part_of_a_gap_that_lies_in_the_range_is_named(tmp_path: Path) -> None:
    log = open_log(tmp_path, **ROOMY)
    big_fill(log, 200)
    log.gaps.add(FLOOR + 10, log.end - 10)
    found = log.locate(FLOOR, 1)
    assert found.gaps == ((FLOOR + 10, found.next),)
    crash(log)


# files come and go


def test_a_range_can_be_read_after_its_segment_was_removed(tmp_path: Path) -> None:
    log = open_log(tmp_path, **ROOMY)
    written = big_fill(log, 200)
    found = log.locate(FLOOR, 100_000)
    for segment in log.trim(log.end, 0):
        segment.remove()
    assert len(segment_files(tmp_path)) == 1
    assert messages_in(found) == [m for m in written if m.sequence < found.next]
    log.discard()
    assert messages_in(found) == [m for m in written if m.sequence < found.next]


def open_descriptors(path: Path) -> int:
    names = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(name) and os.readlink(name).startswith(str(path)) for name in names)


def test_the_file_is_closed_when_its_last_range_is_gone(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 10)
    log.release_files()
    log.unsynced = 0
    assert log.release_files()
    assert open_descriptors(tmp_path) == 0
    ranges = [log.locate(FLOOR + i, 1000) for i in range(5)]
    assert open_descriptors(tmp_path) == 1
    ranges.pop().read()
    assert open_descriptors(tmp_path) == 1
    ranges.clear()
    gc.collect()
    assert open_descriptors(tmp_path) == 0
    crash(log)


def test_a_range_located_while_a_thread_closes_the_file_has_a_file_of_its_own(tmp_path: Path) -> None:
    class SlowlyClosing(FaultyFiles):
        def close(self, fd: int) -> None:
            if threading.current_thread() is letting_go:
                is_closing.set()
                assert may_close.wait(DEADLINE)
            super().close(fd)

    def let_go() -> None:
        ranges.clear()

    is_closing, may_close = threading.Event(), threading.Event()
    letting_go = threading.Thread(target=let_go)
    log = open_log(tmp_path, files=SlowlyClosing())
    written = fill(log, 20)
    ranges = [log.locate(FLOOR, 1_000_000)]
    letting_go.start()
    try:
        assert is_closing.wait(DEADLINE)
        found = log.locate(FLOOR, 1_000_000)
    finally:
        may_close.set()
        letting_go.join()
    assert messages_in(found) == written
    crash(log)


def test_a_failed_append_is_in_no_range(tmp_path: Path) -> None:
    files = FaultyFiles()
    log = open_log(tmp_path, files=files)
    written = append(log, b"first")
    files.fail("write", torn=100)
    files.fail("truncate")
    with pytest.raises(WriteFailed):
        append(log, b"refused" * 30)
    files.heal()
    found = log.locate(FLOOR, 1000)
    assert messages_in(found) == written
    assert found.size < segment_files(tmp_path)[0].stat().st_size, "the torn bytes are still there"
    written += append(log, b"second")
    assert follow(log, FLOOR, 1000) == written
    assert follow(log, found.next, 1000) == written[1:]
    crash(log)


def test_a_torn_tail_is_in_no_range_after_a_crash(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = fill(log, 5)
    crash(log)
    with segment_files(tmp_path)[0].open("ab") as file:
        file.write(encoded(FLOOR + 15, b"torn off")[:-3])
    log = open_log(tmp_path)
    assert follow(log, FLOOR, 1000) == written
    crash(log)


@in_all_modes
def test_a_thread_reads_ranges_while_the_log_appends_rolls_and_reclaims(
    tmp_path: Path, durability: Durability
) -> None:
    """The event loop changes the log while a thread reads ranges. All it reads is correct."""
    log = open_log(tmp_path, durability=durability, segment_bytes=30_000, memory_messages=20)
    position = [FLOOR]
    log.reader_low = lambda: position[0]
    written: list[Message] = []
    read: list[Message] = []
    pending: Queue[LogRange | None] = Queue()

    def reading() -> None:
        while (found := pending.get()) is not None:
            read.extend(messages_in(found))

    thread = threading.Thread(target=reading)
    thread.start()
    chance = random.Random(7)
    try:
        for number in range(400):
            bodies = [b"%d" % number * chance.randrange(1, 40) for _ in range(chance.randrange(1, 5))]
            written += append(log, *bodies, now_ns=NOW_NS + number)
            if chance.random() < 0.5:
                found = log.locate(position[0], 5000)
                pending.put(found)
                position[0] = found.next
            if chance.random() < 0.2:
                for segment in log.trim(position[0], 0):
                    segment.remove()
    finally:
        pending.put(None)
        thread.join()
    assert sorted(set(read)) == [m for m in written if m.sequence < position[0]]
    assert follow(log, position[0], 5000) == [m for m in written if m.sequence >= position[0]]
    crash(log)


# in memory


def test_a_range_in_memory_is_encoded_as_on_disk(tmp_path: Path) -> None:
    log = open_log(tmp_path, durability=MEMORY, memory_messages=1000)
    batches = log.append([([b"a", b""], 0), ([b"later"], 9)], NOW_NS)
    found = log.locate(FLOOR + 1, 1000)
    assert found.reader is None
    assert found.first == FLOOR
    assert found.read() == encoded(FLOOR, b"a", b"") + encoded(FLOOR + 2, b"later", due_ns=9)
    assert found.size == len(found.read())
    assert messages_in(found) == messages_of(batches)
    crash(log)


def test_a_range_from_memory_has_a_bounded_number_of_batches() -> None:
    log = MemoryLog(floor=FLOOR)
    for _ in range(MAX_BATCHES + 10):
        log.append([([b"x"], 0)], NOW_NS)
    assert log.locate(FLOOR, 1 << 30).next == FLOOR + MAX_BATCHES
    assert len(follow(log, FLOOR, 1 << 30)) == MAX_BATCHES + 10


def test_memory_mode_reads_from_disk_and_then_from_memory(tmp_path: Path) -> None:
    log = open_log(tmp_path, durability=MEMORY, segment_bytes=2000, memory_messages=20)
    written = fill(log, 60)
    assert log.start < log.stable < log.end
    for start in range(0, len(written), 7):
        assert follow(log, FLOOR + start, 300) == written[start:]
    crash(log)


def test_messages_that_memory_mode_did_not_write_are_gone_at_once(tmp_path: Path) -> None:
    """They were not written when they left memory, so no reader may go back to them."""
    log = open_log(tmp_path, durability=MEMORY, memory_messages=30)
    low = [0]
    log.reader_low = lambda: low[0]
    written = fill(log, 20)
    assert log.start < log.stable, "the first of them are on disk"
    low[0] = log.end
    fill(log, 20)
    low[0] = 0
    written += fill(log, 20)
    kept = follow(log, log.start, 1000)
    assert written[0] in kept
    assert written[-1] in kept
    hole = log.end - log.start - len(kept)
    assert hole == log.gaps.count(log.start, log.end) > 0
    assert log.count(log.start, log.end) == len(kept)
    crash(log)


def test_without_anything_on_disk_the_log_begins_where_it_was_last_needed(tmp_path: Path) -> None:
    log = open_log(tmp_path, durability=MEMORY, memory_messages=30)
    log.reader_low = lambda: log.end
    fill(log, 40)
    assert segment_files(tmp_path) == []
    assert log.start >= log.memory_start
    assert not log.gaps.count(FLOOR, log.end), "what comes before the start is no gap to step over"
    assert [m.sequence for m in follow(log, log.start, 1000)] == [*range(log.start, log.end)]
    crash(log)


@pytest.mark.parametrize("retention", [{"retention_s": 60}, {"retention_bytes": 1 << 20}])
def test_retention_keeps_what_nobody_needs_in_memory_mode_too(
    tmp_path: Path, retention: dict[str, int]
) -> None:
    log = open_log(tmp_path, durability=MEMORY, memory_messages=30, **retention)
    log.reader_low = lambda: log.end
    written = fill(log, 40)
    assert follow(log, FLOOR, 1000) == written
    clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end)
    assert follow(log, FLOOR, 1000) == written
    crash(log)


def test_an_ephemeral_log_has_ranges_too() -> None:
    log = MemoryLog(floor=FLOOR)
    assert log.locate(FLOOR, 10).size == 0
    assert log.positions()[:4] == (FLOOR, FLOOR, 0, 0)
    written = big_fill(log, 40)
    assert follow(log, FLOOR, 20_000) == written
    assert log.positions()[:4] == (FLOOR, log.end, NOW_NS, NOW_NS + 39)
    log.trim(FLOOR + 30)
    with pytest.raises(OffsetGone) as gone:
        log.locate(FLOOR + 29, 10)
    assert gone.value.earliest == FLOOR + 30
    with pytest.raises(OffsetAhead):
        log.locate(log.end + 1, 10)
    log.gaps.add(FLOOR + 33, FLOOR + 39)
    assert follow(log, FLOOR + 34, 20_000) == written[39:]


# damage


@pytest.mark.parametrize(("has_index", "batch"), [(True, 0), (True, 3), (True, 9), (False, 0), (False, 3)])
@pytest.mark.parametrize("place", [0, 9, 20, 50, -1], ids=["magic", "size", "number", "table", "body"])
def test_damage_in_a_range_is_reported_and_left_out(
    tmp_path: Path, has_index: bool, batch: int, place: int
) -> None:
    log = open_log(tmp_path)
    written = fill(log, 10)
    clean_end = stop(log)
    (path,) = segment_files(tmp_path)
    bad = places(path)[batch]
    flip(path, bad.position + place if place >= 0 else bad.end - 1, 2)
    if not has_index:
        path.with_suffix(".index").unlink()
    log = open_log(tmp_path, clean_end=clean_end)
    assert log.corrupt_batches == (not has_index)
    found = log.locate(FLOOR, 1 << 20)
    with pytest.raises(CorruptRange) as corrupt:
        messages_in(found)
    # Nothing says where the first batch begins but the range itself.
    assert corrupt.value.sequence == (bad.sequences[0] if batch else None)
    assert corrupt.value.position == bad.position
    verified = found.read_verified()
    assert verified.lost == [(bad.position, bad.end, bad.sequences[0], bad.sequences[-1] + 1)]
    assert messages_in(found, verified.data) == [m for m in written if m.sequence not in bad.sequences]
    log.note_lost(found, verified.lost)
    log.note_lost(found, verified.lost)
    assert log.corrupt_batches == 1, "what opening has found is not counted again"
    assert log.corrupt_messages == 3
    assert log.count(FLOOR, clean_end) == 27
    again = log.locate(FLOOR, 1 << 20)
    assert again.first > bad.sequences[-1] or again.gaps == ((bad.sequences[0], bad.sequences[-1] + 1),)
    # A channel that reads there later finds the same damage, and counts nothing twice.
    sequence = FLOOR
    while (read := log.read(sequence, wait=True)) is not None:
        sequence = read.end
    assert (log.corrupt_batches, log.corrupt_messages) == (1, 3)
    crash(log)


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = fill(log, 10)
    (path,) = segment_files(tmp_path)
    found = log.locate(FLOOR, 1 << 20)
    cut = places(path)[7]
    os.truncate(path, cut.position)
    with pytest.raises(CorruptBatch, match="shorter"):
        found.read()
    verified = found.read_verified()
    assert messages_in(found, verified.data) == written[:21]
    assert verified.lost == [(cut.position, found.size, FLOOR + 21, FLOOR + 30)]
    crash(log)


def test_verifying_an_undamaged_range_changes_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 10)
    for found in (log.locate(FLOOR, 1 << 20), log.locate(log.end, 1)):
        assert found.read_verified() == (found.read(), [])
    crash(log)


def test_a_body_that_looks_like_a_batch_is_not_taken_for_one(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = append(log, b"first") + append(log, encoded(FLOOR + 1, b"forged") * 3) + append(log, b"last")
    flip(segment_files(tmp_path)[0], places(segment_files(tmp_path)[0])[1].position + 4)
    found = log.locate(FLOOR, 1 << 20)
    assert messages_in(found, found.read_verified().data) == [written[0], written[2]]
    crash(log)


# decoding


def test_cutting_a_buffer_anywhere_gives_whole_batches_and_an_error() -> None:
    whole = encoded(5, b"a", b"bb") + encoded(7, b"") + encoded(8, b"ccc", due_ns=4)
    ends = [len(encoded(5, b"a", b"bb")), len(encoded(5, b"a", b"bb") + encoded(7, b"")), len(whole)]
    for cut in range(len(whole) + 1):
        found: list[RawBatch] = []
        try:
            found.extend(iter_batches(whole[:cut]))
            assert cut in (0, *ends)
        except CorruptRange as error:
            assert "cut off" in error.reason
            assert error.sequence == {0: None, 1: 7, 2: 8}[len(found)]
        assert len(found) == sum(end <= cut for end in ends)


def test_decoded_batches_are_views_and_can_be_cut() -> None:
    buffer = encoded(5, b"a", b"", b"ccc", b"dd", timestamp_ns=3, due_ns=4)
    (batch,) = iter_batches(buffer)
    assert (batch.base, batch.end, batch.timestamp_ns, batch.due_ns) == (5, 9, 3, 4)
    assert batch.offsets().tolist() == [0, 1, 1, 4, 6]
    assert batch.data.obj is buffer
    assert batch.between(0, 100) is batch
    for start in range(3, 12):
        for end in range(3, 12):
            part = batch.between(start, end)
            wanted = {5: b"a", 6: b"", 7: b"ccc", 8: b"dd"}
            assert part.bodies() == [body for s, body in wanted.items() if start <= s < end]
            if len(part.lengths):
                assert part.base == max(start, 5)
                assert (part.timestamp_ns, part.due_ns) == (3, 4)


# positions and times


@in_all_modes
def test_positions_are_the_reach_of_the_log(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, segment_bytes=2000, memory_messages=20)
    log.reader_low = lambda: FLOOR
    fill(log, 60)
    assert log.positions()[:4] == (FLOOR, FLOOR + 180, NOW_NS, NOW_NS + 59)
    clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end, segment_bytes=2000)
    assert log.positions()[:4] == (FLOOR, FLOOR + 180, NOW_NS, NOW_NS + 59)
    for segment in log.trim(FLOOR + 100, 0):
        segment.remove()
    positions = log.positions()
    assert FLOOR < positions.earliest <= FLOOR + 100
    assert positions.first_ns == NOW_NS + (positions.earliest - FLOOR) // 3
    crash(log)


def expected_at(written: list[Message], time_ns: int, end: int) -> int:
    return next((m.sequence for m in written if m.timestamp_ns >= time_ns), end)


@in_all_modes
def test_a_time_search_finds_the_first_message_published_then_or_later(
    tmp_path: Path, durability: Durability
) -> None:
    log = open_log(tmp_path, durability=durability, **ROOMY)
    log.reader_low = lambda: FLOOR
    written: list[Message] = []
    for number in range(200):
        written += append(log, b"x" * 9000, b"y", now_ns=NOW_NS + 10 * (number // 3))
    for _ in range(2):
        for offset in [-5, *range(0, 680, 7), 665, 10_000]:
            assert log.search_time(NOW_NS + offset).run() == expected_at(written, NOW_NS + offset, log.end)
        assert log.search_time(0).run() == log.search_time(-1).run() == FLOOR
        clean_end = stop(log)
        log = open_log(tmp_path, clean_end=clean_end, **ROOMY)
    crash(log)


def test_a_time_search_is_exact_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """All messages before the found one have earlier publish times, whatever the clock did."""
    chance = random.Random(3)
    log = open_log(tmp_path, **ROOMY)
    now_ns = NOW_NS
    written: list[Message] = []
    for _ in range(300):
        now_ns += chance.choice([0, 5, 10, 10, -70 if chance.random() < 0.3 else 20])
        written += append(log, b"x" * 7000, b"y", now_ns=now_ns)
    crash(log)
    for has_index in (True, False):
        if not has_index:
            for path in tmp_path.glob("*.index"):
                path.unlink()
        log = open_log(tmp_path, **ROOMY)
        for offset in range(-50, now_ns - NOW_NS + 100, 13):
            at_ns = NOW_NS + offset
            assert log.search_time(at_ns).run() == expected_at(written, at_ns, log.end)
        crash(log)


def test_finding_a_time_reads_one_index_entry(tmp_path: Path) -> None:
    files = CountingFiles()
    log = open_log(tmp_path, files=files, segment_bytes=500_000)
    written = big_fill(log, 300)
    times = [message.timestamp_ns for message in written]
    files.calls.clear()
    files.bytes_read = 0
    at_ns = NOW_NS + 170
    assert log.search_time(at_ns).run() == written[bisect_left(times, at_ns)].sequence
    assert files.calls["read"] == 1
    assert files.bytes_read <= INDEX_EVERY + 10_000
    crash(log)


def test_a_time_search_works_after_its_segment_was_removed(tmp_path: Path) -> None:
    log = open_log(tmp_path, **ROOMY)
    written = big_fill(log, 200)
    search = log.search_time(NOW_NS + 20)
    for segment in log.trim(log.end, 0):
        segment.remove()
    assert search.run() == written[60].sequence
    crash(log)


def test_a_time_search_skips_damage(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = fill(log, 10)
    (path,) = segment_files(tmp_path)
    flip(path, places(path)[4].end - 1)
    assert log.search_time(NOW_NS + 4).run() == written[15].sequence
    flip(path, places(path)[9].end - 1)
    assert log.search_time(NOW_NS + 9).run() == log.end
    crash(log)


def test_a_time_search_works_in_an_ephemeral_log() -> None:
    log = MemoryLog(floor=FLOOR)
    written = big_fill(log, 20)
    for offset in range(-2, 22):
        assert log.search_time(NOW_NS + offset).run() == expected_at(written, NOW_NS + offset, log.end)


# deferred messages


@in_all_modes
def test_deferred_messages_are_found_on_disk_and_in_memory(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, segment_bytes=500, memory_messages=20)
    log.reader_low = lambda: FLOOR
    deferred = []
    for number in range(60):
        append(log, b"plain", b"too")
        deferred += [(m.sequence, m.due_ns) for m in append(log, b"later", due_ns=1000 + number % 7)]
    assert log.deferred_since(FLOOR) == deferred
    assert log.deferred_since(deferred[20][0]) == deferred[20:]
    assert log.deferred_since(deferred[20][0] + 1) == deferred[21:]
    assert log.deferred_since(FLOOR, 1003) == [pair for pair in deferred if pair[1] > 1003]
    log.gaps.add(deferred[10][0], deferred[50][0])
    assert log.deferred_since(FLOOR) == deferred[:10] + deferred[50:]
    crash(log)


class CountingFiles(FaultyFiles):
    """Counts opened files and read bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read = 0

    def open_read(self, path: Path) -> int:
        self.calls["open_read"] += 1
        return super().open_read(path)

    def read(self, fd: int, size: int, position: int) -> bytes:
        found = super().read(fd, size, position)
        self.bytes_read += len(found)
        return found
