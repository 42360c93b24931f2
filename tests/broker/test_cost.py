"""Cost grows with work only: what is idle costs nothing, an answer the same whatever is in flight."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from nsparq.broker.channel import Channel
from nsparq.broker.topic import Topic
from nsparq.storage.log import Log
from nsparq.storage.memory import MemoryLog
from tests.broker.rig import Rig, bodies

MakeRig = Callable[..., Rig]

# What upkeep does to a topic or a channel.
TOUCHES = [
    (Topic, ["reclaim", "low", "flush", "bound", "save_channel", "stats"]),
    (
        Channel,
        ["expire", "next_event", "pump", "snapshot", "low", "carry_over", "drop_carried", "_unfinished"],
    ),
    (Log, ["trim", "release_files", "sealed_segments", "begin_sync", "append", "read"]),
    (MemoryLog, ["trim", "append", "read"]),
]


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of everything in TOUCHES."""
    calls: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
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


# A durable topic takes a while to make; it is counts that are compared, so fewer of them say as much.
@pytest.mark.parametrize(("number", "suffix"), [(2_000, ""), (10_000, "#ephemeral")])
def test_idle_topics_are_touched_by_nothing(rig: Rig, touched: Counter[str], number: int, suffix: str):
    for i in range(number):
        rig.channel("c", f"idle{i}{suffix}")
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
    assert not rig.broker._used
    assert not rig.broker._with_files, "nor are they gone through in search of something to do"


def test_idle_topics_that_have_been_used_are_touched_by_nothing(rig: Rig, touched: Counter[str]):
    for number in range(300):
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

    assert work(1000) == work(1)


def test_one_channel_of_many_that_times_out_is_the_only_one_looked_at(rig: Rig, touched: Counter[str]):
    for number in range(100):
        rig.subscribe(f"t{number}", rdy=1, msg_timeout_ms=60_000)
        rig.publish(f"t{number}", b"x")
    rig.subscribe("hasty", rdy=1, msg_timeout_ms=1000)
    rig.publish("hasty", b"x")
    touched.clear()
    rig.pass_time(1)
    assert touched["Channel.expire"] == 1
    assert touched["Channel.pump"] == 1


def cost_of(make_rig: MakeRig, in_flight: int, act: Callable[[Rig, list], None]) -> float:
    """Seconds that `act` takes with 200 messages spread over `in_flight` unanswered ones."""
    best = 1e9
    for _ in range(3):
        rig = make_rig()
        client = rig.subscribe(msg_timeout_ms=60_000)
        client.channel.set_ready(client, in_flight)
        for start in range(0, in_flight, 20):
            rig.send("t", *bodies(20, start=start))
            rig.turn()
        chosen = client.messages[:: in_flight // 200][:200]
        started = time.process_time()
        act(rig, [(client, message.id) for message in chosen])
        best = min(best, time.process_time() - started)
        rig.drop()
    return best


def finish_each(rig: Rig, chosen: list) -> None:
    for client, message_id in chosen:
        client.channel.finish(client, [(message_id, message_id + 1)], rig.clock())


def touch_each(rig: Rig, chosen: list) -> None:
    for client, message_id in chosen:
        client.channel.touch(client, message_id, rig.clock())


def expire_some(rig: Rig, chosen: list) -> None:
    channel = chosen[0][0].channel
    rig.clock.advance(60)
    for _ in chosen:
        assert channel.expire(rig.clock(), 1) == 1


@pytest.mark.parametrize("act", [finish_each, touch_each, expire_some])
def test_an_answer_costs_the_same_whatever_is_in_flight(make_rig: MakeRig, act: Callable[[Rig, list], None]):
    # Twenty times as many in flight; a linear cost would be twenty times as high.
    assert cost_of(make_rig, 20_000, act) < 6 * cost_of(make_rig, 1_000, act)
