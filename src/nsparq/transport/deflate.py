"""Deflate for either side of a connection. Expansion is bounded: a piece of output has at most
MAX_PIECE bytes, and is decoded only when it is read.

If ISA-L is installed (it comes with the server), it is used up to level 6: it is eight times as
fast as zlib at that level, and its stream is 5 % longer. Higher levels use zlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

from nsparq.transport.layers import MAX_PIECE, Layer, LayerError

try:
    from isal import isal_zlib
except ImportError:
    isal_zlib = None  # type: ignore[assignment]  # optional

_ERRORS: Final[Any] = (zlib.error,) if isal_zlib is None else (zlib.error, isal_zlib.error)
_SLOW_FROM: Final = 7
"""From this level on, size matters more than speed."""


def _compressor(level: int) -> Any:
    if isal_zlib is None or level >= _SLOW_FROM:
        return zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return isal_zlib.compressobj(1 if level <= 3 else 2, zlib.DEFLATED, -zlib.MAX_WBITS)


class DeflateLayer(Layer):
    """One raw DEFLATE stream (RFC 1951) in each direction; each send() ends with a sync flush."""

    def __init__(self, level: int = 6) -> None:
        self._compressor = _compressor(level)
        self._decompressor: Any = (isal_zlib or zlib).decompressobj(-zlib.MAX_WBITS)
        self._input = b""
        self._has_more = False
        """Whether there is more input, or output that did not fit into the last piece."""

    def send(self, data: bytes | memoryview) -> bytes:
        if not data:
            return b""
        encoded: bytes = self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        return encoded

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
            piece: bytes = decompressor.decompress(self._input, MAX_PIECE)
        except _ERRORS as error:
            raise LayerError("deflate: corrupt stream") from error
        self._input = decompressor.unconsumed_tail
        self._has_more = len(piece) == MAX_PIECE or bool(self._input)
        if decompressor.eof:
            self.is_ended, self._has_more, self._input = True, False, b""
        return piece
