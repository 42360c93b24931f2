"""The command line of nsparq's own commands: words and flags in any order, help, and running.

A word fills a flag: `nsparq peek orders` is `nsparq peek --topic=orders`. So each value has one
declaration, in the options class of the command.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from nsparq import logs
from nsparq.errors import NsparqError
from nsparq.flags import FlagError, HelpWanted, UnknownFlag
from nsparq.option_table import CommandLineExit, Option, OptionError
from nsparq.streams import run_with_output
from nsparq.tools.options import T, ToolTable, table_row
from nsparq.version import version_line

__all__ = ["CommandTable", "run_command"]

WIDTH: Final = 100
MAX_COLUMN: Final = 30
"""Characters of a flag beside its description; the description of a longer one is below it."""
SHORT: Final = {"f": "follow", "n": "count", "y": "yes"}
"""Short names of flags, in the commands that have them."""


class CommandTable(ToolTable[T]):
    """The options of one command of `nsparq`."""

    def __init__(
        self,
        command: str,
        options_class: type[T],
        *,
        words: Sequence[str] = (),
        required: int = 0,
        about: str,
        examples: Sequence[str],
    ) -> None:
        """`words` are the options that words fill, in this order; the first `required` ones must be
        given. A list takes all further words."""
        super().__init__(f"nsparq {command}", options_class, command=command, about=about, examples=examples)
        by_name = {option.attribute: option for option in self.options}
        self.words = tuple(by_name[word] for word in words)
        self.required = self.words[:required]
        flags = {option.flag: option for option in self.options}
        self.short: Mapping[str, str] = {
            short: flag
            for short, flag in SHORT.items()
            # A choice of words is another flag of that name.
            if flag in flags and short not in flags and not flags[flag].kind.choices
        }

    def read(self, arguments: Sequence[str]) -> T:
        flags, words = self._split(arguments)
        try:
            commands, values = self.read_flags(flags)
        except HelpWanted:
            raise CommandLineExit(self.usage(), 0) from None
        except UnknownFlag as error:
            hint = self.explained(error).partition(";")[2]
            self.refuse(f"there is no flag --{error.name}" + (f";{hint}" if hint else ""))
        except FlagError as error:
            self.refuse(str(error))
        if commands.get("version"):
            raise CommandLineExit(version_line("nsparq") + "\n", 0)
        self._fill(values, words)
        return self._options_class(**values)

    def check(self, options: T) -> None:
        try:
            super().check(options)
        except OptionError as error:
            self.refuse(str(error))

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """The flags with their values, and the words. After `--` there are only words."""
        has_value = {option.flag for option in self.options if not option.kind.is_boolean}
        flags: list[str] = []
        words: list[str] = []
        remaining = iter(arguments)
        for argument in remaining:
            if argument == "--":
                words += remaining
            elif argument == "-" or not argument.startswith("-"):
                words.append(argument)
            else:
                dashes = "--" if argument.startswith("--") else "-"
                name, equals, value = argument.removeprefix(dashes).partition("=")
                name = self.short.get(name, name)
                flags.append(f"{dashes}{name}{equals}{value}")
                if not equals and name in has_value:
                    flags += islice(remaining, 1)
        return flags, words

    def _fill(self, values: dict[str, Any], words: list[str]) -> None:
        for option in self.words:
            if not words:
                break
            if option.attribute in values:
                continue
            count = len(words) if option.kind.is_list else 1
            taken, words = words[:count], words[count:]
            if not all(taken):
                self.refuse(f"{shown(option)} must not be empty")
            try:
                values[option.attribute] = option.kind.combine(
                    [option.kind.from_text(word) for word in taken]
                )
            except ValueError as error:
                self.refuse(f"{shown(option)}: {error}")
        if words:
            self.refuse(f"does not know what to do with {words[0]!r}\nUsage: {self._synopsis()}")
        for option in self.required:
            if not values.get(option.attribute):
                self.refuse(f"{shown(option)} is missing\nUsage: {self._synopsis()}")

    def _synopsis(self) -> str:
        parts = [self.program]
        for option in self.words:
            name = shown(option) + (" ..." if option.kind.is_list else "")
            parts.append(name if option in self.required else f"[{name}]")
        return " ".join([*parts, "[FLAGS]"])

    def usage(self) -> str:
        lines = [f"Usage: {self._synopsis()}", "", self.about, "", "Examples:"]
        lines += [f"  {example}" for example in self.examples]
        if self.words:
            lines += ["", f"Arguments, which may also be flags (--{self.words[0].flag}=...):"]
            lines += _entries([(shown(option), _described(option)) for option in self.words])
        long = {flag: short for short, flag in self.short.items()}
        entries: list[tuple[str, str]] = []

        def flush(heading: str) -> None:
            nonlocal entries, lines
            if entries:
                lines += ["", f"{heading}:", *_entries(entries)]
            entries = []

        heading = "Flags"
        for option in self.options:
            if option in self.words:
                continue
            if option.heading:
                flush(heading)
                heading = option.heading
            name = f"--{option.flag}" + (f" {option.kind.name.upper()}" if option.kind.name else "")
            short = f"-{long[option.flag]}, " if option.flag in long else ""
            entries.append((short + name, _described(option)))
        flush(heading)
        return "\n".join(lines) + "\n"

    def section(self) -> str:
        lines = [f"## {self.program}", "", self.about_block, "", "```sh", *self.examples, "```"]
        rows = [table_row(option).replace("| `--", "| argument or `--", 1) for option in self.words]
        rows += [table_row(option) for option in self.options if option not in self.words]
        lines += ["", "| flag | default | meaning |", "| --- | --- | --- |", *rows]
        return "\n".join([*lines, ""])


def shown(option: Option) -> str:
    return option.flag.upper()


def _described(option: Option) -> str:
    notes = ["may be given several times"] if option.kind.is_list else []
    if option.kind.choices:
        notes.append(", ".join(option.kind.choices))
    if option.default_text:
        notes.append(f"default {option.default_text}")
    elif option.default not in ("", (), None, False):
        notes.append(f"default {option.kind.to_toml(option.default)}".replace('"', ""))
    return option.help.replace("`", "") + (f" ({'; '.join(notes)})" if notes else "")


def _entries(entries: Sequence[tuple[str, str]]) -> list[str]:
    column = min(max(len(name) for name, _ in entries), MAX_COLUMN)
    lines = []
    for name, text in entries:
        head = f"  {name:<{column}}  "
        wrapped = textwrap.wrap(text, WIDTH - column - 4) or [""]
        if len(name) > column:
            lines.append(f"  {name}")
            head = " " * (column + 4)
        lines.append(head + wrapped[0])
        lines += [" " * (column + 4) + line for line in wrapped[1:]]
    return lines


def run_command(table: CommandTable[T], work: Callable[[T], int], argv: Sequence[str] | None = None) -> int:
    """The main function of a command. `work` returns the exit status; an NsparqError is status 1, a
    wrong command line is status 2."""
    return run_with_output(
        partial(_run, table, work, argv), lambda text: sys.stderr.write(f"{table.program}: {text}\n")
    )


def _run(table: CommandTable[T], work: Callable[[T], int], argv: Sequence[str] | None) -> int:
    # Only warnings: the output of a command is for people and scripts.
    logs.configure("warn", f"[{table.program}] ")
    try:
        options = table.read(sys.argv[1:] if argv is None else argv)
        table.check(options)
        return work(options)
    except CommandLineExit as leave:
        (sys.stderr if leave.status else sys.stdout).write(leave.text)
        return leave.status
    except NsparqError as error:
        sys.stderr.write(f"{table.program}: {error}\n")
        return 1
