"""What a task of queue mode does: bring one slot of a micro-batch to its end, then hand out its rows.

Filling comes first, as a whole. How fast Spark takes the rows then has no bearing on nsqd, whose messages
would time out while they wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from nsparq.client.config import Config
from nsparq.spark.queue.client import Away, QueueConnection, Taken, nothing
from nsparq.spark.queue.staging import Chunk, Lost, Slot, Staging, TooLate, keys_of

__all__ = ["QueuePartition", "Taking", "fill", "rows_of"]

logger = logging.getLogger(__name__)

WINDOW_BYTES: Final = 64 << 20
"""About how much may be in flight on a connection."""
CHUNK_BYTES: Final = 32 << 20
FIRST_ROWS: Final = 256
"""How many may be in flight before anything is known about their size."""
FIRST_S: Final = 0.5
"""How long the first message may be in coming: there were some when the batch was planned."""
IDLE_S: Final = 0.1
"""How long the next may be; nsqd may hold messages back for its output buffer's 25 ms."""
LINGER_S: Final = 1.0
"""How long messages wait for others to share a chunk with."""
CLOSE_S: Final = 5.0
NO_OFFSET: Final = -1
"""In the rows: a message that was consumed has no place in a log."""


class QueuePartition(InputPartition):
    """One slot: what one task takes from one nsqd."""

    def __init__(
        self,
        *,
        batch: int,
        slot: int,
        topic: str,
        node: str,
        address: str,
        rows: int,
        row_bytes: float,
        max_bytes: int,
    ) -> None:
        super().__init__(None)
        self.batch, self.slot = batch, slot
        self.topic, self.node = topic, node
        self.address = address
        """For NSQ's own protocol; empty if nobody knows where the node is just now."""
        self.rows = rows
        """At most so many are taken."""
        self.row_bytes = row_bytes
        """About how large a message is; 0 if unknown."""
        self.max_bytes = max_bytes
        """No more are taken when there are so many bytes; 0: no matter."""


@dataclass(frozen=True, slots=True)
class Taking:
    """How messages are taken. Plain values: it travels to the executors."""

    channel: str
    config: Config
    batch_duration: float
    dedupe: bool


@dataclass(slots=True)
class Filling:
    """The state of one attempt at a slot."""

    slot: Slot
    partition: QueuePartition
    taking: Taking
    next: int = 0
    """Number of the next chunk."""
    rows: int = 0
    """Rows in the chunks before it."""
    size_bytes: int = 0
    row_bytes: float = 0.0
    """About how large a message is; 0 if unknown."""
    since: float = 0.0
    """Messages that were not taken yet have come later than this."""
    is_sealed: bool = False
    own: list[int] = field(default_factory=list)
    """Chunks that are of this attempt, and whose FINs have been sent."""
    suspects: set[bytes] = field(default_factory=set)
    """Keys of messages that were staged before, and perhaps not finished."""

    def follow(self) -> None:
        """Past the chunks that others have made."""
        for chunk in self.slot.chunks(self.next):
            self.next += 1
            self.rows += len(chunk.rows)
            self.size_bytes += chunk.rows.nbytes
            self.is_sealed = chunk.is_last

    def seal(self) -> None:
        """End it without another row."""
        while not self.is_sealed:
            if self.slot.publish(self.next, self._chunk(nothing(), is_last=True)):
                self.is_sealed = True
            else:
                self.follow()

    def fill(self, connection: QueueConnection) -> None:
        """Take messages until there are enough, or no more. Raises Away, when it may be sealed or not."""
        self.since = time.monotonic()
        deadline = self.since + self.taking.batch_duration
        self.row_bytes = self.partition.row_bytes
        if self.taking.dedupe:
            self.suspects = self.slot.staged_keys(self.partition.topic, self.partition.node)
        connection.ready(self._window())
        while not self.is_sealed:
            is_last = self._collect(connection, deadline)
            if is_last:
                connection.stop_taking(CLOSE_S)
            self._stage(connection, is_last)
        # There are some only if somebody else has brought it to its end.
        connection.stop_taking(CLOSE_S)
        connection.requeue(connection.take().ids)
        if connection.prove():
            for index in self.own:
                self.slot.prove(index)

    def _window(self) -> int:
        """How many may be in flight, so that in the end there are not more than wanted."""
        fitting = int(WINDOW_BYTES / self.row_bytes) if self.row_bytes else FIRST_ROWS
        return max(1, min(self.partition.rows - self.rows, fitting))

    def _collect(self, connection: QueueConnection, deadline: float) -> bool:
        """Wait for a chunk's worth of messages. Whether it is the last chunk."""
        partition = self.partition
        missing = partition.rows - self.rows
        # While one half is being staged, nsqd sends the other.
        window = min(connection.max_rdy_count, self._window())
        wanted = missing if missing <= window else max(1, window // 2)
        while connection.waiting < wanted and connection.waiting_bytes < CHUNK_BYTES:
            now = time.monotonic()
            if now >= deadline:
                return True
            if connection.waiting and now - self.since >= LINGER_S:
                break
            quiet = IDLE_S if connection.waiting or self.rows else FIRST_S
            if not connection.receive(min(quiet, deadline - now)):
                return True
        if partition.max_bytes and self.size_bytes + connection.waiting_bytes >= partition.max_bytes:
            return True
        return connection.waiting >= missing

    def _stage(self, connection: QueueConnection, is_last: bool) -> None:
        """Make what has come a chunk, and only then finish it."""
        # Messages that nsqd has taken back meanwhile may be somebody else's by now.
        until = self.since + 0.9 * self.taking.config.msg_timeout
        taken = connection.take()
        self.since = time.monotonic()
        rows = self._without_staged(taken)
        if not len(rows) and not is_last:
            connection.finish(taken.ids)
            return
        try:
            is_ours = self.slot.publish(
                self.next, self._chunk(rows, is_last), until=until if len(rows) else None
            )
        except TooLate as error:
            raise Away(f"{error}: see option messageTimeout") from error
        except Lost:
            connection.requeue(taken.ids)
            raise
        if not is_ours:
            connection.requeue(taken.ids)
            self.follow()
            return
        index, self.next = self.next, self.next + 1
        self.rows += len(rows)
        self.size_bytes += rows.nbytes
        self.is_sealed = is_last
        if not is_last:
            self.row_bytes = rows.nbytes / len(rows)
            connection.ready(self._window())
        connection.finish(taken.ids)
        self.own.append(index)

    def _without_staged(self, taken: Taken) -> pa.RecordBatch:
        """Without messages that are staged already, and come again since their FIN did not get through."""
        rows = taken.rows
        if not self.taking.dedupe:
            return rows
        # An nsqd that was killed may have forgotten how often it has delivered them.
        again = np.arange(len(rows))
        if not self.suspects:
            again = np.flatnonzero(rows.column("attempts").to_numpy() != 1)
        if not len(again):
            return rows
        staged = self.slot.staged_keys(self.partition.topic, self.partition.node)
        wanted = np.ones(len(rows), bool)
        keys = keys_of(rows.take(pa.array(again)))
        wanted[again] = [key not in staged for key in keys]
        dropped = len(rows) - int(wanted.sum())
        if dropped:
            logger.info("%s: %d messages came again that are staged", self.partition.node, dropped)
            rows = rows.filter(pa.array(wanted))
        return rows

    def _chunk(self, rows: pa.RecordBatch, is_last: bool) -> Chunk:
        return Chunk(rows, self.partition.topic, self.partition.node, is_last)


def fill(staging: Staging, partition: QueuePartition, taking: Taking) -> Slot:
    """Bring the slot to its end, from wherever earlier attempts have left it. Raises QueueError,
    StagingError, Lost."""
    slot = staging.slot(partition.batch, partition.slot)
    filling = Filling(slot, partition, taking)
    filling.follow()
    if filling.is_sealed:
        return slot
    try:
        if not partition.address:
            raise Away(f"{partition.node}: nobody knows where it is")
        if filling.rows < partition.rows:
            with QueueConnection(
                partition.address, partition.topic, taking.channel, taking.config
            ) as connection:
                filling.fill(connection)
    except Away as error:
        # What was not staged comes again by itself, in a later batch.
        logger.warning("%s: batch %d goes on without it: %s", partition.node, partition.batch, error)
    filling.seal()
    return slot


def rows_of(slot: Slot, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a slot that has been filled, in the source's columns."""
    is_whole = False
    for chunk in slot.chunks():
        count = len(chunk.rows)
        is_whole = chunk.is_last
        if not count:
            continue
        columns = {
            "topic": pa.repeat(chunk.topic, count),
            "node": pa.repeat(chunk.node, count),
            "offset": pa.repeat(pa.scalar(NO_OFFSET, pa.int64()), count),
            **{name: chunk.rows.column(name) for name in chunk.rows.schema.names},
        }
        yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    if not is_whole:
        raise Lost(f"{slot.directory} was removed while it was read")
