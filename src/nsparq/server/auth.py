"""Who may do what: permissions, grants, and where they come from.

A client shows a secret (AUTH on a TCP connection, a bearer token over HTTP), and an authenticator turns it
into a Grant, which is then asked about each action. Authenticators are NSQ's auth servers, here, the policy
file, in `auth_policy`, or one after the other. Knows neither connections nor requests.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit

from nsparq.errors import NsparqError
from nsparq.fetch import Answer, FetchError, fetch, without_secrets
from nsparq.private_random import private_random
from nsparq.server.auth_patterns import BadPattern, Pattern, compile_pattern

__all__ = [
    "AuthChain",
    "AuthFailed",
    "AuthServers",
    "Authenticator",
    "Authorization",
    "Grant",
    "Permission",
    "TokenCache",
    "Validity",
    "secret_from_header",
]

logger = logging.getLogger(__name__)

MAX_SECRET: Final = 64 << 10
"""Bytes of a secret; a longer one is wrong without being looked at."""
MAX_ANSWER: Final = 1 << 20
MAX_REMEMBERED: Final = 1024
"""Answers that a grant remembers, and tokens that a cache does."""
FAILURE_S: Final = 1.0
"""How long a token that failed is refused without asking again."""
MAX_TTL: Final = (1 << 63) - 1

HEADERS: Final = (("Accept", "application/vnd.nsq; version=1.0"),)


class AuthFailed(NsparqError):
    """No grant for this secret. The text is for our log; the client is told nothing of it."""


class Permission(StrEnum):
    """What an authorization can permit. NSQ knows the first two."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"  # consuming, and looking at the contents of messages
    READ = "read"  # looking at anything else: stats, metrics, settings
    ADMIN = "admin"  # changing: create, delete, pause, empty, seek, configure

    __hash__ = str.__hash__  # asked for with every publish, and that of Enum is slow


@dataclass(frozen=True, slots=True)
class Authorization:
    """Permissions for the topics and channels that match."""

    topic: Pattern
    channels: tuple[Pattern, ...]
    permissions: frozenset[Permission]

    def allows(self, permission: Permission, topic: str, channel: str) -> bool:
        return (
            permission in self.permissions
            and self.topic.search(topic)
            and any(pattern.search(channel) for pattern in self.channels)
        )


class Validity:
    """Shared by the grants of one policy: all of them end when it is replaced."""

    is_over = False


@dataclass(frozen=True, slots=True)
class Grant:
    """What an identity may do, until it expires."""

    identity: str
    identity_url: str
    authorizations: tuple[Authorization, ...]
    expires: float = math.inf
    """On the clock of time.monotonic(), which is the event loop's."""
    validity: Validity | None = field(default=None, compare=False, repr=False)
    _answers: dict[tuple[Permission, str, str], bool] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def allows(self, permission: Permission, topic: str = "", channel: str = "") -> bool:
        """Whether any authorization permits this. NSQ's rule: its topic pattern matches somewhere in the
        topic, and one of its channel patterns somewhere in the channel, which is "" where none is meant.

        An action on the whole daemon has the topic "": `.*` matches that, `^billing` does not.
        """
        key = (permission, topic, channel)
        known = self._answers.get(key)
        if known is None:
            if len(self._answers) >= MAX_REMEMBERED:
                self._answers.clear()
            known = any(entry.allows(permission, topic, channel) for entry in self.authorizations)
            self._answers[key] = known
        return known

    def may(self, permission: Permission) -> bool:
        """Whether it is permitted for any topic at all."""
        return any(permission in entry.permissions for entry in self.authorizations)

    def is_expired(self, now: float) -> bool:
        """Whether the secret must be shown again before anything else is permitted."""
        return now >= self.expires or (self.validity is not None and self.validity.is_over)

    def reply(self) -> bytes:
        """The answer to AUTH, byte for byte as NSQ writes it."""
        text = json.dumps(
            {
                "identity": self.identity,
                "identity_url": self.identity_url,
                "permission_count": len(self.authorizations),
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )
        for character in "<>&\u2028\u2029":
            text = text.replace(character, f"\\u{ord(character):04x}")
        return text.encode("utf-8", "replace")


class Authenticator(Protocol):
    """Turns a secret into a grant."""

    @property
    def anonymous(self) -> Grant | None:
        """What may be done without any secret; None for nothing."""

    async def authenticate(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        """The grant of whoever knows this secret; it may hold no authorization. Raises AuthFailed."""

    def reload(self) -> None:
        """Read again what was read from files. What cannot be read is logged, and the old stays."""


class AuthChain:
    """Several authenticators: the first that knows a secret decides."""

    def __init__(self, authenticators: Sequence[Authenticator]) -> None:
        self._authenticators = tuple(authenticators)

    @property
    def anonymous(self) -> Grant | None:
        grants = (authenticator.anonymous for authenticator in self._authenticators)
        return next((grant for grant in grants if grant is not None), None)

    async def authenticate(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        failures = []
        for authenticator in self._authenticators:
            try:
                return await authenticator.authenticate(
                    secret, remote_ip=remote_ip, tls=tls, common_name=common_name
                )
            except AuthFailed as error:
                failures.append(str(error))
        raise AuthFailed("; ".join(failures))

    def reload(self) -> None:
        for authenticator in self._authenticators:
            authenticator.reload()


class AuthServers:
    """NSQ's way: an HTTP server is asked what a secret permits, and for how long."""

    anonymous: Grant | None = None

    def __init__(
        self,
        addresses: Sequence[str],
        executor: Executor,
        *,
        method: str = "get",
        connect_timeout: float = 2.0,
        request_timeout: float = 5.0,
        ca_file: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An address is host:port, or a URL. A query takes a thread of `executor` for as long as it lasts."""
        self._urls = tuple(address if "://" in address else f"http://{address}/auth" for address in addresses)
        self._executor = executor
        self._method = method.upper()
        self._timeouts = (connect_timeout, request_timeout)
        self._ca_file = ca_file
        self._clock = clock

    def reload(self) -> None:
        """Nothing: fetch() notices by itself when the certificate authorities have changed."""

    async def authenticate(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        if not 0 < len(secret) <= MAX_SECRET:
            raise AuthFailed(f"a secret of {len(secret)} bytes")
        fields = {
            "common_name": common_name.encode("utf-8", "replace"),
            "remote_ip": remote_ip.encode(),
            "secret": secret,
            "tls": b"true" if tls else b"false",
        }
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._ask_all, fields)

    def _ask_all(self, fields: Mapping[str, bytes]) -> Grant:
        first = private_random.randrange(len(self._urls))
        for url in self._urls[first:] + self._urls[:first]:
            try:
                return self._ask(url, fields)
            except FetchError as error:
                logger.warning("AUTH: %s", error)
            except _BadAnswer as error:
                logger.warning("AUTH: %s: %s", without_secrets(url), error)
        raise AuthFailed("no auth server gave a usable answer")

    def _ask(self, url: str, fields: Mapping[str, bytes]) -> Grant:
        answer = self._fetch(url, fields)
        if answer.status == 403 and url.startswith("http:"):
            answer = self._fetch(_secure(url, answer), fields)
        if answer.status != 200:
            raise _BadAnswer(f"status {answer.status}")
        return _parse_grant(_parse_object(answer.body), self._clock())

    def _fetch(self, url: str, fields: Mapping[str, bytes]) -> Answer:
        body: bytes | None = None
        headers: tuple[tuple[str, str], ...] = HEADERS
        if self._method == "POST":
            listed = {name: [value.decode("utf-8", "replace")] for name, value in fields.items()}
            body = json.dumps(listed, separators=(",", ":")).encode()
            headers = (*HEADERS, ("Content-Type", "application/json"))
        else:
            url += ("&" if "?" in url else "?") + urlencode(fields)
        connect_timeout, request_timeout = self._timeouts
        return fetch(
            url,
            method=self._method,
            body=body,
            headers=headers,
            connect_timeout=connect_timeout,
            request_timeout=request_timeout,
            ca_file=self._ca_file,
            max_bytes=MAX_ANSWER,
        )


class _BadAnswer(NsparqError):
    """An auth server said something that is no grant."""


def _secure(url: str, answer: Answer) -> str:
    """Where a server that wants TLS is to be asked instead."""
    port = _parse_object(answer.body).get("https_port")
    if type(port) is not int or not 0 < port < 65536:
        raise _BadAnswer("status 403 without the port of HTTPS")
    parts = urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return parts._replace(scheme="https", netloc=f"{login}{at}{host}:{port}").geturl()


def _parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, its keys in lower case: Go does not tell the cases apart."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise _BadAnswer("the answer is no JSON") from None
    return _lowered(parsed)


def _lowered(parsed: object) -> dict[str, Any]:
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise _BadAnswer("the answer has something else where an object belongs")
    return {name.lower(): value for name, value in parsed.items()}


def _field(parsed: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of this type; its empty value when it is missing or null."""
    value = parsed.get(name)
    if value is None:
        return kind()
    if type(value) is not kind:
        raise _BadAnswer(f"{name} is not of the right type")
    return value


def _strings(parsed: Mapping[str, Any], name: str) -> list[str]:
    values: list[object] = _field(parsed, name, list)
    if not all(isinstance(value, str) for value in values):
        raise _BadAnswer(f"{name} must be strings")
    return [str(value) for value in values]


def _parse_grant(parsed: Mapping[str, Any], now: float) -> Grant:
    ttl = _field(parsed, "ttl", int)
    if not 0 < ttl <= MAX_TTL:
        raise _BadAnswer(f"ttl {ttl:.3g}, which must be positive")
    entries = [_lowered(entry) for entry in _field(parsed, "authorizations", list)]
    return Grant(
        identity=_field(parsed, "identity", str),
        identity_url=_field(parsed, "identity_url", str),
        authorizations=tuple(map(_parse_authorization, entries)),
        expires=now + ttl,
    )


def _parse_authorization(entry: Mapping[str, Any]) -> Authorization:
    try:
        return Authorization(
            topic=compile_pattern(_field(entry, "topic", str)),
            channels=tuple(map(compile_pattern, _strings(entry, "channels"))),
            permissions=frozenset(map(Permission, _strings(entry, "permissions"))),
        )
    except (BadPattern, ValueError) as error:
        raise _BadAnswer(str(error)) from None


class TokenCache:
    """Grants by token, for HTTP, where every request shows its secret again.

    A token is asked about once for as long as its grant lasts, by one request for all; one that failed is
    not asked about again for a moment. Tokens are kept as keyed digests only.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        capacity: int = MAX_REMEMBERED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._authenticator = authenticator
        self._capacity = capacity
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._grants: OrderedDict[bytes, Grant] = OrderedDict()
        self._failures: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Grant]] = {}

    def known(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant | None:
        """The grant, if it needs no waiting."""
        if not secret:
            return self._authenticator.anonymous
        return self._known(self._digest(secret, remote_ip, tls, common_name))

    async def grant(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        """The grant for a token, or for none if the secret is empty. Raises AuthFailed."""
        if not secret:
            if self._authenticator.anonymous is None:
                raise AuthFailed("no secret was shown")
            return self._authenticator.anonymous
        key = self._digest(secret, remote_ip, tls, common_name)
        known = self._known(key)
        if known is not None:
            return known
        if self._clock() < self._failures.get(key, 0.0):
            raise AuthFailed("failed a moment ago")
        task = self._asking.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(key, secret, remote_ip, tls, common_name))
            task.add_done_callback(lambda done: self._asked(key, done))
            self._asking[key] = task
        # A request that goes away must not take the answer from the others.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End what is still being asked."""
        tasks = [*self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: bytes, secret: bytes, remote_ip: str, tls: bool, common_name: str) -> Grant:
        try:
            grant = await self._authenticator.authenticate(
                secret, remote_ip=remote_ip, tls=tls, common_name=common_name
            )
        except AuthFailed:
            _remember(self._failures, key, self._clock() + FAILURE_S, self._capacity)
            raise
        _remember(self._grants, key, grant, self._capacity)
        return grant

    def _asked(self, key: bytes, task: asyncio.Task[Grant]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # whoever waited for it may be gone

    def _known(self, key: bytes) -> Grant | None:
        grant = self._grants.get(key)
        if grant is None:
            return None
        if grant.is_expired(self._clock()):
            del self._grants[key]
            return None
        self._grants.move_to_end(key)
        return grant

    def _digest(self, *parts: object) -> bytes:
        return hashlib.blake2b(repr(parts).encode(), key=self._key, digest_size=32).digest()


def _remember(table: OrderedDict[bytes, Any], key: bytes, value: object, capacity: int) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > capacity:
        table.popitem(last=False)


def secret_from_header(value: str | bytes) -> bytes:
    """The secret in an Authorization header: a bearer token, or `name:password` in the basic scheme.

    Of basic credentials without a name the password alone is the secret. No header is no secret: the answer
    is empty. Raises AuthFailed for what is no credentials that we know.
    """
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not text:
        return b""
    scheme, _, credentials = text.strip().partition(" ")
    secret = credentials.strip().encode("latin-1", "replace")
    if scheme.lower() == "basic":
        try:
            secret = base64.b64decode(secret, validate=True).removeprefix(b":")
        except (binascii.Error, ValueError):
            raise AuthFailed("basic credentials that are not base64") from None
    elif scheme.lower() != "bearer":
        raise AuthFailed("neither bearer nor basic credentials")
    if not secret:
        raise AuthFailed("empty credentials")
    return secret
