"""The task's part of log mode: fetches a range of a log, chunk by chunk, as record batches.

The chunks come from nsqd or, for a range that is archived, from the store; if that fails, from
nsqd.

The next chunk is fetched while the current one is decoded and passed to Spark. A task knows only
its range, so it returns the same rows whenever and wherever it runs again. It waits for an nsqd
that is away, because with a local master a single failed task ends the query.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Final, TypeVar

import pyarrow as pa

from nsparq.errors import ArchiveUnavailable
from nsparq.spark.cluster.api import Client, LogChunk
from nsparq.spark.cluster.http_client import Access, Backoff, Refused, Unreachable
from nsparq.spark.cluster.nodes import Cluster
from nsparq.spark.errors import DataLoss, NoAnswer
from nsparq.spark.options import NsqOptions
from nsparq.spark.source.archived import ArchivedSegment, open_store
from nsparq.spark.source.arrow import RowBuilder
from nsparq.spark.source.plan import begins_epoch
from nsparq.storage.manifest import SegmentEntry
from nsparq.storage.raw_batch import CorruptRange

__all__ = ["LogRange", "close_idle", "read_range"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK: Final = 4 << 20
"""Bytes per request by default. A task holds twice as much."""
MARGIN: Final = 128 << 10
"""Bytes to ask for beyond the estimate, because nsqd returns whole batches."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """A range of numbers of a log, read by one task."""

    topic: str
    node: str
    url: str
    incarnation: str
    start: int
    end: int
    """The first number after it."""
    size_bytes: int
    """An estimate."""
    first_id: int | None = None
    """See Client.first_id(). If it is None, the task asks for it."""
    where: str = ""
    """The node's current name; `node` is its name in the offsets."""
    is_held: bool = False
    """The query's channel is before the range, so nsqd does not remove unread messages."""
    entry: SegmentEntry | None = None
    """The archived segment that has the whole range; None to read it from nsqd."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Numbers without a message in the archived segment. nsqd itself leaves them out."""

    @property
    def log(self) -> tuple[str, str]:
        return self.topic, self.where

    def __str__(self) -> str:
        return f"topic {self.topic} on {self.node}, numbers {self.start} to {self.end - 1}"


_idle: dict[tuple[str, Access], list[Client]] = {}
"""Connections left open by earlier tasks in this process."""


def close_idle() -> None:
    open_store.cache_clear()
    while _idle:
        for client in _idle.popitem()[1]:
            client.close()


def read_range(
    work: LogRange, options: NsqOptions, schema: pa.Schema, chunk: int | None = None
) -> Iterator[pa.RecordBatch]:
    """The messages of a range, `chunk` bytes per request. Raises DataLoss, NoAnswer."""
    access = Access.of(options)
    idle = _idle.setdefault((work.url, access), [])
    client = idle.pop() if idle else Client(work.url, access)
    reader = _RangeReader(work, client, options, chunk or CHUNK)
    is_read = False
    try:
        yield from reader.rows(schema)
        is_read = True
    finally:
        reader.close()
        if is_read and reader.client is client:
            idle.append(client)
        else:
            reader.client.close()


class _RangeReader:
    def __init__(self, work: LogRange, client: Client, options: NsqOptions, chunk: int) -> None:
        self._work = work
        self.client = client
        """To the node that has the log."""
        self._options = options
        self._chunk = chunk
        self._segment: ArchivedSegment | None = None
        """Where to read from; None for nsqd."""
        if work.entry is not None and options.archive is not None:
            store = open_store(options.archive)
            self._segment = ArchivedSegment.of_log(store, work.topic, work.incarnation, work.entry)
        self._bytes_per_number = work.size_bytes / max(1, work.end - work.start)
        self._stopped = Event()
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[LogChunk | None]] | None = None
        """The chunk that is being fetched, and its first number."""

    def close(self) -> None:
        """Break off the request that is under way, and end the thread."""
        self._stopped.set()
        if self._thread is not None:
            if self._ahead is not None and not self._ahead[1].done():
                self.client.abort()
            self._thread.shutdown(wait=True, cancel_futures=True)

    def rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        work = self._work
        builder: RowBuilder | None = None
        at = work.start
        while at < work.end:
            chunk = self._take(at)
            if chunk is None:
                return
            if builder is None:
                # Before the next chunk is fetched, which needs the same connection.
                first_id = self._first_id(max(at, chunk.first)) if "id" in schema.names else 0
                if first_id is None:
                    return
                builder = RowBuilder(schema, work.topic, work.node, first_id)
            if chunk.next < work.end:
                self._fetch_ahead(chunk.next)
            builder.reached = at
            try:
                yield from builder.build(chunk.data, at, work.end, chunk.gaps)
            except CorruptRange as error:
                # Spark has the rows before the damage. nsqd returns what is readable of the rest,
                # also if the damage is in the archive.
                logger.error("%s: %s; asking nsqd for the readable rest", work, error)
                at = builder.reached
                chunk = self._verified(at)
                if chunk is None:
                    return
                yield from builder.build(chunk.data, at, work.end, chunk.gaps)
            at = chunk.next

    def _first_id(self, sequence: int) -> int | None:
        """See Client.first_id(). None if nsqd has no message any more to tell it by."""
        work = self._work
        if work.first_id is not None:
            return work.first_id
        # If that place is damaged or has been removed, the newest message tells it.
        for start in (sequence, None):
            try:
                found = self._ask(partial(self._peek, start))
            except Refused as refused:
                if refused.status not in (404, 410, 416):
                    raise
                continue
            if found is not None:
                return found
        self._report_loss(f"{work}: nsqd has no readable message any more that tells the ids")
        return None

    def _peek(self, sequence: int | None) -> int | None:
        return self.client.first_id(self._work.topic, sequence)

    def _take(self, at: int) -> LogChunk | None:
        """The chunk from a number on; None if nothing more can be read."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            chunk = ahead[1].result()
            if ahead[0] == at:
                return chunk
        return self._fetch(at)

    def _fetch_ahead(self, at: int) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "nsq-read")
        self._ahead = at, self._thread.submit(self._fetch, at)

    def _verified(self, at: int) -> LogChunk | None:
        if self._ahead is not None:
            # Wait: the connection is in use.
            self._ahead[1].result()
            self._ahead = None
        chunk = self._fetch(at, verify=True)
        if chunk is not None and chunk.lost:
            self._report_loss(f"{self._work}: {chunk.lost} messages are damaged")
        return chunk

    def _fetch(self, at: int, *, verify: bool = False) -> LogChunk | None:
        size = min(self._chunk, int((self._work.end - at) * self._bytes_per_number * 1.05) + MARGIN)
        if self._segment is not None and not verify:
            try:
                return self._segment.chunk(at, size, self._work.gaps)
            except ArchiveUnavailable as error:
                logger.warning(
                    "%s: reading the rest from nsqd, because the archive fails: %s", self._work, error
                )
        self._segment = None
        return self._fetch_from_nsqd(at, size, verify=verify)

    def _fetch_from_nsqd(self, at: int, size: int, *, verify: bool) -> LogChunk | None:
        work = self._work
        while True:
            try:
                chunk = self._ask(partial(self._read, at, size, verify))
                if chunk.next > at:
                    return chunk
                reason = f"the log ends at {chunk.latest}"
                break
            except Refused as refused:
                if refused.code == "OFFSET_GONE":
                    earliest = int(refused.details.get("earliest", 0))
                    if not (work.is_held and begins_epoch(earliest)):
                        self._report_loss(f"{work}: everything before {earliest} has been removed")
                    if not at < earliest < work.end:
                        return None
                    at = earliest
                elif refused.code in ("TOPIC_NOT_FOUND", "WRONG_INCARNATION"):
                    reason = "the topic has been deleted"
                    break
                elif refused.code == "OFFSET_AHEAD":
                    reason = f"the log ends at {refused.details.get('latest')}"
                    break
                else:
                    raise
        self._report_loss(f"{work}: {reason}, before {at} was read")
        return None

    def _read(self, at: int, size: int, verify: bool) -> LogChunk:
        work = self._work
        return self.client.read(work.topic, at, size, work.incarnation, verify=verify)

    def _ask(self, request: Callable[[], T]) -> T:
        """The answer of nsqd, which may be away for a while. Raises NoAnswer, Refused."""
        backoff = Backoff(self._options.retry_for)
        while True:
            try:
                return request()
            except Unreachable as error:
                if self._stopped.is_set() or not backoff.wait():
                    limit = f"for {self._options.retry_for:g} seconds (option retryFor)"
                    raise NoAnswer(f"{self._work}: {error}, {limit}") from error
            except Refused as refused:
                if refused.status < 500 or not backoff.wait():
                    raise
            self._find_again()

    def _find_again(self) -> None:
        """Another node of a replicated nsqd may have taken over: it has the same log."""
        work = self._work
        cluster = Cluster(replace(self._options, topic=work.topic, topics=(), topics_pattern=None))
        try:
            found = cluster.look()
            for name in found.topics.get(work.topic, ()):
                node = found.nodes[name]
                if node.url == self.client.url:
                    continue
                with suppress(Unreachable, Refused):
                    if cluster.client(node).positions(work.topic).incarnation == work.incarnation:
                        logger.warning("%s: continues at %s", work, name)
                        self.client.close()
                        self.client = Client(node.url, Access.of(self._options))
                        return
        finally:
            cluster.close()

    def _report_loss(self, what: str) -> None:
        """Raises DataLoss, unless the options allow the loss."""
        if self._options.fail_on_data_loss:
            raise DataLoss(what)
        logger.error("%s; the query continues without them", what)
