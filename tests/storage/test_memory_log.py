"""The log of an ephemeral topic."""

from __future__ import annotations

from nsparq.storage.memory_log import MemoryLog

from .support import FLOOR, NOW_NS, Message, messages_of, read_all


def add(log: MemoryLog, *bodies: bytes, due_ns: int = 0, now_ns: int = NOW_NS) -> list[Message]:
    return messages_of(log.append([([*bodies], due_ns)], now_ns))


def fill(log: MemoryLog, batches: int, per_batch: int = 3) -> list[Message]:
    return [message for n in range(batches) for message in add(log, *[b"%d" % n] * per_batch, now_ns=n)]


def test_an_empty_log_begins_at_its_floor() -> None:
    log = MemoryLog(floor=FLOOR)
    assert log.start == log.end == log.memory_start == FLOOR
    assert log.read(FLOOR) is None
    assert log.count(FLOOR, log.end) == 0
    assert [*log.deferred_since(0)] == []
    assert log.size_bytes == log.corrupt_batches == log.corrupt_messages == 0


def test_appended_messages_can_be_read() -> None:
    log = MemoryLog(floor=FLOOR)
    batches = log.append([([b"a", b"bb"], 0), ([b"later"], 9)], NOW_NS)
    assert [(batch.base, batch.count, batch.due_ns) for batch in batches] == [
        (FLOOR, 2, 0),
        (FLOOR + 2, 1, 9),
    ]
    written = messages_of(batches) + fill(log, 5)
    assert read_all(log) == written
    assert read_all(log, wait=False) == written
    assert (log.start, log.end) == (FLOOR, FLOOR + 18)


def test_reading_begins_at_any_number() -> None:
    log = MemoryLog(floor=FLOOR)
    written = fill(log, 5)
    for message in written:
        assert read_all(log, message.sequence) == written[message.sequence - FLOOR :]
    assert read_all(log, 0) == written
    assert log.read(log.end) is None


def test_trimming_drops_whole_batches_that_nobody_needs() -> None:
    log = MemoryLog(floor=FLOOR)
    written = fill(log, 5)
    log.trim(FLOOR + 2)
    assert log.start == FLOOR
    log.trim(FLOOR + 7)
    assert log.start == log.memory_start == FLOOR + 6
    assert read_all(log, FLOOR) == written[6:]
    log.trim(log.end)
    assert log.start == log.end == FLOOR + 15
    assert log.read(FLOOR) is None
    assert add(log, b"next")[0].sequence == FLOOR + 15


def test_trimming_forgets_gaps_that_lie_before() -> None:
    log = MemoryLog(floor=FLOOR)
    fill(log, 5)
    log.gaps.add(FLOOR, FLOOR + 3)
    log.gaps.add(FLOOR + 9, FLOOR + 12)
    log.trim(FLOOR + 6)
    assert log.gaps.ranges == [(FLOOR + 9, FLOOR + 12)]


def test_the_oldest_are_discarded_until_no_more_than_the_limit_follow() -> None:
    log = MemoryLog(floor=FLOOR)
    written = fill(log, 10)
    assert log.discard_oldest(FLOOR + 6, 10) == 15
    assert log.count(FLOOR + 6, log.end) == 9
    assert read_all(log, FLOOR) == written[:6] + written[21:]
    assert read_all(log, FLOOR + 6) == written[21:]
    assert log.gaps.ranges == [(FLOOR + 6, FLOOR + 21)]
    assert log.discard_oldest(FLOOR + 6, 10) == 0


def test_a_batch_that_begins_before_is_not_discarded() -> None:
    log = MemoryLog(floor=FLOOR)
    written = fill(log, 4)
    assert log.discard_oldest(FLOOR + 1, 3) == 6
    assert read_all(log, FLOOR) == written[:3] + written[9:]


def test_the_newest_batch_is_never_discarded() -> None:
    log = MemoryLog(floor=FLOOR)
    written = fill(log, 3)
    assert log.discard_oldest(FLOOR, 0) == 6
    assert log.discard_oldest(FLOOR, 0) == 0
    assert log.discard_oldest(log.end, 0) == 0
    assert read_all(log, FLOOR) == written[6:]


def test_count_leaves_gaps_out() -> None:
    log = MemoryLog(floor=FLOOR)
    fill(log, 5)
    log.gaps.add(FLOOR + 3, FLOOR + 6)
    assert log.count(FLOOR, log.end) == 12
    assert log.count(log.end, FLOOR) == 0


def test_deferred_messages_are_listed_from_a_number_on() -> None:
    log = MemoryLog(floor=FLOOR)
    for number in range(3):
        add(log, b"now")
        add(log, b"later", due_ns=NOW_NS + number)
    assert [*log.deferred_since(0)] == [(FLOOR + 1, NOW_NS), (FLOOR + 3, NOW_NS + 1), (FLOOR + 5, NOW_NS + 2)]
    assert [*log.deferred_since(FLOOR + 2)] == [(FLOOR + 3, NOW_NS + 1), (FLOOR + 5, NOW_NS + 2)]
    log.trim(FLOOR + 4)
    assert [*log.deferred_since(0)] == [(FLOOR + 5, NOW_NS + 2)]
