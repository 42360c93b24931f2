"""The part of PromQL that our expressions use. Anything else is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<range>\[[^\]]*\])
    |(?P<number>\d+(?:\.\d+)?(?:[smhdwy])?)
    |(?P<name>[a-zA-Z_:][\w:]*)
    |(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){},]))""",
    re.VERBOSE,
)
GROUPING = {"by", "without", "on", "ignoring"}
OPERATORS = {"and", "or", "unless", "bool"}
AGGREGATIONS = {"sum", "min", "max", "count", "avg"}
OF_COUNTERS = {"rate", "increase"}
OF_GAUGES = {"deriv", "delta", "predict_linear"}
FUNCTIONS = AGGREGATIONS | OF_COUNTERS | OF_GAUGES | {"histogram_quantile", "changes", "time", "vector"}


@dataclass
class Selector:
    """A metric, the labels that are asked of it, and the function that it is given to."""

    metric: str
    labels: set[str] = field(default_factory=set)
    function: str = ""
    has_range: bool = False


@dataclass
class Expression:
    selectors: list[Selector] = field(default_factory=list)
    grouped_by: list[set[str]] = field(default_factory=list)


def tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text.rstrip()):
        found = TOKEN.match(text, position)
        if found is None:
            raise ValueError(f"not PromQL at {text[position:]!r}")
        assert found.lastgroup is not None
        yield found.lastgroup, found[found.lastgroup]
        position = found.end()


def parse(text: str) -> Expression:
    """Raises ValueError."""
    found, all_tokens = Expression(), [*tokens(text), ("end", "")]
    calls: list[str] = []
    place = 0
    while (kind := all_tokens[place][0]) != "end":
        value, following = all_tokens[place][1], all_tokens[place + 1][1]
        place += 1
        if kind == "name" and value in GROUPING:
            labels, place = _between(all_tokens, place, "(", ")")
            found.grouped_by.append({name for kind, name in labels if kind == "name"})
        elif kind == "name" and following == "(" and value not in OPERATORS:
            if value not in FUNCTIONS:
                raise ValueError(f"no function {value}")
            calls.append(value)
            place += 1
        elif kind == "name" and value in AGGREGATIONS and following in GROUPING:
            labels, place = _between(all_tokens, place + 1, "(", ")")
            found.grouped_by.append({name for kind, name in labels if kind == "name"})
            if all_tokens[place][1] != "(":
                raise ValueError(f"{value} of what?")
            calls.append(value)
            place += 1
        elif kind == "name" and value not in OPERATORS:
            one = Selector(value, function=calls[-1] if calls else "")
            if following == "{":
                inside, place = _between(all_tokens, place, "{", "}")
                one.labels = {name for kind, name in inside if kind == "name"}
            one.has_range = all_tokens[place][0] == "range"
            place += one.has_range
            found.selectors.append(one)
        elif value == "(":
            calls.append(calls[-1] if calls else "")
        elif value == ")":
            if not calls:
                raise ValueError("a parenthesis too many")
            calls.pop()
        elif kind == "range" or value in ("{", "}"):
            raise ValueError(f"unexpected {value}")
    if calls:
        raise ValueError("a parenthesis is not closed")
    return found


def _between(
    all_tokens: list[tuple[str, str]], place: int, left: str, right: str
) -> tuple[list[tuple[str, str]], int]:
    if all_tokens[place][1] != left:
        raise ValueError(f"expected {left}, not {all_tokens[place][1]!r}")
    end = next((n for n in range(place, len(all_tokens)) if all_tokens[n][1] == right), None)
    if end is None:
        raise ValueError(f"{left} is not closed")
    return all_tokens[place + 1 : end], end + 1
