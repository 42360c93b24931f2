"""The topics file: what it declares is there before the ports are open, and mistakes refuse the
start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsparq.errors import StartError
from nsparq.options import NsqdOptions
from nsparq.server.topics_file import TopicsFileError, read_topics_file
from tests.broker.rig import Rig
from tests.support import BrokerThread, wait_until
from tests.support.lookupd import start_lookupd

FILE = """
[topics.orders]
durability = "fsync"
retention_age = "24h"
policy = { max_attempts = 3, retry_delay = "5s" }

[topics.orders.channels.billing]
policy = { max_attempts = 9 }

[topics.orders.channels.archive]

[topics."eu.orders"]
"""


def settings(broker: BrokerThread, topic: str) -> Any:
    return json.loads(broker.http("GET", "/topic/settings", topic=topic))


def change(broker: BrokerThread, topic: str, **changes: Any) -> None:
    path = f"/topic/settings?topic={topic}"
    broker.request("PUT", path, json.dumps(changes).encode()).expect_json()


def test_what_the_file_declares_is_there_after_every_start(tmp_path: Path) -> None:
    path = tmp_path / "topics.toml"
    path.write_text(FILE)
    with BrokerThread(tmp_path, topics_file=str(path)) as broker:
        found = settings(broker, "orders")
        assert (found["durability"], found["retention_age"], found["policy"]["retry_delay"]) == (
            "fsync",
            86400.0,
            5,
        )
        assert {name: one["max_attempts"] for name, one in found["channel_policies"].items()} == {
            "billing": 9
        }
        stats = broker.topic_stats("orders")
        assert stats is not None
        assert [one["channel_name"] for one in stats["channels"]] == ["archive", "billing"]
        assert broker.topic_stats("eu.orders")
        # The file wins over HTTP. What it does not name stays.
        change(broker, "orders", policy={}, durability="os", retention_bytes=77)
        change(broker, "eu.orders", policy={})
        broker.restart()
        found = settings(broker, "orders")
        assert (found["durability"], found["retention_bytes"], found["policy"]["max_attempts"]) == (
            "fsync",
            77,
            3,
        )
        assert settings(broker, "eu.orders")["policy"] is not None
        # A word takes a value away.
        path.write_text('[topics.orders]\npolicy = "none"\nretention_age = "default"')
        broker.restart()
        found = settings(broker, "orders")
        assert (found["policy"], found["retention_age"], found["durability"]) == (None, None, "fsync")


def test_the_file_orders_a_channel_and_none_ends_the_order(tmp_path: Path) -> None:
    path = tmp_path / "topics.toml"
    path.write_text("")
    with BrokerThread(tmp_path, topics_file=str(path)) as broker:

        def applied(text: str) -> tuple[str | None, int | None]:
            path.write_text(text)
            broker.call_daemon(lambda nsqd: nsqd.reload())
            found = json.loads(broker.http("GET", "/channel/settings", topic="orders", channel="billing"))
            return found["ordered_by"], found["policy"] and found["policy"]["max_attempts"]

        table = "[topics.orders.channels.billing]\n"
        both = f"{table}ordered_by = '/customer'\npolicy = {{ max_attempts = 9 }}"
        assert applied(both) == ("/customer", 9)
        # What the file does not name stays.
        assert applied(f"{table}policy = 'none'") == ("/customer", None)
        assert applied(f"{table}ordered_by = 'header:customer'") == ("header:customer", None)
        # A mistake changes nothing, wherever it stands.
        assert applied(f"{table}policy = {{}}\nordered_by = 'customer'") == ("header:customer", None)
        assert applied(f"{table}ordered_by = '/k'\n[topics.t]\npolicy = 1") == ("header:customer", None)
        path.write_text(both)
        broker.restart()
        assert applied(f"{table}ordered_by = 'none'") == (None, 9)


def test_sighup_applies_the_file_again_and_a_mistake_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "topics.toml"
    path.write_text("[topics.first]")
    with BrokerThread(tmp_path, topics_file=str(path)) as broker:
        path.write_text("[topics.second]\npolicy = {}")
        broker.call_daemon(lambda nsqd: nsqd.reload())
        assert settings(broker, "second")["policy"]["max_attempts"] == 4
        path.write_text("[topics.third]\n[topics.second]\npolicy = { max_attempts = -1 }")
        broker.call_daemon(lambda nsqd: nsqd.reload())
        assert broker.topic_stats("third") is None
        assert settings(broker, "second")["policy"]["max_attempts"] == 4
    assert f"SIGHUP: the topics file cannot be applied: {path}: topics.second.policy: max_att" in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[topics", "Expected"),
        ("[topic.t]", "topic: the file has only [topics.NAME] tables"),
        ("topics = 1", "topics: must be a table for each topic, such as [topics.NAME]"),
        ("[topics]\nt = 1", "topics.t: must be a table"),
        ('[topics."a b"]', "topics.a b: not a valid name of a topic"),
        ('[topics."t#ephemeral"]', "topics.t#ephemeral: an ephemeral topic is not kept"),
        ("[topics.t]\nretention = 1", "topics.t.retention: there is no such key; there are retention_age, "),
        ("[topics.orders.eu]", "topics.orders.eu: there is no such key; there are retention_age, "),
        ('[topics.t]\ndurability = "disk"', "topics.t.durability: durability must be"),
        ('[topics.t]\ndurability = "memory"', 'topics.t.durability: durability "memory" does not work with'),
        ("[topics.t]\narchive = true", "topics.t.archive: there is no archive: nsqd runs without --archive"),
        ('[topics.t]\nretention_age = "1x"', "topics.t.retention_age: retention_age must be seconds, or"),
        ("[topics.t]\npolicy = { attempts = 3 }", "topics.t.policy: a policy has no 'attempts'"),
        ("[topics.t]\nchannels = []", "topics.t.channels: must be a table for each channel"),
        ('[topics.t.channels."c d"]', "topics.t.channels.c d: not a valid name of a channel"),
        (
            '[topics.t.channels.c]\ndurability = "os"',
            "topics.t.channels.c.durability: there is no such key; there are policy, ordered_by",
        ),
        (
            '[topics.t.channels.c]\nordered_by = "customer"',
            "topics.t.channels.c.ordered_by: ordered_by must be a JSON pointer such as /customer/id",
        ),
        ("[topics.t.channels.c]\nordered_by = 5", "topics.t.channels.c.ordered_by: ordered_by must be"),
        (
            '[topics.t.channels.c]\nordered_by = "header:a b"',
            "topics.t.channels.c.ordered_by: not a header name",
        ),
        ('[topics.t]\nordered_by = "/k"', "topics.t.ordered_by: there is no such key; there are "),
    ],
)
def test_a_mistake_is_named_with_its_file_and_key(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "topics.toml"
    path.write_text(text)
    with pytest.raises(TopicsFileError) as caught:
        read_topics_file(path, NsqdOptions(replication_cluster="orders"))
    assert str(caught.value).startswith(f"{path}: {reason}")


def test_a_file_that_cannot_be_used_refuses_the_start(tmp_path: Path) -> None:
    path = tmp_path / "topics.toml"
    with pytest.raises(StartError, match=r"topics\.toml: No such file"):
        BrokerThread(tmp_path, topics_file=str(path)).start()
    path.write_text('[topics.t]\npolicy = { dead_letters = "t" }')
    with pytest.raises(StartError, match="dead letters would go in a circle: t → t$"):
        BrokerThread(tmp_path, topics_file=str(path)).start()
    assert not [*tmp_path.glob("topics/*")], "nothing has been created"


def test_a_declared_topic_gets_the_channels_that_nsqlookupd_knows(tmp_path: Path) -> None:
    path = tmp_path / "topics.toml"
    path.write_text("[topics.orders.channels.mine]")
    with start_lookupd() as lookupd:
        for kind in ("topic", "channel"):
            lookupd.post(f"/{kind}/create", topic="orders", channel="theirs")
        address = f"{lookupd.address[0]}:{lookupd.address[1]}"
        with BrokerThread(tmp_path, topics_file=str(path), lookupd_tcp_address=(address,)) as broker:
            wait_until(lambda: broker.channel_stats("orders", "theirs") is not None, what="their channel")
            assert broker.channel_stats("orders", "mine") is not None
            wait_until(lambda: "mine" in lookupd.channels("orders"), what="registration")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.drop()


def apply(rig: Rig, path: Path, **targets: str) -> None:
    path.write_text(
        "".join(f'[topics.{name}]\npolicy = {{ dead_letters = "{to}" }}\n' for name, to in targets.items())
    )
    read_topics_file(path, rig.broker.options).apply(rig.broker)


def test_only_the_policies_after_the_change_may_not_make_a_circle(tmp_path: Path, rig: Rig) -> None:
    path = tmp_path / "topics.toml"
    apply(rig, path, a="b", c="a")
    # In the order of the file, the first change would close a circle with the policies of before.
    apply(rig, path, a="c", b="a", c="d")
    assert rig.broker.topics["b"].settings.policy.dead_letters == "a"  # type: ignore[union-attr]
    with pytest.raises(TopicsFileError) as caught:
        apply(rig, path, d="b")
    assert "circle: " in str(caught.value)
    assert str(caught.value).endswith("; the policy of b, a, c was set before and is not in the file")
    assert "d" not in rig.broker.topics


def test_a_file_that_is_applied_again_writes_nothing(tmp_path: Path, rig: Rig) -> None:
    path = tmp_path / "topics.toml"
    path.write_text(FILE)
    read_topics_file(path, rig.broker.options).apply(rig.broker)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    read_topics_file(path, rig.broker.options).apply(rig.broker)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == before
