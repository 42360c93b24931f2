"""A day of a made-up shop: the messages that its apps send, and the result that must come out.

Some events are late, because phones were offline; some are duplicates, because apps send again when
they get no answer; some are malformed. The same seed gives the same day. `Expected` has the exact
result.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

__all__ = ["CLOSING", "DAY_S", "KINDS", "LATE_S", "OPENED", "WINDOW_S", "Expected", "Shop"]

OPENED: Final = datetime(2026, 11, 14, tzinfo=UTC)
"""Midnight at the start of the day."""
DAY_S: Final = 86_400
WINDOW_S: Final = 900
"""A quarter of an hour, as in shop.toml."""
LATE_S: Final = 3600
"""As in shop.toml: an event that is sent more than an hour after it happened is not counted."""
KINDS: Final = ("view", "search", "basket", "order", "refund")
CLOSING: Final = "closing"
"""The kind of the last event. It is hours after the day and closes all windows of the day."""
_ITEMS: Final = ("tea", "coffee", "cake", "bread", "jam", "honey", "milk", "apples")
_OF_100: Final = ("view",) * 60 + ("search",) * 20 + ("basket",) * 12 + ("order",) * 7 + ("refund",)
"""The kinds by frequency. A lookup in a tuple is fast: there are a million events."""

_SLOW, _LATE, _TWICE, _BROKEN = 0.02, 0.01, 0.01, 0.005
"""Shares of the events: delayed, too late, duplicate, malformed."""
_USUAL_S, _SLOW_S = 5.0, 50 * 60.0
_LATEST_S: Final = 6.0 * 3600
_REMEMBERED: Final = 2000
"""A duplicate comes within this many other events."""


@dataclass
class Expected:
    """What was sent, and the result that must come out."""

    sent: int = 0
    """All messages."""
    broken: int = 0
    """Malformed messages, which become dead letters."""
    rows: Counter[str] = field(default_factory=Counter)
    """Events by kind, with duplicates."""
    twice: int = 0
    late: int = 0
    """Events that are too late, without duplicates."""
    windows: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Counted events, each once, by the start of their window in Unix seconds and their kind."""
    cents: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Their amounts."""


class Shop:
    """Generates `per_day` messages for a day, as fast as they are consumed."""

    def __init__(self, per_day: int, seed: int = 7) -> None:
        self.expected = Expected()
        self._per_day = per_day
        self._chance = random.Random(seed)
        self._number = 0
        self._recent: deque[tuple[bytes, str]] = deque(maxlen=_REMEMBERED)

    def day(self, number: int = 0) -> Iterator[bytes]:
        """The messages of the day with this number, without closing()."""
        begin = int(OPENED.timestamp()) + number * DAY_S
        weights = [_busyness(minute / 60) for minute in range(DAY_S // 60)]
        total, sum_so_far, made = sum(weights), 0.0, 0
        for minute, weight in enumerate(weights):
            sum_so_far += weight
            count = round(self._per_day * sum_so_far / total) - made
            made += count
            for at in range(count):
                yield self._message(begin + minute * 60 + at * 60 / count)

    def closing(self, number: int = 0) -> bytes:
        """The last message: it closes all windows of the day. Its own window stays open."""
        self.expected.sent += 1
        self.expected.rows[CLOSING] += 1
        return self._event(CLOSING, OPENED.timestamp() + (number + 1) * DAY_S + 3 * LATE_S, 0.0)[0]

    def _message(self, sent_s: float) -> bytes:
        expected, draw = self.expected, self._chance.random()
        expected.sent += 1
        if draw < _BROKEN:
            expected.broken += 1
            return self._broken(sent_s)
        if draw < _BROKEN + _TWICE and self._recent:
            body, kind = self._recent[self._chance.randrange(len(self._recent))]
            expected.twice += 1
            expected.rows[kind] += 1
            return body
        kind = _OF_100[int(self._chance.random() * 100)]
        age_s = self._age(draw)
        body, cents = self._event(kind, sent_s, age_s)
        expected.rows[kind] += 1
        if age_s > LATE_S:
            expected.late += 1
        else:
            at_s = sent_s - age_s
            window = (int(at_s - at_s % WINDOW_S), kind)
            expected.windows[window] += 1
            expected.cents[window] += cents
        self._recent.append((body, kind))
        return body

    def _age(self, draw: float) -> float:
        """Seconds from the event until it is sent."""
        rest = draw - _BROKEN - _TWICE
        chance = self._chance.random()
        if rest < _LATE:
            return 2 * LATE_S + chance * (_LATEST_S - 2 * LATE_S)
        return chance * (_SLOW_S if rest < _LATE + _SLOW else _USUAL_S)

    def _event(self, kind: str, sent_s: float, age_s: float) -> tuple[bytes, int]:
        """The message and its amount in cents."""
        self._number += 1
        chance = self._chance.random()
        cents = int(100 + chance * 9900) if kind in ("order", "refund") else 0
        # Several times as fast as json.dumps.
        text = (
            f'{{"id": {self._number}, "kind": "{kind}", "user": {int(chance * 99_991)}, '
            f'"item": "{_ITEMS[self._number % 8]}", "cents": {cents}, '
            f'"at": "{_time(sent_s - age_s)}", "sent": "{_time(sent_s)}"}}'
        )
        return text.encode(), cents

    def _broken(self, sent_s: float) -> bytes:
        """A malformed event, of five kinds in turn."""
        whole, _ = self._event("order", sent_s, 0.0)
        return (
            whole[: len(whole) // 2],
            whole.replace(b'{"id": ', b'{"id": "none", "number": '),
            whole.replace(b'"at"', b'"when"'),
            b"\xff\xfe" + whole,
            b"GET / HTTP/1.1",
        )[self.expected.broken % 5]


def _time(unix_s: float) -> str:
    second = int(unix_s)
    return f"{_second(second)}.{int((unix_s - second) * 1000):03d}Z"


@lru_cache(maxsize=40_000)
def _second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _busyness(hour: float) -> float:
    """Relative traffic: highest at noon and in the evening."""
    return 0.15 + math.exp(-(((hour - 12.5) / 2.6) ** 2)) + 1.3 * math.exp(-(((hour - 20) / 1.9) ** 2))
