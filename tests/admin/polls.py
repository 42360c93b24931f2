"""A watch that is told what the nodes say, for tests of what nsqadmin makes of it."""

from __future__ import annotations

from typing import Any

from nsparq.admin.collect.merge import Node, NodeStats
from nsparq.admin.collect.watch import NodeState, Watch

NODES = [Node(f"h{number}", f"h{number}", 4150, 4151, "1.3.0") for number in (1, 2)]


def channel(name: str = "c", **fields: Any) -> dict[str, Any]:
    counts = ("in_flight", "deferred", "message", "requeue", "timeout", "client")
    figures = dict.fromkeys(("depth", "backend_depth", *(f"{one}_count" for one in counts)), 0)
    latency = {"count": 0, "percentiles": None}
    return {"channel_name": name, **figures, "paused": False, "e2e_processing_latency": latency, **fields}


def said(messages: int, *channels: dict[str, Any], name: str = "t", **fields: Any) -> dict[str, Any]:
    topic = {"topic_name": name, "depth": 0, "message_count": messages, "channels": [*channels], **fields}
    return {"topics": [topic], "health": "OK", "start_time": 1}


class Polls:
    """A watch that is told what the nodes say."""

    def __init__(self) -> None:
        self.time_s = 1_000_000.0
        self.watch = Watch(
            None,  # type: ignore[arg-type]  # nobody is asked
            interval_s=5.0,
            history_bytes=1 << 26,
            max_clients=100,
            clock=lambda: self.time_s,
        )
        for node in NODES:
            self.watch.nodes[node.address] = NodeState(node)

    def poll(self, *answers: dict[str, Any] | None, after_s: float = 5.0) -> None:
        self.time_s += after_s
        states = [self.watch.nodes[node.address] for node in NODES][: len(answers)]
        stats = [
            None if one is None else NodeStats.parse(node, one)
            for node, one in zip(NODES, answers, strict=False)
        ]
        self.watch._record(states, stats)
        self.watch.number += 1

    def channel(self) -> dict[str, float]:
        return self.watch.channels.latest(("t", "c")) or {}
