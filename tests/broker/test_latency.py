"""broker.latency: percentiles of the time from publish to FIN."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from nsparq.broker.latency import Latency, summarize

MINUTE = 60_000_000_000


def summary(*latencies: Latency, now_ns: int = 0) -> dict:
    return summarize(latencies[0].percentiles, [latency.buckets(now_ns) for latency in latencies])


def test_not_configured_means_no_percentiles_at_all():
    assert summarize((), []) == {"count": 0, "percentiles": None}
    assert summarize((), [Counter({1: 2})]) == {"count": 0, "percentiles": None}


def test_configured_without_data_gives_zeros():
    latency = Latency((0.99, 0.5), 600, 0)
    assert summary(latency) == {
        "count": 0,
        "percentiles": [{"quantile": 0.99, "value": 0}, {"quantile": 0.5, "value": 0}],
    }


@pytest.mark.parametrize("value", [1, 2, 1_000, 123_456_789, 3_600 * 1_000_000_000])
def test_a_value_is_shown_within_one_per_cent(value: int):
    latency = Latency((1.0,), 600, 0)
    latency.record(value, 0)
    assert summary(latency)["percentiles"][0]["value"] == pytest.approx(value, rel=0.0101, abs=1)


def test_percentiles_of_many_values_are_within_one_per_cent_and_in_the_configured_order():
    latency = Latency((0.99, 0.5, 0.1), 600, 0)
    values = list(range(1_000, 1_001_000, 100))
    random.Random(1).shuffle(values)
    for value in values:
        latency.record(value, 0)
    result = summary(latency)
    assert result["count"] == 10_000
    assert [p["quantile"] for p in result["percentiles"]] == [0.99, 0.5, 0.1]
    found = [p["value"] for p in result["percentiles"]]
    assert found == pytest.approx([991_000, 501_000, 101_000], rel=0.015)
    assert all(type(value) is int for value in found)


@pytest.mark.parametrize("value", [0, -5])
def test_a_clock_that_went_back_counts_as_no_time(value: int):
    latency = Latency((0.5,), 600, 0)
    latency.record(value, 0)
    result = summary(latency)
    assert result["count"] == 1
    assert result["percentiles"][0]["value"] == pytest.approx(1, abs=1)


def test_a_topic_merges_its_channels():
    first, second = Latency((1.0, 0.5), 600, 0), Latency((1.0, 0.5), 600, 0)
    first.record(1_000_000, 0)
    second.record(5_000_000, 0)
    result = summary(first, second)
    assert result["count"] == 2
    values = [p["value"] for p in result["percentiles"]]
    assert values == pytest.approx([5_000_000, 1_000_000], rel=0.011)


def test_reading_does_not_change_what_is_counted():
    latency = Latency((0.5,), 600, 0)
    latency.record(10, 0)
    assert summary(latency) == summary(latency)


def test_values_are_kept_for_at_least_half_the_window_and_gone_after_the_whole():
    latency = Latency((0.5,), 600, 0)
    latency.record(10, 0)
    assert summary(latency, now_ns=5 * MINUTE - 1)["count"] == 1
    latency.record(10, 5 * MINUTE)
    assert summary(latency, now_ns=10 * MINUTE - 1)["count"] == 2
    assert summary(latency, now_ns=10 * MINUTE)["count"] == 1
    assert summary(latency, now_ns=15 * MINUTE)["count"] == 0


def test_after_a_long_silence_the_window_starts_anew():
    latency = Latency((0.5,), 600, 0)
    latency.record(10, 0)
    much_later = 1_000_000 * MINUTE
    latency.record(20, much_later)
    assert summary(latency, now_ns=much_later)["count"] == 1
    assert summary(latency, now_ns=much_later + 5 * MINUTE - 1)["count"] == 1
    assert summary(latency, now_ns=much_later + 10 * MINUTE)["count"] == 0
