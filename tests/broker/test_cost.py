"""Idle topics cost nothing, and the cost of an answer does not depend on the messages in flight."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from nsparq.broker import stats, upkeep
from nsparq.broker.carried_over import CarriedOver
from nsparq.broker.channel import Channel
from nsparq.broker.checkpoint import Checkpoint
from nsparq.broker.delivery import Delivery
from nsparq.broker.ephemeral import EphemeralBound
from nsparq.broker.runs import Run
from nsparq.broker.stats import broker_stats
from nsparq.broker.topic import Topic
from nsparq.broker.turn import Publishing
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.memory_log import MemoryLog
from tests.broker.rig import SECOND, Later, Rig, bodies

MakeRig = Callable[..., Rig]

# Methods that upkeep calls for a topic or a channel.
TOUCHES = [
    (Topic, ["low", "save_channel"]),
    (stats, ["topic_stats"]),
    (upkeep, ["reclaim"]),
    (Publishing, ["flush"]),
    (EphemeralBound, ["apply", "reclaim"]),
    (Channel, ["expire", "next_event", "low"]),
    (Delivery, ["pump"]),
    (Checkpoint, ["capture"]),
    (CarriedOver, ["begin", "drop_finished", "only_in_log"]),
    (DiskLog, ["trim", "release_files", "sealed_segments", "begin_sync", "append", "read"]),
    (MemoryLog, ["trim", "append", "read"]),
]


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of everything in TOUCHES."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(self, *args, **kwargs):
            calls[f"{owner.__name__}.{name}"] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for owner, names in TOUCHES:
        for name in names:
            count(owner, name)
    return calls


def settle(rig: Rig) -> None:
    for _ in range(4):
        rig.clock.advance(3)
        rig.maintain()
        rig.scan()


# Making topics takes a while. The test counts calls, so 200 topics show as much as 10,000 would.
@pytest.mark.parametrize("suffix", ["", "#ephemeral"])
def test_no_step_looks_at_idle_topics(rig: Rig, touched: Counter[str], suffix: str):
    for number in range(200):
        rig.channel("c", f"idle{number}{suffix}")
    settle(rig)
    touched.clear()
    rig.files.calls.clear()
    for _ in range(5):
        rig.clock.advance(1)
        rig.turn()
        rig.scan()
        rig.maintain()
    assert not touched
    assert not rig.files.calls
    assert not rig.broker.upkeep.changed
    assert not rig.broker.upkeep._with_files, "nor are they gone through in search of something to do"


def test_no_step_looks_at_topics_that_are_idle_again(rig: Rig, touched: Counter[str]):
    for number in range(50):
        client = rig.subscribe(f"t{number}", rdy=2)
        rig.publish(f"t{number}", *bodies(3))
        rig.publish(f"t{number}", b"in an hour", defer_ms=3_600_000)
        rig.finish(client, client.messages[0])
    settle(rig)
    touched.clear()
    rig.files.calls.clear()
    for _ in range(5):
        rig.clock.advance(1)
        rig.scan()
        rig.maintain()
    assert not touched
    assert not rig.files.calls


def test_a_busy_topic_costs_the_same_among_many_idle_ones(make_rig: MakeRig, touched: Counter[str]):
    def work(idle: int) -> Counter[str]:
        rig = make_rig()
        for number in range(idle):
            rig.channel("c", f"idle{number}")
        client = rig.subscribe("busy", rdy=10)
        settle(rig)
        touched.clear()
        for _ in range(20):
            rig.publish("busy", *bodies(3))
            rig.finish(client, *client.take())
            rig.clock.advance(0.1)
            rig.scan()
            rig.maintain()
        return Counter(touched)

    assert work(200) == work(1)


def test_the_scan_looks_only_at_the_channel_that_times_out(rig: Rig, touched: Counter[str]):
    for number in range(100):
        rig.subscribe(f"t{number}", rdy=1, msg_timeout_ms=60_000)
        rig.publish(f"t{number}", b"x")
    rig.subscribe("hasty", rdy=1, msg_timeout_ms=1000)
    rig.publish("hasty", b"x")
    touched.clear()
    rig.pass_time(1)
    assert touched["Channel.expire"] == 1
    assert touched["Delivery.pump"] == 1


def cost_of(make_rig: MakeRig, in_flight: int, act: Callable[[Rig, list], None]) -> float:
    """Seconds that `act` takes with 200 messages spread over `in_flight` unanswered ones, best of
    three."""
    rig = make_rig()
    client = rig.subscribe(msg_timeout_ms=60_000)
    client.channel.set_ready(client, in_flight)
    for start in range(0, in_flight, 20):
        rig.send("t", *bodies(20, start=start))
        rig.turn()
    best = 1e9
    for attempt in range(3):
        chosen = client.messages[attempt :: in_flight // 200][:200]
        started = time.process_time()
        act(rig, [(client, message.id) for message in chosen])
        best = min(best, time.process_time() - started)
    return best


def finish_each(rig: Rig, chosen: list) -> None:
    for client, message_id in chosen:
        client.channel.delivery.finish(client, [(message_id, message_id + 1)], rig.clock())


def touch_each(rig: Rig, chosen: list) -> None:
    for client, message_id in chosen:
        client.channel.delivery.touch(client, message_id, rig.clock())


def expire_some(rig: Rig, chosen: list) -> None:
    channel = chosen[0][0].channel
    rig.clock.advance(60)
    for _ in chosen:
        assert channel.expire(rig.clock(), 1) == 1


@pytest.mark.parametrize("act", [finish_each, touch_each, expire_some])
def test_an_answer_costs_the_same_whatever_is_in_flight(make_rig: MakeRig, act: Callable[[Rig, list], None]):
    # With twenty times as many in flight, a linear cost would be twenty times as high.
    assert cost_of(make_rig, 20_000, act) < 6 * cost_of(make_rig, 1_000, act)


class Lines:
    """Counts the lines of Python that the broker runs, because they block the event loop. Work that
    C does for many messages at once costs a hundredth of that."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        self.count += event == "line"
        return self._trace


HELD_LINES = 20_000
"""About 2 ms."""


MANY = 100_000
"""Unfinished messages."""


def pass_over(rig: Rig, topic: str = "t") -> list[int]:
    """Publish ten times MANY messages, and let the cursor pass them. Gives every tenth number."""
    channel = rig.channel(topic=topic)
    start = channel.cursor.position
    for _ in range(0, 10 * MANY, 2500):
        rig.publish(topic, *[b"a message"] * 2500)
        channel.cursor.jump(rig.topic(topic).log.end)
    channel.mark_changed()
    return [*range(start, channel.cursor.position, 10)]


def defer(channel: Channel, unfinished: list[int]) -> None:
    for sequence in unfinished:
        channel.defer(sequence, channel.topic.broker.monotonic_ns() + 3600 * SECOND, 1)


def put_back(channel: Channel, unfinished: list[int]) -> None:
    channel.unfinished.requeue(unfinished, 1)


def send_one_by_one(channel: Channel, unfinished: list[int]) -> None:
    (client,) = channel.clients
    deadline_ns = channel.topic.broker.monotonic_ns() + 3600 * SECOND
    for sequence in unfinished:
        channel.delivery.launch(Run(client, sequence, sequence + 1, sequence, 0, deadline_ns, 1, 0))


def send_in_runs(channel: Channel, unfinished: list[int]) -> None:
    """Every tenth message has not been answered."""
    (client,) = channel.clients
    deadline_ns = channel.topic.broker.monotonic_ns() + 3600 * SECOND
    for start in range(unfinished[0], unfinished[-1], 2500):
        run = Run(client, start, start + 2500, start, 0, deadline_ns, 1, 0)
        channel.delivery.launch(run)
        run.holes = {*range(start, start + 2500)} - {*range(start, start + 2500, 10)}
        channel.unfinished.in_flight._count -= len(run.holes)


@pytest.mark.parametrize("leave", [defer, send_one_by_one])
def test_no_step_of_upkeep_looks_at_each_of_many_unfinished_messages(
    make_rig: MakeRig, leave: Callable[[Channel, list[int]], None]
):
    later = Later()
    rig = make_rig(background=later, max_bytes_per_file=100 << 10, mem_queue_size=1000)
    client = rig.subscribe()
    unfinished = pass_over(rig)
    channel = rig.channel()
    leave(channel, unfinished)
    segments = rig.names("*.log")
    for _ in range(8):
        rig.clock.advance(1)
        channel.mark_changed()
        with Lines() as lines:
            rig.maintain()
        assert lines.count < HELD_LINES
        work = later.jobs
        later.jobs = []
        for do, then in work:
            do()
            with Lines() as lines:
                then()
            assert lines.count < HELD_LINES
    assert len(channel.carried_over.store.kept) >= 5000
    assert rig.names("*.log")[0] > segments[3], "the log has let go of what was carried over"
    assert sorted(channel.checkpoint.capture()().sequences.tolist()) == unfinished
    channel.unfinished.in_flight.clear()
    rig.disconnect(client)


@pytest.mark.parametrize("leave", [put_back, send_in_runs])
def test_no_step_of_upkeep_looks_at_each_of_many_unfinished_messages_in_memory(
    make_rig: MakeRig, leave: Callable[[Channel, list[int]], None]
):
    rig = make_rig(mem_queue_bytes=1 << 30, mem_queue_size=10 * MANY)
    client = rig.subscribe("t#ephemeral")
    unfinished = pass_over(rig, "t#ephemeral")
    channel = rig.channel(topic="t#ephemeral")
    leave(channel, unfinished)
    rig.broker.upkeep.note_changed(rig.topic("t#ephemeral"))
    for step in [rig.maintain, rig.broker.turn, rig.broker.turn]:
        before = len(channel.carried_over.store.kept)
        with Lines() as lines:
            step()
        assert lines.count < HELD_LINES
        assert len(channel.carried_over.store.kept) > before
    assert rig.topic("t#ephemeral").log.start > unfinished[0]
    rig.turn()
    assert len(channel.carried_over.store.kept) == MANY
    assert rig.topic("t#ephemeral").log.start == channel.cursor.position
    channel.unfinished.in_flight.clear()
    rig.disconnect(client)


def test_stats_count_what_waits_in_a_channel_once(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    counted: Counter[str] = Counter()
    original = Channel.depth

    def depth(self: Channel) -> int:
        counted[str(self)] += 1
        return original.__get__(self)

    for number in range(3):
        rig.channel(f"c{number}")
    rig.publish("t", b"x")
    monkeypatch.setattr(Channel, "depth", property(depth))
    broker_stats(rig.broker)
    assert counted == {"t:c0": 1, "t:c1": 1, "t:c2": 1}


def test_answering_after_a_slow_fsync_costs_the_same_for_each_publisher(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    for _ in range(1000):
        rig.send("t", b"x")
        rig.turn()
    for _ in range(2):
        with Lines() as lines:
            later.run()
        assert lines.count < HELD_LINES
    assert not later.jobs
