"""`nsparq create`, `pause`, `unpause`, `empty` and `delete`: change topics and channels.

On every nsqd that has the topic; `create` on all nsqds if nsqlookupd is not used.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from nsparq.option_table import BOOL, STRING, opt
from nsparq.tools.cluster import AskFailed
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.figures import poll
from nsparq.tools.output import amount, print_json
from nsparq.tools.source import Answers, Source, SourceFlags

__all__ = ["can_ask", "confirmed", "create", "delete", "empty", "pause", "unpause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManageFlags(SourceFlags):
    topic: str = opt("", "the topic", STRING)
    channel: str = opt("", "a channel of the topic; without it, the topic itself", STRING)


@dataclass(frozen=True, slots=True, kw_only=True)
class DangerousFlags(ManageFlags):
    yes: bool = opt(False, "do it without asking", BOOL)


F = TypeVar("F", bound=ManageFlags)


def _table(command: str, flags: type[F], about: str) -> CommandTable[F]:
    examples = (f"nsparq {command} orders", f"nsparq {command} orders archive")
    return CommandTable(
        command, flags, words=("topic", "channel"), required=1, about=about, examples=examples
    )


ASKS: Final = "It asks for confirmation. Without a terminal it needs --yes."
CREATE: Final = _table(
    "create",
    ManageFlags,
    "Creates a topic, or a topic and a channel of it. It does not change existing ones.",
)
PAUSE: Final = _table(
    "pause",
    ManageFlags,
    "Pauses a channel: its consumers get no messages. Or pauses a topic: its channels get no messages.\n"
    "No message is lost: messages wait until the pause ends.",
)
UNPAUSE: Final = _table("unpause", ManageFlags, "Ends the pause of a topic or a channel.")
EMPTY: Final = _table(
    "empty",
    DangerousFlags,
    "Drops all messages of a channel: waiting, in flight and deferred. Or drops the messages that wait\n"
    f"in a topic itself; those of its channels stay.\n{ASKS}",
)
DELETE: Final = _table(
    "delete", DangerousFlags, f"Deletes a topic with its channels and messages, or a channel.\n{ASKS}"
)


def can_ask() -> bool:
    """Whether somebody can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirmed(question: str, *, yes: bool) -> bool:
    """Whether to continue. Raises AskFailed without a terminal."""
    if yes:
        return True
    if not can_ask():
        raise AskFailed(f"{question} There is no terminal to ask on: add --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _names(options: ManageFlags) -> tuple[str, dict[str, str], str]:
    """The kind, the names for a request, and the names for people."""
    if options.channel:
        names = {"topic": options.topic, "channel": options.channel}
        return "channel", names, f"the channel {options.channel} of the topic {options.topic}"
    return "topic", {"topic": options.topic}, f"the topic {options.topic}"


def _done(options: ManageFlags, action: str, past: str, found: Answers[Any]) -> int:
    _, names, shown = _names(options)
    if options.json:
        print_json({"action": action, **names, "nodes": [*found.done], "unreachable": found.unreachable()})
    else:
        print(f"{past} {shown} on {', '.join(found.done) or 'nsqlookupd'}.")
    return found.report(f"nsparq {action}")


def _create(options: ManageFlags) -> int:
    source = Source(options)
    kind, names, _ = _names(options)
    if source.lookupds:
        # nsqds that get the topic later learn its channels from nsqlookupd.
        _require(source.ask_lookupds("/topic/create", topic=options.topic))
        if options.channel:
            _require(source.ask_lookupds("/channel/create", **names))

    def make(address: str) -> object:
        source.require_nsqd(address)
        source.ask("POST", address, "/topic/create", topic=options.topic)
        return source.ask("POST", address, f"/{kind}/create", **names)

    return _done(options, "create", "Created", source.each(_where(source, options.topic), make))


def _where(source: Source, topic: str) -> list[str]:
    """Where to create: the nsqds that have the topic. If none has it, all of them."""
    return (source.nsqds(topic) if source.lookupds else []) or source.nsqds()


def _require(answers: Answers[Any]) -> None:
    for error in answers.failed.values():
        raise error


def _change(action: str, past: str, options: ManageFlags) -> int:
    source = Source(options)
    kind, names, _ = _names(options)

    def post(address: str) -> object:
        return source.ask("POST", address, f"/{kind}/{action}", **names)

    return _done(options, action, past, source.each_of(options.topic, post, options.channel))


def _empty(options: DangerousFlags) -> int:
    if not _agreed(f"Drop the messages of {_names(options)[2]}", options, whole=bool(options.channel)):
        return 1
    return _change("empty", "Emptied", options)


def _delete(options: DangerousFlags) -> int:
    kind, names, shown = _names(options)
    if not _agreed(f"Delete {shown}", options, whole=True):
        return 1
    source = Source(options)

    def remove(address: str) -> object:
        source.require_nsqd(address)
        return source.ask("POST", address, f"/{kind}/delete", **names)

    nsqds = source.nsqds(options.topic)
    # nsqlookupd first, so that it sends no consumer to an nsqd meanwhile.
    lookupds = source.ask_lookupds(f"/{kind}/delete", **names)
    found = source.each(nsqds, remove)
    found.failed |= lookupds.failed
    if not found.done and not found.failed:
        raise AskFailed(f"{shown} does not exist", 404)
    return _done(options, "delete", "Deleted", found)


def _agreed(what: str, options: DangerousFlags, *, whole: bool) -> bool:
    """Say how many messages will be lost, and ask. `whole`: those of all channels, too."""
    if options.yes:
        return True
    found = poll(Source(options), options.topic, options.channel)
    rows = found.topics()
    if not rows:
        raise AskFailed(f"{_names(options)[2]} does not exist", 404)
    lost = 0 if options.channel else sum(row["depth"] for row in rows)
    if whole:
        counts = ("depth", "in_flight_count", "deferred_count")
        lost += sum(row[count] for row in found.channels() for count in counts)
    return confirmed(f"{what} ({amount(lost)} message{'' if lost == 1 else 's'})?", yes=False)


create = partial(run_command, CREATE, _create)
pause = partial(run_command, PAUSE, partial(_change, "pause", "Paused"))
unpause = partial(run_command, UNPAUSE, partial(_change, "unpause", "Unpaused"))
empty = partial(run_command, EMPTY, _empty)
delete = partial(run_command, DELETE, _delete)
