"""When the next micro-batch may begin: by a clock that is passed in."""

from __future__ import annotations

from nsparq.spark.hold import Hold
from tests.spark.log_support import FakeClock, options


def test_the_first_batch_is_not_held_back() -> None:
    assert Hold(1000, 60.0, FakeClock(), interval=60.0).is_over(1)


def test_a_batch_waits_for_its_rows_or_for_its_time() -> None:
    clock = FakeClock()
    hold = Hold(10, 60.0, clock)
    hold.begin()
    assert not hold.is_over(9) and hold.is_over(10)
    assert hold.remaining() == 60.0
    clock.sleep(59.0)
    assert not hold.is_over(9) and hold.remaining() == 1.0
    clock.sleep(1.0)
    assert hold.is_over(1)
    hold.begin()
    assert not hold.is_over(1)


def test_an_interval_holds_back_whatever_there_is() -> None:
    clock = FakeClock()
    hold = Hold(10, 60.0, clock, interval=20.0)
    hold.begin()
    assert not hold.is_over(10) and hold.remaining() == 20.0
    clock.sleep(20.0)
    assert hold.is_over(10) and not hold.is_over(9) and hold.remaining() == 40.0


def test_without_options_nothing_is_held_back() -> None:
    hold = Hold.of(options(nsqd="h:1"), FakeClock())
    hold.begin()
    assert hold.is_over(1)
