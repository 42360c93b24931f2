"""Messages in flight: found by id and by deadline. tests/broker/test_channel.py has the delivery
itself."""

from __future__ import annotations

import time

import pytest

from nsparq.broker.delivery import InFlight
from nsparq.broker.runs import Run
from tests.broker.rig import FakeClient


def make_run(first: int, end: int, *, client: FakeClient | None = None, deadline_ns: int = 100) -> Run:
    return Run(client or FakeClient(), first, end, first, 10, deadline_ns, 1, 7)


def test_single_messages_and_long_runs_are_found_by_id():
    in_flight = InFlight()
    single, long = make_run(3, 4), make_run(10, 60)
    in_flight.add(single)
    in_flight.add(long)
    assert in_flight.find(3) is single
    assert in_flight.find(10) is in_flight.find(35) is in_flight.find(59) is long
    assert in_flight.find(9) is in_flight.find(60) is in_flight.find(4) is None
    assert len(in_flight) == 51
    assert sorted(in_flight) == [3, *range(10, 60)]
    assert in_flight.lowest() == 3


def test_runs_that_share_a_block_of_ids_are_told_apart():
    in_flight = InFlight()
    runs = [make_run(0, 3), make_run(3, 5), make_run(5, 20)]
    for run in runs:
        in_flight.add(run)
    assert [runs.index(in_flight.find(i)) for i in (0, 2, 3, 4, 5, 19)] == [0, 0, 1, 1, 2, 2]
    in_flight.answer(runs[1], 3, 2)
    assert in_flight.find(3) is None
    assert in_flight.find(5) is runs[2]


def test_an_answered_message_is_not_found_any_more():
    in_flight = InFlight()
    run = make_run(0, 3)
    in_flight.add(run)
    assert in_flight.answer(run, 1) == 1
    assert in_flight.find(1) is None
    assert in_flight.find(0) is run
    assert len(in_flight) == 2


def test_a_settled_run_is_gone_from_its_client_and_from_every_index():
    in_flight = InFlight()
    client = FakeClient()
    single, long = make_run(3, 4, client=client), make_run(10, 60, client=client)
    in_flight.add(single)
    in_flight.add(long)
    assert client.runs == {single, long}
    in_flight.answer(single, 3)
    in_flight.answer(long, 10, 50)
    assert not client.runs
    assert len(in_flight) == 0
    assert not in_flight.runs
    assert not in_flight.singles
    assert not in_flight.longer._short and not in_flight.longer._long
    assert in_flight.lowest() is None
    assert in_flight.next_deadline() is None
    assert not in_flight._heap


def test_the_lowest_number_changes_with_the_answers():
    in_flight = InFlight()
    run = make_run(0, 5)
    in_flight.add(run)
    in_flight.add(make_run(7, 8))
    in_flight.answer(run, 0, 3)
    assert in_flight.lowest() == 3
    in_flight.answer(run, 3, 2)
    assert in_flight.lowest() == 7


def test_a_message_may_leave_its_run_and_come_back_alone():
    in_flight = InFlight()
    run, alone = make_run(0, 3), make_run(1, 2)
    in_flight.add(run)
    in_flight.answer(run, 1)
    in_flight.add(alone)
    assert in_flight.find(1) is alone
    assert len(in_flight) == 3
    assert sorted(in_flight) == [0, 1, 2]


def test_the_earliest_deadline_comes_first_and_answered_runs_are_passed_over():
    in_flight = InFlight()
    early, late = make_run(0, 1, deadline_ns=50), make_run(1, 2, deadline_ns=60)
    in_flight.add(late)
    in_flight.add(early)
    assert in_flight.next_deadline() == 50
    in_flight.answer(early, 0)
    assert in_flight.next_deadline() == 60


def test_a_run_expires_at_its_deadline_and_stays_expired_until_taken_out():
    in_flight = InFlight()
    run = make_run(0, 2, deadline_ns=50)
    in_flight.add(run)
    assert in_flight.first_expired(49) is None
    assert in_flight.first_expired(50) is run
    in_flight.answer(run, 0)
    assert in_flight.first_expired(50) is run
    in_flight.answer(run, 1)
    assert in_flight.first_expired(50) is None


def test_a_touched_run_expires_at_its_new_deadline_only():
    in_flight = InFlight()
    touched, other = make_run(0, 1, deadline_ns=50), make_run(1, 2, deadline_ns=60)
    in_flight.add(touched)
    in_flight.add(other)
    touched.deadline_ns = 80
    assert in_flight.first_expired(55) is None
    assert in_flight.first_expired(60) is other
    in_flight.answer(other, 1)
    assert in_flight.first_expired(79) is None
    assert in_flight.first_expired(80) is touched


def test_the_heap_of_deadlines_forgets_answered_runs_when_it_is_half_dead():
    in_flight = InFlight()
    keeper = make_run(0, 1, deadline_ns=1)  # stays on top, so that nothing dead is popped
    in_flight.add(keeper)
    for number in range(1, 1001):
        run = make_run(number, number + 1)
        in_flight.add(run)
        in_flight.answer(run, number)
    assert len(in_flight._heap) <= 2 * 64 + 2
    assert in_flight.first_expired(1) is keeper


def test_dead_entries_that_are_popped_are_not_counted_twice():
    in_flight = InFlight()
    for number in range(300):
        run = make_run(number, number + 1, deadline_ns=number)
        in_flight.add(run)
        in_flight.answer(run, number)
        in_flight.next_deadline()
    assert in_flight._dead == 0
    assert not in_flight._heap


def test_clear_removes_all_runs_from_their_clients():
    in_flight = InFlight()
    client = FakeClient()
    run = make_run(0, 20, client=client)
    in_flight.add(run)
    in_flight.add(make_run(30, 31, client=client))
    in_flight.clear()
    assert len(in_flight) == 0
    assert not client.runs
    assert in_flight.find(0) is in_flight.find(30) is None
    assert in_flight.next_deadline() is None
    assert not run.holds(3)


@pytest.mark.parametrize("length", [1, 3], ids=["single messages", "short runs"])
def test_finding_answering_and_expiring_do_not_slow_with_what_is_in_flight(length: int):
    def cost(number: int) -> float:
        """Seconds for 500 answers and 500 expirations among `number` runs."""
        best = 1e9
        for _ in range(3):
            in_flight = InFlight()
            client = FakeClient()
            for i in range(number):
                in_flight.add(make_run(length * i, length * (i + 1), client=client, deadline_ns=i))
            step = number // 500
            started = time.process_time()
            for i in range(number - 1, 0, -2 * step):
                message_id = length * i
                run = in_flight.find(message_id)
                in_flight.answer(run, message_id, length)
            for _ in range(250):
                run = in_flight.first_expired(number)
                in_flight.answer(run, run.low, length)
            best = min(best, time.process_time() - started)
        return best

    # Twenty times as many in flight: a linear cost would show as twenty times, a heap's as less
    # than twice.
    assert cost(20_000) < 6 * cost(1_000)


def test_all_messages_below_a_number_can_be_taken_out():
    for limit in range(12):
        one, other = FakeClient("one"), FakeClient("other")
        in_flight = InFlight()
        runs = [make_run(0, 4, client=one), make_run(4, 5, client=other), make_run(5, 10, client=other)]
        for run in runs:
            in_flight.add(run)
        for message_id in (1, 6, 7, 9):
            run = in_flight.find(message_id)
            assert run is not None
            in_flight.answer(run, message_id)
        unanswered = {0: one, 2: one, 3: one, 4: other, 5: other, 8: other}
        below = [client for message_id, client in unanswered.items() if message_id < limit]
        assert in_flight.count_below(limit) == len(below)
        assert in_flight.drop_below(limit) == {c: below.count(c) for c in (one, other) if c in below}
        left = [message_id for message_id in unanswered if message_id >= limit]
        assert sorted(in_flight) == left
        assert len(in_flight) == len(left)
        assert in_flight.lowest() == min(left, default=None)
        for message_id in range(10):
            assert (in_flight.find(message_id) is not None) == (message_id in left)
        assert one.runs | other.runs == {*in_flight.runs} == {run for run in runs if run.low < run.end}
        for message_id in left:
            run = in_flight.find(message_id)
            assert run is not None
            in_flight.answer(run, message_id)
        assert not in_flight.runs
