"""nsparq top: the model with polls and keys, the screen in a pseudo-terminal, and plain output."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

from nsparq.tools.figures import Poll
from nsparq.tools.source import Answers
from nsparq.tools.top import Model
from nsparq.tools.top_screen import draw, keys_of
from tests.support import TestBroker
from tests.support.polling import DEADLINE

from .conftest import Run
from .processes import http
from .terminal import Terminal


def channel(name: str, depth: int, messages: int, **more: Any) -> dict[str, Any]:
    return {"channel_name": name, "depth": depth, "message_count": messages, "clients": [], **more}


def stats(*topics: tuple[str, int, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "health": "OK",
        "topics": [
            {"topic_name": name, "message_count": messages, "depth": 0, "channels": channels}
            for name, messages, channels in topics
        ],
    }


def poll(at: float, **nodes: dict[str, Any]) -> Poll:
    return Poll(Answers({f"{name}:4151": found for name, found in nodes.items()}), at)


def two_polls() -> Model:
    model = Model()
    first = stats(("a", 0, [channel("x", 0, 0)]), ("b", 100, [channel("y", 5, 100), channel("z", 50, 100)]))
    lag = {"oldest_message_age_s": 3.5, "drain_time_s": None}
    second = stats(
        ("a", 20, [channel("x", 10, 20, **lag)]), ("b", 100, [channel("y", 5, 100), channel("z", 40, 100)])
    )
    model.update(poll(10.0, n1=first))
    model.update(poll(20.0, n1=second, n2=stats(("a", 7, [channel("x", 1, 7, **lag)]))))
    return model


def shown(model: Model, *keys: str) -> list[Any]:
    return [tuple(row[key] for key in keys) for row in model.rows()]


def press(model: Model, *keys: str) -> bool:
    return all(model.press(key) for key in keys)


def test_the_largest_backlog_is_first_and_rates_are_per_second() -> None:
    model = two_polls()
    # Channel x: 27 messages came, 11 wait. Channel z: 10 fewer wait.
    assert shown(model, "channel", "depth", "publish_rate", "finish_rate") == [
        ("z", 40, 0.0, 1.0), ("x", 11, 2.7, 1.6), ("y", 5, 0.0, 0.0)
    ]  # fmt: skip
    assert model.rows()[1]["oldest_message_age_s"] == 3.5 and model.rows()[1]["drain_time_s"] is None
    assert model.totals() == "nodes 2   topics 2   channels 3   in 2.7/s   out 2.6/s   waiting 56"
    # After a restart the counters are smaller than before.
    model.update(poll(30.0, n1=stats(("a", 1, [channel("x", 1, 1)]))))
    assert shown(model, "channel", "publish_rate") == [("x", None)]


def test_keys_sort_and_look_closer() -> None:
    model = two_polls()
    press(model, "left")
    assert (model.sorted_by, shown(model, "channel")) == (("channel", False), [("x",), ("y",), ("z",)])
    press(model, "r", "down", "down", "down")
    assert shown(model, "channel") == [("z",), ("y",), ("x",)] and model.selected == 2
    press(model, "n", "enter")
    assert model.place.title == "topics of n1:4151"
    assert shown(model, "topic", "message_count") == [("a", 20), ("b", 100)]
    press(model, "enter")
    assert (model.place.title, shown(model, "channel", "depth")) == ("channels of n1:4151 / a", [("x", 10)])
    press(model, "enter")
    assert model.place.view == "clients"
    press(model, "esc", "esc", "esc")
    assert model.place.title == "nodes"
    press(model, "c", "/", "z", "enter")
    assert shown(model, "channel") == [("z",)]
    press(model, "/", "q", "backspace", "esc", " ")
    assert model.filter == "" and model.is_stopped
    before = model.last
    model.update(poll(40.0))
    assert model.last is before
    assert not press(model, "q")


def test_a_terminal_does_not_obey_what_clients_say() -> None:
    model = Model()
    client = {"client_id": "\x1b]0;title\x07a\nb", "user_agent": "c\x9b31m", "message_count": 5}
    model.update(poll(10.0, n1=stats(("t", 0, [channel("c", 0, 0, clients=[client])]))))
    press(model, "enter")
    text = draw(model, 200, 10).plain
    assert model.place.view == "clients" and len(text.splitlines()) == 10
    assert r"\x1b]0;title\x07a\nb" in text and r"c\x9b31m" in text
    assert text.replace("\n", "").isprintable()


def test_of_an_odd_client_what_is_known_is_shown() -> None:
    model = Model()
    clients: list[Any] = [
        {},
        {"remote_address": [], "client_id": 5, "message_count": "x"},
        {"ready_count": 7},
    ]
    model.update(poll(10.0, n1=stats(("t", 0, [channel("c", 0, 0, clients=clients)]))))
    press(model, "enter")
    assert shown(model, "client_id", "remote_address", "message_count", "ready_count") == [
        (None, None, None, None), (None, None, None, None), (None, None, None, 7)
    ]  # fmt: skip
    assert len(draw(model, 200, 10).plain.splitlines()) == 10


def test_escape_sequences_are_keys() -> None:
    assert keys_of("\x1b[A\x1bOBq\r\x1b[15~\x7f\x1b") == ["up", "down", "q", "enter", "backspace", "esc"]


def test_the_screen_in_a_terminal(broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "archive")
    broker.publish(topic, *[b"x"] * 12_000)
    arguments = ("top", "--interval=100ms", f"--filter={topic}", f"--nsqd-http-address={http(broker)}")
    with Terminal("main", *arguments) as terminal:
        terminal.wait_for("q quit")
        assert re.search(rf"{topic} +archive +12\.0k", terminal.text())
        with broker.connect() as connection:
            connection.identify(client_id="a-consumer")
            connection.sub(topic, "archive")
            terminal.type(b"\r")
            terminal.wait_for(f"clients of {topic} / archive")
            terminal.wait_for("a-consumer")
        terminal.type(b"\x1b[Dt")
        terminal.wait_for("IN CHANNELS")
        terminal.type(b"n")
        terminal.wait_for("HEALTH")
        terminal.forget()
        terminal.type(b"q")
        assert terminal.process.wait(DEADLINE) == 0
        # It leaves the alternate screen, and shows the cursor again.
        assert b"\x1b[?1049l" in terminal.raw() and b"\x1b[?25h" in terminal.raw()


def test_a_signal_restores_the_terminal(broker: TestBroker) -> None:
    with Terminal("main", "top", f"--nsqd-http-address={http(broker)}") as terminal:
        terminal.wait_for("q quit")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(DEADLINE) == 0
        assert b"\x1b[?1049l" in terminal.raw()


def test_plain_output_if_there_is_no_terminal(nsparq: Run, broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, b"one")
    done = nsparq("top", "--interval=10ms", f"--filter={topic}")
    totals, head, row = done.out.decode().splitlines()
    assert totals.startswith("nodes 1 ")
    assert head.split()[:7] == "TOPIC CHANNEL WAITING LAG DRAIN IN/S OUT/S".split()
    assert row.split()[:3] == [topic, "c", "1"] and re.match(r"<?\d", row.split()[3])
    found = json.loads(nsparq("top", "--interval=10ms", "--json").out)
    assert {*found} == {"channels", "topics", "nodes", "unreachable"}
    assert found["nodes"][0]["publish_rate"] == 0.0
