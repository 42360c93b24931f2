"""Figures over time, in memory, for the charts and for the overview.

A table holds the series of one kind (topics, channels, …), each with the same few figures, in four
rings: every poll for some minutes, then a point per minute, per ten minutes, per two hours for a
week. The arrays grow with the number of series, in blocks, up to the table's limit:

    block: [slot][series][figure], float32      a poll writes one slot of each block, in one piece

A series that was not seen for a while gives its place to another. A series without room in the
rings has its latest figures but no history. NaN means unknown: a node did not answer, or the series
was not there yet.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["RANGES", "SLOTS", "Places", "Piece", "Points", "Table", "Trend", "fit", "steady_clock"]

Floats = NDArray[np.float32]
Places = NDArray[np.intp]

BLOCK: Final = 256
STEPS: Final = (60, 600, 7200)
"""Seconds between points in the coarser rings; in the finest ring it is the time between polls."""
SLOTS: Final = (240, 150, 144, 84)
RANGES: Final = ("now", "hours", "day", "week")
"""Names of the rings."""
FORGET_S: Final = 900.0
"""How long an unseen series keeps its place."""


def steady_clock() -> Callable[[], float]:
    """Unix time that never goes back, whatever happens to the system's clock."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class Points(NamedTuple):
    """One series: times in Unix seconds, and a row of figures for each."""

    times: list[float]
    values: Floats


class Piece(NamedTuple):
    """Some series of a table with all their points, as they are saved."""

    keys: list[list[str]]
    born_s: list[float]
    seen_s: list[float]
    ordinals: list[NDArray[np.int64]]
    """For each ring: the points that it has."""
    values: list[Floats]
    """For each ring: `[point][series][figure]`."""


class Trend(NamedTuple):
    """A straight line through the points of each series. NaN if there are too few."""

    slope: NDArray[np.float64]
    """Per second."""
    correlation: NDArray[np.float64]
    """Of value and time, from -1 to 1. Near 0 the values have no direction."""
    span_s: NDArray[np.float64]
    """Time from the first point to the last."""


def fit(times: NDArray[np.float64], values: NDArray[Any], least_s: float) -> Trend:
    """`values`: a row for each time, a column for each series. NaN is left out. Less than three
    points, or a span below `least_s`, are too few."""
    known = ~np.isnan(values)
    at = np.where(known, (times - times[0])[:, None] if len(times) else 0.0, np.nan)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        # A series without points gives NaN, as it should.
        warnings.simplefilter("ignore", RuntimeWarning)
        span_s = np.nanmax(at, axis=0, initial=0.0) - np.nanmin(at, axis=0, initial=math.inf)
        at -= np.nanmean(at, axis=0)
        off = values - np.nanmean(values, axis=0, dtype=np.float64)
        spread, shared = np.nansum(at * at, axis=0), np.nansum(at * off, axis=0)
        slope, correlation = shared / spread, shared / np.sqrt(spread * np.nansum(off * off, axis=0))
    is_flat = (shared == 0) & (spread > 0)
    correlation[is_flat] = 0.0
    too_few = (known.sum(axis=0) < 3) | ~(span_s >= least_s)
    slope[too_few] = correlation[too_few] = math.nan
    return Trend(slope, correlation, span_s)


class _Ring:
    """One resolution. Slots are reused in turn."""

    def __init__(self, step_s: float, slots: int, width: int) -> None:
        self.step_s, self.slots, self.width = step_s, slots, width
        self.blocks: list[Floats] = []
        self.ordinals = np.full(slots, -1, dtype=np.int64)
        """The point in each slot: its time divided by the step; -1 for none."""
        self.newest = -1

    def add_block(self) -> None:
        # Zeros take no memory until they are written.
        self.blocks.append(np.zeros((self.slots, BLOCK, self.width), dtype=np.float32))

    def open(self, ordinal: int) -> int:
        """The slot for a point."""
        slot = ordinal % self.slots
        self.ordinals[slot] = ordinal
        self.newest = max(self.newest, ordinal)
        return slot

    def known(self) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The used slots in order of time, and their times."""
        found = np.flatnonzero((self.ordinals >= 0) & (self.ordinals > self.newest - self.slots))
        found = found[np.argsort(self.ordinals[found])]
        return found, self.ordinals[found].astype(np.float64) * self.step_s


class Table:
    """Series of one kind. For each poll: begin(), write the figures of each series to its place in
    `now`, commit()."""

    def __init__(
        self,
        figures: Sequence[str],
        *,
        poll_s: float,
        max_bytes: int,
        peaks: Sequence[str] = (),
        max_series: int = 1 << 30,
    ) -> None:
        """Coarser rings keep the highest value of `peaks`, and the mean of other figures."""
        self.figures = tuple(figures)
        self.column = {name: place for place, name in enumerate(self.figures)}
        width = len(self.figures)
        self._is_peak = np.array([name in peaks for name in self.figures])
        steps = (poll_s, *(max(step, poll_s) for step in STEPS))
        self._rings = [_Ring(step, slots, width) for step, slots in zip(steps, SLOTS, strict=True)]
        self.bytes_per_series = width * sum(SLOTS) * 4
        self.max_blocks = min(max_bytes // (self.bytes_per_series * BLOCK), -(-max_series // BLOCK))
        self._index: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._count = 0
        """Places in use, or free again."""
        self._born_s = np.empty(0)
        """For each place, the time since when its present series has it."""
        self._seen_s = np.empty(0)
        self.now = np.empty((0, width))
        """The latest figures of every place; NaN if unknown."""
        self._time_s = 0.0
        self._tidied_s = 0.0

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._index

    @property
    def size_bytes(self) -> int:
        """The most memory that the history of the present series can take."""
        return len(self._rings[0].blocks) * BLOCK * self.bytes_per_series

    # Writing

    def begin(self, time_s: float) -> None:
        self._time_s = time_s
        self.now[:] = np.nan

    def places(self, keys: Iterable[Hashable]) -> Places:
        """The places of these series; a new series gets one."""
        index, wanted = self._index, [*keys]
        found = np.fromiter((index.get(key, -1) for key in wanted), dtype=np.intp)
        for position in np.flatnonzero(found < 0):
            found[position] = self._add(wanted[position])
        return found

    def see(self, places: Places) -> None:
        """Note that these series are still there."""
        self._seen_s[places] = self._time_s

    def put(self, key: Hashable, values: Sequence[float] | NDArray[np.float64]) -> None:
        place = self._index.get(key, -1)
        if place < 0:
            place = self._add(key)
        self._seen_s[place] = self._time_s
        self.now[place] = values

    def _add(self, key: Hashable) -> int:
        if key in self._index:  # twice among the keys of one call
            return self._index[key]
        if self._free:
            place = self._free.pop()
        else:
            place = self._count
            self._count += 1
            if place % BLOCK == 0:
                self._grow(place // BLOCK)
        self._born_s[place] = self._seen_s[place] = self._time_s
        self._index[key] = place
        return place

    def _grow(self, blocks: int) -> None:
        self.now = np.concatenate([self.now, np.full((BLOCK, len(self.figures)), np.nan)])
        self._born_s = np.concatenate([self._born_s, np.zeros(BLOCK)])
        self._seen_s = np.concatenate([self._seen_s, np.zeros(BLOCK)])
        if blocks < self.max_blocks:
            for ring in self._rings:
                ring.add_block()

    def commit(self) -> None:
        """Store `now` as the point of this poll."""
        for coarse, fine in zip(self._rings[1:], self._rings, strict=False):
            # Polls may be far apart, and nsqadmin may have been stopped meanwhile.
            last = int(fine.newest * fine.step_s // coarse.step_s)
            if coarse.newest < last < int(self._time_s // coarse.step_s):
                self._condense(coarse, fine, last)
        for coarse in self._rings[1:]:
            coarse.newest = max(coarse.newest, int(self._time_s // coarse.step_s) - 1)
        ring = self._rings[0]
        slot = ring.open(int(self._time_s // ring.step_s))
        for number, block in enumerate(ring.blocks):
            block[slot] = self.now[number * BLOCK : (number + 1) * BLOCK]
        if self._time_s - self._tidied_s > FORGET_S / 3:
            self._forget()

    def _condense(self, coarse: _Ring, fine: _Ring, ordinal: int) -> None:
        """Write a point of the coarse ring from the points of the finer one."""
        begin_s, end_s = ordinal * coarse.step_s, (ordinal + 1) * coarse.step_s
        slots, times = fine.known()
        within = slots[(times >= begin_s) & (times < end_s)]
        if not len(within):
            return
        slot = coarse.open(ordinal)
        for block, finer in zip(coarse.blocks, fine.blocks, strict=True):
            part = finer[within]
            with warnings.catch_warnings():
                # The mean of nothing but NaN is NaN, as it should be.
                warnings.simplefilter("ignore", RuntimeWarning)
                block[slot] = np.where(self._is_peak, np.nanmax(part, axis=0), np.nanmean(part, axis=0))

    def _forget(self) -> None:
        """Free the places of series that were not seen for FORGET_S."""
        self._tidied_s = self._time_s
        limit_s = self._time_s - FORGET_S
        for key in [key for key, place in self._index.items() if self._seen_s[place] < limit_s]:
            place = self._index.pop(key)
            self._free.append(place)
            self.now[place] = np.nan
        # Use places with history first.
        self._free.sort(reverse=True)

    # Reading

    def items(self) -> Iterator[tuple[Any, int]]:
        """Each series with its place in `now`."""
        return iter(self._index.items())

    def find(self, key: Hashable) -> int:
        """The place of the series; -1 if it is unknown."""
        return self._index.get(key, -1)

    def latest(self, key: Hashable) -> dict[str, float] | None:
        """The figures of the last poll by name, NaN if unknown; None if the series is unknown."""
        place = self._index.get(key)
        if place is None:
            return None
        return dict(zip(self.figures, map(float, self.now[place]), strict=True))

    def top(self, figure: str, count: int) -> list[Any]:
        """The keys of the series with the highest values of a figure, without zeros."""
        values = self.now[:, self.column[figure]]
        known = np.flatnonzero(values > 0)
        if not len(known):
            return []
        best = {int(place): rank for rank, place in enumerate(known[np.argsort(-values[known])][:count])}
        found = [(best[place], key) for key, place in self._index.items() if place in best]
        return [key for _, key in sorted(found, key=lambda one: one[0])]

    def points(self, key: Hashable, resolution: int = 0) -> Points:
        """The series at one of the resolutions; no points if it is unknown."""
        place = self._index.get(key, -1)
        ring = self._rings[resolution]
        if place < 0 or place // BLOCK >= len(ring.blocks):
            return Points([], np.empty((0, len(self.figures)), dtype=np.float32))
        slots, times = ring.known()
        # A coarse point from before may belong to the series that had the place.
        is_own = times > self._born_s[place] - (0 if resolution else ring.step_s)
        block = ring.blocks[place // BLOCK]
        return Points([*map(float, times[is_own])], block[slots[is_own], place % BLOCK])

    def step_s(self, resolution: int) -> float:
        return self._rings[resolution].step_s

    def before(self, age_s: float, figure: str) -> tuple[NDArray[np.float64], float] | None:
        """A figure of all series, by place, about `age_s` ago, and the exact age. NaN for series
        that were not there or have no history. None if there is no point of that time."""
        ring = self._rings[0]
        slots, times = ring.known()
        if not len(slots):
            return None
        wanted_s = self._time_s - age_s
        nearest = int(np.argmin(np.abs(times - wanted_s)))
        if abs(times[nearest] - wanted_s) > max(2 * ring.step_s, age_s / 4):
            return None
        found = np.full(len(self.now), np.nan)
        for number, block in enumerate(ring.blocks):
            found[number * BLOCK : (number + 1) * BLOCK] = block[slots[nearest], :, self.column[figure]]
        found[self._born_s > times[nearest] + ring.step_s] = np.nan
        return found, self._time_s - float(times[nearest])

    def recent(self, figure: str, for_s: float) -> NDArray[np.float64]:
        """The mean of a figure over `for_s` seconds, of all series by place. NaN if unknown."""
        ring = self._rings[0]
        slots, times = ring.known()
        slots, column = slots[times > self._time_s - for_s], self.column[figure]
        found = self.now[:, column].copy()
        for number, block in enumerate(ring.blocks if len(slots) else ()):
            rows = slice(number * BLOCK, (number + 1) * BLOCK)
            part = block[slots, :, column].astype(np.float64)
            # Points from before a series had its place are not its own.
            part[times[-len(slots) :, None] + ring.step_s <= self._born_s[None, rows]] = np.nan
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                found[rows] = np.nanmean(part, axis=0)
        return found

    def trend(self, figure: str, for_s: float, least_s: float) -> Trend:
        """How a figure of all series, by place, went over the last `for_s` seconds."""
        ring, column = self._rings[0], self.column[figure]
        slots, times = ring.known()
        is_recent = times > self._time_s - for_s
        slots, times = slots[is_recent], times[is_recent]
        found = Trend(*(np.full(len(self.now), np.nan) for _ in Trend._fields))
        for number, block in enumerate(ring.blocks if len(slots) else ()):
            rows = slice(number * BLOCK, (number + 1) * BLOCK)
            part = block[slots, :, column].astype(np.float64)
            part[times[:, None] + ring.step_s <= self._born_s[None, rows]] = np.nan
            for whole, piece in zip(found, fit(times, part, least_s), strict=True):
                whole[rows] = piece
        return found

    # Saving

    @property
    def steps(self) -> list[float]:
        """Seconds between two points, of each ring."""
        return [ring.step_s for ring in self._rings]

    @property
    def piece_count(self) -> int:
        return len(self._rings[0].blocks)

    def piece(self, number: int) -> Piece:
        """A copy of the series in one block."""
        found = [(key, place) for key, place in self.items() if place // BLOCK == number]
        places = np.array([place for _, place in found], dtype=np.intp)
        ordinals, values = [], []
        for ring in self._rings:
            slots, _ = ring.known()
            ordinals.append(ring.ordinals[slots])
            values.append(ring.blocks[number][slots[:, None], places % BLOCK])
        return Piece(
            [list(key) for key, _ in found],
            self._born_s[places].tolist(),
            self._seen_s[places].tolist(),
            ordinals,
            values,
        )

    def restore(
        self, figures: Sequence[str], steps: Sequence[float], pieces: Sequence[Piece], now_s: float
    ) -> None:
        """Take over saved pieces, before the first poll. A ring with another step stays empty, and
        a figure that was not saved is unknown. Points after `now_s` are left out: the clock was set
        back."""
        columns = [(place, self.column[name]) for place, name in enumerate(figures) if name in self.column]
        theirs, ours = [place for place, _ in columns], [place for _, place in columns]
        for number, ring in enumerate(self._rings):
            if number < len(steps) and steps[number] == ring.step_s:
                for piece in pieces:
                    found = piece.ordinals[number]
                    found = found[(found >= 0) & (found * ring.step_s <= now_s)]
                    np.maximum.at(ring.ordinals, found % ring.slots, found)
                ring.newest = int(ring.ordinals.max())
        for piece in pieces:
            places = self.places(tuple(key) for key in piece.keys)
            self._born_s[places] = np.minimum(piece.born_s, now_s)
            self._seen_s[places] = np.minimum(piece.seen_s, now_s)
            for number, ring in enumerate(self._rings):
                known, _ = ring.known()
                slots = piece.ordinals[number] % ring.slots
                is_kept = ring.ordinals[slots] == piece.ordinals[number]
                for block_number in np.unique(places // BLOCK):
                    if block_number >= len(ring.blocks):
                        continue
                    mine = np.flatnonzero(places // BLOCK == block_number)
                    rows, block = places[mine] % BLOCK, ring.blocks[block_number]
                    block[known[:, None], rows] = np.nan
                    part = np.full((int(is_kept.sum()), len(mine), len(self.figures)), np.nan, np.float32)
                    part[:, :, ours] = piece.values[number][is_kept][:, mine][:, :, theirs]
                    block[slots[is_kept][:, None], rows] = part
