"""A blocking connection to nsqd's TCP port that takes messages of one channel, many at a time.

Received frames stay bytes: Python looks only at the length and type of each, frames.py decodes all
of them at once. A task connects, takes a given number of messages, and disconnects. It needs no
event loop and no reconnecting consumer.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import struct
import time
from typing import Any, Final

from nsparq.addresses import split_address
from nsparq.client.config import Config
from nsparq.client.connect.secret import reason_to_withhold
from nsparq.errors import NsparqError
from nsparq.spark.cluster.http_client import reason_of
from nsparq.spark.queue.frames import HEAD_SIZE, MESSAGE_HEAD, Taken, commands, decode
from nsparq.transport.layers import Layer, LayerError, LayerStack
from nsparq.wire import client as wire
from nsparq.wire.frames import ERROR, MESSAGE, MESSAGE_WITH_HEADERS, RESPONSE

__all__ = ["Away", "QueueConnection", "QueueError"]

logger = logging.getLogger(__name__)

MESSAGES: Final = (MESSAGE, MESSAGE_WITH_HEADERS)
_HEAD: Final = struct.Struct(">ii")
_LONGEST: Final = 1 << 30
"""Limit on the bytes of a frame. A larger size means that the other side is not an nsqd."""
_PIECE: Final = 1 << 20
DEFAULT_MAX_RDY: Final = 2500
PROOF_S: Final = 5.0
"""How long nsqd may take to carry out the last commands."""


class Away(NsparqError):
    """The connection cannot be made, or is lost: nsqd is away, and may come back."""


class QueueError(NsparqError):
    """nsqd refuses the connection: wrong secret, no TLS, or an invalid name."""

    retry_helps = False


class QueueConnection:
    """A subscribed connection, with RDY 0 at first. Unusable after Away or QueueError."""

    def __init__(
        self, address: str, topic: str, channel: str, config: Config, *, headers: bool = False
    ) -> None:
        """With `headers`, nsqd sends the headers of messages too, if it knows them."""
        self.max_rdy_count = DEFAULT_MAX_RDY
        self.failed_fins = 0
        """FINs that nsqd refused, because it had taken the message back."""
        self._address = address
        self._wants_headers = headers
        self._write_timeout = config.write_timeout
        self._buffer = bytearray()
        self._scanned = 0
        """End of the whole frames in the buffer; they begin at `_starts`."""
        self._starts: list[int] = []
        self._others: set[int] = set()
        """Indexes in `_starts` of frames that are not messages."""
        self._responses: list[tuple[int, bytes]] = []
        self._layers: LayerStack | None = None
        self._ready = 0
        self._is_stopped = False
        try:
            self._socket = self._open_socket(config)
        except (OSError, ValueError, OverflowError) as error:
            raise Away(f"{address}: {reason_of(error)}") from error
        try:
            self._socket.setblocking(False)
            self._readable, self._either = select.poll(), select.poll()
            self._readable.register(self._socket, select.POLLIN)
            self._either.register(self._socket, select.POLLIN | select.POLLOUT)
            self._handshake(config)
            self._send(wire.sub(topic, channel))
            self._expect(wire.OK, "SUB", time.monotonic() + config.handshake_timeout)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> QueueConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    # handshake

    def _open_socket(self, config: Config) -> socket.socket:
        host_port = split_address(self._address)
        if host_port is not None:
            connection = socket.create_connection(host_port, config.dial_timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(config.dial_timeout)
            connection.connect(self._address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _handshake(self, config: Config) -> None:
        deadline = time.monotonic() + config.handshake_timeout
        identity = {**config.identify(), "headers": self._wants_headers}
        self._send(wire.MAGIC + wire.identify(json.dumps(identity).encode()))
        answer = self._response("IDENTIFY", deadline)
        try:
            agreed: dict[str, Any] = json.loads(answer) if answer.startswith(b"{") else {}
            max_rdy_count = agreed.get("max_rdy_count") or DEFAULT_MAX_RDY
            if type(max_rdy_count) is not int or max_rdy_count < 0:
                raise ValueError("max_rdy_count is no number of messages")
        except (ValueError, RecursionError) as error:
            raise QueueError(f"{self._address}: IDENTIFY was answered with {answer[:100]!r}") from error
        self.max_rdy_count = max_rdy_count
        self._upgrade(agreed, config, deadline)
        if agreed.get("auth_required"):
            if not config.auth_secret:
                raise QueueError(f"{self._address}: nsqd requires AUTH, and option authToken is not set")
            host, _ = split_address(self._address) or ("", 0)
            if reason_to_withhold(config, self._address, host, is_encrypted=config.tls_v1):
                raise QueueError(
                    f"{self._address}: nsqd requires AUTH, and option authTokenFor does not name this nsqd"
                )
            self._send(wire.auth(config.auth_secret.encode()))
            self._response("AUTH", deadline)

    def _upgrade(self, agreed: dict[str, Any], config: Config, deadline: float) -> None:
        """Add the layers that IDENTIFY has agreed on. nsqd confirms each with an OK."""
        if config.tls_v1:
            if not agreed.get("tls_v1"):
                raise QueueError(f"{self._address}: option tls: nsqd does not offer TLS")
            from nsparq.transport.tls_client import TlsClientLayer

            host, _ = split_address(self._address) or ("", 0)
            try:
                layer: Layer = TlsClientLayer(config.ssl_context(), host)
            except (OSError, ValueError) as error:
                raise QueueError(f"{self._address}: TLS: {error}") from error
            self._add_layer(layer, deadline)
        if config.snappy and agreed.get("snappy"):
            from nsparq.transport.snappy import SnappyLayer

            self._add_layer(SnappyLayer(), deadline)

    def _add_layer(self, layer: Layer, deadline: float) -> None:
        layers = self._layers = LayerStack([*(self._layers.layers if self._layers else ()), layer])
        # Bytes behind the last frame belong to the new layer.
        rest, self._buffer = bytes(self._buffer), bytearray()
        try:
            self._send_raw(layers.take_output())
            self._buffer += b"".join(layer.receive(rest))
            self._send_raw(layers.take_output())
            self._expect(wire.OK, "the upgrade", deadline)
        except (LayerError, _LayerFailed) as error:
            # Send TLS's alert, which tells nsqd why the handshake failed.
            self._send_raw(layers.take_output())
            raise QueueError(str(error)) from error

    def _response(self, what: str, deadline: float) -> bytes:
        """The answer to a command of the handshake. Leaves everything behind it in the buffer."""
        while True:
            while (frame := self._first_frame()) is None:
                if not self._pull(deadline - time.monotonic()):
                    raise Away(f"{self._address}: {what} was not answered in time")
            kind, data = frame
            if data == wire.HEARTBEAT:
                self._send(wire.NOP)
                continue
            if kind == ERROR:
                text = f"{self._address}: {what} failed: {data.decode('utf-8', 'replace')}"
                # The channel is just being deleted, or the auth server is away: a retry may help.
                raise (Away if data.startswith((b"E_SUB_FAILED", b"E_AUTH_FAILED")) else QueueError)(text)
            return data

    def _first_frame(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < HEAD_SIZE:
            return None
        size, kind = _HEAD.unpack_from(buffer)
        if not 4 <= size <= _LONGEST or not 0 <= kind < MESSAGE:
            raise QueueError(f"{self._address}: not the TCP port of an nsqd")
        if len(buffer) < 4 + size:
            return None
        data = bytes(buffer[HEAD_SIZE : 4 + size])
        del buffer[: 4 + size]
        return kind, data

    def _expect(self, wanted: bytes, what: str, deadline: float) -> None:
        answer = self._response(what, deadline)
        if answer != wanted:
            raise QueueError(f"{self._address}: {what} was answered with {answer[:100]!r}")

    # messages

    def ready(self, count: int) -> None:
        """Set how many messages may be in flight, up to nsqd's limit."""
        count = min(count, self.max_rdy_count)
        if count != self._ready:
            self._ready = count
            self._send(wire.rdy(count))

    @property
    def waiting(self) -> int:
        """Messages that have arrived and were not taken yet."""
        return len(self._starts) - len(self._others)

    @property
    def waiting_bytes(self) -> int:
        return self._scanned

    def receive(self, seconds: float) -> bool:
        """Wait for more, up to so many seconds. Returns False if nothing arrived."""
        arrived = self._pull(seconds)
        self._scan()
        while self._responses:
            self._check_response(*self._responses.pop(0))
        return arrived

    def take(self) -> Taken:
        """All messages that have arrived."""
        with memoryview(self._buffer) as view:
            data = bytes(view[: self._scanned])
        del self._buffer[: self._scanned]
        starts, others = self._starts, self._others
        self._starts, self._others, self._scanned = [], set(), 0
        try:
            return decode(data, starts, others)
        except ValueError as error:
            raise Away(f"{self._address}: {error}") from error

    def stop_taking(self, seconds: float) -> None:
        """Send CLS, once, and wait until nsqd sends no more messages."""
        if self._is_stopped:
            return
        self._send(wire.CLS)
        deadline = time.monotonic() + seconds
        while True:
            self._scan()
            while self._responses:
                kind, data = self._responses.pop(0)
                if data == wire.CLOSE_WAIT:
                    self._is_stopped = True
                    return
                self._check_response(kind, data)
            if not self._pull(deadline - time.monotonic()):
                raise Away(f"{self._address}: CLS was not answered in time")

    def finish(self, ids: bytes) -> None:
        if ids:
            self._send(commands(b"FIN ", ids, b"\n"))

    def requeue(self, ids: bytes) -> None:
        if ids:
            self._send(commands(b"REQ ", ids, b" 0\n"))

    def confirm_fins(self) -> bool:
        """Whether nsqd has carried out all commands, and every FIN was in time: it reads our stream
        to the end before it ends its own. The connection cannot be used afterwards."""
        deadline = time.monotonic() + PROOF_S
        try:
            if self._layers is not None:
                self._layers.close()
                self._send_raw(self._layers.take_output())
            self._socket.shutdown(socket.SHUT_WR)
            while self.receive(deadline - time.monotonic()):
                pass
        except _Ended:
            self._scan()
            failed = any(data.startswith(b"E_FIN_FAILED") for _, data in self._responses)
            return not failed and not self.failed_fins
        except (OSError, NsparqError) as error:
            logger.info("%s: the last FINs may not have arrived: %s", self._address, error)
        return False

    def _check_response(self, kind: int, data: bytes) -> None:
        if kind != ERROR:
            return
        if data.startswith(b"E_FIN_FAILED"):
            self.failed_fins += 1
        elif not data.startswith((b"E_REQ_FAILED", b"E_TOUCH_FAILED")):
            # nsqd closes the connection after any other error.
            raise Away(f"{self._address}: {data.decode('utf-8', 'replace')}")

    # bytes

    def _scan(self) -> None:
        buffer, position, starts = self._buffer, self._scanned, self._starts
        unpack, available = _HEAD.unpack_from, len(self._buffer)
        while available - position >= HEAD_SIZE:
            size, kind = unpack(buffer, position)
            end = position + 4 + size
            if end > available and 0 <= size <= _LONGEST:
                break
            if kind not in MESSAGES or not 4 + MESSAGE_HEAD <= size <= _LONGEST:
                if not 4 <= size <= _LONGEST or not 0 <= kind < MESSAGE:
                    raise Away(f"{self._address}: a frame of type {kind} with {size} bytes")
                self._others.add(len(starts))
                self._responses.append((kind, bytes(buffer[position + HEAD_SIZE : end])))
            starts.append(position)
            position = end
        self._scanned = position
        if (RESPONSE, wire.HEARTBEAT) in self._responses:
            self._responses.remove((RESPONSE, wire.HEARTBEAT))
            self._send(wire.NOP)

    def _pull(self, seconds: float) -> bool:
        """Read what has arrived. Returns False if nothing arrives in time."""
        if not self._readable.poll(max(0.0, seconds) * 1000):
            return False
        self._read()
        if self._layers is not None:
            self._send_raw(self._layers.take_output())
        return True

    def _read(self) -> None:
        try:
            data = self._socket.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError as error:
            raise Away(f"{self._address}: {reason_of(error)}") from error
        if not data:
            raise _Ended(f"{self._address}: nsqd closed the connection")
        layers = self._layers
        if layers is None:
            self._buffer += data
            return
        try:
            for piece in layers.receive(data):
                self._buffer += piece
        except LayerError as error:
            raise _LayerFailed(f"{self._address}: {error}") from error
        if layers.is_ended:
            raise _Ended(f"{self._address}: nsqd closed the connection")

    def _send(self, data: bytes) -> None:
        if self._layers is not None:
            try:
                data = self._layers.send(data)
            except LayerError as error:
                raise Away(f"{self._address}: {error}") from error
        self._send_raw(data)

    def _send_raw(self, data: bytes) -> None:
        """Reads while it waits: an nsqd that cannot send its messages may not read our commands."""
        left = memoryview(data)
        deadline = time.monotonic() + self._write_timeout
        while left:
            try:
                left = left[self._socket.send(left) :]
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise Away(f"{self._address}: {reason_of(error)}") from error
            events = self._either.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                raise Away(f"{self._address}: timed out")
            if events[0][1] & select.POLLIN:
                self._read()


class _Ended(Away):
    """nsqd has ended its stream."""


class _LayerFailed(Away):
    """TLS or snappy cannot read the bytes, or TLS does not trust the certificate."""
