"""How Go programs read our JSON: into structs, where a value of another type is an error.

A shape is a type, a list with one shape, or a dictionary of shapes by key. Go ignores keys that the
struct does not have, and takes null for an empty list. A missing key would be a silent zero there;
here it is an error, because these programs need all of them.
"""

from __future__ import annotations

from typing import Any

INT64 = range(-(1 << 63), 1 << 63)


def decode(value: Any, shape: Any, place: str = "") -> Any:
    """The part of `value` that the shape names. Raises TypeError."""
    if isinstance(shape, dict):
        if not isinstance(value, dict) or not shape.keys() <= value.keys():
            raise TypeError(f"{place or 'the answer'} is {value!r}, without {sorted(shape)}")
        return {key: decode(value[key], part, f"{place}.{key}") for key, part in shape.items()}
    if isinstance(shape, list):
        if value is not None and not isinstance(value, list):
            raise TypeError(f"{place} is {value!r}, not a list")
        return [decode(one, shape[0], f"{place}[]") for one in value or ()]
    if type(value) is not shape or (shape is int and value not in INT64):
        raise TypeError(f"{place} is {value!r}, not {shape.__name__}")
    return value
