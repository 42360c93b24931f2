"""Avro and Protobuf as Spark columns: every type, and values that do not fit their column."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from fastavro import schemaless_writer

from tests.pipeline.decode.test_protobuf import SET, make

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIELDS: dict[str, tuple[Any, Any]] = {
    "flag": ("boolean", True),
    "small": ("int", -(1 << 31)),
    "large": ("long", 1 << 62),
    "half": ("float", 0.5),
    "bytes": ("bytes", b"\0\xff"),
    "nothing": (["null", "string"], None),
    "kind": ({"type": "enum", "name": "k", "symbols": ["A", "B"]}, "B"),
    "tags": ({"type": "array", "items": ["null", "string"]}, ["a", None]),
    "counts": ({"type": "map", "values": "long"}, {"a": 1}),
    "inner": ({"type": "record", "name": "i", "fields": [{"name": "n", "type": "int"}]}, {"n": 7}),
    "money": ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, Decimal("-1.25")),
    "day": ({"type": "int", "logicalType": "date"}, date(2026, 11, 15)),
    "at": (
        {"type": "long", "logicalType": "timestamp-micros"},
        datetime(2026, 11, 15, 12, 0, 0, 1, tzinfo=UTC),
    ),
    "local": (
        {"type": "long", "logicalType": "local-timestamp-micros"},
        datetime(2026, 11, 15, 12, 0, 0, 1),
    ),
}


def avro(schema: Any, row: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    schemaless_writer(stream, schema, row)
    return stream.getvalue()


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "r", "fields": [{"name": k, "type": v} for k, v in fields.items()]}


@pytest.fixture
def far_away(spark: SparkSession) -> Iterator[SparkSession]:
    """A session with another time zone than UTC."""
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_every_type_is_the_same_in_spark(far_away: SparkSession) -> None:
    from nsparq.pipeline.functions import from_avro, from_protobuf

    schema = record(**{name: kind for name, (kind, _) in FIELDS.items()})
    row = {name: value for name, (_, value) in FIELDS.items()}
    known = make("shop.Known", x_uint64value={"value": (1 << 64) - 1})
    known.x_timestamp.FromDatetime(row["at"])
    known.x_duration.FromTimedelta(timedelta(days=-1, microseconds=1))
    frame = far_away.createDataFrame(
        [(avro(schema, row), known.SerializeToString()), (b"", b"x"), (None, None)], "a BINARY, p BINARY"
    )
    found, bad, none = frame.select(
        from_avro("a", json.dumps(schema)).alias("a"),
        from_protobuf(frame.p, "shop.Known", SET).alias("p"),
        frame.a.isNull(),
    ).collect()
    moment = datetime.fromtimestamp(row["at"].timestamp())
    assert found.a.row.asDict(recursive=True) == {**row, "at": moment}
    assert (found.p.row.x_timestamp, found.p.row.x_uint64value) == (moment, (1 << 64) - 1)
    assert found.p.row.x_duration == timedelta(days=-1, microseconds=1)
    assert (found.a.error, found.p.error) == (None, None)
    assert (bad.a.row, bad.a.error) == (None, "flag: the message ends within its value")
    assert (bad.p.row, bad.p.error) == (None, "field 15: the message ends within its value")
    assert [*none.a, *none.p] == [None] * 4


def test_a_value_that_does_not_fit_its_column_fails_only_its_message() -> None:
    import pyarrow as pa

    from nsparq.pipeline.decode.avro import Avro
    from nsparq.pipeline.functions import rows_of

    money = {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 0}
    plain, schema = record(x="bytes"), record(x=money)
    bodies = pa.array([avro(plain, {"x": value}) for value in (b"\x07", b"\x7f\xff", b"\x08")])
    kind = pa.struct([("row", pa.struct([("x", pa.decimal128(2, 0))])), ("error", pa.string())])
    first, second, third = rows_of(bodies, Avro(json.dumps(schema)), kind).to_pylist()
    assert [first, third] == [{"row": {"x": 7}, "error": None}, {"row": {"x": 8}, "error": None}]
    assert second["row"] is None and "precision" in second["error"]
