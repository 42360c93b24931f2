"""Transport layers of a connection: what they have in common, and how they stack.

A layer turns bytes into bytes and knows no socket. The caller hands it what arrived and what is to be sent,
and is told what to put on the wire. Bytes of the peer's that are not of the layer end as LayerError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, Protocol

from nsparq.errors import NsparqError

MAX_PIECE: Final = 262_144
"""No piece that a layer hands out is longer, however far its input expands. As long as what the event loop
reads at a time: shorter pieces cut MPUBs of a usual size in two, and those cost twice as much to read."""


class LayerError(NsparqError):
    """The peer sent what this layer cannot read. take_output() may have a last word for it: an alert."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Layer(Protocol):
    """One direction is decoded, the other encoded; the two know nothing of each other."""

    is_established: bool = True
    """Whether send() may be called: a layer with a handshake finishes that first, inside receive()."""
    is_ended: bool = False
    """Whether the peer has said inside the layer that nothing follows; to be taken as end of stream."""

    def receive(self, data: bytes) -> Iterator[bytes]:
        """Take what arrived; the decoded pieces come one by one, each decoded only when it is asked for.

        The bytes are kept at once. So a caller may stop before the end and go on later, with the same
        iterator or with receive(b""). Pieces are never empty.
        """
        ...

    def send(self, data: bytes | memoryview) -> bytes:
        """Encode, so that the peer can decode all of it at once. One large call beats many small ones."""
        ...

    def take_output(self) -> bytes:
        """What the layer itself has to say: handshake, alerts. Ask after each receive() and after close()."""
        return b""

    def close(self) -> None:
        """Nothing more will be sent; take_output() then has the farewell, if the layer knows one."""
        return None


class LayerStack:
    """Layers on top of each other, behaving as one. The outermost comes first: it is the one on the wire."""

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
        """The frame once for each layer, inside it and those around it: how NSQ confirms its upgrades."""
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
            # What it said itself, before the rest is sent through it.
            own = layer.take_output()
            data = own + layer.send(data) if data else own
        return data

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


def _decode_through(layer: Layer, pieces: Iterator[bytes]) -> Iterator[bytes]:
    # First what an earlier run, not followed to its end, left in the layer.
    return chain(layer.receive(b""), chain.from_iterable(map(layer.receive, pieces)))
