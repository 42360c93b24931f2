"""Limit on the memory of batches, for all topics of a daemon together."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from nsparq.storage.batch import Batch


class Owner(Protocol):
    """A log that keeps batches in memory and can drop them."""

    def forget(self, batch: Batch) -> bool: ...


class BatchCache:
    """Counts the bytes of all batches in memory. Over the limit, the least recently used one goes.

    The newest batch always stays, however large: it is about to be delivered.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._batches: OrderedDict[Batch, Owner] = OrderedDict()

    def add(self, owner: Owner, batch: Batch) -> None:
        self._batches[batch] = owner
        self.size_bytes += batch.size
        if self.size_bytes > self.limit_bytes:
            self._evict(batch)

    def _evict(self, newest: Batch) -> None:
        while self.size_bytes > self.limit_bytes:
            batch, owner = next(iter(self._batches.items()))
            if batch is newest:
                return
            if not owner.forget(batch):
                self._evict_others(newest)
                return

    def _evict_others(self, newest: Batch) -> None:
        """The disk refuses the oldest batch, so it stays. Evict others instead."""
        for batch, owner in [*self._batches.items()]:
            if self.size_bytes <= self.limit_bytes:
                return
            if batch is not newest and batch in self._batches:
                owner.forget(batch)

    def use(self, batch: Batch) -> None:
        """Note that a batch that was read back from disk was used again."""
        self._batches.move_to_end(batch)

    def remove(self, batch: Batch) -> None:
        """The owner calls this once, when it drops a batch."""
        del self._batches[batch]
        self.size_bytes -= batch.size
