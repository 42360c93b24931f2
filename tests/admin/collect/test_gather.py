"""Figures of several nsqds put together: sums, rates, restarts, nodes that do not answer."""

from __future__ import annotations

import gc
import math
import tracemalloc
from typing import Any

from tests.admin.polls import Polls, channel, said


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


def test_the_drain_time_of_a_channel_follows_from_its_depth_on_all_nodes() -> None:
    polls = Polls()

    def drain(*depths: int) -> tuple[float | None, float | None]:
        total = {"topic_name": "t", "channel_name": "c", "depth": sum(depths), "drain_time_s": None}
        polls.poll(*(said(0, channel(depth=depth)) for depth in depths))
        polls.watch.add_drain(total)
        return total["drain_rate"], total["drain_time_s"]  # type: ignore[return-value]  # it has been filled in

    assert drain(5000, 100) == (None, None), "one poll gives no rate"
    for number in range(60):
        found = drain(5000 - number * 40, 100 + number * 10)
    # Every 5 seconds 40 go on one node, and 10 come on the other.
    assert found == (6, (5000 - 59 * 40 + 100 + 59 * 10) / 6)
    for number in range(60):
        found = drain(3000 + number * 40, 100)
    assert found == (-8, None)
    assert drain(0, 0)[1] == 0


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
