"""`nsparq topics`, `nsparq channels` and `nsparq nodes`: lists with the present figures."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

from nsparq.option_table import STRINGS, opt
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.figures import Poll, poll
from nsparq.tools.output import Column, age, amount, print_json, print_rows, size
from nsparq.tools.source import Source, SourceFlags

__all__ = ["CHANNELS", "NODES", "TOPICS", "channels", "nodes", "topics"]


def yes(value: bool) -> str:
    return "yes" if value else ""


CHANNEL_LAG: Final = (
    Column("oldest_message_age_s", "LAG", age),
    Column("drain_time_s", "DRAIN", age),
)
"""Lag as time. A dash if nsqd does not tell, as NSQ's own."""
TOPIC_COLUMNS: Final = (
    Column("topic", "TOPIC", left=True),
    Column("channels", "CHANNELS"),
    Column("depth", "IN TOPIC", amount),
    Column("channels_depth", "IN CHANNELS", amount),
    Column("deferred_count", "DEFERRED", amount),
    Column("message_count", "MESSAGES", amount),
    Column("log_bytes", "ON DISK", size),
    Column("nodes", "NODES"),
    Column("paused", "PAUSED", yes),
)
CHANNEL_COLUMNS: Final = (
    Column("topic", "TOPIC", left=True),
    Column("channel", "CHANNEL", left=True),
    Column("depth", "WAITING", amount),
    *CHANNEL_LAG,
    Column("in_flight_count", "IN FLIGHT", amount),
    Column("deferred_count", "DEFERRED", amount),
    Column("requeue_count", "REQUEUED", amount),
    Column("timeout_count", "TIMED OUT", amount),
    Column("message_count", "MESSAGES", amount),
    Column("client_count", "CLIENTS"),
    Column("paused", "PAUSED", yes),
)
NODE_COLUMNS: Final = (
    Column("node", "NODE", left=True),
    Column("version", "VERSION", left=True),
    Column("health", "HEALTH", left=True),
    Column("uptime_s", "UPTIME", age),
    Column("topics", "TOPICS"),
    Column("channels", "CHANNELS"),
    Column("clients", "CLIENTS"),
    Column("depth", "WAITING", amount),
    Column("message_count", "MESSAGES", amount),
    Column("log_bytes", "ON DISK", size),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFlags(SourceFlags):
    pattern: tuple[str, ...] = opt((), "only topics with this name; `*` and `?` are placeholders", STRINGS)


TOPICS: Final = CommandTable(
    "topics",
    ListFlags,
    words=("pattern",),
    about="""
Lists topics with their figures, summed over all nsqds.

  IN TOPIC      messages that wait in the topic itself: it has no channel, or is paused
  IN CHANNELS   messages that wait in its channels, all channels together
""",
    examples=("nsparq topics", "nsparq topics 'orders*' --json"),
)
CHANNELS: Final = CommandTable(
    "channels",
    ListFlags,
    words=("pattern",),
    about="""
Lists channels with their figures, summed over all nsqds.

  LAG     age of the oldest waiting message
  DRAIN   how long the backlog takes at the present rate
""",
    examples=("nsparq channels", "nsparq channels orders", "nsparq channels --json | jq '.channels[].depth'"),
)
NODES: Final = CommandTable(
    "nodes",
    SourceFlags,
    about="Lists the nsqds with their health and figures.",
    examples=("nsparq nodes", "nsparq nodes --lookupd-http-address=10.0.0.1:4161"),
)


def _list(name: str, columns: tuple[Column, ...], options: Any) -> int:
    found = poll(Source(options))
    rows = getattr(Poll, name)(found)
    patterns = getattr(options, "pattern", ())
    if patterns:
        rows = [row for row in rows if any(fnmatchcase(row["topic"], pattern) for pattern in patterns)]
    if options.json:
        print_json({name: rows, "unreachable": found.answers.unreachable()})
    elif rows:
        print_rows(rows, columns)
    else:
        print(f"There are no {name}" + (f" that match {' or '.join(patterns)}." if patterns else "."))
    return found.answers.report(f"nsparq {name}")


topics = partial(run_command, TOPICS, partial(_list, "topics", TOPIC_COLUMNS))
channels = partial(run_command, CHANNELS, partial(_list, "channels", CHANNEL_COLUMNS))
nodes = partial(run_command, NODES, partial(_list, "nodes", NODE_COLUMNS))
