"""The sink's side of Spark's API: tasks stage or publish Arrow batches, the driver commits.

A micro-batch, or a batch job, is one transaction of nsqd: the query is its producer, the batch id
its sequence number. Each attempt of a task stages under a new part name, so it never adds to the
messages of an earlier attempt. The driver commits the parts of the tasks that Spark reports as
successful.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from nsparq.errors import NsparqError
from nsparq.spark.checkpoint import fingerprint
from nsparq.spark.cluster.http_client import Access, Unreachable
from nsparq.spark.options import NsqOptions, OptionError
from nsparq.spark.sink.commit import Coordinator, check_replay
from nsparq.spark.sink.nodes import Plan, SinkNode, find_again, find_plan
from nsparq.spark.sink.rows import Chunks, SinkColumns
from nsparq.spark.sink.send import AlreadyCommitted, Published, Sender, Staged
from nsparq.spark.worker import prepare_worker

__all__ = ["NsqStreamWriter", "NsqWriter", "PublishedRows", "StagedRows"]

logger = logging.getLogger(__name__)

FORGET_S: Final = 600
"""How long nsqd remembers a batch job, which is never repeated: as long as its commit may take."""


@dataclass(frozen=True)
class StagedRows(WriterCommitMessage):
    """Messages that a task has staged."""

    producer: str
    sequence: int
    nodes: tuple[SinkNode, ...]
    """All nodes of the write."""
    node: str
    part: str
    messages: int


@dataclass(frozen=True)
class PublishedRows(WriterCommitMessage):
    """Messages that a task has published."""

    messages: int


Messages = Sequence[WriterCommitMessage | None]


class Task(NamedTuple):
    partition: int = 0
    attempt: int = 0
    query_id: str | None = None
    batch_id: int = 0

    @classmethod
    def current(cls) -> Task:
        context = TaskContext.get()
        if context is None:
            return cls()
        query_id = context.getLocalProperty("sql.streaming.queryId")
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        return cls(context.partitionId(), context.attemptNumber(), query_id, int(batch_id or 0))


class _Writer:
    """Common part of both writers. Spark pickles it for the tasks."""

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        """Raises SchemaError, OptionError, Refused."""
        self._columns = SinkColumns.of(schema)
        if self._columns.topic is None and options.topic is None:
            raise OptionError("option topic is missing: set it, or add a column 'topic'")
        self._options = options
        self._plan: Plan | None = None
        # Do not wait here: Spark makes another writer only to commit.
        with suppress(Unreachable):
            self._plan = self._find_plan(wait=False)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for the tasks, which all need the same plan."""
        self._get_plan()
        return self.__dict__

    def _get_plan(self) -> Plan:
        """Raises OptionError, Unreachable."""
        if self._plan is None:
            self._plan = self._find_plan(wait=True)
        return self._plan

    def _find_plan(self, *, wait: bool) -> Plan:
        has_headers = self._columns.headers is not None
        plan = find_plan(self._options, headers=has_headers, wait=wait)
        if has_headers and self._columns.defer is not None and not plan.exactly_once:
            raise OptionError(
                "columns defer and headers: both together need transactions (option delivery), because NSQ "
                "cannot publish deferred messages with headers over HTTP"
            )
        return plan

    def _write(self, batches: Iterator[pa.RecordBatch], producer: str, sequence: int) -> WriterCommitMessage:
        prepare_worker()
        task = Task.current()
        options, plan = self._options, self._get_plan()
        access = Access.of(options)
        first = (task.partition + sequence) % len(plan.nodes)
        nodes = [*plan.nodes[first:], *plan.nodes[:first]]
        if not plan.exactly_once:
            published = Published(nodes, access, options.retry_for)
            return PublishedRows(self._send(published, batches, task))
        part = f"{task.partition}-{task.attempt}-{uuid4().hex[:12]}"
        staged = Staged(
            nodes[0], access, options.retry_for, producer, sequence, part, partial(find_again, options)
        )
        try:
            messages = self._send(staged, batches, task)
        except AlreadyCommitted as known:
            # The driver's commit compares the fingerprint too.
            check_replay(producer, sequence, "", known.sequence, "")
            logger.info("batch %d was published before; nothing is sent", sequence)
            # Read all rows: a state store or a metric earlier in the task has to see them.
            for _ in batches:
                pass
            messages = 0
        return StagedRows(producer, sequence, plan.nodes, nodes[0].name, part, messages)

    def _send(self, sender: Sender, batches: Iterator[pa.RecordBatch], task: Task) -> int:
        options = self._options
        where = f"partition {task.partition}, "
        chunks = Chunks(
            self._columns, options.topic, options.chunk_bytes, where, refused=options.refuse_topics
        )
        try:
            for batch in batches:
                for chunk in chunks.add(batch):
                    sender.send(chunk)
            for chunk in chunks.finish():
                sender.send(chunk)
            return sender.finish()
        finally:
            sender.close()

    def _coordinator(
        self, messages: Messages, remember_s: int | None = None, planned: str = ""
    ) -> Coordinator | None:
        """None if there is nothing to commit or abort."""
        staged = _staged(messages)
        if not staged:
            return None
        return Coordinator(
            staged[0].producer,
            staged[0].sequence,
            {node for one in staged for node in one.nodes},
            Access.of(self._options),
            self._options.retry_for,
            remember_s,
            planned,
            partial(find_again, self._options),
        )

    def _commit(self, messages: Messages, remember_s: int | None = None, planned: str = "") -> None:
        coordinator = self._coordinator(messages, remember_s, planned)
        if coordinator is None:
            return
        parts: dict[str, dict[str, int]] = {}
        for one in _staged(messages):
            if one.messages:
                parts.setdefault(one.node, {})[one.part] = one.messages
        with coordinator:
            coordinator.commit(parts)

    def _abort(self, messages: Messages, *, for_good: bool) -> None:
        coordinator = self._coordinator(messages)
        if coordinator is not None:
            with coordinator:
                coordinator.abort(for_good=for_good)


class NsqWriter(_Writer, DataSourceArrowWriter):
    """`df.write.format("nsq")`. Publishes all rows or none."""

    def __init__(self, schema: StructType, options: NsqOptions, overwrite: bool) -> None:
        if overwrite:
            raise OptionError('a topic cannot be overwritten: write with mode("append")')
        super().__init__(schema, options)
        self._is_named = options.producer is not None
        self._producer = options.producer or f"spark-job:{uuid4().hex}"
        self._sequence = options.sequence or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write(iterator, self._producer, self._sequence)

    def commit(self, messages: Messages) -> None:
        self._commit(messages, None if self._is_named else FORGET_S, self._options.fingerprint or "")

    def abort(self, messages: Messages) -> None:
        # Whoever named the producer repeats the batch.
        self._abort(messages, for_good=not self._is_named)


class NsqStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """`df.writeStream.format("nsq")`. Publishes each micro-batch exactly once."""

    def __init__(
        self, schema: StructType, options: NsqOptions, overwrite: bool, checkpoint: str = ""
    ) -> None:
        """`overwrite` is true in output mode `complete`: each batch publishes the whole result."""
        super().__init__(schema, options)
        self._checkpoint = checkpoint

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = Task.current()
        producer = self._options.producer
        if producer is None:
            if task.query_id is None:
                raise NsparqError(
                    "Spark does not tell the task its query; set option producer to a name for the query"
                )
            producer = f"spark:{task.query_id}"
        return self._write(iterator, producer, task.batch_id)

    def commit(self, messages: Messages, batchId: int) -> None:
        self._commit(messages, planned=fingerprint(self._checkpoint, batchId))

    def abort(self, messages: Messages, batchId: int) -> None:
        self._abort(messages, for_good=False)


def _staged(messages: Iterable[WriterCommitMessage | None]) -> list[StagedRows]:
    return [message for message in messages if isinstance(message, StagedRows)]
