"""Errors that a producer or consumer raises.

ClientError
├── ConnectFailed        no connection: refused, timed out, not an nsqd, TLS or AUTH failed
├── NotConnected         connection lost before the answer; it may have been published
├── PublishFailed        the broker refused; `code` and `description` are from its answer
├── PublishTimeout       no broker acknowledged in time
├── HeadersNotSupported  the broker knows no message headers; nothing was published
├── Stopped              the producer or consumer has been stopped
├── LookupFailed         client.connect.lookup: no usable answer; a producer raises ConnectFailed
└── DecodeFailed         client.payloads.decode: a body does not have the declared type
"""

from __future__ import annotations

import os
import re
import ssl

from nsparq.errors import NsparqError

__all__ = [
    "ClientError",
    "ConnectFailed",
    "HeadersNotSupported",
    "NotConnected",
    "PublishFailed",
    "PublishTimeout",
    "Stopped",
]


class ClientError(NsparqError):
    """Root of the tree above."""


class ConnectFailed(ClientError):
    """No connection could be made."""


class NotConnected(ClientError):
    """The connection was lost."""

    def __init__(self, text: str = "not connected") -> None:
        super().__init__(text)


class PublishFailed(ClientError):
    """The broker refused the publish; the text is its answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code, _, self.description = text.partition(" ")


class PublishTimeout(ClientError, TimeoutError):
    """No broker acknowledged in time. The message may still have been published."""


class HeadersNotSupported(ClientError):
    """The broker knows no message headers, as NSQ's own nsqd. The message was not published."""

    def __init__(self, address: str) -> None:
        super().__init__(f"{address}: this nsqd does not support message headers")


class Stopped(ClientError):
    """The producer or consumer has been stopped."""

    def __init__(self) -> None:
        super().__init__("stopped")


def reason_of(error: BaseException | None) -> str:
    """Why a connection was lost or could not be made. For a system error, the system's text:
    asyncio's text repeats the address."""
    if error is None:
        return "closed"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        if error.errno is not None and error.errno > 0:
            return os.strerror(error.errno)
        # asyncio joins the errors for all addresses of a host in one text.
        numbers = re.findall(r"\[Errno (\d+)\]", str(error))
        if numbers:
            return ", ".join(dict.fromkeys(os.strerror(int(number)) for number in numbers))
    strerror = error.strerror if isinstance(error, OSError) else ""
    return strerror or str(error) or type(error).__name__
