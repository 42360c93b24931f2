"""What a topic and its channels should hold, in the plainest terms: dictionaries of bodies.

A crash leaves things open that the model must allow for: a message finished since the channel's
last checkpoint may come back (it is in `maybe`, and `ghosts` says how many of those are there),
attempts and failures may have fallen back to what the checkpoint knew, and a delay asked for since
may be forgotten (state UNKNOWN).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from enum import Enum

from nsparq.delivery_policy import DeliveryPolicy, Failure
from tests.broker.rig import Delivered, FakeClient

PlaceOf = Callable[[bytes], int | None]
"""The place of a message in the log; None if it was published with a delay."""


class State(Enum):
    WAITING = "to be delivered"
    IN_FLIGHT = "with a client"
    DEFERRED = "not due yet"
    GIVEN_UP = "about to become a dead letter"
    UNKNOWN = "waiting or deferred: a crash has blurred it"


@dataclass
class Entry:
    """One unfinished message of a channel."""

    body: bytes
    state: State = State.WAITING
    attempts: int = 0
    least_attempts: int = 0
    due_ns: int = 0
    client: FakeClient | None = None
    delivered_ns: int = 0
    deadline_ns: int = 0
    failures: int = 0
    """Failed attempts that count."""
    least_failures: int = 0
    holds_key: bool = False
    """It was sent while the channel was ordered: no other of its key is, before it is finished."""
    comes_first: bool = False
    """It was sent before the channel became ordered, so it comes before older ones that were
    not."""
    is_loose: bool = False
    """It was given up without having its key. If it is sent after all, it has no place."""
    key: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.key = json.loads(self.body).get("k")

    def wait(self) -> None:
        self.state, self.client = State.WAITING, None

    def defer(self, due_ns: int) -> None:
        self.state, self.client, self.due_ns = State.DEFERRED, None, due_ns

    def give_up(self) -> None:
        self.state, self.client = State.GIVEN_UP, None
        self.is_loose |= not self.holds_key


@dataclass
class ChannelModel:
    paused: bool = False
    entries: dict[bytes, Entry] = field(default_factory=dict)
    finished: dict[bytes, int] = field(default_factory=dict)
    """Finished or dropped, with the attempts it took."""
    since: set[bytes] = field(default_factory=set)
    """Finished since the last checkpoint."""
    maybe: set[bytes] = field(default_factory=set)
    ghosts: int = 0
    saved_attempts: dict[bytes, int] = field(default_factory=dict)
    saved_failures: dict[bytes, int] = field(default_factory=dict)
    is_ordered: bool = False
    policy: DeliveryPolicy | None = None

    def count(self, *states: State) -> int:
        return sum(entry.state in states for entry in self.entries.values())

    def held_by(self, client: FakeClient) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.client is client]

    @property
    def total(self) -> int:
        return len(self.entries) + self.ghosts

    @property
    def is_exact(self) -> bool:
        return not self.ghosts and not self.count(State.UNKNOWN)

    def show(self, body: bytes, due_ns: int) -> None:
        entry = self.entries[body] = Entry(body)
        if due_ns:
            entry.defer(due_ns)

    def deliver(
        self,
        client: FakeClient,
        message: Delivered,
        now_ns: int,
        timeout_ns: int,
        place_of: PlaceOf,
        is_too_old: Callable[[bytes], bool],
    ) -> None:
        """Check that this delivery is allowed, and note it."""
        body = message.body
        if body not in self.entries:
            assert body in self.finished, f"{body!r} was never on this channel"
            assert body in self.maybe, f"{body!r} came back after FIN"
            assert self.ghosts, f"{body!r} came back though nothing was left to come back"
            self.maybe.discard(body)
            self.ghosts -= 1
            ghost = Entry(body, State.UNKNOWN, self.finished.pop(body), 0, comes_first=True)
            ghost.failures = ghost.attempts
            self.entries[body] = ghost
        entry = self.entries[body]
        assert entry.state is not State.IN_FLIGHT, f"{body!r} is with {entry.client} and goes to {client}"
        assert entry.state is not State.DEFERRED, f"{body!r} is not due"
        # Without a policy, what was given up is sent again.
        assert entry.state is not State.GIVEN_UP or self.policy is None, f"{body!r} was given up"
        self._check_order(entry, place_of, is_too_old)
        assert entry.least_attempts < message.attempts <= entry.attempts + 1, f"attempts of {body!r}"
        entry.state, entry.client = State.IN_FLIGHT, client
        entry.attempts = entry.least_attempts = message.attempts
        entry.delivered_ns, entry.deadline_ns = now_ns, now_ns + timeout_ns

    def _check_order(self, entry: Entry, place_of: PlaceOf, is_too_old: Callable[[bytes], bool]) -> None:
        """One message of a key at a time, and the oldest first. A message that was published with a
        delay takes its place when it is due; None stands for that."""
        if not self.is_ordered or entry.key is None:
            return
        place = place_of(entry.body)
        for other in self.entries.values():
            if other is entry or other.key != entry.key:
                continue
            if other.state is not State.IN_FLIGHT and is_too_old(other.body):
                continue  # it may have expired just before
            assert not other.holds_key, f"{entry.body!r} came while {other.body!r} has the key"
            if place is None or entry.comes_first or entry.is_loose or other.is_loose:
                continue
            other_place = place_of(other.body)
            assert other_place is None or place < other_place, f"{entry.body!r} before {other.body!r}"
        entry.holds_key = True

    def order(self, is_ordered: bool) -> None:
        """Order the channel by keys, or no more."""
        for entry in self.entries.values():
            if is_ordered != self.is_ordered:
                entry.holds_key = False
                entry.comes_first = is_ordered and entry.attempts > 0
        self.is_ordered = is_ordered

    def idle(self) -> list[bytes]:
        """Messages that nothing keeps from being sent."""
        waiting = [entry for entry in self.entries.values() if entry.state is State.WAITING]
        if not self.is_ordered:
            return [entry.body for entry in waiting]
        blocked: dict[str | None, bool] = defaultdict(bool)
        for entry in self.entries.values():
            is_untried = entry.state is State.DEFERRED and not entry.attempts
            blocked[entry.key] |= entry.state is not State.WAITING and not is_untried
        return [one.body for one in waiting if one.key is None or not (blocked[one.key] or self.ghosts)]

    def fail(self, entry: Entry, failure: Failure, is_given_up: bool, due_ns: int, is_too_old: bool) -> None:
        """An attempt has ended badly. The broker says what it did with the message: given up, to be
        sent again at `due_ns`, or at once (0)."""
        policy = self.policy
        counts = policy is not None and policy.counts(failure)
        entry.failures += counts
        entry.least_failures += counts
        most = policy.max_attempts if policy is not None and counts else 0
        assert is_given_up or not 0 < most <= entry.least_failures, f"{entry.body!r} has no attempts left"
        may_be_given_up = is_too_old or 0 < most <= entry.failures
        assert may_be_given_up or not is_given_up, f"{entry.body!r} was given up early"
        if is_given_up:
            entry.give_up()
        elif due_ns:
            entry.defer(due_ns)
        else:
            entry.wait()

    def delays_ns(self, entry: Entry) -> set[int]:
        """The delays that the policy may choose after the next failed attempt."""
        if self.policy is None:
            return {0}
        return {self.policy.delay_ns(n + 1) for n in range(entry.least_failures, entry.failures + 1)}

    def finish(self, body: bytes) -> None:
        self.finished[body] = self.entries.pop(body).attempts
        self.since.add(body)

    def bury(self, body: bytes) -> None:
        """It is a dead letter. A crash does not bring it back."""
        self.finished[body] = self.entries.pop(body).attempts

    def timed_out(self, now_ns: int) -> list[Entry]:
        flying = [entry for entry in self.entries.values() if entry.state is State.IN_FLIGHT]
        return [entry for entry in flying if entry.deadline_ns <= now_ns]

    def requeue_due(self, now_ns: int) -> None:
        for entry in self.entries.values():
            if entry.state is State.DEFERRED and entry.due_ns <= now_ns:
                entry.wait()

    def release(self) -> None:
        """The broker has stopped."""
        for entry in self.entries.values():
            if entry.state is State.IN_FLIGHT:
                entry.wait()

    def checkpoint(self) -> None:
        self.since.clear()
        self.saved_attempts = {body: entry.least_attempts for body, entry in self.entries.items()}
        self.saved_failures = {body: entry.least_failures for body, entry in self.entries.items()}

    def empty(self) -> None:
        for body in [*self.entries]:
            self.finish(body)
        self.maybe.clear()
        self.ghosts = 0
        self.checkpoint()

    def start_over(self, seen: Mapping[bytes, int], now_ns: int) -> None:
        """Stand before these messages of the log, with their due times, as if none had been
        delivered."""
        for body in [*self.entries]:
            self.finish(body)
        for body, due_ns in seen.items():
            self.finished.pop(body, None)
            self.show(body, due_ns if due_ns > now_ns else 0)
        self.maybe.clear()
        self.ghosts = 0
        self.checkpoint()

    def commit(self, passed: Container[bytes]) -> None:
        """These are done. The caller says how many ghosts are left."""
        for body in [body for body in self.entries if body in passed]:
            self.finish(body)
        # One that a crash has brought back may be done once more, and once more unknown to the
        # checkpoint.
        done = {body for body in self.maybe if body in passed}
        self.maybe -= done
        self.since |= done

    def crash(self) -> None:
        self.release()
        self.maybe |= self.since
        self.since.clear()
        for body, entry in self.entries.items():
            entry.state = State.UNKNOWN
            entry.least_attempts = min(entry.least_attempts, self.saved_attempts.get(body, 0))
            entry.least_failures = min(entry.least_failures, self.saved_failures.get(body, 0))
            entry.holds_key = False


@dataclass
class TopicModel:
    paused: bool = False
    channels: dict[str, ChannelModel] = field(default_factory=dict)
    kept: list[tuple[bytes, int]] = field(default_factory=list)
    """What no channel has seen yet, with due times."""

    def publish(self, body: bytes, due_ns: int) -> None:
        self.kept.append((body, due_ns))
        self.show()

    def show(self) -> None:
        if self.channels and not self.paused:
            for body, due_ns in self.kept:
                for channel in self.channels.values():
                    channel.show(body, due_ns)
            self.kept.clear()

    def create(self, name: str) -> None:
        if name not in self.channels:
            self.channels[name] = ChannelModel()
            self.show()
            self.channels[name].checkpoint()

    @property
    def depth(self) -> int:
        return len(self.kept)
