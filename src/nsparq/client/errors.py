"""What can go wrong between a program and its brokers.

ClientError
├── ConnectFailed        no connection: refused, timed out, not an nsqd, TLS or AUTH failed
├── NotConnected         the connection went away before the answer came: it is unknown what became of it
├── PublishFailed        the broker refused; `code` and `description` are its own
├── PublishTimeout       no broker acknowledged in time
├── Stopped              the producer or consumer has been stopped
├── LookupFailed         client.lookup: no nsqlookupd gave a usable answer; a producer raises ConnectFailed
└── DecodeFailed         client.payload: a body is not what a subscription declared
"""

from __future__ import annotations

import os
import re
import ssl

from nsparq.errors import NsparqError

__all__ = [
    "ClientError",
    "ConnectFailed",
    "NotConnected",
    "PublishFailed",
    "PublishTimeout",
    "Stopped",
]


class ClientError(NsparqError):
    """Root of the tree above."""


class ConnectFailed(ClientError):
    """No conversation came about."""


class NotConnected(ClientError):
    """The connection is gone."""

    def __init__(self, text: str = "not connected") -> None:
        super().__init__(text)


class PublishFailed(ClientError):
    """The broker's own words."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code, _, self.description = text.partition(" ")


class PublishTimeout(ClientError, TimeoutError):
    """Nothing acknowledged it in time. It may still have been published."""


class Stopped(ClientError):
    """Nothing more goes through here."""

    def __init__(self) -> None:
        super().__init__("stopped")


def reason_of(error: BaseException | None) -> str:
    """Why a connection is gone, or did not come about. In the system's words where it is the system's: those
    of asyncio name the address again, which is known."""
    if error is None:
        return "closed"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        if error.errno is not None and error.errno > 0:
            return os.strerror(error.errno)
        # One for each address of a host, in one text.
        numbers = re.findall(r"\[Errno (\d+)\]", str(error))
        if numbers:
            return ", ".join(dict.fromkeys(os.strerror(int(number)) for number in numbers))
    strerror = error.strerror if isinstance(error, OSError) else ""
    return strerror or str(error) or type(error).__name__
