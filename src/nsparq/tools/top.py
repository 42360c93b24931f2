"""`nsparq top`: topics, channels, nodes and consumers, live. `top_screen` draws it on a terminal.

The model here knows neither a terminal nor a clock: polls and keys come in, rows go out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

from nsparq.option_table import BOOL, DURATION, STRING, choice, opt
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.figures import Poll, Row, add_rates, poll
from nsparq.tools.listing import CHANNEL_LAG, yes
from nsparq.tools.output import Column, age, amount, print_json, print_rows, size
from nsparq.tools.source import Answers, Source, SourceFlags

__all__ = ["TOP", "Model", "top"]


class View(NamedTuple):
    """One table: its columns, the keys that identify a row, its rates, and what Enter opens."""

    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    rates: tuple[str, ...]
    sort: str
    opens: str


PUBLISHED: Final = Column("publish_rate", "IN/S", amount)
VIEWS: Final = {
    "channels": View(
        (
            Column("topic", "TOPIC", left=True),
            Column("channel", "CHANNEL", left=True),
            Column("depth", "WAITING", amount),
            *CHANNEL_LAG,
            PUBLISHED,
            Column("finish_rate", "OUT/S", amount),
            Column("in_flight_count", "IN FLIGHT", amount),
            Column("deferred_count", "DEFERRED", amount),
            Column("requeue_rate", "REQUEUED/S", amount),
            Column("timeout_rate", "TIMED OUT/S", amount),
            Column("client_count", "CLIENTS"),
            Column("paused", "PAUSED", yes),
        ),
        ("topic", "channel"),
        ("publish_rate", "finish_rate", "requeue_rate", "timeout_rate"),
        "depth",
        "clients",
    ),
    "topics": View(
        (
            Column("topic", "TOPIC", left=True),
            PUBLISHED,
            Column("depth", "IN TOPIC", amount),
            Column("channels_depth", "IN CHANNELS", amount),
            Column("deferred_count", "DEFERRED", amount),
            Column("message_count", "MESSAGES", amount),
            Column("channels", "CHANNELS"),
            Column("log_bytes", "ON DISK", size),
            Column("nodes", "NODES"),
            Column("paused", "PAUSED", yes),
        ),
        ("topic",),
        ("publish_rate",),
        "publish_rate",
        "channels",
    ),
    "nodes": View(
        (
            Column("node", "NODE", left=True),
            Column("health", "HEALTH", left=True),
            PUBLISHED,
            Column("depth", "WAITING", amount),
            Column("topics", "TOPICS"),
            Column("channels", "CHANNELS"),
            Column("clients", "CLIENTS"),
            Column("message_count", "MESSAGES", amount),
            Column("log_bytes", "ON DISK", size),
            Column("uptime_s", "UPTIME", age),
            Column("version", "VERSION"),
        ),
        ("node",),
        ("publish_rate",),
        "node",
        "topics",
    ),
    "clients": View(
        (
            Column("client_id", "CLIENT", left=True),
            Column("remote_address", "ADDRESS", left=True),
            Column("node", "NODE", left=True),
            Column("in_flight_count", "IN FLIGHT", amount),
            Column("ready_count", "RDY", amount),
            Column("message_count", "SENT", amount),
            Column("finish_count", "FINISHED", amount),
            Column("requeue_count", "REQUEUED", amount),
            Column("user_agent", "PROGRAM"),
        ),
        ("node", "remote_address"),
        (),
        "in_flight_count",
        "",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopFlags(SourceFlags):
    view: str = opt("channels", "the table to show first", choice("channels", "topics", "nodes"))
    interval: float = opt(2.0, "time between two updates", DURATION, bound="positive")
    filter: str = opt("", "only rows that contain this text", STRING)
    once: bool = opt(False, "print the table once and end, as when the output is not a terminal", BOOL)


TOP: Final = CommandTable(
    "top",
    TopFlags,
    about="""
Shows channels, topics and nodes live, with rates and lag, the largest backlog first. Keys:

  c t n          channels, topics, nodes
  up, down       choose a row
  Enter          look into it (topic: channels, channel: consumers, node: topics)
  Esc            back
  left, right    choose the column to sort by;  r: reverse the order
  /              show only rows with a text;  space: freeze and resume;  q: quit

LAG is the age of the oldest waiting message, DRAIN how long the backlog takes at the present rate.
If the output is not a terminal, it prints the table once.
""",
    examples=("nsparq top", "nsparq top --view=nodes", "nsparq top --json | jq '.channels[].finish_rate'"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """What is on the screen: a table, possibly of one topic, channel or node."""

    view: str
    topic: str = ""
    channel: str = ""
    node: str = ""

    @property
    def title(self) -> str:
        parts = [part for part in (self.node, self.topic, self.channel) if part]
        return f"{self.view} of {' / '.join(parts)}" if parts else self.view


class Model:
    """The state of the screen."""

    def __init__(self, view: str = "channels", filter: str = "") -> None:
        self.place = Place(view)
        self.filter = filter
        self.is_typing = False
        """Whether keys go into the filter."""
        self.is_stopped = False
        self.selected = 0
        self.message = ""
        self.last: Poll | None = None
        self._before: Poll | None = None
        self._back: list[Place] = []
        self._sort: dict[str, tuple[str, bool]] = {
            name: (view.sort, not view.columns[0].key == view.sort) for name, view in VIEWS.items()
        }
        """By view: the key to sort by, and whether large values come first."""

    @property
    def sorted_by(self) -> tuple[str, bool]:
        return self._sort[self.place.view]

    def update(self, found: Poll) -> None:
        if not self.is_stopped:
            self._before, self.last = self.last, found

    def rows(self) -> list[Row]:
        """The rows on the screen, in order."""
        place, view = self.place, VIEWS[self.place.view]
        rows = self.all_rows(place.view, place.node)
        for key in ("topic", "channel"):
            if wanted := getattr(place, key):
                rows = [row for row in rows if row[key] == wanted]
        if self.filter:
            rows = [row for row in rows if any(self.filter in str(row[key]) for key in view.keys)]
        key, is_falling = self.sorted_by
        rows.sort(key=lambda row: _order(row.get(key)), reverse=is_falling)
        self.selected = min(self.selected, max(0, len(rows) - 1))
        return rows

    def all_rows(self, name: str, node: str = "") -> list[Row]:
        """All rows of a view, with rates."""
        if self.last is None:
            return []
        now, before = (_only(found, node) for found in (self.last, self._before or self.last))
        view = VIEWS[name]
        rows: list[Row] = getattr(now, name)()
        add_rates(rows, getattr(before, name)(), now.at - before.at, view.keys, view.rates)
        return rows

    def press(self, key: str) -> bool:
        """Do what a key says. False: quit."""
        if self.is_typing:
            self._type(key)
        elif key in ("q", "ctrl-c"):
            return False
        elif key in ("c", "t", "n"):
            self._go(Place({"c": "channels", "t": "topics", "n": "nodes"}[key]))
            self._back.clear()
        elif key in ("up", "k", "down", "j"):
            self.selected = max(0, self.selected + (1 if key in ("down", "j") else -1))
        elif key in ("left", "right"):
            self._sort_by_next(1 if key == "right" else -1)
        elif key == "r":
            name, is_falling = self.sorted_by
            self._sort[self.place.view] = name, not is_falling
        elif key == "enter":
            self._open()
        elif key in ("esc", "backspace") and self._back:
            self.place, self.selected = self._back.pop(), 0
        elif key == "/":
            self.is_typing, self.filter = True, ""
        elif key == " ":
            self.is_stopped = not self.is_stopped
        return True

    def _type(self, key: str) -> None:
        if key in ("enter", "esc"):
            self.is_typing = False
            self.filter = "" if key == "esc" else self.filter
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key

    def _go(self, place: Place) -> None:
        self._back.append(self.place)
        self.place, self.selected = place, 0

    def _open(self) -> None:
        rows, opens = self.rows(), VIEWS[self.place.view].opens
        if not rows or not opens:
            return
        row = rows[self.selected]
        found = {key: str(row[key]) for key in VIEWS[self.place.view].keys}
        self._go(replace(self.place, view=opens, **found))
        self.filter = ""

    def _sort_by_next(self, step: int) -> None:
        columns = VIEWS[self.place.view].columns
        keys = [column.key for column in columns]
        at = (keys.index(self.sorted_by[0]) + step) % len(keys)
        self._sort[self.place.view] = keys[at], not columns[at].left

    def totals(self) -> str:
        channels, topics = self.all_rows("channels"), self.all_rows("topics")
        published = sum(row["publish_rate"] or 0 for row in topics)
        finished = sum(row["finish_rate"] or 0 for row in channels)
        waiting = sum(row["depth"] for row in (*channels, *topics))
        nodes = len(self.last.answers.done) if self.last else 0
        return (
            f"nodes {nodes}   topics {len(topics)}   channels {len(channels)}   in {amount(published)}/s   "
            f"out {amount(finished)}/s   waiting {amount(waiting)}"
        )


def _order(value: Any) -> tuple[int, Any]:
    """Unknown values come last when large ones come first."""
    return (0, 0) if value is None else (1, value)


def _only(found: Poll, node: str) -> Poll:
    if not node:
        return found
    done = {address: stats for address, stats in found.answers.done.items() if address == node}
    return Poll(Answers(done), found.at)


def print_once(options: TopFlags, source: Source) -> int:
    """The tables after one interval, for files and programs."""
    model = Model(options.view, options.filter)
    model.update(poll(source))
    time.sleep(options.interval)
    found = poll(source)
    model.update(found)
    if options.json:
        tables: dict[str, Any] = {name: model.all_rows(name) for name in ("channels", "topics", "nodes")}
        print_json({**tables, "unreachable": found.answers.unreachable()})
    else:
        print(model.totals())
        if rows := model.rows():
            print_rows(rows, VIEWS[options.view].columns)
    return found.answers.report("nsparq top")


def _top(options: TopFlags) -> int:
    from nsparq.tools.top_screen import is_possible, run

    source = Source(options)
    if options.once or options.json or not is_possible():
        return print_once(options, source)
    return run(Model(options.view, options.filter), partial(poll, source, clients=True), options.interval)


top = partial(run_command, TOP, _top)
