"""A task's side of the sink: chunks on their way to nsqd, in order, several at a time, until each is
answered.

Two ways. Staged puts them aside for a transaction, each exactly once: a request says at which number its
messages begin, so one whose answer was lost is sent again and nsqd knows it. Published publishes them; what
was not answered is published again, to another nsqd if there is one.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn
from urllib.parse import quote

from nsparq.errors import NsparqError
from nsparq.spark.cluster.http_client import Access, Patience, Refused, Unreachable
from nsparq.spark.sink.nodes import SinkNode
from nsparq.spark.sink.pipe import Buffer, Pipe, Reply
from nsparq.spark.sink.rows import Chunk, RowError

__all__ = ["AlreadyCommitted", "Published", "Sender", "Staged", "StagingLost"]

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 32
"""On their way at a time; nsqd reads no further."""
MAX_BYTES: Final = 2 << 20
"""Of their bodies, unless it is one alone."""


class AlreadyCommitted(NsparqError):
    """nsqd has this transaction: the batch is being repeated."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"committed up to {sequence}")
        self.sequence = sequence


class StagingLost(NsparqError):
    """nsqd does not hold what it has said to hold. Nothing of the transaction has been published."""


class _Request(NamedTuple):
    chunk: Chunk
    target: str
    body: Sequence[Buffer]
    end: int
    """Messages sent with it and before it."""


class _TryAgain(OSError):
    """nsqd cannot do it now."""


class Sender(ABC):
    """Raises RowError for what nsqd does not take, Refused, and Unreachable when time is up."""

    in_any_order = False
    """Whether a request makes sense when one before it was not done."""

    def __init__(self, nodes: Sequence[SinkNode], access: Access, retry_for: float) -> None:
        """`nodes` in the order in which they are to be tried."""
        self._nodes = nodes
        self._access = access
        self._retry_for = retry_for
        self._node = 0
        self._pipe: Pipe | None = None
        self._unanswered: deque[_Request] = deque()
        self._bytes = 0
        self._sent = 0
        """How many of them have been sent on this connection."""
        self._patience: Patience | None = None
        """Since when nothing goes on."""
        self.messages = 0
        """Given to us so far."""

    @abstractmethod
    def requests(self, chunk: Chunk) -> list[tuple[str, Sequence[Buffer], int]]:
        """What has to be sent for it: targets, bodies, and the number of messages in each."""

    @abstractmethod
    def judge(self, request: _Request, reply: Reply) -> None:
        """Returns if the request is done. Raises _TryAgain, or what is to end it all."""

    def send(self, chunk: Chunk) -> None:
        for target, body, count in self.requests(chunk):
            self.messages += count
            request = _Request(chunk, target, body, self.messages)
            self._unanswered.append(request)
            self._bytes += _size(request)
            try:
                self._fill()
            except OSError as error:
                self._recover(error)
            while len(self._unanswered) > MAX_REQUESTS or (
                self._bytes > MAX_BYTES and len(self._unanswered) > 1
            ):
                self._take()

    def finish(self) -> int:
        """Wait for all answers; gives the number of messages."""
        while self._unanswered:
            self._take()
        return self.messages

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        self._sent = 0
        if pipe is not None:
            with suppress(OSError):
                pipe.close()

    def _take(self) -> None:
        """The next answer."""
        try:
            self._hear()
        except OSError as error:
            self._recover(error)

    def _fill(self) -> None:
        """Send what has not been sent yet."""
        while self._sent < len(self._unanswered):
            self._send_next()

    def _send_next(self) -> None:
        if self._pipe is None:
            self._pipe = Pipe(self._nodes[self._node].url, self._access)
        request = self._unanswered[self._sent]
        # Counted before: of a request that was sent in part an answer may come as well.
        self._sent += 1
        self._pipe.send(request.target, request.body)

    def _hear(self) -> None:
        assert self._pipe is not None
        reply = self._pipe.receive()
        self.judge(self._unanswered[0], reply)
        self._drop()
        self._patience = None

    def _drop(self) -> _Request:
        request = self._unanswered.popleft()
        self._bytes -= _size(request)
        self._sent -= 1
        return request

    def _recover(self, error: OSError) -> None:
        """The connection is of no use any more: have another, in time."""
        if isinstance(error, _TryAgain) and self.in_any_order:
            self._keep_failed()
        elif self._pipe is not None and not isinstance(error, (TimeoutError, _TryAgain)):
            # nsqd may have said why before it closed.
            with suppress(OSError):
                while self._sent:
                    self._hear()
        self.close()
        while self._unanswered:
            node = self._nodes[self._node]
            if self._patience is None:
                self._patience = Patience(self._retry_for)
                logger.warning("%s: %s; trying again", node, error)
            if not self._patience.wait():
                raise Unreachable(f"{node}: {error}, for {self._retry_for:g} s") from error
            self._node = (self._node + 1) % len(self._nodes)
            try:
                # One alone first, so that something goes on even if connections do not last.
                self._send_next()
                self._hear()
                self._fill()
                return
            except OSError as next_error:
                error = next_error
                self.close()

    def _keep_failed(self) -> None:
        """One was refused for now. Those behind it may have been done, and are not to be sent again."""
        failed = [self._drop()]
        with suppress(OSError):
            while self._sent:
                try:
                    self._hear()
                except _TryAgain:
                    failed.append(self._drop())
        for request in reversed(failed):
            self._unanswered.appendleft(request)
            self._bytes += _size(request)

    def _refuse(self, request: _Request, reply: Reply) -> NoReturn:
        chunk, code = request.chunk, reply.code
        node = self._nodes[self._node]
        if reply.status >= 500 or reply.status in (408, 429):
            raise _TryAgain(f"{reply.status} {code}")
        if reply.status == 413:
            raise RowError(
                f"{node} does not take a message of topic {chunk.topic}: {code}; the largest of those that "
                f"were sent with it has {chunk.largest()} bytes (see nsqd's --max-msg-size and "
                "--max-body-size)"
            )
        if "DEFER" in code:
            raise RowError(
                f"{node} does not take a delay of {chunk.defer_ms} ms (see nsqd's --max-req-timeout): {code}"
            )
        raise Refused(f"POST {node}{request.target.partition('?')[0]}", reply.status, code, reply.details())


class Staged(Sender):
    """Puts chunks aside on one node, in one part of a transaction. Raises AlreadyCommitted, StagingLost
    too."""

    def __init__(
        self, node: SinkNode, access: Access, retry_for: float, producer: str, sequence: int, part: str
    ) -> None:
        super().__init__([node], access, retry_for)
        self._target = f"/transaction/stage?producer={quote(producer)}&sequence={sequence}&part={quote(part)}"

    def requests(self, chunk: Chunk) -> list[tuple[str, Sequence[Buffer], int]]:
        target = f"{self._target}&topic={quote(chunk.topic)}&at={self.messages}"
        if chunk.defer_ms:
            target += f"&defer={chunk.defer_ms}"
        return [(target, [chunk.head, *chunk.pieces], chunk.messages)]

    def judge(self, request: _Request, reply: Reply) -> None:
        details = reply.details()
        match reply.status, reply.code:
            case 200, _ if details.get("messages") == request.end:
                return
            case 409, "WRONG_POSITION" if details.get("messages", 0) >= request.end:
                # It had come before, and only its answer was lost.
                return
            case (200, _) | (409, "WRONG_POSITION"):
                raise StagingLost(
                    f"{self._nodes[0]} holds {details.get('messages')} messages of a part where it should "
                    f"hold {request.end - request.chunk.messages} or {request.end}"
                )
            case 409, "ALREADY_COMMITTED":
                raise AlreadyCommitted(int(details["sequence"]))
        self._refuse(request, reply)


class Published(Sender):
    """Publishes chunks at once, at least once."""

    in_any_order = True

    def requests(self, chunk: Chunk) -> list[tuple[str, Sequence[Buffer], int]]:
        topic = quote(chunk.topic)
        if chunk.defer_ms:
            # NSQ has no way to publish several deferred messages together.
            target = f"/pub?topic={topic}&defer={chunk.defer_ms}"
            return [(target, [body], 1) for body in chunk.bodies()]
        return [(f"/mpub?topic={topic}&binary=true", [chunk.head, *chunk.pieces], chunk.messages)]

    def judge(self, request: _Request, reply: Reply) -> None:
        if reply.status != 200:
            self._refuse(request, reply)


def _size(request: _Request) -> int:
    return sum(map(len, request.body))
