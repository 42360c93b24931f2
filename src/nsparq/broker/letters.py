"""Reads dead letters: which of them match a filter, and the channels that they came from.

Log.locate() finds the bytes on the event loop, and read_letters() decodes them in a thread.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nsparq.broker.tagged import DEAD_LETTERS
from nsparq.dead_letter import ORIGIN_HEADERS, DeadLetter
from nsparq.headers import decode_headers, encode_headers
from nsparq.json_pointer import find_value, parse_pointer
from nsparq.storage.log_range import LogRange, Lost
from nsparq.storage.raw_batch import RawBatch, RawBlocks, iter_batches
from nsparq.wire.message import SEQUENCE_BITS

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic

RANGE_BYTES: Final = 1 << 20
"""Bytes of the log that are verified and decoded at a time."""
_SEQUENCE: Final = (1 << SEQUENCE_BITS) - 1
_NAME: Final = rb"([.a-zA-Z0-9_#-]+)"
_VALUES: Final = (
    _NAME,
    _NAME,
    b"([0-9a-f]{16})",
    b"([0-9]{1,19})",
    b"([0-9]{1,19})",
    b"([a-z ]+)",
    b"([!-~]+)",
    b"([0-9]{1,19})",
)
_ORIGIN: Final = re.compile(
    b"".join(
        # nsqd leaves out an empty value, which only the client can have.
        (b"(?:%b)?" if name.endswith("client") else b"%b")
        % (re.escape(bytes((len(name),)) + name.encode()) + b".." + value)
        for name, value in zip(ORIGIN_HEADERS, _VALUES, strict=True)
    )
    + rb"\Z",
    re.DOTALL,
)
"""The headers of a letter's origin, at the end of its header block."""
_DIFFERENT: Final = ((3, 16), (4, 10), (8, 10))
"""The groups of _ORIGIN in which letters of a batch differ, and the bases of these numbers: id,
time of publishing, time of giving up."""
_DIGITS: Final = np.full(256, 16, np.uint64)
"""The values of hexadecimal digits; 16 for other characters."""
_DIGITS[list(b"0123456789abcdef")] = range(16)
MIN_ALIKE: Final = 16
"""For fewer letters NumPy does not pay."""
MAX_EXAMPLES: Final = 8
"""Letters of a batch that serve as an example, at most: each costs a look at all that are left."""

Origin = tuple[str, str]
"""Topic and channel that a letter came from."""


class Letter(NamedTuple):
    """A dead letter that nsqd has written."""

    number: int
    """Its sequence number in the dead-letter topic."""
    sequence: int
    """The sequence number of the message in its own topic."""
    timestamp_ns: int
    """When the message was published."""
    given_up_ns: int
    body: bytes
    block: bytes
    """Headers of the message."""
    # Letters of a batch often have these in common.
    origin: Origin
    attempts: int
    reason: str
    client: str


_SHARED: Final = Letter._fields.index("origin")
_origin_of: Final = itemgetter(_SHARED)
_make: Final[Callable[[tuple[object, ...]], Letter]] = partial(tuple.__new__, Letter)
"""Letter._make() without Python code for each letter, which is half of the time."""


def decode_letter(number: int, body: bytes, block: bytes) -> Letter | None:
    """A letter, from a message of the dead-letter topic: its body and its header block. None if it
    is not a letter."""
    found = _ORIGIN.search(block)
    if found is not None:
        return _regular(found, number, body, block)
    # A letter of an earlier version, which is JSON.
    try:
        letter = DeadLetter.from_message(body, decode_headers(block))
        if letter is None:
            return None
        return Letter(
            number,
            int(letter.id, 16) & _SEQUENCE,
            letter.timestamp_ns,
            letter.given_up_ns,
            letter.body,
            encode_headers(letter.headers or {}),
            (letter.topic, letter.channel),
            letter.attempts,
            letter.error,
            letter.client,
        )
    except ValueError:
        return None


def _regular(found: re.Match[bytes], number: int, body: bytes, block: bytes) -> Letter:
    """A letter as nsqd writes it: the headers of its origin follow those of the message, in a fixed
    order. This is ten times faster than decoding all headers."""
    topic, channel, message_id, timestamp, attempts, reason, client, given_up = found.groups()
    return Letter(
        number,
        int(message_id, 16) & _SEQUENCE,
        int(timestamp),
        int(given_up),
        body,
        block[: found.start()],
        (topic.decode(), channel.decode()),
        int(attempts),
        reason.decode(),
        client.decode() if client else "",
    )


def decode_letters(batch: RawBatch) -> list[Letter | None]:
    """The same for each message of a batch.

    Most letters of a batch differ only in body, own headers, id and times. So one letter is decoded
    as an example, and NumPy finds those like it."""
    count = len(batch.lengths)
    letters: list[Letter | None] = [None] * count
    bodies, headers = batch.bodies(), batch.headers
    if headers is None:
        return [decode_letter(number, body, b"") for number, body in enumerate(bodies, batch.base)]
    ends, data = headers.offsets(), bytes(headers.data)
    is_left = np.ones(count, np.bool_)
    for _ in range(MAX_EXAMPLES):
        left = np.flatnonzero(is_left)
        if len(left) < MIN_ALIKE:
            break
        first = int(left[0])
        block = data[ends[first] : ends[first + 1]]
        found = _ORIGIN.search(block)
        if found is None:
            break
        example = _regular(found, batch.base + first, bodies[first], block)
        alike, columns = _find_alike(found, headers, left)
        is_left[alike] = False
        starts, own_ends = ends[alike], ends[alike + 1] - len(found[0])
        own = zip(starts.tolist(), own_ends.tolist(), strict=True)
        made = map(
            _make,
            zip(
                (batch.base + alike).tolist(),
                *columns,
                bodies if len(alike) == count else [bodies[index] for index in alike.tolist()],
                [data[a:b] for a, b in own] if (starts < own_ends).any() else repeat(b""),
                *map(repeat, example[_SHARED:]),
                strict=False,
            ),
        )
        if len(alike) == count:
            return [*made]
        for index, letter in zip(alike.tolist(), made, strict=True):
            letters[index] = letter
    for index in np.flatnonzero(is_left).tolist():
        block = data[ends[index] : ends[index + 1]]
        letters[index] = decode_letter(batch.base + index, bodies[index], block)
    return letters


def _find_alike(
    example: re.Match[bytes], blocks: RawBlocks, left: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], list[list[int]]]:
    """Which of the letters `left` have the origin headers of the example, apart from id and times;
    and their message's sequence number, its time and the time of giving up."""
    text = example[0]
    left = left[blocks.lengths[left] >= len(text)]
    starts = blocks.offsets()[left + 1] - len(text)
    # A row for each byte, which begins there.
    shape = (len(blocks.data) - len(text) + 1, len(text))
    rows = np.ndarray(shape, np.uint8, blocks.data, strides=(1, 1))[starts]
    is_alike = rows == np.frombuffer(text, np.uint8)
    columns = []
    for group, base in _DIFFERENT:
        first, last = (place - example.start() for place in example.span(group))
        digits = _DIGITS[rows[:, first:last]]
        is_alike[:, first:last] = digits < base
        columns.append(digits @ np.uint64(base) ** np.arange(last - first, dtype=np.uint64)[::-1])
    columns[0] &= np.uint64(_SEQUENCE)
    chosen = is_alike.all(axis=1)
    return left[chosen], [column[chosen].tolist() for column in columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Chooses letters. An empty text, and a time of 0, stand for "any"."""

    origin_topic: str = ""
    channel: str = ""
    reason: str = ""
    since_ns: int = 0
    """Given up at this time or later."""
    until_ns: int = 0
    """Given up before this time."""
    text: str = ""
    """The body contains this."""
    field: str = ""
    """The body is JSON and has a value at this JSON pointer."""
    value: str | None = None
    """The value is this: a text, or the JSON of another value. None for any value."""

    def __post_init__(self) -> None:
        """Raises ValueError with a text for the user."""
        if self.field:
            parse_pointer(self.field)
        elif self.value is not None:
            raise ValueError("a value needs a field: the JSON pointer of the value")

    def choose(self, letters: list[Letter | None]) -> list[bool]:
        """Which of the letters match."""
        found = [*filter(None, letters)]
        takes = {
            (topic, channel): self.origin_topic in ("", topic) and self.channel in ("", channel)
            for topic, channel in {*map(_origin_of, found)}
        }
        # Only what the filter uses costs time for each letter.
        matches = [True] * len(found)
        if not all(takes.values()):
            matches = [takes[letter.origin] for letter in found]
        if reason := self.reason:
            matches = [so_far and one.reason == reason for so_far, one in zip(matches, found, strict=True)]
        if self.since_ns or self.until_ns:
            since_ns, until_ns = self.since_ns, self.until_ns or math.inf
            matches = [
                so_far and since_ns <= one.given_up_ns < until_ns
                for so_far, one in zip(matches, found, strict=True)
            ]
        if text := self.text.encode(errors="surrogateescape"):
            matches = [so_far and text in one.body for so_far, one in zip(matches, found, strict=True)]
        if self.field:
            matches = [
                so_far and self._has_value(one.body) for so_far, one in zip(matches, found, strict=True)
            ]
        if len(found) < len(letters):
            of_letter = iter(matches)
            return [letter is not None and next(of_letter) for letter in letters]
        return matches

    def _has_value(self, body: bytes) -> bool:
        try:
            found = find_value(json.loads(body), parse_pointer(self.field))
        except (ValueError, LookupError, RecursionError):
            return False
        if self.value is None:
            return True
        return self.value == (found if isinstance(found, str) else json.dumps(found))

    def stored(self) -> dict[str, Any]:
        """The values that choose something."""
        defaults = asdict(LetterFilter())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


@dataclass(slots=True)
class OfOrigin:
    """Letters of one origin, in the order of their numbers."""

    matching: list[Letter] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    """Numbers of the letters that do not match."""


@dataclass(slots=True)
class Part:
    """A part of a dead-letter topic that has been read."""

    start: int
    next: int
    """Where to continue."""
    origins: dict[Origin, OfOrigin] = field(default_factory=lambda: defaultdict(OfOrigin))
    letters: int = 0
    """Dead letters in this part."""
    foreign: int = 0
    """Messages that are not dead letters of nsqd."""
    lost: list[tuple[LogRange, list[Lost]]] = field(default_factory=list)
    """Damage in the log; pass it to Log.note_lost()."""

    def add(self, letters: list[Letter | None], matches: list[bool]) -> None:
        """Add letters, and None for each message that is not one. `matches` says which of them
        match."""
        found = [*filter(None, letters)]
        self.letters += len(found)
        if all(matches) and len(origins := {*map(_origin_of, found)}) == 1:
            # The usual case: a batch has letters of one channel.
            self.origins[origins.pop()].matching += found
            return
        for letter, is_matching in zip(letters, matches, strict=False):
            if letter is None:
                self.foreign += 1
            elif is_matching:
                self.origins[letter.origin].matching.append(letter)
            else:
                self.origins[letter.origin].others.append(letter.number)


def locate_letters(topic: Topic, start: int, end: int, max_bytes: int) -> list[LogRange]:
    """The bytes of the messages from `start` on, up to about `max_bytes`, to be read in a
    thread."""
    ranges: list[LogRange] = []
    size = 0
    while start < end and size < max_bytes:
        found = topic.log.locate(start, min(RANGE_BYTES, max_bytes))
        if found.next <= start:
            break
        ranges.append(found)
        size += found.size
        start = found.next
    return ranges


def read_letters(
    ranges: list[LogRange], start: int, end: int, wanted: LetterFilter, limit: int | None = None
) -> Part:
    """Decode the letters with numbers from `start` to before `end`, up to `limit` that match. Any
    thread may call this."""
    part = Part(start, min(ranges[-1].next, end) if ranges else end)
    for place in ranges:
        verified = place.read_verified()
        if verified.lost:
            part.lost.append((place, verified.lost))
        for whole in iter_batches(verified.data):
            batch = whole.between(start, end)
            if batch.tag != DEAD_LETTERS:
                part.foreign += len(batch.lengths)
                continue
            letters = decode_letters(batch)
            if place.gaps:
                letters = [
                    letter
                    for number, letter in enumerate(letters, batch.base)
                    if not any(low <= number < high for low, high in place.gaps)
                ]
            matches = wanted.choose(letters)
            if limit is not None and sum(matches) >= limit:
                index = list(accumulate(map(int, matches))).index(limit)
                last = letters[index]
                assert last is not None
                part.add(letters[: index + 1], matches)
                part.next = last.number + 1
                return part
            part.add(letters, matches)
            limit = None if limit is None else limit - sum(matches)
    return part
