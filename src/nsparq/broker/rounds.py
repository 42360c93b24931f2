"""Rounds: a channel's messages are spread evenly over the clients that are ready, and requeued
messages are sent in turn with new ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from nsparq.broker.client import Client
from nsparq.broker.cold_reads import cannot_read
from nsparq.broker.framing import frames_for
from nsparq.broker.runs import Run
from nsparq.broker.sampling import is_left_out
from nsparq.storage.segment import Cold
from nsparq.wire.message import with_attempts

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.delivery import Delivery


MAX_WRITE: Final = 128 << 10
"""Bytes sent to one client before the next one is served."""


class Rounds:
    """The rounds of one channel."""

    def __init__(self, channel: Channel, delivery: Delivery) -> None:
        self._channel = channel
        self._delivery = delivery
        self.turns = 0
        """Clients still to be served in the present round."""
        self._share = 0
        """Messages for each of them."""
        self._requeued_next = True
        """Which comes next when both requeued and new messages wait."""

    def serve(self, now_ns: int, stop_ns: int) -> bool:
        """Give each ready client its share. False when nothing more can be sent now."""
        channel, delivery, broker = self._channel, self._delivery, self._channel.topic.broker
        cursor, requeued = channel.cursor, channel.unfinished.requeued
        near, middle, far = delivery.lines
        ready = near or middle or far
        before = (cursor.position, len(requeued), len(ready))
        if not self.turns:
            depth = max(0, channel.depth)
            self.turns = min(len(ready), depth)
            self._share = max(1, depth // len(ready)) if ready else 0
        while self.turns and ready:
            if broker.monotonic_ns() > stop_ns:
                broker.next_turn.add_channel(channel)
                return False
            self.turns -= 1
            client = ready[0]
            if not self._serve(client, now_ns):
                self.turns = 0
                return False
            # A send can end the connection. Then the client has left the line, and another is
            # first.
            if client.is_queued and client.capacity > 0:
                ready.rotate(-1)
            elif client.is_queued:
                delivery.unqueue(client)
        self.turns = 0
        # A round without progress is the last one, whatever the depth says.
        has_moved = before != (cursor.position, len(requeued), len(ready))
        return has_moved and delivery.ready_clients > 0 and channel.depth > 0

    def _serve(self, client: Client, now_ns: int) -> bool:
        """Give one client its share, up to its capacity. False when nothing can be sent now."""
        channel, delivery = self._channel, self._delivery
        cursor, requeued = channel.cursor, channel.unfinished.requeued
        wanted, keys = self._share, channel.unfinished.keys
        send_new = delivery.send_new if keys is None else partial(channel.ordering.send_new, keys)
        while wanted > 0 and (capacity := client.capacity) > 0:
            if delivery.reading is not None:
                return False
            is_requeued = requeued and (self._requeued_next or cursor.position >= channel.topic.visible_end)
            self._requeued_next = not is_requeued
            send = self._send_again if is_requeued else send_new
            try:
                passed = send(client, min(capacity, wanted), now_ns)
            except (Cold, OSError) as error:
                cannot_read(channel, error)
                return False
            channel.mark_changed()
            if not passed and not requeued:
                # The cursor is at the end. A wrong depth must not keep us here.
                break
            delivery.counts[client.distance] += passed
            wanted -= passed
        return True

    def _send_again(self, client: Client, limit: int, now_ns: int) -> int:
        """Send up to `limit` requeued messages. Gives how many are not requeued any more."""
        channel, delivery, unfinished = self._channel, self._delivery, self._channel.unfinished
        requeued, keys, expires = unfinished.requeued, unfinished.keys, channel.retries.expires
        deadline_ns = now_ns + client.msg_timeout_ns
        frames: list[bytes] = []
        passed = size = 0
        for _ in range(min(limit, len(requeued))):
            try:
                found = delivery.find(requeued[0])
            except (Cold, OSError):
                if frames:
                    break
                raise
            sequence, delivered = unfinished.take_requeued()
            passed += 1
            attempts = (delivered + 1) & 0xFFFF
            if found is None:
                channel.lost_to_damage(sequence)
                continue
            batch, index = found
            timestamp_ns = batch.timestamp_of(index)
            if keys is not None and not keys.admits(batch, index):
                unfinished.park(sequence, delivered)
                continue
            if is_left_out(client):
                unfinished.forget(sequence)
                continue
            if expires and channel.retries.is_expired(timestamp_ns):
                channel.retries.expire(sequence, delivered)
                continue
            buffer, offsets = frames_for(client, batch, channel.topic.first_id)
            frame = buffer[offsets[index] : offsets[index + 1]]
            frames.append(frame if attempts == 1 else with_attempts(frame, attempts))
            size += len(frame)
            run = Run(client, sequence, sequence + 1, sequence, now_ns, deadline_ns, attempts, timestamp_ns)
            delivery.launch(run)
            if size >= MAX_WRITE:
                break
        delivery.send_frames(client, frames)
        return passed
