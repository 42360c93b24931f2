"""Completion: every command and flag, values, names of the cluster, and real shells."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from nsparq.tools.completion import PROGRAMS, SHELLS, candidates, grammar_of
from nsparq.tools.main import COMMANDS
from tests.support import TestBroker

from .conftest import Run
from .processes import http
from .terminal import Terminal

ALL = [command for group in COMMANDS.values() for command in group]


def texts(line: str) -> list[str]:
    return [text for text, _ in candidates(line)[1]]


def test_every_command_and_every_flag_is_completed() -> None:
    assert texts("nsparq ") == [f"{command.name} " for command in ALL]
    for command in ALL:
        grammar = grammar_of(command)
        assert grammar.flags and all(help for help in grammar.help.values()), command.name
        flags = {text.rstrip(" =") for text in texts(f"nsparq {command.name} -")}
        assert flags == {*grammar.flags}, command.name
    for program in PROGRAMS[1:]:
        assert "--version " in texts(f"{program} --ver")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nsparq unp", ["unpause "]),
        ("X=1 /usr/bin/nsparq unp", ["unpause "]),
        ("nsparq peek t --stat", ["--state="]),
        ("nsparq peek t c --state=re", ["--state=ready ", "--state=requeued "]),
        ("nsparq peek t c --state re", ["ready ", "requeued "]),
        ("nsparq auth ch", ["check "]),
        ("nsparq pipeline run --fail", ["--fail-fast "]),
        ("nsparq completion ", ["bash ", "zsh ", "fish "]),
        ("nsqd --log-level=w", ["--log-level=warn "]),
        ("nsparq nothing ", []),
        ("nsparq 'unclosed", []),
        ("", []),
    ],
)
def test_what_may_come_next(line: str, expected: list[str]) -> None:
    assert texts(line) == expected


def test_names_of_topics_channels_and_files(
    nsparq: Run, broker: TestBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.control("create", topic, "archive")
    assert texts(f"nsparq pause {topic}") == [f"{topic} "]
    assert texts(f"nsparq pause {topic} ar") == ["archive "]
    assert texts(f"nsq_tail --topic={topic[:-1]}")[-1].startswith("--topic=")
    assert nsparq("completion", "bash", f"--line=nsq_tail --topic={topic}").out == f"{topic} \n".encode()
    monkeypatch.setenv("NSQ_NSQD_HTTP_ADDRESS", "127.0.0.1:1")
    assert texts("nsparq pause ") == []
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert texts("nsparq publish t --file=or") == ["--file=orders/", "--file=orders.toml "]


COMMAND_LINES = {
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
    "fish": ["--no-config", "-i"],
}
READY = {
    "bash": "source <(nsparq completion bash); echo rea''dy\n",
    "zsh": "autoload -Uz compinit; compinit -u -D; source <(nsparq completion zsh); echo rea''dy\n",
    "fish": "nsparq completion fish | source; echo rea''dy\n",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes(shell: str, broker: TestBroker, topic: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    # No other topic begins like this one.
    broker.control("create", f"{shell}-{topic}", "archive")
    program = tmp_path / "nsparq"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m nsparq.tools.main "$@"\n')
    program.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "NSQ_NSQD_HTTP_ADDRESS": http(broker),
    }
    with Terminal(*COMMAND_LINES[shell], program=[shell], variables=variables) as terminal:
        terminal.type(READY[shell].encode())
        terminal.wait_for("ready")
        terminal.type(b"nsparq unp\t")
        terminal.wait_for("nsparq unpause ")
        terminal.type(f"{shell}-\t".encode())
        terminal.wait_for(f"{shell}-{topic}")
        terminal.type(b"ar\t")
        terminal.wait_for("archive")
