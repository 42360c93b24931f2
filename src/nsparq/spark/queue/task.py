"""The task's part of queue mode: completes one slot of a micro-batch, then returns its rows.

The slot is completed before the first row is returned. So messages cannot time out in nsqd while
Spark is slow to take the rows.
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
from nsparq.spark.header_columns import no_maps
from nsparq.spark.queue.connection import Away, QueueConnection
from nsparq.spark.queue.frames import Taken
from nsparq.spark.queue.staging import NO_ROWS, Chunk, Lost, Slot, Staging, TooLate, keys_of

__all__ = ["QueuePartition", "TaskSettings", "fill", "rows_of"]

logger = logging.getLogger(__name__)

WINDOW_BYTES: Final = 64 << 20
"""About the limit of bytes in flight on a connection."""
CHUNK_BYTES: Final = 32 << 20
FIRST_ROWS: Final = 256
"""Limit on messages in flight while their size is unknown."""
FIRST_S: Final = 0.5
"""How long to wait for the first message: there were some when the batch was planned."""
IDLE_S: Final = 0.1
"""How long to wait for the next message; nsqd may buffer messages for 25 ms."""
LINGER_S: Final = 1.0
"""How long messages wait for others to share a chunk."""
CLOSE_S: Final = 5.0
NO_OFFSET: Final = -1
"""Offset of all rows: a consumed message has no place in a log."""


@dataclass(kw_only=True, eq=False)
class QueuePartition(InputPartition):
    """One slot: the messages that one task takes from one nsqd."""

    value: None = None
    batch: int
    slot: int
    topic: str
    node: str
    address: str
    """Of the TCP port; empty if it is unknown now."""
    rows: int
    row_bytes: float
    """Average size of a message; 0 if unknown."""
    max_bytes: int
    """Size at which the task stops taking messages; 0 for no limit."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """How tasks take messages. Plain values, sent to the executors."""

    channel: str
    config: Config
    batch_duration: float
    dedupe: bool
    headers: bool


@dataclass(slots=True)
class Filling:
    """The state of one attempt at a slot."""

    slot: Slot
    partition: QueuePartition
    settings: TaskSettings
    next: int = 0
    rows: int = 0
    """Rows in the chunks before it."""
    size_bytes: int = 0
    row_bytes: float = 0.0
    """Average size of a message; 0 if unknown."""
    since: float = 0.0
    """Messages that were not taken yet have arrived after this time."""
    is_sealed: bool = False
    own: list[int] = field(default_factory=list)
    """Chunks of this attempt whose FINs have been sent."""
    suspects: set[bytes] = field(default_factory=set)
    """Keys of messages that were staged and perhaps not finished."""

    def skip_existing(self) -> None:
        """Skip the chunks that other attempts have published."""
        for chunk in self.slot.chunks(self.next):
            self.next += 1
            self.rows += len(chunk.rows)
            self.size_bytes += chunk.rows.nbytes
            self.is_sealed = chunk.is_last

    def seal(self) -> None:
        """End the slot with an empty last chunk."""
        while not self.is_sealed:
            if self.slot.publish(self.next, self._chunk(NO_ROWS, is_last=True)):
                self.is_sealed = True
            else:
                self.skip_existing()

    def fill(self, connection: QueueConnection) -> None:
        """Take messages until there are enough, or no more. Raises Away."""
        self.since = time.monotonic()
        deadline = self.since + self.settings.batch_duration
        self.row_bytes = self.partition.row_bytes
        if self.settings.dedupe:
            self.suspects = self.slot.staged_keys(self.partition.topic, self.partition.node)
        connection.ready(self._window())
        while not self.is_sealed:
            is_last = self._collect(connection, deadline)
            if is_last:
                connection.stop_taking(CLOSE_S)
            self._stage(connection, is_last)
        # Messages are left over only if another attempt has sealed the slot.
        connection.stop_taking(CLOSE_S)
        connection.requeue(connection.take().ids)
        if connection.confirm_fins():
            for index in self.own:
                self.slot.mark_finished(index)

    def _window(self) -> int:
        """How many messages may be in flight without taking too many in the end."""
        fitting = int(WINDOW_BYTES / self.row_bytes) if self.row_bytes else FIRST_ROWS
        return max(1, min(self.partition.rows - self.rows, fitting))

    def _collect(self, connection: QueueConnection, deadline: float) -> bool:
        """Wait for the messages of a chunk. Returns whether it is the last chunk."""
        partition = self.partition
        missing = partition.rows - self.rows
        # While one half is written to disk, nsqd sends the other half.
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
        """Publish the messages as a chunk, and only then finish them."""
        # After that time nsqd may requeue them and give them to another consumer.
        until = self.since + 0.9 * self.settings.config.msg_timeout
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
            raise Away(f"{error}: increase option messageTimeout") from error
        except Lost:
            connection.requeue(taken.ids)
            raise
        if not is_ours:
            connection.requeue(taken.ids)
            self.skip_existing()
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
        """Drop messages that were staged before and come again because their FIN did not arrive."""
        rows = taken.rows
        if not self.settings.dedupe:
            return rows
        # Check all messages if there are suspects: a killed nsqd may have forgotten its attempts.
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
            logger.info("%s: dropped %d messages that are staged already", self.partition.node, dropped)
            rows = rows.filter(pa.array(wanted))
        return rows

    def _chunk(self, rows: pa.RecordBatch, is_last: bool) -> Chunk:
        return Chunk(rows, self.partition.topic, self.partition.node, is_last)


def fill(staging: Staging, partition: QueuePartition, settings: TaskSettings) -> Slot:
    """Complete the slot, after earlier attempts. Raises QueueError, StagingError, Lost."""
    slot = staging.slot(partition.batch, partition.slot)
    filling = Filling(slot, partition, settings)
    filling.skip_existing()
    if filling.is_sealed:
        return slot
    try:
        if not partition.address:
            raise Away(f"{partition.node}: its address is unknown")
        if filling.rows < partition.rows:
            with QueueConnection(
                partition.address,
                partition.topic,
                settings.channel,
                settings.config,
                headers=settings.headers,
            ) as connection:
                filling.fill(connection)
    except Away as error:
        # nsqd delivers the other messages again, in a later batch.
        logger.warning("%s: batch %d continues without it: %s", partition.node, partition.batch, error)
    filling.seal()
    return slot


def rows_of(slot: Slot, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a completed slot, in the source's columns."""
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
            "headers": no_maps(count),
            **{name: chunk.rows.column(name) for name in chunk.rows.schema.names},
        }
        yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    if not is_whole:
        raise Lost(f"{slot.directory} was removed while it was read")
