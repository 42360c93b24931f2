"""The cluster that a node belongs to, and answers that wait for its followers."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING

from nsparq.errors import NotReplicated
from nsparq.http.api import ApiError, Endpoint, Later, Request, Result
from nsparq.replication.node import NotPossible
from nsparq.server.cluster_state import STATUS

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd


def replicated(endpoint: Endpoint, nsqd: Nsqd) -> Endpoint:
    """The same endpoint. If it changes something, its answer waits until every node that may take
    over has the change."""
    if endpoint.method == "GET":
        return endpoint
    handler = endpoint.handler

    async def wait(result: Result | Awaitable[Result]) -> Result:
        answer = await result if isinstance(result, Awaitable) else result
        try:
            await nsqd.replicated()
        except NotReplicated as error:
            raise ApiError(503, "NOT_REPLICATED", reason=str(error)) from error
        return answer

    def handle(request: Request) -> Later | Awaitable[Result]:
        result = handler(request)
        # A publish waits by itself.
        return result if isinstance(result, Later) else wait(result)

    return replace(endpoint, handler=handle, errors=(*endpoint.errors, (503, "NOT_REPLICATED")))


class ReplicationApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd

    @Endpoint(
        method="GET",
        path="/replication",
        summary="Get the state of the cluster that this node belongs to.",
        details="Every node answers, whatever its `role`: `waiting` means that it is neither primary nor "
        "connected to one. `in_sync` are the nodes that may take over. `problems` is empty if all is well. "
        "`changes` counts changes of the data path in this `epoch`, on this node. `seconds_behind` is how "
        "long the follower has confirmed nothing while something is due. 404 `NOT_REPLICATED` without "
        "`--replication-cluster`.",
        permission="read",
        success="an object",
        success_schema=STATUS,
        errors=((404, "NOT_REPLICATED"),),
    )
    def read(self, request: Request) -> Result:
        if self._nsqd.replication is None:
            raise ApiError(404, "NOT_REPLICATED")
        return self._nsqd.replication.state.status()

    @Endpoint(
        method="POST",
        path="/replication/switch_over",
        summary="Let a follower take over. This node stops serving and follows.",
        details="409 `NOT_POSSIBLE` if no follower is in sync.",
        permission="admin",
        errors=((404, "NOT_REPLICATED"), (409, "NOT_POSSIBLE")),
    )
    def switch_over(self, request: Request) -> Result:
        if self._nsqd.replication is None:
            raise ApiError(404, "NOT_REPLICATED")
        try:
            self._nsqd.replication.switch_over()
        except NotPossible as error:
            raise ApiError(409, "NOT_POSSIBLE", reason=str(error)) from error
        return None
