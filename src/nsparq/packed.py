"""Message bodies end to end with the table of their lengths: how messages travel from the wire to the log.

A publish of two hundred messages is two objects instead of two hundred, and it is already in the form in
which it goes to disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import overload


class PackedBodies(Sequence[bytes]):
    """Bodies as one string of bytes; reads like a list of them, and equals one."""

    __slots__ = ("data", "lengths")

    def __init__(self, lengths: array[int], data: bytes) -> None:
        self.lengths = lengths
        """Unsigned 32-bit numbers, array type "I"."""
        self.data = data

    @classmethod
    def of(cls, bodies: Iterable[bytes]) -> PackedBodies:
        # By type: asking an abstract class takes longer than all the rest.
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
        """Pieces of no more than `most` bodies each."""
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
        """All but so many at the beginning."""
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
