"""Figures for people (a table) and for machines (JSON)."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.macro.loads import Figures, Parameters

LOWER_IS_BETTER = {"ms", "s", "us", "MiB", "messages", "x"}
HEADINGS = (
    "load",
    "unit",
    "ours best",
    "ours median",
    "peer best",
    "peer median",
    "ratio best",
    "ratio median",
)


@dataclass
class Row:
    """One figure over all rounds, on both sides."""

    unit: str
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def best(self, values: Sequence[float]) -> float | None:
        if not values:
            return None
        return min(values) if self.unit in LOWER_IS_BETTER else max(values)

    def cells(self, name: str) -> tuple[str, ...]:
        best_ours, best_peer = self.best(self.ours), self.best(self.peer)
        median_ours, median_peer = median(self.ours), median(self.peer)
        values = [number(value) for value in (best_ours, median_ours, best_peer, median_peer)]
        return (name, self.unit, *values, ratio(best_ours, best_peer), ratio(median_ours, median_peer))


class Results:
    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.failures: list[str] = []

    def add(self, side: str, figures: Figures) -> None:
        for name, figure in figures.items():
            row = self.rows.setdefault(name, Row(figure.unit))
            getattr(row, side).append(figure.value)

    def write_json(
        self, path: Path, parameters: Parameters | dict[str, object], machine: dict[str, str]
    ) -> None:
        whole = {
            "machine": machine,
            "parameters": parameters if isinstance(parameters, dict) else asdict(parameters),
            "figures": {name: asdict(row) for name, row in self.rows.items()},
            "failures": self.failures,
        }
        path.write_text(json.dumps(whole, indent=2) + "\n")

    def finish(
        self, path: Path | None, parameters: Parameters | dict[str, object], machine: dict[str, str]
    ) -> int:
        """Print the failures, and write the JSON if there is a path. Returns the status for
        exit()."""
        for failure in self.failures:
            print(f"FAILED: {failure}")
        if path:
            self.write_json(path, parameters, machine)
        return 1 if self.failures else 0


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def ratio(ours: float | None, peer: float | None) -> str:
    return f"{ours / peer:.3g}" if ours is not None and peer else "-"


def describe_machine(command_lines: dict[str, str]) -> dict[str, str]:
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        model = models[0] if models else ""
    return {
        "cpu": f"{os.cpu_count()} x {model or platform.machine()}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "revision": revision(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        **command_lines,
    }


def revision() -> str:
    """The commit that is measured, marked if files have changed since."""
    words = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    for name, value in facts:
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name:>18}  {shown}")
    sys.stdout.flush()


def print_table(results: Results) -> None:
    rows = [row.cells(name) for name, row in results.rows.items()]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table()
        for index, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if index < 2 else "right")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[index]) for row in [HEADINGS, *rows]) for index in range(len(HEADINGS))]
    for row in [HEADINGS, tuple("-" * width for width in widths), *rows]:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        print("  ".join(left + right).rstrip())
