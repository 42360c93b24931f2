"""Transactions: messages of any topics, staged by several writers, published all or none, and once.

A transaction is named by a producer and a sequence number that only grows: a pipeline's query and
its batch, for instance. For each producer the highest committed number is kept. A lower or equal
number counts as committed, so a producer that missed the answer simply asks again.

The decision is on disk before the first message is appended, and the commit after the last. After
a crash in between, the tags in the logs tell which messages are there, and the others are appended
then. Until that is done no log drops messages from after the decision, and no later transaction of
the producer is decided.

A staged message that cannot be read any more is lost, and its transaction is *damaged*. If it was
decided, everything else of it is published. It counts as committed only when an operator has
accepted the loss.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nsparq.broker.tagged import MAX_TAG
from nsparq.broker.transaction import (
    COMMITTED,
    OWNER,
    PRODUCER_SUFFIX,
    UNKNOWN_OWNER,
    AlreadyCommitted,
    Committed,
    Damaged,
    Decision,
    Incomplete,
    PartSealed,
    Producer,
    StagingFull,
    Transaction,
    Unfinished,
    WrongPosition,
    read_record,
    write_record,
)
from nsparq.packed import PackedBodies
from nsparq.storage.staging import Chunk, Part

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker

logger = logging.getLogger(__name__)

FOLDER: Final = "transactions"
TRASH_SUFFIX: Final = ".deleted"
MIN_REQUEST: Final = 16 << 10
"""Bytes that a small request counts for: each takes an entry in memory, and each part a file."""
NAME: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Name of a producer or a part."""


class Transactions:
    """All transactions of a broker.

    The caller writes promises and reads chunks in a thread, because both may take long. It runs
    one commit, prepare, abort or disown at a time for each producer.
    """

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
        """Staged messages that were damaged and not published."""

    def load(self) -> None:
        """Read what an earlier run left. The topics must be loaded."""
        files = self._broker.files
        for name in files.list_directory(self._folder):
            if name.endswith(PRODUCER_SUFFIX):
                self._load_producer(Producer(name.removesuffix(PRODUCER_SUFFIX), self._folder))
            elif name.endswith(TRASH_SUFFIX):
                files.remove_tree(self._folder / name)

    def _load_producer(self, producer: Producer) -> None:
        files = self._broker.files
        committed = read_record(self._broker, producer.directory / COMMITTED, producer.name)
        if committed is not None:
            producer.committed = Committed(**committed)
        if files.read_whole(producer.directory / OWNER) is not None:
            owner = read_record(self._broker, producer.directory / OWNER, producer.name)
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
        """Decided transactions that can be finished by trying again."""
        return [
            transaction
            for transaction in self._all_open()
            if transaction.decision is not None and not transaction.is_published
        ]

    def damaged(self) -> list[Transaction]:
        """Transactions that wait for an operator."""
        return [transaction for transaction in self._all_open() if transaction.lost_messages]

    # a transaction's life

    def find(self, name: str, sequence: int) -> Transaction | None:
        """The transaction, if it is open. Raises AlreadyCommitted, also if a later transaction of
        the producer is decided."""
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
        """Stage messages; gives the number of messages in the part. `at` is the number that the
        part must have before. Raises AlreadyCommitted, PartSealed, WrongPosition, StagingFull or
        OSError, with nothing staged."""
        transaction = self.find(name, sequence)
        part = None if transaction is None else transaction.parts.get(part_name)
        if transaction is not None and transaction.decision is not None:
            raise AlreadyCommitted(sequence)
        if transaction is not None and part_name in (transaction.promised or ()):
            raise PartSealed(part_name)
        held = 0 if part is None else part.messages
        if at is not None and at != held:
            raise WrongPosition(held)
        self._check_room(name, len(bodies.data) + (0 if bodies.headers is None else len(bodies.headers.data)))
        if bodies.headers is not None and not self._broker.data_path.needs_headers:
            self._broker.data_path.need_headers()
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
                producer.write_owner(self._broker, sync=False)
            except OSError:
                producer.owner = None
                raise

    def is_owner(self, name: str, identity: str | None) -> bool:
        """Whether this identity may use the producer's name."""
        producer = self.producers.get(name)
        return producer is None or producer.owner is None or producer.owner == identity

    def disown(self, name: str) -> None:
        """Let the next identity that uses the producer's name own it. Raises OSError."""
        producer = self.producers.get(name)
        if producer is not None:
            self._broker.files.unlink(producer.directory / OWNER)
            producer.owner = None

    def promise(
        self, name: str, sequence: int, parts: Mapping[str, int], note: str = "", *, owner: str | None = None
    ) -> Transaction:
        """Fix the parts of the transaction; write_promise() makes that durable. Raises
        AlreadyCommitted, Incomplete or OSError, with nothing changed."""
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
        """Decide to commit. The transaction is committed once write_promise() has made this
        durable. Raises Incomplete if nothing was promised, Unfinished if another transaction comes
        first, Damaged unless the loss is accepted, OSError or Exiting if a topic cannot be
        created."""
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
        """A tag that no decided transaction uses. There are few of them at a time."""
        used = {other.decision.tag for other in self._all_open() if other.decision is not None}
        while True:
            self._tag = self._tag % MAX_TAG + 1
            if self._tag not in used:
                return self._tag

    def revoke(self, transaction: Transaction) -> None:
        """Undo a decision that could not be written."""
        transaction.decision = None
        self.release(transaction)

    def apply(self, transaction: Transaction, chunk: Chunk, bodies: PackedBodies) -> None:
        """Publish the next chunk. Raises StorageError, OSError or Exiting, with none of it
        published."""
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
        """Note that the next chunk cannot be read; write_promise() makes that durable."""
        # Messages that were published before the damage are not lost.
        lost = chunk.messages - min(transaction.present.get(chunk.topic, 0), chunk.messages)
        transaction.lost[transaction.applied] = lost
        logger.error("%s: %d staged messages are lost: %s", transaction, lost, error)

    def pass_over(self, transaction: Transaction, chunk: Chunk) -> None:
        """Skip a chunk that is lost, once the loss is on disk."""
        lost = transaction.lost[transaction.applied]
        if lost < chunk.messages:
            transaction.present[chunk.topic] -= chunk.messages - lost
        self.lost_messages += lost
        transaction.applied += 1

    def write_committed(self, transaction: Transaction, *, sync: bool, remember_s: float) -> Committed:
        """Write the commit to disk; finish() follows. Any thread may call this. Raises OSError."""
        until_ns = self._broker.wall_ns() + round(remember_s * 1e9)
        lost = transaction.lost_messages
        published = transaction.messages - lost
        committed = Committed(transaction.sequence, published, until_ns, transaction.note, lost)
        path = transaction.producer.directory / COMMITTED
        write_record(self._broker, path, committed._asdict(), transaction.producer.name, sync=sync)
        return committed

    def finish(self, transaction: Transaction, committed: Committed) -> None:
        """End a commit. Earlier transactions of the producer are dropped: they can never be
        committed."""
        producer = transaction.producer
        producer.committed = committed
        self.committed_count += 1
        for sequence in [number for number in producer.open if number <= committed.sequence]:
            self._drop(producer.open[sequence])

    def abort(self, name: str, sequence: int) -> None:
        """Drop the staged messages, if there are any. Raises AlreadyCommitted."""
        transaction = self.find(name, sequence)
        if transaction is None:
            return
        if transaction.decision is not None:
            raise AlreadyCommitted(sequence)
        self.aborted_count += 1
        self._drop(transaction)

    def expire(self) -> None:
        """Drop transactions and producers without a request for too long."""
        options, now_ns = self._broker.options, self._broker.monotonic_ns()
        for transaction in [*self._all_open()]:
            is_promised = transaction.promised is not None
            limit_s = options.transaction_retention if is_promised else options.transaction_timeout
            if transaction.decision is None and now_ns - transaction.touched_ns > limit_s * 1e9:
                logger.warning("%s: dropped after %.0f s without a request", transaction, limit_s)
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
        """Let the logs drop messages again that were kept for this transaction."""
        for topic in self._broker.topics.values():
            topic.holds.pop(transaction, None)

    def _throw_away(self, directory: Path) -> None:
        """Rename at once, because the name may be used again; remove in the background."""
        self._trash_count += 1
        trash = self._folder / f"{self._broker.wall_ns()}.{self._trash_count}{TRASH_SUFFIX}"
        files = self._broker.files
        try:
            files.rename(directory, trash)
        except FileNotFoundError:
            return
        self._broker.upkeep.remove(trash.name, lambda: files.remove_tree(trash))


def _weight(chunk: Chunk) -> int:
    return max(chunk.size, MIN_REQUEST)
