"""What the demo prints: progress bars while it runs, then tables and a small plot of the day."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nsparq.demo.events import CLOSING, DAY_S, KINDS, OPENED, WINDOW_S, Expected
from nsparq.demo.results import Found
from nsparq.demo.watching import Now

__all__ = ["Bars", "Timing", "by_window", "show"]

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
COLUMNS: Final = 48
"""Columns of the plot, each half an hour."""
LINE_S: Final = 10.0
"""Seconds between two lines of progress where there is no terminal."""
COLOURS: Final = {"view": "blue", "search": "cyan", "basket": "yellow", "order": "green", "refund": "red"}


class Bars:
    """Progress of published, in Parquet, dead letters and results."""

    def __init__(self, console: Console, events: int, letters: int, windows: int) -> None:
        """`letters` and `windows` are estimates: their numbers are known only at the end."""
        self._console = console
        columns = (
            TextColumn("{task.description:>12}"),
            BarColumn(36),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        add = self._progress.add_task
        self._published = add("published", total=events, note="")
        self._written = add("in Parquet", total=events - letters, note="")
        self._letters = add("dead letters", total=letters, note="")
        self._results = add("results", total=windows, note="")
        self._next_line = time.monotonic() + LINE_S

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def expect(self, events: int, letters: int, windows: int) -> None:
        """Set the real numbers."""
        self._progress.update(self._published, total=events)
        self._progress.update(self._written, total=events - letters)
        self._progress.update(self._letters, total=letters)
        self._progress.update(self._results, total=windows)

    def show(self, published: int, now: Now) -> None:
        update = self._progress.update
        lag = "lag unknown" if now.lag is None else f"lag {now.lag:,}"
        update(self._published, completed=published)
        update(self._written, completed=now.written, note=lag)
        update(self._letters, completed=now.letters)
        update(self._results, completed=now.results)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_S
            self._console.print(
                f"published {published:,}, in Parquet {now.written:,} ({lag}), "
                f"dead letters {now.letters:,}, results {now.results:,}",
                soft_wrap=True,
            )


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds."""

    starting: float
    publishing: float
    until_results: float
    """From the first event to the last result."""
    total: float


def show(console: Console, expected: Expected, found: Found, timing: Timing) -> None:
    for part in (_results(found), _plot(found), _figures(expected, found, timing)):
        console.print(part)
        console.print()


def _results(found: Found) -> Table:
    table = Table(title="Results per kind of event, from topic shop.activity", title_justify="left")
    table.add_column("kind")
    for heading in ("rows in Parquet", "counted once", "busiest 15 min", "turnover"):
        table.add_column(heading, justify="right")
    for kind in KINDS:
        windows = {start: count for (start, one), count in found.windows.items() if one == kind}
        cents = sum(amount for (_, one), amount in found.cents.items() if one == kind)
        busiest = max(windows, key=lambda start: windows[start], default=None)
        table.add_row(
            Text(kind, COLOURS[kind]),
            f"{found.rows[kind]:,}",
            f"{sum(windows.values()):,}",
            "" if busiest is None else f"{_clock(busiest)}  {windows[busiest]:,}",
            f"{cents / 100:,.2f}" if cents else "",
        )
    return table


def _plot(found: Found) -> Text:
    """A line for each kind over the day, each with its own scale."""
    lines = Text("events per half hour, 00:00 to 24:00\n", "dim")
    for kind in KINDS:
        counts = by_window(found, kind)
        size = len(counts) // COLUMNS
        values = [sum(counts[at * size : (at + 1) * size]) for at in range(COLUMNS)]
        most = max(values) or 1
        bars = "".join(BLOCKS[round(value / most * (len(BLOCKS) - 1))] for value in values)
        lines.append(f"{kind:>7} ")
        lines.append(bars, COLOURS[kind])
        lines.append(f" {most:,}\n", "dim")
    lines.rstrip()
    return lines


def by_window(found: Found, kind: str) -> list[int]:
    """Event counts of the day, one for each window."""
    begin = int(OPENED.timestamp())
    return [found.windows[(begin + at, kind)] for at in range(0, DAY_S, WINDOW_S)]


def _figures(expected: Expected, found: Found, timing: Timing) -> Table:
    table = Table(title="Where the messages are", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows, counted = found.rows.total(), found.windows.total()
    median, most = found.latencies_s
    seconds = timing.until_results
    table.add_row("messages published and acknowledged", f"{expected.sent:,}")
    table.add_row("= rows in Parquet", f"{rows:,}")
    table.add_row("+ dead letters (malformed messages)", f"{found.letters:,}", end_section=True)
    table.add_row("rows in Parquet", f"{rows:,}")
    table.add_row("= events counted in windows", f"{counted:,}")
    table.add_row("+ duplicates", f"{found.twice:,}")
    table.add_row("+ more than an hour late, not counted", f"{found.late:,}")
    table.add_row("+ end of the day, in a window still open", f"{found.rows[CLOSING]:,}", end_section=True)
    table.add_row("results, one per window and kind", f"{found.results:,}")
    table.add_row("Parquet", f"{found.files:,} files, {found.bytes / 1e6:.1f} MB", end_section=True)
    table.add_row("start of all processes, with Spark", f"{timing.starting:.1f} s")
    table.add_row("from the first event to the last result", f"{seconds:.1f} s")
    table.add_row("events per second, published", f"{expected.sent / timing.publishing:,.0f}")
    table.add_row("events per second, end to end", f"{expected.sent / seconds:,.0f}")
    table.add_row("publish to Parquet, median", f"{median:.1f} s")
    table.add_row("publish to Parquet, 95th percentile", f"{most:.1f} s")
    table.add_row("total time", f"{timing.total:.0f} s")
    return table


def _clock(unix_s: int) -> str:
    minutes = unix_s % DAY_S // 60
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
