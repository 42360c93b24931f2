"""Random lives of a topic against a model: nothing lost, nothing back after FIN but what a crash
redelivers.

Messages are published by themselves and in transactions. Between runs the node id may change. At
any time the wall clock may be set, the disk may refuse what it is asked, and a client may end its
connection in the middle of a delivery.

Besides: no message with two clients at once, attempts that grow, depths that add up at every step,
delivery as soon as somebody may take a message, and ids that are never given twice. And whoever
goes back in the log, by seek, by range or by looking, finds what was published.

Channels get and lose delivery policies and an order of keys. With a policy a message becomes one
dead letter when its attempts are used up or it is too old, and is not delivered after that. With an
order one message of a key is with a client at a time, the oldest first.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nsparq.broker import ordering
from nsparq.broker.broker import run_inline
from nsparq.broker.channel import Channel
from nsparq.broker.peek import STATES, peek_channel, peek_topic
from nsparq.broker.settings import TopicSettings
from nsparq.dead_letter import DeadLetter
from nsparq.delivery_policy import Failure, parse_policy
from nsparq.errors import ClientError
from nsparq.headers import decode_headers
from nsparq.packed import PackedBodies
from nsparq.storage.log_range import OffsetAhead
from nsparq.storage.raw_batch import iter_batches
from nsparq.wire.message import SEQUENCE_BITS
from tests.broker.rig import MILLISECOND, SECOND, FakeClient, Later, Rig
from tests.property.broker_model import ChannelModel, Entry, State, TopicModel

TOPIC, DEAD, ORDERED_BY = "t", "t.dead", "/k"
MAX_MSG_TIMEOUT_S = 15
names = st.sampled_from(["a", "b"])
delays_ms = st.sampled_from([1, 700, 3000, 20_000])
policies = st.none() | st.fixed_dictionaries(
    {
        "max_attempts": st.sampled_from([0, 1, 2, 3]),
        "count": st.sampled_from(["failures", "deliveries"]),
        "retry_delay": st.sampled_from([0, 0, 1, 4]),
        "retry_jitter": st.just(0),
        "expire_after": st.sampled_from([0, 0, 5]),
        "expired": st.sampled_from(["drop", "dead_letters"]),
    }
)


MOST_CALLS = 200
"""Calls at the door to the disk that one step may cost, besides those for what it publishes and
delivers."""
node_ids = st.sampled_from([0, 5, 6, 1023])


class BreakingClient(FakeClient):
    """A connection that ends when something is sent on it: a TLS layer that fails, for instance."""

    def _keep(self, data: bytes | memoryview) -> None:
        super()._keep(data)
        if self.channel is not None:
            self.channel.remove_client(self)


class BrokerMachine(RuleBasedStateMachine):
    """Every rule does one thing to the broker and to the model, then takes in what was
    delivered."""

    flags: ClassVar[dict[str, Any]] = {}
    may_crash: ClassVar[bool] = True
    is_slow: ClassVar[bool] = False
    """Background work is done some time later, and every read of the disk is background work."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="broker-machine-"))
        self.background = Later() if self.is_slow else None
        self.rig = Rig(
            self.directory, background=self.background, max_msg_timeout=float(MAX_MSG_TIMEOUT_S), **self.flags
        )
        self.rig.files.is_cold = self.is_slow
        self.rig.topic(TOPIC)
        self.model = TopicModel()
        self.clients: list[FakeClient] = []
        self.channel_of: dict[FakeClient, str] = {}
        self.published = 0
        self.published_ns: dict[bytes, int] = {}
        self.earliest_ns: dict[bytes, int] = {}
        self.bodies_by_id: dict[int, bytes] = {}
        self.ids_by_body: dict[bytes, int] = {}
        self.log: dict[bytes, tuple[int, int]] = {}
        """Everything published and not emptied: sequence number and due time, in the log's
        order."""
        self.settings = TopicSettings()
        self.was_set = self.was_set_back = False
        """Whether the wall clock was set, and whether it was set back."""
        self.letters: Counter[tuple[str, bytes]] = Counter()
        """Dead letters by channel and body, and how far they were read."""
        self.letters_end = 0
        self.known_letters: Counter[tuple[str, bytes]] = Counter()
        """Those of them that the model knows."""
        self.abandoned: set[tuple[str, bytes]] = set()
        """Messages that were dropped, or begun anew, while their letters were on the way."""
        self.transaction = 0
        self.staged: dict[str, list[bytes]] = {}
        self.calls_before = self.rig.files.calls.total()
        self.work_before = 0

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.drain()
        finally:
            self.rig.drop()
            shutil.rmtree(self.directory)

    # publishing

    def new_body(self, size: int) -> bytes:
        self.published += 1
        key = b'"k":"%c",' % b"abc"[self.published % 3] if self.published % 5 else b""
        body = b'{%b"n":%d,"x":"' % (key, self.published)
        body += b"x" * max(0, size - len(body) - 2) + b'"}'
        self.published_ns[body] = self.rig.clock.wall()
        return body

    def note(self, *messages: tuple[bytes, int]) -> None:
        """What is about to be appended, in this order."""
        end = self.rig.topic(TOPIC).log.end
        for number, (body, due_ns) in enumerate(messages):
            self.log[body] = (end + number, due_ns)

    @rule(sizes=st.lists(st.sampled_from([0, 30, 300, 900]), min_size=1, max_size=6))
    def publish(self, sizes: list[int]) -> None:
        bodies = [self.new_body(size) for size in sizes]
        self.note(*((body, 0) for body in bodies))
        for body in bodies:
            self.model.publish(body, 0)
        assert self.rig.publish(TOPIC, *bodies).is_ok
        self.observe()

    @rule(count=st.sampled_from([64, 70]))
    def publish_many(self, count: int) -> None:
        self.publish([20] * count)

    @rule(sizes=st.lists(st.sampled_from([0, 30]), min_size=2, max_size=5))
    def publish_one_by_one(self, sizes: list[int]) -> None:
        for size in sizes:
            self.publish([size])

    @rule(size=st.sampled_from([30, 900]), descriptors=st.none() | st.integers(0, 2))
    def publish_while_the_disk_refuses(self, size: int, descriptors: int | None) -> None:
        """It is full, or there are no descriptors. What was refused is not there; what was not
        is."""
        files = self.rig.files
        if descriptors is None:
            files.fail("write", ".log")
        else:
            files.run_out_of_descriptors(descriptors, 1000)
        body = self.new_body(size)
        self.note((body, 0))
        receipt = self.rig.publish(TOPIC, body)
        files.heal()
        is_refused = bool(receipt.answers) and not receipt.is_ok
        if is_refused:
            del self.log[body]
        else:
            self.model.publish(body, 0)
        self.observe()
        # What could not be read meanwhile is read when it is tried again; the same for what was not
        # synced.
        self.pass_time(1.0)
        self.publish([0])
        assert is_refused or receipt.is_ok, "nobody was answered"

    @rule(after=st.integers(0, 5), times=st.integers(1, 3))
    def maintain_without_descriptors(self, after: int, times: int) -> None:
        """Checkpoints may have come to nothing; so the model does not rely on them."""
        self.rig.files.run_out_of_descriptors(after, times)
        self.rig.maintain()
        self.rig.files.heal()
        self.rig.turn()
        self.observe()

    @rule()
    def trouble_is_over(self) -> None:
        """Whatever the disk has refused before: upkeep makes up for it by itself, and health says
        so."""
        for _ in range(2):
            self.pass_time(10)
            self.rig.maintain()
            if self.background is not None:
                self.background.run_all()
            self.rig.turn()
            self.observe()
        assert self.rig.broker.health.error is None

    @rule(delay_ms=delays_ms, size=st.sampled_from([0, 300]))
    def publish_deferred(self, delay_ms: int, size: int) -> None:
        body = self.new_body(size)
        due_ns = self.rig.clock() + delay_ms * MILLISECOND
        self.earliest_ns[body] = due_ns
        self.note((body, due_ns))
        self.model.publish(body, due_ns)
        assert self.rig.publish(TOPIC, body, defer_ms=delay_ms).is_ok
        self.observe()

    @rule(delay_ms=delays_ms)
    def publish_both_kinds_in_one_turn(self, delay_ms: int) -> None:
        deferred, plain = self.new_body(10), self.new_body(20)
        due_ns = self.rig.clock() + delay_ms * MILLISECOND
        self.earliest_ns[deferred] = due_ns
        self.note((plain, 0), (deferred, due_ns))
        receipts = [self.rig.send(TOPIC, deferred, defer_ms=delay_ms), self.rig.send(TOPIC, plain)]
        self.model.publish(deferred, due_ns)
        self.model.publish(plain, 0)
        self.rig.turn()
        assert all(receipt.is_ok for receipt in receipts)
        self.observe()

    # transactions

    @precondition(lambda self: len(self.staged) < 3)
    @rule(sizes=st.lists(st.sampled_from([0, 300]), min_size=1, max_size=4))
    def stage(self, sizes: list[int]) -> None:
        """What is staged is seen by nobody, and is there after a restart and a crash."""
        bodies = [self.new_body(size) for size in sizes]
        name = f"part-{len(self.staged)}"
        self.staged[name] = bodies
        staged = self.rig.broker.transactions.stage(
            "p", self.transaction, name, TOPIC, PackedBodies.of(bodies)
        )
        assert staged == len(bodies)
        self.observe()

    @precondition(lambda self: self.staged)
    @rule()
    def commit_what_is_staged(self) -> None:
        transactions, files = self.rig.broker.transactions, self.rig.files
        parts = {name: len(bodies) for name, bodies in self.staged.items()}
        transaction = transactions.promise("p", self.transaction, parts)
        transactions.decide(transaction)
        transaction.write_promise(sync=False)
        found: list[bytes] = []
        for chunk in transaction.chunks:
            messages = chunk.read(files)
            bodies = [*messages]
            self.published_ns.update(dict.fromkeys(bodies, self.rig.clock.wall()))
            self.note(*((body, 0) for body in bodies))
            for body in bodies:
                self.model.publish(body, 0)
            transactions.apply(transaction, chunk, messages)
            self.rig.turn()
            self.observe()
            found += bodies
        assert found == [body for bodies in self.staged.values() for body in bodies]
        committed = transactions.write_committed(transaction, sync=False, remember_s=60)
        transactions.finish(transaction, committed)
        self.transaction += 1
        self.staged.clear()

    # clients

    @precondition(lambda self: len(self.clients) < 5)
    @rule(name=names, rdy=st.integers(0, 8), timeout_s=st.sampled_from([2, 10]))
    def subscribe(self, name: str, rdy: int, timeout_s: int) -> None:
        self.model.create(name)
        client = self.rig.subscribe(TOPIC, name, msg_timeout_ms=timeout_s * 1000)
        self.clients.append(client)
        self.channel_of[client] = name
        self.rig.ready(client, rdy)
        self.observe()

    @precondition(lambda self: not any(isinstance(one, BreakingClient) for one in self.clients))
    @rule(name=names, rdy=st.integers(1, 8))
    def subscribe_one_that_breaks(self, name: str, rdy: int) -> None:
        self.model.create(name)
        client = BreakingClient("breaking", msg_timeout_ms=10_000)
        self.rig.broker.clients.add(client)
        self.rig.broker.subscribe(client, TOPIC, name)
        self.clients.append(client)
        self.channel_of[client] = name
        self.rig.ready(client, rdy)
        self.observe()

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), count=st.sampled_from([0, 1, 3, 10, 1000]))
    def ready(self, data: st.DataObject, count: int) -> None:
        self.rig.ready(data.draw(st.sampled_from(self.clients)), count)
        self.observe()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        self.rig.disconnect(client)
        self.forget(client)
        self.observe()

    def forget(self, client: FakeClient) -> None:
        """It has disconnected."""
        name = self.channel_of[client]
        self.clients.remove(client)
        for entry in self.model.channels[name].held_by(client):
            self.fail(name, entry, Failure.DISCONNECTED)

    # answers

    def holders(self) -> list[FakeClient]:
        return [client for client in self.clients if self.held(client)]

    def held(self, client: FakeClient) -> list[bytes]:
        """In the order of their ids."""
        entries = self.model.channels[self.channel_of[client]].held_by(client)
        return sorted((entry.body for entry in entries), key=lambda body: self.ids_by_body[body])

    @precondition(lambda self: self.holders())
    @rule(data=st.data(), share=st.sampled_from([0.3, 1.0]))
    def finish_in_order(self, data: st.DataObject, share: float) -> None:
        client = data.draw(st.sampled_from(self.holders()))
        bodies = self.held(client)
        self.finish(client, bodies[: max(1, int(share * len(bodies)))])

    @precondition(lambda self: self.holders())
    @rule(data=st.data())
    def finish_all_but_one(self, data: st.DataObject) -> None:
        """A straggler, which must not keep the files of all the others."""
        client = data.draw(st.sampled_from(self.holders()))
        straggler = data.draw(st.sampled_from(self.held(client)))
        self.finish(client, [body for body in self.held(client) if body != straggler])

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def race_ahead(self, data: st.DataObject) -> None:
        """Several files go through while somebody holds on to a message or two."""
        for client in self.clients:
            self.rig.ready(client, 1000)
        for _ in range(5):
            self.publish([20] * 20)
        for client in self.holders():
            bodies = self.held(client)
            kept = {data.draw(st.sampled_from(bodies)), bodies[0]}
            self.finish(client, [body for body in bodies if body not in kept])
        self.maintain()

    def finish(self, client: FakeClient, bodies: list[bytes]) -> None:
        spans: list[tuple[int, int]] = []
        for body in bodies:
            message_id = self.ids_by_body[body]
            if spans and spans[-1][1] == message_id:
                spans[-1] = (spans[-1][0], message_id + 1)
            else:
                spans.append((message_id, message_id + 1))
            self.model.channels[self.channel_of[client]].finish(body)
        assert client.channel.delivery.finish(client, spans, self.rig.clock()) == []
        self.rig.turn()
        self.observe()

    @precondition(lambda self: self.holders())
    @rule(data=st.data())
    def finish_out_of_order(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.holders()))
        bodies = data.draw(st.permutations(self.held(client)))
        for body in bodies[:3]:
            self.model.channels[self.channel_of[client]].finish(body)
            assert client.channel.delivery.finish(client, [self.span(body)], self.rig.clock()) == []
        self.rig.turn()
        self.observe()

    def span(self, body: bytes) -> tuple[int, int]:
        return self.ids_by_body[body], self.ids_by_body[body] + 1

    @precondition(lambda self: self.clients and self.ids_by_body)
    @rule(data=st.data())
    def answer_what_is_not_ones_own(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        own = set(self.held(client))
        others = [body for body in self.ids_by_body if body not in own]
        if not others:
            return
        message_id = self.ids_by_body[data.draw(st.sampled_from(others))]
        (error,) = self.rig.finish(client, message_id)
        assert error.code == "E_FIN_FAILED"
        for act in (self.rig.requeue, self.rig.touch):
            with pytest.raises(ClientError):
                act(client, message_id)
        self.observe()

    @precondition(lambda self: self.holders())
    @rule(data=st.data(), delay_ms=st.sampled_from([0, 0, 1, 700, 3000]))
    def requeue(self, data: st.DataObject, delay_ms: int) -> None:
        client = data.draw(st.sampled_from(self.holders()))
        body = data.draw(st.sampled_from(self.held(client)))
        name = self.channel_of[client]
        self.rig.requeue(client, self.ids_by_body[body], delay_ms)
        self.fail(name, self.model.channels[name].entries[body], Failure.REQUEUED, delay_ms * MILLISECOND)
        self.observe()

    def fail(self, name: str, entry: Entry, failure: Failure, delay_ns: int = 0) -> None:
        """The broker has been told that an attempt has ended badly. Take in what it did."""
        self.read_letters()
        model, unfinished = self.model.channels[name], self.rig.channel(name, TOPIC).unfinished
        due_ns = unfinished.deferred.due_ns.get(self.log[entry.body][0], 0)
        is_given_up = self.is_given_up(name, entry.body)
        counts = model.policy is not None and model.policy.counts(failure)
        delays_ns = {delay_ns} if delay_ns or not counts else model.delays_ns(entry)
        if due_ns:
            assert due_ns - self.rig.clock() in delays_ns
        elif not is_given_up:
            assert 0 in delays_ns
        model.fail(entry, failure, is_given_up, due_ns, self.is_too_old(name, entry.body))
        self.note_letter(name, entry)

    # policies and order

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data(), values=policies)
    def change_policy(self, data: st.DataObject, values: dict[str, Any] | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.channels)))
        if values is not None and self.was_set:
            values["expire_after"] = 0
        policy = None if values is None else parse_policy(values, TOPIC)
        self.rig.channel(name, TOPIC).change_policy(policy)
        self.model.channels[name].policy = policy
        self.rig.turn()
        self.observe()

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data(), is_ordered=st.booleans())
    def change_order(self, data: st.DataObject, is_ordered: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.channels)))
        self.rig.channel(name, TOPIC).ordering.change(ORDERED_BY if is_ordered else "")
        self.model.channels[name].order(is_ordered)
        self.rig.turn()
        self.observe()

    def place_of(self, body: bytes) -> int | None:
        return None if body in self.earliest_ns else self.log[body][0]

    def is_too_old(self, name: str, body: bytes) -> bool:
        policy = self.model.channels[name].policy
        if policy is None or not policy.expire_after:
            return False
        return self.published_ns[body] < self.rig.broker.age_ns() - policy.expire_after * SECOND

    def read_letters(self) -> None:
        """Take in new dead letters."""
        topic = self.rig.broker.topics.get(DEAD)
        if topic is None or topic.log.end == self.letters_end:
            return
        calls, log = self.rig.files.calls.total(), topic.log
        sequence = max(log.start, self.letters_end)
        while (located := log.locate(sequence, 1 << 20)).size:
            for batch in iter_batches(located.read()):
                messages = zip(batch.bodies(), batch.blocks(), strict=True)
                for number, (body, block) in enumerate(messages, batch.base):
                    if number >= sequence:
                        letter = DeadLetter.from_message(body, decode_headers(block))
                        assert letter is not None and letter.channel is not None
                        self.letters[letter.channel, body] += 1
            sequence = located.next
        self.letters_end = log.end
        self.calls_before += self.rig.files.calls.total() - calls

    def is_given_up(self, name: str, body: bytes) -> bool:
        given_up = self.rig.channel(name, TOPIC).unfinished.given_up
        return self.log[body][0] in given_up or self.letters[name, body] > self.known_letters[name, body]

    def note_given_up(self) -> None:
        """Take in which messages were given up or have expired, and which letters are written."""
        self.read_letters()
        for name, model in self.model.channels.items():
            for body, entry in [*model.entries.items()]:
                if entry.state is State.IN_FLIGHT or (name, body) in self.abandoned:
                    continue
                if entry.state is not State.GIVEN_UP and self.is_given_up(name, body):
                    policy = model.policy
                    is_used_up = policy is not None and 0 < policy.max_attempts <= entry.failures
                    assert is_used_up or self.is_too_old(name, body), f"{body!r} was given up early"
                    entry.give_up()
                self.note_letter(name, entry)
            if model.policy is not None and model.policy.expire_after:
                self.note_expired(name, model)
        for (name, body), count in self.letters.items():
            if count > self.known_letters[name, body]:
                self.note_unexpected_letter(name, body)

    def note_letter(self, name: str, entry: Entry) -> None:
        """A message that was given up may have become a letter. Without a policy it is sent
        again."""
        given_up = self.rig.channel(name, TOPIC).unfinished.given_up
        if entry.state is not State.GIVEN_UP or self.log[entry.body][0] in given_up:
            return
        if self.letters[name, entry.body] > self.known_letters[name, entry.body]:
            self.known_letters[name, entry.body] += 1
            self.model.channels[name].bury(entry.body)
        else:
            entry.wait()

    def note_expired(self, name: str, model: ChannelModel) -> None:
        """Some messages may have been dropped, also of those that a crash has brought back."""
        channel = self.rig.channel(name, TOPIC)
        unfinished = {*channel.unfinished}
        for body, entry in [*model.entries.items()]:
            sequence = self.log[body][0]
            is_gone = sequence not in unfinished and sequence < channel.cursor.position
            if is_gone and entry.state is not State.IN_FLIGHT and self.is_too_old(name, body):
                model.finish(body)
        if model.ghosts:
            left = self.total(name) - len(model.entries)
            assert 0 <= left <= model.ghosts
            model.ghosts = left

    def note_unexpected_letter(self, name: str, body: bytes) -> None:
        """Of a message that was dropped, or begun anew, while its letter was written; or of one
        that had come back in a crash and was too old."""
        model = self.model.channels.get(name)
        is_ghost = model is not None and body in model.maybe and self.is_too_old(name, body)
        assert is_ghost or (name, body) in self.abandoned, f"a letter of {body!r}"
        self.known_letters[name, body] += 1
        self.abandoned.discard((name, body))

    def abandon(self, name: str, sequence: int = sys.maxsize) -> None:
        """The messages of a channel before `sequence` are dropped or begun anew, whatever is on the
        way."""
        for body, entry in self.model.channels[name].entries.items():
            if entry.state is State.GIVEN_UP and self.log[body][0] < sequence:
                self.abandoned.add((name, body))

    @precondition(lambda self: self.holders())
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.holders()))
        body = data.draw(st.sampled_from(self.held(client)))
        entry = self.model.channels[self.channel_of[client]].entries[body]
        entry.deadline_ns = min(
            self.rig.clock() + client.msg_timeout_ns, entry.delivered_ns + MAX_MSG_TIMEOUT_S * SECOND
        )
        self.rig.touch(client, self.ids_by_body[body])
        self.observe()

    # time

    @precondition(lambda self: not self.is_anything_deferred() and not self.may_expire())
    @rule(seconds=st.sampled_from([-3600, -0.5, 0.5, 3600]))
    def set_the_wall_clock(self, seconds: float) -> None:
        """Nothing that the broker does at its own pace depends on it."""
        self.was_set = True
        self.was_set_back |= seconds < 0
        self.rig.clock.set_wall(seconds)
        self.rig.scan()
        self.observe()

    def is_anything_deferred(self) -> bool:
        """Or has been: due times are kept on disk by the wall clock."""
        return bool(self.earliest_ns)

    def may_expire(self) -> bool:
        policies = [model.policy for model in self.model.channels.values()]
        return any(policy is not None and policy.expire_after for policy in policies)

    @rule(seconds=st.sampled_from([0.001, 0.7, 2.0, 9.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.expire()

    def expire(self) -> None:
        now_ns = self.rig.clock()
        self.rig.scan()
        for name, model in self.model.channels.items():
            model.requeue_due(now_ns)
            for entry in model.timed_out(now_ns):
                self.fail(name, entry, Failure.TIMED_OUT)
        self.observe()

    @rule()
    def maintain(self) -> None:
        self.rig.maintain()
        if not self.is_slow:  # else the checkpoint may come to nothing
            for channel in self.model.channels.values():
                channel.checkpoint()
        self.observe()

    @precondition(lambda self: self.background is not None and self.background.jobs)
    @rule(all_of_it=st.booleans())
    def work_in_the_background(self, all_of_it: bool) -> None:
        if all_of_it:
            self.background.run_all()
        else:
            self.background.run()
        self.rig.turn()
        self.observe()

    # management

    @rule(pause=st.booleans())
    def pause_topic(self, pause: bool) -> None:
        topic = self.rig.topic(TOPIC)
        topic.pause() if pause else topic.unpause()
        self.model.paused = pause
        self.model.show()
        self.rig.turn()
        self.observe()

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data(), pause=st.booleans())
    def pause_channel(self, data: st.DataObject, pause: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.channels)))
        channel = self.rig.channel(name, TOPIC)
        channel.pause() if pause else channel.unpause()
        self.model.channels[name].paused = pause
        self.model.channels[name].checkpoint()
        self.rig.turn()
        self.observe()

    @rule()
    def empty_topic(self) -> None:
        self.rig.topic(TOPIC).empty()
        if self.model.channels:
            for body, _ in self.model.kept:
                del self.log[body]
        self.model.kept.clear()
        self.observe()

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data())
    def empty_channel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.channels)))
        self.abandon(name)
        self.rig.channel(name, TOPIC).empty()
        self.model.channels[name].empty()
        self.rig.turn()
        self.observe()

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data())
    def delete_channel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.channels)))
        self.clients = [client for client in self.clients if self.channel_of[client] != name]
        self.abandon(name)
        self.rig.topic(TOPIC).delete_channel(name)
        if self.background is not None:
            # It is answered when it is on disk.
            self.background.run_all()
        del self.model.channels[name]
        self.rig.turn()
        self.observe()

    # back in the log

    def stored(self) -> dict[bytes, tuple[int, int]]:
        """What the log still has of everything published."""
        log = self.rig.topic(TOPIC).log
        return {
            body: (sequence, due_ns)
            for body, (sequence, due_ns) in self.log.items()
            if sequence >= log.start and log.gaps.skip(sequence) == sequence
        }

    def visible(self, start: int) -> dict[bytes, int]:
        """Due times of what a channel that stands at `start` has ahead of it."""
        held_back = {body for body, _ in self.model.kept} if self.rig.topic(TOPIC).paused else set()
        return {
            body: due_ns
            for body, (sequence, due_ns) in self.stored().items()
            if sequence >= start and body not in held_back
        }

    def draw_place(self, data: st.DataObject) -> int:
        log = self.rig.topic(TOPIC).log
        known = [sequence for sequence, _ in self.log.values()]
        places = [0, log.start, log.start + 1, log.end - 1, log.end, *known[:: max(1, len(known) // 8)]]
        return data.draw(st.sampled_from(sorted(places)))

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.channels)))
        channel, model = self.rig.channel(name, TOPIC), self.model.channels[name]
        target = self.draw_place(data)
        self.abandon(name)
        plan = channel.seek(target)
        topic = self.rig.topic(TOPIC)
        assert plan.target == min(max(target, topic.log.start), topic.visible_end)
        numbers = [sequence for sequence, _ in self.stored().values()]
        assert plan.again == sum(plan.target <= sequence < plan.cursor for sequence in numbers)
        if not model.ghosts:
            unfinished = [self.log[body][0] for body in model.entries]
            assert plan.skipped == sum(sequence < plan.target for sequence in unfinished)
        model.start_over(self.visible(plan.target), self.rig.clock())
        self.rig.turn()
        self.observe()

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.channels)))
        channel, model = self.rig.channel(name, TOPIC), self.model.channels[name]
        sequence = self.draw_place(data)
        cursor = channel.cursor.position
        if sequence > self.rig.topic(TOPIC).visible_end:
            with pytest.raises(OffsetAhead):
                channel.commit(sequence)
            return
        self.abandon(name, sequence)
        channel.commit(sequence)
        assert channel.cursor.position == max(cursor, sequence)
        model.commit({body for body, (number, _) in self.log.items() if number < sequence})
        model.ghosts = self.total(name) - len(model.entries)
        assert 0 <= model.ghosts <= len(model.maybe)
        self.rig.turn()
        self.observe()

    @precondition(lambda self: len(self.model.channels) < 2)
    @rule(data=st.data())
    def create_channel_somewhere(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({"a", "b"} - set(self.model.channels))))
        start = self.draw_place(data)
        channel = self.rig.topic(TOPIC).get_channel(name, start=start)
        if not self.model.channels and not self.model.paused:
            self.model.kept.clear()
        self.model.channels[name] = ChannelModel()
        self.model.channels[name].start_over(self.visible(channel.cursor.position), self.rig.clock())
        self.rig.turn()
        self.observe()

    @rule(holds=st.booleans())
    def hold(self, holds: bool) -> None:
        topic = self.rig.topic(TOPIC)
        topic.holds = {"test": topic.log.start} if holds else {}

    @rule(max_bytes=st.sampled_from([1, 500, 1 << 20]))
    def read_the_log(self, max_bytes: int) -> None:
        log, clock = self.rig.topic(TOPIC).log, self.rig.clock
        found: dict[bytes, tuple[int, int]] = {}
        sequence = log.start
        while (located := log.locate(sequence, max_bytes)).size:
            assert located.next > sequence
            for batch in iter_batches(located.read()):
                for number, body in enumerate(batch.bodies(), batch.base):
                    is_gap = any(low <= number < high for low, high in located.gaps)
                    if number >= sequence and not is_gap:
                        assert body not in found
                        assert batch.timestamp_ns == self.published_ns[body]
                        due_ns = batch.due_ns and batch.due_ns - clock.wall() + clock()
                        found[body] = (number, due_ns)
            sequence = located.next
        assert found == self.stored()
        positions = log.positions()
        assert (positions.earliest, positions.latest) == (log.start, log.end)
        assert log.count(log.start, log.end) == len(found)

    @precondition(lambda self: self.published_ns)
    @rule(data=st.data())
    def find_a_time(self, data: st.DataObject) -> None:
        at_ns = data.draw(st.sampled_from(sorted(set(self.published_ns.values())))) + data.draw(
            st.sampled_from([0, 1])
        )
        found = self.rig.topic(TOPIC).log.search_time(at_ns).run()
        stamps = {sequence: self.published_ns[body] for body, (sequence, _) in self.stored().items()}
        assert all(stamp < at_ns for sequence, stamp in stamps.items() if sequence < found)
        assert found not in stamps or stamps[found] >= at_ns
        if not self.was_set_back:
            assert all(stamp >= at_ns for sequence, stamp in stamps.items() if sequence >= found)

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data())
    def peek(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.channels)))
        model = self.model.channels[name]
        ahead_ns = self.rig.clock.wall() - self.rig.clock()
        look = peek_channel(self.rig.channel(name, TOPIC), STATES, 10_000, 1 << 30)
        seen = {message.body: message for message in look.read()}
        assert look.missing == 0
        shown = {body: one for body, one in model.entries.items() if one.state is not State.GIVEN_UP}
        assert len(seen) == len(shown) + model.ghosts
        assert set(shown) <= set(seen)
        for body, entry in shown.items():
            message = seen[body]
            assert message.timestamp_ns == self.published_ns[body]
            if entry.state is State.IN_FLIGHT:
                assert (message.state, message.attempts) == ("in_flight", entry.attempts)
                assert message.deadline_ns == entry.deadline_ns + ahead_ns
            elif entry.state is State.DEFERRED:
                assert (message.state, message.due_ns) == ("deferred", entry.due_ns + ahead_ns)
            elif entry.state is State.WAITING:
                assert message.state in ("ready", "requeued")
        newest = peek_topic(self.rig.topic(TOPIC), None, 5, 1 << 30).read()
        assert [message.body for message in newest] == [*self.stored()][-5:]

    @rule(data=st.data())
    def change_settings(self, data: st.DataObject) -> None:
        modes = [None, "os"]
        if not self.is_slow:
            modes.append("fsync")
        if not self.may_crash:
            modes.append("memory")
        changes = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "durability": st.sampled_from(modes),
                    "retention_bytes": st.sampled_from([None, 0, 3000, 1 << 20]),
                    "retention_age": st.sampled_from([None, 0, 5]),
                },
            )
        )
        self.settings = self.rig.topic(TOPIC).change_settings(changes)
        for model in self.model.channels.values():
            if self.rig.topic(TOPIC).is_synchronous:
                model.checkpoint()
        self.observe()

    # the end, and after

    @rule(node_id=node_ids)
    def restart(self, node_id: int) -> None:
        if self.background is not None:
            self.background.run_all()
        self.rig.turn()
        self.observe()
        self.move_to(node_id)
        self.rig.restart()
        self.everyone_is_gone()
        for channel in self.model.channels.values():
            channel.release()
            channel.checkpoint()
        self.observe()

    @precondition(lambda self: self.may_crash)
    @rule(seconds=st.sampled_from([0.001, 1.0, 30.0]), node_id=node_ids)
    def crash(self, seconds: float, node_id: int) -> None:
        self.move_to(node_id)
        self.rig.crash(seconds)
        self.everyone_is_gone()
        for name, model in self.model.channels.items():
            self.abandon(name)
            model.crash()
            model.ghosts = self.total(name) - len(model.entries)
            assert 0 <= model.ghosts <= len(model.maybe), f"{name}: {model.ghosts} of {len(model.maybe)}"
        self.expire()

    def move_to(self, node_id: int) -> None:
        """The next start is under another node id: the messages stay, and with them their
        numbers."""
        shift = (node_id - self.rig.options.node_id) << SEQUENCE_BITS
        self.rig.options = replace(self.rig.options, node_id=node_id)
        self.ids_by_body = {body: number + shift for body, number in self.ids_by_body.items()}
        self.bodies_by_id = {number + shift: body for number, body in self.bodies_by_id.items()}

    def everyone_is_gone(self) -> None:
        self.clients.clear()
        assert {*self.rig.broker.topics} - {DEAD} == {TOPIC}
        assert sorted(self.rig.topic(TOPIC).channels) == sorted(self.model.channels)

    # what was delivered

    def observe(self) -> None:
        """Take in what the clients got."""
        now_ns = self.rig.clock()
        # What one that broke had got went to the others afterwards.
        for client in sorted(self.clients, key=lambda one: not isinstance(one, BreakingClient)):
            name = self.channel_of[client]
            model, is_too_old = self.model.channels[name], partial(self.is_too_old, name)
            for message in client.take():
                body = message.body
                assert message.timestamp_ns == self.published_ns[body]
                assert now_ns >= self.earliest_ns.get(body, 0), f"{body!r} is not due"
                assert self.bodies_by_id.setdefault(message.id, body) == body, "an id was given twice"
                assert self.ids_by_body.setdefault(body, message.id) == message.id, "an id has changed"
                assert message.id == self.rig.topic(TOPIC).first_id + self.log[body][0]
                assert not is_too_old(body), f"{body!r} is too old"
                model.deliver(client, message, now_ns, client.msg_timeout_ns, self.place_of, is_too_old)
            if client.channel is None:
                self.forget(client)
                continue
            held = model.held_by(client)
            assert client.in_flight == len(held)
        self.note_given_up()

    def total(self, name: str) -> int:
        channel = self.rig.channel(name, TOPIC)
        unfinished = channel.unfinished
        waiting = len(unfinished.deferred) + len(unfinished.given_up)
        return channel.depth + len(unfinished.in_flight) + waiting

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "rig"):
            return
        topic = self.rig.broker.topics[TOPIC]
        assert topic.settings == self.settings
        assert topic.paused == self.model.paused
        assert topic.depth == self.model.depth
        for name, model in self.model.channels.items():
            channel = topic.channels[name]
            assert channel.paused == model.paused
            assert channel.retries.own_policy == model.policy
            assert channel.ordering.ordered_by == (ORDERED_BY if model.is_ordered else "")
            self.check_keys(channel)
            assert self.total(name) == model.total, name
            assert len(channel.unfinished.in_flight) == model.count(State.IN_FLIGHT)
            assert channel.dropped_count == 0
            if model.is_exact:
                assert len(channel.unfinished.deferred) == model.count(State.DEFERRED)
                assert channel.depth == model.count(State.WAITING)
            self.check_liveness(name, model)

    def check_keys(self, channel: Channel) -> None:
        """Only unfinished messages have places in the order, and who waits for a key has one."""
        unfinished = channel.unfinished
        keys, everything = unfinished.keys, {*unfinished}
        assert len(everything) == sum(1 for _ in unfinished), "a message is in two places"
        if keys is None:
            assert not unfinished.parked
        else:
            assert keys.key_of.keys() | keys.unknown.keys() <= everything
            assert unfinished.parked.keys() <= keys.key_of.keys()

    @invariant()
    def no_step_costs_much(self) -> None:
        """Counted in calls at the door to the disk, not in time."""
        if not hasattr(self, "rig"):
            return
        calls, work = (
            self.rig.files.calls.total(),
            self.published + sum(len(client.messages) for client in self.clients) + 20 * self.letters.total(),
        )
        spent = calls - self.calls_before
        assert spent <= MOST_CALLS + 4 * max(0, work - self.work_before), f"{spent} calls in one step"
        self.calls_before, self.work_before = calls, work

    def check_liveness(self, name: str, model: ChannelModel) -> None:
        """Nothing waits while somebody may take it."""
        if self.background is not None and self.background.jobs:
            return
        takers = [c for c in self.clients if self.channel_of[c] == name and c.capacity > 0]
        is_full = len(self.rig.channel(name, TOPIC).unfinished.parked) >= ordering.MAX_PARKED
        if takers and not model.paused and not is_full:
            assert not model.idle(), f"{name}: messages wait for {len(takers)} ready clients"

    def drain(self) -> None:
        """Everything unfinished comes, sooner or later; then nothing is left."""
        if self.background is not None:
            self.background.run_all()
            self.rig.background = self.background = None
            self.rig.broker._background = run_inline
            self.rig.turn()
            self.observe()
        while self.clients:
            client = self.clients[0]
            self.rig.disconnect(client)
            self.forget(client)
            self.observe()
        for name, model in self.model.channels.items():
            self.rig.channel(name, TOPIC).unpause()
            self.rig.channel(name, TOPIC).change_policy(None)
            model.paused, model.policy = False, None
        for name in {"a", *self.model.channels}:
            self.subscribe(name, 2500, 10)
        self.pause_topic(False)
        self.pass_time(100)
        for client in self.clients:
            while bodies := self.held(client):
                for body in bodies:
                    self.model.channels[self.channel_of[client]].finish(body)
                assert not self.rig.finish(client, *(self.ids_by_body[body] for body in bodies))
                self.observe()
        self.trouble_is_over()
        for name, model in self.model.channels.items():
            states = Counter(entry.state for entry in model.entries.values())
            assert not model.entries, f"{name}: messages are lost: {states}"
            assert self.total(name) == 0
        self.rig.clock.advance(10)
        self.rig.maintain()
        assert self.rig.broker.health.error is None, "it goes on by itself"
        self.rig.restart()
        for name in self.model.channels:
            assert self.total(name) == 0


SMALL = {"max_bytes_per_file": 2000, "mem_queue_size": 5}
RUNS = [
    pytest.param("os", SMALL, False, 60, id="os, small files, little memory"),
    pytest.param("os", SMALL, True, 40, id="os, a slow disk"),
    pytest.param("os", {}, False, 20, id="os, defaults"),
    pytest.param("os", SMALL | {"mem_queue_bytes": 600}, False, 20, id="os, a tiny cache"),
    pytest.param("fsync", SMALL, False, 15, id="fsync"),
    pytest.param("memory", SMALL, False, 30, id="memory, clean stops only"),
]


@pytest.mark.parametrize(("durability", "flags", "is_slow", "examples"), RUNS)
def test_random_lives_agree_with_the_model(
    durability: str, flags: dict[str, int], is_slow: bool, examples: int
) -> None:
    machine = type(
        "Machine",
        (BrokerMachine,),
        {
            "flags": {"durability": durability, **flags},
            "may_crash": durability != "memory",
            "is_slow": is_slow,
        },
    )
    logging.disable(logging.CRITICAL)  # thousands of lines that say nothing new
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=50,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        logging.disable(logging.NOTSET)
