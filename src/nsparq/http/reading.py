"""The reading side of an HTTP connection: bytes in, complete requests out.

httptools, a parser in C, calls the `on_…` methods. Everything that a client can make us keep is
limited: its headers, its body, and the time that they may take. See nsparq.http.limits.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

import httptools

from nsparq.http import limits
from nsparq.http.api import TEXT_TYPE, Endpoint, Request, Response, error_response

if TYPE_CHECKING:
    from nsparq.http.connection import HttpConnection
    from nsparq.http.server import HttpServer

logger = logging.getLogger(__name__)

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Head(NamedTuple):
    """The head of a request after parsing, checks and routing."""

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    endpoint: Endpoint
    path_value: str
    length: int


class _Refused(Exception):
    """The request gets this response before it is complete."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


class RequestReader:
    """Gives each complete request of a connection to its add_request()."""

    def __init__(self, connection: HttpConnection, server: HttpServer) -> None:
        self._connection = connection
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_size = 0
        self._partial = 0
        """Bytes received since the head, or the last piece of the body, began to arrive."""
        self._in_head = False
        self._request: Request | None = None
        """The request whose body is arriving."""
        self._early: Response | None = None
        """The response to that request, if it needs no handler."""
        self._body: bytes | bytearray = b""
        self._body_size = 0
        self._kept = 0
        """Bytes of the body that `server.gathered` includes."""

    @property
    def is_between_requests(self) -> bool:
        return not self._in_head and self._request is None

    def close(self) -> None:
        """Drop everything. The parser refers back to this object, and the garbage collector hardly
        ever runs in a daemon: the cycle would keep the body alive."""
        self._drop_body()
        del self._parser
        self._request = None
        self._headers = []

    def receive(self, data: bytes) -> None:
        connection = self._connection
        is_start = self.is_between_requests and not connection.ignores_input
        if is_start and self._receive_known(data):
            return
        rest: bytes | memoryview = data
        while rest and not connection.ignores_input:
            rest = self._feed(rest)
        if is_start and self.is_between_requests and connection.queue_length == 1:
            self._remember_head(data)

    def _receive_known(self, data: bytes) -> bool:
        """Take a complete request with a known head, without parsing it again."""
        server = self._server
        end = data.find(b"\r\n\r\n", 0, limits.MAX_KNOWN) + 4
        known = server.heads.get(data[:end]) if end > 4 else None
        if known is None or len(data) != end + known.length or server.refuse_all is not None:
            return False
        if known.length and server.gathered + known.length > limits.MAX_GATHERED:
            return False
        request = self._connection.new_request(known.method, known.path, known.query, known.headers)
        request.endpoint, request.path_value = known.endpoint, known.path_value
        if known.length and known.endpoint.keeps_body:
            request.body = data[end:]
            server.gathered += known.length
        self._connection.add_request(request, None, True)
        return True

    def _remember_head(self, data: bytes) -> None:
        """Remember the head of the only queued request, if it is a plain one. `data` is the
        request."""
        request, early, keep_alive = self._connection.first_in_queue
        end = data.find(b"\r\n\r\n", 0, limits.MAX_KNOWN) + 4
        endpoint = request.endpoint
        if end <= 4 or early is not None or not keep_alive or endpoint is None or request.is_http_1_0:
            return
        named = {name.lower(): value for name, value in request.headers}
        length = int(named.get(b"content-length", b"0"))
        if named.keys() & {b"expect", b"transfer-encoding", b"upgrade"} or len(data) != end + length:
            return
        if self._server.refuse_all is None:
            heads = self._server.heads
            if len(heads) >= limits.MAX_HEADS:
                heads.clear()
            where = request.method, request.path, request.query, request.headers
            heads[data[:end]] = Head(*where, endpoint, request.path_value, length)

    def _feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Parse what arrived. Gives the part that must be parsed again."""
        before = self._body_size
        rest: memoryview | None = None
        try:
            self._parser.feed_data(data)
            if self._in_head or (self._request is not None and self._body_size == before):
                # Headers or trailers without an end, or chunks that never come.
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
            logger.info("HTTP client(%s): not HTTP: %s", self._connection.peer, error)
            self._refuse(_plain_error(400))
        if rest is None:
            return b""
        self._decline_upgrade()
        return rest

    def _decline_upgrade(self) -> None:
        """The client offers another protocol, as some do with any first request. The parser then
        skips the body. So parse the head again, without the offer."""
        parser = self._parser
        if parser.get_method() == b"CONNECT":
            self._connection.finish_after_queue()
            return
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self._headers if header[0].lower() != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*lines, b"", b""]))

    def _refuse(self, response: Response) -> None:
        self._drop_body()
        self._request = None
        self._connection.refuse(response)

    def _drop_body(self) -> None:
        self._server.gathered -= self._kept
        self._kept = self._body_size = 0
        self._body = b""

    # Called by the parser

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_size = self._partial = 0
        self._url = b""
        self._headers = []
        self._connection.deadline = self._loop.time() + limits.HEAD_S

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_size = len(self._url)
        if self._head_size > limits.MAX_HEAD:
            raise _Refused(_plain_error(414))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value) + 4
        if self._head_size > limits.MAX_HEAD:
            raise _Refused(_plain_error(431))
        if self._in_head:  # trailers are ignored
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._partial = 0
        parser, connection, server = self._parser, self._connection, self._server
        if parser.should_upgrade() and parser.get_method() != b"CONNECT":
            return  # _decline_upgrade() parses the head again
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Refused(_plain_error(400 if version < "1" else 505))
        target = self._url.decode("latin-1")
        if not target.startswith(("/", "*")):
            target = _without_host(target)
        path, _, query = target.partition("?")
        request = connection.new_request(parser.get_method().decode("latin-1"), path, query, self._headers)
        request.is_http_1_0 = version == "1.0"
        self._request = request
        self._early = server.refuse_all or server.api.route(request)
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
            connection.deadline = self._loop.time() + limits.BODY_S
            if server.gathered + length > limits.MAX_GATHERED and self._keeps_body:
                raise _Refused(error_response(503, "OVERLOADED"))
        if expects and self._early is None and connection.is_idle:
            connection.write(_CONTINUE)

    @property
    def _keeps_body(self) -> bool:
        endpoint = self._request.endpoint if self._request else None
        return self._early is None and endpoint is not None and endpoint.keeps_body

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
        # The bytes in `server.gathered` belong to the connection's queue from here on.
        self._kept = self._body_size = 0
        self._connection.add_request(request, self._early, self._parser.should_keep_alive())


def _refusal(error: httptools.HttpParserCallbackError) -> Response:
    """The response to a request that one of our callbacks refused. Not a part of _feed(): the cause
    refers to the frame of _feed(), and a local name for the cause there would be a cycle."""
    cause = error.__context__
    if isinstance(cause, _Refused):
        return cause.response
    logger.error("internal error while reading a request", exc_info=cause)
    return error_response(500, "INTERNAL_ERROR")


def _plain_error(status: int) -> Response:
    text = f"{status} {HTTPStatus(status).phrase}"
    return Response(status=status, body=text.encode(), content_type=TEXT_TYPE, nsq_header=False)


def _without_host(target: str) -> str:
    """The path of a target in absolute form, which proxies send."""
    _, separator, rest = target.partition("://")
    slash = rest.find("/")
    return rest[slash:] if separator and slash >= 0 else target
