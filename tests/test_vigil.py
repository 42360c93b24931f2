"""Staying awake for a moment after something was said."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Callable

import pytest

from nsparq.vigil import MOST_LEFT_OUT, Vigil

AWAKE_S = 50e-6
TURN_S = AWAKE_S / 10
ON_ONE_CORE = """
import os
from nsparq.vigil import usable_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(usable_cores())
"""


class FakeLoop:
    """An event loop that says whether it would fall asleep. Each of its turns takes as long as the last."""

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
def vigil(loop: FakeLoop) -> Vigil:
    return Vigil(loop, AWAKE_S, loop.clock, cores=2)


def occasions_left_out(loop: FakeLoop, vigil: Vigil) -> int:
    """Until it stays awake again."""
    count = 0
    while True:
        vigil.begin()
        if loop.is_awake:
            return count
        count += 1
        assert count < 1000


def test_it_sleeps_while_nothing_is_said(loop: FakeLoop, vigil: Vigil) -> None:
    assert not loop.is_awake


def test_on_a_single_core_it_sleeps_at_once(loop: FakeLoop) -> None:
    vigil = Vigil(loop, AWAKE_S, loop.clock, cores=1)
    vigil.begin()
    assert not loop.is_awake


def test_for_no_time_at_all_it_sleeps_at_once(loop: FakeLoop) -> None:
    vigil = Vigil(loop, 0, loop.clock, cores=2)
    vigil.begin()
    assert not loop.is_awake


def test_it_knows_how_many_cores_it_may_run_on() -> None:
    on_one = subprocess.run([sys.executable, "-c", ON_ONE_CORE], capture_output=True, text=True, check=True)
    assert on_one.stdout.strip() == "1"


def test_it_stays_awake_for_a_moment_and_no_longer(loop: FakeLoop, vigil: Vigil) -> None:
    vigil.begin()
    assert loop.turns_to_sleep() in (10, 11)


def test_what_comes_meanwhile_makes_it_last(loop: FakeLoop, vigil: Vigil) -> None:
    vigil.begin()
    for _ in range(50):
        for _ in range(5):
            loop.turn()
            assert loop.is_awake
        vigil.begin()
    assert loop.turns_to_sleep() in (10, 11)


def test_in_vain_again_and_again_it_is_left_out_more_and_more_often(loop: FakeLoop, vigil: Vigil) -> None:
    seen = []
    for _ in range(8):
        seen.append(occasions_left_out(loop, vigil))
        loop.turns_to_sleep()
    assert seen == [0, 1, 3, 7, 15, 15, 15, 15]
    assert MOST_LEFT_OUT == 15


def test_once_something_comes_of_it_it_is_left_out_no_more(loop: FakeLoop, vigil: Vigil) -> None:
    for _ in range(8):
        occasions_left_out(loop, vigil)
        loop.turns_to_sleep()
    assert occasions_left_out(loop, vigil) == MOST_LEFT_OUT
    loop.turn()
    vigil.begin()
    loop.turns_to_sleep()
    assert occasions_left_out(loop, vigil) == 1


def test_several_things_said_in_one_turn_are_not_an_answer(loop: FakeLoop, vigil: Vigil) -> None:
    for _ in range(8):
        occasions_left_out(loop, vigil)
        vigil.begin()
        vigil.begin()
        loop.turns_to_sleep()
    assert occasions_left_out(loop, vigil) == MOST_LEFT_OUT


def test_it_ends_with_what_it_was_for(loop: FakeLoop, vigil: Vigil) -> None:
    vigil.begin()
    loop.turn()
    vigil.end()
    assert loop.turns_to_sleep() == 1


def test_an_answer_that_ends_it_shows_that_it_pays(loop: FakeLoop, vigil: Vigil) -> None:
    for _ in range(8):
        occasions_left_out(loop, vigil)
        loop.turn()
        vigil.end()
        loop.turns_to_sleep()
    assert occasions_left_out(loop, vigil) == 0


def test_after_its_end_it_begins_anew(loop: FakeLoop, vigil: Vigil) -> None:
    vigil.begin()
    loop.turn()
    vigil.end()
    vigil.begin()
    assert loop.turns_to_sleep() in (10, 11)


def test_an_end_without_a_beginning_is_nothing(loop: FakeLoop, vigil: Vigil) -> None:
    vigil.end()
    assert not loop.is_awake
    vigil.begin()
    assert loop.turns_to_sleep() in (10, 11)
