"""Decoders of parsed JSON values: each checks a value and converts it to a Python type."""

from __future__ import annotations

import base64
import collections.abc
import datetime
import json
import types
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

Decode = Callable[[Any], Any]
"""From a JSON value to a value of some type. Raises WrongValue."""

SHOWN: Final = 40
"""Characters of a wrong text in an error."""


class WrongValue(Exception):
    """A value that does not have the declared type. Every container adds its part of the path."""

    def __init__(self, reason: str, *parts: str | int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.parts = [*parts]
        """The innermost first."""


def expected(what: str, value: Any) -> WrongValue:
    if isinstance(value, str):
        shown = json.dumps(value if len(value) <= SHOWN else value[:SHOWN] + "…", ensure_ascii=False)
    elif isinstance(value, list):
        shown = "a list"
    elif isinstance(value, dict):
        shown = "an object"
    else:
        shown = json.dumps(value)
    return WrongValue(f"expected {what}, got {shown}")


# Simple types


def _exactly(kind: type, what: str) -> Decode:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise expected(what, value)
        return value

    return decode


def parsed(what: str, parse: Callable[[str], Any], *kinds: type) -> Decode:
    """Parses the text of a value. `kinds` are the JSON types it accepts; default: texts."""

    def decode(value: Any) -> Any:
        if type(value) in (kinds or (str,)):
            try:
                return parse(str(value))
            except (ValueError, ArithmeticError):
                pass
        raise expected(what, value)

    return decode


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise expected("a number", value)
    try:
        return float(value)
    except OverflowError:
        raise WrongValue("a number that is too large") from None


SIMPLE: Final[dict[Any, Decode]] = {
    **dict.fromkeys((Any, object), lambda value: value),
    **dict.fromkeys((None, types.NoneType), _exactly(types.NoneType, "null")),
    bool: _exactly(bool, "true or false"),
    int: _exactly(int, "an integer"),
    float: _float,
    str: _exactly(str, "a text"),
    bytes: parsed("bytes in base64", lambda text: base64.b64decode(text, validate=True)),
    Decimal: parsed("a decimal number", Decimal, int, float, str),
    datetime.datetime: parsed("a time (ISO 8601)", datetime.datetime.fromisoformat),
    datetime.date: parsed("a date (ISO 8601)", datetime.date.fromisoformat),
    datetime.time: parsed("a time of day (ISO 8601)", datetime.time.fromisoformat),
    UUID: parsed("a UUID", UUID),
}
LISTS: Final[dict[Any, Callable[[Iterable[Any]], Any]]] = {
    list: list,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
    set: set,
    collections.abc.Set: set,
    collections.abc.MutableSet: set,
    frozenset: frozenset,
}
MAPPINGS: Final = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


# Containers

_a_list, _an_object = _exactly(list, "a list"), _exactly(dict, "an object")


def object_decoder(fields: list[tuple[str, Decode, bool]]) -> Callable[[Any], dict[str, Any]]:
    """`fields` have a name, a decoder, and whether they are required. Unknown keys are ignored."""

    def decode(value: Any) -> dict[str, Any]:
        _an_object(value)
        found = {}
        for name, decode_field, is_required in fields:
            if name in value:
                try:
                    found[name] = decode_field(value[name])
                except WrongValue as wrong:
                    wrong.parts.append(name)
                    raise
            elif is_required:
                raise WrongValue("missing", name)
        return found

    return decode


def list_decoder(decode_item: Decode, make: Callable[[Iterable[Any]], Any]) -> Decode:
    def decode(value: Any) -> Any:
        _a_list(value)
        items = _items(value, [decode_item] * len(value))
        try:
            return items if make is list else make(items)
        except TypeError as error:
            raise WrongValue(str(error)) from error

    return decode


def tuple_decoder(decoders: list[Decode]) -> Decode:
    def decode(value: Any) -> Any:
        _a_list(value)
        if len(value) != len(decoders):
            raise WrongValue(f"expected {len(decoders)} items, got {len(value)}")
        return tuple(_items(value, decoders))

    return decode


def _items(values: list[Any], decoders: list[Decode]) -> list[Any]:
    items: list[Any] = []
    try:
        for decode, value in zip(decoders, values, strict=True):
            items.append(decode(value))
    except WrongValue as wrong:
        wrong.parts.append(len(items))
        raise
    return items


def mapping_decoder(decode_key: Decode | None, decode_item: Decode) -> Decode:
    """Without `decode_key` the keys stay texts."""

    def decode(value: Any) -> Any:
        _an_object(value)
        found = {}
        for key, item in value.items():
            try:
                found[key if decode_key is None else decode_key(key)] = decode_item(item)
            except WrongValue as wrong:
                wrong.parts.append(key)
                raise
        return found

    return decode


def choice_decoder(choices: dict[tuple[type, Any], Any]) -> Decode:
    """Choices are compared by type and value: true is not 1."""
    text = "one of " + ", ".join(json.dumps(value, default=str) for _, value in choices)

    def decode(value: Any) -> Any:
        try:
            return choices[type(value), value]
        except (KeyError, TypeError):
            raise expected(text, value) from None

    return decode
