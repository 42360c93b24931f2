"""broker.broker: opening and closing, metadata, health, turn and upkeep, and stats."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import pytest

from nsparq.broker import stats as stats_of_broker
from nsparq.broker.broker import Broker, run_inline
from nsparq.broker.delivery import PUMP_NS
from nsparq.broker.stats import broker_stats, client_stats, stats_in_slices, topic_stats
from nsparq.broker.turn import DELIVERY_MESSAGES
from nsparq.broker.upkeep import SLICE_NS
from nsparq.errors import StartError
from nsparq.options import NsqdOptions
from tests.broker.rig import MILLISECOND, FakeClient, Later, Receipt, Rig, TestFiles, bodies, counts, publish

MakeRig = Callable[..., Rig]


def metadata(rig: Rig) -> dict:
    return json.loads((rig.data_path / "nsqd.dat").read_bytes())


# Opening and closing.


def test_a_data_path_belongs_to_one_broker(rig: Rig):
    other = Broker(rig.options)
    with pytest.raises(StartError, match="possibly in use by another instance of nsqd"):
        other.open()
    other.close()
    assert rig.publish("t", b"x").is_ok


def test_a_data_path_that_is_not_there_is_refused(tmp_path: Path):
    broker = Broker(NsqdOptions(data_path=str(tmp_path / "missing")))
    with pytest.raises(StartError, match="failed to lock data-path"):
        broker.open()


def test_closing_unlocks_the_data_path_and_twice_is_safe(rig: Rig):
    rig.close()
    rig.close()
    other = Broker(rig.options)
    other.open()
    other.close()


def test_a_broker_that_fails_to_load_leaves_nothing_open(tmp_path: Path):
    (tmp_path / "nsqd.dat").mkdir()
    broker = Broker(NsqdOptions(data_path=str(tmp_path)))
    with pytest.raises(StartError, match="Is a directory"):
        broker.open()
    assert broker.data_path._lock_fd == -1
    broker.close()
    (tmp_path / "nsqd.dat").rmdir()
    again = Broker(NsqdOptions(data_path=str(tmp_path)))
    again.open()
    again.close()


def test_the_empty_data_path_is_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    broker = Broker(NsqdOptions())
    broker.open()
    broker.close()
    assert (tmp_path / "nsqd.dat").exists()


def test_closing_appends_what_was_published_and_answers(rig: Rig):
    rig.channel()
    receipt = rig.send("t", b"x")
    rig.close()
    assert receipt.is_ok
    rig.start()
    assert rig.channel().depth == 1


def test_closing_waits_for_no_thread(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    rig.channel()
    receipt = rig.send("t", b"x")
    rig.close()
    assert receipt.is_ok
    assert not later.jobs


def test_closing_ends_all_connections(rig: Rig):
    clients = [rig.subscribe(name, rdy=1) for name in ("a", "b")]
    rig.close()
    assert [client.close_calls for client in clients] == [1, 1]


def test_a_broker_that_fails_to_load_closes_the_files_of_loaded_topics(rig: Rig):
    rig.publish("a", b"x")
    rig.publish("b", b"x")
    rig.close()
    rig.files.fail("open", "b.topic/" + rig.names("*.log", "b")[0], errno.EACCES)
    for index in rig.data_path.rglob("*.index"):
        index.unlink()
    with pytest.raises(StartError, match="failed to load data-path .*: .*Permission denied"):
        rig.start()
    assert rig.broker.data_path._lock_fd == -1
    rig.files.heal()
    rig.start()
    assert sorted(rig.broker.topics) == ["a", "b"]


def test_unknown_files_among_the_topics_are_left_alone(rig: Rig):
    rig.publish("t", b"x")
    rig.close()
    stranger = rig.data_path / "topics" / "lost+found"
    stranger.mkdir()
    rig.start()
    assert [*rig.broker.topics] == ["t"]
    assert stranger.exists()


def test_run_inline_runs_the_work_and_then_the_callback():
    order = []
    run_inline(lambda: order.append(1), lambda: order.append(2))
    assert order == [1, 2]


# Topics and metadata.


def test_topics_and_channels_are_made_on_first_use_and_found_again(rig: Rig):
    topic = rig.broker.get_topic("t")
    assert rig.broker.get_topic("t") is topic
    assert topic.get_channel("c") is topic.get_channel("c")
    rig.publish("u", b"x")
    assert sorted(rig.broker.topics) == ["t", "u"]


def test_a_fresh_data_path_gets_its_metadata_at_once(rig: Rig):
    assert metadata(rig) == {"topics": [], "version": "1.3.0", "crc": ANY}


def test_new_topics_and_channels_are_in_the_metadata_after_the_next_maintenance(rig: Rig):
    rig.channel("c")
    rig.topic("bare")
    rig.maintain()
    assert metadata(rig)["topics"] == [
        {"name": "t", "paused": False, "channels": [{"name": "c", "paused": False}]},
        {"name": "bare", "paused": False, "channels": []},
    ]


def test_maintenance_writes_no_metadata_when_nothing_has_changed(rig: Rig):
    rig.channel()
    rig.maintain()
    (rig.data_path / "nsqd.dat").unlink()
    rig.maintain()
    assert not (rig.data_path / "nsqd.dat").exists()


def test_pause_and_unpause_are_in_the_metadata_at_once(rig: Rig):
    channel = rig.channel()
    channel.pause()
    assert metadata(rig)["topics"][0]["channels"] == [{"name": "c", "paused": True}]
    rig.topic().pause()
    assert metadata(rig)["topics"][0]["paused"] is True
    channel.unpause()
    rig.topic().unpause()
    assert metadata(rig)["topics"] == [
        {"name": "t", "paused": False, "channels": [{"name": "c", "paused": False}]}
    ]


def test_metadata_is_written_in_the_background_and_waiting_callbacks_are_called(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later)
    rig.channel("c")
    later.run_all()
    told: list[str] = []
    rig.files.calls.clear()
    rig.channel("c").pause()
    rig.broker.changes.when_durable(lambda _: told.append("pause"))
    rig.topic().pause()
    rig.broker.changes.when_durable(lambda _: told.append("topic"))
    rig.topic("other").pause()
    rig.broker.changes.when_durable(lambda _: told.append("other"))
    assert (told, rig.files.calls["replace sync"]) == ([], 0)
    assert later.run() == 1
    assert (told, rig.files.calls["replace sync"]) == (["pause"], 1)
    assert later.run() == 1
    assert (told, rig.files.calls["replace sync"]) == (["pause", "topic", "other"], 2), (
        "two changes, one write"
    )
    assert not later.jobs
    assert [topic["paused"] for topic in metadata(rig)["topics"]] == [True, True]
    rig.broker.changes.when_durable(lambda _: told.append("at once"))
    assert told[-1] == "at once"


def test_callbacks_are_called_if_the_metadata_cannot_be_written(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later)
    rig.files.fail("replace", "nsqd.dat")
    told: list[str] = []
    for name in ("a", "b"):
        rig.topic(name).pause()
        rig.broker.changes.when_durable(lambda _, name=name: told.append(name))
    later.run_all()
    assert told == ["a", "b"]
    assert "failed to persist metadata" in rig.broker.health.error


def test_deletions_are_in_the_metadata_at_once(rig: Rig):
    rig.channel("c")
    rig.channel("d")
    rig.maintain()
    rig.topic().delete_channel("c")
    assert [c["name"] for c in metadata(rig)["topics"][0]["channels"]] == ["d"]
    rig.broker.delete_topic("t")
    assert metadata(rig)["topics"] == []


def test_topics_of_another_nsqd_are_made_as_its_metadata_says(make_rig: MakeRig, tmp_path: Path):
    rig = make_rig()
    rig.close()
    listed = {
        "topics": [
            {"name": "t", "paused": True, "channels": [{"name": "c", "paused": True}, {"name": "d"}]},
            {"name": "bare", "paused": False, "channels": None},
        ],
        "version": "1.2.1",
    }
    (rig.data_path / "nsqd.dat").write_text(json.dumps(listed))
    rig.start()
    assert sorted(rig.broker.topics) == ["bare", "t"]
    assert rig.topic("t").paused
    assert rig.channel("c").paused
    assert not rig.channel("d").paused
    assert rig.topic("bare").channels == {}
    rig.crash()
    assert rig.topic("t").paused
    assert rig.channel("c").paused


def test_our_own_state_wins_over_the_metadata(rig: Rig):
    rig.channel().pause()
    rig.close()
    listed = {"topics": [{"name": "t", "paused": True, "channels": [{"name": "c", "paused": False}]}]}
    (rig.data_path / "nsqd.dat").write_text(json.dumps(listed))
    rig.start()
    assert not rig.topic().paused
    assert rig.channel().paused


@pytest.mark.parametrize("name", ["bad name", "", "x" * 65, "\ud800"], ids=["blank", "empty", "long", "half"])
def test_an_invalid_topic_name_in_the_metadata_is_skipped(rig: Rig, name: str):
    rig.close()
    topics = [{"name": name, "channels": [{"name": "c"}]}, {"name": "good", "channels": []}]
    (rig.data_path / "nsqd.dat").write_text(json.dumps({"topics": topics}))
    rig.start()
    assert [*rig.broker.topics] == ["good"]


@pytest.mark.parametrize("name", ["bad name", "\ud800"], ids=["blank", "half"])
def test_an_invalid_channel_name_in_the_metadata_skips_only_that_channel(rig: Rig, name: str):
    rig.close()
    topics = [{"name": "t", "paused": True, "channels": [{"name": name}, {"name": "good"}]}]
    (rig.data_path / "nsqd.dat").write_text(json.dumps({"topics": topics}))
    rig.start()
    assert [*rig.broker.topics["t"].channels] == ["good"]
    assert rig.topic("t").paused


def test_a_channel_that_only_another_nsqd_s_metadata_knows_is_made_at_the_end(rig: Rig):
    rig.channel("a")
    rig.publish("t", b"before")
    rig.close()
    listed = {"topics": [{"name": "t", "channels": [{"name": "a"}, {"name": "b"}]}], "version": "1.3.0"}
    (rig.data_path / "nsqd.dat").write_text(json.dumps(listed))
    rig.start()
    assert sorted(rig.topic().channels) == ["a", "b"]
    assert (counts(rig.channel("a")), counts(rig.channel("b"))) == ((1, 0, 0), (0, 0, 0))
    assert rig.topic().corrupt_files == 0


def assert_unhealthy_until_healed(rig: Rig, text: str) -> None:
    """The disk has refused something. Nobody has to try it again for health to be OK."""
    rig.files.fail("replace", "nsqd.dat")
    assert text in rig.broker.health.error
    rig.maintain()
    assert "No space left on device" in rig.broker.health.error
    rig.files.heal()
    rig.maintain()
    assert rig.broker.health.error is None


def test_a_topic_that_the_disk_refuses_is_not_created(rig: Rig):
    rig.files.fail("replace", "topic.json")
    with pytest.raises(OSError):
        rig.publish("t", b"x")
    assert "t" not in rig.broker.topics
    assert_unhealthy_until_healed(rig, "failed to create topic t")
    assert rig.publish("t", b"x").is_ok


def test_a_channel_that_the_disk_refuses_is_not_created(rig: Rig):
    """Otherwise it would accept messages that a crash loses."""
    rig.channel("other")
    rig.files.fail("replace", ".channel")
    with pytest.raises(OSError):
        rig.subscribe(channel="c")
    assert [*rig.topic().channels] == ["other"]
    assert_unhealthy_until_healed(rig, "failed to create channel t:c")
    rig.channel("c")
    rig.publish("t", b"x")
    rig.crash()
    assert rig.channel("c").depth == 1


def test_a_first_channel_that_the_disk_refuses_leaves_the_topic_its_messages(rig: Rig):
    rig.publish("t", b"0")
    rig.publish("t", b"later", defer_ms=1000)
    rig.files.fail("replace", ".channel")
    with pytest.raises(OSError):
        rig.channel()
    assert rig.topic().depth == 2
    rig.files.heal()
    assert counts(rig.channel()) == (1, 0, 1)


# Health.


def test_health_is_the_error_of_the_latest_write_until_one_succeeds(rig: Rig):
    assert broker_stats(rig.broker)["health"] == "OK"
    rig.topic()
    rig.files.fail("write", ".log")
    rig.publish("t", b"x")
    assert broker_stats(rig.broker)["health"].startswith("NOK - ")
    assert "No space left on device" in rig.broker.health.error
    rig.files.heal()
    rig.publish("t", b"x")
    assert broker_stats(rig.broker)["health"] == "OK"


def test_a_publish_to_an_ephemeral_topic_does_not_clear_a_disk_error(rig: Rig):
    rig.topic()
    rig.files.fail("write", ".log")
    rig.publish("t", b"x")
    rig.publish("u#ephemeral", b"x")
    assert rig.broker.health.error is not None


def test_metadata_that_cannot_be_written_shows_in_health_and_is_tried_again(rig: Rig):
    rig.files.fail("replace", "nsqd.dat", errno.EIO)
    rig.channel()
    rig.maintain()
    assert "failed to persist metadata" in rig.broker.health.error
    rig.files.heal()
    rig.maintain()
    assert [t["name"] for t in metadata(rig)["topics"]] == ["t"]


def test_a_checkpoint_that_cannot_be_written_shows_in_health_and_is_tried_again(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    rig.finish(client, *client.take())
    rig.files.fail("replace", ".channel")
    rig.maintain()
    assert "failed to checkpoint t:c" in rig.broker.health.error
    rig.files.heal()
    rig.maintain()
    rig.crash()
    assert counts(rig.channel()) == (0, 0, 0)


def publish_a_hundred(rig: Rig) -> None:
    """Messages of 150 bytes, ten at a time: several segments, if a file holds 2,000 bytes."""
    for number in range(0, 100, 10):
        rig.publish("t", *bodies(10, start=number, size=150))


def test_messages_that_cannot_be_carried_over_show_in_health_and_stay_in_the_log(
    make_rig: MakeRig,
):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    publish_a_hundred(rig)
    held, *rest = client.take()
    rig.finish(client, *rest)
    rig.files.fail("write", ".carry.copy")
    rig.maintain()
    assert "cannot carry messages over" in rig.broker.health.error
    rig.requeue(client, held)
    assert client.take_bodies() == [held.body]
    rig.files.heal()
    rig.maintain()
    assert rig.names("*.carry") == ["c.carry"]
    rig.requeue(client, held)
    assert client.take_bodies() == [held.body]


def test_carried_messages_whose_sync_fails_are_not_given_up(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    publish_a_hundred(rig)
    held, *rest = client.take()
    rig.finish(client, *rest)
    rig.files.fail("sync", ".carry.copy", errno.EIO)
    rig.maintain()
    rig.files.heal()
    rig.maintain()
    rig.maintain()
    rig.crash()
    assert rig.subscribe(rdy=10).take_bodies() == [held.body]


@pytest.mark.parametrize(("call", "suffix"), [("write", ".carry.copy"), ("open_read", ".log")])
def test_the_error_of_carrying_over_ends_when_no_message_is_left_to_carry(
    make_rig: MakeRig, call: str, suffix: str
):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    publish_a_hundred(rig)
    held, *rest = client.take()
    rig.finish(client, *rest)
    rig.files.fail(call, suffix, errno.EMFILE)
    rig.maintain()
    assert "t:c: cannot carry messages over" in rig.broker.health.error
    rig.files.heal()
    rig.finish(client, held)
    rig.maintain()
    assert rig.broker.health.error is None


@pytest.mark.parametrize("is_deleted", [False, True])
def test_each_channel_has_its_own_error_of_carrying_over(make_rig: MakeRig, is_deleted: bool):
    rig = make_rig(max_bytes_per_file=2000)
    clients = [rig.subscribe(channel=name, rdy=200) for name in ("a", "b")]
    publish_a_hundred(rig)
    for client in clients:
        rig.finish(client, *client.take()[1:])
    rig.files.fail("write", "a.carry.copy")
    rig.maintain()
    assert rig.names("*.carry") == ["b.carry"]
    assert "t:a: cannot carry messages over" in rig.broker.health.error
    if is_deleted:
        rig.topic().delete_channel("a")
    else:
        rig.files.heal()
        rig.maintain()
    assert rig.broker.health.error is None


@pytest.mark.parametrize(("call", "suffix"), [("sync_pending", ""), ("unlink", ".log")])
def test_segments_that_cannot_be_removed_show_in_health_and_are_tried_again(
    make_rig: MakeRig, call: str, suffix: str
):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    publish_a_hundred(rig)
    rig.finish(client, *client.take())
    rig.files.fail(call, suffix, errno.EIO)
    rig.maintain()
    assert "cannot remove segments of t" in rig.broker.health.error
    rig.files.heal()
    rig.clock.advance(10)
    rig.maintain()
    assert len(rig.names("*.log")) == 1
    assert rig.broker.health.error is None


def test_a_deleted_topic_that_cannot_be_removed_shows_in_health_and_is_tried_again(rig: Rig):
    rig.channel()
    rig.files.fail("remove_tree", error=errno.EIO)
    rig.broker.delete_topic("t")
    assert "cannot remove t." in rig.broker.health.error
    rig.files.heal()
    rig.maintain()
    assert [*(rig.data_path / "topics").iterdir()] == []
    assert rig.broker.health.error is None


# The turn.


def test_the_broker_asks_to_be_woken_once_for_all_that_a_turn_has_to_do(rig: Rig):
    client = rig.subscribe()
    rig.turn()
    rig.wakes = 0
    rig.send("t", b"x")
    rig.send("u", b"x")
    client.channel.set_ready(client, 1)
    assert rig.wakes == 1
    rig.turn()
    assert client.take_bodies() == [b"x"]
    rig.wakes = 0
    rig.send("t", b"y")
    assert rig.wakes == 1


def test_an_idle_turn_does_nothing(rig: Rig):
    rig.channel()
    rig.turn()
    rig.files.calls.clear()
    rig.turn()
    assert not rig.files.calls


def test_the_time_that_one_channel_may_send_is_limited(rig: Rig):
    crew = [rig.subscribe() for _ in range(50)]
    rig.publish("t", *bodies(2000))
    for client in crew:
        client.channel.set_ready(client, 2500)

    def ticking() -> int:
        rig.clock.advance(PUMP_NS / 4e9)
        return rig.clock()

    rig.broker.monotonic_ns = ticking
    rig.wakes = 0
    rig.broker.turn()
    assert 0 < sum(len(client.messages) for client in crew) < 2000
    assert rig.wakes == 1, "it goes on in the next turn"
    rig.turn()
    shares = [len(client.messages) for client in crew]
    assert sum(shares) == 2000
    assert max(shares) < 2 * min(shares)


def test_with_much_to_deliver_a_turn_serves_some_channels_and_the_next_turn_the_others(rig: Rig):
    clients = [rig.subscribe("t", f"c{number}", rdy=2500) for number in range(8)]
    receipt = Receipt()
    rig.wakes = 0
    publish(rig.broker, "t", bodies(DELIVERY_MESSAGES), receipt)
    rig.broker.turn()
    assert receipt.is_ok
    lengths = [len(client.messages) for client in clients]
    assert lengths == [DELIVERY_MESSAGES] * 2 + [0] * 6, "one in four"
    assert rig.wakes == 2, "once for the publish, once for those that are left"
    publish(rig.broker, "t", bodies(10), Receipt())
    rig.broker.turn()
    lengths = [len(client.messages) for client in clients]
    assert lengths == [DELIVERY_MESSAGES] * 2 + [DELIVERY_MESSAGES + 10] * 2 + [0] * 4, (
        "nobody overtakes them"
    )
    rig.turn()
    for client in clients:
        assert [message.body for message in client.messages] == bodies(DELIVERY_MESSAGES) + bodies(10)


def test_with_little_to_deliver_a_turn_serves_all_channels(rig: Rig):
    clients = [rig.subscribe("t", f"c{number}", rdy=2500) for number in range(8)]
    count = DELIVERY_MESSAGES // 8
    publish(rig.broker, "t", bodies(count), Receipt())
    rig.broker.turn()
    assert [len(client.messages) for client in clients] == [count] * 8


def test_a_channel_deleted_before_its_part_of_the_turn_is_not_served(rig: Rig):
    clients = [rig.subscribe("t", f"c{number}", rdy=2500) for number in range(8)]
    publish(rig.broker, "t", bodies(DELIVERY_MESSAGES), Receipt())
    rig.broker.turn()
    rig.broker.topics["t"].delete_channel("c7")
    rig.turn()
    assert [len(client.messages) for client in clients] == [DELIVERY_MESSAGES] * 7 + [0]


def test_an_error_in_one_channel_does_not_stop_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    clients = [rig.subscribe("t", f"c{number}", rdy=2500) for number in range(3)]

    def fail(now_ns: int) -> int:
        raise RuntimeError("in the second channel")

    channel = clients[1].channel
    assert channel is not None
    monkeypatch.setattr(channel.delivery, "pump", fail)
    publish(rig.broker, "t", bodies(10), Receipt())
    rig.turn()
    assert [len(client.messages) for client in clients] == [10, 0, 10]
    assert "in the second channel" in caplog.text
    monkeypatch.undo()
    rig.maintain()
    rig.turn()
    assert [len(client.messages) for client in clients] == [10, 10, 10]


def test_a_read_error_in_one_topic_does_not_stop_the_others(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=1)
    for name in ("a", "b"):
        rig.channel("c", name)
        for number in range(5):
            rig.publish(name, b"%d" % number)
    clients = {name: rig.subscribe(name) for name in ("a", "b")}
    log = rig.names("*.log", "a")[0]
    for call in ("read", "read_cached"):
        rig.files.fail(call, f"a.topic/{log}", errno.EIO)
    for client in clients.values():
        client.channel.set_ready(client, 100)
    rig.turn()
    assert clients["b"].take_bodies() == bodies(5)
    assert clients["a"].take_bodies() == []
    assert counts(rig.channel("c", "a")) == (5, 0, 0)
    rig.files.heal()
    rig.maintain()
    rig.turn()
    assert clients["a"].take_bodies() == bodies(5)


# Upkeep.


def test_a_change_is_checkpointed_once_by_the_next_round_of_upkeep(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.subscribe("u", rdy=1)
    rig.maintain()
    rig.publish("t", b"x")
    rig.files.calls.clear()
    rig.finish(client, *client.take())
    assert rig.files.calls["replace"] == 0
    rig.maintain()
    assert rig.files.calls["replace"] == 1
    rig.clock.advance(5)
    rig.maintain()
    assert rig.files.calls["replace"] == 1


def test_the_fins_of_a_client_with_rdy_0_are_checkpointed(rig: Rig):
    client = rig.subscribe(rdy=3)
    rig.publish("t", *bodies(3))
    rig.maintain()
    rig.ready(client, 0)
    rig.maintain()
    zero, one, two = client.take()
    rig.finish(client, zero)
    rig.requeue(client, one, 5000)
    rig.requeue(client, two)
    rig.maintain()
    rig.crash()
    assert counts(rig.channel()) == (1, 0, 1)


def test_checkpoints_are_synced_only_when_publishes_are(make_rig: MakeRig):
    for durability, synced in (("os", 0), ("fsync", 1)):
        rig = make_rig(durability=durability)
        client = rig.subscribe(rdy=1)
        rig.publish("t", b"x")
        rig.maintain()
        rig.finish(client, *client.take())
        rig.files.calls.clear()
        rig.maintain()
        assert rig.files.calls["replace"] == 1
        assert rig.files.calls["sync"] == synced


def test_a_channel_is_not_checkpointed_again_while_its_checkpoint_is_being_written(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later)
    client = rig.subscribe(rdy=2)
    rig.publish("t", *bodies(2))
    zero, one = client.take()
    rig.finish(client, zero)
    rig.maintain()
    jobs = len(later.jobs)
    rig.finish(client, one)
    rig.maintain()
    assert len(later.jobs) == jobs
    later.run_all()
    rig.maintain()
    later.run_all()
    rig.crash()
    assert counts(rig.channel()) == (0, 0, 0)


def test_a_costly_checkpoint_is_taken_less_often(make_rig: MakeRig):
    rig = make_rig()
    client = rig.subscribe(rdy=3)
    rig.publish("t", *bodies(3))
    channel = rig.channel()
    capture = channel.checkpoint.capture
    taken = []

    def slow_capture():
        taken.append(rig.clock())
        rig.clock.advance(0.5)
        return capture()

    channel.checkpoint.capture = slow_capture  # type: ignore[method-assign]
    rig.maintain()
    for message in client.take():
        rig.finish(client, message)
        rig.clock.advance(4)
        rig.maintain()
    assert len(taken) == 2


def busy_topics(rig: Rig, count: int) -> dict[str, FakeClient]:
    """Topics that were used since the last round of upkeep, with a consumer each. Upkeep takes a
    millisecond for each of them, and closing its files takes another."""
    clients = {f"t{number}": rig.subscribe(f"t{number}", rdy=1) for number in range(count)}
    for name, client in clients.items():
        topic = rig.topic(name)
        rig.publish(name, b"x")
        rig.finish(client, *client.take())
        for owner, step in ((topic, "low"), (topic.log, "release_files")):
            setattr(owner, step, _slow(rig, getattr(owner, step)))
    return clients


def _slow(rig: Rig, step):
    def slowly(*arguments):
        rig.clock.advance(0.001)
        return step(*arguments)

    return slowly


def test_upkeep_of_many_topics_yields_to_the_event_loop(make_rig: MakeRig):
    rig = make_rig(sync_timeout=3600.0)
    busy_topics(rig, 100)
    # All of them are looked at, once more because they are not synced, and then their files are
    # closed.
    for _ in range(3):
        began = last = rig.clock()
        for _ in rig.broker.upkeep.run_in_slices():
            assert rig.clock() - last <= SLICE_NS + 2 * MILLISECOND
            last = rig.clock()
        assert rig.clock() - began >= 100 * MILLISECOND
        assert rig.clock() - last <= SLICE_NS + 2 * MILLISECOND
        for topic in rig.broker.topics.values():
            topic.log.sync_now()


def test_stats_of_many_topics_yield_to_the_event_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    names = [*busy_topics(rig, 100)]
    monkeypatch.setattr(stats_of_broker, "topic_stats", _slow(rig, topic_stats))
    stats: dict = {}
    last, deleted = rig.clock(), 0
    for _ in stats_in_slices(rig.broker, stats, "", "", True):
        assert rig.clock() - last <= SLICE_NS + 2 * MILLISECOND
        last = rig.clock()
        rig.broker.delete_topic(max(names))
        names.remove(max(names))
        deleted += 1
    assert deleted >= 10
    assert {topic["topic_name"] for topic in stats["topics"]} == set(names)


def test_the_round_after_an_interrupted_one_looks_at_the_other_topics(rig: Rig):
    names = busy_topics(rig, 20)
    slices = rig.broker.upkeep.run_in_slices()
    next(slices)
    slices.close()
    rig.maintain()
    rig.crash()
    assert {counts(rig.channel(topic=name)) for name in names} == {(0, 0, 0)}


def test_topics_may_be_deleted_between_two_slices_of_upkeep(rig: Rig, caplog: pytest.LogCaptureFixture):
    names = [*busy_topics(rig, 20)]
    for _ in rig.broker.upkeep.run_in_slices():
        rig.broker.delete_topic(names.pop())
    rig.maintain()
    assert len(names) < 18
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_checkpoint_is_not_costly_because_other_topics_come_before_it(rig: Rig):
    clients = busy_topics(rig, 100)
    rig.maintain()
    for name, client in clients.items():
        rig.publish(name, b"y")
        rig.finish(client, *client.take())
    rig.clock.advance(1)
    rig.maintain()
    rig.crash()
    assert {counts(rig.channel(topic=name)) for name in clients} == {(0, 0, 0)}


@pytest.mark.parametrize("write_first", [True, False], ids=["written before", "written after"])
def test_a_late_checkpoint_of_a_deleted_channel_does_not_harm_its_successor(
    make_rig: MakeRig, write_first: bool
):
    later = Later()
    rig = make_rig(background=later)
    rig.channel("other")
    rig.channel("c")
    rig.publish("t", b"old")
    client = rig.subscribe(rdy=1)
    rig.finish(client, *client.take())
    later.run_all()
    rig.maintain()
    jobs, later.jobs = later.jobs, []
    if write_first:
        for work, _ in jobs:
            work()
    rig.topic().delete_channel("c")
    rig.channel("c")
    if not write_first:
        for work, _ in jobs:
            work()
    for _, then in jobs:
        then()
    rig.publish("t", b"new")
    rig.crash()
    assert rig.subscribe(rdy=10).take_bodies() == [b"new"]


@pytest.mark.parametrize("act", ["pause", "empty"])
def test_a_late_checkpoint_does_not_undo_what_was_saved_after_it_was_taken(make_rig: MakeRig, act: str):
    later = Later()
    rig = make_rig(background=later)
    channel = rig.channel()
    rig.publish("t", *bodies(3))
    client = rig.subscribe(rdy=1)
    rig.finish(client, *client.take())
    rig.disconnect(client)
    rig.maintain()
    getattr(channel, act)()
    later.run_all()
    rig.maintain()
    later.run_all()
    rig.crash()
    assert rig.channel().paused == (act == "pause")
    assert rig.channel().depth == (2 if act == "pause" else 0)


def test_a_late_checkpoint_of_a_deleted_channel_leaves_no_file(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later)
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    rig.finish(client, *client.take())
    rig.maintain()
    rig.topic().delete_channel("c")
    later.run_all()
    assert rig.names("*.channel") == []


def test_a_late_checkpoint_of_a_deleted_topic_changes_nothing(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later)
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    rig.finish(client, *client.take())
    rig.maintain()
    rig.broker.delete_topic("t")
    later.run_all()
    assert rig.broker.health.error is None
    assert [*(rig.data_path / "topics").iterdir()] == []


def test_the_worker_pool_follows_the_number_of_channels(rig: Rig):
    for number in range(12):
        rig.channel(f"c{number}", f"t{number % 3}")
    rig.maintain()
    assert rig.broker.scan.workers == 3
    rig.broker.delete_topic("t0")
    rig.topic("t1").delete_channel("c1")
    rig.maintain()
    assert rig.broker.scan.workers == 1
    for number in range(13):
        rig.channel(f"c{number}", "u")
    rig.restart()
    rig.maintain()
    assert rig.broker.scan.workers == 4


def test_the_files_of_an_idle_topic_are_closed_and_open_again_when_needed(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"0")
    rig.maintain()
    log = rig.topic().log
    assert log.segments[-1]._fd >= 0
    for _ in range(4):
        rig.clock.advance(3)
        rig.maintain()
    assert log.segments[-1]._fd < 0
    rig.publish("t", b"1")
    rig.finish(client, client.take()[0])
    assert client.take_bodies() == [b"1"]


def test_finished_segments_are_removed_and_retained_ones_stay(make_rig: MakeRig):
    for age, kept in ((0.0, 1), (3600.0, 10)):
        rig = make_rig(max_bytes_per_file=1000, retention_age=age)
        client = rig.subscribe(rdy=10)
        for number in range(10):
            rig.publish("t", *bodies(1, start=number, size=800))
        rig.finish(client, *client.take())
        rig.maintain()
        assert len(rig.names("*.log")) == kept
        rig.restart()
        assert counts(rig.channel()) == (0, 0, 0)


def test_maintenance_that_fails_for_one_topic_is_done_for_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    for name in ("a", "b"):
        client = rig.subscribe(name, rdy=1)
        rig.publish(name, b"x")
        rig.finish(client, *client.take())

    def fail() -> None:
        raise RuntimeError

    monkeypatch.setattr(rig.topic("a"), "low", fail)
    rig.files.calls.clear()
    rig.maintain()
    assert rig.files.calls["replace"] >= 2
    rig.crash()
    assert counts(rig.channel("c", "b")) == (0, 0, 0)


# Stats.

TOPIC_KEYS = [
    "topic_name", "channels", "depth", "backend_depth", "message_count", "message_bytes", "paused",
    "e2e_processing_latency",
]  # fmt: skip
CHANNEL_KEYS = [
    "channel_name", "depth", "backend_depth", "in_flight_count", "deferred_count", "message_count",
    "requeue_count", "timeout_count", "client_count", "clients", "paused", "e2e_processing_latency",
]  # fmt: skip


def test_stats_of_a_fresh_broker(rig: Rig):
    assert broker_stats(rig.broker) == {
        "version": "1.3.0",
        "health": "OK",
        "start_time": 1_700_000_000,
        "corrupt_files": 0,
        "warnings": [],
        "topics": [],
        "producers": None,
    }


def test_stats_show_every_field_of_topic_and_channel(rig: Rig):
    client = rig.subscribe(rdy=2, msg_timeout_ms=1000)
    rig.publish("t", b"one", b"two", b"three")
    rig.publish("t", b"later", defer_ms=60_000)
    rig.requeue(client, client.messages[0])
    rig.pass_time(1)
    rig.finish(client, client.messages[-1])
    rig.ready(client, 0)
    rig.channel().pause()
    (topic,) = broker_stats(rig.broker)["topics"]
    assert [*topic][: len(TOPIC_KEYS)] == TOPIC_KEYS
    assert {key: topic[key] for key in TOPIC_KEYS if key != "channels"} == {
        "topic_name": "t",
        "depth": 0,
        "backend_depth": 0,
        "message_count": 4,
        "message_bytes": 16,
        "paused": False,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
    }
    assert topic["dropped_count"] == topic["corrupt_batches"] == topic["corrupt_messages"] == 0
    assert topic["log_bytes"] > 16
    (channel,) = topic["channels"]
    assert [*channel][: len(CHANNEL_KEYS)] == CHANNEL_KEYS
    shown = {key: channel[key] for key in CHANNEL_KEYS if key != "clients"}
    assert shown == {
        "channel_name": "c",
        "depth": 3 - 1 - client.in_flight,
        "backend_depth": 0,
        "in_flight_count": client.in_flight,
        "deferred_count": 1,
        "message_count": 4,
        "requeue_count": 1,
        "timeout_count": 2,
        "client_count": 1,
        "paused": True,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
    }
    assert channel["dropped_count"] == 0
    assert channel["clients"] == [client_stats(client)]
    json.dumps(broker_stats(rig.broker))


def test_topics_and_channels_are_sorted_by_name(rig: Rig):
    for topic in ("b", "a", "c"):
        for channel in ("z", "x", "y"):
            rig.channel(channel, topic)
    shown = broker_stats(rig.broker)["topics"]
    assert [topic["topic_name"] for topic in shown] == ["a", "b", "c"]
    assert [channel["channel_name"] for channel in shown[0]["channels"]] == ["x", "y", "z"]


def test_stats_of_one_topic_and_of_one_channel(rig: Rig):
    for topic, channel in (("a", "x"), ("a", "y"), ("b", "y")):
        rig.channel(channel, topic)

    def shown(**filters: str) -> object:
        topics = broker_stats(rig.broker, **filters)["topics"]
        return topics and [(t["topic_name"], [c["channel_name"] for c in t["channels"]]) for t in topics]

    assert shown(topic="a") == [("a", ["x", "y"])]
    assert shown(topic="a", channel="y") == [("a", ["y"])]
    assert shown(channel="y") == [("a", ["y"]), ("b", ["y"])]
    assert shown(topic="b", channel="x") == []
    assert shown(topic="nobody") is None


def test_stats_without_clients_still_count_them(rig: Rig):
    client = rig.subscribe()
    client.publish_counts["t"] = 1
    shown = broker_stats(rig.broker, include_clients=False)
    assert shown["producers"] is None
    (channel,) = shown["topics"][0]["channels"]
    assert channel["clients"] is None
    assert channel["client_count"] == 1


def test_a_channel_without_clients_shows_an_empty_list(rig: Rig):
    rig.channel()
    assert broker_stats(rig.broker)["topics"][0]["channels"][0]["clients"] == []


def test_producers_are_the_clients_that_have_published(rig: Rig):
    silent, busy = FakeClient("silent"), FakeClient("busy")
    rig.broker.clients |= {silent, busy}
    busy.publish_counts.update({"t": 2, "u": 1})
    rig.broker.get_topic("u")
    (shown,) = broker_stats(rig.broker)["producers"]
    assert shown["client_id"] == "busy"
    assert broker_stats(rig.broker, topic="unknown")["producers"] is None
    (shown,) = broker_stats(rig.broker, topic="u")["producers"]
    assert shown["pub_counts"] == [{"topic": "u", "count": 1}]


def test_producers_of_other_topics_are_not_shown_with_a_topic(rig: Rig):
    """A client that may read one topic sees no clients of other topics."""
    mine, theirs = FakeClient("mine"), FakeClient("theirs")
    rig.broker.clients |= {mine, theirs}
    for name, client in (("t", mine), ("u", theirs)):
        rig.broker.get_topic(name)
        client.publish_counts[name] += 1
    assert [one["client_id"] for one in broker_stats(rig.broker, topic="t")["producers"]] == ["mine"]
    assert len(broker_stats(rig.broker)["producers"]) == 2


def test_stats_of_a_paused_topic_that_overflows_memory(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=2)
    rig.channel()
    rig.topic().pause()
    for number in range(5):
        rig.publish("t", b"%d" % number)
    (topic,) = broker_stats(rig.broker)["topics"]
    assert (topic["paused"], topic["depth"], topic["backend_depth"]) == (True, 5, 3)


def test_the_files_given_are_the_ones_used(tmp_path: Path):
    files = TestFiles()
    broker = Broker(NsqdOptions(data_path=str(tmp_path)), files=files)
    broker.open()
    broker.close()
    assert files.calls["replace"] == 3


# A disk that refuses.


def test_a_topic_whose_deletion_fails_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    client = rig.subscribe("t", rdy=1)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(rig.files, "rename", refuse)
        with pytest.raises(OSError, match="Read-only"):
            rig.broker.delete_topic("t")
    rig.publish("t", b"x")
    assert client.take_bodies() == [b"x"]
    rig.broker.delete_topic("t")
    assert client.close_calls == 1


def test_the_files_of_a_deleted_channel_that_stay_are_reported(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.channel()
    rig.files.fail("unlink", "c.channel", errno.EIO)
    rig.topic().delete_channel("c")
    assert "t:c: cannot remove its files, so the next start will find it again: [Errno 5]" in caplog.text


def test_the_files_of_a_deleted_channel_go_after_the_metadata_and_not_those_of_its_successor(
    make_rig: MakeRig,
):
    later = Later()
    rig = make_rig(background=later)
    rig.channel()
    rig.publish("t", b"x")
    later.run_all()
    rig.topic().delete_channel("c")
    assert rig.names("*.channel") == ["c.channel"]
    later.run_all()
    assert rig.names("*.channel") == []
    rig.channel()
    rig.topic().delete_channel("c")
    rig.channel()
    later.run_all()
    assert rig.names("*.channel") == ["c.channel"]


def test_an_ephemeral_channel_is_unregistered_even_if_the_disk_is_full(rig: Rig):
    told: list[tuple[str, str, str]] = []
    rig.broker._announce = lambda *change: told.append(change)
    client = rig.subscribe("t", "c#ephemeral", rdy=1)
    rig.publish("t", b"seen")
    told.clear()
    rig.files.fail("replace", "topic.json")
    rig.disconnect(client)
    assert told == [("UNREGISTER", "t", "c#ephemeral")]
    assert "cannot write its state" in rig.broker.health.error
    rig.files.heal()
    rig.maintain()
    assert rig.broker.health.error is None
    rig.crash()
    assert rig.topic().depth == 0, "the topic knows what it has handed out"


def test_a_topic_whose_deletion_a_kill_interrupts_does_not_come_back_as_an_empty_one(make_rig: MakeRig):
    """Its directory has been moved away, and nsqd.dat still lists it."""
    later = Later()
    rig = make_rig(background=later)
    rig.channel("c", "t.with.dots")
    rig.publish("t.with.dots", b"x")
    rig.channel("c", "other")
    rig.maintain()
    later.run_all()
    rig.broker.delete_topic("t.with.dots")
    rig.crash()
    assert [*rig.broker.topics] == ["other"]
    rig.crash()
    assert [*rig.broker.topics] == ["other"]
    assert [path.name for path in (rig.data_path / "topics").iterdir()] == ["other.topic"]


def test_a_topic_s_files_go_when_the_metadata_does_not_list_it_any_more(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later)
    rig.channel()
    rig.maintain()
    later.run_all()
    rig.broker.delete_topic("t")
    assert len(later.jobs) == 1, "first nsqd.dat"
    later.run()
    assert (rig.data_path / "nsqd.dat").read_bytes().count(b'"name"') == 0
    assert len([*(rig.data_path / "topics").iterdir()]) == 1
    later.run_all()
    assert [*(rig.data_path / "topics").iterdir()] == []


def test_a_failed_checkpoint_is_forgotten_when_the_channel_is_saved_otherwise(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    rig.files.fail("replace", ".channel")
    rig.finish(client, *client.take())
    rig.maintain()
    assert rig.broker.health.error is not None
    rig.files.heal()
    rig.channel().empty()
    assert rig.broker.health.error is None


def test_any_error_of_work_in_the_background_is_told(rig: Rig) -> None:
    def run_out() -> None:
        raise MemoryError

    told: list[OSError | None] = []
    rig.broker.try_in_background(run_out, told.append)
    (error,) = told
    assert "MemoryError" in str(error)
