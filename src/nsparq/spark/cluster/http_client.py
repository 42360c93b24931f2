"""A blocking HTTP client for Spark's processes, which have no event loop.

One client is one connection that stays open: a micro-batch makes a handful of small requests, a
task a series of large ones. Only one thread at a time may use a client. A client does not wait for
a daemon that is away; callers that want to wait use Backoff.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote, urlencode, urlsplit

from nsparq.addresses import join_address
from nsparq.errors import NsparqError
from nsparq.fetch import without_secrets
from nsparq.secret_scope import SecretScope
from nsparq.spark.options import NsqOptions
from nsparq.version import __version__

__all__ = ["Access", "Answer", "Backoff", "HttpClient", "Refused", "Unreachable", "base_url", "reason_of"]

MAX_ANSWER: Final = 256 << 20
"""Limit in bytes, larger than anything that nsqd sends."""
CONNECT_S: Final = 3.0


class Unreachable(NsparqError):
    """No answer: nobody listens, the connection broke, or the request timed out."""


class Refused(NsparqError):
    """An answer other than 200. `code` is nsqd's error code, such as TOPIC_NOT_FOUND."""

    def __init__(self, what: str, status: int, code: str, details: Mapping[str, Any]) -> None:
        super().__init__(f"{what}: {status} {code}")
        self.status, self.code, self.details = status, code, details


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials, trusted certificates and the timeout of requests."""

    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True
    timeout: float = 10.0
    token_for: tuple[str, ...] = ("*",)
    """Addresses that may get the token; see option authTokenFor."""
    given: frozenset[str | None] = frozenset()
    """Hosts named by the user. They get the token too, on any port."""

    @classmethod
    def of(cls, options: NsqOptions) -> Access:
        return cls(
            options.auth_token,
            options.tls_ca_file,
            options.tls_cert_file,
            options.tls_key_file,
            options.tls_verify,
            options.request_timeout,
            options.auth_token_for,
            frozenset(urlsplit(base_url(one)).hostname for one in (*options.nsqlookupd, *options.nsqd)),
        )

    def headers(self, url: str) -> dict[str, str]:
        """Headers of every request to this address, with the credentials that it may get."""
        parts = urlsplit(url)
        headers = {
            "Accept": "application/vnd.nsq; version=1.0",
            "User-Agent": f"nsparq-spark/{__version__}",
        }
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        elif token := self.token_of(url):
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def token_of(self, url: str) -> str | None:
        """The token, if the daemon at this address may get it."""
        parts = urlsplit(url)
        if not self.token or parts.hostname in self.given:
            return self.token
        port = parts.port or (443 if parts.scheme == "https" else 80)
        is_covered = SecretScope(self.token_for).covers(parts.hostname or "", port)
        return self.token if is_covered else None

    def context(self) -> ssl.SSLContext:
        """Raises OSError for a file that cannot be read."""
        return _context(self.ca_file, self.cert_file, self.key_file, self.verify, os.getpid())


@lru_cache(8)
def _context(
    ca_file: str | None, cert_file: str | None, key_file: str | None, verify: bool, pid: int
) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert_file:
        context.load_cert_chain(cert_file, key_file)
    return context


def base_url(address: str) -> str:
    """`host:port` or a URL as a URL without a path."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    return f"{parts.scheme}://{parts.netloc}"


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    """By lower-case name."""

    def json(self) -> Any:
        """The JSON value in the body. Raises ValueError."""
        content = json.loads(self.body or b"null")
        if isinstance(content, dict) and set(content) == {"status_code", "status_txt", "data"}:
            # NSQ before 1.0 wrapped every answer.
            return content["data"]
        return content

    def object(self) -> dict[str, Any]:
        """The JSON object in the body. Raises Unreachable: another server answered."""
        try:
            content = self.json()
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"not an answer of NSQ: {error}") from error
        if not isinstance(content, dict):
            raise Unreachable("not an answer of NSQ: no JSON object")
        return content

    def details(self) -> dict[str, Any]:
        """The JSON object in the body of an error; empty if there is none."""
        try:
            content = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def code(self) -> str:
        return str(self.details().get("message") or self.body[:200].decode("utf-8", "replace").strip())


class HttpClient:
    """One nsqd or nsqlookupd. Raises Unreachable and Refused; it stays usable after both."""

    def __init__(self, address: str, access: Access) -> None:
        self.url = base_url(address)
        self._access = access
        self._connection: http.client.HTTPConnection | None = None
        self._is_aborted = False
        self.opened = 0
        """How often the connection was opened: the daemon may have been restarted."""
        self._headers = {**access.headers(self.url), "Connection": "keep-alive"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({without_secrets(self.url)!r})"

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Break off a request of another thread. Close the client afterwards."""
        self._is_aborted = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def get(self, path: str, **parameters: str | int) -> Answer:
        return self.request("GET", path, parameters)

    def post(self, path: str, body: bytes = b"", **parameters: str | int) -> Answer:
        return self.request("POST", path, parameters, body)

    def request(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str | int],
        body: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request and return its answer, if that is 200.

        A connection that was closed while idle is opened again, once. After a failure the daemon
        may have carried out the request; the caller has to allow for that.
        """
        target = f"{path}?{urlencode(parameters)}" if parameters else path
        what = f"{method} {without_secrets(self.url)}{path}"
        limit = timeout or self._access.timeout or None
        try:
            answer = self._exchange(method, target, body, limit)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise Unreachable(f"{what}: {reason_of(error)}") from error
        except BaseException:
            # The rest of an interrupted answer must not be read as the next answer.
            self.close()
            raise
        if answer.status == 200:
            return answer
        details = answer.details()
        port = details.get("https_port")
        if answer.status == 403 and isinstance(port, int) and self.url.startswith("http:"):
            # This nsqd requires TLS and names its HTTPS port.
            self.close()
            host = urlsplit(self.url).hostname or ""
            self.url = f"https://{join_address(host, port)}"
            return self.request(method, path, parameters, body, timeout=timeout)
        raise Refused(what, answer.status, answer.code, details)

    def _exchange(self, method: str, target: str, body: bytes | None, timeout: float | None) -> Answer:
        kept = self._connection
        if kept is not None:
            try:
                return self._ask(kept, method, target, body, timeout)
            except (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest):
                self.close()
                if self._is_aborted:
                    raise
        self._connection = self._connect()
        self.opened += 1
        return self._ask(self._connection, method, target, body, timeout)

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        body: bytes | None,
        timeout: float | None,
    ) -> Answer:
        assert connection.sock is not None
        connection.sock.settimeout(timeout)
        connection.request(method, target, body, self._headers)
        response = connection.getresponse()
        if response.length is not None and response.length > MAX_ANSWER:
            raise ValueError(f"the answer has more than {MAX_ANSWER} bytes")
        content = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        if response.will_close:
            self.close()
        return Answer(response.status, content, headers)

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = self._access.context()
            connection = http.client.HTTPSConnection(
                host, parts.port or 443, timeout=CONNECT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port or 80, timeout=CONNECT_S)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class Backoff:
    """Waits between attempts to reach a daemon, in growing steps, until a deadline."""

    def __init__(self, seconds: float, first: float = 0.05) -> None:
        self._deadline = time.monotonic() + seconds
        self._step = first

    def wait(self) -> bool:
        """Wait one step. Returns False at once if no time is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._step, left))
        self._step = min(self._step * 2, 1.0)
        return True


def reason_of(error: Exception) -> str:
    """A short text for an error of a connection."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
