"""What a task does: fetch a range of a log, piece by piece, and turn it into record batches.

The next piece is fetched while the present one is decoded and handed over. A task knows nothing but its
range, so that it gives the same rows whenever and wherever it runs again; it waits for an nsqd that is away,
since with a local master a single failed task ends the query.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Final

import pyarrow as pa

from nsparq.spark.cluster.http_client import Access, Chunk, Client, Patience, Refused, Unreachable
from nsparq.spark.errors import DataLoss, NoAnswer
from nsparq.spark.options import NsqOptions
from nsparq.spark.source.arrow import RowBuilder
from nsparq.spark.source.plan import begins_epoch
from nsparq.storage.decode import CorruptRange

__all__ = ["LogRange", "close_idle", "read_range"]

logger = logging.getLogger(__name__)

CHUNK: Final = 4 << 20
"""Bytes to ask for at a time, unless told otherwise. Twice this is what a task holds."""
MARGIN: Final = 128 << 10
"""A range begins and ends in the middle of what nsqd can hand out at once."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """Consecutive numbers of a log, for one task."""

    topic: str
    node: str
    url: str
    incarnation: str
    start: int
    end: int
    """The first number not in it."""
    size_bytes: int
    """About."""
    first_id: int | None = None
    """The id that the message with number 0 would have had; if it is not known, the task asks."""
    where: str = ""
    """The node, by the name that it has now: `node` is the one in the offsets."""
    is_held: bool = False
    """The query has a channel that stands before it: what has not been read is not removed."""

    def __str__(self) -> str:
        return f"topic {self.topic} on {self.node}, numbers {self.start} to {self.end - 1}"


_idle: dict[tuple[str, Access], list[Client]] = {}
"""Connections that earlier tasks in this process have left open."""


def close_idle() -> None:
    """Close them."""
    while _idle:
        for client in _idle.popitem()[1]:
            client.close()


def read_range(
    work: LogRange, options: NsqOptions, schema: pa.Schema, chunk: int | None = None
) -> Iterator[pa.RecordBatch]:
    """The messages of a range, asked for so many bytes at a time. Raises DataLoss, NoAnswer."""
    access = Access.of(options)
    idle = _idle.setdefault((work.url, access), [])
    client = idle.pop() if idle else Client(work.url, access)
    reader = _RangeReader(work, client, options, chunk or CHUNK)
    try:
        yield from reader.rows(schema)
        idle.append(client)
    finally:
        reader.close()
        if client not in idle:
            client.close()


class _RangeReader:
    def __init__(self, work: LogRange, client: Client, options: NsqOptions, chunk: int) -> None:
        self._work = work
        self._client = client
        self._options = options
        self._chunk = chunk
        self._bytes_per_number = work.size_bytes / max(1, work.end - work.start)
        self._stopped = Event()
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[Chunk | None]] | None = None
        """What is being fetched, and from which number on."""

    def close(self) -> None:
        """Let nothing run on; what is being fetched is broken off."""
        self._stopped.set()
        if self._thread is not None:
            if self._ahead is not None and not self._ahead[1].done():
                self._client.abort()
            self._thread.shutdown(wait=True, cancel_futures=True)

    def rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        work = self._work
        builder: RowBuilder | None = None
        at = work.start
        while at < work.end:
            chunk = self._take(at)
            if chunk is None:
                return
            if chunk.next < work.end:
                self._fetch_ahead(chunk.next)
            if builder is None:
                first_id = self._first_id(max(at, chunk.first)) if "id" in schema.names else 0
                builder = RowBuilder(schema, work.topic, work.node, first_id)
            builder.reached = at
            try:
                yield from builder.build(chunk.data, at, work.end, chunk.gaps)
            except CorruptRange as error:
                # Rows before it are out already. What can be read of the rest, nsqd picks out.
                logger.error("%s: %s; asking for what can be read", work, error)
                at = builder.reached
                chunk = self._verified(at)
                if chunk is None:
                    return
                yield from builder.build(chunk.data, at, work.end, chunk.gaps)
            at = chunk.next

    def _first_id(self, sequence: int) -> int:
        """Without a message nobody needs it."""
        work = self._work
        if work.first_id is not None:
            return work.first_id
        try:
            return self._client.first_id(work.topic, sequence) or 0
        except (Refused, Unreachable):
            return 0

    def _take(self, at: int) -> Chunk | None:
        """The piece from a number on; None if there is nothing more to be had."""
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

    def _verified(self, at: int) -> Chunk | None:
        if self._ahead is not None:
            # The connection is in use.
            self._ahead[1].result()
            self._ahead = None
        chunk = self._fetch(at, verify=True)
        if chunk is not None and chunk.lost:
            self._lose(f"{self._work}: {chunk.lost} messages are damaged")
        return chunk

    def _fetch(self, at: int, *, verify: bool = False) -> Chunk | None:
        work = self._work
        size = min(self._chunk, int((work.end - at) * self._bytes_per_number * 1.05) + MARGIN)
        patience = Patience(self._options.retry_for)
        while True:
            try:
                chunk = self._client.read(work.topic, at, size, work.incarnation, verify=verify)
                if chunk.next > at:
                    return chunk
                reason = f"the log ends at {chunk.latest}"
                break
            except Unreachable as error:
                if self._stopped.is_set():
                    return None
                if not patience.wait():
                    raise NoAnswer(f"{work}: {error}, for {self._options.retry_for:g} seconds") from error
            except Refused as refused:
                if refused.code == "OFFSET_GONE":
                    earliest = int(refused.details.get("earliest", 0))
                    if not (work.is_held and begins_epoch(earliest)):
                        self._lose(f"{work}: everything before {earliest} has been removed")
                    if not at < earliest < work.end:
                        return None
                    at = earliest
                elif refused.code in ("TOPIC_NOT_FOUND", "WRONG_INCARNATION"):
                    reason = "the topic has been deleted"
                    break
                elif refused.code == "OFFSET_AHEAD":
                    reason = f"the log ends at {refused.details.get('latest')}"
                    break
                elif refused.status < 500 or not patience.wait():
                    raise
        self._lose(f"{work}: {reason}, before {at} was read")
        return None

    def _lose(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLoss(what)
        logger.error("%s; going on without", what)
