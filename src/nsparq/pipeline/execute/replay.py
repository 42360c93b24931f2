"""Messages of an archive, or of a time range of a topic, published again: in their order, at a rate.

With nsparq's nsqd a replay that has a name can be broken off and taken up: each chunk is a transaction whose
number is how many messages have been published with it, so nsqd itself knows how far the replay has come.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final
from uuid import uuid4

from nsparq.errors import NsparqError
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Backoff, Refused, Unreachable

__all__ = ["MAX_CHUNK", "Publisher", "ReplayFailed", "chunks", "committed", "replay"]

logger = logging.getLogger(__name__)

PRODUCER: Final = "nsparq-replay:"
MAX_CHUNK: Final = 2000
MAX_CHUNK_BYTES: Final = 1 << 20
CHUNKS_PER_SECOND: Final = 10
PATIENCE_S: Final = 60.0

Progress = Callable[[int], None]


class ReplayFailed(NsparqError):
    """nsqd does not take the messages."""


def committed(client: Client, name: str) -> int | None:
    """How many messages nsqd has of the replay of this name; None if it knows none. Raises Refused,
    Unreachable."""
    answer = client.get("/transaction", producer=f"{PRODUCER}{name}", sequence=0).json()
    found: int | None = answer["committed_sequence"]
    return found


class Publisher:
    """Publishes chunks to one nsqd, exactly once if that knows transactions."""

    def __init__(self, client: Client, topic: str, name: str = "") -> None:
        """Under its name a replay can be taken up again. Raises ReplayFailed."""
        self._client, self._topic = client, topic
        own_name = name or uuid4().hex
        self._producer = f"{PRODUCER}{own_name}"
        self.published = 0
        """How many messages nsqd has of this replay, earlier runs included."""
        self._part = uuid4().hex[:12]
        self.is_exact = True
        try:
            self.published = committed(client, own_name) or 0
        except Refused as error:
            if error.status != 404:
                raise ReplayFailed(str(error)) from error
            self.is_exact = False
            if name:
                raise ReplayFailed(
                    f"{client.url} is no nsqd of nsparq: a replay there cannot have a name"
                ) from None
        except Unreachable as error:
            raise ReplayFailed(str(error)) from error

    def publish(self, bodies: list[bytes]) -> None:
        """Raises ReplayFailed."""
        packed = struct.pack(">I", len(bodies)) + b"".join(
            struct.pack(">I", len(body)) + body for body in bodies
        )
        if not self.is_exact:
            self._send("/mpub", packed, topic=self._topic, binary="true")
        else:
            self._transact(packed, len(bodies))
        self.published += len(bodies)

    def _transact(self, packed: bytes, count: int) -> None:
        named: dict[str, str | int] = {"producer": self._producer, "sequence": self.published + count}

        def is_there(error: Refused) -> bool:
            """An answer was lost, and the messages are where they should be."""
            is_staged = error.code == "WRONG_POSITION" and error.details.get("messages") == count
            return is_staged or error.code == "ALREADY_COMMITTED"

        where: dict[str, str | int] = {"part": self._part, "topic": self._topic, "at": 0}
        self._send("/transaction/stage", packed, is_there, **named, **where)
        parts = json.dumps({"parts": {self._part: count}}).encode()
        self._send("/transaction/commit", parts, is_there, **named)

    def _send(
        self,
        path: str,
        body: bytes,
        is_done: Callable[[Refused], bool] = lambda error: False,
        **parameters: str | int,
    ) -> None:
        patience = Backoff(PATIENCE_S)
        while True:
            try:
                self._client.post(path, body, **parameters)
                return
            except Refused as error:
                if is_done(error):
                    return
                if error.status != 503:
                    raise ReplayFailed(str(error)) from error
                self._wait(patience, error)
            except Unreachable as error:
                self._wait(patience, error)

    def _wait(self, patience: Backoff, error: NsparqError) -> None:
        if not patience.wait():
            raise ReplayFailed(str(error)) from error


def chunks(bodies: Iterable[bytes], rate: float) -> Iterator[list[bytes]]:
    """As many messages at a time as a tenth of a second takes, and no more than nsqd takes."""
    most = MAX_CHUNK if not rate else max(1, min(MAX_CHUNK, int(rate / CHUNKS_PER_SECOND)))
    chunk: list[bytes] = []
    size = 0
    for body in bodies:
        if chunk and (len(chunk) >= most or size + len(body) > MAX_CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(body)
        size += len(body) + 4
    if chunk:
        yield chunk


def replay(
    bodies: Iterable[bytes],
    publisher: Publisher,
    rate: float,
    progress: Progress,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Publish them in order, those left out that an earlier run has published. How many this one has.

    `progress` is told how many messages have been dealt with. Raises ReplayFailed.
    """
    skip = publisher.published
    if skip:
        logger.info("%d messages were published by an earlier run", skip)
        progress(skip)
    begun, done = clock(), 0
    for chunk in chunks(_without_first(bodies, skip), rate):
        if rate and stop.wait(max(0.0, begun + done / rate - clock())):
            break
        if stop.is_set():
            break
        publisher.publish(chunk)
        done += len(chunk)
        progress(len(chunk))
    return done


def _without_first(bodies: Iterable[bytes], count: int) -> Iterator[bytes]:
    for place, body in enumerate(bodies):
        if place >= count:
            yield body
