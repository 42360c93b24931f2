"""broker.deferred: messages that wait for their time."""

from __future__ import annotations

from nsparq.broker.deferred import Deferred


def test_messages_come_out_in_the_order_of_their_due_times():
    deferred = Deferred()
    for message_id, due_ns in ((1, 30), (2, 10), (3, 20)):
        deferred.add(message_id, due_ns)
    assert len(deferred) == 3
    assert deferred.next_due() == 10
    assert [deferred.pop_due(30) for _ in range(4)] == [2, 3, 1, None]
    assert len(deferred) == 0
    assert deferred.next_due() is None


def test_a_message_is_due_at_its_time_and_not_before():
    deferred = Deferred()
    deferred.add(1, 30)
    assert deferred.pop_due(29) is None
    assert len(deferred) == 1
    assert deferred.pop_due(30) == 1


def test_of_messages_due_together_the_older_comes_first():
    deferred = Deferred()
    for message_id in (3, 1, 2):
        deferred.add(message_id, 10)
    assert [deferred.pop_due(10) for _ in range(3)] == [1, 2, 3]


def test_a_message_may_be_deferred_again():
    deferred = Deferred()
    deferred.add(1, 10)
    deferred.pop_due(10)
    deferred.add(1, 20)
    assert deferred.due_ns == {1: 20}
    assert deferred.pop_due(15) is None
    assert deferred.pop_due(20) == 1


def test_clear_leaves_nothing():
    deferred = Deferred()
    deferred.add(1, 10)
    deferred.clear()
    assert len(deferred) == 0
    assert deferred.next_due() is None
    assert deferred.pop_due(100) is None
