"""Figures of subscriptions, and Prometheus' text format of them.

Figures are plain dictionaries, so that processes can send them to each other as JSON. Those of the
same topic and channel are added up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Final

__all__ = ["BUCKETS", "CONTENT_TYPE", "METRICS", "Durations", "Figures", "only_counters", "text", "total"]

Figures = dict[str, Any]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
METRICS: Final = {
    "received": ("nsparq_consumer_messages_received_total", "counter", "messages received"),
    "finished": ("nsparq_consumer_messages_finished_total", "counter", "messages finished"),
    "requeued": ("nsparq_consumer_messages_requeued_total", "counter", "messages requeued"),
    "failed": ("nsparq_consumer_messages_failed_total", "counter", "messages on which the handler failed"),
    "undecodable": (
        "nsparq_consumer_messages_undecodable_total",
        "counter",
        "messages without the declared type",
    ),
    "dead_letters": ("nsparq_consumer_dead_letters_total", "counter", "messages given up"),
    "in_flight": ("nsparq_consumer_messages_in_flight", "gauge", "messages received and not answered"),
    "connections": ("nsparq_consumer_connections", "gauge", "connections to nsqd"),
    "in_backoff": ("nsparq_consumer_in_backoff", "gauge", "consumers that are in back-off"),
}
HISTOGRAM: Final = "nsparq_consumer_handler_seconds"


class Durations:
    """How long calls of a handler took."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """A call has ended."""
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def figures(self) -> Figures:
        """The calls in each bucket, and the sum of their seconds."""
        return {"buckets": [*self._counts], "seconds": self._sum}


def total(many: Iterable[Figures]) -> list[Figures]:
    """One for each topic and channel, in the order of the first of each."""
    sums: dict[tuple[str, str], Figures] = {}
    for one in many:
        key = (one["topic"], one["channel"])
        known = sums.get(key)
        if known is None:
            sums[key] = dict(one)
            continue
        for name, value in one.items():
            if name == "buckets":
                known[name] = [a + b for a, b in zip(known[name], value, strict=True)]
            elif name not in ("topic", "channel"):
                known[name] += value
    return [*sums.values()]


def only_counters(figures: Figures) -> Figures:
    """What remains of figures when their process has ended: no gauge."""
    gauges = {name for name, (_, kind, _) in METRICS.items() if kind == "gauge"}
    return {name: 0 if name in gauges else value for name, value in figures.items()}


def text(many: Iterable[Figures]) -> str:
    """Prometheus' text format."""
    # Names of topics and channels have no character that needs an escape.
    labelled = [(f'topic="{one["topic"]}",channel="{one["channel"]}"', one) for one in total(many)]
    lines = []
    for key, (name, kind, help_text) in METRICS.items():
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{labels}}} {one[key]}" for labels, one in labelled]
    lines += [f"# HELP {HISTOGRAM} duration of calls of the handler", f"# TYPE {HISTOGRAM} histogram"]
    for labels, one in labelled:
        counts = [*accumulate(one["buckets"])]
        bounds = [*map(str, BUCKETS), "+Inf"]
        lines += [
            f'{HISTOGRAM}_bucket{{{labels},le="{bound}"}} {count}'
            for bound, count in zip(bounds, counts, strict=True)
        ]
        lines += [
            f"{HISTOGRAM}_sum{{{labels}}} {one['seconds']}",
            f"{HISTOGRAM}_count{{{labels}}} {counts[-1]}",
        ]
    return "\n".join(lines) + "\n"
