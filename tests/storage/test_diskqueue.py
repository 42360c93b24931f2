"""Reading the disk queues of NSQ's own nsqd, whole and after its crashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.storage import diskqueue
from nsparq.storage.diskqueue import DiskQueue, Record, find_queues
from nsparq.storage.files import Files
from tests.support.go_queue import GoMessage, GoQueue, go_messages

from .support import FaultyFiles


def found(directory: Path) -> DiskQueue:
    (queue,) = find_queues(Files(), directory)
    return queue


def bodies(queue: DiskQueue) -> list[bytes]:
    return [record.body for record in queue.records()]


def of(messages: list[GoMessage]) -> list[bytes]:
    return [message.body for message in messages]


# finding


def test_queues_are_found_by_their_files(tmp_path: Path) -> None:
    GoQueue(tmp_path, "t").write(*go_messages(1)).save()
    GoQueue(tmp_path, "t", "c").save()
    GoQueue(tmp_path, "only-data.x_Y", "c.d").write(*go_messages(1))
    names = {(queue.topic, queue.channel) for queue in find_queues(Files(), tmp_path)}
    assert names == {("t", ""), ("t", "c"), ("only-data.x_Y", "c.d")}


def test_names_are_split_at_the_first_colon(tmp_path: Path) -> None:
    (tmp_path / "a:b:c.diskqueue.meta.dat").write_text("0\n0,0\n0,0\n")
    assert (found(tmp_path).topic, found(tmp_path).channel) == ("a", "b:c")


def test_a_semicolon_separates_where_file_names_hold_no_colon(tmp_path: Path) -> None:
    (tmp_path / "a;b.diskqueue.meta.dat").write_text("0\n0,0\n0,0\n")
    assert (found(tmp_path).topic, found(tmp_path).channel) == ("a", "b")


def test_ephemeral_names_are_found_too(tmp_path: Path) -> None:
    GoQueue(tmp_path, "t#ephemeral", "c").save()
    assert str(found(tmp_path)) == "t#ephemeral:c"


@pytest.mark.parametrize(
    "name",
    [
        "nsqd.dat",
        "t.diskqueue.000000.dat.bad",
        "t.diskqueue.meta.dat.1234.tmp",
        "t.diskqueue.00000.dat",
        "t.diskqueue.other.dat",
        ".diskqueue.meta.dat",
        "topics",
    ],
)
def test_other_files_are_not_queues(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(GoMessage(b"body").encode())
    assert find_queues(Files(), tmp_path) == []


def test_a_missing_directory_has_no_queues(tmp_path: Path) -> None:
    assert find_queues(Files(), tmp_path / "nowhere") == []


def test_the_files_of_a_queue_are_listed_with_the_state_last(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(3), max_bytes=1).save()
    queue.data_path(0).with_suffix(".dat.bad").write_bytes(b"given up")
    assert found(tmp_path).paths == [*map(queue.data_path, range(3)), queue.meta_path]


# reading


def test_records_come_with_time_attempts_and_body(tmp_path: Path) -> None:
    written = [GoMessage(b"one", 0, 1), GoMessage(b"two", 65_535, 2**62), GoMessage(b"\0" * 100, 7, -1)]
    GoQueue(tmp_path, "t").write(*written).save()
    queue = found(tmp_path)
    assert [*queue.records()] == [Record(m.timestamp_ns, m.attempts, m.body) for m in written]
    assert queue.complaints == {}
    assert [*queue.records()] == [*queue.records()], "a queue can be read again"


def test_reading_begins_at_the_read_position(tmp_path: Path) -> None:
    messages = go_messages(10)
    GoQueue(tmp_path, "t").write(*messages).consume(4).save()
    assert bodies(found(tmp_path)) == of(messages[4:])


def test_rolled_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    messages = go_messages(100)
    GoQueue(tmp_path, "t").write(*messages, max_bytes=100).consume(31).save()
    assert len([*tmp_path.iterdir()]) > 20
    assert bodies(found(tmp_path)) == of(messages[31:])
    assert found(tmp_path).complaints == {}


def test_numbers_may_have_more_than_six_digits(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t")
    queue.read_side = queue.write_side = (999_999, 0)
    queue.write(*go_messages(3), max_bytes=1).save()
    assert bodies(found(tmp_path)) == of(go_messages(3))


def test_consumed_records_are_not_read(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(3), max_bytes=1)
    queue.read_side, queue.depth = (2, 0), 1
    queue.save()
    assert bodies(found(tmp_path)) == [b"2"]


@pytest.mark.parametrize("consumed", [0, 5])
def test_an_empty_queue_has_no_records(tmp_path: Path, consumed: int) -> None:
    GoQueue(tmp_path, "t").write(*go_messages(consumed)).consume(consumed).save()
    queue = found(tmp_path)
    assert not queue.has_records()
    assert bodies(queue) == []
    assert queue.complaints == {}


def test_a_write_file_that_does_not_exist_yet_is_normal(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(2))
    queue.write_side = (1, 0)
    queue.save()
    assert bodies(found(tmp_path)) == [b"0", b"1"]
    assert found(tmp_path).complaints == {}


@pytest.mark.parametrize("size", [1, 1 << 20, (1 << 20) - 30, (3 << 20) + 1])
def test_records_of_any_size_are_read_whole(tmp_path: Path, size: int) -> None:
    messages = [GoMessage(bytes([number]) * size) for number in range(4)]
    GoQueue(tmp_path, "t").write(*messages).save()
    assert bodies(found(tmp_path)) == of(messages)


@given(sizes=st.lists(st.integers(1, 200), max_size=30), window=st.integers(34, 400))
def test_records_do_not_depend_on_where_the_window_ends(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], window: int
) -> None:
    directory = tmp_path_factory.mktemp("queue")
    messages = [GoMessage(bytes([number]) * size, number, number) for number, size in enumerate(sizes)]
    GoQueue(directory, "t").write(*messages, max_bytes=1000).save()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diskqueue, "_WINDOW", window)
        assert [(r.body, r.attempts, r.timestamp_ns) for r in found(directory).records()] == messages


def test_no_file_is_held_in_memory_or_left_open(tmp_path: Path) -> None:
    GoQueue(tmp_path, "t").write(*[GoMessage(b"x" * 100_000)] * 100).save()
    largest = 0

    class Watched(FaultyFiles):
        def read(self, fd: int, size: int, position: int) -> bytes:
            nonlocal largest
            largest = max(largest, size)
            return super().read(fd, size, position)

    before = len(os.listdir("/proc/self/fd"))
    (queue,) = find_queues(Watched(), tmp_path)
    assert queue.has_records()
    assert sum(1 for _ in queue.records()) == 100
    assert largest <= 1 << 20
    assert len(os.listdir("/proc/self/fd")) == before


# what crashes leave


def test_records_beyond_the_recorded_end_are_salvaged(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(3)).consume(1).save()
    queue.write(*go_messages(2, start=3))
    assert bodies(found(tmp_path)) == of(go_messages(4, start=1))
    assert found(tmp_path).complaints == {}


def test_files_beyond_the_recorded_end_are_salvaged(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(3)).save()
    queue.write(*go_messages(2, start=3), max_bytes=1)
    assert bodies(found(tmp_path)) == of(go_messages(5))


def test_without_a_state_everything_is_read(tmp_path: Path) -> None:
    messages = go_messages(10)
    GoQueue(tmp_path, "t").write(*messages, max_bytes=100)
    assert bodies(found(tmp_path)) == of(messages)
    assert found(tmp_path).complaints == {}


@pytest.mark.parametrize("content", [b"", b"3\n", b"3\n0;0\n0,96\n", b"\0" * 20, b"x\n0,0\n0,0\n"])
def test_a_state_that_cannot_be_parsed_is_reported_and_everything_is_read(
    tmp_path: Path, content: bytes
) -> None:
    GoQueue(tmp_path, "t").write(*go_messages(3)).meta_path.write_bytes(content)
    queue = found(tmp_path)
    assert bodies(queue) == [b"0", b"1", b"2"]
    assert "cannot be parsed" in queue.complaints["t.diskqueue.meta.dat"]


def test_stale_bytes_beyond_the_recorded_end_are_not_taken_for_messages(tmp_path: Path) -> None:
    """A queue without its state is overwritten from the start; the rest begins inside a record."""
    queue = GoQueue(tmp_path, "t").write(GoMessage(b"\0\0\0\x40" * 50), GoMessage(b"old"))
    queue.write_side, queue.depth = (0, 0), 0
    queue.write(GoMessage(b"new!")).save()
    read = found(tmp_path)
    assert bodies(read) == [b"new!"]
    assert "no valid id" in read.complaints["t.diskqueue.000000.dat"]


def test_whole_stale_records_beyond_the_recorded_end_come_as_they_would_in_nsq(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(3))
    queue.write_side, queue.depth = (0, 0), 0
    queue.write(GoMessage(b"N")).save()
    assert bodies(found(tmp_path)) == [b"N", b"1", b"2"]


def test_a_write_torn_at_any_byte_leaves_the_records_before_it(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(3)).save()
    whole = queue.data_path(0).read_bytes()
    record = len(whole) // 3
    for size in range(len(whole) + 1):
        queue.data_path(0).write_bytes(whole[:size])
        read = found(tmp_path)
        assert bodies(read) == of(go_messages(size // record))
        skipped = read.complaints.get("t.diskqueue.000000.dat", "")
        assert skipped.startswith(f"{size % record} bytes skipped") if size % record else skipped == ""
        assert ("t.diskqueue.meta.dat" in read.complaints) is (size < len(whole))


@pytest.mark.parametrize("length", [0, 26, -1, -(2**31), 2**31 - 1, 1 << 28])
def test_an_impossible_length_ends_its_file_only(tmp_path: Path, length: int) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(9), max_bytes=100).save()
    path = queue.data_path(1)
    content = bytearray(path.read_bytes())
    record = len(content) // 3
    content[record : record + 4] = length.to_bytes(4, "big", signed=True)
    path.write_bytes(content)
    read = found(tmp_path)
    assert bodies(read) == [b"0", b"1", b"2", b"3", b"6", b"7", b"8"]
    assert read.complaints[path.name].startswith(f"{2 * record} bytes skipped from byte {record} on")
    assert read.complaints["t.diskqueue.meta.dat"] == "it counts 9 messages, but 7 were found"


def test_missing_files_are_reported(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(4), max_bytes=1).save()
    queue.data_path(1).unlink()
    queue.data_path(3).unlink()
    read = found(tmp_path)
    assert bodies(read) == [b"0", b"2"]
    assert read.complaints == {"t.diskqueue.meta.dat": "2 files that it names are missing"}


def test_a_state_with_absurd_numbers_takes_no_time(tmp_path: Path) -> None:
    (tmp_path / "t.diskqueue.meta.dat").write_text(f"5\n0,0\n{10**15},10\n")
    assert bodies(found(tmp_path)) == []


def test_a_read_side_beyond_the_write_side_gives_nothing(tmp_path: Path) -> None:
    queue = GoQueue(tmp_path, "t").write(*go_messages(2))
    queue.read_side, queue.depth = (3, 50), 0
    queue.save()
    assert bodies(found(tmp_path)) == []


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    GoQueue(tmp_path, "t").write(*go_messages(2)).save()
    files = FaultyFiles()
    files.fail("read")
    (queue,) = find_queues(files, tmp_path)
    with pytest.raises(OSError):
        bodies(queue)
