"""What the overview lists under "Needs attention", and in which order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nsparq.admin.health import Severity, find_problems
from tests.admin.polls import Polls, channel, said


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
    assert "by a pipeline or another reader" in problem.detail


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
    for number in range(20):
        slow = channel(
            message_count=number * 20, depth=7, in_flight_count=2, client_count=1, timeout_count=number * 3
        )
        polls.poll(said(number * 20, slow))
    assert kinds(polls) == {"timeouts": Severity.WARNING}


def test_nodes_that_do_not_answer_or_are_unhealthy_come_first() -> None:
    polls = Polls()
    polls.poll(said(5, channel(depth=5)), {"topics": [], "health": "NOK - disk full"})
    polls.watch.nodes["h1:4151"].error = "timed out"
    found = find_problems(polls.watch)
    assert {one.kind for one in found[:2]} == {"unreachable", "unhealthy"}
    assert all(one.severity is Severity.CRITICAL for one in found[:2])


def test_nodes_with_one_address_are_not_said_to_be_silent() -> None:
    polls = Polls()
    polls.poll(said(5), said(5))
    polls.watch.errors = ["a and b both announce h1:4151"]
    (found,) = find_problems(polls.watch)
    assert (found.severity, found.title) == (Severity.WARNING, "two nodes have one address")


# What the overview must not hide


def test_a_backlog_that_grows_evenly_stays_listed_however_large_it_is() -> None:
    polls = Polls()
    for number in range(61):
        grown = channel(message_count=number * 100, depth=5_000_000 + number * 50, client_count=2)
        polls.poll(said(number * 100, grown))
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("growing", Severity.WARNING)
    assert "5,003,000 waiting, +10.0/s" in problem.detail


def test_a_depth_that_goes_up_and_down_is_no_growth() -> None:
    polls, chance = Polls(), random.Random(5)
    for number in range(200):
        busy = channel(message_count=number * 10_000, depth=chance.randrange(2000), client_count=2)
        polls.poll(said(number * 10_000, busy))
        assert kinds(polls) == {}


def test_a_backlog_of_a_few_messages_is_no_growth() -> None:
    polls = Polls()
    for number in range(61):
        grown = channel(message_count=number * 20, depth=number, client_count=2)
        polls.poll(said(number * 20, grown))
    assert kinds(polls) == {}


def test_a_backlog_that_takes_hours_to_drain_is_a_notice_with_that_time() -> None:
    polls = Polls()
    for number in range(61):
        drained = channel(message_count=0, depth=1_003_000 - number * 50, client_count=2)
        polls.poll(said(0, drained))
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("lagging", Severity.NOTICE)
    assert "1,000,000 waiting" in problem.detail and "drains in 28 h" in problem.detail


def test_a_message_that_waits_too_long_is_a_warning_however_short_the_backlog() -> None:
    """Consumers that finish as much as arrives never reach the oldest message."""
    polls = Polls()
    for number in range(61):
        late = channel(message_count=number * 50, depth=7, client_count=2, oldest_message_age_s=599.0)
        polls.poll(said(number * 50, late))
    assert kinds(polls) == {}
    for number in range(61, 70):
        late = channel(message_count=number * 50, depth=7, client_count=2, oldest_message_age_s=10_800.0)
        polls.poll(said(number * 50, late))
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("lagging", Severity.WARNING)
    assert problem.detail.startswith("7 waiting, the oldest for 3 h; 10.0/s arrive, 10.0/s are finished")


def test_of_problems_of_one_kind_the_one_with_the_most_messages_comes_first() -> None:
    polls = Polls()
    polls.poll(
        said(0, channel("a", depth=5), channel("b", depth=500, deferred_count=9), channel("c", depth=50))
    )
    assert [one.channel for one in find_problems(polls.watch)] == ["b", "c", "a"]


def test_a_paused_channel_with_messages_is_listed_and_a_warning_when_it_grows() -> None:
    polls = Polls()
    for _ in range(20):
        polls.poll(said(70, channel(depth=70, deferred_count=3, client_count=1, paused=True)))
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("paused", Severity.NOTICE)
    assert "70 waiting, 3 deferred" in problem.detail
    for number in range(61):
        grown = channel(message_count=number * 50, depth=number * 50, client_count=1, paused=True)
        polls.poll(said(number * 50, grown))
    assert kinds(polls) == {"paused": Severity.WARNING}


def test_a_paused_channel_with_nothing_but_deferred_messages_is_listed() -> None:
    polls = Polls()
    for _ in range(20):
        polls.poll(said(3, channel(deferred_count=3, client_count=1, paused=True)))
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("paused", Severity.NOTICE)
    assert problem.detail == "0 waiting, 3 deferred"


def test_a_paused_topic_with_messages_is_listed_and_does_not_hide_its_channels() -> None:
    """A paused topic gives its channels nothing new. They still deliver what they have."""
    polls = Polls()
    for _ in range(20):
        stuck = channel(depth=7, in_flight_count=2, client_count=1)
        polls.poll(said(9, stuck, paused=True, depth=400))
    found = {one.kind: one for one in find_problems(polls.watch)}
    assert {*found} == {"paused", "stuck"}
    assert found["paused"].channel == "" and "400 waiting" in found["paused"].detail


def test_deferred_messages_are_in_the_totals() -> None:
    polls = Polls()
    polls.poll(said(9, channel(deferred_count=4)), said(9, channel(deferred_count=5)))
    assert (polls.watch.totals.latest(()) or {})["deferred"] == 9
    assert (polls.watch.topics.latest(("t",)) or {})["deferred"] == 9


def test_a_channel_where_everything_fails_comes_first() -> None:
    """Each message is requeued with a delay. So nothing waits and nothing is in flight."""
    polls = Polls()
    for number in range(20):
        failing = channel(deferred_count=2000, client_count=3, requeue_count=number * 20_772)
        grown = channel("d", depth=number * 500_000, message_count=number * 500_000, client_count=1)
        polls.poll(said(0, failing, grown))
    first, second = find_problems(polls.watch)
    assert (first.kind, first.severity, first.channel) == ("failing", Severity.CRITICAL, "c")
    assert "0 finished" in first.detail and "4,154.4/s requeued" in first.detail
    assert "2,000 deferred" in first.detail
    assert second.kind == "growing"


def test_one_message_that_always_fails_is_a_warning() -> None:
    polls = Polls()
    for number in range(20):
        polls.poll(said(1, channel(deferred_count=1, client_count=1, requeue_count=number)))
    assert kinds(polls) == {"failing": Severity.WARNING}


def disk(polls: Polls, free: int, device: str = "fd:1") -> None:
    for state in polls.watch.nodes.values():
        state.node = replace(state.node, hostname="one-host")
        state.disk_free, state.disk_size, state.disk_device = free, 1000, device


def test_nodes_that_share_a_disk_share_its_entry() -> None:
    polls = Polls()
    disk(polls, 30)
    polls.poll(said(1, channel()), said(1, channel()))
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("disk", Severity.CRITICAL)
    assert "h1:4151 and h2:4151" in problem.detail
    second = polls.watch.nodes["h2:4151"]
    second.disk_device = "fd:2"
    assert len(find_problems(polls.watch)) == 2
    # Another machine may have a disk of the same name.
    second.disk_device, second.node = "fd:1", replace(second.node, hostname="another-host")
    assert [one.node for one in find_problems(polls.watch)] == ["h1:4151", "h2:4151"]


def test_a_disk_is_forecast_from_half_an_hour_of_even_use() -> None:
    polls = Polls()

    def fill(minutes: int, free: Callable[[int], int]) -> None:
        for minute in range(minutes):
            disk(polls, free(minute))
            polls.poll(said(1, channel()), said(1, channel()), after_s=60)

    fill(29, lambda minute: 900 - minute)
    assert kinds(polls) == {}
    fill(11, lambda minute: 871 - minute)
    (problem,) = find_problems(polls.watch)
    assert (problem.kind, problem.severity) == ("disk", Severity.WARNING)
    assert "full in 14 h" in problem.detail
    # Space that comes and goes gives no forecast.
    fill(180, lambda minute: 900 - 200 * (minute % 10 == 9))
    assert kinds(polls) == {}
    fill(150, lambda minute: 900 - 9 * (minute % 75))
    assert kinds(polls) == {}


def test_a_few_points_give_no_forecast_however_far_apart_they_are() -> None:
    """The node did not answer for half an hour. Through two places there is always a line."""
    polls = Polls()
    for minute in range(57):
        disk(polls, 900 if minute < 3 else 850)
        answers = (None, None) if 3 <= minute < 40 else (said(1, channel()), said(1, channel()))
        polls.poll(*answers, after_s=60)
        assert kinds(polls) == {}, f"after {minute} minutes"


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


def of_cluster(role: str, *problems: str) -> dict[str, Any]:
    return {"replication": {"cluster": "orders", "node": role, "role": role, "problems": [*problems]}}


def test_a_degraded_cluster_is_a_warning_and_one_without_a_primary_is_critical() -> None:
    polls = Polls()
    polls.poll(of_cluster("primary"), of_cluster("follower"))
    assert kinds(polls) == {}
    # What a follower sees for a moment, its primary sees too.
    polls.poll(of_cluster("primary"), of_cluster("waiting", "node b waits for a primary"))
    assert kinds(polls) == {}
    polls.poll(of_cluster("primary", "node b is lost", "no other node can take over"), None)
    (problem,) = find_problems(polls.watch)
    assert (problem.severity, problem.node) == (Severity.WARNING, "h1:4151")
    assert problem.detail == "orders: node b is lost; no other node can take over"
    polls.poll(of_cluster("waiting", "node a waits for a primary"), of_cluster("follower"))
    assert kinds(polls) == {"replication": Severity.CRITICAL}


def test_a_node_whose_copy_serves_has_not_left_with_its_messages() -> None:
    polls = Polls()
    polls.poll({**said(5, channel(depth=5)), **of_cluster("primary")}, of_cluster("follower"))
    old = polls.watch.nodes["h1:4151"]
    old.error, old.left_s = "connection refused", polls.time_s
    polls.poll(None, of_cluster("primary"))
    assert kinds(polls) == {}
    # Nobody else has them.
    old.replication = None
    assert kinds(polls) == {"left": Severity.CRITICAL}


def archive(**fields: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("segments", "bytes", "waiting_segments", "waiting_bytes"), 0)
    return {"enabled": True, "replaced": False, **counts, "oldest_waiting_age_s": 0.0, "error": "", **fields}


def test_an_archive_that_fails_or_falls_behind_is_one_problem_of_its_node() -> None:
    polls = Polls()
    polls.poll(said(5, archive=archive(waiting_segments=1, waiting_bytes=1000, oldest_waiting_age_s=800.0)))
    assert kinds(polls) == {}
    waiting = {"waiting_segments": 3, "waiting_bytes": 3 * 10**8, "oldest_waiting_age_s": 7200.0}
    polls.poll(said(5, archive=archive(**waiting)))
    (problem,) = find_problems(polls.watch)
    assert (problem.title, problem.topic, problem.severity) == ("archive falls behind", "t", Severity.WARNING)
    assert problem.detail == "the oldest log file waits for 2 h; 300.0 MB wait on disk"
    failing = said(5, archive=archive(**waiting, error="t: cannot be archived: no room"))
    failing["topics"].append({**failing["topics"][0], "topic_name": "u"})
    polls.poll(failing)
    (problem,) = find_problems(polls.watch)
    assert (problem.title, problem.topic, problem.node) == ("archive fails", "", "h1:4151")
    assert problem.detail == "t: cannot be archived: no room; 600.0 MB wait on disk, of 2 topics"
    # A node that answers nonsense, and one that does not answer.
    polls.poll(said(5, archive=["on"]))
    assert kinds(polls) == {}
