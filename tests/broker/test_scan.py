"""broker.scan: which channels the queue scan looks at, and when."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from nsparq.broker.scan import SLICE, QueueScan
from nsparq.private_random import private_random


class FakeChannel:
    """Has `due` messages ready to expire, then an event at `next_ns`."""

    def __init__(self, scan: QueueScan, at_ns: int, due: int = 1, next_ns: int | None = None) -> None:
        self.watched_ns: int | None = at_ns
        self.is_exiting = False
        self.due = due
        self.next_ns = next_ns
        self.looks: list[int] = []
        self.on_expire: Callable[[], None] = lambda: None
        scan.watch(self, at_ns)  # type: ignore[arg-type]

    def expire(self, now_ns: int, limit: int) -> int:
        done = min(self.due, limit)
        self.due -= done
        self.looks.append(done)
        self.on_expire()
        return done

    def next_event(self) -> int | None:
        return self.next_ns


def make_scan(selection: int = 20, workers: int = 4, pool_max: int = 4) -> QueueScan:
    scan = QueueScan(selection, pool_max)
    scan.workers = workers
    return scan


def run(scan: QueueScan, now_ns: int) -> int:
    """The number of breaks that the scan made."""
    return sum(1 for _ in scan.scan(now_ns))


def test_nothing_due_costs_nothing():
    scan = make_scan()
    channel = FakeChannel(scan, at_ns=100)
    assert run(scan, 99) == 0
    assert channel.looks == []


def test_a_channel_is_looked_at_when_its_time_has_come():
    scan = make_scan()
    channel = FakeChannel(scan, at_ns=100)
    run(scan, 100)
    assert channel.looks == [1]
    assert channel.watched_ns is None


def test_a_channel_without_further_events_is_not_looked_at_again():
    scan = make_scan()
    channel = FakeChannel(scan, at_ns=100)
    run(scan, 100)
    run(scan, 10**9)
    assert channel.looks == [1]


def test_a_channel_is_watched_again_for_its_next_event():
    scan = make_scan()
    channel = FakeChannel(scan, at_ns=100, next_ns=200)
    run(scan, 100)
    assert channel.watched_ns == 200
    run(scan, 199)
    assert len(channel.looks) == 1
    run(scan, 200)
    assert len(channel.looks) == 2


def test_an_earlier_event_replaces_a_later_one():
    scan = make_scan()
    channel = FakeChannel(scan, at_ns=100)
    channel.watched_ns = 50
    scan.watch(channel, 50)  # type: ignore[arg-type]
    run(scan, 60)
    assert channel.looks == [1]
    run(scan, 100)
    assert channel.looks == [1], "the replaced entry is stale"


def test_two_entries_for_the_same_moment_are_one_look():
    scan = make_scan()
    channel = FakeChannel(scan, at_ns=100, next_ns=100)
    channel.watched_ns = 50
    scan.watch(channel, 50)  # type: ignore[arg-type]
    run(scan, 60)
    channel.next_ns = None
    run(scan, 100)
    assert len(channel.looks) == 2


def test_a_deleted_channel_is_not_watched_again():
    scan = make_scan()
    channel = FakeChannel(scan, at_ns=100, next_ns=200)
    channel.is_exiting = True
    run(scan, 100)
    assert channel.watched_ns is None


def test_an_earlier_watch_set_during_the_scan_stays():
    scan = make_scan()
    channel = FakeChannel(scan, at_ns=100, next_ns=300)

    def deliver() -> None:
        channel.watched_ns = 200
        scan.watch(channel, 200)  # type: ignore[arg-type]

    channel.on_expire = deliver
    run(scan, 100)
    assert channel.watched_ns == 200
    run(scan, 200)
    assert len(channel.looks) == 2


def test_every_due_channel_is_looked_at_whatever_the_number_of_workers():
    for workers, number in product((1, 2, 3, 4), (1, 2, 3, 5, 20)):
        scan = make_scan(workers=workers)
        channels = [FakeChannel(scan, at_ns=100) for _ in range(number)]
        run(scan, 100)
        assert [channel.looks for channel in channels] == [[1]] * number, (workers, number)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_channel_is_watched_again_whatever_the_number_of_workers(workers: int):
    scan = make_scan(workers=workers)
    channels = [FakeChannel(scan, at_ns=100, next_ns=200) for _ in range(7)]
    run(scan, 100)
    assert {channel.watched_ns for channel in channels} == {200}


def test_a_long_queue_is_worked_off_in_slices_with_breaks():
    scan = make_scan(workers=1)
    channel = FakeChannel(scan, at_ns=100, due=2 * SLICE + 10)
    breaks = run(scan, 100)
    assert channel.looks == [SLICE, SLICE, 10]
    assert breaks == 3


def test_with_two_workers_a_long_queue_does_not_delay_another():
    scan = make_scan(workers=2)
    long = FakeChannel(scan, at_ns=100, due=10 * SLICE)
    short = FakeChannel(scan, at_ns=100)
    scanning = scan.scan(100)
    next(scanning)
    assert long.looks == [SLICE]
    assert short.looks == [1]
    scanning.close()


def test_as_many_channels_are_served_between_breaks_as_there_are_workers():
    scan = make_scan(workers=3)
    channels = [FakeChannel(scan, at_ns=100) for _ in range(6)]
    scanning = scan.scan(100)
    next(scanning)
    assert sum(bool(channel.looks) for channel in channels) == 3
    next(scanning)
    assert sum(bool(channel.looks) for channel in channels) == 6
    scanning.close()


def test_more_than_a_quarter_dirty_means_another_round_at_once():
    scan = make_scan(selection=4)
    channels = [FakeChannel(scan, at_ns=100) for _ in range(12)]
    run(scan, 100)
    assert all(channel.looks == [1] for channel in channels)


def test_a_quarter_dirty_or_less_ends_the_scan_and_the_rest_is_looked_at_next_time(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(private_random, "sample", lambda population, count: population[:count])
    scan = make_scan(selection=4)
    channels = [FakeChannel(scan, at_ns=100, due=int(number == 0)) for number in range(6)]
    run(scan, 100)
    assert [len(channel.looks) for channel in channels] == [1, 1, 1, 1, 0, 0]
    assert {channel.watched_ns for channel in channels[4:]} == {100}
    run(scan, 100)
    assert [len(channel.looks) for channel in channels] == [1] * 6


def test_channels_are_chosen_at_random():
    chosen_first = set()
    for _ in range(50):
        scan = make_scan(selection=1, workers=1)
        channels = [FakeChannel(scan, at_ns=100) for _ in range(4)]
        next(scan.scan(100))
        chosen_first.update(number for number, channel in enumerate(channels) if channel.looks)
    assert chosen_first == {0, 1, 2, 3}


def test_a_channel_that_falls_due_during_a_dirty_round_is_taken_in():
    scan = make_scan()
    first = FakeChannel(scan, at_ns=100)
    late: list[FakeChannel] = []
    first.on_expire = lambda: late.append(FakeChannel(scan, at_ns=100))
    run(scan, 100)
    assert late[0].looks == [1]


@pytest.mark.parametrize(
    ("channels", "workers"), [(0, 1), (1, 1), (7, 1), (8, 2), (15, 3), (16, 4), (1000, 4)]
)
def test_the_pool_is_a_quarter_of_the_channels_within_its_bounds(channels: int, workers: int):
    scan = make_scan(pool_max=4)
    scan.resize(channels)
    assert scan.workers == workers
