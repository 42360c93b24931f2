"""The result as an SVG chart, written without any package."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from nsparq.demo.events import KINDS
from nsparq.demo.results import Found
from nsparq.demo.show import by_window
from nsparq.demo.watching import Series

__all__ = ["draw"]

WIDTH, HEIGHT = 960, 620
LEFT, RIGHT = 70, 930
COLOURS: Final = {
    "view": "#4e79a7",
    "search": "#76b7b2",
    "basket": "#edc948",
    "order": "#59a14f",
    "refund": "#e15759",
}
PUBLISHED, WRITTEN = "#4e79a7", "#59a14f"
STYLE: Final = """
text { font: 13px system-ui, sans-serif; fill: #333 }
.title { font-size: 16px; font-weight: 600 }
.axis { stroke: #ccc; stroke-width: 1 }
.note { fill: #777; font-size: 12px }
"""


class Panel:
    """A part of the chart, with axes. x() and y() turn values into coordinates."""

    def __init__(self, top: float, bottom: float, most_x: float, most_y: float) -> None:
        self.top, self.bottom = top, bottom
        self.most_x, self.most_y = most_x or 1.0, most_y or 1.0
        self.parts: list[str] = []

    def x(self, value: float) -> float:
        return LEFT + value / self.most_x * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        return self.bottom - value / self.most_y * (self.bottom - self.top)

    def text(self, x: float, y: float, text: str, *, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def axes(self, ticks_x: Sequence[tuple[float, str]], ticks_y: Sequence[float]) -> None:
        for value in ticks_y:
            y = self.y(value)
            self.parts.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
            self.text(LEFT - 8, y + 4, f"{value:,.0f}", kind="note", anchor="end")
        for value, label in ticks_x:
            self.text(self.x(value), self.bottom + 18, label, kind="note", anchor="middle")

    def area(self, below: Sequence[float], above: Sequence[float], colour: str) -> None:
        """The area between two step lines over 0, 1, 2, …"""
        there = [
            f"{self.x(at + side):.1f} {self.y(value):.1f}"
            for at, value in enumerate(above)
            for side in (0, 1)
        ]
        back = [
            f"{self.x(at + side):.1f} {self.y(value):.1f}"
            for at, value in enumerate(below)
            for side in (0, 1)
        ]
        self.parts.append(f'<path fill="{colour}" d="M{" L".join([*there, *reversed(back)])}Z"/>')

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str) -> None:
        points = " L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
        if points:
            self.parts.append(f'<path fill="none" stroke="{colour}" stroke-width="2.5" d="M{points}"/>')

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        x = LEFT
        for name, colour in entries:
            self.parts.append(
                f'<rect x="{x}" y="{self.top - 24:.0f}" width="12" height="12" fill="{colour}"/>'
            )
            self.text(x + 18, self.top - 13, name)
            x += 34 + 8 * len(name)


def draw(found: Found, series: Series) -> str:
    """The events of the day above, the progress of the run below."""
    panels = (_day(found), _progress(series))
    body = "\n".join(part for panel in panels for part in panel.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>nsparq demo</title>\n<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _day(found: Found) -> Panel:
    counts = {kind: by_window(found, kind) for kind in KINDS}
    totals = [sum(at) for at in zip(*counts.values(), strict=True)]
    panel = Panel(90, 330, len(totals), _ceiling(max(totals)))
    panel.text(LEFT, 40, "Events per 15 minutes of the shop's day, from topic shop.activity", kind="title")
    panel.legend([(kind, COLOURS[kind]) for kind in KINDS])
    hours = [(hour * len(totals) / 24, f"{hour:02d}:00") for hour in range(0, 25, 3)]
    panel.axes(hours, _ticks(panel.most_y))
    below = [0] * len(totals)
    for kind, values in counts.items():
        above = [one + more for one, more in zip(below, values, strict=True)]
        panel.area(below, above, COLOURS[kind])
        below = above
    return panel


def _progress(series: Series) -> Panel:
    seconds = series.seconds or [0.0]
    panel = Panel(450, 580, seconds[-1], _ceiling(max(series.published, default=1)))
    panel.text(LEFT, 405, "Messages published and written, over the seconds of the run", kind="title")
    panel.legend([("published", PUBLISHED), ("in Parquet", WRITTEN)])
    step = _ceiling(panel.most_x) / 5
    marks = [(at * step, f"{at * step:.0f} s") for at in range(6) if at * step <= panel.most_x]
    panel.axes(marks, _ticks(panel.most_y))
    panel.line(series.seconds, series.published, PUBLISHED)
    panel.line(series.seconds, series.written, WRITTEN)
    return panel


def _ceiling(value: float) -> float:
    """The next round number."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    return next(power * factor for factor in (1, 2, 4, 5, 6, 8, 10) if power * factor >= value)


def _ticks(most: float) -> list[float]:
    return [most * part / 4 for part in range(5)]
