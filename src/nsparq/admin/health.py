"""Finds problems in the figures of the last polls, the most urgent first.

Each problem has a title, the figures, and a hint about the usual cause. What may be intended, such
as a queue that grows at night and is empty by noon, is only a notice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nsparq.admin.collect.pipelines import readers
from nsparq.admin.collect.watch import Watch
from nsparq.admin.show.templating import size
from nsparq.names import is_ephemeral

__all__ = ["Problem", "Severity", "find_problems"]

Array = NDArray[np.float64]

GROWING_S: Final = 300.0
"""Growth is measured over this time; soon after the start over less, but at least over a minute."""
GROWN: Final = 100
"""A queue that has grown by fewer messages is no problem."""
STUCK_S: Final = 60.0
"""Rates are means over this time. A consumer that finishes nothing for this time is stuck."""
MANY_TIMEOUTS: Final = 0.05
MANY_REQUEUES: Final = 0.5
"""Timeouts and requeues, relative to finished messages."""
DISK_LOW, DISK_CRITICAL = 0.15, 0.05
"""Free shares of a disk."""
DISK_SOON_S: Final = 24 * 3600.0
MAX_PER_KIND: Final = 100
"""Further problems of a kind are counted, not listed: ten thousand usually have one cause."""


class Severity(IntEnum):
    """How urgent a problem is."""

    CRITICAL = 3
    """Data is lost, or will be soon."""
    WARNING = 2
    """It gets worse unless somebody acts."""
    NOTICE = 1
    """It may be intended."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: str
    severity: Severity
    title: str
    """A few words, without names."""
    detail: str
    """The figures."""
    hint: str
    """The usual cause, or what to do."""
    topic: str = ""
    channel: str = ""
    node: str = ""
    client: str = ""
    pipeline: str = ""
    weight: float = 0.0
    """Orders problems of the same severity, the heaviest first."""

    def as_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("kind", "title", "detail", "hint")}
        places = ("topic", "channel", "node", "client", "pipeline")
        found |= {name: value for name in places if (value := getattr(self, name))}
        return {"severity": self.severity.name.lower(), **found}


def find_problems(watch: Watch, pipelines: Sequence[Mapping[str, Any]] = ()) -> list[Problem]:
    """The most urgent first."""
    found = [
        *_lookups(watch),
        *_nodes(watch),
        *_lost(watch),
        *_channels(watch, readers(pipelines)),
        *_topics(watch),
        *_clients(watch),
        *_pipelines(pipelines),
    ]
    found.sort(key=lambda one: (-one.severity, -one.weight, one.topic, one.channel, one.node))
    return _bounded(found)


def _bounded(found: list[Problem]) -> list[Problem]:
    counts: dict[str, int] = {}
    kept = []
    for one in found:
        counts[one.kind] = counts.get(one.kind, 0) + 1
        if counts[one.kind] <= MAX_PER_KIND:
            kept.append(one)
    for kind, count in counts.items():
        if count > MAX_PER_KIND:
            text = f"{kind}: {count - MAX_PER_KIND:,} more are not listed"
            kept.append(Problem(kind, Severity.NOTICE, "more of the same kind", text, ""))
    return kept


# Daemons


def _lookups(watch: Watch) -> Iterator[Problem]:
    unreachable = {f"{address}: {state.error}" for address, state in watch.nodes.items() if state.error}
    for error in watch.errors:
        if error in unreachable:
            continue
        is_all = error.startswith("failed to query any")
        yield Problem(
            "lookupd",
            Severity.CRITICAL if is_all else Severity.WARNING,
            "no nsqlookupd answers" if is_all and "nsqlookupd" in error else "a daemon does not answer",
            error,
            "New nodes and topics are not detected." if is_all else "Some data may be missing.",
            weight=1e9,
        )


def _nodes(watch: Watch) -> Iterator[Problem]:
    for address, state in watch.nodes.items():
        if state.error:
            yield Problem(
                "unreachable",
                Severity.CRITICAL,
                "node does not answer",
                f"for {_duration(watch.polled_s - state.since_s)}: {state.error}",
                "It is registered, so it ran a short time ago. It may be down, or nsqadmin cannot reach it.",
                node=address,
                weight=1e8,
            )
            continue
        if state.health != "OK":
            yield Problem(
                "unhealthy",
                Severity.CRITICAL,
                "node is unhealthy",
                state.health,
                "Publishing to it fails meanwhile. Often its disk is full.",
                node=address,
                weight=1e8,
            )
        if state.node.out_of_date:
            yield Problem(
                "version",
                Severity.NOTICE,
                "node runs an older version",
                f"{state.node.version}; other nodes run a newer version",
                "Normal during an upgrade.",
                node=address,
            )
        yield from _disk(watch, address)


def _disk(watch: Watch, address: str) -> Iterator[Problem]:
    state = watch.nodes[address]
    if state.disk_free is None or not state.disk_size:
        return
    share = state.disk_free / state.disk_size
    left_s = _time_left(watch, address, share)
    if share >= DISK_LOW and left_s > DISK_SOON_S:
        return
    soon = f"; full in {_duration(left_s)} at the current rate" if left_s < 30 * 24 * 3600 else ""
    yield Problem(
        "disk",
        Severity.CRITICAL if share < DISK_CRITICAL or left_s < 3600 else Severity.WARNING,
        "disk is filling" if soon else "disk is nearly full",
        f"{share:.1%} of {size(state.disk_size)} free ({size(state.disk_free)}){soon}",
        "When it is full, publishing fails; consumers still work. Channels without consumers keep their "
        "messages on disk.",
        node=address,
        weight=1e7 * (1 - share),
    )


def _time_left(watch: Watch, address: str, share: float) -> float:
    """Seconds until the disk is full at the rate of the last hours or minutes, or infinity."""
    for resolution in (1, 0):
        points = watch.nodes_table.points((address,), resolution)
        free = points.values[:, watch.nodes_table.column["disk_free"]] if points.times else np.empty(0)
        known = np.flatnonzero(~np.isnan(free))
        if len(known) > 1 and points.times[known[-1]] - points.times[known[0]] >= 600:
            used = float(free[known[0]] - free[known[-1]])
            took_s = points.times[known[-1]] - points.times[known[0]]
            return share / (used / took_s) if used > 0.001 else math.inf
    return math.inf


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
            weight=1e9,
        )


# Queues


def _growth(watch: Watch, depth: Array) -> tuple[Array, float]:
    """How much the depth of each channel has grown, and over which time; NaN if unknown."""
    for age_s in (GROWING_S, GROWING_S / 2, 60.0):
        found = watch.channels.before(age_s, "depth")
        if found is not None:
            then, elapsed_s = found
            return depth - then, elapsed_s
    return np.full(len(depth), np.nan), math.inf


def _channels(watch: Watch, read: Set[tuple[str, str]]) -> Iterator[Problem]:
    """The signs of a problem are computed for all channels at once; only the few with a sign are
    looked at one by one. `read`: the channels that a pipeline reads."""
    table = watch.channels
    now = {name: table.now[:, column] for name, column in table.column.items()}
    rates = {name: table.recent(name, STUCK_S) for name in ("out_rate", "timeout_rate", "requeue_rate")}
    depth, out = now["depth"], np.maximum(rates["out_rate"], 1e-9)
    growth, elapsed_s = _growth(watch, depth)
    with np.errstate(invalid="ignore"):
        signs = {
            "growing": (growth >= GROWN) & (growth >= 0.1 * (depth - growth)),
            # Spark reads ranges of the log and is no consumer. Its commits show as finished
            # messages.
            "unread": (now["clients"] == 0) & (depth > 0) & ~(rates["out_rate"] > 0),
            "timeouts": (rates["timeout_rate"] > 0) & (rates["timeout_rate"] > MANY_TIMEOUTS * out),
            "requeues": (rates["requeue_rate"] > 0.1) & (rates["requeue_rate"] > MANY_REQUEUES * out),
            "stuck": (now["clients"] > 0) & (now["in_flight"] > 0) & (rates["out_rate"] == 0) & (depth > 0),
        }
        held = table.before(STUCK_S, "in_flight")
        signs["stuck"] &= held[0] > 0 if held is not None else False
    suspects = np.flatnonzero(np.logical_or.reduce([*signs.values()]))
    names = {place: key for key, place in table.items()} if len(suspects) else {}
    for place in map(int, suspects):
        if (key := names.get(place)) is not None:
            figures = {name: float(values[place]) for name, values in {**now, **rates}.items()}
            speed = float(growth[place]) / elapsed_s if signs["growing"][place] else 0.0
            seen = {name for name, sign in signs.items() if sign[place]}
            yield from _about_channel(watch, key, seen - {"unread"} if key in read else seen, figures, speed)


def _about_channel(
    watch: Watch, key: tuple[str, str], signs: set[str], figures: Mapping[str, float], speed: float
) -> Iterator[Problem]:
    topic, channel = key
    about: dict[str, Any] = {"topic": topic, "channel": channel}
    waiting, out = figures["depth"], f"{figures['out_rate']:,.1f}/s"
    shown = f"{waiting:,.0f} waiting" + (f", {speed:+,.1f}/s" if speed else "")
    if key in watch.paused or (topic,) in watch.paused:
        if "growing" in signs:
            yield Problem(
                "paused",
                Severity.NOTICE,
                "paused with a growing backlog",
                shown,
                "Resume it if the pause is no longer needed.",
                weight=waiting,
                **about,
            )
        return
    if "unread" in signs:
        yield _without_consumers(channel, shown, speed > 0, waiting, about)
        return
    if "growing" in signs:
        clients = figures["clients"]
        yield Problem(
            "growing",
            Severity.WARNING,
            "backlog is growing",
            f"{shown}; {figures['in_rate']:,.1f}/s arrive, {out} are finished by "
            + (f"{clients:.0f} consumers" if clients else "a pipeline or another reader of the log"),
            "The consumers are too slow or too few." if clients else "The reader is too slow.",
            weight=waiting,
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
            weight=figures["timeout_rate"] * 1000,
            **about,
        )
    elif "stuck" in signs:
        yield Problem(
            "stuck",
            Severity.WARNING,
            "consumers finish nothing",
            f"{figures['in_flight']:,.0f} in flight and {waiting:,.0f} waiting for over a minute",
            "The consumers hang, or need very long for each message.",
            weight=waiting,
            **about,
        )
    if "requeues" in signs:
        yield Problem(
            "requeues",
            Severity.NOTICE,
            "high requeue rate",
            f"{figures['requeue_rate']:,.2f}/s are requeued, {out} are finished",
            "Consumers fail on messages. A message that always fails is delivered again and again.",
            weight=figures["requeue_rate"] * 100,
            **about,
        )


def _without_consumers(
    channel: str, shown: str, is_growing: bool, waiting: float, about: dict[str, Any]
) -> Problem:
    if is_ephemeral(channel):
        hint = "The last consumer has just left. nsqd deletes an ephemeral channel without consumers."
    elif is_growing:
        hint = "The backlog keeps growing. Start a consumer or pipeline, or delete the channel."
    else:
        hint = "Start a consumer or pipeline, or delete the channel if it is no longer needed."
    return Problem(
        "no consumers",
        Severity.WARNING if is_growing else Severity.NOTICE,
        "no consumers",
        shown,
        hint,
        weight=waiting,
        **about,
    )


def _topics(watch: Watch) -> Iterator[Problem]:
    table = watch.topics
    column = table.column["depth"]
    for name, channels in watch.channels_of.items():
        if channels:
            continue
        waiting = table.now[table.find((name,)), column] if (name,) in table else math.nan
        if waiting > 0 and not is_ephemeral(name):
            yield Problem(
                "no channel",
                Severity.NOTICE,
                "topic has no channel",
                f"{waiting:,.0f} messages waiting",
                "Messages wait in the topic until its first channel is created.",
                topic=name,
                weight=float(waiting),
            )


# Clients


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
            continue  # the whole channel is stuck: _channels() reports that
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


# Pipelines


def _pipelines(pipelines: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    for one in pipelines:
        about = {"pipeline": str(one.get("name", "")), "weight": 1e6}
        if error := one.get("unreachable"):
            yield Problem(
                "pipeline",
                Severity.WARNING,
                "pipeline runner does not answer",
                str(error),
                "",
                **about,  # type: ignore[arg-type]  # a name and a number
            )
        elif one.get("state") in ("failed", "waiting"):
            yield Problem(
                "pipeline",
                Severity.CRITICAL if one["state"] == "failed" else Severity.WARNING,
                "pipeline failed" if one["state"] == "failed" else "pipeline failed and is being retried",
                str(one.get("error") or "no error text")[:500],
                "No data is lost: its channels keep the messages that it has not read.",
                **about,  # type: ignore[arg-type]  # a name and a number
            )


# Formatting


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "a long time"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
