"""The import of a data path of NSQ's nsqd: every message reaches the right channels, once."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsparq.broker import importer
from nsparq.broker.importer import IMPORTED
from nsparq.broker.topic import Topic
from nsparq.errors import StartError
from nsparq.storage.state_files import ChannelState, decode_channel_state
from tests.broker.rig import NODE_ID, Delivered, FakeClient, Rig, TestFiles, counts
from tests.support.go_queue import GO_TIME_NS, GoMessage, GoQueue, go_messages, write_metadata

StartRig = Callable[..., Rig]

DURABILITIES = pytest.mark.parametrize("durability", ["os", "fsync", "memory"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartRig]:
    """A broker on tmp_path, after the test has put NSQ's files there."""
    rigs: list[Rig] = []

    def make(**arguments: Any) -> Rig:
        rigs.append(Rig(tmp_path, **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.drop()


def of(messages: list[GoMessage]) -> list[bytes]:
    return sorted(message.body for message in messages)


def drain(rig: Rig, channel: str = "c", topic: str = "t", rdy: int = 2500) -> list[Delivered]:
    """Take and finish all messages of the channel, and disconnect."""
    client = rig.subscribe(topic, channel, rdy=rdy)
    got: list[Delivered] = []
    while new := client.take():
        got += new
        rig.finish(client, *new)
    rig.disconnect(client)
    assert len({message.id for message in got}) == len(got)
    return got


def drained(rig: Rig, channel: str = "c", topic: str = "t", rdy: int = 2500) -> list[bytes]:
    return sorted(message.body for message in drain(rig, channel, topic, rdy))


def left_of_nsq(path: Path) -> list[str]:
    return sorted(found.name for found in path.glob("*.diskqueue.*"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# topics and channels


def test_a_topic_s_messages_wait_for_its_first_channel(tmp_path: Path, start: StartRig):
    write_metadata(tmp_path, {"t": []})
    GoQueue(tmp_path, "t").write(*go_messages(10)).save()
    rig = start()
    assert rig.topic().depth == 10
    assert [message.body for message in drain(rig, "first")] == [b"%d" % number for number in range(10)]
    assert rig.topic().depth == 0
    assert drain(rig, "second") == []


def test_a_topic_s_messages_go_to_each_of_its_channels(tmp_path: Path, start: StartRig):
    write_metadata(tmp_path, {"t": ["a", "b"]})
    GoQueue(tmp_path, "t").write(*go_messages(10)).save()
    rig = start()
    assert rig.topic().depth == 0
    for name in ("a", "b"):
        assert counts(rig.channel(name)) == (10, 0, 0)
        assert drained(rig, name) == of(go_messages(10))


@DURABILITIES
@pytest.mark.parametrize(("rdy", "mem_queue_size"), [(1, 10_000), (7, 0), (2500, 0)])
def test_a_channel_s_messages_are_for_it_alone(
    tmp_path: Path, start: StartRig, durability: str, rdy: int, mem_queue_size: int
):
    write_metadata(tmp_path, {"t": ["a", "b", "idle"]})
    GoQueue(tmp_path, "t").write(*go_messages(5, "topic")).save()
    GoQueue(tmp_path, "t", "a").write(*go_messages(30, "a")).consume(10).save()
    GoQueue(tmp_path, "t", "b").write(*go_messages(7, "b")).save()
    GoQueue(tmp_path, "t", "idle").write(*go_messages(3)).consume(3).save()
    rig = start(durability=durability, mem_queue_size=mem_queue_size)
    expected = {
        "a": of(go_messages(20, "a", start=10) + go_messages(5, "topic")),
        "b": of(go_messages(7, "b") + go_messages(5, "topic")),
        "idle": of(go_messages(5, "topic")),
    }
    assert {name: rig.channel(name).depth for name in expected} == {"a": 25, "b": 12, "idle": 5}
    assert rig.topic().depth == 0
    for name, bodies in expected.items():
        assert drained(rig, name, rdy=rdy) == bodies
        assert counts(rig.channel(name)) == (0, 0, 0)
    rig.publish("t", b"new")
    for name in expected:
        assert rig.channel(name).depth == 1
        assert drained(rig, name) == [b"new"]
    assert left_of_nsq(tmp_path) == []


def test_depth_is_right_at_every_step(tmp_path: Path, start: StartRig):
    write_metadata(tmp_path, {"t": ["a", "b", "c"]})
    for name in ("a", "b", "c"):
        GoQueue(tmp_path, "t", name).write(*go_messages(20, name), *go_messages(5, name, 1, 20)).save()
    GoQueue(tmp_path, "t").write(*go_messages(5, "topic")).save()
    rig = start()
    for name in ("b", "c", "a"):
        channel = rig.channel(name)
        client = rig.subscribe(channel=name)
        for finished in range(30):
            assert counts(channel) == (30 - finished, 0, 0)
            rig.ready(client, 1)
            assert counts(channel) == (29 - finished, 1, 0)
            rig.ready(client, 0)
            rig.finish(client, client.take()[0])
        assert counts(channel) == (0, 0, 0)
        rig.disconnect(client)


def test_two_clients_share_imported_messages(tmp_path: Path, start: StartRig):
    for name in ("a", "b"):
        GoQueue(tmp_path, "t", name).write(*go_messages(50, name), *go_messages(50, name, 2, 50)).save()
    rig = start()
    clients = [rig.subscribe(channel="a", rdy=3) for _ in range(2)]
    got: list[bytes] = []
    while any(new := [client.take() for client in clients]):
        for client, messages in zip(clients, new, strict=True):
            got += [message.body for message in messages]
            rig.finish(client, *messages)
    assert sorted(got) == of(go_messages(100, "a"))


def test_a_channel_created_later_gets_no_imported_message(tmp_path: Path, start: StartRig):
    write_metadata(tmp_path, {"t": ["a"]})
    GoQueue(tmp_path, "t", "a").write(*go_messages(10)).save()
    GoQueue(tmp_path, "t").write(*go_messages(10)).save()
    rig = start()
    assert drain(rig, "later") == []
    rig.topic().delete_channel("a")
    rig.topic().delete_channel("later")
    assert rig.topic().depth == 0
    assert drain(rig, "first again") == []


def test_queues_that_nsqd_dat_does_not_list_are_imported_too(tmp_path: Path, start: StartRig):
    GoQueue(tmp_path, "t", "c").write(*go_messages(3)).save()
    GoQueue(tmp_path, "u").write(*go_messages(2)).save()
    rig = start()
    assert drained(rig) == of(go_messages(3))
    assert rig.broker.topics["u"].depth == 2
    listed = (tmp_path / "nsqd.dat").read_text()
    assert '"name":"u"' in listed and '"name":"c"' in listed


def test_empty_queues_create_nothing_and_are_moved_away(tmp_path: Path, start: StartRig):
    write_metadata(tmp_path, {"listed": ["c"]})
    for topic in ("listed", "unlisted"):
        GoQueue(tmp_path, topic).save()
        GoQueue(tmp_path, topic, "c").write(*go_messages(2)).consume(2).save()
        GoQueue(tmp_path, topic, "d").save()
    rig = start()
    assert list(rig.broker.topics) == ["listed"]
    assert list(rig.topic("listed").channels) == ["c"]
    assert left_of_nsq(tmp_path) == []
    assert len([*(tmp_path / IMPORTED).iterdir()]) == 8


def test_names_with_every_allowed_character(tmp_path: Path, start: StartRig):
    topic, channel = "T.o-p_1" + "x" * 57, "c.H-1_" + "y" * 58
    GoQueue(tmp_path, topic, channel).write(*go_messages(3)).save()
    rig = start()
    assert drained(rig, channel, topic) == of(go_messages(3))


# what the messages keep


def test_timestamps_are_kept_and_ids_are_ours(tmp_path: Path, start: StartRig):
    stamps = [GO_TIME_NS, GO_TIME_NS, GO_TIME_NS + 1, GO_TIME_NS - 5, GO_TIME_NS, 1, 2**62]
    messages = [GoMessage(b"%d" % number, 0, stamp) for number, stamp in enumerate(stamps)]
    write_metadata(tmp_path, {"t": ["c"]})
    GoQueue(tmp_path, "t").write(*messages).save()
    GoQueue(tmp_path, "t", "c").write(*messages).save()
    rig = start()
    got = drain(rig)
    assert [(m.body, m.attempts, m.timestamp_ns) for m in got] == [
        (message.body, 1, message.timestamp_ns) for message in messages * 2
    ]
    assert {message.id >> 54 for message in got} == {NODE_ID}


def test_attempts_are_kept(tmp_path: Path, start: StartRig):
    messages = [
        GoMessage(b"%d" % number, attempts) for number, attempts in enumerate([0, 3, 0, 1, 65_535, 7])
    ]
    write_metadata(tmp_path, {"t": ["c", "other"]})
    GoQueue(tmp_path, "t", "c").write(*messages).save()
    rig = start()
    assert counts(rig.channel()) == (6, 0, 0)
    assert counts(rig.channel("other")) == (0, 0, 0)
    got = {message.body: message.attempts for message in drain(rig)}
    assert got == {b"0": 1, b"1": 4, b"2": 1, b"3": 2, b"4": 0, b"5": 8}
    assert drain(rig, "other") == []
    assert rig.channel().dropped_count == 0


@pytest.mark.parametrize("end", ["restart", "crash"])
def test_imported_attempts_survive_restarts(tmp_path: Path, start: StartRig, end: str):
    GoQueue(tmp_path, "t", "c").write(*go_messages(5), *go_messages(5, "", 3, 5)).save()
    rig = start()
    getattr(rig, end)()
    client = rig.subscribe(rdy=4)
    rig.maintain()
    getattr(rig, end)()
    client = rig.subscribe(rdy=100)
    got = client.take()
    assert sorted(message.body for message in got) == of(go_messages(10))
    assert all(m.attempts in ((1, 2) if int(m.body) < 5 else (4, 5)) for m in got)
    assert sum(m.attempts in (2, 5) for m in got) == 4


def test_equal_times_make_one_batch_of_bounded_size(tmp_path: Path, start: StartRig):
    GoQueue(tmp_path, "t").write(*(GoMessage(b"%d" % number) for number in range(2500))).save()
    GoQueue(tmp_path, "large").write(*(GoMessage(b"%d" % n * 700_000) for n in range(4))).save()
    rig = start()
    assert len(drain(rig)) == 2500
    assert [len(message.body) for message in drain(rig, topic="large")] == [700_000] * 4


# pauses


def test_pause_flags_are_kept(tmp_path: Path, start: StartRig):
    write_metadata(
        tmp_path, {"t": ["a", "b"], "paused": ["a"], "bare": [], "last": ["a"]}, ["t:a", "paused", "bare"]
    )
    GoQueue(tmp_path, "t", "a").write(*go_messages(3)).save()
    rig = start()
    assert [rig.channel(name).paused for name in "ab"] == [True, False]
    assert {name: topic.paused for name, topic in rig.broker.topics.items()} == {
        "t": False,
        "paused": True,
        "bare": True,
        "last": False,
    }
    assert rig.channel("a").depth == 3
    assert drain(rig, "a") == []
    rig.channel("a").unpause()
    assert drained(rig, "a") == of(go_messages(3))


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_paused_topic_holds_its_own_messages_and_not_those_of_its_channels(
    tmp_path: Path, start: StartRig, restarts: int
):
    write_metadata(tmp_path, {"t": ["a", "b"]}, ["t"])
    GoQueue(tmp_path, "t").write(*go_messages(5, "topic")).save()
    GoQueue(tmp_path, "t", "a").write(*go_messages(4, "a"), *go_messages(4, "a", 1, 4)).save()
    rig = start()
    for _ in range(restarts):
        rig.restart()
    assert rig.topic().depth == 5
    assert [rig.channel(name).depth for name in "ab"] == [8, 0]
    assert drained(rig, "a") == of(go_messages(8, "a"))
    assert drain(rig, "b") == []
    rig.topic().unpause()
    for name in ("a", "b"):
        assert drained(rig, name) == of(go_messages(5, "topic"))


def test_a_paused_topic_without_channels_keeps_its_messages(tmp_path: Path, start: StartRig):
    write_metadata(tmp_path, {"t": []}, ["t"])
    GoQueue(tmp_path, "t").write(*go_messages(5)).save()
    rig = start()
    assert rig.topic().depth == 5
    assert drain(rig) == []
    rig.topic().unpause()
    assert drained(rig) == of(go_messages(5))


def test_the_metadata_is_whole_at_every_moment_of_loading(tmp_path: Path):
    topics = {f"t{number}": ["c"] for number in range(10)}
    write_metadata(tmp_path, topics, ["t0", "t1:c", *(f"t{number}" for number in range(5, 10))])
    seen: list[int] = []

    class Watching(TestFiles):
        def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
            super().replace(path, content, sync=sync)
            if path.name == "nsqd.dat":
                seen.append(len(re.findall(rb'"name":"t\d', content)))

    Rig(tmp_path, files=Watching()).drop()
    assert seen == [10]


# damage


def test_messages_that_a_crash_left_unrecorded_are_imported(tmp_path: Path, start: StartRig):
    GoQueue(tmp_path, "t", "c").write(*go_messages(3)).consume(1).save().write(*go_messages(4, start=3))
    GoQueue(tmp_path, "no-state").write(*go_messages(30), max_bytes=100)
    rig = start()
    assert drained(rig) == of(go_messages(6, start=1))
    assert rig.topic("no-state").depth == 30


def test_damage_loses_the_rest_of_its_file_and_is_reported(
    tmp_path: Path, start: StartRig, caplog: pytest.LogCaptureFixture
):
    write_metadata(tmp_path, {"t": ["c"]})
    queue = GoQueue(tmp_path, "t", "c").write(*go_messages(3, "", 1), *go_messages(6, start=3), max_bytes=100)
    queue.save()
    content = bytearray(queue.data_path(1).read_bytes())
    content[31:35] = b"\xff" * 4
    queue.data_path(1).write_bytes(content)
    rig = start()
    assert drained(rig) == [b"0", b"1", b"2", b"3", b"6", b"7", b"8"]
    assert rig.channel().dropped_count == 0
    assert warnings(caplog) == [
        "t:c.diskqueue.000001.dat: 62 bytes skipped from byte 31 on: -1 is not the length of a record",
        "t:c.diskqueue.meta.dat: it counts 9 messages, but 7 were found",
    ]
    assert left_of_nsq(tmp_path) == []


def test_a_queue_with_only_damage_creates_nothing_and_is_reported(
    tmp_path: Path, start: StartRig, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "t.diskqueue.000000.dat").write_bytes(b"\xff" * 100)
    rig = start()
    assert rig.broker.topics == {}
    assert len(warnings(caplog)) == 1
    assert left_of_nsq(tmp_path) == []


def test_files_given_up_by_nsq_are_not_read(tmp_path: Path, start: StartRig):
    queue = GoQueue(tmp_path, "t").write(*go_messages(3)).save()
    queue.data_path(0).rename(tmp_path / "t.diskqueue.000000.dat.bad")
    rig = start()
    assert rig.broker.topics == {}
    assert left_of_nsq(tmp_path) == ["t.diskqueue.000000.dat.bad"]


def test_queues_with_invalid_or_ephemeral_names_are_not_imported(
    tmp_path: Path, start: StartRig, caplog: pytest.LogCaptureFixture
):
    for names in [("t#ephemeral", "c"), ("t", "c#ephemeral"), ("t", "a:b"), ("b@d", ""), ("x" * 65, "")]:
        GoQueue(tmp_path, *names).write(*go_messages(3)).save()
    before = left_of_nsq(tmp_path)
    rig = start()
    assert rig.broker.topics == {}
    assert left_of_nsq(tmp_path) == before
    assert not (tmp_path / IMPORTED).exists()
    texts = warnings(caplog)
    assert len(texts) == 5
    assert any(text.startswith("t#ephemeral:c: ephemeral") for text in texts)


def test_the_import_is_logged(tmp_path: Path, start: StartRig, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    GoQueue(tmp_path, "t").write(*go_messages(5)).save()
    GoQueue(tmp_path, "t", "c").write(*go_messages(3), *go_messages(3, "", 2)).save()
    start()
    texts = [record.getMessage() for record in caplog.records if "import" in record.getMessage()]
    assert texts == [
        "TOPIC(t): importing from NSQ: t, t:c",
        "CHANNEL(t:c): imported 6 messages from NSQ",
        "TOPIC(t): imported 5 messages from NSQ",
    ]


# every message once


@DURABILITIES
@pytest.mark.parametrize("end", ["restart", "crash"])
def test_a_restart_does_not_import_again(tmp_path: Path, start: StartRig, durability: str, end: str):
    write_metadata(tmp_path, {"t": ["a", "b"]})
    GoQueue(tmp_path, "t", "a").write(*go_messages(10, "a"), *go_messages(10, "a", 2, 10)).save()
    GoQueue(tmp_path, "t").write(*go_messages(10, "topic")).save()
    rig = start(durability=durability)
    for _ in range(2):
        getattr(rig, end)()
        assert [rig.channel(name).depth for name in "ab"] == [30, 10]
    client = rig.subscribe(channel="a", rdy=15)
    first = client.take()
    assert len(first) == 15
    rig.finish(client, *first)
    rig.ready(client, 0)
    rest_of_first = client.take()
    rig.maintain()
    getattr(rig, end)()
    assert [rig.channel(name).depth for name in "ab"] == [15, 10]
    rest = drain(rig, "a")
    assert len(rest_of_first) <= len(rest)
    assert sorted(m.body for m in first + rest) == of(go_messages(20, "a") + go_messages(10, "topic"))
    assert drained(rig, "b") == of(go_messages(10, "topic"))


POINTS = ["append", "last append", "sync", "channel state", "topic state", "move", "last move"]


class Crash(Exception):
    """The process was killed."""


class CrashingFiles(TestFiles):
    """Kills the process at a point of the import."""

    def __init__(self, point: str) -> None:
        super().__init__()
        self.point = point
        self.is_importing = False

    def _die_at(self, point: str) -> None:
        if self.point == point:
            raise Crash

    def add_version(self, path: Path, content: bytes) -> None:
        self.is_importing |= re.search(rb'"import_start": \d', content) is not None
        if self.is_importing and path.name == "topic.json" and b'"import_start": -1' in content:
            self._die_at("topic state")
        if self.is_importing and path.name.endswith(".channel") and path.name.startswith("b"):
            self._die_at("channel state")
        super().add_version(path, content)

    def write(self, fd: int, buffers: Any, position: int) -> None:
        super().write(fd, buffers, position)
        if self.is_importing:
            if position:
                self._die_at("append")
            if any(b"last" in bytes(buffer) for buffer in buffers):
                self._die_at("last append")

    def sync(self, fd: int) -> None:
        if self.is_importing:
            self._die_at("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        if target.parent.name == IMPORTED:
            self._die_at("move")
            if source.name == "t:b.diskqueue.meta.dat":
                self._die_at("last move")
        super().rename(source, target)


@pytest.mark.parametrize(("durability", "paused"), [("memory", False), ("os", True), ("fsync", False)])
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_during_an_import_loses_nothing_and_shows_nothing_to_other_channels(
    tmp_path: Path, start: StartRig, durability: str, point: str, paused: bool
):
    write_metadata(tmp_path, {"t": ["a", "b"]}, ["t"] if paused else [])
    GoQueue(tmp_path, "t").write(*go_messages(10, "topic"), GoMessage(b"last")).save()
    GoQueue(tmp_path, "t", "a").write(*go_messages(10, "a"), *go_messages(5, "a", 2, 10)).save()
    GoQueue(tmp_path, "t", "b").write(*go_messages(10, "b"), *go_messages(5, "b", 2, 10)).save()
    with pytest.raises(Crash):
        start(durability=durability, files=CrashingFiles(point), mem_queue_size=0)
    rig = start(durability=durability, mem_queue_size=0)
    assert rig.topic().paused is paused
    if paused:
        rig.topic().unpause()
    own = go_messages(10, "topic") + [GoMessage(b"last")]
    is_repeated = "move" in point
    for name in ("a", "b"):
        got = drained(rig, name)
        assert sorted(set(got)) == of(go_messages(15, name) + own)
        assert is_repeated or len(got) == len(set(got))
        assert counts(rig.channel(name)) == (0, 0, 0)
        assert rig.channel(name).dropped_count == 0
    assert left_of_nsq(tmp_path) == []
    rig.publish("t", b"new")
    rig.restart()
    for name in ("a", "b"):
        assert drained(rig, name) == [b"new"]


def test_an_import_survives_one_crash_after_another(
    tmp_path: Path, start: StartRig, caplog: pytest.LogCaptureFixture
):
    GoQueue(tmp_path, "t").write(*go_messages(10, "topic"), GoMessage(b"last")).save()
    GoQueue(tmp_path, "t", "b").write(*go_messages(10, "b"), *go_messages(5, "b", 2, 10)).save()
    for point in ["append", "topic state", "last append", "channel state", "append"]:
        with pytest.raises(Crash):
            start(files=CrashingFiles(point))
    rig = start()
    assert rig.channel("b").depth == 26
    assert drained(rig, "b") == of(go_messages(15, "b") + go_messages(10, "topic") + [GoMessage(b"last")])
    assert sum("it starts again" in text for text in warnings(caplog)) == 5


def test_a_crash_while_importing_one_topic_keeps_the_others_imported(
    tmp_path: Path, start: StartRig, monkeypatch: pytest.MonkeyPatch
):
    for topic in ("t1", "t2", "t3"):
        GoQueue(tmp_path, topic, "c").write(*go_messages(5, topic)).save()

    def fail(topic: Topic) -> None:
        if topic.name == "t2":
            raise Crash
        end(topic)

    end = importer.let_import_count
    monkeypatch.setattr(importer, "let_import_count", fail)
    with pytest.raises(Crash):
        start()
    assert {name.partition(":")[0] for name in left_of_nsq(tmp_path)} == {"t2", "t3"}
    monkeypatch.undo()
    rig = start()
    for topic in ("t1", "t2", "t3"):
        assert drained(rig, topic=topic) == of(go_messages(5, topic))


@pytest.mark.parametrize("call", ["write", "open_read", "sync"])
def test_an_import_that_the_disk_refuses_stops_the_start(tmp_path: Path, start: StartRig, call: str):
    GoQueue(tmp_path, "t", "c").write(*go_messages(5)).save()
    files = TestFiles()
    files.fail(call, ".dat" if call == "open_read" else ".log")
    with pytest.raises(StartError, match="cannot import NSQ's messages of topic 't'"):
        start(files=files)
    assert len(left_of_nsq(tmp_path)) == 2
    rig = start()
    assert drained(rig) == of(go_messages(5))


def test_everything_is_synced_before_nsq_s_files_are_moved(tmp_path: Path, start: StartRig):
    GoQueue(tmp_path, "t", "c").write(*go_messages(5)).save()
    order: list[str] = []

    class Watching(TestFiles):
        def sync(self, fd: int) -> None:
            order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.parent.name == IMPORTED:
                order.append("moved")

    start(files=Watching(), durability="memory")
    moved = order.index("moved")
    log = next(name for name in order if name.endswith(".log"))
    assert order.index(log) < order.index("c.channel", order.index(log)) < moved
    assert order[moved - 1] == "topic.json"
    assert order[moved:] == ["moved", "moved", "nsqd.dat.tmp"]


def test_a_second_import_is_appended(tmp_path: Path, start: StartRig):
    """NSQ's own nsqd was started on the data path once more."""
    write_metadata(tmp_path, {"t": ["a", "b"]})
    GoQueue(tmp_path, "t", "a").write(*go_messages(3, "first")).save()
    rig = start()
    rig.publish("t", b"ours")
    rig.publish("t", b"later", defer_ms=60_000)
    rig.close()
    GoQueue(tmp_path, "t", "a").write(*go_messages(3, "second")).save()
    rig.start()
    assert [counts(rig.channel(name)) for name in "ab"] == [(7, 0, 1), (1, 0, 1)]
    assert drained(rig, "b") == [b"ours"]
    assert drained(rig, "a") == of([*go_messages(3, "first"), GoMessage(b"ours"), *go_messages(3, "second")])
    rig.pass_time(60)
    assert [drained(rig, name) for name in "ab"] == [[b"later"]] * 2
    assert sorted(path.name for path in (tmp_path / IMPORTED).iterdir()) == [
        "t:a.diskqueue.000000.dat",
        "t:a.diskqueue.000000.dat.2",
        "t:a.diskqueue.meta.dat",
        "t:a.diskqueue.meta.dat.2",
    ]


# after the import


def subscribe_and_take(rig: Rig, channel: str) -> tuple[FakeClient, list[Delivered]]:
    client = rig.subscribe(channel=channel, rdy=2500)
    return client, client.take()


def test_redelivery_requeue_and_deferral_work_on_imported_messages(tmp_path: Path, start: StartRig):
    GoQueue(tmp_path, "t", "a").write(*go_messages(2, "a"), *go_messages(2, "a", 5, 2)).save()
    GoQueue(tmp_path, "t", "b").write(*go_messages(4, "b")).save()
    rig = start()
    client, got = subscribe_and_take(rig, "a")
    for message in got[:2]:
        rig.requeue(client, message)
    assert sorted(client.take()) == sorted(
        message._replace(attempts=message.attempts + 1) for message in got[:2]
    )
    rig.requeue(client, got[2], 1000)
    rig.disconnect(client)
    client, again = subscribe_and_take(rig, "a")
    assert len(again) == 3
    rig.pass_time(1)
    assert client.take() == [got[2]._replace(attempts=got[2].attempts + 1)]


def test_emptying_or_deleting_a_channel_does_not_affect_the_others(tmp_path: Path, start: StartRig):
    for name in ("a", "b", "c"):
        GoQueue(tmp_path, "t", name).write(*go_messages(4, name), *go_messages(2, name, 1, 4)).save()
    rig = start()
    rig.channel("a").empty()
    rig.topic().delete_channel("b")
    assert counts(rig.channel("a")) == (0, 0, 0)
    rig.restart()
    assert counts(rig.channel("a")) == (0, 0, 0)
    assert drain(rig, "b") == []
    assert drained(rig, "c") == of(go_messages(6, "c"))


def test_imported_messages_that_all_channels_have_passed_are_reclaimed(tmp_path: Path, start: StartRig):
    write_metadata(tmp_path, {"t": ["a", "b", "idle"]})
    for name in ("a", "b"):
        messages = [GoMessage(b"%d" % number + b"x" * 100) for number in range(200)]
        GoQueue(tmp_path, "t", name).write(*messages, GoMessage(b"tried", 3)).save()
    rig = start(max_bytes_per_file=2000)
    before = len(rig.names("*.log"))
    assert len(drain(rig, "a")) == 201
    rig.maintain()
    middle = len(rig.names("*.log"))
    assert middle < before, "a channel with nothing of its own must not pin what the others have finished"
    assert len(drain(rig, "b")) == 201
    rig.publish("t", b"new")
    rig.maintain()
    assert len(rig.names("*.log")) < middle
    assert not any(channel.cursor.skips.ranges for channel in rig.topic().channels.values())


def test_skips_are_forgotten_once_passed(tmp_path: Path, start: StartRig):
    for name in ("a", "b", "c"):
        GoQueue(tmp_path, "t", name).write(*go_messages(4, name)).save()
    rig = start()
    assert [len(rig.channel(name).cursor.skips.ranges) for name in "abc"] == [1, 1, 0]
    for name in ("a", "b", "c"):
        drain(rig, name)
    rig.maintain()
    assert [rig.channel(name).cursor.skips.ranges for name in "abc"] == [[], [], []]


def test_skips_are_part_of_a_channel_s_state_and_absent_from_older_files():
    plain = ChannelState(cursor=5, seen=9)
    assert b"skips" not in plain.encode()
    assert decode_channel_state(plain.encode()).skips == []
    with_skips = ChannelState(cursor=5, seen=9, skips=[(6, 7), (8, 2**53)])
    assert decode_channel_state(with_skips.encode()).skips == [(6, 7), (8, 2**53)]


def test_an_import_needs_little_memory(tmp_path: Path, start: StartRig, monkeypatch: pytest.MonkeyPatch):
    GoQueue(tmp_path, "t", "c").write(*(GoMessage(b"x" * 1000, 0, number) for number in range(5000))).save()
    sizes: list[int] = []
    append = importer._append

    def watched(topic: Topic, records: Any) -> int:
        def look() -> Iterator[Any]:
            for number, record in enumerate(records):
                if number % 100 == 0:
                    sizes.append(topic.broker.cache.size_bytes)
                yield record

        return append(topic, look())

    monkeypatch.setattr(importer, "_append", watched)
    rig = start(mem_queue_size=100)
    assert max(sizes) < 100 * 3000
    assert rig.broker.cache.size_bytes == 0
    assert rig.channel().depth == 5000
    assert rig.channel().backend_depth == 5000
