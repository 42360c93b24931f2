"""The nsqlookupd daemon: the registry and its two listeners, from start to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from nsparq.addresses import join_address, split_address
from nsparq.errors import StartError
from nsparq.http.hosts import HostNames
from nsparq.http.server import HttpServer
from nsparq.listening import bound_address, listen_on, serve_on
from nsparq.lookup.http_api import LookupApi
from nsparq.lookup.options import NsqlookupdOptions
from nsparq.lookup.registry import Producer, Registry
from nsparq.lookup.tcp import Connection
from nsparq.process import raise_file_limit
from nsparq.version import NSQ_VERSION, version_line
from nsparq.wire.lookup import encode_identify_reply

logger = logging.getLogger(__name__)

IDLE_S: Final = 600.0
"""Longest time without a command before a connection is closed. Twice --inactive-producer-timeout
if that is longer. An nsqd sends a command every 15 seconds. NSQ's nsqlookupd has no such limit."""
SWEEP_S: Final = 10.0
DRAIN_S: Final = 2.0
"""Time for connections to close at shutdown."""


class Nsqlookupd:
    """One daemon. Call start() and stop() once. Everything runs on the loop of start()."""

    def __init__(self, options: NsqlookupdOptions, *, clock: Callable[[], int] | None = None) -> None:
        self.options = options
        self.clock = clock or steady_clock()
        """Unix time in nanoseconds."""
        self.registry = Registry(
            inactive_timeout_ns=_ns(options.inactive_producer_timeout),
            tombstone_lifetime_ns=_ns(options.tombstone_lifetime),
            max_registrations=options.max_registrations,
        )
        self.connections: set[Connection] = set()
        self.tcp_address: tuple[str, int] = ("", 0)
        self.http_address: tuple[str, int] = ("", 0)
        self.idle_limit_s = max(IDLE_S, 2 * options.inactive_producer_timeout)
        self._all_gone = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._servers: list[asyncio.AbstractServer] = []
        self._http: HttpServer
        self._sweeper: asyncio.TimerHandle

    async def start(self) -> None:
        """Raises StartError, with nothing left open."""
        self._loop = asyncio.get_running_loop()
        logger.info("%s", version_line("nsqlookupd"))
        raise_file_limit()
        tcp_address = _host_and_port(self.options.tcp_address)
        http_address = _host_and_port(self.options.http_address)
        options = self.options
        hosts = HostNames(options.broadcast_address, options.http_address, allowed=options.allowed_host)
        self._http = HttpServer(
            LookupApi(self.registry, self.clock, hosts.check, lambda: len(self.connections))
        )
        try:
            sockets = listen_on(tcp_address)
        except (OSError, OverflowError) as error:
            raise _cannot_listen(self.options.tcp_address, error) from error
        try:
            http_bound = await self._http.listen(http_address)
        except (OSError, OverflowError) as error:
            for sock in sockets:
                sock.close()
            raise _cannot_listen(self.options.http_address, error) from error
        tcp_bound = bound_address(sockets)
        assert isinstance(tcp_bound, tuple) and isinstance(http_bound, tuple)
        self.tcp_address, self.http_address = tcp_bound, http_bound
        self._servers = await serve_on(sockets, lambda: Connection(self))
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        logger.info("TCP: listening on %s", join_address(*self.tcp_address))
        logger.info("HTTP: listening on %s", join_address(*self.http_address))

    async def stop(self) -> None:
        """Stop accepting and end the connections. Calling it again does nothing."""
        if not self._servers:
            return
        servers, self._servers = self._servers, []
        logger.info("TCP: closing %s", join_address(*self.tcp_address))
        logger.info("HTTP: closing %s", join_address(*self.http_address))
        for server in servers:
            server.close()
        self._sweeper.cancel()
        for connection in [*self.connections]:
            connection.close()
        if self.connections:
            self._all_gone.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._all_gone.wait()
        for connection in [*self.connections]:
            connection.abort()
        await self._http.close()

    def reload(self) -> None:
        """SIGHUP. There is nothing to read again, but the signal must not end the daemon."""
        logger.info("SIGHUP: nothing to reload")

    def identify_reply(self, cluster: str) -> bytes:
        return encode_identify_reply(
            broadcast_address=self.options.broadcast_address,
            hostname=socket.gethostname(),
            http_port=self.http_address[1],
            tcp_port=self.tcp_address[1],
            version=NSQ_VERSION,
            cluster=cluster,
        )

    def connection_of(self, producer: Producer) -> Connection:
        return next(connection for connection in self.connections if connection.producer is producer)

    def connection_ended(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    def _sweep(self) -> None:
        """Close the connections that have sent no command for too long."""
        silent_since_s = self._loop.time() - self.idle_limit_s
        for connection in [*self.connections]:
            if connection.last_command_s < silent_since_s:
                logger.warning(
                    "client(%s): no command for %.0f s; closing", connection.address, self.idle_limit_s
                )
                connection.abort()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)


def steady_clock() -> Callable[[], int]:
    """Unix time in nanoseconds, read once and then advanced by the monotonic clock: setting the
    machine's clock must not make all producers inactive."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda: time.monotonic_ns() + offset


def _ns(seconds: float) -> int:
    return round(seconds * 1_000_000_000)


def _host_and_port(address: str) -> tuple[str, int]:
    found = split_address(address)
    if found is None:
        raise StartError(f"listen ({address}) failed - not host:port")
    return found


def _cannot_listen(address: str, error: OSError | OverflowError) -> StartError:
    reason = getattr(error, "strerror", "") or error
    return StartError(f"listen ({address}) failed - {reason}")
