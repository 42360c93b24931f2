"""The table of what nsqd's HTTP API has for transactions: see transaction_api for the handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsparq.http.api import JSON_TYPE, Endpoint, Param
from nsparq.server.arguments import NAMED_TOPIC_ERRORS, TOPIC
from nsparq.server.schemas import COUNT, INT, SEQUENCE, TEXT, listed, obj

if TYPE_CHECKING:
    from nsparq.server.transaction_api import TransactionApi

MAX_PARTS_BODY: Final = 1 << 20

_GROUP: Final = "Transactions"
_IDENTIFIER: Final = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}
_WHICH: Final = (
    Param(
        name="producer",
        help="whose transaction: 1 to 128 of `A-Za-z0-9._:-`",
        required=True,
        schema=_IDENTIFIER,
    ),
    Param(name="sequence", help="which of them", required=True, schema=SEQUENCE),
)
_PROMISE: Final = Param(
    name="promise",
    help="only if this is the note of what is prepared now; empty if nothing is",
    schema={"type": "string"},
)
_WHICH_ERRORS: Final = (
    (400, "MISSING_ARG_PRODUCER"),
    (400, "INVALID_ARG_PRODUCER"),
    (400, "MISSING_ARG_SEQUENCE"),
    (400, "INVALID_ARG_SEQUENCE"),
)
_OWNED_ERRORS: Final = (*_WHICH_ERRORS, (403, "OWNED_BY_ANOTHER"))
_PARTS: Final = {
    "type": "object",
    "properties": {
        "parts": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
        "note": {"type": "string", "maxLength": 4096},
    },
    "required": ["parts"],
    "additionalProperties": False,
}
_PARTS_HELP: Final = (
    '`{"parts": {name: messages}, "note": text}`: the parts that the transaction consists of, in this order, '
    "each with the number of messages that it must hold"
)
_UNFINISHED: Final = ((409, "DAMAGED_TRANSACTION"), (503, "EARLIER_TRANSACTION_UNFINISHED"))
_COMMITTED: Final = obj(
    {
        "sequence": COUNT,
        "messages": {"type": ["integer", "null"]},
        "already_committed": {"type": "boolean"},
    },
    {"lost_messages": COUNT},
)
_PARTS_ERRORS: Final = ((400, "INVALID_PARTS"), (409, "INCOMPLETE_TRANSACTION"), (503, "WRITE_FAILED"))


def transaction_endpoints(api: TransactionApi, max_body_size: int) -> list[Endpoint]:
    return [
        Endpoint(
            group=_GROUP,
            method="POST",
            path="/transaction/stage",
            handler=api.stage,
            summary="Put messages aside until their transaction is committed.",
            details="They are appended to a part of it, which one writer fills with as many requests as it "
            "needs. With `at` a request can be sent again when its answer was lost: it is done once. "
            "`TOO_MUCH_STAGED`: the producer has as much staged as `--max-staged-bytes-per-producer` allows. "
            "`STAGING_FULL`: all producers together have as much as `--max-staged-bytes` allows; try again.",
            params=(
                *_WHICH,
                Param(
                    name="part", help="which part, named like a producer", required=True, schema=_IDENTIFIER
                ),
                TOPIC,
                Param(
                    name="defer",
                    help="milliseconds between the commit and delivery, up to `--max-req-timeout`",
                    schema={"type": "integer", "minimum": 0, "maximum": 3_600_000},
                ),
                Param(name="at", help="how many messages the part holds before these", schema=SEQUENCE),
            ),
            permission="publish",
            is_owner=api.is_owner,
            keeps_body=True,
            body_help="messages as in `/mpub?binary=true`",
            body_schema={"type": "string", "format": "binary", "minLength": 4},
            max_body=max_body_size,
            success="an object; `messages` is how many the part holds now",
            success_type=JSON_TYPE,
            success_schema=obj({"messages": COUNT}),
            errors=(
                *_OWNED_ERRORS,
                (400, "MISSING_ARG_PART"),
                (400, "INVALID_ARG_PART"),
                *NAMED_TOPIC_ERRORS,
                (400, "INVALID_ARG_DEFER"),
                (400, "INVALID_ARG_AT"),
                (409, "ALREADY_COMMITTED"),
                (409, "PART_SEALED"),
                (409, "TOO_MUCH_STAGED"),
                (409, "WRONG_POSITION"),
                (413, "BAD_BODY"),
                (413, "BAD_MESSAGE"),
                (503, "STAGING_FULL"),
                (503, "WRITE_FAILED"),
            ),
        ),
        Endpoint(
            group=_GROUP,
            method="POST",
            path="/transaction/prepare",
            handler=api.prepare,
            summary="Promise that a transaction can be committed.",
            details="For a transaction that is spread over several nsqd: prepare it on all, then commit it "
            "on all. If one of them has committed it, the others are to; what they have prepared waits for "
            "that. A later promise takes the place of an earlier one.",
            params=(*_WHICH, _PROMISE),
            permission="publish",
            topics=api.topics,
            is_owner=api.is_owner,
            keeps_body=True,
            body_help=_PARTS_HELP,
            body_type=JSON_TYPE,
            body_schema=_PARTS,
            max_body=MAX_PARTS_BODY,
            success="an object",
            success_type=JSON_TYPE,
            success_schema=obj({"sequence": COUNT, "messages": COUNT}),
            errors=(*_OWNED_ERRORS, (409, "ALREADY_COMMITTED"), (409, "WRONG_PROMISE"), *_PARTS_ERRORS),
        ),
        Endpoint(
            group=_GROUP,
            method="POST",
            path="/transaction/commit",
            handler=api.commit,
            summary="Publish a transaction: all of it, and once.",
            details="Without a body: what has been prepared. One that is committed already, or is older than "
            "the producer's last, is answered with `already_committed` and changes nothing. Once it is under "
            "way it is finished, whatever becomes of the connection or of the daemon. What else was staged "
            "for it is dropped. An earlier transaction of the producer that is under way is finished first; "
            "if the disk does not allow that now, the answer is `EARLIER_TRANSACTION_UNFINISHED`: try again. "
            "`DAMAGED_TRANSACTION` names the transaction of which staged messages are lost, and says how "
            "many: see `/transaction/resolve`.",
            params=(
                *_WHICH,
                _PROMISE,
                Param(
                    name="remember",
                    help="seconds for which the producer will be remembered, if less than "
                    "`--transaction-retention`",
                    schema=SEQUENCE,
                ),
            ),
            permission="publish",
            topics=api.topics,
            is_owner=api.is_owner,
            keeps_body=True,
            needs_body=False,
            body_help=_PARTS_HELP + "; or nothing",
            body_type=JSON_TYPE,
            body_schema=_PARTS,
            max_body=MAX_PARTS_BODY,
            success="an object; `messages` is null for one that was not the last",
            success_type=JSON_TYPE,
            success_schema=_COMMITTED,
            errors=(
                *_OWNED_ERRORS,
                (400, "INVALID_ARG_REMEMBER"),
                (409, "WRONG_PROMISE"),
                *_PARTS_ERRORS,
                *_UNFINISHED,
            ),
        ),
        Endpoint(
            group=_GROUP,
            method="POST",
            path="/transaction/resolve",
            handler=api.resolve,
            summary="Accept the loss of messages that were staged, and commit the rest.",
            details="For an operator. If staged messages are damaged on disk, or their files are gone, nsqd "
            "publishes the others of a transaction that is decided, and nothing of one that is only "
            "prepared. Such a transaction is not called committed until this is said; nor is a later one of "
            "the producer, if it was decided. What is only prepared can be aborted instead.",
            params=_WHICH,
            permission="admin",
            topics=api.admin_topics,
            success="an object; `lost_messages` is how many were not published",
            success_type=JSON_TYPE,
            success_schema=_COMMITTED,
            errors=(
                *_WHICH_ERRORS,
                (409, "NOT_DAMAGED"),
                (409, "INCOMPLETE_TRANSACTION"),
                *_UNFINISHED,
                (503, "WRITE_FAILED"),
            ),
        ),
        Endpoint(
            group=_GROUP,
            method="POST",
            path="/transaction/abort",
            handler=api.abort,
            summary="Drop what was staged for a transaction.",
            details="Also if it was prepared, or if nothing is known of it.",
            params=(*_WHICH, _PROMISE),
            permission="publish",
            topics=api.topics,
            is_owner=api.is_owner,
            errors=(*_OWNED_ERRORS, (409, "ALREADY_COMMITTED"), (409, "WRONG_PROMISE")),
        ),
        Endpoint(
            group=_GROUP,
            method="GET",
            path="/transaction",
            handler=api.state,
            summary="What has become of a transaction.",
            params=_WHICH,
            permission="publish",
            topics=api.topics,
            is_owner=api.is_owner,
            success="an object; `state` is `unknown`, `open`, `prepared`, `committed` or `damaged` (and then "
            "`decided` tells whether the rest is published), "
            "`committed_sequence` the producer's last commit or null, `committed_note` its note",
            success_type=JSON_TYPE,
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
        ),
        Endpoint(
            group=_GROUP,
            method="POST",
            path="/transaction/disown",
            handler=api.disown,
            summary="Let another identity use a producer's name.",
            details="With a policy file a producer belongs to the identity that has used its name first. "
            "After this it belongs to the next that does.",
            params=_WHICH[:1],
            permission="admin",
            errors=(*_WHICH_ERRORS[:2], (503, "WRITE_FAILED")),
        ),
        Endpoint(
            group=_GROUP,
            method="GET",
            path="/transactions",
            handler=api.list_all,
            summary="All producers, and their open transactions.",
            permission="read",
            success="an object",
            success_type=JSON_TYPE,
            success_schema=obj(
                {
                    "producers": listed(
                        obj(
                            {
                                "producer": TEXT,
                                "owner": {"type": ["string", "null"]},
                                "committed_sequence": INT,
                                "committed_messages": COUNT,
                                "open": listed(
                                    obj(
                                        {
                                            "sequence": COUNT,
                                            "state": TEXT,
                                            "topics": listed(TEXT),
                                            "messages": COUNT,
                                            "bytes": COUNT,
                                            "lost_messages": COUNT,
                                            "touched": INT,
                                        }
                                    )
                                ),
                            }
                        )
                    )
                }
            ),
        ),
    ]
