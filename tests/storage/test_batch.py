"""The batch, in memory and as bytes."""

from __future__ import annotations

import struct
from array import array

import numpy as np
import pytest

from nsparq.storage import batch as batch_module
from nsparq.storage.batch import (
    HEADER_SIZE,
    MAGIC,
    Batch,
    checksum_holds,
    data_range,
    decode_head,
    decode_lengths,
    encode_head,
    lengths_of,
)

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
    assert decode_head(b"NQB2" + encoded(7, *BODIES)[4:]) is None


@pytest.mark.parametrize(("field", "value"), [(8, 1), (8, 1 << 31), (40, 2), (40, 4), (44, 9)])
def test_a_header_with_contradicting_sizes_is_not_a_batch(field: int, value: int) -> None:
    raw = bytearray(encoded(7, *BODIES))
    struct.pack_into("<I", raw, field, value)
    assert decode_head(bytes(raw)) is None


def test_a_header_without_messages_is_not_a_batch() -> None:
    assert decode_head(encode_head(7, 8, 0, array("I"), b"")) is None


def test_the_checksum_covers_every_bit() -> None:
    raw = encoded(7, *BODIES)
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
    batch = Batch.join(7, [(1, lengths_of([b"a", b"bc"]), b"abc"), (2, lengths_of([b"", b"d"]), b"d")])
    assert (batch.base, batch.end, batch.due_ns) == (7, 11, 0)
    assert batch.bodies() == [b"a", b"bc", b"", b"d"]
    assert [batch.timestamp_of(i) for i in range(4)] == [1, 1, 2, 2]
    assert isinstance(batch.timestamps_ns, np.ndarray)
    assert isinstance(batch.timestamp_of(0), int)


def test_a_single_message_is_a_batch() -> None:
    batch = Batch.single(7, NOW_NS, b"body")
    assert (batch.base, batch.end, batch.due_ns, batch.bodies()) == (7, 8, 0, [b"body"])
    assert batch.timestamp_of(0) == NOW_NS


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
