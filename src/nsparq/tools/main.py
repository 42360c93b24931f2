"""The `nsparq` command: finds a sub-command, imports only its module, and runs it."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from nsparq.streams import run_with_output
from nsparq.version import __version__

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: `module`.main takes its arguments and returns the exit status."""

    name: str
    module: str
    help: str
    extra: str = ""
    """The extra of the nsparq package that it needs."""
    function: str = "main"
    """The function of the module that runs it."""
    table: str = ""
    """The name of what describes its flags, for completion: an OptionTable, or a function that
    makes an ArgumentParser. Empty: TABLE or make_parser, whichever the module has."""


def _own(name: str, module: str, help: str) -> Command:
    """A command that is not one of NSQ's tools. Its module may have several."""
    return Command(name, f"nsparq.tools.{module}", help, function=name, table=name.upper())


COMMANDS: Final[dict[str, tuple[Command, ...]]] = {
    "All at once": (
        Command(
            "up",
            "nsparq.up.main",
            "nsqlookupd, nsqd, nsqadmin and pipelines, until Ctrl-C",
            "server",
            table="make_parser",
        ),
    ),
    "Daemons": (
        Command("nsqd", "nsparq.server.main", "the broker: receives, stores and delivers messages", "server"),
        Command("nsqlookupd", "nsparq.lookup.main", "the directory: which nsqd has which topic", "server"),
        Command("nsqadmin", "nsparq.admin.main", "web pages to watch and manage the cluster", "server"),
    ),
    "Look": (
        Command("top", "nsparq.tools.top", "watch channels, topics and nodes, live", "tools", "top", "TOP"),
        _own("topics", "listing", "list topics"),
        _own("channels", "listing", "list channels"),
        _own("nodes", "listing", "list the nsqds"),
        _own("peek", "messages", "show messages of a topic or a channel; consumes nothing"),
        _own("tail", "messages", "print messages as they arrive, or since a time (nsq_tail)"),
        Command("stat", "nsparq.tools.nsq_stat", "print the figures of a channel (nsq_stat)"),
    ),
    "Publish and manage": (
        _own("publish", "publish", "publish arguments, a file or standard input (to_nsq)"),
        _own("create", "manage", "create a topic or a channel"),
        _own("pause", "manage", "pause a topic or a channel"),
        _own("unpause", "manage", "end the pause of a topic or a channel"),
        _own("empty", "manage", "drop the messages of a topic or a channel"),
        _own("delete", "manage", "delete a topic or a channel"),
        _own("replay", "replay", "move a channel back or forward in its topic"),
        _own("policy", "policy", "show, set and remove delivery policies: retries, dead letters, expiry"),
        _own("settings", "settings", "show and change a topic's retention and durability"),
        Command(
            "dead-letters",
            "nsparq.tools.dead_letters",
            "show dead letters, and put them back into their channels",
            function="dead_letters",
            table="DEAD_LETTERS",
        ),
    ),
    "Your programs": (
        Command("run", "nsparq.runner.main", "run the subscriptions of a Python program, in workers"),
    ),
    "Send messages elsewhere": (
        Command("to-file", "nsparq.tools.nsq_to_file", "archive topics in files (nsq_to_file)"),
        Command("to-http", "nsparq.tools.nsq_to_http", "send messages as HTTP requests (nsq_to_http)"),
        Command("to-nsq", "nsparq.tools.nsq_to_nsq", "copy messages to other nsqds (nsq_to_nsq)"),
    ),
    "Spark": (
        Command(
            "pipeline",
            "nsparq.tools.pipeline",
            "topics through SQL to files, tables and topics",
            "spark",
            table="make_parser",
        ),
        Command(
            "spark",
            "nsparq.tools.spark",
            "check whether Spark can run here; faster starts",
            "spark",
            table="make_parser",
        ),
    ),
    "Administration": (
        Command(
            "auth",
            "nsparq.tools.auth",
            "create secrets for clients, check a policy file",
            table="make_parser",
        ),
        _own("replication", "replication", "show replicated nsqds, and move the primary"),
        _own("completion", "completion", "completion of commands, flags and topics for your shell"),
        Command(
            "deploy",
            "nsparq.tools.deploy",
            "files for systemd, Prometheus, containers, Kubernetes",
            table="make_parser",
        ),
    ),
}


def usage() -> str:
    lines = [
        "Usage: nsparq COMMAND [ARGUMENTS]",
        "",
        "A message broker that NSQ clients work with: producers publish messages to a topic,",
        "consumers subscribe to a channel of it.",
    ]
    for heading, commands in COMMANDS.items():
        lines += ["", f"{heading}:", *(f"  {command.name:<14}{command.help}" for command in commands)]
    lines += [
        "",
        "nsparq COMMAND --help    describe a command and its flags",
        "nsparq --version         print the version",
        "",
        "To try it, start `nsparq up` in one terminal, in a second",
        "  nsparq tail greetings",
        "and in a third",
        "  nsparq publish greetings hello",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 for success, 1 for a failure, 2 for a wrong command line."""
    return run_with_output(partial(_main, argv), lambda text: sys.stderr.write(f"nsparq: {text}\n"))


def _main(argv: Sequence[str] | None) -> int:
    name, *arguments = (sys.argv[1:] if argv is None else list(argv)) or [""]
    known = {command.name: command for commands in COMMANDS.values() for command in commands}
    if name == "help" and arguments and arguments[0] in known:
        name, arguments = arguments[0], ["--help"]
    if name in ("help", "-h", "-help", "--help"):
        sys.stdout.write(usage())
        return 0
    if name in ("version", "-version", "--version"):
        sys.stdout.write(f"nsparq {__version__}\n")
        return 0
    if not name:
        sys.stderr.write(usage())
        return 2
    if name not in known:
        # NSQ's name of a tool, or a typing error.
        similar = [command.name for command in known.values() if f"({name})" in command.help]
        similar = similar or difflib.get_close_matches(name, known, 1)
        hint = f"did you mean `nsparq {similar[0]}`?" if similar else "`nsparq --help` lists the commands"
        sys.stderr.write(f"nsparq: there is no command {name!r}; {hint}\n")
        return 2
    return _run(known[name], arguments)


def _run(command: Command, arguments: list[str]) -> int:
    try:
        run: Callable[[Sequence[str]], int] = getattr(
            importlib.import_module(command.module), command.function
        )
        return run(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "nsparq":
            raise
        package = f"nsparq[{command.extra}]" if command.extra else error.name
        sys.stderr.write(f"nsparq {command.name}: {error.name} is missing: pip install '{package}'\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
