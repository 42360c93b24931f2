"""Settings of a topic that override the daemon's flags: checked, applied at once, and kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from nsparq.broker.settings import TopicSettings
from nsparq.errors import WriteFailed
from nsparq.storage.checked_json import crc_of
from nsparq.storage.files import Files
from nsparq.storage.log import Durability, LogSettings
from nsparq.storage.state_files import TopicState, read_topic_state
from tests.broker.rig import Later, Rig, bodies, counts

MakeRig = Callable[..., Rig]


def consume(rig: Rig, client) -> list[bytes]:
    found = []
    while messages := client.take():
        found += [message.body for message in messages]
        rig.finish(client, *messages)
    return found


# values


def test_without_settings_the_flags_apply():
    flags = LogSettings(Durability.FSYNC, 1, 2, 3.0, 4)
    assert TopicSettings().applied_to(flags) == flags
    assert TopicSettings().stored() == {}


def test_settings_override_the_flags():
    flags = LogSettings(Durability.FSYNC, 1, 2, 3.0, 4)
    settings = TopicSettings().changed({"retention_age": 60, "retention_bytes": 0, "durability": "memory"})
    assert settings.applied_to(flags) == LogSettings(Durability.MEMORY, 1, 2, 60.0, 0)
    assert settings.stored() == {"retention_age": 60.0, "retention_bytes": 0, "durability": "memory"}


def test_only_named_settings_change_and_none_means_the_flag():
    settings = TopicSettings(60.0, 1000, "os").changed({"retention_age": None})
    assert settings == TopicSettings(None, 1000, "os")
    assert settings.changed({}) == settings


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"retention": 5},
            "no setting 'retention'; there are retention_age, retention_bytes, ",
        ),
        ({"changed": 5}, "no setting"),
        ({"durability": "disk"}, 'durability must be "os", "fsync", "memory" or null, not \'disk\''),
        ({"durability": ["os"]}, "durability must be"),
        ({"durability": 1}, "durability must be"),
        ({"retention_bytes": -1}, "retention_bytes must be a whole number, not negative"),
        ({"retention_bytes": 1.5}, "retention_bytes must be"),
        ({"retention_bytes": True}, "retention_bytes must be"),
        ({"retention_bytes": "1"}, "retention_bytes must be"),
        ({"retention_age": -0.1}, "retention_age must be a number of seconds, not negative"),
        ({"retention_age": math.inf}, "retention_age must be"),
        ({"retention_age": math.nan}, "retention_age must be"),
        ({"retention_age": 10**400}, "retention_age must be"),
        ({"retention_age": False}, "retention_age must be"),
        ({"retention_age": "soon"}, "retention_age must be seconds, or a duration such as 24h"),
        ({"retention_age": "-1h"}, "retention_age must be a number of seconds, not negative"),
    ],
)
def test_invalid_settings_are_refused_and_nothing_changes(rig: Rig, changes: dict[str, object], text: str):
    topic = rig.topic()
    with pytest.raises(ValueError, match=text):
        topic.change_settings({"retention_bytes": 77} | changes)
    assert topic.settings == TopicSettings()
    assert topic.log.settings == rig.broker.log_settings


@pytest.mark.parametrize("changes", [{"durability": "os"}, {"retention_age": 1}, {}])
def test_an_ephemeral_topic_has_no_settings(rig: Rig, changes: dict[str, object]):
    with pytest.raises(ValueError, match="t#ephemeral is ephemeral"):
        rig.topic("t#ephemeral").change_settings(changes)


# keeping


@pytest.mark.parametrize("how", ["restart", "crash"])
def test_settings_are_on_disk_before_they_count(rig: Rig, how: str):
    settings = rig.topic().change_settings({"retention_age": 3600, "durability": "fsync"})
    assert settings == rig.topic().settings == TopicSettings(3600.0, None, "fsync")
    rig.topic("other")
    rig.crash() if how == "crash" else rig.restart()
    assert rig.topic().settings == settings
    assert rig.topic().is_synchronous
    assert rig.topic().log.settings == settings.applied_to(rig.broker.log_settings)
    assert rig.topic("other").settings == TopicSettings()
    assert not rig.topic("other").is_synchronous
    rig.topic().change_settings({"retention_age": None, "durability": None})
    rig.crash()
    assert rig.topic().settings == TopicSettings()


def test_settings_that_the_disk_refuses_do_not_count(rig: Rig):
    topic = rig.topic()
    rig.files.fail("replace", "topic.json")
    with pytest.raises(OSError, match="No space left"):
        topic.change_settings({"durability": "fsync", "retention_bytes": 5})
    assert topic.settings == TopicSettings()
    assert not topic.is_synchronous
    assert topic.log.settings == rig.broker.log_settings
    rig.files.heal()
    assert rig.publish("t", b"x").is_ok
    topic.change_settings({"durability": "fsync"})
    assert topic.is_synchronous


def test_a_state_without_settings_can_be_read(tmp_path: Path):
    """As a topic without settings writes it, and as older versions did."""
    fields = {"incarnation": "x", "origin": 5, "paused": False, "pause_position": -1}
    fields |= {"clean_end": 7, "gaps": [], "import_start": -1}
    (tmp_path / "topic.json").write_text(json.dumps(fields | {"crc": crc_of(fields)}))
    state = read_topic_state(Files(), tmp_path)
    assert state == TopicState(incarnation="x", origin=5, clean_end=7)
    state.write(Files(), tmp_path)
    assert "settings" not in json.loads((tmp_path / "topic.json").read_text().splitlines()[-1])


@pytest.mark.parametrize("stored", [{"durability": "tape"}, {"replicas": 3}])
def test_unknown_stored_settings_do_not_lose_the_topic(
    rig: Rig, stored: dict[str, object], caplog: pytest.LogCaptureFixture
):
    rig.channel()
    rig.publish("t", b"x")
    rig.close()
    directory = rig.topic_directory("t")
    state = read_topic_state(Files(), directory)
    state.settings = stored
    state.write(Files(), directory)
    rig.start()
    assert rig.topic().settings == TopicSettings()
    assert counts(rig.channel()) == (1, 0, 0)
    assert "settings are invalid" in caplog.text


# durability


def test_with_fsync_publishers_wait_for_the_disk_from_now_on(make_rig: MakeRig):
    background = Later()
    rig = make_rig(background=background)
    topic = rig.topic()
    rig.topic("other")
    assert rig.publish("t", b"at once").is_ok
    topic.change_settings({"durability": "fsync"})
    background.run_all()
    assert topic.log.committed == topic.log.end, "what was acknowledged before is synced too"
    waiting, at_once = rig.publish("t", b"waits"), rig.publish("other", b"x")
    assert waiting.answers == []
    assert at_once.is_ok
    background.run_all()
    assert waiting.is_ok
    topic.change_settings({"durability": None})
    assert rig.publish("t", b"at once again").is_ok


def test_a_publisher_waiting_for_fsync_is_answered_after_the_setting_changed(make_rig: MakeRig):
    background = Later()
    rig = make_rig(background=background, durability="fsync")
    topic = rig.topic()
    first, second = rig.publish("t", b"first"), rig.publish("t", b"second")
    topic.change_settings({"durability": "os"})
    third = rig.publish("t", b"third")
    assert (first.answers, second.answers, third.is_ok) == ([], [], True)
    background.run_all()
    assert first.is_ok
    assert second.is_ok


def test_a_change_to_fsync_syncs_earlier_messages(make_rig: MakeRig):
    rig = make_rig()
    rig.channel("a")
    rig.channel("b#ephemeral")
    rig.publish("t", b"x")
    rig.files.calls.clear()
    rig.topic().change_settings({"durability": "fsync"})
    rig.broker.changes.when_durable(lambda error: None)
    # The log, the channel, and the topic itself.
    assert rig.files.calls["sync"] == 3
    rig.channel("c")
    rig.broker.changes.when_durable(lambda error: None)
    assert rig.files.calls["sync"] == 4


@pytest.mark.parametrize("target", ["os", "fsync"])
def test_a_change_from_memory_writes_what_memory_holds(make_rig: MakeRig, target: str):
    rig = make_rig(durability="memory", mem_queue_size=100)
    rig.channel()
    rig.publish("t", *bodies(20))
    rig.publish("t", b"later", defer_ms=60_000)
    assert rig.names("*.log") == []
    rig.topic().change_settings({"durability": target})
    rig.publish("t", b"new")
    rig.crash()
    assert counts(rig.channel()) == (21, 0, 1)
    assert consume(rig, rig.subscribe(rdy=100)) == [*bodies(20), b"new"]


def test_a_change_from_memory_fails_if_the_disk_refuses(make_rig: MakeRig):
    rig = make_rig(durability="memory", mem_queue_size=100)
    client = rig.subscribe(rdy=5)
    rig.publish("t", *bodies(20))
    rig.files.fail("write", ".log")
    with pytest.raises(WriteFailed):
        rig.topic().change_settings({"durability": "os"})
    assert rig.topic().settings == TopicSettings()
    assert rig.topic().log.settings.durability is Durability.MEMORY
    assert rig.publish("t", b"more").is_ok
    rig.files.heal()
    rig.topic().change_settings({"durability": "os"})
    assert consume(rig, client) == [*bodies(20), b"more"]


def test_going_to_memory_and_back_loses_nothing(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=5, max_bytes_per_file=300)
    rig.channel()
    published = []
    for i, durability in enumerate(["memory", "os", "memory", None, "memory", "fsync"] * 4):
        rig.topic().change_settings({"durability": durability})
        new = bodies(7, 7 * i)
        published += new
        assert rig.publish("t", *new).is_ok
        rig.maintain()
        assert counts(rig.channel()) == (len(published), 0, 0)
    rig.crash()
    assert counts(rig.channel()) == (len(published), 0, 0)
    assert consume(rig, rig.subscribe(rdy=100)) == published


# retention


def test_retention_applies_from_the_next_round_on(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=300)
    client = rig.subscribe(rdy=100)
    topic = rig.topic()
    topic.change_settings({"retention_bytes": 2000})
    start = topic.log.end
    for i in range(30):
        rig.publish("t", *bodies(5, 5 * i))
        consume(rig, client)
        rig.maintain()
    assert 1500 < topic.log.size_bytes <= 2000
    assert topic.log.start > start
    topic.change_settings({"retention_bytes": 600})
    rig.maintain()
    assert topic.log.size_bytes <= 600
    topic.change_settings({"retention_bytes": None})
    rig.maintain()
    assert len(rig.names("*.log")) == 1


def test_retention_by_age(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=300)
    client = rig.subscribe(rdy=100)
    topic = rig.topic()
    topic.change_settings({"retention_age": 10})
    start = topic.log.end
    for i in range(20):
        rig.publish("t", *bodies(5, 5 * i))
        consume(rig, client)
        rig.clock.advance(1)
        rig.maintain()
    kept = rig.topic().log.end - rig.topic().log.start
    assert 50 <= kept < 75
    plan = rig.channel().seek(start)
    rig.turn()
    assert plan.target == topic.log.start
    assert len(consume(rig, client)) == kept
