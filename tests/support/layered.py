"""A raw V2 connection with TLS, snappy and deflate. It shares no code with the package under test.

with LayeredConnection(address) as connection:
    reply = connection.upgrade(tls=context, snappy=True)
                                    IDENTIFY, start each layer, wait for each OK
    connection.pub(...)             everything else like RawConnection
    connection.begin_tls(context, server_name), begin_snappy(), begin_deflate()
                                    the steps, one by one
    connection.wire                 every byte that came since the first layer began
    connection.snappy.chunks        (type, contents) of the chunks received
"""

from __future__ import annotations

import ssl
import struct
import time
import zlib
from typing import Any, Protocol

import cramjam
from crc32c import crc32c

from .connection import ConnectionClosed, RawConnection, wait_readable

IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"


class Coding(Protocol):
    def encode(self, data: bytes) -> bytes: ...

    def decode(self, data: bytes) -> bytes: ...


def snappy_checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def snappy_chunk(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(3, "little") + body


class Snappy:
    """The framing format. Clients differ in what they send, so it can be chosen."""

    def __init__(self, *, identify_always: bool = False, stored: bool = False, before: bytes = b"") -> None:
        self.identify_always = identify_always
        self.stored = stored
        self.before = before  # goes before each chunk of data
        self.chunks: list[tuple[int, bytes]] = []
        self._has_identified = False
        self._input = b""

    def encode(self, data: bytes) -> bytes:
        parts = []
        if self.identify_always or not self._has_identified:
            parts.append(IDENTIFIER)
            self._has_identified = True
        for start in range(0, len(data), 65_536):
            block = data[start : start + 65_536]
            body = block if self.stored else bytes(cramjam.snappy.compress_raw(block))
            parts += self.before, snappy_chunk(int(self.stored), snappy_checksum(block) + body)
        return b"".join(parts)

    def decode(self, data: bytes) -> bytes:
        self._input += data
        found = []
        while len(self._input) >= 4:
            kind, length = self._input[0], int.from_bytes(self._input[1:4], "little")
            if len(self._input) < 4 + length:
                break
            body, self._input = self._input[4 : 4 + length], self._input[4 + length :]
            contents = body
            if kind in (0, 1):
                contents = body[4:] if kind else bytes(cramjam.snappy.decompress_raw(body[4:]))
                assert body[:4] == snappy_checksum(contents)
                assert len(contents) <= 65_536
                found.append(contents)
            else:
                assert (kind, body) == (0xFF, b"sNaPpY")
            self.chunks.append((kind, contents))
            assert self.chunks[0][0] == 0xFF, "no stream identifier"
        return b"".join(found)


class Deflate:
    def __init__(self, level: int = 6) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -15)
        self._decompressor = zlib.decompressobj(-15)

    def encode(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decode(self, data: bytes) -> bytes:
        return self._decompressor.decompress(data)


class Tls:
    """A client of the standard library, in memory."""

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self.is_ended = False
        """Whether the server sent close_notify before it closed."""

    def shake(self, data: bytes) -> tuple[bytes, bool]:
        """The bytes to send next, and whether the handshake is done."""
        self._incoming.write(data)
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return self._outgoing.read(), False
        return self._outgoing.read(), True

    def encode(self, data: bytes) -> bytes:
        self.tls.write(data)
        return self._outgoing.read()

    def decode(self, data: bytes) -> bytes:
        self._incoming.write(data)
        found = []
        try:
            while piece := self.tls.read(65_536):
                found.append(piece)
            self.is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_ended = True
        return b"".join(found)


class LayeredConnection(RawConnection):
    """See the module docstring."""

    tls: Tls | None = None
    snappy: Snappy | None = None

    def __init__(self, address: Any, **arguments: Any) -> None:
        self._codings: list[Coding] = []  # the outermost first
        self.wire = bytearray()
        super().__init__(address, **arguments)

    def upgrade(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        snappy: bool | Snappy = False,
        deflate: bool = False,
        **fields: Any,
    ) -> dict[str, Any]:
        reply = self.identify(tls_v1=tls is not None, snappy=bool(snappy), deflate=deflate, **fields)
        assert (reply["tls_v1"], reply["snappy"], reply["deflate"]) == (
            tls is not None,
            bool(snappy),
            deflate,
        )
        if tls is not None:
            self.begin_tls(tls)
            self.expect_ok()
        if snappy:
            self.begin_snappy(snappy if isinstance(snappy, Snappy) else None)
            self.expect_ok()
        if deflate:
            self.begin_deflate()
            self.expect_ok()
        return reply

    def begin_tls(
        self, context: ssl.SSLContext, server_name: str = "localhost", *, begun: Tls | None = None
    ) -> None:
        """The handshake. Raises ssl.SSLError, or ConnectionClosed if the server closed the
        connection.

        With `begun` its first bytes were already sent.
        """
        layer = begun or Tls(context, server_name)
        if begun is None:
            self.socket.sendall(layer.shake(b"")[0])
        done = False
        while not done:
            received, self._input = bytes(self._input), bytearray()
            if not received:
                if not wait_readable(self.socket, self.timeout):
                    raise TimeoutError("no answer to the handshake")
                received = self.socket.recv(1 << 16)
            if not received:
                raise ConnectionClosed
            self.wire += received
            answer, done = layer.shake(received)
            self.socket.sendall(answer)
        self.tls = layer
        self._begin(layer)

    def begin_snappy(self, layer: Snappy | None = None) -> None:
        self.snappy = layer or Snappy()
        self._begin(self.snappy)

    def begin_deflate(self, layer: Deflate | None = None) -> None:
        self._begin(layer or Deflate())

    def _begin(self, layer: Coding) -> None:
        self._codings.append(layer)
        # Bytes after the last frame already belong to the new layer.
        rest, self._input = bytes(self._input), bytearray()
        if len(self._codings) == 1:
            self.wire += rest
        self._input += layer.decode(rest)

    def send(self, data: bytes) -> None:
        for layer in reversed(self._codings):
            data = layer.encode(data)
        super().send(data)

    def send_wire(self, data: bytes) -> None:
        """Send bytes without the layers."""
        super().send(data)

    def _fill(self, count: int, deadline: float) -> None:
        while len(self._input) < count:
            remaining = max(0.0, deadline - time.monotonic())
            if not wait_readable(self.socket, remaining):
                raise TimeoutError(f"waited for {count} bytes, have {bytes(self._input[:64])!r}")
            data = self.socket.recv(1 << 20)
            if not data:
                assert not self._input, f"stream ended inside a frame: {bytes(self._input[:64])!r}"
                raise ConnectionClosed
            self.wire += data if self._codings else b""
            for layer in self._codings:
                data = layer.decode(data)
            self._input += data
