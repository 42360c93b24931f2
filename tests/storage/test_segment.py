"""One file of the log: writing, opening with and without its index, reading around damage."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from nsparq.errors import CorruptBatch
from nsparq.storage.batch import Batch, encode_head
from nsparq.storage.recovery import Damage
from nsparq.storage.segment import GATHER_SIZE, READ_SIZE, Cold, Segment
from nsparq.storage.segment_index import INDEX_EVERY

from .support import NOW_NS, FaultyFiles, Message, encoded, flip, messages_of, write_segment

START = (0, 100)
"""Position and sequence number of the first batch in the segment below."""


def add(segment: Segment, *bodies: bytes, now_ns: int = NOW_NS, due_ns: int = 0) -> list[Message]:
    """Write one batch as the log does."""
    base, position = segment.end, segment.size
    raw = encoded(base, *bodies, timestamp_ns=now_ns, due_ns=due_ns)
    segment.append([raw], len(raw))
    segment.note(position, base, base + len(bodies), now_ns, due_ns)
    return [Message(base + i, body, now_ns, due_ns) for i, body in enumerate(bodies)]


def read_all(segment: Segment, sequence: int = 0) -> tuple[list[Message], list[CorruptBatch]]:
    """All messages of the segment, and the damage between them."""
    found: list[Message] = []
    damage: list[CorruptBatch] = []
    place = segment.place_before(sequence)
    while len(damage) < 100:
        try:
            item = segment.read(place, sequence, wait=True)
        except CorruptBatch as error:
            damage.append(error)
            place = segment.place_before(sequence)
            continue
        if item is None:
            break
        batch, position = item
        place = (position, batch.end)
        found += [message for message in messages_of([batch]) if message.sequence >= sequence]
        sequence = batch.end
    return found, damage


def batches_of(segment: Segment) -> list[Batch]:
    """The batches as reading gives them."""
    place, batches = START, list[Batch]()
    while (found := segment.read(place, place[1], wait=True)) is not None:
        batches.append(found[0])
        place = (found[1], found[0].end)
    return batches


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def segment(tmp_path: Path, files: FaultyFiles) -> Segment:
    return Segment(files, tmp_path, 100)


def reopened(segment: Segment, *, last: bool = True) -> tuple[Segment, list[Damage]]:
    segment.close()
    fresh = Segment(segment.files, segment.path.parent, segment.base)
    damage = fresh.open(last=last)
    fresh.close()
    return fresh, damage


# writing


def test_the_file_is_named_by_the_first_sequence_number(segment: Segment) -> None:
    assert segment.path.name == "00000000000000000100.log"
    assert segment.index_path.name == "00000000000000000100.index"


def test_nothing_is_on_disk_before_the_first_write(segment: Segment) -> None:
    assert not segment.path.exists()
    assert (segment.end, segment.size) == (100, 0)


def test_what_is_written_is_read(segment: Segment) -> None:
    written = add(segment, b"a", b"bb") + add(segment, b"", now_ns=NOW_NS + 1) + add(segment, b"c", due_ns=5)
    assert read_all(segment) == (written, [])
    assert segment.end == 104
    assert segment.size == segment.path.stat().st_size
    assert (segment.first_ns, segment.last_ns) == (NOW_NS, NOW_NS + 1)
    assert segment.index.deferred.tolist() == [103, 5]
    segment.close()


def test_a_closed_file_opens_again_when_used(segment: Segment) -> None:
    written = add(segment, b"a")
    segment.close()
    segment.close()
    written += add(segment, b"b")
    assert read_all(segment) == (written, [])
    segment.close()


@pytest.mark.parametrize("torn", [0, 1, 40, 10_000])
def test_a_failed_write_leaves_the_file_as_it_was(segment: Segment, files: FaultyFiles, torn: int) -> None:
    written = add(segment, b"a")
    before = segment.path.read_bytes()
    files.fail("write", torn=torn)
    with pytest.raises(OSError, match="No space left"):
        add(segment, b"b" * 100)
    assert segment.path.read_bytes() == before
    assert (segment.size, segment.end) == (len(before), 101)
    written += add(segment, b"c")
    assert read_all(segment) == (written, [])
    segment.close()


def test_what_a_failed_write_leaves_is_overwritten_by_the_next(segment: Segment, files: FaultyFiles) -> None:
    written = add(segment, b"a")
    files.fail("write", torn=80)
    files.fail("truncate", errno.EIO)
    with pytest.raises(OSError, match="No space left"):
        add(segment, b"b" * 100)
    written += add(segment, b"c")
    assert read_all(segment) == (written, [])
    assert read_all(reopened(segment)[0]) == (written, [])


def test_a_whole_batch_left_by_a_failed_write_does_not_come_back(
    segment: Segment, files: FaultyFiles
) -> None:
    """One write of several batches tears the last one, and the disk refuses to cut them off."""
    written = add(segment, b"a")
    pieces = [encoded(101, b"refused" * 5), encoded(102, b"refused too"), encoded(103, b"and torn")]
    files.fail("write", errno.EIO, torn=sum(map(len, pieces)) - 1)
    files.fail("truncate", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        segment.append([*pieces], sum(map(len, pieces)))
    written += add(segment, b"c")
    assert read_all(reopened(segment)[0]) == (written, [])


def test_a_file_that_cannot_be_opened_fails_the_write(segment: Segment, files: FaultyFiles) -> None:
    files.fail("open", errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        add(segment, b"a")
    written = add(segment, b"b")
    assert read_all(segment) == (written, [])
    segment.close()


def test_removing_a_segment_removes_its_index(segment: Segment) -> None:
    add(segment, b"a")
    segment.write_index()
    segment.remove()
    assert not segment.path.exists()
    assert not segment.index_path.exists()
    segment.remove()


# opening


def fill(segment: Segment) -> list[Message]:
    written = []
    for number in range(5):
        written += add(segment, b"%d" % number * 10, b"", now_ns=NOW_NS + number)
    return written + add(segment, b"later", due_ns=99, now_ns=NOW_NS + 5)


@pytest.mark.parametrize("has_index", [True, False])
def test_opening_finds_everything_again(segment: Segment, has_index: bool) -> None:
    written = fill(segment)
    if has_index:
        segment.write_index()
    fresh, damage = reopened(segment)
    assert damage == []
    assert (fresh.base, fresh.end, fresh.size) == (segment.base, segment.end, segment.size)
    assert (fresh.first_ns, fresh.last_ns) == (NOW_NS, NOW_NS + 5)
    assert fresh.index.deferred.tolist() == [110, 99]
    assert read_all(fresh) == (written, [])
    fresh.close()


def test_opening_with_an_index_reads_no_message(segment: Segment, files: FaultyFiles) -> None:
    fill(segment)
    segment.write_index()
    files.calls.clear()
    reopened(segment)
    assert files.calls["read"] == files.calls["read_cached"] == 0


def test_the_index_is_sparse_and_leads_to_the_batch(segment: Segment) -> None:
    written = []
    for _ in range(40):
        written += add(segment, b"x" * 10_000, b"y")
    segment.write_index()
    assert segment.index_path.stat().st_size < 500
    for fresh in (segment, reopened(segment)[0]):
        for message in written:
            place = fresh.place_before(message.sequence)
            assert place[0] <= (message.sequence - 100) // 2 * (10_001 + 48 + 8)
            assert place[1] <= message.sequence
            found = fresh.read(place, message.sequence, wait=True)
            assert found is not None
            batch = found[0]
            assert batch.base <= message.sequence < batch.end
            assert message in messages_of([batch])
        later = fresh.place_before(written[-1].sequence)[0]
        assert 0 < len(written) // 2 * 10_057 - later <= INDEX_EVERY + 10_057
        fresh.close()
    assert segment.place_before(0) == (0, 100)


def damaged_indexes() -> list[tuple[str, object]]:
    return [
        ("missing", lambda raw: None),
        ("empty", lambda raw: b""),
        ("cut in the header", lambda raw: raw[:30]),
        ("cut in the entries", lambda raw: raw[:-1]),
        ("longer", lambda raw: raw + b"\0" * 8),
        ("another magic", lambda raw: b"XXXX" + raw[4:]),
        ("junk", lambda raw: os.urandom(len(raw))),
    ]


@pytest.mark.parametrize(
    "damage", [d for _, d in damaged_indexes()], ids=[name for name, _ in damaged_indexes()]
)
def test_a_damaged_index_is_ignored(segment: Segment, damage) -> None:  # type: ignore[no-untyped-def]
    written = fill(segment)
    segment.write_index()
    content = damage(segment.index_path.read_bytes())
    segment.index_path.unlink()
    if content is not None:
        segment.index_path.write_bytes(content)
    fresh, found = reopened(segment)
    assert found == []
    assert fresh.end == segment.end
    assert fresh.index.deferred == segment.index.deferred
    assert read_all(fresh) == (written, [])
    fresh.close()


def test_any_flipped_bit_of_the_index_is_noticed(segment: Segment, caplog: pytest.LogCaptureFixture) -> None:
    written = fill(segment)
    segment.write_index()
    raw = segment.index_path.read_bytes()
    for position in range(len(raw)):
        segment.index_path.write_bytes(raw)
        flip(segment.index_path, position, position % 8)
        caplog.clear()
        fresh, damage = reopened(segment)
        assert "index is damaged" in caplog.text, f"byte {position}"
        assert damage == []
        assert (fresh.end, read_all(fresh)) == (segment.end, (written, [])), f"byte {position}"
        fresh.close()


def test_an_index_of_another_state_of_the_file_is_ignored(segment: Segment) -> None:
    written = add(segment, b"a")
    segment.write_index()
    written += add(segment, b"b")
    fresh, _ = reopened(segment)
    assert fresh.end == 102
    assert read_all(fresh) == (written, [])
    fresh.close()


def test_an_index_of_another_segment_is_ignored(segment: Segment, tmp_path: Path, files: FaultyFiles) -> None:
    other = Segment(files, tmp_path, 500)
    add(other, b"xx")
    other.write_index()
    other.close()
    written = add(segment, b"yy")
    segment.index_path.write_bytes(other.index_path.read_bytes())
    fresh, _ = reopened(segment)
    assert (fresh.end, read_all(fresh)) == (101, (written, []))
    fresh.close()


def test_an_index_that_cannot_be_written_leaves_none(segment: Segment, files: FaultyFiles) -> None:
    """The old index would be wrong for the longer segment."""
    add(segment, b"a")
    segment.write_index()
    add(segment, b"b")
    for call in ("write", "rename"):
        files.fail(call)
        with pytest.raises(OSError, match="No space left"):
            segment.write_index()
        assert not segment.index_path.exists()
    segment.close()


def test_a_torn_tail_of_the_last_segment_is_cut_off(
    segment: Segment, caplog: pytest.LogCaptureFixture
) -> None:
    written = add(segment, b"a", b"b")
    size = segment.size
    segment.path.write_bytes(segment.path.read_bytes() + encoded(102, b"unfinished")[:-3])
    fresh, damage = reopened(segment)
    assert damage == []
    assert segment.path.stat().st_size == fresh.size == size
    assert (fresh.end, read_all(fresh)) == (102, (written, []))
    assert "cut off 59 bytes of an unfinished write" in caplog.text
    fresh.close()


def test_bytes_are_cut_off_only_from_the_last_segment(
    segment: Segment, caplog: pytest.LogCaptureFixture
) -> None:
    written = add(segment, b"a")
    content = segment.path.read_bytes() + b"junk"
    segment.path.write_bytes(content)
    fresh, damage = reopened(segment, last=False)
    assert damage == [Damage(segment.size, segment.size + 4)]
    assert segment.path.read_bytes() == content
    assert read_all(fresh) == (written, [])
    assert "4 bytes unreadable" in caplog.text
    fresh.close()


def test_damage_in_the_middle_is_reported_kept_and_read_around(
    segment: Segment, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [add(segment, b"%d" % i, b"more") for i in range(5)]
    size = segment.size // 5
    flip(segment.path, 1 * size + 50)
    flip(segment.path, 3 * size)
    content = segment.path.read_bytes()
    fresh, damage = reopened(segment)
    assert damage == [Damage(size, 2 * size), Damage(3 * size, 4 * size)]
    assert caplog.text.count("bytes unreadable") == 2
    assert segment.path.read_bytes() == content
    assert read_all(fresh) == (batches[0] + batches[2] + batches[4], [])
    for number in (1, 3):
        sequence = batches[number][0].sequence
        found = fresh.read(fresh.place_before(sequence), sequence, wait=True)
        assert found is not None
        assert messages_of([found[0]]) == batches[number + 1]
    fresh.close()


def test_damage_at_the_start_is_read_around(segment: Segment) -> None:
    batches = [add(segment, b"%d" % i) for i in range(3)]
    flip(segment.path, 1)
    fresh, damage = reopened(segment)
    assert len(damage) == 1
    assert read_all(fresh) == (batches[1] + batches[2], [])
    fresh.close()


def test_a_last_segment_with_only_junk_is_emptied(segment: Segment) -> None:
    segment.path.write_bytes(b"\0" * 100)
    fresh, damage = reopened(segment)
    assert (damage, fresh.size, fresh.end) == ([], 0, 100)


def test_a_tail_that_cannot_be_cut_off_stops_the_start(segment: Segment, files: FaultyFiles) -> None:
    add(segment, b"a")
    content = segment.path.read_bytes() + b"torn"
    segment.path.write_bytes(content)
    files.fail("truncate", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        segment.open(last=True)
    assert segment.path.read_bytes() == content
    segment.close()


# reading


def test_reading_continues_where_the_last_read_ended(segment: Segment) -> None:
    written = add(segment, b"x" * GATHER_SIZE) + add(segment, b"b")
    found = segment.read(START, 100, wait=True)
    assert found is not None
    assert messages_of([found[0]]) == written[:1]
    found = segment.read((found[1], found[0].end), found[0].end, wait=True)
    assert found is not None
    assert messages_of([found[0]]) == written[1:]
    assert segment.read((found[1], found[0].end), found[0].end, wait=True) is None
    segment.close()


def test_nothing_follows_the_last_message(segment: Segment) -> None:
    add(segment, b"a")
    assert segment.read(START, 101, wait=True) is None
    assert segment.read((segment.size, 101), 101, wait=True) is None
    segment.close()


def test_small_neighbours_are_read_as_one_batch_with_their_own_times(segment: Segment) -> None:
    written = []
    for number in range(100):
        written += add(segment, b"%d" % number, b"!" * number, now_ns=NOW_NS + number)
    found = segment.read(START, 100, wait=True)
    assert found is not None
    assert messages_of([found[0]]) == written
    assert found[1] == segment.size
    segment.close()


def test_a_lone_small_batch_keeps_its_single_time(segment: Segment) -> None:
    add(segment, b"a")
    found = segment.read(START, 100, wait=True)
    assert found is not None
    assert found[0].timestamps_ns == NOW_NS
    segment.close()


def test_a_joined_batch_is_bounded(segment: Segment) -> None:
    written = []
    for number in range(60):
        written += add(segment, b"x" * 5_000, now_ns=NOW_NS + number)
    sizes = [len(batch.data) for batch in batches_of(segment)]
    assert max(sizes) <= GATHER_SIZE + 5_000
    assert max(sizes) > GATHER_SIZE - 5_000
    assert read_all(segment) == (written, [])
    segment.close()


def test_deferred_messages_are_never_joined(segment: Segment) -> None:
    written = add(segment, b"a") + add(segment, b"later", due_ns=7) + add(segment, b"b")
    batches = batches_of(segment)
    assert [batch.due_ns for batch in batches] == [0, 7, 0]
    assert messages_of(batches) == written
    segment.close()


def test_a_large_batch_is_read_alone(segment: Segment) -> None:
    written = add(segment, b"x" * GATHER_SIZE) + add(segment, b"b")
    found = segment.read(START, 100, wait=True)
    assert found is not None
    assert messages_of([found[0]]) == written[:1]
    segment.close()


def test_a_batch_larger_than_one_read_is_read_whole(segment: Segment) -> None:
    written = add(segment, b"a") + add(segment, b"x" * (2 * READ_SIZE)) + add(segment, b"b")
    assert read_all(segment) == (written, [])
    assert read_all(segment, 101) == (written[1:], [])
    segment.close()


@pytest.mark.parametrize("behind", [0, 1, 20, 47, 48, 49, 60])
def test_a_header_across_two_reads_is_put_together(segment: Segment, behind: int) -> None:
    """The first read ends `behind` bytes inside the second batch, or just before it."""
    first = READ_SIZE - behind - 48 - 4
    written = add(segment, b"x" * first) + add(segment, b"second") + add(segment, b"third")
    for place in (START, segment.place_before(101)):
        found = segment.read(place, 101, wait=True)
        assert found is not None
        assert messages_of([found[0]]) == written[1 : 1 + found[0].count]
    assert read_all(segment) == (written, [])
    segment.close()


def test_batches_are_not_joined_over_a_jump_in_the_numbers(tmp_path: Path) -> None:
    segment = write_segment(tmp_path, 100, encoded(100, b"a") + encoded(105, b"b"))
    found = segment.read(START, 100, wait=True)
    assert found is not None
    assert (found[0].base, found[0].end) == (100, 101)
    segment.close()


def test_a_flipped_bit_is_reported_once_and_loses_its_batch(segment: Segment) -> None:
    batches = [add(segment, b"%d" % i, b"more") for i in range(5)]
    segment.write_index()
    size = segment.size // 5
    whole = segment.path.read_bytes()
    for position in range(2 * size, 3 * size):
        segment.path.write_bytes(whole)
        flip(segment.path, position, position % 8)
        fresh, _ = reopened(segment)
        found, damage = read_all(fresh)
        assert found == batches[0] + batches[1] + batches[3] + batches[4], f"byte {position}"
        assert [error.position for error in damage] == [2 * size], f"byte {position}"
        assert read_all(fresh)[1] == []
        fresh.close()


def test_a_lowered_sequence_number_is_damage_not_an_older_batch(segment: Segment) -> None:
    """The batch must not be skipped silently because its header claims an older number."""
    batches = [add(segment, b"%d" % i, b"more") for i in range(3)]
    segment.write_index()
    flip(segment.path, segment.size // 3 + 16, 6)
    assert read_all(reopened(segment)[0], batches[1][0].sequence)[0] == batches[2]
    assert len(read_all(reopened(segment)[0], batches[1][0].sequence)[1]) == 1
    found, damage = read_all(reopened(segment)[0])
    assert (found, len(damage)) == (batches[0] + batches[2], 1)


def test_damage_up_to_the_end_ends_reading(segment: Segment) -> None:
    written = add(segment, b"a")
    add(segment, b"b")
    segment.write_index()
    flip(segment.path, segment.size - 1)
    fresh, _ = reopened(segment)
    found, damage = read_all(fresh)
    assert (found, len(damage)) == (written, 1)
    assert "checksum mismatch" in str(damage[0])
    assert str(segment.path) in str(damage[0])
    assert read_all(fresh) == (written, [])
    fresh.close()


def test_an_invalid_header_is_damage(segment: Segment) -> None:
    written = add(segment, b"a")
    add(segment, b"b")
    segment.write_index()
    flip(segment.path, segment.size // 2)
    found, damage = read_all(reopened(segment)[0])
    assert (found, len(damage)) == (written, 1)
    assert "no batch header" in str(damage[0])


def test_damage_next_to_damage_is_read_around(segment: Segment) -> None:
    batches = [add(segment, b"%d" % i * 200) for i in range(5)]
    segment.write_index()
    size = segment.size // 5
    fresh, _ = reopened(segment)
    flip(segment.path, 2 * size + 100)
    assert read_all(fresh)[0] == batches[0] + batches[1] + batches[3] + batches[4]
    flip(segment.path, 3 * size + 100)
    found, damage = read_all(fresh)
    assert (found, len(damage)) == (batches[0] + batches[1] + batches[4], 1)
    flip(segment.path, 1 * size + 100)
    found, damage = read_all(fresh)
    assert (found, len(damage)) == (batches[0] + batches[4], 1)
    assert read_all(fresh) == (batches[0] + batches[4], [])
    fresh.close()


@pytest.mark.parametrize("cut_in_batch", [0, 1, 30, 59])
def test_a_file_cut_while_it_is_in_use_gives_what_is_left(
    segment: Segment, cut_in_batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [add(segment, b"%d" % i * 20) for i in range(5)]
    size = segment.size // 5
    os.truncate(segment.path, 3 * size + cut_in_batch)
    found, damage = read_all(segment)
    assert found == batches[0] + batches[1] + batches[2]
    # A cut between two batches leaves no damaged one; that the file has shrunk is logged all the
    # same.
    assert len(damage) == (1 if cut_in_batch else 0)
    assert "the file is shorter than it was" in caplog.text
    segment.close()


def test_reading_without_waiting_works_from_the_page_cache(segment: Segment, files: FaultyFiles) -> None:
    written = add(segment, b"a")
    files.calls.clear()
    found = segment.read(START, 100, wait=False)
    assert found is not None
    assert messages_of([found[0]]) == written
    assert files.calls["read"] == 0
    segment.close()


def test_reading_without_waiting_raises_cold_if_the_disk_must_be_waited_for(
    segment: Segment, files: FaultyFiles
) -> None:
    written = add(segment, b"a")
    files.fail("read_cached")
    with pytest.raises(Cold) as cold:
        segment.read(START, 100, wait=False)
    assert (cold.value.path, cold.value.position) == (segment.path, 0)
    assert str(segment.path) in str(cold.value)
    assert read_all(segment) == (written, [])
    segment.close()


def test_bytes_that_are_partly_in_memory_are_cold(segment: Segment) -> None:
    class HalfCached(FaultyFiles):
        def read_cached(self, fd: int, size: int, position: int) -> memoryview | None:
            return super().read_cached(fd, size - 1, position)

    add(segment, b"a")
    segment.files = HalfCached()
    with pytest.raises(Cold):
        segment.read(START, 100, wait=False)
    segment.close()


def test_a_read_error_is_not_damage(segment: Segment, files: FaultyFiles) -> None:
    """EIO may be temporary. The bytes are read again later."""
    written = add(segment, b"a")
    files.fail("read", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        segment.read(START, 100, wait=True)
    assert read_all(segment) == (written, [])
    segment.close()


def test_a_read_error_while_searching_after_damage_is_not_damage(
    segment: Segment, files: FaultyFiles
) -> None:
    add(segment, b"a")
    written = add(segment, b"b")
    flip(segment.path, 50)
    files.fail("read", errno.EIO, after=1)
    with pytest.raises(OSError, match="Input/output error"):
        segment.read(START, 100, wait=True)
    found, damage = read_all(segment)
    assert (found, len(damage)) == (written, 1)
    segment.close()


def test_opening_logs_nothing_about_a_whole_file(segment: Segment, caplog: pytest.LogCaptureFixture) -> None:
    fill(segment)
    with caplog.at_level(logging.DEBUG):
        reopened(segment)
    assert not caplog.records


def test_an_encoded_head_is_what_the_log_writes(segment: Segment) -> None:
    """The helper above writes as the log does: header and table in one buffer, bodies in
    another."""
    batch = Batch.single(100, NOW_NS, b"body")
    head = encode_head(100, NOW_NS, 0, batch.lengths, batch.data)
    segment.append([head, batch.data], len(head) + 4)
    segment.note(0, 100, 101, NOW_NS, 0)
    assert segment.path.read_bytes() == encoded(100, b"body")
    segment.close()


def test_an_index_without_times_is_rebuilt_without_a_warning(
    segment: Segment, caplog: pytest.LogCaptureFixture
) -> None:
    """As the first version wrote it. The index of the last segment stays until it is sealed."""
    written = fill(segment)
    segment.write_index()
    new = segment.index_path.read_bytes()
    segment.index_path.write_bytes(b"NQX1" + new[4:])
    fresh, damage = reopened(segment)
    assert damage == []
    assert read_all(fresh) == (written, [])
    fresh.close()
    assert caplog.text == ""
    again = Segment(segment.files, segment.path.parent, segment.base)
    again.open(last=False)
    again.close()
    assert segment.index_path.read_bytes() == new
