"""The TCP side of nsqlookupd: one Connection per nsqd, between the event loop and the registry.

The memory of one peer is limited: a line, one IDENTIFY, its registrations, and its replies. A peer
that does not read its replies is not read from. A silent peer is closed after a while: see
Nsqlookupd.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from nsparq.addresses import join_address
from nsparq.errors import FatalClientError
from nsparq.lookup.registry import Producer
from nsparq.wire.lookup import (
    OK,
    Command,
    Identify,
    LookupServerProtocol,
    PeerInfo,
    Register,
    Unregister,
    encode_error,
)

if TYPE_CHECKING:
    from nsparq.lookup.daemon import Nsqlookupd

logger = logging.getLogger(__name__)

WRITE_HIGH: Final = 64 << 10
"""Unsent bytes of replies above which a peer is not read from."""
COMMANDS_PER_TURN: Final = 200
"""Commands of one peer to handle before other peers are served."""
MAX_FIELD: Final = 1024
"""Longest text in IDENTIFY: responses repeat it for every topic of the peer."""
LINGER_S: Final = 5.0
"""Time for a closing connection to send its last bytes."""
KEEPALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""TCP keep-alive, so that the loss of a peer's machine is noticed within two minutes."""


class Connection(asyncio.Protocol):
    """The connection of one nsqd."""

    def __init__(self, nsqlookupd: Nsqlookupd) -> None:
        self._nsqlookupd = nsqlookupd
        self._registry = nsqlookupd.registry
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._protocol: LookupServerProtocol
        self.address = ""
        self.producer: Producer | None = None
        """Set by IDENTIFY."""
        self.last_command_s = self._loop.time()
        self._commands: Iterator[Command] | None = None
        """Commands that wait for the next turn or for the peer to read. Reading pauses
        meanwhile."""
        self._is_writable = True
        self._is_closing = False
        self._linger: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport
        self._nsqlookupd.connections.add(self)
        peer = transport.get_extra_info("peername")
        if peer is None:  # it has already disconnected
            self.abort()
            return
        self.address = join_address(*peer[:2])
        self._protocol = LookupServerProtocol(self.address)
        transport.set_write_buffer_limits(WRITE_HIGH)
        _keep_alive(transport.get_extra_info("socket"))
        logger.info("TCP: new client(%s)", self.address)

    def data_received(self, data: bytes) -> None:
        if not self._is_closing:
            self._handle(self._protocol.receive_data(data))

    def eof_received(self) -> None:
        try:
            self._protocol.receive_eof()
        except FatalClientError as error:
            self._fail(error)
        self.close()

    def pause_writing(self) -> None:
        self._is_writable = False
        self._adjust_reading()

    def resume_writing(self) -> None:
        self._is_writable = True
        if self._commands is not None:
            self._loop.call_soon(self._handle_more)
        self._adjust_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        if self._linger is not None:
            self._linger.cancel()
        if self.producer is not None:
            self._registry.remove(self.producer)
        self._nsqlookupd.connection_ended(self)
        logger.info("client(%s): disconnected", self.address)

    # Commands

    def _handle(self, commands: Iterator[Command]) -> None:
        """Answer a limited number of commands, and leave the others for the next turn."""
        replies: list[bytes] = []
        error: FatalClientError | None = None
        was_waiting, self._commands = self._commands is not None, None
        try:
            for command in commands:
                replies.append(self._answer(command))
                if len(replies) == COMMANDS_PER_TURN:
                    self._commands = commands
                    break
        except FatalClientError as found:
            error = found
        except Exception:
            logger.exception("client(%s): internal error", self.address)
            self.close()
            return
        if replies:
            self.last_command_s = self._loop.time()
            self._transport.write(b"".join(replies))
        if error is not None:
            self._fail(error)
        elif self._commands is not None and self._is_writable:
            self._loop.call_soon(self._handle_more)
        if was_waiting or self._commands is not None:
            self._adjust_reading()

    def _handle_more(self) -> None:
        if self._commands is not None and self._is_writable and not self._is_closing:
            self._handle(self._commands)

    def _answer(self, command: Command) -> bytes:
        producer = self.producer
        if isinstance(command, Identify):
            return self._identify(command.peer)
        if producer is not None:
            if isinstance(command, Register):
                if self._registry.register(producer, command.topic, command.channel):
                    logger.debug("client(%s): REGISTER %s %s", self.address, *command)
            elif isinstance(command, Unregister):
                if self._registry.unregister(producer, command.topic, command.channel):
                    logger.debug("client(%s): UNREGISTER %s %s", self.address, *command)
            else:
                self._registry.ping(producer, self._nsqlookupd.clock())
        return OK

    def _identify(self, peer: PeerInfo) -> bytes:
        texts = (
            peer.broadcast_address,
            peer.hostname,
            peer.version,
            peer.topology_zone,
            peer.topology_region,
            peer.cluster,
        )
        if max(map(len, texts)) > MAX_FIELD:
            raise FatalClientError("E_BAD_BODY", f"IDENTIFY field longer than {MAX_FIELD}")
        replaced = self._registry.replaced_by(peer)
        if replaced is not None:
            # It may be silent: nobody knows when its connection would end.
            self._nsqlookupd.connection_of(replaced).replace(peer)
        self.producer = self._registry.identify(peer, self._nsqlookupd.clock())
        logger.info(
            "client(%s): IDENTIFY Address:%s TCP:%d HTTP:%d Version:%s",
            self.address,
            peer.broadcast_address,
            peer.tcp_port,
            peer.http_port,
            peer.version,
        )
        return self._nsqlookupd.identify_reply(peer.cluster)

    # Ending

    def _fail(self, error: FatalClientError) -> None:
        logger.error("client(%s): %.200s", self.address, error.shown)
        self._transport.write(encode_error(error))
        self.close()

    def close(self) -> None:
        """Close the connection when everything is sent, or after LINGER_S."""
        if not self._is_closing:
            self._is_closing = True
            self._transport.close()
            self._linger = self._loop.call_later(LINGER_S, self._transport.abort)

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    def replace(self, by: PeerInfo) -> None:
        """Another node serves in place of this one, which is removed at once."""
        logger.warning(
            "client(%s): replaced by %s, epoch %d of cluster %s",
            self.address, by.broadcast_address, by.epoch, by.cluster,
        )  # fmt: skip
        if self.producer is not None:
            self._registry.remove(self.producer)
            self.producer = None
        self.abort()

    def _adjust_reading(self) -> None:
        if self._is_closing or self._transport.is_closing():
            return
        if self._is_writable and self._commands is None:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
