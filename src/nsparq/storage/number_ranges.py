"""Sets of sequence numbers as ranges: small where the numbers lie together, and kept in a few
bytes."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class NumberRanges:
    """Disjoint half-open ranges in order. It never changes: the methods give another one. So a
    thread may encode it while the event loop goes on."""

    def __init__(self, bounds: Numbers | None = None) -> None:
        self.bounds: Numbers = np.empty(0, np.int64) if bounds is None else bounds
        """Start and end of each range, one after the other."""

    def holds(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these numbers are in a range."""
        odd: npt.NDArray[np.bool_] = np.searchsorted(self.bounds, numbers, side="right") % 2 == 1
        return odd

    def with_ranges(self, starts: Numbers, ends: Numbers) -> NumberRanges:
        """These ranges in addition. They may overlap."""
        if not len(starts):
            return self
        starts = np.concatenate((self.bounds[::2], starts))
        ends = np.concatenate((self.bounds[1::2], ends))
        order = np.argsort(starts, kind="stable")
        starts, reached = starts[order], np.maximum.accumulate(ends[order])
        # A range begins where all ranges before it have ended.
        begins = np.flatnonzero(np.append(True, starts[1:] > reached[:-1]))
        lasts = np.append(begins[1:], len(starts)) - 1
        return NumberRanges(np.column_stack((starts[begins], reached[lasts])).ravel())

    def without_before(self, number: int) -> NumberRanges:
        """Without the ranges that end at `number` or before."""
        return NumberRanges(self.bounds[2 * int(np.count_nonzero(self.bounds[1::2] <= number)) :])

    def encode(self) -> str:
        steps = np.diff(self.bounds, prepend=np.int64(0)).astype("<i8")
        return b64encode(zlib.compress(steps.tobytes(), 1)).decode()

    @classmethod
    def decode(cls, text: str) -> NumberRanges:
        """Raises ValueError."""
        try:
            steps = np.frombuffer(zlib.decompress(b64decode(text)), "<i8")
        except zlib.error as error:
            raise ValueError(f"ranges of numbers are damaged: {error}") from error
        return cls(np.cumsum(steps, dtype=np.int64))
