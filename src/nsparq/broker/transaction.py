"""One transaction of a producer, and its files.

In transactions/<producer>.producer/:

    owner.json         the identity that may use the producer's name, if nsqd has access control
    committed.json     the last commit
    <sequence>/        an open transaction
        <part>.part    the messages that one writer staged
        promise.json   the promised parts with their chunks; after the decision also the tag and
                       the end of each topic's log at that time; damaged chunks
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nsparq.broker.tagged import SEARCH_SIZE, count_tagged
from nsparq.errors import CorruptBatch, NsparqError
from nsparq.storage.checked_json import read_json, write_json
from nsparq.storage.log import Durability
from nsparq.storage.log_range import LogRange
from nsparq.storage.staging import Chunk, Part

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker

logger = logging.getLogger(__name__)

PRODUCER_SUFFIX: Final = ".producer"
PART_SUFFIX: Final = ".part"
PROMISE: Final = "promise.json"
COMMITTED: Final = "committed.json"
OWNER: Final = "owner.json"
UNKNOWN_OWNER: Final = "\0unknown"
"""Owner of a producer whose owner file is unreadable. It is nobody's identity, so that the first
one to ask does not become the owner."""


class AlreadyCommitted(NsparqError):
    """This transaction, or a later one of the producer, is committed."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"committed up to {sequence}")
        self.sequence = sequence


class Incomplete(NsparqError):
    """The staged messages are not what the transaction should consist of."""


class Unfinished(NsparqError):
    """Another transaction of the producer is decided but not wholly published. It comes first."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(f"{transaction} is not finished")
        self.transaction = transaction


class Damaged(NsparqError):
    """Messages of the transaction are lost, and no operator has accepted the loss."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(f"{transaction}: {transaction.lost_messages} staged messages are damaged or missing")
        self.transaction = transaction


class StagingFull(NsparqError):
    """The staged messages take as many bytes as the flags allow."""

    def __init__(self, limit: int, *, is_producers: bool) -> None:
        whose = "the producer" if is_producers else "all producers"
        super().__init__(f"the staged messages of {whose} may take {limit} bytes")
        self.limit = limit
        self.is_producers = is_producers
        """Whether the producer's own limit is reached. Then only its own commits make room."""


class PartSealed(NsparqError):
    """The part was promised, and takes no more messages."""


class WrongPosition(NsparqError):
    """The part does not hold the number of messages that the writer expects."""

    def __init__(self, messages: int) -> None:
        super().__init__(f"the part holds {messages} messages")
        self.messages = messages


class Decision(NamedTuple):
    """A transaction is committed. Holds what a restart needs to finish it after a crash."""

    tag: int
    topics: dict[str, tuple[str, int]]
    """Incarnation and end of each topic's log at the time of the decision."""


class Committed(NamedTuple):
    """A producer's last commit."""

    sequence: int = -1
    messages: int = 0
    until_ns: int = 0
    """When it may be forgotten."""
    note: str = ""
    lost: int = 0
    """Staged messages that were damaged and not published."""


class Transaction:
    """A transaction that is not committed, or not wholly published."""

    def __init__(self, broker: Broker, producer: Producer, sequence: int) -> None:
        self._broker = broker
        self.producer = producer
        self.sequence = sequence
        self.directory = producer.directory / str(sequence)
        self.parts: dict[str, Part] = {}
        self.promised: list[str] | None = None
        """Names of the parts that it consists of, in order. None until it is prepared."""
        self.note = ""
        """Text of the producer, given back with the promise."""
        self.decision: Decision | None = None
        self.present: dict[str, int] = {}
        """By topic, messages that are in the log already and must not be appended again."""
        self.uncounted: dict[str, tuple[int, int]] = {}
        """By topic, the part of the log in which such messages have still to be counted, because it
        is only in an archive. A start does not wait for that."""
        self.applied = 0
        """Number of chunks that are published, or skipped because they are lost."""
        self.lost: dict[int, int] = {}
        """Numbers of unreadable chunks, and how many messages of each are not in the log."""
        self.is_published = False
        """Whether everything that is not lost is in the logs, as durable as configured."""
        self.touch()

    def touch(self) -> None:
        """Note that a request came for this transaction."""
        self.touched_ns = self._broker.monotonic_ns()
        self.touched_wall_ns = self._broker.wall_ns()
        """The same moment, for display."""

    @property
    def topics(self) -> set[str]:
        return {chunk.topic for chunk in self.all_chunks()}

    @property
    def chunks(self) -> list[Chunk]:
        """The promised chunks, in the order in which they are published."""
        return [chunk for name in self.promised or () for chunk in self.parts[name].chunks]

    def all_chunks(self) -> Iterator[Chunk]:
        """All staged chunks, promised or not."""
        for part in self.parts.values():
            yield from part.chunks

    @property
    def messages(self) -> int:
        """Number of promised messages; of staged ones before it is prepared."""
        names = self.parts if self.promised is None else self.promised
        return sum(self.parts[name].messages for name in names)

    @property
    def size_bytes(self) -> int:
        return sum(part.size for part in self.parts.values())

    @property
    def lost_messages(self) -> int:
        return sum(self.lost.values())

    @property
    def is_synchronous(self) -> bool:
        """Whether any of its messages must be on disk before the publisher gets an answer."""
        broker = self._broker
        known = (broker.topics.get(name) for name in self.topics)
        default = broker.log_settings.durability is Durability.FSYNC
        return any(default if topic is None else topic.is_synchronous for topic in known)

    @property
    def state(self) -> str:
        if self.lost_messages:
            return "damaged"
        if self.decision is not None:
            return "committing"
        return "open" if self.promised is None else "prepared"

    def part_path(self, name: str) -> Path:
        return self.directory / (name + PART_SUFFIX)

    def __str__(self) -> str:
        return f"transaction {self.producer.name}/{self.sequence}"

    # on disk

    def write_promise(self, *, sync: bool) -> None:
        """Any thread may call this, while nothing else uses the transaction. Raises OSError."""
        promised = self.promised or []
        fields: dict[str, Any] = {"parts": promised, "note": self.note}
        fields["chunks"] = [self.parts[name].rows() for name in promised]
        if self.decision is not None:
            fields |= self.decision._asdict()
        if self.lost:
            fields["lost"] = [*self.lost.items()]
            fields["published"] = self.is_published
        else:
            for name in promised:
                self.parts[name].sync(now=sync)
        files = self._broker.files
        if sync and self.producer.owner is not None and not self.producer.is_owner_synced:
            self.producer.write_owner(self._broker, sync=True)
        if not promised:
            files.make_directory(self.directory)
        if sync:
            # A promise must not be on disk without its parts, nor a decision without the topics
            # whose incarnations it names.
            files.sync_names(self.directory)
            for name in self.decision.topics if self.decision is not None else ():
                files.sync_written(self._broker.data_path.topic_directory(name))
        write_record(self._broker, self.directory / PROMISE, fields, str(self), sync=sync)

    def load(self) -> None:
        """Read what an earlier run left."""
        files = self._broker.files
        promise = read_record(self._broker, self.directory / PROMISE, str(self))
        if promise is not None:
            self._load_promise(promise)
        for file_name in files.list_directory(self.directory):
            name = file_name.removesuffix(PART_SUFFIX)
            if file_name.endswith(PART_SUFFIX) and name not in self.parts:
                part = self.parts[name] = Part(files, self.directory / file_name)
                part.load()
        for name in self.promised or ():
            if name not in self.parts:
                # Old promises do not list their chunks. The number of messages is not known.
                self.parts[name] = part = Part(files, self.part_path(name))
                part.restore([(0, "", 1, 0)])
        if self.decision is None:
            self._check_promised()

    def _load_promise(self, promise: dict[str, Any]) -> None:
        self.promised, self.note = promise["parts"], promise["note"]
        for name, rows in zip(promise["parts"], promise.get("chunks", ()), strict=False):
            part = self.parts[name] = Part(self._broker.files, self.part_path(name))
            part.restore(rows)
        self.lost = dict(promise.get("lost", ()))
        self.is_published = promise.get("published", False)
        if "tag" in promise:
            topics = {name: (incarnation, end) for name, (incarnation, end) in promise["topics"].items()}
            self.decision = Decision(promise["tag"], topics)
            if not self.is_published:
                self.present = {name: self._count_present(name) for name in topics}

    def _check_promised(self) -> None:
        """Find promised chunks that cannot be read, before anybody tries to commit them."""
        for index, chunk in enumerate(self.chunks):
            try:
                chunk.read(self._broker.files)
            except (CorruptBatch, OSError) as error:
                logger.error("%s: %d staged messages are lost: %s", self, chunk.messages, error)
                self.lost[index] = chunk.messages

    def _count_present(self, name: str) -> int:
        assert self.decision is not None
        incarnation, end = self.decision.topics[name]
        topic = self._broker.topics.get(name)
        if topic is None or topic.incarnation != incarnation:
            return 0
        topic.holds[self] = end
        local = topic.log.archived_end
        if end < local:
            self.uncounted[name] = end, local
        return count_tagged(topic.log, self.decision.tag, max(end, local))

    def locate_uncounted(self, name: str) -> LogRange | None:
        """What is to be read next, to count the messages that are in the log of a topic. None if
        that is done, or the topic was deleted meanwhile."""
        topic = self._broker.topics.get(name)
        start, end = self.uncounted[name]
        if self.decision is None or topic is None or topic.incarnation != self.decision.topics[name][0]:
            return None
        return topic.log.locate(max(start, topic.log.start), SEARCH_SIZE) if start < end else None

    def count(self, name: str, place: LogRange, messages: int) -> None:
        """So many messages were found in what locate_uncounted() gave."""
        self.present[name] += messages
        self.uncounted[name] = place.next, self.uncounted[name][1]


class Producer:
    """The owner of a sequence of transactions."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.directory = folder / (name + PRODUCER_SUFFIX)
        self.committed = Committed()
        self.owner: str | None = None
        """The only identity that may use this name, once one used it under access control."""
        self.is_owner_synced = False
        self.staged = 0
        """Bytes, as max_staged_bytes_per_producer counts them."""
        self.open: dict[int, Transaction] = {}

    def write_owner(self, broker: Broker, *, sync: bool) -> None:
        """Any thread may call this. Raises OSError."""
        broker.files.make_directory(self.directory)
        write_record(broker, self.directory / OWNER, {"identity": self.owner}, self.name, sync=sync)
        self.is_owner_synced = sync

    def decided(self) -> Transaction | None:
        """The first transaction that is decided and not finished."""
        decided = [transaction for transaction in self.open.values() if transaction.decision is not None]
        return min(decided, key=lambda transaction: transaction.sequence, default=None)


def write_record(broker: Broker, path: Path, fields: dict[str, Any], subject: str, *, sync: bool) -> None:
    """`subject` names the producer or transaction, so that a misplaced file is not used."""
    write_json(broker.files, path, {**fields, "about": subject}, sync=sync)


def read_record(broker: Broker, path: Path, subject: str) -> dict[str, Any] | None:
    """What write_record() wrote. None if it is missing, damaged or about another subject."""
    try:
        fields = read_json(broker.files, path)
        if fields is not None and fields.pop("about", subject) != subject:
            raise ValueError("it belongs to another transaction")
    except ValueError as error:
        broker.corrupt_files += 1
        logger.error("%s is damaged and ignored: %s", path, error)
        return None
    return fields
