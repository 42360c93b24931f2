"""JSON Schema: columns, and violations of a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nsparq.pipeline.decode.formats import SchemaFileError
from nsparq.pipeline.decode.json_schema import JsonSchema

ORDER = {
    "$ref": "#/$defs/order",
    "$defs": {
        "order": {
            "type": "object",
            "required": ["number", "note", "lines"],
            "properties": {
                "number": {"type": "integer"},
                "note": {"type": ["string", "null"]},
                "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
            },
        },
        "line": {"properties": {"price": {"type": "number", "minimum": 0}}},
    },
}

HALF_A_PAIR = r"'utf-8' codec can't encode character '\ud800' in position 0: surrogates not allowed"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "boolean"}, "BOOLEAN"),
        ({"type": "integer"}, "BIGINT"),
        ({"type": ["integer", "number"]}, "DOUBLE"),
        ({"type": ["string", "null"], "format": "date-time"}, "TIMESTAMP"),
        ({"type": "string", "format": "date"}, "DATE"),
        ({"type": "string", "format": "email"}, "STRING"),
        ({"enum": [1, 2, None]}, "BIGINT"),
        ({"const": "tea"}, "STRING"),
        ({"type": "array"}, "ARRAY<STRING>"),
        ({"type": "array", "items": {"type": "integer"}}, "ARRAY<BIGINT>"),
        ({"type": "array", "items": [{"type": "integer"}]}, "ARRAY<STRING>"),
        ({"type": "object", "properties": {"a b": {"type": "integer"}}}, "STRUCT<`a b`: BIGINT>"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "MAP<STRING, DOUBLE>"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "BIGINT"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "STRING"),
        (
            {
                "allOf": [
                    {"properties": {"a": {"type": "integer"}}},
                    {"properties": {"b": {"type": "string"}}},
                ]
            },
            "STRUCT<a: BIGINT, b: STRING>",
        ),
        # Any value is allowed: the column has its JSON.
        ({"type": "object"}, "STRING"),
        ({"type": ["integer", "string"]}, "STRING"),
        ({}, "STRING"),
        (True, "STRING"),
    ],
)
def test_the_column_of_a_property(schema: Any, expected: str) -> None:
    assert JsonSchema(json.dumps({"properties": {"x": schema}})).columns() == f"x {expected}"


def test_a_required_property_that_cannot_be_null_is_not_null() -> None:
    columns = "number BIGINT NOT NULL, note STRING, lines ARRAY<STRUCT<price: DOUBLE>> NOT NULL"
    assert JsonSchema(json.dumps(ORDER)).columns() == columns


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("{", "is not JSON: "),
        ("{}", "has no 'properties' to take the columns from: add a 'schema'"),
        ('{"properties": {"a": {"$ref": "#"}}}', "refers to itself, which no column can do: add a 'schema'"),
        ('{"properties": {"a": {"$ref": "#/nowhere"}}}', "refers to #/nowhere, which does not exist"),
        ('{"properties": {"a": {"$ref": "b.json"}}}', "b.json is outside the file and is not fetched"),
    ],
)
def test_a_schema_that_gives_no_columns_is_refused(schema: str, expected: str) -> None:
    with pytest.raises(SchemaFileError) as caught:
        JsonSchema(schema).columns()
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ('{"type": "text"}', "is not a JSON Schema: "),
        (
            '{"$ref": "http://127.0.0.1:9/a.json"}',
            "http://127.0.0.1:9/a.json is outside the file and is not fetched",
        ),
    ],
)
def test_an_invalid_schema_is_refused(schema: str, expected: str) -> None:
    with pytest.raises(SchemaFileError) as caught:
        JsonSchema(schema).validator()
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"number": 1, "note": null, "lines": []}', None),
        (b'{"number": 1, "lines": []}', '"note" is a required property'),
        (
            b'{"number": 1, "note": "", "lines": [{"price": 1}, {"price": -1}]}',
            "lines[1].price: -1 is less than the minimum of 0",
        ),
        (b'{"number": "1", "note": "", "lines": []}', 'number: "1" is not of type "integer"'),
        (b"[]", '[] is not of type "object"'),
        # Spark would read this.
        (
            b"{'number': 1}",
            "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        (b'{"number": \xff}', "not UTF-8: byte 0xff at position 11"),
        (b"[" * 100_000, "not readable as JSON: nested too deeply"),
        (b"[" * 500 + b"]" * 500, "cannot be checked: Recursion limit reached"),
        (rb'{"note": "\ud800"}', f"cannot be checked: {HALF_A_PAIR}"),
    ],
)
def test_the_reason_names_the_place(body: bytes, expected: str | None) -> None:
    assert JsonSchema(json.dumps(ORDER)).validator()(body) == expected


def test_confluents_frame_is_removed() -> None:
    reason = JsonSchema('{"type": "integer"}', "confluent").validator()
    assert reason(b"\0\0\0\0\7" + b"1") is None
    assert reason(b"1") == "no Confluent frame: it must begin with a zero byte and a 4-byte schema id"
