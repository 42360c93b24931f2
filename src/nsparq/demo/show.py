"""The result on a terminal, or in a file: tables, and a small plot of the day."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsparq.demo.events import CLOSING, DAY_S, KINDS, OPENED, WINDOW_S, Expected
from nsparq.demo.results import Found

__all__ = ["Timing", "by_window", "show"]

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
COLUMNS: Final = 48
"""Of the plot: one is half an hour."""
COLOURS: Final = {"view": "blue", "search": "cyan", "basket": "yellow", "order": "green", "refund": "red"}


@dataclass(frozen=True, slots=True)
class Timing:
    """How long it took, in seconds."""

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
    table = Table(title="What the shop did, by the results in topic shop.activity", title_justify="left")
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
    """A line for each kind, over the day; each by its own measure."""
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
    """Events of the day, window by window."""
    begin = int(OPENED.timestamp())
    return [found.windows[(begin + at, kind)] for at in range(0, DAY_S, WINDOW_S)]


def _figures(expected: Expected, found: Found, timing: Timing) -> Table:
    table = Table(title="Where every message went", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows, counted = found.rows.total(), found.windows.total()
    median, most = found.latencies_s
    seconds = timing.until_results
    table.add_row("messages published and acknowledged", f"{expected.sent:,}")
    table.add_row("= rows in Parquet", f"{rows:,}")
    table.add_row("+ dead letters, malformed", f"{found.letters:,}", end_section=True)
    table.add_row("rows in Parquet", f"{rows:,}")
    table.add_row("= events counted in windows", f"{counted:,}")
    table.add_row("+ duplicates found", f"{found.twice:,}")
    table.add_row("+ more than an hour late, not counted", f"{found.late:,}")
    table.add_row("+ end of the day, in a window still open", f"{found.rows[CLOSING]:,}", end_section=True)
    table.add_row("results, one for each window and kind", f"{found.results:,}")
    table.add_row("Parquet", f"{found.files:,} files, {found.bytes / 1e6:.1f} MB", end_section=True)
    table.add_row("until everything answered, Spark included", f"{timing.starting:.1f} s")
    table.add_row("from the first event to the last result", f"{seconds:.1f} s")
    table.add_row("events per second, published", f"{expected.sent / timing.publishing:,.0f}")
    table.add_row("events per second, end to end", f"{expected.sent / seconds:,.0f}")
    table.add_row("published until in Parquet, median", f"{median:.1f} s")
    table.add_row("published until in Parquet, 95 of 100", f"{most:.1f} s")
    table.add_row("altogether", f"{timing.total:.0f} s")
    return table


def _clock(unix_s: int) -> str:
    minutes = unix_s % DAY_S // 60
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
