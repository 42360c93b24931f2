"""JSON Schema: whether a message satisfies it, and which columns it describes. Needs no Spark.

Publishers and pipelines can share one schema file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nsparq.pipeline.decode.formats import SchemaFileError, Undecodable, library, read_json, without_frame
from nsparq.pipeline.decode.samples import quoted

_PLAIN: Final = {"boolean": "BOOLEAN", "integer": "BIGINT", "number": "DOUBLE", "string": "STRING"}
_FORMATS: Final = {"date-time": "TIMESTAMP", "date": "DATE"}
_ANYTHING: Final = "STRING"
"""A value that may have several types is a column with its JSON text."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A schema, and the framing of the bodies (see `formats.without_frame`)."""

    schema: str
    framing: str = ""

    def columns(self) -> str:
        """The columns, as in CREATE TABLE. A required property that cannot be null is NOT NULL.
        Raises SchemaFileError."""
        try:
            found = _Columns(self._parsed()).of_root()
        except RecursionError:
            raise SchemaFileError("refers to itself, which no column can do: add a 'schema'") from None
        if not found:
            raise SchemaFileError("has no 'properties' to take the columns from: add a 'schema'")
        return ", ".join(found)

    def validator(self) -> Callable[[bytes], str | None]:
        """A function that returns what is wrong with a body, or None. Raises SchemaFileError."""
        make = library("jsonschema_rs", "JSON Schema", "jsonschema-rs").validator_for
        framing = self.framing
        try:
            found = make(self._parsed(), retriever=_refuse_to_fetch)
        # The library's ValidationError is a ValueError.
        except ValueError as error:
            raise SchemaFileError(f"is not a JSON Schema: {str(error).splitlines()[0]}") from error

        def reason(body: bytes) -> str | None:
            try:
                value = read_json(without_frame(body, framing))
                wrong = next(iter(found.iter_errors(value)), None)
            except Undecodable as error:
                return str(error)
            except ValueError as error:
                # Half of a surrogate pair, or nesting too deep for the library.
                return f"cannot be checked: {error}"
            return None if wrong is None else _in_words(wrong.instance_path, wrong.message)

        return reason

    def _parsed(self) -> Any:
        try:
            return json.loads(self.schema)
        except ValueError as error:
            raise SchemaFileError(f"is not JSON: {error}") from error


def _refuse_to_fetch(uri: str) -> Any:
    raise ValueError(f"{uri} is outside the file and is not fetched")


def _in_words(path: Iterable[str | int], message: str) -> str:
    place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).removeprefix(".")
    return f"{place}: {message}" if place else message


class _Columns:
    """The columns that a schema describes. Raises SchemaFileError."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def of_root(self) -> list[str]:
        root = self._plain(self._root)
        required = {*root.get("required", ())}
        return [
            f"{quoted(name)} {self.of(one)}" + (" NOT NULL" if name in required and self._is_set(one) else "")
            for name, one in root.get("properties", {}).items()
        ]

    def of(self, schema: Any) -> str:
        """The column type for values that satisfy a schema."""
        plain = self._plain(schema)
        kinds = self._kinds(plain)
        if kinds == {"integer", "number"}:
            return "DOUBLE"
        kind = next(iter(kinds)) if len(kinds) == 1 else ""
        if kind == "object":
            return self._of_object(plain)
        if kind == "array":
            items = plain.get("items", {})
            return f"ARRAY<{self.of(items) if isinstance(items, dict) else _ANYTHING}>"
        if kind == "string":
            return _FORMATS.get(plain.get("format", ""), "STRING")
        return _PLAIN.get(kind) or self._of_choice(plain)

    def _of_object(self, plain: Mapping[str, Any]) -> str:
        properties, others = plain.get("properties"), plain.get("additionalProperties")
        if properties:
            inner = ", ".join(f"{quoted(name)}: {self.of(one)}" for name, one in properties.items())
            return f"STRUCT<{inner}>"
        return f"MAP<STRING, {self.of(others)}>" if isinstance(others, dict) and others else _ANYTHING

    def _of_choice(self, plain: Mapping[str, Any]) -> str:
        ways = plain.get("anyOf") or plain.get("oneOf") or ()
        found = {self.of(one) for one in ways if self._kinds(self._plain(one), null=True) != {"null"}}
        return next(iter(found)) if len(found) == 1 else _ANYTHING

    def _is_set(self, schema: Any) -> bool:
        """Whether the types in the schema exclude null."""
        kinds = self._kinds(self._plain(schema), null=True)
        return bool(kinds) and "null" not in kinds

    def _kinds(self, plain: Mapping[str, Any], *, null: bool = False) -> set[str]:
        """JSON types of the values that satisfy a schema. Empty if any value may."""
        given = plain.get("type")
        if isinstance(given, str):
            found = {given}
        elif given:
            found = {*given}
        elif "const" in plain or "enum" in plain:
            found = {_kind(one) for one in plain.get("enum", [plain.get("const")])}
        else:
            found = {kind for kind, key in (("object", "properties"), ("array", "items")) if key in plain}
        return found if null else found - {"null"}

    def _plain(self, schema: Any) -> dict[str, Any]:
        """A schema with `$ref` and `allOf` resolved, as far as columns need it."""
        if not isinstance(schema, dict):
            return {}
        parts = [self._plain(one) for one in schema.get("allOf", ())]
        if "$ref" in schema:
            parts.append(self._plain(self._referred(schema["$ref"])))
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        found: dict[str, Any] = {}
        for part in (*parts, own):
            properties = {**found.get("properties", {}), **part.get("properties", {})}
            required = [*found.get("required", ()), *part.get("required", ())]
            found = {
                **found,
                **part,
                **({"properties": properties} if properties else {}),
                "required": required,
            }
        return found

    def _referred(self, reference: str) -> Any:
        if not reference.startswith("#"):
            raise SchemaFileError(f"{reference} is outside the file and is not fetched")
        found = self._root
        for part in filter(None, reference[1:].split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise SchemaFileError(f"refers to {reference}, which does not exist")
            found = found[key]
        return found


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
