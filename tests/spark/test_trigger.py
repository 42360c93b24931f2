"""When the next micro-batch may begin: by a clock that is passed in."""

from __future__ import annotations

from nsparq.spark.trigger import BatchTimer
from tests.spark.source.support import FakeClock, options


def test_the_first_batch_is_not_delayed() -> None:
    assert BatchTimer(1000, 60.0, FakeClock(), interval=60.0).may_start(1)


def test_a_batch_waits_for_its_rows_or_for_its_time() -> None:
    clock = FakeClock()
    timer = BatchTimer(10, 60.0, clock)
    timer.start()
    assert not timer.may_start(9) and timer.may_start(10)
    assert timer.remaining() == 60.0
    clock.sleep(59.0)
    assert not timer.may_start(9) and timer.remaining() == 1.0
    clock.sleep(1.0)
    assert timer.may_start(1)
    timer.start()
    assert not timer.may_start(1)


def test_an_interval_delays_a_batch_of_any_size() -> None:
    clock = FakeClock()
    timer = BatchTimer(10, 60.0, clock, interval=20.0)
    timer.start()
    assert not timer.may_start(10) and timer.remaining() == 20.0
    clock.sleep(20.0)
    assert timer.may_start(10) and not timer.may_start(9) and timer.remaining() == 40.0


def test_without_options_no_batch_is_delayed() -> None:
    timer = BatchTimer.of(options(nsqd="h:1"), FakeClock())
    timer.start()
    assert timer.may_start(1)
