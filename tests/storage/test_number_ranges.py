"""Ranges of sequence numbers: they hold what a set would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.storage.number_ranges import NumberRanges

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 10)), max_size=8)


@given(added=st.lists(RANGES, max_size=4), before=st.integers(0, 80))
def test_ranges_hold_what_a_set_holds(added: list[list[tuple[int, int]]], before: int):
    ranges, model = NumberRanges(), set()
    for some in added:
        starts = np.array([start for start, _ in some], np.int64)
        sizes = np.array([size for _, size in some], np.int64)
        ranges = ranges.with_ranges(starts, starts + sizes)
        model |= {number for start, size in some for number in range(start, start + size)}
    numbers = np.arange(80)
    assert {*numbers[ranges.holds(numbers)].tolist()} == model
    assert np.all(np.diff(ranges.bounds) > 0), "no two ranges touch"
    assert NumberRanges.decode(ranges.encode()).bounds.tolist() == ranges.bounds.tolist()
    later = ranges.without_before(before)
    assert {*numbers[before:][later.holds(numbers[before:])].tolist()} == {n for n in model if n >= before}


def test_many_ranges_take_few_bytes():
    starts = np.arange(0, 200_000, 2, dtype=np.int64) + (1 << 53)
    assert len(NumberRanges().with_ranges(starts, starts + 1).encode()) < 20_000


@pytest.mark.parametrize("text", ["####", "AAAA", "eJw="])
def test_a_damaged_text_is_refused(text: str):
    with pytest.raises(ValueError):
        NumberRanges.decode(text)
