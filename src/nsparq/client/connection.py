"""One connection to an nsqd: set-up, frames in, commands out, heartbeats, and its end.

A Connection does not know what it is for: whoever opens it is told of messages, responses, errors and the
end through a Listener. Commands of one turn of the event loop leave together.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from nsparq.addresses import join_address, split_address
from nsparq.client.config import Config
from nsparq.client.errors import ConnectFailed
from nsparq.transport.layers import Layer, LayerError, LayerStack
from nsparq.wire import client as wire
from nsparq.wire.client import BadFrame, Error, Frame, FrameDecoder, Received, Response

logger = logging.getLogger(__name__)

DEFAULT_MAX_RDY: Final = 2500
"""Of a server that does not negotiate."""
WRITE_HIGH: Final = 256 << 10
CLOSE_S: Final = 1.0
MANY: Final = 128
"""Commands that do not wait for the end of the turn."""


class Listener(Protocol):
    """Who a connection reports to. Called on the event loop; must not raise."""

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None: ...
    def on_response(self, connection: Connection, data: bytes) -> None: ...
    def on_error(self, connection: Connection, text: str) -> None: ...
    def on_closed(self, connection: Connection, reason: Exception | None) -> None: ...
    def on_writable(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """open() one; it is subscribed or published on by writing commands."""

    def __init__(self, address: str, config: Config, listener: Listener) -> None:
        self.address = address
        self.config = config
        self.max_rdy_count = DEFAULT_MAX_RDY
        self.in_flight = 0
        self.is_closing = False
        self.is_writable = True
        self.last_message = 0.0
        self.server_version = ""
        self.msg_timeout = config.msg_timeout
        """Seconds before the server takes an unanswered message back; 0 if it has not said."""
        self._listener: Listener | None = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder(config.max_msg_size)
        self._layers: LayerStack | None = None
        self._arrived: asyncio.Queue[bytes | Exception] | None = asyncio.Queue()
        """Where bytes go while the connection is being set up."""
        self._outgoing: list[bytes] = []
        self._is_flushing = False
        self._last_read = self._loop.time()
        self._blocked_since = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._reason: Exception | None = None

    @classmethod
    async def open(cls, address: str, config: Config, listener: Listener) -> Connection:
        """Connect and agree on everything. Raises ConnectFailed, with nothing left open."""
        connection = cls(address, config, listener)
        try:
            async with asyncio.timeout(config.dial_timeout):
                await connection._dial()
        except TimeoutError as error:
            raise ConnectFailed(f"{address}: timed out") from error
        except OSError as error:
            raise ConnectFailed(f"{address}: {error.strerror or error}") from error
        try:
            async with asyncio.timeout(max(config.read_timeout, config.dial_timeout)):
                await connection._introduce()
        except BaseException as error:
            connection.abort()
            if isinstance(error, TimeoutError):
                raise ConnectFailed(f"{address}: timed out") from error
            if isinstance(error, BadFrame | LayerError | OSError):
                raise ConnectFailed(f"{address}: {error}") from error
            raise
        connection._start()
        return connection

    def _start(self) -> None:
        """Everything is agreed on: from here on frames are reported as they come."""
        arrived, self._arrived = self._arrived, None
        assert arrived is not None
        self._schedule_watch()
        self._take(self._decoder.receive_data(b""))
        while not arrived.empty():
            data = arrived.get_nowait()
            if isinstance(data, bytes):
                self._take(self._decoder.receive_data(data))
            else:
                raise ConnectFailed(f"{self.address}: {data}")

    async def _dial(self) -> None:
        host_port = split_address(self.address)
        if host_port is None:
            await self._loop.create_unix_connection(lambda: self, self.address)
            return
        local = split_address(self.config.local_addr) if self.config.local_addr else None
        await self._loop.create_connection(lambda: self, *host_port, local_addr=local)

    # set-up

    async def _introduce(self) -> None:
        body = json.dumps(self.config.identify()).encode()
        self._send_now(wire.MAGIC + wire.identify(body))
        answer = await self._response("IDENTIFY")
        if not answer.startswith(b"{"):
            return
        try:
            agreed: dict[str, Any] = json.loads(answer)
        except ValueError as error:
            raise ConnectFailed(f"{self.address}: IDENTIFY was answered with {answer[:100]!r}") from error
        self.max_rdy_count = agreed.get("max_rdy_count") or DEFAULT_MAX_RDY
        self.server_version = str(agreed.get("version", ""))
        self.msg_timeout = (agreed.get("msg_timeout") or 0) / 1000
        await self._upgrade(agreed)
        if agreed.get("auth_required"):
            if not self.config.auth_secret:
                raise ConnectFailed(f"{self.address}: the server asks for AUTH, and auth_secret is not set")
            self._send_now(wire.auth(self.config.auth_secret.encode()))
            identity = await self._response("AUTH")
            logger.debug("%s: authorised: %s", self.address, identity.decode("utf-8", "replace"))

    async def _upgrade(self, agreed: dict[str, Any]) -> None:
        """Put the layers on that the server has agreed to; it confirms each with an OK."""
        wanted: list[Layer] = []
        if agreed.get("tls_v1"):
            from nsparq.transport.tls_client import TlsClientLayer

            host = split_address(self.address) or ("", 0)
            wanted.append(TlsClientLayer(self.config.ssl_context(), host[0]))
        elif self.config.tls_v1:
            raise ConnectFailed(f"{self.address}: the server does not offer TLS")
        if agreed.get("snappy"):
            from nsparq.transport.snappy import SnappyLayer

            wanted.append(SnappyLayer())
        elif agreed.get("deflate"):
            from nsparq.transport.deflate import DeflateLayer

            wanted.append(DeflateLayer(agreed.get("deflate_level") or self.config.deflate_level))
        # One after the other, as the server does: each OK comes inside the layers up to it.
        active: list[Layer] = []
        for layer in wanted:
            active.append(layer)
            self._layers = LayerStack(active)
            self._send_output()
            self._pass_rest_through(layer)
            if await self._response("the upgrade") != wire.OK:
                raise ConnectFailed(f"{self.address}: the upgrade was not confirmed")

    def _pass_rest_through(self, layer: Layer) -> None:
        """What arrived before the layer was on, and was not looked at, is for it."""
        arrived = self._arrived
        assert arrived is not None
        rest = [self._decoder.take_rest()]
        while not arrived.empty():
            data = arrived.get_nowait()
            if isinstance(data, Exception):
                raise data
            rest.append(data)
        for piece in layer.receive(b"".join(rest)):
            arrived.put_nowait(piece)
        self._send_output()

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

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport
        transport.set_write_buffer_limits(WRITE_HIGH)

    def data_received(self, data: bytes) -> None:
        self._last_read = self._loop.time()
        try:
            if self._layers is None:
                self._receive(data)
                return
            for piece in self._layers.receive(data):
                self._receive(piece)
            self._send_output()
            if self._layers.is_ended:
                self._fail(ConnectionResetError("the server ended the connection"))
        except (BadFrame, LayerError) as error:
            logger.warning("%s: %s", self.address, error)
            self._fail(error)

    def _receive(self, data: bytes) -> None:
        if self._arrived is None:
            self._take(self._decoder.receive_data(data))
        else:
            self._arrived.put_nowait(data)

    def _take(self, frames: list[Frame]) -> None:
        listener = self._listener
        messages: list[Received] = []
        for frame in frames:
            if type(frame) is Received:
                messages.append(frame)
                continue
            if messages and listener is not None:
                listener.on_messages(self, messages)
                messages = []
            if type(frame) is Response:
                if frame.data == wire.HEARTBEAT:
                    self.write(wire.NOP)
                elif listener is not None:
                    listener.on_response(self, frame.data)
            elif listener is not None:
                assert type(frame) is Error
                listener.on_error(self, frame.text)
            listener = self._listener
        if messages and listener is not None:
            listener.on_messages(self, messages)

    def eof_received(self) -> bool:
        self._reason = self._reason or ConnectionResetError("the server closed the connection")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        reason = exc or self._reason
        self.is_closing = True
        self._outgoing.clear()
        if self._watch is not None:
            self._watch.cancel()
        if self._arrived is not None:
            self._arrived.put_nowait(reason or ConnectionResetError("the server closed the connection"))
        listener, self._listener = self._listener, None
        if listener is not None and self._arrived is None:
            listener.on_closed(self, reason)

    def pause_writing(self) -> None:
        self.is_writable = False
        self._blocked_since = self._loop.time()

    def resume_writing(self) -> None:
        self.is_writable = True
        self._blocked_since = 0.0
        if self._listener is not None:
            self._listener.on_writable(self)

    # sending

    def write(self, command: bytes) -> None:
        """Have a command leave at the end of the turn, with the others of the turn."""
        self._outgoing.append(command)
        if len(self._outgoing) >= MANY:
            self._flush()
        elif not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def send_rdy(self, count: int) -> None:
        self.write(wire.rdy(count))

    def _flush(self) -> None:
        self._is_flushing = False
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None and not self._transport.is_closing():
            self._send_now(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))

    def _send_now(self, data: bytes) -> None:
        assert self._transport is not None
        if self._layers is None:
            self._transport.write(data)
            return
        try:
            self._transport.write(self._layers.send(data))
        except LayerError as error:
            self._fail(error)

    def _send_output(self) -> None:
        """What the layers themselves have to say."""
        output = self._layers.take_output() if self._layers is not None else b""
        if output and self._transport is not None:
            self._transport.write(output)

    # time and the end

    def _schedule_watch(self) -> None:
        if self.is_closing:
            return
        due = self._last_read + self.config.read_timeout
        if self._blocked_since:
            due = min(due, self._blocked_since + self.config.write_timeout)
        at = max(due, self._loop.time() + min(0.05, self.config.write_timeout))
        at = min(at, self._loop.time() + self.config.write_timeout)
        self._watch = self._loop.call_at(at, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if now - self._last_read >= self.config.read_timeout:
            self._fail(TimeoutError(f"nothing heard for {self.config.read_timeout:g} s"))
        elif self._blocked_since and now - self._blocked_since >= self.config.write_timeout:
            self._fail(TimeoutError(f"nothing taken for {self.config.write_timeout:g} s"))
        else:
            self._schedule_watch()

    def _fail(self, reason: Exception) -> None:
        self._reason = self._reason or reason
        self.abort()

    def close(self) -> None:
        """End it after what is written has left; the listener is told when it has ended."""
        if self._transport is None or self._transport.is_closing():
            return
        self._flush()
        self.is_closing = True
        if self._layers is not None:
            self._layers.close()
            self._send_output()
        self._transport.close()
        self._loop.call_later(CLOSE_S, self._transport.abort)

    def abort(self) -> None:
        self.is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def __str__(self) -> str:
        host_port = split_address(self.address)
        return self.address if host_port is None else join_address(*host_port)
