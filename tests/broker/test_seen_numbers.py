"""The window of stored numbers, by itself."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.broker.seen_numbers import MAX_RANGES, NumberRange, NumberRefused, Producer, SeenNumbers, Window

WINDOW = Window(numbers=100, age_ns=60)


def store(producer: Producer, number: int) -> bool:
    """One number; whether it was not stored before."""
    return producer.add(number, number + 1) != []


def producer_with(*numbers: int) -> Producer:
    producer = Producer("p", 1, 0)
    for number in numbers:
        store(producer, number)
    return producer


def numbers_in(ranges: Iterable[NumberRange]) -> list[int]:
    return [number for start, end in ranges for number in range(start, end)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 12))))
def test_the_ranges_hold_exactly_the_stored_numbers(steps: Iterable[tuple[bool, int, int]]) -> None:
    producer, stored = producer_with(), set[int]()
    for is_stored, start, count in steps:
        numbers = range(start, start + count)
        if is_stored:
            new = producer.add(start, start + count)
            assert numbers_in(new) == [number for number in numbers if number not in stored]
            stored.update(numbers)
        else:
            producer.discard(start, start + count)
            stored.difference_update(numbers)
        bounds = producer.bounds
        assert bounds == sorted({*bounds}) and not len(bounds) % 2
        assert {*numbers_in(zip(bounds[::2], bounds[1::2], strict=True))} == stored


def test_a_number_that_was_overtaken_store() -> None:
    producer = producer_with(1, 3)
    assert [store(producer, number) for number in (3, 2, 2, 1)] == [False, True, False, False]
    assert producer.bounds == [1, 4]


def test_the_last_numbers_stay_and_older_ones_are_refused() -> None:
    seen = SeenNumbers(WINDOW)
    producer = seen.find("p", 1, 0)
    for number in range(1000):
        store(producer, number)
        seen.tidy(producer, 0)
        producer.check(max(0, number - WINDOW.numbers + 1))
        assert not store(producer, max(0, number - WINDOW.numbers + 1))
    with pytest.raises(NumberRefused, match="number 700 of producer p is before the window") as refused:
        producer.check(700)
    assert refused.value.code == "NUMBER_TOO_OLD"


def test_numbers_stay_for_the_time_of_the_window_and_then_go() -> None:
    seen = SeenNumbers(WINDOW)
    producer = seen.find("p", 1, 0)
    for number, now in enumerate((0, 59, 60, 119)):
        store(producer, number)
        seen.tidy(producer, now)
    assert not store(producer, 2)
    store(producer, 4)
    seen.tidy(producer, 120)
    producer.check(3)
    with pytest.raises(NumberRefused):
        producer.check(2)


def test_too_many_gaps_shorten_the_window() -> None:
    seen = SeenNumbers(Window(numbers=1_000_000, age_ns=60))
    producer = seen.find("p", 1, 0)
    for number in range(0, 10 * MAX_RANGES, 2):
        store(producer, number)
        seen.tidy(producer, 0)
        assert len(producer.bounds) <= 2 * MAX_RANGES
    assert not store(producer, 10 * MAX_RANGES - MAX_RANGES)
    with pytest.raises(NumberRefused):
        producer.check(0)


def test_a_newer_epoch_begins_anew_and_fences_the_older() -> None:
    seen = SeenNumbers(WINDOW)
    assert store(seen.find("p", 1, 0), 7)
    assert store(seen.find("p", 2, 0), 7)
    with pytest.raises(NumberRefused, match="epoch 1 of producer p is over") as refused:
        seen.find("p", 1, 0)
    assert refused.value.code == "FENCED"
    assert not store(seen.find("p", 2, 0), 7)
    assert store(seen.find("q", 1, 0), 7)


def test_the_producer_that_was_idle_for_longest_goes_first() -> None:
    seen = SeenNumbers(WINDOW, max_entries=6)
    for name in ("a", "b", "c", "a"):
        producer = seen.find(name, 1, 0)
        store(producer, 1)
        seen.tidy(producer, 0)
    producer = seen.find("d", 1, 0)
    assert [one.name for one in seen] == ["c", "a", "d"]
    for number in range(0, 20, 2):
        store(producer, number)
        seen.tidy(producer, 0)
    assert [one.name for one in seen] == ["d"]


def test_a_producer_comes_back_from_disk_as_it_was() -> None:
    producer = producer_with(1, 2, 5)
    producer.forget_old(Window(1, 60), 60)
    again = Producer.restored(json.loads(json.dumps(producer.stored())), 50)
    assert (again.bounds, again.epoch, again.floor) == (producer.bounds, 1, producer.floor)
    # The clock was set back: the age counts from now.
    assert again.stored()[4] == 50


@pytest.mark.parametrize(
    "stored", [[], ["p", 1, 0, 0, 0, 5], ["p", 1, 0, 0, 0, 5, 5], ["p", 1, 0, 0, "x"], 7]
)
def test_anything_else_is_not_taken_for_a_producer(stored: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Producer.restored(stored, 0)  # type: ignore[arg-type]
