"""Avro records: their columns, and why a message does not decode."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from fastavro import schemaless_writer

from nsparq.pipeline.decode.avro import Avro
from nsparq.pipeline.decode.formats import SchemaFileError, Undecodable

ORDER = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "number", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["SALE", "RETURN"]}},
        {"name": "before", "type": ["null", "Kind"], "default": None},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}
ROW = {"number": 1, "at": datetime(2026, 11, 15, tzinfo=UTC), "kind": "SALE", "before": None, "tags": ["a"]}


def encoded(row: dict[str, Any], schema: Any = ORDER) -> bytes:
    stream = io.BytesIO()
    schemaless_writer(stream, schema, row)
    return stream.getvalue()


BODY = encoded(ROW)


def with_field(kind: Any) -> str:
    return json.dumps({"type": "record", "name": "r", "fields": [{"name": "x", "type": kind}]})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("boolean", "BOOLEAN"),
        ("int", "INT"),
        ("float", "FLOAT"),
        ("bytes", "BINARY"),
        ("null", "STRING"),
        (["null"], "STRING"),
        (["null", "string"], "STRING"),
        (["int", "null", "long"], "BIGINT"),
        (["float", "double"], "DOUBLE"),
        ({"type": "fixed", "name": "f", "size": 4}, "BINARY"),
        ({"type": "enum", "name": "e", "symbols": ["A"]}, "STRING"),
        ({"type": "map", "values": ["null", "int"]}, "MAP<STRING, INT>"),
        ({"type": "array", "items": {"type": "array", "items": "long"}}, "ARRAY<ARRAY<BIGINT>>"),
        ({"type": "record", "name": "s", "fields": [{"name": "a b", "type": "int"}]}, "STRUCT<`a b`: INT>"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, "DECIMAL(9, 2)"),
        ({"type": "int", "logicalType": "date"}, "DATE"),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, "TIMESTAMP_NTZ"),
        # Spark has no such types: the values keep their plain type.
        ({"type": "string", "logicalType": "uuid"}, "STRING"),
        ({"type": "int", "logicalType": "time-millis"}, "INT"),
        ({"type": "long", "logicalType": "of-our-own"}, "BIGINT"),
    ],
)
def test_the_column_of_a_type(kind: Any, expected: str) -> None:
    assert Avro(with_field(kind)).columns() == f"x {expected}"


def test_columns_are_the_fields_of_the_record() -> None:
    columns = "number BIGINT, at TIMESTAMP, kind STRING, before STRING, tags ARRAY<STRING>"
    assert Avro(json.dumps(ORDER)).columns() == columns


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("{", "is not an Avro schema: Expecting property name"),
        (with_field("unheard-of"), "is not an Avro schema: unheard-of"),
        ('"long"', "must be a record: its fields are the columns"),
        ('{"type": "record", "name": "r", "fields": []}', "r has no fields"),
        (with_field(["null", "r"]), "r contains itself, which no column can do"),
        (with_field({"type": "array", "items": "r"}), "r contains itself, which no column can do"),
        (with_field(["int", "string"]), "x: a union of several types cannot be a column"),
        *(
            (
                with_field({"type": "array", "items": items}),
                "x: an array of values without bytes could be of any length",
            )
            for items in (
                "null",
                {"type": "fixed", "name": "f", "size": 0},
                {"type": "record", "name": "s", "fields": [{"name": "y", "type": "null"}]},
            )
        ),
        (
            with_field({"type": "bytes", "logicalType": "decimal", "precision": 39}),
            "x: Spark's decimals have at most 38 digits",
        ),
    ],
)
def test_a_schema_that_gives_no_columns_is_refused(schema: str, expected: str) -> None:
    with pytest.raises(SchemaFileError) as caught:
        Avro(schema).columns()
    assert str(caught.value).startswith(expected)


def test_a_record_becomes_a_row() -> None:
    assert Avro(json.dumps(ORDER)).decoder()(BODY) == ROW


def test_logical_types_that_spark_lacks_keep_their_plain_type() -> None:
    schema = with_field({"type": "string", "logicalType": "uuid"})
    assert Avro(schema).decoder()(encoded({"x": "no uuid"}, json.loads(with_field("string")))) == {
        "x": "no uuid"
    }
    money = with_field({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2})
    row = {"x": Decimal("1.25")}
    assert Avro(money).decoder()(encoded(row, json.loads(money))) == row


def reason(body: bytes, framing: str = "") -> str:
    with pytest.raises(Undecodable) as caught:
        Avro(json.dumps(ORDER), framing).decoder()(body)
    return str(caught.value)


SHORT = "the message ends within its value"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", f"number: {SHORT}"),
        (BODY[:3], f"at: {SHORT}"),
        (BODY[:-1], f"tags: {SHORT}"),
        (BODY + b"xy", "2 bytes after the record"),
        (
            BODY[:7] + b"\x04" + BODY[8:],
            "kind: the number of the enum symbol or of the union type is out of range",
        ),
        (BODY.replace(b"a", b"\xff"), "tags: 'utf-8' codec can't decode byte 0xff in position 0"),
        # The year 292,278,994.
        (b"\x02" + b"\xfe" + b"\xff" * 8 + b"\x01" + BODY[7:], "at: "),
    ],
)
def test_the_reason_names_the_field(body: bytes, expected: str) -> None:
    assert reason(body).startswith(expected)


def test_confluents_frame_is_removed() -> None:
    decode = Avro(json.dumps(ORDER), "confluent").decoder()
    assert decode(b"\0\0\0\0\7" + BODY) == ROW
    assert reason(b"\0\0\0\0\7", "confluent") == f"number: {SHORT}"
