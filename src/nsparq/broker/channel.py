"""A channel: a cursor over its topic's log, and the exceptions to it.

Every message before the cursor is finished unless it is in flight, waiting to be sent again, or deferred.
Messages are known here by id (see wire.message): the node's part plus the sequence number.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from nsparq.broker.client import Client
from nsparq.broker.deferred import Deferred
from nsparq.broker.inflight import InFlight, Run
from nsparq.broker.latency import Latency, summarize
from nsparq.errors import ClientError, Exiting, SubscribeRefused
from nsparq.names import is_ephemeral
from nsparq.storage.batch import Batch
from nsparq.storage.carry import CARRY_SUFFIX, CarryFile, MemoryCarry
from nsparq.storage.gaps import Gaps
from nsparq.storage.segment import Cold
from nsparq.storage.state import CHANNEL_SUFFIX, ChannelState, StateFile
from nsparq.wire.message import build_frames, with_attempts

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

MAX_WRITE = 128 << 10
"""Bytes handed to one client before the next has its turn."""
PUMP_NS = 10_000_000
"""How long one channel may send before the rest of the daemon has its turn."""


class Channel:
    """Delivery of one topic's messages, each to one of the channel's clients."""

    def __init__(self, topic: Topic, name: str, cursor: int) -> None:
        self.topic = topic
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.is_durable = not self.is_ephemeral and topic.directory is not None
        """Whether its state is kept on disk."""
        self.is_bounded = not self.is_durable
        """Whether it keeps no more than the memory queue's size."""
        self.cursor = cursor
        """The next sequence number never delivered."""
        self.skips = Gaps()
        """Messages of the log that the cursor passes by: taken over from another nsqd for one channel alone,
        or, with their attempts, among the requeued from the start."""
        self.paused = False
        self.is_exiting = False
        self.clients: set[Client] = set()
        self.message_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.dropped_count = 0
        """Messages given up: an ephemeral channel that fell too far behind, or bytes lost to a bad disk."""
        self.is_changed = True
        """Whether a checkpoint would differ from the last one."""
        self.in_flight = InFlight()
        self.deferred = Deferred()
        self.requeued: deque[int] = deque()
        """Ids to be sent again, in the order in which they came back."""
        self.watched_ns: int | None = None
        """When the queue scan will look at this channel next."""
        options = topic.broker.options
        percentiles = options.e2e_processing_latency_percentile
        window_s = options.e2e_processing_latency_window_time
        self._latency = Latency(percentiles, window_s, topic.broker.clock()) if percentiles else None
        self._attempts: dict[int, int] = {}
        """Deliveries so far of the messages requeued or deferred after one."""
        self._deferred_ahead: deque[int] = deque()
        """Sequence numbers of deferred messages that the cursor has still to step over."""
        self._ready: deque[Client] = deque()
        self._turns = 0
        """Clients still to be served in the round of delivery under way."""
        self._share = 0
        """What each of them gets."""
        self._current: Batch | None = None
        """The batch under the cursor."""
        self._requeued_next = True
        """Whose turn it is when both requeued and new messages wait."""
        self._is_warming = False
        self._must_wait = False
        """The disk has just been asked for what is read next: do not ask again, wait."""
        self.state_file: StateFile | None = None
        self._carried: CarryFile | MemoryCarry = MemoryCarry()
        if self.is_durable and topic.directory is not None:
            files = topic.broker.files
            self.state_file = StateFile(files, topic.directory / (name + CHANNEL_SUFFIX))
            self._carried = CarryFile(files, topic.directory / (name + CARRY_SUFFIX))

    def _mark_changed(self) -> None:
        """Have the next round of checkpoints include this channel."""
        self.is_changed = True
        self.topic.broker.note_changed(self.topic)

    # what is there

    @property
    def depth(self) -> int:
        """Messages ready to be sent: neither in flight nor deferred."""
        return len(self.requeued) + self._ahead

    @property
    def backend_depth(self) -> int:
        """The part of the depth that is beyond the memory queue."""
        return min(self._ahead, self._count_to(min(self.topic.log.memory_start, self.topic.visible_end)))

    @property
    def _ahead(self) -> int:
        return self._count_to(self.topic.visible_end) - len(self._deferred_ahead)

    def _count_to(self, end: int) -> int:
        """Messages from the cursor to `end`, less those that it will pass by."""
        log = self.topic.log
        if not self.skips.ranges:
            return log.count(self.cursor, end)
        both = Gaps(self.skips.ranges)
        for start, stop in log.gaps.ranges:
            both.add(start, stop)
        return max(0, end - self.cursor) - both.count(self.cursor, end)

    def low(self) -> int:
        """The oldest sequence number that this channel may still have to read from the log."""
        first = self.topic.first_id
        lowest = min(self.cursor, (self.in_flight.lowest() or self.cursor + first) - first)
        for ids in (self.requeued, self.deferred.due_ns):
            lowest = min(lowest, min(ids, default=self.cursor + first) - first)
        if lowest in self._carried:
            kept = (i - first for i in self._unfinished() if i - first not in self._carried)
            lowest = min(self.cursor, min(kept, default=self.cursor))
        return lowest

    # clients

    def add_client(self, client: Client) -> None:
        if self.is_exiting:
            raise Exiting
        limit = self.topic.broker.options.max_channel_consumers
        if limit and len(self.clients) >= limit:
            raise SubscribeRefused(f"consumers for {self.topic.name}:{self.name} exceeds limit of {limit}")
        self.clients.add(client)
        client.channel = self

    def remove_client(self, client: Client) -> None:
        """The client is gone: what it left unanswered is sent again at once."""
        if client not in self.clients:
            return
        self.clients.remove(client)
        client.channel = None
        client.ready_count = 0
        if client.is_queued:
            client.is_queued = False
            self._ready.remove(client)
        for run in sorted(client.runs, key=lambda run: run.first):
            self._take_back(run, [*run.unanswered()])
        client.runs.clear()
        client.in_flight = 0
        self._mark_changed()
        self.topic.broker.schedule_channel(self)
        if self.is_ephemeral and not self.clients and not self.is_exiting:
            self.topic.delete_channel(self.name)

    def offer(self, client: Client) -> None:
        """The client may have become able to take messages."""
        if not client.is_queued and client.capacity > 0:
            client.is_queued = True
            self._ready.append(client)
        if self._ready:
            self.topic.broker.schedule_channel(self)

    def set_ready(self, client: Client, count: int) -> None:
        client.ready_count = count
        self.offer(client)

    # answers

    def finish(self, client: Client, spans: list[tuple[int, int]], now_ns: int) -> list[ClientError]:
        """FIN, for spans of ids. Gives an error for each id that is not this client's to finish."""
        in_flight, latency = self.in_flight, self._latency
        errors = []
        finished = 0
        for message_id, end in spans:
            while message_id < end:
                run = in_flight.find(message_id)
                if run is None or run.client is not client:
                    reason = "ID not in flight" if run is None else "client does not own message"
                    errors.append(_failed("FIN", message_id, reason))
                    message_id += 1
                    continue
                number = in_flight.answer(run, message_id, end - message_id)
                if latency is not None:
                    for i in range(message_id, message_id + number):
                        latency.record(now_ns - run.timestamp_of(i), now_ns)
                finished += number
                message_id += number
        client.finish_count += finished
        client.in_flight -= finished
        self._mark_changed()
        self.offer(client)
        return errors

    def requeue(self, client: Client, message_id: int, timeout_ms: int, now_ns: int) -> None:
        """REQ: send again at once, or after a while."""
        run = self._owned("REQ", client, message_id)
        self.in_flight.answer(run, message_id)
        self._attempts[message_id] = run.attempts
        if timeout_ms > 0:
            self._defer(message_id, now_ns + timeout_ms * 1_000_000)
        else:
            self.requeued.append(message_id)
        self.requeue_count += 1
        client.requeue_count += 1
        client.in_flight -= 1
        self._mark_changed()
        self.offer(client)

    def touch(self, client: Client, message_id: int, now_ns: int) -> None:
        """TOUCH: a new deadline, within the limit counted from the delivery."""
        run = self._owned("TOUCH", client, message_id)
        limit_ns = run.delivered_ns + int(self.topic.broker.options.max_msg_timeout * 1e9)
        deadline_ns = min(now_ns + client.msg_timeout_ns, limit_ns)
        if run.end - run.first == 1 and deadline_ns >= run.deadline_ns:
            # The heap's entry is early now; it is put right when it comes up.
            run.deadline_ns = deadline_ns
            return
        self.in_flight.answer(run, message_id)
        alone = Run(
            client,
            message_id,
            message_id + 1,
            run.delivered_ns,
            deadline_ns,
            run.attempts,
            run.timestamp_of(message_id),
        )
        self._launch(alone)

    def _owned(self, verb: str, client: Client, message_id: int) -> Run:
        run = self.in_flight.find(message_id)
        if run is None:
            raise _failed(verb, message_id, "ID not in flight")
        if run.client is not client:
            raise _failed(verb, message_id, "client does not own message")
        return run

    # time

    def defer_published(self, sequence: int, due_ns: int) -> None:
        """A message published with a delay: it waits here from the start, and the cursor will pass it by."""
        self._deferred_ahead.append(sequence)
        self._defer(self.topic.first_id + sequence, due_ns)

    def _defer(self, message_id: int, due_ns: int) -> None:
        self.deferred.add(message_id, due_ns)
        self._watch(due_ns)

    def _launch(self, run: Run) -> None:
        self.in_flight.add(run)
        self._watch(run.deadline_ns)

    def _watch(self, at_ns: int) -> None:
        if self.watched_ns is None or at_ns < self.watched_ns:
            self.watched_ns = at_ns
            self.topic.broker.scan.watch(self, at_ns)

    def next_event(self) -> int | None:
        """When something times out or falls due next."""
        times = [at for at in (self.in_flight.next_deadline(), self.deferred.next_due()) if at is not None]
        return min(times, default=None)

    def expire(self, now_ns: int, limit: int) -> int:
        """Requeue what has timed out and what is due, `limit` messages at the most. Gives their number."""
        done = 0
        while done < limit and (run := self.in_flight.first_expired(now_ns)) is not None:
            expired = list(islice(run.unanswered(), limit - done))
            self._take_back(run, expired)
            self.timeout_count += len(expired)
            run.client.in_flight -= len(expired)
            self.offer(run.client)
            done += len(expired)
        while done < limit and (due := self.deferred.pop_due(now_ns)) is not None:
            self.requeued.append(due)
            done += 1
        if done:
            self._mark_changed()
            self.topic.broker.schedule_channel(self)
        return done

    def _take_back(self, run: Run, ids: list[int]) -> None:
        """Messages that were not answered: they are sent again."""
        for message_id in ids:
            self.in_flight.answer(run, message_id)
            self._attempts[message_id] = run.attempts
        self.requeued.extend(ids)

    # delivery

    def appended(self, count: int) -> None:
        """The topic has made `count` more messages visible."""
        self.message_count += count
        if self._ready or self.is_bounded:
            self.topic.broker.schedule_channel(self)

    def pump(self, now_ns: int) -> None:
        """Send what can be sent, in rounds: what waits is spread evenly over the clients that are ready."""
        stop_ns = self.topic.broker.clock() + PUMP_NS
        while not self.paused and self._round(now_ns, stop_ns):
            pass
        self.step_over()
        if not self._ready:
            self._current = None
        if self.is_bounded:
            self._bound()

    def _round(self, now_ns: int, stop_ns: int) -> bool:
        """Give each ready client its share. False when nothing more can be sent now."""
        ready, clock = self._ready, self.topic.broker.clock
        if not self._turns:
            depth = self.depth
            self._turns = min(len(ready), depth)
            self._share = max(1, depth // len(ready)) if ready else 0
        while self._turns and ready:
            if clock() > stop_ns:
                # The round goes on with the same shares when the others have had their time.
                self.topic.broker.schedule_channel(self)
                return False
            self._turns -= 1
            client = ready[0]
            if not self._serve(client, now_ns):
                self._turns = 0
                return False
            ready.rotate(-1)
            if client.capacity <= 0:
                ready.pop()
                client.is_queued = False
        self._turns = 0
        return len(ready) > 0 and self.depth > 0

    def _serve(self, client: Client, now_ns: int) -> bool:
        """Give one client its share, as far as it can take it. False when nothing can be sent now."""
        wanted = self._share
        while wanted > 0 and (capacity := client.capacity) > 0:
            passed = self._deliver(client, min(capacity, wanted), now_ns)
            if passed is None:
                return False
            if not passed and not self.depth:
                break
            wanted -= passed
        return True

    def _deliver(self, client: Client, limit: int, now_ns: int) -> int | None:
        """Send up to `limit` messages; gives how many have gone from the queue. None if it cannot be done
        now."""
        if self._is_warming:
            return None
        has_new = self.cursor < self.topic.visible_end
        try:
            if self.requeued and (self._requeued_next or not has_new):
                self._requeued_next = False
                passed = self._deliver_again(client, limit, now_ns)
            else:
                self._requeued_next = True
                passed = self._deliver_new(client, limit, now_ns)
        except Cold as cold:
            self._warm(cold)
            return None
        except OSError as error:
            self.topic.broker.read_failed(self, error)
            return None
        self._mark_changed()
        return passed

    def _deliver_new(self, client: Client, limit: int, now_ns: int) -> int:
        batch = self._batch_at_cursor()
        if batch is None:
            return 0
        buffer, offsets = batch.frames or self._build(batch)
        index = self.cursor - batch.base
        most = min(limit, batch.count - index, self._stretch_end() - self.cursor)
        fitting = bisect_right(offsets, offsets[index] + MAX_WRITE) - 1 - index
        number = max(1, min(most, fitting))
        first = self.topic.first_id + self.cursor
        self.cursor += number
        if client.identity.sample_rate:
            self._deliver_sample(client, batch, index, number, now_ns)
            return number
        start, end = offsets[index], offsets[index + number]
        # A slice is copied: a client that does not read must not hold on to the whole batch.
        client.send(buffer if end - start == len(buffer) else buffer[start:end])
        stamps = batch.timestamps_ns
        if not isinstance(stamps, int):
            stamps = stamps[index : index + number]
        self._launch(Run(client, first, first + number, now_ns, now_ns + client.msg_timeout_ns, 1, stamps))
        client.in_flight += number
        client.message_count += number
        return number

    def _deliver_sample(self, client: Client, batch: Batch, index: int, number: int, now_ns: int) -> None:
        """A client that asked for a share: what it does not get is gone for the channel."""
        buffer, offsets = batch.frames or self._build(batch)
        deadline_ns = now_ns + client.msg_timeout_ns
        for i in range(index, index + number):
            if random.randrange(100) > client.identity.sample_rate:
                continue
            message_id = self.topic.first_id + batch.base + i
            client.send(buffer[offsets[i] : offsets[i + 1]])
            self._launch(
                Run(client, message_id, message_id + 1, now_ns, deadline_ns, 1, batch.timestamp_of(i))
            )
            client.in_flight += 1
            client.message_count += 1

    def _batch_at_cursor(self) -> Batch | None:
        """The batch that holds the cursor, which steps over gaps and deferred messages; None at the end."""
        batch = self._current
        while True:
            self.step_over()
            if self.cursor >= self.topic.visible_end:
                return None
            if batch is not None and batch.base <= self.cursor < batch.end and not batch.due_ns:
                self._current = batch
                return batch
            batch = self.topic.log.read(self.cursor, wait=self._must_wait)
            self._must_wait = False
            if batch is None:
                self.cursor = self.topic.visible_end
                return None
            self.cursor = min(max(self.cursor, batch.base), self.topic.visible_end)
            if batch.due_ns and self.cursor < batch.end:
                self._jump(batch.end)

    def step_over(self) -> None:
        """Move the cursor out of numbers that hold no message for this channel."""
        if not (self.topic.log.gaps.ranges or self.skips.ranges or self._deferred_ahead):
            return
        if not self._ahead:
            self._jump(self.topic.visible_end)
        gaps, skips = self.topic.log.gaps, self.skips
        while gaps.ranges or skips.ranges:
            following = min(skips.skip(gaps.skip(self.cursor)), self.topic.visible_end)
            if following <= self.cursor:
                break
            self._jump(following)
        skips.drop_before(self.cursor)

    def _stretch_end(self) -> int:
        """How far the cursor may go before it must step over something. Batches that were read from disk
        come joined, so this may be inside one."""
        end = self.topic.visible_end
        if not (self.topic.log.gaps.ranges or self.skips.ranges):
            return end
        for ranges in (self.topic.log.gaps.ranges, self.skips.ranges):
            for start, _ in ranges:
                if self.cursor < start < end:
                    end = start
        return end

    def _deliver_again(self, client: Client, limit: int, now_ns: int) -> int:
        pieces: list[bytes] = []
        before = len(self.requeued)
        deadline_ns = now_ns + client.msg_timeout_ns
        size = 0
        for _ in range(min(limit, len(self.requeued))):
            message_id = self.requeued[0]
            try:
                found = self._find(message_id - self.topic.first_id)
            except (Cold, OSError):
                if pieces:
                    break
                raise
            self.requeued.popleft()
            attempts = (self._attempts.pop(message_id, 0) + 1) & 0xFFFF
            if found is None:
                self.dropped_count += 1
                logger.error("%s: message %016x is lost to a damaged log", self, message_id)
                continue
            if client.identity.sample_rate and random.randrange(100) > client.identity.sample_rate:
                continue
            frame, timestamp_ns = found
            pieces.append(frame if attempts == 1 else with_attempts(frame, attempts))
            size += len(frame)
            self._launch(Run(client, message_id, message_id + 1, now_ns, deadline_ns, attempts, timestamp_ns))
            if size >= MAX_WRITE:
                break
        if pieces:
            client.send(b"".join(pieces))
        client.in_flight += len(pieces)
        client.message_count += len(pieces)
        return before - len(self.requeued)

    def _find(self, sequence: int) -> tuple[bytes, int] | None:
        """The first-delivery frame of a message and its publish time."""
        batch = self._carried.read(sequence) if sequence in self._carried else None
        if batch is None:
            batch = self.topic.log.read(sequence, wait=self._must_wait)
            self._must_wait = False
        if batch is None or not batch.base <= sequence < batch.end:
            return None
        buffer, offsets = batch.frames or self._build(batch)
        index = sequence - batch.base
        return buffer[offsets[index] : offsets[index + 1]], batch.timestamp_of(index)

    def _build(self, batch: Batch) -> tuple[bytes, list[int]]:
        frames = build_frames(
            self.topic.first_id + batch.base, batch.timestamps_ns, batch.lengths, batch.data
        )
        batch.frames = frames
        return frames

    def _warm(self, cold: Cold) -> None:
        """Have the disk read in a thread; delivery goes on when it has."""
        self._is_warming = True

        def warmed() -> None:
            self._is_warming = False
            self._must_wait = True
            self.topic.broker.schedule_channel(self)

        self.topic.broker.warm(cold, warmed)

    def _bound(self) -> None:
        """An ephemeral channel keeps no more than the memory queue's size: the oldest go, and are counted."""
        limit = self.topic.broker.options.mem_queue_size
        surplus = self.depth - limit
        while surplus > 0 and self.requeued:
            self._attempts.pop(self.requeued.popleft(), None)
            self.dropped_count += 1
            surplus -= 1
        if surplus > 0:
            before = self._ahead
            self._jump(self._behind(surplus))
            self._current = None
            self.dropped_count += before - self._ahead

    def _behind(self, count: int) -> int:
        """The sequence number that the cursor reaches when it passes `count` messages."""
        end = self.topic.visible_end
        reached = self.cursor + count
        while reached < end:
            deferred = sum(1 for sequence in self._deferred_ahead if sequence < reached)
            missing = count - (self._count_to(reached) - deferred)
            if missing <= 0:
                return reached
            reached += missing
        return end

    def _jump(self, sequence: int) -> None:
        """Move the cursor, and forget the deferred messages that it passes by."""
        self.cursor = sequence
        while self._deferred_ahead and self._deferred_ahead[0] < sequence:
            self._deferred_ahead.popleft()

    # management

    def pause(self) -> None:
        self.paused = True
        self._mark_changed()
        self.topic.broker.channel_changed(self)

    def unpause(self) -> None:
        self.paused = False
        self._mark_changed()
        self.topic.broker.channel_changed(self)
        self.topic.broker.schedule_channel(self)

    def empty(self) -> None:
        """Drop everything: what waits, what is in flight, what is deferred."""
        self.cursor = self.topic.visible_end
        self._deferred_ahead.clear()
        self._current = None
        self.in_flight.clear()
        self.deferred.clear()
        self.requeued.clear()
        self._attempts.clear()
        self._mark_changed()
        for client in self.clients:
            client.in_flight = 0
            self.offer(client)
        self.topic.broker.channel_changed(self)

    def close(self) -> None:
        """Take leave of the clients, because the channel goes or the daemon stops."""
        self.is_exiting = True
        for client in [*self.clients]:
            client.close()
            self.remove_client(client)

    # state

    def snapshot(self) -> ChannelState:
        """Everything needed to go on after a restart."""
        flying = [(i, run.attempts) for run in self.in_flight.runs for i in run.unanswered()]
        waiting = [*self.requeued, *self.deferred.due_ns]
        ids = [i for i, _ in flying] + waiting
        attempts = [number for _, number in flying] + [self._attempts.get(i, 0) for i in waiting]
        due = np.zeros(len(ids), np.int64)
        due[len(ids) - len(self.deferred) :] = np.fromiter(
            self.deferred.due_ns.values(), np.int64, len(self.deferred)
        )
        return ChannelState(
            cursor=self.cursor,
            seen=self.topic.visible_end,
            paused=self.paused,
            skips=self.skips.ranges,
            ids=np.array(ids, np.uint64),
            due_ns=due,
            attempts=np.array(attempts, np.uint16),
        )

    def restore(self, state: ChannelState | None) -> None:
        """Go on where an earlier run stood. Without its state, everything that is kept is sent again."""
        log, first = self.topic.log, self.topic.first_id
        carried = self._carried.load()
        self.is_changed = False
        if state is None:
            self._mark_changed()
            state = ChannelState(cursor=log.start, seen=log.start)
        self.cursor = max(state.cursor, log.start)
        self.skips = Gaps(state.skips)
        self.paused = state.paused
        unfinished = set()
        for message_id, due_ns, attempts in zip(
            state.ids.tolist(), state.due_ns.tolist(), state.attempts.tolist(), strict=True
        ):
            sequence = message_id - first
            # The log lets go only of what is finished or carried: this one was finished after the checkpoint.
            if sequence < log.start and sequence not in self._carried:
                continue
            unfinished.add(sequence)
            if attempts:
                self._attempts[message_id] = attempts
            if due_ns:
                self._defer(message_id, due_ns)
            else:
                self.requeued.append(message_id)
        # Delivered, and carried over, after the checkpoint; what the log still has, the cursor finds.
        late = (s for s in carried if state.cursor <= s < self.cursor and s not in unfinished)
        self.requeued.extend(first + sequence for sequence in late)
        self.drop_carried()
        for sequence, due_ns in log.deferred_since(self.cursor):
            if sequence >= self.topic.visible_end:
                continue
            self._deferred_ahead.append(sequence)
            if sequence >= state.seen:
                self._defer(first + sequence, due_ns)

    def add_tried(self, sequence: int, attempts: list[int]) -> None:
        """Messages from `sequence` on that another nsqd has delivered before, so many times each: they wait
        to be sent again, and the cursor will pass them by."""
        first = self.topic.first_id + sequence
        self.skips.add(sequence, sequence + len(attempts))
        self.requeued.extend(range(first, first + len(attempts)))
        self._attempts.update(zip(range(first, first + len(attempts)), attempts, strict=True))

    def carry_over(self, before: int, limit: int) -> bool:
        """Copy what is unfinished of the log before `before` into the channel's own keeping, so that the
        log can let go of it. False, and nothing done, if that would be more than `limit` messages."""
        if self.cursor < before:
            return False
        first = self.topic.first_id
        wanted = [
            i - first for i in self._unfinished() if i - first < before and i - first not in self._carried
        ]
        if len(wanted) > limit:
            return False
        messages: list[tuple[int, int, bytes]] = []
        for sequence in sorted(wanted):
            batch = self.topic.log.read(sequence, wait=True)
            if batch is None or not batch.base <= sequence < batch.end:
                continue
            index = sequence - batch.base
            start = sum(batch.lengths[:index])
            messages.append(
                (sequence, batch.timestamp_of(index), batch.data[start : start + batch.lengths[index]])
            )
        if messages:
            self._carried.add(messages)
        return True

    def drop_carried(self) -> None:
        """Let go of carried messages that have been finished since."""
        if len(self._carried):
            first = self.topic.first_id
            self._carried.keep_only(i - first for i in self._unfinished())

    def _unfinished(self) -> Iterable[int]:
        return chain(self.in_flight, self.requeued, self.deferred.due_ns)

    def save(self, *, sync: bool) -> None:
        """Write down now where the channel stands."""
        if self.state_file is not None:
            self.is_changed = False
            self.state_file.write(self.snapshot().encode(), self.state_file.next_version(), sync=sync)

    def remove_files(self) -> None:
        if self.state_file is not None:
            self.state_file.remove()
        self._carried.remove()

    def stats(self, include_clients: bool, now_ns: int) -> dict[str, Any]:
        latency = self._latency
        return {
            "channel_name": self.name,
            "depth": self.depth,
            "backend_depth": self.backend_depth,
            "in_flight_count": len(self.in_flight),
            "deferred_count": len(self.deferred),
            "message_count": self.message_count,
            "requeue_count": self.requeue_count,
            "timeout_count": self.timeout_count,
            "client_count": len(self.clients),
            "clients": [client.stats() for client in self.clients] if include_clients else None,
            "paused": self.paused,
            "e2e_processing_latency": summarize(
                latency.percentiles if latency else (), [latency.buckets(now_ns)] if latency else []
            ),
            "dropped_count": self.dropped_count,
        }

    def latency_parts(self, now_ns: int) -> list[Any]:
        return [self._latency.buckets(now_ns)] if self._latency else []

    def __str__(self) -> str:
        return f"{self.topic.name}:{self.name}"


def _failed(verb: str, message_id: int, reason: str) -> ClientError:
    return ClientError(f"E_{verb}_FAILED", f"{verb} {message_id:016x} failed {reason}")
