"""Sequence numbers without a message."""

from __future__ import annotations

from itertools import product

import pytest

from nsparq.storage.gaps import Gaps


def gaps(*ranges: tuple[int, int]) -> Gaps:
    made = Gaps()
    for start, end in ranges:
        made.add(start, end)
    return made


def test_new_gaps_are_empty() -> None:
    assert Gaps().ranges == []
    assert Gaps().count(0, 100) == 0
    assert Gaps().skip(5) == 5


def test_ranges_may_be_given_from_the_start() -> None:
    assert Gaps([(1, 2), (5, 9)]).count(0, 7) == 3


@pytest.mark.parametrize("start_end", [(5, 5), (6, 5)])
def test_an_empty_range_adds_no_gap(start_end: tuple[int, int]) -> None:
    assert gaps(start_end).ranges == []


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ((0, 5), [(0, 5), (10, 20), (30, 40)]),
        ((22, 25), [(10, 20), (22, 25), (30, 40)]),
        ((50, 60), [(10, 20), (30, 40), (50, 60)]),
        ((5, 10), [(5, 20), (30, 40)]),
        ((20, 25), [(10, 25), (30, 40)]),
        ((20, 30), [(10, 40)]),
        ((12, 15), [(10, 20), (30, 40)]),
        ((15, 35), [(10, 40)]),
        ((0, 50), [(0, 50)]),
    ],
)
def test_ranges_that_touch_become_one(added: tuple[int, int], expected: list[tuple[int, int]]) -> None:
    assert gaps((30, 40), (10, 20), added).ranges == expected


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 10, 0), (0, 50, 20), (15, 35, 10), (12, 14, 2), (20, 30, 0), (35, 15, 0), (15, 15, 0)],
)
def test_only_the_part_of_a_gap_inside_the_range_counts(start: int, end: int, expected: int) -> None:
    assert gaps((10, 20), (30, 40)).count(start, end) == expected


@pytest.mark.parametrize(("sequence", "expected"), [(9, 9), (10, 20), (19, 20), (20, 20), (35, 40), (40, 40)])
def test_skipping_goes_to_the_end_of_the_gap(sequence: int, expected: int) -> None:
    assert gaps((10, 20), (30, 40)).skip(sequence) == expected


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [(9, [(10, 20), (30, 40)]), (19, [(10, 20), (30, 40)]), (20, [(30, 40)]), (35, [(30, 40)]), (40, [])],
)
def test_gaps_wholly_before_a_number_can_be_dropped(sequence: int, expected: list[tuple[int, int]]) -> None:
    made = gaps((10, 20), (30, 40))
    made.drop_before(sequence)
    assert made.ranges == expected


def test_empty_gaps_can_be_dropped() -> None:
    made = Gaps()
    made.drop_before(10)
    assert made.ranges == []


@pytest.mark.parametrize("ranges", [[], [(10, 20), (30, 40)], [(0, 3)], [(35, 50)]])
def test_counting_back_leaves_gaps_out(ranges: list[tuple[int, int]]) -> None:
    made = gaps(*ranges)
    for end, count in product((5, 10, 15, 20, 25, 35, 50), range(1, 30)):
        start = made.back(end, count)
        assert end - start - made.count(start, end) == count, end
        assert made.skip(start) == start, "it is a message's number"
