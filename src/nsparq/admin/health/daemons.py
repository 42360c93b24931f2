"""Problems of nsqlookupds, nodes, their disks, and pipelines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from nsparq.admin.collect.cluster import ONE_NAME
from nsparq.admin.collect.history import fit
from nsparq.admin.collect.replicated import Replicated
from nsparq.admin.collect.watch import FORGET_S, NodeState, Watch
from nsparq.admin.health.problem import Problem, Severity, duration
from nsparq.admin.show.templating import size

__all__ = ["daemon_problems", "pipeline_problems"]

DISK_LOW, DISK_CRITICAL = 0.15, 0.05
"""Free shares of a disk."""
DISK_SOON_S: Final = 24 * 3600.0
FORECAST_S: Final = 1800.0
FORECAST_POINTS: Final = 20
STEADY: Final = 0.9
"""A forecast needs this much history, and a correlation of free space and time of at least STEADY:
a disk that fills and is cleaned again has none."""

ARCHIVE_BEHIND_S: Final = 900.0
"""Age of a complete log file that should be in the archive."""


def daemon_problems(watch: Watch) -> Iterator[Problem]:
    yield from _lookups(watch)
    yield from _nodes(watch)
    yield from _disks(watch)
    yield from _archives(watch)


def _lookups(watch: Watch) -> Iterator[Problem]:
    unreachable = {f"{address}: {state.error}" for address, state in watch.nodes.items() if state.error}
    for error in watch.errors:
        if error in unreachable:
            continue
        if ONE_NAME in error:
            yield Problem(
                "lookupd",
                Severity.WARNING,
                "two nodes have one address",
                error,
                "The figures lack those of the other node.",
            )
            continue
        is_all = error.startswith("failed to query any")
        yield Problem(
            "lookupd",
            Severity.CRITICAL if is_all else Severity.WARNING,
            "no nsqlookupd answers" if is_all and "nsqlookupd" in error else "a daemon does not answer",
            error,
            "New nodes and topics are not detected." if is_all else "Some data may be missing.",
        )


def _nodes(watch: Watch) -> Iterator[Problem]:
    primaries = {
        one.cluster
        for state in watch.nodes.values()
        if (one := state.replication) and not state.error and one.is_primary
    }
    for address, state in watch.nodes.items():
        if state.replication is not None and not state.error:
            yield from _replication(address, state.replication, primaries)
        if state.left_s is not None and (state.is_standby or _is_replaced(state, primaries)):
            continue
        if state.left_s is not None:
            yield _left(address, state, watch.polled_s - state.left_s)
        elif state.error:
            yield Problem(
                "unreachable",
                Severity.CRITICAL,
                "node does not answer",
                f"for {duration(watch.polled_s - state.since_s)}: {state.error}",
                "It is registered, so it ran a short time ago. It may be down, or nsqadmin cannot reach it.",
                node=address,
            )
        if state.error:
            continue
        if state.health != "OK":
            yield Problem(
                "unhealthy",
                Severity.CRITICAL,
                "node is unhealthy",
                state.health,
                "Publishing to it fails meanwhile. Often its disk is full.",
                node=address,
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


def _is_replaced(state: NodeState, primaries: set[str]) -> bool:
    """Whether another node of its cluster serves its messages. That one reports what is missing."""
    return bool(state.error) and state.replication is not None and state.replication.cluster in primaries


def _replication(address: str, found: Replicated, primaries: set[str]) -> Iterator[Problem]:
    if found.is_primary and found.problems:
        yield Problem(
            "replication",
            Severity.WARNING,
            "cluster is degraded",
            f"{found.cluster}: {'; '.join(found.problems)}",
            "Messages are safe, but the next failure may stop the cluster. See docs/how-to/replication.md.",
            node=address,
        )
    elif found.cluster not in primaries:
        yield Problem(
            "replication",
            Severity.CRITICAL,
            "cluster has no primary",
            f"{found.cluster}: {'; '.join(found.problems) or 'no primary is registered'}",
            "Nobody serves its messages. Normal for seconds at a fail-over; otherwise see the nodes' logs.",
            node=address,
        )


def _left(address: str, state: NodeState, ago_s: float) -> Problem:
    """A node that no nsqlookupd lists any more."""
    held = int(state.parts.held)
    if not state.error:
        return Problem(
            "not registered",
            Severity.WARNING,
            "node is not registered",
            f"for {duration(ago_s)}; {held:,} messages wait there",
            "It answers, but new consumers do not find it. Check its connection to nsqlookupd.",
            node=address,
            weight=held,
        )
    return Problem(
        "left",
        Severity.CRITICAL if held else Severity.NOTICE,
        "node has left",
        f"{duration(ago_s)} ago, with {held:,} unfinished messages: {state.error}",
        "Unless a replica has taken over, nobody gets its messages until it is back. If it was removed on "
        f"purpose, ignore this: it disappears from here after {duration(FORGET_S)}.",
        node=address,
        weight=held,
    )


# Disks


def _archives(watch: Watch) -> Iterator[Problem]:
    """One entry for each node, and kind of trouble: a store that is away concerns all its
    topics."""
    for address, state in watch.nodes.items():
        if state.error:
            continue
        found = state.parts.archives
        failing = {name: one for name, one in found.items() if one["error"]}
        behind = {
            name: one
            for name, one in found.items()
            if name not in failing and one["oldest_waiting_age_s"] > ARCHIVE_BEHIND_S
        }
        if failing:
            name, worst = max(failing.items(), key=lambda item: item[1]["oldest_waiting_age_s"])
            hint = "Messages are safe on the node, and its disk fills until the store takes them again."
            if worst["replaced"]:
                hint = "Another nsqd has taken over this log. Stop the one that is not needed, or restart it."
            yield _about_archive("archive fails", worst["error"], hint, address, name, failing)
        if behind:
            name, worst = max(behind.items(), key=lambda item: item[1]["oldest_waiting_age_s"])
            hint = "The store, or --archive-bandwidth, is slower than publishing. The node's disk fills."
            since = f"the oldest log file waits for {duration(worst['oldest_waiting_age_s'])}"
            yield _about_archive("archive falls behind", since, hint, address, name, behind)


def _about_archive(
    title: str, detail: str, hint: str, node: str, topic: str, found: Mapping[str, Mapping[str, Any]]
) -> Problem:
    waiting = sum(one["waiting_bytes"] for one in found.values())
    others = f", of {len(found):,} topics" if len(found) > 1 else ""
    text = f"{detail}; {size(waiting)} wait on disk{others}"
    name = topic if len(found) == 1 else ""
    return Problem("archive", Severity.WARNING, title, text, hint, topic=name, node=node, weight=waiting)


def _disks(watch: Watch) -> Iterator[Problem]:
    """One entry for each disk, however many nodes use it."""
    sharing: dict[tuple[str, str], list[str]] = {}
    for address, state in watch.nodes.items():
        if not state.error and state.disk_free is not None and state.disk_size:
            disk = (state.node.hostname, state.disk_device) if state.disk_device else ("", address)
            sharing.setdefault(disk, []).append(address)
    for addresses in sharing.values():
        yield from _disk(watch, sorted(addresses))


def _disk(watch: Watch, addresses: list[str]) -> Iterator[Problem]:
    state: NodeState = watch.nodes[addresses[0]]
    assert state.disk_free is not None and state.disk_size
    share = state.disk_free / state.disk_size
    left_s = _time_left(watch, addresses[0], share)
    if share >= DISK_LOW and left_s > DISK_SOON_S:
        return
    soon = f"; full in {duration(left_s)} at the current rate" if left_s < 30 * 24 * 3600 else ""
    users = f"; the disk of {_listed(addresses)}" if len(addresses) > 1 else ""
    yield Problem(
        "disk",
        Severity.CRITICAL if share < DISK_CRITICAL or left_s < 3600 else Severity.WARNING,
        "disk is filling" if soon else "disk is nearly full",
        f"{share:.1%} of {size(state.disk_size)} free ({size(state.disk_free)}){soon}{users}",
        "When it is full, publishing fails; consumers still work. Channels without consumers keep their "
        "messages on disk.",
        node=addresses[0],
        weight=1 - share,
    )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _time_left(watch: Watch, address: str, share: float) -> float:
    """Seconds until the disk is full at the rate of the last hours; infinity without a forecast."""
    table = watch.nodes_table
    points = table.points((address,), 1)  # a point for each minute
    free = points.values[:, [table.column["disk_free"]]]
    # Unknown while the node does not answer.
    if np.count_nonzero(~np.isnan(free)) < FORECAST_POINTS:
        return math.inf
    found = fit(np.array(points.times), free, FORECAST_S)
    slope, steadiness = float(found.slope[0]), float(found.correlation[0])
    if math.isnan(slope) or slope >= 0 or -steadiness < STEADY:
        return math.inf
    return share / -slope


# Pipelines


def pipeline_problems(pipelines: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    for one in pipelines:
        name = str(one.get("name", ""))
        if error := one.get("unreachable"):
            yield Problem(
                "pipeline",
                Severity.WARNING,
                "pipeline runner does not answer",
                str(error),
                "",
                pipeline=name,
            )
        elif one.get("state") in ("failed", "waiting"):
            yield Problem(
                "pipeline",
                Severity.CRITICAL if one["state"] == "failed" else Severity.WARNING,
                "pipeline failed" if one["state"] == "failed" else "pipeline failed and is being retried",
                str(one.get("error") or "no error text")[:500],
                "No data is lost: its channels keep the messages that it has not read.",
                pipeline=name,
            )
