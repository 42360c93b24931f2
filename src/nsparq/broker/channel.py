"""A channel: its clients, and the delivery to them of what its backlog holds.

Where it stands in its topic's log, and how that is kept, is in `backlog`.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from nsparq.broker.backlog import Backlog, SeekPlan
from nsparq.broker.client import Client
from nsparq.broker.inflight import Run
from nsparq.broker.latency import Latency, summarize
from nsparq.chance import chance
from nsparq.errors import ClientError, Exiting, SubscribeRefused
from nsparq.storage.batch import Batch
from nsparq.storage.ranges import OffsetAhead
from nsparq.storage.segment import Cold
from nsparq.wire.message import build_frames, with_attempts

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

MAX_WRITE = 128 << 10
"""Bytes handed to one client before the next has its turn."""
MAX_HELD = 4
"""How many times what it is sent a client that does not read may make us keep."""
TOPOLOGY_AWARE = "topology-aware-consumption"
PUMP_NS = 10_000_000
"""How long one channel may send before the rest of the daemon has its turn."""


class Channel(Backlog):
    """Delivery of one topic's messages, each to one of the channel's clients."""

    def __init__(self, topic: Topic, name: str, cursor: int) -> None:
        super().__init__(topic, name, cursor)
        self.is_bounded = not self.is_durable
        """Whether it keeps no more than the memory queue's size."""
        self.is_exiting = False
        self.hold = ""
        """Name of the hold that keeps it from delivering for the moment; empty if there is none."""
        self.clients: dict[Client, None] = {}
        """In the order in which they subscribed. A set would have them in the order of their addresses in
        memory, and who gets what would depend on that."""
        self.message_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.watched_ns: int | None = None
        """When the queue scan will look at this channel next."""
        options = topic.broker.options
        percentiles = options.e2e_processing_latency_percentile
        window_s = options.e2e_processing_latency_window_time
        self._latency = Latency(percentiles, window_s, topic.broker.monotonic_ns()) if percentiles else None
        self._lines: tuple[deque[Client], ...] = (deque(), deque(), deque())
        """Clients that are ready, by how far away they are: see _distance."""
        self._delivered = [0, 0, 0]
        """Messages delivered to each of these, where the distance counts."""
        self._turns = 0
        """Clients still to be served in the round of delivery under way."""
        self._share = 0
        """What each of them gets."""
        self._current: Batch | None = None
        """The batch under the cursor."""
        self._open: Run | None = None
        """What has been delivered last in the pump() under way, and may grow. Where latencies are recorded it
        does not: there a run needs the publish time of each message."""
        self._requeued_next = True
        """Whose turn it is when both requeued and new messages wait."""
        self._warming: Cold | None = None
        """What the disk is being asked for; nothing is sent meanwhile."""
        self._must_wait = False
        """The disk has just been asked for what is read next: do not ask again, wait."""

    # clients

    def add_client(self, client: Client) -> None:
        if self.is_exiting:
            raise Exiting
        limit = self.topic.broker.options.max_channel_consumers
        if limit and len(self.clients) >= limit:
            raise SubscribeRefused(f"consumers for {self.topic.name}:{self.name} exceeds limit of {limit}")
        self.clients[client] = None
        client.channel = self
        client.distance = self._distance(client)

    def _distance(self, client: Client) -> int:
        """0 in the same zone, 1 in the same region, 2 elsewhere; the same for all unless that experiment of
        NSQ's is on. Nearer clients are served first, and others only while no nearer one is ready."""
        options = self.topic.broker.options
        if TOPOLOGY_AWARE not in options.enable_experiment:
            return 2
        if options.topology_zone and client.identity.topology_zone == options.topology_zone:
            return 0
        same_region = client.identity.topology_region == options.topology_region
        return 1 if options.topology_region and same_region else 2

    def remove_client(self, client: Client) -> None:
        """The client is gone: what it left unanswered is sent again at once."""
        if client not in self.clients:
            return
        del self.clients[client]
        self._launch_open()
        client.channel = None
        client.ready_count = 0
        if client.is_queued:
            client.is_queued = False
            self._lines[client.distance].remove(client)
        for run in sorted(client.runs, key=lambda run: run.first):
            self._take_back(run, [*run.unanswered()])
        client.runs.clear()
        client.in_flight = 0
        self._mark_changed()
        self.topic.broker.next_turn.add_channel(self)
        if self.is_ephemeral and not self.clients and not self.is_exiting:
            self.topic.delete_channel(self.name)

    def offer(self, client: Client) -> None:
        """The client may have become able to take messages."""
        if not client.is_queued and client.capacity > 0:
            client.is_queued = True
            self._lines[client.distance].append(client)
        if (self.requeued or self.cursor < self.topic.visible_end) and any(self._lines):
            self.topic.broker.next_turn.add_channel(self)

    def set_ready(self, client: Client, count: int) -> None:
        client.ready_count = count
        self.offer(client)

    # answers

    def finish(self, client: Client, spans: list[tuple[int, int]], now_ns: int) -> list[ClientError]:
        """FIN, for spans of ids. Gives an error for each id that is not this client's to finish."""
        in_flight, latency, first_id = self.in_flight, self._latency, self.topic.first_id
        errors = []
        finished = 0
        for message_id, end_id in spans:
            sequence, end = message_id - first_id, end_id - first_id
            while sequence < end:
                run = in_flight.find(sequence)
                if run is None or run.client is not client:
                    reason = "ID not in flight" if run is None else "client does not own message"
                    errors.append(_failed("FIN", first_id + sequence, reason))
                    sequence += 1
                    continue
                number = in_flight.answer(run, sequence, end - sequence)
                if latency is not None:
                    wall_ns = self.topic.broker.wall_ns()
                    for i in range(sequence, sequence + number):
                        latency.record(wall_ns - run.timestamp_of(i), now_ns)
                finished += number
                sequence += number
        client.finish_count += finished
        client.in_flight -= finished
        self._mark_changed()
        self.offer(client)
        return errors

    def requeue(self, client: Client, message_id: int, timeout_ms: int, now_ns: int) -> None:
        """REQ: send again at once, or after a while."""
        run, sequence = self._owned("REQ", client, message_id)
        self.in_flight.answer(run, sequence)
        if sequence < self.topic.given_up_before:
            self.dropped_count += 1
        else:
            self._attempts[sequence] = run.attempts
            if timeout_ms > 0:
                self._defer(sequence, now_ns + timeout_ms * 1_000_000)
            else:
                self.requeued.append(sequence)
        self.requeue_count += 1
        client.requeue_count += 1
        client.in_flight -= 1
        self._mark_changed()
        self.offer(client)

    def touch(self, client: Client, message_id: int, now_ns: int) -> None:
        """TOUCH: a new deadline, within the limit counted from the delivery."""
        run, sequence = self._owned("TOUCH", client, message_id)
        limit_ns = run.delivered_ns + int(self.topic.broker.options.max_msg_timeout * 1e9)
        deadline_ns = min(now_ns + client.msg_timeout_ns, limit_ns)
        if run.end - run.first == 1 and deadline_ns >= run.deadline_ns:
            # The heap's entry is early now; it is put right when it comes up.
            run.deadline_ns = deadline_ns
            return
        self.in_flight.answer(run, sequence)
        alone = Run(
            client,
            sequence,
            sequence + 1,
            run.delivered_ns,
            deadline_ns,
            run.attempts,
            run.timestamp_of(sequence),
        )
        self._launch(alone)

    def _owned(self, verb: str, client: Client, message_id: int) -> tuple[Run, int]:
        """The client's delivery that holds the message, and the message's sequence number."""
        sequence = message_id - self.topic.first_id
        run = self.in_flight.find(sequence)
        if run is None:
            raise _failed(verb, message_id, "ID not in flight")
        if run.client is not client:
            raise _failed(verb, message_id, "client does not own message")
        return run, sequence

    # time

    def _launch(self, run: Run) -> None:
        self.in_flight.add(run)
        self._watch(run.deadline_ns)

    def _launch_open(self) -> None:
        run, self._open = self._open, None
        if run is not None:
            self._launch(run)

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
            self.topic.broker.next_turn.add_channel(self)
        return done

    def _take_back(self, run: Run, sequences: list[int]) -> None:
        """Messages that were not answered: they are sent again, unless they have been given up."""
        for sequence in sequences:
            self.in_flight.answer(run, sequence)
        if run.first < self.topic.given_up_before:
            number = len(sequences)
            sequences = [sequence for sequence in sequences if sequence >= self.topic.given_up_before]
            self.dropped_count += number - len(sequences)
        for sequence in sequences:
            self._attempts[sequence] = run.attempts
        self.requeued.extend(sequences)

    # delivery

    def appended(self, count: int) -> None:
        """The topic has made `count` more messages visible."""
        self.message_count += count
        if self.is_bounded or any(self._lines):
            self.topic.broker.next_turn.add_channel(self)

    def pump(self, now_ns: int) -> int:
        """Send what can be sent, in rounds: what waits is spread evenly over the clients that are ready.
        Gives how far the cursor has come."""
        start = self.cursor
        stop_ns = self.topic.broker.monotonic_ns() + PUMP_NS
        goes_on = not (self.paused or self.hold)
        try:
            ready = self._nearest()
            if goes_on and len(ready) == 1 and not (self.requeued or self._turns):
                goes_on = self._stream(ready[0], now_ns, stop_ns)
            while goes_on:
                goes_on = self._round(now_ns, stop_ns)
        finally:
            self._launch_open()
        if self.is_exiting:
            # Its last client left while it was sent to, and the channel was ephemeral.
            return self.cursor - start
        self.step_over()
        if not any(self._lines):
            self._current = None
        if self.is_bounded:
            self._bound()
        return self.cursor - start

    def _stream(self, client: Client, now_ns: int, stop_ns: int) -> bool:
        """What rounds come to where one client is ready and nothing came back: all that is new goes to it.
        False when nothing more can be sent now."""
        topic = self.topic
        self._mark_changed()
        while (capacity := client.capacity) > 0:
            if self.cursor >= topic.visible_end or self._warming is not None:
                return False
            try:
                self._delivered[client.distance] += self._deliver_new(client, capacity, now_ns)
            except (Cold, OSError) as error:
                self._unreadable(error)
                return False
            if topic.broker.monotonic_ns() > stop_ns:
                topic.broker.next_turn.add_channel(self)
                return False
        if client.is_queued:
            client.is_queued = False
            self._lines[client.distance].remove(client)
        return any(self._lines)

    def _round(self, now_ns: int, stop_ns: int) -> bool:
        """Give each ready client its share. False when nothing more can be sent now."""
        ready, clock = self._nearest(), self.topic.broker.monotonic_ns
        before = (self.cursor, len(self.requeued), len(ready))
        if not self._turns:
            depth = max(0, self.depth)
            self._turns = min(len(ready), depth)
            self._share = max(1, depth // len(ready)) if ready else 0
        while self._turns and ready:
            if clock() > stop_ns:
                # The round goes on with the same shares when the others have had their time.
                self.topic.broker.next_turn.add_channel(self)
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
        moved = before != (self.cursor, len(self.requeued), len(ready))
        return moved and any(self._lines) and self.depth > 0

    def _nearest(self) -> deque[Client]:
        """The line whose clients are served now."""
        near, middle, far = self._lines
        return near or middle or far

    def _serve(self, client: Client, now_ns: int) -> bool:
        """Give one client its share, as far as it can take it. False when nothing can be sent now."""
        wanted = self._share
        while wanted > 0 and (capacity := client.capacity) > 0:
            passed = self._deliver(client, min(capacity, wanted), now_ns)
            if passed is None:
                return False
            if not passed and not self.requeued:
                # The cursor is at the end. A depth that said otherwise must not keep us here.
                break
            self._delivered[client.distance] += passed
            wanted -= passed
        return True

    def _deliver(self, client: Client, limit: int, now_ns: int) -> int | None:
        """Send up to `limit` messages; gives how many have gone from the queue. None if it cannot be done
        now."""
        if self._warming is not None:
            return None
        has_new = self.cursor < self.topic.visible_end
        try:
            if self.requeued and (self._requeued_next or not has_new):
                self._requeued_next = False
                passed = self._deliver_again(client, limit, now_ns)
            else:
                self._requeued_next = True
                passed = self._deliver_new(client, limit, now_ns)
        except (Cold, OSError) as error:
            self._unreadable(error)
            return None
        self._mark_changed()
        return passed

    def _unreadable(self, error: Cold | OSError) -> None:
        """What is to be sent next cannot be read now."""
        if isinstance(error, Cold):
            self._warm(error)
        else:
            self.topic.broker.read_failed(self, error)

    def _deliver_new(self, client: Client, limit: int, now_ns: int) -> int:
        batch = self._batch_at_cursor()
        if batch is None:
            return 0
        buffer, offsets = batch.frames or self._build(batch)
        cursor = self.cursor
        index = cursor - batch.base
        number = min(limit, batch.end - cursor, self._stretch_end() - cursor)
        start, end = offsets[index], offsets[index + number]
        if end - start > MAX_WRITE:
            number = max(1, bisect_right(offsets, start + MAX_WRITE) - 1 - index)
            end = offsets[index + number]
        # Only up to the next deferred message: nothing is passed by here.
        self.cursor += number
        if client.identity.sample_rate:
            self._deliver_sample(client, batch, index, number, now_ns)
            return number
        run = self._open
        if run is not None and run.end == cursor and run.client is client and self._latency is None:
            run.end += number
        else:
            self._launch_open()
            stamps = 0 if self._latency is None else batch.timestamps_of(index, number)
            deadline_ns = now_ns + client.msg_timeout_ns
            self._open = Run(client, cursor, cursor + number, now_ns, deadline_ns, 1, stamps)
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

    def _deliver_sample(self, client: Client, batch: Batch, index: int, number: int, now_ns: int) -> None:
        """A client that asked for a share: what it does not get is gone for the channel."""
        buffer, offsets = batch.frames or self._build(batch)
        deadline_ns = now_ns + client.msg_timeout_ns
        pieces: list[bytes] = []
        for i in range(index, index + number):
            if chance.randrange(100) > client.identity.sample_rate:
                continue
            sequence = batch.base + i
            pieces.append(buffer[offsets[i] : offsets[i + 1]])
            self._launch(Run(client, sequence, sequence + 1, now_ns, deadline_ns, 1, batch.timestamp_of(i)))
        self._send_pieces(client, pieces)

    def _send_pieces(self, client: Client, pieces: list[bytes]) -> None:
        """Send messages that are in flight already: if sending ends the connection, they are taken back."""
        if pieces:
            client.in_flight += len(pieces)
            client.message_count += len(pieces)
            client.send(b"".join(pieces))

    def _batch_at_cursor(self) -> Batch | None:
        """The batch that holds the cursor, which steps over gaps and deferred messages; None at the end."""
        batch = self._current
        passes_by = False
        while True:
            self.step_over()
            if self.cursor >= self.topic.visible_end:
                return None
            if batch is not None and batch.base <= self.cursor < batch.end and not passes_by:
                self._current = batch
                return batch
            batch = self.topic.log.read(self.cursor, wait=self._must_wait)
            self._must_wait = False
            if batch is None:
                self._jump(self.topic.visible_end)
                return None
            self._jump(min(max(self.cursor, batch.base), self.topic.visible_end))
            passes_by = batch.due_ns > 0 and not self._is_replayed(batch.base, batch.due_ns)
            if passes_by and self.cursor < batch.end:
                self._jump(batch.end)

    def _deliver_again(self, client: Client, limit: int, now_ns: int) -> int:
        pieces: list[bytes] = []
        before = len(self.requeued)
        deadline_ns = now_ns + client.msg_timeout_ns
        size = 0
        for _ in range(min(limit, len(self.requeued))):
            sequence = self.requeued[0]
            try:
                found = self._find(sequence)
            except (Cold, OSError):
                if pieces:
                    break
                raise
            self.requeued.popleft()
            attempts = (self._attempts.pop(sequence, 0) + 1) & 0xFFFF
            if found is None:
                self.dropped_count += 1
                logger.error("%s: message %d is lost to a damaged log", self, sequence)
                continue
            if client.identity.sample_rate and chance.randrange(100) > client.identity.sample_rate:
                continue
            frame, timestamp_ns = found
            pieces.append(frame if attempts == 1 else with_attempts(frame, attempts))
            size += len(frame)
            self._launch(Run(client, sequence, sequence + 1, now_ns, deadline_ns, attempts, timestamp_ns))
            if size >= MAX_WRITE:
                break
        passed = before - len(self.requeued)
        self._send_pieces(client, pieces)
        return passed

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

    def _build(self, batch: Batch) -> tuple[bytes, array[int]]:
        frames = build_frames(
            self.topic.first_id + batch.base, batch.timestamps_ns, batch.lengths, batch.data
        )
        batch.frames = frames
        return frames

    def _warm(self, cold: Cold) -> None:
        """Have the disk read in a thread; delivery goes on when it has."""
        self._warming = cold

        def warmed() -> None:
            if self._warming is cold:
                self._warming = None
                self._must_wait = True
            self.topic.broker.next_turn.add_channel(self)

        self.topic.broker.read_ahead(cold, warmed)

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

    def give_up(self, before: int) -> None:
        self._current = None
        super().give_up(before)

    # management

    def pause(self) -> None:
        self.paused = True
        self._mark_changed()
        self.topic.broker.channel_changed(self)

    def unpause(self) -> None:
        self.paused = False
        self._mark_changed()
        self.topic.broker.channel_changed(self)
        self.topic.broker.next_turn.add_channel(self)

    def start_hold(self, name: str) -> None:
        """Deliver nothing for the moment. Unlike a pause it is not kept on disk, and whoever asked for it has
        seen to it that it ends. A hold that is there already is replaced."""
        self.hold = name

    def end_hold(self, name: str) -> bool:
        """False if another hold, or none, is there by now."""
        if self.hold != name:
            return False
        self.hold = ""
        self.topic.broker.next_turn.add_channel(self)
        return True

    def empty(self) -> None:
        """Drop everything: what waits, what is in flight, what is deferred."""
        self._jump(self.topic.visible_end)
        self._drop_all()
        self._mark_changed()
        self._offer_all()
        self.topic.broker.channel_changed(self)

    def seek(self, sequence: int) -> SeekPlan:
        """Go to a number of the log, or as near as the log reaches: everything from there on is delivered, as
        if for the first time, and everything before it is done. On disk when
        DurableChanges.when_durable() says so; raises OSError, with nothing changed.

        What is in flight is so no longer: the clients get other messages, and their late answers an error.
        """
        plan = self.plan_seek(sequence)
        state = self.state_at(plan.target)
        self.topic.save_channel(self, state)
        self._drop_all()
        self.resume(state)
        self.topic.low_fell()
        self.topic.broker.upkeep.note_changed(self.topic)
        self._offer_all()
        self.topic.broker.next_turn.add_channel(self)
        return plan

    def commit(self, sequence: int) -> None:
        """Everything before this number is done, in flight or not. The cursor never goes back. As with FIN,
        the next checkpoint keeps it. Raises OffsetAhead."""
        if sequence > self.topic.visible_end:
            raise OffsetAhead(sequence, self.topic.visible_end)
        self._drop_below(sequence)
        if sequence > self.cursor:
            self._jump(sequence)
            self._current = None
        self._mark_changed()
        for client, number in self.in_flight.drop_below(sequence).items():
            client.in_flight -= number
            self.offer(client)

    def claim(self, owner: str) -> None:
        """From now on `owner` alone may commit; nobody in particular if it is empty. On disk as a seek is;
        raises OSError, with nothing changed."""
        if owner == self.owner:
            return
        before = self.owner, self.owned_since_ns
        self.owner, self.owned_since_ns = owner, self.topic.broker.wall_ns() if owner else 0
        try:
            self.topic.save_channel(self)
        except OSError:
            self.owner, self.owned_since_ns = before
            raise

    def _offer_all(self) -> None:
        """The channel has gone elsewhere in the log, and nothing is in flight any more."""
        self._current = None
        self._warming, self._must_wait = None, False
        for client in self.clients:
            client.in_flight = 0
            self.offer(client)

    def close(self) -> None:
        """Take leave of the clients, because the channel goes or the daemon stops."""
        self.is_exiting = True
        for client in [*self.clients]:
            client.close()
            self.remove_client(client)

    def stats(self, include_clients: bool, now_ns: int) -> dict[str, Any]:
        latency = self._latency
        return {
            "channel_name": self.name,
            "depth": self.depth,
            "backend_depth": self.backend_depth,
            "in_flight_count": len(self.in_flight),
            "deferred_count": len(self.deferred),
            "message_count": self.message_count,
            **self._local_counts(),
            "requeue_count": self.requeue_count,
            "timeout_count": self.timeout_count,
            "client_count": len(self.clients),
            "clients": [client.stats() for client in self.clients] if include_clients else None,
            "paused": self.paused,
            "e2e_processing_latency": summarize(
                latency.percentiles if latency else (), [latency.buckets(now_ns)] if latency else []
            ),
            "dropped_count": self.dropped_count,
            "owner": self.owner,
        }

    def _local_counts(self) -> dict[str, int]:
        """Where the experiment is on; NSQ leaves out what is 0."""
        if TOPOLOGY_AWARE not in self.topic.broker.options.enable_experiment:
            return {}
        names = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")
        return {name: count for name, count in zip(names, self._delivered, strict=True) if count}

    def latency_parts(self, now_ns: int) -> list[Any]:
        return [self._latency.buckets(now_ns)] if self._latency else []


def _failed(verb: str, message_id: int, reason: str) -> ClientError:
    return ClientError(f"E_{verb}_FAILED", f"{verb} {message_id:016x} failed {reason}")
