"""The policy file: identities, hashes of their secrets, and their permissions.

    [[identity]]
    name = "billing"
    secret = "sha256:…"              # of a generated secret; or "scrypt:…" of a password; or a list
    [[identity.allow]]
    topic = "^billing"
    channels = [".*"]
    permissions = ["publish", "subscribe"]

    [[anonymous.allow]]              # optional: permissions without a secret
    topic = ".*"
    permissions = ["read"]

Nobody can guess a generated secret, so a fast hash is enough, and the client sends the secret
alone. A password can be guessed, so its hash is slow. The client sends `name:password`, so that
nsqd computes one hash and not one for each identity.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from nsparq.errors import StartError
from nsparq.server.auth.grants import Authorization, Permission
from nsparq.server.auth.patterns import BadPattern, compile_pattern

MAX_SECRETS: Final = 8
"""Secrets of one identity. While one is replaced, the old and the new one are valid."""

# About 60 ms and 32 MiB for each attempt.
SCRYPT_N, SCRYPT_R, SCRYPT_P = 15, 8, 1
MAX_SCRYPT_BYTES: Final = 256 << 20


class PolicyError(StartError):
    """A policy file cannot be used. The text names the file, the entry and the reason."""


def hash_generated(secret: bytes) -> str:
    """The entry in the file for a generated secret, which nobody can guess."""
    return f"sha256:{hashlib.sha256(secret).hexdigest()}"


def hash_password(password: bytes) -> str:
    """The entry in the file for a password that a person chose."""
    found = PasswordHash(SCRYPT_N, SCRYPT_R, SCRYPT_P, secrets.token_bytes(16), b"\0" * 32)
    key = found.derive(password)
    return f"scrypt:{SCRYPT_N}:{SCRYPT_R}:{SCRYPT_P}:{found.salt.hex()}:{key.hex()}"


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """A `scrypt:` entry: cost parameters (the first as a power of two), salt and key."""

    cost: int
    block: int
    parallel: int
    salt: bytes
    key: bytes

    @classmethod
    def parse(cls, text: str) -> PasswordHash:
        found = re.fullmatch(r"(\d{1,2}):(\d{1,2}):(\d{1,2}):([0-9a-f]{16,128}):([0-9a-f]{32,128})", text)
        if not found or len(found[4]) % 2 or len(found[5]) % 2:
            raise ValueError("not a scrypt hash; `nsparq auth hash` makes one")
        parsed = cls(int(found[1]), int(found[2]), int(found[3]), *map(bytes.fromhex, found.groups()[3:]))
        if not (1 <= parsed.cost <= 24 and 1 <= parsed.block and 1 <= parsed.parallel <= 16):
            raise ValueError("scrypt parameters out of range")
        if parsed.bytes_needed > MAX_SCRYPT_BYTES:
            raise ValueError(f"the scrypt hash needs {parsed.bytes_needed >> 20} MiB for each attempt")
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


@dataclass(frozen=True, slots=True)
class Identity:
    name: str
    url: str
    generated: tuple[bytes, ...]
    """SHA-256 digests of generated secrets."""
    passwords: tuple[PasswordHash, ...]
    authorizations: tuple[Authorization, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """The contents of a policy file."""

    identities: Mapping[str, Identity]
    anonymous: tuple[Authorization, ...] | None
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Entries that are valid but probably a mistake."""


def read_policy(path: Path) -> Policy:
    """Raises PolicyError."""
    try:
        is_open = os.stat(path).st_mode & 0o002
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PolicyError(f"{path}: {error}") from error
    warnings = ["every user of this machine can write to the file"] if is_open else []
    try:
        policy = _Reader(warnings).policy(content)
    except ValueError as error:
        raise PolicyError(f"{path}: {error}") from None
    return Policy(policy.identities, policy.anonymous, tuple(warnings))


class _Reader:
    """Turns TOML values into a policy. Raises ValueError, with the place before the reason.

    An unknown key is an error: a mistyped one must neither lock anybody out nor let anybody in.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings

    def policy(self, content: Mapping[str, Any]) -> Policy:
        self._check_keys("", content, {"identity", "anonymous"})
        if not content:
            self._fail("", "neither [[identity]] nor [anonymous]; write `identity = []` if that is intended")
        identities: dict[str, Identity] = {}
        owners: dict[bytes, str] = {}
        for number, table in enumerate(self._tables("", content, "identity"), 1):
            identity = self._identity(f"identity {number}", table)
            if identity.name in identities:
                self._fail(f"identity {number}", f"another identity has the name {identity.name!r}")
            for digest in identity.generated:
                if digest in owners:
                    self._fail(f"identity {identity.name!r}", f"has the same secret as {owners[digest]!r}")
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
            self._fail(place, "name must be a string without a colon")
        place = f"identity {name!r}"
        url = table.get("url", "")
        if not isinstance(url, str):
            self._fail(place, "url must be a string")
        generated, passwords = self._secrets(place, table.get("secret"))
        return Identity(name, url, generated, passwords, self._authorizations(place, table))

    def _secrets(self, place: str, value: object) -> tuple[tuple[bytes, ...], tuple[PasswordHash, ...]]:
        texts = value if isinstance(value, list) else [value]
        if not 1 <= len(texts) <= MAX_SECRETS:
            self._fail(place, f"secret must be a string or a list of up to {MAX_SECRETS}")
        generated, passwords = [], []
        for text in texts:
            kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
            # The error does not show the value: it may be the secret itself.
            if kind == "sha256":
                if not re.fullmatch(r"[0-9a-f]{64}", rest):
                    self._fail(place, "secret: sha256: must be followed by 64 hexadecimal digits (0-9, a-f)")
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
            self._warnings.append(f"{place} has no permissions: it has no allow")
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
            self._fail(place, f"permissions: {error}; known are {', '.join(Permission)}")
        whole_topic = sorted(found.permissions - {Permission.SUBSCRIBE})
        if whole_topic and not any(pattern.search("") for pattern in found.channels):
            self._warnings.append(
                f"{place}: no effect on {', '.join(whole_topic)}: for these a channel pattern must match the "
                'empty string, as ".*" does'
            )
        return found

    def _texts(self, place: str, entry: Mapping[str, Any], key: str, default: list[str]) -> list[str]:
        values = entry.get(key, default)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self._fail(place, f"{key} must be a list of strings")
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
                self._fail(place, f"unknown key {key!r}; known are {', '.join(sorted(known))}")

    def _fail(self, place: str, reason: str) -> NoReturn:
        raise ValueError(f"{place}: {reason}" if place else reason)
