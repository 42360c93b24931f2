"""nsparq create, pause, unpause, empty, delete, replay and settings."""

from __future__ import annotations

import json

import pytest

from tests.support import TestBroker, wait_until
from tests.support.lookupd import start_lookupd
from tests.support.polling import DEADLINE

from .conftest import Run
from .processes import consume, http, run_tool
from .terminal import Terminal


def test_create_pause_and_unpause(nsparq: Run, broker: TestBroker, topic: str) -> None:
    done = nsparq("create", topic, "c")
    assert done.out.decode() == f"Created the channel c of the topic {topic} on {http(broker)}.\n"
    for command, is_paused in (("pause", True), ("unpause", False)):
        assert nsparq(command, topic).status == 0
        done = nsparq(command, topic, "c", "--json")
        assert json.loads(done.out) == {
            "action": command, "topic": topic, "channel": "c", "nodes": [http(broker)], "unreachable": []
        }  # fmt: skip
        stats = broker.topic_stats(topic)
        assert stats is not None and (stats["paused"], stats["channels"][0]["paused"]) == (is_paused,) * 2
    assert nsparq("pause", topic, "d").err == f"nsparq pause: the topic {topic} has no channel d\n"
    assert nsparq("pause", f"{topic}x").err == f"nsparq pause: there is no topic {topic}x\n"


def test_empty_and_delete_need_yes_if_nobody_can_answer(broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, b"one", b"two")
    address = f"--nsqd-http-address={http(broker)}"
    for command, question in (
        ("empty", f"Drop the messages of the channel c of the topic {topic} (2 messages)?"),
        ("delete", f"Delete the channel c of the topic {topic} (2 messages)?"),
    ):
        done = run_tool("main", command, topic, "c", address)
        assert done.status == 1
        assert done.err == f"nsparq {command}: {question} There is no terminal to ask on: add --yes\n"
    assert broker.channel_stats(topic, "c")["depth"] == 2  # type: ignore[index]
    assert run_tool("main", "empty", topic, "c", address, "--yes").status == 0
    assert broker.channel_stats(topic, "c")["depth"] == 0  # type: ignore[index]
    for names in ([topic, "c"], [topic]):
        assert run_tool("main", "delete", *names, address, "-y").status == 0
    assert broker.topic_stats(topic) is None
    done = run_tool("main", "delete", topic, address, "--yes")
    assert (done.status, done.err) == (1, f"nsparq delete: the topic {topic} does not exist\n")


@pytest.mark.parametrize(("answer", "status"), [(b"n\n", 1), (b"\n", 1), (b"yes\n", 0)])
def test_delete_asks_on_a_terminal(broker: TestBroker, topic: str, answer: bytes, status: int) -> None:
    broker.publish(topic, b"one")
    with Terminal("main", "delete", topic, f"--nsqd-http-address={http(broker)}") as terminal:
        terminal.wait_for(f"Delete the topic {topic} (1 message)? [y/N] ")
        terminal.type(answer)
        assert terminal.process.wait(DEADLINE) == status
    assert (broker.topic_stats(topic) is None) == (status == 0)


def test_delete_removes_the_topic_from_nsqlookupd_too(
    nsparq: Run, broker: TestBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_lookupd() as lookupd, lookupd.peer(broadcast_address="127.0.0.1", **_ports(broker)):
        monkeypatch.setenv("NSQ_LOOKUPD_HTTP_ADDRESS", http(lookupd))
        assert nsparq("create", topic, "c").status == 0
        assert lookupd.channels(topic) == ["c"]
        assert broker.channel_stats(topic, "c") is not None
        nsparq("delete", topic, "--yes")
        wait_until(lambda: topic not in lookupd.topics())


def _ports(broker: TestBroker) -> dict[str, int]:
    assert broker.http_address is not None
    return {"tcp_port": broker.address[1], "http_port": broker.http_address[1]}


def test_replay_shows_the_effect_first_and_moves_with_yes(
    nsparq: Run, broker: TestBroker, topic: str
) -> None:
    broker.control("create", topic, "c")
    assert nsparq("settings", topic, "--retention-age=1d").status == 0
    broker.publish(topic, b"one", b"two", b"three")
    assert consume(broker, topic, 3, "c") == [b"one", b"two", b"three"]
    done = run_tool("main", "replay", topic, "c", "1h", f"--nsqd-http-address={http(broker)}")
    assert done.status == 0
    assert done.out.endswith(b"\nNothing has changed. Add --yes to move the channel.\n")
    plan = json.loads(nsparq("replay", topic, "c", "start", "--dry-run", "--json").out)
    assert plan["moved"] is False
    assert {*plan["nodes"][0]} == {"node", "again", "skipped", "cursor", "target", "oldest"}
    assert broker.channel_stats(topic, "c")["depth"] == 0  # type: ignore[index]
    number = plan["nodes"][0]["target"] + 1
    moved = json.loads(nsparq("replay", topic, "c", f"#{number}", "--yes", "--json").out)
    assert (moved["moved"], moved["nodes"][0]["again"]) == (True, 2)
    assert consume(broker, topic, 2, "c") == [b"two", b"three"]
    done = nsparq("replay", topic, "c", "soon")
    assert done.status == 2 and "nsparq replay: --to: 'soon' is not a time" in done.err


def test_settings_are_shown_and_changed(nsparq: Run, broker: TestBroker, topic: str) -> None:
    broker.publish(topic, b"one")
    assert b"not kept" in nsparq("settings", topic).out
    done = nsparq("settings", topic, "--retention-age=7d", "--retention-bytes=10g", "--durability=fsync")
    assert b"for 7d00h, up to 10.0 GiB  fsync" in done.out
    done = nsparq("settings", topic, "--retention-age=default", "--json")
    (node,) = json.loads(done.out)["nodes"]
    assert (node["retention_age"], node["retention_bytes"], node["durability"]) == (None, 10 << 30, "fsync")
    effective = {"retention_age": 0.0, "retention_bytes": 10 << 30, "durability": "fsync", "policy": None}
    assert node["effective"].items() >= effective.items()
    for flag in ("--retention-age=x", "--retention-bytes=1x", "--durability=none"):
        assert nsparq("settings", topic, flag).status == 2
