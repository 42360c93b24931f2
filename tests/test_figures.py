"""Figures in the documentation come from benchmark runs, so that no two pages contradict each
other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import figures

ROOT = Path(__file__).parents[1]
# A rate that somebody measured, and the memory of a broker with a backlog.
MEASURED = re.compile(
    r"\d[\d.,]* ?(?:[kM]/s|(?:k |million )?(?:rows|messages)/s|million (?:rows |messages )?a second)"
    r"|\d+ MiB with (?:1|5|one|five) million"
    # In a table the unit may be in another column.
    r"|million messages waiting[^|\n]*\| *\d+ MiB|\d[\d.,]* million *\|"
    r"|\d[\d.,]* (?:million )?instead of \d[\d.,]*(?: million)?"
)
# Measurements that are on one page only, with their own command.
ELSEWHERE = {"internals/delivery.md", "internals/storage.md", "client.md", "nsqadmin.md"}


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_the_figures_of_the_runs_and_no_others(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.filled(text) == text, "run python -m benchmarks.figures"
    if page.relative_to(ROOT).as_posix().removeprefix("docs/") not in ELSEWHERE:
        assert MEASURED.findall(figures.without_figures(text)) == []


@pytest.mark.parametrize(
    "line",
    [
        "- **Memory does not grow with the backlog**: 48 MiB with one million messages waiting",
        "| nsqd, with 1 or 5 million messages waiting on disk | 44 MiB | `make bench` |",
        "| publish in batches | 2,369 k/s | 1,508 k/s |",
        "| published in MPUBs of 200 | 2.9 million |",
        "a pair publishes less than a single nsqd (880,000 instead of 2.5 million)",
    ],
)
def test_a_figure_that_is_written_by_hand_is_found(line: str) -> None:
    """Two pages gave different figures for the same thing."""
    assert MEASURED.search(line)


@pytest.mark.parametrize("path", sorted(figures.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_run_says_where_it_comes_from(path: Path) -> None:
    whole = json.loads(path.read_text(encoding="utf-8"))
    about = whole["machine"]
    assert about["command"].startswith("python -m benchmarks.") and "/" not in about["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about["date"]) and re.fullmatch(
        r"[0-9a-f]{7,}", about["revision"]
    )
    assert whole["figures"] and about["cpu"] and about["python"] and about["note"]


def test_a_stale_page_is_found_and_filled() -> None:
    page = "before\n<!-- figures: summary -->\nold\n<!-- /figures -->\nafter\n"
    filled = figures.filled(page)
    assert "old" not in filled and "| publish in batches |" in filled
    assert filled.startswith("before\n") and filled.endswith("<!-- /figures -->\nafter\n")
    assert figures.filled(filled) == filled
    assert figures.without_figures(filled) == "before\n\nafter\n"


def test_values_are_shown_with_three_digits() -> None:
    shown = [("msg/s", 1_628_236), ("ms", 0.451), ("ms", 2.386), ("us", 15.3), ("%", 99.8), ("MiB", 3369)]
    assert [figures.shown(unit, [value]) for unit, value in shown] == [
        "1,628 k/s",
        "0.45 ms",
        "2.4 ms",
        "15 µs",
        "99.8 %",
        "3,369 MiB",
    ]
    assert figures.joined(["0.45 ms", "2.4 ms"]) == "0.45, 2.4 ms"
    assert figures.joined(["128 MiB", "1.7 GiB"]) == "128 MiB, 1.7 GiB"
