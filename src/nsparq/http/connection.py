"""HTTP/1.1 connections: requests from a RequestReader, responses back in the same order.

A protocol of our own takes half the time per request of the general servers
(benchmarks/decisions/http_layer.py): a callback at the end of the turn answers a publish, without a
task. A client that does not read its responses is not read from.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Protocol

from nsparq.errors import NsparqError
from nsparq.http import limits
from nsparq.http.api import LATER, ApiError, Request, Response, Result, error_response, to_response
from nsparq.http.reading import RequestReader

if TYPE_CHECKING:
    from nsparq.http.server import HttpServer

logger = logging.getLogger(__name__)

Queued = tuple[Request, Response | None, bool]
"""A request, its response if it needs no handler, and whether the connection stays open."""


class Layer(Protocol):
    """TLS, between the socket and HTTP."""

    is_ended: bool
    """The client has closed its side of the layer."""

    def receive(self, data: bytes) -> Iterator[bytes]: ...
    def send(self, data: bytes) -> bytes: ...
    def take_output(self) -> bytes: ...
    def close(self) -> None: ...


class HttpConnection(asyncio.Protocol):
    """One client. Requests are answered one at a time, in order."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._layer = server.layer() if server.layer else None
        self._reader = RequestReader(self, server)
        self.deadline = self._loop.time() + limits.HEAD_S
        """When the connection ends if nothing happens before."""
        self.peer, self._peer_port = "", 0
        self._queue: deque[Queued] = deque()
        """Complete requests that wait for their turn."""
        self._queued_bytes = 0
        self._busy: Request | None = None
        """The request whose handler is working."""
        self._busy_keeps_alive = True
        self._task: asyncio.Task[None] | None = None
        self.ignores_input = False
        self._is_finishing = False
        """The connection ends when the queue is empty."""
        self._may_have_unread_input = False
        """The client may still be sending a request that was refused."""
        self._is_reading = True
        self._is_writable = True
        self._is_closed = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport
        transport.set_write_buffer_limits(limits.WRITE_HIGH)
        peer = transport.get_extra_info("peername")
        self.peer, self._peer_port = peer[:2] if isinstance(peer, tuple) else ("", 0)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._server.closed(self)
        self._server.slow.discard(self)
        self._forget_queue()
        if self._busy is not None:
            self._server.gathered -= len(self._busy.body)
            self._busy = None
        if self._task is not None:
            self._task.cancel()
        # Break the reference cycles: the garbage collector hardly ever runs in a daemon.
        self._reader.close()
        del self._reader
        self._layer = self._task = None

    def data_received(self, data: bytes) -> None:
        if self.ignores_input:
            return
        layer = self._layer
        if layer is None:
            self._reader.receive(data)
            self._answer_queued()
            return
        try:
            for piece in layer.receive(data):
                self._reader.receive(piece)
                self._answer_queued()
        except NsparqError as error:
            logger.info("HTTPS client(%s): %s", self.peer, error)
            self.ignores_input = True
            self._end()
        self.write(b"")
        if layer.is_ended:
            self.eof_received()

    def eof_received(self) -> bool:
        """A client that has sent everything still gets its responses."""
        self._may_have_unread_input = False
        self.finish()
        return True

    def pause_writing(self) -> None:
        self._is_writable = False
        self._server.slow.add(self)
        self.deadline = self._loop.time() + limits.BODY_S
        self._adjust_reading()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._server.slow.discard(self)
        self.deadline = self._loop.time() + limits.IDLE_S
        self._adjust_reading()
        self._answer_queued()

    # For the reader

    @property
    def is_idle(self) -> bool:
        return self._busy is None and not self._queue

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    @property
    def first_in_queue(self) -> Queued:
        return self._queue[0]

    def new_request(self, method: str, path: str, query: str, headers: list[tuple[bytes, bytes]]) -> Request:
        request = Request(method, path, query, headers)
        request.peer, request.peer_port = self.peer, self._peer_port
        request.secure = self._layer
        request._answer = self._on_answer
        return request

    def add_request(self, request: Request, early: Response | None, keep_alive: bool) -> None:
        """Queue a complete request. `server.gathered` already includes its body."""
        self._queued_bytes += len(request.body)
        self._queue.append((request, early, keep_alive))

    def refuse(self, response: Response) -> None:
        """Send the response after those of earlier requests, and read no more."""
        self.finish_after_queue()
        self._may_have_unread_input = True
        self._queue.append((Request("", "", "", []), response, False))

    def finish_after_queue(self) -> None:
        self.ignores_input = True
        self._is_finishing = True

    # Answering

    def _answer_queued(self) -> None:
        """Answer requests until one has to wait, or the time of this client is up."""
        queue = self._queue
        if len(queue) > 1:
            stop = time.monotonic() + limits.PUMP_S
        while queue and self._busy is None and self._is_writable and not self._is_closed:
            if len(queue) > 1 and time.monotonic() > stop:
                self._loop.call_soon(self._answer_queued)
                break
            request, early, keep_alive = queue.popleft()
            self._queued_bytes -= len(request.body)
            self._busy_keeps_alive = keep_alive
            if early is not None:
                self._send(early, request, keep_alive)
                continue
            self._busy = request
            try:
                if self._server.is_overloaded:
                    raise ApiError(503, "OVERLOADED")
                result = self._server.api.handle(request)
            except Exception as error:
                self._on_answer(error)
                continue
            if isinstance(result, Awaitable):
                self._task = asyncio.ensure_future(self._wait_for(result))
            elif result is not LATER:
                self._on_answer(result)  # type: ignore[arg-type]  # LATER is the only Later
        if queue or not self._is_reading:
            self._adjust_reading()
        if self._is_finishing and self.is_idle:
            self._end()

    async def _wait_for(self, result: Awaitable[Result]) -> None:
        answer: Result | Exception
        try:
            answer = await result
        except Exception as error:
            answer = error
        self._task = None
        self._on_answer(answer)
        self._answer_queued()

    def _on_answer(self, result: Result | Exception) -> None:
        """Send the response to the request that a handler was working on."""
        request, self._busy = self._busy, None
        if request is None:
            return
        request._answer = None
        self._server.gathered -= len(request.body)
        if self._is_closed:
            return
        response = _from_error(request, result) if isinstance(result, Exception) else to_response(result)
        self._send(response, request, self._busy_keeps_alive)
        if self._queue or self._is_finishing:
            self._loop.call_soon(self._answer_queued)

    def _send(self, response: Response, request: Request, keep_alive: bool) -> None:
        # When the server stops, the queued requests are answered, too.
        keep_alive = keep_alive and (not self._is_finishing or bool(self._queue))
        self.write(self._server.encode(response, request, keep_alive))
        if len(response.body) >= limits.LARGE and request.method != "HEAD":
            self.write(response.body)
        if keep_alive:
            self.deadline = self._loop.time() + limits.IDLE_S
        else:
            self.finish_after_queue()
            self._forget_queue()

    def _forget_queue(self) -> None:
        self._server.gathered -= self._queued_bytes
        self._queued_bytes = 0
        self._queue.clear()

    def write(self, data: bytes) -> None:
        if self._is_closed:
            return
        layer = self._layer
        if layer is None:
            self._transport.write(data)
            return
        encoded = layer.take_output() + (layer.send(data) if data else b"")
        if encoded:
            self._transport.write(encoded)

    @property
    def unread(self) -> int:
        """Bytes of responses that the client has not read."""
        return self._transport.get_write_buffer_size()

    @property
    def _is_full(self) -> bool:
        return len(self._queue) >= limits.MAX_QUEUED or self._queued_bytes >= limits.MAX_QUEUED_BYTES

    def _adjust_reading(self) -> None:
        wanted = self._is_writable and not self._is_full
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            self._transport.resume_reading() if wanted else self._transport.pause_reading()

    # Ending

    def finish(self) -> None:
        """Answer the requests that have arrived, then end."""
        self.finish_after_queue()
        if self.is_idle:
            self._end()

    def _end(self) -> None:
        if self._transport.is_closing():
            return
        self.ignores_input = True
        if self._layer is not None:
            self._layer.close()
            self.write(b"")
        if not self._may_have_unread_input:
            self._transport.close()
            return
        # Closing with unread input resets the connection, perhaps before the client has read our
        # response.
        self._may_have_unread_input = False
        self.deadline = self._loop.time() + limits.LINGER_S
        if self._layer is None:
            self._transport.write_eof()

    def expire(self) -> None:
        """The deadline has passed."""
        if self._busy is not None:
            self.deadline = self._loop.time() + limits.BODY_S
            return
        if not self._reader.is_between_requests:
            logger.info("HTTP client(%s): too slow; closing", self.peer)
        self.abort()

    def abort(self) -> None:
        self._transport.abort()


def _from_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error_response(error.status, error.code, error.headers, **error.more)
    logger.error("%s %s failed", request.method, request.path, exc_info=error)
    return error_response(500, "INTERNAL_ERROR")
