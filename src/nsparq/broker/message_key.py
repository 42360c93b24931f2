"""The keys of messages, for channels that are ordered by keys: see broker.ordering.

`ordered_by` is `header:` and a name, or a JSON pointer (RFC 6901) such as `/customer/id`. In JSON
text, numbers and booleans are keys. Any other message has no key.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Final, NoReturn

from nsparq.headers import decode_headers, encode_headers
from nsparq.json_pointer import find_value, parse_pointer
from nsparq.storage.batch import Batch

MAX_LENGTH: Final = 1024
"""Characters of `ordered_by`."""
MAX_BYTES: Final = 1 << 20
"""Bytes of bodies that are read at a time; a larger body is read alone."""
HEADER: Final = "header:"

KeyReader = Callable[[Batch, int, int], list[int | None]]
"""Gives a number for the key of each message, for up to so many messages of a batch from an index
on; None for a message without a key. Two keys with the same number share a lock: then one of them
waits for the other, and the order still holds. So no lock takes the memory of a long key."""


def key_reader(ordered_by: object) -> KeyReader:
    """Raises ValueError with a text for the user."""
    if type(ordered_by) is not str or not ordered_by.startswith(("/", HEADER)):
        raise ValueError(
            "ordered_by must be a JSON pointer such as /customer/id, or header: and a name, "
            f"not {ordered_by!r}"
        )
    if len(ordered_by) > MAX_LENGTH:
        raise ValueError(f"ordered_by must have at most {MAX_LENGTH} characters")
    if ordered_by.startswith(HEADER):
        return _header_reader(ordered_by.removeprefix(HEADER).lower())
    return _pointer_reader(ordered_by)


def _header_reader(name: str) -> KeyReader:
    encode_headers({name: ""})  # checks the name

    def read(batch: Batch, index: int, number: int) -> list[int | None]:
        blocks = batch.headers
        if blocks is None:
            return [None] * number
        values = (decode_headers(one).get(name) for one in _cut(blocks.lengths, blocks.data, index, number))
        return [None if value is None else hash(value) for value in values]

    return read


def _pointer_reader(pointer: str) -> KeyReader:
    steps = parse_pointer(pointer)

    def read(batch: Batch, index: int, number: int) -> list[int | None]:
        keys: list[int | None] = []
        size = 0
        for body in _cut(batch.lengths, batch.data, index, number):
            size += len(body)
            if keys and size > MAX_BYTES:
                break
            keys.append(_find(body, steps))
        return keys

    return read


def _cut(lengths: array[int], data: bytes, index: int, number: int) -> Iterator[bytes]:
    """Some of the strings that lie end to end in `data`."""
    bounds = accumulate(lengths[index : index + number], initial=sum(lengths[:index]))
    return (data[start:end] for start, end in pairwise(bounds))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decode: Final = json.JSONDecoder(parse_constant=_refuse).decode


def _find(body: bytes, steps: tuple[str, ...]) -> int | None:
    try:
        value = find_value(_decode(body.decode()), steps)
    except (ValueError, RecursionError, LookupError):
        return None
    return hash(value) if isinstance(value, str | int | float) else None
