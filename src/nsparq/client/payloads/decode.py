"""From a declared type to the function that decodes the body of a message.

Bytes and text stay as they are; everything else is JSON. Dataclasses, typed dictionaries,
containers and simple types are decoded here; pydantic models and msgspec structs by their own
packages, which are imported only for such a type. An error names its place: `items[2].price:
expected a number, got "cheap"`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin

from nsparq.client.errors import ClientError
from nsparq.client.payloads.json_values import (
    LISTS,
    MAPPINGS,
    SIMPLE,
    Decode,
    WrongValue,
    choice_decoder,
    expected,
    list_decoder,
    mapping_decoder,
    object_decoder,
    parsed,
    tuple_decoder,
)

__all__ = ["DecodeFailed", "payload_decoder"]


class DecodeFailed(ClientError, ValueError):
    """The body does not have the declared type: `reason` says why, `path` where."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason, self.path = reason, path


def payload_decoder(kind: Any, names: Mapping[str, Any] | None = None) -> Callable[[bytes], Any]:
    """A function that decodes a body into a `kind`, or raises DecodeFailed. Annotations inside
    `kind` may use `names` besides those of their module. Raises TypeError for a type that has no
    form in JSON."""
    if kind is bytes:
        return lambda body: body
    if kind is str:
        return _text
    if (readers := _package_readers(kind)) is not None:
        return _package_decoder(readers[0], lambda reason, parts: DecodeFailed(reason, path_text(parts)))
    return _json_decoder(_Compiler(names or {}).decoder(kind))


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise DecodeFailed(f"not UTF-8: {error.reason} at byte {error.start}") from error


def _json_decoder(decode: Decode) -> Callable[[bytes], Any]:
    def decode_body(body: bytes) -> Any:
        try:
            return decode(json.loads(body, parse_constant=_refuse_constant))
        except WrongValue as wrong:
            raise DecodeFailed(wrong.reason, path_text(reversed(wrong.parts))) from wrong.__cause__
        except RecursionError as error:
            raise DecodeFailed("nested too deeply") from error
        except ValueError as error:
            raise DecodeFailed(f"not JSON: {error}") from error

    return decode_body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def path_text(parts: Iterable[str | int]) -> str:
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
        else:
            path += f"[{json.dumps(part)}]"
    return path


class _Compiler:
    """Turns a type into its decoder, once, when the handler is declared."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = dict(names)
        self._made: dict[Any, Decode] = {}

    def decoder(self, kind: Any) -> Decode:
        """Raises TypeError for a type that is not supported."""
        kind = _bare(kind)
        if kind in SIMPLE:
            return SIMPLE[kind]
        if kind not in self._made:
            # A type may contain itself: then the inner one finds its decoder here, at the first
            # call.
            self._made[kind] = lambda value: self._made[kind](value)
            self._made[kind] = self._compile(kind)
        return self._made[kind]

    def _compile(self, kind: Any) -> Decode:
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if origin is Literal:
            return choice_decoder({(type(value), value): value for value in arguments})
        if origin in LISTS:
            return list_decoder(self.decoder(arguments[0] if arguments else Any), LISTS[origin])
        if origin is tuple:
            if not arguments or arguments[1:] == (...,):
                return list_decoder(self.decoder(arguments[0] if arguments else Any), tuple)
            return tuple_decoder([self.decoder(argument) for argument in arguments])
        if origin in MAPPINGS:
            of_key, of_value = arguments or (str, Any)
            return mapping_decoder(self._key(of_key), self.decoder(of_value))
        if isinstance(kind, type):
            if issubclass(kind, Enum):
                return choice_decoder({(type(member.value), member.value): member for member in kind})
            if (readers := _package_readers(kind)) is not None:
                return _package_decoder(
                    readers[1], lambda reason, parts: WrongValue(reason, *reversed(parts))
                )
            if typing.is_typeddict(kind):
                return self._typed_dict(kind)
            if dataclasses.is_dataclass(kind):
                return self._dataclass(kind)
        raise TypeError(f"a payload cannot be decoded into {kind!r}")

    def _union(self, members: tuple[Any, ...]) -> Decode:
        """The first member that fits. `int` comes before `float`, so that an integer stays one."""
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
                except WrongValue as wrong:
                    wrongs.append(wrong)
            # The member whose decoder got furthest is probably the one that was meant.
            furthest = max(wrongs, key=lambda wrong: len(wrong.parts))
            raise furthest if furthest.parts or len(wrongs) == 1 else expected(text, value)

        return decode

    def _key(self, kind: Any) -> Decode | None:
        """The decoder of a mapping's keys, which are texts in JSON. None: they stay texts."""
        kind = _bare(kind)
        if kind in (str, Any, object):
            return None
        if kind in (int, float):
            return parsed("a number", kind)
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
        return object_decoder(fields)

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
                raise TypeError(f"{kind.__qualname__} needs {parameter.name!r}, which is not a field")
        decode_fields = object_decoder(fields)

        def decode(value: Any) -> Any:
            arguments = decode_fields(value)
            try:
                return kind(**arguments)
            except (TypeError, ValueError) as error:
                # Raised by the checks of the class itself.
                raise WrongValue(str(error)) from error

        return decode


def _bare(kind: Any) -> Any:
    """The type without Annotated, Required, NewType and aliases, which do not change its values."""
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


# Types of pydantic and msgspec. They are recognised by their attributes, so neither has to be
# installed.


def _package_readers(kind: Any) -> tuple[Callable[[bytes], Any], Decode] | None:
    """How the type's package reads a body, and a parsed value; None if it has none."""
    if not isinstance(kind, type):
        return None
    if hasattr(kind, "__struct_fields__"):
        import msgspec

        return msgspec.json.Decoder(kind).decode, partial(msgspec.convert, type=kind)
    if hasattr(kind, "model_validate_json"):
        return kind.model_validate_json, kind.model_validate  # type: ignore[attr-defined]  # a pydantic model
    if hasattr(kind, "__pydantic_validator__"):
        validator = kind.__pydantic_validator__
        return validator.validate_json, validator.validate_python
    return None


def _package_decoder(read: Callable[[Any], Any], fail: Callable[[str, list[str | int]], Exception]) -> Decode:
    """`fail` makes an exception of a reason and the parts of the path, the outermost first."""

    def decode(value: Any) -> Any:
        try:
            return read(value)
        except Exception as error:
            raise fail(*_package_error(error)) from error

    return decode


def _package_error(error: Exception) -> tuple[str, list[str | int]]:
    """The reason, and the parts of the path, the outermost first."""
    if hasattr(error, "errors"):  # pydantic
        first, *others = error.errors(include_url=False, include_context=False)
        more = f" (and {len(others)} more)" if others else ""
        return f"{first['msg']}{more}", [*first["loc"]]
    found = re.fullmatch(r"(.*) - at `(key in )?\$(.*)`", str(error), re.DOTALL)  # msgspec
    if found is None:
        return str(error) or type(error).__name__, []
    parts = re.findall(r"\[(.*?)\]|\.([^.\[]+)", found[3])
    return found[1], [int(index) if index.isdecimal() else index or name for index, name in parts]
