"""What is unhealthy, and why: worked out from the figures of the last polls, sorted by what needs a person.

Each finding says what was seen, in numbers, and what it usually means. None is a verdict: a queue that grows
at night and is empty by noon is how some people work, so what only may be wrong is said as such.
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
from nsparq.names import is_ephemeral

__all__ = ["Problem", "Severity", "find_problems"]

Array = NDArray[np.float64]

GROWING_S: Final = 300.0
"""Growth is looked at over so long; over less, but a minute at least, while there is not more to look at."""
GROWN: Final = 100
"""Messages by which a queue must have grown to be worth a word."""
STUCK_S: Final = 60.0
"""Rates are those of so long; and who finishes nothing for so long is stuck."""
MANY_TIMEOUTS: Final = 0.05
MANY_REQUEUES: Final = 0.5
"""Timeouts and requeues, as parts of what is finished."""
DISK_LOW, DISK_CRITICAL = 0.15, 0.05
"""Free share of the disk."""
DISK_SOON_S: Final = 24 * 3600.0
MAX_PER_KIND: Final = 100
"""A cluster in which everything is wrong has one cause, not ten thousand: more are only counted."""


class Severity(IntEnum):
    """How soon somebody should look."""

    CRITICAL = 3
    """Something is lost, or will be."""
    WARNING = 2
    """It does not go on like this."""
    NOTICE = 1
    """As it is meant, perhaps."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: str
    severity: Severity
    title: str
    """What is wrong, in a few words, without names."""
    detail: str
    """The figures."""
    hint: str
    """What it usually means."""
    topic: str = ""
    channel: str = ""
    node: str = ""
    client: str = ""
    pipeline: str = ""
    weight: float = 0.0
    """Among those of the same severity the larger comes first."""

    def as_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("kind", "title", "detail", "hint")}
        places = ("topic", "channel", "node", "client", "pipeline")
        found |= {name: value for name in places if (value := getattr(self, name))}
        return {"severity": self.severity.name.lower(), **found}


def find_problems(watch: Watch, pipelines: Sequence[Mapping[str, Any]] = ()) -> list[Problem]:
    """The worst first."""
    found: list[Problem] = []
    for kind in (
        _asking(watch),
        _nodes(watch),
        _lost(watch),
        _channels(watch, readers(pipelines)),
        _topics(watch),
        _clients(watch),
        _pipelines(pipelines),
    ):
        found += kind
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
            text = f"{count - MAX_PER_KIND:,} more like it are not listed"
            kept.append(Problem(kind, Severity.NOTICE, "and more", f"{kind}: {text}", ""))
    return kept


# Daemons


def _asking(watch: Watch) -> Iterator[Problem]:
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
            "What is shown may not be all there is." if not is_all else "New nodes and topics are not seen.",
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
                "It is listed, so it was there lately; or it is there, and cannot be reached from here.",
                node=address,
                weight=1e8,
            )
            continue
        if state.health != "OK":
            yield Problem(
                "unhealthy",
                Severity.CRITICAL,
                "node says that it is not well",
                state.health,
                "Publishing to it fails while this lasts; most often its disk is full.",
                node=address,
                weight=1e8,
            )
        if state.node.out_of_date:
            yield Problem(
                "version",
                Severity.NOTICE,
                "node runs an older version",
                f"{state.node.version}, while others run a newer one",
                "Fine during an upgrade.",
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
    soon = f"; at the present rate full in {_duration(left_s)}" if left_s < 30 * 24 * 3600 else ""
    yield Problem(
        "disk",
        Severity.CRITICAL if share < DISK_CRITICAL or left_s < 3600 else Severity.WARNING,
        "disk is filling" if soon else "disk is nearly full",
        f"{share:.1%} of {_bytes(state.disk_size)} free ({_bytes(state.disk_free)}){soon}",
        "When it is full publishing fails; consumers go on. Channels without consumers hold messages back.",
        node=address,
        weight=1e7 * (1 - share),
    )


def _time_left(watch: Watch, address: str, share: float) -> float:
    """Until the disk is full, if it goes on as in the last hours or minutes; infinity if it does not fill."""
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
            f"{count:,} since the node was started, to a damaged disk or for lack of room",
            "See the node's log. Ephemeral topics and channels drop what does not fit in memory.",
            topic=key[0],
            channel=key[1] if len(key) > 1 else "",
            weight=1e9,
        )


# Queues


def _growth(watch: Watch, depth: Array) -> tuple[Array, float]:
    """By how much each channel's depth has grown, and over which time; NaN where it is not known."""
    for age_s in (GROWING_S, GROWING_S / 2, 60.0):
        found = watch.channels.before(age_s, "depth")
        if found is not None:
            then, elapsed_s = found
            return depth - then, elapsed_s
    return np.full(len(depth), np.nan), math.inf


def _channels(watch: Watch, read: Set[tuple[str, str]]) -> Iterator[Problem]:
    """What is worth a word is found for all channels at once; few are. `read` are those that a pipeline
    reads."""
    table = watch.channels
    now = {name: table.now[:, column] for name, column in table.column.items()}
    rates = {name: table.recent(name, STUCK_S) for name in ("out_rate", "timeout_rate", "requeue_rate")}
    depth, out = now["depth"], np.maximum(rates["out_rate"], 1e-9)
    growth, elapsed_s = _growth(watch, depth)
    with np.errstate(invalid="ignore"):
        signs = {
            "growing": (growth >= GROWN) & (growth >= 0.1 * (depth - growth)),
            # Spark reads ranges of the log, and is no consumer; but what it has read goes.
            "alone": (now["clients"] == 0) & (depth > 0) & ~(rates["out_rate"] > 0),
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
            yield from _about_channel(watch, key, seen - {"alone"} if key in read else seen, figures, speed)


def _about_channel(
    watch: Watch, key: tuple[str, str], signs: set[str], figures: Mapping[str, float], speed: float
) -> Iterator[Problem]:
    topic, channel = key
    about: dict[str, Any] = {"topic": topic, "channel": channel}
    waiting, out = figures["depth"], f"{figures['out_rate']:,.1f}/s"
    shown = f"{waiting:,.0f} waiting" + (f", {speed:+,.1f} a second" if speed else "")
    if key in watch.paused or (topic,) in watch.paused:
        if "growing" in signs:
            yield Problem(
                "paused",
                Severity.NOTICE,
                "paused, and messages wait",
                shown,
                "Somebody has paused it.",
                weight=waiting,
                **about,
            )
        return
    if "alone" in signs:
        yield _without_consumers(channel, shown, speed > 0, waiting, about)
        return
    if "growing" in signs:
        clients = figures["clients"]
        yield Problem(
            "growing",
            Severity.WARNING,
            "falls behind",
            f"{shown}; {figures['in_rate']:,.1f}/s come, {out} are finished, by "
            + (f"{clients:.0f} consumers" if clients else "a reader of the log, such as a pipeline"),
            "The consumers are too slow or too few." if clients else "What reads it is too slow.",
            weight=waiting,
            **about,
        )
    if "timeouts" in signs:
        yield Problem(
            "timeouts",
            Severity.WARNING,
            "messages time out",
            f"{figures['timeout_rate']:,.2f}/s, while {out} are finished",
            "A consumer takes messages and does not answer in time: it hangs, or needs longer than "
            "msg-timeout; each is then worked on twice.",
            weight=figures["timeout_rate"] * 1000,
            **about,
        )
    elif "stuck" in signs:
        yield Problem(
            "stuck",
            Severity.WARNING,
            "consumers finish nothing",
            f"{figures['in_flight']:,.0f} in flight and {waiting:,.0f} waiting for over a minute",
            "The consumers hang, or each message takes them very long.",
            weight=waiting,
            **about,
        )
    if "requeues" in signs:
        yield Problem(
            "requeues",
            Severity.NOTICE,
            "many messages are put back",
            f"{figures['requeue_rate']:,.2f}/s, while {out} are finished",
            "Consumers fail on messages; those that always fail come back again and again.",
            weight=figures["requeue_rate"] * 100,
            **about,
        )


def _without_consumers(
    channel: str, shown: str, is_growing: bool, waiting: float, about: dict[str, Any]
) -> Problem:
    if is_ephemeral(channel):
        hint = "It goes with its last consumer, so one has just left."
    elif is_growing:
        hint = "Nobody reads it and it keeps growing: start its consumer or pipeline, or delete the channel."
    else:
        hint = "Nobody reads it: start its consumer or pipeline, or delete the channel if nobody needs it."
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
                "nobody has ever read it",
                f"{waiting:,.0f} messages, and no channel",
                "Messages wait in the topic until its first channel is created.",
                topic=name,
                weight=float(waiting),
            )


# Clients


def _clients(watch: Watch) -> Iterator[Problem]:
    """Those that hold messages and finish none, while others of the same channel do."""
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
            continue  # the channel as a whole is stuck, which is said there
        yield Problem(
            "slow client",
            Severity.WARNING,
            "a consumer finishes nothing",
            f"{in_flight[place]:,.0f} in flight for over a minute, while others finish "
            f"{others['out_rate']:,.1f} a second",
            "It hangs, or has a message that takes very long.",
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
                "a runner of pipelines does not answer",
                str(error),
                "",
                **about,  # type: ignore[arg-type]  # a name and a number
            )
        elif one.get("state") in ("failed", "waiting"):
            yield Problem(
                "pipeline",
                Severity.CRITICAL if one["state"] == "failed" else Severity.WARNING,
                "pipeline has failed" if one["state"] == "failed" else "pipeline has failed, and is retried",
                str(one.get("error") or "no reason is given")[:500],
                "Nothing is lost: its channels keep what it has not read.",
                **about,  # type: ignore[arg-type]  # a name and a number
            )


# Words


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "a long time"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} PB"
