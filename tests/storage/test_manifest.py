"""Manifests: what they name, and what survives a change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.storage.checked_json import decode_json, encode_json
from nsparq.storage.manifest import (
    BadManifest,
    Manifest,
    SegmentEntry,
    index_key,
    latest_number,
    manifest_key,
    number_of,
    segment_key,
)


def entry(base: int, end: int, *, crc: int = 1, last_ns: int = 0) -> SegmentEntry:
    return SegmentEntry(base, end, 100 * (end - base), last_ns, last_ns, 0, crc)


def manifest(*segments: SegmentEntry, **fields: object) -> Manifest:
    return Manifest(topic="t", incarnation="i", segments=segments, **fields)  # type: ignore[arg-type]


entries = st.builds(
    lambda base, size, crc: entry(base, base + size, crc=crc),
    st.integers(0, 50),
    st.integers(1, 10),
    st.integers(0, 2**32 - 1),
)


@given(st.lists(entries, max_size=12))
def test_a_manifest_that_is_read_is_the_one_that_was_written(added: list[SegmentEntry]) -> None:
    written = manifest(gaps=((3, 5),), channels={"c": 7}, number=3, writer="w", node=2).changed(added)
    assert Manifest.decode(written.encode()) == written


@given(st.lists(entries, max_size=12))
def test_segments_are_in_order_and_never_overlap_and_the_last_added_stays(added: list[SegmentEntry]) -> None:
    changed = manifest().changed(added)
    ends = [0, *(one.end for one in changed.segments)]
    assert all(end <= one.base for end, one in zip(ends, changed.segments, strict=False))
    assert not added or added[-1] in changed.segments


@given(st.lists(entries, max_size=12), st.integers(0, 60), st.integers(0, 60))
def test_between_gives_every_segment_with_such_a_number(
    added: list[SegmentEntry], start: int, end: int
) -> None:
    changed = manifest().changed(added)
    wanted = [one for one in changed.segments if one.base < end and one.end > start]
    assert [*changed.between(start, end)] == wanted


def test_dropped_segments_are_gone() -> None:
    first, second = entry(0, 5), entry(5, 9)
    assert manifest(first, second).changed(drop=[first]).segments == (second,)


def test_times_prune_segments_even_if_the_clock_was_set_back() -> None:
    found = manifest(
        entry(0, 5, last_ns=10), entry(5, 9, last_ns=50), entry(9, 12, last_ns=30), entry(12, 20, last_ns=60)
    )
    assert [one.base for one in found.published_in(20, 40)] == [5]
    assert [one.base for one in found.published_in(40, 55)] == [5, 9, 12]
    assert [one.base for one in found.published_in(0, 5)] == [0]
    assert [one.base for one in found.published_in(70, 90)] == []


def test_every_changed_byte_of_a_manifest_is_noticed() -> None:
    written = manifest(entry(0, 5)).encode()
    for position in range(len(written)):
        damaged = bytearray(written)
        damaged[position] ^= 1
        try:
            assert Manifest.decode(bytes(damaged)) == manifest(entry(0, 5))  # the same JSON
        except BadManifest:
            continue
    for size in range(len(written)):
        with pytest.raises(BadManifest):
            Manifest.decode(written[:size])


def test_a_newer_format_is_refused_with_its_number() -> None:
    fields = decode_json(manifest().encode()) | {"format": 2}
    with pytest.raises(BadManifest, match="format 2: this version of nsparq reads format 1"):
        Manifest.decode(encode_json(fields))


def test_names_of_objects() -> None:
    one = entry(3, 7, crc=0xABC)
    assert segment_key("topics/t/i", one) == f"topics/t/i/segments/{3:020d}-{7:020d}-00000abc.log"
    assert index_key("topics/t/i", one).endswith("00000abc.index")
    key = manifest_key("topics/t/i", 12)
    assert number_of(key) == 12
    assert latest_number([key, manifest_key("topics/t/i", 9), "topics/t/i/manifest/x.json", "y"]) == 12
    assert latest_number([]) == 0
