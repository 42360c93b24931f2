"""Figures of several nsqds put together: sums, rates, restarts, nodes that do not answer."""

from __future__ import annotations

import gc
import math
import tracemalloc
from typing import Any

from nsparq.admin.collect.merge import Node, NodeStats
from nsparq.admin.collect.watch import NodeState, Watch
from nsparq.admin.health import Severity, find_problems

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

    def poll(self, *answers: dict[str, Any] | None) -> None:
        self.time_s += 5
        states = [self.watch.nodes[node.address] for node in NODES][: len(answers)]
        stats = [
            None if one is None else NodeStats.parse(node, one)
            for node, one in zip(NODES, answers, strict=False)
        ]
        self.watch._record(states, stats)
        self.watch.number += 1

    def channel(self) -> dict[str, float]:
        return self.watch.channels.latest(("t", "c")) or {}


def test_gauges_are_added_up_and_rates_are_differences_of_each_node() -> None:
    polls = Polls()
    polls.poll(said(100, channel(message_count=100, depth=3)), said(50, channel(message_count=50, depth=4)))
    assert math.isnan(polls.channel()["in_rate"])
    polls.poll(said(150, channel(message_count=150, depth=3)), said(60, channel(message_count=60, depth=4)))
    found = polls.channel()
    assert (found["depth"], found["in_rate"], found["out_rate"]) == (7, 12, 12)
    assert (polls.watch.topics.latest(("t",)) or {})["in_rate"] == 12
    assert (polls.watch.totals.latest(()) or {})["in_rate"] == 12


def test_memory_is_bounded_while_topics_and_clients_come_and_go() -> None:
    """Hours of polls, of a cluster where every minute other topics and clients are there."""
    polls = Polls()
    watch = polls.watch
    tables = (watch.totals, watch.nodes_table, watch.topics, watch.channels, watch.clients)

    def poll_until(end: int) -> None:
        for number in range(watch.number, end):
            clients = [{"remote_address": f"1.2.3.4:{number // 12 * 10 + one}"} for one in range(3)]
            polls.poll(said(number, channel(clients=clients), name=f"t{number // 12}"))

    def held() -> tuple[list[int], int]:
        gc.collect()
        return [table.size_bytes for table in tables], tracemalloc.get_traced_memory()[0]

    tracemalloc.start(1)
    try:
        # By then what was there at first is forgotten, and its places are used again.
        poll_until(400)
        rings, in_use = held()
        poll_until(1000)
        rings_later, in_use_later = held()
    finally:
        tracemalloc.stop()
    assert rings_later == rings
    assert sum(rings) <= 1 << 26
    # Six hundred polls that left a hundred bytes each would be more.
    assert in_use_later - in_use < 60_000
    assert all(len(table) < 300 for table in tables)


def test_messages_that_stay_do_not_count_as_finished() -> None:
    polls = Polls()
    polls.poll(said(0, channel(message_count=0, depth=0)))
    polls.poll(said(100, channel(message_count=100, depth=60, in_flight_count=10)))
    assert (polls.channel()["in_rate"], polls.channel()["out_rate"]) == (20, 6)


def test_a_restart_makes_no_jump_in_the_rate() -> None:
    polls = Polls()
    polls.poll(said(1000, channel(message_count=1000)))
    polls.poll(said(10, channel(message_count=10)))
    assert polls.channel()["in_rate"] == 2


def test_sums_are_unknown_while_a_node_does_not_answer_and_do_not_jump_after() -> None:
    polls = Polls()
    polls.poll(said(100, channel(message_count=100)), said(100, channel(message_count=100)))
    polls.poll(said(110, channel(message_count=110)), None)
    assert all(math.isnan(value) for value in polls.channel().values())
    polls.poll(said(120, channel(message_count=120)), said(120, channel(message_count=120)))
    assert polls.channel()["in_rate"] == 2 + 2


def test_a_field_that_is_not_a_number_counts_as_0() -> None:
    polls = Polls()
    odd = channel(depth="many", message_count=None, client_count={"x": 1}, in_flight_count=1e400)
    polls.poll(said(1, odd, channel("d", depth=5)), {"topics": "none"})
    assert polls.channel()["depth"] == 0
    assert (polls.watch.channels.latest(("t", "d")) or {})["depth"] == 5


def test_latencies_are_the_highest_of_all_nodes() -> None:
    polls = Polls()

    def latency(high: int) -> dict[str, Any]:
        values = [{"quantile": 0.99, "value": high}, {"quantile": 0.5, "value": 1_000_000}]
        return channel(e2e_processing_latency={"count": 3, "percentiles": values})

    polls.poll(said(1, latency(2_000_000_000)), said(1, latency(5_000_000_000)))
    assert (polls.channel()["latency"], polls.channel()["median"]) == (5.0, 0.001)


def test_a_node_that_was_never_seen_makes_nothing_unknown() -> None:
    polls = Polls()
    polls.poll(said(1, channel()), None)
    assert polls.channel()["depth"] == 0


# Problems


def kinds(polls: Polls) -> dict[str, Severity]:
    return {one.kind: one.severity for one in find_problems(polls.watch)}


def test_a_healthy_cluster_has_no_problems() -> None:
    polls = Polls()
    for number in range(20):
        polls.poll(said(number * 10, channel(message_count=number * 10, client_count=1)))
    assert kinds(polls) == {}


def test_a_channel_without_consumers_is_a_notice_and_a_warning_when_it_grows() -> None:
    polls = Polls()
    polls.poll(said(5, channel(depth=5)))
    assert kinds(polls) == {"no consumers": Severity.NOTICE}
    for number in range(20):
        polls.poll(said(number * 100, channel(message_count=number * 100, depth=number * 100)))
    assert kinds(polls) == {"no consumers": Severity.WARNING}


def test_a_channel_that_spark_reads_is_not_without_consumers() -> None:
    """Spark commits what it has read; nsqd counts no consumer."""
    polls = Polls()
    for number in range(20):
        polls.poll(said(number * 100, channel(message_count=number * 100, depth=50)))
    assert kinds(polls) == {}
    for _ in range(20):
        polls.poll(said(1900, channel(message_count=1900, depth=50)))
    assert kinds(polls) == {"no consumers": Severity.NOTICE}
    running = {"name": "p", "state": "running", "channels": {"c": "other, t"}}
    assert find_problems(polls.watch, [running]) == []
    (problem,) = find_problems(polls.watch, [{**running, "state": "stopped"}])
    assert problem.kind == "no consumers"


def test_a_spark_reader_that_falls_behind_is_found() -> None:
    polls = Polls()
    for number in range(20):
        polls.poll(said(number * 100, channel(message_count=number * 100, depth=number * 50)))
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("growing", Severity.WARNING)
    assert "by a pipeline or another reader of the log" in problem.detail


def test_consumers_that_fall_behind_are_found() -> None:
    polls = Polls()
    for number in range(20):
        grown = channel(message_count=number * 100, depth=number * 50, client_count=2)
        polls.poll(said(number * 100, grown))
    assert kinds(polls) == {"growing": Severity.WARNING}
    (problem,) = find_problems(polls.watch)
    assert "950 waiting, +10.0/s" in problem.detail


def test_timeouts_and_consumers_that_finish_nothing_are_found() -> None:
    polls = Polls()
    for number in range(20):
        stuck = channel(depth=7, in_flight_count=2, client_count=1, timeout_count=0)
        polls.poll(said(number, stuck))
    assert kinds(polls) == {"stuck": Severity.WARNING}
    for number in range(5):
        polls.poll(said(20, channel(depth=7, in_flight_count=2, client_count=1, timeout_count=number)))
    assert "timeouts" in kinds(polls)


def test_nodes_that_do_not_answer_or_are_unhealthy_come_first() -> None:
    polls = Polls()
    polls.poll(said(5, channel(depth=5)), {"topics": [], "health": "NOK - disk full"})
    polls.watch.nodes["h1:4151"].error = "timed out"
    found = find_problems(polls.watch)
    assert {one.kind for one in found[:2]} == {"unreachable", "unhealthy"}
    assert all(one.severity is Severity.CRITICAL for one in found[:2])


def test_a_disk_that_is_nearly_full_is_found() -> None:
    polls = Polls()
    polls.watch.nodes["h1:4151"].disk_free = 3
    polls.watch.nodes["h1:4151"].disk_size = 100
    polls.poll(said(1, channel()))
    assert kinds(polls) == {"disk": Severity.CRITICAL}


def test_lost_messages_are_critical() -> None:
    polls = Polls()
    polls.poll(said(5, channel(), corrupt_messages=2, dropped_count=1))
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("lost", Severity.CRITICAL)
    assert problem.detail.startswith("3 since")


def test_many_problems_of_a_kind_are_counted_and_not_listed() -> None:
    polls = Polls()
    polls.poll(said(1, *(channel(f"c{number}", depth=1) for number in range(150))))
    found = find_problems(polls.watch)
    assert len(found) == 101 and "50 more" in found[-1].detail
