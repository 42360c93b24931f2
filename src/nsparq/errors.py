"""Every error we raise, and what it does to the connection.

NsparqError
├── ProtocolError        has a wire code and a text for the client
│   ├── ClientError      answered; the connection stays open    E_FIN_FAILED, E_REQ_FAILED, E_TOUCH_FAILED
│   └── FatalClientError answered; the connection then closes   every other code
├── Exiting              the topic or channel is being deleted, or the daemon stops
├── StorageError         logged; a client sees only that its publish failed
│   ├── WriteFailed      the disk refused an append (full, I/O error); nothing of it is kept
│   └── CorruptBatch     bytes on disk that are not what was written
└── StartError           the daemon cannot start; the text is for the operator
"""

from __future__ import annotations

from pathlib import Path


class NsparqError(Exception):
    """Root of the tree above."""


class ProtocolError(NsparqError):
    """An answer the peer earned: a code for machines, a description for people."""

    fatal = True

    def __init__(self, code: str, description: str = "") -> None:
        super().__init__(f"{code} {description}" if description else code)
        self.code = code
        self.description = description

    @property
    def shown(self) -> str:
        """For a log: bytes of the peer that are no text, which stand in it as they came, are escaped."""
        return str(self).encode("utf-8", "backslashreplace").decode()


class ClientError(ProtocolError):
    """The command failed; the conversation goes on."""

    fatal = False


class FatalClientError(ProtocolError):
    """The conversation cannot go on."""


class Exiting(NsparqError):
    """The topic or channel is going away."""

    def __init__(self) -> None:
        super().__init__("exiting")


class SubscribeRefused(NsparqError):
    """The channel takes no further client."""


class StorageError(NsparqError):
    """The disk did not do what we asked, or does not hold what we wrote."""


class WriteFailed(StorageError):
    """An append did not reach the disk; the log is as it was before."""


class CorruptBatch(StorageError):
    """A batch whose bytes are not those that were written."""

    def __init__(self, path: Path, position: int, reason: str) -> None:
        super().__init__(f"{path}: {reason} at byte {position}")
        self.path, self.position, self.reason = path, position, reason


class StartError(NsparqError):
    """The daemon cannot start."""
