"""nsqd as a running thing: the broker, its listener, its timers, and their clean end."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from nsparq.broker.broker import Broker
from nsparq.broker.scan import INTERVAL_S
from nsparq.errors import StartError
from nsparq.options import NsqdOptions
from nsparq.server.tcp import Connection
from nsparq.storage.files import Files
from nsparq.version import NSQ_VERSION, version_line
from nsparq.wire.limits import Limits

logger = logging.getLogger(__name__)

DRAIN_S = 2.0
"""How long closing connections may take at shutdown."""


class Nsqd:
    """One daemon. start() and stop() once each; everything runs on the loop that start() is called on."""

    def __init__(self, options: NsqdOptions, *, files: Files | None = None) -> None:
        self.options = options
        self.connections: set[Connection] = set()
        self._all_gone = asyncio.Event()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="nsqd-disk")
        self._server: asyncio.AbstractServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop
        self._unix_path: Path | None = None
        self.tcp_address: tuple[str, int] | str = ""
        """Where clients connect: host and port, or the path of a Unix socket."""
        self.broker = Broker(options, files=files, wake=self._wake, background=self._in_thread)

    async def start(self) -> None:
        """Raises StartError, with nothing left open."""
        self._loop = asyncio.get_running_loop()
        _refuse_what_cannot_be_kept(self.options)
        logger.info("%s", version_line("nsqd"))
        logger.info("ID: %d", self.options.node_id)
        _raise_file_limit()
        self.broker.open()
        try:
            await self._listen()
        except OSError as error:
            self.broker.close()
            self._threads.shutdown()
            address = self.options.tcp_address
            raise StartError(f"listen ({address}) failed - {error.strerror or error}") from error
        self._tasks = [asyncio.create_task(self._scan()), asyncio.create_task(self._maintain())]

    async def _listen(self) -> None:
        limits = _limits(self.options)

        def connect() -> Connection:
            return Connection(self, limits)

        host_port = split_address(self.options.tcp_address)
        if host_port is None:
            path = self.options.tcp_address
            _remove_stale_socket(Path(path))
            self._server = await self._loop.create_unix_server(connect, path, backlog=1024)
            self._unix_path = Path(path)
            self.tcp_address = path
            logger.info("TCP: listening on %s", path)
            return
        host, port = host_port
        self._server = await self._loop.create_server(
            connect, host or None, port, backlog=1024, reuse_address=True
        )
        bound = self._server.sockets[0].getsockname()
        self.tcp_address = (bound[0], bound[1])
        logger.info("TCP: listening on %s", join_address(bound[0], bound[1]))

    async def stop(self) -> None:
        """Stop accepting, take leave of the clients, persist. Calling it again does nothing."""
        if self._server is None:
            return
        server, self._server = self._server, None
        logger.info("NSQ: stopping")
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.broker.turn()
        for connection in [*self.connections]:
            connection.close()
        self._all_gone.set() if not self.connections else self._all_gone.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._all_gone.wait()
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.sleep(0)
        self.broker.close()
        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)
        logger.info("NSQ: bye")

    def connection_ended(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    def reload(self) -> None:
        """SIGHUP: nothing that is reread yet, but it must not end the daemon."""
        logger.info("SIGHUP: nothing to reload")

    def _wake(self) -> None:
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        try:
            self.broker.turn()
        except Exception:
            logger.exception("internal error at the end of a turn")

    def _in_thread(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        future = self._threads.submit(work)

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the loop has closed: the daemon is gone
                self._loop.call_soon_threadsafe(finish)

        def finish() -> None:
            error = future.exception()
            if error is not None:
                logger.error("background work failed", exc_info=error)
            then()

        future.add_done_callback(done)

    async def _scan(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                for _ in self.broker.scan.scan(self.broker.clock()):
                    await asyncio.sleep(0)
            except Exception:
                logger.exception("queue scan failed")

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(self.options.checkpoint_interval)
            try:
                self.broker.maintain(self.broker.clock())
            except Exception:
                logger.exception("maintenance failed")


def _remove_stale_socket(path: Path) -> None:
    if path.is_socket():
        path.unlink()


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port; None for what is a path."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return None
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refuse_what_cannot_be_kept(options: NsqdOptions) -> None:
    """Better no broker than one that is open where its operator asked for a lock."""
    if options.tls_required or options.tls_client_auth_policy:
        raise StartError("--tls-required cannot be met: TLS is not there yet")
    if options.auth_http_address:
        raise StartError("--auth-http-address cannot be met: AUTH is not there yet")


def _raise_file_limit() -> None:
    """A connection is a file, and so is a topic: take what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            logger.warning("cannot raise the limit of open files above %d: %s", soft, error)


def _limits(options: NsqdOptions) -> Limits:
    return Limits(
        version=NSQ_VERSION,
        max_msg_size=options.max_msg_size,
        max_body_size=options.max_body_size,
        max_rdy_count=options.max_rdy_count,
        max_req_timeout_ms=_ms(options.max_req_timeout),
        msg_timeout_ms=_ms(options.msg_timeout),
        max_msg_timeout_ms=_ms(options.max_msg_timeout),
        max_heartbeat_interval_ms=_ms(options.max_heartbeat_interval),
        max_output_buffer_size=options.max_output_buffer_size,
        output_buffer_timeout_ms=_ms(options.output_buffer_timeout),
        min_output_buffer_timeout_ms=_ms(options.min_output_buffer_timeout),
        max_output_buffer_timeout_ms=_ms(options.max_output_buffer_timeout),
        max_deflate_level=options.max_deflate_level,
        deflate_allowed=options.deflate,
        snappy_allowed=options.snappy,
        topology_region=options.topology_region,
        topology_zone=options.topology_zone,
        tls_required=bool(options.tls_required),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
