"""Channels that deliver in the order of keys: messages with the same key one after the other, other
keys beside them.

The unfinished messages of a key form a queue, and only the first of them may be sent. Until it is
finished, the others are parked: the cursor has passed them, and they wait to be sent. So the lock
on a key is held by a message, not by a client, and a requeue, a timeout or a lost client does not
release it. Only unfinished messages have a place here. The memory does not grow with the number of
keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from nsparq.broker.client import Client
from nsparq.broker.cold_reads import cannot_read
from nsparq.broker.framing import frames_for
from nsparq.broker.message_key import KeyReader, key_reader
from nsparq.broker.runs import Run
from nsparq.broker.sampling import is_left_out
from nsparq.storage.batch import Batch
from nsparq.storage.segment import Cold

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.unfinished import Unfinished

logger = logging.getLogger(__name__)

MAX_PARKED: Final = 32_768
"""Parked messages of a channel at which its cursor waits."""
MAX_LOOKED: Final = 1000
"""Messages whose keys are read before the next client is served."""


class KeyQueues:
    """The unfinished messages of each key, in the order of their delivery."""

    def __init__(self, unfinished: Unfinished, read_keys: KeyReader, wake: Callable[[], None]) -> None:
        self.read_keys = read_keys
        self.unknown: dict[int, None] = {}
        """Unfinished messages whose keys have still to be read, in the order of their delivery.
        Until then the cursor waits."""
        self.key_of: dict[int, int] = {}
        self._queues: dict[int, list[int]] = {}
        self._unfinished = unfinished
        self._wake = wake

    def admits(self, batch: Batch, index: int) -> bool:
        """Whether a message may be sent now. If it has no place yet, it gets one."""
        sequence = batch.base + index
        key = self.key_of.get(sequence)
        if key is None:
            return self.join(sequence, self.read_keys(batch, index, 1)[0])
        return self._queues[key][0] == sequence

    def join(self, sequence: int, key: int | None) -> bool:
        """Give a message its place. Whether it may be sent now."""
        self.unknown.pop(sequence, None)
        if key is None:
            return True
        self.key_of[sequence] = key
        queue = self._queues.setdefault(key, [])
        queue.append(sequence)
        return len(queue) == 1

    def leave(self, sequence: int) -> None:
        """A message is finished. The next one of its key may be sent."""
        self.unknown.pop(sequence, None)
        key = self.key_of.pop(sequence, None)
        if key is None:
            return
        queue = self._queues[key]
        queue.remove(sequence)
        if not queue:
            del self._queues[key]
        elif queue[0] in self._unfinished.parked:
            self._unfinished.unpark(queue[0])
            self._wake()

    def leave_below(self, limit: int) -> None:
        for sequence in [one for one in (*self.key_of, *self.unknown) if one < limit]:
            self.leave(sequence)

    def in_order(self, sequences: list[int]) -> list[int]:
        """The same messages, those of a key in the order of their delivery."""
        placed = self.key_of.keys() & sequences
        ordered = [sequence for queue in self._queues.values() for sequence in queue if sequence in placed]
        return ordered + [sequence for sequence in sequences if sequence not in placed]

    def clear(self) -> None:
        self.unknown.clear()
        self.key_of.clear()
        self._queues.clear()


class Ordering:
    """The setting `ordered_by` of one channel, and the delivery of its new messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.ordered_by = ""
        """Where the key of a message is; empty if the channel is not ordered."""

    # the setting

    def change(self, ordered_by: str) -> None:
        """Order the channel by another key, or no more (empty): see Channel.change_settings."""
        if ordered_by != self.ordered_by:
            self._channel.change_settings(self._channel.retries.own_policy, ordered_by)

    def restore(self, ordered_by: str) -> None:
        """Continue from a state on disk. Its unfinished messages are not there yet."""
        self.ordered_by = ordered_by
        try:
            self.apply(key_reader(ordered_by) if ordered_by else None)
        except ValueError as error:
            logger.error("%s: its setting ordered_by is not applied: %s", self._channel, error)

    def apply(self, read_keys: KeyReader | None) -> None:
        """`ordered_by` has changed. None: the channel is not ordered."""
        channel, unfinished = self._channel, self._channel.unfinished
        for sequence in [*unfinished.parked]:
            unfinished.unpark(sequence)
        unfinished.keys = None
        if read_keys is not None:
            next_turn = channel.topic.broker.next_turn
            unfinished.keys = KeyQueues(unfinished, read_keys, lambda: next_turn.add_channel(channel))
            self.expect(sorted(unfinished))

    def expect(self, sequences: Iterable[int]) -> None:
        """Have these unfinished messages take their places before any other: first those that have
        been sent before, by number, then the others in this order. A message that was published
        with a delay takes its place when it is due."""
        unfinished, keys = self._channel.unfinished, self._channel.unfinished.keys
        if keys is None:
            return
        sent, due_ns = {*unfinished.in_flight, *unfinished.given_up}, unfinished.deferred.due_ns
        tried, untried = [], []
        for sequence in sequences:
            if sequence in sent or unfinished.attempts_of(sequence):
                tried.append(sequence)
            elif sequence not in due_ns:
                untried.append(sequence)
        keys.unknown.update(dict.fromkeys([*sorted(tried), *untried]))

    # delivery

    def learn_keys(self, keys: KeyQueues, stop_ns: int) -> bool:
        """Read keys that are unknown: after a restart, or when the channel has just become ordered.
        False if that has to go on later."""
        channel = self._channel
        delivery, broker = channel.delivery, channel.topic.broker
        for sequence in [*keys.unknown]:
            if delivery.reading is not None:
                return False
            if broker.monotonic_ns() > stop_ns:
                broker.next_turn.add_channel(channel)
                return False
            try:
                found = delivery.find(sequence)
            except (Cold, OSError) as error:
                cannot_read(channel, error)
                return False
            if found is None:
                # Delivery drops it.
                del keys.unknown[sequence]
            else:
                keys.admits(*found)
        return True

    def send_new(self, keys: KeyQueues, client: Client, limit: int, now_ns: int) -> int:
        """Send up to `limit` messages from the cursor on, and park those whose keys are locked.
        Gives how many were sent."""
        delivery, cursor, parked = (
            self._channel.delivery,
            self._channel.cursor,
            self._channel.unfinished.parked,
        )
        frames: list[bytes] = []
        sent = looked = 0
        while sent < limit and looked < MAX_LOOKED and len(parked) < MAX_PARKED:
            try:
                batch = delivery.find_batch()
            except (Cold, OSError):
                if frames:
                    break
                raise
            if batch is None:
                break
            start = cursor.position
            number = min(batch.end, cursor.free_until(), start + limit - sent, start + MAX_LOOKED) - start
            first = start
            for sequence, key in enumerate(keys.read_keys(batch, start - batch.base, number), start):
                cursor.position += 1
                looked += 1
                if not keys.join(sequence, key):
                    parked[sequence] = None
                elif is_left_out(client):
                    keys.leave(sequence)
                else:
                    continue
                sent += self._launch(frames, batch, client, first, sequence, now_ns)
                first = sequence + 1
                if len(parked) >= MAX_PARKED:
                    break
            sent += self._launch(frames, batch, client, first, cursor.position, now_ns)
        client.in_flight += sent
        client.message_count += sent
        if frames:
            client.send(b"".join(frames))
        return sent

    def _launch(
        self, frames: list[bytes], batch: Batch, client: Client, first: int, end: int, now_ns: int
    ) -> int:
        """Have consecutive messages in flight. Gives their number."""
        if first == end:
            return 0
        delivery = self._channel.delivery
        buffer, offsets = frames_for(client, batch, self._channel.topic.first_id)
        index = first - batch.base
        frames.append(buffer[offsets[index] : offsets[end - batch.base]])
        stamps = batch.timestamps_of(index, end - first)
        delivery.launch(Run(client, first, end, first, now_ns, now_ns + client.msg_timeout_ns, 1, stamps))
        return end - first
