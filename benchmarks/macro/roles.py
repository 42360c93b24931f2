"""What the load processes do: publish, consume, send single messages, time them.

Each role connects when it is made and works when told to run(), so that a load starts with
everything in place. Times are CLOCK_MONOTONIC nanoseconds, which all processes of a machine share.
Every role ends by its deadline.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.macro.wire import (
    BODY_START,
    HEAD,
    HEARTBEAT,
    ID_START,
    MESSAGE,
    MESSAGE_WITH_HEADERS,
    OK_FRAME,
    Address,
    BrokerRefused,
    Finisher,
    FrameBuffer,
    Rows,
    connect,
    encode_mpub,
    encode_pub,
    expect_ok,
    receive_frame,
    subscribe,
    wait_in_kernel,
    with_headers,
)

Progress = Any  # a shared array of signed 64-bit integers, one slot per consuming process
POLL_SECONDS = 0.02
STAMP = struct.Struct(">q")
STAMPED = np.dtype([("id", "V16"), ("sent", ">i8")])


class OutOfTime(Exception):
    """The deadline passed with the load unfinished."""


@dataclass
class Span:
    """When a role was first and last busy, and how much it moved."""

    count: int = 0
    first_ns: int = 0
    last_ns: int = 0
    arrivals: list[tuple[int, int]] = field(
        default_factory=list
    )  # when a run of messages was done with; how many
    ids: dict[str, npt.NDArray[np.uint64]] = field(default_factory=dict)  # by topic/channel
    latencies_ns: npt.NDArray[np.int64] | None = None
    cpu_s: float = 0.0  # processor time that it took itself


class Replies:
    """Counts the OKs of pipelined publishes. The usual case, nothing but OKs, is a comparison."""

    def __init__(self) -> None:
        self.buffer = b""

    def receive_from(self, connection: socket.socket) -> int:
        data = connection.recv(65536)
        if data == OK_FRAME and not self.buffer:
            return 1
        if not data:
            raise BrokerRefused("the broker closed the connection")
        self.buffer += data
        count = 0
        while len(self.buffer) >= HEAD.size:
            size, kind = HEAD.unpack_from(self.buffer)
            if len(self.buffer) < 4 + size:
                break
            body, self.buffer = self.buffer[8 : 4 + size], self.buffer[4 + size :]
            if body == b"OK":
                count += 1
            elif body == HEARTBEAT:
                connection.sendall(b"NOP\n")
            else:
                raise BrokerRefused(f"frame of type {kind}: {body.decode(errors='replace')}")
        return count


class Publisher:
    """MPUB after MPUB on one connection, with at most `window` of them unanswered.

    The bytes are the same each time, so they are built once: the broker is to be measured, not our
    encoder.
    """

    def __init__(
        self,
        address: Address,
        topic: str,
        count: int,
        size: int,
        batch: int,
        window: int,
        encode: bool,
        deadline: float,
        headers: bool = False,
    ) -> None:
        self.connection = connect(address, timeout=deadline, headers=headers)
        wait_in_kernel(self.connection)
        self.count, self.batch, self.window, self.deadline = count, batch, window, deadline
        self.topic, self.encode = topic, encode
        body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
        if headers:
            self.topic, body = f"{topic} headers", with_headers(body)
        self.bodies = [body] * batch

    def run(self, progress: Progress) -> Span:
        connection, replies = self.connection, Replies()
        whole = encode_mpub(self.topic, self.bodies)
        unanswered, to_send = 0, self.count
        first = time.monotonic_ns()
        give_up = first + int(self.deadline * 1e9)
        while to_send:
            count = min(to_send, self.batch)
            if self.encode or count < self.batch:
                command = encode_mpub(self.topic, self.bodies[:count])
            else:
                command = whole
            connection.sendall(command)
            to_send -= count
            unanswered += 1
            # Wait for room in the window, and at the end for everything.
            while unanswered >= (self.window if to_send else 1):
                unanswered -= replies.receive_from(connection)
                if time.monotonic_ns() > give_up:
                    raise OutOfTime(f"publishing: {self.count - to_send} of {self.count} messages sent")
        last = time.monotonic_ns()
        connection.close()
        return Span(self.count, first, last)


class Consumer:
    """Takes messages from one or more channels, a connection each, and finishes all of them.

    `total` is for all consuming processes together: each writes what it has into its slot of the
    shared progress. After a crash nobody knows what will come: with `idle_seconds` the role ends
    when nothing came for that long, whatever the total, and a FIN may fail, as it does for one of
    two copies in flight.
    """

    def __init__(
        self,
        address: Address,
        subscriptions: Sequence[tuple[str, str]],
        size: int,
        rdy: int,
        total: int,
        slot: int,
        deadline: float,
        idle_seconds: float = 0.0,
        headers: bool = False,
    ) -> None:
        self.rdy, self.total, self.slot = rdy, total, slot
        self.deadline, self.idle_seconds = deadline, idle_seconds
        self.names = [f"{topic}/{channel}" for topic, channel in subscriptions]
        self.connections = [self.connect(address, deadline, headers) for _ in subscriptions]
        kind, more = (MESSAGE_WITH_HEADERS, len(with_headers(b""))) if headers else (MESSAGE, 0)
        self.buffers = [FrameBuffer(size + more, kind=kind) for _ in subscriptions]
        for connection, (topic, channel) in zip(self.connections, subscriptions, strict=True):
            subscribe(connection, topic, channel)

    def connect(self, address: Address, timeout: float, headers: bool = False) -> socket.socket:
        connection = connect(address, timeout=timeout, headers=headers)
        wait_in_kernel(connection)
        return connection

    def has_more(self, connection: socket.socket) -> bool:
        """Whether more can be received that epoll does not see."""
        return False

    def run(self, progress: Progress) -> Span:
        span = Span()
        received: list[list[Rows]] = [[] for _ in self.names]
        finisher = Finisher()
        poller = select.epoll()
        by_descriptor = {}
        for index, connection in enumerate(self.connections):
            by_descriptor[connection.fileno()] = index
            poller.register(connection, select.EPOLLIN)
            connection.sendall(b"RDY %d\n" % self.rdy)
        started = busy = time.monotonic()
        while self.idle_seconds or sum(progress[:]) < self.total:
            ready = poller.poll(POLL_SECONDS)
            now = time.monotonic()
            if now - started > self.deadline:
                raise OutOfTime(f"consuming: {sum(progress[:])} of {self.total} messages received")
            if ready:
                busy = now
            elif self.idle_seconds and now - busy > self.idle_seconds:
                break
            for descriptor, _ in ready:
                index = by_descriptor[descriptor]
                connection, buffer = self.connections[index], self.buffers[index]
                has_more = True
                while has_more:
                    buffer.receive_from(connection)
                    for ids in buffer.take_messages():
                        if not span.count:
                            span.first_ns = time.monotonic_ns()
                        connection.sendall(finisher.encode(ids))
                        received[index].append(ids)
                        span.count += len(ids)
                        progress[self.slot] = span.count
                        span.last_ns = time.monotonic_ns()
                        span.arrivals.append((span.last_ns, len(ids)))
                    has_more = self.has_more(connection)
                check_errors(buffer, fin_may_fail=bool(self.idle_seconds))
                if buffer.heartbeats:
                    buffer.heartbeats = 0
                    connection.sendall(b"NOP\n")
        poller.close()
        for connection, buffer in zip(self.connections, self.buffers, strict=True):
            leave(connection, buffer, fin_may_fail=bool(self.idle_seconds))
        span.ids = {name: numeric_ids(ids) for name, ids in zip(self.names, received, strict=True)}
        return span


def check_errors(buffer: FrameBuffer, fin_may_fail: bool) -> None:
    for error in buffer.errors:
        if not (fin_may_fail and error.startswith(b"E_FIN_FAILED")):
            raise BrokerRefused(error.decode(errors="replace"))
    buffer.errors.clear()


def leave(connection: socket.socket, buffer: FrameBuffer, fin_may_fail: bool = False) -> None:
    """Wait until the broker has taken the last FIN (it answers in order), so that an error in one
    is seen."""
    connection.sendall(b"CLS\n")
    while b"CLOSE_WAIT" not in buffer.replies:
        buffer.receive_from(connection)
        buffer.take_messages()
        check_errors(buffer, fin_may_fail)
    connection.close()


def numeric_ids(parts: list[Rows]) -> npt.NDArray[np.uint64]:
    """Message ids (16 hex digits) as integers, so that duplicates are quickly found among
    millions."""
    return np.frombuffer(bytes.fromhex(b"".join(part.tobytes() for part in parts).decode()), np.uint64)


class SinglePublisher:
    """PUB one message and wait for its OK, on several connections that do not wait for each
    other."""

    def __init__(
        self,
        address: Address,
        topic: str,
        count: int,
        size: int,
        connections: int,
        deadline: float,
        headers: bool = False,
    ) -> None:
        self.connections = [connect(address, timeout=deadline, headers=headers) for _ in range(connections)]
        for connection in self.connections:
            wait_in_kernel(connection)
        self.command = encode_pub(topic, b"x" * size)
        if headers:
            self.command = encode_pub(f"{topic} headers", with_headers(b"x" * size))
        self.count, self.deadline = count, deadline

    def run(self, progress: Progress) -> Span:
        command, to_send, answered = self.command, self.count, 0
        poller = select.epoll()
        by_descriptor = {connection.fileno(): (connection, Replies()) for connection in self.connections}
        first = time.monotonic_ns()
        for connection in self.connections[:to_send]:
            poller.register(connection, select.EPOLLIN)
            connection.sendall(command)
            to_send -= 1
        give_up = first + int(self.deadline * 1e9)
        while answered < self.count:
            for descriptor, _ in poller.poll(1.0):
                connection, replies = by_descriptor[descriptor]
                if not replies.receive_from(connection):
                    continue
                answered += 1
                if to_send:
                    connection.send(command)
                    to_send -= 1
            if time.monotonic_ns() > give_up:
                raise OutOfTime(f"single publishes: {answered} of {self.count} answered")
        last = time.monotonic_ns()
        poller.close()
        for connection in self.connections:
            connection.close()
        return Span(self.count, first, last)


class PacedPublisher:
    """PUBs at a steady rate, each carrying the time it was sent at the start of its body."""

    def __init__(
        self, address: Address, topic: str, count: int, size: int, rate: float, deadline: float
    ) -> None:
        self.connection = connect(address, timeout=deadline)
        self.topic, self.count, self.rate = topic, count, rate
        self.padding = b"x" * (size - STAMP.size)

    def run(self, progress: Progress) -> Span:
        start = time.monotonic() + 0.1
        first = time.monotonic_ns()
        for number in range(self.count):
            wait = start + number / self.rate - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            self.connection.sendall(encode_pub(self.topic, STAMP.pack(time.monotonic_ns()) + self.padding))
            expect_ok(self.connection)
        last = time.monotonic_ns()
        self.connection.close()
        return Span(self.count, first, last)


class StampReader:
    """Receives what PacedPublisher sends and notes how long each message was under way."""

    def __init__(
        self, address: Address, topic: str, channel: str, size: int, rdy: int, total: int, deadline: float
    ) -> None:
        self.total, self.rdy, self.deadline = total, rdy, deadline
        self.connection = connect(address, timeout=deadline)
        self.buffer = FrameBuffer(size, slice(ID_START, BODY_START + STAMP.size))
        subscribe(self.connection, topic, channel)

    def run(self, progress: Progress) -> Span:
        connection, buffer, finisher = self.connection, self.buffer, Finisher()
        connection.settimeout(1.0)
        connection.sendall(b"RDY %d\n" % self.rdy)
        latencies: list[npt.NDArray[np.int64]] = []
        count = 0
        give_up = time.monotonic() + self.deadline
        while count < self.total:
            if time.monotonic() > give_up:
                raise OutOfTime(f"latency: {count} of {self.total} messages received")
            try:
                buffer.receive_from(connection)
            except TimeoutError:
                continue
            now = time.monotonic_ns()
            for rows in buffer.take_messages():
                messages = rows.view(STAMPED)
                connection.sendall(finisher.encode(messages["id"]))
                latencies.append(now - messages["sent"].astype(np.int64))
                count += len(messages)
        leave(connection, buffer)
        return Span(count, latencies_ns=np.concatenate(latencies))


def first_message(address: Address, topic: str, channel: str, timeout: float) -> None:
    """Wait until the channel delivers a message, and put it back."""
    with connect(address, timeout=timeout) as connection:
        subscribe(connection, topic, channel)
        connection.sendall(b"RDY 1\n")
        _, message = receive_frame(connection)
        connection.sendall(b"RDY 0\nREQ %s 0\nCLS\n" % message[10:26])
        while receive_frame(connection)[1] != b"CLOSE_WAIT":
            pass
