"""One connection to an nsqd: frames in, commands out, heartbeats, time limits, and its end.

A Connection does not know what it is used for: it reports messages, responses, errors and its end
to a Listener. Commands of one turn of the event loop are sent together.
"""

from __future__ import annotations

import asyncio
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from nsparq.addresses import join_address, split_address
from nsparq.client.config import Config
from nsparq.client.connect.handshake import DEFAULT_MAX_RDY, Handshake
from nsparq.client.errors import ConnectFailed, reason_of
from nsparq.transport.layers import LayerError, LayerStack
from nsparq.wire import client as wire
from nsparq.wire.client import BadFrame, Frame, FrameDecoder, Received, Response

DEFAULT_MSG_TIMEOUT_S: Final = 60.0
"""For a server that does not negotiate."""
WRITE_HIGH: Final = 256 << 10
CLOSE_S: Final = 1.0
FLUSH_COMMANDS: Final = 128
FLUSH_BYTES: Final = 64 << 10
"""This many commands, or bytes of commands, are sent without waiting for the end of the turn."""
READ_SIZE: Final = 256 << 10


class Listener(Protocol):
    """Receives the events of a connection, on the event loop. Must not raise."""

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None: ...
    def on_response(self, connection: Connection, data: bytes, count: int) -> None: ...
    def on_error(self, connection: Connection, text: str) -> None: ...
    def on_closed(self, connection: Connection, reason: Exception | None) -> None: ...
    def on_writable(self, connection: Connection) -> None: ...


def checked_addresses(addresses: Iterable[str]) -> list[str]:
    """Addresses of nsqd without duplicates. Raises ValueError for an invalid one."""
    found = list(dict.fromkeys(addresses))
    for address in found:
        host, port = split_address(address) or ("", 0)
        is_path = "/" in address
        if not is_path and not (host and 0 < port < 65536):
            raise ValueError(f"{address!r} is not host:port or the path of a Unix socket")
    return found


class Connection(asyncio.BufferedProtocol):
    """open() connects; write() sends commands.

    It has 27 attributes, because it is the asyncio protocol with its buffers and timers, and it
    also holds what the handshake settled and what the RDY distribution reads.
    """

    def __init__(self, address: str, config: Config, listener: Listener) -> None:
        self.address = address
        self.config = config
        self.max_rdy_count = DEFAULT_MAX_RDY
        self.has_headers = False
        """Whether the server knows message headers. NSQ's own nsqd does not."""
        self.in_flight = 0
        self.is_closing = False
        """No more messages are wanted. Commands are still sent until the connection is closed."""
        self.is_close_confirmed = False
        """The server has confirmed CLS: it sends no more messages."""
        self.is_writable = True
        self.last_message = 0.0
        self.msg_timeout = config.msg_timeout or DEFAULT_MSG_TIMEOUT_S
        """Seconds after which the server requeues an unanswered message."""
        self.closed = asyncio.Event()
        self.decoder = FrameDecoder(config.max_msg_size)
        self.layers: LayerStack | None = None
        self._listener: Listener | None = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._input = memoryview(bytearray(READ_SIZE))
        """Reused for every read: allocating a buffer of this size costs more than the read. The
        system provides memory only for the part that is used."""
        self._handshake: Handshake | None = Handshake(self)
        """None once it is done."""
        self._outgoing: list[bytes] = []
        self._outgoing_size = 0
        self._is_flushing = False
        self._last_read = self._loop.time()
        self._written = 0
        """Bytes given to the transport so far."""
        self._sent = 0
        """How many of them had left the transport at the last check."""
        self._sent_at = 0.0
        """When the last check found that more had left."""
        self._timer: asyncio.TimerHandle | None = None
        self._reason: Exception | None = None
        _all.add(self)

    @classmethod
    async def open(cls, address: str, config: Config, listener: Listener) -> Connection:
        """Connect and do the handshake. Raises ConnectFailed, and then leaves nothing open."""
        connection = cls(address, config, listener)
        assert connection._handshake is not None
        try:
            async with asyncio.timeout(config.dial_timeout or None):
                await connection._dial()
            async with asyncio.timeout(config.handshake_timeout):
                await connection._handshake.run()
            connection._end_handshake()
        except TimeoutError as error:
            connection.abort()
            raise ConnectFailed(f"{address}: timed out") from error
        except (BadFrame, LayerError, OSError, ValueError, OverflowError, RecursionError) as error:
            # The last three: an odd reply of something that is no nsqd, or of a broken one.
            connection.abort()
            raise ConnectFailed(f"{address}: {reason_of(error)}") from error
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _dial(self) -> None:
        host_port = split_address(self.address)
        if host_port is None:
            await self._loop.create_unix_connection(lambda: self, self.address)
            return
        local = split_address(self.config.local_addr) if self.config.local_addr else None
        try:
            await self._loop.create_connection(lambda: self, *host_port, local_addr=local)
        except (ValueError, OverflowError) as error:
            # An impossible host name or port.
            raise ConnectFailed(f"{self.address}: {error}") from error

    def _end_handshake(self) -> None:
        """From here on frames are reported to the listener as they arrive."""
        assert self._handshake is not None
        frames = self.decoder.receive_data(self._handshake.take_arrived())
        self._handshake = None
        self._sent_at = self._loop.time()
        self._check_time_limits()
        self._handle_frames(frames)

    def leave_to_parent(self) -> None:
        """In the child of a fork: drop the socket, so that the child sends nothing on it, and the
        connection ends when the parent closes it.

        Closing the socket here would unregister it from the parent's event loop: both share an
        epoll."""
        transport, self._transport = self._transport, None
        self.is_closing = True
        held = transport.get_extra_info("socket") if transport is not None else None
        if held is not None and held.fileno() >= 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, held.fileno(), inheritable=False)
            os.close(null)
            _of_the_parent.append(transport)

    @property
    def peer_address(self) -> Any:
        return self._transport.get_extra_info("peername") if self._transport is not None else None

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport
        transport.set_write_buffer_limits(WRITE_HIGH)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._input

    def buffer_updated(self, nbytes: int) -> None:
        self._last_read = self._loop.time()
        data = bytes(self._input[:nbytes])
        try:
            if self.layers is None:
                self._receive(data)
                return
            for piece in self.layers.receive(data):
                self._receive(piece)
            self.send_layer_output()
            if self.layers is not None and self.layers.is_ended:
                self.fail(ConnectionResetError("the server ended the connection"))
        except BadFrame as error:
            self._handle_frames(error.frames)
            self.fail(error)
        except LayerError as error:
            # The layer may have an alert for the server, for example why its certificate was
            # refused.
            self.send_layer_output()
            self.fail(error)

    def _receive(self, data: bytes) -> None:
        if self._handshake is not None:
            self._handshake.arrived.put_nowait(data)
        elif count := self.decoder.receive_oks(data):
            if self._listener is not None:
                self._listener.on_response(self, wire.OK, count)
                if not self._is_flushing:
                    # Tasks that waited for an OK probably write in the next turn. Scheduled now,
                    # the flush runs at the end of that turn, not one turn later.
                    self._flush_soon()
        else:
            self._handle_frames(self.decoder.receive_data(data))

    def _handle_frames(self, frames: list[Frame]) -> None:
        listener = self._listener
        if listener is None:
            return
        for frame in frames:
            if isinstance(frame, list):
                listener.on_messages(self, frame)
            elif isinstance(frame, Response) and frame.data == wire.HEARTBEAT:
                self.write(wire.NOP)
            elif isinstance(frame, Response):
                listener.on_response(self, frame.data, 1)
            else:
                listener.on_error(self, frame.text)

    def eof_received(self) -> bool:
        self._reason = self._reason or ConnectionResetError("the server closed the connection")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._reason or exc
        self.is_closing = True
        self._outgoing.clear()
        self.layers = None
        if self._timer is not None:
            self._timer.cancel()
        self.closed.set()
        listener, self._listener = self._listener, None
        if self._handshake is not None:
            end = reason or ConnectionResetError("the server closed the connection")
            self._handshake.arrived.put_nowait(end)
        elif listener is not None:
            listener.on_closed(self, reason)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if self._listener is not None:
            self._listener.on_writable(self)

    # sending

    @property
    def unsent_count(self) -> int:
        """Commands that wait for the end of the turn."""
        return len(self._outgoing)

    def write(self, command: bytes, *, at_once: bool = False) -> None:
        """Send a command at the end of the turn, or at once, together with those that wait."""
        outgoing = self._outgoing
        outgoing.append(command)
        self._outgoing_size += len(command)
        if at_once or len(outgoing) >= FLUSH_COMMANDS or self._outgoing_size >= FLUSH_BYTES:
            self._flush()
        elif not self._is_flushing:
            self._flush_soon()

    def _flush_soon(self) -> None:
        self._is_flushing = True
        self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_flushing = False
        self._flush()

    def send_rdy(self, count: int) -> None:
        self.write(wire.rdy(count))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        self._outgoing_size = 0
        if outgoing:
            self.send_now(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))

    def send_now(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            if self.layers is not None:
                data = self.layers.send(data)
        except LayerError as error:
            self.fail(error)
            return
        self._write_to_transport(data)

    def send_layer_output(self) -> None:
        """Send the layers' own bytes: handshakes and alerts."""
        output = self.layers.take_output() if self.layers is not None else b""
        if output:
            self._write_to_transport(output)

    def _write_to_transport(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._written += len(data)
            self._transport.write(data)

    # time limits and the end

    def _check_time_limits(self) -> None:
        """Check periodically that the server still reads and still sends something."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        config, now = self.config, self._loop.time()
        unsent = transport.get_write_buffer_size()
        sent = self._written - unsent - (_unacknowledged(transport) if unsent else 0)
        if not unsent or sent != self._sent:
            self._sent, self._sent_at = sent, now
        elif now - self._sent_at >= config.write_timeout:
            self.fail(TimeoutError(f"the server read nothing for {config.write_timeout:g} s"))
            return
        wait = config.write_timeout / 2
        if config.heartbeat_interval >= 0:
            left = self._last_read + config.read_timeout - now
            if left <= 0:
                self.fail(TimeoutError(f"the server sent nothing for {config.read_timeout:g} s"))
                return
            wait = min(wait, left)
        self._timer = self._loop.call_later(wait, self._check_time_limits)

    def fail(self, reason: Exception) -> None:
        """End the connection now. The listener gets the first reason."""
        self._reason = self._reason or reason
        self.abort()

    def close(self) -> None:
        """Send all commands, then end the connection. The listener is told when it ends."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._flush()
        self.is_closing = True
        if self.layers is not None:
            self.layers.close()
            self.send_layer_output()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_S, transport.abort)
        transport.close()

    def abort(self) -> None:
        """End the connection now; the listener is told in the next turn."""
        self.is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def __str__(self) -> str:
        host_port = split_address(self.address)
        return self.address if host_port is None else join_address(*host_port)


_all: weakref.WeakSet[Connection] = weakref.WeakSet()
_of_the_parent: list[object] = []
"""Kept forever in a child: a transport that nobody uses any more would close its socket."""


def _leave_to_parent() -> None:
    for connection in [*_all]:
        connection.leave_to_parent()
    _all.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that our system holds and the server's has not acknowledged.

    Without them a slow line would look stuck for seconds: our system takes more from the transport
    only after a large part of its own buffer was sent."""
    try:
        import fcntl
        import termios

        file = transport.get_extra_info("socket").fileno()
        (count,) = struct.unpack("i", fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4)))
        return int(count)
    except (ImportError, AttributeError, OSError):
        return 0
