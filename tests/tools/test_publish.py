"""nsparq publish: arguments, a file, standard input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import TestBroker

from .conftest import Run
from .processes import consume, free_address, run_tool, tcp


def test_arguments_are_messages(nsparq: Run, broker: TestBroker, topic: str) -> None:
    done = nsparq("publish", topic, "one", "two words", "--json")
    assert json.loads(done.out) == {"topic": topic, "published": 2, "nodes": [tcp(broker)]}
    assert consume(broker, topic, 2) == [b"one", b"two words"]


def test_lines_of_a_file_or_the_whole_file(
    nsparq: Run, broker: TestBroker, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b"one\n\ntwo")
    done = nsparq("publish", topic, f"--file={tmp_path / 'in'}")
    assert done.out.decode() == f"Published 2 messages to the topic {topic} on {tcp(broker)}.\n"
    assert nsparq("publish", topic, f"--file={tmp_path / 'in'}", "--whole").status == 0
    assert consume(broker, topic, 3) == [b"one", b"two", b"one\n\ntwo"]
    done = nsparq("publish", topic, "--file=/nowhere")
    assert (done.status, done.err) == (1, "nsparq publish: /nowhere: No such file or directory\n")


def test_standard_input_and_the_addresses_of_to_nsq(broker: TestBroker, topic: str) -> None:
    flags = (f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}", "--delimiter=;")
    assert run_tool("main", "publish", *flags, input=b"one;two").status == 0
    assert consume(broker, topic, 2) == [b"one", b"two"]
    variables = {"NSQ_NSQD_TCP_ADDRESS": tcp(broker)}
    assert run_tool("main", "publish", topic, input=b"three\n", **variables).status == 0
    assert consume(broker, topic, 1) == [b"three"]


def test_deferred_messages(nsparq: Run, broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "c")
    assert nsparq("publish", topic, "one", "two", "--defer=10m").status == 0
    stats = broker.channel_stats(topic, "c")
    assert stats is not None and (stats["deferred_count"], stats["depth"]) == (2, 0)


def test_what_was_not_published_is_status_1(nsparq: Run, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = nsparq("publish", topic, "one", "x" * 100_000, f"--nsqd-tcp-address={free_address()}")
    assert done.status == 1 and "record 1 of the input was not published" in done.err
    assert nsparq("publish", topic, "one", "--whole").status == 2
    assert nsparq("publish", "t/u", "one").status == 2
