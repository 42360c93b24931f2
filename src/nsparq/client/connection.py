"""One connection to an nsqd: set-up, frames in, commands out, heartbeats, and its end.

A Connection does not know what it is for: whoever opens it is told of messages, responses, errors and the
end through a Listener. Commands of one turn of the event loop leave together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from nsparq.addresses import join_address, split_address
from nsparq.client.config import Config
from nsparq.client.errors import ConnectFailed, reason_of
from nsparq.client.secret import reason_to_withhold
from nsparq.transport.layers import Layer, LayerError, LayerStack
from nsparq.wire import client as wire
from nsparq.wire.client import BadFrame, Error, Frame, FrameDecoder, Received, Response

logger = logging.getLogger(__name__)

DEFAULT_MAX_RDY: Final = 2500
"""Of a server that does not negotiate."""
DEFAULT_MSG_TIMEOUT_S: Final = 60.0
"""Likewise."""
WRITE_HIGH: Final = 256 << 10
CLOSE_S: Final = 1.0
MANY: Final = 128
LARGE: Final = 64 << 10
"""Commands, and bytes, that do not wait for the end of the turn."""
READ_SIZE: Final = 256 << 10
"""Bytes that are read at a time, at most."""


class Listener(Protocol):
    """Who a connection reports to. Called on the event loop; must not raise."""

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None: ...
    def on_response(self, connection: Connection, data: bytes, count: int) -> None: ...
    def on_error(self, connection: Connection, text: str) -> None: ...
    def on_closed(self, connection: Connection, reason: Exception | None) -> None: ...
    def on_writable(self, connection: Connection) -> None: ...


def checked_addresses(addresses: Iterable[str]) -> list[str]:
    """Addresses of nsqd, each once. Raises ValueError for what is neither `host:port` nor a path."""
    found = list(dict.fromkeys(addresses))
    for address in found:
        host, port = split_address(address) or ("", 0)
        is_path = "/" in address
        if not is_path and not (host and 0 < port < 65536):
            raise ValueError(f"{address!r} is no address of an nsqd: host:port, or the path of a Unix socket")
    return found


class Connection(asyncio.BufferedProtocol):
    """open() one; it is subscribed or published on by writing commands."""

    def __init__(self, address: str, config: Config, listener: Listener) -> None:
        self.address = address
        self.config = config
        self.max_rdy_count = DEFAULT_MAX_RDY
        self.in_flight = 0
        self.is_closing = False
        """No more messages are wanted of it. What is written still leaves, until it is closed."""
        self.is_writable = True
        self.last_message = 0.0
        self.server_version = ""
        self.msg_timeout = config.msg_timeout or DEFAULT_MSG_TIMEOUT_S
        """Seconds before the server takes an unanswered message back."""
        self.closed = asyncio.Event()
        self._listener: Listener | None = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._input = memoryview(bytearray(READ_SIZE))
        """Read into, again and again: a new one for each read, as large as it may have to be, would cost more
        than the read. The system gives memory only to as much of it as is used."""
        self._decoder = FrameDecoder(config.max_msg_size)
        self._layers: LayerStack | None = None
        self._arrived: asyncio.Queue[bytes | Exception] | None = asyncio.Queue()
        """Where bytes go while the connection is being set up."""
        self._outgoing: list[bytes] = []
        self._outgoing_size = 0
        self._is_flushing = False
        self._last_read = self._loop.time()
        self._written = 0
        """Bytes given to the transport, ever."""
        self._taken = 0
        """Those of them that had left it when last looked at, and when that was."""
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reason: Exception | None = None

    @classmethod
    async def open(cls, address: str, config: Config, listener: Listener) -> Connection:
        """Connect and agree on everything. Raises ConnectFailed, with nothing left open."""
        connection = cls(address, config, listener)
        try:
            async with asyncio.timeout(config.dial_timeout or None):
                await connection._dial()
            async with asyncio.timeout(config.handshake_timeout):
                await connection._introduce()
            connection._start()
        except TimeoutError as error:
            connection.abort()
            raise ConnectFailed(f"{address}: timed out") from error
        except (BadFrame, LayerError, OSError) as error:
            connection.abort()
            raise ConnectFailed(f"{address}: {reason_of(error)}") from error
        except BaseException:
            connection.abort()
            raise
        return connection

    def leave_to_parent(self) -> None:
        """After fork(), in the child: no longer hold the socket, so that it ends when the parent closes it.
        Closing it here would have the event loop undo what the parent's waits for: they share an epoll."""
        held = self._transport.get_extra_info("socket") if self._transport is not None else None
        if held is not None and held.fileno() >= 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, held.fileno(), inheritable=False)
            os.close(nothing)

    def _start(self) -> None:
        """Everything is agreed on: from here on frames are reported as they come."""
        arrived = self._arrived
        assert arrived is not None
        waiting = []
        while not arrived.empty():
            data = arrived.get_nowait()
            if isinstance(data, Exception):
                raise ConnectFailed(f"{self.address}: {reason_of(data)}")
            waiting.append(data)
        frames = self._decoder.receive_data(b"".join(waiting))
        self._arrived = None
        self._taken_at = self._loop.time()
        self._watch()
        self._take(frames)

    async def _dial(self) -> None:
        host_port = split_address(self.address)
        if host_port is None:
            await self._loop.create_unix_connection(lambda: self, self.address)
            return
        local = split_address(self.config.local_addr) if self.config.local_addr else None
        try:
            await self._loop.create_connection(lambda: self, *host_port, local_addr=local)
        except (ValueError, OverflowError) as error:
            # A name or a port that no machine can have.
            raise ConnectFailed(f"{self.address}: {error}") from error

    # set-up

    async def _introduce(self) -> None:
        body = json.dumps(self.config.identify()).encode()
        self._send_now(wire.MAGIC + wire.identify(body))
        answer = await self._response("IDENTIFY")
        try:
            # A server from before features were negotiated just says OK. It has none.
            agreed: dict[str, Any] = json.loads(answer) if answer.startswith(b"{") else {}
        except ValueError as error:
            raise ConnectFailed(f"{self.address}: IDENTIFY was answered with {answer[:100]!r}") from error
        self.max_rdy_count = _positive(agreed.get("max_rdy_count")) or DEFAULT_MAX_RDY
        self.server_version = str(agreed.get("version", ""))
        self.msg_timeout = _positive(agreed.get("msg_timeout")) / 1000 or self.msg_timeout
        await self._upgrade(agreed)
        if agreed.get("auth_required"):
            await self._authenticate()

    async def _authenticate(self) -> None:
        config = self.config
        if not config.auth_secret:
            raise ConnectFailed(f"{self.address}: the server asks for AUTH, and auth_secret is not set")
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        host = peer[0] if isinstance(peer, tuple) else ""
        if reason := reason_to_withhold(config, self.address, host, is_encrypted=config.tls_v1):
            raise ConnectFailed(f"{self.address}: the server asks for AUTH, and {reason}")
        self._send_now(wire.auth(config.auth_secret.encode()))
        identity = await self._response("AUTH")
        logger.debug("%s: authorised: %s", self.address, identity.decode("utf-8", "replace"))

    async def _upgrade(self, agreed: dict[str, Any]) -> None:
        """Put the layers on that the server has agreed to; it confirms each with an OK."""
        config = self.config
        if config.tls_v1 and not agreed.get("tls_v1"):
            raise ConnectFailed(f"{self.address}: the server does not offer TLS")
        # One after the other, as the server does: each OK comes inside the layers up to it.
        if config.tls_v1:
            await self._put_on(await self._tls_layer())
        if config.snappy and agreed.get("snappy"):
            from nsparq.transport.snappy import SnappyLayer

            await self._put_on(SnappyLayer())
        elif config.deflate and agreed.get("deflate"):
            from nsparq.transport.deflate import DeflateLayer

            await self._put_on(DeflateLayer(_positive(agreed.get("deflate_level")) or config.deflate_level))

    async def _tls_layer(self) -> Layer:
        from nsparq.transport.tls_client import TlsClientLayer

        host, _ = split_address(self.address) or ("", 0)
        try:
            # Reading certificates takes milliseconds, those of the system tens of them.
            context = await asyncio.to_thread(self.config.ssl_context)
            return TlsClientLayer(context, host)
        except (OSError, ValueError) as error:
            # Certificates that cannot be read, or a name that cannot be one.
            raise ConnectFailed(f"{self.address}: TLS: {reason_of(error)}") from error

    async def _put_on(self, layer: Layer) -> None:
        """A further layer, inside those that are on."""
        self._layers = LayerStack([*(self._layers.layers if self._layers else ()), layer])
        self._send_output()
        arrived = self._arrived
        assert arrived is not None
        # What arrived behind the last frame, and was not looked at, is of the new layer already.
        rest = [self._decoder.take_rest()]
        while not arrived.empty():
            data = arrived.get_nowait()
            if isinstance(data, Exception):
                raise data
            rest.append(data)
        for piece in layer.receive(b"".join(rest)):
            arrived.put_nowait(piece)
        self._send_output()
        if await self._response("the upgrade") != wire.OK:
            raise ConnectFailed(f"{self.address}: the upgrade was not confirmed")

    async def _response(self, what: str) -> bytes:
        """The next response of the set-up; heartbeats are answered on the way."""
        assert self._arrived is not None
        while True:
            frames = self._decoder.receive_data(b"", most=1)
            while not frames:
                data = await self._arrived.get()
                if isinstance(data, Exception):
                    raise data
                frames = self._decoder.receive_data(data, most=1)
            frame = frames[0]
            if isinstance(frame, Error):
                raise ConnectFailed(f"{self.address}: {what} failed: {frame.text}")
            if isinstance(frame, Received):
                raise ConnectFailed(f"{self.address}: a message before {what} was answered")
            if frame.data == wire.HEARTBEAT:
                self._send_now(wire.NOP)
                continue
            return frame.data

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
            if self._layers is None:
                self._receive(data)
                return
            for piece in self._layers.receive(data):
                self._receive(piece)
            self._send_output()
            if self._layers is not None and self._layers.is_ended:
                self.fail(ConnectionResetError("the server ended the connection"))
        except BadFrame as error:
            self._take(error.frames)
            self.fail(error)
        except LayerError as error:
            # It may have a last word for the server: why it would not trust it.
            self._send_output()
            self.fail(error)

    def _receive(self, data: bytes) -> None:
        if self._arrived is not None:
            self._arrived.put_nowait(data)
        elif count := self._decoder.receive_oks(data):
            if self._listener is not None:
                self._listener.on_response(self, wire.OK, count)
                if not self._is_flushing:
                    # Whoever waited for one will perhaps send something next, in the coming turn. That leaves
                    # at the end of that turn, not of the one after.
                    self._flush_soon()
        else:
            self._take(self._decoder.receive_data(data))

    def _take(self, frames: list[Frame]) -> None:
        messages: list[Received] = []
        for frame in frames:
            if type(frame) is Received:
                messages.append(frame)
                continue
            if messages:
                self._report(messages)
                messages = []
            listener = self._listener
            if type(frame) is Response:
                if frame.data == wire.HEARTBEAT:
                    self.write(wire.NOP)
                elif listener is not None:
                    listener.on_response(self, frame.data, 1)
            elif listener is not None:
                assert type(frame) is Error
                listener.on_error(self, frame.text)
        if messages:
            self._report(messages)

    def _report(self, messages: list[Received]) -> None:
        if self._listener is not None:
            self._listener.on_messages(self, messages)

    def eof_received(self) -> bool:
        self._reason = self._reason or ConnectionResetError("the server closed the connection")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._reason or exc
        self.is_closing = True
        self._outgoing.clear()
        self._layers = None
        if self._timer is not None:
            self._timer.cancel()
        self.closed.set()
        if self._arrived is not None:
            self._arrived.put_nowait(reason or ConnectionResetError("the server closed the connection"))
        listener, self._listener = self._listener, None
        if listener is not None and self._arrived is None:
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
        """Have a command leave at the end of the turn, or at once, with the others of the turn."""
        outgoing = self._outgoing
        outgoing.append(command)
        self._outgoing_size += len(command)
        if at_once or len(outgoing) >= MANY or self._outgoing_size >= LARGE:
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
            self._send_now(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))

    def _send_now(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        try:
            if self._layers is not None:
                data = self._layers.send(data)
        except LayerError as error:
            self.fail(error)
            return
        self._written += len(data)
        transport.write(data)

    def _send_output(self) -> None:
        """What the layers themselves have to say."""
        output = self._layers.take_output() if self._layers is not None else b""
        if output and self._transport is not None and not self._transport.is_closing():
            self._written += len(output)
            self._transport.write(output)

    # time and the end

    def _watch(self) -> None:
        """See from time to time whether the server still reads and still says something."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        config, now = self.config, self._loop.time()
        unsent = transport.get_write_buffer_size()
        taken = self._written - unsent - (_unacknowledged(transport) if unsent else 0)
        if not unsent or taken != self._taken:
            self._taken, self._taken_at = taken, now
        elif now - self._taken_at >= config.write_timeout:
            self.fail(TimeoutError(f"nothing was taken for {config.write_timeout:g} s"))
            return
        wait = config.write_timeout / 2
        if config.heartbeat_interval >= 0:
            left = self._last_read + config.read_timeout - now
            if left <= 0:
                self.fail(TimeoutError(f"nothing was heard for {config.read_timeout:g} s"))
                return
            wait = min(wait, left)
        self._timer = self._loop.call_later(wait, self._watch)

    def fail(self, reason: Exception) -> None:
        """End it now, over this."""
        self._reason = self._reason or reason
        self.abort()

    def close(self) -> None:
        """End it after what is written has left; the listener is told when it has ended."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._flush()
        self.is_closing = True
        if self._layers is not None:
            self._layers.close()
            self._send_output()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_S, transport.abort)
        transport.close()

    def abort(self) -> None:
        """End it now; the listener is told in the next turn."""
        self.is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def __str__(self) -> str:
        host_port = split_address(self.address)
        return self.address if host_port is None else join_address(*host_port)


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the system has taken and the server's has not. It takes more of us only when a good part of
    them has gone: on a slow line nothing would seem to move for seconds."""
    try:
        import fcntl
        import termios

        file = transport.get_extra_info("socket").fileno()
        (count,) = struct.unpack("i", fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4)))
        return int(count)
    except (ImportError, AttributeError, OSError):
        return 0


def _positive(value: object) -> int:
    """A number of the server's, which is to be one; 0 for anything else."""
    return value if isinstance(value, int) and value > 0 else 0
