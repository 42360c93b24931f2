"""Redrive: dead letters go back to their channel, each at most once, whatever happens on the
way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from nsparq.broker import redrive as redrive_module
from nsparq.broker.letters import LetterFilter
from nsparq.broker.redrive import Progress, Redrive, RedriveRunning
from nsparq.broker.tagged import DEAD_LETTERS
from nsparq.dead_letter import DeadLetter
from nsparq.delivery_policy import parse_policy
from nsparq.headers import encode_headers
from nsparq.packed import PackedBodies
from nsparq.storage.carried import CarriedFile
from tests.broker.rig import Later, Receipt, Rig, TestFiles
from tests.broker.test_policy import letters

MakeRig = Callable[..., Rig]


def give_up(rig: Rig, *bodies: bytes, topic: str = "t", channel: str = "c", dead: str = "") -> None:
    """Make dead letters of these messages."""
    rig.channel(channel, topic).change_policy(parse_policy({"max_attempts": 1, "dead_letters": dead}, topic))
    client = rig.subscribe(topic, channel, rdy=2500)
    rig.publish(topic, *bodies)
    for message in client.take():
        rig.requeue(client, message)
    rig.disconnect(client)


def redrive(rig: Rig, topic: str = "t.dead", rate: float = 0.0, **wanted: object) -> Progress:
    found = rig.broker.redrives.start(rig.topic(topic), LetterFilter(**wanted), rate)  # type: ignore[arg-type]
    rig.turn()
    return found.progress


def running(rig: Rig, topic: str = "t.dead") -> Redrive:
    found = rig.broker.redrives.find(rig.topic(topic))
    assert found is not None
    return found


def drain(rig: Rig, topic: str = "t", channel: str = "c") -> list[bytes]:
    """Take all messages of a channel, and finish them."""
    client = rig.subscribe(topic, channel, rdy=2500)
    found = []
    while messages := client.take():
        found += [message.body for message in messages]
        rig.finish(client, *messages)
    rig.disconnect(client)
    return found


def forget_log(rig: Rig, topic: str = "t") -> None:
    """Have the log drop what all channels have finished. Needs small segments."""
    rig.publish(topic, b"." * 3000)
    for name in rig.topic(topic).channels:
        drain(rig, topic, name)
    rig.maintain()


@pytest.fixture(params=[False, True], ids=["in the log", "gone from the log"])
def is_gone(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


def test_a_letter_goes_back_to_its_channel_alone(make_rig: MakeRig, is_gone: bool):
    rig = make_rig(max_bytes_per_file=2000)
    rig.channel("other")
    give_up(rig, b"one", b"two")
    drain(rig, channel="other")
    if is_gone:
        forget_log(rig)
    letter = letters(rig)[0]
    progress = redrive(rig)
    assert (progress.state, progress.redriven, progress.skipped) == ("finished", 2, {})
    client = rig.subscribe(rdy=10)
    messages = client.take()
    assert [message.body for message in messages] == [b"one", b"two"]
    assert (f"{messages[0].id:016x}", messages[0].timestamp_ns) == (letter["id"], letter["timestamp_ns"])
    assert [message.attempts for message in messages] == [1, 1]
    assert rig.subscribe(channel="other", rdy=10).take() == []


@pytest.mark.parametrize("block", [b"", encode_headers({"key": "ü"})], ids=["plain", "with headers"])
def test_a_message_comes_back_with_its_headers(make_rig: MakeRig, is_gone: bool, block: bytes):
    rig = make_rig(max_bytes_per_file=2000)
    rig.channel().change_policy(parse_policy({"max_attempts": 1}, "t"))
    client = rig.subscribe(rdy=1, headers=True)
    rig.publish("t", b"\xff", blocks=[block])
    rig.requeue(client, *client.take())
    rig.disconnect(client)
    if is_gone:
        forget_log(rig)
    assert redrive(rig).redriven == 1
    rig.crash()
    (message,) = rig.subscribe(rdy=1, headers=True).take()
    assert (message.body, message.block) == (b"\xff", block)


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_messages_that_come_back_and_get_lost_are_counted(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, damage: str
):
    rig = make_rig(max_bytes_per_file=2000)
    give_up(rig, b"one", b"two")
    forget_log(rig)
    assert redrive(rig).redriven == 2
    path = rig.topic_directory() / "c.carry"
    rig.broker.close()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"")
    rig.start()
    assert rig.channel().dropped_count == 2
    assert "2 unfinished messages are lost" in caplog.text


def test_a_letter_of_an_earlier_version_goes_back(rig: Rig):
    rig.channel()
    rig.publish("t", b"one")
    drain(rig)
    old = DeadLetter(
        topic="t",
        channel="c",
        id=f"{rig.topic().first_id + rig.topic().log.end - 1:016x}",
        timestamp_ns=1,
        attempts=1,
        error="requeued",
        text="one",
    )
    rig.topic("t.dead").publishing.append_tagged(PackedBodies.of([old.to_json(), b"?"]), 0, DEAD_LETTERS)
    progress = redrive(rig)
    assert (progress.redriven, progress.foreign) == (1, 1)
    assert drain(rig) == [b"one"]


def test_a_letter_goes_back_once(make_rig: MakeRig, is_gone: bool):
    rig = make_rig(max_bytes_per_file=2000)
    give_up(rig, b"one", b"two", b"three")
    if is_gone:
        forget_log(rig)
    assert redrive(rig, text="two").redriven == 1
    assert drain(rig) == [b"two"]
    rig.maintain()
    for begin in (rig.crash, rig.restart, lambda: None):
        begin()
        again = redrive(rig, text="two")
        assert (again.redriven, again.skipped) == (0, {"redriven": 1})
    assert redrive(rig).redriven == 2
    assert drain(rig) == [b"one", b"three"]


def test_a_message_that_fails_again_can_be_put_back_again(make_rig: MakeRig, is_gone: bool):
    rig = make_rig(max_bytes_per_file=2000)
    give_up(rig, b"poison")
    if is_gone:
        forget_log(rig)
    for _ in range(3):
        assert redrive(rig).redriven == 1
        client = rig.subscribe(rdy=1)
        rig.requeue(client, *client.take())
        rig.disconnect(client)
    progress = redrive(rig)
    assert (progress.redriven, progress.skipped) == (1, {"redriven": 3})


def test_letters_of_several_channels_go_back_to_theirs(rig: Rig):
    for number in range(5):
        for channel in ("a", "b"):
            give_up(rig, b"%d" % number, channel=channel, dead="dead")
            drain(rig, channel="b" if channel == "a" else "a")
    assert redrive(rig, "dead", channel="a").redriven == 5
    assert (drain(rig, channel="a"), drain(rig, channel="b")) == ([b"0", b"1", b"2", b"3", b"4"], [])
    bounds = rig.channel("a").dead_letters.redriven["dead"].bounds
    assert len(bounds) == 2, "letters of other channels do not end a range"
    assert redrive(rig, "dead").redriven == 5


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"reason": "requeued"}, [b'{"a": {"b": 1}}', b"text", b'{"a": {"b": "x"}}']),
        ({"reason": "expired"}, []),
        ({"text": "ex"}, [b"text"]),
        ({"field": "/a/b"}, [b'{"a": {"b": 1}}', b'{"a": {"b": "x"}}']),
        ({"field": "/a/b", "value": "x"}, [b'{"a": {"b": "x"}}']),
        ({"field": "/a/b", "value": "1"}, [b'{"a": {"b": 1}}']),
        ({"field": "/a/c"}, []),
        ({"origin_topic": "x"}, []),
    ],
)
def test_a_filter_chooses(rig: Rig, wanted: dict[str, str], found: list[bytes]):
    give_up(rig, b'{"a": {"b": 1}}', b"text", b'{"a": {"b": "x"}}')
    assert redrive(rig, **wanted).redriven == len(found)
    assert drain(rig) == found


def test_a_filter_chooses_by_the_time_of_giving_up(rig: Rig):
    times = []
    for number in range(3):
        times.append(rig.clock.wall())
        give_up(rig, b"%d" % number)
        rig.pass_time(10)
    assert redrive(rig, since_ns=times[1], until_ns=times[2]).redriven == 1
    assert drain(rig) == [b"1"]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"field": "a"}, "a JSON pointer begins with /"),
        ({"field": "/a~"}, "in a JSON pointer ~0 stands for ~"),
        ({"value": "1"}, "a value needs a field"),
    ],
)
def test_a_wrong_filter_is_refused(wanted: dict[str, str], text: str):
    with pytest.raises(ValueError, match=text):
        LetterFilter(**wanted)  # type: ignore[arg-type]


def test_what_others_published_to_the_topic_is_never_put_back(rig: Rig):
    give_up(rig, b"real")
    log = rig.topic("t.dead").log
    batch = log.read(log.start)
    assert batch is not None
    forged = PackedBodies(batch.lengths, batch.data, batch.headers)
    rig.topic("t.dead").publishing.publish(forged, 0, Receipt())
    rig.publish("t.dead", b"not a letter")
    progress = redrive(rig)
    assert (progress.redriven, progress.letters, progress.foreign) == (1, 1, 2)


def test_letters_that_cannot_go_back_are_counted(rig: Rig):
    give_up(rig, b"gone", channel="gone", dead="dead")
    give_up(rig, b"ephemeral", channel="e#ephemeral", dead="dead")
    give_up(rig, b"owned", channel="owned", dead="dead")
    give_up(rig, b"replayed", channel="replayed", dead="dead")
    give_up(rig, b"old", channel="old", dead="dead")
    rig.topic().delete_channel("gone")
    rig.channel("e#ephemeral")
    rig.channel("owned").claim("a query")
    rig.channel("replayed").seek(0)
    rig.channel("old").change_policy(parse_policy({"expire_after": 5, "expired": "drop"}, "t"))
    rig.pass_time(6)
    progress = redrive(rig, "dead")
    assert progress.redriven == 0
    assert {*progress.skipped} == {"no_channel", "not_kept", "owned", "unfinished", "expired"}


def test_two_letters_of_one_message_put_it_back_once(make_rig: MakeRig):
    rig = make_rig(retention_age=1000)
    give_up(rig, b"poison")
    rig.channel().seek(0)
    client = rig.subscribe(rdy=1)
    rig.requeue(client, *client.take())
    rig.disconnect(client)
    progress = redrive(rig)
    assert (progress.redriven, progress.skipped) == (1, {"unfinished": 1})
    assert drain(rig) == [b"poison"]


def test_the_rate_is_kept(rig: Rig):
    give_up(rig, *[b"%d" % number for number in range(100)])
    progress = redrive(rig, rate=10)
    found = []
    for _ in range(5):
        found.append(progress.redriven)
        rig.pass_time(1)
        rig.maintain()
    assert found == [10, 20, 30, 40, 50]
    rig.pass_time(1000)
    rig.maintain()
    assert progress.redriven == 60 + 20, "it does not make up for all of a long pause"


def test_a_redrive_that_is_cancelled_loses_nothing(rig: Rig):
    give_up(rig, *[b"%d" % number for number in range(20)])
    progress = redrive(rig, rate=5)
    with pytest.raises(RedriveRunning):
        redrive(rig)
    running(rig).cancel()
    rig.pass_time(10)
    rig.maintain()
    assert (progress.state, progress.redriven) == ("cancelled", 5)
    assert len(drain(rig)) == 5
    rig.maintain()
    rig.crash()
    assert running(rig).progress.state == "cancelled"
    assert redrive(rig).redriven == 15
    assert len(drain(rig)) == 15


@pytest.mark.parametrize("is_crash", [True, False], ids=["crash", "stop"])
def test_the_next_start_continues(rig: Rig, is_crash: bool):
    give_up(rig, *[b"%d" % number for number in range(30)])
    redrive(rig, rate=10, reason="requeued")
    (rig.crash if is_crash else rig.restart)()
    give_up(rig, b"later", topic="u", dead="t.dead")
    for _ in range(5):
        rig.pass_time(1)
        rig.maintain()
    progress = running(rig).progress
    assert (progress.state, progress.rate, progress.filter.reason) == ("finished", 10, "requeued")
    assert sorted(drain(rig), key=int) == [b"%d" % number for number in range(30)]


def test_a_redrive_waits_while_the_channel_has_many_messages(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig(max_bytes_per_file=2000)
    monkeypatch.setattr(redrive_module, "MAX_WAITING", 50)
    monkeypatch.setattr(redrive_module, "PART_BYTES", 1)
    for number in range(4):
        give_up(rig, *[b"%d" % (100 * number + one) for one in range(40)])
    progress = redrive(rig)
    rig.maintain()
    assert progress.state == "running"
    assert running(rig).waits_for == "t:c has 50 messages to send again"
    found = drain(rig)
    while progress.state == "running":
        rig.maintain()
        found += drain(rig)
    assert len({*found}) == len(found) == 160


def test_messages_wait_for_the_checkpoint(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later, durability="fsync")
    client = rig.subscribe(rdy=1)
    rig.channel().change_policy(parse_policy({"max_attempts": 1}, "t"))
    later.run_all()
    rig.publish("t", b"poison")
    later.run_all()
    rig.turn()
    rig.requeue(client, *client.take())
    later.run_all()
    progress = redrive(rig)
    later.run()
    rig.turn()
    assert (progress.redriven, client.take()) == (1, [])
    rig.files.fail("sync", ".channel")
    later.run()
    rig.turn()
    assert client.take() == []
    rig.files.heal()
    rig.maintain()
    later.run_all()
    rig.turn()
    assert client.take_bodies() == [b"poison"]


@pytest.mark.parametrize("has_earlier", [False, True])
def test_a_checkpoint_that_takes_longer_than_a_round_of_upkeep_is_waited_for(
    make_rig: MakeRig, has_earlier: bool
):
    """Rounds of upkeep write no later checkpoint, which would replace it."""
    later = Later()
    rig = make_rig(background=later)
    give_up(rig, b"poison")
    later.run_all()
    redrive(rig)
    if has_earlier:
        rig.maintain()
    later.run()
    rig.channel().mark_changed()
    rig.maintain()
    rig.maintain()
    later.run()
    assert drain(rig) == [b"poison"]


def test_a_seek_amid_the_writing_puts_nothing_back_twice(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later, max_bytes_per_file=2000, retention_age=1000)
    give_up(rig, b"one")
    later.run_all()
    rig.topic().log.gaps.add(rig.topic().log.start, rig.topic().log.start + 1)
    redrive(rig)
    later.run()
    rig.topic().log.gaps.ranges.clear()
    rig.channel().seek(0)
    later.run_all()
    assert running(rig).progress.skipped == {"unfinished": 1}
    assert drain(rig) == [b"one"]


def fail_to_write(rig: Rig) -> None:
    """Begin a redrive whose messages cannot be written. The disk is well afterwards."""
    give_up(rig, b"one")
    forget_log(rig)
    rig.files.fail("write", ".carry.copy")
    redrive(rig)
    rig.files.heal()
    assert "redrive of t.dead: cannot write messages" in rig.broker.health.error


def test_the_error_of_a_redrive_ends_with_it(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    fail_to_write(rig)
    running(rig).cancel()
    assert (rig.broker.health.error, running(rig).waits_for) == (None, "")


def test_the_error_of_a_redrive_ends_with_its_topic(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    fail_to_write(rig)
    rig.broker.delete_topic("t.dead")
    assert rig.broker.health.error is None


@pytest.mark.parametrize("is_deleted", [False, True], ids=["cancelled", "topic deleted"])
def test_a_part_that_fails_after_the_end_of_the_redrive_is_no_error(make_rig: MakeRig, is_deleted: bool):
    later = Later()
    rig = make_rig(background=later, max_bytes_per_file=2000)
    give_up(rig, b"one")
    forget_log(rig)
    later.run_all()
    rig.maintain()
    later.run_all()
    redrive(rig)
    later.run()
    if is_deleted:
        rig.broker.delete_topic("t.dead")
    else:
        running(rig).cancel()
    rig.files.fail("write", ".carry.copy")
    later.run_all()
    rig.files.heal()
    assert "redrive t.dead" not in rig.broker.health.errors


def test_a_redrive_leaves_no_file_in_a_new_dead_letter_topic(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later)
    give_up(rig, b"one", b"two")
    later.run_all()
    progress = redrive(rig, rate=1)
    later.run()
    assert progress.redriven == 1, "its checkpoint is under way"
    rig.broker.delete_topic("t.dead")
    rig.channel("c", "t.dead")
    later.run_all()
    assert rig.names("redrive.json", "t.dead") == []
    assert drain(rig) == [b"one"]
    rig.restart()
    assert rig.broker.redrives.find(rig.topic("t.dead")) is None


@pytest.mark.parametrize("is_deleted", [False, True], ids=["replaced", "topic deleted"])
def test_messages_of_a_redrive_that_has_ended_are_not_stuck(rig: Rig, is_deleted: bool):
    """The checkpoint that they wait for fails, and is written again."""
    give_up(rig, b"one", b"two")
    rig.files.fail("replace", ".channel")
    assert redrive(rig, rate=1).redriven == 1
    running(rig).cancel()
    if is_deleted:
        rig.broker.delete_topic("t.dead")
    else:
        redrive(rig)
    client = rig.subscribe(rdy=10)
    rig.maintain()
    rig.turn()
    assert client.take() == []
    rig.files.heal()
    for _ in range(3):
        rig.maintain()
        rig.turn()
    assert client.take_bodies() == ([b"one"] if is_deleted else [b"one", b"two"])


def test_two_redrives_into_one_channel_do_not_release_the_messages_of_each_other(make_rig: MakeRig):
    """A message is sent only when a checkpoint says that it was put back."""
    later = Later()
    rig = make_rig(background=later, max_bytes_per_file=2000)
    give_up(rig, b"gone", dead="first")
    forget_log(rig)
    give_up(rig, b"kept", dead="second")
    later.run_all()
    rig.maintain()
    later.run_all()
    client = rig.subscribe(rdy=10)
    redrive(rig, "first")
    later.run()
    ((carry, carried),) = later.jobs
    later.jobs = []
    redrive(rig, "second")
    later.run()
    ((write, written),) = later.jobs
    later.jobs = []
    write()
    carry()
    carried()
    written()
    rig.turn()
    assert client.take_bodies() == [b"kept"]
    while running(rig, "first").is_running:
        rig.maintain()
        assert client.take() == []
        later.run_all()
        rig.turn()
    assert client.take_bodies() == [b"gone"]


def test_messages_are_put_back_only_if_the_thread_that_writes_them_has_no_error_at_all(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig(max_bytes_per_file=2000)
    give_up(rig, b"one")
    forget_log(rig)

    def run_out(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(CarriedFile, "write_singles", run_out)
    progress = redrive(rig)
    assert (progress.redriven, progress.state) == (0, "running")
    assert "MemoryError" in rig.broker.health.error
    monkeypatch.undo()
    rig.maintain()
    assert progress.redriven == 1
    assert rig.broker.health.error is None
    assert drain(rig) == [b"one"]


class Killed(BaseException):
    """nsqd was killed."""


class KillingFiles(TestFiles):
    """Kills nsqd before a call that changes something."""

    left = -1
    """Changing calls that still work; negative for all."""

    def _note(self, call: str, path: str) -> None:
        super()._note(call, path)
        if call in ("write", "sync", "replace", "unlink", "rename", "open") and not self._is_inside:
            if self.left == 0:
                raise Killed
            self.left -= 1

    def rename(self, source: Path, target: Path) -> None:
        self._note("rename", str(target))
        super().rename(source, target)


def test_a_kill_at_any_call_neither_loses_nor_doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redrive_module, "PART_BYTES", 1)
    bodies = [b"%d" % number + b"." * 500 for number in range(12)]
    number = 0
    while True:
        (tmp_path / str(number)).mkdir()
        rig = Rig(tmp_path / str(number), files=KillingFiles(), max_bytes_per_file=2000)
        assert isinstance(rig.files, KillingFiles)
        for start in (0, 3, 6):
            give_up(rig, *bodies[start : start + 3])
        forget_log(rig)
        give_up(rig, *bodies[9:])
        rig.maintain()
        rig.files.left = number
        was_killed = False
        try:
            redrive(rig)
            rig.maintain()
        except Killed:
            was_killed = True
        rig.files.left = -1
        rig.crash()
        rig.maintain()
        known = rig.broker.redrives.find(rig.topic("t.dead"))
        assert known is None or not known.is_running
        if known is None:
            redrive(rig)
        assert Counter(drain(rig)) == Counter(bodies), number
        again = redrive(rig)
        assert (again.redriven, again.skipped) == (0, {"redriven": 12})
        rig.close()
        if not was_killed:
            break
        number += 1
    assert number > 20


def test_a_crash_keeps_what_was_put_back_while_another_channel_has_an_old_checkpoint(rig: Rig):
    rig.channel("b").change_policy(parse_policy({"dead_letters": "dead"}, "t"))
    give_up(rig, b"x", channel="a", dead="dead")
    assert redrive(rig, "dead").redriven == 1
    rig.crash()
    assert drain(rig, channel="a") == [b"x"]
