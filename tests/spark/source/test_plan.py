"""The arithmetic of planning: sharing a limit, cutting ranges around gaps, finding a time."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from nsparq.spark.source.plan import BatchHeads, find_time, join, piece_bytes, share, split

COUNTS = st.lists(st.integers(0, 10**12), max_size=8)


@given(COUNTS, st.integers(1, 10**6))
def test_a_limit_is_used_up_and_nobody_gets_more_than_wanted(wanted: list[int], limit: int) -> None:
    given = share(wanted, limit)
    assert sum(given) == min(limit, sum(wanted))
    assert all(0 <= got <= want for got, want in zip(given, wanted, strict=True))


@given(COUNTS, st.integers(8, 10**6))
def test_nobody_who_wants_something_gets_nothing_if_there_is_enough_for_all(
    wanted: list[int], limit: int
) -> None:
    assert all(got > 0 or want == 0 for got, want in zip(share(wanted, limit), wanted, strict=True))


def test_a_limit_is_shared_in_proportion() -> None:
    assert share([900, 100], 100) == [90, 10]
    assert share([5, 5], 100) == [5, 5]
    assert share([1, 1, 1], 2) == [1, 1, 0]
    assert share([], 5) == []


def test_a_limit_is_shared_over_thousands_of_logs() -> None:
    """With a look at all of them for each of them, this took ten seconds."""
    few, many = share([1_000_000] * 2 + [1] * 20_000, 30_000)[:2], 20_000
    assert few == [5_000, 5_000] and sum(share([1_000_000] * 2 + [1] * many, 30_000)) == 30_000


def test_a_range_without_gaps_is_cut_evenly() -> None:
    assert split(0, 10, 4) == [(0, 3), (3, 6), (6, 10)]
    assert split(5, 6, 100) == [(5, 6)]
    assert split(5, 5, 100) == []
    assert len(split(0, 10**12, 1)) == 10_000


def test_a_batch_is_spread_over_some_tasks_unless_it_is_tiny() -> None:
    mebi = 1 << 20
    assert piece_bytes(5 * mebi, 64 * mebi) == 8 * mebi
    assert piece_bytes(40 * mebi, 64 * mebi) == 10 * mebi
    assert piece_bytes(1000 * mebi, 64 * mebi) == 64 * mebi
    assert piece_bytes(1000 * mebi, mebi) == mebi


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 200))
def test_neighbours_share_a_group_as_far_as_it_goes(sizes: list[int], most: int) -> None:
    groups = join(sizes, most)
    assert [i for first, last in groups for i in range(first, last)] == [*range(len(sizes))]
    totals = [sum(sizes[first:last]) for first, last in groups]
    assert all(
        total <= most or last - first == 1 for total, (first, last) in zip(totals, groups, strict=True)
    )
    assert all(total + sizes[last] > most for total, (_, last) in zip(totals, groups[:-1], strict=False))


RUNS = st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 300)), min_size=1, max_size=5)


@given(RUNS, st.integers(1, 100))
def test_pieces_hold_every_message_once_and_leave_out_what_is_long_and_empty(
    runs: list[tuple[int, int]], size: int
) -> None:
    """`runs` are a gap and then messages, each."""
    ranges = []
    at = 0
    for gap, count in runs:
        ranges.append((at + gap, at + gap + count))
        at += gap + count
    asked = 0

    def first_from(number: int) -> int:
        nonlocal asked
        asked += 1
        return next((max(low, number) for low, high in ranges if number < high), at)

    pieces = split(0, at, size, first_from)
    assert pieces == sorted(pieces)
    assert all(high <= following for (_, high), (following, _) in zip(pieces, pieces[1:], strict=False))
    for low, high in ranges:
        held = sum(max(0, min(high, b) - max(low, a)) for a, b in pieces)
        assert held == high - low
    messages = sum(high - low for low, high in ranges)
    assert len(pieces) <= messages // size * 2 + 4 * len(runs) + 2
    assert asked <= 40 * len(runs) + 4 * (messages // size + len(runs) + 1)


STAMPS = st.lists(st.integers(0, 50), min_size=1, max_size=60).map(sorted)


@given(STAMPS, st.integers(0, 51), st.integers(1, 9), st.integers(0, 10**7))
def test_a_time_is_found_wherever_it_lies(stamps: list[int], time_ns: int, stretch: int, gap: int) -> None:
    """A number for each message, with a gap in the middle; stretches of several messages."""
    middle = len(stamps) // 2
    numbers = [100 + i + (gap if i >= middle else 0) for i in range(len(stamps))]
    latest = numbers[-1] + 1

    def read(number: int) -> BatchHeads:
        index = bisect_left(numbers, number)
        first = index - index % stretch
        chosen = range(first, min(first + stretch, len(numbers))) if index < len(numbers) else ()
        heads = [(numbers[i], stamps[i]) for i in chosen]
        return BatchHeads(heads, numbers[chosen[-1]] + 1 if chosen else latest)

    expected = next((n for n, stamp in zip(numbers, stamps, strict=True) if stamp >= time_ns), latest)
    assert find_time(numbers[0], latest, time_ns, read) == expected


def test_a_clock_that_was_set_back_does_not_keep_the_search_from_ending() -> None:
    stamps = [5, 9, 2, 7, 1, 8]
    for time_ns in range(11):
        found = find_time(0, 6, time_ns, lambda n: BatchHeads([(n, stamps[n])], n + 1))
        assert 0 <= found <= 6
