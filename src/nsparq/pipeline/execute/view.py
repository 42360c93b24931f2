"""Shows running pipelines: a live table on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import logging
import time
from math import ceil
from typing import TYPE_CHECKING, Final, Self

from nsparq.flags import format_duration
from nsparq.pipeline.execute.progress import Figures, State
from nsparq.pipeline.execute.status import Status

if TYPE_CHECKING:
    from rich.console import Group

logger = logging.getLogger(__name__)

LOG_S: Final = 10.0
UNKNOWN: Final = "unknown"
HEADINGS: Final = (
    "pipeline",
    "state",
    "rows/s",
    "lag",
    "caught up in",
    "rows",
    "batch",
    "took",
    "dead letters",
    "failures",
)
_STYLES: Final = {
    State.RUNNING: "green",
    State.STARTING: "yellow",
    State.WAITING: "yellow",
    State.FAILED: "bold red",
}


def cells(one: Figures) -> tuple[str, ...]:
    """The cells of a pipeline's line in the table."""
    letters = one.dead_letters or one.undecodable
    return (
        one.name,
        str(one.state),
        f"{one.rows_per_second:,.0f}",
        UNKNOWN if one.lag is None else f"{one.lag:,}",
        _remaining(one),
        f"{one.rows:,}",
        "" if one.batch is None else str(one.batch),
        f"{one.batch_seconds:.2f} s" if one.batches else "",
        f"{letters:,}" if letters else "",
        f"{one.failures:,}" if one.failures else "",
    )


def _remaining(one: Figures) -> str:
    """When it will have read everything. Empty if it has, or if nothing is known."""
    if one.catch_up_seconds is None:
        return UNKNOWN if one.lag and one.batches else ""
    return format_duration(ceil(one.catch_up_seconds)) if one.catch_up_seconds else ""


def describe(one: Figures) -> str:
    """The same as a log line."""
    parts = [f"{one.rows:,} rows ({one.rows_per_second:,.0f}/s)"]
    parts.append(f"lag {UNKNOWN if one.lag is None else format(one.lag, ',')}")
    if remaining := _remaining(one):
        parts.append(f"caught up in {remaining}")
    if one.batches:
        parts.append(f"batch {one.batch} took {one.batch_seconds:.2f} s")
    if one.undecodable:
        parts.append(f"{one.undecodable:,} did not decode")
    if one.dead_letters:
        parts.append(f"{one.dead_letters:,} dead letters")
    if one.late:
        parts.append(f"{one.late:,} too late (watermark)")
    if one.failures:
        parts.append(f"{one.failures:,} failures")
    return f"{one.name}: {one.state}, {', '.join(parts)}"


class View:
    """Shows the status of the runner."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, status: Status) -> None:
        raise NotImplementedError


class LogView(View):
    """Logs a line for each pipeline every few seconds, if it has changed."""

    def __init__(self, every: float = LOG_S) -> None:
        self._every = every
        self._next = time.monotonic() + every
        self._said: dict[str, str] = {}

    def show(self, status: Status) -> None:
        now = time.monotonic()
        if now < self._next and status.is_running:
            return
        self._next = now + self._every
        for one in status.pipelines:
            text = describe(one)
            if self._said.get(one.name) != text:
                logger.info("%s", text)
                self._said[one.name] = text


class TerminalView(View):
    """Raises ModuleNotFoundError without rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, status: Status) -> None:
        self._live.update(picture(status), refresh=True)


def picture(status: Status) -> Group:
    """The table for rich. Failures stand out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        is_text = heading in ("pipeline", "state")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for one in status.pipelines:
        name, state, *numbers, letters, failures = cells(one)
        styled = Text(state, _STYLES.get(one.state, ""))
        table.add_row(name, styled, *numbers, Text(letters, "yellow"), Text(failures, "red"))
    lines: list[Text] = [
        Text(f"{one.name}: {one.error}", "red", no_wrap=True, overflow="ellipsis")
        for one in status.pipelines
        if one.error and one.state in (State.FAILED, State.WAITING)
    ]
    where = {"Spark": status.ui, "metrics": status.address and f"http://{status.address}/metrics"}
    shown = "   ".join(f"{name}: {address}" for name, address in where.items() if address)
    return Group(table, *lines, Text(shown, "dim"))
