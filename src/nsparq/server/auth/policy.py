"""The policy file as an authenticator. See auth.policy_file for its format."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

from nsparq.server.auth.grants import AuthFailed, Grant, Validity
from nsparq.server.auth.policy_file import (
    SCRYPT_N,
    SCRYPT_P,
    SCRYPT_R,
    Identity,
    PasswordHash,
    Policy,
    PolicyError,
    read_policy,
)

logger = logging.getLogger(__name__)

MAX_SECRET: Final = 1024
MAX_REMEMBERED: Final = 1024
MAX_RUNNING: Final = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Passwords that are hashed at the same time."""
MAX_WAITING: Final = 256
"""Passwords that wait to be hashed. One thread hashes about 16 a second."""

WRONG_AT_ONCE: Final = 10
WRONG_PER_S: Final = 1.0
"""Wrong passwords for one identity from one address: in a burst, and per second."""
MAX_THROTTLED: Final = 4096

_NOBODY: Final = PasswordHash(SCRYPT_N, SCRYPT_R, SCRYPT_P, bytes(16), bytes(32))
"""Checked for an unknown name, so that the time of an attempt does not reveal which names exist."""


class StaticPolicy:
    """An authenticator that uses a policy file.

    Passwords are hashed in threads, few at a time, so that cores and threads are left for other
    work. A keyed digest of each right password is cached, so that it is hashed once.
    """

    def __init__(self, path: Path, executor: Executor, *, clock: Callable[[], float] = monotonic) -> None:
        """Raises PolicyError."""
        self.path = path
        self._executor = executor
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._throttle = _Throttle()
        self._verified: OrderedDict[bytes, tuple[str, PasswordHash]] = OrderedDict()
        self._checking: dict[bytes, asyncio.Future[PasswordHash | None]] = {}
        self._to_hash: deque[tuple[bytes, Sequence[PasswordHash], bytes]] = deque()
        """Passwords to hash: the key in `_checking`, the hashes to compare with, the password."""
        self._running = 0
        self._validity = Validity()
        self._use(read_policy(path))

    @property
    def anonymous(self) -> Grant | None:
        return self._anonymous

    def reload(self) -> None:
        """Read the file again. If it cannot be used, the old policy stays."""
        try:
            policy = read_policy(self.path)
        except PolicyError as error:
            logger.error("AUTH: %s; the old policy stays in force", error)
            return
        if policy == self._policy:
            logger.info("AUTH: %s is unchanged", self.path)
            return
        self._validity.is_over = True
        self._validity = Validity()
        self._use(policy)

    def _use(self, policy: Policy) -> None:
        self._policy = policy
        self._grants = {
            identity.name: Grant(
                identity.name, identity.url, identity.authorizations, validity=self._validity
            )
            for identity in policy.identities.values()
        }
        self._generated = {
            self._keyed(digest): identity
            for identity in policy.identities.values()
            for digest in identity.generated
        }
        self._has_passwords = any(identity.passwords for identity in policy.identities.values())
        self._anonymous = (
            None if policy.anonymous is None else Grant("", "", policy.anonymous, validity=self._validity)
        )
        logger.info("AUTH: %s: %d identities", self.path, len(policy.identities))
        for warning in policy.warnings:
            logger.warning("AUTH: %s: %s", self.path, warning)

    async def authenticate(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        if not 0 < len(secret) <= MAX_SECRET:
            raise AuthFailed(f"the secret has {len(secret)} bytes")
        key = self._keyed(hashlib.sha256(secret).digest())
        identity = self._find(key)
        if identity is None:
            await self._check_password(key, secret, remote_ip)
            identity = self._find(key)
        if identity is None:
            raise AuthFailed("the policy has changed in the meantime")
        return self._grants[identity.name]

    def _keyed(self, digest: bytes) -> bytes:
        # A client cannot know the key that its guess leads to, so the time of the search reveals
        # nothing about the secrets.
        return hashlib.blake2b(digest, key=self._key, digest_size=32).digest()

    def _find(self, key: bytes) -> Identity | None:
        """The identity with this secret, if that is known without hashing a password."""
        identity = self._generated.get(key)
        if identity is None and key in self._verified:
            self._verified.move_to_end(key)
            name, matched = self._verified[key]
            identity = self._policy.identities.get(name)
            if identity is not None and matched not in identity.passwords:
                identity = None
        return identity

    async def _check_password(self, key: bytes, secret: bytes, remote_ip: str) -> None:
        """Wait until `name:password` is verified. Raises AuthFailed."""
        name_bytes, colon, password = secret.partition(b":")
        if not colon or not self._has_passwords:
            raise AuthFailed("no identity has this secret")
        name = name_bytes.decode("utf-8", "replace")
        checking = self._checking.get(key)
        if checking is None:
            checking = self._start_check(key, name, password, remote_ip)
        # Several clients may wait for the result, and one of them may disconnect.
        if await asyncio.shield(checking) is None:
            raise AuthFailed("wrong name or password")

    def _start_check(
        self, key: bytes, name: str, password: bytes, remote_ip: str
    ) -> asyncio.Future[PasswordHash | None]:
        identity = self._policy.identities.get(name)
        hashes = identity.passwords if identity is not None else ()
        source = (_network(remote_ip), name if hashes else "")
        if len(self._checking) >= MAX_WAITING:
            raise AuthFailed("too many passwords are being checked")
        if not self._throttle.take(source, self._clock()):
            raise AuthFailed("too many wrong passwords")
        future: asyncio.Future[PasswordHash | None] = asyncio.get_running_loop().create_future()

        def finish(done: asyncio.Future[PasswordHash | None]) -> None:
            del self._checking[key]
            matched = None if done.cancelled() or done.exception() else done.result()
            if matched is not None:
                self._throttle.undo(source)
                self._verified[key] = (name, matched)
                if len(self._verified) > MAX_REMEMBERED:
                    self._verified.popitem(last=False)

        future.add_done_callback(finish)
        self._checking[key] = future
        self._to_hash.append((key, hashes, password))
        self._hash_next()
        return future

    def _hash_next(self) -> None:
        loop = asyncio.get_running_loop()
        while self._to_hash and self._running < MAX_RUNNING:
            key, hashes, password = self._to_hash.popleft()
            try:
                work = loop.run_in_executor(self._executor, _first_match, hashes, password)
            except RuntimeError:
                return self._fail_all()
            self._running += 1
            work.add_done_callback(partial(self._hashed, self._checking[key]))

    def _hashed(
        self, future: asyncio.Future[PasswordHash | None], work: asyncio.Future[PasswordHash | None]
    ) -> None:
        self._running -= 1
        if work.cancelled():
            return self._fail_all()
        error = work.exception()
        if future.done():  # by _fail_all()
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(work.result())
        self._hash_next()

    def _fail_all(self) -> None:
        """Fail all checks: the daemon is stopping, and its threads are gone."""
        self._to_hash.clear()
        for future in self._checking.values():
            if not future.done():
                future.set_exception(AuthFailed("nsqd is stopping"))


def _first_match(hashes: Sequence[PasswordHash], password: bytes) -> PasswordHash | None:
    if not hashes:
        _NOBODY.matches(password)
    return next((candidate for candidate in hashes if candidate.matches(password)), None)


def _network(remote_ip: str) -> str:
    """The source of an attempt. An IPv6 client has a whole network of addresses."""
    if ":" in remote_ip:
        try:
            return str(ipaddress.ip_network((remote_ip.partition("%")[0], 64), strict=False))
        except ValueError:
            pass
    return remote_ip


class _Throttle:
    """Limits attempts by source: a burst, then a rate. Right passwords do not count."""

    def __init__(self) -> None:
        self._sources: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        """Attempts left, and the time of that count."""

    def take(self, source: tuple[str, str], now: float) -> bool:
        left, since = self._sources.get(source, (float(WRONG_AT_ONCE), now))
        left = min(WRONG_AT_ONCE, left + (now - since) * WRONG_PER_S)
        permitted = left >= 1.0
        self._sources[source] = (left - permitted, now)
        self._sources.move_to_end(source)
        if len(self._sources) > MAX_THROTTLED:
            self._sources.popitem(last=False)
        return permitted

    def undo(self, source: tuple[str, str]) -> None:
        if source in self._sources:
            left, since = self._sources[source]
            self._sources[source] = (left + 1, since)
