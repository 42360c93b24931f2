"""What one connection has to send, in order.

Replies leave in the order of their commands. A publish is answered when its topic has appended it,
so every reply behind it waits until then. Messages wait for no reply.

Frames are gathered during a turn of the event loop and sent with one write at its end: a system
call costs more than most frames. Publishers that get nothing but OK are answered together by one
compiled call, and by one system call where the system has io_uring.

The outbox also knows how much the client leaves unread. Beyond WRITE_HIGH bytes the client gets no
messages. Beyond MAX_UNREAD bytes of replies on top of that, or MAX_UNANSWERED publishes, nothing is
read from it either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from nsparq import kernel
from nsparq.broker.turn import Turn
from nsparq.transport.layers import LayerError, LayerStack
from nsparq.wire.frames import OK

WRITE_HIGH: Final = 256 << 10
"""Unsent bytes at which a client gets no more messages."""
WRITE_LOW: Final = 64 << 10
"""Unsent bytes at which it gets messages again."""
MAX_UNREAD: Final = 256 << 10
"""Unsent bytes of replies, on top of WRITE_HIGH, at which nothing is read from the client."""
MAX_UNANSWERED: Final = 4096
"""Publishes waiting for the disk at which nothing is read from the client."""
FLUSH_SIZE: Final = 64 << 10
"""Frames of this size are sent without waiting for the end of the turn."""
JOIN_LIMIT: Final = 16 << 10
"""Frames are joined before they are sent, unless they are larger: then copying them costs more than
sending several pieces."""


class Owner(Protocol):
    """What an outbox tells its connection."""

    def sending_failed(self, error: Exception) -> None:
        """Nothing more can be sent."""

    def adjust_reading(self) -> None:
        """More was sent to a client that does not read."""


class Outbox:
    """The sending side of one connection."""

    def __init__(self, transport: asyncio.Transport, turn: Turn, oks: PendingOks, owner: Owner) -> None:
        self.layers: LayerStack | None = None
        self.are_layers_confirmed = False
        """Whether the client has been told that the layers are up. Nothing else is sent before."""
        self.before_send: Callable[[], None] | None = None
        """Called once before anything but an OK is sent."""
        self.blocked_since = 0.0
        """When the client stopped reading; 0 while it reads."""
        self.unanswered = 0
        """Publishes without an answer."""
        self.transport = transport
        self.descriptor: int = transport.get_extra_info("socket").fileno()
        self._max_unsent = 0
        """Unsent bytes at which nothing is read from a client that does not read."""
        self._turn = turn
        self._oks = oks
        self._owner = owner
        self._answered = 0
        """Publishes answered so far."""
        self._replies: deque[tuple[int, bytes]] = deque()
        """Replies that wait, each with the number of publishes to be answered before it."""
        self._frames: list[bytes | memoryview] = []
        """Frames to send at the end of the turn."""
        self._size = 0
        """Bytes of these."""
        transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)

    # replies

    def ok(self, count: int) -> None:
        """Answer the oldest publishes with OK, and send the replies behind them."""
        self.unanswered -= count
        self._answered += count
        if self.unanswered or self._replies or self._frames or self.layers is not None:
            self.send(OK * count)
            while self._replies and self._replies[0][0] <= self._answered:
                self.send(self._replies.popleft()[1])
        else:
            self._oks.owed.setdefault(count, []).append(self)
            if not self._turn.is_scheduled:
                self._turn.schedule()

    def reply(self, frame: bytes) -> None:
        """Send a frame behind all earlier replies."""
        if self.unanswered:
            self._replies.append((self._answered + self.unanswered, frame))
        else:
            self.send(frame)

    def give_up_answers(self) -> None:
        """The publishes without an answer get none, because an error ends the connection."""
        self.unanswered = 0
        self._replies.clear()

    # frames

    def send(self, data: bytes | memoryview) -> None:
        """Send frames at the end of the turn, whatever replies are waiting."""
        if self.before_send is not None:
            self.before_send()
        if not self._frames:
            if len(data) >= FLUSH_SIZE and self.layers is None:
                self._oks.send()
                self.transport.write(data)
                return
            self._turn.outboxes.append(self)
            if not self._turn.is_scheduled:
                self._turn.schedule()
        self._frames.append(data)
        self._size += len(data)
        if self._size >= FLUSH_SIZE:
            self.flush()

    def flush(self) -> None:
        """Send the frames of this turn now, with one write."""
        if self._oks.owed:
            self._oks.send()
        frames, size, layers = self._frames, self._size, self.layers
        if not frames or (layers is not None and not self.are_layers_confirmed):
            return
        self._frames, self._size = [], 0
        try:
            if layers is None and size >= JOIN_LIMIT:
                self.transport.writelines(frames)
            else:
                data = frames[0] if len(frames) == 1 else b"".join(frames)
                self.transport.write(data if layers is None else layers.send(data))
        except LayerError as error:
            self._owner.sending_failed(error)
        if self.blocked_since:
            self._owner.adjust_reading()

    @property
    def has_frames(self) -> bool:
        return bool(self._frames)

    def fail(self, error: Exception) -> None:
        self._owner.sending_failed(error)

    def finish_ok(self, sent: int, count: int) -> None:
        """Send the rest of `count` OKs, of which `sent` bytes have been written directly."""
        if not self.transport.is_closing():
            self.transport.write((OK * count)[sent:])
            if self.blocked_since:
                self._owner.adjust_reading()

    # layers

    def confirm_layers(self) -> None:
        """Tell the client that the layers are up: one OK for each, inside it. Does so once."""
        if self.layers is not None and not self.are_layers_confirmed and self.layers.is_established:
            self.are_layers_confirmed = True
            self.transport.write(self.layers.confirm(OK))

    def write_layer_output(self) -> None:
        """Send the layers' own bytes: handshakes, alerts, closing messages."""
        if self.layers is not None and (output := self.layers.take_output()):
            self.transport.write(output)

    # room

    @property
    def has_room(self) -> bool:
        """Whether replies to further commands may be added."""
        is_read = not self.blocked_since or self.transport.get_write_buffer_size() < self._max_unsent
        return is_read and self.unanswered + len(self._replies) < MAX_UNANSWERED

    def block(self, now: float) -> None:
        """The client does not read."""
        self.blocked_since = now
        # It gets no more messages, so everything that comes on top of this are replies.
        self._max_unsent = self.transport.get_write_buffer_size() + MAX_UNREAD

    def unblock(self) -> None:
        self.blocked_since = 0.0

    def clear(self) -> None:
        """The connection has ended. No reference to it may stay: see Connection._release()."""
        self.layers = self.before_send = None
        self._replies.clear()
        self._frames.clear()
        self._owner = _NOBODY


class PendingOks:
    """OKs for publishers that get nothing else in this turn."""

    def __init__(self) -> None:
        self.owed: dict[int, list[Outbox]] = {}
        """Outboxes that owe nothing but OKs, by the number of OKs."""
        self.ring: object = None
        """Sends to many sockets with one system call, if the system can: see kernel.open_ring."""

    def send(self) -> None:
        """Send the OKs. One compiled call writes to all sockets that have no unsent bytes."""
        owed, self.owed = self.owed, {}
        for count, outboxes in owed.items():
            descriptors = []
            for outbox in outboxes:
                transport = outbox.transport
                is_clear = not (transport.is_closing() or transport.get_write_buffer_size())
                descriptors.append(outbox.descriptor if is_clear else -1)
            for index, sent in (kernel.send_each or _send_none)(descriptors, OK * count, self.ring):
                outboxes[index].finish_ok(sent, count)


def _send_none(descriptors: list[int], data: bytes, ring: object) -> list[tuple[int, int]]:
    """Without compiled code the transports send everything."""
    return [(index, 0) for index in range(len(descriptors))]


class _Nobody:
    """The owner of an outbox whose connection has ended."""

    def sending_failed(self, error: Exception) -> None:
        pass

    def adjust_reading(self) -> None:
        pass


_NOBODY: Final = _Nobody()
