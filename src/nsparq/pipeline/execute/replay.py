"""`nsparq pipeline replay`: publishes messages again, in their order, at a given rate.

With nsparq's nsqd a replay that has a name can be interrupted and continued. Each chunk is a
transaction whose sequence number is the count of messages published so far, so nsqd knows the
progress of the replay.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final
from uuid import uuid4

from nsparq.errors import NsparqError
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Backoff, Refused, Unreachable

logger = logging.getLogger(__name__)

PRODUCER: Final = "nsparq-replay:"
MAX_CHUNK: Final = 2000
MAX_CHUNK_BYTES: Final = 1 << 20
CHUNKS_PER_SECOND: Final = 10
PATIENCE_S: Final = 60.0

Progress = Callable[[int], None]
Message = tuple[bytes, bytes]
"""Header block and body."""


class ReplayFailed(NsparqError):
    """nsqd does not accept the messages."""


def committed(client: Client, name: str) -> int | None:
    """How many messages of this replay nsqd has. None if it does not know the replay. Raises
    Refused, Unreachable."""
    answer = client.get("/transaction", producer=f"{PRODUCER}{name}", sequence=0).json()
    found: int | None = answer["committed_sequence"]
    return found


class Publisher:
    """Publishes chunks to one nsqd, exactly once if that nsqd has transactions."""

    def __init__(self, client: Client, topic: str, name: str = "") -> None:
        """A replay with a name can be continued later. Raises ReplayFailed."""
        self._client, self._topic = client, topic
        own_name = name or uuid4().hex
        self._producer = f"{PRODUCER}{own_name}"
        self.published = 0
        """How many messages of this replay nsqd has, including earlier runs."""
        self._part = uuid4().hex[:12]
        self.is_exact = True
        self._is_warned = False
        try:
            self.published = committed(client, own_name) or 0
        except Refused as error:
            if error.status != 404:
                raise ReplayFailed(str(error)) from error
            self.is_exact = False
            if name:
                raise ReplayFailed(
                    f"{client.url} is not an nsqd of nsparq: a replay to it cannot have a name"
                ) from None
        except Unreachable as error:
            raise ReplayFailed(str(error)) from error

    def publish(self, messages: list[Message]) -> None:
        """Raises ReplayFailed."""
        if self.is_exact:
            self._transact(_packed([_sized(block) + body for block, body in messages]), len(messages))
        else:
            if any(block for block, _ in messages) and not self._is_warned:
                logger.warning("%s is not an nsqd of nsparq: headers are left out", self._client.url)
                self._is_warned = True
            bodies = _packed([body for _, body in messages])
            self._send("/mpub", bodies, topic=self._topic, binary="true")
        self.published += len(messages)

    def _transact(self, packed: bytes, count: int) -> None:
        named: dict[str, str | int] = {"producer": self._producer, "sequence": self.published + count}

        def is_there(error: Refused) -> bool:
            """Whether an earlier attempt succeeded and only its answer was lost."""
            is_staged = error.code == "WRONG_POSITION" and error.details.get("messages") == count
            return is_staged or error.code == "ALREADY_COMMITTED"

        where: dict[str, str | int] = {"part": self._part, "topic": self._topic, "at": 0, "headers": "true"}
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


def _packed(messages: list[bytes]) -> bytes:
    """As in MPUB."""
    return struct.pack(">I", len(messages)) + b"".join(map(_sized, messages))


def _sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def chunks(messages: Iterable[Message], rate: float) -> Iterator[list[Message]]:
    """Chunks for a tenth of a second each, within the limits of nsqd."""
    most = MAX_CHUNK if not rate else max(1, min(MAX_CHUNK, int(rate / CHUNKS_PER_SECOND)))
    chunk: list[Message] = []
    size = 0
    for block, body in messages:
        length = len(block) + len(body)
        if chunk and (len(chunk) >= most or size + length > MAX_CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append((block, body))
        size += length + 8
    if chunk:
        yield chunk


def replay(
    messages: Iterable[Message],
    publisher: Publisher,
    rate: float,
    progress: Progress,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Publishes messages in order, without those that an earlier run has published. Returns how
    many.

    `progress` is called with the number of messages that are done. Raises ReplayFailed.
    """
    skip = publisher.published
    if skip:
        logger.info("skipping %d messages that an earlier run published", skip)
        progress(skip)
    begun, done = clock(), 0
    for chunk in chunks(islice(messages, skip, None), rate):
        if rate and stop.wait(max(0.0, begun + done / rate - clock())):
            break
        if stop.is_set():
            break
        publisher.publish(chunk)
        done += len(chunk)
        progress(len(chunk))
    return done
