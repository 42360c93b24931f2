"""Message bodies end to end, with a table of their lengths: the form of messages from the wire to
the log. Header blocks have the same form beside them, if there are any.

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
    headers: PackedBodies | None = None
    """The header block of each message, empty for a message without headers. None if no message has
    headers."""
    has_numbers: bool = True
    """Of header blocks: False if certainly none of them has a producer's number. Looking for it
    costs more than all else that headers cost in nsqd."""

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
        lengths, has_headers = array("I"), False
        for part in parts:
            lengths.extend(part.lengths)
            has_headers = has_headers or part.headers is not None
        joined = cls(lengths, b"".join([part.data for part in parts]))
        if has_headers:
            joined.headers = join_headers([(len(part.lengths), part.headers) for part in parts])
        return joined

    def with_blocks(self, blocks: PackedBodies) -> PackedBodies:
        """The same bodies with these header blocks, which may all be empty."""
        return PackedBodies(self.lengths, self.data, blocks if blocks.data else None)

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
        if self.headers is not None:
            blocks = self.headers.split(most)
            return [piece.with_blocks(some) for piece, some in zip(pieces, blocks, strict=True)]
        return pieces

    def without_first(self, count: int) -> PackedBodies:
        """All but the first `count` bodies."""
        rest = PackedBodies(self.lengths[count:], self.data[sum(self.lengths[:count]) :])
        return rest if self.headers is None else rest.with_blocks(self.headers.without_first(count))

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
            same = self.lengths == other.lengths and self.data == other.data
            return same and self.headers == other.headers
        return self[:] == other

    def __hash__(self) -> int:
        return hash((self.lengths.tobytes(), self.data))

    def __repr__(self) -> str:
        blocks = "" if self.headers is None else f", headers={self.headers[:]!r}"
        return f"PackedBodies({self[:]!r}{blocks})"


def join_headers(parts: Sequence[tuple[int, PackedBodies | None]]) -> PackedBodies | None:
    """The header blocks of several groups of messages, given as (number of messages, blocks)."""
    if all(blocks is None for _, blocks in parts):
        return None
    return PackedBodies.join([blocks or _empty(count) for count, blocks in parts])


def _empty(count: int) -> PackedBodies:
    return PackedBodies(array("I", bytes(4 * count)), b"")
