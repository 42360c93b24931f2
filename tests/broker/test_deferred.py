"""broker.deferred: messages that wait for their time."""

from __future__ import annotations

import random
import time

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


def test_of_messages_due_at_the_same_time_the_older_is_first():
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


def test_deferred_messages_agree_with_a_plain_model():
    """Any sequence of changes gives the same answers as a dictionary, and the heap does not
    grow."""
    chance = random.Random(5)
    deferred, model = Deferred(), {}
    for step in range(5000):
        action = chance.random()
        if action < 0.5:
            message_id, due_ns = chance.randrange(300), chance.randrange(1000)
            if message_id not in model:
                deferred.add(message_id, due_ns)
                model[message_id] = due_ns
        elif action < 0.9:
            now_ns = chance.randrange(1000)
            due = min(((at, i) for i, at in model.items() if at <= now_ns), default=None)
            assert deferred.pop_due(now_ns) == (due and due[1])
            if due:
                del model[due[1]]
        elif action < 0.95:
            limit = chance.randrange(100)
            assert deferred.drop_below(limit) == sorted(i for i in model if i < limit)
            model = {i: at for i, at in model.items() if i >= limit}
        elif step % 500 == 0:
            deferred.clear()
            model.clear()
        ordered = sorted(model, key=lambda i: (model[i], i))
        for count in (0, 1, 7, 1000):
            assert deferred.soonest(count) == ordered[:count]
        assert deferred.lowest() == min(model, default=None)
        assert deferred.next_due() == min(model.values(), default=None)
        assert deferred.due_ns == model
        assert max(len(deferred._heap), len(deferred._sequences)) <= 2 * len(model) + 64


def test_looking_at_the_soonest_does_not_slow_with_their_number():
    def cost(number: int) -> float:
        deferred = Deferred()
        for i in range(number):
            deferred.add(i, (i * 7919) % number)
        started = time.process_time()
        for _ in range(100):
            assert len(deferred.soonest(20)) == 20
            deferred.lowest()
        return time.process_time() - started

    assert min(cost(50_000) for _ in range(3)) < 6 * min(cost(2_000) for _ in range(3)) + 0.01
