"""How far behind a channel is, as time: the age of its oldest waiting message, and how fast its
depth falls.

/stats and /metrics ask for both, perhaps for ten thousand channels, so nothing here waits for the
disk. The publish time of a message that is only on disk is read once, in a thread. Until then the
age is unknown.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from nsparq.errors import StorageError
from nsparq.storage.batch import Batch
from nsparq.storage.carried import CarriedInMemory
from nsparq.storage.raw_batch import find_batch, iter_batches
from nsparq.storage.segment import Cold

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel

SECOND_NS: Final = 1_000_000_000
HALF_NS: Final = 150 * SECOND_NS
"""The drain rate is measured over one to two times this."""
LEAST_NS: Final = 10 * SECOND_NS
"""A drain rate over less time is unknown."""
MANY_REQUEUED: Final = 1000
"""From this many requeued or parked messages on, the oldest of them is looked for once a second."""


class Lag:
    """The lag of one channel."""

    __slots__ = ("_channel", "_known", "_lowest", "_middle", "_start")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._known = (-1, 0)
        """A sequence number, and the publish time of its message."""
        self._lowest = (0, 0)
        """The lowest requeued sequence number, and the monotonic time when it was found."""
        self._start: tuple[int, int] | None = None
        self._middle = (0, 0)
        """Monotonic time and depth, where the measurement of the drain rate began and where the
        next one will begin."""

    # the oldest waiting message

    def oldest_age_s(self) -> float | None:
        """Time since the oldest waiting message was published, by the wall clock; 0 if none waits,
        None if it is unknown for the moment."""
        sequence = self._oldest()
        if sequence is None:
            return 0.0
        published_ns = self._published_ns(sequence)
        if published_ns is None:
            return None
        # A clock that was set back makes no negative age.
        return max(0, self._channel.topic.broker.wall_ns() - published_ns) / SECOND_NS

    def _oldest(self) -> int | None:
        """The lowest sequence number of a message that is ready to be sent. Sequence numbers follow
        the order of publishing."""
        cursor, unfinished = self._channel.cursor, self._channel.unfinished
        requeued, parked = unfinished.requeued, unfinished.parked
        cursor.step_over()
        ahead = cursor.position if cursor.position < self._channel.topic.visible_end else None
        if not requeued and not parked:
            return ahead
        now_ns = self._channel.topic.broker.monotonic_ns()
        if len(requeued) + len(parked) < MANY_REQUEUED or now_ns - self._lowest[1] >= SECOND_NS:
            self._lowest = (min(chain(requeued, parked)), now_ns)
        return self._lowest[0] if ahead is None else min(self._lowest[0], ahead)

    def _published_ns(self, sequence: int) -> int | None:
        if self._known[0] != sequence:
            batch = self._in_memory(sequence)
            if batch is not None:
                self._known = (sequence, batch.timestamp_of(max(0, sequence - batch.base)))
            else:
                self._channel.topic.broker.stamps.want(self)
        return self._known[1] if self._known[0] == sequence else None

    def _in_memory(self, sequence: int) -> Batch | None:
        channel = self._channel
        log, carried = channel.topic.log, channel.carried_over.store
        if sequence in carried.kept:
            return carried.read(sequence) if isinstance(carried, CarriedInMemory) else None
        # With clients, delivery reads the same next, and without waiting for the disk.
        if sequence >= log.memory_start or channel.clients:
            try:
                return log.read(sequence)
            except (Cold, OSError):
                return None
        return None

    def reader(self) -> Reading | None:
        """To read the publish time of the oldest message in a thread; None if there is no need."""
        sequence = self._oldest()
        if sequence is None or self._known[0] == sequence or self._channel.is_exiting:
            return None
        try:
            reading = Reading(self, self._channel, sequence)
        except (StorageError, OSError):
            # It is lost. Delivery finds out, and drops it.
            return None
        return None if reading.is_remote else reading

    def note(self, sequence: int, published_ns: int) -> None:
        self._known = (sequence, published_ns)

    # how fast the depth falls

    def sample(self, now_ns: int, depth: int) -> None:
        """Called about once a second while the topic is used, and for /stats."""
        here = (now_ns, depth)
        if self._start is None or now_ns - self._middle[0] >= 2 * HALF_NS:
            # Nothing happened for long. What happens now has its own speed.
            self._start = self._middle = here
        elif now_ns - self._middle[0] >= HALF_NS:
            self._start, self._middle = self._middle, here

    def drain_rate(self, now_ns: int, depth: int) -> float | None:
        """Messages per second by which the depth falls; negative if it grows. None if unknown."""
        if self._start is None or now_ns - self._start[0] < LEAST_NS:
            return None
        return (self._start[1] - depth) / ((now_ns - self._start[0]) / SECOND_NS)

    def stats(self, now_ns: int, depth: int) -> dict[str, float | None]:
        """For /stats."""
        self.sample(now_ns, depth)
        age_s, rate = self.oldest_age_s(), self.drain_rate(now_ns, depth)
        time_s = 0.0 if not depth else depth / rate if rate is not None and rate > 0 else None
        return {
            "oldest_message_age_s": None if age_s is None else round(age_s, 3),
            "drain_rate": None if rate is None else round(rate, 3),
            "drain_time_s": None if time_s is None else round(time_s, 3),
        }


class Reading:
    """Reads the publish time of one message. Call run() in a thread, then finish()."""

    def __init__(self, lag: Lag, channel: Channel, sequence: int) -> None:
        self._lag = lag
        self._sequence = sequence
        self._range = channel.locate(sequence)
        self._published_ns = 0
        self.is_remote = self._range.is_remote
        """Whether it is only in an archive. A figure does not fetch it: the time is unknown."""

    def run(self) -> None:
        batches = [*iter_batches(self._range.read_verified().data)]
        batch = find_batch(batches, self._sequence)
        self._published_ns = batch.timestamp_ns if batch is not None else 0

    def finish(self) -> None:
        if self._published_ns:
            self._lag.note(self._sequence, self._published_ns)


class PublishTimes:
    """Reads publish times that are only on disk, one at a time: after a restart all channels may
    ask, and each reading has a file open."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._wanted: dict[Lag, None] = {}
        self._is_reading = False

    def want(self, lag: Lag) -> None:
        self._wanted[lag] = None
        self._next()

    def _next(self) -> None:
        while self._wanted and not self._is_reading:
            lag = next(iter(self._wanted))
            del self._wanted[lag]
            reading = lag.reader()
            if reading is not None:
                self._is_reading = True
                self._broker.try_in_background(reading.run, partial(self._done, reading))

    def _done(self, reading: Reading, error: OSError | None) -> None:
        """After an error of the disk the time stays unknown. The next /stats asks again."""
        self._is_reading = False
        reading.finish()
        self._next()
