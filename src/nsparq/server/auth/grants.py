"""Permissions, and the grants that give them to clients.

A client sends a secret: AUTH on a TCP connection, or a bearer token over HTTP. An authenticator
turns the secret into a Grant, which decides about each action. The authenticators are NSQ's auth
servers (auth.servers), the policy file (auth.policy), or both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from nsparq.errors import NsparqError
from nsparq.names import MAX_NAME_LENGTH
from nsparq.server.auth.patterns import Pattern

MAX_REMEMBERED: Final = 1024
"""Decisions that a grant caches."""


class AuthFailed(NsparqError):
    """There is no grant for a secret. The text is for the log; the client does not see it."""


class Permission(StrEnum):
    """NSQ has the first two."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"  # consume messages, or read their contents
    READ = "read"  # read anything else: stats, metrics, settings
    ADMIN = "admin"  # change anything: create, delete, pause, empty, seek, configure

    __hash__ = str.__hash__  # Enum's own is slow, and every publish needs it


@dataclass(frozen=True, slots=True)
class Authorization:
    """Permissions for the topics and channels that match the patterns."""

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
    """Shared by all grants of one policy. They end when the policy is replaced."""

    is_over = False


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of an identity, until they expire."""

    identity: str
    identity_url: str
    authorizations: tuple[Authorization, ...]
    expires: float = math.inf
    """A time of time.monotonic(), which is the event loop's clock."""
    validity: Validity | None = field(default=None, compare=False, repr=False)
    _answers: dict[tuple[Permission, str, str], bool] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def allows(self, permission: Permission, topic: str = "", channel: str = "") -> bool:
        """Whether any authorization permits the action. NSQ's rule: its topic pattern matches a
        part of the topic, and one of its channel patterns a part of the channel, which is "" for an
        action on a whole topic.

        An action on the whole daemon has the topic "". `.*` matches that, `^billing` does not.
        """
        key = (permission, topic, channel)
        known = self._answers.get(key)
        if known is None:
            known = any(entry.allows(permission, topic, channel) for entry in self.authorizations)
            # HTTP parameters may be as long as the head of a request.
            if len(topic) <= MAX_NAME_LENGTH and len(channel) <= MAX_NAME_LENGTH:
                if len(self._answers) >= MAX_REMEMBERED:
                    self._answers.clear()
                self._answers[key] = known
        return known

    def may(self, permission: Permission) -> bool:
        """Whether the action is permitted for at least one topic."""
        return any(permission in entry.permissions for entry in self.authorizations)

    def is_expired(self, now: float) -> bool:
        """Whether the client must authenticate again."""
        return now >= self.expires or (self.validity is not None and self.validity.is_over)

    def reply(self) -> bytes:
        """The response to AUTH, byte for byte as NSQ writes it."""
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
        """The grant of clients without a secret, or None if they may do nothing."""

    async def authenticate(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        """The grant for a secret. It may have no authorization. Raises AuthFailed."""

    def reload(self) -> None:
        """Read the files again. If that fails, log it and keep the old contents."""


class AuthChain:
    """Several authenticators. The first that knows a secret decides."""

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
