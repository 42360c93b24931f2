"""Damaged files of a stopped broker: whole messages are delivered, lost ones are logged and
counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from crc32c import crc32c

from nsparq.broker.stats import broker_stats
from nsparq.packed import PackedBodies
from tests.broker.rig import Delivered, Later, Rig, bodies, counts

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
def test_damaged_deferred_messages_lose_no_others(rig: Rig, rdy: int, damaged: int):
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
    while rig.channel().unfinished.in_flight:
        rig.finish(client, *got[-rdy:])
        got += client.take()
    assert [message.body for message in got] == [b"first", *bodies(10)]
    assert counts(rig.channel()) == (0, 0, damaged)


def test_damage_found_by_one_channel_is_known_to_the_others(rig: Rig):
    """Also that deferred messages are among what is lost: the depth no longer leaves them out."""
    rig.channel("slow")
    rig.channel("quick")
    rig.publish("t", b"first")
    rig.publish("t", b"later 1", defer_ms=3_600_000)
    rig.publish("t", b"lost")
    rig.publish("t", b"later 2", defer_ms=3_600_000)
    rig.close()
    for body in (b"lost", b"later 2"):
        zero(rig, body)
    rig.start()
    assert [counts(rig.channel(name)) for name in ("quick", "slow")] == [(2, 0, 2)] * 2
    clients = []
    for name in ("quick", "slow"):
        client = rig.subscribe("t", name, rdy=1)
        clients.append(client)
        (first,) = client.take()
        assert first.body == b"first"
        rig.finish(client, first)
        assert client.take() == []
        assert counts(rig.channel(name)) == (0, 0, 2)
        assert rig.topic().log.corrupt_messages == 2
        assert counts(rig.channel("slow")) == ((1, 0, 2) if name == "quick" else (0, 0, 2))
    rig.publish("t", b"afterwards")
    assert [client.take_bodies() for client in clients] == [[b"afterwards"]] * 2


# damage to a channel's files


def carry(rig: Rig) -> tuple[list[Delivered], list[Delivered]]:
    """Three carried-over messages of the channel, and those that are still in the log."""
    client = rig.subscribe(rdy=1000)
    for number in range(0, 100, 10):
        rig.publish("t", *bodies(10, start=number, size=150))
    messages = client.take()
    carried = [messages[0], messages[15], messages[25]]
    rig.requeue(client, carried[1])
    client.take()
    rig.requeue(client, carried[2], 60_000)
    rig.finish(client, *(m for m in messages[:95] if m not in carried))
    rig.maintain()
    assert rig.names("*.carry") == ["c.carry"]
    assert rig.topic().log.start > messages[25].id - rig.topic().first_id
    rig.maintain()
    return carried, messages[95:]


both_ends = pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])


def stop(rig: Rig, clean: bool) -> None:
    rig.close() if clean else rig.drop()


def drain(rig: Rig, channel: str = "c") -> set[bytes]:
    client = rig.subscribe("t", channel, rdy=1000, msg_timeout_ms=600_000)
    rig.pass_time(300)
    return {message.body for message in client.take()}


@both_ends
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "zeroed"])
def test_a_channel_without_its_state_delivers_every_message_again(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, clean: bool, damage: str
):
    rig = make_rig(max_bytes_per_file=2000)
    carried, left = carry(rig)
    stop(rig, clean)
    path = rig.topic_directory() / "c.channel"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        changed = {"empty": b"", "cut": content[:20], "zeroed": bytes(len(content))}
        path.write_bytes(changed[damage])
    rig.start()
    assert rig.topic().corrupt_files == 1
    assert "c.channel is damaged" in caplog.text
    assert drain(rig) >= {message.body for message in (*carried, *left)}
    assert rig.channel().dropped_count == 0


@pytest.mark.parametrize("source", ["t.topic/done.channel", "u.topic/c.channel"])
def test_the_file_of_another_channel_is_not_used(rig: Rig, caplog: pytest.LogCaptureFixture, source: str):
    for name in ("c", "done"):
        rig.channel(name)
    rig.channel("c", "u")
    rig.publish("t", *bodies(10))
    rig.channel("done").empty()
    rig.close()
    path = rig.topic_directory() / "c.channel"
    path.write_bytes((path.parent.parent / source).read_bytes())
    rig.start()
    assert rig.topic().corrupt_files == 1
    assert "the channel starts" in caplog.text
    assert drain(rig) == {*bodies(10)}
    assert drain(rig, "done") == set()


def test_a_channel_whose_state_is_lost_stays_paused(rig: Rig):
    rig.channel("a").pause()
    rig.channel("b")
    rig.close()
    for name in ("a", "b"):
        (rig.topic_directory() / f"{name}.channel").unlink()
    rig.start()
    assert (rig.channel("a").paused, rig.channel("b").paused) == (True, False)


def test_a_deleted_channel_is_not_taken_for_a_damaged_one(rig: Rig):
    rig.channel("a")
    rig.channel("b")
    rig.maintain()
    rig.topic().delete_channel("b")
    rig.crash()
    assert [*rig.topic().channels] == ["a"]
    assert rig.topic().corrupt_files == 0


@both_ends
@pytest.mark.parametrize("damage", ["missing", "empty", "torn"])
def test_carried_messages_that_are_gone_are_logged_and_counted(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, clean: bool, damage: str
):
    rig = make_rig(max_bytes_per_file=2000)
    carried, left = carry(rig)
    stop(rig, clean)
    path = rig.topic_directory() / "c.carry"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-7])
    gone = 1 if damage == "torn" else 3
    rig.start()
    assert rig.channel().dropped_count == gone
    assert f"{gone} unfinished messages are lost" in caplog.text
    found = drain(rig)
    assert found >= {message.body for message in left}
    assert len(found & {message.body for message in carried}) == 3 - gone


def test_a_carried_message_finished_right_before_a_crash_is_not_taken_for_a_lost_one(make_rig: MakeRig):
    later = Later()
    rig = make_rig(max_bytes_per_file=2000, background=later)
    client = rig.subscribe(rdy=1000)
    for number in range(0, 100, 10):
        rig.publish("t", *bodies(10, start=number, size=150))
    held, *rest = client.take()
    rig.finish(client, *rest)
    for _ in range(3):
        rig.maintain()
        later.run_all()
    assert rig.names("*.carry") == ["c.carry"]
    rig.finish(client, held)
    rig.maintain()
    # The checkpoint that no longer names it does not reach the disk.
    rig.crash()
    assert rig.channel().dropped_count == 0
    assert drain(rig) == {held.body}


# damage to the topic's file, and to nsqd.dat


@both_ends
@pytest.mark.parametrize("damage", ["missing", "empty", "another topic's"])
def test_a_topic_without_its_state_is_the_same_log(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, clean: bool, damage: str
):
    rig = make_rig()
    rig.channel("a")
    rig.channel("b")
    rig.channel("c", "u")
    rig.publish("t", *bodies(10))
    rig.maintain()
    incarnation = rig.topic().incarnation
    stop(rig, clean)
    path = rig.topic_directory() / "topic.json"
    if damage == "missing":
        path.unlink()
    else:
        content = (rig.topic_directory("u") / "topic.json").read_bytes()
        path.write_bytes(b"" if damage == "empty" else content)
    rig.start()
    assert rig.topic().incarnation == incarnation
    assert (rig.topic().corrupt_files, rig.topic("u").corrupt_files) == (1, 0)
    assert "topic.json" in caplog.text
    assert drain(rig, "a") == {*bodies(10)}
    rig.restart()
    assert (rig.topic().incarnation, rig.topic().corrupt_files) == (incarnation, 0)


def test_a_topic_whose_state_is_lost_stays_paused(rig: Rig):
    rig.channel()
    rig.publish("t", b"before")
    rig.topic().pause()
    rig.publish("t", b"behind")
    rig.maintain()
    rig.close()
    (rig.topic_directory() / "topic.json").unlink()
    rig.start()
    assert rig.topic().paused
    client = rig.subscribe(rdy=10)
    assert b"behind" not in client.take_bodies()
    rig.topic().unpause()
    rig.turn()
    assert [message.body for message in client.messages] == [b"before", b"behind"]


@pytest.mark.parametrize("content", [b"", b"{", bytes(100), b'{"topics": 7}'])
def test_a_bad_nsqd_dat_is_kept_aside_and_loses_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture, content: bytes
):
    rig.channel()
    rig.publish("t", b"x")
    rig.close()
    (rig.data_path / "nsqd.dat").write_bytes(content)
    rig.start()
    assert (rig.data_path / "nsqd.dat.bad").read_bytes() == content
    assert "kept as nsqd.dat.bad" in caplog.text
    assert broker_stats(rig.broker)["corrupt_files"] == 1
    assert drain(rig) == {b"x"}
    rig.restart()
    assert broker_stats(rig.broker)["corrupt_files"] == 0


# damage to the files of transactions


@pytest.mark.parametrize("name", ["committed.json", "2/promise.json"])
@pytest.mark.parametrize("damage", ["zeroed", "cut", "another's"])
def test_a_damaged_file_of_a_transaction_is_logged_and_counted(
    rig: Rig, caplog: pytest.LogCaptureFixture, name: str, damage: str
):
    transactions = rig.broker.transactions
    for producer in ("p", "q"):
        for sequence in (1, 2):
            transactions.stage(producer, sequence, "0", "t", PackedBodies.of([b"x"]))
            transaction = transactions.promise(producer, sequence, {"0": 1})
            transaction.write_promise(sync=False)
            if sequence == 1:
                transactions.decide(transaction)
                (chunk,) = transaction.chunks
                transactions.apply(transaction, chunk, chunk.read(rig.files))
                written = transactions.write_committed(transaction, sync=False, remember_s=60)
                transactions.finish(transaction, written)
    rig.close()
    folder = rig.data_path / "transactions"
    path, other = folder / "p.producer" / name, folder / "q.producer" / name
    content = path.read_bytes()
    changed = {"zeroed": bytes(len(content)), "cut": content[:-9], "another's": other.read_bytes()}
    path.write_bytes(changed[damage])
    rig.start()
    assert rig.broker.corrupt_files == 1
    assert f"{path} is damaged and ignored" in caplog.text
    # The staged messages are still there, and can be committed.
    transactions = rig.broker.transactions
    transactions.decide(transactions.promise("p", 2, {"0": 1}))


# damage to segments


def segments(rig: Rig, topic: str = "t") -> list[Path]:
    return sorted(rig.topic_directory(topic).glob("*.log"))


def fill(rig: Rig, topic: str) -> list[bytes]:
    """Forty messages over several segments."""
    prefix = topic.encode()
    published = [prefix + body for body in bodies(40, size=150)]
    for start in range(0, 40, 10):
        rig.publish(topic, *published[start : start + 10])
    assert len(segments(rig, topic)) == 4
    return published


@both_ends
@pytest.mark.parametrize("which", [0, 1, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_messages_of_a_segment_that_is_gone_are_logged_and_counted(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, clean: bool, which: int, damage: str
):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe()
    published = fill(rig, "t")
    # Two of each segment are in flight: too many to be carried over.
    rig.ready(client, 40)
    rig.finish(client, *(m for i, m in enumerate(client.take()) if i % 10 > 1))
    rig.maintain()
    rig.maintain()
    stop(rig, clean)
    path = segments(rig)[which]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:100])
    rig.start()
    assert rig.topic().log.corrupt_messages == 10
    assert str(path) in caplog.text or "the log's end is missing" in caplog.text
    gone = 10 * range(4)[which]
    assert drain(rig) == {*published[::10], *published[1::10]} - {*published[gone : gone + 2]}
    assert rig.channel().dropped_count == 2
    assert counts(rig.channel()) == (0, 6, 0)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_segment_swapped_with_another_topic_s_is_not_delivered_under_its_name(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, has_index: bool
):
    rig = make_rig(max_bytes_per_file=2000)
    published = {}
    for topic in ("t", "u"):
        rig.channel("c", topic)
        published[topic] = fill(rig, topic)
    rig.close()
    mine, other = segments(rig)[1], segments(rig, "u")[1]
    # Both were made in the same millisecond: even the numbers are the same.
    assert (mine.name, mine.stat().st_size) == (other.name, other.stat().st_size)
    content = mine.read_bytes()
    mine.write_bytes(other.read_bytes())
    other.write_bytes(content)
    for path in (mine, other):
        if not has_index:
            path.with_suffix(".index").unlink()
    rig.start()
    for topic in ("t", "u"):
        got = rig.subscribe(topic, "c", rdy=100).take_bodies()
        assert got == published[topic][:10] + published[topic][20:]
        assert rig.topic(topic).log.corrupt_batches > 0
        assert rig.names("*.foreign", topic) == [mine.name + ".foreign"]
    assert rig.topic().log.corrupt_messages == (10 if has_index else 1)
    assert "is another segment" in caplog.text


def test_the_index_of_another_topic_is_not_used(make_rig: MakeRig):
    rig = make_rig()
    for topic in ("t", "u"):
        rig.channel("c", topic)
    rig.publish("t", b"a" * 20, b"b" * 20)
    rig.publish("t", b"later", defer_ms=60_000)
    rig.publish("u", b"later", defer_ms=60_000)
    rig.publish("u", b"a" * 20, b"b" * 20)
    rig.close()
    mine, other = (segments(rig, topic)[0].with_suffix(".index") for topic in ("t", "u"))
    mine.write_bytes(other.read_bytes())
    rig.start()
    assert counts(rig.channel()) == (2, 0, 1)
    assert drain(rig) == {b"a" * 20, b"b" * 20, b"later"}


def test_a_topic_with_only_its_segments_left_keeps_them(make_rig: MakeRig):
    rig = make_rig()
    rig.publish("t", *bodies(10))
    rig.close()
    (rig.topic_directory() / "topic.json").unlink()
    rig.start()
    assert drain(rig) == {*bodies(10)}
    rig.restart()
    assert rig.topic().log.corrupt_batches == 0


def test_old_segments_and_indexes_without_marks_still_open(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    rig.channel()
    rig.topic().log.segments.mark = 0
    published = fill(rig, "t")
    rig.close()
    for path in rig.topic_directory().glob("*.index"):
        raw = path.read_bytes()
        head, arrays = bytearray(raw[:64]), raw[72:]
        head[:8] = b"NQX2" + bytes(4)
        head[4:8] = crc32c(arrays, crc32c(head)).to_bytes(4, "little")
        path.write_bytes(bytes(head) + arrays)
    rig.start()
    assert rig.subscribe(rdy=100).take_bodies() == published
    assert rig.topic().log.corrupt_batches == 0
    assert rig.files.calls["read"] < 100
