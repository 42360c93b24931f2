"""Staying awake for a moment after something was said."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Callable

import pytest

from nsparq.busy_poll import MAX_SKIPPED, BusyPoll

AWAKE_S = 50e-6
TURN_S = AWAKE_S / 10
ON_ONE_CORE = """
import os
from nsparq.busy_poll import usable_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(usable_cores())
"""


class FakeLoop:
    """An event loop that says whether it would fall asleep. Each of its turns takes as long as the
    last."""

    def __init__(self) -> None:
        self.now = 100.0
        self._ready: deque[Callable[[], object]] = deque()

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._ready.append(callback)

    def clock(self) -> float:
        return self.now

    @property
    def is_awake(self) -> bool:
        return bool(self._ready)

    def turn(self) -> None:
        self.now += TURN_S
        for _ in range(len(self._ready)):
            self._ready.popleft()()

    def turns_to_sleep(self) -> int:
        turns = 0
        while self.is_awake:
            self.turn()
            turns += 1
            assert turns < 1000
        return turns


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def poll(loop: FakeLoop) -> BusyPoll:
    return BusyPoll(loop, AWAKE_S, loop.clock, cores=2)


def times_skipped(loop: FakeLoop, poll: BusyPoll) -> int:
    """Until it stays awake again."""
    count = 0
    while True:
        poll.start()
        if loop.is_awake:
            return count
        count += 1
        assert count < 1000


def test_it_sleeps_while_nothing_is_written(loop: FakeLoop, poll: BusyPoll) -> None:
    assert not loop.is_awake


def test_on_a_single_core_it_sleeps_at_once(loop: FakeLoop) -> None:
    poll = BusyPoll(loop, AWAKE_S, loop.clock, cores=1)
    poll.start()
    assert not loop.is_awake


def test_for_no_time_at_all_it_sleeps_at_once(loop: FakeLoop) -> None:
    poll = BusyPoll(loop, 0, loop.clock, cores=2)
    poll.start()
    assert not loop.is_awake


def test_it_knows_how_many_cores_it_may_run_on() -> None:
    on_one = subprocess.run([sys.executable, "-c", ON_ONE_CORE], capture_output=True, text=True, check=True)
    assert on_one.stdout.strip() == "1"


def test_it_stays_awake_for_a_moment_and_no_longer(loop: FakeLoop, poll: BusyPoll) -> None:
    poll.start()
    assert loop.turns_to_sleep() in (10, 11)


def test_a_reply_makes_it_last(loop: FakeLoop, poll: BusyPoll) -> None:
    poll.start()
    for _ in range(50):
        for _ in range(5):
            loop.turn()
            assert loop.is_awake
        poll.start()
    assert loop.turns_to_sleep() in (10, 11)


def test_while_no_reply_comes_it_is_skipped_more_and_more_often(loop: FakeLoop, poll: BusyPoll) -> None:
    seen = []
    for _ in range(8):
        seen.append(times_skipped(loop, poll))
        loop.turns_to_sleep()
    assert seen == [0, 1, 3, 7, 15, 15, 15, 15]
    assert MAX_SKIPPED == 15


def test_after_a_reply_it_is_skipped_no_more(loop: FakeLoop, poll: BusyPoll) -> None:
    for _ in range(8):
        times_skipped(loop, poll)
        loop.turns_to_sleep()
    assert times_skipped(loop, poll) == MAX_SKIPPED
    loop.turn()
    poll.start()
    loop.turns_to_sleep()
    assert times_skipped(loop, poll) == 1


def test_several_writes_in_one_turn_are_not_a_reply(loop: FakeLoop, poll: BusyPoll) -> None:
    for _ in range(8):
        times_skipped(loop, poll)
        poll.start()
        poll.start()
        loop.turns_to_sleep()
    assert times_skipped(loop, poll) == MAX_SKIPPED


def test_it_stops_when_no_reply_is_expected_any_more(loop: FakeLoop, poll: BusyPoll) -> None:
    poll.start()
    loop.turn()
    poll.stop()
    assert loop.turns_to_sleep() == 1


def test_a_reply_that_stops_it_counts_as_success(loop: FakeLoop, poll: BusyPoll) -> None:
    for _ in range(8):
        times_skipped(loop, poll)
        loop.turn()
        poll.stop()
        loop.turns_to_sleep()
    assert times_skipped(loop, poll) == 0


def test_after_a_stop_it_starts_again(loop: FakeLoop, poll: BusyPoll) -> None:
    poll.start()
    loop.turn()
    poll.stop()
    poll.start()
    assert loop.turns_to_sleep() in (10, 11)


def test_a_stop_without_a_start_does_nothing(loop: FakeLoop, poll: BusyPoll) -> None:
    poll.stop()
    assert not loop.is_awake
    poll.start()
    assert loop.turns_to_sleep() in (10, 11)
