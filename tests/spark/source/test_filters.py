"""Spark's filters on a batch: what remains to be read, which filters are settled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from nsparq.spark.source.filters import CLOCK_SLACK_NS, Filters
from tests.spark.source.support import copied

TOPIC, NODE, OFFSET, TIME = ("topic",), ("node",), ("offset",), ("timestamp",)
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp()) * 10**6


def taken(*filters: Filter) -> tuple[Filters, list[bool]]:
    found = Filters()
    settled = [found.take(one) for one in filters]
    return copied(found), settled


@pytest.mark.parametrize(
    ("given", "topics"),
    [
        (EqualTo(TOPIC, "a1"), {"a1"}),
        (EqualNullSafe(TOPIC, "a1"), {"a1"}),
        (In(TOPIC, ("a1", "b2", "c")), {"a1", "b2"}),
        (StringStartsWith(TOPIC, "a"), {"a1", "a2"}),
        (StringEndsWith(TOPIC, "2"), {"a2", "b2"}),
        (StringContains(TOPIC, "b"), {"b2"}),
        (Not(EqualTo(TOPIC, "a1")), {"a2", "b2"}),
        (Not(In(TOPIC, ("a1", "b2"))), {"a2"}),
    ],
)
def test_filters_on_names_choose_logs_and_are_settled(given: Filter, topics: set[str]) -> None:
    filters, settled = taken(given)
    assert settled == [True]
    assert {topic for topic in ("a1", "a2", "b2") if filters.wants(topic, "n:1")} == topics


def test_all_filters_have_to_pass() -> None:
    filters, settled = taken(StringStartsWith(TOPIC, "a"), EqualTo(NODE, "n:1"), GreaterThan(OFFSET, 5))
    assert settled == [True] * 3
    assert filters.wants("a", "n:1") and not filters.wants("a", "n:2") and not filters.wants("b", "n:1")
    assert filters.low == 6


@pytest.mark.parametrize(
    ("given", "kept", "is_settled"),
    [
        (EqualTo(OFFSET, 12), [12], True),
        (EqualNullSafe(OFFSET, 12), [12], True),
        (GreaterThan(OFFSET, 17), [18, 19], True),
        (GreaterThanOrEqual(OFFSET, 18), [18, 19], True),
        (LessThan(OFFSET, 12), [10, 11], True),
        (LessThanOrEqual(OFFSET, 11), [10, 11], True),
        (In(OFFSET, (12, 14)), [12, 13, 14], False),
        (In(OFFSET, (12,)), [12], True),
        (EqualTo(OFFSET, 30), [], True),
        (LessThan(OFFSET, -5), [], True),
        (Not(LessThan(OFFSET, 12)), [*range(10, 20)], False),
        (EqualNullSafe(OFFSET, None), [*range(10, 20)], False),
    ],
)
def test_filters_on_offsets_narrow_a_range(given: Filter, kept: list[int], is_settled: bool) -> None:
    filters, settled = taken(given)
    assert settled == [is_settled]
    assert [*range(*filters.narrowed(10, 20, lambda _: pytest.fail("no time was asked for")))] == kept


@pytest.mark.parametrize(
    ("given", "since", "until"),
    [
        (GreaterThanOrEqual(TIME, NOON), NOON_US, None),
        (GreaterThan(TIME, NOON), NOON_US + 1, None),
        (LessThan(TIME, NOON), None, NOON_US),
        (LessThanOrEqual(TIME, NOON), None, NOON_US + 1),
        (EqualTo(TIME, NOON), NOON_US, NOON_US + 1),
    ],
)
def test_filters_on_times_narrow_a_range_and_leave_the_rows_to_spark(
    given: Filter, since: int | None, until: int | None
) -> None:
    filters, settled = taken(given)
    assert settled == [False]
    assert (filters.since_us, filters.until_us) == (since, until)
    # A little more, for a clock that was set back.
    first = {since and since * 1000 - CLOCK_SLACK_NS: 12, until and until * 1000 + CLOCK_SLACK_NS: 18}
    assert filters.narrowed(10, 20, first.__getitem__) == (12 if since else 10, 18 if until else 20)


def test_the_narrowest_of_several_times_counts() -> None:
    filters, _ = taken(
        GreaterThan(TIME, NOON),
        GreaterThan(TIME, NOON - timedelta(hours=1)),
        LessThan(TIME, NOON + timedelta(hours=1)),
        LessThan(TIME, NOON + timedelta(hours=2)),
    )
    assert (filters.since_us, filters.until_us) == (NOON_US + 1, NOON_US + 3600 * 10**6)


def test_only_headers_can_be_null() -> None:
    assert taken(IsNotNull(("body",)))[1] == [True]
    assert taken(IsNotNull(("headers",)))[1] == [False]
    assert taken(IsNull(("body",)), Not(IsNotNull(("body",))))[1] == [False, False]


@pytest.mark.parametrize(
    "given",
    [
        EqualTo(("body",), b"x"),
        EqualTo(("id",), "0"),
        EqualTo(("topic", "x"), "t"),
        EqualTo(TOPIC, None),
        In(TOPIC, ("t", None)),
        GreaterThan(TOPIC, "t"),
        GreaterThan(OFFSET, 5.5),
        GreaterThan(TIME, datetime(2026, 11, 16)),
        GreaterThan(TIME, None),
    ],
)
def test_whatever_else_is_left_to_spark_and_narrows_nothing(given: Any) -> None:
    filters, settled = taken(given)
    assert settled == [False] and vars(filters) == vars(Filters())
