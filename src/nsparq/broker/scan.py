"""The queue scan: finds messages that have timed out or are due, over all channels.

NSQ looks at a few channels every 100 ms, chosen at random, with a pool of workers that grows with
the number of channels. If more than a quarter of them had something, it looks again at once. The
numbers here are NSQ's, the choice is better: channels say when they next have something, and only
those whose time has come are candidates. An idle channel costs nothing, and a new one need not wait
for a refresh.
"""

from __future__ import annotations

from collections.abc import Generator
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING

from nsparq.private_random import private_random

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel

INTERVAL_S = 0.1
DIRTY_SHARE = 0.25
POOL_SHARE = 0.25
SLICE = 256
"""Messages that a worker handles before it yields to the event loop."""
TIDY_LEAST = 64
"""Dead entries that the heap may have in any case."""


class QueueScan:
    """One for the whole broker. The server calls scan() every INTERVAL_S and rests at each
    yield."""

    def __init__(self, selection_count: int, worker_pool_max: int) -> None:
        self._selection_count = selection_count
        self._worker_pool_max = worker_pool_max
        self._heap: list[tuple[int, int, Channel]] = []
        self._order = count()
        self._tidy_at = TIDY_LEAST
        """Size of the heap at which its dead entries are removed."""
        self.workers = 1

    def watch(self, channel: Channel, at_ns: int) -> None:
        """Look at the channel when `at_ns` has come."""
        heappush(self._heap, (at_ns, next(self._order), channel))
        if len(self._heap) > self._tidy_at:
            self._tidy()

    def _tidy(self) -> None:
        """Keep one entry for each channel that is watched. A channel leaves a dead entry each time
        that it is watched for an earlier time, and that entry would stay until its time: an hour
        for some deferred messages."""
        watched = {c: at_ns for at_ns, _, c in self._heap if c.watched_ns == at_ns and not c.is_exiting}
        self._heap = [(at_ns, next(self._order), channel) for channel, at_ns in watched.items()]
        heapify(self._heap)
        self._tidy_at = 2 * len(self._heap) + TIDY_LEAST

    def resize(self, channels: int) -> None:
        """Adjust the pool to the number of channels."""
        self.workers = max(1, min(int(channels * POOL_SHARE), self._worker_pool_max))

    def scan(self, now_ns: int) -> Generator[None, None, None]:
        """Serve the channels whose time has come, in rounds. Yields to the event loop in
        between."""
        candidates = self._take_due(now_ns)
        while candidates:
            chosen = private_random.sample(candidates, min(self._selection_count, len(candidates)))
            remaining = set(chosen)
            candidates = [channel for channel in candidates if channel not in remaining]
            dirty = yield from self._round(chosen, now_ns)
            if dirty <= DIRTY_SHARE * len(chosen):
                break
            candidates += self._take_due(now_ns)
        for channel in candidates:
            channel.watched_ns = now_ns
            self.watch(channel, now_ns)

    def _take_due(self, now_ns: int) -> list[Channel]:
        due = []
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, channel = heappop(self._heap)
            # The entry is stale if the channel has replaced it by an earlier one.
            if channel.watched_ns == at_ns:
                channel.watched_ns = None
                if not channel.is_exiting:
                    due.append(channel)
        return due

    def _round(self, chosen: list[Channel], now_ns: int) -> Generator[None, None, int]:
        """Work through the chosen channels, as many at a time as there are workers."""
        waiting = iter(chosen)
        busy: list[Channel] = []
        dirty: set[Channel] = set()
        while True:
            busy += islice(waiting, self.workers - len(busy))
            if not busy:
                return len(dirty)
            for channel in [*busy]:
                done = 0 if channel.is_exiting else channel.expire(now_ns, SLICE)
                if done:
                    dirty.add(channel)
                if done < SLICE:
                    busy.remove(channel)
                    self._rewatch(channel)
            yield

    def _rewatch(self, channel: Channel) -> None:
        at_ns = channel.next_event()
        if (
            at_ns is not None
            and not channel.is_exiting
            and (channel.watched_ns is None or at_ns < channel.watched_ns)
        ):
            channel.watched_ns = at_ns
            self.watch(channel, at_ns)
