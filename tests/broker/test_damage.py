"""Damage to the files of a stopped broker: what is whole is delivered, what is not is logged and counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.broker.rig import Rig, bodies, counts

MakeRig = Callable[..., Rig]


def zero(rig: Rig, body: bytes, topic: str = "t") -> None:
    """Overwrite one message's body with zeros, wherever in the log it is."""
    for path in sorted(rig.topic_directory(topic).glob("*.log")):
        content = path.read_bytes()
        if body in content:
            path.write_bytes(content.replace(body, bytes(len(body))))
            return
    raise AssertionError(f"{body!r} is in no segment")


# damage among deferred messages


@pytest.mark.parametrize("consumers", [1, 2])
def test_damage_to_deferred_messages_at_the_end_of_the_log_does_not_stop_delivery(rig: Rig, consumers: int):
    rig.channel()
    rig.publish("t", b"now")
    rig.publish("t", b"later 1", defer_ms=60_000)
    rig.publish("t", b"lost")
    rig.publish("t", b"later 2", defer_ms=60_000)
    rig.close()
    for body in (b"later 1", b"lost", b"later 2"):
        zero(rig, body)
    rig.start()
    clients = [rig.subscribe(rdy=10) for _ in range(consumers)]
    assert [body for client in clients for body in client.take_bodies()] == [b"now"]
    assert counts(rig.channel()) == (0, 1, 2)
    rig.publish("t", b"afterwards")
    assert [body for client in clients for body in client.take_bodies()] == [b"afterwards"]
    rig.pass_time(60)
    assert (rig.channel().dropped_count, rig.topic().log.corrupt_messages) == (2, 3)


@pytest.mark.parametrize("damaged", [1, 3])
@pytest.mark.parametrize("rdy", [1, 100])
def test_damaged_deferred_messages_cost_no_others(rig: Rig, rdy: int, damaged: int):
    rig.channel()
    rig.publish("t", b"first")
    for number in range(damaged):
        rig.publish("t", b"later %d" % number, defer_ms=3_600_000)
    rig.publish("t", *bodies(10))
    rig.close()
    for number in range(damaged):
        zero(rig, b"later %d" % number)
    rig.start()
    client = rig.subscribe(rdy=rdy, msg_timeout_ms=600_000)
    got = client.take()
    while rig.channel().in_flight:
        rig.finish(client, *got[-rdy:])
        got += client.take()
    assert [message.body for message in got] == [b"first", *bodies(10)]
    assert counts(rig.channel()) == (0, 0, damaged)


def test_damage_that_one_channel_meets_is_known_to_the_others(rig: Rig):
    rig.channel("slow")
    rig.channel("quick")
    rig.publish("t", b"first")
    rig.publish("t", b"later", defer_ms=3_600_000)
    rig.publish("t", b"last")
    rig.close()
    zero(rig, b"later")
    rig.start()
    for name in ("quick", "slow"):
        client = rig.subscribe("t", name, rdy=1)
        (first,) = client.take()
        rig.finish(client, first)
        assert client.take_bodies() == [b"last"]
        assert counts(rig.channel(name)) == (0, 1, 1)
