"""Cuts what a micro-batch reads into ranges of a log, and puts ranges together to tasks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil
from typing import Final

from nsparq.spark.cluster.api import LogStatus, Positions
from nsparq.spark.cluster.http_client import Unreachable
from nsparq.spark.options import NsqOptions
from nsparq.spark.source.losses import Losses
from nsparq.spark.source.peers import Log, Peers
from nsparq.spark.source.plan import RANGE_COST, join, piece_bytes, split
from nsparq.spark.source.positions import Offsets, Place
from nsparq.spark.source.range_reader import LogRange

__all__ = ["GUESSED_BYTES", "RangePlanner"]

GUESSED_BYTES: Final = 256.0
"""Size of a message, where nsqd does not know it."""


class RangePlanner:
    """Plans tasks from the last answers of the nodes. Asks for more only where a log has gaps."""

    def __init__(self, options: NsqOptions, peers: Peers, losses: Losses) -> None:
        self._options, self._peers, self._losses = options, peers, losses

    def tasks(self, ranges: list[LogRange]) -> list[tuple[LogRange, ...]]:
        """Small ranges share a task, because starting a task costs more than reading them."""
        sizes = [work.size_bytes + RANGE_COST for work in ranges]
        size = piece_bytes(sum(sizes), self._options.partition_bytes)
        return [tuple(ranges[first:last]) for first, last in join(sizes, size)]

    def ranges(self, wanted: list[tuple[str, str, Place, int]]) -> list[LogRange]:
        """`wanted` has topic, node, first place and end of each log. Raises DataLoss."""
        wholes = [self._whole(*one) for one in wanted]
        size = piece_bytes(sum(whole.size_bytes for whole in wholes), self._options.partition_bytes)
        return [work for whole in wholes for work in self._cut(whole, size)]

    def _whole(self, topic: str, name: str, first: Place, end: int) -> LogRange:
        """Everything that a batch reads of a log. If its node is away, the task waits for it."""
        where = self._peers.find_log(topic, first.incarnation, name) or name
        positions = self._positions(topic, where, first.incarnation)
        count = end - first.sequence
        size = GUESSED_BYTES
        if positions is not None:
            count = min(count, positions.messages)
            size = positions.bytes_per_message or GUESSED_BYTES
        return LogRange(
            topic,
            name,
            self._peers.node(where).url,
            first.incarnation,
            first.sequence,
            end,
            int(count * size),
            where=where,
            is_held=self._losses.is_held((topic, where), self._peers.status(topic, where)),
        )

    def _cut(self, whole: LogRange, size: int) -> list[LogRange]:
        """Into ranges of about `size` bytes."""
        log = whole.topic, whole.where
        positions = self._positions(*log, whole.incarnation)
        status = self._peers.status(*log)
        if positions is None or status is None:
            return [whole]
        message_bytes = positions.bytes_per_message or GUESSED_BYTES
        start = self._losses.readable_from(log, Place(whole.incarnation, whole.start), status)
        first_from = partial(self._first_from, log, positions) if positions.has_gaps else None
        # Rounded up, or the remainder would be one more task.
        count = max(1, ceil(size / message_bytes))
        try:
            pieces = split(start, whole.end, count, first_from)
        except Unreachable:
            # Without knowing the gaps, cutting by numbers could make thousands of tasks.
            return [replace(whole, start=start)]
        first_id = self._peers.first_id(*log, pieces[0][0]) if pieces else None
        return [
            replace(
                whole,
                start=low,
                end=high,
                size_bytes=int(min(high - low, positions.messages) * message_bytes),
                first_id=first_id,
            )
            for low, high in pieces
        ]

    def _positions(self, topic: str, name: str, incarnation: str) -> Positions | None:
        """The last answer about this incarnation of a log."""
        status = self._peers.status(topic, name)
        positions = status.positions if status is not None else None
        return positions if positions is not None and positions.incarnation == incarnation else None

    def first_message(self, log: Log, positions: Positions, sequence: int) -> int:
        """The first message at or after `sequence`, as far as known. Raises DataLoss."""
        if not positions.has_gaps:
            return sequence
        try:
            return self._first_from(log, positions, sequence)
        except Unreachable:
            return sequence

    def _first_from(self, log: Log, positions: Positions, sequence: int) -> int:
        """first_message(), but raises Unreachable."""
        chunk = self._peers.probe(*log, positions.incarnation, sequence)
        if chunk is None:
            raise Unreachable(f"{log[1]} does not answer")
        if chunk.removed_before > sequence:
            # Removed since the last poll, for example because the channel has been moved.
            status = self._peers.status(*log) or LogStatus(positions)
            self._losses.note_removed(log, sequence, chunk.removed_before, status)
        return max(sequence, chunk.first)


def unread(start: Offsets, end: Offsets) -> list[tuple[str, str, Place, int]]:
    """Topic, node, first place and end of each log that both offsets have."""
    found: list[tuple[str, str, Place, int]] = []
    for topic, name, last in end.items_flat():
        first = start.place(topic, name)
        if first is None or first.incarnation != last.incarnation:
            earlier = start.find(topic, last.incarnation)
            first = None if earlier is None else start[topic][earlier]
        if first is not None and first.sequence < last.sequence:
            found.append((topic, name, first, last.sequence))
    return found
