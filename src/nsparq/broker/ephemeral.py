"""Bounds on the memory of ephemeral topics: in messages for each topic, in bytes for all of them
together."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from nsparq.storage.memory_log import EphemeralMemory, MemoryLog

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic


class EphemeralBound:
    """Keeps one ephemeral topic within the memory queue's size."""

    def __init__(self, topic: Topic, log: MemoryLog) -> None:
        self._topic = topic
        self._log = log
        self._limit = topic.broker.options.mem_queue_size
        self._has_more_to_carry = False
        """Whether carrying messages over has stopped half-way."""
        self._reclaim_above = 0
        """A log with more messages than this is reclaimed without waiting for upkeep."""

    @property
    def held_bytes(self) -> int:
        return self._log.held_bytes

    def apply(self) -> None:
        """After an append: reclaim if there may be too much."""
        topic, log = self._topic, self._log
        is_well_above = log.end - log.start > max(2 * self._limit, self._reclaim_above)
        is_full = not topic.channels or (topic.paused and topic.depth > self._limit)
        if is_full or is_well_above or self._has_more_to_carry:
            self.reclaim()

    def reclaim(self) -> None:
        """Let go of what nobody needs, or as much of it as can be done in one step. The next turn
        goes on."""
        topic, log, limit = self._topic, self._log, self._limit
        if not topic.channels:
            surplus = log.count(topic.origin, log.end) - limit
            if surplus > 0:
                topic.dropped_count += surplus
                topic.origin += surplus
                topic.drop_held_back_before(topic.origin)
            if topic.paused:
                topic.visible_end = topic.origin
            log.trim(topic.origin)
            return
        if topic.paused and (dropped := log.discard_oldest(topic.visible_end, limit)):
            topic.dropped_count += dropped
            topic.held_back = [held for held in topic.held_back if log.gaps.skip(held[0]) == held[0]]
        cursor = min(channel.cursor.position for channel in topic.channels.values())
        needed = min([channel.carried_over.carry_over(log, cursor) for channel in topic.channels.values()])
        self._has_more_to_carry = needed < cursor
        if self._has_more_to_carry:
            topic.broker.next_turn.add_topic(topic)
        if topic.holds:
            needed = min(needed, max(min(topic.holds.values()), log.end - limit))
        log.trim(needed)
        self._reclaim_above = 2 * (log.end - log.start)

    def give_up(self, size_bytes: int) -> None:
        """Let go of at least so many bytes: of what nobody needs, then of the oldest messages.
        Messages that were still to be sent are counted as dropped."""
        log = self._log
        enough = log.held_bytes - size_bytes
        self.reclaim()
        while self._has_more_to_carry and log.held_bytes > enough:
            self.reclaim()
        if log.held_bytes > enough:
            self._give_up_oldest(log.held_bytes - enough)

    def _give_up_oldest(self, size_bytes: int) -> None:
        topic, log = self._topic, self._log
        before = 0
        # What channels have carried over is older than the log.
        carried = [held for channel in topic.channels.values() for held in channel.carried_over.sizes()]
        for sequence, size in sorted(carried):
            if size_bytes <= 0 or sequence >= log.start:
                break
            size_bytes -= size
            before = sequence + 1
        if size_bytes > 0:
            before = max(before, log.end_of_oldest(size_bytes))
        topic.given_up_before = max(topic.given_up_before, before)
        if topic.depth:
            held_from = topic.visible_end if topic.channels else topic.origin
            topic.dropped_count += log.count(held_from, before)
            topic.drop_held_back_before(before)
        if not topic.channels:
            topic.origin = max(topic.origin, before)
            if topic.paused:
                topic.visible_end = topic.origin
        for channel in topic.channels.values():
            channel.give_up(before)
        log.trim(before)
        if topic.channels and topic.paused:
            log.gaps.add(topic.visible_end, before)


def bound_memory(topics: Mapping[str, Topic], memory: EphemeralMemory) -> None:
    """Keep all ephemeral topics together within their limit in bytes: the largest gives up its
    oldest messages. A sixteenth more than needed goes, so that this is not done for each
    message."""
    if memory.size_bytes <= memory.limit_bytes:
        return
    enough = memory.limit_bytes - memory.limit_bytes // 16
    least = memory.limit_bytes // 64
    bounds = {name: topic.bound for name, topic in topics.items() if topic.bound is not None}
    largest = [(-bound.held_bytes, name) for name, bound in bounds.items()]
    heapify(largest)
    while largest and (surplus := memory.size_bytes - enough) > 0:
        size, name = heappop(largest)
        following = largest[0][0] if largest else 0
        bound = bounds[name]
        bound.give_up(min(surplus, max(following - size, least, 1)))
        if bound.held_bytes < -size:
            heappush(largest, (-bound.held_bytes, name))
