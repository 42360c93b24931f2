"""What has arrived on one connection, as commands in order, through whatever transport layers there are.

A connection that has to wait stops taking commands, and goes on later where it stopped: the iterator that it
was given keeps its place, and what arrives meanwhile comes behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from nsparq.server.outbox import Outbox
from nsparq.transport.layers import LayerStack
from nsparq.wire.commands import Command
from nsparq.wire.server import ServerProtocol

Step = Command | None
"""A command, or None after a piece of decoded bytes: a good moment to see whether others should be served."""


class Inbox:
    """The receiving side of one connection."""

    def __init__(self, protocol: ServerProtocol, outbox: Outbox) -> None:
        self.protocol = protocol
        self.is_ended = False
        """Whether the peer has ended the conversation inside the layers."""
        self._outbox = outbox
        self._received: deque[bytes] = deque()
        self._steps: Iterator[Step] | None = None
        """What has arrived and has not been taken."""

    @property
    def has_more(self) -> bool:
        """Whether something has arrived that was not taken."""
        return self._steps is not None or bool(self._received)

    def receive(self, data: bytes) -> Iterator[Step]:
        """Take bytes when nothing else is left, and give the commands in them. Raises LayerError, and what
        ServerProtocol raises. Whoever stops before the end gives the rest back with put_back()."""
        if self._outbox.layers is None:
            return iter(self.protocol.receive_data(data))
        self._received.append(data)
        return self._drain()

    def keep(self, data: bytes) -> None:
        """Bytes that cannot be looked at now."""
        self._received.append(data)

    def put_back(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def take_back(self) -> Iterator[Step]:
        """What was put back; or, if nothing was, what has arrived since."""
        steps, self._steps = self._steps, None
        return self._drain() if steps is None else steps

    def _drain(self) -> Iterator[Step]:
        while self._received:
            data = self._received.popleft()
            layers = self._outbox.layers
            if layers is None:
                yield from self.protocol.receive_data(data)
            else:
                yield from self._decode(layers, data)

    def _decode(self, layers: LayerStack, data: bytes) -> Iterator[Step]:
        for piece in layers.receive(data):
            self._confirm()
            yield from self.protocol.receive_data(piece)
            yield None
        self._outbox.write_layer_output()
        self._confirm()
        self.is_ended = layers.is_ended

    def _confirm(self) -> None:
        if not self._outbox.are_layers_confirmed:
            self._outbox.confirm_layers()

    def start_layers(self) -> None:
        """The layers of the outbox are under the conversation from here on. A client that did not wait for
        our answer has sent bytes of theirs already."""
        rest = self.protocol.take_rest()
        if rest:
            self._received.appendleft(rest)

    def clear(self) -> None:
        """Drop what has arrived."""
        self.protocol.discard()
        self._received.clear()
        self._steps = None
