"""The arithmetic of planning: shares a limit out, cuts ranges, searches a time. No I/O.

Sequence numbers have gaps: an nsqd that was killed continues at a number far ahead. So the length
of a range says little about how many messages it has. Functions passed in by the caller look into
the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

__all__ = ["RANGE_COST", "BatchHeads", "begins_epoch", "find_time", "join", "piece_bytes", "share", "split"]

MAX_PIECES: Final = 10_000
"""Limit on the pieces of one range."""
SPREAD: Final = 4
"""Tasks of a batch that is not tiny, so that one core is not busy while the others are idle."""
TINY: Final = 8 << 20
"""Bytes that are too few for a task of their own, because starting a task has a cost."""
RANGE_COST: Final = 64 << 10
"""Cost of the request for a range, in bytes that could be read in the same time."""

EPOCH: Final = 1 << 12
"""A log that was not closed cleanly continues at a multiple of this number."""


def begins_epoch(number: int) -> bool:
    """Whether a log may have continued at this number after a crash."""
    return number % EPOCH == 0


def share(wanted: Sequence[int], limit: int) -> list[int]:
    """Share `limit` out in proportion to what each wants. All of it is used if they want more, and
    everyone who wants something gets something, as far as the limit allows."""
    total = sum(wanted)
    if total <= limit:
        return [*wanted]
    given = [want * limit // total for want in wanted]
    # What is left after rounding goes to the greatest remainders; among equals to the first.
    order = sorted(range(len(wanted)), key=lambda i: (-(wanted[i] * limit % total), i))
    for i in order[: limit - sum(given)]:
        given[i] += 1
    # Whoever would get nothing takes one from the one with the most.
    richest = [(-count, i) for i, count in enumerate(given) if count > 1]
    heapify(richest)
    for i, want in enumerate(wanted):
        if want and not given[i] and richest:
            count, rich = richest[0]
            given[i], given[rich] = 1, given[rich] - 1
            if given[rich] > 1:
                heapreplace(richest, (count + 1, rich))
            else:
                heappop(richest)
    return given


def piece_bytes(total: int, most: int) -> int:
    """Bytes for each task of a batch of `total` bytes."""
    return min(most, max(TINY, -(-total // SPREAD)))


def join(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Group neighbours up to a total size of `most`. Returns where each group begins and ends."""
    groups: list[tuple[int, int]] = []
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            groups.append((first, i))
            first, total = i, 0
        total += size
    return [*groups, (first, len(sizes))] if sizes else []


def split(
    start: int, end: int, size: int, first_from: Callable[[int], int] | None = None
) -> list[tuple[int, int]]:
    """Cut the numbers from `start` to before `end` into pieces of about `size`, all about equal.

    `first_from` returns the number of the first message at or after a number; None stands for a log
    without gaps. Gaps that are long compared with a piece are left out.
    """
    if first_from is None:
        return _even(start, end, size) if start < end else []
    pieces: list[tuple[int, int]] = []
    waiting = [(max(start, first_from(start)), end)] if start < end else []
    while waiting:
        low, high = waiting.pop()
        if low >= high:
            continue
        if high - low <= size or len(pieces) + len(waiting) > MAX_PIECES:
            pieces.append((low, high))
            continue
        middle = (low + high) // 2
        found = first_from(middle)
        waiting += [(found, high), (low, middle)] if found > middle else [(middle, high), (low, middle)]
    joined = _join(pieces)
    return [piece for low, high in joined for piece in _even(low, high, size)]


def _even(start: int, end: int, size: int) -> list[tuple[int, int]]:
    count = min(max(1, -((start - end) // max(1, size))), MAX_PIECES, end - start)
    borders = [start + (end - start) * i // count for i in range(count + 1)]
    return [*zip(borders, borders[1:], strict=False)]


def _join(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pieces):
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


class BatchHeads(NamedTuple):
    """The heads of some consecutive batches of a log."""

    heads: Sequence[tuple[int, int]]
    """First number and publish time of each batch."""
    next: int
    """The number after the last batch."""


def find_time(earliest: int, latest: int, time_ns: int, read: Callable[[int], BatchHeads]) -> int:
    """The first message published at or after a time; `latest` if there is none.

    `read` returns some batches from the one with a given number on, or from the first one behind
    it.
    """
    low, high, answer = earliest, latest, latest
    # Everything before `low` is older than the time. `answer` is right if everything before `high`
    # is, too.
    while low < high:
        middle = (low + high) // 2
        heads, following = read(middle)
        if not heads or heads[0][0] >= high:
            high = middle
        elif heads[-1][1] < time_ns:
            low = max(following, middle + 1)
        elif heads[0][1] < time_ns:
            return next(base for base, published_ns in heads if published_ns >= time_ns)
        else:
            answer = max(heads[0][0], low)
            high = min(middle, answer)
    return answer
