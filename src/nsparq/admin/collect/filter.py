"""The filter of the messages page: a line of terms, all of which must match.

    tea "green tea"       the text contains it, in upper or lower case
    customer.id=17        a field of the JSON body; also != > >= < <=, and ~ for "contains"
    items.0.name=tea      of the first item
    @attempts>3           about the message: @attempts @size @node @id @state @reason
    @header.tenant=acme   a header of the message

The fields of a dead letter are those of the message inside it, and the letter's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nsparq.admin.collect.messages import ShownMessage
from nsparq.errors import NsparqError

__all__ = ["BadFilter", "Filter"]

MAX_LENGTH: Final = 1000
_TERM: Final = re.compile(
    r"""\s*(?:(?P<field>@?[A-Za-z_][\w.\-]*)(?P<operator>!=|>=|<=|[=><~]))?"""
    r"""(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\s"]*))(?=\s|$)"""
)
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": lambda value, limit: value > limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    "<=": lambda value, limit: value <= limit,
}
_ABOUT: Final[Mapping[str, Callable[[ShownMessage], Any]]] = {
    "@attempts": lambda one: one.letter.attempts if one.letter else one.attempts,
    "@size": lambda one: one.size,
    "@node": lambda one: one.node,
    "@id": lambda one: one.id,
    "@state": lambda one: one.state,
    "@reason": lambda one: one.letter.reason if one.letter else None,
}
_HEADER: Final = "@header."


class BadFilter(NsparqError):
    """Not a filter. The text is for the user."""


@dataclass(frozen=True, slots=True)
class _Term:
    field: str
    """Empty for a text that may be anywhere."""
    operator: str
    wanted: str

    def matches(self, message: ShownMessage) -> bool:
        if not self.field:
            return message.contains(self.wanted)
        if self.field in _ABOUT:
            return self._holds(_ABOUT[self.field](message))
        values = [*_values(message, self.field)]
        if self.operator == "!=":
            return all(self._holds(value) for value in values)
        return any(self._holds(value) for value in values)

    def _holds(self, value: Any) -> bool:
        if self.operator in ("=", "!="):
            return _equals(value, self.wanted) == (self.operator == "=")
        if self.operator == "~":
            return value is not None and self.wanted.lower() in _text(value).lower()
        if isinstance(value, str) and self.field.startswith(_HEADER) and _NUMBER.fullmatch(value):
            value = float(value)
        # bool is an int, but true is no number.
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return _COMPARE[self.operator](value, float(self.wanted))


class Filter:
    """Raises BadFilter."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        if len(self.text) > MAX_LENGTH:
            raise BadFilter(f"a filter must have at most {MAX_LENGTH} characters")
        self._terms = [*_parse(self.text)]

    def __bool__(self) -> bool:
        return bool(self._terms)

    def matches(self, message: ShownMessage) -> bool:
        return all(term.matches(message) for term in self._terms)


def _parse(text: str) -> Iterable[_Term]:
    place = 0
    while place < len(text):
        found = _TERM.match(text, place)
        if found is None or found.end() == place:
            raise BadFilter(
                f"cannot parse the filter at {text[place : place + 20]!r}; write a text that contains quotes "
                'in quotes: "say \\"tea\\""'
            )
        place = found.end()
        field, operator, quoted, plain = found.group("field", "operator", "quoted", "plain")
        wanted = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        if field and field.startswith("@") and field not in _ABOUT and not field.startswith(_HEADER):
            raise BadFilter(f"{field} is unknown; there are {', '.join(_ABOUT)} and {_HEADER}NAME")
        if operator in _COMPARE and not _NUMBER.fullmatch(wanted):
            raise BadFilter(f"{field}{operator} needs a number, not {wanted!r}")
        if field or wanted:
            yield _Term(field or "", operator or "", wanted)


def _values(message: ShownMessage, path: str) -> Iterable[Any]:
    """The values of a field, in the message inside a dead letter and in the body; or of a
    header."""
    if path.startswith(_HEADER):
        name = path.removeprefix(_HEADER).lower()
        yield from (found[name] for found in (message.original_headers, message.headers) if name in found)
        return
    if message.letter is not None:
        yield from _at(message.letter.value, path)
    yield from _at(message.value, path)


def _at(value: Any, path: str) -> Iterable[Any]:
    if isinstance(value, dict):
        if path in value:
            yield value[path]
            return
        name, dot, rest = path.partition(".")
        if dot and name in value:
            yield from _at(value[name], rest)
    elif isinstance(value, list):
        place, dot, rest = path.partition(".")
        if place.isascii() and place.isdigit() and len(place) < 6 and int(place) < len(value):
            found = value[int(place)]
            if dot:
                yield from _at(found, rest)
            else:
                yield found


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _equals(value: Any, wanted: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool) and _NUMBER.fullmatch(wanted):
        # A whole number may be too large for a float.
        return value == (int(wanted) if wanted.isdigit() else float(wanted))
    return _text(value) == wanted
