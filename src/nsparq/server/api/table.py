"""The whole HTTP API of nsqd: every endpoint, from the modules of this package.

`python -m nsparq.server.api.table --markdown` prints the reference page in docs/reference.
`--openapi` prints the document that the daemon serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsparq.http.api import JSON_TYPE, Api, Endpoint, Request, Result, endpoints_of
from nsparq.http.describe import openapi, print_description
from nsparq.http.hosts import HostNames
from nsparq.server.api.config import ConfigApi
from nsparq.server.api.cursors import CursorsApi
from nsparq.server.api.dead_letters import DeadLettersApi
from nsparq.server.api.debug import DebugApi
from nsparq.server.api.log import LogApi
from nsparq.server.api.many_topics import ManyTopicsApi
from nsparq.server.api.metrics import MetricsApi
from nsparq.server.api.producers import ProducersApi
from nsparq.server.api.publish import PublishApi
from nsparq.server.api.replication import ReplicationApi, replicated
from nsparq.server.api.settings import SettingsApi
from nsparq.server.api.stats import StatsApi
from nsparq.server.api.topics import ChannelsApi, TopicsApi
from nsparq.server.api.transactions import TransactionsApi
from nsparq.version import NSQ_VERSION

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

SUBJECTS: Final = (
    ("Publishing", PublishApi),
    ("Topics", TopicsApi),
    ("Channels", ChannelsApi),
    ("Transactions", TransactionsApi),
    ("Transactions", ProducersApi),
    ("The log", LogApi),
    ("The log", SettingsApi),
    ("The log", CursorsApi),
    ("The log", ManyTopicsApi),
    ("Dead letters", DeadLettersApi),
    ("Watching", StatsApi),
    ("Watching", MetricsApi),
    ("Replication", ReplicationApi),
    ("Configuration", ConfigApi),
    ("Debugging", DebugApi),
)
"""Headings of the reference page, and the classes that handle the requests."""

INTRODUCTION: Final = """
# nsqd's HTTP API

Generated from the daemon's table of endpoints by `make docs`; do not edit. `/openapi.json` has the
same description for programs. Parameters go into the query string, also for POST; of a repeated one
the first counts. Errors are `{"message":"CODE"}`. Names of topics and channels consist of 1 to 64
characters of `.a-zA-Z0-9_-`. With `#ephemeral` (as `%23ephemeral`) at its end, the name is of a topic
or channel that is removed when nobody uses it.

Any endpoint may answer 400 `INVALID_REQUEST` (malformed query), 404 `NOT_FOUND`, 405
`METHOD_NOT_ALLOWED`, 413 (body too long), 500 `INTERNAL_ERROR`, 503 `OVERLOADED` (slow clients have
not read too many responses); 401 `AUTH_REQUIRED` and 403 `UNAUTHORIZED` if the API is guarded (see
[auth](../auth.md)), and 403 `TLS_REQUIRED` on the plain port with `--tls-required`. A request line
with its headers may have 64 KiB and 10 seconds, a body 60 seconds.

Sequence numbers count the messages of one topic on one node. They never repeat, and may have gaps.
"""


class NsqdApi(Api):
    def __init__(self, nsqd: Nsqd) -> None:
        options = nsqd.options
        hosts = HostNames(options.broadcast_address, options.http_address, allowed=options.allowed_host)
        endpoints = [one for group, subject in SUBJECTS for one in endpoints_of(subject(nsqd), group)]
        if nsqd.replication is not None:
            endpoints = [replicated(one, nsqd) for one in endpoints]
        super().__init__(
            title="nsqd",
            version=NSQ_VERSION,
            endpoints=[*endpoints, *endpoints_of(self, "This API")],
            guard=nsqd.guard,
            # With a policy file a foreign page is refused anyway: it has no secret.
            check_host=None if nsqd.guard is not None else hosts.check,
        )

    @Endpoint(
        method="GET",
        path="/openapi.json",
        summary="Get the OpenAPI document of this API.",
        permission="read",
        success="an OpenAPI 3.1 document",
        success_type=JSON_TYPE,
    )
    def openapi(self, request: Request) -> Result:
        return openapi(self)


if __name__ == "__main__":
    from nsparq.options import NsqdOptions
    from nsparq.server.daemon import Nsqd

    print_description("nsparq.server.api.table", lambda: NsqdApi(Nsqd(NsqdOptions())), INTRODUCTION)
