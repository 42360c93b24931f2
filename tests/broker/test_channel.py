"""broker.channel: delivery, answers, and timeouts."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations

import pytest

from nsparq.broker.rounds import MAX_WRITE
from nsparq.broker.scan import SLICE
from nsparq.broker.stats import broker_stats, channel_stats
from nsparq.errors import ClientError, Exiting, SubscribeRefused
from nsparq.private_random import private_random
from tests.broker.rig import MILLISECOND, NODE_ID, SECOND, FakeClient, Rig, bodies, counts

MakeRig = Callable[..., Rig]

# Delivery.


def test_a_message_carries_its_publish_time_its_first_attempt_and_an_id_with_the_node(rig: Rig):
    client = rig.subscribe(rdy=1)
    published_ns = rig.clock.wall()
    rig.send("t", b"body")
    rig.turn()
    (message,) = client.take()
    assert message.body == b"body"
    assert message.attempts == 1
    assert message.timestamp_ns == published_ns
    assert message.id >> 54 == NODE_ID


def test_without_rdy_nothing_is_sent(rig: Rig):
    client = rig.subscribe()
    rig.publish("t", b"x")
    assert not client.messages
    assert counts(rig.channel()) == (1, 0, 0)


def test_rdy_limits_what_is_in_flight_not_what_is_sent(rig: Rig):
    client = rig.subscribe(rdy=2)
    rig.publish("t", *bodies(5))
    first, second = client.take()
    assert client.in_flight == 2
    rig.finish(client, first)
    (third,) = client.take()
    rig.finish(client, second, third)
    assert client.take_bodies() == [b"3", b"4"]
    assert client.message_count == 5
    assert client.finish_count == 3
    assert counts(rig.channel()) == (0, 2, 0)


def test_rdy_0_stops_delivery_and_leaves_what_is_in_flight(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"0")
    rig.ready(client, 0)
    rig.publish("t", b"1")
    assert client.take_bodies() == [b"0"]
    rig.finish(client, client.messages[0])
    assert client.take() == []
    rig.ready(client, 1)
    assert client.take_bodies() == [b"1"]


def test_a_smaller_rdy_takes_effect_as_messages_are_finished(rig: Rig):
    client = rig.subscribe(rdy=3)
    rig.publish("t", *bodies(6))
    first, second, third = client.take()
    rig.ready(client, 1)
    rig.finish(client, first, second)
    assert client.take() == []
    rig.finish(client, third)
    assert client.take_bodies() == [b"3"]


def test_messages_come_in_the_order_of_publishing(rig: Rig):
    client = rig.subscribe(rdy=100)
    rig.send("t", b"0")
    rig.send("t", b"1", b"2")
    rig.turn()
    rig.publish("t", b"3")
    assert client.take_bodies() == [b"0", b"1", b"2", b"3"]


def test_a_run_of_messages_is_one_write(rig: Rig):
    client = rig.subscribe(rdy=100)
    rig.publish("t", *bodies(50))
    assert len(client.sends) == 1


def test_one_write_is_bounded_in_bytes(rig: Rig):
    client = rig.subscribe(rdy=100)
    rig.publish("t", *bodies(10, size=MAX_WRITE // 4))
    assert len(client.messages) == 10
    assert max(map(len, client.sends)) <= MAX_WRITE
    assert len(client.sends) == 4


def test_a_message_larger_than_one_write_is_sent_all_the_same(rig: Rig):
    client = rig.subscribe(rdy=100)
    rig.publish("t", b"x" * (2 * MAX_WRITE), b"y")
    assert [len(body) for body in client.take_bodies()] == [2 * MAX_WRITE, 1]


def test_one_write_of_redeliveries_is_bounded_in_bytes(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(10, size=MAX_WRITE // 4))
    rig.ready(client, 0)
    for message in client.take():
        rig.requeue(client, message)
    client.sends.clear()
    rig.ready(client, 10)
    assert len(client.take()) == 10
    assert max(map(len, client.sends)) < MAX_WRITE + MAX_WRITE // 2
    assert len(client.sends) > 1


@pytest.mark.parametrize(
    ("backlog", "clients"), [(10, 5), (5, 5), (7, 3), (1, 4), (100, 7), (4, 2), (200, 3)]
)
def test_a_backlog_is_spread_evenly_over_the_ready_clients(make_rig: MakeRig, backlog: int, clients: int):
    rig = make_rig()
    crew = [rig.subscribe() for _ in range(clients)]
    rig.publish("t", *bodies(backlog))
    for client in crew:
        client.channel.set_ready(client, 1000)
    rig.turn()
    shares = [len(client.messages) for client in crew]
    assert sum(shares) == backlog
    assert max(shares) - min(shares) <= 1, shares


def test_a_backlog_is_spread_evenly_after_a_crash_too(make_rig: MakeRig):
    """Numbers that the recovery skips do not count as messages."""
    rig = make_rig()
    rig.channel()
    rig.publish("t", *bodies(10))
    rig.crash()
    crew = [rig.subscribe() for _ in range(5)]
    for client in crew:
        client.channel.set_ready(client, 1000)
    rig.turn()
    assert [len(client.messages) for client in crew] == [2] * 5


def test_deferred_messages_do_not_count_when_a_backlog_is_spread(rig: Rig):
    crew = [rig.subscribe() for _ in range(5)]
    rig.send("t", *bodies(10))
    for _ in range(30):
        rig.send("t", b"later", defer_ms=1000)
    rig.turn()
    for client in crew:
        client.channel.set_ready(client, 1000)
    rig.turn()
    assert [len(client.messages) for client in crew] == [2] * 5


def test_requeued_messages_are_spread_too(rig: Rig):
    crew = [rig.subscribe() for _ in range(5)]
    gone = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(10))
    for client in crew:
        client.channel.set_ready(client, 1000)
    rig.disconnect(gone)
    assert [len(client.messages) for client in crew] == [2] * 5


def test_a_client_takes_no_more_than_it_may_of_its_share(rig: Rig):
    small, large = rig.subscribe(), rig.subscribe()
    rig.publish("t", *bodies(10))
    small.channel.set_ready(small, 2)
    large.channel.set_ready(large, 100)
    rig.turn()
    assert len(small.messages) == 2
    assert len(large.messages) == 8


def test_single_messages_go_round_the_ready_clients(rig: Rig):
    crew = [rig.subscribe(rdy=100) for _ in range(3)]
    for number in range(9):
        rig.publish("t", b"%d" % number)
    assert [client.take_bodies() for client in crew] == [
        [b"0", b"3", b"6"],
        [b"1", b"4", b"7"],
        [b"2", b"5", b"8"],
    ]


def test_a_message_goes_to_one_client_of_each_channel(rig: Rig):
    first = [rig.subscribe(channel="a", rdy=10) for _ in range(2)]
    second = [rig.subscribe(channel="b", rdy=10) for _ in range(2)]
    rig.publish("t", *bodies(6))
    for crew in (first, second):
        assert sorted(m.body for client in crew for m in client.messages) == bodies(6)


def test_each_channel_has_its_own_answers(rig: Rig):
    first, second = rig.subscribe(channel="a", rdy=1), rig.subscribe(channel="b", rdy=1)
    rig.publish("t", b"x")
    rig.finish(first, first.messages[0])
    assert counts(rig.channel("a")) == (0, 0, 0)
    assert counts(rig.channel("b")) == (0, 1, 0)
    rig.requeue(second, second.messages[0])
    assert [m.attempts for m in second.messages] == [1, 2]
    assert [m.attempts for m in first.messages] == [1]


def test_a_client_that_does_not_read_gets_nothing_until_it_does(rig: Rig):
    slow, quick = rig.subscribe(rdy=10), rig.subscribe(rdy=10)
    slow.is_writable = False
    rig.publish("t", *bodies(6))
    assert len(quick.messages) == 6
    assert not slow.messages
    slow.is_writable = True
    slow.channel.delivery.offer(slow)
    rig.publish("t", *bodies(6))
    assert slow.messages


def test_requeued_and_new_messages_take_turns(rig: Rig):
    client = rig.subscribe(rdy=4)
    rig.publish("t", *bodies(4))
    rig.ready(client, 0)
    for message in client.take():
        rig.requeue(client, message)
    rig.publish("t", *bodies(4, start=10))
    order = []
    for _ in range(8):
        rig.ready(client, 1)
        (message,) = client.take()
        order.append("again" if message.attempts > 1 else "new")
        rig.ready(client, 0)
        rig.finish(client, message)
    assert order in (["again", "new"] * 4, ["new", "again"] * 4)


def test_redeliveries_come_in_the_order_in_which_they_came_back(rig: Rig):
    client = rig.subscribe(rdy=3)
    rig.publish("t", *bodies(3))
    rig.ready(client, 0)
    zero, one, two = client.take()
    for message in (two, zero, one):
        rig.requeue(client, message)
    rig.ready(client, 3)
    assert client.take_bodies() == [b"2", b"0", b"1"]


def test_a_sampling_client_gets_about_its_share_and_the_rest_is_gone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(private_random, "randrange", random.Random(1).randrange)
    client = rig.subscribe(rdy=2500, sample_rate=30)
    rig.publish("t", *bodies(2000))
    got = len(client.messages)
    assert 500 < got < 740
    assert client.in_flight == got
    assert counts(rig.channel()) == (0, got, 0)


def test_a_sampling_client_samples_redeliveries_too(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    draws = iter([0, 0, 0, 99, 0, 99])
    monkeypatch.setattr(private_random, "randrange", lambda limit: next(draws))
    client = rig.subscribe(rdy=10, sample_rate=50)
    rig.publish("t", *bodies(3))
    client.channel.delivery.requeue(client, client.messages[0].id, 0, rig.clock())
    client.channel.delivery.requeue(client, client.messages[1].id, 0, rig.clock())
    client.channel.delivery.requeue(client, client.messages[2].id, 0, rig.clock())
    client.take()
    rig.turn()
    assert client.take_bodies() == [b"1"]
    assert client.in_flight == 1
    assert counts(rig.channel()) == (0, 1, 0)


def test_a_sampling_client_sees_message_times_and_ids_like_any_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    draws = iter([99, 0, 99, 0])
    monkeypatch.setattr(private_random, "randrange", lambda limit: next(draws))
    client = rig.subscribe(rdy=10, sample_rate=50)
    rig.publish("t", *bodies(4))
    one, three = client.take()
    assert (one.body, three.body) == (b"1", b"3")
    assert three.id - one.id == 2
    assert not rig.finish(client, one, three)


def test_a_refused_client_is_not_among_the_consumers(make_rig: MakeRig):
    rig = make_rig(max_channel_consumers=2)
    first = rig.subscribe()
    rig.subscribe()
    with pytest.raises(SubscribeRefused, match="consumers for t:c exceeds limit of 2"):
        rig.subscribe()
    assert len(rig.channel().clients) == 2
    rig.subscribe(channel="other")
    rig.disconnect(first)
    rig.subscribe()


def test_an_exiting_channel_takes_no_client(rig: Rig):
    channel = rig.channel()
    channel.topic.delete_channel("c")
    with pytest.raises(Exiting):
        channel.add_client(FakeClient())


# FIN, REQ, TOUCH.


def test_a_finished_message_is_never_sent_again(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    assert rig.finish(client, client.messages[0]) == []
    assert counts(rig.channel()) == (0, 0, 0)
    assert client.finish_count == 1
    assert client.in_flight == 0
    rig.pass_time(1000)
    assert len(client.messages) == 1


def test_fin_of_a_span_of_ids_over_several_runs(rig: Rig):
    client = rig.subscribe(rdy=100)
    for number in range(10):
        rig.publish("t", b"%d" % number, b"%d" % number)
    first = client.messages[0].id
    assert client.channel.delivery.finish(client, [(first, first + 20)], rig.clock()) == []
    assert client.finish_count == 20
    assert counts(rig.channel()) == (0, 0, 0)


def test_fin_in_any_order(rig: Rig):
    client = rig.subscribe(rdy=200)
    rig.publish("t", *bodies(200))
    order = client.take()
    random.Random(3).shuffle(order)
    for number, message in enumerate(order):
        assert rig.finish(client, message) == []
        assert len(rig.channel().unfinished.in_flight) == 199 - number


def test_fin_twice_fails_the_second_time(rig: Rig):
    client = rig.subscribe(rdy=2)
    rig.publish("t", *bodies(2))
    message = client.messages[1]
    rig.finish(client, message)
    (error,) = rig.finish(client, message)
    assert error.code == "E_FIN_FAILED"
    assert error.description == f"FIN {message.id:016x} failed ID not in flight"
    assert not error.fatal
    assert client.finish_count == 1
    assert client.in_flight == 1


def test_fin_by_a_client_that_does_not_own_the_message_fails_and_changes_nothing(rig: Rig):
    owner, other = rig.subscribe(rdy=1), rig.subscribe()
    rig.publish("t", b"x")
    message = owner.messages[0]
    (error,) = rig.finish(other, message)
    assert str(error) == f"E_FIN_FAILED FIN {message.id:016x} failed client does not own message"
    assert counts(rig.channel()) == (0, 1, 0)
    assert other.finish_count == 0
    assert rig.finish(owner, message) == []


def test_fin_of_a_span_names_each_id_that_was_not_its_own(rig: Rig):
    client, other = rig.subscribe(rdy=2), rig.subscribe()
    rig.publish("t", *bodies(2))
    other.channel.set_ready(other, 1)
    rig.publish("t", b"2")
    first = client.messages[0].id
    errors = client.channel.delivery.finish(client, [(first, first + 4)], rig.clock())
    assert [error.description.split("failed ")[1] for error in errors] == [
        "client does not own message",
        "ID not in flight",
    ]
    assert client.finish_count == 2


def test_an_id_of_another_topic_is_not_in_flight(rig: Rig):
    client, other = rig.subscribe("t", rdy=1), rig.subscribe("u", rdy=1)
    rig.publish("t", b"x")
    rig.clock.advance(5)
    (error,) = rig.finish(other, client.messages[0])
    assert "ID not in flight" in str(error)


def test_req_0_sends_the_message_again_at_once_as_the_next_attempt(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    first = client.take()[0]
    rig.requeue(client, first)
    (second,) = client.take()
    assert second == first._replace(attempts=2)
    assert client.requeue_count == 1
    assert rig.channel().requeue_count == 1
    assert client.in_flight == 1
    assert rig.channel().message_count == 1


def test_req_0_may_go_to_another_client(rig: Rig):
    first = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    second = rig.subscribe(rdy=1)
    rig.ready(first, 0)
    rig.requeue(first, first.messages[0])
    assert [m.attempts for m in second.messages] == [2]
    assert first.in_flight == 0


def test_req_with_a_delay_waits_for_it(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    rig.requeue(client, client.take()[0], 1500)
    assert counts(rig.channel()) == (0, 0, 1)
    assert client.in_flight == 0
    rig.pass_time(1.499)
    assert client.take() == []
    rig.pass_time(0.001)
    assert [m.attempts for m in client.take()] == [2]
    assert rig.channel().requeue_count == 1
    assert rig.channel().timeout_count == 0


def test_req_of_a_foreign_or_unknown_message_fails(rig: Rig):
    owner, other = rig.subscribe(rdy=1), rig.subscribe()
    rig.publish("t", b"x")
    message = owner.messages[0]
    with pytest.raises(ClientError, match=f"E_REQ_FAILED REQ {message.id:016x} failed client does not own"):
        rig.requeue(other, message)
    with pytest.raises(ClientError, match="E_REQ_FAILED REQ 00000000000000ff failed ID not in flight"):
        rig.requeue(owner, 255)
    assert counts(rig.channel()) == (0, 1, 0)
    assert rig.channel().requeue_count == 0


def test_touch_gives_a_message_its_full_time_again(rig: Rig):
    client = rig.subscribe(rdy=1, msg_timeout_ms=10_000)
    rig.publish("t", b"x")
    rig.pass_time(9)
    rig.touch(client, client.take()[0])
    rig.pass_time(9)
    assert client.take() == []
    rig.pass_time(1)
    assert [m.attempts for m in client.take()] == [2]


def test_touch_of_one_message_leaves_the_others_of_its_delivery(rig: Rig):
    client = rig.subscribe(rdy=3, msg_timeout_ms=10_000)
    rig.publish("t", *bodies(3))
    rig.pass_time(9)
    rig.touch(client, client.take()[1])
    rig.pass_time(1)
    assert sorted(client.take_bodies()) == [b"0", b"2"]
    assert rig.channel().timeout_count == 2
    rig.pass_time(8)
    assert client.take() == []
    rig.pass_time(1)
    assert b"1" in client.take_bodies()


def test_touch_again_and_again_keeps_a_message_of_a_longer_delivery(rig: Rig):
    client = rig.subscribe(rdy=3, msg_timeout_ms=10_000)
    rig.publish("t", *bodies(3))
    one = client.take()[1]
    for _ in range(5):
        rig.clock.advance(9)
        rig.touch(client, one)
    rig.scan()
    assert b"1" not in client.take_bodies()
    assert rig.finish(client, one) == []


def test_touch_cannot_reach_beyond_the_longest_timeout_counted_from_the_delivery(make_rig: MakeRig):
    rig = make_rig(max_msg_timeout=15.0)
    client = rig.subscribe(rdy=1, msg_timeout_ms=10_000)
    rig.publish("t", b"x")
    rig.pass_time(9)
    rig.touch(client, client.take()[0])
    rig.pass_time(5.9)
    assert client.take() == []
    rig.pass_time(0.1)
    assert [m.attempts for m in client.take()] == [2]


@pytest.mark.parametrize("number", [1, 3])
def test_touch_after_the_limit_lets_the_message_time_out_at_the_next_scan(make_rig: MakeRig, number: int):
    rig = make_rig(max_msg_timeout=5.0)
    client = rig.subscribe(rdy=number, msg_timeout_ms=10_000)
    rig.publish("t", *bodies(number))
    rig.clock.advance(6)
    touched = client.take()[-1]
    rig.touch(client, touched)
    rig.scan()
    (again,) = client.take()
    assert (again.id, again.attempts) == (touched.id, 2)


def test_touch_does_not_count_as_a_delivery(rig: Rig):
    client = rig.subscribe(rdy=2)
    rig.publish("t", *bodies(2))
    message = client.take()[0]
    rig.touch(client, message)
    assert client.in_flight == 2
    assert client.message_count == 2
    assert len(rig.channel().unfinished.in_flight) == 2
    rig.requeue(client, message)
    assert [m.attempts for m in client.take()] == [2]


def test_touch_of_a_foreign_or_unknown_message_fails(rig: Rig):
    owner, other = rig.subscribe(rdy=1), rig.subscribe()
    rig.publish("t", b"x")
    with pytest.raises(ClientError, match="E_TOUCH_FAILED TOUCH .* failed client does not own message"):
        rig.touch(other, owner.messages[0])
    with pytest.raises(ClientError, match="E_TOUCH_FAILED TOUCH 0000000000000001 failed ID not in flight"):
        rig.touch(owner, 1)


# Time.


def test_an_unanswered_message_is_sent_again_after_the_clients_timeout(rig: Rig):
    client = rig.subscribe(rdy=2, msg_timeout_ms=2000)
    rig.publish("t", *bodies(2))
    first = client.take()
    rig.pass_time(1.999)
    assert client.take() == []
    rig.pass_time(0.001)
    assert client.take() == [m._replace(attempts=2) for m in first]
    assert rig.channel().timeout_count == 2
    assert rig.channel().requeue_count == 0
    assert rig.channel().message_count == 2
    assert client.in_flight == 2


def test_only_the_unanswered_messages_of_a_delivery_time_out(rig: Rig):
    client = rig.subscribe(rdy=5, msg_timeout_ms=2000)
    rig.publish("t", *bodies(5))
    messages = client.take()
    rig.finish(client, messages[0], messages[3])
    rig.pass_time(2)
    assert client.take_bodies() == [b"1", b"2", b"4"]


def test_each_client_has_its_own_timeout(rig: Rig):
    hasty = rig.subscribe(rdy=1, msg_timeout_ms=1000)
    rig.publish("t", b"0")
    patient = rig.subscribe(rdy=1, msg_timeout_ms=5000)
    rig.publish("t", b"1")
    rig.ready(hasty, 0)
    rig.ready(patient, 0)
    rig.pass_time(1)
    assert counts(rig.channel()) == (1, 1, 0)
    assert (hasty.in_flight, patient.in_flight) == (0, 1)
    rig.pass_time(4)
    assert counts(rig.channel()) == (2, 0, 0)


def test_fin_after_the_timeout_fails(rig: Rig):
    owner = rig.subscribe(rdy=1, msg_timeout_ms=1000)
    rig.publish("t", b"x")
    rig.ready(owner, 0)
    rig.pass_time(1)
    (error,) = rig.finish(owner, owner.messages[0])
    assert "ID not in flight" in str(error)
    other = rig.subscribe(rdy=1)
    (error,) = rig.finish(owner, owner.messages[0])
    assert "client does not own message" in str(error)
    assert rig.finish(other, other.messages[0]) == []


def test_timeouts_are_handled_in_slices(rig: Rig):
    client = rig.subscribe(rdy=2500, msg_timeout_ms=1000)
    rig.publish("t", *bodies(SLICE + 50))
    rig.ready(client, 0)
    rig.clock.advance(1)
    channel = rig.channel()
    assert channel.expire(rig.clock(), SLICE) == SLICE
    assert counts(channel) == (SLICE, 50, 0)
    assert client.in_flight == 50
    assert channel.expire(rig.clock(), SLICE) == 50
    assert channel.expire(rig.clock(), SLICE) == 0


def test_timeouts_and_due_messages_share_the_slice(rig: Rig):
    client = rig.subscribe(rdy=3, msg_timeout_ms=1000)
    rig.publish("t", *bodies(3))
    rig.ready(client, 0)
    for _ in range(3):
        rig.publish("t", b"later", defer_ms=1000)
    rig.clock.advance(1)
    channel = rig.channel()
    assert channel.expire(rig.clock(), 4) == 4
    assert counts(channel) == (4, 0, 2)
    assert channel.timeout_count == 3


def test_the_scan_learns_of_every_channel_at_once(rig: Rig):
    """Twenty channels with one worker, each with a message that times out: all of them do."""
    crew = [rig.subscribe(channel=f"c{number}", rdy=1, msg_timeout_ms=1000) for number in range(20)]
    rig.publish("t", b"x")
    rig.pass_time(1)
    assert [[m.attempts for m in client.messages] for client in crew] == [[1, 2]] * 20


def test_a_deferred_message_counts_neither_as_depth_nor_as_in_flight(rig: Rig):
    client = rig.subscribe()
    channel = rig.channel()
    rig.send("t", b"0", b"1")
    rig.send("t", b"later", defer_ms=5000)
    rig.turn()
    rig.publish("t", b"2")
    assert counts(channel) == (3, 0, 1)
    assert channel.message_count == 4
    rig.ready(client, 10)
    assert sorted(client.take_bodies()) == [b"0", b"1", b"2"]
    assert counts(channel) == (0, 3, 1)
    rig.pass_time(4.999)
    assert counts(channel) == (0, 3, 1)
    rig.ready(client, 3)
    rig.pass_time(0.001)
    assert counts(channel) == (1, 3, 0)
    rig.ready(client, 10)
    (later,) = client.take()
    assert (later.body, later.attempts) == (b"later", 1)
    assert counts(channel) == (0, 4, 0)
    assert channel.message_count == 4


def test_depth_is_right_while_the_cursor_has_still_to_pass_deferred_messages(rig: Rig):
    client = rig.subscribe()
    channel = rig.channel()
    for number in range(3):
        rig.publish("t", b"now %d" % number)
        rig.publish("t", b"later %d" % number, defer_ms=1000)
    assert counts(channel) == (3, 0, 3)
    rig.pass_time(1)
    assert counts(channel) == (6, 0, 0)
    rig.ready(client, 1)
    assert counts(channel) == (5, 1, 0)
    rig.ready(client, 100)
    assert counts(channel) == (0, 6, 0)
    assert len({m.id for m in client.messages}) == 6


def test_only_deferred_messages_leave_nothing_to_deliver(rig: Rig):
    client = rig.subscribe(rdy=10)
    for _ in range(3):
        rig.publish("t", b"later", defer_ms=1000)
    assert client.take() == []
    assert counts(rig.channel()) == (0, 0, 3)


def test_each_channel_has_its_own_deferred_messages(rig: Rig):
    first, second = rig.subscribe(channel="a", rdy=1), rig.subscribe(channel="b")
    rig.publish("t", b"later", defer_ms=1000)
    rig.pass_time(1)
    assert first.take_bodies() == [b"later"]
    assert counts(rig.channel("b")) == (1, 0, 0)
    rig.ready(second, 1)
    assert second.take_bodies() == [b"later"]


def test_a_due_message_waits_for_a_ready_client(rig: Rig):
    channel = rig.channel()
    rig.publish("t", b"later", defer_ms=10)
    rig.pass_time(1)
    assert counts(channel) == (1, 0, 0)
    assert rig.subscribe(rdy=1).take_bodies() == [b"later"]


def test_the_channel_says_when_it_has_something_to_do_next(rig: Rig):
    client = rig.subscribe(rdy=1, msg_timeout_ms=3000)
    channel = rig.channel()
    assert channel.next_event() is None
    rig.publish("t", b"x")
    now = rig.clock()
    assert channel.next_event() == now + 3 * SECOND
    rig.publish("t", b"later", defer_ms=500)
    assert channel.next_event() == now + 500 * MILLISECOND
    rig.finish(client, client.messages[0])
    assert channel.next_event() == now + 500 * MILLISECOND


# Attempts.


def test_attempts_grow_with_each_delivery_whatever_ended_the_last(rig: Rig):
    client = rig.subscribe(rdy=1, msg_timeout_ms=1000)
    rig.publish("t", b"x")
    rig.requeue(client, client.messages[-1])
    rig.pass_time(1)
    rig.requeue(client, client.messages[-1], 100)
    rig.pass_time(0.1)
    rig.disconnect(client)
    other = rig.subscribe(rdy=1)
    assert [m.attempts for m in client.messages + other.messages] == [1, 2, 3, 4, 5]


def test_attempts_wrap_after_65535(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    message = client.messages[0]
    rig.ready(client, 0)
    rig.requeue(client, message)
    rig.channel().unfinished._attempts[message.id - rig.topic().first_id] = 65_534
    rig.ready(client, 1)
    for _ in range(3):
        rig.requeue(client, message)
    assert [m.attempts for m in client.messages] == [1, 65_535, 0, 1, 2]


def test_a_message_beyond_65535_attempts_is_checkpointed_like_any_other(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    message = client.messages[0]
    rig.ready(client, 0)
    rig.requeue(client, message)
    rig.channel().unfinished._attempts[message.id - rig.topic().first_id] = 65_535
    rig.ready(client, 1)
    rig.maintain()
    rig.restart()
    assert [m.attempts for m in rig.subscribe(rdy=1).take()] == [1]


# Disconnects.


def test_the_messages_of_a_client_that_disconnects_are_requeued_at_once(rig: Rig):
    gone, stays = rig.subscribe(rdy=4), rig.subscribe()
    rig.publish("t", *bodies(4))
    rig.finish(gone, gone.messages[1])
    rig.requeue(gone, gone.messages[2], 5000)
    stays.channel.set_ready(stays, 10)
    rig.disconnect(gone)
    assert [(m.body, m.attempts) for m in stays.take()] == [(b"0", 2), (b"3", 2)]
    assert counts(rig.channel()) == (0, 2, 1)
    assert gone.in_flight == 0
    assert gone.channel is None
    assert not gone.runs
    assert rig.channel().timeout_count == 0
    assert rig.channel().requeue_count == 1


def test_the_messages_of_a_disconnected_client_do_not_time_out(rig: Rig):
    gone = rig.subscribe(rdy=1, msg_timeout_ms=1000)
    rig.publish("t", b"x")
    rig.disconnect(gone)
    stays = rig.subscribe(rdy=1, msg_timeout_ms=60_000)
    rig.pass_time(2)
    assert [m.attempts for m in stays.messages] == [2]
    assert rig.channel().timeout_count == 0


def test_a_disconnected_client_gets_no_more_messages(rig: Rig):
    gone = rig.subscribe(rdy=10)
    rig.disconnect(gone)
    rig.publish("t", b"x")
    assert not gone.messages
    assert counts(rig.channel()) == (1, 0, 0)


def test_removing_a_client_twice_is_safe(rig: Rig):
    client = rig.subscribe(rdy=1)
    channel = rig.channel()
    rig.disconnect(client)
    channel.remove_client(client)
    assert not channel.clients


@pytest.mark.parametrize("paused", [False, True])
def test_clients_that_come_and_go_leave_nothing_behind(rig: Rig, paused: bool):
    rig.subscribe(rdy=1)
    channel = rig.channel()
    if paused:
        channel.pause()
    for _ in range(100):
        rig.disconnect(rig.subscribe(rdy=1))
    assert sum(map(len, channel.delivery.lines)) < 10


# Pause, unpause, empty.


def test_a_paused_channel_sends_nothing_and_still_fills(rig: Rig):
    client = rig.subscribe(rdy=10)
    channel = rig.channel()
    channel.pause()
    rig.publish("t", *bodies(3))
    assert client.take() == []
    assert counts(channel) == (3, 0, 0)
    channel.unpause()
    rig.turn()
    assert client.take_bodies() == bodies(3)


def test_answers_timeouts_and_due_times_go_on_while_a_channel_is_paused(rig: Rig):
    client = rig.subscribe(rdy=4, msg_timeout_ms=1000)
    channel = rig.channel()
    rig.publish("t", *bodies(4))
    rig.publish("t", b"later", defer_ms=1000)
    channel.pause()
    rig.finish(client, client.messages[0])
    rig.requeue(client, client.messages[1])
    assert counts(channel) == (1, 2, 1)
    rig.pass_time(1)
    assert counts(channel) == (4, 0, 0)
    assert len(client.messages) == 4
    channel.unpause()
    rig.turn()
    assert len(client.messages) == 8


def test_pausing_twice_is_pausing_once(rig: Rig):
    channel = rig.channel()
    channel.pause()
    channel.pause()
    assert channel.paused
    channel.unpause()
    assert not channel.paused
    channel.unpause()
    assert not channel.paused


def test_emptying_a_channel_drops_what_waits_is_in_flight_and_is_deferred(rig: Rig):
    client = rig.subscribe(rdy=2)
    channel = rig.channel()
    rig.publish("t", *bodies(5))
    rig.publish("t", b"later", defer_ms=1000)
    held = client.take()
    rig.requeue(client, held[0], 1000)
    held += client.take()
    assert counts(channel) == (2, 2, 2)
    channel.empty()
    rig.turn()
    assert counts(channel) == (0, 0, 0)
    assert client.in_flight == 0
    (error,) = rig.finish(client, held[1])
    assert "ID not in flight" in str(error)
    rig.pass_time(100)
    assert client.take() == []
    assert channel.message_count == 6


def test_clients_of_an_emptied_channel_receive_again_at_once(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"0")
    rig.channel().empty()
    rig.publish("t", b"1")
    assert client.take_bodies() == [b"0", b"1"]
    assert counts(rig.channel()) == (0, 1, 0)


def test_emptying_one_channel_leaves_the_other(rig: Rig):
    rig.channel("a")
    rig.channel("b")
    rig.publish("t", *bodies(3))
    rig.channel("a").empty()
    assert rig.channel("a").depth == 0
    assert rig.channel("b").depth == 3


def test_a_client_of_an_emptied_channel_can_disconnect(rig: Rig):
    client = rig.subscribe(rdy=3)
    rig.publish("t", *bodies(3))
    rig.channel().empty()
    rig.disconnect(client)
    assert counts(rig.channel()) == (0, 0, 0)


def test_emptying_a_channel_frees_the_disk_at_the_next_maintenance(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    channel = rig.channel()
    for number in range(40):
        rig.publish("t", *bodies(1, start=number, size=200))
    rig.maintain()
    rig.maintain()
    assert len(rig.names("*.log")) > 3
    channel.empty()
    rig.maintain()
    assert len(rig.names("*.log")) == 1


def test_deleting_a_channel_closes_its_clients_and_its_files(rig: Rig):
    client = rig.subscribe(rdy=1)
    other = rig.subscribe(channel="other", rdy=1)
    rig.publish("t", b"x")
    rig.maintain()
    assert "c.channel" in rig.names("*")
    rig.topic().delete_channel("c")
    assert client.close_calls == 1
    assert client.channel is None
    assert other.close_calls == 0
    assert [*rig.topic().channels] == ["other"]
    assert rig.names("*.channel") == ["other.channel"]
    rig.pass_time(100)
    assert len(client.messages) == 1


def test_deleting_a_missing_channel_returns_false(rig: Rig):
    with pytest.raises(KeyError):
        rig.topic().delete_channel("nobody")


def test_a_channel_created_again_starts_empty(rig: Rig):
    rig.channel("other")
    rig.channel()
    rig.publish("t", b"x")
    rig.topic().delete_channel("c")
    assert counts(rig.channel()) == (0, 0, 0)
    assert rig.channel().message_count == 0


# Latency.


def test_latency_is_the_time_from_publish_to_fin(make_rig: MakeRig):
    rig = make_rig(e2e_processing_latency_percentile=(1.0, 0.5))
    client = rig.subscribe(rdy=3)
    rig.publish("t", *bodies(3))
    for message, seconds in zip(client.take(), (1, 1, 8), strict=True):
        rig.clock.advance(seconds)
        rig.finish(client, message)
    shown = broker_stats(rig.broker)["topics"][0]
    for part in (shown, shown["channels"][0]):
        latency = part["e2e_processing_latency"]
        assert latency["count"] == 3
        assert [p["quantile"] for p in latency["percentiles"]] == [1.0, 0.5]
        assert [p["value"] for p in latency["percentiles"]] == pytest.approx([10e9, 2e9], rel=0.011)


def test_latency_of_messages_read_back_from_disk_is_counted_from_each_ones_publishing(make_rig: MakeRig):
    rig = make_rig(e2e_processing_latency_percentile=(1.0, 0.3))
    rig.channel()
    rig.publish("t", b"0")
    rig.clock.advance(10)
    rig.publish("t", b"1")
    rig.restart()
    client = rig.subscribe(rdy=2)
    first = client.messages[0].id
    rig.clock.advance(5)
    client.channel.delivery.finish(client, [(first, first + 2)], rig.clock())
    values = broker_stats(rig.broker)["topics"][0]["channels"][0]["e2e_processing_latency"]["percentiles"]
    assert [p["value"] for p in values] == pytest.approx([15e9, 5e9], rel=0.011)


def test_a_channel_is_named_by_its_topic_and_itself(rig: Rig):
    assert str(rig.channel("c", "t")) == "t:c"
    assert str(rig.topic("t")) == "t"


# Distance of clients.


def near_and_far(make_rig: MakeRig, **more: object) -> tuple[Rig, FakeClient, FakeClient, FakeClient]:
    rig = make_rig(topology_zone="z", topology_region="r", **more)
    places = (("z", "r"), ("other", "r"), ("other", "other"))
    near, middle, far = (
        rig.subscribe(rdy=10, topology_zone=zone, topology_region=region) for zone, region in places
    )
    return rig, near, middle, far


def test_with_the_experiment_nearer_clients_are_served_first(make_rig: MakeRig):
    rig, near, middle, far = near_and_far(make_rig, enable_experiment=("topology-aware-consumption",))
    rig.publish("t", *(b"%d" % number for number in range(25)))
    assert [len(client.messages) for client in (near, middle, far)] == [10, 10, 5]
    (stats,) = broker_stats(rig.broker)["topics"][0]["channels"]
    counts = [stats[f"{name}_msg_count"] for name in ("zone_local", "region_local", "global")]
    assert counts == [10, 10, 5]


def test_without_the_experiment_distance_does_not_matter(make_rig: MakeRig):
    rig, *clients = near_and_far(make_rig)
    rig.publish("t", *(b"%d" % number for number in range(24)))
    assert [len(client.messages) for client in clients] == [8, 8, 8]
    assert not [key for key in channel_stats(rig.channel()) if key.endswith("_msg_count")]


# Runs that grow over several batches.


def pile_up(rig: Rig, batches: int = 3, size: int = 4) -> list[bytes]:
    """Publish separate batches to a channel without clients."""
    rig.channel()
    made = []
    for number in range(batches):
        batch = [b"%d.%d" % (number, index) for index in range(size)]
        rig.publish("t", *batch)
        made += batch
    return made


def test_messages_of_several_batches_sent_in_one_pump_are_one_run(rig: Rig):
    expected = pile_up(rig)
    client = rig.subscribe(rdy=100)
    assert client.take_bodies() == expected
    assert len(rig.channel().unfinished.in_flight.runs) == 1
    assert client.in_flight == len(expected)
    assert not rig.finish(client, *client.messages)
    assert counts(rig.channel()) == (0, 0, 0)
    assert not rig.channel().unfinished.in_flight.runs


def test_two_clients_have_runs_of_their_own(rig: Rig):
    expected = pile_up(rig)
    first, second = rig.subscribe(), rig.subscribe()
    for client in (first, second):
        rig.channel().set_ready(client, 100)
    rig.turn()
    assert sorted(first.take_bodies() + second.take_bodies()) == expected
    for client in (first, second):
        assert sum(run.end - run.first for run in client.runs) == client.in_flight > 0
        assert not rig.finish(client, *client.messages)
    assert counts(rig.channel()) == (0, 0, 0)


def test_a_message_in_the_middle_of_a_long_run_can_be_touched_requeued_and_time_out(rig: Rig):
    pile_up(rig)
    client = rig.subscribe(rdy=100)
    messages = client.take()
    rig.pass_time(30)
    rig.touch(client, messages[6])
    rig.requeue(client, messages[9])
    assert [message.body for message in client.take()] == [messages[9].body]
    rig.pass_time(31)
    again = client.take()
    touched = {messages[6].body, messages[9].body}
    assert {message.body for message in again} == {message.body for message in messages} - touched
    assert {message.attempts for message in again} == {2}


def test_the_messages_of_a_client_that_disconnects_during_a_send_go_to_the_next(rig: Rig):
    expected = pile_up(rig)
    client = FakeClient("going")
    rig.broker.clients.add(client)
    rig.broker.subscribe(client, "t", "c")
    keep = client.send

    def send(data: bytes | memoryview) -> None:
        keep(data)
        if len(client.sends) == 2:
            rig.channel().remove_client(client)

    client.send = send
    rig.ready(client, 100)
    assert rig.subscribe(rdy=100).take_bodies() == expected
    assert counts(rig.channel()) == (0, len(expected), 0)


def test_with_latencies_each_message_keeps_its_publish_time(make_rig: MakeRig):
    rig = make_rig(e2e_processing_latency_percentile=(1.0,))
    rig.channel()
    for _ in range(3):
        rig.publish("t", b"x", b"y")
        rig.clock.advance(1)
    client = rig.subscribe(rdy=100)
    messages = client.take()
    assert len(rig.channel().unfinished.in_flight.runs) == 3
    rig.touch(client, messages[3])
    rig.finish(client, *messages)
    stats = channel_stats(rig.channel())
    (percentile,) = stats["e2e_processing_latency"]["percentiles"]
    assert percentile["value"] == pytest.approx(3 * SECOND, rel=0.05)


# A send that ends the connection: its client leaves the channel in the middle of a round.


class FailingClient(FakeClient):
    """A client whose connection ends with its first message, as after a bad TLS record."""

    def _keep(self, data: bytes | memoryview) -> None:
        assert self.channel is not None, "a client that has left gets nothing"
        self.close_calls += 1
        self.channel.remove_client(self)


@pytest.mark.parametrize(
    ("channel", "came_back", "sample_rate"),
    [("c", False, 0), ("c", True, 0), ("c", False, 100), ("c#ephemeral", False, 0)],
    ids=["new messages", "messages that came back", "sampled", "ephemeral"],
)
@pytest.mark.parametrize(
    ("number", "failing"),
    [(n, {*who}) for n in range(1, 4) for k in (1, 2) for who in combinations(range(n), k)],
)
def test_a_send_that_ends_its_connection_does_not_affect_other_clients(
    rig: Rig, number: int, failing: set[int], came_back: bool, sample_rate: int, channel: str
) -> None:
    rig.channel(channel)
    if came_back:
        first = rig.subscribe(channel=channel, rdy=20)
    rig.publish("t", *bodies(20))
    clients = []
    for position in range(number):
        made = FailingClient if position in failing else FakeClient
        client = made(f"client-{position}", sample_rate=sample_rate)
        rig.broker.subscribe(client, "t", channel)
        clients.append(client)
    if came_back:
        rig.disconnect(first)
    for client in clients:
        # All clients are in line before the turn ends.
        rig.channel(channel).set_ready(client, 2)
    rig.turn()
    healthy = [client for position, client in enumerate(clients) if position not in failing]
    is_kept = channel == "c" or bool(healthy)
    if not healthy:
        healthy = [rig.subscribe(channel=channel, rdy=2)]
    seen: list[bytes] = []
    for _ in range(20):
        for client in healthy:
            messages = client.take()
            seen += [message.body for message in messages]
            rig.finish(client, *messages)
    assert sorted(seen) == (sorted(bodies(20)) if is_kept else [])
    assert [client.close_calls for client in clients] == [position in failing for position in range(number)]
    # All clients are still in line.
    rig.publish("t", *bodies(2 * len(healthy)))
    assert [len(client.take()) for client in healthy] == [2] * len(healthy)


@pytest.mark.parametrize("paused", [True, False])
def test_a_channel_that_cannot_be_saved_is_paused_as_before(rig: Rig, paused: bool) -> None:
    channel = rig.channel()
    if not paused:
        channel.pause()
    rig.files.fail("replace", ".channel")
    with pytest.raises(OSError, match="No space"):
        channel.pause() if paused else channel.unpause()
    assert channel.paused is not paused
    rig.files.heal()
    channel.pause() if paused else channel.unpause()
    assert channel.paused is paused
