"""The HTTP client for nsqlookupds, nsqds and others: HTTP/1.1 with connections that are kept, and a
limit on the requests in progress.

A page about a cluster asks every node, and asks again a few seconds later, so kept connections save
most of the time. Redirects are not followed. If an nsqd requires HTTPS and names its port, it is
asked there.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit

import httptools

from nsparq.addresses import is_host, join_address
from nsparq.errors import NsparqError, StartError
from nsparq.fetch import without_secrets
from nsparq.version import NSQ_VERSION

__all__ = [
    "Answer",
    "RequestFailed",
    "BadStatus",
    "Secret",
    "TlsFiles",
    "Upstream",
    "SecretWithheld",
    "client_context",
]

AT_A_TIME: Final = 32
"""Requests in progress, to all daemons together."""
MAX_IDLE: Final = 4
"""Connections kept for each address."""
IDLE_S: Final = 60.0
"""How long an idle connection is kept. nsqd keeps it longer."""
MAX_BODY: Final = 256 << 20
"""Bytes of an answer. The stats of 10,000 channels with their clients are about 20 MB."""
MAX_SHOWN: Final = 500
"""Characters of an unexpected answer in an error."""
HEADERS: Final = f"User-Agent: nsqadmin/{NSQ_VERSION}\r\nAccept: application/vnd.nsq; version=1.0\r\n"


class RequestFailed(NsparqError):
    """A request got no usable answer. The text names the URL and the reason, and no secret."""


class BadStatus(RequestFailed):
    """The answer has another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        text = body[:MAX_SHOWN].decode("utf-8", "replace").strip()
        super().__init__(f"got response {status} {_phrase(status)} {json.dumps(text, ensure_ascii=False)}")
        self.status, self.body = status, body

    @property
    def code(self) -> str:
        """NSQ's error code; empty if the answer has none."""
        try:
            found = json.loads(self.body).get("message", "")
        except (ValueError, AttributeError, RecursionError):
            return ""
        return found if isinstance(found, str) else ""


class SecretWithheld(RequestFailed):
    """The daemon requires a secret, and is not trusted with ours."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes

    def json(self) -> Any:
        """The parsed body, without the envelope of NSQ before 1.0. Raises RequestFailed."""
        try:
            parsed = json.loads(self.body)
        except (ValueError, RecursionError):
            raise RequestFailed("the answer is not JSON") from None
        if isinstance(parsed, dict) and "status_code" in parsed and "data" in parsed:
            return parsed["data"]
        return parsed


class Secret(NamedTuple):
    """The secret for a daemon."""

    text: str = ""
    needs_proof: bool = False
    """Send it only over HTTPS, to a daemon whose certificate our own authority has signed."""


NO_SECRET: Final = Secret()


class TlsFiles(NamedTuple):
    """Files for HTTPS: the authority to trust, and our own certificate."""

    ca_file: str = ""
    cert: str = ""
    key: str = ""
    skip_verify: bool = False


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Raises StartError."""
    try:
        context = ssl.create_default_context(cafile=files.ca_file or None)
        if files.cert:
            context.load_cert_chain(files.cert, files.key)
    except (OSError, ValueError) as error:
        shown = files.cert or files.ca_file
        raise StartError(f"failed to load TLS files ({shown}) - {error}") from error
    if files.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Place(NamedTuple):
    host: str
    port: int
    is_tls: bool


class Upstream:
    """The client. One for the whole daemon; close() at its end."""

    def __init__(self, *, connect_timeout: float, request_timeout: float) -> None:
        self._connect_timeout, self._request_timeout = connect_timeout, request_timeout
        self._tls: ssl.SSLContext | None = None
        self._proves = False
        """Whether an accepted certificate proves that a node is ours."""
        self._idle: defaultdict[_Place, list[_Connection]] = defaultdict(list)
        self._swept_at = 0.0
        self._slots = asyncio.Semaphore(AT_A_TIME)

    def use_tls(self, files: TlsFiles) -> None:
        """Raises StartError."""
        self._tls = client_context(files)
        # The system's authorities give anybody a certificate for a name of their own.
        self._proves = bool(files.ca_file) and not files.skip_verify

    async def get_json(self, url: str, **query: str) -> Any:
        """Raises RequestFailed."""
        return (await self.ask("GET", with_query(url, query))).json()

    async def ask(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        secret: Secret = NO_SECRET,
    ) -> Answer:
        """An answer with status 200. Raises BadStatus for another, RequestFailed without one."""
        answer = await self.exchange(method, url, body, secret=secret)
        if answer.status == 403 and url.startswith("http:") and (secure := _https_url(url, answer.body)):
            url = secure
            answer = await self.exchange(method, url, body, secret=secret)
        if answer.status == 401 and secret.text and not self._may_show(secret, url):
            raise SecretWithheld(f'{method.capitalize()} "{without_secrets(url)}": it requires a secret')
        if answer.status != 200:
            raise BadStatus(answer.status, answer.body)
        return answer

    async def exchange(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        content_type: str = "application/octet-stream",
        secret: Secret = NO_SECRET,
        headers: Iterable[tuple[str, str]] = (),
    ) -> Answer:
        """An answer with any status. Raises RequestFailed."""
        shown = secret.text if self._may_show(secret, url) else ""
        try:
            place, request = _encode(method, url, body, content_type, shown, headers)
        except ValueError as error:
            raise RequestFailed(f"{method} {without_secrets(url)}: {error}") from None
        async with self._slots:
            try:
                async with asyncio.timeout(self._request_timeout):
                    return await self._send(place, request, may_reuse=method == "GET")
            except TimeoutError:
                reason = "timed out"
            except (OSError, UnicodeError) as error:
                # An impossible host name is an encoding error.
                reason = getattr(error, "strerror", "") or str(error) or type(error).__name__
            except _BadAnswer as error:
                reason = str(error)
        raise RequestFailed(f'{method.capitalize()} "{without_secrets(url)}": {reason}')

    def _may_show(self, secret: Secret, url: str) -> bool:
        return not secret.needs_proof or (self._proves and url.startswith("https:"))

    async def _send(self, place: _Place, request: bytes, *, may_reuse: bool) -> Answer:
        while True:
            # A change must not happen twice. On a new connection there is no doubt whether it
            # arrived.
            connection = self._take(place) if may_reuse else None
            is_new = connection is None
            if connection is None:
                connection = await self._connect(place)
            try:
                answer = await connection.exchange(request)
            except (_BadAnswer, OSError):
                # The server may have closed a kept connection just now. Then try again on another.
                if is_new or connection.has_answered:
                    raise
                continue
            finally:
                self._put_back(place, connection)
            return answer

    async def _connect(self, place: _Place) -> _Connection:
        loop = asyncio.get_running_loop()
        tls = None
        if place.is_tls:
            self._tls = tls = self._tls or client_context(TlsFiles())
        connection = _Connection()
        try:
            async with asyncio.timeout(self._connect_timeout):
                await loop.create_connection(lambda: connection, place.host, place.port, ssl=tls)
        except BaseException:
            # It may just have been made. The event loop would close it, and wait for the other
            # side.
            connection.close()
            raise
        return connection

    def _take(self, place: _Place) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        idle = self._idle[place]
        while idle:
            connection = idle.pop()
            if connection.is_usable and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    def _put_back(self, place: _Place, connection: _Connection) -> None:
        idle = self._idle[place]
        now = asyncio.get_running_loop().time()
        if connection.is_usable and len(idle) < MAX_IDLE:
            connection.idle_since = now
            idle.append(connection)
        else:
            connection.close()
        if now - self._swept_at >= IDLE_S:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Close idle connections, also those to nodes that have left the cluster."""
        self._swept_at = now
        for place, idle in [*self._idle.items()]:
            kept = [one for one in idle if one.is_usable and now - one.idle_since < IDLE_S]
            for connection in set(idle) - {*kept}:
                connection.close()
            if kept:
                self._idle[place] = kept
            else:
                del self._idle[place]

    async def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()
        # The sockets are closed in the next turn of the loop.
        await asyncio.sleep(0)


class _BadAnswer(Exception):
    """The answer is malformed or incomplete."""


class _Connection(asyncio.Protocol):
    """A connection, for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._is_lost = False
        self._keeps = False
        self._has_head = False
        """Whether all headers of the answer have arrived."""
        self.has_answered = False
        """Whether any byte of the answer to the current request has arrived."""
        self.idle_since = 0.0

    async def exchange(self, request: bytes) -> Answer:
        if self._transport is None or self._is_lost:
            raise _BadAnswer("the connection has ended")
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = 0
        self._keeps = self.has_answered = self._has_head = False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    @property
    def is_usable(self) -> bool:
        return self._keeps and not self._is_lost

    def close(self) -> None:
        # Not close(): with TLS it would wait for the other side.
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            # Bytes without a request: they must not be taken for the next answer.
            self._keeps = False
            return
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(
                error.__context__ if isinstance(error.__context__, _BadAnswer) else _BadAnswer(str(error))
            )
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(_BadAnswer(f"the answer is not HTTP: {data[:50]!r}"))

    def eof_received(self) -> None:
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self._answer is None or self._answer.done():
            return
        has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self._has_head and not has_length and not error:
            # The end of the connection is the end of the answer.
            self._finish()
        else:
            self._fail(_BadAnswer("the connection ended in the middle of the answer"))

    def _fail(self, error: BaseException | None) -> None:
        self._keeps = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or _BadAnswer("unknown"))

    def _finish(self) -> None:
        if self._answer is not None and not self._answer.done():
            status = self._parser.get_status_code()
            self._answer.set_result(Answer(status, self._headers, b"".join(self._pieces)))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY:
            raise _BadAnswer(f"the answer has more than {MAX_BODY} bytes")
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self._keeps = self._parser.should_keep_alive()
        self._finish()


def with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}?{urlencode(query)}" if query else url


def _encode(
    method: str,
    url: str,
    body: bytes | None,
    content_type: str,
    secret: str,
    headers: Iterable[tuple[str, str]] = (),
) -> tuple[_Place, bytes]:
    """Raises ValueError for an invalid URL."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not is_host(host):
        raise ValueError("not an http or https address")
    if any(character <= " " or character == "\x7f" for character in url):
        raise ValueError("blanks in an address")
    is_tls = parts.scheme == "https"
    place = _Place(host, parts.port or (443 if is_tls else 80), is_tls)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{method} {target} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n{HEADERS}"
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        head += f"Authorization: Basic {base64.b64encode(login.encode()).decode()}\r\n"
    elif secret:
        # Basic scheme: a password is `name:password`; a generated secret has no name.
        shown = secret if ":" in secret else f":{secret}"
        head += f"Authorization: Basic {base64.b64encode(shown.encode()).decode()}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers)
    if body is not None:
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    elif method != "GET":
        head += "Content-Length: 0\r\n"
    return place, head.encode("latin-1", "replace") + b"\r\n" + (body or b"")


def _https_url(url: str, body: bytes) -> str:
    """The HTTPS URL that an nsqd names when it requires TLS; empty if it names none."""
    try:
        port = json.loads(body).get("https_port")
    except (ValueError, AttributeError, RecursionError):
        return ""
    if type(port) is not int or not 0 < port < 65536:
        return ""
    parts = urlsplit(url)
    return parts._replace(scheme="https", netloc=join_address(parts.hostname or "", port)).geturl()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
