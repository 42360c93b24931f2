"""The loads: each puts one kind of work on a broker and gives figures, by name, for one round."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np

from benchmarks.macro.brokers import Broker, Spawned
from benchmarks.macro.crew import Crew, LoadFailed
from benchmarks.macro.roles import Span, first_message
from benchmarks.macro.wire import create_channel, with_headers

CHANNEL = "load"
_serial = itertools.count()


class Figure(NamedTuple):
    value: float
    unit: str


Figures = dict[str, Figure]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Everything that shapes the loads; printed before any figure. Each is a flag of the same
    name."""

    messages: int = 2_000_000
    backlog_messages: int = 2_000_000
    fanout_messages: int = 1_000_000
    single_messages: int = 200_000
    memory_messages: int = 5_000_000
    idle_topics: int = 10_000
    size: int = 200
    batch: int = 200
    producers: int = 2
    consumers: int = 2
    rdy: int = 2500
    window: int = 1
    encode: bool = False
    headers: bool = False
    channels: int = 8
    connections: int = 16
    latency_seconds: float = 5.0
    idle_seconds: float = 10.0
    deadline: float = 120.0
    rounds: int = 3


@dataclass
class Round:
    """One round of one load on one broker, and the pieces that loads are made of."""

    broker: Broker
    crew: Crew
    parameters: Parameters
    topic: str = field(default_factory=lambda: fresh_name())

    def publishers(self, count: int, topic: str | None = None) -> list[tuple[str, dict[str, Any]]]:
        p = self.parameters
        return [
            (
                "Publisher",
                {
                    "address": self.broker.address,
                    "topic": topic or self.topic,
                    "count": share,
                    "size": p.size,
                    "batch": p.batch,
                    "window": p.window,
                    "encode": p.encode,
                    "headers": p.headers,
                    "deadline": p.deadline,
                },
            )
            for share in shares(count, p.producers)
        ]

    def consumers(
        self, total: int, subscriptions: Sequence[Sequence[tuple[str, str]]], **more: float
    ) -> list[tuple[str, dict[str, Any]]]:
        """A consuming process for each list of subscriptions; `total` is what all of them are to
        receive."""
        p = self.parameters
        return [
            (
                "Consumer",
                {
                    "address": self.broker.address,
                    "subscriptions": wanted,
                    "size": p.size,
                    "rdy": p.rdy,
                    "total": total,
                    "slot": slot,
                    "headers": p.headers,
                    "deadline": p.deadline,
                    **more,
                },
            )
            for slot, wanted in enumerate(subscriptions)
        ]

    def work(self, roles: Sequence[tuple[str, dict[str, Any]]]) -> list[Span]:
        return self.crew.work(roles, self.parameters.deadline)

    def cpu_seconds(self) -> float | None:
        """Processor time that the broker has used; None for one that the tool has not started."""
        return self.broker.cpu_seconds() if isinstance(self.broker, Spawned) else None

    def create_channel(self, channel: str = CHANNEL) -> None:
        create_channel(self.broker.address, self.topic, channel)

    def publish(self, count: int, topic: str | None = None) -> float:
        return rate(count, self.work(self.publishers(count, topic)))

    def consume(self, count: int) -> float:
        p = self.parameters
        every = [[(self.topic, CHANNEL)]] * p.consumers
        spans = self.work(self.consumers(count, every))
        check_delivery(spans, count)
        return consumed_rate(spans, p.rdy * p.consumers)


def fresh_name() -> str:
    """A topic name no broker has seen: what an earlier round left on an external one must not
    matter."""
    return f"bench_{os.getpid()}_{time.time_ns():x}_{next(_serial)}"


def shares(count: int, parts: int) -> list[int]:
    return [count // parts + (number < count % parts) for number in range(parts)]


def rate(count: int, spans: Sequence[Span]) -> float:
    """Messages per second from the first moment of any process to the last of all."""
    busy = [span for span in spans if span.count]
    elapsed_ns = max(span.last_ns for span in busy) - min(span.first_ns for span in busy)
    return count / (elapsed_ns / 1e9)


def consumed_rate(spans: Sequence[Span], tail: int) -> float:
    """Messages per second from the first moment of any process until all but the last `tail` are
    finished.

    A broker may hold back the last few messages for as long as the consumer's output buffer timeout
    (250 ms unless asked otherwise) in the hope of more. That says nothing of how fast it delivers,
    so the end of the run is left out.
    """
    arrivals = np.array(sorted(arrival for span in spans for arrival in span.arrivals), np.int64)
    finished = np.cumsum(arrivals[:, 1])
    whole = int(finished[-1])
    cut = int(np.searchsorted(finished, whole - min(tail, whole // 10)))
    elapsed_ns = int(arrivals[cut, 0]) - min(span.first_ns for span in spans if span.count)
    return int(finished[cut]) / (elapsed_ns / 1e9)


def check_delivery(spans: Sequence[Span], count: int) -> None:
    """Every channel must have delivered each message exactly once."""
    for name in sorted({name for span in spans for name in span.ids}):
        ids = np.concatenate([span.ids[name] for span in spans if name in span.ids])
        distinct = len(np.unique(ids))
        if (len(ids), distinct) != (count, count):
            raise LoadFailed(f"{name}: {len(ids)} messages, {distinct} distinct ids, expected {count}")


def publish(run: Round) -> Figures:
    return {"publish": Figure(run.publish(run.parameters.messages), "msg/s")}


def consume(run: Round) -> Figures:
    run.create_channel()
    run.publish(run.parameters.messages)
    return {"consume": Figure(run.consume(run.parameters.messages), "msg/s")}


def both(run: Round) -> Figures:
    p = run.parameters
    run.create_channel()
    consumers = run.consumers(p.messages, [[(run.topic, CHANNEL)]] * p.consumers)
    spans = run.work(consumers + run.publishers(p.messages))
    check_delivery(spans, p.messages)
    return {"both": Figure(consumed_rate(spans, p.rdy * p.consumers), "msg/s")}


def backlog(run: Round) -> Figures:
    count = run.parameters.backlog_messages
    run.create_channel()
    published = run.publish(count)
    return {
        "backlog publish": Figure(published, "msg/s"),
        "backlog consume": Figure(run.consume(count), "msg/s"),
    }


def fanout8(run: Round) -> Figures:
    """Every message to several channels: consumed while it is published; or piled up first, then
    consumed."""
    p = run.parameters
    channels = [f"channel{number}" for number in range(p.channels)]
    figures: Figures = {}
    for label, piled_up in (("fanout8, live", False), ("fanout8, piled up", True)):
        topic = fresh_name()
        for channel in channels:
            create_channel(run.broker.address, topic, channel)
        pairs = [(topic, channel) for channel in channels]
        spread = [pairs[part :: p.consumers] for part in range(min(p.consumers, p.channels))]
        consumers = run.consumers(p.fanout_messages * p.channels, spread)
        publishers = run.publishers(p.fanout_messages, topic)
        used = run.cpu_seconds()
        spans = run.work(publishers) + run.work(consumers) if piled_up else run.work(consumers + publishers)
        check_delivery(spans, p.fanout_messages)
        figures[label] = Figure(consumed_rate(spans, p.rdy * p.channels) / p.channels, "msg/s")
        if used is not None:
            spent = (run.cpu_seconds() or 0.0) - used
            figures[f"{label}, broker CPU"] = Figure(1e6 * spent / (p.fanout_messages * p.channels), "us")
    return figures


def publish_single(run: Round) -> float:
    p = run.parameters
    roles = [
        (
            "SinglePublisher",
            {
                "address": run.broker.address,
                "topic": run.topic,
                "count": count,
                "size": p.size,
                "connections": connections,
                "headers": p.headers,
                "deadline": p.deadline,
            },
        )
        for count, connections in zip(
            shares(p.single_messages, p.producers), shares(p.connections, p.producers), strict=True
        )
    ]
    return rate(p.single_messages, run.work(roles))


def single_pub(run: Round) -> Figures:
    return {"single_pub": Figure(publish_single(run), "msg/s")}


HEADER_PASSES = 9


def headers(run: Round) -> Figures:
    """What headers cost: messages of the same size with and without one, in short passes in turn,
    on one broker. The size counts the header. The processor time of the broker varies less than the
    rate on a busy machine."""
    p = run.parameters
    header_bytes = len(with_headers(b""))
    rates: dict[tuple[str, bool], list[float]] = defaultdict(list)
    costs: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for number in range(HEADER_PASSES):
        for has_headers in (False, True) if number % 2 == 0 else (True, False):
            part = replace(
                p,
                headers=has_headers,
                size=max(1, p.size - header_bytes) if has_headers else p.size,
                messages=max(1, p.messages // HEADER_PASSES),
                single_messages=max(1, p.single_messages // HEADER_PASSES),
            )
            one = Round(run.broker, run.crew, part)
            one.create_channel()
            steps: dict[str, Callable[[], float]] = {
                "publish": partial(one.publish, part.messages),
                "consume": partial(one.consume, part.messages),
                "single_pub": partial(publish_single, Round(run.broker, run.crew, part)),
            }
            for name, step in steps.items():
                used = run.cpu_seconds()
                rates[name, has_headers].append(step())
                if used is not None:
                    costs[name, has_headers].append((run.cpu_seconds() or 0.0) - used)
    figures: Figures = {}
    for name in ("publish", "consume", "single_pub"):
        figures[f"{name}, no headers"] = Figure(statistics.median(rates[name, False]), "msg/s")
        figures[f"{name}, a header"] = Figure(statistics.median(rates[name, True]), "msg/s")
        share = median_ratio(rates[name, True], rates[name, False])
        figures[f"{name}, a header, share"] = Figure(share, "of 1")
        if costs[name, True]:
            cost = median_ratio(costs[name, True], costs[name, False])
            figures[f"{name}, a header, ratio of broker CPU"] = Figure(cost, "x")
    return figures


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Of pairs that were measured one after the other."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def latency(run: Round) -> Figures:
    p = run.parameters
    figures: Figures = {}
    for per_second in (200, 1000):
        topic = fresh_name()
        count = max(1, int(per_second * p.latency_seconds))
        common = {"address": run.broker.address, "topic": topic, "size": p.size, "deadline": p.deadline}
        reader = ("StampReader", {**common, "channel": CHANNEL, "rdy": p.rdy, "total": count})
        writer = ("PacedPublisher", {**common, "count": count, "rate": per_second})
        latencies = run.work([reader, writer])[0].latencies_ns
        assert latencies is not None
        p50, p99 = np.percentile(latencies, [50, 99]) / 1e6
        figures[f"latency at {per_second}/s, p50"] = Figure(float(p50), "ms")
        figures[f"latency at {per_second}/s, p99"] = Figure(float(p99), "ms")
    return figures


POLICIES: dict[str, dict[str, Any] | None] = {
    "no policy": None,
    "no policy again": None,
    "a policy": {"retry_delay": 5},
    "a policy with expiry": {"retry_delay": 5, "expire_after": 86400},
}
"""The second shows how far the others can be trusted: its ratio to the first is noise."""
POLICY_PASSES = 25


def policy(run: Round) -> Figures:
    """What a delivery policy costs a channel whose messages do not fail: the same work with and
    without one, in many short passes in turn, on one broker. A pass is so short that the machine
    is mostly as busy in the next one, and the ratio of the two says little of it."""
    p, broker = run.parameters, run.broker
    assert isinstance(broker, Spawned)
    whole = replace(p, messages=max(1, p.messages // 25))
    single = replace(p, messages=max(1, p.messages // 250), batch=1)
    figures: Figures = {}
    for mode, parameters in (("batches", whole), ("single messages", single)):
        times: dict[str, list[float]] = {label: [] for label in POLICIES}
        for number in range(POLICY_PASSES):
            # Each comes first, second … equally often.
            first = number % len(POLICIES)
            for label in [*POLICIES][first:] + [*POLICIES][:first]:
                one = Round(broker, run.crew, parameters)
                times[label].append(policy_pass(one, broker, POLICIES[label]))
        without, *others = POLICIES
        base = times[without]
        figures[f"{mode}, {without}, broker CPU"] = Figure(statistics.median(base), "us")
        for label in others:
            ratios = [with_it / alone for with_it, alone in zip(times[label], base, strict=True)]
            low, high = median_range(ratios)
            figures[f"{mode}, {label}, ratio of CPU"] = Figure(statistics.median(ratios), "x")
            figures[f"{mode}, {label}, ratio, at least"] = Figure(low, "x")
            figures[f"{mode}, {label}, ratio, at most"] = Figure(high, "x")
    return figures


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies, with a probability of 95 %. It needs no assumption about the
    noise: each value is above the true median as often as below it, like the two sides of a
    coin."""
    ordered, count = sorted(values), len(values)
    skipped = max(0, int(count / 2 - 0.98 * math.sqrt(count)) - 1)
    return ordered[skipped], ordered[-1 - skipped]


def policy_pass(run: Round, broker: Spawned, values: dict[str, Any] | None) -> float:
    """Processor time of the broker for a message that is published and consumed, in
    microseconds."""
    p = run.parameters
    run.create_channel()
    set_policy(broker, run.topic, values)
    used = broker.cpu_seconds()
    consumers = run.consumers(p.messages, [[(run.topic, CHANNEL)]] * p.consumers)
    check_delivery(run.work(consumers + run.publishers(p.messages)), p.messages)
    return 1e6 * (broker.cpu_seconds() - used) / p.messages


def set_policy(broker: Spawned, topic: str, values: dict[str, Any] | None) -> None:
    host, port = broker.http_address
    url = f"http://{host}:{port}/channel/settings?topic={topic}&channel={CHANNEL}"
    urlopen(Request(url, json.dumps({"policy": values}).encode(), method="PUT"), timeout=10).close()


def memory(run: Round) -> Figures:
    """Memory with a small and a large backlog, a hard and a clean restart with the large one, its
    end."""
    p, broker = run.parameters, run.broker
    assert isinstance(broker, Spawned)
    figures: Figures = {}
    run.create_channel()
    published = 0
    for count in (p.memory_messages // 5, p.memory_messages):
        run.publish(count - published)
        published = count
        time.sleep(1.0)
        figures[f"memory, {count:,} messages"] = Figure(broker.memory_mib()["VmRSS"], "MiB")
    figures["memory, without mapped files"] = Figure(broker.memory_mib()["RssAnon"], "MiB")
    figures["memory, peak"] = Figure(broker.memory_mib()["VmHWM"], "MiB")
    # The hard end comes first, when nothing but the publishing itself has put the backlog on the
    # disk.
    for label in ("restart after kill -9", "restart after clean stop"):
        if label.endswith("kill -9"):
            broker.kill()
        else:
            figures["clean stop"] = Figure(broker.stop(), "s")
        began = time.monotonic()
        figures[f"{label}, listening"] = Figure(broker.start(), "s")
        first_message(broker.address, run.topic, CHANNEL, p.deadline)
        figures[f"{label}, first message"] = Figure(time.monotonic() - began, "s")
    every = [[(run.topic, CHANNEL)]] * p.consumers
    spans = run.work(run.consumers(p.memory_messages, every, idle_seconds=5.0))
    ids = np.concatenate([ids for span in spans for ids in span.ids.values()])
    distinct = len(np.unique(ids))
    figures["delivered after both restarts"] = Figure(distinct / p.memory_messages * 100, "%")
    figures["delivered more than once"] = Figure(len(ids) - distinct, "messages")
    figures["drained after both restarts"] = Figure(consumed_rate(spans, p.rdy * p.consumers), "msg/s")
    figures["memory, peak while draining"] = Figure(broker.memory_mib()["VmHWM"], "MiB")
    return figures


def idle(run: Round) -> Figures:
    """What many topics that do nothing cost, in CPU and in the speed of one that does."""
    p, broker = run.parameters, run.broker
    assert isinstance(broker, Spawned)
    figures: Figures = {}
    existing = 0
    for topics in (1, p.idle_topics):
        began = time.monotonic()
        for _ in range(topics - existing):
            create_channel(broker.address, fresh_name(), CHANNEL)
        if existing:
            figures["creating topics"] = Figure((topics - existing) / (time.monotonic() - began), "topics/s")
            figures["then settled after"] = Figure(settle(broker), "s")
        existing = topics
        before = broker.cpu_seconds()
        time.sleep(p.idle_seconds)
        used = broker.cpu_seconds() - before
        figures[f"CPU in {p.idle_seconds:g} s, {topics:,} idle"] = Figure(used, "s")
        figures[f"memory, {topics:,} idle"] = Figure(broker.memory_mib()["VmRSS"], "MiB")
        figures[f"publish, {topics:,} idle"] = Figure(run.publish(p.messages, fresh_name()), "msg/s")
    return figures


def settle(broker: Spawned, limit: float = 30.0) -> float:
    """Wait until CPU use no longer changes from second to second; gives how long that took."""
    began = time.monotonic()
    samples = [broker.cpu_seconds()]
    while time.monotonic() - began < limit:
        time.sleep(1.0)
        samples.append(broker.cpu_seconds())
        used = np.diff(samples[-4:])
        if len(used) == 3 and used.max() - used.min() <= 0.03:
            break
    return time.monotonic() - began


@dataclass(frozen=True)
class Load:
    """A load and how it is run."""

    run: Callable[[Round], Figures]
    peer_in_memory: bool  # a peer that the tool starts gets a memory queue that holds all of it
    needs_process: bool = False  # measures or restarts the process, so an external broker cannot have it
    once: bool = False  # long, and not a matter of chance: one round is enough


LOADS = {
    "publish": Load(publish, peer_in_memory=True),
    "consume": Load(consume, peer_in_memory=True),
    "both": Load(both, peer_in_memory=True),
    "backlog": Load(backlog, peer_in_memory=False),
    "fanout8": Load(fanout8, peer_in_memory=False),
    "single_pub": Load(single_pub, peer_in_memory=True),
    "headers": Load(headers, peer_in_memory=True),
    "latency": Load(latency, peer_in_memory=True),
    "policy": Load(policy, peer_in_memory=False, needs_process=True),
    "memory": Load(memory, peer_in_memory=False, needs_process=True, once=True),
    "idle": Load(idle, peer_in_memory=False, needs_process=True, once=True),
}
