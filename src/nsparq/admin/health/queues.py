"""Problems of topics, channels and consumers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

import numpy as np

from nsparq.admin.collect.watch import Watch
from nsparq.admin.health.problem import Problem, Severity, duration
from nsparq.names import is_ephemeral

__all__ = ["queue_problems"]

GROWN: Final = 100
"""A backlog that has grown by fewer messages is no problem."""
STEADY: Final = 0.8
"""The correlation of depth and time from which on a backlog grows. A depth that goes up and down
stays far below it; a backlog that doubled and one that gained a hundredth are both near 1."""
STUCK_S: Final = 60.0
"""Rates are means over this time. A consumer that finishes nothing for this time is stuck."""
MANY_TIMEOUTS: Final = 0.05
MANY_REQUEUES: Final = 0.5
"""Timeouts and requeues, relative to finished messages."""
FEW: Final = 10
"""If all messages fail, and there are fewer than this, it may be the fault of the messages."""
ALL_FAIL: Final = (
    "The consumers fail on every message: look at their log. A service that they depend on may be down. "
    "Consumers that give up after some attempts lose messages."
)
ONE_FAILS: Final = "The same few messages are delivered again and again. Look at them in Messages."
LATE_S: Final = 600.0
"""Messages should not wait longer than this."""
DRAIN_S: Final = 3600.0
"""A backlog should be gone within this time."""


def queue_problems(watch: Watch, read: Set[tuple[str, str]]) -> Iterator[Problem]:
    """`read`: the channels that a pipeline reads."""
    yield from _lost(watch)
    yield from _channels(watch, read)
    yield from _topics(watch)
    yield from _clients(watch)


def _lost(watch: Watch) -> Iterator[Problem]:
    for key, count in watch.lost.items():
        yield Problem(
            "lost",
            Severity.CRITICAL,
            "messages were lost",
            f"{count:,} since the node was started: a damaged disk, or no room in memory",
            "See the node's log. Ephemeral topics and channels drop messages that do not fit in memory.",
            topic=key[0],
            channel=key[1] if len(key) > 1 else "",
            weight=count,
        )


# Channels


def _channels(watch: Watch, read: Set[tuple[str, str]]) -> Iterator[Problem]:
    """The signs of a problem are computed for all channels at once; only the few with a sign are
    looked at one by one."""
    table = watch.channels
    now = {name: table.now[:, column] for name, column in table.column.items()}
    rates = {name: table.recent(name, STUCK_S) for name in ("out_rate", "timeout_rate", "requeue_rate")}
    depth, out = now["depth"], np.maximum(rates["out_rate"], 1e-9)
    trend, drain_s = watch.trend, watch.drain_times()
    is_paused = np.zeros(len(depth), bool)
    is_paused[[place for key in watch.paused if (place := table.find(key)) >= 0]] = True
    with np.errstate(invalid="ignore"):
        failed = rates["timeout_rate"] + rates["requeue_rate"]
        has_client, is_waiting = now["clients"] > 0, depth > 0
        signs = {
            "paused": is_paused & (depth + now["deferred"] > 0),
            "growing": (trend.slope * trend.span_s >= GROWN) & (trend.correlation >= STEADY),
            # Spark reads ranges of the log and is no consumer. Its commits show as finished
            # messages.
            "unread": ~has_client & is_waiting & ~(rates["out_rate"] > 0),
            "failing": (failed > 0.1) & (rates["out_rate"] == 0),
            "timeouts": (rates["timeout_rate"] > 0) & (rates["timeout_rate"] > MANY_TIMEOUTS * out),
            "requeues": (rates["requeue_rate"] > 0.1) & (rates["requeue_rate"] > MANY_REQUEUES * out),
            "stuck": has_client & (now["in_flight"] > 0) & (rates["out_rate"] == 0) & is_waiting,
            "lagging": is_waiting & ((now["age"] >= LATE_S) | ((depth >= GROWN) & (drain_s >= DRAIN_S))),
        }
        # A depth that only goes up and down has no time to drain worth telling.
        signs["lagging"] &= (now["age"] >= LATE_S) | (trend.correlation <= -STEADY)
        held = table.before(STUCK_S, "in_flight")
        signs["stuck"] &= held[0] > 0 if held is not None else False
    suspects = np.flatnonzero(np.logical_or.reduce([*signs.values()]))
    names = {place: key for key, place in table.items()} if len(suspects) else {}
    for place in map(int, suspects):
        if (key := names.get(place)) is None:
            continue
        figures = {name: float(values[place]) for name, values in {**now, **rates}.items()}
        figures |= {"growth": float(trend.slope[place]), "drain": float(drain_s[place])}
        seen = {name for name, sign in signs.items() if sign[place]}
        yield from _about_channel(key, seen - {"unread"} if key in read else seen, figures)


def _about_channel(key: tuple[str, str], signs: set[str], figures: Mapping[str, float]) -> Iterator[Problem]:
    """First what stops the channel. What only slows it is of interest if nothing stops it."""
    topic, channel = key
    held = figures["depth"] + figures["deferred"] + figures["in_flight"]
    about: dict[str, Any] = {"topic": topic, "channel": channel, "weight": held}
    shown = _waiting(figures, is_growing="growing" in signs)
    out = f"{figures['out_rate']:,.1f}/s"
    readers = f"{figures['clients']:.0f} consumers" if figures["clients"] else "a pipeline or another reader"
    if "paused" in signs:
        is_growing = "growing" in signs
        yield Problem(
            "paused",
            Severity.WARNING if is_growing else Severity.NOTICE,
            "paused with a growing backlog" if is_growing else "paused with messages waiting",
            shown,
            "Resume it if the pause is no longer needed.",
            **about,
        )
        return
    if "unread" in signs:
        yield _without_consumers(channel, shown, "growing" in signs, about)
        return
    if "failing" in signs:
        yield Problem(
            "failing",
            Severity.CRITICAL if held >= FEW else Severity.WARNING,
            "all messages fail",
            f"0 finished; {figures['requeue_rate']:,.1f}/s requeued, {figures['timeout_rate']:,.1f}/s timed "
            f"out; {shown}",
            ALL_FAIL if held >= FEW else ONE_FAILS,
            **about,
        )
        return
    if "growing" in signs:
        yield Problem(
            "growing",
            Severity.WARNING,
            "backlog is growing",
            f"{shown}; {figures['in_rate']:,.1f}/s arrive, {out} are finished by {readers}",
            "The consumers are too slow or too few." if figures["clients"] else "The reader is too slow.",
            **about,
        )
    if "timeouts" in signs:
        yield Problem(
            "timeouts",
            Severity.WARNING,
            "messages time out",
            f"{figures['timeout_rate']:,.2f}/s time out, {out} are finished",
            "A consumer does not finish messages in time: it hangs, or needs longer than msg-timeout. "
            "Messages that time out are delivered again.",
            **about,
        )
    elif "stuck" in signs:
        yield Problem(
            "stuck",
            Severity.WARNING,
            "consumers finish nothing",
            f"{figures['in_flight']:,.0f} in flight and {shown} for over a minute",
            "The consumers hang, or need very long for each message.",
            **about,
        )
    elif "lagging" in signs and "growing" not in signs:
        is_draining = math.isfinite(figures["drain"])
        yield Problem(
            "lagging",
            Severity.NOTICE if is_draining else Severity.WARNING,
            "backlog drains slowly" if is_draining else "backlog does not drain",
            f"{shown}; {figures['in_rate']:,.1f}/s arrive, {out} are finished by {readers}",
            "More consumers drain it faster."
            if is_draining
            else "The consumers only keep up with new messages: add consumers.",
            **about,
        )
    if "requeues" in signs:
        yield Problem(
            "requeues",
            Severity.NOTICE,
            "high requeue rate",
            f"{figures['requeue_rate']:,.2f}/s are requeued, {out} are finished",
            "Consumers fail on messages. A message that always fails is delivered again and again.",
            **about,
        )


def _waiting(figures: Mapping[str, float], *, is_growing: bool) -> str:
    """`1,200 waiting, +10.0/s, the oldest for 3 h, 5 deferred, drains in 2 h`"""
    parts = [f"{figures['depth']:,.0f} waiting"]
    if is_growing:
        parts.append(f"{figures['growth']:+,.1f}/s")
    if figures["age"] >= 1:
        parts.append(f"the oldest for {duration(figures['age'])}")
    if figures["deferred"]:
        parts.append(f"{figures['deferred']:,.0f} deferred")
    if figures["depth"] and math.isfinite(figures["drain"]) and not is_growing:
        parts.append(f"drains in {duration(figures['drain'])}")
    return ", ".join(parts)


def _without_consumers(channel: str, shown: str, is_growing: bool, about: dict[str, Any]) -> Problem:
    if is_ephemeral(channel):
        hint = "The last consumer has just left. nsqd deletes an ephemeral channel without consumers."
    elif is_growing:
        hint = "The backlog keeps growing. Start a consumer or pipeline, or delete the channel."
    else:
        hint = "Start a consumer or pipeline, or delete the channel if it is no longer needed."
    severity = Severity.WARNING if is_growing else Severity.NOTICE
    return Problem("no consumers", severity, "no consumers", shown, hint, **about)


# Topics


def _topics(watch: Watch) -> Iterator[Problem]:
    """Topics that hold messages themselves: they are paused, or have no channel."""
    table = watch.topics
    column = table.column["depth"]
    for name, channels in watch.channels_of.items():
        is_paused = (name,) in watch.paused
        if channels and not is_paused:
            continue
        waiting = float(table.now[table.find((name,)), column]) if (name,) in table else math.nan
        if not waiting > 0 or is_ephemeral(name):
            continue
        shown, about = f"{waiting:,.0f} waiting", {"topic": name, "weight": waiting}
        if is_paused:
            hint = "Its channels get nothing new. Resume it if the pause is no longer needed."
            yield Problem("paused", Severity.NOTICE, "paused with messages waiting", shown, hint, **about)  # type: ignore[arg-type]  # a name and a number
        else:
            hint = "Messages wait in the topic until its first channel is created."
            yield Problem("no channel", Severity.NOTICE, "topic has no channel", shown, hint, **about)  # type: ignore[arg-type]  # a name and a number


# Consumers


def _clients(watch: Watch) -> Iterator[Problem]:
    """Consumers that hold messages and finish none, while others of the same channel do."""
    table = watch.clients
    if not len(table):
        return
    in_flight, finished = table.now[:, table.column["in_flight"]], table.now[:, table.column["finish_rate"]]
    ready = table.now[:, table.column["ready"]]
    suspects = np.flatnonzero((in_flight > 0) & (in_flight >= ready) & (finished == 0))
    if not len(suspects):
        return
    names = {place: key for key, place in table.items()}
    for place in suspects:
        if (key := names.get(int(place))) is None:
            continue
        topic, channel, node, client = key
        points = table.points(key)
        if not points.times or points.times[-1] - points.times[0] < STUCK_S:
            continue
        since = points.times[-1] - STUCK_S
        recent = points.values[[when > since for when in points.times]]
        if recent[:, table.column["finish_rate"]].any() or not recent[:, table.column["in_flight"]].all():
            continue
        others = watch.channels.latest((topic, channel)) or {}
        if not others.get("out_rate", 0) > 0:
            continue  # the whole channel is stuck: _about_channel() reports that
        yield Problem(
            "slow client",
            Severity.WARNING,
            "a consumer finishes nothing",
            f"{in_flight[place]:,.0f} in flight for over a minute; other consumers finish "
            f"{others['out_rate']:,.1f}/s",
            "It hangs, or needs very long for a message.",
            topic=topic,
            channel=channel,
            node=node,
            client=client,
            weight=float(in_flight[place]),
        )
