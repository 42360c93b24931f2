"""/stats as text: the columns that scripts parse, and durations in Go's format."""

from __future__ import annotations

from typing import Any

import pytest

from nsparq.server.api.stats_text import go_duration, render_stats
from nsparq.version import version_line

NOW_S = 1_700_000_000.5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-5, "0s"),
        (1e-10, "0s"),
        (1e-9, "1ns"),
        (0.000_000_999, "999ns"),
        (0.000_0015, "1.5µs"),
        (0.999_999_999, "999.999999ms"),
        (60, "1m0s"),
        (153.014_738_55, "2m33.01473855s"),
        (3600, "1h0m0s"),
        (90_061, "25h1m1s"),
        (10 * 365 * 86_400, "87600h0m0s"),
    ],
)
def test_durations_are_printed_as_go_prints_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


def test_no_fraction_gives_sixty_seconds() -> None:
    for whole in (0, 59, 3599, 86_399):
        for fraction in (1e-9, 0.1, 0.999_999_999, 0.999_999_999_9):
            text = go_duration(whole + fraction)
            assert "60s" not in text and "60m" not in text
            assert text.endswith("s") and " " not in text


def stats(**more: Any) -> dict[str, Any]:
    return {
        "version": "1.3.0",
        "health": "OK",
        "start_time": 1_699_999_990,
        "topics": [],
        "producers": None,
        **more,
    }


def latency(*values: float) -> dict[str, Any]:
    entries = [{"quantile": 0.9, "value": value} for value in values]
    return {"count": len(values), "percentiles": entries or None}


def channel(**more: Any) -> dict[str, Any]:
    return {
        "channel_name": "c",
        "depth": 0,
        "backend_depth": 2,
        "in_flight_count": 3,
        "deferred_count": 4,
        "requeue_count": 5,
        "timeout_count": 6,
        "message_count": 7,
        "paused": False,
        "clients": None,
        "e2e_processing_latency": latency(),
        "oldest_message_age_s": 0.0,
        "drain_rate": None,
        "drain_time_s": 0.0,
        **more,
    }


def topic(*channels: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "topic_name": "t",
        "depth": 10,
        "backend_depth": 20,
        "message_count": 30,
        "paused": False,
        "channels": [*channels],
        "e2e_processing_latency": latency(),
        **more,
    }


def client(**more: Any) -> dict[str, Any]:
    return {
        "version": "V2",
        "hostname": "host",
        "remote_address": "[::1]:4711",
        "user_agent": "agent/1",
        "state": 3,
        "in_flight_count": 1,
        "ready_count": 2,
        "finish_count": 3,
        "requeue_count": 4,
        "message_count": 5,
        "connect_ts": 1_699_999_900,
        **more,
    }


def lines(**more: Any) -> list[str]:
    """The lines after the heading."""
    text = "".join(render_stats(stats(**more), NOW_S))
    assert text.endswith("\n")
    return text.split("\n")[6:-1]


def test_the_heading_has_version_start_uptime_and_health() -> None:
    found = "".join(render_stats(stats(health="NOK - disk full"), NOW_S)).split("\n")
    assert found[0] == version_line("nsqd")
    assert found[1].startswith("start_time 2023-11-14T") or found[1].startswith("start_time 2023-11-15T")
    assert found[1].endswith("Z") or found[1][-6] in "+-"
    assert found[2:6] == ["uptime 10.5s", "", "Health: NOK - disk full", ""]


def test_empty_lists_are_shown_as_none() -> None:
    assert lines() == lines(topics=None) == ["Topics: None", "", "Producers: None"]


def test_memory_is_shown_on_request() -> None:
    found = lines(memory={"heap_objects": 12, "gc_total_runs": 3})
    assert found[:4] == ["Memory:", "   heap_objects             \t12", "   gc_total_runs            \t3", ""]


def test_the_lag_has_a_line_of_its_own_while_messages_wait() -> None:
    def lag(**more: Any) -> str:
        return lines(topics=[topic(channel(depth=1, **more))])[3].strip()

    assert lag(oldest_message_age_s=90.04, drain_rate=2.0, drain_time_s=59.6) == "oldest: 1m30s drain: 1m0s"
    assert lag(oldest_message_age_s=1.25, drain_rate=-2.0, drain_time_s=None) == "oldest: 1.2s drain: never"
    assert lag(oldest_message_age_s=None, drain_time_s=None) == "oldest: unknown drain: unknown"


def test_topics_and_channels_are_in_columns() -> None:
    consumers = [client(), client(hostname="h", user_agent="", remote_address="1.2.3.4:5")]
    found = lines(
        topics=[
            topic(channel(clients=consumers), channel(channel_name="paused one", paused=True)),
            topic(topic_name="another-rather-long-name", paused=True),
        ]
    )
    figures = (
        "depth: 0     be-depth: 2     inflt: 3    def: 4    re-q: 5     timeout: 6     msgs: 7        e2e%: "
    )
    work = "state: 3 inflt: 1    rdy: 2    fin: 3        re-q: 4        msgs: 5        connected: 1m40s"
    assert found == [
        "Topics:",
        "   [t              ] depth: 10    be-depth: 20    msgs: 30       e2e%: ",
        f"      [c                        ] {figures}",
        f"        [V2 host:4711 agent/1    ] {work}",
        f"        [V2 h:5                  ] {work}",
        f"   *P [paused one               ] {figures}",
        "",
        "*P [another-rather-long-name] depth: 10    be-depth: 20    msgs: 30       e2e%: ",
        "",
        "Producers: None",
    ]


def test_producers_are_shown_with_their_counts_by_topic() -> None:
    counts = [{"topic": "a", "count": 1}, {"topic": "b", "count": 2}]
    found = lines(producers=[client(pub_counts=counts), client(pub_counts=counts[:1])])
    assert found[2:] == [
        "Producers:",
        "   [V2 host:4711 agent/1    ] msgs: 3        topics: a=1,b=2 connected: 1m40s",
        "   [V2 host:4711 agent/1    ] msgs: 1        topics: a=1 connected: 1m40s",
    ]


def test_a_consumer_that_also_publishes_is_shown_as_a_producer() -> None:
    both = client(pub_counts=[{"topic": "a", "count": 1}])
    assert "topics: a=1 connected" in "\n".join(lines(topics=[topic(channel(clients=[both]))]))


def test_latencies_have_a_suitable_unit() -> None:
    values = (1.5e9, 1e9, 2.25e6, 2e3, 1e3, 12.0)
    found = lines(topics=[topic(channel(e2e_processing_latency=latency(*values)))])
    assert found[2].endswith("e2e%: 1.5s, 1000.0ms, 2.2ms, 2.0us, 1000.0ns, 12.0ns")
