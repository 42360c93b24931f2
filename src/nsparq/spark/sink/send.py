"""The task's part of the sink: sends chunks to nsqd, in order, several at a time.

There are two senders. Staged stages chunks for a transaction, each exactly once: a request has the
number of its first message, so nsqd recognises a request that is sent again. Published publishes
them at once; a request without an answer is sent again, to another nsqd if there is one.
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
from nsparq.spark.cluster.http_client import Access, Answer, Backoff, Refused, Unreachable
from nsparq.spark.sink.nodes import FindAgain, SinkNode
from nsparq.spark.sink.pipe import Buffer, Pipe
from nsparq.spark.sink.rows import Chunk, RowError

__all__ = ["AlreadyCommitted", "Published", "Sender", "Staged", "StagingLost"]

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 32
"""Limit on unanswered requests; nsqd reads no further."""
MAX_BYTES: Final = 2 << 20
"""Limit on the bytes of unanswered requests, except for a single one."""


class AlreadyCommitted(NsparqError):
    """nsqd has committed this transaction before: the batch is being repeated."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"committed up to {sequence}")
        self.sequence = sequence


class StagingLost(NsparqError):
    """nsqd has lost staged messages. Nothing of the transaction has been published."""


class _Request(NamedTuple):
    chunk: Chunk
    target: str
    body: Sequence[Buffer]
    end: int
    """Number of messages in it and in all requests before it."""


class _TryAgain(OSError):
    """nsqd cannot carry out the request now."""


class Sender(ABC):
    """Raises RowError for messages that nsqd refuses, Refused, and Unreachable."""

    in_any_order = False
    """Whether requests are independent of each other."""

    def __init__(
        self, nodes: Sequence[SinkNode], access: Access, retry_for: float, find_again: FindAgain | None = None
    ) -> None:
        """`nodes` are tried in this order. `find_again` says where a node is that does not
        answer."""
        self._nodes = [*nodes]
        self._find_again = find_again
        self._access = access
        self._retry_for = retry_for
        self._node = 0
        self._pipe: Pipe | None = None
        self._unanswered: deque[_Request] = deque()
        self._bytes = 0
        self._sent = 0
        """How many of the unanswered requests were sent on this connection."""
        self._backoff: Backoff | None = None
        """Runs since the last answer, while requests fail."""
        self.messages = 0
        """Number of messages passed to send() so far."""

    @abstractmethod
    def requests(self, chunk: Chunk) -> list[tuple[str, Sequence[Buffer], int]]:
        """The requests for a chunk: target, body and number of messages of each."""

    @abstractmethod
    def check(self, request: _Request, answer: Answer) -> None:
        """Raises _TryAgain, or an error that ends the task."""

    def send(self, chunk: Chunk) -> None:
        for target, body, count in self.requests(chunk):
            self.messages += count
            request = _Request(chunk, target, body, self.messages)
            self._unanswered.append(request)
            self._bytes += _size(request)
            try:
                self._send_all()
            except OSError as error:
                self._recover(error)
            while len(self._unanswered) > MAX_REQUESTS or (
                self._bytes > MAX_BYTES and len(self._unanswered) > 1
            ):
                self._await_answer()

    def finish(self) -> int:
        """Wait for all answers. Returns the number of messages."""
        while self._unanswered:
            self._await_answer()
        return self.messages

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        self._sent = 0
        if pipe is not None:
            with suppress(OSError):
                pipe.close()

    def _await_answer(self) -> None:
        try:
            self._receive()
        except OSError as error:
            self._recover(error)

    def _send_all(self) -> None:
        while self._sent < len(self._unanswered):
            self._send_next()

    def _send_next(self) -> None:
        if self._pipe is None:
            self._pipe = Pipe(self._nodes[self._node].url, self._access)
        request = self._unanswered[self._sent]
        # Counted before sending: nsqd may also answer a request that was sent in part.
        self._sent += 1
        self._pipe.send(request.target, request.body)

    def _receive(self) -> None:
        assert self._pipe is not None
        self.check(self._unanswered[0], self._pipe.receive())
        self._pop()
        self._backoff = None

    def _pop(self) -> _Request:
        request = self._unanswered.popleft()
        self._bytes -= _size(request)
        self._sent -= 1
        return request

    def _recover(self, error: OSError) -> None:
        """Open another connection, with retries, and send the unanswered requests again."""
        if isinstance(error, _TryAgain) and self.in_any_order:
            self._keep_failed()
        elif self._pipe is not None and not isinstance(error, (TimeoutError, _TryAgain)):
            # nsqd may have answered before it closed the connection.
            with suppress(OSError):
                while self._sent:
                    self._receive()
        self.close()
        while self._unanswered:
            node = self._nodes[self._node]
            if self._backoff is None:
                self._backoff = Backoff(self._retry_for)
                logger.warning("%s: %s; trying again", node, error)
            if not self._backoff.wait():
                raise Unreachable(f"{node}: {error}, for {self._retry_for:g} s (option retryFor)") from error
            self._node = (self._node + 1) % len(self._nodes)
            if self._find_again is not None:
                self._nodes[self._node] = self._find_again(self._nodes[self._node])
            try:
                # A single request first: progress even if connections are short-lived.
                self._send_next()
                self._receive()
                self._send_all()
                return
            except OSError as next_error:
                error = next_error
                self.close()

    def _keep_failed(self) -> None:
        """Keep only the failed requests: others behind the first may have succeeded."""
        failed = [self._pop()]
        with suppress(OSError):
            while self._sent:
                try:
                    self._receive()
                except _TryAgain:
                    failed.append(self._pop())
        for request in reversed(failed):
            self._unanswered.appendleft(request)
            self._bytes += _size(request)

    def _raise_for(self, request: _Request, answer: Answer) -> NoReturn:
        chunk, code = request.chunk, answer.code
        node = self._nodes[self._node]
        if answer.status >= 500 or answer.status in (408, 429):
            raise _TryAgain(f"{answer.status} {code}")
        if answer.status == 413:
            raise RowError(
                f"{node} refuses messages of topic {chunk.topic}: {code}. The largest one of the request has "
                f"{chunk.largest()} bytes (see nsqd's --max-msg-size and --max-body-size)"
            )
        if "DEFER" in code:
            raise RowError(
                f"{node} refuses a delay of {chunk.defer_ms} ms (see nsqd's --max-req-timeout): {code}"
            )
        path = request.target.partition("?")[0]
        raise Refused(f"POST {node}{path}", answer.status, code, answer.details())


class Staged(Sender):
    """Stages one part of a transaction. Also raises AlreadyCommitted, StagingLost."""

    def __init__(
        self,
        node: SinkNode,
        access: Access,
        retry_for: float,
        producer: str,
        sequence: int,
        part: str,
        find_again: FindAgain | None = None,
    ) -> None:
        super().__init__([node], access, retry_for, find_again)
        self._target = f"/transaction/stage?producer={quote(producer)}&sequence={sequence}&part={quote(part)}"

    def requests(self, chunk: Chunk) -> list[tuple[str, Sequence[Buffer], int]]:
        target = f"{self._target}&topic={quote(chunk.topic)}&at={self.messages}"
        if chunk.defer_ms:
            target += f"&defer={chunk.defer_ms}"
        if chunk.has_headers:
            target += "&headers=true"
        return [(target, [chunk.head, *chunk.pieces], chunk.messages)]

    def check(self, request: _Request, answer: Answer) -> None:
        details = answer.details()
        match answer.status, answer.code:
            case 200, _ if details.get("messages") == request.end:
                return
            case 409, "WRONG_POSITION" if details.get("messages", 0) >= request.end:
                # nsqd has the messages; only its first answer was lost.
                return
            case (200, _) | (409, "WRONG_POSITION"):
                raise StagingLost(
                    f"{self._nodes[0]} has {details.get('messages')} messages of a part and should have "
                    f"{request.end - request.chunk.messages} or {request.end}"
                )
            case 409, "ALREADY_COMMITTED":
                raise AlreadyCommitted(int(details["sequence"]))
        self._raise_for(request, answer)


class Published(Sender):
    """Publishes chunks at once, at least once."""

    in_any_order = True

    def requests(self, chunk: Chunk) -> list[tuple[str, Sequence[Buffer], int]]:
        topic = quote(chunk.topic)
        if chunk.defer_ms:
            # NSQ cannot publish several deferred messages in one request.
            target = f"/pub?topic={topic}&defer={chunk.defer_ms}"
            return [(target, [body], 1) for body in chunk.bodies()]
        target = f"/mpub?topic={topic}&binary=true{'&headers=true' if chunk.has_headers else ''}"
        return [(target, [chunk.head, *chunk.pieces], chunk.messages)]

    def check(self, request: _Request, answer: Answer) -> None:
        if answer.status != 200:
            self._raise_for(request, answer)


def _size(request: _Request) -> int:
    return sum(map(len, request.body))
