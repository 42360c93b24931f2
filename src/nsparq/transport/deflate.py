"""Deflate for either side of a connection. A piece of output has at most MAX_PIECE bytes, and the next one is
made only when it is asked for: expansion is bounded."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from nsparq.transport.layers import MAX_PIECE, Layer, LayerError


class DeflateLayer(Layer):
    """One raw DEFLATE stream (RFC 1951) in each direction; each send() ends with a sync flush."""

    def __init__(self, level: int = 6) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        self._input = b""
        self._has_more = False
        """Whether there is input, or output that did not fit the last piece."""

    def send(self, data: bytes | memoryview) -> bytes:
        if not data:
            return b""
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def receive(self, data: bytes) -> Iterator[bytes]:
        if data and not self.is_ended:
            self._input = self._input + data if self._input else data
            self._has_more = True
        return iter(self._read, b"")

    def _read(self) -> bytes:
        if not self._has_more:
            return b""
        decompressor = self._decompressor
        try:
            piece = decompressor.decompress(self._input, MAX_PIECE)
        except zlib.error as error:
            raise LayerError("deflate: corrupt stream") from error
        self._input = decompressor.unconsumed_tail
        self._has_more = len(piece) == MAX_PIECE
        if decompressor.eof:
            self.is_ended, self._has_more, self._input = True, False, b""
        return piece
