"""Cold reads run in a thread, and everything else continues."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import pytest

from tests.broker.rig import Later, Rig, bodies, counts

MakeRig = Callable[..., Rig]


@pytest.fixture
def cold(make_rig: MakeRig) -> Rig:
    """Ten messages in the channel. Memory has the last one; the others need the disk."""
    rig = make_rig(mem_queue_size=1, background=Later())
    rig.channel()
    for number in range(10):
        rig.publish("t", b"%d" % number)
    rig.files.is_cold = True
    return rig


def test_a_cold_read_is_done_in_the_background_and_delivery_goes_on_after_it(cold: Rig):
    client = cold.subscribe(rdy=100)
    assert client.take() == []
    assert len(cold.background.jobs) == 1
    cold.background.run()
    cold.turn()
    assert client.take_bodies()[:9] == bodies(9)
    while cold.background.run():
        cold.turn()
    assert len(client.messages) == 10


def test_the_disk_is_asked_once_however_often_delivery_is_tried(cold: Rig):
    client = cold.subscribe(rdy=1)
    cold.ready(client, 2)
    cold.subscribe(rdy=5)
    cold.turn()
    assert len(cold.background.jobs) == 1
    assert counts(cold.channel()) == (10, 0, 0)


def test_other_channels_are_served_while_one_waits_for_the_disk(cold: Rig):
    cold.subscribe(rdy=1)
    other = cold.subscribe("u", rdy=1)
    cold.publish("u", b"x")
    assert other.take_bodies() == [b"x"]


def test_publishing_goes_on_while_a_channel_waits_for_the_disk(cold: Rig):
    client = cold.subscribe(rdy=100)
    assert cold.publish("t", b"10").is_ok
    while cold.background.run():
        cold.turn()
    assert client.take_bodies() == bodies(11)


def test_reading_goes_on_through_many_cold_segments(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=1, max_bytes_per_file=500, background=Later())
    rig.channel()
    for number in range(30):
        rig.publish("t", *bodies(1, start=number, size=100))
    rig.files.is_cold = True
    client = rig.subscribe(rdy=100)
    rounds = 0
    while rig.background.run():
        rig.turn()
        rounds += 1
    assert [body.rstrip(b".") for body in client.take_bodies()] == bodies(30)
    assert rounds > 3


def test_cold_deferred_messages_are_stepped_over(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=1, background=Later())
    rig.channel()
    for number in range(5):
        rig.publish("t", b"later", defer_ms=60_000)
        rig.publish("t", b"%d" % number)
    rig.files.is_cold = True
    client = rig.subscribe(rdy=100)
    while rig.background.run():
        rig.turn()
    assert client.take_bodies() == bodies(5)
    assert counts(rig.channel()) == (0, 5, 5)


def test_a_cold_redelivery_is_sent_after_the_read(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=1, background=Later())
    rig.channel()
    for number in range(10):
        rig.publish("t", b"%d" % number)
    client = rig.subscribe(rdy=100)
    rig.background.run_all()
    held = client.take()
    assert len(held) == 10
    rig.ready(client, 0)
    for message in held:
        rig.requeue(client, message)
    rig.background.run_all()
    # Nothing that was read back stays in memory.
    log = rig.topic().log
    for batch in [*log._batches]:
        if batch.base < log.memory_start:
            log.forget(batch)
    rig.files.is_cold = True
    rig.ready(client, 100)
    assert client.take() == []
    while rig.background.run():
        rig.turn()
    again = client.take()
    assert sorted(m.body for m in again) == sorted(bodies(10))
    assert {m.attempts for m in again} == {2}
    assert counts(rig.channel()) == (0, 10, 0)


def test_messages_in_memory_are_sent_before_a_cold_redelivery(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=1, background=Later())
    client = rig.subscribe(rdy=2)
    rig.publish("t", b"old")
    rig.publish("t", b"new")
    old, new = client.take()
    rig.ready(client, 0)
    rig.requeue(client, new)
    rig.requeue(client, old)
    rig.files.is_cold = True
    rig.ready(client, 10)
    assert client.take_bodies() == [b"new"]
    while rig.background.run():
        rig.turn()
    assert client.take_bodies() == [b"old"]
    assert counts(rig.channel()) == (0, 2, 0)


@pytest.mark.parametrize("call", ["open_read", "read"])
def test_an_error_of_the_background_read_is_reported_by_the_read_after_it(cold: Rig, call: str):
    client = cold.subscribe(rdy=100)
    cold.files.fail(call, error=errno.EIO)
    cold.background.run()
    cold.files.heal()
    cold.turn()
    while cold.background.run():
        cold.turn()
    assert client.take_bodies() == bodies(10)


def test_an_error_that_goes_on_is_not_said_to_have_ended(make_rig: MakeRig, caplog: pytest.LogCaptureFixture):
    rig = make_rig(mem_queue_size=1)
    rig.channel()
    caplog.set_level(logging.INFO)
    for _ in range(5):
        rig.publish("t", b".")
    for call in ("read", "read_cached"):
        rig.files.fail(call, ".log", errno.EIO)
    client = rig.subscribe(rdy=10)

    def said() -> list[str]:
        rig.maintain()
        rig.turn()
        return [text for text in caplog.messages if "cannot read the log" in text]

    for _ in range(3):
        assert said() == ["t:c: cannot read the log: Input/output error"]
    rig.files.heal()
    said()
    assert said()[1:] == ["recovered from: t:c: cannot read the log: Input/output error"]
    assert len(client.take()) == 5


def test_a_channel_deleted_while_it_waits_for_the_disk_is_gone(cold: Rig):
    client = cold.subscribe(rdy=100)
    cold.topic().delete_channel("c")
    cold.background.run_all()
    cold.turn()
    assert client.take() == []


def test_a_channel_emptied_while_it_waits_for_the_disk_is_empty(cold: Rig):
    client = cold.subscribe(rdy=100)
    cold.channel().empty()
    cold.background.run_all()
    cold.turn()
    assert client.take() == []
    cold.publish("t", b"new")
    assert client.take_bodies() == [b"new"]
