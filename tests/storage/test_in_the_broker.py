"""Storage faults in the broker: an error of one topic does not affect others."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsparq.packed import PackedBodies
from nsparq.storage.log import Durability
from tests.broker.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, mem_queue_size=1, max_bytes_per_file=2_000)
    yield made
    made.files.heal()
    made.drop()


def test_emptied_messages_do_not_come_back_from_disk(rig: Rig) -> None:
    """Small batches are read as one, and the emptied one may be in the middle."""
    rig.subscribe()
    rig.publish("t", b"kept")
    rig.topic().pause()
    rig.publish("t", b"emptied")
    rig.topic().empty()
    rig.topic().unpause()
    rig.publish("t", b"kept too")
    rig.restart()
    client = rig.subscribe(rdy=10)
    assert client.take_bodies() == [b"kept", b"kept too"]
    assert rig.channel().depth == 0


def test_a_read_error_of_one_topic_does_not_stop_another(rig: Rig) -> None:
    client = rig.subscribe("bad", "c")
    other = rig.subscribe("good", "c", rdy=10)
    for number in range(5):
        rig.publish("bad", b"%d" % number)
    for call in ("read", "read_cached"):
        rig.files.fail(call, ".log", errno.EIO)
    rig.broker.topics["bad"].channels["c"].set_ready(client, 10)
    rig.send("good", b"delivered")
    rig.turn()
    assert other.take_bodies() == [b"delivered"]
    rig.files.heal()
    rig.publish("bad", b"5")
    rig.pass_time(5)
    assert client.take_bodies() == [b"%d" % number for number in range(6)]


def test_an_error_in_the_upkeep_of_one_topic_does_not_stop_the_others(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """A carried-over message is finished, and its file cannot be removed."""
    stuck = {}
    for name in ("a", "bad", "z"):
        client = rig.subscribe(name, "c", rdy=1000)
        for number in range(200):
            rig.publish(name, b"%d" % number * 20)
        stuck[client], *rest = client.take()
        rig.finish(client, *rest)
        rig.maintain()
        assert rig.names("*.carry", name), "the first message is carried over"
    for client, message in stuck.items():
        rig.finish(client, message)
    rig.files.fail("unlink", "bad.topic/c.carry", errno.EIO)
    rig.maintain()
    assert rig.names("*.carry", "a") == rig.names("*.carry", "z") == []
    assert "bad" in caplog.text
    rig.files.heal()
    rig.restart()
    assert rig.subscribe("bad", "c", rdy=10).take_bodies() == [], "finished is finished"


def test_a_message_that_cannot_be_carried_over_is_not_lost(rig: Rig) -> None:
    client = rig.subscribe(rdy=1000)
    for number in range(200):
        rig.publish("t", b"%d" % number * 20)
    _, *rest = client.take()
    rig.finish(client, *rest)
    rig.files.fail("write", ".carry")
    rig.maintain()
    rig.files.heal()
    rig.crash()
    client = rig.subscribe(rdy=1000)
    assert b"0" * 20 in client.take_bodies()


@pytest.mark.parametrize("durability", [*Durability])
def test_ids_never_decrease_or_repeat_over_starts(tmp_path: Path, durability: Durability) -> None:
    """Neither milliseconds after a crash, nor with the clock set back by less than the uptime."""
    rig = Rig(tmp_path, durability=durability.value)
    last = -1
    for number, (gone_on, set_back) in enumerate([(0.001, 0), (0.002, 0.001), (10, 9.99), (5, 0), (100, 99)]):
        client = rig.subscribe(rdy=100)
        client.take()
        for body in range(7):
            rig.publish("t", b"%d" % body)
        ids = [message.id for message in client.take()]
        assert len(ids) == 7
        assert [last, *ids] == sorted({last, *ids})
        last = ids[-1]
        rig.clock.advance(gone_on)
        if number % 3 == 2:
            rig.close()
            rig.clock.set_wall(-set_back)
            rig.start()
        else:
            rig.clock.set_wall(-set_back)
            rig.crash(0)
    rig.drop()


def test_other_users_cannot_read_the_data_path(rig: Rig, tmp_path: Path) -> None:
    """Directories too: their names tell the topics and channels."""
    before = os.umask(0)
    try:
        rig.subscribe(rdy=1)
        rig.publish("t", b"in flight", b"waiting")
        rig.broker.transactions.stage("p", 1, "part", "t", PackedBodies.of([b"staged"]))
        rig.restart()
    finally:
        os.umask(before)
    made = [*tmp_path.rglob("*")]
    assert {path.name for path in made} >= {"topics", "t.topic", "c.channel", "nsqd.dat", "transactions"}
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
