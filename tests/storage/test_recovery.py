"""Finding whole batches among damaged bytes."""

from __future__ import annotations

import pytest

from nsparq.storage import recovery
from nsparq.storage.batch import MAGIC
from nsparq.storage.recovery import Damage, Found, end_of_damage, scan

from .support import encoded, reader

FIRST = encoded(1, b"a", b"bb")
SECOND = encoded(3, b"ccc")
THIRD = encoded(4, b"", b"dddd")


def scanned(content: bytes) -> list[tuple[int, int] | Damage]:
    """Damage, and for a batch its position and first sequence number."""
    return [
        (item.position, item.head.base) if isinstance(item, Found) else item
        for item in scan(reader(content), len(content), first=1)
    ]


def test_an_empty_file_has_no_batches() -> None:
    assert scanned(b"") == []


def test_whole_batches_are_found_in_order() -> None:
    assert scanned(FIRST + SECOND + THIRD) == [(0, 1), (len(FIRST), 3), (len(FIRST + SECOND), 4)]


def test_a_torn_batch_is_damage_up_to_the_end() -> None:
    for cut in range(1, len(SECOND)):
        content = FIRST + SECOND[:cut]
        assert scanned(content) == [(0, 1), Damage(len(FIRST), len(content))], cut


def test_one_damaged_batch_leaves_its_neighbours_whole() -> None:
    start, end = len(FIRST), len(FIRST + SECOND)
    for position in range(len(SECOND)):
        damaged = bytearray(SECOND)
        damaged[position] ^= 0x40
        assert scanned(FIRST + bytes(damaged) + THIRD) == [(0, 1), Damage(start, end), (end, 4)], position


def test_bytes_before_the_first_batch_are_damage() -> None:
    assert scanned(b"junk" + FIRST) == [Damage(0, 4), (4, 1)]


def test_a_file_of_junk_is_one_piece_of_damage() -> None:
    assert scanned(b"\0" * 1000) == [Damage(0, 1000)]


def test_bodies_that_look_like_a_header_are_not_mistaken_for_one() -> None:
    tricky = encoded(1, MAGIC * 30, b"NQB", b"1")
    damaged = bytearray(tricky)
    damaged[50] ^= 1
    content = bytes(damaged) + SECOND
    assert scanned(tricky + SECOND) == [(0, 1), (len(tricky), 3)]
    assert scanned(content) == [Damage(0, len(tricky)), (len(tricky), 3)]


def test_the_scan_continues_at_the_first_whole_batch_after_damage() -> None:
    content = b"junk" + FIRST + SECOND
    assert end_of_damage(reader(content), 0, len(content), 1) == 4
    assert end_of_damage(reader(content), 0, len(content), None) == 4
    assert end_of_damage(reader(content), 5, len(content), None) == 4 + len(FIRST)
    assert end_of_damage(reader(content), 5 + len(FIRST), len(content), None) == len(content)


def test_a_batch_whose_numbers_do_not_fit_is_skipped() -> None:
    content = b"junk" + encoded(100, b"x") + SECOND
    assert end_of_damage(reader(content), 0, len(content), 3) == len(content) - len(SECOND)
    assert end_of_damage(reader(content), 0, len(content), None) == 4


def test_without_an_order_any_whole_batch_counts() -> None:
    content = SECOND + b"junk" + FIRST
    found = [item for item in scan(reader(content), len(content), first=None) if isinstance(item, Found)]
    assert [item.head.base for item in found] == [3, 1]


@pytest.mark.parametrize("window", [4, 5, 7, 47, 48, 49, 64, 100, 1000])
def test_the_result_does_not_depend_on_the_window(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    content = b"junkNQ" + FIRST + SECOND[:30] + THIRD + b"NQB1" * 5 + encoded(6, b"e") + b"NQB"
    expected = scanned(content)
    assert [item[1] for item in expected if not isinstance(item, Damage)] == [1, 4, 6]
    monkeypatch.setattr(recovery, "_WINDOW", window)
    assert scanned(content) == expected


def test_a_batch_larger_than_the_window_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_WINDOW", 64)
    large = encoded(1, b"x" * 5000)
    assert scanned(large + THIRD) == [(0, 1), (len(large), 4)]


def test_memory_is_bounded_by_the_window_whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_WINDOW", 1000)
    content = b"".join(encoded(i, b"x" * 50) for i in range(200)) + b"\0" * 20_000
    asked = []

    def read(size: int, at: int) -> bytes:
        asked.append(size)
        return content[at : at + size]

    assert sum(isinstance(item, Found) for item in scan(read, len(content), first=0)) == 200
    assert max(asked) <= 1000


def test_bodies_full_of_magic_do_not_make_recovery_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients publish anything. A torn batch of it must not cost minutes at the next start."""
    monkeypatch.setattr(recovery, "_WINDOW", 4096)
    content = encoded(1, MAGIC * 16_000)[:-1]
    read_bytes = 0

    def read(size: int, at: int) -> bytes:
        nonlocal read_bytes
        read_bytes += size
        return content[at : at + size]

    assert [*scan(read, len(content), first=1)] == [Damage(0, len(content))]
    assert read_bytes <= 8 * len(content)


def test_a_batch_published_inside_a_message_is_not_taken_for_one_of_the_log() -> None:
    """A body may be a piece of a log. It stays a body, even if the batch around it is damaged."""
    around = encoded(3, encoded(77, b"not a message of this log"), b"x")
    for cut in range(len(around)):
        content = FIRST + around[:cut]
        bases = [
            item.head.base for item in scan(reader(content), len(content), first=1) if isinstance(item, Found)
        ]
        assert bases == [1], f"cut at byte {cut}"
    for position in range(len(around)):
        damaged = bytearray(around)
        damaged[position] ^= 0x10
        content = FIRST + bytes(damaged) + encoded(5, b"next")
        bases = [
            item.head.base for item in scan(reader(content), len(content), first=1) if isinstance(item, Found)
        ]
        assert bases == [1, 5], f"damaged at byte {position}"


def test_a_file_shorter_than_its_given_size_ends_the_scan() -> None:
    content = FIRST + SECOND
    size = len(content) + 50
    assert [
        item.head.base if isinstance(item, Found) else (item.position, item.end)
        for item in scan(reader(content), size, first=1)
    ] == [1, 3, (len(content), size)]
