"""JSON objects as Go's decoder reads them: keys match in any case and the last one wins, null means
absent, integers carry no fraction or exponent, unknown keys are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["BOOL", "INT32", "INT64", "STRING", "decode_object"]

BOOL: Final = "bool"
INT32: Final = "int32"
INT64: Final = "int64"
STRING: Final = "string"

_TYPES: Final[dict[str, type]] = {BOOL: bool, INT32: int, INT64: int, STRING: str}
_BITS: Final = {INT32: 32, INT64: 64}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def decode_object(body: bytes, kinds: Mapping[str, str]) -> dict[str, Any]:
    """The fields named in `kinds`, each of its kind; absent where missing or null. Raises
    ValueError."""
    try:
        parsed = json.loads(
            body.decode("utf-8", "replace"),
            object_pairs_hook=_Pairs,
            parse_int=_parse_int,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if parsed is None:
        return {}
    if not isinstance(parsed, _Pairs):
        raise ValueError("not an object")
    fields: dict[str, Any] = {}
    value: Any
    for key, value in parsed:
        name = key.lower()
        kind = kinds.get(name)
        if kind is None or value is None:
            continue
        if type(value) is not _TYPES[kind]:
            raise ValueError(f"{name} is not of type {kind}")
        if isinstance(value, int) and kind in _BITS and not _fits(value, _BITS[kind]):
            raise ValueError(f"{name} is out of range")
        # Half a surrogate pair could not be encoded again; Go replaces it as well.
        fields[name] = _SURROGATE.sub("\ufffd", value) if isinstance(value, str) else value
    return fields


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs in order, so that of keys that differ only in case the last one
    wins."""


def _parse_int(digits: str) -> int:
    """No field takes more than 64 bits; Python refuses to read very long numbers, which must be
    ignored under an unknown key."""
    return int(digits[:25])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _fits(value: int, bits: int) -> bool:
    return -(1 << (bits - 1)) <= value < 1 << (bits - 1)
