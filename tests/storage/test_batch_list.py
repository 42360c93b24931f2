"""The batches of a log in memory."""

from __future__ import annotations

from nsparq.storage.batch import Batch, lengths_of
from nsparq.storage.batch_list import BatchList
from nsparq.storage.gaps import Gaps
from nsparq.storage.log_range import locate_in_memory


def numbered(base: int, count: int) -> Batch:
    bodies = [b"%d" % number for number in range(base, base + count)]
    return Batch(base, 1, 0, lengths_of(bodies), b"".join(bodies))


def filled() -> tuple[BatchList, list[Batch]]:
    """Numbers 10 to 12, 13 to 14 and 20 to 24, the middle batch added last."""
    batches = [numbered(10, 3), numbered(13, 2), numbered(20, 5)]
    found = BatchList()
    found.append(batches[0])
    found.append(batches[2])
    assert found.add(batches[1]) and not found.add(numbered(13, 5))
    return found, batches


def test_batches_are_in_the_order_of_their_numbers_and_each_is_there_once() -> None:
    found, batches = filled()
    assert [*found] == batches


def test_a_number_leads_to_its_batch_or_to_the_next_one() -> None:
    found, (first, second, third) = filled()
    expected = {9: first, 10: first, 12: first, 13: second, 14: second, 15: third, 24: third, 25: None}
    assert {number: found.at_or_after(number) for number in expected} == expected
    assert [*found.since(11)] == [second, third]


def test_only_whole_batches_before_a_number_are_popped() -> None:
    found, (first, second, third) = filled()
    assert found.pop_before(12) == []
    assert found.pop_before(24) == [first, second]
    found.remove(third)
    assert not found and found.at_or_after(0) is None


def test_a_range_ends_at_a_missing_number_and_at_the_size() -> None:
    found, (first, second, _) = filled()
    located = locate_in_memory(found, 11, 1 << 20, Gaps([(12, 13)]))
    assert located is not None
    assert (located.batches, located.first, located.next) == ((first, second), 10, 15)
    assert located.gaps == ((12, 13),)
    small = locate_in_memory(found, 11, 1, Gaps())
    assert small is not None and small.batches == (first,)
    assert locate_in_memory(found, 25, 1, Gaps()) is None
