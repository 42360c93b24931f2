"""A channel: its clients, and what becomes of the messages that they are sent.

Where the channel stands is `cursor`, what it has delivered and is not finished is `unfinished`. `delivery`
sends, `checkpoint` keeps the state on disk, and `carried_over` keeps messages that the log must not hold any
longer. Messages are known by their sequence numbers. The ids that clients see also hold the node id, which
may be another one after a restart.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nsparq.broker.carried_over import CarriedOver
from nsparq.broker.checkpoint import Checkpoint
from nsparq.broker.client import Client
from nsparq.broker.cursor import Cursor
from nsparq.broker.delivery import Delivery
from nsparq.broker.inflight import Run
from nsparq.broker.latency import Latency, summarize
from nsparq.broker.unfinished import Unfinished
from nsparq.errors import ClientError, Exiting, SubscribeRefused
from nsparq.names import is_ephemeral
from nsparq.storage.log_range import LogRange, OffsetAhead

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic

TOPOLOGY_AWARE: Final = "topology-aware-consumption"


class SeekPlan(NamedTuple):
    """What a seek does, or would do."""

    cursor: int
    """Where the channel stands before it."""
    target: int
    """Where it goes: what was asked for, as far as the log reaches."""
    again: int
    """Messages that the cursor had passed and meets again."""
    skipped: int
    """Unfinished messages that count as done."""


class Channel:
    """Delivery of one topic's messages, each to one of the channel's clients."""

    def __init__(self, topic: Topic, name: str, position: int) -> None:
        self.topic = topic
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.is_durable = not self.is_ephemeral and topic.directory is not None
        """Whether its state is kept on disk."""
        self.is_bounded = not self.is_durable
        """Whether it keeps no more than the memory queue's size."""
        self.is_exiting = False
        self.paused = False
        self.hold = ""
        """Name of the hold that keeps it from delivering for the moment; empty if there is none."""
        self.owner = ""
        """Who alone may commit: the query of Spark that reads this topic. Empty for nobody."""
        self.owned_since_ns = 0
        """Wall time of the claim."""
        self.cursor = Cursor(topic, position)
        self.unfinished = Unfinished()
        self.carried_over = CarriedOver(self)
        self.checkpoint = Checkpoint(self)
        options = topic.broker.options
        percentiles = options.e2e_processing_latency_percentile
        window_s = options.e2e_processing_latency_window_time
        self.latency = Latency(percentiles, window_s, topic.broker.monotonic_ns()) if percentiles else None
        self.delivery = Delivery(self)
        self.clients: dict[Client, None] = {}
        """In the order in which they subscribed. A set would have them in the order of their addresses in
        memory, and who gets what would depend on that."""
        self.watched_ns: int | None = None
        """When the queue scan will look at this channel next."""
        self.message_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.dropped_count = 0
        """Messages given up: an ephemeral channel that fell too far behind, or bytes lost to a bad disk."""

    def mark_changed(self) -> None:
        """Have the next round of checkpoints include this channel."""
        self.checkpoint.is_stale = True
        self.topic.broker.upkeep.note_changed(self.topic)

    # what is there

    @property
    def depth(self) -> int:
        """Messages ready to be sent: neither in flight nor deferred."""
        return len(self.unfinished.requeued) + self.cursor.ahead

    @property
    def backend_depth(self) -> int:
        """The part of the depth that is beyond the memory queue."""
        memory_start = min(self.topic.log.memory_start, self.topic.visible_end)
        return min(self.cursor.ahead, self.cursor.count_to(memory_start))

    def low(self) -> int:
        """The oldest sequence number that this channel may still have to read from the log."""
        position, lowest = self.cursor.position, self.unfinished.lowest()
        if lowest is None or lowest >= position:
            return position
        if lowest in self.carried_over.store:
            return min(position, min(self.carried_over.only_in_log(), default=position))
        return lowest

    def locate(self, sequence: int) -> LogRange:
        """Where an unfinished message can be read."""
        carried = self.carried_over.store
        return carried.locate(sequence) if sequence in carried else self.topic.log.locate(sequence, 1)

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
        self.delivery.leave(client)
        client.channel = None
        client.ready_count = 0
        for run in sorted(client.runs, key=lambda run: run.first):
            self._take_back(run, [*run.unanswered()])
        client.runs.clear()
        client.in_flight = 0
        self.mark_changed()
        self.topic.broker.next_turn.add_channel(self)
        if self.is_ephemeral and not self.clients and not self.is_exiting:
            self.topic.delete_channel(self.name)

    def set_ready(self, client: Client, count: int) -> None:
        client.ready_count = count
        self.delivery.offer(client)

    # answers

    def finish(self, client: Client, spans: list[tuple[int, int]], now_ns: int) -> list[ClientError]:
        """FIN, for spans of ids. Gives an error for each id that is not this client's to finish."""
        in_flight, latency, first_id = self.unfinished.in_flight, self.latency, self.topic.first_id
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
        self.mark_changed()
        self.delivery.offer(client)
        return errors

    def requeue(self, client: Client, message_id: int, timeout_ms: int, now_ns: int) -> None:
        """REQ: send again at once, or after a while."""
        run, sequence = self._owned("REQ", client, message_id)
        self.unfinished.in_flight.answer(run, sequence)
        if sequence < self.topic.given_up_before:
            self.dropped_count += 1
        elif timeout_ms > 0:
            self.defer(sequence, now_ns + timeout_ms * 1_000_000, run.attempts)
        else:
            self.unfinished.requeue((sequence,), run.attempts)
        self.requeue_count += 1
        client.requeue_count += 1
        client.in_flight -= 1
        self.mark_changed()
        self.delivery.offer(client)

    def touch(self, client: Client, message_id: int, now_ns: int) -> None:
        """TOUCH: a new deadline, within the limit counted from the delivery."""
        run, sequence = self._owned("TOUCH", client, message_id)
        limit_ns = run.delivered_ns + int(self.topic.broker.options.max_msg_timeout * 1e9)
        deadline_ns = min(now_ns + client.msg_timeout_ns, limit_ns)
        if run.end - run.first == 1 and deadline_ns >= run.deadline_ns:
            # The heap's entry is early now. It is put right when it comes up.
            run.deadline_ns = deadline_ns
            return
        self.unfinished.in_flight.answer(run, sequence)
        stamp = run.timestamp_of(sequence)
        self.launch(Run(client, sequence, sequence + 1, run.delivered_ns, deadline_ns, run.attempts, stamp))

    def _owned(self, verb: str, client: Client, message_id: int) -> tuple[Run, int]:
        """The client's delivery that holds the message, and the message's sequence number."""
        sequence = message_id - self.topic.first_id
        run = self.unfinished.in_flight.find(sequence)
        if run is None:
            raise _failed(verb, message_id, "ID not in flight")
        if run.client is not client:
            raise _failed(verb, message_id, "client does not own message")
        return run, sequence

    # time

    def launch(self, run: Run) -> None:
        """A delivery is on its way to its client."""
        self.unfinished.in_flight.add(run)
        self._watch(run.deadline_ns)

    def defer(self, sequence: int, due_ns: int, attempts: int = 0) -> None:
        self.unfinished.defer(sequence, due_ns, attempts)
        self._watch(due_ns)

    def defer_published(self, sequence: int, due_ns: int) -> None:
        """A message published with a delay: it waits here from the start, and the cursor will pass it by."""
        self.cursor.deferred_ahead.append(sequence)
        self.defer(sequence, due_ns)

    def _watch(self, at_ns: int) -> None:
        """Have the queue scan look at this channel then."""
        if self.watched_ns is None or at_ns < self.watched_ns:
            self.watched_ns = at_ns
            self.topic.broker.scan.watch(self, at_ns)

    def next_event(self) -> int | None:
        """When something times out or falls due next."""
        times = (self.unfinished.in_flight.next_deadline(), self.unfinished.deferred.next_due())
        return min((at for at in times if at is not None), default=None)

    def expire(self, now_ns: int, limit: int) -> int:
        """Requeue what has timed out and what is due, `limit` messages at the most. Gives their number."""
        unfinished = self.unfinished
        done = 0
        while done < limit and (run := unfinished.in_flight.first_expired(now_ns)) is not None:
            expired = list(islice(run.unanswered(), limit - done))
            self._take_back(run, expired)
            self.timeout_count += len(expired)
            run.client.in_flight -= len(expired)
            self.delivery.offer(run.client)
            done += len(expired)
        while done < limit and unfinished.requeue_due(now_ns):
            done += 1
        if done:
            self.mark_changed()
            self.topic.broker.next_turn.add_channel(self)
        return done

    def _take_back(self, run: Run, sequences: list[int]) -> None:
        """Messages that were not answered are sent again, unless they have been given up."""
        for sequence in sequences:
            self.unfinished.in_flight.answer(run, sequence)
        if run.first < self.topic.given_up_before:
            kept = [sequence for sequence in sequences if sequence >= self.topic.given_up_before]
            self.dropped_count += len(sequences) - len(kept)
            sequences = kept
        self.unfinished.requeue(sequences, run.attempts)

    # the log

    def appended(self, count: int) -> None:
        """The topic has made `count` more messages visible."""
        self.message_count += count
        if self.is_bounded or self.delivery.has_ready_clients:
            self.topic.broker.next_turn.add_channel(self)

    def give_up(self, before: int) -> None:
        """In memory: let go of all messages below a number. Those that wait are dropped, and counted; those
        in flight can only be finished."""
        cursor = self.cursor
        self.delivery.moved()
        ahead = cursor.ahead
        self.dropped_count += self.unfinished.drop_waiting_below(before)
        if cursor.position < before:
            cursor.jump(min(before, self.topic.visible_end))
            self.dropped_count += ahead - cursor.ahead
        self.carried_over.give_up(before)

    def add_tried(self, sequence: int, attempts: list[int]) -> None:
        """Messages from `sequence` on that another nsqd has delivered before, so many times each: they wait
        to be sent again, and the cursor will pass them by."""
        self.cursor.skips.add(sequence, sequence + len(attempts))
        for number, tried in enumerate(attempts, sequence):
            self.unfinished.requeue((number,), tried)

    # management

    def pause(self) -> None:
        self.paused = True
        self.mark_changed()
        self.topic.broker.channel_changed(self)

    def unpause(self) -> None:
        self.paused = False
        self.mark_changed()
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
        self.cursor.jump(self.topic.visible_end)
        self._drop_all()
        self.mark_changed()
        self._offer_all()
        self.topic.broker.channel_changed(self)

    def plan_seek(self, sequence: int) -> SeekPlan:
        """What it would mean to go to this number."""
        log, position = self.topic.log, self.cursor.position
        target = min(max(sequence, log.start), self.topic.visible_end)
        skipped = self.unfinished.count_below(target)
        if target > position:
            skipped += self.cursor.count_below(target)
        return SeekPlan(position, target, log.count(target, position), skipped)

    def seek(self, sequence: int) -> SeekPlan:
        """Go to a number of the log, or as near as the log reaches: everything from there on is delivered, as
        if for the first time, and everything before it is done. On disk when DurableChanges.when_durable()
        says so. Raises OSError, with nothing changed.

        What was in flight is not any longer: clients get other messages, and their late answers an error.
        """
        plan = self.plan_seek(sequence)
        state = self.checkpoint.state_at(plan.target)
        self.topic.save_channel(self, state)
        self._drop_all()
        self.checkpoint.resume(state)
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
        self.unfinished.drop_waiting_below(sequence)
        if sequence > self.cursor.position:
            self.cursor.jump(sequence)
            self.delivery.moved()
        self.mark_changed()
        for client, number in self.unfinished.in_flight.drop_below(sequence).items():
            client.in_flight -= number
            self.delivery.offer(client)

    def claim(self, owner: str) -> None:
        """From now on `owner` alone may commit; nobody in particular if it is empty. On disk as a seek is.
        Raises OSError, with nothing changed."""
        if owner == self.owner:
            return
        before = self.owner, self.owned_since_ns
        self.owner, self.owned_since_ns = owner, self.topic.broker.wall_ns() if owner else 0
        try:
            self.topic.save_channel(self)
        except OSError:
            self.owner, self.owned_since_ns = before
            raise

    def _drop_all(self) -> None:
        """Count everything unfinished as done."""
        self.cursor.deferred_ahead.clear()
        self.carried_over.clear_plans()
        self.unfinished.clear()

    def _offer_all(self) -> None:
        """The channel has gone elsewhere in the log, and nothing is in flight any more."""
        self.delivery.moved()
        for client in self.clients:
            client.in_flight = 0
            self.delivery.offer(client)

    def close(self) -> None:
        """Close the connections of all clients, because the channel is deleted or the daemon stops."""
        self.is_exiting = True
        for client in [*self.clients]:
            client.close()
            self.remove_client(client)

    # stats

    def stats(self, include_clients: bool, now_ns: int) -> dict[str, Any]:
        latency = self.latency
        return {
            "channel_name": self.name,
            "depth": self.depth,
            "backend_depth": self.backend_depth,
            "in_flight_count": len(self.unfinished.in_flight),
            "deferred_count": len(self.unfinished.deferred),
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
        return {name: count for name, count in zip(names, self.delivery.counts, strict=True) if count}

    def latency_parts(self, now_ns: int) -> list[Any]:
        return [self.latency.buckets(now_ns)] if self.latency else []

    def __str__(self) -> str:
        return f"{self.topic.name}:{self.name}"


def _failed(verb: str, message_id: int, reason: str) -> ClientError:
    return ClientError(f"E_{verb}_FAILED", f"{verb} {message_id:016x} failed {reason}")
