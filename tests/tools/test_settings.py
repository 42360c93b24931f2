"""nsparq settings: the archive of a topic, and the order of a channel, on all nodes or on none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsparq.tools.completion import candidates
from tests.support import TestBroker, start_broker
from tests.support.auth_server import unused_port

from .conftest import Run
from .processes import http


def ordered_by(broker: TestBroker, topic: str) -> str | None:
    found: str | None = json.loads(broker.http("GET", "/channel/settings", topic=topic, channel="c"))[
        "ordered_by"
    ]
    return found


def test_the_archive_of_a_topic_is_set_and_shown(
    nsparq: Run, broker: TestBroker, tmp_path: Path, topic: str
) -> None:
    with start_broker(archive=(tmp_path / "store").as_uri()) as archiving:
        archiving.control("create", topic)
        node = f"--nsqd-http-address={http(archiving)}"
        assert b"  forever  " in nsparq("settings", topic, node).out
        limits = ("--archive-retention-age=365d", "--archive-retention-bytes=1t", "--archive-local-bytes=10g")
        done = nsparq("settings", topic, *limits, node)
        assert (done.status, done.err) == (0, "")
        assert b"for 365d00h, up to 1.0 TiB; on disk 10.0 GiB" in done.out
        assert b"archive_retention_age, archive_retention_bytes, archive_local_bytes" in done.out
        assert b"  off  " in nsparq("settings", topic, "--archive=off", node).out
        back = [f"{limit.partition('=')[0]}=default" for limit in limits]
        assert b"  forever  " in nsparq("settings", topic, "--archive=default", *back, node).out
    broker.control("create", topic)
    refused = nsparq("settings", topic, "--archive=on", f"--nsqd-http-address={http(broker)}")
    assert refused.status == 1 and "--archive" in refused.err


def test_an_order_is_set_shown_and_removed_on_all_nodes(
    nsparq: Run, broker: TestBroker, second: TestBroker, topic: str, both: list[str]
) -> None:
    out = nsparq("settings", topic, "c", *both).out.decode().splitlines()
    assert out[0].split() == ["NODE", "ORDERED", "BY", "POLICY"]
    assert [line.split() for line in out[1:]] == [[http(one), "-", "-"] for one in (broker, second)]
    done = nsparq("settings", topic, "c", "--ordered-by=/customer/id", *both)
    assert (done.status, done.err) == (0, "")
    assert [line.split()[1] for line in done.out.decode().splitlines()[1:]] == ["/customer/id"] * 2
    assert ordered_by(broker, topic) == ordered_by(second, topic) == "/customer/id"
    assert nsparq("policy", "set", topic, *both).status == 0
    shown = json.loads(nsparq("settings", topic, "c", "--json", *both).out)
    assert (shown["topic"], shown["channel"], shown["unreachable"]) == (topic, "c", [])
    assert [(one["ordered_by"], one["policy"]) for one in shown["nodes"]] == [("/customer/id", None)] * 2
    assert b"of the topic" in nsparq("settings", topic, "c", *both).out
    assert nsparq("settings", topic, "c", "--ordered-by=none", *both).status == 0
    assert ordered_by(broker, topic) is ordered_by(second, topic) is None


def test_an_order_that_nsqd_refuses_changes_no_node(
    nsparq: Run, broker: TestBroker, second: TestBroker, topic: str, both: list[str]
) -> None:
    done = nsparq("settings", topic, "c", "--ordered-by=customer", *both)
    assert done.status == 1 and done.err.startswith("nsparq settings: PUT http://")
    assert done.err.endswith(
        "400 INVALID_SETTINGS: ordered_by must be a JSON pointer such as /customer/id, or header: and a "
        "name, not 'customer'\n"
    )
    assert ordered_by(broker, topic) is ordered_by(second, topic) is None
    done = nsparq("settings", topic, "other", "--ordered-by=/k", *both)
    assert (done.status, done.err) == (1, f"nsparq settings: the topic {topic} has no channel other\n")


def test_nodes_that_disagree_or_are_down_are_named(
    nsparq: Run, broker: TestBroker, second: TestBroker, topic: str, both: list[str]
) -> None:
    assert nsparq("settings", topic, "c", "--ordered-by=header:key", both[0]).status == 0
    done = nsparq("settings", topic, "c", *both)
    assert "header:key" in done.out.decode() and "the nodes disagree" in done.err
    down = f"127.0.0.1:{unused_port()}"
    done = nsparq("settings", topic, "c", "--ordered-by=/k", "--json", *both, f"--nsqd-http-address={down}")
    answer = json.loads(done.out)
    assert [one["node"] for one in answer["nodes"]] == [http(broker), http(second)]
    assert [one["node"] for one in answer["unreachable"]] == [down]
    assert done.status == 1 and down in done.err
    assert ordered_by(broker, topic) == ordered_by(second, topic) == "/k"


def test_a_key_is_no_command_for_the_terminal(nsparq: Run, topic: str, both: list[str]) -> None:
    assert b"/\\x1b[2J" in nsparq("settings", topic, "c", "--ordered-by=/\x1b[2J", both[0]).out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("orders", "--ordered-by=/k"), "--ordered-by is for a channel: give its name after the topic"),
        (("orders", "c", "--durability=fsync"), "--durability is for a topic: leave the channel out"),
        (("orders", "c", "more"), "does not know what to do with 'more'"),
    ],
)
def test_a_wrong_command_line_is_refused(nsparq: Run, arguments: tuple[str, ...], error: str) -> None:
    done = nsparq("settings", *arguments)
    assert done.status == 2 and error in done.err


def test_the_flag_and_the_names_of_channels_are_completed(nsparq: Run, topic: str, both: list[str]) -> None:
    assert candidates("nsparq settings orders billing --ord")[1][0][0] == "--ordered-by="
    assert candidates(f"nsparq settings {both[0]} {topic} ")[1] == [("c ", "")]
