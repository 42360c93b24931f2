"""Cuts what a micro-batch reads into ranges of a log, and puts ranges together to tasks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil
from typing import Final

from nsparq.spark.cluster.api import LogStatus, Positions
from nsparq.spark.cluster.http_client import Unreachable
from nsparq.spark.options import NsqOptions
from nsparq.spark.source.archived import ArchivedLogs, Part, cut_evenly, parts
from nsparq.spark.source.losses import Losses
from nsparq.spark.source.peers import Log, Peers
from nsparq.spark.source.plan import RANGE_COST, join, piece_bytes, split
from nsparq.spark.source.positions import Offsets, Place
from nsparq.spark.source.range_reader import LogRange
from nsparq.storage.gaps import Gaps
from nsparq.storage.manifest import Manifest
from nsparq.wire.message import SEQUENCE_BITS

__all__ = ["GUESSED_BYTES", "RangePlanner"]

GUESSED_BYTES: Final = 256.0
"""Size of a message, where nsqd does not know it."""


class RangePlanner:
    """Plans tasks from the last answers of the nodes. Asks for more only where a log has gaps."""

    def __init__(self, options: NsqOptions, peers: Peers, losses: Losses, archived: ArchivedLogs) -> None:
        self._options, self._peers, self._losses, self._archived = options, peers, losses, archived

    def tasks(self, ranges: list[LogRange]) -> list[tuple[LogRange, ...]]:
        """Small ranges share a task, because starting a task costs more than reading them."""
        sizes = [work.size_bytes + RANGE_COST for work in ranges]
        size = piece_bytes(sum(sizes), self._options.partition_bytes)
        return [tuple(ranges[first:last]) for first, last in join(sizes, size)]

    def ranges(self, wanted: list[tuple[str, str, Place, int]]) -> list[LogRange]:
        """`wanted` has topic, node, first place and end of each log. Raises DataLoss."""
        self._archived.prepare((topic, *first) for topic, _, first, _ in wanted)
        found = [part for one in wanted for part in self._parts(self._whole(*one))]
        size = piece_bytes(sum(part.size_bytes for part in found), self._options.partition_bytes)
        return [work for part in found for work in self._cut(part, size)]

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

    def _parts(self, whole: LogRange) -> list[LogRange]:
        """Divided into what is archived and what nsqd has to be asked for. Raises DataLoss."""
        topic, incarnation = whole.topic, whole.incarnation
        manifest = self._archived.manifest(topic, incarnation, whole.start)
        if manifest is None:
            return [whole]
        positions, status = self._positions(topic, whole.where, incarnation), self._peers.status(*whole.log)
        start = whole.start
        if positions is not None and status is not None:
            start = self._losses.readable_from(whole.log, Place(incarnation, start), status)
        gaps = self._gaps(whole.log, positions, manifest)
        bytes_per_number = whole.size_bytes / max(1, whole.end - whole.start)
        return [
            replace(
                whole,
                start=part.start,
                end=part.end,
                size_bytes=part.size_bytes or int((part.end - part.start) * bytes_per_number),
                # From nsqd it would cost a peek, for which nsqd may have to fetch a segment.
                first_id=None if part.entry is None else manifest.node << SEQUENCE_BITS,
                entry=part.entry,
                gaps=gaps.inside(part.start, part.end),
            )
            for part in parts(manifest, start, whole.end, gaps)
        ]

    def _gaps(self, log: Log, positions: Positions | None, manifest: Manifest) -> Gaps:
        """All gaps of a log. nsqd may have more than at the last commit of the archive."""
        if positions is not None and not positions.has_gaps:
            return Gaps()
        known = self._peers.gaps(*log) if positions is not None else None
        return Gaps([*manifest.gaps] if known is None else known)

    def _cut(self, whole: LogRange, size: int) -> list[LogRange]:
        """Into ranges of about `size` bytes."""
        if whole.entry is not None:
            gaps = Gaps([*whole.gaps])
            return [
                replace(
                    whole,
                    start=one.start,
                    end=one.end,
                    size_bytes=one.size_bytes,
                    gaps=gaps.inside(one.start, one.end),
                )
                for one in cut_evenly(Part(whole.start, whole.end, whole.entry), size)
            ]
        log = whole.log
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
        manifest = self._archived.manifest(log[0], positions.incarnation, sequence)
        if manifest is not None and manifest.between(sequence, sequence + 1):
            # Inside an archived segment gaps are rare, and nsqd would have to fetch it.
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
