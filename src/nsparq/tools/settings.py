"""`nsparq settings`: show and change a topic's retention and durability."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nsparq.flags import parse_duration
from nsparq.option_table import STRING, OptionError, choice, opt
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.output import Column, age, moment, print_json, print_rows, size
from nsparq.tools.source import Source, SourceFlags

__all__ = ["SETTINGS", "parse_age", "settings"]

DEFAULT: Final = "default"
UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFlags(SourceFlags):
    topic: str = opt("", "the topic", STRING)
    retention_age: str = opt(
        "", "how long to keep messages that all channels have finished, such as `24h` or `7d`", STRING
    )
    retention_bytes: str = opt("", "how many bytes of such messages to keep at most, such as `10g`", STRING)
    durability: str = opt(
        "", "what nsqd waits for before it answers OK", choice("memory", "os", "fsync", DEFAULT, empty="")
    )

    def validate(self) -> None:
        SourceFlags.validate(self)
        self.changes()

    def changes(self) -> dict[str, Any]:
        """What to change; None goes back to the flag of nsqd. Raises OptionError."""
        parsers: dict[str, Callable[[str], Any]] = {
            "retention_age": parse_age,
            "retention_bytes": _bytes,
            "durability": str,
        }
        found: dict[str, Any] = {}
        for name, parse in parsers.items():
            if text := getattr(self, name):
                try:
                    found[name] = None if text == DEFAULT else parse(text)
                except ValueError as error:
                    raise OptionError(f"--{name.replace('_', '-')}: {error}") from None
        return found


def parse_age(text: str) -> float:
    """Seconds of a duration, which may be in days. Raises ValueError."""
    days = re.fullmatch(r"([0-9]+)d", text)
    try:
        seconds = int(days[1]) * 86400.0 if days else parse_duration(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise ValueError(f"{text!r} is not a duration; write one such as 24h or 7d")
    return seconds


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([kmgt]?)", text.lower())
    if not found:
        raise ValueError(f"{text!r} is not a number of bytes; write one such as 500m or 10g")
    return int(found[1]) * UNITS[found[2]]


SETTINGS: Final = CommandTable(
    "settings",
    SettingsFlags,
    words=("topic",),
    required=1,
    about="""
Shows a topic's settings, or changes those that are given, on every nsqd that has the topic. Nothing
needs a restart. The value `default` goes back to the flag of nsqd.

Retention decides how far back `nsparq replay` and `nsparq tail --since` reach: it keeps messages
after all channels have finished them.
""",
    examples=(
        "nsparq settings orders",
        "nsparq settings orders --retention-age=7d --retention-bytes=10g",
        "nsparq settings orders --durability=default",
    ),
)


def _kept(effective: Mapping[str, Any]) -> str:
    """How long nsqd keeps finished messages, in words."""
    parts = []
    if effective["retention_age"]:
        parts.append(f"for {age(effective['retention_age'])}")
    if effective["retention_bytes"]:
        parts.append(f"up to {size(effective['retention_bytes'])}")
    return ", ".join(parts) or "not kept"


COLUMNS: Final = (
    Column("node", "NODE", left=True),
    Column("effective", "FINISHED MESSAGES", _kept, left=True),
    Column("durability", "DURABILITY", left=True),
    Column("own", "SET FOR THIS TOPIC", lambda names: ", ".join(names) or "nothing", left=True),
    Column("oldest", "OLDEST MESSAGE", lambda ns: moment(ns) if ns else "none"),
    Column("bytes", "ON DISK", size),
)


def _settings(options: SettingsFlags) -> int:
    source, changes = Source(options), options.changes()

    def ask(address: str) -> Mapping[str, Any]:
        if changes:
            found = source.ask("PUT", address, "/topic/settings", changes, topic=options.topic)
        else:
            found = source.ask("GET", address, "/topic/settings", topic=options.topic)
        log = source.ask("GET", address, "/topic/positions", topic=options.topic)
        return {**found, "oldest": log["first_timestamp"], "bytes": log["bytes"]}

    answers = source.each_of(options.topic, ask)
    rows = [{"node": node, **found} for node, found in answers.done.items()]
    if options.json:
        print_json({"topic": options.topic, "nodes": rows, "unreachable": answers.unreachable()})
    else:
        shown = [
            {
                **row,
                "durability": row["effective"]["durability"],
                "own": [name for name in row["effective"] if row[name] is not None],
            }
            for row in rows
        ]
        print_rows(shown, COLUMNS)
    return answers.report("nsparq settings")


settings = partial(run_command, SETTINGS, _settings)
