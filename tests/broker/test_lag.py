"""The age of the oldest waiting message, and the time to drain a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsparq.broker.stats import broker_stats
from tests.broker.rig import Later, Rig, bodies

MakeRig = Callable[..., Rig]


def lag(rig: Rig) -> tuple[float | None, float | None, float | None]:
    """Age, drain rate and drain time, as /stats shows them."""
    (topic,) = broker_stats(rig.broker, "t", "c")["topics"]
    channel: dict[str, Any] = topic["channels"][0]
    return tuple(channel[key] for key in ("oldest_message_age_s", "drain_rate", "drain_time_s"))  # type: ignore[return-value]


def age(rig: Rig) -> float | None:
    return lag(rig)[0]


def test_the_age_is_that_of_the_oldest_message_that_can_be_sent(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.channel()
    assert age(rig) == 0
    rig.publish("t", b"first")
    rig.pass_time(5)
    rig.publish("t", b"second")
    assert age(rig) == 5
    client = rig.subscribe(rdy=1)
    (first,) = client.take()
    # In flight is not waiting.
    assert age(rig) == 0
    rig.pass_time(2)
    assert age(rig) == 2
    # Requeued, it waits again, with the time of its publishing.
    rig.ready(client, 0)
    rig.requeue(client, first, 0)
    assert age(rig) == 7


def test_a_deferred_message_waits_from_the_time_it_is_due(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.channel()
    rig.publish("t", b"later", defer_ms=60_000)
    rig.publish("t", b"now")
    rig.pass_time(10)
    assert age(rig) == 10
    client = rig.subscribe(rdy=1)
    rig.finish(client, *client.take())
    rig.ready(client, 0)
    assert age(rig) == 0
    rig.pass_time(50)
    assert age(rig) == 60


def test_a_clock_that_is_set_back_gives_no_negative_age(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.channel()
    rig.publish("t", b"x")
    rig.clock.set_wall(-3600)
    assert age(rig) == 0
    rig.clock.set_wall(7200)
    assert age(rig) == 3600


def test_after_a_restart_the_age_is_unknown_until_a_thread_has_read_it(make_rig: MakeRig) -> None:
    rig = make_rig(background=Later())
    rig.channel()
    rig.publish("t", *bodies(3))
    rig.background.run_all()
    rig.restart()
    rig.background.run_all()
    rig.pass_time(30)
    rig.background.run_all()
    rig.files.calls.clear()
    assert age(rig) is None
    assert rig.files.calls["read"] == rig.files.calls["read_cached"] == 0
    assert age(rig) is None
    assert rig.background.run() == 1
    rig.files.calls.clear()
    assert age(rig) == 30
    # It is read once.
    rig.pass_time(1)
    assert age(rig) == 31
    assert not rig.background.jobs
    assert rig.files.calls["open_read"] == rig.files.calls["read"] == 0


def test_one_file_is_read_at_a_time_however_many_channels_ask(make_rig: MakeRig) -> None:
    rig = make_rig(background=Later())
    for name in ("a", "b", "c"):
        rig.channel(name)
    rig.publish("t", b"x")
    rig.background.run_all()
    rig.restart()
    rig.background.run_all()
    broker_stats(rig.broker)
    for left in (2, 1, 0):
        assert rig.background.run() == 1
        found = [
            one["oldest_message_age_s"] for one in broker_stats(rig.broker, "t")["topics"][0]["channels"]
        ]
        assert found.count(None) == left


def test_the_drain_time_follows_from_the_rate_of_minutes(make_rig: MakeRig) -> None:
    rig = make_rig(mem_queue_size=10_000)
    rig.channel()
    rig.publish("t", *bodies(3000))
    # At first it is unknown, then the channel does not drain.
    assert lag(rig)[1:] == (None, None)
    rig.pass_time(10)
    assert lag(rig)[1:] == (0, None)
    topic = rig.broker.topics["t"]
    start = topic.channels["c"].cursor.position
    for second in range(600):
        topic.channels["c"].commit(start + 3 * (second + 1))
        rig.pass_time(1)
        rig.maintain()
    _, rate, drain_s = lag(rig)
    assert (rate, drain_s) == (3, 400)
    topic.channels["c"].commit(topic.visible_end)
    assert lag(rig)[2] == 0
    rig.publish("t", *bodies(3000))
    rig.pass_time(1)
    assert lag(rig)[2] is None and lag(rig)[1] < 0  # type: ignore[operator]


def test_the_drain_rate_forgets_what_was_minutes_ago(make_rig: MakeRig) -> None:
    rig = make_rig(mem_queue_size=10_000)
    channel = rig.channel()
    rig.publish("t", *bodies(3000))
    start = channel.cursor.position
    finished = 0
    for rate, seconds in ((6, 300), (2, 300)):
        for _ in range(seconds):
            finished += rate
            channel.commit(start + finished)
            rig.pass_time(1)
            rig.maintain()
            assert finished < 72 or lag(rig)[1] is not None, "once it is known, it stays known"
    assert lag(rig)[1:] == (2, 300)
