"""Every error we raise, and what it does to the connection. Those of one module only are defined there.

NsparqError
├── ProtocolError        has a wire code and a text for the client
│   ├── ClientError      answered; the connection stays open    E_FIN_FAILED, E_REQ_FAILED, E_TOUCH_FAILED
│   └── FatalClientError answered; the connection then closes   every other code
├── Exiting              the topic or channel is being deleted, or the daemon stops
├── SubscribeRefused     the channel takes no further client; the client is told, the connection then closes
├── StorageError         logged; a client sees only that its publish failed
│   ├── WriteFailed      the disk refused an append (full, I/O error); nothing of it is kept
│   ├── SyncFailed       an fsync failed; nobody knows what the disk has, and consumers may get the messages
│   ├── CorruptBatch     bytes on disk that are not what was written
│   ├── CorruptRange     storage.decode: bytes of a range that are not the batches they should be
│   ├── OffsetGone       storage.ranges: the log no longer holds this sequence number
│   └── OffsetAhead      storage.ranges: it has not reached it yet
├── AlreadyCommitted     broker.transactions: it is done already; nothing is done twice
├── Incomplete           broker.transactions: not all of it has been staged
├── Unfinished           broker.transactions: an earlier one of the same producer has to be finished first
├── Damaged              broker.transactions: staged messages are lost, and nobody has accepted that
├── StagingFull          broker.transactions: as much is staged as the flags allow
├── PartSealed           broker.transactions: the part has been promised as it is
├── WrongPosition        broker.transactions: the writer takes the part for longer or shorter than it is
├── StartError           the daemon cannot start; the text is for the operator
│   ├── OptionError      option_table: a flag or a key of the file
│   └── PolicyError      server.auth_policy: the file that says who may do what
├── StopError            the daemon has stopped, and could not keep everything; the text is for the operator
├── AuthFailed           server.auth: no grant for a secret; logged, the client is told E_AUTH_FAILED or 401
├── BadPattern           server.auth_patterns: no regular expression; refused with the policy that has it
├── ApiError             http.api: the answer to an HTTP request, with status and code; it stays open
├── LineTooLong          wire.server: the connection ends without a word
├── LayerError           transport.layers: bytes that TLS or compression cannot read; the connection ends
├── BadFrame             wire.client: bytes that are no frames; the connection ends
├── BadReply             wire.lookup: an nsqlookupd that cannot be understood; the connection is made anew
├── FetchError           fetch: no answer to an HTTP request of ours
├── GetFailed            client.http: the same on an event loop
├── RequestFailed        tools.http_client: the same, where connections are kept
├── AskFailed            tools.cluster: an nsqd or nsqlookupd gave no usable answer; the tool ends
├── ConfigError          client.config: an option of the client
└── ClientError          client.errors: what a producer or consumer raises; the tree is there

`nsparq.admin`, `nsparq.spark` and `nsparq.pipeline` have their own, under the same root.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class NsparqError(Exception):
    """Root of the tree above."""

    retry_helps: ClassVar[bool] = True
    """Whether the same work could succeed later without a person doing something. The runner of pipelines
    asks: it does not start a pipeline again after an error for which this is False."""


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


class SyncFailed(StorageError):
    """The messages are in the log and may be delivered, but are not known to be on disk."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"fsync failed: {reason}; the message may be delivered, and may be lost")


class CorruptBatch(StorageError):
    """A batch whose bytes are not those that were written."""

    def __init__(self, path: Path, position: int, reason: str) -> None:
        super().__init__(f"{path}: {reason} at byte {position}")
        self.path, self.position, self.reason = path, position, reason


class StartError(NsparqError):
    """The daemon cannot start."""


class StopError(NsparqError):
    """The daemon has stopped, and something could not be kept."""
