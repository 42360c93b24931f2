"""/metrics, parsed by prometheus-client."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nsparq.http.api import Request
from nsparq.http.metrics import CONTENT_TYPE, Exposition
from nsparq.options import NsqdOptions
from nsparq.server.api import metrics
from nsparq.server.api.metrics import LAG_BUCKETS, LoopLag, MetricsApi
from nsparq.server.daemon import Nsqd
from nsparq.version import NSQ_VERSION, __version__
from tests.support import BrokerThread, wait_until

Samples = dict[tuple[tuple[str, str], ...], float]

DAEMON = {
    "nsqd_info": "gauge",
    "nsqd_start_time_seconds": "gauge",
    "nsqd_healthy": "gauge",
    "nsqd_corrupt_files": "counter",
    "nsqd_topics": "gauge",
    "nsqd_connections": "gauge",
    "nsqd_http_connections": "gauge",
    "nsqd_transactions_open": "gauge",
    "nsqd_transactions_staged_bytes": "gauge",
    "nsqd_transactions_committed": "counter",
    "nsqd_transactions_aborted": "counter",
    "nsqd_transactions_expired": "counter",
    "nsqd_transactions_damaged": "gauge",
    "nsqd_transactions_lost_messages": "counter",
    "nsqd_disk_info": "gauge",
    "nsqd_disk_free_bytes": "gauge",
    "nsqd_disk_size_bytes": "gauge",
    "nsqd_loop_lag_seconds": "histogram",
    "process_cpu_seconds": "counter",
    "process_max_fds": "gauge",
    "process_resident_memory_bytes": "gauge",
    "process_open_fds": "gauge",
    "process_start_time_seconds": "gauge",
}
# By metric: its kind, and the key of the same figure in /stats.
TOPIC = {
    "nsqd_topic_depth": ("gauge", "depth"),
    "nsqd_topic_backend_depth": ("gauge", "backend_depth"),
    "nsqd_topic_messages": ("counter", "message_count"),
    "nsqd_topic_message_bytes": ("counter", "message_bytes"),
    "nsqd_topic_paused": ("gauge", "paused"),
    "nsqd_topic_dropped_messages": ("counter", "dropped_count"),
    "nsqd_topic_corrupt_batches": ("counter", "corrupt_batches"),
    "nsqd_topic_corrupt_messages": ("counter", "corrupt_messages"),
    "nsqd_topic_corrupt_files": ("counter", "corrupt_files"),
    "nsqd_topic_log_bytes": ("gauge", "log_bytes"),
    "nsqd_topic_repeated_messages": ("counter", "repeated_count"),
}
CHANNEL = {
    "nsqd_channel_depth": ("gauge", "depth"),
    "nsqd_channel_backend_depth": ("gauge", "backend_depth"),
    "nsqd_channel_in_flight": ("gauge", "in_flight_count"),
    "nsqd_channel_deferred": ("gauge", "deferred_count"),
    "nsqd_channel_parked": ("gauge", "parked_count"),
    "nsqd_channel_messages": ("counter", "message_count"),
    "nsqd_channel_requeued_messages": ("counter", "requeue_count"),
    "nsqd_channel_timed_out_messages": ("counter", "timeout_count"),
    "nsqd_channel_dropped_messages": ("counter", "dropped_count"),
    "nsqd_channel_dead_letters": ("counter", "dead_letter_count"),
    "nsqd_channel_expired_messages": ("counter", "expired_count"),
    "nsqd_channel_clients": ("gauge", "client_count"),
    "nsqd_channel_paused": ("gauge", "paused"),
}
LAG = ("nsqd_channel_oldest_message_age_seconds", "nsqd_channel_drain_time_seconds")
LATENCY = ("nsqd_topic_e2e_processing_latency_seconds", "nsqd_channel_e2e_processing_latency_seconds")


def parse(text: str) -> dict[str, Any]:
    """Metrics by name. Each name occurs once."""
    families = [*text_string_to_metric_families(text)]
    names = [family.name for family in families]
    assert len(names) == len(set(names)), names
    assert all(family.documentation for family in families)
    return {family.name: family for family in families}


def scrape(broker: BrokerThread) -> dict[str, Any]:
    answer = broker.request("GET", "/metrics")
    assert (answer.status, answer.header("Content-Type")) == (200, CONTENT_TYPE)
    assert answer.body.endswith(b"\n")
    return parse(answer.body.decode())


def values(family: Any) -> Samples:
    return {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    return values(families[name])[tuple(sorted(labels.items()))]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerThread]:
    with BrokerThread(tmp_path, e2e_processing_latency_percentile=(0.99, 0.5), mem_queue_size=5) as broker:
        yield broker


def test_a_daemon_without_topics_has_daemon_figures(broker: BrokerThread) -> None:
    with broker.connect() as connection:
        connection.identify()
        found = scrape(broker)
    assert {name: family.type for name, family in found.items()} == DAEMON
    assert value(found, "nsqd_info", version=__version__, nsq_version=NSQ_VERSION) == 1
    assert value(found, "nsqd_start_time_seconds") == broker.stats()["start_time"]
    assert value(found, "nsqd_healthy") == 1
    assert value(found, "nsqd_topics") == 0
    assert value(found, "nsqd_connections") == 1
    assert value(found, "nsqd_http_connections") == 1
    assert 0 < value(found, "nsqd_disk_free_bytes") <= value(found, "nsqd_disk_size_bytes")
    assert value(found, "process_cpu_seconds") > 0
    assert 1 << 20 < value(found, "process_resident_memory_bytes") < 1 << 36
    assert 0 < value(found, "process_open_fds") <= value(found, "process_max_fds")
    assert 0 < value(found, "process_start_time_seconds") <= time.time()


def test_the_figures_of_topics_and_channels_equal_those_of_stats(broker: BrokerThread) -> None:
    broker.control("create", "busy", "one")
    broker.control("create", "busy", "two")
    broker.control("create", "quiet.-_9", "c#ephemeral")
    broker.control("create", "gone#ephemeral")
    with broker.connect() as consumer:
        consumer.sub("busy", "one", rdy=4)
        with broker.connect() as producer:
            for _ in range(20):
                producer.pub("busy", b"x" * 10)
        finished, requeued, deferred, _ = consumer.read_messages(4)
        consumer.rdy(1)
        consumer.fin(finished.id)
        consumer.req(requeued.id)
        consumer.req(deferred.id, 60_000)
        consumer.barrier()
        broker.control("pause", "busy", "two")
        broker.control("pause", "quiet.-_9")
        broker.publish("quiet.-_9", b"held")
        broker.publish("gone#ephemeral", *[b"x"] * 20)
        found = scrape(broker)
        stats = broker.stats()
    assert set(found) == {*DAEMON, *TOPIC, *CHANNEL, *LATENCY, *LAG}
    assert value(found, "nsqd_topics") == 3
    for name, (kind, key) in TOPIC.items():
        assert found[name].type == kind
        assert values(found[name]) == {
            (("topic", topic["topic_name"]),): float(topic[key]) for topic in stats["topics"]
        }, name
    for name, (kind, key) in CHANNEL.items():
        assert found[name].type == kind
        assert values(found[name]) == {
            (("channel", channel["channel_name"]), ("topic", topic["topic_name"])): float(channel[key])
            for topic in stats["topics"]
            for channel in topic["channels"]
        }, name
    # Not all of them are zero.
    busy = {"topic": "busy", "channel": "one"}
    assert value(found, "nsqd_topic_messages", topic="busy") == 20
    assert value(found, "nsqd_channel_in_flight", **busy) >= 1
    assert value(found, "nsqd_channel_deferred", **busy) == 1
    assert value(found, "nsqd_channel_requeued_messages", **busy) >= 1
    assert value(found, "nsqd_channel_clients", **busy) == 1
    assert value(found, "nsqd_channel_paused", topic="busy", channel="two") == 1
    assert value(found, "nsqd_topic_paused", topic="quiet.-_9") == 1
    assert value(found, "nsqd_topic_dropped_messages", topic="gone#ephemeral") > 0
    assert value(found, "nsqd_channel_backend_depth", topic="busy", channel="two") > 0


def test_latency_is_given_by_quantile_in_seconds(broker: BrokerThread) -> None:
    with broker.connect() as consumer:
        consumer.sub("t", "c", rdy=10)
        broker.publish("t", *[b"x"] * 10)
        consumer.read_messages(10, finish=True)
        consumer.barrier()
    found = scrape(broker)
    for name, labels in ((LATENCY[0], {"topic": "t"}), (LATENCY[1], {"topic": "t", "channel": "c"})):
        assert found[name].type == "summary"
        slow, median = (value(found, name, **labels, quantile=quantile) for quantile in ("0.99", "0.5"))
        assert 0 < median <= slow < 10


def test_without_percentiles_there_are_none(tmp_path: Path) -> None:
    with BrokerThread(tmp_path) as broker:
        broker.control("create", "t", "c")
        assert set(scrape(broker)) == {*DAEMON, *TOPIC, *CHANNEL, *LAG}


def test_an_unknown_lag_has_no_sample_and_a_channel_that_does_not_drain_takes_forever() -> None:
    def lag(**figures: float | None) -> dict[str, list[float]]:
        names = ("oldest_message_age_s", "drain_rate", "drain_time_s")
        out = Exposition()
        out.add("x", "gauge", "x", 1)
        metrics._lag(out, dict.fromkeys(names) | figures, '{channel="c"}')
        return {one.name: [sample.value for sample in one.samples] for one in parse(out.text()).values()}

    assert lag() == {"x": [1]}
    assert lag(oldest_message_age_s=0.0, drain_time_s=0.0) == {"x": [1], LAG[0]: [0], LAG[1]: [0]}
    assert lag(oldest_message_age_s=2.5, drain_rate=-1.0) == {"x": [1], LAG[0]: [2.5], LAG[1]: [math.inf]}


def test_a_failing_disk_is_visible(broker: BrokerThread) -> None:
    broker.call(lambda inner: inner.health.set("disk full"))
    assert value(scrape(broker), "nsqd_healthy") == 0
    broker.call(lambda inner: inner.health.set(None))
    assert value(scrape(broker), "nsqd_healthy") == 1


def test_a_deleted_topic_is_not_shown(broker: BrokerThread) -> None:
    broker.control("create", "t", "c")
    broker.control("delete", "t")
    assert set(scrape(broker)) == set(DAEMON)


# The event loop


def lag_of(families: dict[str, Any]) -> tuple[list[tuple[float, float]], float, float]:
    """The buckets, the sum and the count of the histogram."""
    samples = families["nsqd_loop_lag_seconds"].samples
    buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
    rest = {s.name.rpartition("_")[2]: s.value for s in samples if not s.name.endswith("_bucket")}
    return buckets, rest["sum"], rest["count"]


def test_the_lag_of_the_loop_is_a_histogram() -> None:
    lag = LoopLag()
    recorded = [0.0, 0.0005, 0.001, 0.0011, 0.3, 7.0]
    for seconds in recorded:
        lag.record(seconds)
    out = Exposition()
    metrics._add_lag(out, lag)
    buckets, total, count = lag_of(parse(out.text()))
    assert [bound for bound, _ in buckets] == [*LAG_BUCKETS, math.inf]
    for bound, number in buckets:
        assert number == sum(seconds <= bound for seconds in recorded), bound
    assert count == 6
    assert total == pytest.approx(sum(recorded))


def test_a_blocked_loop_is_measured(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LAG_INTERVAL_S", 0.01)
    wait_until(lambda: lag_of(scrape(broker))[2] >= 3)
    broker.loop.call_soon_threadsafe(time.sleep, 0.3)
    wait_until(lambda: lag_of(scrape(broker))[1] > 0.2)


def test_a_thousand_topics_do_not_block_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work runs while the figures are gathered."""
    monkeypatch.setattr(metrics, "SLICE", 50)
    count = 1_000

    async def scenario() -> None:
        options = {"tcp_address": "127.0.0.1:0", "http_address": "", "https_address": ""}
        nsqd = Nsqd(NsqdOptions(data_path=str(tmp_path), **options))
        await nsqd.start()
        try:
            for i in range(count):
                nsqd.broker.get_topic(f"t{i}").get_channel("c")
            turns = 0
            is_done = False

            async def others() -> None:
                nonlocal turns
                while not is_done:
                    turns += 1
                    await asyncio.sleep(0)

            watching = asyncio.create_task(others())
            before, turns = turns, 0
            response = await MetricsApi(nsqd).read(Request("GET", "/metrics", "", []))
            is_done = True
            await watching
            assert before == 0 and turns >= count // 50
            found = parse(response.body.decode())
            assert len(values(found["nsqd_channel_depth"])) == count
        finally:
            await nsqd.stop()

    asyncio.run(scenario())


def test_a_topic_deleted_during_the_request_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SLICE", 1)

    async def scenario() -> None:
        options = {"tcp_address": "127.0.0.1:0", "http_address": "", "https_address": ""}
        nsqd = Nsqd(NsqdOptions(data_path=str(tmp_path), **options))
        await nsqd.start()
        try:
            for i in range(10):
                nsqd.broker.get_topic(f"t{i}")
            asking = asyncio.create_task(MetricsApi(nsqd).read(Request("GET", "/metrics", "", [])))
            while not nsqd.broker.topics["t9"].is_exiting:
                await asyncio.sleep(0)
                if len(nsqd.broker.topics) == 10 and not asking.done():
                    nsqd.broker.topics["t9"].is_exiting = True
            found = parse((await asking).body.decode())
            assert len(values(found["nsqd_topic_depth"])) == 9
            nsqd.broker.topics["t9"].is_exiting = False
        finally:
            await nsqd.stop()

    asyncio.run(scenario())


# The format


def test_samples_of_a_metric_are_grouped_under_one_heading() -> None:
    out = Exposition()
    for i in range(3):
        out.add("first", "gauge", "one thing", i, f'{{n="{i}"}}')
        out.add("second", "counter", "another", i / 2, f'{{n="{i}"}}')
    assert out.text() == (
        "# HELP first one thing\n# TYPE first gauge\n"
        'first{n="0"} 0\nfirst{n="1"} 1\nfirst{n="2"} 2\n'
        "# HELP second another\n# TYPE second counter\n"
        'second{n="0"} 0.0\nsecond{n="1"} 0.5\nsecond{n="2"} 1.0\n'
    )


@pytest.mark.parametrize(
    ("number", "text"), [(True, "1"), (False, "0"), (10**18, "1" + "0" * 18), (1e-7, "1e-07")]
)
def test_numbers_are_in_prometheus_format(number: float, text: str) -> None:
    out = Exposition()
    out.add("n", "gauge", "h", number)
    assert out.text().endswith(f"\nn {text}\n")
    assert value(parse(out.text()), "n") == float(number)
