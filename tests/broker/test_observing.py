"""A client that only looks takes nothing from a topic without a channel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.broker.rig import FakeClient, Rig, bodies

MakeRig = Callable[..., Rig]


def look(rig: Rig, channel: str = "look#ephemeral") -> FakeClient:
    return rig.subscribe(channel=channel, rdy=100, observe=True)


def drain(rig: Rig, client: FakeClient) -> list[bytes]:
    messages = client.take()
    rig.finish(client, *messages)
    return [message.body for message in messages]


@pytest.mark.parametrize("end", ["leave", "stay", "crash", "restart"])
def test_the_first_other_channel_gets_what_an_observer_has_seen(make_rig: MakeRig, end: str) -> None:
    rig = make_rig(max_bytes_per_file=200)
    rig.publish("t", *bodies(10))
    observers = [look(rig), look(rig, "look2#ephemeral")]
    for observer in observers:
        assert drain(rig, observer) == bodies(10)
    rig.publish("t", *bodies(5, 10))
    for observer in observers:
        assert drain(rig, observer) == bodies(5, 10)
    rig.maintain()
    assert rig.topic().depth == 15
    if end == "leave":
        for observer in observers:
            rig.disconnect(observer)
        rig.maintain()
        assert (rig.topic().depth, rig.topic().channels) == (15, {})
    elif end != "stay":
        getattr(rig, end)()
        assert rig.topic().depth == 15
    assert drain(rig, rig.subscribe(rdy=100)) == bodies(15)
    assert rig.topic().holds == {} and rig.topic().depth == 0


def test_deferred_messages_are_kept_too(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.publish("t", b"later", defer_ms=10_000)
    observer = look(rig)
    rig.publish("t", b"later still", defer_ms=20_000)
    rig.clock.advance(15)
    rig.scan()
    assert drain(rig, observer) == [b"later"]
    rig.disconnect(observer)
    client = rig.subscribe(rdy=100)
    rig.clock.advance(15)
    rig.scan()
    assert drain(rig, client) == [b"later", b"later still"]


def test_beside_another_channel_an_observer_sees_only_new_messages(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.publish("t", b"one")
    client = rig.subscribe(rdy=100)
    observer = look(rig)
    rig.publish("t", b"two")
    assert (drain(rig, client), drain(rig, observer)) == ([b"one", b"two"], [b"two"])
    # From here on, nothing but the observer reads the topic.
    rig.topic().delete_channel("c")
    rig.publish("t", b"three")
    assert drain(rig, observer) == [b"three"]
    assert drain(rig, rig.subscribe(rdy=100)) == [b"three"]


def test_an_emptied_topic_keeps_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.publish("t", b"one")
    observer = look(rig)
    rig.topic().empty()
    rig.disconnect(observer)
    assert rig.topic().depth == 0


def test_a_channel_that_the_disk_refuses_takes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.publish("t", b"one")
    look(rig)
    rig.files.fail("replace")
    rig.files.fail("open")
    with pytest.raises(OSError):
        rig.subscribe()
    rig.files.heal()
    assert rig.topic().depth == 1
    assert drain(rig, rig.subscribe(rdy=1)) == [b"one"]


def test_an_ephemeral_topic_goes_with_its_observer(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.publish("t#ephemeral", b"one")
    observer = rig.subscribe("t#ephemeral", "c#ephemeral", rdy=1, observe=True)
    assert drain(rig, observer) == [b"one"]
    rig.disconnect(observer)
    assert "t#ephemeral" not in rig.broker.topics
