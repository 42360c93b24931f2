"""Bytes that have arrived on one connection and that its protocol has not taken yet.

Mostly there are none: the connection hands them to the protocol at once. They are kept here while a
command waits for something, and while transport layers have to decode them first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from nsparq.server.outbox import Outbox
from nsparq.wire.server import ServerProtocol


class Inbox:
    """The receiving side of one connection."""

    def __init__(self, protocol: ServerProtocol, outbox: Outbox) -> None:
        self.has_more = False
        """Whether there are bytes that the protocol has not taken."""
        self.is_ended = False
        """Whether the client has ended the conversation inside the layers."""
        self._protocol = protocol
        self._outbox = outbox
        self._received: deque[bytes] = deque()
        self._decoded: Iterator[bytes] | None = None
        """Pieces that the layers decode, one at a time."""

    def keep(self, data: bytes) -> None:
        """Bytes for later."""
        self._received.append(data)
        self.has_more = True

    def take(self) -> bytes:
        """The next piece, decoded if there are layers. It may be empty. Raises LayerError."""
        layers = self._outbox.layers
        if self._decoded is None:
            data = self._received.popleft()
            if layers is None:
                self.has_more = bool(self._received)
                return data
            self._decoded = layers.receive(data)
        piece = next(self._decoded, b"")
        if not piece:
            assert layers is not None
            self._decoded = None
            self.has_more = bool(self._received)
            self._outbox.write_layer_output()
            self.is_ended = layers.is_ended
        if not self._outbox.are_layers_confirmed:
            self._outbox.confirm_layers()
        return piece

    def start_layers(self) -> None:
        """The layers of the outbox are under the conversation from here on. A client that did not
        wait for our answer has sent bytes of theirs already."""
        rest = self._protocol.take_rest()
        if rest:
            self._received.appendleft(rest)
            self.has_more = True

    def clear(self) -> None:
        """Drop everything that has arrived."""
        self._protocol.discard()
        self._received.clear()
        self._decoded = None
        self.has_more = False
