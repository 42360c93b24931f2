"""How far it is, while it runs: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nsparq.demo.watching import Now

__all__ = ["Bars"]

LINE_S: Final = 10.0


class Bars:
    """published, in Parquet, dead letters, results: each against what it will be."""

    def __init__(self, console: Console, events: int, letters: int, windows: int) -> None:
        """The number of dead letters and windows is only known in the end: these are guesses."""
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
        """Now it is known."""
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
