"""Sending a channel's messages to its clients, and the messages in flight until the clients have
answered: FIN, REQ, TOUCH.

Mostly one client is ready and nothing was requeued. Then that client gets everything new. Otherwise
the messages are spread over the clients in rounds: see broker.rounds.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, count
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from nsparq import kernel
from nsparq.broker.client import Client
from nsparq.broker.cold_reads import cannot_read
from nsparq.broker.framing import frames_for
from nsparq.broker.rounds import MAX_WRITE, Rounds
from nsparq.broker.runs import LongerRuns, Run
from nsparq.broker.sampling import send_sample
from nsparq.delivery_policy import Failure
from nsparq.errors import AnswerFailed, ClientError
from nsparq.storage.batch import Batch
from nsparq.storage.segment import Cold
from nsparq.wire.message import build_frames

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel

logger = logging.getLogger(__name__)

MAX_HELD: Final = 4
"""Limit on memory pinned by a slow client, as a multiple of what it was sent."""
PUMP_NS: Final = 10_000_000
"""How long one channel may send before the rest of the daemon is served."""

_order = count()


class Delivery:
    """The sending side of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._topic = channel.topic
        self._cursor = channel.cursor
        self._unfinished = channel.unfinished
        self.lines: tuple[deque[Client], ...] = (deque(), deque(), deque())
        """Clients that are ready, by their distance: see Channel._distance. The first line that is
        not empty is served."""
        self.ready_clients = 0
        """Number of clients in all lines."""
        self.counts = [0, 0, 0]
        """Messages delivered to clients of each distance."""
        self._rounds = Rounds(channel, self)
        self._batch: Batch | None = None
        """The batch under the cursor."""
        self._open: Run | None = None
        """The last delivery of the present pump(), which may grow. Where latencies are recorded it
        does not grow: there a run needs the publish time of each message."""
        self.reading: Cold | None = None
        """What a thread reads from disk at the moment. Nothing is sent meanwhile."""
        self.must_wait = False
        """A thread has just read what is needed next: wait for the disk instead of asking again."""

    # which clients are ready

    def appended(self, count: int, batch: Batch | None = None) -> None:
        """The topic shows `count` more messages. `batch` is the first of them, if they are new."""
        self._channel.message_count += count
        if self.ready_clients or self._channel.is_bounded:
            if batch is not None and batch.base == self._cursor.position:
                self._batch = batch
            self._topic.broker.next_turn.add_channel(self._channel)

    def offer(self, client: Client) -> None:
        """The client may have become able to take messages."""
        if not client.is_queued and client.capacity > 0:
            client.is_queued = True
            self.ready_clients += 1
            self.lines[client.distance].append(client)
        has_messages = self._unfinished.requeued or self._cursor.position < self._topic.visible_end
        if has_messages and self.ready_clients:
            self._topic.broker.next_turn.add_channel(self._channel)

    def leave(self, client: Client) -> None:
        """The client takes no more messages."""
        if self._open is not None:
            self.launch(self._open)
            self._open = None
        if client.is_queued:
            self.unqueue(client)

    def unqueue(self, client: Client) -> None:
        client.is_queued = False
        self.ready_clients -= 1
        self.lines[client.distance].remove(client)

    def moved(self) -> None:
        """The cursor was moved elsewhere: what was read there is of no use."""
        self._batch = self.reading = None
        self.must_wait = False

    # sending

    def pump(self, now_ns: int) -> int:
        """Send what can be sent. Gives how far the cursor has come."""
        if self._channel.is_exiting:
            return 0
        channel, cursor = self._channel, self._cursor
        start = cursor.position
        stop_ns = self._topic.broker.monotonic_ns() + PUMP_NS
        can_send = not (channel.paused or channel.hold)
        if channel.retries.expires and stop_ns > channel.retries.none_expires_before_ns:
            can_send = channel.retries.expire_new(stop_ns) and can_send
        if self._unfinished.given_up:
            channel.dead_letters.write()
        keys = self._unfinished.keys
        if keys is not None and keys.unknown and can_send and self.ready_clients:
            can_send = channel.ordering.learn_keys(keys, stop_ns)
        try:
            is_simple = self.ready_clients == 1 and keys is None
            if can_send and is_simple and not (self._unfinished.requeued or self._rounds.turns):
                can_send = self._stream(now_ns, stop_ns)
            while can_send:
                can_send = self._rounds.serve(now_ns, stop_ns)
        finally:
            run, self._open = self._open, None
            if run is not None:
                self.launch(run)
        if channel.is_exiting:  # an ephemeral channel, and its last client left during a send
            return cursor.position - start
        if self._topic.log.gaps.ranges or cursor.skips.ranges or cursor.deferred_ahead:
            cursor.step_over()
        if not self.ready_clients:
            self._batch = None
        if channel.is_bounded:
            channel.drop_surplus()
        return cursor.position - start

    def _stream(self, now_ns: int, stop_ns: int) -> bool:
        """Send everything new to the only ready client. False when nothing more can be sent now."""
        topic, cursor = self._topic, self._cursor
        near, middle, far = self.lines
        client = (near or middle or far)[0]
        self._channel.checkpoint.is_stale = True
        start = cursor.position
        while client.is_writable and client.in_flight < client.ready_count:
            if cursor.position >= topic.visible_end or self.reading is not None:
                return False
            if cursor.position > start and topic.broker.monotonic_ns() > stop_ns:
                topic.broker.next_turn.add_channel(self._channel)
                return False
            try:
                passed = self.send_new(client, client.ready_count - client.in_flight, now_ns)
            except (Cold, OSError) as error:
                cannot_read(self._channel, error)
                return False
            self.counts[client.distance] += passed
        if client.is_queued:
            self.unqueue(client)
        return self.ready_clients > 0

    # new messages

    def send_new(self, client: Client, limit: int, now_ns: int) -> int:
        """Send up to `limit` messages at the cursor. Gives how many the cursor has passed."""
        topic, cursor, batch = self._topic, self._cursor, self._batch
        reach = topic.visible_end
        has_obstacles = topic.log.gaps.ranges or cursor.skips.ranges or cursor.deferred_ahead
        if has_obstacles or batch is None or not batch.base <= cursor.position < batch.end or batch.due_ns:
            batch = self.find_batch()
            if batch is None:
                return 0
            reach = cursor.free_until()
        if batch.headers is not None:
            buffer, offsets = frames_for(client, batch, topic.first_id)
        else:
            if batch.frames is None:
                build = kernel.build_frames or build_frames
                first_id = topic.first_id + batch.base
                batch.frames = build(first_id, batch.timestamps_ns, batch.lengths, batch.data)
            buffer, offsets = batch.frames
        position = cursor.position
        index = position - batch.base
        number = min(limit, batch.end - position, reach - position)
        start, end = offsets[index], offsets[index + number]
        if end - start > MAX_WRITE:
            number = max(1, bisect_right(offsets, start + MAX_WRITE) - 1 - index)
            end = offsets[index + number]
        cursor.position += number
        if client.identity.sample_rate:
            send_sample(self, client, batch, topic.first_id, index, number, now_ns)
            return number
        run, latency = self._open, self._channel.latency
        if run is not None and run.end == position and run.client is client and latency is None:
            run.end += number
        else:
            if run is not None:
                self.launch(run)
            stamps = 0 if latency is None else batch.timestamps_of(index, number)
            deadline_ns = now_ns + client.msg_timeout_ns
            self._open = Run(client, position, position + number, position, now_ns, deadline_ns, 1, stamps)
        client.in_flight += number
        client.message_count += number
        if end - start == len(buffer):
            client.send(buffer)
        elif (end - start) * MAX_HELD >= len(buffer):
            client.send(memoryview(buffer)[start:end])
        else:
            # Copied: a client that does not read must not pin the whole batch.
            client.send(buffer[start:end])
        return number

    def find_batch(self) -> Batch | None:
        """The batch that holds the cursor; None at the end. On the way the cursor steps over gaps
        and deferred messages."""
        cursor, topic, batch = self._cursor, self._topic, self._batch
        while True:
            cursor.step_over()
            if cursor.position >= topic.visible_end:
                return None
            if batch is not None and batch.base <= cursor.position < batch.end:
                self._batch = batch
                return batch
            batch = topic.log.read(cursor.position, wait=self.must_wait)
            self.must_wait = False
            if batch is None:
                cursor.jump(topic.visible_end)
                return None
            if batch.base > cursor.position:
                cursor.jump(min(batch.base, topic.visible_end))
            if batch.due_ns and not cursor.delivers_deferred(batch.base, batch.due_ns):
                cursor.jump(min(batch.end, topic.visible_end))

    def find(self, sequence: int) -> tuple[Batch, int] | None:
        """A message: the batch that has it, and its index there. None if it is lost."""
        carried = self._channel.carried_over.store
        batch = carried.read(sequence) if sequence in carried.kept else None
        if batch is None:
            batch = self._topic.log.read(sequence, wait=self.must_wait)
            self.must_wait = False
        if batch is None or not batch.base <= sequence < batch.end:
            return None
        return batch, sequence - batch.base

    def launch(self, run: Run) -> None:
        """The messages of a delivery are in flight from now on."""
        self._unfinished.in_flight.add(run)
        watched_ns = self._channel.watched_ns
        if watched_ns is None or run.deadline_ns < watched_ns:
            self._channel.watch(run.deadline_ns)

    def send_frames(self, client: Client, frames: list[bytes]) -> None:
        """Send messages that are in flight. If that ends the connection, they are requeued."""
        if frames:
            client.in_flight += len(frames)
            client.message_count += len(frames)
            client.send(b"".join(frames))

    # the clients' answers

    def finish(self, client: Client, spans: list[tuple[int, int]], now_ns: int) -> list[ClientError]:
        """FIN, for spans of ids. Gives an error for each id that is not this client's to finish."""
        in_flight, topic, latency = self._unfinished.in_flight, self._topic, self._channel.latency
        first_id, failures, keys = topic.first_id, self._unfinished.failures, self._unfinished.keys
        errors: list[ClientError] = []
        finished = 0
        for message_id, end_id in spans:
            sequence, end = message_id - first_id, end_id - first_id
            while sequence < end:
                # in_flight.find(), without the call for each message.
                run = in_flight.singles.get(sequence) or in_flight.longer.find(sequence)
                if run is None or run.client is not client:
                    errors.append(AnswerFailed("FIN", first_id + sequence, is_in_flight=run is not None))
                    sequence += 1
                    continue
                number = in_flight.answer(run, sequence, end - sequence)
                if latency is not None:
                    wall_ns = topic.broker.wall_ns()
                    for i in range(sequence, sequence + number):
                        latency.record(wall_ns - run.timestamp_of(i), now_ns)
                if failures or keys is not None:
                    for one in range(sequence, sequence + number):
                        self._unfinished.forget(one)
                finished += number
                sequence += number
        client.finish_count += finished
        client.in_flight -= finished
        self._channel.checkpoint.is_stale = True
        topic.broker.upkeep.changed.add(topic)
        if not client.is_queued or self._cursor.position < topic.visible_end or self._unfinished.requeued:
            self.offer(client)
        return errors

    def requeue(self, client: Client, message_id: int, timeout_ms: int, now_ns: int) -> None:
        """REQ: send again at once, or after a while."""
        run, sequence = self._owned("REQ", client, message_id)
        self._unfinished.in_flight.answer(run, sequence)
        channel = self._channel
        if sequence < self._topic.given_up_before:
            channel.dropped_count += 1
            self._unfinished.forget(sequence)
        else:
            channel.retries.send_again(run, [sequence], Failure.REQUEUED, now_ns, timeout_ms * 1_000_000)
        channel.requeue_count += 1
        client.requeue_count += 1
        client.in_flight -= 1
        channel.mark_changed()
        self.offer(client)

    def touch(self, client: Client, message_id: int, now_ns: int) -> None:
        """TOUCH: a new deadline, within the limit counted from the delivery."""
        run, sequence = self._owned("TOUCH", client, message_id)
        limit_ns = run.delivered_ns + int(self._topic.broker.options.max_msg_timeout * 1e9)
        deadline_ns = min(now_ns + client.msg_timeout_ns, limit_ns)
        if run.end - run.first == 1 and deadline_ns >= run.deadline_ns:
            # The heap's entry is early now. It is corrected when it comes up.
            run.deadline_ns = deadline_ns
            return
        self._unfinished.in_flight.answer(run, sequence)
        first, stamp, delivered_ns = sequence, run.timestamp_of(sequence), run.delivered_ns
        self.launch(Run(client, first, first + 1, first, delivered_ns, deadline_ns, run.attempts, stamp))

    def _owned(self, verb: str, client: Client, message_id: int) -> tuple[Run, int]:
        """The client's delivery that holds the message, and the message's sequence number."""
        sequence = message_id - self._topic.first_id
        run = self._unfinished.in_flight.find(sequence)
        if run is None or run.client is not client:
            raise AnswerFailed(verb, message_id, is_in_flight=run is not None)
        return run, sequence


class InFlight:
    """All unanswered deliveries of a channel."""

    def __init__(self) -> None:
        self._count = 0
        self.singles: dict[int, Run] = {}
        """Runs of one message, by its number."""
        self.longer = LongerRuns()
        """Both kinds are in the order of their delivery: after a restart they are sent again in
        that order."""
        self._heap: list[tuple[int, int, Run]] = []
        """By deadline. Answered runs stay here until they are half of it."""
        self._dead = 0
        """Number of answered runs there."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """The sequence numbers of all unanswered messages."""
        return chain(self.singles, chain.from_iterable(map(Run.unanswered, self.longer)))

    @property
    def runs(self) -> list[Run]:
        return [*self.singles.values(), *self.longer]

    def lowest(self) -> int | None:
        return min(chain(self.singles, map(attrgetter("low"), self.longer)), default=None)

    def add(self, run: Run) -> None:
        count = run.end - run.first
        if count == 1:
            self.singles[run.first] = run
        else:
            self.longer.add(run)
        self._count += count
        run.client.runs.add(run)
        heappush(self._heap, (run.deadline_ns, next(_order), run))

    def find(self, sequence: int) -> Run | None:
        """The run in which the message is in flight."""
        return self.singles.get(sequence) or self.longer.find(sequence)

    def answer(self, run: Run, sequence: int, most: int = 1) -> int:
        """Take out a message that `run` holds, and up to `most` with those behind it. Gives the
        number."""
        number = 1
        if sequence == run.low and not run.holes:
            number = min(most, run.end - sequence)
            run.low += number
        else:
            run.answer_out_of_order(sequence)
        self._count -= number
        if run.low < run.end:
            return number
        # That was the last message of the run.
        run.client.runs.discard(run)
        if run.end - run.first == 1:
            del self.singles[run.first]
        else:
            self.longer.remove(run)
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].low < entry[2].end]
            heapify(self._heap)
            self._dead = 0
        return number

    def count_below(self, sequence: int) -> int:
        """How many messages with smaller numbers are in flight."""
        return sum(run.count_below(sequence) for run in self.runs)

    def drop_below(self, sequence: int) -> Counter[Client]:
        """Take out every message with a smaller number. Gives how many each client had of them."""
        dropped: Counter[Client] = Counter()
        for run in [run for run in self.runs if run.low < sequence]:
            while run.low < min(run.end, sequence):
                dropped[run.client] += self.answer(run, run.low, sequence - run.low)
        return dropped

    def next_deadline(self) -> int | None:
        heap = self._heap
        while heap and heap[0][2].low == heap[0][2].end:
            heappop(heap)
            self._dead -= 1
        return heap[0][0] if heap else None

    def first_expired(self, now_ns: int) -> Run | None:
        """A run whose deadline has passed. It is given again until its messages have been taken
        out."""
        while (deadline := self.next_deadline()) is not None and deadline <= now_ns:
            run = self._heap[0][2]
            if run.deadline_ns <= now_ns:
                return run
            # TOUCH has moved the deadline.
            heappop(self._heap)
            heappush(self._heap, (run.deadline_ns, next(_order), run))
        return None

    def clear(self) -> None:
        for run in self.runs:
            run.low = run.end
            run.client.runs.discard(run)
        self.singles.clear()
        self.longer.clear()
        self._heap.clear()
        self._count = self._dead = 0
