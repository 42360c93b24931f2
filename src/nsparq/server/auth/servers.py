"""NSQ's auth servers as an authenticator."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from nsparq.errors import NsparqError
from nsparq.fetch import Answer, FetchError, fetch, without_secrets
from nsparq.private_random import private_random
from nsparq.server.auth.grants import AuthFailed, Authorization, Grant, Permission
from nsparq.server.auth.patterns import BadPattern, compile_pattern

logger = logging.getLogger(__name__)

MAX_SECRET: Final = 64 << 10
"""Longest secret in bytes. No server is asked about a longer one."""
MAX_RESPONSE: Final = 1 << 20
MAX_TTL: Final = (1 << 63) - 1

HEADERS: Final = (("Accept", "application/vnd.nsq; version=1.0"),)


class AuthServers:
    """Asks HTTP servers what a secret permits and for how long, as NSQ does."""

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
        """An address is host:port or a URL. Each query occupies a thread of `executor`."""
        self._urls = tuple(address if "://" in address else f"http://{address}/auth" for address in addresses)
        self._executor = executor
        self._method = method.upper()
        self._timeouts = (connect_timeout, request_timeout)
        self._ca_file = ca_file
        self._clock = clock

    def reload(self) -> None:
        """Does nothing: fetch() reads a changed file of certificate authorities by itself."""

    async def authenticate(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        if not 0 < len(secret) <= MAX_SECRET:
            raise AuthFailed(f"the secret has {len(secret)} bytes")
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
        raise AuthFailed("no auth server gave a usable response")

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
            max_bytes=MAX_RESPONSE,
        )


class _BadAnswer(NsparqError):
    """The response of an auth server is not a grant."""


def _secure(url: str, answer: Answer) -> str:
    """The HTTPS address of a server that requires TLS."""
    port = _parse_object(answer.body).get("https_port")
    if type(port) is not int or not 0 < port < 65536:
        raise _BadAnswer("status 403 without an https_port")
    parts = urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return parts._replace(scheme="https", netloc=f"{login}{at}{host}:{port}").geturl()


def _parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object with keys in lower case, because Go ignores the case of keys."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise _BadAnswer("the response is not JSON") from None
    return _lowered(parsed)


def _lowered(parsed: object) -> dict[str, Any]:
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise _BadAnswer("not a JSON object")
    return {name.lower(): value for name, value in parsed.items()}


def _field(parsed: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of this type. If it is missing or null, the type's empty value."""
    value = parsed.get(name)
    if value is None:
        return kind()
    if type(value) is not kind:
        raise _BadAnswer(f"{name} has the wrong type")
    return value


def _strings(parsed: Mapping[str, Any], name: str) -> list[str]:
    values: list[object] = _field(parsed, name, list)
    if not all(isinstance(value, str) for value in values):
        raise _BadAnswer(f"{name} must be a list of strings")
    return [str(value) for value in values]


def _parse_grant(parsed: Mapping[str, Any], now: float) -> Grant:
    ttl = _field(parsed, "ttl", int)
    if not 0 < ttl <= MAX_TTL:
        raise _BadAnswer(f"ttl {ttl:.3g} is out of range")
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
