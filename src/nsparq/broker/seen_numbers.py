"""Which messages a topic has already stored: the numbers that producers gave them.

A client has several publishes on their way and may repeat number n after n + 1 was stored. So the
highest number is not enough: each producer has the exact set of its recent numbers, as ranges.
Producers count in steps of one, so that is one range, and a few more while some are missing.

Old numbers leave the window. A number before the window is refused, because nobody can tell
whether it was stored. Knows no messages and no files; the time is an argument.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from nsparq.errors import NsparqError

MAX_RANGES: Final = 1000
"""Ranges of one producer. With more gaps than that, the window gets shorter."""
MAX_ENTRIES: Final = 20_000
"""Producers and ranges of one topic. Beyond that, the producer that was idle for longest goes."""


NumberRange = tuple[int, int]
"""The first number, and the one after the last."""


class NumberRefused(NsparqError):
    """A message that cannot be stored, because of its producer, epoch or number."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        """`BAD_MESSAGE`, `FENCED` or `NUMBER_TOO_OLD`; over TCP with `E_` before it."""
        self.index = 0
        """Which message of the publish it is."""


class Window(NamedTuple):
    """What is remembered for certain. Up to twice as much may be."""

    numbers: int
    """Of a producer."""
    age_ns: int


class Producer:
    """The numbers of one producer in one epoch."""

    __slots__ = ("_aged_at_ns", "_aged_before", "bounds", "entries", "epoch", "floor", "name")

    def __init__(self, name: str, epoch: int, now_ns: int) -> None:
        self.name = name
        self.epoch = epoch
        self.floor = 0
        """Numbers below this are before the window."""
        self.bounds: list[int] = []
        """Start and end of each range of stored numbers, ascending: a number is stored if an odd
        number of bounds are at or below it."""
        self.entries = 0
        """How many of MAX_ENTRIES it takes, when last counted."""
        self._aged_before = 0
        """Numbers below this were stored before `_aged_at_ns`."""
        self._aged_at_ns = now_ns

    def check(self, number: int) -> None:
        """Raises NumberRefused for a number before the window."""
        if number < self.floor:
            raise NumberRefused(
                "NUMBER_TOO_OLD",
                f"number {number} of producer {self.name} is before the window, which begins at "
                f"{self.floor}: nsqd no longer knows whether the message was stored",
            )

    def add(self, start: int, end: int) -> list[NumberRange]:
        """Note that the numbers from `start` to before `end` are stored. Gives those that were not,
        as ranges."""
        bounds = self.bounds
        if bounds and bounds[-1] == start:
            # The usual case: the producer goes on.
            bounds[-1] = end
            return [(start, end)]
        low, high = bisect_right(bounds, start), bisect_left(bounds, end)
        missing = [*([] if low % 2 else [start]), *bounds[low:high], *([] if high % 2 else [end])]
        low, high = bisect_left(bounds, start), bisect_right(bounds, end)
        bounds[low:high] = [*([] if low % 2 else [start]), *([] if high % 2 else [end])]
        return [*zip(missing[::2], missing[1::2], strict=True)]

    def discard(self, start: int, end: int) -> None:
        """The numbers from `start` to before `end` are not stored after all."""
        low, high = bisect_left(self.bounds, start), bisect_right(self.bounds, end)
        self.bounds[low:high] = [*([start] if low % 2 else []), *([end] if high % 2 else [])]

    def forget_old(self, window: Window, now_ns: int) -> None:
        """Move the window up to the present."""
        end = self.bounds[-1] if self.bounds else 0
        floor = self.floor
        if end - floor > 2 * window.numbers:
            floor = end - window.numbers
        if now_ns - self._aged_at_ns >= window.age_ns:
            floor = max(floor, self._aged_before)
            self._aged_before, self._aged_at_ns = end, now_ns
        if len(self.bounds) > 2 * MAX_RANGES:
            floor = max(floor, self.bounds[len(self.bounds) // 4 * 2 - 1])
        if floor > self.floor:
            self.floor = floor
            index = bisect_right(self.bounds, floor)
            self.bounds[:index] = [floor] if index % 2 else []

    def stored(self) -> list[Any]:
        """For the disk."""
        return [self.name, self.epoch, self.floor, self._aged_before, self._aged_at_ns, *self.bounds]

    @classmethod
    def restored(cls, stored: list[Any], now_ns: int) -> Producer:
        """Raises ValueError or TypeError for anything else than stored() gives."""
        name, *numbers = stored
        epoch, floor, aged_before, aged_at_ns, *bounds = map(int, numbers)
        if len(bounds) % 2 or bounds != sorted({*bounds}):
            raise ValueError("not ranges of numbers")
        producer = cls(str(name), epoch, now_ns)
        producer.floor, producer._aged_before, producer.bounds = floor, aged_before, bounds
        # The clock may have been set back since.
        producer._aged_at_ns = min(aged_at_ns, now_ns)
        return producer


class SeenNumbers:
    """The producers of one topic."""

    def __init__(self, window: Window, max_entries: int = MAX_ENTRIES) -> None:
        self._window = window
        self._max_entries = max_entries
        self._producers: OrderedDict[str, Producer] = OrderedDict()
        """The one that published last is at the end."""
        self._entries = 0
        """Producers and ranges."""

    def __iter__(self) -> Iterator[Producer]:
        return iter(self._producers.values())

    def find(self, name: str, epoch: int, now_ns: int) -> Producer:
        """The producer, which is about to publish. A newer epoch begins anew. Raises NumberRefused
        for an older one: another process has taken over the name."""
        producer = self._producers.get(name)
        if producer is not None and producer.epoch > epoch:
            raise NumberRefused(
                "FENCED",
                f"epoch {epoch} of producer {name} is over: another process publishes under this name, "
                f"with epoch {producer.epoch}",
            )
        if producer is None or producer.epoch < epoch:
            producer = Producer(name, epoch, now_ns)
            self.put(producer)
        self._producers.move_to_end(name)
        return producer

    def put(self, producer: Producer) -> None:
        """Add a producer, or replace it by that of a newer epoch."""
        replaced = self._producers.get(producer.name)
        self._entries -= 0 if replaced is None else replaced.entries
        producer.entries = 0
        self._producers[producer.name] = producer
        self._keep_to_limit(producer)

    def tidy(self, producer: Producer, now_ns: int) -> None:
        """Forget what is no longer in the window, after numbers were added."""
        producer.forget_old(self._window, now_ns)
        self._keep_to_limit(producer)

    def _keep_to_limit(self, producer: Producer) -> None:
        entries = 1 + len(producer.bounds) // 2
        self._entries += entries - producer.entries
        producer.entries = entries
        while self._entries > self._max_entries and len(self._producers) > 1:
            _, oldest = self._producers.popitem(last=False)
            self._entries -= oldest.entries
