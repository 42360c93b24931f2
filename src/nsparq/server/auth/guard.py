"""Permissions for the HTTP API: bearer tokens, with the same policy as AUTH."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any

from nsparq.http.api import ApiError, Endpoint, Request
from nsparq.server.auth.grants import Authenticator, AuthFailed, Grant, Permission
from nsparq.server.auth.tokens import TokenCache, secret_from_header

logger = logging.getLogger(__name__)


class Guard:
    """Checks every request before its handler runs."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._tokens = TokenCache(authenticator)

    def __call__(self, request: Request, endpoint: Endpoint) -> Awaitable[None] | None:
        """Raise ApiError unless the request is permitted. Awaitable if that needs a lookup."""
        tls = request.secure
        about: dict[str, Any] = {
            "remote_ip": request.peer,
            "tls": tls is not None,
            "common_name": tls.common_name if tls else "",
        }
        try:
            secret = secret_from_header(request.header("Authorization"))
        except AuthFailed as error:
            raise _auth_required() from error
        grant = self._tokens.known(secret, **about)
        if grant is None:
            return self._ask(secret, about, request, endpoint)
        _check(grant, request, endpoint)
        return None

    async def _ask(self, secret: bytes, about: dict[str, Any], request: Request, endpoint: Endpoint) -> None:
        try:
            grant = await self._tokens.grant(secret, **about)
        except AuthFailed as error:
            logger.info("HTTP client(%s): %s", request.peer, error)
            raise _auth_required() from error
        _check(grant, request, endpoint)

    async def close(self) -> None:
        await self._tokens.close()


def _auth_required() -> ApiError:
    return ApiError(401, "AUTH_REQUIRED", (("WWW-Authenticate", "Bearer"),))


def _check(grant: Grant, request: Request, endpoint: Endpoint) -> None:
    if not _is_allowed(grant, request, endpoint):
        raise ApiError(403, "UNAUTHORIZED") if request.header("Authorization") else _auth_required()
    request.identity = grant.identity
    if endpoint.is_owner is not None and not endpoint.is_owner(request):
        raise ApiError(403, "OWNED_BY_ANOTHER") if request.header("Authorization") else _auth_required()


def _is_allowed(grant: Grant, request: Request, endpoint: Endpoint) -> bool:
    permission, parameters = Permission(endpoint.permission), request.parameters
    # Only parameters that the handler reads: others could name a topic that the client may use.
    known = {param.name for param in endpoint.params}
    channel = parameters.get("channel", "") if "channel" in known else ""
    if endpoint.topics is not None:
        topics = endpoint.topics(request)
        if not topics:
            return grant.may(permission)
        return all(grant.allows(permission, topic, channel) for topic in topics)
    topic = parameters.get("topic", "") if "topic" in known else ""
    return grant.allows(permission, topic, channel)
