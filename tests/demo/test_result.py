"""What the demo makes of a result: that it sees what is wrong with it, and that it can be shown."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

pytest.importorskip("rich")

from rich.console import Console

from nsparq.demo.chart import draw
from nsparq.demo.events import Expected, Shop
from nsparq.demo.results import Found, problems
from nsparq.demo.show import Timing, show
from nsparq.demo.watching import Series


def day() -> tuple[Expected, Found]:
    """A day, and what a pipeline without fault makes of it."""
    shop = Shop(5000)
    for _ in shop.day():
        pass
    shop.closing()
    expected = shop.expected
    found = Found(
        rows=Counter(expected.rows),
        twice=expected.twice,
        late=expected.late,
        places=expected.sent,
        letters=expected.broken,
        results=len(expected.windows),
        windows=Counter(expected.windows),
        cents=Counter(expected.cents),
        files=2,
        bytes=1_000_000,
        latencies_s=(1.5, 3.0),
    )
    return expected, found


def test_a_right_result_has_no_problems() -> None:
    assert problems(*day()) == []


def lose_a_row(found: Found) -> None:
    found.rows["view"] -= 1


def write_a_row_twice(found: Found) -> None:
    """Instead of another: the sum is right."""
    found.places -= 1


def lose_a_letter(found: Found) -> None:
    found.letters -= 1


def miss_a_duplicate(found: Found) -> None:
    window = next(iter(found.windows))
    found.windows[window] += 1


def drop_an_event(found: Found) -> None:
    window = next(iter(found.windows))
    found.windows[window] -= 1


def move_an_event(found: Found) -> None:
    first, second = list(found.windows)[:2]
    found.windows[first] -= 1
    found.windows[second] += 1


def repeat_a_result(found: Found) -> None:
    found.results += 1


def lose_money(found: Found) -> None:
    found.cents[next(window for window in found.cents if window[1] == "order")] -= 1


@pytest.mark.parametrize(
    "fault",
    [
        lose_a_row,
        write_a_row_twice,
        lose_a_letter,
        miss_a_duplicate,
        drop_an_event,
        move_an_event,
        repeat_a_result,
        lose_money,
    ],
)
def test_each_fault_is_found(fault: Callable[[Found], None]) -> None:
    expected, found = day()
    fault(found)
    assert all(" instead of " in problem for problem in problems(expected, found))
    assert problems(expected, found)


def test_many_differences_are_a_few_lines() -> None:
    expected, found = day()
    found.windows.clear()
    assert len(problems(expected, found)) < 8


def test_the_chart_is_valid_svg() -> None:
    _, found = day()
    series = Series()
    for count in (0, 2000, 5000):
        series.add(count, count // 2)
    root = ElementTree.fromstring(draw(found, series))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    paths = root.findall("{http://www.w3.org/2000/svg}path")
    assert len([one for one in paths if one.get("class") is None]) == 5 + 2
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")


def test_an_empty_result_can_be_shown_too() -> None:
    assert "</svg>" in draw(Found(), Series())
    show(Console(file=io.StringIO()), Expected(sent=1), Found(), Timing(1.0, 1.0, 1.0, 1.0))


def test_the_tables_have_the_figures() -> None:
    expected, found = day()
    console = Console(file=io.StringIO(), width=100)
    show(console, expected, found, Timing(10.0, 20.0, 25.0, 40.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for figure in (expected.sent, found.letters, found.twice, found.late, found.results):
        assert f"{figure:,}" in text
    assert "\x1b" not in text
