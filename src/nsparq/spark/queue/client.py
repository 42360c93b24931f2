"""A blocking connection that takes messages of one channel, and turns them into Arrow many at a time.

Frames stay bytes as they came: Python looks at the length and the kind of each, NumPy and Arrow do the rest.
A task needs no event loop, and none of what a consumer in a service needs: it connects, takes what it was
told to take, and leaves.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import struct
import time
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nsparq.addresses import split_address
from nsparq.client.config import Config
from nsparq.client.connect.secret import reason_to_withhold
from nsparq.errors import NsparqError
from nsparq.spark.queue.staging import CHUNK_SCHEMA
from nsparq.transport.layers import Layer, LayerError, LayerStack
from nsparq.wire import client as wire
from nsparq.wire.frames import ERROR, MESSAGE, RESPONSE

__all__ = ["Away", "QueueConnection", "QueueError", "Taken", "nothing"]

logger = logging.getLogger(__name__)

_HEAD: Final = struct.Struct(">ii")
_HEAD_SIZE: Final = 8
_MESSAGE_HEAD: Final = 26
_ID: Final = slice(10, 26)
_ID_SIZE: Final = 16
_LONGEST: Final = 1 << 30
"""Bytes of a frame that nsqd can send; anything beyond is somebody else talking."""
_PIECE: Final = 1 << 20
DEFAULT_MAX_RDY: Final = 2500
PROOF_S: Final = 5.0
"""How long nsqd may take to work off our last commands."""


class Away(NsparqError):
    """The connection cannot be made, or is lost. Nothing is wrong with the query: nsqd is away, and may be
    back."""


class QueueError(NsparqError):
    """nsqd will not have us: wrong secret, no TLS, a name it does not take. To try again would not help."""

    retry_helps = False


class Taken(NamedTuple):
    """Messages, in the order in which they came."""

    rows: pa.RecordBatch
    """Of CHUNK_SCHEMA."""
    ids: bytes
    """16 bytes each."""


class QueueConnection:
    """Subscribed from the start, with RDY 0. Raises Away and QueueError; after either it is of no more
    use."""

    def __init__(self, address: str, topic: str, channel: str, config: Config) -> None:
        self.max_rdy_count = DEFAULT_MAX_RDY
        self.failed_fins = 0
        """Messages that were no longer ours when we finished them."""
        self._address = address
        self._write_timeout = config.write_timeout
        self._buffer = bytearray()
        self._scanned = 0
        """Up to here the buffer holds whole frames, which begin at `_starts`."""
        self._starts: list[int] = []
        self._others: set[int] = set()
        """Which of `_starts` are no messages."""
        self._responses: list[tuple[int, bytes]] = []
        self._layers: LayerStack | None = None
        self._ready = 0
        self._is_stopped = False
        try:
            self._socket = self._dial(config)
        except (OSError, ValueError, OverflowError) as error:
            raise Away(f"{address}: {_reason(error)}") from error
        try:
            self._socket.setblocking(False)
            self._readable, self._either = select.poll(), select.poll()
            self._readable.register(self._socket, select.POLLIN)
            self._either.register(self._socket, select.POLLIN | select.POLLOUT)
            self._introduce(config)
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

    # set-up

    def _dial(self, config: Config) -> socket.socket:
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

    def _introduce(self, config: Config) -> None:
        deadline = time.monotonic() + config.handshake_timeout
        self._send(wire.MAGIC + wire.identify(json.dumps(config.identify()).encode()))
        answer = self._response("IDENTIFY", deadline)
        try:
            agreed: dict[str, Any] = json.loads(answer) if answer.startswith(b"{") else {}
        except ValueError as error:
            raise QueueError(f"{self._address}: IDENTIFY was answered with {answer[:100]!r}") from error
        self.max_rdy_count = int(agreed.get("max_rdy_count") or DEFAULT_MAX_RDY)
        self._upgrade(agreed, config, deadline)
        if agreed.get("auth_required"):
            if not config.auth_secret:
                raise QueueError(f"{self._address}: nsqd asks for AUTH, and option authToken is not set")
            host, _ = split_address(self._address) or ("", 0)
            if reason_to_withhold(config, self._address, host, is_encrypted=config.tls_v1):
                raise QueueError(
                    f"{self._address}: nsqd asks for AUTH, and option authTokenFor does not name it"
                )
            self._send(wire.auth(config.auth_secret.encode()))
            self._response("AUTH", deadline)

    def _upgrade(self, agreed: dict[str, Any], config: Config, deadline: float) -> None:
        """The layers that were agreed on, outermost first; each is confirmed with an OK inside it."""
        if config.tls_v1:
            if not agreed.get("tls_v1"):
                raise QueueError(f"{self._address}: option tls: nsqd does not offer TLS")
            from nsparq.transport.tls_client import TlsClientLayer

            host, _ = split_address(self._address) or ("", 0)
            try:
                layer: Layer = TlsClientLayer(config.ssl_context(), host)
            except (OSError, ValueError) as error:
                raise QueueError(f"{self._address}: TLS: {error}") from error
            self._put_on(layer, deadline)
        if config.snappy and agreed.get("snappy"):
            from nsparq.transport.snappy import SnappyLayer

            self._put_on(SnappyLayer(), deadline)

    def _put_on(self, layer: Layer, deadline: float) -> None:
        layers = self._layers = LayerStack([*(self._layers.layers if self._layers else ()), layer])
        # What came behind the last frame is of the new layer already.
        rest, self._buffer = bytes(self._buffer), bytearray()
        try:
            self._send_raw(layers.take_output())
            self._buffer += b"".join(layer.receive(rest))
            self._send_raw(layers.take_output())
            self._expect(wire.OK, "the upgrade", deadline)
        except (LayerError, _NotOfTheLayer) as error:
            # It may have a last word for the server: why it would not trust it.
            self._send_raw(layers.take_output())
            raise QueueError(str(error)) from error

    def _response(self, what: str, deadline: float) -> bytes:
        """The answer to a command of the set-up. Nothing behind it is looked at."""
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
                # Of a channel that is just being deleted, or of an auth server that is away.
                raise (Away if data.startswith((b"E_SUB_FAILED", b"E_AUTH_FAILED")) else QueueError)(text)
            return data

    def _first_frame(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < _HEAD_SIZE:
            return None
        size, kind = _HEAD.unpack_from(buffer)
        if not 4 <= size <= _LONGEST or not 0 <= kind < MESSAGE:
            raise QueueError(f"{self._address}: this is not the TCP port of an nsqd")
        if len(buffer) < 4 + size:
            return None
        data = bytes(buffer[_HEAD_SIZE : 4 + size])
        del buffer[: 4 + size]
        return kind, data

    def _expect(self, wanted: bytes, what: str, deadline: float) -> None:
        answer = self._response(what, deadline)
        if answer != wanted:
            raise QueueError(f"{self._address}: {what} was answered with {answer[:100]!r}")

    # taking

    def ready(self, count: int) -> None:
        """How many messages may be in flight; of more than nsqd allows, as many as that."""
        count = min(count, self.max_rdy_count)
        if count != self._ready:
            self._ready = count
            self._send(wire.rdy(count))

    @property
    def waiting(self) -> int:
        """Messages that have come and were not taken yet."""
        return len(self._starts) - len(self._others)

    @property
    def waiting_bytes(self) -> int:
        return self._scanned

    def receive(self, seconds: float) -> bool:
        """Wait for more, at most so long. False if nothing came."""
        came = self._pull(seconds)
        self._scan()
        while self._responses:
            self._note(*self._responses.pop(0))
        return came

    def take(self) -> Taken:
        """All that has come."""
        with memoryview(self._buffer) as view:
            data = bytes(view[: self._scanned])
        del self._buffer[: self._scanned]
        starts, others = self._starts, self._others
        self._starts, self._others, self._scanned = [], set(), 0
        return _decode(data, starts, others)

    def stop_taking(self, seconds: float) -> None:
        """Ask for no more, and wait until nothing more can come. What came is there for take(). Again it does
        nothing."""
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
                self._note(kind, data)
            if not self._pull(deadline - time.monotonic()):
                raise Away(f"{self._address}: CLS was not answered in time")

    def finish(self, ids: bytes) -> None:
        """FIN, each of them."""
        if ids:
            self._send(_commands(b"FIN ", ids, b"\n"))

    def requeue(self, ids: bytes) -> None:
        if ids:
            self._send(_commands(b"REQ ", ids, b" 0\n"))

    def prove(self) -> bool:
        """Whether nsqd has carried out all that was sent, and every FIN was in time: it reads our stream to
        its end before it ends its own. The connection is done with afterwards."""
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
            logger.info("%s: the last FINs are not certain: %s", self._address, error)
        return False

    def _note(self, kind: int, data: bytes) -> None:
        if kind != ERROR:
            return
        if data.startswith(b"E_FIN_FAILED"):
            self.failed_fins += 1
        elif not data.startswith((b"E_REQ_FAILED", b"E_TOUCH_FAILED")):
            # Any other ends the connection.
            raise Away(f"{self._address}: {data.decode('utf-8', 'replace')}")

    # bytes

    def _scan(self) -> None:
        """Find the frames that are whole."""
        buffer, position, starts = self._buffer, self._scanned, self._starts
        unpack, available = _HEAD.unpack_from, len(self._buffer)
        while available - position >= _HEAD_SIZE:
            size, kind = unpack(buffer, position)
            end = position + 4 + size
            if end > available and 0 <= size <= _LONGEST:
                break
            if kind != MESSAGE or not 4 + _MESSAGE_HEAD <= size <= _LONGEST:
                if not 4 <= size <= _LONGEST or not 0 <= kind < MESSAGE:
                    raise Away(f"{self._address}: a frame of type {kind} with {size} bytes")
                self._others.add(len(starts))
                self._responses.append((kind, bytes(buffer[position + _HEAD_SIZE : end])))
            starts.append(position)
            position = end
        self._scanned = position
        if (RESPONSE, wire.HEARTBEAT) in self._responses:
            self._responses.remove((RESPONSE, wire.HEARTBEAT))
            self._send(wire.NOP)

    def _pull(self, seconds: float) -> bool:
        """Read what there is. False if nothing came in time."""
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
            raise Away(f"{self._address}: {_reason(error)}") from error
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
            raise _NotOfTheLayer(f"{self._address}: {error}") from error
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
        """Goes on reading meanwhile: an nsqd that cannot get rid of its messages may not listen."""
        left = memoryview(data)
        deadline = time.monotonic() + self._write_timeout
        while left:
            try:
                left = left[self._socket.send(left) :]
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise Away(f"{self._address}: {_reason(error)}") from error
            events = self._either.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                raise Away(f"{self._address}: timed out")
            if events[0][1] & select.POLLIN:
                self._read()


class _Ended(Away):
    """nsqd has ended its stream."""


class _NotOfTheLayer(Away):
    """Bytes that TLS or the compression cannot read; in TLS's handshake, a certificate that is not
    trusted."""


def _commands(before: bytes, ids: bytes, after: bytes) -> bytes:
    """The same command for each of the ids."""
    count = len(ids) // _ID_SIZE
    lines = np.empty((count, len(before) + _ID_SIZE + len(after)), np.uint8)
    lines[:, : len(before)] = np.frombuffer(before, np.uint8)
    lines[:, len(before) : len(before) + _ID_SIZE] = np.frombuffer(ids, np.uint8).reshape(count, _ID_SIZE)
    lines[:, len(before) + _ID_SIZE :] = np.frombuffer(after, np.uint8)
    return lines.tobytes()


def _decode(data: bytes, starts: list[int], others: set[int]) -> Taken:
    """Whole frames, one behind the other, as rows; those in `others` are no messages."""
    count = len(starts)
    if count == len(others):
        return Taken(nothing(), b"")
    edges = np.empty(count + 1, np.int32)
    edges[:count] = starts
    edges[count] = len(data)
    frames = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(edges), pa.py_buffer(data)])
    begins = edges[:count].astype(np.int64)
    if others:
        messages = np.ones(count, bool)
        messages[list(others)] = False
        frames = frames.filter(pa.array(messages))
        begins = begins[messages]
        count = len(begins)
    raw = np.frombuffer(data, np.uint8)
    heads = raw[begins[:, None] + np.arange(_HEAD_SIZE, _HEAD_SIZE + _MESSAGE_HEAD)]
    times = np.ascontiguousarray(heads[:, :8]).view(">i8").ravel() // 1000
    attempts = np.ascontiguousarray(heads[:, 8:10]).view(">u2").ravel()
    ids = heads[:, _ID].tobytes()
    places = np.arange(0, (count + 1) * _ID_SIZE, _ID_SIZE, dtype=np.int32)
    # Without an end it overflows.
    bodies = pc.binary_slice(frames, _HEAD_SIZE + _MESSAGE_HEAD, stop=(1 << 31) - 1)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(times.astype(np.int64)).cast(pa.timestamp("us", tz="UTC")),
            pa.array(attempts.astype(np.int32)),
            pa.StringArray.from_buffers(count, pa.py_buffer(places), pa.py_buffer(ids)),
            bodies,
        ],
        schema=CHUNK_SCHEMA,
    )
    return Taken(rows, ids)


def nothing() -> pa.RecordBatch:
    """No rows."""
    return pa.RecordBatch.from_arrays(
        [pa.array([], field.type) for field in CHUNK_SCHEMA], schema=CHUNK_SCHEMA
    )


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
