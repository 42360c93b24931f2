"""The zeros that a busy segment is prepared with: see storage.batch. A primary does not send
them."""

from __future__ import annotations

from collections.abc import Sequence

from nsparq.storage.files import Buffer

_ZEROS = memoryview(bytes(16 << 10))
"""Short, so that they stay in the processor's cache."""


def zeros(size: int) -> list[Buffer]:
    """So many zeros. count_zeros() knows them without a look at their bytes."""
    whole, rest = divmod(size, len(_ZEROS))
    return [*[_ZEROS] * whole, _ZEROS[:rest]]


def count_zeros(buffers: Sequence[Buffer]) -> int:
    """How many of the last buffers are from zeros()."""
    count = 0
    for buffer in reversed(buffers):
        if type(buffer) is not memoryview or buffer.obj is not _ZEROS.obj:
            break
        count += 1
    return count
