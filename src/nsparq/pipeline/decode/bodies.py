"""What the formats of message bodies share, those above all that a schema file describes. Needs no Spark.

Avro and Protobuf are decoded in the tasks by fastavro and by Protobuf's own library, not by Spark's from_avro
and from_protobuf. Those need jars that PySpark does not bring (spark-avro, spark-protobuf), and of a message
that does not decode they say only that. Two ways could differ in what they take for a good message. So there
is one: the one that works wherever `pip install` does, names the field that is wrong, and has tests.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from typing import Any, Final, Protocol

from nsparq.errors import NsparqError

__all__ = [
    "BodyFormat",
    "SchemaFileError",
    "Undecodable",
    "frame_beginning",
    "library",
    "read_framing",
    "read_json",
    "read_text",
    "without_frame",
]

INSTALL: Final = "pip install 'nsparq[formats]'"
CONFLUENT: Final = "confluent"
"""The framing of Confluent's serializers. Behind a colon it may have the id of the only schema to accept."""
FRAME_BYTES: Final = 5

Decoder = Callable[[bytes], dict[str, Any]]


class SchemaFileError(NsparqError):
    """A schema that cannot be used, or a library that is not installed."""

    retry_helps = False


class Undecodable(ValueError):
    """A body that does not decode; the text is the reason."""


class BodyFormat(Protocol):
    """How bodies become rows. A value that travels to the tasks."""

    def __hash__(self) -> int: ...

    def columns(self) -> str:
        """As in CREATE TABLE. Raises SchemaFileError."""

    def decoder(self) -> Decoder:
        """Makes a row of a body, as Arrow takes it, or raises Undecodable. Raises SchemaFileError."""


def library(name: str, purpose: str, package: str) -> Any:
    """A module of a package that may not be installed. Raises SchemaFileError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SchemaFileError(f"{purpose} needs the package {package}: {INSTALL} ({error})") from error


def read_framing(value: Any) -> str:
    """Raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(rf"{CONFLUENT}(:\d{{1,9}})?", value):
        raise ValueError(f"must be {CONFLUENT} or {CONFLUENT}:ID, the id of a schema")
    return value


def frame_beginning(framing: str) -> bytes:
    """What a body must begin with: a zero byte and, if the framing names one, the id of its schema."""
    _, _, schema = framing.partition(":")
    return b"\0" + (int(schema).to_bytes(4, "big") if schema else b"")


def without_frame(body: bytes, framing: str) -> bytes:
    """The body without what the serializer of a schema registry puts before it. Raises Undecodable.

    Confluent's puts a zero byte there, and the id of the schema in 4 bytes.
    """
    if not framing:
        return body
    if len(body) < FRAME_BYTES or body[0]:
        raise Undecodable("no Confluent frame: a zero byte and 4 bytes of a schema's id should come first")
    if not body.startswith(frame_beginning(framing)):
        found = int.from_bytes(body[1:FRAME_BYTES], "big")
        raise Undecodable(f"the id of its schema is {found}, not {framing.partition(':')[2]}")
    return body[FRAME_BYTES:]


def read_text(body: bytes) -> str:
    """Raises Undecodable."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Undecodable(f"not UTF-8: byte {body[error.start]:#04x} at position {error.start}") from error


def read_json(body: bytes) -> Any:
    """Raises Undecodable."""
    try:
        return json.loads(read_text(body))
    except Undecodable:
        raise
    except ValueError as error:
        raise Undecodable(f"not JSON: {error}") from error
    except RecursionError as error:
        raise Undecodable("not JSON that can be read: nested too deeply") from error
