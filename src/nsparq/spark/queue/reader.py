"""Queue mode's side of Spark's API: a channel of any nsqd as a stream.

An offset is the number of a batch, and how many rows each connection takes for it. So a batch that
is run again after a crash is the same, whatever nodes there are by then:

    {"batch": 7, "staging": "5f0c…", "take": {"events": {"host:4151": [2500, 2500]}}}

The first attempt to read a batch decides which messages it has; see task.py and staging.py. Batch 0
is empty: Spark runs it if no messages wait when the query starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from nsparq.client.config import Config
from nsparq.spark.columns import arrow_schema
from nsparq.spark.options import NsqOptions, OptionError
from nsparq.spark.queue.planner import QueuePlanner, Take
from nsparq.spark.queue.staging import Staging
from nsparq.spark.queue.task import QueuePartition, TaskSettings, fill, rows_of
from nsparq.spark.stream_api import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from nsparq.spark.trigger import Limit
from nsparq.spark.worker import prepare_worker
from nsparq.version import __version__

__all__ = ["QueueStreamReader", "task_settings"]

DEFAULT_ROWS: Final = 100_000
"""Limit of rows per micro-batch without option maxRowsPerTrigger."""
WAIT_S: Final = 0.5
"""How long the driver waits for messages before it tells Spark that there are none."""


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream` with option mode=queue. The driver's planner is made at its first call,
    because tasks get a copy of an object that has only been constructed."""

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        assert options.staging is not None
        self._staging = Staging(options.staging)
        self._planner: QueuePlanner | None = None
        self._is_available_now = False

    # in the driver

    def prepareForTriggerAvailableNow(self) -> None:
        # Spark calls this before any other method.
        self._is_available_now = True

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_rows_per_trigger or DEFAULT_ROWS)

    def initialOffset(self) -> dict[str, Any]:
        self._open().look()
        return _offset(0, self._staging.identity, {})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        planner = self._open()
        batch, take = self._checked(start)
        planner.note_result(batch, take)
        take = planner.plan(_limit(limit), wait=0.0 if self._is_available_now else WAIT_S)
        return _offset(batch + 1, self._staging.identity, take) if take else start

    def reportLatestOffset(self) -> dict[str, Any]:
        """Spark shows it in a query's progress: the messages that wait now."""
        depth: dict[str, dict[str, int]] = {}
        for (topic, node), backlog in sorted(self._open().backlogs.items()):
            depth.setdefault(topic, {})[node] = backlog.depth
        return {"depth": depth}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        planner = self._open()
        batch, take = self._checked(end)
        if not batch:
            return []
        self._staging.begin(batch)
        return [*planner.partitions(batch, take)]

    def commit(self, end: dict[str, Any]) -> None:
        self._open()
        self._staging.finish(int(end["batch"]))

    def stop(self) -> None:
        planner, self._planner = self._planner, None
        if planner is not None:
            planner.cluster.close()
        self._staging.close()

    def _open(self) -> QueuePlanner:
        if self._planner is None:
            options = self._options
            pattern = options.topics_pattern
            topics = [*options.wanted_topics] if pattern is None else pattern.pattern
            self._staging.open({"topics": topics, "channel": options.channel})
            self._planner = QueuePlanner(options, self._staging, self._is_available_now)
        return self._planner

    def _checked(self, offset: dict[str, Any]) -> tuple[int, Take]:
        """An offset of the checkpoint. Raises OptionError, StagingError."""
        if not offset.keys() >= {"batch", "staging", "take"}:
            raise OptionError(
                "option mode: this checkpoint was not written in queue mode; use a new checkpoint"
            )
        batch = int(offset["batch"])
        self._staging.check(str(offset["staging"]), batch)
        return batch, offset["take"]

    # in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, QueuePartition):
            # Without partitions Spark passes one of its own.
            return iter(())
        prepare_worker()
        settings = task_settings(self._options, headers="headers" in self._schema.names)
        slot = fill(self._staging, partition, settings)
        return rows_of(slot, self._schema)


def task_settings(options: NsqOptions, *, headers: bool = False) -> TaskSettings:
    """`headers` says that the query wants them."""
    assert options.channel is not None
    # requestTimeout 0 means no limit, which a client's configuration does not have.
    timeout = min(max(0.1, options.request_timeout or 60.0), 300.0)
    config = Config(
        client_id="nsparq-spark",
        user_agent=f"nsparq-spark/{__version__}",
        auth_secret=options.auth_token or "",
        auth_secret_for=options.auth_token_for,
        dial_timeout=min(3.0, timeout),
        handshake_timeout=timeout,
        write_timeout=timeout,
        tls_v1=options.tls,
        tls_root_ca_file=options.tls_ca_file or "",
        tls_cert=options.tls_cert_file or "",
        tls_key=options.tls_key_file or options.tls_cert_file or "",
        tls_insecure_skip_verify=not options.tls_verify,
        snappy=options.snappy,
        msg_timeout=options.message_timeout,
        # The least that nsqd allows: the last messages of a queue wait only for this.
        output_buffer_timeout=0.025,
        output_buffer_size=64 << 10,
    )
    return TaskSettings(options.channel, config, options.batch_duration, options.dedupe, headers)


def _limit(limit: ReadLimit) -> Limit:
    """Spark passes our default limit or, with trigger `once`, ReadAllAvailable."""
    if isinstance(limit, ReadMaxRows):
        return Limit(limit.max_rows)
    assert isinstance(limit, ReadAllAvailable), limit
    return Limit(is_everything=True)


def _offset(batch: int, staging: str, take: Take) -> dict[str, Any]:
    """With sorted keys, since Spark compares offsets as texts."""
    ordered = {topic: {node: take[topic][node] for node in sorted(take[topic])} for topic in sorted(take)}
    return {"batch": batch, "staging": staging, "take": ordered}
