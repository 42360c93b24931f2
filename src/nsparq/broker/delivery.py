"""Sending a channel's messages to its clients.

What waits is spread evenly over the clients that are ready, in rounds. Where one client is ready and nothing
was requeued, which is how most channels are most of the time, everything new goes to that client.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Final

from nsparq.broker.client import Client
from nsparq.broker.inflight import Run
from nsparq.private_random import private_random
from nsparq.storage.batch import Batch
from nsparq.storage.segment import Cold
from nsparq.wire.message import build_frames, with_attempts

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel

logger = logging.getLogger(__name__)

MAX_WRITE: Final = 128 << 10
"""Bytes handed to one client before the next has its turn."""
MAX_HELD: Final = 4
"""Limit on memory pinned by a slow client, as a multiple of what it was sent."""
PUMP_NS: Final = 10_000_000
"""How long one channel may send before the rest of the daemon has its turn."""


class Delivery:
    """The sending side of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._topic = channel.topic
        self._cursor = channel.cursor
        self._unfinished = channel.unfinished
        self._lines: tuple[deque[Client], ...] = (deque(), deque(), deque())
        """Clients that are ready, by their distance: see Channel._distance. The first line that is not empty
        is served."""
        self.counts = [0, 0, 0]
        """Messages delivered to clients of each distance."""
        self._turns = 0
        """Clients still to be served in the round under way."""
        self._share = 0
        """What each of them gets."""
        self._batch: Batch | None = None
        """The batch under the cursor."""
        self._open: Run | None = None
        """What has been delivered last in the pump() under way, and may grow. Where latencies are recorded it
        does not: there a run needs the publish time of each message."""
        self._requeued_next = True
        """Whose turn it is when both requeued and new messages wait."""
        self._reading: Cold | None = None
        """What the disk is being asked for. Nothing is sent meanwhile."""
        self._must_wait = False
        """The disk has just been asked for what is read next: do not ask again, wait."""

    # who is ready

    @property
    def has_ready_clients(self) -> bool:
        near, middle, far = self._lines
        return bool(near or middle or far)

    def offer(self, client: Client) -> None:
        """The client may have become able to take messages."""
        if not client.is_queued and client.capacity > 0:
            client.is_queued = True
            self._lines[client.distance].append(client)
        if (self._unfinished.requeued or not self._cursor.is_at_end) and self.has_ready_clients:
            self._topic.broker.next_turn.add_channel(self._channel)

    def leave(self, client: Client) -> None:
        """The client takes no more messages."""
        self.launch_open()
        self._leave_line(client)

    def _leave_line(self, client: Client) -> None:
        if client.is_queued:
            client.is_queued = False
            self._lines[client.distance].remove(client)

    def _nearest(self) -> deque[Client]:
        """The line whose clients are served now."""
        near, middle, far = self._lines
        return near or middle or far

    def moved(self) -> None:
        """The cursor was moved elsewhere: what was read or asked for there is of no use."""
        self._batch = self._reading = None
        self._must_wait = False

    # sending

    def pump(self, now_ns: int) -> int:
        """Send what can be sent. Gives how far the cursor has come."""
        channel, cursor = self._channel, self._cursor
        start = cursor.position
        stop_ns = self._topic.broker.monotonic_ns() + PUMP_NS
        goes_on = not (channel.paused or channel.hold)
        try:
            ready = self._nearest()
            if goes_on and len(ready) == 1 and not (self._unfinished.requeued or self._turns):
                goes_on = self._stream(ready[0], now_ns, stop_ns)
            while goes_on:
                goes_on = self._round(now_ns, stop_ns)
        finally:
            self.launch_open()
        if channel.is_exiting:
            # Its last client left while it was sent to, and the channel was ephemeral.
            return cursor.position - start
        cursor.step_over()
        if not self.has_ready_clients:
            self._batch = None
        if channel.is_bounded:
            self._drop_surplus()
        return cursor.position - start

    def _stream(self, client: Client, now_ns: int, stop_ns: int) -> bool:
        """Send everything new to the only ready client. False when nothing more can be sent now."""
        topic, cursor = self._topic, self._cursor
        self._channel.mark_changed()
        while (capacity := client.capacity) > 0:
            if cursor.position >= topic.visible_end or self._reading is not None:
                return False
            try:
                self.counts[client.distance] += self._send_new(client, capacity, now_ns)
            except (Cold, OSError) as error:
                self._cannot_read(error)
                return False
            if topic.broker.monotonic_ns() > stop_ns:
                topic.broker.next_turn.add_channel(self._channel)
                return False
        self._leave_line(client)
        return self.has_ready_clients

    def _round(self, now_ns: int, stop_ns: int) -> bool:
        """Give each ready client its share. False when nothing more can be sent now."""
        channel, cursor, requeued = self._channel, self._cursor, self._unfinished.requeued
        ready, clock = self._nearest(), self._topic.broker.monotonic_ns
        before = (cursor.position, len(requeued), len(ready))
        if not self._turns:
            depth = max(0, channel.depth)
            self._turns = min(len(ready), depth)
            self._share = max(1, depth // len(ready)) if ready else 0
        while self._turns and ready:
            if clock() > stop_ns:
                # The round goes on with the same shares when the others have had their time.
                self._topic.broker.next_turn.add_channel(channel)
                return False
            self._turns -= 1
            client = ready[0]
            if not self._serve(client, now_ns):
                self._turns = 0
                return False
            # A send can end the connection: then the client has left the line, and another stands there.
            if client.is_queued:
                ready.rotate(-1)
                if client.capacity <= 0:
                    ready.pop()
                    client.is_queued = False
        self._turns = 0
        # A round without any progress is the last one, whatever the depth says.
        has_moved = before != (cursor.position, len(requeued), len(ready))
        return has_moved and self.has_ready_clients and channel.depth > 0

    def _serve(self, client: Client, now_ns: int) -> bool:
        """Give one client its share, as far as it can take it. False when nothing can be sent now."""
        wanted = self._share
        while wanted > 0 and (capacity := client.capacity) > 0:
            passed = self._send(client, min(capacity, wanted), now_ns)
            if passed is None:
                return False
            if not passed and not self._unfinished.requeued:
                # The cursor is at the end. A depth that says otherwise must not keep us here.
                break
            self.counts[client.distance] += passed
            wanted -= passed
        return True

    def _send(self, client: Client, limit: int, now_ns: int) -> int | None:
        """Send up to `limit` messages; gives how many have left the queue. None if it cannot be done now."""
        if self._reading is not None:
            return None
        try:
            if self._unfinished.requeued and (self._requeued_next or self._cursor.is_at_end):
                self._requeued_next = False
                passed = self._send_again(client, limit, now_ns)
            else:
                self._requeued_next = True
                passed = self._send_new(client, limit, now_ns)
        except (Cold, OSError) as error:
            self._cannot_read(error)
            return None
        self._channel.mark_changed()
        return passed

    # new messages

    def _send_new(self, client: Client, limit: int, now_ns: int) -> int:
        batch = self._batch_at_cursor()
        if batch is None:
            return 0
        buffer, offsets = batch.frames or self._build(batch)
        position = self._cursor.position
        index = position - batch.base
        number = min(limit, batch.end - position, self._cursor.free_until() - position)
        start, end = offsets[index], offsets[index + number]
        if end - start > MAX_WRITE:
            number = max(1, bisect_right(offsets, start + MAX_WRITE) - 1 - index)
            end = offsets[index + number]
        # Not a jump: nothing is passed by up to here.
        self._cursor.position += number
        if client.identity.sample_rate:
            self._send_sample(client, batch, index, number, now_ns)
            return number
        run, latency = self._open, self._channel.latency
        if run is not None and run.end == position and run.client is client and latency is None:
            run.end += number
        else:
            self.launch_open()
            stamps = 0 if latency is None else batch.timestamps_of(index, number)
            deadline_ns = now_ns + client.msg_timeout_ns
            self._open = Run(client, position, position + number, now_ns, deadline_ns, 1, stamps)
        client.in_flight += number
        client.message_count += number
        if end - start == len(buffer):
            client.send(buffer)
        elif (end - start) * MAX_HELD >= len(buffer):
            client.send(memoryview(buffer)[start:end])
        else:
            # Copied: a client that does not read must not hold on to the whole batch.
            client.send(buffer[start:end])
        return number

    def launch_open(self) -> None:
        """What was delivered last grows no more."""
        run, self._open = self._open, None
        if run is not None:
            self._channel.launch(run)

    def _batch_at_cursor(self) -> Batch | None:
        """The batch that holds the cursor, which steps over gaps and deferred messages; None at the end."""
        cursor, topic, batch = self._cursor, self._topic, self._batch
        passes_by = False
        while True:
            cursor.step_over()
            if cursor.position >= topic.visible_end:
                return None
            if batch is not None and batch.base <= cursor.position < batch.end and not passes_by:
                self._batch = batch
                return batch
            batch = topic.log.read(cursor.position, wait=self._must_wait)
            self._must_wait = False
            if batch is None:
                cursor.jump(topic.visible_end)
                return None
            cursor.jump(min(max(cursor.position, batch.base), topic.visible_end))
            passes_by = batch.due_ns > 0 and not cursor.delivers_deferred(batch.base, batch.due_ns)
            if passes_by and cursor.position < batch.end:
                cursor.jump(batch.end)

    def _send_sample(self, client: Client, batch: Batch, index: int, number: int, now_ns: int) -> None:
        """A client that asked for a share of the messages: what it does not get is gone for the channel."""
        buffer, offsets = batch.frames or self._build(batch)
        deadline_ns = now_ns + client.msg_timeout_ns
        frames: list[bytes] = []
        for i in range(index, index + number):
            if private_random.randrange(100) > client.identity.sample_rate:
                continue
            sequence = batch.base + i
            frames.append(buffer[offsets[i] : offsets[i + 1]])
            stamp = batch.timestamp_of(i)
            self._channel.launch(Run(client, sequence, sequence + 1, now_ns, deadline_ns, 1, stamp))
        self._send_frames(client, frames)

    def _send_frames(self, client: Client, frames: list[bytes]) -> None:
        """Send messages that are in flight already: if sending ends the connection, they are taken back."""
        if frames:
            client.in_flight += len(frames)
            client.message_count += len(frames)
            client.send(b"".join(frames))

    # messages to be sent again

    def _send_again(self, client: Client, limit: int, now_ns: int) -> int:
        channel, requeued = self._channel, self._unfinished.requeued
        frames: list[bytes] = []
        before = len(requeued)
        deadline_ns = now_ns + client.msg_timeout_ns
        size = 0
        for _ in range(min(limit, len(requeued))):
            try:
                found = self._find(requeued[0])
            except (Cold, OSError):
                if frames:
                    break
                raise
            sequence, delivered = self._unfinished.take_requeued()
            attempts = (delivered + 1) & 0xFFFF
            if found is None:
                channel.dropped_count += 1
                logger.error("%s: message %d is lost to a damaged log", channel, sequence)
                continue
            if client.identity.sample_rate and private_random.randrange(100) > client.identity.sample_rate:
                continue
            frame, timestamp_ns = found
            frames.append(frame if attempts == 1 else with_attempts(frame, attempts))
            size += len(frame)
            channel.launch(Run(client, sequence, sequence + 1, now_ns, deadline_ns, attempts, timestamp_ns))
            if size >= MAX_WRITE:
                break
        passed = before - len(requeued)
        self._send_frames(client, frames)
        return passed

    def _find(self, sequence: int) -> tuple[bytes, int] | None:
        """The first-delivery frame of a message and its publish time."""
        carried = self._channel.carried_over.store
        batch = carried.read(sequence) if sequence in carried else None
        if batch is None:
            batch = self._topic.log.read(sequence, wait=self._must_wait)
            self._must_wait = False
        if batch is None or not batch.base <= sequence < batch.end:
            return None
        buffer, offsets = batch.frames or self._build(batch)
        index = sequence - batch.base
        return buffer[offsets[index] : offsets[index + 1]], batch.timestamp_of(index)

    def _build(self, batch: Batch) -> tuple[bytes, array[int]]:
        """The frames of a batch. All channels share them."""
        first_id = self._topic.first_id + batch.base
        batch.frames = build_frames(first_id, batch.timestamps_ns, batch.lengths, batch.data)
        return batch.frames

    # the disk

    def _cannot_read(self, error: Cold | OSError) -> None:
        """What is to be sent next cannot be read now."""
        if isinstance(error, Cold):
            self._read_ahead(error)
        else:
            self._topic.broker.read_failed(self._channel, error)

    def _read_ahead(self, cold: Cold) -> None:
        """Have the disk read in a thread. Delivery goes on when it has."""
        self._reading = cold

        def done() -> None:
            if self._reading is cold:
                self._reading = None
                self._must_wait = True
            self._topic.broker.next_turn.add_channel(self._channel)

        self._topic.broker.read_ahead(cold, done)

    # bounds

    def _drop_surplus(self) -> None:
        """An ephemeral channel keeps no more than the memory queue's size: the oldest go, and are counted."""
        channel, cursor, unfinished = self._channel, self._cursor, self._unfinished
        surplus = channel.depth - self._topic.broker.options.mem_queue_size
        while surplus > 0 and unfinished.requeued:
            unfinished.take_requeued()
            channel.dropped_count += 1
            surplus -= 1
        if surplus > 0:
            before = cursor.ahead
            cursor.jump(cursor.behind(surplus))
            self._batch = None
            channel.dropped_count += before - cursor.ahead
