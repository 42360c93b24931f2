"""Every message is either a row or a dead letter, and the letter says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from nsparq.pipeline.spec import Decode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


JSON_SCHEMA = "number INT NOT NULL, item STRING, price DOUBLE, at TIMESTAMP, tags ARRAY<STRING>"

GOOD_JSON = {
    b'{"number": 1}': 1,
    b'{"number": 2, "item": "tea", "price": 4.5, "tags": ["a", null], "other": {}}': 2,
    b' \n{"number": 3}\r\n\t ': 3,
    b'{"number": 4, "item": "}{"}': 4,
    b'{"item": "caf\xc3\xa9", "number": 5}': 5,
    b'{"number": 6, "at": "2026-11-15T12:00:00Z"}': 6,
    b'{"number": 7, "item": "a\\"}"}': 7,
}
BAD_JSON = {
    b"hello": "not JSON: Expecting value: line 1 column 1 (char 0)",
    b'{"number": 1': "not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)",
    b'{"number": 1x': "not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)",
    # Spark's own reader would take the first object of these, and say nothing.
    b'{"number": 1} x': "not JSON: Extra data: line 1 column 15 (char 14)",
    b'{"number": 1}{"number": 2}': "not JSON: Extra data: line 1 column 14 (char 13)",
    b'{"number": 1},{"number": 2}': "not JSON: Extra data: line 1 column 14 (char 13)",
    b'{"number": 1}}': "not JSON: Extra data: line 1 column 14 (char 13)",
    b'{"number": 1}] }': "not JSON: Extra data: line 1 column 14 (char 13)",
    b"{}{}": "not JSON: Extra data: line 1 column 3 (char 2)",
    b"{}": "number is missing",
    b'{"number": null}': "number is missing",
    b"12": "not a JSON object but the value 12",
    b"null": "not a JSON object but the value null",
    b"  ": "not JSON: Expecting value: line 1 column 3 (char 2)",
    b'[{"number": 1}]': "not a JSON object but an array",
    b'{"number": "one"}': 'number: "one" is not INT',
    b'{"number": 1.5}': "number: 1.5 is not INT",
    b'{"number": 99999999999}': "number: 99999999999 is not INT",
    b'{"number": 1, "price": true}': "price: true is not DOUBLE",
    b'{"number": 1, "tags": "a"}': 'tags: "a" is not ARRAY<STRING>',
    b'{"number": 1, "at": "soon"}': 'at: "soon" is not TIMESTAMP',
    b'{"number": 1, "item": "\xff"}': "not UTF-8: byte 0xff at position 23",
}

GOOD_CSV = {b"1,tea,4.5": 1, b"2,,": 2, b'3,"a,b",1': 3}
BAD_CSV = {
    b"1,tea": "2 fields, where there should be 3",
    b"1,tea,2,3": "4 fields, where there should be 3",
    b"one,tea,2": 'number: "one" is not INT',
    b",tea,2": "number: is missing",
    b"1,tea,x": 'price: "x" is not DOUBLE',
    b"1,\xff,2": "not UTF-8: byte 0xff at position 2",
}


@pytest.fixture
def messages(spark: SparkSession) -> Callable[..., DataFrame]:
    from nsparq.spark.datasource import SCHEMA

    def make(*bodies: bytes) -> DataFrame:
        at = datetime(2026, 11, 15, 12, 0, 0, 250, tzinfo=UTC)
        rows = [
            ("orders", "n:1", 10 + place, at, 1, f"{place:016x}", body) for place, body in enumerate(bodies)
        ]
        return spark.createDataFrame(rows, SCHEMA)

    return make


@pytest.mark.parametrize(
    ("decode", "schema", "good", "bad"),
    [
        pytest.param(Decode(format="json"), JSON_SCHEMA, GOOD_JSON, BAD_JSON, id="json"),
        pytest.param(
            Decode(format="csv"),
            "number INT NOT NULL, item STRING, price DOUBLE",
            GOOD_CSV,
            BAD_CSV,
            id="csv",
        ),
    ],
)
def test_a_message_is_a_row_or_a_dead_letter_that_says_why(
    messages: Callable[..., DataFrame],
    decode: Decode,
    schema: str,
    good: dict[bytes, int],
    bad: dict[bytes, str],
) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode import dead_letters, good_rows

    frame, fields = messages(*good, *bad), StructType.fromDDL(schema)
    rows = good_rows(frame, decode, fields, bad="drop").collect()
    letters = [
        json.loads(row.body)
        for row in dead_letters(frame, decode, fields, pipeline="p", channel="c").collect()
    ]
    assert {row._offset - 10: row.number for row in rows} == dict(enumerate(good.values()))
    bodies = [*good, *bad]
    assert {bodies[letter["offset"] - 10]: letter["error"] for letter in letters} == bad


def test_a_dead_letter_says_where_the_message_came_from(messages: Callable[..., DataFrame]) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode import dead_letters

    frame = messages(b"x", b"\xff")
    found = dead_letters(
        frame, Decode(format="json"), StructType.fromDDL("a INT"), pipeline="bills", channel="billing"
    )
    first, second = (json.loads(row.body) for row in found.collect())
    assert first == {
        "topic": "orders",
        "channel": "billing",
        "id": "0000000000000000",
        "timestamp_ns": 1_794_744_000_000_250_000,
        "attempts": 1,
        "pipeline": "bills",
        "node": "n:1",
        "offset": 10,
        "error": "not JSON: Expecting value: line 1 column 1 (char 0)",
        "text": "x",
        "base64": None,
    }
    assert (second["text"], second["base64"]) == (None, "/w==")


def test_text_and_raw(messages: Callable[..., DataFrame]) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode import dead_letters, good_rows

    frame, none = messages(b"caf\xc3\xa9", b"\xff"), StructType()
    (row,) = good_rows(frame, Decode(format="text"), none, bad="drop").collect()
    assert (row.text, row._topic, row._offset) == ("café", "orders", 10)
    (letter,) = dead_letters(frame, Decode(format="text"), none, pipeline="p", channel="c").collect()
    assert json.loads(letter.body)["error"] == "not UTF-8: byte 0xff at position 0"
    rows = good_rows(frame, Decode(format="raw"), none, bad="fail")
    assert [bytes(row.body) for row in rows.collect()] == [b"caf\xc3\xa9", b"\xff"]
    assert rows.columns == ["body", "_topic", "_node", "_offset", "_timestamp", "_attempts", "_id"]


def test_without_a_place_for_bad_messages_the_first_of_them_fails_the_query(
    messages: Callable[..., DataFrame],
) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode import good_rows

    rows = good_rows(messages(b"x"), Decode(format="json"), StructType.fromDDL("a INT"), bad="fail")
    with pytest.raises(
        Exception, match="message 10 of topic orders at n:1 does not decode as json"
    ) as caught:
        rows.collect()
    assert "dead_letters" in str(caught.value)


def test_a_message_is_decoded_once(messages: Callable[..., DataFrame], capsys: Any) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode import good_rows

    rows = good_rows(messages(b"{}"), Decode(format="json"), StructType.fromDDL("a INT, b INT"), bad="drop")
    rows.select("a", "b").explain()
    assert capsys.readouterr().out.count("from_json(") == 1
