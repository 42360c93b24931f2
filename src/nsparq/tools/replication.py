"""`nsparq replication`: shows clusters of nsqds that keep copies of one data path, and moves the
primary."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nsparq.addresses import heard_address, split_address
from nsparq.option_table import BOOL, STRING, choice, opt
from nsparq.tools.cluster import AskFailed
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.manage import confirmed
from nsparq.tools.output import Column, amount, print_json, print_rows, size
from nsparq.tools.source import Answers, Source, SourceFlags

__all__ = ["REPLICATION", "replication"]

STATUS, SWITCH_OVER = "status", "switch-over"
POLL_S: Final = 0.1
SWITCH_OVER_S: Final = 60.0
"""How long to wait for the next primary."""

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFlags(SourceFlags):
    action: str = opt("", "`status` or `switch-over`", choice(STATUS, SWITCH_OVER, empty=""))
    cluster: str = opt("", "the cluster; not needed if there is only one", STRING)
    yes: bool = opt(False, "switch over without asking", BOOL)


REPLICATION: Final = CommandTable(
    "replication",
    ReplicationFlags,
    words=("action", "cluster"),
    required=1,
    about="""
Shows which node of a replicated nsqd is primary, who may take over, and how far the others are
behind. `switch-over` lets a follower take over, and waits until it serves: for an upgrade, or to
move the primary. No message is lost.

Any node of a cluster will do as --nsqd-http-address. The exit status of `status` is 1 if a cluster
has a problem.
""",
    examples=(
        "nsparq replication status",
        "nsparq replication status --nsqd-http-address=10.0.0.1:4151 --json",
        "nsparq replication switch-over orders --yes",
    ),
)
COLUMNS: Final = (
    Column("cluster", "CLUSTER", left=True),
    Column("node", "NODE", left=True),
    Column("role", "ROLE", left=True),
    Column("state", "STATE", left=True),
    Column("epoch", "EPOCH"),
    Column("changes_behind", "CHANGES BEHIND", amount),
    Column("bytes_behind", "BYTES BEHIND", size),
)


def _clusters(source: Source, wanted: str = "") -> tuple[dict[str, Status], Answers[Status]]:
    """The state of each cluster, from its primary if that answers. Raises AskFailed."""

    def ask(address: str) -> Status:
        try:
            return source.ask("GET", address, "/replication")
        except AskFailed as error:
            if error.code == "NOT_REPLICATED":
                return {}
            raise

    answers = source.each(source.nsqds(), ask)
    found: dict[str, Status] = {}
    for status in _with_primaries(answers, ask):
        name = status["cluster"]
        if name not in found or _rank(status) > _rank(found[name]):
            found[name] = status
    if wanted:
        found = {name: status for name, status in found.items() if name == wanted}
    if not found:
        none = "no nsqd is in a cluster: see docs/how-to/replication.md"
        raise AskFailed(f"there is no cluster {wanted}" if wanted else none, 404)
    return found, answers


def _with_primaries(answers: Answers[Status], ask: Any) -> Iterable[Status]:
    for node, status in answers.done.items():
        if not status:
            continue
        yield status
        if status["role"] == "primary":
            continue
        asked = node
        try:
            address = _primary_address(node, status)
            if address and address not in answers.done:
                asked = address
                if found := ask(address):
                    yield found
        except AskFailed as error:
            answers.failed.setdefault(asked, error)


def _primary_address(node: str, status: Status) -> str:
    """The HTTP address of the primary, from the answer of a node; empty if it knows none. Raises
    AskFailed if it is not `host:port`: anybody can register a node, and the secret goes there."""
    named = status["primary_http_address"]
    place = split_address(named)
    address = heard_address(*place) if place else None
    if named and address is None:
        raise AskFailed(f"{node} names an invalid address as its primary's: {named!r}", 200)
    return address or ""


def _rank(status: Status) -> tuple[bool, int]:
    return status["role"] == "primary", status["epoch"]


def _rows(status: Status) -> list[dict[str, Any]]:
    cluster, known = status["cluster"], {one["name"] for one in status["followers"]}
    is_primary = status["role"] == "primary"
    rows = [
        {
            "cluster": cluster,
            "node": status["node"],
            "role": status["role"],
            "state": "in sync" if status["node"] in status["in_sync"] else "not in sync",
            "epoch": status["epoch"],
        }
    ]
    for one in status["followers"]:
        state = "in sync" if one["is_in_sync"] else "joining" if one["is_joining"] else "catching up"
        rows.append({"cluster": cluster, "node": one["name"], "role": "follower", "state": state, **one})
    others = sorted({*status["in_sync"]} - known - {status["node"]})
    lost = "lost" if is_primary else "in sync"
    rows += [{"cluster": cluster, "node": name, "role": "-", "state": lost} for name in others]
    return rows


def _status(options: ReplicationFlags) -> int:
    found, answers = _clusters(Source(options), options.cluster)
    if options.json:
        print_json({"clusters": [*found.values()], "unreachable": answers.unreachable()})
    else:
        print_rows([row for status in found.values() for row in _rows(status)], COLUMNS)
    failed = answers.report("nsparq replication")
    for name, status in found.items():
        for problem in status["problems"]:
            sys.stderr.write(f"nsparq replication: {name}: {problem}\n")
            failed = 1
    return failed


def _switch_over(options: ReplicationFlags) -> int:
    source = Source(options)
    found, _ = _clusters(source, options.cluster)
    if len(found) > 1:
        raise AskFailed(f"there are several clusters, name one: {', '.join(sorted(found))}")
    ((name, before),) = found.items()
    if before["role"] != "primary":
        raise AskFailed(f"the primary of {name} does not answer")
    address = _primary_address(before["node"], before)
    if not address:
        raise AskFailed(f"the primary of {name} has no HTTP address for others")
    if not confirmed(f"Let another node take over from {before['node']} in {name}?", yes=options.yes):
        return 1
    begun = time.monotonic()
    try:
        source.ask("POST", address, "/replication/switch_over")
    except AskFailed as error:
        if error.code == "NOT_POSSIBLE":
            raise AskFailed(f"no other node of {name} has everything: nobody could take over") from error
        raise
    after = _await_primary(source, address, before)
    took_s = round(time.monotonic() - begun, 2)
    if options.json:
        print_json({"cluster": name, "from": before["node"], "to": after["node"], "epoch": after["epoch"]})
    else:
        print(f"{after['node']} is primary of {name}, epoch {after['epoch']}, after {took_s:.1f} s.")
    return 0


def _await_primary(source: Source, address: str, before: Status) -> Status:
    """The next primary, once it serves. The old one knows where it is. Raises AskFailed."""
    deadline = time.monotonic() + SWITCH_OVER_S
    while time.monotonic() < deadline:
        try:
            status = source.ask("GET", address, "/replication")
            if status["role"] != "primary":
                following = _primary_address(address, status)
                if following not in ("", address):
                    status = source.ask("GET", following, "/replication")
            if status["role"] == "primary" and status["epoch"] > before["epoch"]:
                return status
        except AskFailed as error:
            # Between two roles a node does not listen for a moment.
            if error.status:
                raise
        time.sleep(POLL_S)
    waited = f"nobody serves in {before['cluster']} after {SWITCH_OVER_S:.0f} s"
    raise AskFailed(f"{waited}: see the logs of its nodes")


def _run(options: ReplicationFlags) -> int:
    return {STATUS: _status, SWITCH_OVER: _switch_over}[options.action](options)


replication = partial(run_command, REPLICATION, _run)
