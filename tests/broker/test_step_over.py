"""Messages that the cursor must skip. They may begin and end inside a batch, because batches are
joined when they are read back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.broker.rig import Rig, counts

MakeRig = Callable[..., Rig]


@pytest.mark.parametrize("rdy", [1, 100])
def test_messages_emptied_during_a_pause_do_not_come_back_with_their_neighbours(make_rig: MakeRig, rdy: int):
    rig = make_rig()
    rig.channel()
    rig.publish("t", b"before")
    rig.topic().pause()
    rig.publish("t", b"emptied")
    rig.restart()
    rig.topic().empty()
    rig.publish("t", b"after")
    rig.topic().unpause()
    rig.restart()
    assert counts(rig.channel()) == (2, 0, 0)
    client = rig.subscribe(rdy=rdy)
    got = client.take()
    while rig.channel().depth:
        rig.finish(client, got[-1])
        got += client.take()
    assert [message.body for message in got] == [b"before", b"after"]


def test_the_cursor_steps_over_many_gaps(make_rig: MakeRig):
    rig = make_rig()
    channel = rig.channel()
    for number in range(10):
        rig.publish("t", b"%d" % number)
    start = channel.cursor.position
    for number in range(0, 10, 2):
        channel.cursor.skips.add(start + number, start + number + 1)
    rig.restart()
    assert counts(rig.channel()) == (5, 0, 0)
    client = rig.subscribe(rdy=3)
    assert client.take_bodies() == [b"1", b"3", b"5"]
    assert counts(rig.channel()) == (2, 3, 0)
    rig.crash()
    assert sorted(rig.subscribe(rdy=100).take_bodies()) == [b"1", b"3", b"5", b"7", b"9"]


def test_a_gap_inside_a_skipped_range_counts_once(rig: Rig):
    channel = rig.channel()
    rig.publish("t", *(b"%d" % number for number in range(10)))
    start = channel.cursor.position
    channel.cursor.skips.add(start + 2, start + 8)
    rig.topic().log.gaps.add(start + 4, start + 9)
    assert counts(channel) == (3, 0, 0)
    assert rig.subscribe(rdy=100).take_bodies() == [b"0", b"1", b"9"]
    assert counts(channel) == (0, 3, 0)


def test_an_ephemeral_channel_that_falls_behind_counts_only_messages_as_dropped(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=2)
    channel = rig.channel("c#ephemeral")
    rig.publish("t", *(b"%d" % number for number in range(2)))
    start = channel.cursor.position
    channel.cursor.skips.add(start + 1, start + 5)
    rig.publish("t", *(b"%d" % number for number in range(2, 10)))
    assert channel.dropped_count == 4
    assert rig.subscribe(channel="c#ephemeral", rdy=10).take_bodies() == [b"8", b"9"]
