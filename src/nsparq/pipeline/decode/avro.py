"""Avro: one record in each message. Needs no Spark.

Column types are those of Spark's from_avro. All messages must have the schema of the file: no
schema registry is asked for another.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from nsparq.pipeline.decode.formats import Decoder, SchemaFileError, Undecodable, library, without_frame
from nsparq.pipeline.decode.samples import quoted

_PLAIN: Final = {
    "boolean": "BOOLEAN",
    "int": "INT",
    "long": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "string": "STRING",
    "bytes": "BINARY",
    "fixed": "BINARY",
    "enum": "STRING",
    # The type of a value that is always null is unknown.
    "null": "STRING",
}
_LOGICAL: Final = {
    "date": "DATE",
    "timestamp-millis": "TIMESTAMP",
    "timestamp-micros": "TIMESTAMP",
    "local-timestamp-millis": "TIMESTAMP_NTZ",
    "local-timestamp-micros": "TIMESTAMP_NTZ",
}
_WIDER: Final = {frozenset({"int", "long"}): "BIGINT", frozenset({"float", "double"}): "DOUBLE"}
_MAX_PRECISION: Final = 38


@dataclass(frozen=True, slots=True)
class Avro:
    """A schema, and the framing of the bodies (see `formats.without_frame`)."""

    schema: str
    """The JSON of a record."""
    framing: str = ""

    def columns(self) -> str:
        parsed, named = self._parsed()
        return ", ".join(_Columns(named).of_fields(parsed, " "))

    def decoder(self) -> Decoder:
        schema, _ = self._parsed()
        framing = self.framing
        read = _library().schemaless_reader

        def decode(body: bytes) -> dict[str, Any]:
            stream = io.BytesIO(without_frame(body, framing))
            try:
                row: dict[str, Any] = read(stream, schema, None)
            # No error about one message may end the pipeline.
            except Exception as error:
                raise Undecodable(_reason(self.schema, stream.getvalue(), error)) from error
            if rest := len(stream.getbuffer()) - stream.tell():
                raise Undecodable(f"{rest} byte{'' if rest == 1 else 's'} after the record")
            return row

        return decode

    def _parsed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The schema as fastavro needs it, and its named types. Raises SchemaFileError."""
        parse = _library().parse_schema
        named: dict[str, Any] = {}
        try:
            given = json.loads(self.schema)
            parsed = parse(_without_unknown_types(given), named_schemas=named)
        except Exception as error:
            raise SchemaFileError(f"is not an Avro schema: {_text(error)}") from error
        if not isinstance(parsed, dict) or parsed.get("type") != "record":
            raise SchemaFileError("must be a record: its fields are the columns")
        return parsed, named


def _reason(schema: str, body: bytes, error: Exception) -> str:
    """The reason with the field that cannot be read, which fastavro does not name."""
    read = _library().schemaless_reader
    for name, beginning in _beginnings(schema):
        try:
            read(io.BytesIO(body), beginning, None)
        except Exception:
            return f"{name}: {_in_words(error)}"
    return _in_words(error)


@lru_cache(maxsize=16)
def _beginnings(schema: str) -> list[tuple[str, dict[str, Any]]]:
    """Schemas of the first field, of the first two fields and so on, each with the name of its last
    field. A field can only be read after the fields before it."""
    parse = _library().parse_schema
    record = _without_unknown_types(json.loads(schema))
    fields = record["fields"]
    return [(one["name"], parse({**record, "fields": fields[:count]})) for count, one in enumerate(fields, 1)]


def _in_words(error: Exception) -> str:
    if isinstance(error, IndexError) and "list" in str(error):
        return "the number of the enum symbol or of the union type is out of range"
    # A number that is cut off is an IndexError too.
    if isinstance(error, EOFError | IndexError):
        return "the message ends within its value"
    return _text(error)


def _library() -> Any:
    return library("fastavro", "Avro", "fastavro")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _without_unknown_types(schema: Any) -> Any:
    """The schema without logical types that Spark does not have. Such values keep their plain type,
    as the Avro specification requires."""
    if isinstance(schema, list):
        return [_without_unknown_types(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _without_unknown_types(schema[key]) for key in _INNER if key in schema}
    if schema.get("logicalType", "decimal") not in {*_LOGICAL, "decimal"}:
        schema = {key: value for key, value in schema.items() if key != "logicalType"}
    return {**schema, **inner}


_INNER: Final = ("type", "items", "values", "fields")


class _Columns:
    """The columns of a parsed schema. Raises SchemaFileError for types that cannot be columns."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._within: list[str] = []

    def of_fields(self, record: Mapping[str, Any], separator: str) -> list[str]:
        name = record["name"]
        if name in self._within:
            raise SchemaFileError(f"{name} contains itself, which no column can do")
        if not record["fields"]:
            raise SchemaFileError(f"{name} has no fields")
        self._within.append(name)
        found = [
            f"{quoted(one['name'])}{separator}{self._of(one['type'], one['name'])}"
            for one in record["fields"]
        ]
        self._within.pop()
        return found

    def _of(self, schema: Any, field: str) -> str:
        if isinstance(schema, list):
            return self._of_union(schema, field)
        if isinstance(schema, str):
            return _PLAIN.get(schema) or self._of(self._named[schema], field)
        kind = schema["type"]
        if kind in self._COMPOUND:
            return self._COMPOUND[kind](self, schema, field)
        if schema.get("logicalType") == "decimal":
            return self._of_decimal(schema, field)
        return _LOGICAL.get(schema.get("logicalType", "")) or self._of(kind, field)

    def _of_union(self, schema: list[Any], field: str) -> str:
        kinds = [one for one in schema if one != "null"] or ["null"]
        if len(kinds) == 1:
            return self._of(kinds[0], field)
        wider = _WIDER.get(frozenset(one for one in kinds if isinstance(one, str)))
        if wider is None or len(kinds) != 2:
            raise SchemaFileError(f"{field}: a union of several types cannot be a column")
        return wider

    def _of_decimal(self, schema: Mapping[str, Any], field: str) -> str:
        precision = schema["precision"]
        if precision > _MAX_PRECISION:
            raise SchemaFileError(f"{field}: Spark's decimals have at most {_MAX_PRECISION} digits")
        return f"DECIMAL({precision}, {schema.get('scale', 0)})"

    def _of_record(self, schema: Mapping[str, Any], field: str) -> str:
        return f"STRUCT<{', '.join(self.of_fields(schema, ': '))}>"

    def _of_array(self, schema: Mapping[str, Any], field: str) -> str:
        # This refuses a type that contains itself, which `_takes_no_bytes` could not handle.
        inner = self._of(schema["items"], field)
        if self._takes_no_bytes(schema["items"]):
            # A message of ten bytes could claim more items than fit into memory.
            raise SchemaFileError(f"{field}: an array of values without bytes could be of any length")
        return f"ARRAY<{inner}>"

    def _takes_no_bytes(self, schema: Any) -> bool:
        if isinstance(schema, list):
            return False
        if isinstance(schema, str):
            return schema == "null" or (schema in self._named and self._takes_no_bytes(self._named[schema]))
        if schema["type"] == "record":
            return all(self._takes_no_bytes(one["type"]) for one in schema["fields"])
        return bool(schema["type"] == "null" or schema.get("size") == 0)

    def _of_map(self, schema: Mapping[str, Any], field: str) -> str:
        return f"MAP<STRING, {self._of(schema['values'], field)}>"

    _COMPOUND: Final[dict[str, Callable[..., str]]] = {
        "record": _of_record,
        "error": _of_record,
        "array": _of_array,
        "map": _of_map,
    }
