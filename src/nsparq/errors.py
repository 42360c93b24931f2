"""Every error we raise, and what it does to the connection. Errors of one module are defined there.

NsparqError
├── ProtocolError        has a wire code and a text for the client
│   ├── ClientError      answered; the connection stays open: E_FIN_FAILED, E_REQ_FAILED, …
│   │   └── AnswerFailed FIN, REQ or TOUCH of a message that the client does not have
│   └── FatalClientError answered; then the connection closes: every other code
├── Exiting              the topic or channel is being deleted, or the daemon stops
├── SubscribeRefused     the channel takes no more clients; answered, then the connection closes
├── NotReplicated        a change is not on all nodes that may take over; it may be undone
├── StorageError         logged; a client sees only that its publish failed
│   ├── WriteFailed      the disk refused an append (full, I/O error); nothing of it is kept
│   ├── TooFewReplicas   fewer nodes than --min-in-sync have a copy; nothing is kept
│   ├── SyncFailed       an fsync failed; the messages may be delivered or lost
│   ├── CorruptBatch     bytes on disk that differ from what was written
│   ├── ArchiveUnavailable the object store of the archive cannot be used; tried again later
│   ├── Replaced         archive.topic_archive: another nsqd archives this log now
│   ├── BadManifest      storage.manifest: not a manifest that this version understands
│   ├── CorruptRange     storage.raw_batch: bytes of a range that are not valid batches
│   ├── OffsetGone       storage.log_range: the log no longer has this sequence number
│   └── OffsetAhead      storage.log_range: the log has not reached this sequence number
├── NumberRefused        broker.seen_numbers: the number of an idempotent producer; answered, it closes
├── AlreadyCommitted     broker.transaction: the transaction was committed before
├── Incomplete           broker.transaction: not all of it has been staged
├── Unfinished           broker.transaction: an earlier one of the same producer is not finished
├── Damaged              broker.transaction: staged messages are lost, and nobody has accepted that
├── StagingFull          broker.transaction: the limit for staged messages is reached
├── PartSealed           broker.transaction: the part was prepared and cannot change
├── WrongPosition        broker.transaction: the writer expects another length of the part
├── RedriveRunning       broker.redrive: the topic has a redrive that has not ended
├── StartError           the daemon cannot start; the text is for the operator
│   ├── OptionError      option_table: a wrong flag or file key
│   ├── PolicyError      server.auth.policy_file: a wrong policy file
│   └── TopicsFileError  server.topics_file: a topics file that is wrong or cannot be applied
├── StopError            the daemon could not save everything; the text is for the operator
├── AuthFailed           server.auth.grants: no permissions; logged, answered E_AUTH_FAILED or 401
├── BadPattern           server.auth.patterns: an invalid regular expression in a policy
├── ApiError             http.api: the answer to an HTTP request, with status and code
├── LineTooLong          wire.server: the connection ends without an answer
├── LayerError           transport.layers: unreadable bytes of TLS or compression; it ends
├── BadFrame             wire.client: bytes that are not frames; the connection ends
├── BadReply             wire.lookup: an invalid answer of an nsqlookupd; the connection is reopened
├── BadChange            replication.changes: bytes that are not a change of a data path
├── BadFrame             replication.frames: the other node breaks the protocol; the connection ends
├── Refused              replication.follower: the primary does not accept this follower
├── Fenced               replication.acknowledging: another node has become primary
├── NoAnswer             replication.coordinator: no answer of the coordinator
├── ForeignData          replication.follower: the data path is not a copy of the cluster's; it stops
├── NotPossible          replication.node: a switch-over without a node that could take over
├── FetchError           fetch: no answer to an HTTP request of ours
├── GetFailed            client.connect.http_get: the same on an event loop
├── RequestFailed        tools.http_client: the same, with reused connections
├── AskFailed            tools.cluster: no usable answer of an nsqd or nsqlookupd; the tool ends
├── ConfigError          client.config: a wrong option of the client
└── ClientError          client.errors: what a producer or consumer raises; the tree is there

`nsparq.admin`, `nsparq.spark` and `nsparq.pipeline` have their own, under the same root.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class NsparqError(Exception):
    """Root of the tree above."""

    retry_helps: ClassVar[bool] = True
    """Whether a retry can succeed without somebody's help. After an error for which this is False,
    a pipeline is not restarted."""


class ProtocolError(NsparqError):
    """An error that is sent to the peer: a code for programs, a description for people."""

    fatal = True

    def __init__(self, code: str, description: str = "") -> None:
        super().__init__(f"{code} {description}" if description else code)
        self.code = code
        self.description = description

    @property
    def shown(self) -> str:
        """For logs: bytes of the peer that are not text are escaped."""
        return str(self).encode("utf-8", "backslashreplace").decode()


class ClientError(ProtocolError):
    """The command failed; the connection stays open."""

    fatal = False


class AnswerFailed(ClientError):
    """FIN, REQ or TOUCH of a message that the client does not have."""

    def __init__(self, verb: str, message_id: int, *, is_in_flight: bool) -> None:
        reason = "client does not own message" if is_in_flight else "ID not in flight"
        super().__init__(f"E_{verb}_FAILED", f"{verb} {message_id:016x} failed {reason}")


class FatalClientError(ProtocolError):
    """The connection is closed."""


class NotReplicated(NsparqError):
    """A change was made here, but it is not known to be on the other nodes."""


class Exiting(NsparqError):
    """The topic or channel is being deleted, or the daemon stops."""

    def __init__(self) -> None:
        super().__init__("exiting")


class SubscribeRefused(NsparqError):
    """The channel takes no more clients."""


class StorageError(NsparqError):
    """The disk failed, or does not have what we wrote."""


class WriteFailed(StorageError):
    """An append failed; the log is unchanged."""


class TooFewReplicas(StorageError):
    """Nothing is published while a failure could leave no copy."""

    def __init__(self, count: int, minimum: int) -> None:
        super().__init__(f"{count} of at least {minimum} nodes are in sync: publishes are refused")


class SyncFailed(StorageError):
    """The messages are in the log and may be delivered, but may not be on disk."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"fsync failed: {reason}; the message may be delivered or lost")


class ArchiveUnavailable(StorageError, OSError):
    """The object store of the archive cannot be reached, refuses, or does not have what it
    should."""


class CorruptBatch(StorageError):
    """A batch whose bytes differ from what was written."""

    def __init__(self, path: Path, position: int, reason: str) -> None:
        super().__init__(f"{path}: {reason} at byte {position}")
        self.path, self.position, self.reason = path, position, reason


class StartError(NsparqError):
    """The daemon cannot start."""


class StopError(NsparqError):
    """The daemon stopped but could not save everything."""
