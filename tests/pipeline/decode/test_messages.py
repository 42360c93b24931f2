"""Every message is either a row or a dead letter, and the letter says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nsparq.pipeline.file.spec import Decode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


EXAMPLES = Path(__file__).parents[3] / "examples" / "pipelines"
JSON_SCHEMA = (
    "number INT NOT NULL, item STRING, price DOUBLE, cost DECIMAL(9, 2), at TIMESTAMP, tags ARRAY<STRING>"
)

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
    # Spark's own reader would silently take the first object of these.
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
    b'{"number": 1, "cost": 1' + b"0" * 400 + b"}": "does not fit the schema",
}

GOOD_CSV = {b"1,tea,4.5": 1, b"2,,": 2, b'3,"a,b",1': 3}
BAD_CSV = {
    b"1,tea": "has 2 fields instead of 3",
    b"1,tea,2,3": "has 4 fields instead of 3",
    b"one,tea,2": 'number: "one" is not INT',
    b",tea,2": "number: is missing",
    b"1,tea,x": 'price: "x" is not DOUBLE',
    b"1,\xff,2": "not UTF-8: byte 0xff at position 2",
}

FRAME = b"\0\0\0\0\7"
NO_FRAME = "no Confluent frame: it must begin with a zero byte and a 4-byte schema id"
GOOD_FRAMED = {FRAME + b'{"number": 1} ': 1, FRAME + b' {"number": 2}': 2}
BAD_FRAMED = {
    b'{"number": 1}': NO_FRAME,
    FRAME + b"{}": "number is missing",
    b'\0\0\0\0\6{"number": 1}': "the schema id is 6, not 7",
    b"\0\0\0\0": NO_FRAME,
    FRAME: "not JSON: Expecting value: line 1 column 1 (char 0)",
    b'\1\0\0\0\7{"number": 1}': NO_FRAME,
    FRAME + b'{"number": 1}x': "not JSON: Extra data: line 1 column 14 (char 13)",
}

ORDER_SCHEMA = (EXAMPLES / "order.schema.json").read_bytes()
GOOD_CHECKED = {b'{"number": 1, "item": "tea", "price": null}': 1}
BAD_CHECKED = {
    b'{"number": 0, "item": "tea"}': "number: 0 is less than the minimum of 1",
    b'{"number": 1}': '"item" is a required property',
    b'{"number": 1, "item": "milk"}': 'item: "milk" is not one of "tea" or "coffee"',
    # It satisfies the schema, which does not check formats, but it is not a time.
    b'{"number": 1, "item": "tea", "at": "soon"}': 'at: "soon" is not TIMESTAMP',
    # Spark would accept single quotes.
    b"{'number': 1, 'item': 'tea'}": "not JSON: Expecting property name enclosed in double quotes: line 1 "
    "column 2 (char 1)",
    b"\xff": "not UTF-8: byte 0xff at position 0",
}

ORDER_AVRO = (EXAMPLES / "order.avsc").read_bytes()
AVRO = b"\x02" + b"\x06tea" + b"\x00" + b"\x00"
SHORT = "the message ends within its value"
GOOD_AVRO = {AVRO: 1, b"\x04" + AVRO[1:]: 2}
BAD_AVRO = {
    AVRO[:-1]: f"at: {SHORT}",
    AVRO + b"\x00": "1 byte after the record",
    b"{}": f"item: {SHORT}",
    b"": f"number: {SHORT}",
}

ORDER_PROTOBUF = (EXAMPLES / "shop.desc").read_bytes()
GOOD_PROTOBUF = {b"\x08\x01\x12\x03tea": 1, b"": 0}
BAD_PROTOBUF = {
    b"\x08\x01\x12\x04tea": f"item: {SHORT}",
    b"hello": "the message: no field begins at byte 2",
}


@pytest.fixture
def messages(spark: SparkSession) -> Callable[..., DataFrame]:
    from nsparq.spark.datasource import SCHEMA

    def make(*bodies: bytes) -> DataFrame:
        at = datetime(2026, 11, 15, 12, 0, 0, 250, tzinfo=UTC)
        rows = [
            ("orders", "n:1", 10 + place, at, 1, f"{place:016x}", body, None)
            for place, body in enumerate(bodies)
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
        pytest.param(
            Decode(format="json", framing="confluent:7"),
            "number INT NOT NULL",
            GOOD_FRAMED,
            BAD_FRAMED,
            id="json in frames",
        ),
        pytest.param(
            Decode(format="json", json_schema="order.schema.json", definition=ORDER_SCHEMA),
            "",
            GOOD_CHECKED,
            BAD_CHECKED,
            id="json with a JSON Schema",
        ),
        pytest.param(Decode(format="avro", definition=ORDER_AVRO), "", GOOD_AVRO, BAD_AVRO, id="avro"),
        pytest.param(
            Decode(format="protobuf", definition=ORDER_PROTOBUF, message="shop.Order"),
            "",
            GOOD_PROTOBUF,
            BAD_PROTOBUF,
            id="protobuf",
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

    from nsparq.pipeline.decode.messages import dead_letters, declared_columns, good_rows

    frame, fields = messages(*good, *bad), StructType.fromDDL(schema or declared_columns(decode))
    rows = good_rows(frame, decode, fields, bad="drop").collect()
    letters = [
        json.loads(row.body)
        for row in dead_letters(frame, decode, fields, pipeline="p", channel="c").collect()
    ]
    assert {row._offset - 10: row.number for row in rows} == dict(enumerate(good.values()))
    bodies = [*good, *bad]
    assert {bodies[letter["offset"] - 10]: letter["error"] for letter in letters} == bad


def test_a_message_of_any_depth_has_a_reason() -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.types import IntegerType, StructType

    from nsparq.pipeline.decode.reasons import why_not

    fields = StructType().add("a", IntegerType())
    for depth in range(800, 1000):
        reason = why_not(b'{"a": ' + b"[" * depth + b"]" * depth + b"}", "json", fields, {})
        assert "is not INT" in reason or "nested too deeply" in reason


def test_a_dead_letter_says_where_the_message_came_from(messages: Callable[..., DataFrame]) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode.messages import dead_letters

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


def test_a_dead_letter_has_the_headers_of_the_message(messages: Callable[..., DataFrame]) -> None:
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode.messages import dead_letters

    frame = messages(b"x").withColumn("headers", F.expr("map('traceparent', '00-1', 'nsq-epoch', '1')"))
    decode, fields = Decode(format="json"), StructType.fromDDL("a INT")
    (letter,) = dead_letters(frame, decode, fields, pipeline="p", channel="c").collect()
    found = json.loads(letter.body)
    assert found["headers"] == {"traceparent": "00-1"}


def test_text_and_raw(messages: Callable[..., DataFrame]) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode.messages import dead_letters, good_rows

    frame, none = messages(b"caf\xc3\xa9", b"\xff"), StructType()
    (row,) = good_rows(frame, Decode(format="text"), none, bad="drop").collect()
    assert (row.text, row._topic, row._offset) == ("café", "orders", 10)
    (letter,) = dead_letters(frame, Decode(format="text"), none, pipeline="p", channel="c").collect()
    assert json.loads(letter.body)["error"] == "not UTF-8: byte 0xff at position 0"
    rows = good_rows(frame, Decode(format="raw"), none, bad="fail")
    assert [bytes(row.body) for row in rows.collect()] == [b"caf\xc3\xa9", b"\xff"]
    assert rows.columns == ["body", "_topic", "_node", "_offset", "_timestamp", "_attempts", "_id"]


def test_without_dead_letters_the_first_bad_message_fails_the_query(
    messages: Callable[..., DataFrame],
) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode.messages import good_rows

    rows = good_rows(messages(b"x"), Decode(format="json"), StructType.fromDDL("a INT"), bad="fail")
    with pytest.raises(
        Exception, match="message 10 of topic orders at n:1 does not decode as json"
    ) as caught:
        rows.collect()
    assert "dead_letters" in str(caught.value)


def test_the_query_fails_with_the_reason_where_it_is_known(messages: Callable[..., DataFrame]) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode.messages import declared_columns, good_rows

    decode = Decode(format="avro", definition=ORDER_AVRO)
    rows = good_rows(messages(b""), decode, StructType.fromDDL(declared_columns(decode)), bad="fail")
    with pytest.raises(Exception, match=f"does not decode as avro: number: {SHORT}; set dead_letters"):
        rows.collect()


@pytest.mark.parametrize(
    ("decode", "calls"),
    [
        pytest.param(Decode(format="json", schema="a INT, b INT"), {"from_json(": 1}, id="json"),
        pytest.param(
            Decode(format="json", json_schema="order.schema.json", definition=ORDER_SCHEMA),
            {"from_json(": 1, "ArrowEvalPython": 1},
            id="json with a JSON Schema",
        ),
        pytest.param(Decode(format="avro", definition=ORDER_AVRO), {"ArrowEvalPython": 1}, id="avro"),
    ],
)
def test_a_message_is_decoded_once(
    messages: Callable[..., DataFrame], capsys: Any, decode: Decode, calls: dict[str, int]
) -> None:
    from pyspark.sql.types import StructType

    from nsparq.pipeline.decode.messages import dead_letters, declared_columns, good_rows

    fields = StructType.fromDDL(declared_columns(decode))
    for bad in ("drop", "fail"):
        good_rows(messages(b"{}"), decode, fields, bad=bad).select(*fields.names[:2]).explain()
        plan = capsys.readouterr().out
        assert {name: plan.count(name) for name in calls} == calls, plan
    dead_letters(messages(b"{}"), decode, fields, pipeline="p", channel="c").explain()
    assert capsys.readouterr().out.count("ArrowEvalPython") == calls.get("ArrowEvalPython", 0)
