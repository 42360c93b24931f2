"""Raw batches to record batches: every message once and in order; in both builds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from nsparq import kernel
from nsparq.headers import encode_headers
from nsparq.packed import PackedBodies
from nsparq.spark.datasource import SCHEMA
from nsparq.spark.header_columns import to_maps
from nsparq.spark.source import arrow
from nsparq.spark.source.arrow import RowBuilder, unpack
from nsparq.storage.batch import Batch, encode_batch, encode_head
from nsparq.storage.raw_batch import CorruptRange
from tests.test_kernel import assert_nothing_is_kept

ARROW_SCHEMA = to_arrow_schema(SCHEMA, timezone="UTC")
COMPILED = kernel.unpack_batches
COMPILED_HEADERS = kernel.unpack_headers
BUILDS = ["python"] if COMPILED is None else ["python", "compiled"]
T0 = 1_700_000_000_000_000_000

Headers = dict[str, str]
Batches = list[tuple[int, list[bytes], list[Headers]]]
"""Of each the first number, the bodies, and the headers of each message; or no headers at all."""


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(str(request.param), monkeypatch)
    return str(request.param)


def choose(build: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernel, "unpack_batches", COMPILED if build == "compiled" else None)
    patch.setattr(kernel, "unpack_headers", COMPILED_HEADERS if build == "compiled" else None)


def encoded(base: int, bodies: list[bytes], stamp: int = T0, headers: Sequence[Headers] = ()) -> bytes:
    packed = PackedBodies.of(bodies)
    if headers:
        packed = packed.with_blocks(PackedBodies.of([encode_headers(one) for one in headers]))
    batch = Batch(base, stamp, 0, packed.lengths, packed.data, headers=packed.headers)
    return b"".join(encode_batch(batch))


def raw(batches: Batches) -> bytes:
    return b"".join(encoded(base, bodies, T0 + base * 1000, headers) for base, bodies, headers in batches)


def rows(
    buffer: bytes, start: int = 0, end: int = 1 << 60, gaps: list[tuple[int, int]] | None = None
) -> list[tuple[int, bytes, Headers]]:
    builder = RowBuilder(ARROW_SCHEMA, "t", "n:1", 5 << 54)
    found = []
    for batch in builder.build(buffer, start, end, gaps or []):
        batch.validate(full=True)
        assert batch.schema.equals(ARROW_SCHEMA)
        headers = [dict(one or ()) for one in batch["headers"].to_pylist()]
        found += [*zip(batch["offset"].to_pylist(), batch["body"].to_pylist(), headers, strict=True)]
    return found


def expected(batches: Batches) -> list[tuple[int, bytes, Headers]]:
    return [
        (base + i, body, headers[i] if headers else {})
        for base, bodies, headers in batches
        for i, body in enumerate(bodies)
    ]


HEADERS = st.dictionaries(st.text("ab.-", min_size=1, max_size=3), st.text(max_size=3), max_size=3)


@st.composite
def logs(draw: st.DrawFn) -> Batches:
    at = draw(st.integers(0, 50))
    batches = []
    for _ in range(draw(st.integers(0, 8))):
        bodies = draw(st.lists(st.binary(max_size=20), min_size=1, max_size=6))
        count = len(bodies)
        headers = draw(st.just([]) | st.lists(HEADERS, min_size=count, max_size=count))
        batches.append((at, bodies, headers))
        at += len(bodies) + draw(st.sampled_from([0, 0, 0, 7]))
    return batches


@pytest.mark.parametrize("build", BUILDS)
@given(
    logs(),
    st.integers(0, 60),
    st.integers(0, 110),
    st.lists(st.tuples(st.integers(0, 110), st.integers(1, 9)), max_size=3),
)
def test_any_part_of_any_log_gives_its_messages(
    build: str, batches: Batches, start: int, end: int, holes: list[tuple[int, int]]
) -> None:
    gaps = sorted({low: (low, low + width) for low, width in holes}.values())
    gaps = [gap for i, gap in enumerate(gaps) if i == 0 or gap[0] >= gaps[i - 1][1]]
    wanted = [
        (number, body, headers)
        for number, body, headers in expected(batches)
        if start <= number < end and not any(low <= number < high for low, high in gaps)
    ]
    with pytest.MonkeyPatch.context() as patch:
        choose(build, patch)
        assert rows(raw(batches), start, end, gaps) == wanted


def test_every_column_says_what_it_should(build: str) -> None:
    body = bytes(range(256))
    builder = RowBuilder(ARROW_SCHEMA, "orders", "10.0.0.5:4151", 1023 << 54)
    (batch,) = builder.build(encoded(77, [b"", body], T0 + 123_456_789), 0, 1 << 54)
    first, second = batch.to_pylist()
    assert first == {
        "topic": "orders",
        "node": "10.0.0.5:4151",
        "offset": 77,
        "timestamp": datetime.fromtimestamp(T0 // 10**9, UTC).replace(microsecond=123_456),
        "attempts": 0,
        "id": f"{(1023 << 54) + 77:016x}",
        "body": b"",
        "headers": None,
    }
    assert second["id"] == f"{(1023 << 54) + 78:016x}" and second["body"] == body
    assert builder.reached == 79


def test_a_schema_names_the_columns_and_their_order(build: str) -> None:
    schema = pa.schema([ARROW_SCHEMA.field("body"), ARROW_SCHEMA.field("id")])
    (batch,) = RowBuilder(schema, "t", "n", 0).build(encoded(1, [b"x"]), 0, 9)
    assert batch.to_pylist() == [{"body": b"x", "id": "0000000000000001"}]
    (batch,) = RowBuilder(pa.schema([ARROW_SCHEMA.field("topic")]), "t", "n", 0).build(
        encoded(1, [b"x"]), 0, 9
    )
    assert batch.to_pylist() == [{"topic": "t"}]


def test_headers_are_maps_and_null_where_there_are_none(build: str) -> None:
    buffer = encoded(1, [b"x", b"y"], headers=[{}, {"traceparent": "00-1", "empty": ""}])
    (batch,) = RowBuilder(ARROW_SCHEMA, "t", "n", 0).build(buffer, 0, 9)
    assert batch["headers"].to_pylist() == [None, [("traceparent", "00-1"), ("empty", "")]]
    found = unpack(buffer, 0, 0, 9)
    assert found is not None and not found.blocks and not found.block_offsets, "nobody asked for them"


def test_header_blocks_that_break_the_rules_are_damage(build: str) -> None:
    good = encode_headers({"name": "value"})
    for block in (good[:-1], good[:4], good + b"\x01", b"\xff"):
        blocks = PackedBodies.of([block])
        batch = Batch(1, T0, 0, array("I", [1]), b"x", headers=blocks)
        with pytest.raises(CorruptRange, match="not a header block"):
            rows(b"".join(encode_batch(batch)))


def test_long_headers_count_for_the_size_of_a_record_batch(build: str) -> None:
    long = {"a": "x" * 60_000}
    assert sizes(raw([(i, [b"x"], [long]) for i in range(150)])) == [139, 11]
    assert sizes(raw([(0, [b"x"] * 150, [long] * 150)])) == [139, 11]


def sizes(buffer: bytes) -> list[int]:
    return [len(batch) for batch in RowBuilder(ARROW_SCHEMA, "t", "n", 0).build(buffer, 0, 1 << 54)]


def test_small_batches_are_joined_and_big_ones_are_cut(build: str) -> None:
    assert sizes(raw([(i, [b"x"], []) for i in range(25_000)])) == [10_000, 10_000, 5000]
    assert sizes(raw([(0, [b"x"] * 25_000, [])])) == [10_000, 10_000, 5000]


def test_record_batches_of_long_bodies_have_fewer_rows(build: str) -> None:
    megabyte = b"x" * (1 << 20)
    assert sizes(raw([(i, [megabyte], []) for i in range(20)])) == [8, 8, 4]
    assert sizes(raw([(0, [megabyte] * 20, [])])) == [8, 8, 4]
    assert sizes(raw([(0, [megabyte * 9, b"y"], [])])) == [1, 1]


def test_an_empty_range_gives_no_record_batch(build: str) -> None:
    assert rows(b"") == []
    assert rows(raw([(5, [b"x"], [])]), 6) == []
    assert rows(raw([(5, [b"x"], [])]), 0, 5) == []


def damaged() -> Iterator[tuple[bytes, int]]:
    """Buffers, and how many messages come before the damage."""
    whole = raw([(0, [b"aaaa", b"bb"], []), (2, [b"cc"], []), (3, [b"dd"], [{"a": "b"}])])
    first = len(encoded(0, [b"aaaa", b"bb"]))
    second = first + len(encoded(2, [b"cc"]))
    for position in (0, 4, 8, 17, 40, 44, 49, first - 1):
        yield whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :], 0
        at = second + min(position, len(whole) - second - 1)
        yield whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], 3
    yield whole[:-1], 3
    yield whole[: second + 10], 3
    yield whole + b"N", 4


def test_damage_is_found_after_what_comes_before_it(build: str) -> None:
    for buffer, good in damaged():
        builder = RowBuilder(ARROW_SCHEMA, "t", "n", 0)
        found = 0
        with pytest.raises(CorruptRange):
            for batch in builder.build(buffer, 0, 1 << 54):
                found += len(batch)
        assert found == good
        assert builder.reached == good


def test_lengths_that_do_not_add_up_are_damage_though_the_checksum_is_right(build: str) -> None:
    lengths = array("I", [5, 5])
    for data in (b"too short", b"much too long for that"):
        buffer = encode_head(0, T0, 0, lengths, data) + data
        with pytest.raises(CorruptRange, match="the lengths do not add up"):
            rows(buffer)


@pytest.mark.skipif(COMPILED is None, reason="the kernel is not built")
def test_the_kernel_refuses_what_it_cannot_work_with() -> None:
    assert COMPILED is not None
    with pytest.raises(TypeError):
        COMPILED(b"", 0, 0, 0, 0, 0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        COMPILED("text", 0, 0, 0, 0, 0, True)
    with pytest.raises(ValueError):
        COMPILED(b"", -1, 0, 0, 0, 0, True)
    assert COMPILED(b"", 5, 0, 0, 0, 0, True) == (b"", b"\0\0\0\0", b"", b"", b"", 5)
    assert COMPILED(memoryview(raw([(1, [b"x"], [])])), 0, 0, 9, 1, 1, False)[2] == b"x"


@pytest.mark.skipif(COMPILED is None, reason="the kernel is not built")
@given(st.binary(max_size=300), st.integers(0, 300))
def test_the_kernel_takes_any_bytes(junk: bytes, at: int) -> None:
    assert COMPILED is not None
    good = raw([(1, [b"x", b"yy"], [{}, {"a": "b"}])])
    for buffer in (junk, good + junk, good[:at] + junk, b"NQB1" + junk, b"NQB2" + junk):
        heads, offsets, data, block_offsets, blocks, position = COMPILED(buffer, 0, 0, 1 << 60, 10, 10, True)
        assert 0 <= position <= len(buffer)
        assert len(offsets) == 4 * (int(np.frombuffer(heads, np.int64)[3::4].sum()) + 1)
        assert np.frombuffer(offsets, np.int32)[-1] == len(data)
        assert not blocks or np.frombuffer(block_offsets, np.int32)[-1] == len(blocks)


@pytest.mark.skipif(COMPILED_HEADERS is None, reason="the kernel is not built")
def test_the_kernel_finds_headers_only_in_blocks() -> None:
    assert COMPILED_HEADERS is not None
    block = encode_headers({"a": "bc", "d": ""})
    size = len(block)

    def found(*offsets: int, blocks: bytes = block) -> tuple[bytes, ...] | None:
        assert COMPILED_HEADERS is not None
        return COMPILED_HEADERS(np.array(offsets, np.int32).tobytes(), blocks)

    def numbers(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    both = numbers(0, 1, 2), b"ad", numbers(0, 2, 2), b"bc"
    assert found(0, 0, size, size) == (numbers(0, 0, 2, 2), *both)
    assert found(0, 6, size) == (numbers(0, 1, 2), *both), "a block is a run of headers"
    assert found(0, blocks=b"") == (numbers(0), numbers(0), b"", numbers(0), b"")
    assert found(0, 6) == (numbers(0, 1), numbers(0, 1), b"a", numbers(0, 2), b"bc"), "no more than the rows"
    for offsets in ((), (1, size), (0, size + 1), (0, 6, 0), (0, -1, size), (0, 5, size), (0, size - 1)):
        assert found(*offsets) is None
    for arguments in ((), (b"",), ("", b""), (b"", ""), (b"", b"", b"")):
        with pytest.raises(TypeError):
            COMPILED_HEADERS(*arguments)  # type: ignore[call-arg, arg-type]
    assert_nothing_is_kept(lambda: [found(0, size), found(0, 5, size), found(0, blocks=b"")])


@pytest.mark.parametrize("build", BUILDS)
@given(blocks=st.lists(st.binary(max_size=12) | HEADERS.map(encode_headers), max_size=6))
def test_both_builds_read_any_bytes_as_the_same_headers_or_none(build: str, blocks: list[bytes]) -> None:
    def split(block: bytes) -> list[tuple[bytes, bytes]]:
        """One header after the other; IndexError if it is no block."""
        pairs = []
        while block:
            value = 3 + block[0] + (block[block[0] + 1] << 8 | block[block[0] + 2])
            if len(block) < value:
                raise IndexError
            pairs.append((block[1 : 1 + block[0]], block[3 + block[0] : value]))
            block = block[value:]
        return pairs

    offsets = np.cumsum([0, *map(len, blocks)], dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        choose(build, patch)
        try:
            wanted = [split(block) or None for block in blocks]
        except IndexError:
            with pytest.raises(ValueError, match="not a header block"):
                to_maps(offsets, b"".join(blocks))
            return
        maps = to_maps(offsets, b"".join(blocks))
        bytes_of = pa.map_(pa.binary(), pa.binary())
        assert maps.cast(bytes_of).to_pylist() == wanted


@pytest.mark.parametrize("build", BUILDS)
@given(
    st.lists(st.tuples(st.integers(0, 255), st.integers(0, 300)), max_size=8),
    st.integers(0, 40),
)
def test_names_and_values_of_any_size_keep_their_bytes(
    build: str, pairs: list[tuple[int, int]], behind: int
) -> None:
    """The kernel copies short strings in steps, and may go too far while there is room."""
    one = [(bytes(range(name)), bytes([255 - name]) * value) for name, value in pairs]
    last = [(b"", b"z" * behind)]
    blocks = [
        b"".join(
            b"%c%b%b%b" % (len(name), name, len(value).to_bytes(2, "big"), value) for name, value in some
        )
        for some in (one, last)
    ]
    offsets = np.cumsum([0, *map(len, blocks)], dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        choose(build, patch)
        maps = to_maps(offsets, b"".join(blocks))
    assert maps.cast(pa.map_(pa.binary(), pa.binary())).to_pylist() == [one or None, last]


def test_a_batch_too_large_for_a_column_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "unpack_batches", None)

    class Small:
        max = 5

    monkeypatch.setattr(arrow.np, "iinfo", lambda _: Small)
    with pytest.raises(OverflowError, match="too large for a column of Spark"):
        unpack(raw([(0, [b"123456"], [])]), 0, 0, 9)
