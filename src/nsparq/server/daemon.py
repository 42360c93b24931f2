"""nsqd as a process: the broker, its listeners, its background tasks, start and stop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from nsparq import kernel, logs
from nsparq.addresses import join_address
from nsparq.broker.broker import Broker
from nsparq.broker.scan import INTERVAL_S
from nsparq.broker.topic import Topic
from nsparq.busy_poll import BusyPoll
from nsparq.errors import NotReplicated, StartError, StopError
from nsparq.http.server import HttpServer
from nsparq.listening import Address, bound_address, serve_on
from nsparq.options import NsqdOptions
from nsparq.process import raise_file_limit
from nsparq.server import from_flags
from nsparq.server.api.metrics import LoopLag
from nsparq.server.api.table import NsqdApi
from nsparq.server.auth.grants import Authenticator
from nsparq.server.auth.guard import Guard
from nsparq.server.committing import Committer
from nsparq.server.connection import Connection
from nsparq.server.discovery import Discovery
from nsparq.server.lane import Lanes
from nsparq.server.listeners import Listeners
from nsparq.server.memory import watch_collector
from nsparq.server.outbox import PendingOks
from nsparq.server.statsd import Statsd, expand_prefix
from nsparq.storage.files import Files
from nsparq.tasks import cancel_all
from nsparq.version import version_line
from nsparq.wire.limits import Unfinished

if TYPE_CHECKING:
    from OpenSSL import SSL

    from nsparq.server.replication import Replication
    from nsparq.server.tls import TlsLayer

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_POLL_S = 100e-6
"""How long to poll for the next commands before sleeping. With 16 publishes on their way 50 us gain
as much. But on a slow machine a lone client that waits for each reply needs that long to send
again."""
STOP_THREADS = 16
"""Topics that are written to disk at the same time at shutdown."""
LOST_SHOWN = 3
"""Things that could not be kept which the last line names. The log names them all."""
DRAIN_S = 2.0
"""How long closing connections may take at shutdown."""


class Nsqd:
    """One daemon. start() and stop() once each; everything runs on the event loop of start().

    More than 30 methods and 20 attributes: it ties the parts of nsqd together, and has few ideas of
    its own.
    """

    def __init__(
        self, options: NsqdOptions, *, files: Files | None = None, replication: Replication | None = None
    ) -> None:
        """With `replication`, this node is the primary of a cluster, and `files` are the
        primary's."""
        self.options = options
        self.replication = replication
        self.limits = from_flags.limits_of(options)
        # One command of the largest size always fits.
        self.unfinished = Unfinished(max(options.max_unfinished_bytes, options.max_body_size))
        self.hostname = socket.gethostname()
        self.connections: set[Connection] = set()
        self.oks = PendingOks()
        self.lanes = Lanes(self)
        self.lag = LoopLag()
        self._tls_context: SSL.Context
        self.authenticator: Authenticator | None = None
        self.guard: Guard | None = None
        """Guards the HTTP API, if there is a policy file."""
        self._all_gone = asyncio.Event()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="nsqd-disk")
        self._askers = ThreadPoolExecutor(16, thread_name_prefix="nsqd-ask")
        """For requests to auth servers, which may take seconds, and for hashing passwords."""
        self._listeners = Listeners()
        self.is_stopping = False
        """Whether the daemon stops: requests that wait for something are answered now."""
        self._servers: list[asyncio.AbstractServer] = []
        self._api: NsqdApi
        self._http: list[HttpServer] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop
        self.tcp_address: Address = ""
        """Where clients connect: host and port, or the path of a Unix socket."""
        self.http_address: Address = ""
        self.https_address: Address = ""
        self.archiving = from_flags.archiving_of(options, files)
        self.broker = Broker(
            options,
            files=files,
            background=self._in_thread,
            announce=lambda *change: self._discovery.announce(*change),
            discovers_channels=lambda: bool(self._discovery.peers.addresses),
            replicas=replication,
            archive=self.archiving,
        )
        if replication is not None:
            self.broker.health.other = replication.state.why_unhealthy
        self.committer = Committer(self)
        self._discovery = Discovery(self)
        self._statsd: Statsd | None = None

    # who we are

    @property
    def tcp_port(self) -> int:
        return _port(self.tcp_address)

    @property
    def http_port(self) -> int:
        return _port(self.http_address)

    @property
    def broadcast_tcp_port(self) -> int:
        return self.options.broadcast_tcp_port or max(self.tcp_port, 0)

    @property
    def broadcast_http_port(self) -> int:
        return self.options.broadcast_http_port or max(self.http_port, 0)

    @property
    def http_connection_count(self) -> int:
        return sum(len(server.connections) for server in self._http)

    # start and stop

    async def start(self) -> None:
        """Raises StartError, with nothing left open."""
        self._loop = asyncio.get_running_loop()
        turn = self.broker.next_turn
        turn.wake = partial(self._loop.call_soon, turn.run, True)
        turn.answer = self.oks.send
        turn.stay_awake = BusyPoll(self._loop, BUSY_POLL_S).start
        self.options.validate()
        logger.info("%s", version_line("nsqd"))
        logger.info("ID: %d", self.options.node_id)
        raise_file_limit()
        watch_collector()
        try:
            self._load_security()
            declared = from_flags.topics_file_of(self.options)
            self.broker.data_path.lock()
            # Before anything is loaded: a start that fails because a port is taken must change no
            # file. The data path is locked first: the Unix socket of a daemon that runs must not be
            # taken away.
            self._listen()
            if self.archiving is not None:
                self.archiving.open(self.broker)
            self.broker.open()
            declared.apply(self.broker)
            self.oks.ring = kernel.open_ring() if kernel.open_ring is not None else None
            await self._serve()
        except BaseException:
            self._close_listeners()
            self.oks.ring = None
            self.broker.close()
            self._threads.shutdown()
            self._askers.shutdown()
            if self.archiving is not None:
                self.archiving.stop()
            raise
        for work in (self._scan(), self._maintain(), self.lag.watch(), self.committer.resume()):
            self.launch(work)
        await self._discovery.start()
        if self.options.statsd_address:
            await self._start_statsd()

    def _load_security(self) -> None:
        """Load certificates and policies. Raises StartError before anything is open."""
        options = self.options
        if options.tls_cert:
            self._tls_context = from_flags.tls_context_of(self.options)
        self.authenticator = from_flags.authenticator_of(options, self._askers)
        if options.auth_policy_file and self.authenticator is not None:
            self.guard = Guard(self.authenticator)

    def tls_layer(self) -> TlsLayer:
        """A TLS layer for a new connection."""
        from nsparq.server.tls import TlsLayer

        return TlsLayer(self._tls_context)

    def _listen(self) -> None:
        """Bind the ports. Connections wait until _serve()."""
        options = self.options
        if not options.tcp_address:
            raise StartError("--tcp-address must not be empty: nsqd serves clients there")
        self.tcp_address = self._listeners.bind("TCP", options.tcp_address)
        if options.http_address:
            self.http_address = self._listeners.bind("HTTP", options.http_address)
        if options.tls_cert and options.https_address:
            self.https_address = self._listeners.bind("HTTPS", options.https_address)

    async def _serve(self) -> None:
        """Accept clients."""
        self._api = NsqdApi(self)
        for name, sockets in self._listeners.take().items():
            bound = bound_address(sockets)
            if name == "TCP":
                self._servers = await serve_on(sockets, lambda: Connection(self))
            else:
                http = self._http_server(is_secure=name == "HTTPS")
                self._http.append(http)
                await http.serve(sockets)
            logger.info(
                "%s: listening on %s", name, bound if isinstance(bound, str) else join_address(*bound)
            )

    def _http_server(self, *, is_secure: bool) -> HttpServer:
        if is_secure:
            return HttpServer(self._api, layer=self.tls_layer)
        return HttpServer(
            self._api, refuse_all=from_flags.refusal_of(self.options, _port(self.https_address))
        )

    async def _start_statsd(self) -> None:
        options = self.options
        self._statsd = Statsd(
            self.broker,
            options.statsd_address,
            interval=options.statsd_interval,
            prefix=expand_prefix(options.statsd_prefix, options.broadcast_address, self.broadcast_http_port),
            packet_size=options.statsd_udp_packet_size,
            mem_stats=options.statsd_mem_stats,
            exclude_ephemeral=options.statsd_exclude_ephemeral,
        )
        await self._statsd.start()

    def launch(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that ends with the daemon at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _close_listeners(self) -> None:
        for http in self._http:
            http.close_listener()
        for server in self._servers:
            server.close()
        self._servers = []
        self._listeners.close()

    async def stop(self) -> None:
        """Stop accepting, close all connections, persist. Calling it again does nothing."""
        if not self._servers:
            return
        logger.info("NSQ: stopping")
        self.is_stopping = True
        self._close_listeners()
        await cancel_all(self._tasks)
        if self._statsd is not None:
            await self._statsd.stop()
        self.broker.turn()
        for connection in [*self.connections]:
            connection.close()
        self._all_gone.set() if not self.connections else self._all_gone.clear()
        await asyncio.gather(self._wait_for_clients(), *(http.close() for http in self._http))
        if self.guard is not None:
            await self.guard.close()
        await self._discovery.stop()
        if self.archiving is not None:
            self.archiving.stop()
        await asyncio.to_thread(self._threads.shutdown)
        # As in Discovery.stop().
        self._askers.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)
        self.oks.ring = None
        lost = self.broker.close(_run_in_threads)
        if self.archiving is not None:
            self.archiving.close()
        if lost:
            raise StopError(f"stopped, but could not save everything: {'; '.join(lost[:LOST_SHOWN])}")
        logger.info("NSQ: bye")

    async def _wait_for_clients(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._all_gone.wait()

    def connection_ended(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    # changes at run time

    def reload(self) -> None:
        """SIGHUP: load certificates, the policy file and the topics file again. If one cannot be
        used, what the old one said stays."""
        if self.options.tls_cert:
            try:
                self._tls_context = from_flags.tls_context_of(self.options)
                logger.info("SIGHUP: certificates reloaded")
            except StartError as error:
                logger.error("SIGHUP: keeping the old certificates: %s", error)
        if self.authenticator is not None:
            self.authenticator.reload()
            for connection in [*self.connections]:
                self.launch(connection.recheck())
        if self.options.topics_file:
            try:
                from_flags.topics_file_of(self.options).apply(self.broker)
                logger.info("SIGHUP: topics file applied")
            except StartError as error:
                logger.error("SIGHUP: the topics file cannot be applied: %s", error)

    def change_lookupds(self, addresses: tuple[str, ...]) -> None:
        self.options = dataclasses.replace(self.options, lookupd_tcp_address=addresses)
        self._discovery.peers.set_addresses(addresses)

    def change_log_level(self, level: str) -> None:
        self.options = dataclasses.replace(self.options, log_level=level)
        logging.getLogger().setLevel(logs.LEVELS[level])

    # threads and background tasks

    def _in_thread(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        try:
            future = self._threads.submit(work)
        except RuntimeError:
            # The daemon is stopping, and there are no threads any more.
            work()
            then()
            return

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the loop has closed: the daemon is gone
                self._loop.call_soon_threadsafe(finish)

        def finish() -> None:
            error = future.exception()
            if error is not None:
                logger.error("background work failed", exc_info=error)
            then()

        future.add_done_callback(done)

    def is_durable(self, topic: Topic) -> bool:
        """Whether durable() has nothing to wait for."""
        return self.broker.replicas is None and self.broker.changes.are_on_disk(topic)

    async def durable(self, topic: Topic) -> None:
        """Wait until the changes of a topic are as durable as configured. Raises OSError,
        NotReplicated."""
        if not self.broker.changes.are_on_disk(topic):
            error = await self._called_back(self.broker.changes.when_durable)
            if error is not None:
                raise error
        await self.replicated()

    async def replicated(self) -> None:
        """Wait until every node that may take over has all changes so far. Raises
        NotReplicated."""
        if self.broker.replicas is not None:
            error = await self._called_back(self.broker.replicas.when_safe)
            if error is not None:
                raise NotReplicated(str(error)) from error

    async def _called_back(self, start: Callable[[Callable[[T], None]], None]) -> T:
        """What the callback that `start` takes is called with."""
        waiting: asyncio.Future[T] = self._loop.create_future()
        start(lambda result: None if waiting.done() else waiting.set_result(result))
        return await waiting

    async def in_disk_thread(self, work: Callable[[], T], *, is_remote: bool = False) -> T:
        """Run work that reads from disk in a thread. `is_remote`: it may wait for the archive."""
        if is_remote and self.archiving is not None:
            return await self.archiving.fetch_in_thread(work)
        return await self._loop.run_in_executor(self._threads, work)

    async def _scan(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                for _ in self.broker.scan.scan(self.broker.monotonic_ns()):
                    await asyncio.sleep(0)
            except Exception:
                logger.exception("queue scan failed")

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(self.options.checkpoint_interval)
            try:
                for _ in self.broker.upkeep.run_in_slices():
                    await asyncio.sleep(0)
            except Exception:
                logger.exception("maintenance failed")


def _run_in_threads(works: Sequence[Callable[[], None]]) -> None:
    """A file system syncs many files at once in not much more time than one."""
    if works:
        with ThreadPoolExecutor(min(STOP_THREADS, len(works)), thread_name_prefix="nsqd-stop") as threads:
            for _ in threads.map(lambda work: work(), works):
                pass


def _port(address: Address) -> int:
    """-1 for a Unix socket, and where there is no listener."""
    return address[1] if isinstance(address, tuple) else -1
