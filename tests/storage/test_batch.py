"""The batch as bytes, and batches in memory."""

from __future__ import annotations

import struct
from array import array

import numpy as np
import pytest

from nsparq import kernel
from nsparq.packed import PackedBodies
from nsparq.storage import batch as batch_module
from nsparq.storage.batch import (
    HEADER_SIZE,
    MAGIC,
    Batch,
    BatchCache,
    checksum_holds,
    data_range,
    decode_blocks,
    decode_head,
    decode_lengths,
    encode_batch,
    encode_head,
    encode_singles,
    lengths_of,
)
from nsparq.storage.raw_batch import iter_batches
from tests.wire.harness import both_builds, using

from .support import NOW_NS, encoded

BODIES = [b"one", b"", b"three"]


def test_a_batch_on_disk_is_header_then_lengths_then_bodies() -> None:
    raw = encoded(7, *BODIES, timestamp_ns=8, due_ns=9)
    assert raw[:4] == MAGIC == b"NQB1"
    size, flags, spare, base, published, due, count, data = struct.unpack_from("<IHHQqqII", raw, 8)
    assert (size, flags, spare) == (len(raw), 0, 0)
    assert (base, published, due, count, data) == (7, 8, 9, 3, 8)
    assert struct.unpack_from("<3I", raw, HEADER_SIZE) == (3, 0, 5)
    assert raw[HEADER_SIZE + 12 :] == b"onethree"


def test_what_was_encoded_is_decoded() -> None:
    raw = b"before" + encoded(7, *BODIES, timestamp_ns=8, due_ns=9) + b"behind"
    head = decode_head(raw, 6)
    assert head is not None
    assert (head.base, head.end, head.messages, head.timestamp_ns, head.due_ns) == (7, 10, 3, 8, 9)
    assert (head.size, head.data_size) == (len(raw) - 12, 8)
    assert checksum_holds(head, raw, 6)
    assert checksum_holds(head, memoryview(raw), 6)
    assert decode_lengths(head, raw, 6).tolist() == [3, 0, 5]
    start, end = data_range(head, 6)
    assert raw[start:end] == b"onethree"
    assert end == len(raw) - 6


def test_positions_default_to_the_start_of_the_buffer() -> None:
    raw = encoded(7, *BODIES)
    head = decode_head(memoryview(raw))
    assert head is not None
    assert checksum_holds(head, raw)
    assert decode_lengths(head, raw).tolist() == [3, 0, 5]
    assert data_range(head) == (HEADER_SIZE + 12, len(raw))


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE - 1])
def test_fewer_bytes_than_a_header_are_not_a_batch(size: int) -> None:
    assert decode_head(encoded(7, *BODIES)[:size]) is None
    assert decode_head(b"...." + encoded(7, *BODIES)[:size], 4) is None


def test_bytes_without_the_magic_are_not_a_batch() -> None:
    assert decode_head(b"NQB3" + encoded(7, *BODIES)[4:]) is None


@pytest.mark.parametrize(("field", "value"), [(8, 1), (8, 1 << 31), (40, 2), (40, 4), (44, 9)])
def test_a_header_with_contradicting_sizes_is_not_a_batch(field: int, value: int) -> None:
    raw = bytearray(encoded(7, *BODIES))
    struct.pack_into("<I", raw, field, value)
    assert decode_head(bytes(raw)) is None


def test_a_header_without_messages_is_not_a_batch() -> None:
    assert decode_head(encode_head(7, 8, 0, array("I"), b"")) is None


BLOCKS = [b"", b"\x01a\x00\x01b", b"\x01c\x00\x00"]
WITH_HEADERS = Batch(7, NOW_NS, 5, lengths_of(BODIES), b"onethree", 3, PackedBodies.of(BLOCKS))


def test_a_batch_with_headers_has_their_lengths_and_blocks_behind_the_bodies() -> None:
    raw = b"".join(encode_batch(WITH_HEADERS, 9))
    plain = encoded(7, *BODIES)
    assert raw[:4] == b"NQB2"
    assert raw[HEADER_SIZE:] == plain[HEADER_SIZE:] + struct.pack("<3I", 0, 5, 4) + b"".join(BLOCKS)
    head = decode_head(raw)
    assert head is not None and checksum_holds(head, raw)
    assert (head.size, head.data_size, head.messages, head.tag, head.mark) == (len(raw), 8, 3, 3, 9)
    assert decode_lengths(head, raw).tolist() == [3, 0, 5]
    assert raw[slice(*data_range(head))] == b"onethree"
    assert decode_blocks(head, raw) == BLOCKS
    (read,) = iter_batches(raw)
    assert (read.bodies(), read.blocks(), read.tag, read.size) == (BODIES, BLOCKS, 3, len(raw))
    assert read.between(8, 9).blocks() == BLOCKS[1:2]


def test_a_batch_without_headers_is_written_as_before() -> None:
    batch = Batch(7, NOW_NS, 0, lengths_of(BODIES), b"onethree")
    assert b"".join(encode_batch(batch)) == encoded(7, *BODIES)
    (read,) = iter_batches(encoded(7, *BODIES))
    assert (read.headers, read.blocks()) == (None, [b""] * 3)


def test_one_message_of_a_batch_keeps_its_headers_and_its_tag() -> None:
    for index, (body, block) in enumerate(zip(BODIES, BLOCKS, strict=True)):
        only = WITH_HEADERS.only(index)
        assert (only.base, only.bodies(), only.tag) == (7 + index, [body], 3)
        assert (b"" if only.headers is None else only.headers.data) == block


@pytest.mark.parametrize(
    "raw", [encoded(7, *BODIES), b"".join(encode_batch(WITH_HEADERS))], ids=["plain", "with headers"]
)
def test_the_checksum_covers_every_bit(raw: bytes) -> None:
    head = decode_head(raw)
    assert head is not None
    for position in range(4, len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[position] ^= 1 << bit
            seen = decode_head(bytes(changed))
            assert seen is None or not checksum_holds(seen, bytes(changed)), f"byte {position}, bit {bit}"


def test_the_checksum_fails_for_a_batch_cut_short() -> None:
    raw = encoded(7, *BODIES)
    head = decode_head(raw)
    assert head is not None
    assert not checksum_holds(head, raw[:-1])


def test_a_batch_knows_its_messages() -> None:
    batch = Batch(7, NOW_NS, 5, lengths_of(BODIES), b"onethree")
    assert (batch.base, batch.end, batch.count, batch.due_ns) == (7, 10, 3, 5)
    assert batch.bodies() == BODIES
    assert [batch.timestamp_of(i) for i in range(3)] == [NOW_NS] * 3
    assert batch.frames is None


def test_the_size_of_a_batch_allows_for_its_frames() -> None:
    bodies = [b"x" * 100] * 10
    batch = Batch(0, NOW_NS, 0, lengths_of(bodies), b"".join(bodies))
    frames = 10 * (4 + 4 + 8 + 2 + 16 + 100)
    assert batch.size >= len(batch.data) + frames


def test_joined_batches_keep_each_message_s_publish_time() -> None:
    batch = Batch.join(
        7, [(1, lengths_of([b"a", b"bc"]), b"abc", None), (2, lengths_of([b"", b"d"]), b"d", None)]
    )
    assert (batch.base, batch.end, batch.due_ns) == (7, 11, 0)
    assert batch.bodies() == [b"a", b"bc", b"", b"d"]
    assert [batch.timestamp_of(i) for i in range(4)] == [1, 1, 2, 2]
    assert isinstance(batch.timestamps_ns, np.ndarray)
    assert isinstance(batch.timestamp_of(0), int)


def test_joined_batches_keep_headers() -> None:
    block = PackedBodies.of([b"\x01a\x00\x01b"])
    batch = Batch.join(7, [(1, lengths_of([b"a", b"b"]), b"ab", None), (1, lengths_of([b"c"]), b"c", block)])
    assert batch.bodies() == [b"a", b"b", b"c"]
    assert batch.headers == [b"", b"", b"\x01a\x00\x01b"]


def test_a_single_message_is_a_batch() -> None:
    batch = Batch.single(7, NOW_NS, b"body")
    assert (batch.base, batch.end, batch.due_ns, batch.bodies()) == (7, 8, 0, [b"body"])
    assert batch.timestamp_of(0) == NOW_NS


@both_builds
def test_many_single_messages_are_encoded_as_each_by_itself(build: str) -> None:
    bodies, blocks = [b"one", b"", b"x" * 70_000], [b"", b"block", b"\x00" * 3]
    sequences, stamps = np.array([1, 2**53, 7]), np.array([NOW_NS, -1, 0])
    with using(build):
        data, sizes = encode_singles(sequences, stamps, bodies, blocks, 0xABCD)
        assert encode_singles(sequences[:0], stamps[:0], [], [], 1) == (b"", [])
    columns = zip(sequences.tolist(), stamps.tolist(), bodies, blocks, strict=True)
    each = [b"".join(encode_batch(Batch.single(*one), 0xABCD)) for one in columns]
    assert (data, sizes) == (b"".join(each), [*map(len, each)])


@pytest.mark.skipif(kernel.encode_singles is None, reason="the kernel is not built")
def test_the_kernel_refuses_columns_that_do_not_match() -> None:
    one = np.array([1])
    assert kernel.encode_singles is not None
    for columns in ((one, one, [b"x"], []), (one[:0], one, [b"x"], [b""]), (one, one[:0], [b"x"], [b""])):
        with pytest.raises(ValueError, match="not as many"):
            kernel.encode_singles(*columns, 1)
    with pytest.raises(TypeError):
        kernel.encode_singles(one, one, [bytearray(b"x")], [b""], 1)  # type: ignore[list-item]


def test_a_batch_of_empty_bodies_has_all_of_them() -> None:
    assert Batch(7, NOW_NS, 0, lengths_of([b"", b""]), b"").bodies() == [b"", b""]


def test_the_length_table_is_swapped_where_memory_is_big_endian(monkeypatch: pytest.MonkeyPatch) -> None:
    head = decode_head(encoded(7, *BODIES))
    assert head is not None
    monkeypatch.setattr(batch_module, "_BIG_ENDIAN", True)
    lengths = lengths_of(BODIES)
    raw = encode_head(7, NOW_NS, 0, lengths, b"onethree")
    assert struct.unpack_from(">3I", raw, HEADER_SIZE) == (3, 0, 5)
    assert lengths.tolist() == [3, 0, 5], "the caller's table is left alone"
    assert decode_lengths(head, raw).tolist() == [3, 0, 5]


# the limit on the memory of all logs


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
