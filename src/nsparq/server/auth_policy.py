"""The policy file: identities, hashes of their secrets, what each may do. For those without an auth server.

    [[identity]]
    name = "billing"
    secret = "sha256:…"              # of a generated secret; or "scrypt:…", of a password; or a list of them
    [[identity.allow]]
    topic = "^billing"
    channels = [".*"]
    permissions = ["publish", "subscribe"]

    [[anonymous.allow]]              # optional: what may be done without a secret
    topic = ".*"
    permissions = ["read"]

A generated secret cannot be guessed: a fast hash will do, and the client shows the secret alone. A password
can: its hash is slow on purpose, and the client shows `name:password`, so that one hash has to be computed
and not one for each identity.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import tomllib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, NoReturn

from nsparq.errors import StartError
from nsparq.server.auth import AuthFailed, Authorization, Grant, Permission, Validity
from nsparq.server.auth_patterns import BadPattern, compile_pattern

__all__ = [
    "Identity",
    "Policy",
    "PolicyError",
    "StaticPolicy",
    "hash_generated",
    "hash_password",
    "read_policy",
]

logger = logging.getLogger(__name__)

MAX_SECRET: Final = 1024
MAX_SECRETS: Final = 8
"""Secrets of one identity: an old and a new one while it changes, with some room."""
MAX_REMEMBERED: Final = 1024
MAX_RUNNING: Final = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Passwords that are hashed at a time."""
MAX_WAITING: Final = 256
"""Passwords that are to be hashed; at 16 a second for each that runs, more would only wait in vain."""

WRONG_AT_ONCE: Final = 10
WRONG_PER_S: Final = 1.0
"""Wrong passwords for one identity from one address, in a burst and on average."""
MAX_THROTTLED: Final = 4096

# About 60 ms and 32 MiB for each attempt.
SCRYPT_N, SCRYPT_R, SCRYPT_P = 15, 8, 1
MAX_SCRYPT_BYTES: Final = 256 << 20


class PolicyError(StartError):
    """A policy file that cannot be used; the text names file, entry and reason."""


def hash_generated(secret: bytes) -> str:
    """What stands in the file for a secret that nobody can guess."""
    return f"sha256:{hashlib.sha256(secret).hexdigest()}"


def hash_password(password: bytes) -> str:
    """What stands in the file for a secret that somebody chose."""
    found = PasswordHash(SCRYPT_N, SCRYPT_R, SCRYPT_P, secrets.token_bytes(16), b"\0" * 32)
    key = found.derive(password)
    return f"scrypt:{SCRYPT_N}:{SCRYPT_R}:{SCRYPT_P}:{found.salt.hex()}:{key.hex()}"


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """One `scrypt:` entry: cost parameters (the first as a power of two), salt and key."""

    cost: int
    block: int
    parallel: int
    salt: bytes
    key: bytes

    @classmethod
    def parse(cls, text: str) -> PasswordHash:
        found = re.fullmatch(r"(\d{1,2}):(\d{1,2}):(\d{1,2}):([0-9a-f]{16,128}):([0-9a-f]{32,128})", text)
        if not found or len(found[4]) % 2 or len(found[5]) % 2:
            raise ValueError("no scrypt hash; `nsparq auth hash` makes one")
        parsed = cls(int(found[1]), int(found[2]), int(found[3]), *map(bytes.fromhex, found.groups()[3:]))
        if not (1 <= parsed.cost <= 24 and 1 <= parsed.block and 1 <= parsed.parallel <= 16):
            raise ValueError("scrypt parameters out of range")
        if parsed.bytes_needed > MAX_SCRYPT_BYTES:
            raise ValueError(f"a scrypt hash that needs {parsed.bytes_needed >> 20} MiB for each attempt")
        return parsed

    @property
    def bytes_needed(self) -> int:
        return 128 * self.block * (1 << self.cost)

    def derive(self, password: bytes) -> bytes:
        return hashlib.scrypt(
            password,
            salt=self.salt,
            n=1 << self.cost,
            r=self.block,
            p=self.parallel,
            maxmem=self.bytes_needed + (4 << 20),
            dklen=len(self.key),
        )

    def matches(self, password: bytes) -> bool:
        return hmac.compare_digest(self.derive(password), self.key)


# Checked when there is no such identity: how long an attempt takes must not tell whether there is.
_NOBODY: Final = PasswordHash(SCRYPT_N, SCRYPT_R, SCRYPT_P, bytes(16), bytes(32))


@dataclass(frozen=True, slots=True)
class Identity:
    name: str
    url: str
    generated: tuple[bytes, ...]
    """SHA-256 digests of its generated secrets."""
    passwords: tuple[PasswordHash, ...]
    authorizations: tuple[Authorization, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a file says."""

    identities: Mapping[str, Identity]
    anonymous: tuple[Authorization, ...] | None
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """What is permitted to say, but hardly meant."""


def read_policy(path: Path) -> Policy:
    """Raises PolicyError."""
    try:
        is_open = os.stat(path).st_mode & 0o002
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PolicyError(f"{path}: {error}") from error
    warnings = ["everybody on this machine can write to the file"] if is_open else []
    try:
        policy = _Reader(warnings).policy(content)
    except ValueError as error:
        raise PolicyError(f"{path}: {error}") from None
    return Policy(policy.identities, policy.anonymous, tuple(warnings))


class _Reader:
    """From TOML's values to a policy. Raises ValueError with the place in front of the reason.

    A key that is not known is an error: a mistyped one must neither lock out nor let in.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings

    def policy(self, content: Mapping[str, Any]) -> Policy:
        self._check_keys("", content, {"identity", "anonymous"})
        if not content:
            self._fail("", "neither [[identity]] nor [anonymous]; `identity = []` says that it is meant so")
        identities: dict[str, Identity] = {}
        owners: dict[bytes, str] = {}
        for number, table in enumerate(self._tables("", content, "identity"), 1):
            identity = self._identity(f"identity {number}", table)
            if identity.name in identities:
                self._fail(f"identity {number}", f"there is another {identity.name!r}")
            for digest in identity.generated:
                if digest in owners:
                    self._fail(f"identity {identity.name!r}", f"has a secret of {owners[digest]!r}")
                owners[digest] = identity.name
            identities[identity.name] = identity
        anonymous = None
        if "anonymous" in content:
            table = content["anonymous"]
            if not isinstance(table, dict):
                self._fail("anonymous", "must be a table")
            self._check_keys("anonymous", table, {"allow"})
            anonymous = self._authorizations("anonymous", table)
        return Policy(identities, anonymous)

    def _identity(self, place: str, table: Mapping[str, Any]) -> Identity:
        self._check_keys(place, table, {"name", "secret", "url", "allow"})
        name = table.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"[^\x00-\x20:\x7f][^\x00-\x1f:\x7f]*", name):
            self._fail(place, "name must be a text without a colon")
        place = f"identity {name!r}"
        url = table.get("url", "")
        if not isinstance(url, str):
            self._fail(place, "url must be a text")
        generated, passwords = self._secrets(place, table.get("secret"))
        return Identity(name, url, generated, passwords, self._authorizations(place, table))

    def _secrets(self, place: str, value: object) -> tuple[tuple[bytes, ...], tuple[PasswordHash, ...]]:
        texts = value if isinstance(value, list) else [value]
        if not 1 <= len(texts) <= MAX_SECRETS:
            self._fail(place, f"secret must be one or up to {MAX_SECRETS}")
        generated, passwords = [], []
        for text in texts:
            kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
            # The value is not shown: it may be the secret itself.
            if kind == "sha256":
                if not re.fullmatch(r"[0-9a-f]{64}", rest):
                    self._fail(place, "secret: sha256: must be followed by 64 digits of 0-9 and a-f")
                generated.append(bytes.fromhex(rest))
            elif kind == "scrypt":
                try:
                    passwords.append(PasswordHash.parse(rest))
                except ValueError as error:
                    self._fail(place, f"secret: {error}")
            else:
                self._fail(place, 'secret must be "sha256:…" or "scrypt:…"; see `nsparq auth secret`')
        return tuple(generated), tuple(passwords)

    def _authorizations(self, place: str, table: Mapping[str, Any]) -> tuple[Authorization, ...]:
        entries = self._tables(place, table, "allow")
        if not entries:
            self._warnings.append(f"{place} may do nothing: it has no allow")
        return tuple(
            self._authorization(f"{place}, allow {number}", entry) for number, entry in enumerate(entries, 1)
        )

    def _authorization(self, place: str, entry: Mapping[str, Any]) -> Authorization:
        self._check_keys(place, entry, {"topic", "channels", "permissions"})
        topic = entry.get("topic")
        if not isinstance(topic, str):
            self._fail(place, 'topic must be a pattern, such as "^billing"')
        channels = self._texts(place, entry, "channels", [".*"])
        names = self._texts(place, entry, "permissions", [])
        if not names:
            self._fail(place, f"permissions must be a list of {', '.join(Permission)}")
        try:
            found = Authorization(
                compile_pattern(topic),
                tuple(map(compile_pattern, channels)),
                frozenset(map(Permission, names)),
            )
        except BadPattern as error:
            self._fail(place, str(error))
        except ValueError as error:
            self._fail(place, f"permissions: {error}; there are {', '.join(Permission)}")
        whole_topic = sorted(found.permissions - {Permission.SUBSCRIBE})
        if whole_topic and not any(pattern.search("") for pattern in found.channels):
            self._warnings.append(
                f"{place}: no effect on {', '.join(whole_topic)}, for which a channel pattern must match the "
                'empty text, as ".*" does'
            )
        return found

    def _texts(self, place: str, entry: Mapping[str, Any], key: str, default: list[str]) -> list[str]:
        values = entry.get(key, default)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self._fail(place, f"{key} must be a list of texts")
        return list(values)

    def _tables(self, place: str, content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        tables = content.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            header = f"{place.split(' ')[0]}.{key}" if place else key
            self._fail(place, f"{key} must be written as [[{header}]]")
        return list(tables)

    def _check_keys(self, place: str, table: Mapping[str, Any], known: set[str]) -> None:
        for key in table:
            if key not in known:
                self._fail(place, f"unknown key {key!r}; there are {', '.join(sorted(known))}")

    def _fail(self, place: str, reason: str) -> NoReturn:
        raise ValueError(f"{place}: {reason}" if place else reason)


class StaticPolicy:
    """An authenticator from a policy file.

    Passwords are hashed in threads, few at a time, to leave the broker its processors and others the threads.
    One that was right is remembered, as a keyed digest, so that it costs its time once.
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
        self._waiting: deque[tuple[bytes, Sequence[PasswordHash], bytes]] = deque()
        """What is to be hashed, by the key of its place in `_checking`."""
        self._running = 0
        self._validity = Validity()
        self._use(read_policy(path))

    @property
    def anonymous(self) -> Grant | None:
        return self._anonymous

    def reload(self) -> None:
        """Replace the policy by what the file says now; a file that cannot be used changes nothing."""
        try:
            policy = read_policy(self.path)
        except PolicyError as error:
            logger.error("AUTH: %s; what was read before stays in force", error)
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
            raise AuthFailed(f"a secret of {len(secret)} bytes")
        key = self._keyed(hashlib.sha256(secret).digest())
        identity = self._find(key)
        if identity is None:
            await self._check_password(key, secret, remote_ip)
            identity = self._find(key)
        if identity is None:
            raise AuthFailed("the policy has changed meanwhile")
        return self._grants[identity.name]

    def _keyed(self, digest: bytes) -> bytes:
        # Nobody outside can tell which key a guess leads to, so the time that the search for it takes says
        # nothing about the secrets.
        return hashlib.blake2b(digest, key=self._key, digest_size=32).digest()

    def _find(self, key: bytes) -> Identity | None:
        """Who has this secret, as far as that is known without hashing a password."""
        identity = self._generated.get(key)
        if identity is None and key in self._verified:
            self._verified.move_to_end(key)
            name, matched = self._verified[key]
            identity = self._policy.identities.get(name)
            if identity is not None and matched not in identity.passwords:
                identity = None
        return identity

    async def _check_password(self, key: bytes, secret: bytes, remote_ip: str) -> None:
        """Return once `name:password` is among the verified. Raises AuthFailed."""
        name_bytes, colon, password = secret.partition(b":")
        if not colon or not self._has_passwords:
            raise AuthFailed("no identity has this secret")
        name = name_bytes.decode("utf-8", "replace")
        checking = self._checking.get(key)
        if checking is None:
            checking = self._start_check(key, name, password, remote_ip)
        # The answer is for all who wait for it; one of them may go away.
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
                self._throttle.give_back(source)
                self._verified[key] = (name, matched)
                if len(self._verified) > MAX_REMEMBERED:
                    self._verified.popitem(last=False)

        future.add_done_callback(finish)
        self._checking[key] = future
        self._waiting.append((key, hashes, password))
        self._run_next()
        return future

    def _run_next(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._running < MAX_RUNNING:
            key, hashes, password = self._waiting.popleft()
            try:
                work = loop.run_in_executor(self._executor, _first_match, hashes, password)
            except RuntimeError:
                return self._give_up()
            self._running += 1
            work.add_done_callback(partial(self._ran, self._checking[key]))

    def _ran(
        self, future: asyncio.Future[PasswordHash | None], work: asyncio.Future[PasswordHash | None]
    ) -> None:
        self._running -= 1
        if work.cancelled():
            return self._give_up()
        error = work.exception()
        if future.done():  # given up
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(work.result())
        self._run_next()

    def _give_up(self) -> None:
        """The daemon stops, and its threads have gone before us."""
        self._waiting.clear()
        for future in self._checking.values():
            if not future.done():
                future.set_exception(AuthFailed("nsqd is stopping"))


def _first_match(hashes: Sequence[PasswordHash], password: bytes) -> PasswordHash | None:
    if not hashes:
        _NOBODY.matches(password)
    return next((candidate for candidate in hashes if candidate.matches(password)), None)


def _network(remote_ip: str) -> str:
    """Where an attempt comes from. Of IPv6 everybody has a whole network."""
    if ":" in remote_ip:
        try:
            return str(ipaddress.ip_network((remote_ip.partition("%")[0], 64), strict=False))
        except ValueError:
            pass
    return remote_ip


class _Throttle:
    """Attempts by source: a few at once, then one now and then. Right ones are given back."""

    def __init__(self) -> None:
        self._sources: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        """What is left, and when that was."""

    def take(self, source: tuple[str, str], now: float) -> bool:
        left, since = self._sources.get(source, (float(WRONG_AT_ONCE), now))
        left = min(WRONG_AT_ONCE, left + (now - since) * WRONG_PER_S)
        permitted = left >= 1.0
        self._sources[source] = (left - permitted, now)
        self._sources.move_to_end(source)
        if len(self._sources) > MAX_THROTTLED:
            self._sources.popitem(last=False)
        return permitted

    def give_back(self, source: tuple[str, str]) -> None:
        if source in self._sources:
            left, since = self._sources[source]
            self._sources[source] = (left + 1, since)
