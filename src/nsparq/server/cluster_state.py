"""What a node says of its cluster: `/replication`, `/ping`, `/info`, `/stats`, the metrics and the
log, whatever its role."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from nsparq.errors import TooFewReplicas
from nsparq.http.metrics import Exposition
from nsparq.replication.membership import Membership
from nsparq.replication.node import Node
from nsparq.server.api.parameters import BOOLEAN, COUNT, TEXT, fields, listed, obj

logger = logging.getLogger(__name__)

WATCH_S: Final = 1.0

FOLLOWER: Final = obj(
    {"name": TEXT}
    | fields(BOOLEAN, "is_in_sync", "is_joining")
    | fields(COUNT, "changes_behind", "bytes_behind")
    | {"seconds_behind": {"type": "number", "minimum": 0}}
)
STATUS: Final = obj(
    fields(TEXT, "cluster", "node")
    | {"role": {"type": "string", "enum": ["primary", "follower", "waiting"]}}
    | fields(COUNT, "epoch", "changes", "min_in_sync")
    | fields(TEXT, "primary", "primary_tcp_address", "primary_http_address")
    | {"in_sync": listed(TEXT), "followers": listed(FOLLOWER), "problems": listed(TEXT)}
)
NO_RECORD: Final = Membership(0, "", {})


class ClusterState:
    """The cluster, as this node sees it."""

    def __init__(self, node: Node, min_in_sync: int) -> None:
        self._node = node
        self._min_in_sync = min_in_sync
        self.is_serving = False
        """Whether nsqd runs here. A primary starts and stops it."""

    @property
    def name(self) -> str:
        """Of this node."""
        return self._node.settings.name

    @property
    def membership(self) -> Membership:
        """As the coordinator has it, as far as this node knows."""
        primary = self._node.primary
        return (primary.acknowledging.membership if primary else self._node.membership) or NO_RECORD

    @property
    def role(self) -> str:
        """`waiting` if it neither serves clients nor is connected to a primary."""
        if self.is_serving:
            return "primary"
        follower = self._node.follower
        return "follower" if follower is not None and follower.is_connected else "waiting"

    @property
    def summary(self) -> dict[str, Any]:
        """For /info."""
        return {
            "cluster": self._node.settings.cluster,
            "node": self.name,
            "role": self.role,
            "epoch": self.membership.epoch,
            "primary": self.membership.primary,
            "problems": self.problems(),
        }

    def status(self) -> dict[str, Any]:
        membership, primary, follower = self.membership, self._node.primary, self._node.follower
        changes = primary.changes if primary else follower.number if follower else 0
        return {
            **self.summary,
            "primary_tcp_address": membership.tcp_address,
            "primary_http_address": membership.http_address,
            "in_sync": sorted(membership.in_sync),
            "min_in_sync": self._min_in_sync,
            "changes": changes,
            "followers": primary.followers() if primary else [],
        }

    def check(self) -> None:
        """Raises TooFewReplicas if nothing may be published now."""
        count = len(self.membership.in_sync)
        if count < self._min_in_sync:
            raise TooFewReplicas(count, self._min_in_sync)

    def why_unhealthy(self) -> str | None:
        """Why clients cannot publish now, on the primary."""
        try:
            self.check()
        except TooFewReplicas as error:
            return str(error)
        primary, silence = self._node.primary, self._node.coordinator_error
        if primary is not None and primary.acknowledging.is_changing and silence:
            return f"publishes wait until the coordinator has recorded who is in sync: {silence}"
        return None

    def why_not_primary(self) -> str:
        primary = self.membership.primary
        if self.role == "follower":
            return f"node {self.name} follows {primary}"
        event = self._node.last_event
        return f"node {self.name} waits for a primary" + (f": {event}" if event else "")

    def problems(self) -> list[str]:
        """What an operator should look at. Empty if all is well."""
        node, membership = self._node, self.membership
        found = [node.coordinator_error] if node.coordinator_error else []
        if node.primary is None or not self.is_serving:
            if self.role == "waiting":
                found.append(self.why_not_primary())
            elif self.name not in membership.in_sync:
                found.append(f"node {self.name} does not have everything yet")
            return found
        unhealthy = self.why_unhealthy()
        if unhealthy is not None:
            found.append(unhealthy)
        joining = {one["name"] for one in node.primary.followers()}
        away = sorted((node.known | joining) - membership.in_sync)
        found += [f"node {name} is {'joining' if name in joining else 'lost'}" for name in away]
        if len(membership.in_sync) < 2:
            found.append("no other node can take over")
        return found

    async def watch(self) -> None:
        """Log when the cluster of this primary is degraded, and when it is whole again."""
        shown: list[str] = []
        while True:
            problems = self.problems() if self.is_serving else []
            for text in problems:
                if text not in shown:
                    logger.warning("REPLICATION: degraded: %s", text)
            if shown and not problems and self.is_serving:
                logger.info("REPLICATION: no longer degraded")
            shown = problems
            await asyncio.sleep(WATCH_S)

    def add_metrics(self, out: Exposition) -> None:
        node, membership = self._node, self.membership
        labels = f'{{cluster="{node.settings.cluster}",node="{self.name}",role="{self.role}"}}'
        out.add("nsqd_replication_info", "gauge", "cluster, name and role of this node", 1, labels)
        for name, help_text, value in (
            ("primary", "1 on the primary", self.is_serving),
            ("connected", "1 on the primary, and on a follower that is connected", self.role != "waiting"),
            ("epoch", "number of the primary, counted from the first", membership.epoch),
            ("in_sync", "nodes that have everything that was acknowledged", len(membership.in_sync)),
            ("min_in_sync", "the value of --min-in-sync", self._min_in_sync),
            ("coordinator_up", "1 if the coordinator has answered", not node.coordinator_error),
            ("problems", "problems that /replication lists", len(self.problems())),
        ):
            out.add(f"nsqd_replication_{name}", "gauge", help_text, value)
        for follower in node.primary.followers() if node.primary else ():
            labels = f'{{follower="{follower["name"]}"}}'
            for name, help_text, key in (
                ("in_sync", "1 if the follower may take over", "is_in_sync"),
                ("joining", "1 while the follower gets a snapshot", "is_joining"),
                ("behind_changes", "changes that the follower has not confirmed", "changes_behind"),
                ("behind_bytes", "bytes of those changes, as far as in memory", "bytes_behind"),
                ("behind_seconds", "time without a confirmation while one is due", "seconds_behind"),
            ):
                full = f"nsqd_replication_follower_{name}"
                out.add(full, "gauge", help_text, follower[key], labels)
