"""A blocking HTTP client of nsqd and nsqlookupd for Spark's processes, which have no event loop.

One client is one connection that is kept open: a micro-batch is a handful of small requests, a task a series
of large ones. A client belongs to one thread at a time. Nothing here waits for a daemon that is away: see
Patience.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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

__all__ = [
    "Access",
    "Answer",
    "Chunk",
    "Client",
    "Described",
    "Moved",
    "Patience",
    "Positions",
    "Refused",
    "Unreachable",
    "base_url",
]

logger = logging.getLogger(__name__)

MAX_ANSWER: Final = 256 << 20
"""Beyond anything that nsqd sends; a limit for the case that somebody else answers."""
CONNECT_S: Final = 3.0


class Unreachable(NsparqError):
    """There is no answer: nobody listens, the connection broke, or time is up. It may be back later."""


class Refused(NsparqError):
    """An answer other than 200. `code` is nsqd's word for it, such as TOPIC_NOT_FOUND."""

    def __init__(self, what: str, status: int, code: str, details: Mapping[str, Any]) -> None:
        super().__init__(f"{what}: {status} {code}")
        self.status, self.code, self.details = status, code, details


@dataclass(frozen=True, slots=True)
class Access:
    """How we show who we are, and whom we trust."""

    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True
    timeout: float = 10.0
    token_for: tuple[str, ...] = ("*",)
    """Which nsqd are shown the token; see option authTokenFor."""
    given: frozenset[str | None] = frozenset()
    """Hosts that the user has given: these are shown it too, also on the HTTPS port that they send us to."""

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

    def token_of(self, url: str) -> str | None:
        """What the daemon there is shown, if it may be shown anything."""
        parts = urlsplit(url)
        if not self.token or parts.hostname in self.given:
            return self.token
        port = parts.port or (443 if parts.scheme == "https" else 80)
        is_covered = SecretScope(self.token_for).covers(parts.hostname or "", port)
        return self.token if is_covered else None

    def context(self) -> ssl.SSLContext:
        """Raises OSError for a file that cannot be read. For TLS over TCP too."""
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
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes

    def json(self) -> Any:
        """Raises ValueError."""
        content = json.loads(self.body or b"null")
        if isinstance(content, dict) and set(content) == {"status_code", "status_txt", "data"}:
            # Before 1.0 NSQ wrapped it.
            return content["data"]
        return content


class Chunk(NamedTuple):
    """A range of a log as it lies on disk. See /topic/read."""

    data: bytes
    first: int
    """The number that it begins with: before the one asked for, or behind it, if a gap is in between."""
    next: int
    """Where to go on."""
    latest: int
    gaps: list[tuple[int, int]]
    """Numbers in it that do not count."""
    lost: int
    """Messages that are missing because of damage; only known of a verified one."""
    removed_before: int = 0
    """What was asked for was not there any more, and this is what the log begins with."""


class Positions(NamedTuple):
    """How far a topic's log reaches on a node. See /topic/positions."""

    incarnation: str
    earliest: int
    latest: int
    visible: int
    messages: int
    bytes: int

    @property
    def bytes_per_message(self) -> float:
        return self.bytes / self.messages if self.messages else 0.0


class Described(NamedTuple):
    """What a node says about a topic, among many. See /topics/positions."""

    positions: Positions | None
    """None if it does not have the topic."""
    channel: str
    """`missing`, `there` or `paused`."""
    state: int
    """Sent back with the next request, so that only what has changed is answered."""
    owner: str | None = ""
    """Whose the channel is; empty for nobody's, None if the node does not know of owners."""


class Moved(NamedTuple):
    """What has become of a channel, among many. See /channels/commit."""

    cursor: int = -1
    code: str = ""
    """Why it was refused, such as CHANNEL_NOT_FOUND; empty if it was not."""
    owner: str = ""
    since: str = ""
    """With CHANNEL_OWNED: whose it is, and since when."""


class Client:
    """One nsqd or nsqlookupd. Raises Unreachable and Refused; after either it can be used again."""

    def __init__(self, address: str, access: Access) -> None:
        self.url = base_url(address)
        self._access = access
        self._connection: http.client.HTTPConnection | None = None
        self._is_aborted = False
        self.opened = 0
        """How often the connection had to be opened: whoever answers now may have been started since."""
        parts = urlsplit(self.url)
        self._headers = {
            "Accept": "application/vnd.nsq; version=1.0",
            "User-Agent": f"nsparq-spark/{__version__}",
            "Connection": "keep-alive",
        }
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        elif token := access.token_of(self.url):
            self._headers["Authorization"] = f"Bearer {token}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({without_secrets(self.url)!r})"

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Break off what another thread is waiting for here: it gets Unreachable. To be closed then."""
        self._is_aborted = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    # requests

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
        """Ask, and give the answer if it is 200. A connection that was closed while nobody used it is opened
        again, once; whether the request was carried out before a failure is for the caller to care about."""
        target = f"{path}?{urlencode(parameters)}" if parameters else path
        what = f"{method} {without_secrets(self.url)}{path}"
        limit = timeout or self._access.timeout or None
        try:
            answer = self._exchange(method, target, body, limit)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise Unreachable(f"{what}: {_reason(error)}") from error
        except BaseException:
            # Interrupted in the middle: what is left of the answer must not be taken for the next.
            self.close()
            raise
        if answer.status == 200:
            return answer
        details = _details(answer)
        port = details.get("https_port")
        if answer.status == 403 and isinstance(port, int) and self.url.startswith("http:"):
            # This nsqd wants TLS, and says where.
            self.close()
            host = urlsplit(self.url).hostname or ""
            self.url = f"https://{join_address(host, port)}"
            return self.request(method, path, parameters, body, timeout=timeout)
        code = str(details.get("message") or answer.body[:200].decode("utf-8", "replace").strip())
        raise Refused(what, answer.status, code, details)

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
        return Answer(response.status, headers, content)

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

    # nsqd and nsqlookupd

    def info(self) -> dict[str, Any]:
        return _object(self.get("/info"))

    def lookup(self, topic: str) -> list[dict[str, Any]]:
        """The nsqd that a nsqlookupd knows to have the topic."""
        try:
            return list(_object(self.get("/lookup", topic=topic)).get("producers") or ())
        except Refused as refused:
            if refused.status == 404 and refused.code == "TOPIC_NOT_FOUND":
                return []
            raise

    def nodes(self) -> list[dict[str, Any]]:
        """All nsqd that a nsqlookupd knows; each names its topics too."""
        return list(_object(self.get("/nodes")).get("producers") or ())

    def create_channel(self, topic: str, channel: str) -> None:
        """The topic too, if it is not there."""
        self.post("/topic/create", topic=topic)
        self.post("/channel/create", topic=topic, channel=channel)

    # nsqd

    def stats(self, topic: str = "", channel: str = "") -> list[dict[str, Any]]:
        """Topics with their channels, without clients."""
        given = {name: value for name, value in (("topic", topic), ("channel", channel)) if value}
        answer = self.get("/stats", format="json", include_clients="false", include_mem="false", **given)
        return list(_object(answer).get("topics") or ())

    # the log of nsparq's nsqd

    def positions(self, topic: str) -> Positions:
        found = _object(self.get("/topic/positions", topic=topic))
        with _expected():
            return Positions(str(found["incarnation"]), *(int(found[name]) for name in Positions._fields[1:]))

    def positions_of(
        self, known: Mapping[str, int | None], channel: str | None, wait: float = 0.0
    ) -> dict[str, Described]:
        """Those topics whose state is not the one that is known. If there are none, nsqd waits so many
        seconds for one."""
        given: dict[str, str | int] = {"channel": channel} if channel else {}
        if wait:
            given["wait"] = int(wait * 1000)
        limit = self._access.timeout and self._access.timeout + wait
        body = json.dumps({"topics": known}).encode()
        answer = self.request("POST", "/topics/positions", given, body, timeout=limit)
        with _expected():
            return {topic: _described(one) for topic, one in _object(answer)["topics"].items()}

    def read(
        self, topic: str, start: int, max_bytes: int, incarnation: str, *, verify: bool = False
    ) -> Chunk:
        more = {"verify": "true"} if verify else {}
        answer = self.get(
            "/topic/read",
            topic=topic,
            max_bytes=max_bytes,
            incarnation=incarnation,
            **{"from": start},
            **more,
        )
        found = answer.headers
        with _expected():
            first, following, latest, lost = (
                int(found[f"x-nsparq-{name}"]) for name in ("first", "next", "latest", "lost")
            )
            gaps = [(int(low), int(high)) for low, high in json.loads(found["x-nsparq-gaps"])]
            return Chunk(answer.body, first, following, latest, gaps, lost)

    def first_id(self, topic: str, sequence: int) -> int | None:
        """The id that the message with number 0 would have had; None if there is no message from `sequence`
        on that could tell."""
        answer = self.get("/topic/peek", topic=topic, count=1, **{"from": sequence})
        messages = _object(answer).get("messages") or ()
        with _expected():
            return int(messages[0]["id"], 16) - int(messages[0]["sequence"]) if messages else None

    def commit(self, topic: str, channel: str, sequence: int, incarnation: str) -> tuple[int, int]:
        """Everything before `sequence` is done; the channel's cursor and depth afterwards. The cursor never
        goes back, so that 0 only asks."""
        answer = self.post(
            "/channel/commit", topic=topic, channel=channel, sequence=sequence, incarnation=incarnation
        )
        found = _object(answer)
        with _expected():
            return int(found["cursor"]), int(found["depth"])

    def commit_many(
        self, channel: str, owner: str, places: Mapping[str, tuple[str, int]]
    ) -> dict[str, Moved]:
        """`commit` for a channel of many topics: incarnation and sequence by topic. With an owner the channel
        is theirs from then on."""
        return self._move_many("/channels/commit", channel, owner, places)

    def seek_many(self, channel: str, owner: str, places: Mapping[str, tuple[str, int]]) -> dict[str, Moved]:
        """`seek` for a channel of many topics; where it is missing it is created."""
        return self._move_many("/channels/seek", channel, owner, places)

    def _move_many(
        self, path: str, channel: str, owner: str, places: Mapping[str, tuple[str, int]]
    ) -> dict[str, Moved]:
        body = json.dumps({"topics": places}).encode()
        given: dict[str, str | int] = {"channel": channel}
        if owner:
            given["owner"] = owner
        answer = self.request("POST", path, given, body)
        with _expected():
            found = _object(answer)["topics"]
            return {topic: _moved(found[topic]) for topic in places}


def _described(content: dict[str, Any] | None) -> Described:
    if content is None:
        return Described(None, "missing", 0)
    numbers = (int(content[name]) for name in Positions._fields[1:])
    positions = Positions(str(content["incarnation"]), *numbers)
    return Described(positions, str(content["channel"]), int(content["state"]), content.get("owner"))


def _moved(content: dict[str, Any]) -> Moved:
    if "message" in content:
        owner, since = (str(content.get(name, "")) for name in ("owner", "since"))
        return Moved(code=str(content["message"]), owner=owner, since=since)
    return Moved(int(content["cursor"]))


class Patience:
    """How long to try again when a daemon is away: in growing steps, up to a second, until time is up."""

    def __init__(self, seconds: float, first: float = 0.05) -> None:
        self._deadline = time.monotonic() + seconds
        self._step = first

    def wait(self) -> bool:
        """Wait a step; False, at once, if there is no time left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._step, left))
        self._step = min(self._step * 2, 1.0)
        return True


def _details(answer: Answer) -> dict[str, Any]:
    try:
        content = json.loads(answer.body)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _object(answer: Answer) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError as error:
        raise Unreachable(f"not what NSQ would answer: {error}") from error
    if not isinstance(content, dict):
        raise Unreachable("not what NSQ would answer")
    return content


@contextmanager
def _expected() -> Iterator[None]:
    """What does not look as it should comes from somebody else."""
    try:
        yield
    except (LookupError, ValueError, TypeError) as error:
        raise Unreachable(f"not what nsqd would answer: {error!r}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
