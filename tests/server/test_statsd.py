"""Pushes to statsd: names, kinds, order, increases, and packets."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from nsparq.server.statsd import Statsd, _Lines, expand_prefix, pack
from tests.broker.rig import Rig
from tests.support.polling import DEADLINE

MEMORY = [
    "mem.heap_objects",
    "mem.heap_idle_bytes",
    "mem.heap_in_use_bytes",
    "mem.heap_released_bytes",
    "mem.gc_pause_usec_100",
    "mem.gc_pause_usec_99",
    "mem.gc_pause_usec_95",
    "mem.next_gc_bytes",
    "mem.gc_runs",
]
CHANNEL = [
    "message_count",
    "depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "requeue_count",
    "timeout_count",
    "clients",
]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.drop()


def lines_of(lines: _Lines, rig: Rig, topic: str = "t") -> dict[str, str]:
    found = b"".join(lines.of_topic(rig.broker.topics[topic])).decode().splitlines()
    return dict(line.removeprefix(f"topic.{topic}.").split(":") for line in found)


# lines


def test_the_lines_of_a_topic_have_nsqs_order_and_kinds(tmp_path: Path) -> None:
    rig = Rig(tmp_path, e2e_processing_latency_percentile=(0.5, 0.95, 0.999))
    try:
        consumer = rig.subscribe("t", "b", rdy=1)
        rig.topic("t").get_channel("a#ephemeral")
        rig.publish("t", b"one", b"three")
        rig.pass_time(2)
        rig.finish(consumer, consumer.take()[0])
        rig.broker.turn()
        text = b"".join(_Lines("p.", False).of_topic(rig.topic("t"))).decode()
    finally:
        rig.drop()
    lines = text.splitlines(keepends=True)
    assert lines[:4] == [
        "p.topic.t.message_count:2|c\n",
        "p.topic.t.message_bytes:8|c\n",
        "p.topic.t.depth:0|g\n",
        "p.topic.t.backend_depth:0|g\n",
    ]
    names = [line.split(":")[0] for line in lines[4:]]
    latencies = [f"e2e_processing_latency_{percent}" for percent in (50, 95, 100)]
    assert names[:3] == [f"p.topic.t.{name}" for name in latencies]
    assert names[3:14] == [f"p.topic.t.channel.a#ephemeral.{name}" for name in CHANNEL + latencies]
    assert names[14:] == [f"p.topic.t.channel.b.{name}" for name in CHANNEL + latencies]
    assert lines[4 + 14 : 4 + 14 + 8] == [
        "p.topic.t.channel.b.message_count:2|c\n",
        "p.topic.t.channel.b.depth:0|g\n",
        "p.topic.t.channel.b.backend_depth:0|g\n",
        "p.topic.t.channel.b.in_flight_count:1|g\n",
        "p.topic.t.channel.b.deferred_count:0|g\n",
        "p.topic.t.channel.b.requeue_count:0|c\n",
        "p.topic.t.channel.b.timeout_count:0|c\n",
        "p.topic.t.channel.b.clients:1|g\n",
    ]
    of_latency = int(lines[-1].split(":")[1].removesuffix("|g\n"))
    assert of_latency == pytest.approx(2e9, rel=0.02), "nanoseconds"


def test_counters_are_the_increase_since_the_last_push(rig: Rig) -> None:
    lines = _Lines("", False)
    consumer = rig.subscribe("t", "c", rdy=10)
    rig.publish("t", b"xx", b"yy")
    first, second = consumer.take()
    rig.requeue(consumer, first, 1000)
    pushed = lines_of(lines, rig)
    assert (pushed["message_count"], pushed["message_bytes"]) == ("2|c", "4|c")
    assert (pushed["channel.c.message_count"], pushed["channel.c.requeue_count"]) == ("2|c", "1|c")
    assert (pushed["channel.c.deferred_count"], pushed["channel.c.in_flight_count"]) == ("1|g", "1|g")
    pushed = lines_of(lines, rig)
    assert (pushed["message_count"], pushed["message_bytes"]) == ("0|c", "0|c")
    assert (pushed["channel.c.message_count"], pushed["channel.c.requeue_count"]) == ("0|c", "0|c")
    assert pushed["channel.c.deferred_count"] == "1|g", "a gauge is what is"
    rig.publish("t", b"zzz")
    assert lines_of(lines, rig)["message_bytes"] == "3|c"
    assert second.attempts == 1


def test_a_topic_that_was_deleted_and_created_again_starts_at_zero(rig: Rig) -> None:
    lines = _Lines("", False)
    rig.topic("t").get_channel("c")
    rig.publish("t", b"1", b"2", b"3")
    assert lines_of(lines, rig)["channel.c.message_count"] == "3|c"
    rig.topic("t").delete_channel("c")
    rig.topic("t").get_channel("c")
    rig.publish("t", b"4", b"5", b"6", b"7")
    pushed = lines_of(lines, rig)
    assert (pushed["message_count"], pushed["channel.c.message_count"]) == ("4|c", "4|c")
    rig.broker.delete_topic("t")
    rig.publish("t", b"8")
    pushed = lines_of(lines, rig)
    assert (pushed["message_count"], pushed["message_bytes"]) == ("1|c", "1|c")


def test_deleted_topics_are_not_remembered(rig: Rig) -> None:
    lines = _Lines("", False)
    for number in range(50):
        name = f"t{number}"
        rig.topic(name).get_channel("c")
        lines_of(lines, rig, name)
        rig.broker.delete_topic(name)
    rig.broker.turn()
    gc.collect()  # they refer to each other
    assert len(lines._last) <= 2


def test_ephemeral_topics_and_channels_can_be_left_out(rig: Rig) -> None:
    rig.topic("t").get_channel("c#ephemeral")
    rig.topic("t").get_channel("d")
    rig.topic("e#ephemeral").get_channel("d")
    assert len(lines_of(_Lines("", False), rig, "e#ephemeral")) == 12
    assert len(lines_of(_Lines("", False), rig)) == 20
    lines = _Lines("", True)
    assert lines_of(lines, rig, "e#ephemeral") == {}
    names = lines_of(lines, rig)
    assert len(names) == 12
    assert "channel.d.depth" in names
    assert not any("#ephemeral" in name for name in names)


@pytest.mark.parametrize(
    ("template", "host", "expected"),
    [
        ("nsq.%s", "my.host", "nsq.my_host_4151."),
        ("nsq.%s.", "127.0.0.1", "nsq.127_0_0_1_4151."),
        ("%s/%s", "h", "h_4151/h_4151."),
        ("plain", "h", "plain."),
        ("", "h", ""),
        ("%s", "::1", "[__1]_4151."),
    ],
)
def test_the_prefix_names_the_node_and_ends_in_a_dot(template: str, host: str, expected: str) -> None:
    assert expand_prefix(template, host, 4151) == expected


# packets


def test_lines_are_packed_whole_and_as_many_as_fit() -> None:
    lines = [b"%03d\n" % number for number in range(10)]
    packets = [*pack(lines, 12)]
    assert [len(packet) for packet in packets] == [12, 12, 12, 4]
    assert b"".join(packets) == b"".join(lines)
    assert [*pack([], 12)] == []


def test_a_line_longer_than_a_packet_gets_its_own_packet() -> None:
    long = b"x" * 20 + b"\n"
    assert [*pack([b"a\n", long, b"b\n", b"c\n"], 10)] == [b"a\n", long, b"b\nc\n"]


# pushing

Run = Callable[[Awaitable[None]], None]


@pytest.fixture
def run() -> Run:
    return uvloop.run  # type: ignore[return-value]  # the daemon's event loop


class Listener(asyncio.DatagramProtocol):
    """A statsd daemon that records packets and their times."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.times: list[float] = []
        self.address = ""

    def datagram_received(self, data: bytes, address: object) -> None:
        self.packets.append(data)
        self.times.append(time.perf_counter())

    def names(self) -> list[str]:
        return [line.split(":")[0] for line in b"".join(self.packets).decode().splitlines()]


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    loop = asyncio.get_running_loop()
    transport, listener = await loop.create_datagram_endpoint(Listener, local_addr=("127.0.0.1", 0))
    listener.address = "127.0.0.1:{}".format(transport.get_extra_info("sockname")[1])
    try:
        async with asyncio.timeout(DEADLINE):
            yield listener
    finally:
        transport.close()


@asynccontextmanager
async def pushing(statsd: Statsd) -> AsyncIterator[None]:
    await statsd.start()
    try:
        yield
    finally:
        await statsd.stop()


async def until(fact: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not fact():  # noqa: ASYNC110  # facts of all kinds
            await asyncio.sleep(0.002)


def make(
    rig: Rig, address: str, *, interval: float = 0.1, packet_size: int = 508, mem_stats: bool = True
) -> Statsd:
    return Statsd(
        rig.broker, address, interval=interval, prefix="", packet_size=packet_size, mem_stats=mem_stats
    )


def test_an_interval_below_a_second_works_and_pushes_again_and_again(run: Run, rig: Rig) -> None:
    rig.publish("b", b"x")
    rig.publish("a", b"x")

    async def scenario() -> None:
        started = time.perf_counter()
        async with listening() as listener, pushing(make(rig, listener.address)):
            await until(lambda: listener.names().count("mem.gc_runs") == 3)
            assert listener.times[0] - started > 0.09, "the first push comes after one interval"
            assert listener.times[-1] - started > 0.29
            figures = ["message_count", "message_bytes", "depth", "backend_depth"]
            once = [f"topic.{topic}.{name}" for topic in "ab" for name in figures] + MEMORY
            assert listener.names()[: len(once) * 3] == once * 3
            counts = [line for line in b"".join(listener.packets).splitlines() if b".a.message_count" in line]
            assert counts[:3] == [b"topic.a.message_count:1|c"] + [b"topic.a.message_count:0|c"] * 2

    run(scenario())


def test_memory_figures_can_be_left_out(run: Run, rig: Rig) -> None:
    rig.publish("t", b"x")

    async def scenario() -> None:
        async with listening() as listener, pushing(make(rig, listener.address, mem_stats=False)):
            await until(lambda: listener.packets)
            assert not set(listener.names()) & set(MEMORY)

    run(scenario())


def test_packets_keep_to_their_size_and_are_spread_over_the_interval(run: Run, rig: Rig) -> None:
    for number in range(20):
        rig.topic(f"t{number:02}").get_channel("c")

    async def scenario() -> None:
        statsd = make(rig, "", interval=1.5, packet_size=508)
        async with listening() as listener:
            statsd._address = listener.address
            async with pushing(statsd):
                await until(lambda: "mem.gc_runs" in listener.names())
        assert len(listener.packets) > 10
        assert all(400 < len(packet) <= 508 for packet in listener.packets[:-1])
        assert all(packet.endswith(b"\n") for packet in listener.packets)
        # Evenly over half a second. The last packet leaves one step before its end.
        step = 0.5 / len(listener.packets)
        assert listener.times[-1] - listener.times[0] == pytest.approx(0.5 - step, abs=0.25)
        middle = listener.times[len(listener.times) // 2] - listener.times[0]
        assert middle == pytest.approx(0.25, abs=0.2)

    run(scenario())


def test_stopping_sends_the_rest_at_once_and_twice_is_safe(run: Run, rig: Rig) -> None:
    for number in range(20):
        rig.topic(f"t{number:02}").get_channel("c")

    async def scenario() -> None:
        async with listening() as listener:
            statsd = make(rig, listener.address, interval=3)
            await statsd.start()
            await until(lambda: listener.packets)
            await statsd.stop()
            await statsd.stop()
            await until(lambda: "mem.gc_runs" in listener.names())

    run(scenario())


def test_stopping_before_the_first_push_sends_nothing(run: Run, rig: Rig) -> None:
    async def scenario() -> None:
        async with listening() as listener:
            async with pushing(make(rig, listener.address, interval=60)):
                pass
            assert not listener.packets

    run(scenario())


def test_a_push_without_a_listener_is_not_an_error(
    run: Run, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    async def scenario() -> None:
        async with pushing(make(rig, f"127.0.0.1:{port}", interval=0.02)):
            await asyncio.sleep(0.2)

    run(scenario())
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("address", ["nowhere", "255.255.255.255:8125", ":0"])
def test_an_unreachable_address_is_logged_once_and_tried_again(
    run: Run, rig: Rig, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    async def scenario() -> None:
        statsd = make(rig, address, interval=0.02)
        async with listening() as listener, pushing(statsd):
            await asyncio.sleep(0.3)
            statsd._address = listener.address
            await until(lambda: listener.packets)

    caplog.set_level(logging.INFO, "nsparq.server.statsd")
    run(scenario())
    texts = [record.message for record in caplog.records]
    assert len(texts) == 2
    assert texts[0].startswith(f"failed to create UDP socket to statsd({address}) - ")
    assert texts[1].startswith("STATSD: pushing stats to 127.0.0.1:")


def test_a_push_of_many_topics_does_not_block_the_loop(run: Run, rig: Rig) -> None:
    for number in range(400):
        rig.topic(f"t{number:03}#ephemeral").get_channel("c")

    async def scenario() -> None:
        async with listening() as listener, pushing(make(rig, listener.address, packet_size=60_000)):
            turns = 0
            while not listener.packets:
                turns += 1
                await asyncio.sleep(0)
                # A topic deleted while figures are gathered is left out.
                rig.broker.topics.pop("t399#ephemeral", None)
            assert turns > 400 // 50

    run(scenario())
