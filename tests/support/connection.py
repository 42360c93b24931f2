"""A raw V2 connection: tests send bytes and read frames.

It shares no code with the package under test, so that a mistake in our codec cannot hide itself.
Every read has a deadline.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .polling import DEADLINE

MAGIC = b"  V2"
RESPONSE, ERROR, MESSAGE, MESSAGE_WITH_HEADERS = 0, 1, 2, 3
HEARTBEAT = b"_heartbeat_"
UNKNOWN_ID = b"0000000000000000"

Address = tuple[str, int] | str


def family_of(address: Address) -> socket.AddressFamily:
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def wait_readable(connection: socket.socket, seconds: float) -> bool:
    """With poll: select cannot handle descriptors above 1023."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Frame(NamedTuple):
    type: int
    data: bytes


class Message(NamedTuple):
    timestamp_ns: int
    attempts: int
    id: bytes
    body: bytes
    headers: dict[str, str] = {}


class ConnectionClosed(Exception):
    """The server ended the stream while a frame was expected."""


def as_bytes(value: bytes | str | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def sized(body: bytes) -> bytes:
    """The body after its 32-bit length."""
    return struct.pack(">i", len(body)) + body


def multi(bodies: Iterable[bytes]) -> bytes:
    """The contents of an MPUB: count, then each message with its size (without the total size)."""
    bodies = list(bodies)
    return struct.pack(">i", len(bodies)) + b"".join(map(sized, bodies))


def header_block(headers: Mapping[str, str]) -> bytes:
    """Headers as one block of bytes."""
    pieces = []
    for name, value in headers.items():
        raw = value.encode()
        pieces.append(struct.pack(">B", len(name)) + name.encode() + struct.pack(">H", len(raw)) + raw)
    return b"".join(pieces)


def with_headers(body: bytes, headers: Mapping[str, str]) -> bytes:
    """A message of a publish with headers: the size of its header block, the block, the body."""
    return sized(header_block(headers)) + body


def parse_headers(block: bytes) -> dict[str, str]:
    found, position = {}, 0
    while position < len(block):
        size = block[position]
        name = block[position + 1 : position + 1 + size].decode()
        position += 1 + size
        (size,) = struct.unpack_from(">H", block, position)
        found[name] = block[position + 2 : position + 2 + size].decode()
        position += 2 + size
    return found


def parse_message(data: bytes, kind: int = MESSAGE) -> Message:
    timestamp_ns, attempts, message_id = struct.unpack_from(">qH16s", data)
    if kind == MESSAGE:
        return Message(timestamp_ns, attempts, message_id, data[26:])
    (size,) = struct.unpack_from(">I", data, 26)
    headers = parse_headers(data[30 : 30 + size])
    assert headers, "a message without headers comes as a frame of type 2"
    return Message(timestamp_ns, attempts, message_id, data[30 + size :], headers)


class RawConnection:
    """One blocking connection; the package docstring lists its methods."""

    def __init__(self, address: Address, *, magic: bytes = MAGIC, timeout: float = DEADLINE) -> None:
        self.timeout = timeout
        self.heartbeats_seen = 0
        self._input = bytearray()
        self._frames: deque[Frame] = deque()  # read ahead by barrier()
        family = family_of(address)
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.socket.settimeout(timeout)
            self.socket.connect(address)
            if family != socket.AF_UNIX:
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if magic:
                self.socket.sendall(magic)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def local_address(self) -> str:
        """host:port as the server's stats show this client."""
        host, port = self.socket.getsockname()[:2]
        return f"{host}:{port}"

    # Sending

    def send(self, data: bytes) -> None:
        self.socket.settimeout(self.timeout)
        self.socket.sendall(data)

    def command(self, name: bytes | str, *params: bytes | str | int, body: bytes | None = None) -> None:
        line = b" ".join(map(as_bytes, (name, *params))) + b"\n"
        self.send(line if body is None else line + sized(body))

    def rdy(self, count: int) -> None:
        self.command("RDY", count)

    def fin(self, message_id: bytes) -> None:
        self.command("FIN", message_id)

    def req(self, message_id: bytes, timeout_ms: int = 0) -> None:
        self.command("REQ", message_id, timeout_ms)

    def touch(self, message_id: bytes) -> None:
        self.command("TOUCH", message_id)

    def nop(self) -> None:
        self.command("NOP")

    def end_of_stream(self) -> None:
        """Half close: the server sees the end of the stream, and we can still read its answers."""
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    def abort(self) -> None:
        """Close with a reset, as a killed process may."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    # Whole exchanges

    def identify(self, *, feature_negotiation: bool = True, **fields: Any) -> dict[str, Any]:
        """IDENTIFY; the JSON reply, or an empty dict after a plain OK."""
        body = json.dumps({"feature_negotiation": feature_negotiation, **fields}).encode()
        self.command("IDENTIFY", body=body)
        if not feature_negotiation:
            self.expect_ok()
            return {}
        frame = self.read_frame()
        assert frame.type == RESPONSE, frame
        reply: dict[str, Any] = json.loads(frame.data)
        return reply

    def sub(self, topic: str, channel: str, rdy: int | None = None) -> None:
        self.command("SUB", topic, channel)
        self.expect_ok()
        if rdy is not None:
            self.rdy(rdy)

    def pub(self, topic: str, body: bytes) -> None:
        self.command("PUB", topic, body=body)
        self.expect_ok()

    def dpub(self, topic: str, defer_ms: int, body: bytes) -> None:
        self.command("DPUB", topic, defer_ms, body=body)
        self.expect_ok()

    def mpub(self, topic: str, bodies: Iterable[bytes]) -> None:
        self.command("MPUB", topic, body=multi(bodies))
        self.expect_ok()

    def cls(self) -> None:
        self.command("CLS")
        self.expect_response(b"CLOSE_WAIT")

    def barrier(self) -> None:
        """Return once the server has executed everything sent so far (subscribed connections only).

        FIN of an impossible id is answered with an error and is harmless. Earlier frames are kept.
        """
        self.fin(UNKNOWN_ID)
        wanted = Frame(ERROR, b"E_FIN_FAILED FIN " + UNKNOWN_ID + b" failed ID not in flight")
        ahead = []
        while (frame := self.read_frame()) != wanted:
            ahead.append(frame)
        self._frames.extend(ahead)

    # Reading

    def read_raw_frame(self, timeout: float | None = None) -> Frame:
        """The next frame, heartbeats included and unanswered. Raises TimeoutError or
        ConnectionClosed."""
        if self._frames:
            return self._frames.popleft()
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        self._fill(4, deadline)
        (size,) = struct.unpack_from(">i", self._input)
        assert 4 <= size <= 1 << 27, f"frame size {size}"
        self._fill(4 + size, deadline)
        (kind,) = struct.unpack_from(">i", self._input, 4)
        data = bytes(self._input[8 : 4 + size])
        del self._input[: 4 + size]
        return Frame(kind, data)

    def read_frame(self, timeout: float | None = None) -> Frame:
        """The next frame that is not a heartbeat; heartbeats are counted and answered with NOP."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            frame = self.read_raw_frame(max(0.0, deadline - time.monotonic()))
            if frame != (RESPONSE, HEARTBEAT):
                return frame
            self.heartbeats_seen += 1
            self.nop()

    def read_message(self, timeout: float | None = None) -> Message:
        frame = self.read_frame(timeout)
        assert frame.type in (MESSAGE, MESSAGE_WITH_HEADERS), frame
        return parse_message(frame.data, frame.type)

    def read_messages(
        self, count: int, timeout: float | None = None, *, finish: bool = False
    ) -> list[Message]:
        """Exactly count messages within timeout together; with finish, each is answered with
        FIN."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        messages: list[Message] = []
        while len(messages) < count:
            try:
                message = self.read_message(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(f"got {len(messages)} of {count} messages") from None
            messages.append(message)
            if finish:
                self.fin(message.id)
        return messages

    def expect_response(self, data: bytes, timeout: float | None = None) -> None:
        frame = self.read_frame(timeout)
        assert frame == (RESPONSE, data), f"expected response {data!r}, got {frame}"

    def expect_ok(self, timeout: float | None = None) -> None:
        self.expect_response(b"OK", timeout)

    def expect_error(self, text: bytes | str, timeout: float | None = None) -> None:
        """Exactly this error frame; the connection may stay open."""
        frame = self.read_frame(timeout)
        assert frame == (ERROR, as_bytes(text)), f"expected error {text!r}, got {frame}"

    def expect_fatal(self, text: bytes | str, timeout: float | None = None) -> None:
        """Exactly this error frame, then end of stream."""
        self.expect_error(text, timeout)
        self.expect_closed(timeout)

    def expect_closed(self, timeout: float | None = None) -> None:
        """End of stream (or a reset) without another frame, except heartbeats."""
        try:
            frame = self.read_frame(timeout)
        except (ConnectionClosed, ConnectionResetError, BrokenPipeError):
            return
        except TimeoutError:
            raise AssertionError("the server kept the connection open") from None
        raise AssertionError(f"expected end of stream, got {frame}")

    def read_to_end(self) -> bytes:
        """All bytes up to the end of stream, undecoded."""
        received = bytes(self._input)
        self._input.clear()
        while data := self.socket.recv(1 << 16):
            received += data
        return received

    def expect_silence(self, seconds: float) -> None:
        """No frame other than heartbeats for this long, and the connection stays open."""
        try:
            frame = self.read_frame(seconds)
        except TimeoutError:
            return
        raise AssertionError(f"expected silence, got {frame}")

    def _fill(self, count: int, deadline: float) -> None:
        """Read at least `count` bytes of input. They are kept if the deadline passes."""
        while len(self._input) < count:
            remaining = max(0.0, deadline - time.monotonic())
            if not wait_readable(self.socket, remaining):
                raise TimeoutError(f"waited for {count} bytes, have {bytes(self._input[:64])!r}")
            received = self.socket.recv(1 << 20)
            if not received:
                assert not self._input, f"stream ended inside a frame: {bytes(self._input[:64])!r}"
                raise ConnectionClosed
            self._input += received
