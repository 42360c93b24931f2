"""Registers nsqd, its topics and its channels with nsqlookupds.

Each nsqlookupd has its own task, so that a slow or dead one delays neither the others nor the
broker. Nothing is stored for a peer that is not connected: after each connect it gets all
registrations. While it is connected it gets the changes in order. All commands are pipelined.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Final, Literal

from nsparq.addresses import join_address, split_address
from nsparq.errors import NsparqError
from nsparq.private_random import private_random
from nsparq.tasks import cancel_all
from nsparq.wire import lookup as wire
from nsparq.wire.lookup import BadReply, PeerInfo, ReplyDecoder

logger = logging.getLogger(__name__)

PING_INTERVAL_S: Final = 15.0
IO_TIMEOUT_S: Final = 1.0
"""Time for connecting, and time without any byte while a reply is awaited."""
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0
"""Longest back-off. After a connection that lasted longer than this, the back-off starts anew."""
MAX_PIPELINED: Final = 2_000
"""Commands to send before waiting for replies. These and their replies fit into socket buffers."""
MAX_PENDING: Final = 10_000
"""Changes that may wait for a slow peer. With more, connecting again is cheaper."""


class LookupPeers:
    """All nsqlookupds of an nsqd. Runs on the event loop."""

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        identity: Callable[[], Mapping[str, str | int]],
        registrations: Callable[[], Iterable[tuple[str, str]]],
        max_body_size: int,
        ping_interval: float = PING_INTERVAL_S,
    ) -> None:
        self.identity = identity
        """Gives the fields of IDENTIFY at each connect."""
        self.registrations = registrations
        """Gives all topics and channels. The channel is empty for a topic without channels."""
        self.max_body_size = max_body_size
        self.ping_interval = ping_interval
        self._peers = {address: _Peer(self, address) for address in addresses}
        self._tasks: dict[_Peer, asyncio.Task[None]] = {}
        """Includes the tasks of removed peers until they have ended."""
        self.is_running = False
        """Between start() and stop()."""

    @property
    def addresses(self) -> list[str]:
        return [*self._peers]

    @property
    def http_addresses(self) -> list[str]:
        """HTTP addresses of all nsqlookupds that have been connected at least once."""
        return [join_address(info.broadcast_address, info.http_port) for info in self._infos()]

    @property
    def http_addresses_without_clusters(self) -> list[str]:
        """Of those that know nothing of replicated nsqds, such as NSQ's own."""
        plain = [info for info in self._infos() if not info.cluster]
        return [join_address(info.broadcast_address, info.http_port) for info in plain]

    def _infos(self) -> list[PeerInfo]:
        infos = [peer.info for peer in self._peers.values() if peer.info is not None]
        return [info for info in infos if info.broadcast_address and info.http_port]

    async def start(self) -> None:
        self.is_running = True
        for peer in self._peers.values():
            self._launch(peer)

    async def stop(self) -> None:
        """Close all connections. The nsqlookupds then remove us. Calling it again does nothing."""
        self.is_running = False
        await cancel_all(self._tasks.values())

    async def settled(self) -> None:
        """Wait until every peer has answered IDENTIFY once or has failed: about 2 s at most."""
        for peer in [*self._peers.values()]:
            await peer.tried.wait()

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Disconnect from removed addresses, and connect to new ones."""
        wanted = dict.fromkeys(addresses)
        for address in [address for address in self._peers if address not in wanted]:
            logger.info("LOOKUP(%s): removing peer", address)
            peer = self._peers.pop(address)
            peer.tried.set()
            if peer in self._tasks:
                self._tasks[peer].cancel()
        for address in wanted:
            if address not in self._peers:
                peer = self._peers[address] = _Peer(self, address)
                if self.is_running:
                    self._launch(peer)

    def changed(self, verb: Literal["REGISTER", "UNREGISTER"], topic: str, channel: str = "") -> None:
        """Tell all peers that a topic or channel was created or deleted."""
        encode = wire.encode_register if verb == "REGISTER" else wire.encode_unregister
        line = encode(topic, channel)
        for peer in self._peers.values():
            peer.send(line)

    def _launch(self, peer: _Peer) -> None:
        logger.info("LOOKUP(%s): adding peer", peer.address)
        task = asyncio.create_task(peer.run(), name=f"lookupd {peer.address}")
        self._tasks[peer] = task
        task.add_done_callback(lambda _: self._tasks.pop(peer, None))


class _Peer:
    """One nsqlookupd, connected or not."""

    def __init__(self, owner: LookupPeers, address: str) -> None:
        self._owner = owner
        self.address = address
        self.info: PeerInfo | None = None
        """The last reply to IDENTIFY."""
        self.tried = asyncio.Event()
        """Set after the first reply to IDENTIFY, or the first failure."""
        self._link: _Link | None = None
        """Set while changes must be sent. Otherwise the next registration includes them."""
        self._pending: deque[bytes] = deque()
        self._wake = asyncio.Event()
        """Set when a change is pending or the connection is lost."""
        self._is_failure_logged = False

    def send(self, line: bytes) -> None:
        if self._link is None:
            return
        if len(self._pending) >= MAX_PENDING:
            self._link.fail(ConnectionAbortedError(f"{MAX_PENDING} changes behind"))
            return
        self._pending.append(line)
        self._wake.set()

    async def run(self) -> None:
        """Keep connecting until cancelled."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started = loop.time()
            try:
                await self._run_connection()
            except (OSError, OverflowError, NsparqError) as error:
                self._log_failure(error)
            except Exception:
                logger.exception("LOOKUPD(%s): internal error", self.address)
            self.tried.set()
            failures = 0 if loop.time() - started > LAST_RETRY_S else failures + 1
            delay = min(FIRST_RETRY_S * 2.0 ** min(failures, 30), LAST_RETRY_S)
            await asyncio.sleep(delay * private_random.uniform(0.5, 1.0))

    async def _run_connection(self) -> None:
        """Run one connection. Ends with an exception."""
        link = _Link(self._owner.max_body_size, self._wake)
        try:
            async with asyncio.timeout(IO_TIMEOUT_S):
                await self._connect(link)
            await self._identify(link)
            self._link = link
            # From here on changes are queued behind the full registration.
            await self._register(link, [*self._owner.registrations()])
            await self._send_changes(link)
        finally:
            self._link = None
            self._pending.clear()
            await link.close()

    async def _connect(self, link: _Link) -> None:
        host_port = split_address(self.address)
        if host_port is None:
            raise OSError(f"{self.address!r} is not host:port")
        host, port = host_port
        logger.debug("LOOKUP connecting to %s", self.address)
        loop = asyncio.get_running_loop()
        # create_connection() can look up the name, too. But if that fails after a timeout, asyncio
        # logs an error that nobody retrieved.
        found = await loop.getaddrinfo(host or "localhost", port, type=socket.SOCK_STREAM)
        for left, (*_, place) in zip(reversed(range(len(found))), found, strict=True):
            try:
                await loop.create_connection(lambda: link, str(place[0]), port)
                return
            except OSError:
                if not left:
                    raise

    async def _identify(self, link: _Link) -> None:
        (reply,) = await link.request(wire.MAGIC + wire.encode_identify(self._owner.identity()), 1)
        self.info = info = wire.decode_identify_reply(reply)
        self.tried.set()
        http = join_address(info.broadcast_address, info.http_port)
        logger.info("LOOKUPD(%s): connected, version %s, HTTP at %s", self.address, info.version, http)
        if not info.broadcast_address:
            logger.error("LOOKUPD(%s): no broadcast address", self.address)

    async def _register(self, link: _Link, registrations: list[tuple[str, str]]) -> None:
        for start in range(0, len(registrations), MAX_PIPELINED):
            some = registrations[start : start + MAX_PIPELINED]
            await link.request(b"".join([wire.encode_register(*names) for names in some]), len(some))
        self._is_failure_logged = False
        logger.info("LOOKUPD(%s): registered %d topics and channels", self.address, len(registrations))

    async def _send_changes(self, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        next_ping = loop.time() + self._owner.ping_interval
        while True:
            self._wake.clear()
            link.check()
            if loop.time() >= next_ping:
                await link.request(wire.PING, 1)
                next_ping = loop.time() + self._owner.ping_interval
            elif self._pending:
                some = [*islice(self._pending, MAX_PIPELINED)]
                for _ in some:
                    self._pending.popleft()
                logger.debug("LOOKUPD(%s): %d changes, first %s", self.address, len(some), some[0])
                await link.request(b"".join(some), len(some))
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_ping):
                        await self._wake.wait()

    def _log_failure(self, error: Exception) -> None:
        """Log the first failure as a warning, repeated ones only for debugging."""
        level = logging.DEBUG if self._is_failure_logged else logging.WARNING
        reason = str(error) or ("timed out" if isinstance(error, TimeoutError) else repr(error))
        logger.log(level, "LOOKUPD(%s): disconnected - %s", self.address, reason)
        self._is_failure_logged = True


class _Link(asyncio.Protocol):
    """One connection: commands out, replies in."""

    def __init__(self, max_reply_size: int, wake: asyncio.Event) -> None:
        self._decoder = ReplyDecoder(max_reply_size)
        self._transport: asyncio.Transport | None = None
        self._replies: list[bytes] = []
        self._owed = 0
        self._error: Exception | None = None
        self._progress = asyncio.Event()
        """Set when bytes arrive or the connection is lost."""
        self._lost = asyncio.Event()
        self._wake = wake

    async def request(self, commands: bytes, count: int) -> list[bytes]:
        """Send `count` commands and give their replies. Raises OSError or BadReply."""
        assert self._transport is not None
        self.check()
        self._owed = count
        self._transport.write(commands)
        while len(self._replies) < count:
            self.check()
            self._progress.clear()
            async with asyncio.timeout(IO_TIMEOUT_S):
                await self._progress.wait()
        replies, self._replies, self._owed = self._replies, [], 0
        return replies

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._progress.set()
        self._wake.set()
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            # uvloop does not report the end of a connection whose connect was given up just as it
            # succeeded.
            with suppress(TimeoutError):
                async with asyncio.timeout(IO_TIMEOUT_S):
                    await self._lost.wait()

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._replies += self._decoder.receive_data(data)
        except BadReply as error:
            self.fail(error)
            return
        if len(self._replies) > self._owed:
            self.fail(BadReply(f"reply without a command: {_shown(self._replies[-1])}"))
        self._progress.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set()
        last = self._replies[-1] if self._replies else b""
        if last.startswith(b"E_"):
            self.fail(BadReply(f"it replied {_shown(last)}"))
        self.fail(error or ConnectionResetError("closed by the peer"))


def _shown(reply: bytes) -> str:
    return repr(reply[:200])[1:]
