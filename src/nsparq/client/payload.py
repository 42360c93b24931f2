"""The body of a message as a value of a declared type.

Bytes and text as they are; everything else is JSON: dataclasses, typed dictionaries, containers and simple
types by the code below, pydantic models and msgspec structs by their own packages, which are imported only if
a type of theirs is asked for. What is wrong is said with the place: `items[2].price: expected a number, got
"cheap"`.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import datetime
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, Final, Literal, NotRequired, Required, Union, get_args, get_origin
from uuid import UUID

from nsparq.client.errors import ClientError

__all__ = ["DecodeFailed", "payload_decoder"]

Decode = Callable[[Any], Any]
"""A JSON value into a value of some type. Raises _Wrong."""

SHOWN: Final = 40
"""Characters of a wrong text in an error."""


class DecodeFailed(ClientError, ValueError):
    """The body is not what was declared. `path` is where, `reason` what is wrong there."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason, self.path = reason, path


class _Wrong(Exception):
    """A DecodeFailed on its way up; every container adds its part of the path."""

    def __init__(self, reason: str, *parts: str | int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.parts = [*parts]
        """The innermost first."""


def payload_decoder(kind: Any, names: Mapping[str, Any] | None = None) -> Callable[[bytes], Any]:
    """What turns a body into a `kind`, or raises DecodeFailed. `names` are those that annotations inside
    `kind` may use beyond those of their module. Raises TypeError for a type that JSON has no form for."""
    if kind is bytes:
        return lambda body: body
    if kind is str:
        return _text
    whole = _foreign_json(kind)
    if whole is not None:
        return whole
    return _json_decoder(_Compiler(names or {}).decoder(kind))


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise DecodeFailed(f"not UTF-8: {error.reason} at byte {error.start}") from error


def _json_decoder(decode: Decode) -> Callable[[bytes], Any]:
    def decode_body(body: bytes) -> Any:
        try:
            return decode(json.loads(body, parse_constant=_no_constant))
        except _Wrong as wrong:
            raise DecodeFailed(wrong.reason, _path(reversed(wrong.parts))) from wrong.__cause__
        except RecursionError as error:
            raise DecodeFailed("nested too deeply") from error
        except ValueError as error:
            raise DecodeFailed(f"not JSON: {error}") from error

    return decode_body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _path(parts: Iterable[str | int]) -> str:
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
        else:
            path += f"[{json.dumps(part)}]"
    return path


def _expected(what: str, value: Any) -> _Wrong:
    if isinstance(value, str):
        shown = json.dumps(value if len(value) <= SHOWN else value[:SHOWN] + "…", ensure_ascii=False)
    elif isinstance(value, list):
        shown = "a list"
    elif isinstance(value, dict):
        shown = "an object"
    else:
        shown = json.dumps(value)
    return _Wrong(f"expected {what}, got {shown}")


# Simple types


def _anything(value: Any) -> Any:
    return value


def _null(value: Any) -> None:
    if value is not None:
        raise _expected("null", value)


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _expected("true or false", value)
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise _expected("an integer", value)
    return value


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise _expected("a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _Wrong("a number that is too large") from None


def _str(value: Any) -> str:
    if type(value) is not str:
        raise _expected("a text", value)
    return value


def _decimal(value: Any) -> Decimal:
    if type(value) in (int, float, str):
        try:
            return Decimal(str(value))
        except InvalidOperation:
            pass
    raise _expected("a decimal number", value)


def _base64(value: Any) -> bytes:
    if type(value) is str:
        try:
            return base64.b64decode(value, validate=True)
        except ValueError:
            pass
    raise _expected("bytes in base64", value)


def _from_text(what: str, read: Callable[[str], Any]) -> Decode:
    def decode(value: Any) -> Any:
        if type(value) is str:
            try:
                return read(value)
            except ValueError:
                pass
        raise _expected(what, value)

    return decode


_SIMPLE: Final[dict[Any, Decode]] = {
    Any: _anything,
    object: _anything,
    None: _null,
    types.NoneType: _null,
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    bytes: _base64,
    Decimal: _decimal,
    datetime.datetime: _from_text("a time (ISO 8601)", datetime.datetime.fromisoformat),
    datetime.date: _from_text("a date (ISO 8601)", datetime.date.fromisoformat),
    datetime.time: _from_text("a time of day (ISO 8601)", datetime.time.fromisoformat),
    UUID: _from_text("a UUID", UUID),
}
_LISTS: Final[dict[Any, Callable[[Iterable[Any]], Any]]] = {
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
_MAPPINGS: Final = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


# Types made of others


class _Compiler:
    """Turns a type into the function that decodes it, once, when the handler is declared."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = dict(names)
        self._made: dict[Any, Decode] = {}

    def decoder(self, kind: Any) -> Decode:
        """Raises TypeError for a type that is not supported."""
        kind = _bare(kind)
        if kind in _SIMPLE:
            return _SIMPLE[kind]
        if kind not in self._made:
            # A type may contain itself: those inside go through the dictionary.
            self._made[kind] = lambda value: self._made[kind](value)
            self._made[kind] = self._compile(kind)
        return self._made[kind]

    def _compile(self, kind: Any) -> Decode:
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if origin is Literal:
            return _one_of({(type(value), value): value for value in arguments})
        if origin in _LISTS:
            return _list(self.decoder(arguments[0] if arguments else Any), _LISTS[origin])
        if origin is tuple:
            if not arguments or arguments[1:] == (...,):
                return _list(self.decoder(arguments[0] if arguments else Any), tuple)
            return _tuple([self.decoder(argument) for argument in arguments])
        if origin in _MAPPINGS:
            of_key, of_value = arguments or (str, Any)
            return _dict(self._key(of_key), self.decoder(of_value))
        if isinstance(kind, type):
            found = self._class(kind)
            if found is not None:
                return found
        raise TypeError(f"a payload cannot be decoded into {kind!r}")

    def _class(self, kind: type) -> Decode | None:
        if issubclass(kind, Enum):
            return _one_of({(type(member.value), member.value): member for member in kind})
        foreign = _foreign_value(kind)
        if foreign is not None:
            return foreign
        if typing.is_typeddict(kind):
            return self._typed_dict(kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind)
        return None

    def _union(self, members: tuple[Any, ...]) -> Decode:
        """The first that fits; but an integer stays one if it may."""
        kinds = [kind for kind in members if kind is not types.NoneType]
        if int in kinds and float in kinds:
            kinds.sort(key=lambda kind: kind is float)
        decoders = [self.decoder(kind) for kind in kinds]
        has_none = len(kinds) < len(members)
        text = " or ".join([*(_name(kind) for kind in kinds), *(["null"] if has_none else [])])

        def decode(value: Any) -> Any:
            if value is None and has_none:
                return None
            wrongs = []
            for decode_one in decoders:
                try:
                    return decode_one(value)
                except _Wrong as wrong:
                    wrongs.append(wrong)
            # The one that got furthest is the one that was meant.
            furthest = max(wrongs, key=lambda wrong: len(wrong.parts))
            raise furthest if furthest.parts or len(wrongs) == 1 else _expected(text, value)

        return decode

    def _key(self, kind: Any) -> Decode | None:
        """Keys are texts in JSON. None: they stay as they are."""
        kind = _bare(kind)
        if kind in (str, Any, object):
            return None
        if kind in (int, float):
            return _from_text("a number", kind)
        return self.decoder(kind)

    def _hints(self, kind: type) -> dict[str, Any]:
        try:
            return typing.get_type_hints(kind, localns=self._names, include_extras=True)
        except NameError as error:
            raise TypeError(f"an annotation of {kind.__qualname__} cannot be resolved: {error}") from error

    def _typed_dict(self, kind: type) -> Decode:
        fields: list[tuple[str, Decode, bool]] = []
        required: frozenset[str] = kind.__required_keys__  # type: ignore[attr-defined]  # it is a TypedDict
        for name, hint in self._hints(kind).items():
            mark = get_origin(hint)
            is_required = name in required if mark not in (Required, NotRequired) else mark is Required
            fields.append((name, self.decoder(hint), is_required))
        return lambda value: _fields(value, fields)

    def _dataclass(self, kind: type) -> Decode:
        hints = self._hints(kind)
        fields: list[tuple[str, Decode, bool]] = []
        for field in dataclasses.fields(kind):
            if field.init:
                is_required = field.default is field.default_factory is dataclasses.MISSING
                fields.append((field.name, self.decoder(hints[field.name]), is_required))
        known = {name for name, _, _ in fields}
        for parameter in inspect.signature(kind).parameters.values():
            if parameter.name not in known and parameter.default is parameter.empty:
                raise TypeError(f"{kind.__qualname__} needs {parameter.name!r}, which is none of its fields")

        def decode(value: Any) -> Any:
            arguments = _fields(value, fields)
            try:
                return kind(**arguments)
            except (TypeError, ValueError) as error:
                # Its own checks.
                raise _Wrong(str(error)) from error

        return decode


def _bare(kind: Any) -> Any:
    """Without what changes nothing about its values."""
    while True:
        if get_origin(kind) in (typing.Annotated, Required, NotRequired):
            kind = get_args(kind)[0]
        elif hasattr(kind, "__supertype__"):  # NewType
            kind = kind.__supertype__
        elif hasattr(kind, "__value__"):  # type X = ...
            kind = kind.__value__
        else:
            return kind


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _fields(value: Any, fields: list[tuple[str, Decode, bool]]) -> dict[str, Any]:
    if type(value) is not dict:
        raise _expected("an object", value)
    found = {}
    for name, decode, is_required in fields:
        if name in value:
            try:
                found[name] = decode(value[name])
            except _Wrong as wrong:
                wrong.parts.append(name)
                raise
        elif is_required:
            raise _Wrong("missing", name)
    return found


def _list(decode_item: Decode, make: Callable[[Iterable[Any]], Any]) -> Decode:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _expected("a list", value)
        items = _items(value, [decode_item] * len(value))
        try:
            return items if make is list else make(items)
        except TypeError as error:
            raise _Wrong(str(error)) from error

    return decode


def _tuple(decoders: list[Decode]) -> Decode:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _expected("a list", value)
        if len(value) != len(decoders):
            raise _Wrong(f"expected {len(decoders)} items, got {len(value)}")
        return tuple(_items(value, decoders))

    return decode


def _items(values: list[Any], decoders: list[Decode]) -> list[Any]:
    items: list[Any] = []
    try:
        for decode, value in zip(decoders, values, strict=True):
            items.append(decode(value))
    except _Wrong as wrong:
        wrong.parts.append(len(items))
        raise
    return items


def _dict(decode_key: Decode | None, decode_item: Decode) -> Decode:
    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected("an object", value)
        found = {}
        for key, item in value.items():
            try:
                found[key if decode_key is None else decode_key(key)] = decode_item(item)
            except _Wrong as wrong:
                wrong.parts.append(key)
                raise
        return found

    return decode


def _one_of(choices: dict[tuple[type, Any], Any]) -> Decode:
    """By type as well as value: true is not 1."""
    text = "one of " + ", ".join(json.dumps(value, default=str) for _, value in choices)

    def decode(value: Any) -> Any:
        try:
            return choices[type(value), value]
        except (KeyError, TypeError):
            raise _expected(text, value) from None

    return decode


# Types of other packages. They are known by their attributes: nobody has to have the packages.


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__struct_fields__")


def _foreign_json(kind: Any) -> Callable[[bytes], Any] | None:
    """How a package decodes the whole body by itself, which is faster; None for a type of ours."""
    if _is_struct(kind):
        import msgspec

        read = msgspec.json.Decoder(kind).decode
    elif isinstance(kind, type) and hasattr(kind, "model_validate_json"):
        read = kind.model_validate_json
    elif isinstance(kind, type) and hasattr(kind, "__pydantic_validator__"):
        read = kind.__pydantic_validator__.validate_json
    else:
        return None

    def decode(body: bytes) -> Any:
        try:
            return read(body)
        except Exception as error:
            reason, parts = _foreign_error(error)
            raise DecodeFailed(reason, _path(parts)) from error

    return decode


def _foreign_value(kind: Any) -> Decode | None:
    """The same for a value somewhere inside, which is JSON decoded."""
    if _is_struct(kind):
        import msgspec

        def read(value: Any) -> Any:
            return msgspec.convert(value, kind)

    elif hasattr(kind, "model_validate"):
        read = kind.model_validate
    elif hasattr(kind, "__pydantic_validator__"):
        read = kind.__pydantic_validator__.validate_python
    else:
        return None

    def decode(value: Any) -> Any:
        try:
            return read(value)
        except Exception as error:
            reason, parts = _foreign_error(error)
            raise _Wrong(reason, *reversed(parts)) from error

    return decode


def _foreign_error(error: Exception) -> tuple[str, list[str | int]]:
    """What is wrong, and the parts of the path to it, the outermost first."""
    if hasattr(error, "errors"):  # pydantic
        first, *others = error.errors(include_url=False, include_context=False)
        more = f" (and {len(others)} more)" if others else ""
        return f"{first['msg']}{more}", [*first["loc"]]
    found = re.fullmatch(r"(.*) - at `(key in )?\$(.*)`", str(error), re.DOTALL)  # msgspec
    if found is None:
        return str(error) or type(error).__name__, []
    parts = re.findall(r"\[(.*?)\]|\.([^.\[]+)", found[3])
    return found[1], [int(index) if index.isdecimal() else index or name for index, name in parts]
