"""Who asks for a change, as far as is known: for the log and for notifications."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from nsparq.addresses import join_address
from nsparq.http.api import Request

__all__ = ["Actor", "basic_user"]


@dataclass(frozen=True, slots=True)
class Actor:
    user: str
    """Empty if nobody says."""
    remote_address: str
    user_agent: str
    url: str

    @classmethod
    def of(cls, request: Request, user: str = "") -> Actor:
        """`user` is who we know it is; otherwise what HTTP Basic says counts, as in NSQ, unchecked."""
        is_secure = request.secure is not None or request.header("X-Scheme") == "https"
        target = request.path + (f"?{request.query}" if request.query else "")
        return cls(
            user=user or basic_user(request),
            remote_address=join_address(request.peer, request.peer_port) if request.peer_port else "",
            user_agent=request.header("User-Agent"),
            url=f"{'https' if is_secure else 'http'}://{request.header('Host')}{target}",
        )


def basic_user(request: Request) -> str:
    """The name in the Authorization header of the basic scheme, if it has one."""
    scheme, _, credentials = request.header("Authorization").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        decoded = base64.b64decode(credentials, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""
    name, colon, _ = decoded.partition(":")
    return name if colon else ""
