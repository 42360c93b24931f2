"""Transactions: stage messages, then publish all of them or none. See server.committing."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.transaction import AlreadyCommitted, Committed, Transaction
from nsparq.errors import FatalClientError
from nsparq.http.api import JSON_TYPE, ApiError, Endpoint, Param, Request, Result
from nsparq.server.api.parameters import (
    COUNT,
    FLAG,
    SEQUENCE,
    TEXT,
    TOPIC,
    TOPIC_NAME_ERRORS,
    flag_of,
    name_of,
    number_of,
    obj,
)
from nsparq.server.api.producers import IDENTIFIER, PRODUCER, PRODUCER_ERRORS, identifier_of
from nsparq.server.committing import Parts, transaction_errors
from nsparq.wire.mpub import decode_multiple

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

MAX_NOTE: Final = 4096
MAX_PARTS_BODY: Final = 1 << 20

_WHICH: Final = (
    PRODUCER,
    Param(name="sequence", help="the producer's number of the transaction", required=True, schema=SEQUENCE),
)
_PROMISE: Final = Param(
    name="promise",
    help="the note that must be prepared now; empty if nothing may be prepared",
    schema={"type": "string"},
)
_WHICH_ERRORS: Final = (*PRODUCER_ERRORS, (400, "MISSING_ARG_SEQUENCE"), (400, "INVALID_ARG_SEQUENCE"))
_OWNED_ERRORS: Final = (*_WHICH_ERRORS, (403, "OWNED_BY_ANOTHER"))
_PARTS: Final = {
    "type": "object",
    "properties": {
        "parts": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
        "note": {"type": "string", "maxLength": MAX_NOTE},
    },
    "required": ["parts"],
    "additionalProperties": False,
}
_PARTS_HELP: Final = (
    '`{"parts": {name: messages}, "note": text}`: the parts of the transaction, in this order, each with '
    "the number of messages that it must have"
)
_PARTS_ERRORS: Final = ((400, "INVALID_PARTS"), (409, "INCOMPLETE_TRANSACTION"), (503, "WRITE_FAILED"))
_UNFINISHED: Final = ((409, "DAMAGED_TRANSACTION"), (503, "EARLIER_TRANSACTION_UNFINISHED"))
_COMMITTED: Final = obj(
    {"sequence": COUNT, "messages": {"type": ["integer", "null"]}, "already_committed": {"type": "boolean"}},
    {"lost_messages": COUNT},
)


class TransactionsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._options = nsqd.options
        self._transactions = nsqd.broker.transactions
        self._committer = nsqd.committer

    # For the guard

    def topics(self, request: Request) -> set[str]:
        """The topics of an open transaction: whoever may publish to all of them may change it."""
        try:
            transaction = self._transactions.find(*_which(request))
        except (AlreadyCommitted, ApiError):
            return set()
        return set() if transaction is None else transaction.topics

    def admin_topics(self, request: Request) -> set[str]:
        """The same for admins. A transaction that is not open needs admins of the whole daemon."""
        return self.topics(request) or {""}

    def is_owner(self, request: Request) -> bool:
        return self._transactions.is_owner(request.parameters.get("producer", ""), request.identity)

    @Endpoint(
        method="POST",
        path="/transaction/stage",
        summary="Store messages that are published when their transaction is committed.",
        details="The messages are appended to a part of the transaction. One writer fills a part, with as "
        "many requests as it needs. With `at` a request can be repeated if its answer was lost: it takes "
        "effect once. `TOO_MUCH_STAGED`: the producer has reached `--max-staged-bytes-per-producer`. "
        "`STAGING_FULL`: all producers together have reached `--max-staged-bytes`; try again later.",
        params=(
            *_WHICH,
            Param(
                name="part",
                help="name of the part, with the same characters as a producer's",
                required=True,
                schema=IDENTIFIER,
            ),
            TOPIC,
            Param(
                name="defer",
                help="milliseconds between the commit and delivery, up to `--max-req-timeout`",
                schema={"type": "integer", "minimum": 0, "maximum": 3_600_000},
            ),
            Param(name="at", help="number of messages in the part before these", schema=SEQUENCE),
            Param(
                name="headers",
                help="`true`: each message begins with the 32-bit size of its [header block](headers.md), "
                "and the block",
                schema=FLAG,
            ),
        ),
        permission="publish",
        is_owner=is_owner,
        body_help="messages as in `/mpub?binary=true`",
        body_schema={"type": "string", "format": "binary", "minLength": 4},
        max_body_of=lambda api: api._options.max_body_size,
        success="an object; `messages` is the number of messages in the part",
        success_schema=obj({"messages": COUNT}),
        errors=(
            *_OWNED_ERRORS,
            (400, "MISSING_ARG_PART"),
            (400, "INVALID_ARG_PART"),
            *TOPIC_NAME_ERRORS,
            (400, "INVALID_ARG_DEFER"),
            (400, "INVALID_ARG_AT"),
            (400, "INVALID_ARG_HEADERS"),
            (409, "ALREADY_COMMITTED"),
            (409, "PART_SEALED"),
            (409, "TOO_MUCH_STAGED"),
            (409, "WRONG_POSITION"),
            (413, "BAD_BODY"),
            (413, "BAD_MESSAGE"),
            (503, "STAGING_FULL"),
            (503, "WRITE_FAILED"),
        ),
    )
    def stage(self, request: Request) -> Result:
        producer, sequence = _which(request)
        part = identifier_of(request, "part")
        topic = name_of(request, "topic")
        defer_ms = number_of(request, "defer") or 0
        if defer_ms > self._options.max_req_timeout * 1000:
            raise ApiError(400, "INVALID_ARG_DEFER")
        try:
            bodies = decode_multiple(request.body, self._nsqd.limits, has_headers=flag_of(request, "headers"))
        except FatalClientError as error:
            raise ApiError(413, error.code.removeprefix("E_")) from error
        at = number_of(request, "at")
        with transaction_errors(f"transaction {producer}/{sequence}: cannot stage messages"):
            messages = self._transactions.stage(
                producer, sequence, part, topic, bodies, defer_ms=defer_ms, at=at, owner=request.identity
            )
        return {"messages": messages}

    @Endpoint(
        method="POST",
        path="/transaction/prepare",
        summary="Promise that a transaction can be committed.",
        details="For a transaction on several nsqd: prepare it on all of them, then commit it on all of "
        "them. If one of them has committed it, the others must, too: what they have prepared waits for "
        "that. A later promise replaces an earlier one.",
        params=(*_WHICH, _PROMISE),
        permission="publish",
        topics=topics,
        is_owner=is_owner,
        body_help=_PARTS_HELP,
        body_type=JSON_TYPE,
        body_schema=_PARTS,
        max_body=MAX_PARTS_BODY,
        success="an object",
        success_schema=obj({"sequence": COUNT, "messages": COUNT}),
        errors=(*_OWNED_ERRORS, (409, "ALREADY_COMMITTED"), (409, "WRONG_PROMISE"), *_PARTS_ERRORS),
    )
    async def prepare(self, request: Request) -> Result:
        producer, sequence = _which(request)
        promise = request.parameters.get("promise")
        transaction = await self._committer.prepare(
            producer, sequence, _parts(request), promise=promise, identity=request.identity
        )
        return {"sequence": sequence, "messages": transaction.messages}

    @Endpoint(
        method="POST",
        path="/transaction/commit",
        summary="Publish a transaction: all of it, and once.",
        details="Without a body: what has been prepared. For a transaction that is already committed, or "
        "older than the producer's last one, the answer is `already_committed` and nothing changes. A "
        "commit that has begun is finished, even if the connection or the daemon ends. Other parts that "
        "were staged for the transaction are dropped. nsqd first finishes an earlier commit of the "
        "producer. If the disk does not allow that now, the answer is `EARLIER_TRANSACTION_UNFINISHED`: "
        "try again. `DAMAGED_TRANSACTION` names the transaction that has lost staged messages, and how "
        "many: see `/transaction/resolve`.",
        params=(
            *_WHICH,
            _PROMISE,
            Param(
                name="remember",
                help="seconds for which nsqd remembers the producer, if less than `--transaction-retention`",
                schema=SEQUENCE,
            ),
        ),
        permission="publish",
        topics=topics,
        is_owner=is_owner,
        needs_body=False,
        body_help=_PARTS_HELP + "; or nothing",
        body_type=JSON_TYPE,
        body_schema=_PARTS,
        max_body=MAX_PARTS_BODY,
        success="an object; `messages` is null if the producer has committed a later one",
        success_schema=_COMMITTED,
        errors=(
            *_OWNED_ERRORS,
            (400, "INVALID_ARG_REMEMBER"),
            (409, "WRONG_PROMISE"),
            *_PARTS_ERRORS,
            *_UNFINISHED,
        ),
    )
    async def commit(self, request: Request) -> Result:
        producer, sequence = _which(request)
        remember_s = number_of(request, "remember")
        commit = self._committer.commit(
            producer,
            sequence,
            wanted=_parts(request) if request.body else None,
            promise=request.parameters.get("promise"),
            remember_s=remember_s,
            identity=request.identity,
        )
        # A task of its own: it continues if the client disconnects.
        return await asyncio.shield(self._nsqd.launch(commit))

    @Endpoint(
        method="POST",
        path="/transaction/resolve",
        summary="Accept that staged messages are lost, and commit the others.",
        details="For an operator. If staged messages are damaged on disk, or their files are missing, nsqd "
        "publishes the other messages of a transaction that is decided, and none of one that is only "
        "prepared. Neither that transaction nor a later decided one of the producer counts as committed "
        "until the operator calls this. A transaction that is only prepared can be aborted instead.",
        params=_WHICH,
        permission="admin",
        topics=admin_topics,
        success="an object; `lost_messages` is the number of messages that were not published",
        success_schema=_COMMITTED,
        errors=(
            *_WHICH_ERRORS,
            (409, "NOT_DAMAGED"),
            (409, "INCOMPLETE_TRANSACTION"),
            *_UNFINISHED,
            (503, "WRITE_FAILED"),
        ),
    )
    async def resolve(self, request: Request) -> Result:
        return await asyncio.shield(self._nsqd.launch(self._committer.resolve(*_which(request))))

    @Endpoint(
        method="POST",
        path="/transaction/abort",
        summary="Drop the staged messages of a transaction.",
        details="Not an error if the transaction is prepared, or unknown.",
        params=(*_WHICH, _PROMISE),
        permission="publish",
        topics=topics,
        is_owner=is_owner,
        errors=(*_OWNED_ERRORS, (409, "ALREADY_COMMITTED"), (409, "WRONG_PROMISE")),
    )
    async def abort(self, request: Request) -> None:
        producer, sequence = _which(request)
        promise = request.parameters.get("promise")
        await self._committer.abort(producer, sequence, promise=promise, identity=request.identity)

    @Endpoint(
        method="GET",
        path="/transaction",
        summary="Get the state of a transaction.",
        params=_WHICH,
        permission="publish",
        topics=topics,
        is_owner=is_owner,
        success="an object; `state` is `unknown`, `open`, `prepared`, `committed` or `damaged` (then "
        "`decided` tells whether the rest is published), `committed_sequence` the producer's last commit or "
        "null, `committed_note` its note",
        success_schema=obj(
            {"state": TEXT, "committed_sequence": {"type": ["integer", "null"]}, "committed_note": TEXT},
            {
                "parts": {"type": "object", "additionalProperties": COUNT},
                "prepared": {"type": ["array", "null"], "items": TEXT},
                "note": TEXT,
                "lost_messages": COUNT,
                "decided": {"type": "boolean"},
            },
        ),
        errors=_OWNED_ERRORS,
    )
    def state(self, request: Request) -> Result:
        producer, sequence = _which(request)
        known = self._transactions.producers.get(producer)
        committed = Committed() if known is None else known.committed
        answer: dict[str, Any] = {
            "state": "unknown",
            "committed_sequence": committed.sequence if committed.sequence >= 0 else None,
            "committed_note": committed.note,
        }
        try:
            transaction = self._transactions.find(producer, sequence)
        except AlreadyCommitted:
            is_last = committed.sequence == sequence
            answer |= {"state": "committed", "note": committed.note if is_last else ""}
            return answer | ({"lost_messages": committed.lost} if is_last and committed.lost else {})
        return answer if transaction is None else answer | _describe(transaction)


def _describe(transaction: Transaction) -> dict[str, Any]:
    # A decided transaction counts as committed unless it is damaged: nothing can stop it any more.
    is_decided = transaction.decision is not None
    lost = transaction.lost_messages
    return {
        "state": "committed" if is_decided and not lost else transaction.state,
        **({"lost_messages": lost, "decided": is_decided} if lost else {}),
        "parts": {name: part.messages for name, part in transaction.parts.items()},
        "prepared": transaction.promised,
        "note": transaction.note,
    }


def _which(request: Request) -> tuple[str, int]:
    """Producer and sequence number."""
    producer = identifier_of(request, "producer")
    sequence = number_of(request, "sequence")
    if sequence is None:
        raise ApiError(400, "MISSING_ARG_SEQUENCE")
    return producer, sequence


def _parts(request: Request) -> Parts:
    try:
        body = json.loads(request.body)
        parts, note = body["parts"], body.get("note", "")
        if not isinstance(parts, dict) or not isinstance(note, str) or len(note) > MAX_NOTE:
            raise ValueError("`parts` must be an object, and `note` a short string")
        unknown = body.keys() - {"parts", "note"}
        if unknown:
            raise ValueError(f"unknown key {min(unknown)!r}")
        if not all(type(count) is int and count >= 0 for count in parts.values()):
            raise ValueError("each part must have a number of messages")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ApiError(400, "INVALID_PARTS", reason=str(error)) from error
    return parts, note
