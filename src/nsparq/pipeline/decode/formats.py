"""Common parts of the message formats: the interface, framing, and the columns of a message. Needs
no Spark.

Avro and Protobuf are decoded in the tasks by fastavro and by Protobuf's own library, not by Spark's
from_avro and from_protobuf. Spark's functions need jars that PySpark does not include (spark-avro,
spark-protobuf), and they do not say why a message does not decode. Two implementations could
disagree about which messages are good, so there is only this one: it works after `pip install`, and
it names the field that is wrong.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from nsparq.errors import NsparqError

ORIGIN: Final = ("topic", "node", "offset", "timestamp", "attempts", "id")
"""Columns of the source that rows keep, with a leading _ because many messages have such fields."""
HEADERS: Final = "headers"
"""The column of the source that rows keep if the file says so, also with a leading _. Rows of older
pipelines do not get it by themselves: tables and state that exist do not have the column."""
UNDECODED: Final[Mapping[str, Mapping[str, str]]] = {
    "message": {name: name for name in ("body", "topic", "node", "offset", "timestamp", "id")},
    "raw": {"body": "body", **{f"_{name}": name for name in ORIGIN}},
}
"""Formats that leave the body unchanged: their columns, and the columns of the source."""
DECODED: Final = "nsparq_decoded"
"""Name of the observation that counts the `rows` of the only source, and how many are `bad`."""
MESSAGE_COLUMNS: Final = frozenset(f"_{name}" for name in (*ORIGIN, HEADERS))
"""Columns of a row that are not fields of the message."""
INSTALL: Final = "pip install 'nsparq[formats]'"
CONFLUENT: Final = "confluent"
"""The framing of Confluent's serializers. `confluent:7` accepts only messages with schema id 7."""
FRAME_BYTES: Final = 5

Decoder = Callable[[bytes], dict[str, Any]]


def undecoded_columns(format: str, headers: bool) -> dict[str, str] | None:
    """The columns of a format that leaves the body unchanged, as in UNDECODED; None for another."""
    if format not in UNDECODED:
        return None
    own = HEADERS if format == "message" else f"_{HEADERS}"
    return {**UNDECODED[format], **({own: HEADERS} if headers else {})}


class SchemaFileError(NsparqError):
    """A schema file that cannot be used, or a library that is not installed."""

    retry_helps = False


class Undecodable(ValueError):
    """A body that does not decode. The text is the reason."""


class BodyFormat(Protocol):
    """How bodies become rows. Spark sends this value to the tasks."""

    def __hash__(self) -> int: ...

    def columns(self) -> str:
        """The columns, as in CREATE TABLE. Raises SchemaFileError."""

    def decoder(self) -> Decoder:
        """A function from a body to a row; it raises Undecodable. Raises SchemaFileError."""


def library(name: str, purpose: str, package: str) -> Any:
    """Imports a module of an optional package. Raises SchemaFileError."""
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
    """The first bytes of a framed body: a zero byte and, if the framing has one, the schema id."""
    _, _, schema = framing.partition(":")
    return b"\0" + (int(schema).to_bytes(4, "big") if schema else b"")


def without_frame(body: bytes, framing: str) -> bytes:
    """Removes the frame: a zero byte and 4 bytes of schema id. Raises Undecodable."""
    if not framing:
        return body
    if len(body) < FRAME_BYTES or body[0]:
        raise Undecodable("no Confluent frame: it must begin with a zero byte and a 4-byte schema id")
    if not body.startswith(frame_beginning(framing)):
        found = int.from_bytes(body[1:FRAME_BYTES], "big")
        raise Undecodable(f"the schema id is {found}, not {framing.partition(':')[2]}")
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
        raise Undecodable("not readable as JSON: nested too deeply") from error
