"""HTTP/1.1 connections: bytes through httptools into requests, answers back in order.

Chosen by measuring (benchmarks/decisions/http_layer.py): a parser in C and a protocol of our own take half
the time per request of the general servers, because a publish is answered by a callback at the end of the
turn and needs no task. What a client can make us keep is bounded: its headers, its body, the answers that
it does not read, and the time that any of these may take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import httptools

from nsparq.errors import NsparqError
from nsparq.http import limits
from nsparq.http.api import (
    LATER,
    TEXT_TYPE,
    ApiError,
    Endpoint,
    Request,
    Response,
    Result,
    error_response,
    to_response,
)

if TYPE_CHECKING:
    from nsparq.http.server import HttpServer

logger = logging.getLogger(__name__)

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Layer(Protocol):
    """What lies between the socket and HTTP: TLS."""

    is_ended: bool
    """Whether the client has said inside the layer that nothing follows."""

    def receive(self, data: bytes) -> Iterator[bytes]: ...
    def send(self, data: bytes) -> bytes: ...
    def take_output(self) -> bytes: ...
    def close(self) -> None: ...


class Head(NamedTuple):
    """What a request's head says, once parsed, checked and routed."""

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    endpoint: Endpoint
    path_value: str
    length: int


class _Refused(Exception):
    """The request is answered before it is complete."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


class HttpConnection(asyncio.Protocol):
    """One client. Requests are answered one after the other, in the order in which they came."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._api = server.api
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._layer = server.layer() if server.layer else None
        self._parser = httptools.HttpRequestParser(self)
        self.deadline = self._loop.time() + limits.HEAD_S
        """When the connection ends if nothing happens until then."""
        self._peer, self._peer_port = "", 0
        self._queue: deque[tuple[Request, Response | None, bool]] = deque()
        """Complete requests that wait for their turn, the answer to those that need no handler, and whether
        the connection goes on after them."""
        self._queued_bytes = 0
        self._busy: Request | None = None
        self._busy_keeps = True
        self._task: asyncio.Task[None] | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_size = 0
        self._partial = 0
        """Bytes received since the head, or the last piece of the body, began to arrive."""
        self._in_head = False
        self._request: Request | None = None
        """The one whose body is arriving."""
        self._early: Response | None = None
        self._body: bytes | bytearray = b""
        self._body_size = 0
        self._kept = 0
        """What of it counts among the server's."""
        self._is_deaf = False
        """Nothing that still arrives is looked at."""
        self._is_finishing = False
        self._is_cut_short = False
        """Whether the client may still be sending what we do not want."""
        self._is_reading = True
        self._is_writable = True
        self._is_closed = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport
        transport.set_write_buffer_limits(limits.WRITE_HIGH)
        peer = transport.get_extra_info("peername")
        self._peer, self._peer_port = peer[:2] if isinstance(peer, tuple) else ("", 0)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._server.closed(self)
        self._server.slow.discard(self)
        self._server.gathered -= self._kept + self._queued_bytes
        self._kept = self._queued_bytes = 0
        if self._busy is not None:
            self._server.gathered -= len(self._busy.body)
            self._busy = None
        if self._task is not None:
            self._task.cancel()
        # The parser and the requests refer back to this object. The garbage collector hardly ever runs in a
        # daemon, so each such cycle would keep the connection, with the body that it was sending.
        del self._parser
        self._layer = self._task = self._request = None
        self._queue.clear()
        self._headers = []
        self._body = b""

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        layer = self._layer
        if layer is None:
            self._receive(data)
            return
        try:
            for piece in layer.receive(data):
                self._receive(piece)
        except NsparqError as error:
            logger.info("HTTPS client(%s): %s", self._peer, error)
            self._is_deaf = True
            self._end()
        self._write(b"")
        if layer.is_ended:
            self.eof_received()

    def _receive(self, data: bytes) -> None:
        is_start = not self._in_head and self._request is None and not self._is_deaf
        if not is_start or not self._receive_known(data):
            rest: bytes | memoryview = data
            while rest and not self._is_deaf:
                rest = self._feed(rest)
            if is_start and len(self._queue) == 1 and self._request is None and not self._in_head:
                self._remember(data)
        self._pump()

    def _receive_known(self, data: bytes) -> bool:
        """Take in a request that is whole and whose head is known, without parsing it again."""
        end = data.find(b"\r\n\r\n", 0, limits.MAX_KNOWN) + 4
        known = self._server.heads.get(data[:end]) if end > 4 else None
        if known is None or len(data) != end + known.length or self._server.refuse_all() is not None:
            return False
        if known.length and self._server.gathered + known.length > limits.MAX_GATHERED:
            return False
        request = Request(known.method, known.path, known.query, known.headers)
        request.peer, request.peer_port = self._peer, self._peer_port
        request.secure = self._layer
        request.endpoint, request.path_value = known.endpoint, known.path_value
        request._answer = self._on_answer
        if known.length and known.endpoint.keeps_body:
            request.body = data[end:]
            self._queued_bytes += known.length
            self._server.gathered += known.length
        self._queue.append((request, None, True))
        return True

    def _remember(self, data: bytes) -> None:
        """The bytes were one whole request, just parsed. Only what is plain in every way is remembered."""
        request, early, keeps = self._queue[0]
        end = data.find(b"\r\n\r\n", 0, limits.MAX_KNOWN) + 4
        endpoint = request.endpoint
        if end <= 4 or early is not None or not keeps or endpoint is None or request.is_old:
            return
        named = {name.lower(): value for name, value in request.headers}
        length = int(named.get(b"content-length", b"0"))
        if named.keys() & {b"expect", b"transfer-encoding", b"upgrade"} or len(data) != end + length:
            return
        if self._server.refuse_all() is None:
            heads = self._server.heads
            if len(heads) >= limits.MAX_HEADS:
                heads.clear()
            heads[data[:end]] = Head(
                request.method,
                request.path,
                request.query,
                request.headers,
                endpoint,
                request.path_value,
                length,
            )

    def _feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Have the parser take in what arrived; gives what it is to be fed next."""
        before = self._body_size
        rest: memoryview | None = None
        try:
            self._parser.feed_data(data)
            if self._in_head or (self._request is not None and self._body_size == before):
                # Headers or trailers that do not end, or chunks that never come.
                self._partial += len(data)
                if self._partial > limits.MAX_PARTIAL:
                    raise _Refused(_plain_error(431))
        except _Refused as refused:
            self._refuse(refused.response)
        except httptools.HttpParserCallbackError as error:
            self._refuse(_refusal(error))
        except httptools.HttpParserUpgrade as offer:
            rest = memoryview(data)[offer.args[0] :]
        except httptools.HttpParserError as error:
            logger.info("HTTP client(%s): not HTTP: %s", self._peer, error)
            self._refuse(_plain_error(400))
        if rest is None:
            return b""
        self._decline()
        return rest

    def _decline(self) -> None:
        """The client offers to speak something else, as some do with any first request. Nobody here does, and
        the parser leaves out the body then: it is to read the request as if there were no offer."""
        parser = self._parser
        if parser.get_method() == b"CONNECT":
            self._is_deaf = True
            self._is_finishing = True
            return
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self._headers if header[0].lower() != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*lines, b"", b""]))

    def eof_received(self) -> bool:
        """A client that is done sending still gets the answers to what it sent."""
        self._is_deaf = True
        self._is_finishing = True
        self._is_cut_short = False
        if self._busy is None and not self._queue:
            self._end()
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
        self._pump()

    @property
    def unread(self) -> int:
        """Bytes of answers that the client has not taken."""
        return self._transport.get_write_buffer_size()

    @property
    def _is_full(self) -> bool:
        return len(self._queue) >= limits.MAX_QUEUED or self._queued_bytes >= limits.MAX_QUEUED_BYTES

    def _adjust_reading(self) -> None:
        wanted = self._is_writable and not self._is_full
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            self._transport.resume_reading() if wanted else self._transport.pause_reading()

    # what the parser says

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_size = self._partial = 0
        self._url = b""
        self._headers = []
        self.deadline = self._loop.time() + limits.HEAD_S

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_size = len(self._url)
        if self._head_size > limits.MAX_HEAD:
            raise _Refused(_plain_error(414))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value) + 4
        if self._head_size > limits.MAX_HEAD:
            raise _Refused(_plain_error(431))
        if self._in_head:
            # Not a trailer, which says nothing that anybody here may go by.
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._partial = 0
        parser = self._parser
        if parser.should_upgrade() and parser.get_method() != b"CONNECT":
            return  # to come again: see _decline
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Refused(_plain_error(400 if version < "1" else 505))
        target = self._url.decode("latin-1")
        if not target.startswith(("/", "*")):
            target = _without_host(target)
        path, _, query = target.partition("?")
        request = Request(parser.get_method().decode("latin-1"), path, query, self._headers)
        request.peer, request.peer_port = self._peer, self._peer_port
        request.secure = self._layer
        request.is_old = version == "1.0"
        request._answer = self._on_answer
        self._request = request
        self._early = self._server.refuse_all() or self._api.route(request)
        length, is_chunked, expects, hosts = 0, False, False, 0
        for name, value in self._headers:
            match len(name):
                case 4 if name.lower() == b"host":
                    hosts += 1
                case 14 if name.lower() == b"content-length":
                    length = int(value)
                case 17 if name.lower() == b"transfer-encoding":
                    is_chunked = True
                    if value.strip().lower() != b"chunked":
                        raise _Refused(_plain_error(501))
                case 6 if name.lower() == b"expect":
                    expects = value.lower() == b"100-continue"
        if hosts > 1 or (not hosts and version == "1.1"):
            raise _Refused(_plain_error(400))
        self._check_size(length)
        if is_chunked or length:
            self.deadline = self._loop.time() + limits.BODY_S
            if self._server.gathered + length > limits.MAX_GATHERED and self._keeps_body:
                raise _Refused(error_response(503, "OVERLOADED"))
        if expects and self._early is None and self._busy is None and not self._queue:
            self._write(_CONTINUE)

    @property
    def _keeps_body(self) -> bool:
        request = self._request
        return (
            self._early is None
            and request is not None
            and request.endpoint is not None
            and request.endpoint.keeps_body
        )

    def _check_size(self, size: int) -> None:
        endpoint = self._request.endpoint if self._request else None
        if endpoint is not None and size > endpoint.max_body and self._early is None:
            raise _Refused(error_response(413, endpoint.too_big))
        if size > limits.MAX_DROPPED and self._early is not None:
            raise _Refused(self._early)

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        self._partial = 0
        self._check_size(self._body_size)
        if not self._keeps_body:
            return
        self._kept += len(body)
        self._server.gathered += len(body)
        if self._server.gathered > limits.MAX_GATHERED:
            raise _Refused(error_response(503, "OVERLOADED"))
        if not self._body:
            self._body = body
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += body

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        if request is None:
            return
        if self._body:
            request.body = bytes(self._body)
            self._body = b""
        self._queued_bytes += self._kept
        self._kept = self._body_size = 0
        self._queue.append((request, self._early, self._parser.should_keep_alive()))

    def _drop_body(self) -> None:
        self._server.gathered -= self._kept
        self._kept = self._body_size = 0
        self._body = b""

    # answering

    def _pump(self) -> None:
        """Answer what waits, as far as that can be done now."""
        queue = self._queue
        if len(queue) > 1:
            stop = time.monotonic() + limits.PUMP_S
        while queue and self._busy is None and self._is_writable and not self._is_closed:
            if len(queue) > 1 and time.monotonic() > stop:
                self._loop.call_soon(self._pump)
                break
            request, early, keeps = queue.popleft()
            self._queued_bytes -= len(request.body)
            self._busy_keeps = keeps
            if early is not None:
                self._send(early, request, keeps)
                continue
            self._busy = request
            try:
                if self._server.is_overloaded:
                    raise ApiError(503, "OVERLOADED")
                result = self._api.handle(request)
            except Exception as error:
                self._on_answer(error)
                continue
            if isinstance(result, Awaitable):
                self._task = asyncio.ensure_future(self._wait_for(result))
            elif result is not LATER:
                self._on_answer(result)  # type: ignore[arg-type]  # there is but one Later
        if self._is_full == self._is_reading:
            self._adjust_reading()
        if self._is_finishing and not queue and self._busy is None:
            self._end()

    async def _wait_for(self, result: Awaitable[Result]) -> None:
        answer: Result | Exception
        try:
            answer = await result
        except Exception as error:
            answer = error
        self._task = None
        self._on_answer(answer)
        self._pump()

    def _on_answer(self, result: Result | Exception) -> None:
        """The request that is being worked on has its answer."""
        request, self._busy = self._busy, None
        if request is None:
            return
        request._answer = None
        self._server.gathered -= len(request.body)
        if self._is_closed:
            return
        response = self._from_error(request, result) if isinstance(result, Exception) else to_response(result)
        self._send(response, request, self._busy_keeps)
        if self._queue or self._is_finishing:
            self._loop.call_soon(self._pump)

    def _from_error(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            return error_response(error.status, error.code, error.headers, **error.more)
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return error_response(500, "INTERNAL_ERROR")

    def _send(self, response: Response, request: Request, keeps: bool) -> None:
        # What waits behind it has been asked before the end, and is answered too.
        keeps = keeps and (not self._is_finishing or bool(self._queue))
        self._write(self._server.encode(response, request, keeps))
        if len(response.body) >= limits.LARGE and request.method != "HEAD":
            self._write(response.body)
        if keeps:
            self.deadline = self._loop.time() + limits.IDLE_S
        else:
            self._is_deaf = True
            self._is_finishing = True
            self._server.gathered -= self._queued_bytes
            self._queued_bytes = 0
            self._queue.clear()

    def _write(self, data: bytes) -> None:
        if self._is_closed:
            return
        layer = self._layer
        if layer is None:
            self._transport.write(data)
            return
        encoded = layer.take_output() + (layer.send(data) if data else b"")
        if encoded:
            self._transport.write(encoded)

    def _refuse(self, response: Response) -> None:
        """The request cannot be taken in: say so after the answers before it, and hear no more."""
        self._drop_body()
        self._request = None
        self._is_deaf = True
        self._is_finishing = True
        self._is_cut_short = True
        self._queue.append((Request("", "", "", []), response, False))

    # the end

    def _end(self) -> None:
        """Everything is said."""
        if self._transport.is_closing():
            return
        self._is_deaf = True
        if self._layer is not None:
            self._layer.close()
            self._write(b"")
        if not self._is_cut_short:
            self._transport.close()
            return
        # Closing on unread input would reset the connection, perhaps before our answer has been read.
        self._is_cut_short = False
        self.deadline = self._loop.time() + limits.LINGER_S
        if self._layer is None:
            self._transport.write_eof()

    def finish(self) -> None:
        """The daemon stops: answer what is under way, then go."""
        self._is_finishing = True
        self._is_deaf = True
        if self._busy is None and not self._queue:
            self._end()

    def expire(self) -> None:
        """Time is up."""
        if self._busy is not None:
            self.deadline = self._loop.time() + limits.BODY_S
            return
        if self._in_head or self._request is not None:
            logger.info("HTTP client(%s): too slow; closing", self._peer)
        self.abort()

    def abort(self) -> None:
        self._transport.abort()


def _refusal(error: httptools.HttpParserCallbackError) -> Response:
    """The answer to a request that one of our callbacks did not accept. Not a part of the method that fed the
    parser: the cause refers to that method's frame, and a local name for it there would be a cycle."""
    cause = error.__context__
    if isinstance(cause, _Refused):
        return cause.response
    logger.error("internal error while reading a request", exc_info=cause)
    return error_response(500, "INTERNAL_ERROR")


def _plain_error(status: int) -> Response:
    text = f"{status} {HTTPStatus(status).phrase}"
    return Response(status=status, body=text.encode(), content_type=TEXT_TYPE, nsq_header=False)


def _without_host(target: str) -> str:
    """The path of a target in absolute form, as proxies send it."""
    _, separator, rest = target.partition("://")
    slash = rest.find("/")
    return rest[slash:] if separator and slash >= 0 else target
