"""Message bodies end to end, with a table of their lengths: the form of messages from the wire to
the log.

A publish of two hundred messages is two objects instead of two hundred, and it already has the form
in which it is written to disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload


@dataclass(slots=True, eq=False, repr=False)
class PackedBodies(Sequence[bytes]):
    """Bodies as one string of bytes. Reads like a list of them, and equals one."""

    lengths: array[int]
    """Unsigned 32-bit numbers, array type "I"."""
    data: bytes

    @classmethod
    def of(cls, bodies: Iterable[bytes]) -> PackedBodies:
        # Not isinstance: with an abstract base class that takes longer than everything else here.
        if type(bodies) is cls:
            return bodies
        listed = bodies if type(bodies) is list else [*bodies]
        return cls(array("I", map(len, listed)), b"".join(listed))

    @classmethod
    def join(cls, parts: Sequence[PackedBodies]) -> PackedBodies:
        if len(parts) == 1:
            return parts[0]
        lengths = array("I")
        for part in parts:
            lengths.extend(part.lengths)
        return cls(lengths, b"".join([part.data for part in parts]))

    def split(self, most: int) -> list[PackedBodies]:
        """Pieces of at most `most` bodies each."""
        if len(self.lengths) <= most:
            return [self]
        pieces = []
        position = 0
        for start in range(0, len(self.lengths), most):
            lengths = self.lengths[start : start + most]
            end = position + sum(lengths)
            pieces.append(PackedBodies(lengths, self.data[position:end]))
            position = end
        return pieces

    def without_first(self, count: int) -> PackedBodies:
        """All but the first `count` bodies."""
        return PackedBodies(self.lengths[count:], self.data[sum(self.lengths[:count]) :])

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        ends = [0, *accumulate(self.lengths)]
        bodies = [self.data[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        return bodies[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedBodies):
            return self.lengths == other.lengths and self.data == other.data
        return self[:] == other

    def __hash__(self) -> int:
        return hash((self.lengths.tobytes(), self.data))

    def __repr__(self) -> str:
        return f"PackedBodies({self[:]!r})"
