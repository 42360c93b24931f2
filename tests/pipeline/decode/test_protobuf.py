"""Protobuf messages: their columns and values, and why bytes do not decode."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    message_factory,
    struct_pb2,
    text_format,
    timestamp_pb2,
    wrappers_pb2,
)

from nsparq.pipeline.decode.formats import SchemaFileError, Undecodable
from nsparq.pipeline.decode.protobuf import Protobuf

WELL_KNOWN = [one.DESCRIPTOR for one in (duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)]
PLAIN = {
    "double": "DOUBLE",
    "float": "FLOAT",
    "int64": "BIGINT",
    "uint64": "DECIMAL(20, 0)",
    "int32": "INT",
    "fixed64": "DECIMAL(20, 0)",
    "fixed32": "BIGINT",
    "bool": "BOOLEAN",
    "string": "STRING",
    "bytes": "BINARY",
    "uint32": "BIGINT",
    "sfixed32": "INT",
    "sfixed64": "BIGINT",
    "sint32": "INT",
    "sint64": "BIGINT",
}
MESSAGES = {
    "Timestamp": "TIMESTAMP",
    "Duration": "INTERVAL DAY TO SECOND",
    "UInt64Value": "DECIMAL(20, 0)",
    "StringValue": "STRING",
    "Struct": "STRING",
    "Empty": "STRING",
}


def field(name: str, number: int, kind: str, label: str = "optional", more: str = "") -> str:
    known = f"type: TYPE_{kind.upper()}" if kind in PLAIN else f'type_name: ".{kind}"'
    return f'field {{ name: "{name}" number: {number} label: LABEL_{label.upper()} {known} {more} }}\n'


PLAIN_FIELDS = "".join(field(f"x_{kind}", number, kind) for number, kind in enumerate(PLAIN, 1))
WELL_KNOWN_FIELDS = "".join(
    field(f"x_{kind.lower()}", number, f"google.protobuf.{kind}") for number, kind in enumerate(MESSAGES, 1)
)
ORDER_FIELDS = "".join(
    [
        field("number", 1, "int64"),
        field("item", 2, "string"),
        field("price", 3, "double", more="proto3_optional: true oneof_index: 1"),
        field("kind", 4, "shop.Order.Kind"),
        field("lines", 5, "shop.Order.Line", "repeated"),
        field("counts", 6, "shop.Order.CountsEntry", "repeated"),
        field("card", 7, "string", more="oneof_index: 0"),
        field("cash", 8, "bool", more="oneof_index: 0"),
        field("at", 9, "google.protobuf.Timestamp"),
    ]
)
ORDER_COLUMNS = (
    "number BIGINT, item STRING, price DOUBLE, kind STRING, "
    "lines ARRAY<STRUCT<item: STRING, price: DOUBLE>>, "
    "counts MAP<STRING, INT>, card STRING, cash BOOLEAN, at TIMESTAMP"
)
SHOP = f"""
    name: "shop.proto" package: "shop" syntax: "proto3"
    {" ".join(f'dependency: "{one.name}"' for one in WELL_KNOWN)}
    message_type {{ name: "Plain" {PLAIN_FIELDS} }}
    message_type {{ name: "Order" {ORDER_FIELDS}
      oneof_decl {{ name: "paid" }} oneof_decl {{ name: "_price" }}
      enum_type {{ name: "Kind" value {{ name: "NONE" number: 0 }} value {{ name: "SALE" number: 1 }} }}
      nested_type {{ name: "Line" {field("item", 1, "string")} {field("price", 2, "double")} }}
      nested_type {{ name: "CountsEntry" {field("key", 1, "string")} {field("value", 2, "int32")}
        options {{ map_entry: true }} }}
    }}
    message_type {{ name: "Known" {WELL_KNOWN_FIELDS} }}
    message_type {{ name: "Tree" {field("left", 1, "shop.Tree")} }}
    message_type {{ name: "Bare" }}
"""
OLD = f"""
    name: "old.proto" package: "old"
    message_type {{ name: "Order" {field("number", 1, "int64", "required")} {field("item", 2, "string")} }}
"""


def descriptors(*files: str, well_known: bool = True) -> bytes:
    found = descriptor_pb2.FileDescriptorSet()
    for one in WELL_KNOWN if well_known else ():
        one.CopyToProto(found.file.add())
    for text in files:
        text_format.Parse(text, found.file.add())
    return found.SerializeToString()


SET = descriptors(SHOP, OLD)


def make(name: str, **values: Any) -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(SET).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))(**values)


def decode(message: Any) -> dict[str, Any]:
    return Protobuf(SET, message.DESCRIPTOR.full_name).decoder()(message.SerializeToString())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shop.Plain", ", ".join(f"x_{kind} {column}" for kind, column in PLAIN.items())),
        ("shop.Known", ", ".join(f"x_{kind.lower()} {column}" for kind, column in MESSAGES.items())),
        ("shop.Order", ORDER_COLUMNS),
    ],
)
def test_columns_are_the_fields_of_the_message(name: str, expected: str) -> None:
    assert Protobuf(SET, name).columns() == expected


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        (b"x", "shop.Order", "is not a complete descriptor set"),
        (descriptors(SHOP, well_known=False), "shop.Order", "is not a complete descriptor set"),
        (SET, "Order", "has no message 'Order'; there are shop.Plain, shop.Order, shop.Known, shop.Tree,"),
        (SET, "shop.Tree", "shop.Tree contains itself, which no column can do"),
        (SET, "shop.Bare", "shop.Bare has no fields"),
    ],
)
def test_a_type_without_columns_is_refused(content: bytes, name: str, expected: str) -> None:
    with pytest.raises(SchemaFileError) as caught:
        Protobuf(content, name).columns()
    assert str(caught.value).startswith(expected)


def test_a_message_becomes_a_row() -> None:
    order = make("shop.Order", number=1, item="tea", kind=1, counts={"a": 2}, cash=False)
    order.lines.add(item="tea", price=4.5)
    order.at.FromSeconds(1_794_744_000)
    assert decode(order) == {
        "number": 1,
        "item": "tea",
        "price": None,
        "kind": "SALE",
        "lines": [{"item": "tea", "price": 4.5}],
        "counts": [("a", 2)],
        "card": None,
        "cash": False,
        "at": 1_794_744_000_000_000,
    }


def test_an_unset_field_is_null_only_if_the_message_shows_it() -> None:
    row = decode(make("shop.Order"))
    empty = {"number": 0, "item": "", "kind": "NONE", "lines": [], "counts": []}
    assert row == {**empty, "price": None, "card": None, "cash": None, "at": None}
    assert decode(make("shop.Order", price=0.0))["price"] == 0.0


def test_an_unknown_enum_value_is_its_number() -> None:
    assert decode(make("shop.Order", kind=7))["kind"] == "7"


def test_well_known_messages() -> None:
    known = make("shop.Known", x_uint64value={"value": 1 << 63}, x_stringvalue={"value": ""})
    known.x_timestamp.nanos = 1_500
    known.x_duration.seconds, known.x_duration.nanos = -1, -500_000_000
    known.x_struct.update({"a": [1, "x"]})
    known.x_empty.SetInParent()
    assert decode(known) == {
        "x_timestamp": 1,
        "x_duration": -1_500_000,
        "x_uint64value": 1 << 63,
        "x_stringvalue": "",
        "x_struct": '{"a": [1.0, "x"]}',
        "x_empty": "{}",
    }


def reason(body: bytes, name: str = "shop.Order", framing: str = "") -> str:
    with pytest.raises(Undecodable) as caught:
        Protobuf(SET, name, framing).decoder()(body)
    return str(caught.value)


SHORT = "the message ends within its value"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\x08", f"number: {SHORT}"),
        (b"\x08" + b"\xff" * 11, f"number: {SHORT}"),
        (b"\xff", f"a field: {SHORT}"),
        (b"\x12\x05tea", f"item: {SHORT}"),
        (b"\x19\x00", f"price: {SHORT}"),
        (b"\xa2\x06\x01", f"field 100: {SHORT}"),
        (b"\x12\x01\xff", "item: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"\x2a\x03\x0a\x01\xff", "lines.item: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b"\x2a\x02\x0a\x02", f"lines.item: {SHORT}"),
        (b"\x08\x01\x07", "the message: no field begins at byte 2"),
        (b"hello", "the message: no field begins at byte 2"),
        (b"\x0b", "Error parsing message with type 'shop.Order'"),
        (b"\x4a\x07\x08\xff\xff\xff\xff\xff\x7f", "at: 4398046511103 s and 0 ns is out of range"),
    ],
)
def test_the_reason_names_the_field(body: bytes, expected: str) -> None:
    assert reason(body).startswith(expected)


def test_a_required_field_is_required() -> None:
    assert reason(b"\x12\x03tea", "old.Order") == "number is missing"


def test_confluents_frame_is_removed() -> None:
    body = make("shop.Order", number=1).SerializeToString()
    decoder = Protobuf(SET, "shop.Order", "confluent").decoder()
    # One number follows: 1, for the second message of the file. Numbers are zigzag-encoded.
    assert decoder(b"\0\0\0\0\7\2\2" + body)["number"] == 1
    first = Protobuf(SET, "shop.Plain", "confluent").decoder()
    assert first(b"\0\0\0\0\7\0")["x_int64"] == first(b"\0\0\0\0\7\2\0")["x_int64"] == 0
    inner = Protobuf(SET, "shop.Order.Line", "confluent").decoder()
    assert inner(b"\0\0\0\0\7\4\2\0")["item"] == ""
    assert (
        reason(b"\0\0\0\0\7\0" + body, framing="confluent")
        == "is type [0] of its schema, but shop.Order is type [1]"
    )
    assert reason(b"\0\0\0\0\7\2", framing="confluent") == "the message ends within its Confluent frame"
    assert reason(b"\0\0", framing="confluent").startswith("no Confluent frame")
