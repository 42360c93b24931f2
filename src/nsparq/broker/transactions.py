"""Transactions: messages of any topics, staged by several writers, published all or none, and once.

A transaction is named by a producer and a sequence number that only grows, a pipeline's query and its batch
say. Of each producer the highest committed number is kept: whatever is not higher has been committed, so that
a producer that does not know whether it was heard just says it again.

On disk, in transactions/<producer>.producer/:

    owner.json         who may use the producer's name, where nsqd is guarded
    committed.json     the last commit
    <sequence>/        a transaction that is open
        <part>.part    what one writer has staged
        promise.json   the parts that it is to consist of, with the chunks of each; from the decision on also
                       its tag, and where each topic's log then ended; what turned out to be damaged

The decision is on disk before the first message is appended, and the commit after the last. After a crash in
between the tags in the logs tell which messages are there already, and the others are appended then. Until
that is done no log lets go of what came after the decision, and no later transaction of the producer is
decided.

A staged message that cannot be read any more is lost, and its transaction is *damaged*. If it was decided,
everything else of it is published. It counts as committed only when an operator has accepted the loss.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nsparq.errors import CorruptBatch, NsparqError
from nsparq.packed import PackedBodies
from nsparq.storage.batch import decode_head
from nsparq.storage.files import Files
from nsparq.storage.log import Durability, Log
from nsparq.storage.staging import Chunk, Part
from nsparq.storage.state_files import read_json, write_json

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker

logger = logging.getLogger(__name__)

FOLDER: Final = "transactions"
PRODUCER_SUFFIX: Final = ".producer"
PART_SUFFIX: Final = ".part"
TRASH_SUFFIX: Final = ".deleted"
PROMISE: Final = "promise.json"
COMMITTED: Final = "committed.json"
OWNER: Final = "owner.json"
UNKNOWN_OWNER: Final = "\0unknown"
"""Nobody's identity: an owner that cannot be read must not become the first who asks."""
MIN_REQUEST: Final = 16 << 10
"""What a request that stages little counts as: each has an entry in memory, and each part a file."""
MAX_TAG: Final = (1 << 16) - 1
TAG_SEARCH_SIZE: Final = 4 << 20
NAME: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Of a producer or a part."""


class AlreadyCommitted(NsparqError):
    """There is nothing left to do for this transaction."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"committed up to {sequence}")
        self.sequence = sequence


class Incomplete(NsparqError):
    """What the transaction should consist of is not what has been staged."""


class Unfinished(NsparqError):
    """Another transaction of the producer is decided and not wholly published: it comes first."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(f"{transaction} is not finished")
        self.transaction = transaction


class Damaged(NsparqError):
    """Messages of the transaction are lost, and no operator has accepted that."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(f"{transaction}: {transaction.lost_messages} staged messages are damaged or missing")
        self.transaction = transaction


class StagingFull(NsparqError):
    """As much is staged as the flags allow."""

    def __init__(self, limit: int, *, is_producers: bool) -> None:
        whose = "the producer" if is_producers else "all producers"
        super().__init__(f"the staged messages of {whose} may take {limit} bytes")
        self.limit = limit
        self.is_producers = is_producers
        """Whether it is the producer's own: then nobody else's commit makes room."""


class PartSealed(NsparqError):
    """The part has been promised as it is."""


class WrongPosition(NsparqError):
    """The part does not hold as many messages as the writer takes it to."""

    def __init__(self, messages: int) -> None:
        super().__init__(f"the part holds {messages} messages")
        self.messages = messages


class Decision(NamedTuple):
    """That a transaction is committed, and what must be known to finish that after a crash."""

    tag: int
    topics: dict[str, tuple[str, int]]
    """Incarnation and end of each topic's log when it was taken."""


class Committed(NamedTuple):
    """A producer's last commit."""

    sequence: int = -1
    messages: int = 0
    until_ns: int = 0
    """When it may be forgotten."""
    note: str = ""
    lost: int = 0
    """Staged messages that were damaged and could not be published."""


class Transaction:
    """One that is not committed yet, or not wholly."""

    def __init__(self, broker: Broker, producer: Producer, sequence: int) -> None:
        self._broker = broker
        self.producer = producer
        self.sequence = sequence
        self.directory = producer.directory / str(sequence)
        self.parts: dict[str, Part] = {}
        self.promised: list[str] | None = None
        """The parts that it is to consist of, in this order."""
        self.note = ""
        """Whatever the producer wanted to be told again with the promise."""
        self.decision: Decision | None = None
        self.present: dict[str, int] = {}
        """Messages of each topic that its log has already, and that are not to be appended again."""
        self.applied = 0
        """Chunks done with."""
        self.lost: dict[int, int] = {}
        """Chunks that cannot be read, by number, and how many messages of each are not in the log."""
        self.is_published = False
        """Whether everything but what is lost is in the logs, as durable as configured."""
        self.touch()

    def touch(self) -> None:
        """Somebody has asked for something."""
        self.touched_ns = self._broker.monotonic_ns()
        self.touched_wall_ns = self._broker.wall_ns()
        """The same moment, to be shown."""

    @property
    def topics(self) -> set[str]:
        return {chunk.topic for chunk in self.all_chunks()}

    @property
    def chunks(self) -> list[Chunk]:
        """What it consists of, in the order in which it is published."""
        return [chunk for name in self.promised or () for chunk in self.parts[name].chunks]

    def all_chunks(self) -> Iterator[Chunk]:
        """What is staged, whether it is promised or not."""
        for part in self.parts.values():
            yield from part.chunks

    @property
    def messages(self) -> int:
        """Promised, or else staged."""
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
        """Whether any of its messages must be on disk before their publisher is answered."""
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

    def write_promise(self, *, sync: bool) -> None:
        """May be called in any thread, while nothing else happens to the transaction. Raises OSError."""
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
            self.producer.write_owner(files, sync=True)
        if not promised:
            files.make_directory(self.directory)
        if sync:
            # The parts' names come first, too: a promise must not be there without them. Nor must a decision
            # without the topics whose incarnations it names.
            files.sync_names(self.directory)
            for name in self.decision.topics if self.decision is not None else ():
                files.sync_written(self._broker.data_path.topic_directory(name))
        _write(self._broker, self.directory / PROMISE, fields, str(self), sync=sync)

    def load(self) -> None:
        """Take up what an earlier run has left."""
        files = self._broker.files
        promise = _read(self._broker, self.directory / PROMISE, str(self))
        if promise is not None:
            self._load_promise(promise)
        for file_name in files.list_directory(self.directory):
            name = file_name.removesuffix(PART_SUFFIX)
            if file_name.endswith(PART_SUFFIX) and name not in self.parts:
                part = self.parts[name] = Part(files, self.directory / file_name)
                part.load()
        for name in self.promised or ():
            if name not in self.parts:
                # Written before promises listed their chunks: how many messages there were is not known.
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

    def part_path(self, name: str) -> Path:
        return self.directory / (name + PART_SUFFIX)

    def _check_promised(self) -> None:
        """Find out at once what cannot be committed as it was promised."""
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
        return count_tagged(topic.log, self.decision.tag, end)

    def __str__(self) -> str:
        return f"transaction {self.producer.name}/{self.sequence}"


class Producer:
    """Whose transactions follow each other."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.directory = folder / (name + PRODUCER_SUFFIX)
        self.committed = Committed()
        self.owner: str | None = None
        """The identity that alone may use this name, once it has been used where nsqd is guarded."""
        self.is_owner_synced = False
        self.staged = 0
        """Bytes, as max_staged_bytes_per_producer counts them."""
        self.open: dict[int, Transaction] = {}

    def write_owner(self, files: Files, *, sync: bool) -> None:
        """May be called in any thread. Raises OSError."""
        files.make_directory(self.directory)
        fields = {"identity": self.owner, "about": self.name}
        write_json(files, self.directory / OWNER, fields, sync=sync)
        self.is_owner_synced = sync

    def decided(self) -> Transaction | None:
        """The first transaction that is decided and not finished."""
        return min(
            (transaction for transaction in self.open.values() if transaction.decision is not None),
            key=lambda transaction: transaction.sequence,
            default=None,
        )


class Transactions:
    """All of a broker's. What takes long, writing a promise and reading chunks, the caller does in a thread;
    one commit, prepare or abort at a time for each producer."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._folder = broker.data_path.path / FOLDER
        self.producers: dict[str, Producer] = {}
        self._tag = 0
        self._trash_count = 0
        self.committed_count = 0
        self.aborted_count = 0
        self.expired_count = 0
        self.staged = 0
        """Bytes, as max_staged_bytes counts them."""
        self.lost_messages = 0
        """Staged, and damaged when they were to be published."""

    def load(self) -> None:
        """Take up what an earlier run has left; topics have been loaded."""
        files = self._broker.files
        for name in files.list_directory(self._folder):
            if name.endswith(PRODUCER_SUFFIX):
                self._load_producer(Producer(name.removesuffix(PRODUCER_SUFFIX), self._folder))
            elif name.endswith(TRASH_SUFFIX):
                files.remove_tree(self._folder / name)

    def _load_producer(self, producer: Producer) -> None:
        files = self._broker.files
        committed = _read(self._broker, producer.directory / COMMITTED, producer.name)
        if committed is not None:
            producer.committed = Committed(**committed)
        if files.read_whole(producer.directory / OWNER) is not None:
            owner = _read(self._broker, producer.directory / OWNER, producer.name)
            producer.owner = UNKNOWN_OWNER if owner is None else owner["identity"]
        for name in files.list_directory(producer.directory):
            if not name.isdigit():
                continue
            transaction = Transaction(self._broker, producer, int(name))
            if transaction.sequence <= producer.committed.sequence:
                files.remove_tree(transaction.directory)
                continue
            transaction.load()
            producer.open[transaction.sequence] = transaction
            self._count_staged(transaction, sum(map(_weight, transaction.all_chunks())))
        self.producers[producer.name] = producer

    def _all_open(self) -> Iterator[Transaction]:
        for producer in self.producers.values():
            yield from producer.open.values()

    def undecided_count(self) -> int:
        return sum(transaction.decision is None for transaction in self._all_open())

    def staged_bytes(self) -> int:
        return sum(transaction.size_bytes for transaction in self._all_open())

    def unfinished(self) -> list[Transaction]:
        """Those that have been decided upon and can be finished by trying again."""
        return [
            transaction
            for transaction in self._all_open()
            if transaction.decision is not None and not transaction.is_published
        ]

    def damaged(self) -> list[Transaction]:
        """Those that wait for an operator."""
        return [transaction for transaction in self._all_open() if transaction.lost_messages]

    # a transaction's life

    def find(self, name: str, sequence: int) -> Transaction | None:
        """The transaction if it is known and not committed. Raises AlreadyCommitted, also if a later one of
        the producer has been decided."""
        producer = self.producers.get(name)
        if producer is None:
            return None
        transaction = producer.open.get(sequence)
        if sequence <= producer.committed.sequence:
            raise AlreadyCommitted(producer.committed.sequence)
        decided = producer.decided()
        is_decided = transaction is not None and transaction.decision is not None
        if decided is not None and sequence < decided.sequence and not is_decided:
            raise AlreadyCommitted(decided.sequence)
        return transaction

    def stage(
        self,
        name: str,
        sequence: int,
        part_name: str,
        topic: str,
        bodies: PackedBodies,
        *,
        defer_ms: int = 0,
        at: int | None = None,
        owner: str | None = None,
    ) -> int:
        """Put messages aside; gives the number of them in the part. If it is told `at` which number they are
        to begin, they begin there or not at all. Raises AlreadyCommitted, PartSealed, WrongPosition,
        StagingFull or OSError, with nothing staged."""
        transaction = self.find(name, sequence)
        part = None if transaction is None else transaction.parts.get(part_name)
        if transaction is not None and transaction.decision is not None:
            raise AlreadyCommitted(sequence)
        if transaction is not None and part_name in (transaction.promised or ()):
            raise PartSealed(part_name)
        held = 0 if part is None else part.messages
        if at is not None and at != held:
            raise WrongPosition(held)
        self._check_room(name, len(bodies.data))
        transaction = transaction or self._begin(name, sequence)
        self._claim(transaction.producer, owner)
        if part is None:
            self._broker.files.make_directory(transaction.directory)
            part = Part(self._broker.files, transaction.part_path(part_name))
        part.append(topic, bodies, defer_ms)
        transaction.parts[part_name] = part
        self._count_staged(transaction, _weight(part.chunks[-1]))
        transaction.touch()
        return part.messages

    def _check_room(self, name: str, size: int) -> None:
        options, producer = self._broker.options, self.producers.get(name)
        size = max(size, MIN_REQUEST)
        if producer is not None and producer.staged + size > options.max_staged_bytes_per_producer:
            raise StagingFull(options.max_staged_bytes_per_producer, is_producers=True)
        if self.staged + size > options.max_staged_bytes:
            raise StagingFull(options.max_staged_bytes, is_producers=False)

    def _count_staged(self, transaction: Transaction, size: int) -> None:
        transaction.producer.staged += size
        self.staged += size

    def _begin(self, name: str, sequence: int) -> Transaction:
        producer = self.producers.get(name)
        if producer is None:
            producer = self.producers[name] = Producer(name, self._folder)
        transaction = producer.open[sequence] = Transaction(self._broker, producer, sequence)
        return transaction

    def _claim(self, producer: Producer, owner: str | None) -> None:
        """The first identity to use a producer's name owns it. Raises OSError."""
        if owner is not None and producer.owner is None:
            producer.owner = owner
            try:
                producer.write_owner(self._broker.files, sync=False)
            except OSError:
                producer.owner = None
                raise

    def is_owner(self, name: str, identity: str | None) -> bool:
        """Whether this identity may use the producer's name."""
        producer = self.producers.get(name)
        return producer is None or producer.owner is None or producer.owner == identity

    def disown(self, name: str) -> None:
        """Have the producer's name belong to whoever uses it next. Raises OSError."""
        producer = self.producers.get(name)
        if producer is not None:
            self._broker.files.unlink(producer.directory / OWNER)
            producer.owner = None

    def promise(
        self,
        name: str,
        sequence: int,
        parts: Mapping[str, int],
        note: str = "",
        *,
        owner: str | None = None,
    ) -> Transaction:
        """Settle what the transaction consists of; write_promise() makes that last. Raises AlreadyCommitted,
        or Incomplete or OSError with nothing changed."""
        transaction = self.find(name, sequence)
        if transaction is not None and transaction.decision is not None:
            raise AlreadyCommitted(sequence)
        staged = {} if transaction is None else transaction.parts
        for part_name, count in parts.items():
            held = staged[part_name].messages if part_name in staged else 0
            if held != count:
                raise Incomplete(f"part {part_name} has {held} messages and should have {count}")
        transaction = transaction or self._begin(name, sequence)
        self._claim(transaction.producer, owner)
        transaction.promised = [part_name for part_name, count in parts.items() if count]
        transaction.note = note
        transaction.lost = {}
        transaction.touch()
        return transaction

    def decide(self, transaction: Transaction, *, accept_loss: bool = False) -> None:
        """From the moment at which write_promise() has made this last, the transaction is committed. Raises
        Incomplete if nothing has been promised, Unfinished if another one comes first, Damaged unless the
        loss is accepted; OSError or Exiting if a topic cannot be created."""
        if transaction.promised is None:
            raise Incomplete("nothing has been prepared")
        other = transaction.producer.decided()
        if other is not None:
            raise Unfinished(other)
        if transaction.lost and not accept_loss:
            raise Damaged(transaction)
        names = {
            chunk.topic for index, chunk in enumerate(transaction.chunks) if index not in transaction.lost
        }
        topics = [self._broker.get_topic(name) for name in names]
        for topic in topics:
            topic.holds[transaction] = topic.log.end
        ends = {topic.name: (topic.incarnation, topic.log.end) for topic in topics}
        transaction.decision = Decision(self._next_tag(), ends)

    def _next_tag(self) -> int:
        """One that no transaction uses that is being committed: they are few at a time."""
        used = {other.decision.tag for other in self._all_open() if other.decision is not None}
        while True:
            self._tag = self._tag % MAX_TAG + 1
            if self._tag not in used:
                return self._tag

    def revoke(self, transaction: Transaction) -> None:
        """The decision did not reach the disk: there is none."""
        transaction.decision = None
        self.release(transaction)

    def apply(self, transaction: Transaction, chunk: Chunk, bodies: PackedBodies) -> None:
        """Publish the next chunk. Raises StorageError, OSError or Exiting, with nothing of it published."""
        assert transaction.decision is not None
        skipped = min(transaction.present.get(chunk.topic, 0), chunk.messages)
        if skipped < chunk.messages:
            broker = self._broker
            topic = broker.get_topic(chunk.topic)
            topic.holds.setdefault(transaction, topic.log.end)
            missing = bodies.without_first(skipped) if skipped else bodies
            topic.publishing.append_tagged(missing, chunk.defer_ms * 1_000_000, transaction.decision.tag)
        if skipped:
            transaction.present[chunk.topic] -= skipped
        transaction.applied += 1

    def lose(self, transaction: Transaction, chunk: Chunk, error: Exception) -> None:
        """Note that the next chunk cannot be read; write_promise() makes that last."""
        # What was published of it before it was damaged is not lost.
        lost = chunk.messages - min(transaction.present.get(chunk.topic, 0), chunk.messages)
        transaction.lost[transaction.applied] = lost
        logger.error("%s: %d staged messages are lost: %s", transaction, lost, error)

    def pass_over(self, transaction: Transaction, chunk: Chunk) -> None:
        """Go on behind a chunk that is lost, once that is on disk."""
        lost = transaction.lost[transaction.applied]
        if lost < chunk.messages:
            transaction.present[chunk.topic] -= chunk.messages - lost
        self.lost_messages += lost
        transaction.applied += 1

    def write_committed(self, transaction: Transaction, *, sync: bool, remember_s: float) -> Committed:
        """The last step but one; may be called in any thread. Raises OSError."""
        until_ns = self._broker.wall_ns() + round(remember_s * 1e9)
        lost = transaction.lost_messages
        published = transaction.messages - lost
        committed = Committed(transaction.sequence, published, until_ns, transaction.note, lost)
        path = transaction.producer.directory / COMMITTED
        _write(self._broker, path, committed._asdict(), transaction.producer.name, sync=sync)
        return committed

    def finish(self, transaction: Transaction, committed: Committed) -> None:
        """The last step. What the producer had begun before it goes too: it can never be committed."""
        producer = transaction.producer
        producer.committed = committed
        self.committed_count += 1
        for sequence in [number for number in producer.open if number <= committed.sequence]:
            self._drop(producer.open[sequence])

    def abort(self, name: str, sequence: int) -> None:
        """Forget what was staged, if anything. Raises AlreadyCommitted."""
        transaction = self.find(name, sequence)
        if transaction is None:
            return
        if transaction.decision is not None:
            raise AlreadyCommitted(sequence)
        self.aborted_count += 1
        self._drop(transaction)

    def expire(self) -> None:
        """Drop what nobody has touched for too long, and forget producers that have not been heard of."""
        options, now_ns = self._broker.options, self._broker.monotonic_ns()
        for transaction in [*self._all_open()]:
            is_promised = transaction.promised is not None
            limit_s = options.transaction_retention if is_promised else options.transaction_timeout
            if transaction.decision is None and now_ns - transaction.touched_ns > limit_s * 1e9:
                logger.warning("%s: nothing has been heard of it for %.0f s: dropped", transaction, limit_s)
                self.expired_count += 1
                self._drop(transaction)
        age_ns = self._broker.age_ns()
        for producer in [*self.producers.values()]:
            if not producer.open and age_ns > producer.committed.until_ns:
                del self.producers[producer.name]
                self._throw_away(producer.directory)

    def _drop(self, transaction: Transaction) -> None:
        self.release(transaction)
        self._count_staged(transaction, -sum(map(_weight, transaction.all_chunks())))
        self._broker.health.set(None, str(transaction))
        del transaction.producer.open[transaction.sequence]
        self._throw_away(transaction.directory)

    def release(self, transaction: Transaction) -> None:
        """Let go of the logs: nobody needs to search them for it any more."""
        for topic in self._broker.topics.values():
            topic.holds.pop(transaction, None)

    def _throw_away(self, directory: Path) -> None:
        """Out of the way at once, removed when there is time: another of the same name may come."""
        self._trash_count += 1
        trash = self._folder / f"{self._broker.wall_ns()}.{self._trash_count}{TRASH_SUFFIX}"
        files = self._broker.files
        try:
            files.rename(directory, trash)
        except FileNotFoundError:
            return
        self._broker.upkeep.remove(trash.name, lambda: files.remove_tree(trash))


def count_tagged(log: Log, tag: int, since: int) -> int:
    """Messages with this tag, from a sequence number on. May wait for the disk."""
    count, sequence = 0, max(since, log.start)
    while sequence < log.end:
        found = log.locate(sequence, TAG_SEARCH_SIZE)
        data, position = found.read_verified().data, 0
        while (head := decode_head(data, position)) is not None:
            if head.tag == tag and head.base >= since:
                count += head.count
            position += head.size
        sequence = found.next
    return count


def _weight(chunk: Chunk) -> int:
    return max(chunk.size, MIN_REQUEST)


def _write(broker: Broker, path: Path, fields: dict[str, Any], subject: str, *, sync: bool) -> None:
    """`subject` is whom the file is about: one that has got to another's place is not believed."""
    write_json(broker.files, path, {**fields, "about": subject}, sync=sync)


def _read(broker: Broker, path: Path, subject: str) -> dict[str, Any] | None:
    try:
        fields = read_json(broker.files, path)
        if fields is not None and fields.pop("about", subject) != subject:
            raise ValueError("it is about another")
    except ValueError as error:
        broker.corrupt_files += 1
        logger.error("%s cannot be understood (%s): as if it were not there", path, error)
        return None
    return fields
