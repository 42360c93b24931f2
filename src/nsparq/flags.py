"""Go's command line syntax, which scripts and test suites for NSQ use in full.

Splits arguments into flags, and parses values: booleans, integers, durations.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Final

__all__ = [
    "FlagError",
    "HelpWanted",
    "UnknownFlag",
    "format_duration",
    "parse_bool",
    "parse_duration",
    "parse_int",
    "scan_flags",
]


class FlagError(Exception):
    """The command line is wrong; the text is that of Go's flag package."""


class UnknownFlag(FlagError):
    """A flag that the program does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"flag provided but not defined: -{name}")
        self.name = name


class HelpWanted(Exception):
    """-h, -help or --help was given."""


def scan_flags(arguments: Sequence[str], is_boolean: Mapping[str, bool]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each flag, up to `--` or the first argument that is not a flag.

    `is_boolean` has an entry for every known flag. A boolean takes a value only with `=`; any other
    flag takes the next argument, even if it looks like a flag.
    """
    remaining = iter(arguments)
    for argument in remaining:
        if len(argument) < 2 or argument[0] != "-" or argument == "--":
            return
        name, equals, value = argument[2 if argument[1] == "-" else 1 :].partition("=")
        if not name or name[0] == "-":
            raise FlagError(f"bad flag syntax: {argument}")
        if name not in is_boolean:
            if name in ("h", "help"):
                raise HelpWanted
            raise UnknownFlag(name)
        if not equals:
            following = "true" if is_boolean[name] else next(remaining, None)
            if following is None:
                raise FlagError(f"flag needs an argument: -{name}")
            value = following
        yield name, value


_BOOLEANS: Final = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


def parse_bool(text: str) -> bool:
    try:
        return _BOOLEANS[text]
    except KeyError:
        raise ValueError("parse error: write true or false") from None


_INTEGER: Final = re.compile(
    r"[+-]?(0[xX](_?[0-9a-fA-F])+|0[bB](_?[01])+|0[oO](_?[0-7])+|0(_?[0-7])*|[1-9](_?[0-9])*)"
)


def parse_int(text: str) -> int:
    """Decimal, or hexadecimal, octal and binary by prefix; a leading zero means octal, as in Go."""
    if not _INTEGER.fullmatch(text):
        raise ValueError("parse error: write a whole number")
    digits = text.lstrip("+-").replace("_", "")
    number = int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
    if number > 2**63 - 1:
        raise ValueError("value out of range")
    return -number if text[0] == "-" else number


_UNITS_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # U+00B5, micro sign
    "μs": 1_000,  # U+03BC, Greek letter mu
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
MAX_DURATION_S: Final = 100 * 365 * 86400.0
"""The longest duration of an option, a hundred years. In nanoseconds, added to the present time, it
still fits into 64 bits."""
_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `250ms`, `1.5s` or `2h45m`, exact to the nanosecond."""
    unsigned = text[1:] if text[:1] in ("+", "-") else text
    if unsigned == "0":
        return 0.0
    total_ns = position = 0
    while part := _DURATION_PART.match(unsigned, position):
        total_ns += int(Decimal(part[1]) * _UNITS_NS[part[2]])
        position = part.end()
    if position == 0 or position != len(unsigned) or total_ns > 2**63 - 1:
        raise ValueError("parse error: write a duration such as 250ms, 90s or 1h30m")
    return (-total_ns if text[0] == "-" else total_ns) / 1e9


def format_duration(seconds: float) -> str:
    """The shortest text that parse_duration reads as `seconds`, to the nanosecond."""
    ns = round(seconds * 1e9)
    if ns == 0:
        return "0s"
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    parts = []
    for unit in ("h", "m", "s", "ms", "us", "ns"):
        count, ns = divmod(ns, _UNITS_NS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return sign + "".join(parts)
