"""Tags in a log: they tell after a crash what nsqd had already appended for somebody.

Batches of a transaction carry the transaction's tag, and batches of dead letters carry
DEAD_LETTERS. Batches of ordinary publishes have the tag 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nsparq.storage.batch import Head, decode_head
from nsparq.storage.log import Log
from nsparq.storage.log_range import LogRange
from nsparq.storage.raw_batch import iter_batches

SEARCH_SIZE: Final = 1 << 20
"""Bytes of a log that are searched at a time."""
DEAD_LETTERS: Final = (1 << 16) - 1
MAX_TAG: Final = DEAD_LETTERS - 1
"""Transactions have tags from 1 to this."""


def count_tagged(log: Log, tag: int, since: int) -> int:
    """Messages with this tag, from a sequence number on. May wait for the disk."""
    return sum(head.messages for head, _, _ in _iter_tagged(log, tag, since))


def count_in_range(place: LogRange, tag: int, since: int) -> int:
    """The same in one range of a log. Any thread may call this."""
    return sum(head.messages for head, _, _ in _in_range(place, tag, since))


def tagged_messages(log: Log, tag: int, since: int) -> Iterator[tuple[int, bytes, bytes]]:
    """The messages with this tag, from a sequence number on: number, body and header block. May
    wait for the disk."""
    for head, data, position in _iter_tagged(log, tag, since):
        for batch in iter_batches(memoryview(data)[position : position + head.size]):
            yield from zip(range(batch.base, batch.end), batch.bodies(), batch.blocks(), strict=True)


def _iter_tagged(log: Log, tag: int, since: int) -> Iterator[tuple[Head, bytes | memoryview, int]]:
    """Batches: header, the bytes that hold it, and its position there."""
    sequence = max(since, log.start)
    while sequence < log.end:
        found = log.locate(sequence, SEARCH_SIZE)
        yield from _in_range(found, tag, since)
        sequence = found.next


def _in_range(place: LogRange, tag: int, since: int) -> Iterator[tuple[Head, bytes | memoryview, int]]:
    data, position = place.read_verified().data, 0
    while (head := decode_head(data, position)) is not None:
        if head.tag == tag and head.base >= since:
            yield head, data, position
        position += head.size
