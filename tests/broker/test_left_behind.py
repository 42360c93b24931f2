"""Topics, channels and clients that come and go leave no objects behind."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from nsparq.broker.channel import Channel
from nsparq.broker.client import Client
from nsparq.broker.runs import Run
from nsparq.broker.topic import Topic
from nsparq.storage.batch import Batch
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.memory_log import MemoryLog
from nsparq.storage.segment import Segment
from tests.broker.rig import Later, Rig

MakeRig = Callable[..., Rig]
COUNTED = (Batch, Channel, Client, DiskLog, MemoryLog, Run, Segment, Topic)


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, COUNTED))


def entries(owner: object) -> dict[str, int]:
    """The number of entries in each collection of an object."""
    collections = {name: value for name, value in vars(owner).items() if isinstance(value, dict | list | set)}
    return {name: len(value) for name, value in collections.items()}


def come_and_go(rig: Rig, number: int) -> None:
    """Create a topic with messages in flight, requeued and deferred, and delete it."""
    for topic in (f"t{number}", f"t{number}#ephemeral"):
        rig.channel("idle", topic)
        client = rig.subscribe(topic, f"c{number}", rdy=3)
        rig.publish(topic, b"finished", b"requeued", b"in flight", b"waiting")
        rig.publish(topic, b"in an hour", defer_ms=3_600_000)
        finished, requeued, touched = client.take()
        rig.finish(client, finished)
        rig.requeue(client, requeued, 60_000)
        rig.touch(client, touched)
        rig.maintain()
        rig.topic(topic).pause()
        rig.channel("idle", topic).pause()
        if number % 2:
            rig.topic(topic).delete_channel(f"c{number}")
        if topic in rig.broker.topics:
            rig.broker.delete_topic(topic)
        rig.disconnect(client)
    rig.pass_time(1)
    rig.maintain()


@pytest.mark.parametrize("background", [None, Later], ids=["at once", "in threads that are late"])
def test_deleted_topics_and_channels_leave_nothing_behind(
    make_rig: MakeRig, background: Callable[[], Later] | None
):
    rig = make_rig(background=background and background())

    def use(rounds: range) -> tuple[Counter[str], dict[str, int]]:
        for number in rounds:
            come_and_go(rig, number)
            if rig.background is not None:
                rig.background.run_all()
        rig.pass_time(90)
        rig.maintain()
        return objects(), {**entries(rig.broker), **entries(rig.files)}

    use(range(30))
    first, first_entries = use(range(30, 60))
    later, later_entries = use(range(60, 180))
    # The heap of the queue scan may hold some deleted ones. Their number does not grow with use.
    assert {name: n for name, n in later.items() if n > first[name] + 100} == {}
    assert {name: n for name, n in later_entries.items() if n > first_entries[name]} == {}


def test_a_connected_publisher_is_forgotten_for_deleted_topics(rig: Rig):
    client = rig.subscribe("other")
    rig.topic("t")
    client.publish_counts.update({"t": 5, "other": 2})
    rig.broker.delete_topic("t")
    assert client.publish_counts == {"other": 2}


def test_the_queue_scan_has_one_entry_for_a_channel_however_often_it_is_watched(rig: Rig):
    client = rig.subscribe(rdy=2)
    rig.publish("t", b"in an hour", defer_ms=3_600_000)
    rig.publish("t", b"now")
    for _ in range(1000):
        rig.requeue(client, client.take()[0], 100)
        rig.pass_time(0.1)
    assert len(rig.broker.scan._heap) < 200
    rig.pass_time(3600)
    assert b"in an hour" in client.take_bodies(), "the entry that counts is among those that are kept"
