"""Arrow batches to chunks: which rows are valid, how they are grouped and cut."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    BinaryType,
    DayTimeIntervalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from nsparq.headers import decode_headers
from nsparq.packed import PackedBodies
from nsparq.spark.sink.rows import Chunk, Chunks, RowError, SchemaError, SinkColumns
from nsparq.wire.limits import Limits
from nsparq.wire.mpub import decode_multiple

BODY = SinkColumns(0, None, None)
BODY_TOPIC = SinkColumns(0, 1, None)
BODY_DEFER = SinkColumns(0, None, 1)
BODY_HEADERS = SinkColumns(0, None, None, 1)
MAPS = pa.map_(pa.string(), pa.string())


def schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def rows(bodies: Iterable[Any], kind: pa.DataType | None = None, **more: Any) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array([*bodies], kind or pa.binary()), **more})


def chunks_of(
    *batches: pa.RecordBatch, columns: SinkColumns = BODY, topic: str | None = "t", size: int = 1000
) -> list[Chunk]:
    chunks = Chunks(columns, topic, size, "partition 3, ")
    return [chunk for batch in batches for chunk in chunks.add(batch)] + [*chunks.finish()]


def decoded(chunk: Chunk) -> list[bytes]:
    """As nsqd reads it."""
    body = chunk.head + b"".join(chunk.pieces)
    found = decode_multiple(body, Limits())
    assert chunk.has_headers is False
    assert isinstance(found, PackedBodies)
    assert len(found) == chunk.messages
    assert chunk.size == sum(map(len, chunk.pieces))
    assert [*chunk.bodies()] == found[:]
    return found[:]


def by_group(chunks: Iterable[Chunk]) -> dict[tuple[str, int], list[bytes]]:
    found: dict[tuple[str, int], list[bytes]] = {}
    for chunk in chunks:
        found.setdefault((chunk.topic, chunk.defer_ms), []).extend(decoded(chunk))
    return found


# columns


@pytest.mark.parametrize("kind", [BinaryType(), StringType()])
def test_a_body_is_binary_or_a_string(kind: Any) -> None:
    assert SinkColumns.of(schema(body=kind)) == BODY


@pytest.mark.parametrize("kind", [IntegerType(), LongType(), DayTimeIntervalType()])
def test_a_delay_is_a_number_of_milliseconds_or_an_interval(kind: Any) -> None:
    assert SinkColumns.of(schema(defer=kind, body=BinaryType())) == SinkColumns(1, None, 0)


def test_columns_are_found_in_any_order_and_case() -> None:
    found = SinkColumns.of(schema(Topic=StringType(), DEFER=LongType(), Body=StringType()))
    assert found == SinkColumns(body=2, topic=0, defer=1)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"body": BinaryType(), "price": DoubleType()}, r"column 'price' .*to_json\(struct\(\*\)\) AS body"),
        ({"value": StringType()}, r"column 'value' .*to_json"),
        ({"topic": StringType()}, r"no column 'body'.*to_json"),
        ({"body": DoubleType()}, r"column 'body' is double and must be binary or string: .*to_json"),
        ({"body": BinaryType(), "topic": IntegerType()}, r"column 'topic' is int and must be string"),
        ({"body": BinaryType(), "defer": StringType()}, r"column 'defer' is string and must be whole milli"),
        ({"body": BinaryType(), "BODY": BinaryType()}, r"two columns 'body'"),
        ({"body": BinaryType(), "headers": StringType()}, r"'headers' is string and must be map<string,str"),
        (
            {"body": BinaryType(), "headers": MapType(StringType(), LongType())},
            r"'headers' is map<string,bigint> and must be map<string,string>",
        ),
    ],
)
def test_other_columns_are_refused_with_the_name_and_the_fix(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        SinkColumns.of(schema(**columns))


# framing


@given(
    batches=st.lists(st.lists(st.binary(min_size=1, max_size=60), max_size=20), max_size=6),
    size=st.integers(1, 300),
)
def test_every_body_arrives_once_and_in_order_however_it_is_cut(
    batches: list[list[bytes]], size: int
) -> None:
    found = chunks_of(*map(rows, batches), size=size)
    assert [body for chunk in found for body in decoded(chunk)] == [body for part in batches for body in part]
    for chunk in found:
        assert chunk.size <= size or chunk.messages == 1
    # No more of them than needed: two neighbours would not have fitted into one.
    for one, other in zip(found, found[1:], strict=False):
        first_of_other = 4 + len(decoded(other)[0])
        assert one.size + first_of_other > size


def test_a_batch_that_is_a_slice_of_another_is_framed_from_its_own_rows() -> None:
    whole = rows([b"a", b"bb", b"ccc", b"dddd"])
    assert by_group(chunks_of(whole.slice(1, 2))) == {("t", 0): [b"bb", b"ccc"]}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_all_of_arrows_ways_to_hold_a_body_are_taken(kind: pa.DataType) -> None:
    bodies = ["grün", "x", "☃"]
    given_ = bodies if "string" in str(kind) else [body.encode() for body in bodies]
    assert by_group(chunks_of(rows(given_, kind))) == {("t", 0): [body.encode() for body in bodies]}


def test_any_byte_may_be_in_a_body() -> None:
    bodies = [bytes(range(256)), b"\0", b"\n\n", struct.pack(">I", 7)]
    assert by_group(chunks_of(rows(bodies))) == {("t", 0): bodies}


def test_a_body_larger_than_a_chunk_goes_alone() -> None:
    found = chunks_of(rows([b"a", b"x" * 5000, b"b"]), size=100)
    assert [chunk.messages for chunk in found] == [1, 1, 1]
    assert found[1].largest() == 5000


def test_rows_of_small_batches_go_together() -> None:
    found = chunks_of(*[rows([b"x" * 96])] * 25)
    assert [chunk.messages for chunk in found] == [10, 10, 5]


def test_without_rows_there_are_no_chunks() -> None:
    assert chunks_of(rows([]), rows([])) == []


def test_a_batch_of_more_bytes_than_arrow_can_join_is_framed_in_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsparq.spark.sink.rows.MAX_JOINED", 100)
    bodies = [bytes([index]) * (1 + index * 7 % 150) for index in range(60)]
    topics = [f"t{index % 3}" for index in range(60)]
    found = by_group(chunks_of(rows(bodies, topic=topics), columns=BODY_TOPIC, size=400))
    assert found == {(f"t{index}", 0): bodies[index::3] for index in range(3)}


# topics and delays


def test_rows_go_to_the_topic_that_they_name_in_their_order() -> None:
    batch = rows([b"1", b"2", b"3", b"4"], topic=["b", "a", "b", "a"])
    assert by_group(chunks_of(batch, batch, columns=BODY_TOPIC, topic=None)) == {
        ("a", 0): [b"2", b"4", b"2", b"4"],
        ("b", 0): [b"1", b"3", b"1", b"3"],
    }


def test_a_row_that_names_no_topic_goes_to_that_of_the_option() -> None:
    batch = rows([b"1", b"2"], topic=pa.array([None, "a"]))
    assert by_group(chunks_of(batch, columns=BODY_TOPIC)) == {("t", 0): [b"1"], ("a", 0): [b"2"]}


def test_delays_are_milliseconds_and_null_is_no_delay() -> None:
    batch = rows([b"1", b"2", b"3"], defer=pa.array([250, None, 0], pa.int32()))
    assert by_group(chunks_of(batch, columns=BODY_DEFER)) == {("t", 250): [b"1"], ("t", 0): [b"2", b"3"]}


def test_an_interval_is_never_cut_short() -> None:
    batch = rows([b"1", b"2", b"3"], defer=pa.array([1_000, 1_001, 0], pa.duration("us")))
    assert by_group(chunks_of(batch, columns=BODY_DEFER)) == {
        ("t", 1): [b"1"],
        ("t", 2): [b"2"],
        ("t", 0): [b"3"],
    }


def test_topics_and_delays_are_told_apart_together() -> None:
    batch = rows([b"1", b"2", b"3", b"4"], topic=["a", "a", "b", "a"], defer=[5, 0, 5, 5])
    columns = SinkColumns(0, 1, 2)
    assert by_group(chunks_of(batch, columns=columns)) == {
        ("a", 5): [b"1", b"4"],
        ("a", 0): [b"2"],
        ("b", 5): [b"3"],
    }


def test_what_waits_for_its_chunk_to_fill_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.spark.sink.rows.MAX_WAITING", 1000)
    chunks = Chunks(BODY_TOPIC, None, 1 << 20)
    topics = [f"t{index}" for index in range(30)]
    batch = rows([b"x" * 96] * 30, topic=topics)
    assert {chunk.topic for chunk in chunks.add(batch)} == {*topics}
    assert [*chunks.finish()] == []


# rows that are no messages


@pytest.mark.parametrize(
    ("batch", "columns", "text"),
    [
        (rows([b"1", None]), BODY, "row 3: the body is null"),
        (rows([b"1", b""]), BODY, "row 3: the body is empty"),
        (rows([b"1", b"2"], topic=["a", "bad name"]), BODY_TOPIC, "row 3: 'bad name' is not a valid topic"),
        (
            rows([b"1", b"2"], topic=["a" * 65, "a"]),
            BODY_TOPIC,
            "row 2: '(aaaa)+a' is not a valid topic",
        ),
        (rows([b"1", b"2"], defer=[0, -1]), BODY_DEFER, "row 3: defer is negative"),
    ],
)
def test_an_invalid_row_is_named(batch: pa.RecordBatch, columns: SinkColumns, text: str) -> None:
    good = rows([b"1", b"2"], topic=["a", "b"], defer=[1, 2])
    order = [name for name in ("topic", "defer") if getattr(columns, name) is not None]
    with pytest.raises(RowError, match=f"^partition 3, {text}"):
        chunks_of(good.select(["body", *order]), batch, columns=columns)


def test_a_row_for_a_topic_that_the_query_reads_is_refused() -> None:
    chunks = Chunks(BODY_TOPIC, None, 1000, refused=re.compile("in|in[.].*"))
    assert [*chunks.add(rows([b"1", b"2"], topic=["out", "inner"]))] == []
    with pytest.raises(RowError, match=r"row 3: in.eu is a topic that the query itself reads"):
        [*chunks.add(rows([b"1", b"2"], topic=["out", "in.eu"]))]


def test_a_row_without_a_topic_is_refused_if_no_option_names_one() -> None:
    batch = rows([b"1", b"2"], topic=pa.array(["a", None]))
    with pytest.raises(RowError, match=r"row 1: the topic is null, and option topic is not set"):
        chunks_of(batch, columns=BODY_TOPIC, topic=None)


# headers


@given(
    st.lists(
        st.none() | st.dictionaries(st.text("aB.-", min_size=1, max_size=3), st.text(max_size=3), max_size=3),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, 9),
    st.booleans(),
)
def test_nsqd_gets_the_headers_of_each_row_in_lower_case(
    maps: list[dict[str, str] | None], first: int, by_topic: bool
) -> None:
    maps = [one and {name.lower(): value for name, value in one.items()} for one in maps]
    bodies = [b"%d" % number for number in range(len(maps))]
    topics = ["even" if by_topic and number % 2 else "t" for number in range(len(maps))]
    upper = [one and [(name.upper(), value) for name, value in one.items()] for one in maps]
    batch = rows(bodies, headers=pa.array(upper, MAPS), topic=pa.array(topics))
    found: list[tuple[bytes, dict[str, str]]] = []
    for chunk in chunks_of(batch.slice(first), columns=SinkColumns(0, 2, None, 1)):
        assert chunk.has_headers
        read = decode_multiple(chunk.head + b"".join(chunk.pieces), Limits(), has_headers=True)
        blocks = [b""] * len(read) if read.headers is None else read.headers[:]
        found += [(body, decode_headers(block)) for body, block in zip(read[:], blocks, strict=True)]
    assert sorted(found) == [(body, one or {}) for body, one in zip(bodies, maps, strict=True)][first:]


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([("a b", "")], r"column headers: not a header name: 'a b'"),
        ([("", "")], r"column headers: not a header name: ''"),
        ([("Trace", "1"), ("trace", "2")], r"column headers has 'trace' twice; names are written in lower"),
        ([("a", None)], r"a value of column headers is null"),
        ([("a", "x" * 65_536)], r"column headers: the headers of a message must not exceed 65535 bytes"),
        ([("a", "x" * 40_000), ("b", "x" * 40_000)], r"column headers: .* must not exceed 65535 bytes"),
    ],
)
def test_headers_that_break_a_rule_are_refused_with_the_row(
    headers: list[tuple[str, str | None]], text: str
) -> None:
    good = rows([b"x"] * 2, headers=pa.array([[("a", "1"), ("b", "2")], None], MAPS))
    bad = rows([b"x"] * 2, headers=pa.array([[("ok", "1")], headers], MAPS))
    with pytest.raises(RowError, match=f"partition 3, row 3: {text}"):
        chunks_of(good, bad, columns=BODY_HEADERS)
