"""`nsparq settings`: show and change a topic's retention, durability and archive, and a channel's
order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nsparq.flags import parse_duration
from nsparq.option_table import STRING, OptionError, choice, opt
from nsparq.tools.cluster import AskFailed
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.output import Column, age, moment, print_json, print_rows, size
from nsparq.tools.source import Answers, Source, SourceFlags

__all__ = ["SETTINGS", "change_all", "parse_age", "settings"]

DEFAULT: Final = "default"
NO_ORDER: Final = "none"
PROGRAM: Final = "nsparq settings"
UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFlags(SourceFlags):
    topic: str = opt("", "the topic", STRING)
    channel: str = opt("", "a channel of the topic; without it, the topic itself", STRING)
    retention_age: str = opt(
        "",
        "how long to keep messages that all channels have finished, such as `24h` or `7d`",
        STRING,
        heading="Settings of a topic",
    )
    retention_bytes: str = opt("", "how many bytes of such messages to keep at most, such as `10g`", STRING)
    durability: str = opt(
        "", "what nsqd waits for before it answers OK", choice("memory", "os", "fsync", DEFAULT, empty="")
    )
    archive: str = opt(
        "", "whether nsqd sends complete log files to its `--archive`", choice("on", "off", DEFAULT, empty="")
    )
    archive_retention_age: str = opt(
        "", "how long the archive keeps finished messages, such as `365d`; `0s`: forever", STRING
    )
    archive_retention_bytes: str = opt("", "how many bytes of them at most, such as `1t`", STRING)
    archive_local_bytes: str = opt(
        "", "how much of the topic stays on disk although channels need it; `0`: all of it", STRING
    )
    ordered_by: str = opt(
        "",
        "where the key of a message is: a JSON pointer such as `/customer/id`, or `header:` and a name; "
        f"`{NO_ORDER}` ends the order",
        STRING,
        heading="Settings of a channel",
    )

    def validate(self) -> None:
        SourceFlags.validate(self)
        changes = self.changes()
        if self.ordered_by and not self.channel:
            raise OptionError("--ordered-by is for a channel: give its name after the topic")
        if self.channel and (of_topic := changes.keys() - {"ordered_by"}):
            raise OptionError(f"{_flag(min(of_topic))} is for a topic: leave the channel out")

    def changes(self) -> dict[str, Any]:
        """What to change; None goes back to the flag of nsqd, or to no order. Raises
        OptionError."""
        parsers: dict[str, Callable[[str], Any]] = {
            "retention_age": parse_age,
            "retention_bytes": _bytes,
            "durability": str,
            "archive": lambda text: text == "on",
            "archive_retention_age": parse_age,
            "archive_retention_bytes": _bytes,
            "archive_local_bytes": _bytes,
        }
        found: dict[str, Any] = {}
        for name, parse in parsers.items():
            if text := getattr(self, name):
                try:
                    found[name] = None if text == DEFAULT else parse(text)
                except ValueError as error:
                    raise OptionError(f"{_flag(name)}: {error}") from None
        if self.ordered_by:
            found["ordered_by"] = None if self.ordered_by == NO_ORDER else self.ordered_by
        return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
    words=("topic", "channel"),
    required=1,
    about="""
Shows the settings of a topic or a channel, or changes those that are given, on every nsqd that has
it. Nothing needs a restart. For a topic, the value `default` goes back to the flag of nsqd.

Retention decides how far back `nsparq replay` and `nsparq tail --since` reach: it keeps messages
after all channels have finished them.

A channel with --ordered-by delivers messages with the same key one after the other. If one nsqd
refuses it, none changes. `nsparq policy` sets the delivery policy of a topic or a channel.
""",
    examples=(
        "nsparq settings orders",
        "nsparq settings orders --retention-age=7d --retention-bytes=10g",
        "nsparq settings orders --durability=default",
        "nsparq settings orders --archive-retention-age=365d --archive-local-bytes=10g",
        "nsparq settings orders billing --ordered-by=/customer/id",
        "nsparq settings orders billing --ordered-by=none",
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


def _archived(effective: Mapping[str, Any]) -> str:
    """What the archive keeps, in words."""
    if not effective.get("archive"):
        return "off"
    limits = (
        ("for", effective.get("archive_retention_age"), age),
        ("up to", effective.get("archive_retention_bytes"), size),
    )
    kept = ", ".join(f"{word} {show(value)}" for word, value, show in limits if value) or "forever"
    local = effective.get("archive_local_bytes")
    return f"{kept}; on disk {size(local)}" if local else kept


COLUMNS: Final = (
    Column("node", "NODE", left=True),
    Column("effective", "FINISHED MESSAGES", _kept, left=True),
    Column("durability", "DURABILITY", left=True),
    Column("archive", "ARCHIVE", _archived, left=True),
    Column("own", "SET FOR THIS TOPIC", lambda names: ", ".join(names) or "nothing", left=True),
    Column("oldest", "OLDEST MESSAGE", lambda ns: moment(ns) if ns else "none"),
    Column("bytes", "ON DISK", size),
)


CHANNEL_COLUMNS: Final = (
    Column("node", "NODE", left=True),
    # A JSON pointer may contain anything, also what a terminal would take for a command.
    Column("ordered_by", "ORDERED BY", lambda key: key if key.isprintable() else ascii(key), left=True),
    Column("origin", "POLICY", left=True),
)


def _settings(options: SettingsFlags) -> int:
    source = Source(options)
    return _settings_of_channel(source, options) if options.channel else _settings_of_topic(source, options)


def _settings_of_topic(source: Source, options: SettingsFlags) -> int:
    changes = options.changes()

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
                "archive": row["effective"],
                "own": [name for name in row["effective"] if row.get(name) is not None],
            }
            for row in rows
        ]
        print_rows(shown, COLUMNS)
    return answers.report(PROGRAM)


def _settings_of_channel(source: Source, options: SettingsFlags) -> int:
    path, names = "/channel/settings", {"topic": options.topic, "channel": options.channel}

    def get(address: str) -> Mapping[str, Any]:
        answer = source.ask("GET", address, path, **names)
        if "ordered_by" not in answer:
            raise AskFailed(f"{address} runs an older nsqd, which has no ordered channels", 501)
        return answer

    answers = source.each_of(options.topic, get, options.channel)
    if changes := options.changes():
        answers = change_all(source, answers, path, changes, names)
    rows = [{"node": node, **found} for node, found in answers.done.items()]
    if options.json:
        print_json({**names, "nodes": rows, "unreachable": answers.unreachable()})
    else:
        print_rows([{**row, "origin": _origin(row)} for row in rows], CHANNEL_COLUMNS)
        if len({row.get("ordered_by") for row in rows}) > 1:
            sys.stderr.write(f"{PROGRAM}: the nodes disagree; --ordered-by makes them equal\n")
    return answers.report(PROGRAM)


def _origin(row: Mapping[str, Any]) -> str | None:
    """Where the delivery policy of a channel comes from."""
    if row.get("policy") is not None:
        return "own"
    return "of the topic" if row["effective"].get("policy") is not None else None


def change_all(
    source: Source,
    present: Answers[Mapping[str, Any]],
    path: str,
    wanted: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    is_dry_run: bool = False,
) -> Answers[Mapping[str, Any]]:
    """Rehearse a change of settings everywhere, then make it. Raises AskFailed if an nsqd refuses
    it."""

    def put(address: str, **more: str) -> Mapping[str, Any]:
        return source.ask("PUT", address, path, wanted, **names, **more)

    rehearsed = source.each(present.done, partial(put, dry_run="true"))
    for error in rehearsed.failed.values():
        if error.status:
            raise AskFailed(f"nothing has changed: {error}", error.status, error.code)
    done = rehearsed if is_dry_run else source.each(rehearsed.done, put)
    done.failed = present.failed | rehearsed.failed | done.failed
    return done


settings = partial(run_command, SETTINGS, _settings)
