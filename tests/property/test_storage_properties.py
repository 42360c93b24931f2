"""What must hold of the storage whatever happens to it: cut anywhere, damaged anywhere, used in any
order."""

from __future__ import annotations

import logging
import shutil
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nsparq.errors import WriteFailed
from nsparq.storage.batch import BatchCache
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.gaps import Gaps
from nsparq.storage.log import Durability
from nsparq.storage.state_files import ChannelState, decode_channel_state
from tests.storage.support import (
    FLOOR,
    NOW_NS,
    FaultyFiles,
    Message,
    append,
    crash,
    encoded,
    flip,
    messages_of,
    open_log,
    places,
    read_all,
    segment_files,
    stop,
)
from tests.support.examples import examples

# a small log, cut and damaged everywhere


class SmallLog:
    """A few batches in two segments; `restore` puts the files back as they were written."""

    def __init__(self, directory: Path, *, has_index: bool) -> None:
        self.directory = directory
        log = open_log(directory, segment_bytes=300)
        self.batches = [
            append(log, b"first", b"", now_ns=NOW_NS),
            append(log, b"second", now_ns=NOW_NS + 1),
            append(log, b"later", due_ns=NOW_NS + 9, now_ns=NOW_NS + 2),
            append(log, b"NQB1", b"\0" * 9, b"z", now_ns=NOW_NS + 3),
            append(log, b"NQB1" * 5, now_ns=NOW_NS + 4),
            append(log, b"the one before the last", now_ns=NOW_NS + 5),
            append(log, b"a", b"b", now_ns=NOW_NS + 6),
        ]
        self.messages = [message for batch in self.batches for message in batch]
        self.end = log.end
        if has_index:
            stop(log)
        else:
            crash(log)
            for path in directory.glob("*.index"):
                path.unlink()
        self.content = {path: path.read_bytes() for path in directory.iterdir()}
        self.segments = segment_files(directory)
        assert len(self.segments) == 2
        self.places = [place for path in self.segments for place in places(path)]

    def restore(self) -> None:
        for path in {*self.directory.iterdir()} - {*self.content}:
            path.unlink()
        for path, content in self.content.items():
            path.write_bytes(content)

    def without(self, lost: set[int]) -> list[Message]:
        """The messages of all batches but some."""
        return [m for number, batch in enumerate(self.batches) if number not in lost for m in batch]

    def open(self, *, clean_end: int = -1) -> DiskLog:
        return open_log(self.directory, segment_bytes=300, clean_end=clean_end, epoch=self.end)


@pytest.fixture(params=[True, False], ids=["with index", "without index"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> SmallLog:
    return SmallLog(tmp_path, has_index=request.param)


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_log_cut_at_any_byte_recovers_a_prefix(small: SmallLog, is_clean: bool) -> None:
    for number, path in enumerate(small.segments):
        for cut in range(len(small.content[path])):
            small.restore()
            path.write_bytes(small.content[path][:cut])
            for later in small.segments[number + 1 :]:
                later.unlink()
            has_index = path.with_suffix(".index").exists()
            log = small.open(clean_end=small.end if is_clean else -1)
            found = read_all(log, FLOOR)
            kept = [p for p in small.places if p.path < path or (p.path == path and p.end <= cut)]
            expected = [
                message for message in small.messages if any(message.sequence in p.sequences for p in kept)
            ]
            where = f"{path.name} cut at {cut}"
            assert found == expected == small.messages[: len(found)], where
            # Without an index nothing tells it from a write that a crash has cut short.
            missing = len(small.messages) - len(found) if has_index else 0
            assert (log.corrupt_messages, log.corrupt_batches > 0) == (missing, missing > 0), where
            assert log.count(log.start, log.end) == len(found), where
            (new,) = append(log, b"new")
            assert new.sequence >= small.end, where
            crash(log)
            log = small.open()
            assert read_all(log, FLOOR) == [*expected, new], where
            crash(log)


def test_a_flipped_bit_anywhere_costs_its_batch_and_is_counted_and_logged(
    small: SmallLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for number, place in enumerate(small.places):
        expected = [
            message for other, batch in enumerate(small.batches) if other != number for message in batch
        ]
        # Every bit of one batch in the last segment; of the others one a byte.
        bits = range(8) if number == 4 else range(1)
        for position, bit in product(range(place.position, place.end), bits):
            bit = (bit + position) % 8
            small.restore()
            flip(place.path, position, bit)
            caplog.clear()
            log = small.open(clean_end=small.end)
            where = f"{place.path.name} byte {position}, bit {bit}, batch {number} at {place.position}"
            assert read_all(log, FLOOR) == expected, where
            assert caplog.records, where
            if number < len(small.places) - 1 or any(path.suffix == ".index" for path in small.content):
                assert log.corrupt_batches == 1, where
            # Without an index the last batch looks like a write that a crash has torn.
            assert log.count(log.start, log.end) == sum(m.sequence >= log.start for m in expected), where
            crash(log)


def test_a_flipped_bit_is_met_wherever_reading_begins(small: SmallLog) -> None:
    """From the middle of the log, and by several readers, of which the first may find the
    damage."""
    for number, place in enumerate(small.places):
        expected = [
            message for other, batch in enumerate(small.batches) if other != number for message in batch
        ]
        for position in range(place.position, place.end, 3):
            small.restore()
            flip(place.path, position, 7 - position % 8)
            log = small.open(clean_end=small.end)
            for start in range(small.end - 1, FLOOR - 1, -1):
                found = read_all(log, start)
                assert found == [m for m in expected if m.sequence >= start], f"byte {position}, from {start}"
            crash(log)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_damage_costs_only_the_batches_it_touches(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        small = SmallLog(Path(name), has_index=data.draw(st.booleans()))
        touched = set()
        for _ in range(data.draw(st.integers(1, 4))):
            path = data.draw(st.sampled_from(small.segments))
            content = bytearray(path.read_bytes())
            start = data.draw(st.integers(0, len(content) - 1))
            junk = data.draw(st.binary(min_size=1, max_size=120))[: len(content) - start]
            content[start : start + len(junk)] = junk
            path.write_bytes(content)
        for number, place in enumerate(small.places):
            original = small.content[place.path][place.position : place.end]
            if place.path.read_bytes()[place.position : place.end] != original:
                touched.add(number)
        log = small.open(clean_end=small.end)
        expected = small.without(touched)
        assert read_all(log, FLOOR) == expected
        assert read_all(log, FLOOR) == expected
        assert log.count(log.start, log.end) == len(expected)
        crash(log)


def test_messages_that_are_pieces_of_a_log_are_only_messages(tmp_path: Path) -> None:
    """Backups of a log may be published to one. Cut at any byte, it is still its own log."""
    log = open_log(tmp_path)
    piece = encoded(FLOOR + 2, b"not published here") + encoded(FLOOR + 9, b"nor this")
    written = append(log, b"first") + append(log, piece, b"x", piece) + append(log, b"last")
    end = log.end
    crash(log)
    (path,) = segment_files(tmp_path)
    whole = path.read_bytes()
    for cut in range(0, len(whole) + 1):
        path.write_bytes(whole[:cut])
        log = open_log(tmp_path, epoch=end)
        found = read_all(log, FLOOR)
        assert found == written[: len(found)], f"cut at {cut}"
        assert log.end == end, f"cut at {cut}"
        crash(log)


# gaps

ranges = st.tuples(st.integers(0, 60), st.integers(0, 60))


@given(
    steps=st.lists(st.one_of(ranges.map(lambda r: ("add", r)), st.integers(0, 60).map(lambda n: ("drop", n))))
)
def test_gaps_are_a_set_of_numbers(steps: list[tuple[str, tuple[int, int] | int]]) -> None:
    gaps, model, dropped = Gaps(), set[int](), 0
    for _, argument in steps:
        if isinstance(argument, tuple):
            gaps.add(*argument)
            model |= {*range(*argument)}
        else:
            gaps.drop_before(argument)
            dropped = max(dropped, argument)
    assert gaps.ranges == sorted(gaps.ranges)
    assert all(start < end for start, end in gaps.ranges)
    assert all(a[1] < b[0] for a, b in zip(gaps.ranges, gaps.ranges[1:], strict=False))
    held = {n for start, end in gaps.ranges for n in range(start, end)}
    assert held <= model
    assert {n for n in held if n >= dropped} == {n for n in model if n >= dropped}
    for start in range(dropped, 62, 3):
        for end in range(dropped, 62, 5):
            assert gaps.count(start, end) == len(model & {*range(start, end)})
    for n in range(dropped, 62):
        following = n
        while following in model:
            following += 1
        assert gaps.skip(n) == following


# the state of a channel

numbers = st.integers(0, (1 << 63) - 1)
unfinished = st.lists(
    st.tuples(st.integers(0, (1 << 64) - 1), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 65535)),
    max_size=30,
)


@st.composite
def channel_states(draw: st.DrawFn) -> ChannelState:
    rows = draw(unfinished)
    return ChannelState(
        cursor=draw(numbers),
        seen=draw(numbers),
        paused=draw(st.booleans()),
        sequences=np.array([row[0] for row in rows], np.uint64),
        due_ns=np.array([row[1] for row in rows], np.int64),
        attempts=np.array([row[2] for row in rows], np.uint16),
    )


@given(state=channel_states())
def test_a_channel_s_state_makes_the_round_trip(state: ChannelState) -> None:
    found = decode_channel_state(state.encode())
    assert (found.cursor, found.seen, found.paused) == (state.cursor, state.seen, state.paused)
    assert found.sequences.tolist() == state.sequences.tolist()
    assert found.due_ns.tolist() == state.due_ns.tolist()
    assert found.attempts.tolist() == state.attempts.tolist()


@given(state=channel_states(), data=st.data())
def test_any_damage_to_a_channel_s_state_is_a_value_error(state: ChannelState, data: st.DataObject) -> None:
    raw = state.encode()
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, min(len(raw), start + 40)))
    changed = raw[:start] + data.draw(st.binary(max_size=40)) + raw[end:]
    if changed != raw:
        with pytest.raises(ValueError):
            decode_channel_state(changed)


@given(raw=st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda b: b"NQC1" + b)))
def test_any_other_bytes_are_no_channel_s_state(raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode_channel_state(raw)


# the log, used in any order

bodies = st.lists(
    st.one_of(st.binary(max_size=30), st.just(b"NQB1"), st.just(b"x" * 150)), min_size=1, max_size=4
)
groups = st.lists(
    st.one_of(
        st.tuples(bodies, st.just(0)), st.tuples(st.binary(max_size=9).map(lambda b: [b]), st.integers(1, 9))
    ),
    min_size=1,
    max_size=4,
)

EPOCH_STEP = 1 << 20
"""Numbers that the clock moves on in a second."""


class LogMachine(RuleBasedStateMachine):
    """A log against a list of messages, over stops, crashes, cuts, faults and a clock that is set
    back."""

    def __init__(self) -> None:
        super().__init__()
        # Recovery and faults say a line each time; a hundred thousand of them are no help.
        logging.getLogger("nsparq.storage").setLevel(logging.CRITICAL + 1)
        self.directory = Path(tempfile.mkdtemp(prefix="nsparq-log-"))
        self.files = FaultyFiles()
        self.messages: list[Message] = []
        """What must be there, from `low` on."""
        self.low = 0
        self.used = 0
        """No number below this may be given to a new message."""
        self.now_s = 1000
        self.opened_s = 0
        self.is_over = False
        """A disk that failed in memory mode has left more in memory than belongs there."""
        self.log: DiskLog | None = None

    @initialize(
        durability=st.sampled_from(Durability),
        segment_bytes=st.sampled_from([150, 400, 2_000, 1 << 20]),
        memory_messages=st.sampled_from([1, 5, 30]),
        cache_bytes=st.sampled_from([0, 1_000, 1 << 20]),
    )
    def start(
        self, durability: Durability, segment_bytes: int, memory_messages: int, cache_bytes: int
    ) -> None:
        self.settings = {
            "durability": durability,
            "segment_bytes": segment_bytes,
            "memory_messages": memory_messages,
        }
        self.cache_bytes = cache_bytes
        self.open(clean_end=self.epoch)
        self.low = self.used = self.log.end

    @property
    def epoch(self) -> int:
        return self.now_s * EPOCH_STEP

    def open(self, *, clean_end: int = -1) -> None:
        self.cache = BatchCache(self.cache_bytes)
        self.log = open_log(
            self.directory,
            files=self.files,
            cache=self.cache,
            clean_end=clean_end,
            epoch=self.epoch,
            **self.settings,
        )
        self.opened_s = self.now_s
        self.is_over = False
        assert self.log.end >= self.used

    @property
    def is_in_memory(self) -> bool:
        return self.settings["durability"] is Durability.MEMORY

    # using it

    @rule(groups=groups)
    def append(self, groups: list[tuple[list[bytes], int]]) -> None:
        self.note(messages_of(self.log.append(groups, NOW_NS + self.now_s + len(self.messages))), groups)

        self.is_over = False

    def note(self, written: list[Message], groups: list[tuple[list[bytes], int]]) -> None:
        assert [(m.body, m.due_ns) for m in written] == [
            (body, due) for group, due in groups for body in group
        ]
        assert [m.sequence for m in written] == [
            *range(written[0].sequence, written[0].sequence + len(written))
        ]
        assert written[0].sequence >= self.used
        self.used = written[-1].sequence + 1
        assert self.log.end == self.used
        self.messages += written

    @rule(
        groups=groups,
        call=st.sampled_from(["write", "open", "rename", "duplicate"]),
        after=st.integers(0, 3),
        torn=st.sampled_from([0, 1, 60, 10_000]),
    )
    def append_to_a_failing_disk(
        self, groups: list[tuple[list[bytes], int]], call: str, after: int, torn: int
    ) -> None:
        self.files.fail(call, after=after, torn=torn, times=None)
        end = self.log.end
        try:
            written = messages_of(self.log.append(groups, NOW_NS))
        except WriteFailed:
            assert self.log.end == end
        else:
            self.note(written, groups)
            self.is_over = self.is_in_memory
        finally:
            self.files.heal()

    @rule(back=st.integers(0, 40), wait=st.booleans())
    def read(self, back: int, wait: bool) -> None:
        sequence = max(self.low, self.log.end - back)
        assert read_all(self.log, sequence, wait=wait) == [m for m in self.messages if m.sequence >= sequence]

    @rule()
    def read_everything(self) -> None:
        assert read_all(self.log, self.low) == [m for m in self.messages if m.sequence >= self.low]
        assert self.log.corrupt_batches == self.log.corrupt_messages == 0

    @rule(share=st.floats(0, 1), is_removed=st.booleans())
    def trim(self, share: float, is_removed: bool) -> None:
        ahead = [m.sequence for m in self.messages if m.sequence >= self.low] + [self.log.end]
        self.low = ahead[int(share * (len(ahead) - 1))]
        self.messages = [m for m in self.messages if m.sequence >= self.low]
        for segment in self.log.trim(self.low, 0.0):
            # A crash may come before the files of dropped segments are gone.
            if is_removed:
                segment.remove()
            else:
                segment.close()

    @rule()
    def sync(self) -> None:
        self.log.sync_now()
        assert self.log.committed == self.log.stable

    @rule()
    def release_files(self) -> None:
        assert self.log.release_files() == (not self.log.unsynced)

    # time, and starting again

    @rule(seconds=st.integers(1, 100))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(seconds=st.integers(1, 100))
    def the_clock_is_set_back(self, seconds: int) -> None:
        """By less than it has gone on since the log was opened."""
        self.now_s = max(self.opened_s + 1, self.now_s - seconds)

    @rule()
    def stop_and_start(self) -> None:
        self.log.close()
        assert self.log.committed == self.log.end
        self.open(clean_end=self.log.end)
        self.read_everything()

    @rule(segment_bytes=st.sampled_from([150, 400, 2_000]), durability=st.sampled_from(Durability))
    def start_with_other_settings(self, segment_bytes: int, durability: Durability) -> None:
        self.log.close()
        end = self.log.end
        self.settings |= {"segment_bytes": segment_bytes, "durability": durability}
        self.open(clean_end=end)
        self.read_everything()

    @rule(seconds=st.integers(1, 5))
    def crash_and_start(self, seconds: int) -> None:
        self.now_s += seconds
        stable = self.log.stable
        crash(self.log)
        if self.is_in_memory:
            self.messages = [m for m in self.messages if m.sequence < stable]
        self.open()
        self.read_everything()

    @precondition(lambda self: not self.is_in_memory)
    @rule(seconds=st.integers(0, 1000))
    def crash_and_start_with_the_clock_far_back(self, seconds: int) -> None:
        """Where the last message is on disk, it tells the numbers, whatever the clock."""
        crash(self.log)
        found = [place.sequences for path in segment_files(self.directory) for place in places(path)]
        if found and found[-1].stop >= self.used:
            now_s, self.now_s = self.now_s, seconds
            self.open()
            self.now_s = self.opened_s = now_s
        else:
            self.now_s += 1
            self.open()
        self.read_everything()

    @rule(share=st.floats(0, 1), has_index=st.booleans())
    def lose_power(self, share: float, has_index: bool) -> None:
        """The last segment loses its end, and perhaps all segments their index."""
        self.now_s += 1
        stable = self.log.stable
        crash(self.log)
        if self.is_in_memory:
            self.messages = [m for m in self.messages if m.sequence < stable]
        paths = segment_files(self.directory)
        if paths:
            lost = places(paths[-1])
            cut = int(share * paths[-1].stat().st_size)
            with paths[-1].open("r+b") as file:
                file.truncate(cut)
            # An index is written after its segment. With the index, the loss would be damage.
            paths[-1].with_suffix(".index").unlink(missing_ok=True)
            gone = [place.sequences for place in lost if place.end > cut]
            self.messages = [m for m in self.messages if not any(m.sequence in numbers for numbers in gone)]
        if not has_index:
            for path in self.directory.glob("*.index"):
                path.unlink()
        self.open()
        self.read_everything()

    # what holds at any time

    @invariant()
    def positions_are_in_order(self) -> None:
        if self.log is not None:
            assert self.log.committed <= self.log.stable <= self.log.end
            assert self.log.memory_start <= self.log.end
            assert self.log.end >= self.used

    @invariant()
    def depth_is_the_number_of_messages(self) -> None:
        if self.log is not None:
            low = max(self.low, self.log.start)
            assert self.log.count(low, self.log.end) == sum(m.sequence >= low for m in self.messages)

    @invariant()
    def memory_is_bounded(self) -> None:
        if self.log is not None and not self.is_over:
            held = [*self.log._batches]
            assert self.cache.size_bytes == sum(batch.size for batch in held)
            assert self.cache.size_bytes <= self.cache_bytes or len(held) == 1
            newest = held[-1].count if held else 0
            assert self.log.end - self.log.memory_start <= max(self.settings["memory_messages"], newest)

    def teardown(self) -> None:
        if self.log is not None:
            crash(self.log)
            assert self.cache.size_bytes == 0
        shutil.rmtree(self.directory)
        logging.getLogger("nsparq.storage").setLevel(logging.NOTSET)


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
