"""Framing of message bodies, and libraries that are not installed."""

from __future__ import annotations

import sys

import pytest

from nsparq.pipeline.decode.avro import Avro
from nsparq.pipeline.decode.formats import SchemaFileError, Undecodable, read_framing, without_frame
from nsparq.pipeline.decode.json_schema import JsonSchema
from nsparq.pipeline.decode.protobuf import Protobuf


def test_confluents_frame_is_removed() -> None:
    assert without_frame(b"\1x", "") == b"\1x"
    assert (
        without_frame(b"\0\0\0\1\2x", "confluent") == without_frame(b"\0\0\0\1\2x", "confluent:258") == b"x"
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\0\0\0\1\3x", "the schema id is 259, not 258"),
        (b"\1\0\0\1\2x", "no Confluent frame: it must begin with a zero byte and a 4-byte schema id"),
        (b"\0\0\1\2", "no Confluent frame: it must begin with a zero byte and a 4-byte schema id"),
    ],
)
def test_a_message_in_another_frame_does_not_decode(body: bytes, expected: str) -> None:
    with pytest.raises(Undecodable) as caught:
        without_frame(body, "confluent:258")
    assert str(caught.value) == expected


@pytest.mark.parametrize("framing", ["confluent:", "confluent:x", "confluent:-1", "Confluent", 7])
def test_no_framing(framing: object) -> None:
    with pytest.raises(ValueError, match="must be confluent or confluent:ID"):
        read_framing(framing)


@pytest.mark.parametrize(
    ("module", "use", "expected"),
    [
        ("fastavro", Avro("{}").columns, "Avro needs the package fastavro"),
        ("google.protobuf", Protobuf(b"", "a").columns, "Protobuf needs the package protobuf"),
        ("jsonschema_rs", JsonSchema("{}").validator, "JSON Schema needs the package jsonschema-rs"),
    ],
)
def test_a_library_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, use: object, expected: str
) -> None:
    for name in [module, *(one for one in sys.modules if one.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert callable(use)
    with pytest.raises(SchemaFileError) as caught:
        use()
    assert str(caught.value).startswith(f"{expected}: pip install 'nsparq[formats]'")
