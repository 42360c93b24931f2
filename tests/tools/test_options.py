"""The options of all tools: NSQ's flags, help, reference page, and the checks they share."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsparq.tools.main import COMMANDS
from nsparq.tools.reference import TABLES, markdown

from .processes import environment

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
CONSUMER = {"nsqd-tcp-address": (), "lookupd-http-address": (), "max-in-flight": 200, "consumer-opt": ()}
HTTP = {"http-client-connect-timeout": 2.0, "http-client-request-timeout": 5.0}

# Every flag of NSQ's tools with its default, as NSQ documents them; `...` for what depends on the
# machine.
NSQ_FLAGS: dict[str, dict[str, Any]] = {
    "nsq_tail": {**CONSUMER, "topic": (), "channel": ..., "n": 0, "print-topic": False},
    "nsq_stat": {
        **HTTP,
        "topic": "",
        "channel": "",
        "interval": 2.0,
        "count": None,
        "nsqd-http-address": (),
        "lookupd-http-address": (),
    },
    "to_nsq": {"topic": "", "delimiter": "\n", "rate": 0, "nsqd-tcp-address": (), "producer-opt": ()},
    "nsq_to_file": {
        **CONSUMER,
        **HTTP,
        "topic": (),
        "topic-pattern": "",
        "topic-refresh": 60.0,
        "channel": "nsq_to_file",
        "output-dir": "/tmp",
        "work-dir": "",
        "datetime-format": "%Y-%m-%d_%H",
        "filename-format": "<TOPIC>.<HOST><REV>.<DATETIME>.log",
        "host-identifier": "",
        "gzip": False,
        "gzip-level": 6,
        "skip-empty-files": False,
        "rotate-size": 0,
        "rotate-interval": 0.0,
        "sync-interval": 30.0,
        "log-level": "info",
        "log-prefix": "[nsq_to_file] ",
    },
    "nsq_to_http": {
        **CONSUMER,
        **HTTP,
        "http-client-request-timeout": 20.0,
        "topic": "",
        "channel": "nsq_to_http",
        "post": (),
        "get": (),
        "content-type": "application/octet-stream",
        "header": (),
        "mode": "hostpool",
        "n": 100,
        "sample": 1.0,
        "status-every": 250,
    },
    "nsq_to_nsq": {
        **CONSUMER,
        "topic": (),
        "channel": "nsq_to_nsq",
        "destination-nsqd-tcp-address": (),
        "destination-topic": "",
        "mode": "hostpool",
        "require-json-field": "",
        "require-json-value": "",
        "whitelist-json-field": (),
        "producer-opt": (),
        "status-every": 250,
    },
}
OUR_FLAGS: dict[str, dict[str, Any]] = {
    "nsq_tail": {"headers": False},
    "to_nsq": {"header": (), "json-lines": False},
    "nsq_to_file": {"json-lines": False},
    "nsq_to_nsq": {"drop-headers": False},
}
"""For message headers, which NSQ does not have."""
FLAGS = {program: flags | OUR_FLAGS.get(program, {}) for program, flags in NSQ_FLAGS.items()}
TOOLS = {table.program: table for table in TABLES}


def main_of(program: str) -> Any:
    return importlib.import_module(f"nsparq.tools.{program}").main


@pytest.mark.parametrize("program", NSQ_FLAGS)
def test_every_flag_of_nsq_is_there_with_its_default_and_no_other(program: str) -> None:
    found = {option.flag: option.default for option in TOOLS[program].options}
    wanted = {flag: found[flag] if value is ... else value for flag, value in FLAGS[program].items()}
    assert found == wanted
    assert [flag.flag for flag in TOOLS[program].command_flags] == ["version"]


@pytest.mark.parametrize("program", NSQ_FLAGS)
@pytest.mark.parametrize("asked", ["-h", "-help", "--help"])
def test_help_is_on_stdout_and_begins_with_the_description(
    program: str, asked: str, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    assert main_of(program)([asked]) == 0
    out, err = capsys.readouterr()
    table = TOOLS[program]
    assert err == ""
    assert out.startswith(
        f"Usage: {program} FLAGS      (or: nsparq {table.command} FLAGS)\n\n{table.about}\n"
    )
    assert "\nExamples:\n  " in out
    for flag in NSQ_FLAGS[program]:
        assert re.search(rf"^  -{flag}( |$)", out, re.MULTILINE)
    assert max(len(line.expandtabs(4)) for line in out.splitlines()) <= 110


@pytest.mark.parametrize("program", NSQ_FLAGS)
def test_examples_in_the_help_are_command_lines_that_are_accepted(program: str) -> None:
    text = "\n".join(TOOLS[program].examples).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line]
    assert len(lines) >= 2
    for line in lines:
        import shlex

        words = shlex.split(line)
        while words[0] != program:
            words.pop(0)
        arguments = words[1 : words.index("|")] if "|" in words else words[1:]
        options = TOOLS[program].read(arguments)
        TOOLS[program].check_bounds(options)
        options.validate()


@pytest.mark.parametrize("program", NSQ_FLAGS)
def test_the_version_is_that_of_nsq_followed_by_ours(
    program: str, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    assert main_of(program)(["--version"]) == 0
    assert re.fullmatch(rf"{program} v1\.3\.0 \(built w/nsparq-\S+\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("program", NSQ_FLAGS)
def test_a_wrong_command_line_is_status_2_and_says_where_help_is(
    program: str, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    assert main_of(program)(["--nonsense"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"{program}: flag provided but not defined: -nonsense\n`{program} --help` lists the flags\n"
    )


@pytest.mark.parametrize(
    "program", [program for program in NSQ_FLAGS if "consumer-opt" in NSQ_FLAGS[program]]
)
def test_sources_are_checked_the_same_way_everywhere(
    program: str, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    needed = {
        "nsq_to_http": ["--post=http://a"],
        "nsq_to_nsq": ["--destination-nsqd-tcp-address=127.0.0.1:1"],
    }.get(program, [])

    def refused(*arguments: str, status: int = 1) -> str:
        assert main_of(program)(["--topic=t", "--channel=c", *needed, *arguments]) == status
        return capsys.readouterr().err

    nsqd, lookupd = "--nsqd-tcp-address=127.0.0.1:1", "--lookupd-http-address=127.0.0.1:1"
    assert "--nsqd-tcp-address or --lookupd-http-address required" in refused()
    assert "use --nsqd-tcp-address or --lookupd-http-address not both" in refused(nsqd, lookupd)
    assert "--nsqd-tcp-address 'nowhere' is not host:port" in refused("--nsqd-tcp-address=nowhere")
    assert "--lookupd-http-address nowhere: " in refused("--lookupd-http-address=nowhere")
    assert "--channel 'a b' is not a valid channel name" in refused(nsqd, "--channel=a b")
    assert "--max-in-flight must be positive" in refused(nsqd, "--max-in-flight=0")
    unknown = refused(nsqd, "--consumer-opt=nonsense,1", status=2)
    assert "invalid value of --consumer-opt or --producer-opt: invalid option nonsense" in unknown
    assert "max_attempts" in refused(nsqd, "--consumer-opt=max_attempts,-1", status=2)


def test_the_reference_page_is_what_the_source_generates() -> None:
    command = [sys.executable, "-W", "error", "-m", "nsparq.tools.reference"]
    result = subprocess.run([*command, "--markdown"], capture_output=True, text=True, env=environment())
    assert (result.returncode, result.stderr) == (0, "")
    assert (REFERENCE / "tools.md").read_text(encoding="utf-8") == result.stdout, "stale: run `make docs`"
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode != 0 and "usage: python -m nsparq.tools.reference --markdown" in result.stderr


def test_the_reference_page_has_a_row_for_every_flag() -> None:
    page = markdown()
    for program, flags in FLAGS.items():
        section = page.split(f"\n## {program}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `--(\S+)` \|", section, re.MULTILINE) == [
            option.flag for option in TOOLS[program].options
        ]
        assert set(flags) == {option.flag for option in TOOLS[program].options}


def test_every_tool_is_a_command_of_nsparq_as_its_help_says() -> None:
    commands = {command.name: command for group in COMMANDS.values() for command in group}
    for table in TABLES:
        command = commands[table.command]
        if table.program.startswith("nsparq "):
            assert getattr(importlib.import_module(command.module), command.table) is table
        else:
            assert command.help.endswith(f"({table.program})")
