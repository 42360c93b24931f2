"""What a topic and its channels should hold, in the plainest terms: dictionaries of bodies.

A crash leaves things open that the model must allow for: a message finished since the channel's
last checkpoint may come back (it is in `maybe`, and `ghosts` says how many of those are there),
attempts may have fallen back to what the checkpoint knew, and a delay asked for since may be
forgotten (state UNKNOWN).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tests.broker.rig import Delivered, FakeClient


class State(Enum):
    WAITING = "to be delivered"
    IN_FLIGHT = "with a client"
    DEFERRED = "not due yet"
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

    def wait(self) -> None:
        self.state, self.client = State.WAITING, None

    def defer(self, due_ns: int) -> None:
        self.state, self.client, self.due_ns = State.DEFERRED, None, due_ns


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

    def deliver(self, client: FakeClient, message: Delivered, now_ns: int, timeout_ns: int) -> None:
        """Check that this delivery is allowed, and note it."""
        body = message.body
        if body not in self.entries:
            assert body in self.finished, f"{body!r} was never on this channel"
            assert body in self.maybe, f"{body!r} came back after FIN"
            assert self.ghosts, f"{body!r} came back though nothing was left to come back"
            self.maybe.discard(body)
            self.ghosts -= 1
            self.entries[body] = Entry(body, State.UNKNOWN, self.finished.pop(body), 0)
        entry = self.entries[body]
        assert entry.state is not State.IN_FLIGHT, f"{body!r} is with {entry.client} and goes to {client}"
        assert entry.state is not State.DEFERRED, f"{body!r} is not due"
        assert entry.least_attempts < message.attempts <= entry.attempts + 1, f"attempts of {body!r}"
        entry.state, entry.client = State.IN_FLIGHT, client
        entry.attempts = entry.least_attempts = message.attempts
        entry.delivered_ns, entry.deadline_ns = now_ns, now_ns + timeout_ns

    def finish(self, body: bytes) -> None:
        self.finished[body] = self.entries.pop(body).attempts
        self.since.add(body)

    def expire(self, now_ns: int) -> None:
        for entry in self.entries.values():
            timed_out = entry.state is State.IN_FLIGHT and entry.deadline_ns <= now_ns
            is_due = entry.state is State.DEFERRED and entry.due_ns <= now_ns
            if timed_out or is_due:
                entry.wait()

    def release(self, client: FakeClient | None = None) -> None:
        """A client, or everyone, is gone."""
        for entry in self.entries.values():
            if entry.state is State.IN_FLIGHT and client in (None, entry.client):
                entry.wait()

    def checkpoint(self) -> None:
        self.since.clear()
        self.saved_attempts = {body: entry.least_attempts for body, entry in self.entries.items()}

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
