"""Reads dead letters: which of them match a filter, and the channels that they came from.

Log.locate() finds the bytes on the event loop, and read_letters() decodes them in a thread.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nsparq.broker.tagged import DEAD_LETTERS
from nsparq.dead_letter import ORIGIN_HEADERS, DeadLetter
from nsparq.headers import decode_headers, encode_headers
from nsparq.json_pointer import find_value, parse_pointer
from nsparq.storage.log_range import LogRange, Lost
from nsparq.storage.raw_batch import iter_batches
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
    b"([0-9]+)",
    b"([0-9]+)",
    b"([a-z ]+)",
    b"([!-~]+)",
    b"([0-9]+)",
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
    attempts: int
    reason: str
    client: str
    given_up_ns: int
    body: bytes
    block: bytes
    """Headers of the message."""


def decode_letter(number: int, body: bytes, block: bytes) -> tuple[Origin, Letter] | None:
    """A letter and its origin, from a message of the dead-letter topic: its body and its header
    block. None if it is not a letter."""
    found = _decode_origin(number, body, block)
    if found is not None:
        return found
    # A letter of an earlier version, which is JSON.
    try:
        letter = DeadLetter.from_message(body, decode_headers(block))
        if letter is None:
            return None
        return (letter.topic, letter.channel), Letter(
            number,
            int(letter.id, 16) & _SEQUENCE,
            letter.timestamp_ns,
            letter.attempts,
            letter.error,
            letter.client,
            letter.given_up_ns,
            letter.body,
            encode_headers(letter.headers or {}),
        )
    except ValueError:
        return None


def _decode_origin(number: int, body: bytes, block: bytes) -> tuple[Origin, Letter] | None:
    """The same for a letter as nsqd writes it: the headers of its origin follow those of the
    message, in a fixed order. This is ten times faster than decoding all headers."""
    found = _ORIGIN.search(block)
    if found is None:
        return None
    topic, channel, message_id, timestamp, attempts, reason, client, given_up = found.groups()
    return (topic.decode(), channel.decode()), Letter(
        number,
        int(message_id, 16) & _SEQUENCE,
        int(timestamp),
        int(attempts),
        reason.decode(),
        client.decode() if client else "",
        int(given_up),
        body,
        block[: found.start()],
    )


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

    def takes_origin(self, origin: Origin) -> bool:
        """Whether letters of this origin can match."""
        topic, channel = origin
        return self.origin_topic in ("", topic) and self.channel in ("", channel)

    @property
    def looks_at_letters(self) -> bool:
        """Whether the origin alone does not decide."""
        return bool({*self.stored()} - {"origin_topic", "channel"})

    def matches(self, letter: Letter) -> bool:
        """Whether a letter matches, if its origin can."""
        return (
            (not self.reason or letter.reason == self.reason)
            and letter.given_up_ns >= self.since_ns
            and (not self.until_ns or letter.given_up_ns < self.until_ns)
            and (not self.text or self.text.encode(errors="surrogateescape") in letter.body)
            and (not self.field or self._has_value(letter.body))
        )

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


def locate_letters(topic: Topic, start: int, end: int, max_bytes: int) -> list[LogRange]:
    """The bytes of the messages from `start` on, up to about `max_bytes`, to be read in a thread."""
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
    matching, looks_at_letters = 0, wanted.looks_at_letters
    taken: dict[Origin, bool] = {}
    """Whether letters of an origin can match."""
    for place in ranges:
        verified = place.read_verified()
        if verified.lost:
            part.lost.append((place, verified.lost))
        for whole in iter_batches(verified.data):
            batch = whole.between(start, end)
            if batch.tag != DEAD_LETTERS:
                part.foreign += len(batch.lengths)
                continue
            for number, body, block in zip(
                range(batch.base, batch.end), batch.bodies(), batch.blocks(), strict=True
            ):
                if place.gaps and any(low <= number < high for low, high in place.gaps):
                    continue
                found = decode_letter(number, body, block)
                if found is None:
                    part.foreign += 1
                    continue
                part.letters += 1
                origin, letter = found
                if origin not in taken:
                    taken[origin] = wanted.takes_origin(origin)
                if not taken[origin] or (looks_at_letters and not wanted.matches(letter)):
                    part.origins[origin].others.append(number)
                    continue
                part.origins[origin].matching.append(letter)
                matching += 1
                if matching == limit:
                    part.next = number + 1
                    return part
    return part
