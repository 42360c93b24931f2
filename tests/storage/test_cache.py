"""The limit on the memory of batches."""

from __future__ import annotations

from nsparq.storage.batch import Batch
from nsparq.storage.cache import BatchCache

from .support import NOW_NS


class Keeper:
    """An owner that drops batches, except those it must keep."""

    def __init__(self, cache: BatchCache) -> None:
        self.cache = cache
        self.forgotten: list[int] = []
        self.stubborn: set[int] = set()

    def forget(self, batch: Batch) -> bool:
        if batch.base in self.stubborn:
            return False
        self.forgotten.append(batch.base)
        self.cache.remove(batch)
        return True


def batch_of(base: int, size: int = 26) -> Batch:
    """A batch that counts as 100 bytes, or another size."""
    made = Batch.single(base, NOW_NS, b"x" * size)
    assert made.size == 2 * size + 48
    return made


def test_bytes_are_counted_as_batches_come_and_go() -> None:
    cache = BatchCache(1000)
    keeper = Keeper(cache)
    first, second = batch_of(1), batch_of(2)
    cache.add(keeper, first)
    cache.add(keeper, second)
    assert cache.size_bytes == 200
    cache.remove(first)
    assert cache.size_bytes == 100
    cache.remove(second)
    assert cache.size_bytes == 0


def test_exactly_the_limit_is_within_it() -> None:
    cache = BatchCache(200)
    keeper = Keeper(cache)
    cache.add(keeper, batch_of(1))
    cache.add(keeper, batch_of(2))
    assert keeper.forgotten == []


def test_over_the_limit_the_oldest_batches_go_first_whoever_owns_them() -> None:
    cache = BatchCache(250)
    one, other = Keeper(cache), Keeper(cache)
    cache.add(one, batch_of(1))
    cache.add(other, batch_of(2))
    cache.add(other, batch_of(3))
    assert (one.forgotten, other.forgotten) == ([1], [])
    cache.add(one, batch_of(4))
    assert (one.forgotten, other.forgotten) == ([1], [2])
    assert cache.size_bytes == 200


def test_a_batch_that_is_used_stays_longer() -> None:
    cache = BatchCache(250)
    keeper = Keeper(cache)
    first = batch_of(1)
    cache.add(keeper, first)
    cache.add(keeper, batch_of(2))
    cache.use(first)
    cache.add(keeper, batch_of(3))
    assert keeper.forgotten == [2]


def test_the_newest_batch_stays_however_large() -> None:
    cache = BatchCache(250)
    keeper = Keeper(cache)
    cache.add(keeper, batch_of(1))
    cache.add(keeper, batch_of(2))
    cache.add(keeper, batch_of(3, 5000))
    assert keeper.forgotten == [1, 2]
    assert cache.size_bytes == 10048
    cache.add(keeper, batch_of(4))
    assert keeper.forgotten == [1, 2, 3]
    assert cache.size_bytes == 100


def test_a_limit_of_zero_keeps_one_batch() -> None:
    cache = BatchCache(0)
    keeper = Keeper(cache)
    for base in range(5):
        cache.add(keeper, batch_of(base))
    assert keeper.forgotten == [0, 1, 2, 3]


def test_a_batch_that_its_owner_keeps_is_still_counted() -> None:
    cache = BatchCache(100)
    keeper = Keeper(cache)
    keeper.stubborn = {1}
    cache.add(keeper, batch_of(1))
    cache.add(keeper, batch_of(2))
    assert cache.size_bytes == 200
    keeper.stubborn.clear()
    cache.add(keeper, batch_of(3))
    assert keeper.forgotten == [1, 2]


def test_a_batch_that_its_owner_keeps_does_not_block_the_eviction_of_others() -> None:
    cache = BatchCache(300)
    keeper = Keeper(cache)
    keeper.stubborn = {1}
    for base in range(1, 100):
        cache.add(keeper, batch_of(base))
    assert cache.size_bytes <= 300
