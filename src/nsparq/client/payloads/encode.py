"""From a value to the body of a message: the reverse of `decode`.

Bytes and text stay as they are; everything else becomes JSON. pydantic and msgspec encode their own
types and are never imported for other values. An error names its place: `items[2].price: a value of
type Socket has no form in JSON`.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import datetime
import json
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, Final
from uuid import UUID

from nsparq.client.payloads.decode import path_text

__all__ = ["encode_bodies", "encode_payload"]

_BUFFERS: Final = (bytes, bytearray, memoryview)
MAX_DEPTH: Final = 200
"""Levels of a value whose keys have to be converted. Others may have about a thousand."""


def encode_payload(value: object) -> bytes:
    """The body for a value. Raises TypeError if it has no form in JSON, ValueError for NaN,
    infinity and values that contain themselves."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return value.encode()
    if value is None or isinstance(value, type):
        raise TypeError(f"{value!r} cannot be published: a message is bytes, a text or an object")
    if isinstance(value, _BUFFERS) or _is_buffer(value):
        return bytes(memoryview(value))  # type: ignore[arg-type]  # it is a buffer
    if (writers := _package_writers(value)) is not None:
        return writers[0]()
    with suppress(TypeError, ValueError, RecursionError):
        return _dumps(value)
    # Slower, but it converts keys, which `json` does not, and finds the place of an error.
    return _dumps(_plain(value, (), ()))


def encode_bodies(values: object) -> list[bytes]:
    """The bodies for the values of a multi-publish. Raises TypeError, ValueError."""
    if isinstance(values, (str, collections.abc.Mapping, *_BUFFERS)) or not isinstance(
        values, collections.abc.Iterable
    ):
        raise TypeError(f"a list of messages is needed, not a value of type {type(values).__name__}")
    return [value if type(value) is bytes else encode_payload(value) for value in values]


def _dumps(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_form)
    # A lone surrogate is valid in JSON but not in UTF-8: it stays an escape.
    return text.encode(errors="backslashreplace")


def _is_buffer(value: object) -> bool:
    """Other buffers than bytes, such as array.array."""
    try:
        memoryview(value).release()  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return True


def _json_form(value: Any) -> Any:
    """A value that `json` cannot write, one level closer to one that it can. Raises TypeError."""
    if (writers := _package_writers(value)) is not None:
        return writers[1]()
    if not isinstance(value, type):
        if dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, Decimal | UUID):
            return str(value)
        if isinstance(value, _BUFFERS):
            return base64.b64encode(value).decode()
        if isinstance(value, collections.abc.Mapping):
            return dict(value)
        if isinstance(value, collections.abc.Collection):
            return list(value)
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")


# Values of pydantic and msgspec. As in `decode`, they are recognised by their attributes.


def _package_writers(value: Any) -> tuple[Callable[[], bytes], Callable[[], Any]] | None:
    """How the value's package writes its body, and its form in JSON's types; None if it has none.

    Names are pydantic's aliases, because those are what its models read."""
    if isinstance(value, type):
        return None
    if hasattr(value, "__struct_fields__"):
        import msgspec

        return (
            partial(msgspec.json.encode, value, enc_hook=_json_form),
            partial(msgspec.to_builtins, value, enc_hook=_json_form),
        )
    if (serializer := getattr(value, "__pydantic_serializer__", None)) is None:
        return None
    if hasattr(value, "model_dump_json"):
        # A model may have its own version of these.
        to_json, to_python = value.model_dump_json, value.model_dump
    else:
        to_json, to_python = partial(serializer.to_json, value), partial(serializer.to_python, value)
    return (
        lambda: _as_bytes(_checked(partial(to_json, by_alias=True))),
        lambda: _checked(partial(to_python, mode="json", by_alias=True)),
    )


def _checked(write: Callable[[], Any]) -> Any:
    try:
        return write()
    except ValueError as error:
        # pydantic has no TypeError for a value that it cannot write.
        raise TypeError(str(error)) from error


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _plain(value: Any, path: tuple[str | int, ...], outer: tuple[int, ...]) -> Any:
    """The value in JSON's types. `outer` are the ids of the values around it."""
    if id(value) in outer:
        raise _wrong(ValueError("it contains itself"), path)
    if len(outer) > MAX_DEPTH:
        raise _wrong(ValueError("nested too deeply"), path[:3])
    inside = (*outer, id(value))
    if isinstance(value, dict):
        return {_key(key, path): _plain(item, (*path, str(key)), inside) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index), inside) for index, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise _wrong(ValueError(f"{value!r} is not a JSON number"), path) from None
        return value
    try:
        form = _json_form(value)
    except TypeError as error:
        raise _wrong(error, path) from error.__cause__
    return _plain(form, path, inside)


def _key(key: Any, path: tuple[str | int, ...]) -> Any:
    """A key as `json` takes it."""
    if key is None or isinstance(key, str | int | float):
        return key
    try:
        form = _json_form(key)
    except TypeError:
        form = None
    if not isinstance(form, str | int | float):
        raise _wrong(TypeError(f"a key of type {type(key).__name__} has no form in JSON"), path)
    return form


def _wrong(error: Exception, path: tuple[str | int, ...]) -> Exception:
    place = path_text(path)
    return type(error)(f"{place}: {error}" if place else str(error))
