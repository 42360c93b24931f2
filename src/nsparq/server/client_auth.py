"""The permissions of one client: the secret that it has sent, and the grant for it."""

from __future__ import annotations

import asyncio
import logging

from nsparq.broker.client import Client
from nsparq.errors import FatalClientError
from nsparq.server.auth.grants import Authenticator, AuthFailed, Grant, Permission

logger = logging.getLogger(__name__)


class ClientAuth:
    """The permissions of one client, for as long as it is connected."""

    def __init__(self, authenticator: Authenticator | None, client: Client) -> None:
        self.is_required = authenticator is not None
        """Whether a command needs a permission."""
        self._authenticator = authenticator
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._secret = b""
        self._grant: Grant | None = None

    @property
    def has_expired(self) -> bool:
        """Whether the grant must be asked for again."""
        return self._grant is not None and self._grant.is_expired(self._loop.time())

    @property
    def is_of_an_old_policy(self) -> bool:
        """Whether the policy that gave the grant has been replaced. A grant that is only too old
        holds until the next command that needs it."""
        return self._grant is not None and self._grant.validity is not None and self._grant.validity.is_over

    def take_secret(self, secret: bytes) -> None:
        """AUTH. authenticate() must follow. Raises FatalClientError."""
        if self._grant is not None:
            raise FatalClientError("E_INVALID", "AUTH already set")
        if self._authenticator is None:
            raise FatalClientError("E_AUTH_DISABLED", "AUTH disabled")
        self._secret = secret

    async def authenticate(self) -> Grant:
        """Have the secret checked. Raises FatalClientError."""
        assert self._authenticator is not None
        client, tls = self._client, self._client.tls
        try:
            grant = await self._authenticator.authenticate(
                self._secret,
                remote_ip=client.address.rpartition(":")[0].strip("[]"),
                tls=tls is not None,
                common_name=tls.common_name if tls else "",
            )
        except AuthFailed as error:
            logger.warning("client(%s): AUTH failed: %s", client.address, error)
            raise FatalClientError("E_AUTH_FAILED", "AUTH failed") from error
        self._grant = client.grant = grant
        return grant

    def require(self, verb: str, topic: str, channel: str) -> None:
        """Raise FatalClientError unless the client may do this, by its grant, or by the anonymous
        grant if it has sent no secret."""
        assert self._authenticator is not None
        grant = self._grant or self._authenticator.anonymous
        if grant is None:
            raise FatalClientError("E_AUTH_FIRST", f"AUTH required before {verb}")
        permission = Permission.SUBSCRIBE if verb == "SUB" else Permission.PUBLISH
        if not grant.allows(permission, topic, channel):
            raise FatalClientError("E_UNAUTHORIZED", f'AUTH failed for {verb} on "{topic}" "{channel}"')
