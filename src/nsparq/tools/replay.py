"""`nsparq replay`: moves a channel to another position in its topic's log.

It first asks nsqd what would happen and shows that. It moves the channel after a yes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nsparq.option_table import BOOL, STRING, OptionError, opt
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.manage import can_ask, confirmed
from nsparq.tools.output import Column, amount, moment, print_json, print_rows
from nsparq.tools.source import Source, SourceFlags
from nsparq.tools.times import TIME_HELP, parse_time

__all__ = ["REPLAY", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFlags(SourceFlags):
    topic: str = opt("", "the topic", STRING)
    channel: str = opt("", "the channel to move", STRING)
    to: str = opt("", f"`start`, `end`, `#123` (a sequence number), or a time: {TIME_HELP}", STRING)
    dry_run: bool = opt(False, "only show what would happen", BOOL)
    yes: bool = opt(False, "move the channel without asking", BOOL)

    def validate(self) -> None:
        SourceFlags.validate(self)
        if self.dry_run and self.yes:
            raise OptionError("use --dry-run or --yes, not both")
        self.target()

    def target(self) -> dict[str, str]:
        """The query that names the new position. Raises OptionError."""
        if self.to in ("start", "end"):
            return {"to": self.to}
        if re.fullmatch("#[0-9]+", self.to):
            return {"sequence": self.to[1:]}
        try:
            return {"time": f"{parse_time(self.to):.6f}"}
        except ValueError as error:
            raise OptionError(f"--to: {error}; or start, end, or #123 for a sequence number") from None


REPLAY: Final = CommandTable(
    "replay",
    ReplayFlags,
    words=("topic", "channel", "to"),
    required=3,
    about="""
Moves a channel to another position of its topic: its consumers get every message from there on, and
none before it. A move back delivers messages again; a move forward skips messages.

It shows the effect and asks for confirmation. Without a terminal it only shows the effect; --yes
moves the channel. A move back reaches the messages that the topic still has: see `nsparq settings`.
""",
    examples=(
        "nsparq replay orders archive 2h",
        "nsparq replay orders archive 2026-01-31T12:00 --dry-run",
        "nsparq replay orders archive end --yes",
    ),
)
COLUMNS: Final = (
    Column("node", "NODE", left=True),
    Column("again", "DELIVERED AGAIN", amount),
    Column("skipped", "SKIPPED", amount),
    Column("cursor", "FROM NUMBER"),
    Column("target", "TO NUMBER"),
    Column("oldest", "OLDEST MESSAGE", lambda ns: moment(ns) if ns else "none"),
)


def _replay(options: ReplayFlags) -> int:
    source = Source(options)
    query = {"topic": options.topic, "channel": options.channel, **options.target()}

    def plan(address: str) -> dict[str, Any]:
        effect = source.ask("POST", address, "/channel/seek", dry_run="true", **query)
        positions = source.ask("GET", address, "/topic/positions", topic=options.topic)
        return {**effect, "oldest": positions["first_timestamp"]}

    def move(address: str) -> Mapping[str, Any]:
        return source.ask("POST", address, "/channel/seek", **query)

    plans = source.each_of(options.topic, plan, options.channel)
    if "sequence" in query:
        plans.require_one()
    rows = [{"node": node, **found} for node, found in plans.done.items()]
    if not options.json:
        print_rows(rows, COLUMNS)
    is_moved = _is_wanted(options)
    if is_moved:
        done = source.each(plans.done, move)
        plans.failed |= done.failed
        rows = [{**row, **done.done[row["node"]]} for row in rows if row["node"] in done.done]
    if options.json:
        print_json({"moved": is_moved, "nodes": rows, "unreachable": plans.unreachable()})
    elif is_moved:
        print(f"Moved the channel {options.channel} of the topic {options.topic}.")
    else:
        hint = "" if options.dry_run or can_ask() else " Add --yes to move the channel."
        print(f"Nothing has changed.{hint}")
    return plans.report("nsparq replay")


def _is_wanted(options: ReplayFlags) -> bool:
    if options.dry_run or not (options.yes or (can_ask() and not options.json)):
        return False
    return confirmed(f"Move the channel {options.channel}?", yes=options.yes)


replay = partial(run_command, REPLAY, _replay)
