"""A channel: its clients, its place in the log, and its management.

`cursor` is the channel's place in the log. `unfinished` holds messages that the cursor has passed
and that are not finished. `delivery` sends messages and takes the clients' answers. `checkpoint`
keeps the state on disk. `carried_over` keeps messages whose segments have to go. Messages are named
by their sequence numbers; the ids that clients see also hold the node id, which may be another one
after a restart.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from nsparq.broker.carried_over import CarriedOver
from nsparq.broker.checkpoint import Checkpoint
from nsparq.broker.client import Client
from nsparq.broker.cursor import Cursor
from nsparq.broker.dead_letters import DeadLetters
from nsparq.broker.delivery import Delivery
from nsparq.broker.lag import Lag
from nsparq.broker.latency import Latency
from nsparq.broker.message_key import key_reader
from nsparq.broker.ordering import Ordering
from nsparq.broker.retries import Retries, refuse_cycle
from nsparq.broker.runs import Run
from nsparq.broker.unfinished import Unfinished
from nsparq.delivery_policy import DeliveryPolicy, Failure
from nsparq.errors import Exiting, SubscribeRefused
from nsparq.names import is_ephemeral
from nsparq.storage.log_range import LogRange, OffsetAhead

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

TOPOLOGY_AWARE: Final = "topology-aware-consumption"


class SeekPlan(NamedTuple):
    """The effect of a seek."""

    cursor: int
    """The channel's place before the seek."""
    target: int
    """The new place: the number asked for, or the nearest that the log has."""
    again: int
    """Messages that the cursor had passed and will deliver again."""
    skipped: int
    """Unfinished messages that count as finished."""


class Channel:
    """Delivers each message of a topic to one of the channel's clients.

    More than 30 methods and 20 attributes: beside its parts it has what /stats shows and what HTTP
    manages.
    """

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
        self.is_observer = False
        """Whether its topic keeps its messages for another channel: see broker.observing."""
        self.hold = ""
        """Name of the hold that stops delivery for the moment; empty if there is none."""
        self.owner = ""
        """The only one that may commit: the Spark query that reads this topic. Empty if there is
        none."""
        self.owned_since_ns = 0
        """Wall time of the claim."""
        self.cursor = Cursor(topic, position)
        self.unfinished = Unfinished()
        self.retries = Retries(self)
        self.ordering = Ordering(self)
        self.dead_letters = DeadLetters(self)
        self.carried_over = CarriedOver(self)
        self.checkpoint = Checkpoint(self)
        options = topic.broker.options
        percentiles = options.e2e_processing_latency_percentile
        window_s = options.e2e_processing_latency_window_time
        self.latency = Latency(percentiles, window_s, topic.broker.monotonic_ns()) if percentiles else None
        self.lag = Lag(self)
        self.delivery = Delivery(self)
        self.clients: dict[Client, None] = {}
        """In the order in which they subscribed. A set has no fixed order, and the order decides
        who gets which message."""
        self.watched_ns: int | None = None
        """When the queue scan will look at this channel next."""
        self.message_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.dropped_count = 0
        """Messages dropped: by an ephemeral channel that was too far behind, or lost to a bad
        disk."""

    def mark_changed(self) -> None:
        """Have the next round of checkpoints include this channel."""
        self.checkpoint.is_stale = True
        self.topic.broker.upkeep.changed.add(self.topic)

    # messages

    @property
    def depth(self) -> int:
        """Messages ready to be sent: neither in flight nor deferred."""
        return len(self.unfinished.requeued) + len(self.unfinished.parked) + self.cursor.ahead

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
        if lowest in self.carried_over.store.kept:
            return min(position, min(self.carried_over.only_in_log(), default=position))
        return lowest

    def locate(self, sequence: int) -> LogRange:
        """Where an unfinished message can be read."""
        carried = self.carried_over.store
        return carried.locate(sequence) if sequence in carried.kept else self.topic.log.locate(sequence, 1)

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
        """0 in the same zone, 1 in the same region, 2 elsewhere; 2 for all unless NSQ's experiment
        is on. Nearer clients are served first, and others only while no nearer one is ready."""
        options = self.topic.broker.options
        if TOPOLOGY_AWARE not in options.enable_experiment:
            return 2
        if options.topology_zone and client.identity.topology_zone == options.topology_zone:
            return 0
        same_region = client.identity.topology_region == options.topology_region
        return 1 if options.topology_region and same_region else 2

    def remove_client(self, client: Client) -> None:
        """The client has left. Its unanswered messages are sent again at once."""
        if client not in self.clients:
            return
        del self.clients[client]
        self.delivery.leave(client)
        client.channel = None
        client.ready_count = 0
        for run in sorted(client.runs, key=lambda run: run.first):
            self._take_back(run, [*run.unanswered()], Failure.DISCONNECTED)
        client.runs.clear()
        client.in_flight = 0
        self.mark_changed()
        self.topic.broker.next_turn.add_channel(self)
        if self.is_ephemeral and not self.clients and not self.is_exiting:
            self.topic.delete_channel(self.name)

    def set_ready(self, client: Client, count: int) -> None:
        client.ready_count = count
        self.delivery.offer(client)

    # time

    def defer(self, sequence: int, due_ns: int, attempts: int = 0) -> None:
        self.unfinished.defer(sequence, due_ns, attempts)
        self.watch(due_ns)

    def defer_published(self, sequence: int, due_ns: int) -> None:
        """A message published with a delay is deferred from the start, and the cursor will skip
        it."""
        self.cursor.deferred_ahead.append(sequence)
        self.defer(sequence, due_ns)

    def watch(self, at_ns: int) -> None:
        """Have the queue scan look at this channel then."""
        if self.watched_ns is None or at_ns < self.watched_ns:
            self.watched_ns = at_ns
            self.topic.broker.scan.watch(self, at_ns)

    def next_event(self) -> int | None:
        """When the next message times out or is due."""
        times = (self.unfinished.in_flight.next_deadline(), self.unfinished.deferred.next_due())
        return min((at for at in times if at is not None), default=None)

    def expire(self, now_ns: int, limit: int) -> int:
        """Requeue messages that have timed out or are due, at most `limit`. Gives their number."""
        unfinished = self.unfinished
        done = 0
        while done < limit and (run := unfinished.in_flight.first_expired(now_ns)) is not None:
            expired = list(islice(run.unanswered(), limit - done))
            self._take_back(run, expired, Failure.TIMED_OUT)
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

    def _take_back(self, run: Run, sequences: list[int], failure: Failure) -> None:
        """Send unanswered messages again, unless the topic or the policy has given them up."""
        for sequence in sequences:
            self.unfinished.in_flight.answer(run, sequence)
        if run.first < self.topic.given_up_before:
            dropped = [sequence for sequence in sequences if sequence < self.topic.given_up_before]
            for sequence in dropped:
                self.unfinished.forget(sequence)
            self.dropped_count += len(dropped)
            sequences = [sequence for sequence in sequences if sequence >= self.topic.given_up_before]
        self.retries.send_again(run, sequences, failure, self.topic.broker.monotonic_ns())

    # the log

    def lost_to_damage(self, sequence: int) -> None:
        """A message that was to be sent again cannot be read."""
        self.dropped_count += 1
        self.unfinished.forget(sequence)
        logger.error("%s: message %d is lost to a damaged log", self, sequence)

    def finish_settled(self, sequences: set[int]) -> None:
        """At the start: these messages have become dead letters."""
        ahead = {sequence for sequence in sequences if sequence >= self.cursor.position}
        self.unfinished.discard(sequences)
        for sequence in ahead.difference(self.cursor.deferred_ahead):
            self.cursor.skips.add(sequence, sequence + 1)
        self.mark_changed()

    def give_up(self, before: int) -> None:
        """Drop all messages of an ephemeral topic below a number. Waiting messages are counted as
        dropped; messages in flight can still be finished."""
        cursor = self.cursor
        self.delivery.moved()
        ahead = cursor.ahead
        self.dropped_count += self.unfinished.drop_waiting_below(before)
        if cursor.position < before:
            cursor.jump(min(before, self.topic.visible_end))
            self.dropped_count += ahead - cursor.ahead
        self.carried_over.give_up(before)

    def drop_surplus(self) -> None:
        """A bounded channel keeps no more than the memory queue's size. The oldest messages go, and
        are counted."""
        cursor = self.cursor
        surplus = self.depth - self.topic.broker.options.mem_queue_size
        if surplus > 0:
            dropped = self.unfinished.drop_oldest(surplus)
            self.dropped_count += dropped
            surplus -= dropped
        if surplus > 0:
            before = cursor.ahead
            cursor.jump(cursor.behind(surplus))
            self.delivery.moved()
            self.dropped_count += before - cursor.ahead

    def add_tried(self, sequence: int, attempts: list[int]) -> None:
        """Requeue messages from `sequence` on that another nsqd has delivered, `attempts` times
        each. The cursor will skip them."""
        self.cursor.skips.add(sequence, sequence + len(attempts))
        for number, tried in enumerate(attempts, sequence):
            self.unfinished.requeue((number,), tried)

    # management

    def pause(self) -> None:
        """Raises OSError, and then changes nothing."""
        self._set_paused(True)

    def unpause(self) -> None:
        """Raises OSError, and then changes nothing."""
        self._set_paused(False)
        self.topic.broker.next_turn.add_channel(self)

    def _set_paused(self, paused: bool) -> None:
        before, self.paused = self.paused, paused
        self.mark_changed()
        try:
            self.topic.broker.channel_changed(self)
        except OSError:
            self.paused = before
            raise

    def start_hold(self, name: str) -> None:
        """Deliver nothing for the moment. Unlike a pause a hold is not kept on disk, and its owner
        makes sure that it ends. It replaces another hold."""
        self.hold = name

    def end_hold(self, name: str) -> bool:
        """False if there is another hold by now, or none."""
        if self.hold != name:
            return False
        self.hold = ""
        self.topic.broker.next_turn.add_channel(self)
        return True

    def empty(self) -> None:
        """Drop all messages: waiting, in flight and deferred."""
        self.cursor.jump(self.topic.visible_end)
        self._drop_all()
        self.mark_changed()
        self._offer_all()
        self.topic.broker.channel_changed(self)

    def plan_seek(self, sequence: int) -> SeekPlan:
        """The effect that seek() would have."""
        log, position = self.topic.log, self.cursor.position
        target = min(max(sequence, log.start), self.topic.visible_end)
        skipped = self.unfinished.count_below(target)
        if target > position:
            skipped += self.cursor.count_below(target)
        return SeekPlan(position, target, log.count(target, position), skipped)

    def seek(self, sequence: int) -> SeekPlan:
        """Go to a number of the log, or to the nearest that the log has. Every message from there
        on is delivered as if for the first time, and every message before it counts as finished. On
        disk when DurableChanges.when_durable() says so. Raises OSError, with nothing changed.

        Nothing is in flight any longer. Clients get other messages, and an error for late answers.
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
        """Every message before this number counts as finished, in flight or not. The cursor never
        goes back. As with FIN, the next checkpoint keeps it. Raises OffsetAhead."""
        if sequence > self.topic.visible_end:
            raise OffsetAhead(sequence, self.topic.visible_end)
        dropped = self.unfinished.drop_below(sequence)
        if sequence > self.cursor.position:
            self.cursor.jump(sequence)
            self.delivery.moved()
        self.mark_changed()
        for client, number in dropped.items():
            client.in_flight -= number
            self.delivery.offer(client)

    def claim(self, owner: str) -> None:
        """From now on only `owner` may commit, or anybody if it is empty. On disk as with a seek.
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

    def change_policy(self, policy: DeliveryPolicy | None) -> None:
        """Set or remove the channel's own delivery policy: see change_settings."""
        self.change_settings(policy, self.ordering.ordered_by)

    def change_settings(self, policy: DeliveryPolicy | None, ordered_by: str) -> None:
        """Set the channel's own delivery policy (None: the topic's applies) and its order (empty:
        none), with one write. On disk as with a seek. Raises ValueError or OSError, with nothing
        changed."""
        retries, ordering = self.retries, self.ordering
        if policy is not None and policy != retries.own_policy:
            refuse_cycle(self.topic, policy)
        is_reordered = ordered_by != ordering.ordered_by
        read_keys = key_reader(ordered_by) if is_reordered and ordered_by else None
        before = retries.own_policy, ordering.ordered_by
        retries.own_policy, ordering.ordered_by = policy, ordered_by
        try:
            self.topic.save_channel(self)
        except OSError:
            retries.own_policy, ordering.ordered_by = before
            raise
        if policy != before[0]:
            retries.policy_changed()
        if is_reordered:
            ordering.apply(read_keys)
        self.topic.broker.next_turn.add_channel(self)

    def _drop_all(self) -> None:
        """Count every unfinished message as finished."""
        self.cursor.deferred_ahead.clear()
        self.carried_over.clear_plans()
        self.unfinished.clear()

    def _offer_all(self) -> None:
        """The channel has another place in the log, and nothing is in flight any more."""
        self.delivery.moved()
        for client in self.clients:
            client.in_flight = 0
            self.delivery.offer(client)

    def close(self) -> None:
        """Close the connections of all clients, because the channel is deleted or the daemon
        stops."""
        self.is_exiting = True
        for client in [*self.clients]:
            client.close()
            self.remove_client(client)

    def __str__(self) -> str:
        return f"{self.topic.name}:{self.name}"
