"""A run: messages that were delivered together, until all of them are answered."""

from __future__ import annotations

import numpy as np

from nsparq.broker.delivery import InFlight
from nsparq.broker.runs import Run
from tests.broker.rig import FakeClient


def make_run(first: int, end: int, *, client: FakeClient | None = None, deadline_ns: int = 100) -> Run:
    return Run(client or FakeClient(), first, end, first, 10, deadline_ns, 1, 7)


def answer(run: Run, sequence: int, most: int) -> int:
    """Answer messages of the only run in flight."""
    in_flight = InFlight()
    in_flight.add(run)
    return in_flight.answer(run, sequence, most)


def test_a_run_holds_its_messages_until_they_are_answered():
    run = make_run(5, 8)
    assert [run.holds(i) for i in (4, 5, 7, 8)] == [False, True, True, False]
    assert answer(run, 5, 1) == 1
    assert [*run.unanswered()] == [6, 7]
    assert not run.holds(5)


def test_answers_out_of_order_are_holes_until_the_low_end_reaches_them():
    run = make_run(0, 4)
    assert answer(run, 2, 1) == 1
    assert run.holes == {2}
    assert run.low == 0
    assert answer(run, 1, 1) == 1
    assert answer(run, 0, 1) == 1
    assert run.low == 3
    assert not run.holes
    assert [*run.unanswered()] == [3]


def test_answers_in_reverse_order_complete_a_run():
    run = make_run(0, 3)
    for message_id in (2, 1, 0):
        assert answer(run, message_id, 1) == 1
    assert run.low == run.end
    assert not run.holes


def test_a_span_of_answers_is_taken_at_once_up_to_the_end_of_the_run():
    run = make_run(0, 10)
    assert answer(run, 0, 4) == 4
    assert run.low == 4
    assert answer(run, 4, 100) == 6
    assert run.low == run.end


def test_a_span_is_taken_message_by_message_where_some_are_answered_already():
    run = make_run(0, 4)
    answer(run, 2, 1)
    assert answer(run, 0, 4) == 1
    assert answer(run, 1, 3) == 1
    assert run.low == 3
    assert answer(run, 3, 1) == 1


def test_a_span_that_begins_beyond_the_low_end_is_taken_message_by_message():
    run = make_run(0, 4)
    assert answer(run, 1, 3) == 1
    assert [*run.unanswered()] == [0, 2, 3]


def test_publish_times_are_one_for_all_or_one_each():
    assert make_run(0, 2).timestamp_of(1) == 7
    stamps = np.array([3, 4], np.int64)
    run = Run(FakeClient(), 10, 12, 10, 0, 0, 1, stamps)
    assert run.timestamp_of(11) == 4
    assert type(run.timestamp_of(11)) is int
