"""Snappy for either side of a connection.

Expansion is bounded: a piece of output has at most MAX_PIECE bytes, and is decoded only when it is
read. Less than one chunk of input is kept, whatever length the chunk claims.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import cramjam
from crc32c import crc32c

from nsparq.transport.layers import MAX_PIECE, Layer, LayerError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The snappy framing format, a stream of chunks:
#
#   0         1                         4              8
#   | type    | length, little endian   | checksum     | contents, length - 4 bytes |
#
# The checksum is a masked CRC-32C of the uncompressed contents. Only data chunks have one.
COMPRESSED: Final = 0x00
UNCOMPRESSED: Final = 0x01
SKIPPABLE: Final = 0x80
"""This type and those above may be skipped; padding (0xfe) is one of them."""
IDENTIFIER: Final = 0xFF
STREAM_IDENTIFIER: Final = b"\xff\x06\x00\x00sNaPpY"
MAX_CHUNK: Final = 65_536
MAX_ENCODED_CHUNK: Final = 76_490
"""Largest compressed form of 65,536 bytes."""
_CHUNK_HEADER: Final = struct.Struct("<II")

_compress = cramjam.snappy.compress_raw
_decompress = cramjam.snappy.decompress_raw
_decompressed_length = cramjam.snappy.decompress_raw_len


def _masked_checksum(data: Buffer) -> int:
    checksum: int = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _chunk_header(kind: int, size: int, contents: Buffer) -> bytes:
    return _CHUNK_HEADER.pack(kind | size + 4 << 8, _masked_checksum(contents))


class SnappyLayer(Layer):
    """Snappy's framing format over raw snappy."""

    def __init__(self) -> None:
        self._is_identified = False
        """Whether our stream identifier was sent."""
        self._peer_is_identified = False
        self._input = memoryview(b"")
        self._arrived: list[bytes | memoryview] = []
        """Input after `_input`, joined to it only when a chunk is complete."""
        self._held = 0
        """Number of bytes in `_input` and `_arrived`."""
        self._wanted = 4
        """Bytes needed for the next step: the header of a chunk, or the whole chunk."""
        self._to_skip = 0
        """Bytes still to arrive of a chunk that is skipped."""
        self._failure = ""
        """Why nothing more can be read. A text: an error's traceback would keep the layer alive."""

    def send(self, data: bytes | memoryview) -> bytes:
        if not data:
            return b""
        parts: list[Buffer] = []
        if not self._is_identified:
            self._is_identified = True
            parts.append(STREAM_IDENTIFIER)
        rest = memoryview(data)
        while rest:
            block, rest = rest[:MAX_CHUNK], rest[MAX_CHUNK:]
            compressed = _compress(block)
            if len(compressed) < len(block) - len(block) // 8:
                parts += _chunk_header(COMPRESSED, len(compressed), block), compressed
            else:
                parts += _chunk_header(UNCOMPRESSED, len(block), block), block
        return b"".join(parts)

    def receive(self, data: bytes) -> Iterator[bytes]:
        if self._to_skip and data:
            skipped = min(self._to_skip, len(data))
            self._to_skip -= skipped
            data = data[skipped:]
        if data:
            self._arrived.append(data)
            self._held += len(data)
        return iter(self._read, b"")

    def _read(self) -> bytes:
        """Join complete chunks into one piece. Clients flush often, so chunks are small."""
        if self._failure:
            raise LayerError(self._failure)
        if self._held < self._wanted:
            return b""
        if self._arrived:
            if self._input:
                self._arrived.insert(0, self._input)
            self._input = memoryview(b"".join(self._arrived))
            self._arrived.clear()
        pieces: list[Buffer] = []
        try:
            self._decode_chunks(pieces)
        except LayerError as error:
            self._failure = error.reason
            if not pieces:
                raise
        return b"".join(pieces)

    def _decode_chunks(self, pieces: list[Buffer]) -> None:
        data, position, end = self._input, 0, self._held
        room = MAX_PIECE
        self._wanted = 4
        try:
            while end - position >= 4:
                kind = data[position]
                length = data[position + 1] | data[position + 2] << 8 | data[position + 3] << 16
                # Check it before its bytes arrive: a refused chunk need not be kept.
                self._check_header(kind, length)
                stop = position + 4 + length
                if SKIPPABLE <= kind < IDENTIFIER:
                    self._to_skip = max(0, stop - end)
                    position = min(stop, end)
                    continue
                if stop > end:
                    self._wanted = stop - position
                    break
                if kind == IDENTIFIER:
                    if bytes(data[position:stop]) != STREAM_IDENTIFIER:
                        raise LayerError("snappy: wrong stream identifier")
                    self._peer_is_identified = True
                else:
                    contents: Buffer = data[position + 8 : stop]
                    size = _contents_length(contents) if kind == COMPRESSED else length - 4
                    if size > room:
                        break
                    if kind == COMPRESSED:
                        contents = _decompressed(contents)
                    if _CHUNK_HEADER.unpack_from(data, position)[1] != _masked_checksum(contents):
                        raise LayerError("snappy: wrong checksum")
                    pieces.append(contents)
                    room -= size
                position = stop
        finally:
            self._held = end - position
            # Copy a short rest: a view would keep all of the input alive.
            self._input = (
                data[position:] if self._held >= self._wanted else memoryview(bytes(data[position:]))
            )

    def _check_header(self, kind: int, length: int) -> None:
        if kind == IDENTIFIER:
            if length != 6:
                raise LayerError("snappy: wrong stream identifier")
        elif not self._peer_is_identified:
            raise LayerError("snappy: no stream identifier")
        elif kind >= SKIPPABLE:
            pass
        elif kind > UNCOMPRESSED:
            raise LayerError(f"snappy: chunk of unknown type {kind:#04x}")
        elif not 4 <= length <= 4 + (MAX_ENCODED_CHUNK if kind == COMPRESSED else MAX_CHUNK):
            raise LayerError(f"snappy: chunk of {length} bytes")


def _contents_length(compressed: Buffer) -> int:
    """The uncompressed length that a chunk claims, read before decompression."""
    try:
        size: int = _decompressed_length(compressed)
    except cramjam.DecompressionError as error:
        raise LayerError("snappy: corrupt chunk") from error
    if size > MAX_CHUNK:
        raise LayerError(f"snappy: chunk that expands to {size} bytes")
    return size


def _decompressed(compressed: Buffer) -> Buffer:
    try:
        contents: Buffer = _decompress(compressed)
    except cramjam.DecompressionError as error:
        raise LayerError("snappy: corrupt chunk") from error
    return contents
