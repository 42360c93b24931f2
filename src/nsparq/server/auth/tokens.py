"""Secrets of HTTP requests: taken from the Authorization header, and their grants cached."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from nsparq.server.auth.grants import Authenticator, AuthFailed, Grant
from nsparq.tasks import cancel_all

CAPACITY: Final = 1024
"""Tokens that a cache remembers."""
FAILURE_S: Final = 1.0
"""Time for which a token that failed is refused without another lookup."""


class TokenCache:
    """Caches grants by token, because every HTTP request sends its secret.

    Each token is looked up once for as long as its grant lasts; requests that come meanwhile wait
    for the same lookup. A token that failed is refused for a moment without a lookup. The cache
    keeps keyed digests of tokens, not the tokens.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._authenticator = authenticator
        self._capacity = capacity
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._grants: OrderedDict[bytes, Grant] = OrderedDict()
        self._failures: OrderedDict[bytes, float] = OrderedDict()
        self._lookups: dict[bytes, asyncio.Task[Grant]] = {}

    def known(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant | None:
        """The grant if it is cached, or the grant of anonymous clients."""
        if not secret:
            return self._authenticator.anonymous
        return self._cached(self._digest(secret, remote_ip, tls, common_name))

    async def grant(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        """The grant for a token, or the anonymous one for an empty secret. Raises AuthFailed."""
        if not secret:
            if self._authenticator.anonymous is None:
                raise AuthFailed("no secret was sent")
            return self._authenticator.anonymous
        key = self._digest(secret, remote_ip, tls, common_name)
        known = self._cached(key)
        if known is not None:
            return known
        if self._clock() < self._failures.get(key, 0.0):
            raise AuthFailed("the same credentials failed a moment ago")
        task = self._lookups.get(key)
        if task is None:
            task = asyncio.create_task(self._look_up(key, secret, remote_ip, tls, common_name))
            task.add_done_callback(lambda done: self._looked_up(key, done))
            self._lookups[key] = task
        # If this request ends, the others still need the result.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the lookups that are under way."""
        await cancel_all(self._lookups.values())

    async def _look_up(self, key: bytes, secret: bytes, remote_ip: str, tls: bool, common_name: str) -> Grant:
        try:
            grant = await self._authenticator.authenticate(
                secret, remote_ip=remote_ip, tls=tls, common_name=common_name
            )
        except AuthFailed:
            _remember(self._failures, key, self._clock() + FAILURE_S, self._capacity)
            raise
        _remember(self._grants, key, grant, self._capacity)
        return grant

    def _looked_up(self, key: bytes, task: asyncio.Task[Grant]) -> None:
        del self._lookups[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: nobody may be waiting any more

    def _cached(self, key: bytes) -> Grant | None:
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
    """The secret in an Authorization header: a bearer token, or `name:password` of basic
    credentials.

    If basic credentials have no name, the password alone is the secret. Empty without a header.
    Raises AuthFailed for other credentials.
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
            raise AuthFailed("the basic credentials are not base64") from None
    elif scheme.lower() != "bearer":
        raise AuthFailed("neither bearer nor basic credentials")
    if not secret:
        raise AuthFailed("empty credentials")
    return secret
