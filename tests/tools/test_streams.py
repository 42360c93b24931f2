"""Standard files as users give them: full, closed, or a pipe without a reader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import TestBroker

from .processes import Finished, Tool, http, run_tool, tcp

FULL, CLOSED, NO_READER = "full", "closed", "no reader"


def run(
    name: str, *arguments: str, stdout: str = FULL, closed: int | None = None, **variables: str
) -> Finished:
    """A process of its own: Python's flush at its end must not add a message."""
    if stdout == NO_READER:
        reading, output = os.pipe()
        os.close(reading)
    else:
        output = os.open("/dev/full", os.O_WRONLY)
    closed = 1 if stdout == CLOSED else closed
    end: dict[str, Any] = {"preexec_fn": lambda: closed is None or os.close(closed)}
    with Tool(name, *arguments, stdout=output, variables=variables, **end) as tool:
        os.close(output)
        tool.end_input()
        return Finished(tool.wait(), b"", tool.err())


SAID = {
    FULL: "cannot write to standard output: No space left on device\n",
    CLOSED: "cannot write to standard output: Bad file descriptor\n",
}


@pytest.mark.parametrize("stdout", [FULL, CLOSED, NO_READER])
@pytest.mark.parametrize(
    "command",
    [
        ("main", "topics"),
        ("main", "peek", "TOPIC"),
        ("main", "tail", "TOPIC", "--since=1h"),
        ("main", "tail", "TOPIC", "--since=1h", "-f"),
        ("nsq_stat", "--topic=TOPIC", "--channel=c"),
    ],
    ids=lambda command: command[-1],
)
def test_output_that_cannot_be_written_is_said_in_one_line(
    broker: TestBroker, topic: str, command: tuple[str, ...], stdout: str
) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, b"one", b"x" * 100_000)
    name, *arguments = (word.replace("TOPIC", topic) for word in command)
    done = run(name, *arguments, f"--nsqd-http-address={http(broker)}", stdout=stdout)
    assert done.status == 1
    if stdout == NO_READER:
        assert done.err == ""
    else:
        assert done.err.endswith(SAID[stdout]) and done.err.count("\n") == 1


@pytest.mark.parametrize("stdout", [FULL, CLOSED, NO_READER])
@pytest.mark.parametrize(
    "command",
    [("main", "--help"), ("main", "topics", "--help"), ("main", "deploy", "--list"), ("nsq_tail", "--help")],
    ids=" ".join,
)
def test_so_is_a_text_that_needs_no_daemon(command: tuple[str, ...], stdout: str) -> None:
    done = run(*command, stdout=stdout)
    assert done.status == 1
    if stdout == NO_READER:
        assert done.err == ""
    else:
        assert done.err.endswith(SAID[stdout]) and done.err.count("\n") == 1


@pytest.mark.parametrize("command", ["auth", "run"])
def test_so_is_a_help_that_is_written_at_once(command: str) -> None:
    """argparse hides an error of its write."""
    done = run("main", command, "--help", PYTHONUNBUFFERED="1")
    assert (done.status, done.err) == (1, f"nsparq: {SAID[FULL]}")


def test_no_socket_takes_the_place_of_a_closed_output(broker: TestBroker, topic: str) -> None:
    """nsq_tail would write the messages into it."""
    broker.publish(topic, b"PUB other\n\0\0\0\1x")
    done = run("nsq_tail", f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}", stdout=CLOSED)
    assert done.status == 1
    assert done.err.endswith(f"FATAL: {SAID[CLOSED]}")


def test_a_closed_input_cannot_be_read(broker: TestBroker, topic: str) -> None:
    done = run("to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}", closed=0)
    assert done.status == 1
    assert done.err.endswith("FATAL: cannot read the input: Bad file descriptor\n")
    broker.publish(topic, b"one")
    done = run("main", "delete", topic, f"--nsqd-http-address={http(broker)}", closed=0)
    assert done.status == 1
    assert done.err.endswith("There is no terminal to ask on: add --yes\n")


def test_without_standard_error_a_command_works(broker: TestBroker, topic: str, tmp_path: Path) -> None:
    broker.publish(topic, b"one")
    with (tmp_path / "out").open("wb") as out:
        for name, status in ((topic, 0), (f"{topic}x", 1)):
            address = f"--nsqd-http-address={http(broker)}"
            with Tool("main", "peek", name, address, stdout=out, preexec_fn=lambda: os.close(2)) as tool:
                assert tool.wait() == status
    assert (tmp_path / "out").read_bytes().endswith(b"    one\n")


def test_a_text_that_the_encoding_lacks_is_escaped(broker: TestBroker, topic: str, tmp_path: Path) -> None:
    broker.publish(topic, "Gruß €".encode())
    flag = f"--nsqd-http-address={http(broker)}"
    for arguments in (("peek", topic, flag), ("peek", topic, "--json", flag)):
        done = run_tool("main", *arguments, PYTHONIOENCODING="latin-1")
        assert (done.status, done.err) == (0, "")
        assert "Gruß \\u20ac".encode("latin-1") in done.out
