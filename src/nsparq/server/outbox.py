"""What one connection has to send, in order.

Replies leave in the order of their commands. A publish is answered when its topic has appended it, so every
reply behind it waits until then. Messages wait for no reply.

Frames are gathered during a turn of the event loop and sent with one write at its end: a system call costs
more than most frames. Many publishers that are owed nothing but OK are answered by one compiled call.

The outbox also knows how much the client leaves unread. Beyond WRITE_HIGH bytes the client gets no messages.
Beyond MAX_UNREAD bytes of replies on top of that, or MAX_UNANSWERED publishes, it is not read from either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from nsparq import kernel
from nsparq.broker.turn import Turn
from nsparq.busy_poll import BusyPoll
from nsparq.transport.layers import LayerError, LayerStack
from nsparq.wire.frames import OK

WRITE_HIGH: Final = 256 << 10
"""Unsent bytes at which a client gets no more messages."""
WRITE_LOW: Final = 64 << 10
"""Unsent bytes at which it gets messages again."""
MAX_UNREAD: Final = 256 << 10
"""Unsent bytes of replies, on top of those, at which a client is not read from."""
MAX_UNANSWERED: Final = 4096
"""Publishes waiting for the disk at which a client is not read from."""
FLUSH_SIZE: Final = 64 << 10
"""Frames of this size are sent without waiting for the end of the turn."""
JOIN_LIMIT: Final = 16 << 10
"""Frames are joined before they are sent, unless they are larger: then copying them costs more than sending
several pieces."""


class Owner(Protocol):
    """What an outbox tells its connection."""

    def sending_failed(self, error: Exception) -> None:
        """Nothing more can be sent."""

    def unsent_grew(self) -> None:
        """More was sent to a client that does not read."""


class Outbox:
    """The sending side of one connection."""

    def __init__(self, transport: asyncio.Transport, sender: Sender, owner: Owner) -> None:
        self.layers: LayerStack | None = None
        self.are_layers_confirmed = False
        """Whether the client has been told that the layers are up. Nothing else is sent before."""
        self.before_send: Callable[[], None] | None = None
        """Called once before anything but an OK is sent."""
        self.blocked_since = 0.0
        """When the client stopped reading; 0 while it reads."""
        self._max_unsent = 0
        """Unsent bytes at which a client that does not read is not read from."""
        self._transport = transport
        self._sender = sender
        self._owner = owner
        self._replies: deque[bytes | None] = deque()
        """Replies in order. None stands for a publish without an answer; the first entry is None."""
        self._frames: list[bytes | memoryview] = []
        """Frames to send at the end of the turn."""
        self._size = 0
        """Bytes of these."""
        self._descriptor = -1
        transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)

    # replies

    @property
    def unanswered(self) -> int:
        """Publishes without an answer, and replies behind them."""
        return len(self._replies)

    def expect(self, count: int) -> None:
        """So many publishes are to be answered."""
        self._replies.extend((None,) * count)

    def withdraw(self, count: int) -> None:
        """The latest publishes are answered otherwise."""
        for _ in range(count):
            self._replies.pop()

    def withdraw_all(self) -> None:
        self._replies.clear()

    def ok(self, count: int) -> None:
        """Answer the oldest publishes with OK, and send the replies behind them."""
        replies = self._replies
        for _ in range(count):
            replies.popleft()
        if replies or self._frames or self.layers is not None:
            self.send(OK * count)
        else:
            self._sender.add_ok(self, count)
        while replies and replies[0] is not None:
            self.send(replies.popleft())  # type: ignore[arg-type]  # just seen not to be None

    def reply(self, frame: bytes) -> None:
        """Send a frame behind all earlier replies."""
        if self._replies:
            self._replies.append(frame)
        else:
            self.send(frame)

    # frames

    def send(self, data: bytes | memoryview) -> None:
        """Send frames at the end of the turn, whatever replies are waiting."""
        if self.before_send is not None:
            before, self.before_send = self.before_send, None
            before()
        if not self._frames:
            if len(data) >= FLUSH_SIZE and self.layers is None:
                self._sender.send_oks()
                self._transport.write(data)
                return
            self._sender.add(self)
        self._frames.append(data)
        self._size += len(data)
        if self._size >= FLUSH_SIZE:
            self.flush()

    def flush(self) -> None:
        """Send the frames of this turn now, as one piece."""
        self._sender.send_oks()
        frames, size, layers = self._frames, self._size, self.layers
        if not frames or (layers is not None and not self.are_layers_confirmed):
            return
        self._frames, self._size = [], 0
        try:
            if layers is not None:
                self._transport.write(layers.send(_joined(frames)))
            elif size >= JOIN_LIMIT:
                self._transport.writelines(frames)
            else:
                self._transport.write(_joined(frames))
        except LayerError as error:
            self._owner.sending_failed(error)
        if self.blocked_since:
            self._owner.unsent_grew()

    def fail(self, error: Exception) -> None:
        self._owner.sending_failed(error)

    @property
    def has_frames(self) -> bool:
        return bool(self._frames)

    @property
    def descriptor(self) -> int:
        """The socket, if bytes may be written to it directly: nothing is ahead of them. Otherwise -1."""
        if self._transport.is_closing() or self._transport.get_write_buffer_size():
            return -1
        if self._descriptor < 0:
            self._descriptor = self._transport.get_extra_info("socket").fileno()
        return self._descriptor

    @property
    def known_descriptor(self) -> int:
        """The socket, if `descriptor` has been asked for before."""
        return self._descriptor

    def finish_ok(self, sent: int, count: int) -> None:
        """Send the rest of `count` OKs, of which `sent` bytes have been written directly."""
        if not self._transport.is_closing():
            self._transport.write((OK * count)[sent:])
            if self.blocked_since:
                self._owner.unsent_grew()

    # layers

    def confirm_layers(self) -> None:
        """Tell the client that the layers are up: one OK for each, inside it. Does so once."""
        if self.layers is not None and not self.are_layers_confirmed and self.layers.is_established:
            self.are_layers_confirmed = True
            self._transport.write(self.layers.confirm(OK))

    def write_layer_output(self) -> None:
        """Send what the layers themselves have to say: handshakes, alerts, farewells."""
        if self.layers is not None and (output := self.layers.take_output()):
            self._transport.write(output)

    # room

    @property
    def has_room(self) -> bool:
        """Whether replies to further commands may be added."""
        is_read = not self.blocked_since or self._transport.get_write_buffer_size() < self._max_unsent
        return is_read and len(self._replies) < MAX_UNANSWERED

    def block(self, now: float) -> None:
        """The client does not read."""
        self.blocked_since = now
        # It gets no more messages, so all that comes on top of this are replies.
        self._max_unsent = self._transport.get_write_buffer_size() + MAX_UNREAD

    def unblock(self) -> None:
        self.blocked_since = 0.0

    def clear(self) -> None:
        """The connection has ended. No reference to it may stay: see Connection._release()."""
        self.layers = self.before_send = None
        self._replies.clear()
        self._frames.clear()
        self._owner = _NOBODY


class Sender:
    """The outboxes that have something to send at the end of the turn."""

    def __init__(self, turn: Turn, busy_poll: BusyPoll) -> None:
        self._turn = turn
        self._busy_poll = busy_poll
        self._outboxes: list[Outbox] = []
        """Those with frames."""
        self._owed: dict[int, list[Outbox]] = {}
        """Those that owe nothing but OKs, by the number of them."""

    def add(self, outbox: Outbox) -> None:
        """Flush the outbox at the end of the turn."""
        self._outboxes.append(outbox)
        if not self._turn.is_running:
            self._turn.schedule()

    def add_ok(self, outbox: Outbox, count: int) -> None:
        """Send OKs for an outbox that has nothing else to send, before anything else is sent."""
        self._owed.setdefault(count, []).append(outbox)
        if not self._turn.is_running:
            self._turn.schedule()

    def send_oks(self) -> None:
        """Send the OKs that are owed, those of many connections with one compiled call."""
        if not self._owed:
            return
        owed, self._owed = self._owed, {}
        for count, outboxes in owed.items():
            for index, sent in self.send_ok_to([outbox.descriptor for outbox in outboxes], count):
                outboxes[index].finish_ok(sent, count)

    def send_ok_to(self, descriptors: list[int], count: int = 1) -> list[tuple[int, int]]:
        """Write OKs to each of these sockets. Gives the indices of those that did not take all of it, with
        the bytes that they took."""
        # Started before the writes: to write to many sockets takes longer than a busy-poll lasts.
        self._busy_poll.start()
        if kernel.send_each is None:
            return [(index, 0) for index in range(len(descriptors))]
        return kernel.send_each(descriptors, OK * count)

    def flush(self) -> None:
        """Send everything."""
        self.send_oks()
        outboxes, self._outboxes = self._outboxes, []
        for outbox in outboxes:
            try:
                outbox.flush()
            except Exception as error:
                outbox.fail(error)
        if outboxes:
            self._busy_poll.start()


def _joined(frames: list[bytes | memoryview]) -> bytes | memoryview:
    return frames[0] if len(frames) == 1 else b"".join(frames)


class _Nobody:
    """The owner of an outbox whose connection has ended."""

    def sending_failed(self, error: Exception) -> None:
        pass

    def unsent_grew(self) -> None:
        pass


_NOBODY: Final = _Nobody()
