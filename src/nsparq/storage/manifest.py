"""The manifest of an archive: which segments of a topic's log an object store has, and their names.

Pure: no store, no disk. A program that reads an archive needs this module and a store:

    number = latest_number(keys below manifest_prefix(place))
    manifest = Manifest.decode(bytes of manifest_key(place, number))
    for entry in manifest.between(first, end):
        bytes of segment_key(place, entry) are batches: storage.raw_batch.iter_batches()

docs/internals/archive.md has the format and the rules of a commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

from nsparq.errors import StorageError
from nsparq.storage.checked_json import decode_json, encode_json

FORMAT: Final = 1
ROOT: Final = "topics"
"""Everything is below this, under the prefix of the store."""

_SUFFIX: Final = ".json"


class BadManifest(StorageError):
    """The bytes are not a manifest that this version understands."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A sealed segment, as a manifest names it."""

    base: int
    """Sequence number of the first message."""
    end: int
    """The sequence number after the last message."""
    size: int
    """Bytes of the segment."""
    first_ns: int
    """Publish time of the first message."""
    last_ns: int
    """The latest publish time."""
    deferred: int
    """Number of messages that were published with a delay."""
    crc: int
    """crc32c of the segment."""

    @property
    def name(self) -> str:
        """Names the content: another content has another name."""
        return f"{self.base:020d}-{self.end:020d}-{self.crc:08x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the archive of one log has."""

    topic: str
    incarnation: str
    node: int = 0
    """Node id of the nsqd."""
    number: int = 0
    """Number of the commit; 0 before the first."""
    writer: str = ""
    """Names the run of an nsqd that made the commit."""
    written_ns: int = 0
    segments: tuple[SegmentEntry, ...] = ()
    """In order, without overlaps."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of sequence numbers without a message."""
    channels: dict[str, int] = field(default_factory=dict)
    """The first sequence number that each channel still needed."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The topic's own settings."""

    @property
    def place(self) -> str:
        return place_of(self.topic, self.incarnation)

    @property
    def end(self) -> int:
        """The sequence number after the last archived message; 0 if there is none."""
        return self.segments[-1].end if self.segments else 0

    def between(self, start: int, end: int) -> Sequence[SegmentEntry]:
        """The segments with messages from `start` to before `end`."""
        first = bisect_right(self.segments, start, key=attrgetter("end"))
        last = first
        while last < len(self.segments) and self.segments[last].base < end:
            last += 1
        return self.segments[first:last]

    def published_in(self, start_ns: int, end_ns: int) -> Sequence[SegmentEntry]:
        """The segments from the first message published at or after `start_ns` to the first one
        published at or after `end_ns`, as Log.search_time() finds them: exact even if the clock was
        set back."""
        found: list[SegmentEntry] = []
        for entry in self.segments:
            if found or entry.last_ns >= start_ns:
                found.append(entry)
            if entry.last_ns >= end_ns:
                break
        return found

    def changed(self, add: Iterable[SegmentEntry] = (), drop: Iterable[SegmentEntry] = ()) -> Manifest:
        """With other segments. An added segment replaces all that overlap it."""
        dropped = set(drop)
        kept = {entry.base: entry for entry in self.segments if entry not in dropped}
        for new in add:
            kept = {base: old for base, old in kept.items() if old.end <= new.base or base >= new.end}
            kept[new.base] = new
        return replace(self, segments=tuple(kept[base] for base in sorted(kept)))

    def encode(self) -> bytes:
        return encode_json({"format": FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises BadManifest."""
        try:
            fields = decode_json(raw)
            written = fields.pop("format")
            if written != FORMAT:
                raise BadManifest(f"format {written}: this version of nsparq reads format {FORMAT}")
            fields["segments"] = tuple(SegmentEntry(**entry) for entry in fields["segments"])
            fields["gaps"] = tuple((int(low), int(high)) for low, high in fields["gaps"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise BadManifest(f"not a manifest: {error}") from error


# names of objects, below the prefix of the store


def place_of(topic: str, incarnation: str) -> str:
    """Where the objects of a log are."""
    return f"{ROOT}/{topic}/{incarnation}"


def manifest_prefix(place: str) -> str:
    return f"{place}/manifest/"


def manifest_key(place: str, number: int) -> str:
    return f"{manifest_prefix(place)}{number:020d}{_SUFFIX}"


def segment_prefix(place: str) -> str:
    return f"{place}/segments/"


def segment_key(place: str, entry: SegmentEntry) -> str:
    return f"{segment_prefix(place)}{entry.name}.log"


def index_key(place: str, entry: SegmentEntry) -> str:
    return f"{segment_prefix(place)}{entry.name}.index"


def number_of(key: str) -> int:
    """The number of a manifest; 0 if the key is not that of a manifest."""
    digits = key.rpartition("/")[2].removesuffix(_SUFFIX)
    return int(digits) if key.endswith(_SUFFIX) and digits.isdecimal() else 0


def latest_number(keys: Iterable[str]) -> int:
    """The highest number of these manifests, which is the one that counts; 0 if there is none."""
    return max(map(number_of, keys), default=0)
