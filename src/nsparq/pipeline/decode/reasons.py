"""Why a JSON, CSV or text message does not decode. Spark only says that it does not.

Plain Python over Spark's types, run by the tasks that write dead letters.
"""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from nsparq.pipeline.decode.formats import Undecodable, read_json, read_text

MAX_ERROR: Final = 1000
MAX_SHOWN: Final = 60

_WHOLE: Final[dict[type[DataType], int]] = {ByteType: 7, ShortType: 15, IntegerType: 31, LongType: 63}
_REAL: Final = (FloatType, DoubleType)


def why_not(body: bytes, format: str, schema: StructType, options: Mapping[str, str]) -> str:
    """The first error in a body that does not decode."""
    try:
        if format == "json":
            value = read_json(body)
            if not isinstance(value, dict):
                kind = "an array" if isinstance(value, list) else f"the value {_shown(value)}"
                return f"not a JSON object but {kind}"
            return _mismatch(value, schema, "") or "does not fit the schema"
        if format == "csv":
            return _why_not_csv(read_text(body), schema, options)
        read_text(body)
    except Undecodable as error:
        return str(error)
    except RecursionError:
        return "nested too deeply"
    return "does not decode"


def _why_not_csv(text: str, schema: StructType, options: Mapping[str, str]) -> str:
    separator = options.get("sep", options.get("delimiter", ","))
    try:
        rows = list(csv.reader([text], delimiter=separator, quotechar=options.get("quote", '"')))
    except (csv.Error, TypeError) as error:
        return f"not CSV: {error}"
    row = rows[0] if rows else []
    if len(row) != len(schema.fields):
        return f"has {len(row)} fields instead of {len(schema.fields)}"
    for one, value in zip(schema.fields, row, strict=True):
        found = _csv_mismatch(value.strip(), one.dataType)
        if not value.strip() and not one.nullable:
            found = "is missing"
        if found:
            return f"{one.name}: {found}"
    return "does not fit the schema"


def _csv_mismatch(text: str, wanted: DataType) -> str:
    if not text or isinstance(wanted, StringType):
        return ""
    value: Any = text
    if isinstance(wanted, BooleanType):
        value = {"true": True, "false": False}.get(text.lower(), text)
    elif type(wanted) in _WHOLE or isinstance(wanted, (*_REAL, DecimalType)):
        try:
            value = int(text) if type(wanted) in _WHOLE else float(text)
        except ValueError:
            pass
    return _mismatch(value, wanted, "")


def _mismatch(value: Any, wanted: DataType, path: str) -> str:
    """How a value differs from the schema. Empty if it fits. Times are not fully checked."""
    if value is None:
        return ""
    place = f"{path}: " if path else ""
    wrong = f"{place}{_shown(value)} is not {wanted.simpleString().upper()}"
    if isinstance(wanted, StructType):
        return _struct_mismatch(value, wanted, path) if isinstance(value, dict) else wrong
    if isinstance(wanted, ArrayType):
        if not isinstance(value, list):
            return wrong
        found = (_mismatch(one, wanted.elementType, f"{path}[{n}]") for n, one in enumerate(value))
        return next(filter(None, found), "")
    if isinstance(wanted, MapType):
        if not isinstance(value, dict):
            return wrong
        found = (_mismatch(one, wanted.valueType, f"{path}.{name}") for name, one in value.items())
        return next(filter(None, found), "")
    return "" if _is(value, wanted) else wrong


def _struct_mismatch(value: dict[str, Any], wanted: StructType, path: str) -> str:
    for one in wanted.fields:
        inner = f"{path}.{one.name}" if path else one.name
        if value.get(one.name) is None:
            # Only top-level columns can be NOT NULL.
            if not one.nullable and not path:
                return f"{inner} is missing"
            continue
        if found := _mismatch(value[one.name], one.dataType, inner):
            return found
    return ""


def _is(value: Any, wanted: DataType) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(wanted, BooleanType):
        return isinstance(value, bool)
    bits = _WHOLE.get(type(wanted))
    if bits is not None:
        return isinstance(value, int) and is_number and -(1 << bits) <= value < 1 << bits
    if isinstance(wanted, _REAL):
        return is_number or value in ("NaN", "Infinity", "-Infinity", "+INF", "-INF", "INF")
    if isinstance(wanted, DecimalType):
        # Not math.isfinite() for a whole number, which may be too large for it.
        return is_number and (isinstance(value, int) or math.isfinite(value))
    if isinstance(wanted, BinaryType):
        return isinstance(value, str)
    if isinstance(wanted, TimestampType | DateType):
        # Spark reads many forms of times, so this only finds values that cannot be a time.
        return False if isinstance(value, bool | dict | list) else _is_time(value)
    return True


def _is_time(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    return len(value) >= 4 and value[:4].isdigit() and value[4:5] in ("", "-")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def dead_letter(origin: Mapping[str, Any], body: bytes, error: str) -> str:
    """The JSON of a dead letter: the fields that `nsparq.client` writes and reads, and more."""
    text, encoded = None, None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        encoded = base64.b64encode(body).decode()
    letter = {**origin, "error": error[:MAX_ERROR], "text": text, "base64": encoded}
    return json.dumps(letter, ensure_ascii=False)
