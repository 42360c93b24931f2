"""TLS, snappy and deflate under the load tool's connections, and what publishes and consumes
through them.

As in wire.py nothing here comes from the package under test. A load process must not be what limits
a broker: what is published was compressed beforehand, and checksums of what arrives are left to the
tests.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import struct
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cramjam
from crc32c import crc32c

from benchmarks.macro.roles import Consumer, OutOfTime, Progress, Replies, Span
from benchmarks.macro.wire import (
    MAGIC,
    RESPONSE,
    Address,
    BrokerRefused,
    encode_mpub,
    expect_ok,
    receive_frame,
)

RECEIVE_BYTES = 1 << 17
SNAPPY_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
SNAPPY_BLOCK = 65_536
COMPRESSED, STORED = 0, 1
VARIETY = 16
"""Different MPUBs that are sent in turns: the same one again would suit a compressor too well."""

Bytes = bytes | memoryview


@dataclass(frozen=True)
class Transport:
    """What IDENTIFY asks for."""

    name: str
    tls: bool = False
    snappy: bool = False
    deflate: bool = False


TRANSPORTS = (
    Transport("plain"),
    Transport("tls", tls=True),
    Transport("snappy", snappy=True),
    Transport("deflate", deflate=True),
    Transport("tls+snappy", tls=True, snappy=True),
    Transport("tls+deflate", tls=True, deflate=True),
)


class Coding(Protocol):
    def encode(self, data: Bytes) -> Bytes: ...

    def decode(self, data: bytes) -> Sequence[bytes]: ...


class Tls:
    """The standard library's TLS, in memory: one read of the socket may bring many records."""

    def __init__(self, connection: socket.socket, ca_file: str) -> None:
        context = ssl.create_default_context(cafile=ca_file)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(self._outgoing.read())
                data = connection.recv(RECEIVE_BYTES)
                if not data:
                    raise BrokerRefused("the broker closed the connection during the handshake") from None
                self._incoming.write(data)
        connection.sendall(self._outgoing.read())

    def encode(self, data: Bytes) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()

    def decode(self, data: bytes) -> list[bytes]:
        self._incoming.write(data)
        found: list[bytes] = []
        try:
            while piece := self._tls.read(16_384):
                found.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return found


class Snappy:
    """The framing format, in blocks as large as it allows."""

    def __init__(self) -> None:
        self._has_identified = False
        self._input = b""

    def encode(self, data: Bytes) -> bytes:
        start = b"" if self._has_identified else SNAPPY_IDENTIFIER
        self._has_identified = True
        return start + snappy_chunks(data)

    def decode(self, data: bytes) -> list[bytes]:
        data = self._input + data if self._input else data
        view = memoryview(data)
        position, found = 0, list[Any]()
        while len(data) - position >= 4:
            kind = data[position]
            end = position + 4 + int.from_bytes(data[position + 1 : position + 4], "little")
            if end > len(data):
                break
            if kind == COMPRESSED:
                found.append(cramjam.snappy.decompress_raw(view[position + 8 : end]))
            elif kind == STORED:
                found.append(data[position + 8 : end])
            position = end
        self._input = data[position:]
        return found


def snappy_chunks(data: Bytes) -> bytes:
    parts: list[Bytes] = []
    for start in range(0, len(data), SNAPPY_BLOCK):
        block = data[start : start + SNAPPY_BLOCK]
        checksum = crc32c(block)
        masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
        compressed = bytes(cramjam.snappy.compress_raw(block))
        kind, contents = (COMPRESSED, compressed) if len(compressed) < len(block) else (STORED, block)
        parts += struct.pack("<II", kind | len(contents) + 4 << 8, masked), contents
    return b"".join(parts)


class Deflate:
    def __init__(self, level: int) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)

    def encode(self, data: Bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decode(self, data: bytes) -> tuple[bytes]:
        return (self._decompressor.decompress(data),)


class LayeredConnection:
    """As much of a socket as the roles use, with the transport's layers inside."""

    def __init__(
        self, address: Address, transport: Transport, level: int, ca_file: str, timeout: float
    ) -> None:
        self._socket = socket.create_connection(address, timeout=timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._layers: list[Coding] = []  # the outermost first
        self._decoded: deque[bytes] = deque()
        self.fileno, self.gettimeout, self.settimeout = (
            self._socket.fileno,
            self._socket.gettimeout,
            self._socket.settimeout,
        )
        self.close = self._socket.close
        self._identify(transport, level)
        if transport.tls:
            self._begin(Tls(self._socket, ca_file))
        if transport.snappy:
            self._begin(Snappy())
        if transport.deflate:
            self._begin(Deflate(level))

    def _identify(self, transport: Transport, level: int) -> None:
        wanted = {"tls_v1": transport.tls, "snappy": transport.snappy, "deflate": transport.deflate}
        fields = {
            "client_id": "load",
            "hostname": "load",
            "user_agent": "macro-benchmark/1",
            "feature_negotiation": True,
            "deflate_level": level,
            **wanted,
        }
        encoded = json.dumps(fields).encode()
        self._socket.sendall(MAGIC + b"IDENTIFY\n" + struct.pack(">i", len(encoded)) + encoded)
        kind, data = receive_frame(self._socket)
        agreed = json.loads(data) if kind == RESPONSE else {}
        if any(agreed.get(name) != value for name, value in wanted.items()):
            raise BrokerRefused(f"{transport.name} was not agreed to: {data[:300]!r}")
        if transport.deflate and agreed["deflate_level"] != level:
            raise BrokerRefused(f"deflate level {level} was not agreed to: {agreed['deflate_level']}")

    def _begin(self, layer: Coding) -> None:
        # The broker confirms all layers in one go: what came behind the last OK is of this layer
        # already.
        rest = b"".join(self._decoded)
        self._decoded.clear()
        self._layers.append(layer)
        if rest:
            self._decoded.extend(layer.decode(rest))
        expect_ok(self)  # type: ignore[arg-type]

    @property
    def has_decoded(self) -> bool:
        """Whether there is something to receive that the system knows nothing of."""
        return bool(self._decoded)

    def sendall(self, data: Bytes) -> None:
        for layer in reversed(self._layers):
            data = layer.encode(data)
        self._socket.sendall(data)

    def send_compressed(self, data: bytes) -> None:
        """Bytes that only TLS, if there is any, has yet to see."""
        tls = self._layers[0] if self._layers else None
        self._socket.sendall(tls.encode(data) if isinstance(tls, Tls) else data)

    def recv(self, size: int) -> bytes:
        if not self._layers:
            return self._socket.recv(size)
        if not self._fill():
            return b""
        piece = self._decoded.popleft()
        if len(piece) > size:
            self._decoded.appendleft(bytes(piece)[size:])
        return bytes(piece)[:size]

    def recv_into(self, view: memoryview) -> int:
        """As much as is there and fits, from at most one read of the socket."""
        if not self._layers:
            return self._socket.recv_into(view)
        if not self._fill():
            return 0
        filled, room = 0, len(view)
        decoded = self._decoded
        while decoded and filled < room:
            piece = decoded.popleft()
            size = len(piece)
            if filled + size > room:
                size = room - filled
                rest = memoryview(piece)
                decoded.appendleft(rest[size:])  # type: ignore[arg-type]
                piece = rest[:size]  # type: ignore[assignment]
            view[filled : filled + size] = piece
            filled += size
        return filled

    def _fill(self) -> bool:
        while not self._decoded:
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                return False
            pieces: Sequence[bytes] = (data,)
            for layer in self._layers:
                pieces = layer.decode(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            self._decoded.extend(piece for piece in pieces if piece)
        return True


def make_bodies(kind: str, count: int, seed: int) -> list[bytes]:
    """Of one size: `random`, 100 bytes that nothing can compress, or `json`, 400 that are mostly
    words."""
    source = random.Random(seed)
    if kind == "random":
        return [source.randbytes(100) for _ in range(count)]
    return [json_body(source, 400) for _ in range(count)]


def json_body(source: random.Random, size: int) -> bytes:
    event = {
        "id": f"{source.getrandbits(128):032x}",
        "type": source.choice(["page_view", "add_to_cart", "checkout", "search"]),
        "timestamp": f"2026-03-21T12:{source.randrange(60):02d}:07.{source.randrange(1000):03d}Z",
        "user": {"id": source.randrange(10**7), "country": source.choice(["DE", "FR", "US", "JP"])},
        "session": f"{source.getrandbits(64):016x}",
        "url": f"https://shop.example.com/products/{source.randrange(10**5)}?ref=campaign-{source.randrange(50)}",
        "price_cents": source.randrange(10**5),
        "tags": source.sample(["new", "sale", "mobile", "desktop", "beta", "returning"], 3),
    }
    words = ["order", "shipped", "fast", "delivery", "blue", "size", "returned", "gift", "thanks", "again"]
    body = json.dumps(event)[:-1] + ', "note": "'
    while len(body) < size:
        body += source.choice(words) + " "
    return (body[: size - 2] + '"}').encode()


def compress_mpubs(commands: Sequence[bytes], transport: Transport, level: int) -> list[bytes]:
    """Each as it goes out, so that they can be sent in any order and any number of times."""
    if transport.snappy:
        return [snappy_chunks(command) for command in commands]
    if transport.deflate:
        # A full flush makes the receiver forget what was before, so each can follow any other.
        compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        compressor.flush(zlib.Z_FULL_FLUSH)
        return [compressor.compress(command) + compressor.flush(zlib.Z_FULL_FLUSH) for command in commands]
    return list(commands)


class LayeredPublisher:
    """MPUB after MPUB, compressed beforehand, with at most `window` of them unanswered."""

    def __init__(
        self,
        address: Address,
        topic: str,
        count: int,
        kind: str,
        batch: int,
        window: int,
        deadline: float,
        transport: Transport,
        level: int,
        ca_file: str,
    ) -> None:
        self.count, self.batch, self.window, self.deadline = count, batch, window, deadline
        commands = [
            encode_mpub(topic, make_bodies(kind, batch, seed)) for seed in range(min(VARIETY, count // batch))
        ]
        self.commands = compress_mpubs(commands, transport, level)
        self.layered = LayeredConnection(address, transport, level, ca_file, deadline)
        if transport.snappy:
            self.layered.send_compressed(SNAPPY_IDENTIFIER)

    def run(self, progress: Progress) -> Span:
        connection, replies, commands = self.layered, Replies(), self.commands
        unanswered, to_send = 0, self.count // self.batch
        first = time.monotonic_ns()
        give_up = first + int(self.deadline * 1e9)
        while to_send:
            connection.send_compressed(commands[to_send % len(commands)])
            to_send -= 1
            unanswered += 1
            # Wait for room in the window, and at the end for everything.
            while unanswered >= (self.window if to_send else 1):
                unanswered -= replies.receive_from(connection)  # type: ignore[arg-type]
                if time.monotonic_ns() > give_up:
                    raise OutOfTime(f"publishing: {to_send} of {self.count // self.batch} MPUBs not sent")
        last = time.monotonic_ns()
        connection.close()
        return Span(self.count, first, last)


class LayeredConsumer(Consumer):
    """Takes and finishes messages as any consumer does, through the layers."""

    def __init__(self, *, transport: Transport, level: int, ca_file: str, **others: Any) -> None:
        self.through = (transport, level, ca_file)
        super().__init__(**others)

    def connect(self, address: Address, timeout: float, headers: bool = False) -> socket.socket:
        return LayeredConnection(address, *self.through, timeout)  # type: ignore[return-value]

    def has_more(self, connection: socket.socket) -> bool:
        return connection.has_decoded  # type: ignore[attr-defined,no-any-return]
