"""The HTTP API of a node that is not primary: who it is, and who is. Everything else is refused.

Nothing listens on the TCP port: clients are refused at once, and try the next address.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from nsparq.addresses import join_address, split_address
from nsparq.errors import StartError
from nsparq.http.api import (
    TEXT_TYPE,
    Api,
    Endpoint,
    Request,
    Response,
    Result,
    endpoints_of,
    error_response,
)
from nsparq.http.hosts import HostNames
from nsparq.http.metrics import Exposition, add_process
from nsparq.http.server import HttpServer
from nsparq.options import NsqdOptions
from nsparq.server import from_flags
from nsparq.server.api.stats import describe
from nsparq.server.auth.guard import Guard
from nsparq.server.cluster_state import ClusterState
from nsparq.server.listeners import Listeners
from nsparq.version import NSQ_VERSION, __version__

if TYPE_CHECKING:
    from nsparq.server.tls import TlsLayer

logger = logging.getLogger(__name__)

START_S = round(time.time())


class Standby:
    """Serves on the HTTP addresses of nsqd while nsqd does not run. start() and close() may be
    called again."""

    def __init__(self, options: NsqdOptions, state: ClusterState) -> None:
        self._options = options
        self._state = state
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="nsqd-ask")
        self._authenticator = from_flags.authenticator_of(options, self._threads)
        """Made at once: a policy file that cannot be used ends the start."""
        self._context = from_flags.tls_context_of(options) if options.tls_cert else None
        self._guard: Guard | None = None
        self._listeners = Listeners()
        self._servers: list[HttpServer] = []

    async def start(self) -> None:
        """Raises StartError, with nothing left open."""
        options, listeners = self._options, self._listeners
        https_port = 0
        try:
            if options.http_address:
                listeners.bind("HTTP", options.http_address)
            if self._context is not None and options.https_address:
                bound = listeners.bind("HTTPS", options.https_address)
                https_port = bound[1] if isinstance(bound, tuple) else 0
        except StartError:
            listeners.close()
            raise
        if options.auth_policy_file and self._authenticator is not None:
            self._guard = Guard(self._authenticator)
        api = StandbyApi(options, self._state, self._guard)
        for name, sockets in listeners.take().items():
            if name == "HTTPS":
                http = HttpServer(api, layer=self._tls_layer)
            else:
                http = HttpServer(api, refuse_all=from_flags.refusal_of(options, https_port))
            self._servers.append(http)
            await http.serve(sockets)

    def _tls_layer(self) -> TlsLayer:
        from nsparq.server.tls import TlsLayer

        assert self._context is not None
        return TlsLayer(self._context)

    async def close(self) -> None:
        """Leave the addresses to nsqd."""
        servers, self._servers = self._servers, []
        await asyncio.gather(*(http.close() for http in servers))
        self._listeners.close()
        if self._guard is not None:
            guard, self._guard = self._guard, None
            await guard.close()

    async def stop(self) -> None:
        """Close for good."""
        await self.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def reload(self) -> None:
        """SIGHUP: load certificates and the policy file again. What cannot be used changes
        nothing."""
        if self._context is not None:
            try:
                self._context = from_flags.tls_context_of(self._options)
            except StartError as error:
                logger.error("SIGHUP: the certificates stay as they were: %s", error)
        if self._authenticator is not None:
            self._authenticator.reload()


class StandbyApi(Api):
    def __init__(self, options: NsqdOptions, state: ClusterState, guard: Guard | None) -> None:
        self._options = options
        self._state = state
        hosts = HostNames(options.broadcast_address, options.http_address, allowed=options.allowed_host)
        super().__init__(
            title="nsqd",
            version=NSQ_VERSION,
            endpoints=endpoints_of(self),
            guard=guard,
            check_host=None if guard is not None else hosts.check,
        )

    def route(self, request: Request) -> Response | None:
        found = super().route(request)
        if request.endpoint is not None:
            return None
        if found is not None and found.status not in (404, 405):
            return found
        membership = self._state.membership
        # Who has no secret need not know the addresses.
        addresses = {} if self.guard else {"tcp": membership.tcp_address, "http": membership.http_address}
        return error_response(
            503,
            "NOT_PRIMARY",
            (("Retry-After", "1"),),
            reason=self._state.why_not_primary() if not self.guard else "this node is not the primary",
            **{f"primary_{name}_address": address for name, address in addresses.items()},
        )

    @Endpoint(method="GET", path="/ping", summary="Whether clients may use this node.", permission="read")
    def ping(self, request: Request) -> Response:
        text = f"NOK - {self._state.why_not_primary()}"
        return Response(status=503, body=text.encode(), content_type=TEXT_TYPE, nsq_header=False)

    @Endpoint(method="GET", path="/info", summary="As on the primary.", permission="read")
    def info(self, request: Request) -> Result:
        options = self._options
        return {
            **describe(options, _port(options.tcp_address), _port(options.http_address), START_S),
            "replication": self._state.summary,
        }

    @Endpoint(method="GET", path="/replication", summary="As on the primary.", permission="read")
    def replication(self, request: Request) -> Result:
        return self._state.status()

    @Endpoint(method="GET", path="/metrics", summary="As on the primary.", permission="read")
    def metrics(self, request: Request) -> Response:
        out = Exposition()
        labels = f'{{version="{__version__}",nsq_version="{NSQ_VERSION}"}}'
        out.add("nsqd_info", "gauge", "version of the daemon", 1, labels)
        self._state.add_metrics(out)
        add_process(out)
        return out.response()


def _port(address: str) -> int:
    found = split_address(address)
    return found[1] if found is not None else 0


def address_for_clients(options: NsqdOptions, listen: str, broadcast_port: int) -> str:
    """`host:port` where others find a listener of nsqd; empty if it has no fixed port."""
    port = broadcast_port or _port(listen)
    return join_address(options.broadcast_address, port) if port else ""
