"""The command line of nsparq's own commands: words, flags, help, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from nsparq.names import VALID_NAME
from nsparq.option_table import BOOL, INT, STRING, STRINGS, CommandLineExit, opt
from nsparq.tools import auth, pipeline, spark
from nsparq.tools.command_table import CommandTable
from nsparq.tools.main import COMMANDS, main
from nsparq.tools.reference import TABLES
from nsparq.tools.source import SourceFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags(SourceFlags):
    topic: str = opt("", "the topic", STRING)
    channel: tuple[str, ...] = opt((), "channels", STRINGS)
    count: int = opt(10, "how many", INT, bound="positive")
    follow: bool = opt(False, "go on", BOOL)


TABLE = CommandTable(
    "look", Flags, words=("topic", "channel"), required=1, about="Looks.", examples=("nsparq look orders",)
)


def refused(*arguments: str) -> str:
    with pytest.raises(CommandLineExit) as leave:
        TABLE.check(TABLE.read(arguments))
    assert leave.value.status == 2
    return leave.value.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["t"], {"topic": "t"}),
        (["t", "a", "b"], {"topic": "t", "channel": ("a", "b")}),
        (["-n", "3", "t", "-f"], {"topic": "t", "count": 3, "follow": True}),
        (["t", "--count=3", "a", "--follow=false"], {"topic": "t", "count": 3, "channel": ("a",)}),
        (["--topic=t", "a"], {"topic": "t", "channel": ("a",)}),
        (["t", "--", "-n"], {"topic": "t", "channel": ("-n",)}),
        (["t", "-"], {"topic": "t", "channel": ("-",)}),
    ],
)
def test_words_and_flags_come_in_any_order(arguments: list[str], expected: dict[str, Any]) -> None:
    assert TABLE.read(arguments) == Flags(**expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "TOPIC is missing\nUsage: nsparq look TOPIC [CHANNEL ...] [FLAGS]"),
        (["t", "--cuont=1"], "there is no flag --cuont; did you mean --count?"),
        (["t", "--xyzzy"], "there is no flag --xyzzy"),
        (["t", "--count=x"], 'invalid value "x" for flag -count: parse error: write a whole number'),
        (["t", "--count=0"], "--count must be positive"),
        (["t", ""], "CHANNEL must not be empty"),
        (["t/u"], f"--topic 't/u' is not a valid topic name: {VALID_NAME}"),
        (["t", "--nsqd-http-address=http://x:1"], "--nsqd-http-address is host:port, without http://"),
    ],
)
def test_a_wrong_command_line_gets_a_short_text(arguments: list[str], text: str) -> None:
    assert refused(*arguments) == f"nsparq look: {text}\n`nsparq look --help` lists the flags\n"


def test_help_names_words_flags_and_defaults() -> None:
    with pytest.raises(CommandLineExit) as leave:
        TABLE.read(["-h"])
    text = leave.value.text
    assert leave.value.status == 0
    assert text.startswith("Usage: nsparq look TOPIC [CHANNEL ...] [FLAGS]\n\nLooks.\n")
    for part in ("  TOPIC    the topic", "-n, --count INT  how many (default 10)", "-f, --follow", "--json"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_reference_page_has_every_own_command() -> None:
    own = [one for group in COMMANDS.values() for one in group if one.function == one.name]
    assert {f"nsparq {one.name}" for one in own} <= {table.program for table in TABLES}
    for table in TABLES[: len(own)]:
        assert max(map(len, table.usage().splitlines())) <= 100, table.program


def test_the_status_of_a_wrong_command_line_is_2(
    capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    assert main(["peek", "--cont=1"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", "nsparq peek: there is no flag --cont; did you mean --count?")


@pytest.mark.parametrize("command", [pipeline, auth, spark], ids=lambda one: one.__name__)
def test_every_command_of_a_command_says_what_it_does_and_takes(command: Any) -> None:
    (commands,) = (one for one in command.make_parser()._actions if isinstance(one.choices, dict))
    for name, parser in commands.choices.items():
        assert parser.description, name
        assert [action.dest for action in parser._actions if not action.help] == [], name
