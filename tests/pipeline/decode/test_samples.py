"""Columns inferred from sample messages."""

from __future__ import annotations

import pytest

from nsparq.pipeline.decode.samples import guess_format, infer_csv, infer_json, quoted


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([b'{"a": 1, "b": "x", "c": true, "d": 1.5}'], "a BIGINT, b STRING, c BOOLEAN, d DOUBLE"),
        ([b'{"a": 1}', b'{"a": 2.5}'], "a DOUBLE"),
        ([b'{"a": 1}', b'{"a": "x"}'], "a STRING"),
        ([b'{"a": true}', b'{"a": 1}'], "a STRING"),
        ([b'{"a": null}'], "a STRING"),
        ([b'{"a": null}', b'{"b": 1, "a": 2}'], "a BIGINT, b BIGINT"),
        ([b'{"a": 99999999999999999999}'], "a DOUBLE"),
        ([b'{"at": "2026-11-15T12:00:00Z"}', b'{"at": "2026-11-15 12:00:00.5+01:00"}'], "at TIMESTAMP"),
        ([b'{"at": "2026-11-15T12:00:00Z"}', b'{"at": "soon"}'], "at STRING"),
        ([b'{"a": [1, 2], "b": [], "c": [{"x": 1}, {"y": "z"}]}'],
         "a ARRAY<BIGINT>, b ARRAY<STRING>, c ARRAY<STRUCT<x: BIGINT, y: STRING>>"),
        ([b'{"a": {"b": {"c": 1}}}'], "a STRUCT<b: STRUCT<c: BIGINT>>"),
        ([b'{"a": {}}'], "a STRING"),
        ([b'{"a": {"b": 1}}', b'{"a": [1]}'], "a STRING"),
        ([b'{"order id": 1, "not": 2, "\\u00e9`": 3}'], "`order id` BIGINT, `not` BIGINT, `é``` BIGINT"),
        ([b"x", b"[1]", b"1", b"\xff", b'{"a": 1}'], "a BIGINT"),
        ([b"x"], ""),
        ([], ""),
        ([b"{}"], ""),
        ([b"[" * 100_000], ""),
        ([b'{"": 1, "\\ud800": 2, "a": {"": 3}, "b": 4}'], "a STRING, b BIGINT"),
    ],
)  # fmt: skip
def test_the_schema_of_json(bodies: list[bytes], expected: str) -> None:
    assert infer_json(bodies) == expected


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([b"1,x,2.5,true,2026-11-15T12:00:00Z"], "c1 BIGINT, c2 STRING, c3 DOUBLE, c4 BOOLEAN, c5 TIMESTAMP"),
        ([b"1,,x", b"2.5,3,x", b"1,2", b"4,5,y"], "c1 DOUBLE, c2 BIGINT, c3 STRING"),
        ([b'"a,b",1\n'], "c1 STRING, c2 BIGINT"),
        # Python reads these as numbers, and Spark does not.
        ([b"1_000,1_0.5,nan,inf,infinity,\xd9\xa1"], ", ".join(f"c{n} STRING" for n in range(1, 7))),
        (
            [b"+1,-.5,1.,1e-5,NaN,-Inf,Infinity"],
            ", ".join(["c1 BIGINT", *(f"c{n} DOUBLE" for n in range(2, 8))]),
        ),
        ([b"-1234567890123456789," + b"9" * 19 + b"," + b"9" * 5000], "c1 BIGINT, c2 DOUBLE, c3 DOUBLE"),
        ([b"x" * 200_000, b"1,2"], "c1 BIGINT, c2 BIGINT"),
        ([], ""),
    ],
)
def test_the_schema_of_csv(bodies: list[bytes], expected: str) -> None:
    assert infer_csv(bodies) == expected


def test_values_that_are_nested_deeply_are_text() -> None:
    for depth in (100, 900):
        found = infer_json([b'{"a":' * depth + b"1" + b"}" * depth])
        assert found == "a " + "STRUCT<a: " * 49 + "STRING" + ">" * 49


def test_another_separator() -> None:
    assert infer_csv([b"1;2,5"], ";") == "c1 BIGINT, c2 STRING"


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([b"{}", b"{}", b"x"], "json"),
        ([b"{}", b"x", b"y"], "text"),
        ([b"x", b"\xff"], "raw"),
        ([], "text"),
    ],
)
def test_the_format_is_that_of_most_messages(bodies: list[bytes], expected: str) -> None:
    assert guess_format(bodies) == expected


def test_names_that_sql_would_misunderstand_are_quoted() -> None:
    assert [quoted(name) for name in ("a_1", "a b", "1a", "Comment")] == ["a_1", "`a b`", "`1a`", "`Comment`"]
