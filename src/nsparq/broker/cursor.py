"""Where a channel stands in its topic's log.

The cursor moves forward over every sequence number once. It skips numbers without a message for the
channel: gaps of the log, ranges that are not the channel's (`skips`), and messages published with a
delay, which are among the channel's unfinished messages from the start.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nsparq.storage.gaps import Gaps

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic


class Cursor:
    """The next message to deliver for the first time, and the messages to skip on the way."""

    def __init__(self, topic: Topic, position: int) -> None:
        self._topic = topic
        self.position = position
        """The next sequence number never delivered."""
        self.skips = Gaps()
        """Messages of the log that the cursor skips: imported from another nsqd for one channel
        alone, or, with their attempts, requeued from the start."""
        self.replay = (0, 0)
        """Deferred messages below the first number and due by the second are delivered by the
        cursor like any other: they were due when the channel went back to them."""
        self.deferred_ahead: deque[int] = deque()
        """Sequence numbers of deferred messages that the cursor will skip."""

    @property
    def ahead(self) -> int:
        """Messages that the cursor has still to deliver."""
        return self.count_to(self._topic.visible_end) - len(self.deferred_ahead)

    def count_to(self, end: int) -> int:
        """Messages from the cursor to `end`, deferred ones included."""
        log = self._topic.log
        if not self.skips.ranges:
            return log.count(self.position, end)
        both = Gaps(self.skips.ranges)
        for start, stop in log.gaps.ranges:
            both.add(start, stop)
        return max(0, end - self.position) - both.count(self.position, end)

    def count_below(self, sequence: int) -> int:
        """Messages that the cursor has still to deliver before it reaches a number."""
        return self.count_to(sequence) - sum(1 for one in self.deferred_ahead if one < sequence)

    def next_messages(self, count: int, start: int = 0) -> list[int]:
        """The sequence numbers of the next messages from `start` on, up to `count`."""
        gaps, skips, end = self._topic.log.gaps, self.skips, self._topic.visible_end
        deferred = iter(self.deferred_ahead)
        passed_by = next(deferred, end)
        found: list[int] = []
        sequence = max(self.position, start)
        while len(found) < count:
            following = skips.skip(gaps.skip(sequence))
            if following > sequence:
                sequence = following
                continue
            if sequence >= end:
                break
            while passed_by < sequence:
                passed_by = next(deferred, end)
            if sequence != passed_by:
                found.append(sequence)
            sequence += 1
        return found

    def step_over(self) -> None:
        """Move out of numbers that hold no message for this channel."""
        gaps, skips, ahead = self._topic.log.gaps, self.skips, self.deferred_ahead
        if not (gaps.ranges or skips.ranges or ahead):
            return
        end = self._topic.visible_end
        while self.position < end:
            following = skips.skip(gaps.skip(self.position))
            while ahead and ahead[0] <= following:
                following = max(following, ahead.popleft() + 1)
            if following == self.position:
                break
            self.jump(min(following, end))
        skips.drop_before(self.position)

    def free_until(self) -> int:
        """How far the cursor may go before it must step over something. Batches read from disk come
        joined, so this may be inside one."""
        end = self._topic.visible_end
        if self.deferred_ahead:
            end = min(end, self.deferred_ahead[0])
        gaps, skips = self._topic.log.gaps.ranges, self.skips.ranges
        if gaps or skips:
            for ranges in (gaps, skips):
                for start, _ in ranges:
                    if self.position < start < end:
                        end = start
        return end

    def behind(self, count: int) -> int:
        """The sequence number that the cursor reaches after `count` messages."""
        end = self._topic.visible_end
        reached = self.position + count
        while reached < end:
            missing = count - self.count_below(reached)
            if missing <= 0:
                return reached
            reached += missing
        return end

    def jump(self, sequence: int) -> None:
        """Move, and forget the deferred messages that are skipped."""
        self.position = sequence
        while self.deferred_ahead and self.deferred_ahead[0] < sequence:
            self.deferred_ahead.popleft()

    def lost(self, start: int, end: int) -> None:
        """The log has lost these numbers, and with them deferred messages that the cursor would
        have skipped."""
        if any(start <= sequence < end for sequence in self.deferred_ahead):
            self.deferred_ahead = deque(one for one in self.deferred_ahead if not start <= one < end)

    def delivers_deferred(self, sequence: int, due_ns: int) -> bool:
        """Whether a deferred message is delivered by the cursor: see `replay`."""
        return sequence < self.replay[0] and due_ns <= self.replay[1]
