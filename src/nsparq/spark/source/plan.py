"""The arithmetic of planning: how a limit is shared out, how a range is cut, where a time lies. No I/O.

Sequence numbers have gaps: a broker that was killed goes on at a number far ahead. So a range of numbers says
little about how many messages it holds, and what is to be known of it is asked for, through a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

__all__ = ["Stretch", "begins_epoch", "find_time", "join", "piece_bytes", "share", "split"]

MAX_PIECES: Final = 10_000
"""Of one range. More tasks than that help nobody."""
SPREAD: Final = 4
"""Tasks that a batch is spread over, if it is not tiny: one core should not be busy and the others idle."""
TINY: Final = 8 << 20
"""Bytes. A task costs as much as reading some of them."""
RANGE_COST: Final = 64 << 10
"""Bytes too, and what a range costs beside its own: a request for it."""


EPOCH: Final = 1 << 12
"""A log that was not closed cleanly goes on at a multiple of this number."""


def begins_epoch(number: int) -> bool:
    """Whether it is the number from which a log has gone on after a crash."""
    return number % EPOCH == 0


def share(wanted: Sequence[int], limit: int) -> list[int]:
    """Share out `limit` in proportion to what each wants: all of it, if they want more, and something to each
    that wants something, as far as it goes."""
    total = sum(wanted)
    if total <= limit:
        return [*wanted]
    given = [want * limit // total for want in wanted]
    # What rounding has left goes to the greatest remainders; the order decides between equals.
    order = sorted(range(len(wanted)), key=lambda i: (-(wanted[i] * limit % total), i))
    for i in order[: limit - sum(given)]:
        given[i] += 1
    # Who would get nothing takes one from whoever has the most. A heap, since there may be thousands.
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
    """How much a task is to read of a batch of `total` bytes."""
    return min(most, max(TINY, -(-total // SPREAD)))


def join(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Put neighbours together, as long as they are no more than `most`: where each group begins and ends."""
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

    `first_from` gives the number of the first message at or after a number. With it gaps are left out where
    they matter: those that are long, compared with a piece. Without it there are none.
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


class Stretch(NamedTuple):
    """A short piece of a log: some neighbouring batches."""

    heads: Sequence[tuple[int, int]]
    """Of each the first number and the publish time."""
    next: int
    """The number behind the last."""


def find_time(earliest: int, latest: int, time_ns: int, read: Callable[[int], Stretch]) -> int:
    """The first message published at or after a time; `latest` if there is none.

    `read` gives the stretch that holds a number, or else the first one behind it.
    """
    low, high, answer = earliest, latest, latest
    # What lies before `low` is older; `answer` is right if nothing from `low` to before `high` is not.
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
