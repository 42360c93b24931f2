"""Idempotent publishing: a message that a producer sends again is acknowledged and not stored.

The headers `nsq-producer`, `nsq-epoch` and `nsq-number` name a message; docs/reference/headers.md
has the rules, and `seen_numbers` the window in which nsqd knows it again.

The numbers are in the log, with their messages. A file beside the log has the numbers up to a
position, so that a start need not read all of the log: only what comes after that position. The
file never knows more than the disk has of the log. Otherwise a power cut could lose a message, and
nsqd would acknowledge its repeat.
"""

from __future__ import annotations

import logging
from array import array
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nsparq import kernel
from nsparq.broker.seen_numbers import NumberRange, NumberRefused, Producer, SeenNumbers, Window
from nsparq.broker.tagged import SEARCH_SIZE
from nsparq.headers import ORIGIN, decode_headers, encode_headers
from nsparq.packed import PackedBodies
from nsparq.storage.checked_json import encode_json, read_json
from nsparq.storage.log import Durability, Log
from nsparq.storage.raw_batch import iter_batches
from nsparq.storage.state_files import StateFile

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

PRODUCER: Final = b"\x0cnsq-producer"
"""How the header begins in a block. If the blocks of a publish do not contain this, none of its
messages has a number."""
PRODUCERS_FILE: Final = "producers.json"
SAVE_INTERVAL_NS: Final = 10_000_000_000
"""Time between two versions of the file. After a crash, nsqd reads what was published since."""
MAX_NAME: Final = 255
"""Characters of a producer's name."""
MAX_KNOWN: Final = 1000
"""Beginnings of blocks that are remembered, so that they are decoded once."""
MAX_DIGITS: Final = 18
"""Digits of an epoch and of a number."""

_EPOCH: Final = b"\x09nsq-epoch"
_NUMBER: Final = b"\x0ansq-number"
_LEAST: Final = len(PRODUCER + _EPOCH + _NUMBER) + 3 * 3
"""Bytes of a block with the three headers."""

Origin = tuple[str, int]
"""A producer's name and epoch."""
_origins: dict[bytes, Origin] = {}
"""By the bytes with which a block begins, up to the value of its number."""
Added = list[tuple[Producer, list[NumberRange]]]
"""Numbers that were noted as stored, before their messages are."""


class Run(NamedTuple):
    """Consecutive messages of a publish with consecutive numbers."""

    place: int
    """Index of the first message."""
    origin: Origin
    first: int
    end: int
    """The number after the last one."""


class Idempotence:
    """Knows the repeated messages of one topic."""

    def __init__(self, topic: Topic) -> None:
        options = topic.broker.options
        self._topic = topic
        self._seen = SeenNumbers(
            Window(options.producer_window_count, round(options.producer_window_time * 1e9))
        )
        self.repeated_count = 0
        """Repeated messages since the start."""
        self._position = topic.log.end
        """The file has all numbers before this."""
        self._captured: tuple[int, list[list[Any]]] | None = None
        """A position and the numbers before it, to be written once the disk has the log up to
        there."""
        self._captured_ns = topic.broker.monotonic_ns()
        self._is_writing = False
        self._file: StateFile | None = None
        """None for an ephemeral topic."""
        if topic.directory is not None:
            self._file = StateFile(topic.broker.files, topic.directory / PRODUCERS_FILE)

    # publishing

    def without_repeats(self, bodies: PackedBodies) -> tuple[PackedBodies, Added]:
        """The messages that are not stored yet, and their numbers, which count as stored from now
        on: see forget(). Raises NumberRefused, with nothing noted."""
        assert bodies.headers is not None
        runs = read_numbers(bodies.headers)
        now_ns = self._topic.broker.age_ns()
        added: dict[Origin, tuple[Producer, list[NumberRange]]] = {}
        for run in runs:
            try:
                if run.origin not in added:
                    added[run.origin] = self._seen.find(*run.origin, now_ns), []
                added[run.origin][0].check(run.first)
            except NumberRefused as error:
                error.index = run.place
                raise
        is_new = bytearray(b"\1") * len(bodies.lengths)
        for place, origin, first, end in runs:
            producer, ranges = added[origin]
            new = producer.add(first, end)
            ranges += new
            if new != [(first, end)]:
                is_new[place : place + end - first] = bytes(end - first)
                for start, stop in new:
                    is_new[place + start - first : place + stop - first] = b"\1" * (stop - start)
        for producer, _ in added.values():
            self._seen.tidy(producer, now_ns)
        if not all(is_new):
            self.repeated_count += is_new.count(0)
            blocks = PackedBodies.of(compress(bodies.headers[:], is_new))
            bodies = PackedBodies.of(compress(bodies[:], is_new)).with_blocks(blocks)
        return bodies, [*added.values()]

    def forget(self, added: Added) -> None:
        """The messages with these numbers are not stored, or it is not certain that they are. If
        they come again, they are stored: twice is better than never."""
        self._captured = None
        for producer, ranges in added:
            for start, end in ranges:
                producer.discard(start, end)

    # files

    def upkeep(self) -> None:
        """Have the file follow the log."""
        topic, log, broker = self._topic, self._topic.log, self._topic.broker
        if self._file is None:
            return
        # A log in memory may lose its messages anyway, and need not keep them for us.
        durability = topic.settings.applied_to(broker.log_settings).durability
        if durability is not Durability.MEMORY and log.end != self._position:
            topic.holds[self] = self._position
            broker.upkeep.note_changed(topic)
        else:
            topic.holds.pop(self, None)
        now_ns = broker.monotonic_ns()
        is_time = now_ns - self._captured_ns >= SAVE_INTERVAL_NS
        if is_time and not self._captured and log.end != self._position:
            # Numbers of this turn are noted, and their messages are not appended.
            topic.publishing.flush()
            self._captured = log.end, self._stored()
            self._captured_ns = now_ns
        if (
            self._captured
            and not self._is_writing
            and log.committed >= self._captured[0]
            and not log.doubtful
        ):
            self._write_later(self._file, *self._captured)
            self._captured = None

    def _write_later(self, file: StateFile, position: int, producers: list[list[Any]]) -> None:
        topic, version = self._topic, file.next_version()
        self._is_writing = True

        def write() -> None:
            file.write(self._encoded(position, producers), version, sync=False)

        def written(error: OSError | None) -> None:
            self._is_writing = False
            if topic.is_exiting:
                return
            if error is None:
                self._position = position
            text = None if error is None else f"{topic}: cannot write the numbers of its producers: {error}"
            topic.broker.health.set(text, f"producers {topic}")

        topic.broker.try_in_background(write, written)

    def save(self) -> None:
        """Write the file now. All messages that it knows must be on disk. Raises OSError."""
        if self._file is not None:
            position = self._topic.log.end
            self._file.write(self._encoded(position, self._stored()), self._file.next_version(), sync=False)
            self._position = position

    def _stored(self) -> list[list[Any]]:
        return [producer.stored() for producer in self._seen]

    def _encoded(self, position: int, producers: list[list[Any]]) -> bytes:
        fields = {"incarnation": self._topic.incarnation, "position": position, "producers": producers}
        # Begin with a line break, too: the line before may be torn.
        return b"\n" + encode_json(fields) + b"\n"

    def topic_deleted(self) -> None:
        """A write in progress must not end in the directory of a new topic."""
        if self._file is not None:
            self._file.next_version()

    def _restore(self, path: Path) -> None:
        """Read the file, and what the log has behind it."""
        topic, log, now_ns = self._topic, self._topic.log, self._topic.broker.age_ns()
        try:
            fields = read_json(topic.broker.files, path) or {}
            if fields["incarnation"] != topic.incarnation:
                raise ValueError("it belongs to another log")
            producers = [Producer.restored(stored, now_ns) for stored in fields["producers"]]
            position = int(fields["position"])
        except (ValueError, TypeError, KeyError) as error:
            topic.corrupt_files += 1
            logger.error("%s is damaged (%s): repeats are found in the log instead", path, error)
            producers = []
            window_ns = round(topic.broker.options.producer_window_time * 1e9)
            found = log.search_time(now_ns - window_ns)
            # A start does not wait for an archive.
            position = 0 if found.is_remote else found.run()
        for producer in producers:
            self._seen.put(producer)
        self._position = min(max(position, log.archived_end), log.end)
        self._read_log(self._position)

    def _read_log(self, since: int) -> bool:
        """Add the numbers that the log has from a position on. Gives whether there are any."""
        log, sequence, has_numbers = self._topic.log, since, False
        while sequence < log.end:
            found = log.locate(sequence, SEARCH_SIZE)
            for batch in iter_batches(found.read_verified().data):
                # Transactions and dead letters have tags: there the numbers mean nothing.
                if batch.headers is None or batch.tag or batch.base < since:
                    continue
                blocks = PackedBodies.of(batch.blocks())
                for run in read_numbers(blocks) if PRODUCER in blocks.data else ():
                    has_numbers = True
                    self._add_stored(run, batch.timestamp_ns)
            sequence = found.next
        if has_numbers:
            # After a crash they may be nowhere but in the system's memory. Repeats are acknowledged
            # without another write.
            log.sync_since(since)
        return has_numbers

    def _add_stored(self, run: Run, stored_ns: int) -> None:
        try:
            producer = self._seen.find(*run.origin, stored_ns)
        except NumberRefused:
            return
        producer.add(run.first, run.end)
        self._seen.tidy(producer, stored_ns)


def begin(topic: Topic) -> Idempotence:
    """The first message with a number comes to a topic. From now on there is a file, so that the
    next start looks for numbers in the log. Raises OSError."""
    if topic.idempotence is None:
        idempotence = Idempotence(topic)
        idempotence.save()
        topic.idempotence = idempotence
    return topic.idempotence


def load_producers(topic: Topic) -> None:
    """Restore what an earlier run knew of the topic's producers."""
    assert topic.directory is not None
    if PRODUCERS_FILE in topic.broker.files.list_directory(topic.directory):
        topic.idempotence = Idempotence(topic)
        topic.idempotence._restore(topic.directory / PRODUCERS_FILE)
    elif not topic.checkpoint.is_clean:
        # The first numbers may have come just before a power cut, and the file's name did not reach
        # the disk.
        idempotence = Idempotence(topic)
        if idempotence._read_log(_recent(topic.log)):
            topic.idempotence = idempotence
            idempotence.save()


def _recent(log: Log) -> int:
    """Where the last segment begins, or one before it if they are small. A start does not wait for
    an archive."""
    start, size = log.end, 0
    for segment in reversed(log.sealed_segments()):
        if size >= SEARCH_SIZE:
            return start
        if not segment.is_local:
            return segment.end
        start = segment.end
        size += segment.size
    return log.start


def read_numbers(blocks: PackedBodies) -> list[Run]:
    """The numbers of messages, from their header blocks. Raises NumberRefused."""
    data, lengths = blocks.data, blocks.lengths
    runs: list[Run] = []
    index = start = 0
    while index < len(lengths):
        end = start + lengths[index]
        # How the block begins, up to the value of its number.
        known = data[start : _before_number(data, start, end)]
        origin = _origins.get(known)
        if origin is not None:
            count, first, behind = (kernel.count_numbers or count_numbers)(lengths, data, index, start, known)
            if count:
                runs.append(Run(index, origin, first, first + count))
                index, start = index + count, behind
                continue
        try:
            found = _read_block(data[start:end])
        except ValueError as error:
            refused = NumberRefused("BAD_MESSAGE", str(error))
            refused.index = index
            raise refused from None
        if found is not None:
            runs.append(Run(index, found[0], found[1], found[1] + 1))
        index, start = index + 1, end
    return runs


def count_numbers(
    lengths: array[int], data: bytes, index: int, start: int, known: bytes
) -> tuple[int, int, int]:
    """How many blocks, from number `index` at `start` on, begin with `known` and then have
    consecutive numbers; the first of these numbers, and the end of the last of these blocks."""
    first = count = 0
    for place in range(index, len(lengths)):
        value, end = start + len(known) + 2, start + lengths[place]
        if value >= end or not data.startswith(known, start):
            break
        digits = data[value : value + data[value - 1]]
        if not digits.isdigit() or len(digits) > MAX_DIGITS or data[value - 2]:
            break
        number = int(digits)
        if count and number != first + count:
            break
        first = first if count else number
        start, count = end, count + 1
    return count, first, start


def _before_number(data: bytes, start: int, end: int) -> int:
    """Where the value of the number begins, if the three headers come first; else any position in
    the block."""
    if end - start < _LEAST:
        return end
    epoch = start + len(PRODUCER) + 2 + data[start + len(PRODUCER) + 1]
    number = epoch + len(_EPOCH) + 2
    return min(end, number + data[number - 1] + len(_NUMBER) if number <= end else end)


def _read_block(block: bytes) -> tuple[Origin, int] | None:
    """The origin and number of a message, wherever they are in its block. Raises ValueError."""
    # Without the second look, it may be in a value.
    if PRODUCER not in block or ORIGIN[0] not in (headers := decode_headers(block)):
        return None
    origin = _producer_of(headers), _number_of(headers, ORIGIN[1])
    number = _number_of(headers, ORIGIN[2])
    if [*headers][:3] == [*ORIGIN]:
        if len(_origins) >= MAX_KNOWN:
            _origins.clear()
        before = encode_headers({name: headers[name] for name in ORIGIN[:2]})
        _origins[before + _NUMBER] = origin
    return origin, number


def _producer_of(headers: dict[str, str]) -> str:
    name = headers["nsq-producer"]
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"nsq-producer must have 1 to {MAX_NAME} characters")
    return name


def _number_of(headers: dict[str, str], name: str) -> int:
    text = headers.get(name)
    if text is None:
        raise ValueError(f"a message with nsq-producer needs {name}")
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ValueError(f"{name} must be a whole number of at most {MAX_DIGITS} digits, not {text[:40]!r}")
    return int(text)
