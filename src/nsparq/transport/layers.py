"""Transport layers of a connection: their interface, and how they stack.

A layer turns bytes into bytes and has no socket. The caller gives it the bytes that arrived and
those to send, and gets the bytes for the wire. Bytes of the peer that a layer cannot read raise
LayerError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, Protocol

from nsparq.errors import NsparqError

MAX_PIECE: Final = 262_144
"""Longest piece that a layer returns, however much its input expands. The same as one read of the
event loop: shorter pieces would split MPUBs of the usual size, which then take twice as long to
parse."""


class LayerError(NsparqError):
    """The peer sent unreadable bytes. take_output() may have an alert for it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Layer(Protocol):
    """Decodes one direction and encodes the other, independently."""

    is_established: bool = True
    """Whether send() may be called. A handshake has to finish first, inside receive()."""
    is_ended: bool = False
    """Whether the peer has ended the stream inside the layer."""

    def receive(self, data: bytes) -> Iterator[bytes]:
        """Take the bytes that arrived, and decode them piece by piece as the iterator is read.

        The layer keeps the bytes. So the caller may stop early and continue later, with the same
        iterator or with receive(b""). Pieces are never empty.
        """
        ...

    def send(self, data: bytes | memoryview) -> bytes:
        """Encode and flush. One large call is faster than many small ones."""
        ...

    def take_output(self) -> bytes:
        """The layer's own bytes (handshake, alerts), after each receive() and after close()."""
        return b""

    def close(self) -> None:
        """End the sending direction; take_output() then has the closing bytes, if any."""
        return None


class LayerStack:
    """Several layers as one. The first one is the outermost: its bytes are on the wire."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        assert layers
        self.layers = tuple(layers)
        self._inward = self.layers[1:]
        self._outward = self.layers[::-1]

    @property
    def is_established(self) -> bool:
        return all(layer.is_established for layer in self.layers)

    @property
    def is_ended(self) -> bool:
        return any(layer.is_ended for layer in self.layers)

    def receive(self, data: bytes) -> Iterator[bytes]:
        pieces = self.layers[0].receive(data)
        for layer in self._inward:
            pieces = _decode_through(layer, pieces)
        return pieces

    def send(self, data: bytes | memoryview) -> bytes:
        for layer in self._outward:
            data = layer.send(data)
        return bytes(data)

    def confirm(self, frame: bytes) -> bytes:
        """The frame once for each layer, encoded by it and those around it, as in NSQ."""
        confirmed = []
        for depth in range(len(self.layers)):
            data = frame
            for layer in self.layers[depth::-1]:
                data = layer.send(data)
            confirmed.append(data)
        return b"".join(confirmed)

    def take_output(self) -> bytes:
        data = b""
        for layer in self._outward:
            # Its own bytes come before those of the inner layers.
            own = layer.take_output()
            data = own + layer.send(data) if data else own
        return data

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


def _decode_through(layer: Layer, pieces: Iterator[bytes]) -> Iterator[bytes]:
    # First the bytes that an earlier iterator, not read to its end, left in the layer.
    return chain(layer.receive(b""), chain.from_iterable(map(layer.receive, pieces)))
