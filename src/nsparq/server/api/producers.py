"""The producers of transactions: list them, and remove the owner of a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsparq.broker.transaction import UNKNOWN_OWNER
from nsparq.broker.transactions import NAME
from nsparq.http.api import ApiError, Endpoint, Param, Request, Result
from nsparq.server.api.parameters import COUNT, INT, TEXT, fields, listed, obj

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

IDENTIFIER: Final = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}
PRODUCER: Final = Param(
    name="producer",
    help="name of the producer: 1 to 128 characters of `A-Za-z0-9._:-`",
    required=True,
    schema=IDENTIFIER,
)
_OPEN: Final = obj(
    fields(COUNT, "sequence", "messages", "bytes", "lost_messages")
    | {"state": TEXT, "topics": listed(TEXT), "touched": INT}
)
_LISTED: Final = obj(
    {
        "producer": TEXT,
        "owner": {"type": ["string", "null"]},
        "committed_sequence": INT,
        "committed_messages": COUNT,
        "open": listed(_OPEN),
    }
)
PRODUCER_ERRORS: Final = ((400, "MISSING_ARG_PRODUCER"), (400, "INVALID_ARG_PRODUCER"))


def identifier_of(request: Request, parameter: str) -> str:
    text = request.parameters.get(parameter)
    if text is None:
        raise ApiError(400, f"MISSING_ARG_{parameter.upper()}")
    if not NAME.fullmatch(text):
        raise ApiError(400, f"INVALID_ARG_{parameter.upper()}")
    return text


class ProducersApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._transactions = nsqd.broker.transactions
        self._committer = nsqd.committer

    @Endpoint(
        method="POST",
        path="/transaction/disown",
        summary="Let another identity use a producer's name.",
        details="With a policy file, a producer belongs to the identity that first used its name. "
        "After this request it belongs to the next identity that uses it.",
        params=(PRODUCER,),
        permission="admin",
        errors=(*PRODUCER_ERRORS, (503, "WRITE_FAILED")),
    )
    async def disown(self, request: Request) -> None:
        await self._committer.disown(identifier_of(request, "producer"))

    @Endpoint(
        method="GET",
        path="/transactions",
        summary="List all producers and their open transactions.",
        permission="read",
        success="an object",
        success_schema=obj({"producers": listed(_LISTED)}),
    )
    def list_all(self, request: Request) -> Result:
        return {
            "producers": [
                {
                    "producer": producer.name,
                    "owner": None if producer.owner == UNKNOWN_OWNER else producer.owner,
                    "committed_sequence": producer.committed.sequence,
                    "committed_messages": producer.committed.messages,
                    "open": [
                        {
                            "sequence": transaction.sequence,
                            "state": transaction.state,
                            "topics": sorted(transaction.topics),
                            "messages": transaction.messages,
                            "bytes": transaction.size_bytes,
                            "lost_messages": transaction.lost_messages,
                            "touched": transaction.touched_wall_ns,
                        }
                        for transaction in producer.open.values()
                    ],
                }
                for producer in self._transactions.producers.values()
            ]
        }
