"""The regular expressions of permissions: Go's syntax, matched in time proportional to the name.

Who writes the patterns has an nsqd in mind that is written in Go, so Go's syntax decides: `[[:alpha:]]` means
something, look-ahead does not. And a client chooses the names that they are matched against, on the event
loop of a broker that others use: Python's `re` needs hours for `(\\w+\\.?)+$` and a well-chosen name. So a
pattern becomes a small automaton that tries all ways at once, and its steps are remembered.

Names of topics and channels are ASCII without line ends. So a set of characters is a bit mask, with one bit
for all that is not ASCII, and a multi-line `^` is `^`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from nsparq.errors import NsparqError

__all__ = ["BadPattern", "Pattern", "compile_pattern"]

MAX_STEPS: Final = 10_000
"""Instructions of one pattern; a list of a thousand names fits."""
MAX_REPEAT: Final = 1000
MAX_NESTING: Final = 100
MAX_REMEMBERED: Final = 2000

_OTHER: Final = 1 << 128
_ANY: Final = (1 << 129) - 1
_NEWLINE: Final = 1 << 10

# Instructions: a set of characters to consume, a fork, or something that must hold without consuming.
_SET, _FORK, _ASSERT, _MATCH = range(4)
_AT_START, _AT_END, _AT_BOUNDARY = 1, 2, 4


class BadPattern(NsparqError):
    """Not a regular expression that Go would take; the text says why."""


def _mask(characters: str) -> int:
    return sum(1 << ord(character) for character in set(characters))


def _range(first: int, last: int) -> int:
    """The characters from first to last; those beyond ASCII are never in a name."""
    last = min(last, 127)
    return ((1 << (last + 1)) - 1) & ~((1 << first) - 1) if first <= last else 0


_DIGIT: Final = _range(48, 57)
_UPPER: Final = _range(65, 90)
_LOWER: Final = _range(97, 122)
_WORD: Final = _DIGIT | _UPPER | _LOWER | _mask("_")
_SPACE: Final = _mask("\t\n\f\r ")
_PERL: Final = {"d": _DIGIT, "s": _SPACE, "w": _WORD}
_POSIX: Final = {
    "alnum": _DIGIT | _UPPER | _LOWER,
    "alpha": _UPPER | _LOWER,
    "ascii": _range(0, 127),
    "blank": _mask("\t "),
    "cntrl": _range(0, 31) | _range(127, 127),
    "digit": _DIGIT,
    "graph": _range(33, 126),
    "lower": _LOWER,
    "print": _range(32, 126),
    "punct": _range(33, 47) | _range(58, 64) | _range(91, 96) | _range(123, 126),
    "space": _SPACE | _mask("\v"),
    "upper": _UPPER,
    "word": _WORD,
    "xdigit": _DIGIT | _range(65, 70) | _range(97, 102),
}
_ESCAPES: Final = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}


class _Program(list[tuple[int, int, int]]):
    """Instructions as (kind, argument, other): a set's mask, a fork's two targets, what is asserted."""

    def add(self, kind: int, argument: int = 0, other: int = 0) -> int:
        if len(self) >= MAX_STEPS:
            raise BadPattern("expression too large")
        self.append((kind, argument, other))
        return len(self) - 1


_Part = Callable[[_Program], object]
"""A part of a pattern: writes its instructions to the end of a program."""


def _set(mask: int) -> _Part:
    return lambda program: program.add(_SET, mask)


def _assertion(what: int, wanted: bool = True) -> _Part:
    return lambda program: program.add(_ASSERT, what, int(wanted))


def _sequence(parts: list[_Part]) -> _Part:
    def emit(program: _Program) -> None:
        for part in parts:
            part(program)

    return emit


def _alternatives(choices: list[_Part]) -> _Part:
    def emit(program: _Program) -> None:
        leaps = []
        for choice in choices[:-1]:
            fork = program.add(_FORK)
            choice(program)
            leaps.append(program.add(_FORK))
            program[fork] = (_FORK, fork + 1, len(program))
        choices[-1](program)
        for leap in leaps:
            program[leap] = (_FORK, len(program), len(program))

    return choices[0] if len(choices) == 1 else emit


def _repeated(part: _Part, least: int, most: int | None) -> _Part:
    def emit(program: _Program) -> None:
        for _ in range(least):
            part(program)
        if most is None:
            fork = program.add(_FORK)
            part(program)
            program.add(_FORK, fork, fork)
            program[fork] = (_FORK, fork + 1, len(program))
            return
        forks = []
        for _ in range(most - least):
            forks.append(program.add(_FORK))
            part(program)
        for fork in forks:
            program[fork] = (_FORK, fork + 1, len(program))

    return emit


class _Parser:
    """Recursive descent over Go's syntax. What a match captures, and greed, do not matter here."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._nesting = 0
        self._ignore_case = False
        self._dot_takes_newline = False

    def parse(self) -> _Part:
        node = self._choices()
        if self._position < len(self._text):
            raise BadPattern("unexpected )")
        return node

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _take(self, expected: str) -> bool:
        if self._text.startswith(expected, self._position):
            self._position += len(expected)
            return True
        return False

    def _next(self, missing: str) -> str:
        character = self._peek()
        if not character:
            raise BadPattern(missing)
        self._position += 1
        return character

    def _take_match(self, expression: str) -> re.Match[str] | None:
        found = re.compile(expression).match(self._text, self._position)
        if found:
            self._position = found.end()
        return found

    def _choices(self) -> _Part:
        choices = [self._parts()]
        while self._take("|"):
            choices.append(self._parts())
        return _alternatives(choices)

    def _parts(self) -> _Part:
        parts: list[_Part] = []
        is_repeated = False  # whether the last part has its repetition: Go wants parentheses before another
        while (character := self._peek()) and character not in "|)":
            start = self._position
            bounds = self._repetition()
            if bounds is None:
                parts += self._part()
                is_repeated = False
                continue
            if not parts:
                raise BadPattern(
                    f"missing argument to repetition operator {self._text[start : self._position]}"
                )
            if is_repeated:
                raise BadPattern(f"invalid nested repetition operator {self._text[start : self._position]}")
            parts[-1] = _repeated(parts[-1], *bounds)
            is_repeated = True
        return _sequence(parts)

    def _repetition(self) -> tuple[int, int | None] | None:
        """The bounds of the operator at the position, if there is one."""
        found = self._take_match(r"(?:[*+?]|\{([0-9]+)(?:(,)([0-9]*))?\})\??")
        if not found:
            return None
        operator = found[0][0]
        if operator != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[operator]
        least = int(found[1][:9])
        most = int(found[3][:9]) if found[3] else None if found[2] else least
        if least > MAX_REPEAT or (most is not None and not least <= most <= MAX_REPEAT):
            raise BadPattern(f"invalid repeat count {found[0]}")
        return least, most

    def _part(self) -> list[_Part]:
        """One thing that a repetition operator may follow; several characters of a quotation."""
        character = self._next("")
        if character == "(":
            return self._group()
        if character == "[":
            return [_set(self._character_class())]
        if character == "\\":
            return self._escape()
        if character == ".":
            return [_set(_ANY if self._dot_takes_newline else _ANY & ~_NEWLINE)]
        if character in "^$":
            return [_assertion(_AT_START if character == "^" else _AT_END)]
        return [self._literal(character)]

    def _literal(self, character: str) -> _Part:
        return _set(self._folded(_range(ord(character), ord(character))))

    def _folded(self, mask: int) -> int:
        if self._ignore_case:
            mask |= (mask & _UPPER) << 32 | (mask & _LOWER) >> 32
        return mask

    def _group(self) -> list[_Part]:
        flags = self._ignore_case, self._dot_takes_newline
        if self._take("?") and not self._take_match(r"P?<[A-Za-z0-9_]+>"):
            found = self._take_match(r"([imsU]*)(?:-([imsU]+))?([:)])")
            if not found:
                raise BadPattern("invalid or unsupported Perl syntax (?" + self._peek())
            self._ignore_case = ("i" in found[1] or self._ignore_case) and "i" not in (found[2] or "")
            self._dot_takes_newline = ("s" in found[1] or self._dot_takes_newline) and "s" not in (
                found[2] or ""
            )
            if found[3] == ")":
                return []
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise BadPattern("expression nests too deeply")
        node = self._choices()
        if not self._take(")"):
            raise BadPattern("missing closing )")
        self._nesting -= 1
        self._ignore_case, self._dot_takes_newline = flags
        return [node]

    def _escape(self) -> list[_Part]:
        if self._take("Q"):
            end = self._text.find("\\E", self._position)
            quoted = self._text[self._position :] if end < 0 else self._text[self._position : end]
            self._position = len(self._text) if end < 0 else end + 2
            return [self._literal(character) for character in quoted]
        character = self._peek()
        if character and character in "AzbB":
            self._position += 1
            if character in "bB":
                return [_assertion(_AT_BOUNDARY, character == "b")]
            return [_assertion(_AT_START if character == "A" else _AT_END)]
        mask = self._perl_class()
        if mask is not None:
            return [_set(mask)]
        return [_set(self._folded(_range(code := self._escaped_code(), code)))]

    def _perl_class(self) -> int | None:
        letter = self._peek()
        mask = _PERL.get(letter.lower())
        if mask is not None:
            self._position += 1
            return mask if letter.islower() else _ANY & ~mask
        return None

    def _escaped_code(self) -> int:
        """The character that an escape stands for, its backslash already taken."""
        if found := self._take_match(r"x(?:([0-9A-Fa-f]{2})|\{([0-9A-Fa-f]{1,8})\})"):
            code = int(found[1] or found[2], 16)
            if code <= 0x10FFFF:
                return code
        elif found := self._take_match(r"0[0-7]{0,2}|[1-7][0-7]{1,2}"):
            return int(found[0], 8)
        else:
            character = self._next("trailing backslash at end of expression")
            if character in _ESCAPES:
                return _ESCAPES[character]
            if character.isascii() and not character.isalnum():
                return ord(character)
        raise BadPattern(f"invalid escape sequence before position {self._position}")

    def _character_class(self) -> int:
        missing = "missing closing ]"
        negated = self._take("^")
        mask = 0
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            if found := self._take_match(r"\[:(\^?)(\w+):\]"):
                if found[2] not in _POSIX:
                    raise BadPattern(f"invalid character class range {found[0]}")
                known = _POSIX[found[2]]
                mask |= _ANY & ~known if found[1] else known
                continue
            escaped = self._take("\\")
            perl = self._perl_class() if escaped else None
            if perl is not None:
                mask |= perl
                continue
            first = last = self._escaped_code() if escaped else ord(self._next(missing))
            if self._peek() == "-" and self._text[self._position + 1 : self._position + 2] != "]":
                self._position += 1
                last = self._escaped_code() if self._take("\\") else ord(self._next(missing))
                if last < first:
                    raise BadPattern(f"invalid character class range {chr(first)}-{chr(last)}")
            mask |= _range(first, last)
        self._position += 1
        mask = self._folded(mask)
        return _ANY & ~mask if negated else mask


class Pattern:
    """A compiled pattern. Compares equal to another with the same text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._program = _Program()
        try:
            _Parser(text).parse()(self._program)
        except BadPattern as error:
            raise BadPattern(f"{error} in {text[:200]!r}") from None
        self._program.add(_MATCH)
        self._remembered: dict[tuple[tuple[int, ...], int], tuple[bool, tuple[tuple[int, int], ...]]] = {}
        places = (0, _AT_END, _AT_BOUNDARY, _AT_END | _AT_BOUNDARY)
        self._only_at_start = all(self._spread((), place) == (False, ()) for place in places)

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def search(self, name: str) -> bool:
        """Whether the pattern matches somewhere in the name, or in the empty string."""
        states: tuple[int, ...] = ()
        was_word = False
        for position in range(len(name) + 1):
            code = min(ord(name[position]), 128) if position < len(name) else -1
            is_word = code >= 0 and bool(_WORD >> code & 1)
            place = (
                (_AT_START if position == 0 else 0)
                | (_AT_END if code < 0 else 0)
                | (_AT_BOUNDARY if is_word != was_word else 0)
            )
            matched, sets = self._spread(states, place)
            if matched or code < 0:
                return matched
            states = tuple(target for mask, target in sets if mask >> code & 1)
            if not states and self._only_at_start:
                return False
            was_word = is_word
        return False

    def _spread(self, states: tuple[int, ...], place: int) -> tuple[bool, tuple[tuple[int, int], ...]]:
        """Where these states lead without consuming, and a match that begins here: whether to the end, and
        the sets of characters that lead on, each with its target."""
        known = self._remembered.get((states, place))
        if known is not None:
            return known
        seen: set[int] = set()
        waiting = [0, *states]
        sets = []
        matched = False
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            kind, argument, other = self._program[state]
            if kind == _SET:
                sets.append((argument, state + 1))
            elif kind == _FORK:
                waiting += (argument, other)
            elif kind == _MATCH:
                matched = True
            elif bool(place & argument) == bool(other):
                waiting.append(state + 1)
        if len(self._remembered) >= MAX_REMEMBERED:
            self._remembered.clear()
        found = (matched, tuple(sorted(sets)))
        self._remembered[states, place] = found
        return found


@lru_cache(1024)
def compile_pattern(text: str) -> Pattern:
    """The pattern of this text, shared by all who use it. Raises BadPattern."""
    return Pattern(text)
