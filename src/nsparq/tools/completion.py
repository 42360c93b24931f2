"""`nsparq completion`: completion for bash, zsh and fish.

The printed scripts are small: they ask `nsparq completion --line=...` at each Tab, which looks at
the parsers themselves. So they never go stale, and they know the topics and channels of the
cluster.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import escape, glob
from typing import Any, Final

from nsparq.errors import NsparqError
from nsparq.option_table import STRING, Option, OptionTable, choice, opt
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.figures import poll
from nsparq.tools.main import COMMANDS, Command
from nsparq.tools.source import Source, SourceFlags

__all__ = ["COMPLETION", "candidates", "completion"]

SHELLS: Final = ("bash", "zsh", "fish")
TIMEOUT_S: Final = 1.0
"""How long a Tab may wait for the names of topics and channels."""
FILE_ENDINGS: Final = ("file", "path", "dir", "cert", "key", "directory", "checkpoint")
"""Ends of the names of flags and arguments whose value is a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFlags:
    shell: str = opt("", "your shell", choice(*SHELLS))
    line: str = opt("", "print the completions of this command line; for the scripts", STRING)

    def validate(self) -> None:
        pass


COMPLETION: Final = CommandTable(
    "completion",
    CompletionFlags,
    words=("shell",),
    required=1,
    about="""
Prints a script that completes commands, flags, and the names of topics and channels in your shell.
""",
    examples=(
        "source <(nsparq completion bash)                                   # in ~/.bashrc",
        "source <(nsparq completion zsh)                                    # in ~/.zshrc, after compinit",
        "nsparq completion fish > ~/.config/fish/completions/nsparq.fish",
    ),
)

TOOLS: Final = ("nsq_stat", "nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq", "to_nsq")
PROGRAMS: Final = ("nsparq", "nsqd", "nsqlookupd", "nsqadmin", *TOOLS)
"""All programs of the package."""

SCRIPTS: Final = {
    # Bash cuts words at = and :, and replaces only what is behind them. So do the candidates.
    "bash": """\
_nsparq() {
    local IFS=$'\\n'
    COMPREPLY=($(command nsparq completion bash --line="${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
}
complete -o nospace -F _nsparq PROGRAMS
""",
    "zsh": """\
#compdef PROGRAMS
_nsparq() {
    local -a texts shown
    local line
    while IFS= read -r line; do
        texts+=("${line%%$'\\t'*}")
        shown+=("${line/$'\\t'/  }")
    done < <(command nsparq completion zsh --line="${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)
    compadd -Q -S '' -d shown -a texts
}
compdef _nsparq PROGRAMS
""",
    "fish": """\
function _nsparq
    command nsparq completion fish --line=(commandline -cp | string collect) 2>/dev/null
end
for program in PROGRAMS
    complete -c $program -f -a '(_nsparq)'
end
""",
}


@dataclass(slots=True)
class Grammar:
    """What may follow a command, whichever parser it has."""

    flags: dict[str, Option | argparse.Action | None] = field(default_factory=dict)
    """By name with dashes. None for a flag that takes no value."""
    help: dict[str, str] = field(default_factory=dict)
    """What flags and commands are for."""
    commands: dict[str, Grammar] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    """Names of the arguments, in order. The last one may repeat."""


def grammar_of(command: Command) -> Grammar:
    module = importlib.import_module(command.module)
    name = command.table or ("TABLE" if hasattr(module, "TABLE") else "make_parser")
    found = getattr(module, name)
    return _of_table(found) if isinstance(found, OptionTable) else _of_parser(found())


def _of_table(table: OptionTable[Any]) -> Grammar:
    grammar = Grammar()
    for flag in (*table.command_flags, *table.options):
        name = f"--{flag.flag}" if len(flag.flag) > 1 else f"-{flag.flag}"
        grammar.flags[name] = flag if isinstance(flag, Option) and not flag.kind.is_boolean else None
        grammar.help[name] = flag.help.replace("`", "")
    grammar.flags["--help"] = None
    grammar.help["--help"] = "describe the command and its flags"
    if isinstance(table, CommandTable):
        grammar.words = [option.flag for option in table.words]
    return grammar


def _of_parser(parser: argparse.ArgumentParser) -> Grammar:
    grammar = Grammar()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice_action in action._choices_actions:
                grammar.help[choice_action.dest] = choice_action.help or ""
            grammar.commands = {name: _of_parser(one) for name, one in action.choices.items()}
        elif action.option_strings:
            name = action.option_strings[-1]
            grammar.flags[name] = None if action.nargs == 0 else action
            grammar.help[name] = (action.help or "") % {**vars(action), "prog": parser.prog}
        else:
            grammar.words.append(action.dest)
    return grammar


def candidates(line: str) -> tuple[str, list[tuple[str, str]]]:
    """The word at the end of a command line, and what it may become: texts with descriptions. A
    text without a blank at its end may go on."""
    words, current = _split(line)
    known = {command.name: command for group in COMMANDS.values() for command in group}
    program = ""
    # Assignments and the like may come before the program.
    while words and program not in PROGRAMS:
        program = os.path.basename(words.pop(0))
    if program == "nsparq":
        if not words:
            return current, _matching(current, {name: one.help for name, one in known.items()})
        command = known.get(words.pop(0))
    else:
        command = Command(program, f"nsparq.tools.{program}", "") if program in TOOLS else known.get(program)
    try:
        return current, [] if command is None else _complete(grammar_of(command), words, current)
    except ModuleNotFoundError:
        # The command needs an extra that is not installed.
        return current, []


def _split(line: str) -> tuple[list[str], str]:
    """The complete words, and the one that is being typed."""
    for closing in ("", "'", '"'):
        try:
            words = shlex.split(line + closing)
            break
        except ValueError:
            continue
    else:
        return [], ""
    if not line or line[-1].isspace() and not closing:
        return words, ""
    return words[:-1], words[-1] if words else ""


def _complete(grammar: Grammar, words: Sequence[str], current: str) -> list[tuple[str, str]]:
    given: dict[str, str] = {}
    seen: list[str] = []
    remaining = iter(words)
    pending = ""
    for word in remaining:
        name, equals, value = word.partition("=")
        if word.startswith("-") and len(word) > 1:
            if grammar.flags.get(name) is not None and not equals:
                found = next(remaining, None)
                if found is None:
                    pending = name
                    break
                value = found
            given[name.lstrip("-")] = value
        elif word in grammar.commands:
            return _complete(grammar.commands[word], [*remaining], current)
        else:
            seen.append(word)
    given |= dict(zip(grammar.words, seen, strict=False))
    if pending:
        return _values(pending, grammar.flags[pending], current, given)
    name, equals, value = current.partition("=")
    if equals and name in grammar.flags:
        return [(f"{name}={text}", help) for text, help in _values(name, grammar.flags[name], value, given)]
    if current.startswith("-"):
        ends = {name: "=" if one is not None else " " for name, one in grammar.flags.items()}
        return [
            (text.rstrip() + ends[text.rstrip()], help)
            for text, help in _matching(current, {name: grammar.help.get(name, "") for name in grammar.flags})
        ]
    if grammar.commands:
        return _matching(current, {name: grammar.help.get(name, "") for name in grammar.commands})
    if not grammar.words:
        return []
    word = grammar.words[min(len(seen), len(grammar.words) - 1)]
    return _values(word, grammar.flags.get(f"--{word}"), current, given)


def _values(
    name: str, flag: Option | argparse.Action | None, current: str, given: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Possible values of a flag or an argument."""
    name = name.lstrip("-")
    choices: Iterable[Any] = ()
    if isinstance(flag, Option):
        choices = flag.kind.choices
    elif flag is not None:
        choices = flag.choices or ()
    if choices:
        return _matching(current, dict.fromkeys(map(str, choices), ""))
    if name in ("topic", "channel", "pattern"):
        return _matching(current, dict.fromkeys(_names(name, given), ""))
    if name.rpartition("-")[2] in FILE_ENDINGS:
        return [
            (path + ("/" if os.path.isdir(path) else " "), "") for path in sorted(glob(escape(current) + "*"))
        ]
    return []


def _names(kind: str, given: Mapping[str, str]) -> list[str]:
    """Names of topics, or of the channels of a topic. Empty if nobody answers in time: a Tab must
    not print errors."""
    addresses: dict[str, Any] = {
        name.replace("-", "_"): (given[name],)
        for name in ("nsqd-http-address", "lookupd-http-address")
        if given.get(name)
    }
    try:
        found = poll(Source(SourceFlags(timeout=TIMEOUT_S, **addresses)), given.get("topic", ""))
    except NsparqError:
        return []
    if kind == "channel":
        return [row["channel"] for row in found.channels()]
    return [row["topic"] for row in found.topics()]


def _matching(current: str, known: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(f"{text} ", help) for text, help in known.items() if text.startswith(current)]


def _completion(options: CompletionFlags) -> int:
    if not options.line:
        sys.stdout.write(SCRIPTS[options.shell].replace("PROGRAMS", " ".join(PROGRAMS)))
        return 0
    current, found = candidates(options.line)
    for text, help in found:
        if options.shell == "bash":
            kept = max(current.rfind(character) for character in "=:") + 1
            print(text[kept:])
        elif options.shell == "fish":
            print(f"{text.rstrip()}\t{help}")
        else:
            print(f"{text}\t{help}")
    return 0


completion = partial(run_command, COMPLETION, _completion)
