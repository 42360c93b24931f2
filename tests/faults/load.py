"""Publishers and consumers that go on through the death of their broker, and remember what they
were told.

What counts is what a publisher may rely on: a message whose OK it has read is *acknowledged*. A
batch whose answer never came is *unanswered*: it may be there or not, but as a whole.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nsparq.storage.files import Files
from nsparq.storage.state_files import ChannelState, read_channel_state
from tests.support import (
    ERROR,
    RESPONSE,
    BrokerProcess,
    ConnectionClosed,
    Message,
    RawConnection,
    TestBroker,
    multi,
    wait_until,
)
from tests.support.polling import DEADLINE

# A broker that is killed may leave half a frame behind; RawConnection asserts that none does.
LOST = (ConnectionClosed, OSError, AssertionError)

DRAIN_S = 10.0
"""Deadline for a channel to send its depth."""

Batch = tuple[bytes, ...]

READY = 200
"""RDY of a consumer."""


def await_checkpoint(
    broker: TestBroker, channel: str, fact: Callable[[ChannelState], object], topic: str = "t"
) -> ChannelState:
    """Wait until the channel's file on disk shows this."""
    path = broker.data_path / "topics" / f"{topic}.topic" / f"{channel}.channel"

    def shown() -> ChannelState | None:
        state = read_channel_state(Files(), path)
        return state if state is not None and fact(state) else None

    return wait_until(shown, what=f"a checkpoint of {channel}")


def sequence_of(message_id: bytes) -> int:
    return int(message_id, 16) & ((1 << 54) - 1)


class Worker(threading.Thread):
    """A thread that connects whenever the gate is open, until it is stopped."""

    def __init__(self, broker: BrokerProcess, gate: threading.Event) -> None:
        super().__init__(daemon=True)
        self.broker = broker
        self.gate = gate
        self.stopping = threading.Event()
        self.problems: list[BaseException] = []

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                if not self.gate.wait(0.05):
                    continue
                try:
                    with self.broker.connect() as connection:
                        self.work(connection)
                except LOST:
                    time.sleep(0.005)
        except BaseException as problem:
            self.problems.append(problem)

    def work(self, connection: RawConnection) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.stopping.set()
        self.join(DEADLINE)
        assert not self.is_alive()
        assert not self.problems, self.problems


class Publisher(Worker):
    """PUBs and MPUBs of different sizes; each waits for its answer."""

    def __init__(self, broker: BrokerProcess, gate: threading.Event, topic: str, number: int) -> None:
        super().__init__(broker, gate)
        self.topic = topic
        self.number = number
        self.random = random.Random(number)
        self.acknowledged: list[Batch] = []
        self.unanswered: list[Batch] = []
        self.failed: list[tuple[bytes, Batch]] = []
        self._count = 0

    def next_batch(self) -> Batch:
        size = 1 if self.random.random() < 0.3 else self.random.randint(2, 40)
        start, self._count = self._count, self._count + size
        padding = b"." * self.random.randint(0, 200)
        return tuple(b"%d-%08d%b" % (self.number, i, padding) for i in range(start, start + size))

    def work(self, connection: RawConnection) -> None:
        while not self.stopping.is_set():
            batch = self.next_batch()
            self.unanswered.append(batch)
            if len(batch) == 1:
                connection.command("PUB", self.topic, body=batch[0])
            else:
                connection.command("MPUB", self.topic, body=multi(batch))
            frame = connection.read_frame()
            self.unanswered.pop()
            if frame == (RESPONSE, b"OK"):
                self.acknowledged.append(batch)
            else:
                assert frame.type == ERROR
                self.failed.append((frame.data, batch))
            time.sleep(0.001)


class LonePublisher(Publisher):
    """Nothing but PUBs, each awaited before the next: nsqd reads from such clients together."""

    def next_batch(self) -> Batch:
        return super().next_batch()[:1]


class Consumer(Worker):
    """Receives and finishes everything on one channel."""

    def __init__(self, broker: BrokerProcess, gate: threading.Event, topic: str, channel: str) -> None:
        super().__init__(broker, gate)
        self.topic, self.channel = topic, channel
        self.received: Counter[bytes] = Counter()
        self.times: list[int] = []

    def work(self, connection: RawConnection) -> None:
        connection.identify()
        connection.sub(self.topic, self.channel, rdy=READY)
        while not self.stopping.is_set():
            try:
                message = connection.read_message(0.1)
            except TimeoutError:
                continue
            self.received[message.body] += 1
            self.times.append(time.time_ns())
            connection.fin(message.id)


class Load:
    """Four publishers on a topic, two consumers on its channel `live`; the channel `audit` only
    fills.

    While there is an audit, nothing of the log can be reclaimed.
    """

    def __init__(self, broker: BrokerProcess, topic: str, *, audit: bool = True) -> None:
        self.broker = broker
        self.topic = topic
        # Closed while the broker is away, when its port may be anybody's.
        self.gate = threading.Event()
        for channel in ("live", "audit") if audit else ("live",):
            with broker.connect() as connection:
                connection.identify()
                connection.sub(topic, channel)
        kinds = (Publisher, Publisher, LonePublisher, LonePublisher)
        self.publishers = [kind(broker, self.gate, topic, number) for number, kind in enumerate(kinds)]
        self.consumers = [Consumer(broker, self.gate, topic, "live") for _ in range(2)]

    def start(self) -> None:
        self.gate.set()
        for worker in (*self.publishers, *self.consumers):
            worker.start()

    def acknowledged(self) -> set[bytes]:
        return {body for each in self.publishers for batch in tuple(each.acknowledged) for body in batch}

    def received(self) -> Counter[bytes]:
        total: Counter[bytes] = Counter()
        for consumer in self.consumers:
            # copy() is one bytecode on the dict, so it does not race with the consumer's thread
            total.update(consumer.received.copy())
        return total

    def delivered_since(self, start_ns: int) -> int:
        return sum(at >= start_ns for consumer in self.consumers for at in tuple(consumer.times))

    def await_more(self, count: int) -> None:
        """Wait until so many more messages are acknowledged."""
        goal = len(self.acknowledged()) + count
        wait_until(lambda: len(self.acknowledged()) >= goal, what=f"{count} more messages acknowledged")

    def await_delivery(self, bodies: set[bytes]) -> None:
        """Wait until a consumer has received each of these."""
        wait_until(
            lambda: bodies <= self.received().keys(),
            interval=0.05,
            what=lambda: f"missing: {sorted(bodies - self.received().keys())[:5]}",
        )

    def crash(self) -> int:
        """kill -9 and start again, keeping the workers away meanwhile. Returns how many may come
        again: those delivered since the last checkpoint of `live`, and those on their way."""
        self.gate.clear()
        self.broker.kill()
        last = await_checkpoint(self.broker, "live", lambda state: True, self.topic)
        repeated = self.delivered_since(last.written_ns) + len(self.consumers) * READY
        self.broker.start()
        self.gate.set()
        return repeated

    def stop_publishing(self) -> None:
        for publisher in self.publishers:
            publisher.stop()

    def stop(self) -> None:
        self.gate.set()
        for worker in (*self.publishers, *self.consumers):
            worker.stop()


@contextmanager
def running_load(broker: BrokerProcess, topic: str, *, audit: bool = True) -> Iterator[Load]:
    load = Load(broker, topic, audit=audit)
    load.start()
    try:
        yield load
    finally:
        load.stop()


def drain_messages(broker: TestBroker, topic: str, channel: str, quiet: float = 0.5) -> list[Message]:
    """Receive and finish what the channel holds, until nothing has come for `quiet` seconds. That
    says little on a busy machine, so the broker is asked whether anything is left."""
    found: list[Message] = []
    patience = time.monotonic() + DRAIN_S
    with broker.connect() as connection:
        connection.identify()
        connection.sub(topic, channel, rdy=2500)
        while True:
            try:
                message = connection.read_message(quiet)
            except TimeoutError:
                connection.barrier()
                stats = broker.channel_stats(topic, channel)
                is_left = stats is not None and (stats["depth"] or stats["in_flight_count"])
                if is_left and time.monotonic() < patience:
                    continue
                return found
            found.append(message)
            connection.fin(message.id)
            patience = time.monotonic() + DRAIN_S


def drain(broker: TestBroker, topic: str, channel: str, quiet: float = 0.5) -> list[bytes]:
    """The bodies of drain_messages(), in order of arrival."""
    return [message.body for message in drain_messages(broker, topic, channel, quiet)]


def assert_whole_or_absent(batches: list[Batch], bodies: set[bytes]) -> None:
    """An MPUB without an OK has all of its messages in the log, or none."""
    for batch in batches:
        there = [body in bodies for body in batch]
        assert all(there) or not any(there), (
            f"half of an MPUB was delivered: {list(zip(batch, there, strict=True))}"
        )


def resident_mib(pid: int) -> float:
    return _status_mib(pid, "VmRSS")


def anonymous_mib(pid: int) -> float:
    """Resident memory without mapped files."""
    return _status_mib(pid, "RssAnon")


def peak_mib(pid: int) -> float:
    """Peak resident memory since reset_peak()."""
    return _status_mib(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_mib(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {name} in the status of {pid}")
