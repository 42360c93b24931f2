"""A broker without a server: time passes only on demand, clients collect their frames in lists, and
calls to the disk can be made to fail.

In a test:

    rig = Rig(tmp_path, mem_queue_size=5)
    client = rig.subscribe("t", "c", rdy=2)
    rig.publish("t", b"one", b"two")        # appended and delivered, as at the end of an event loop turn
    first, second = client.take()
    rig.finish(client, first)
    rig.pass_time(60)                       # and look for timeouts and what is due
    rig.maintain()                          # checkpoints, fsyncs, reclaiming
    rig.restart()  rig.crash()              # the same data path with and without a clean stop
"""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nsparq.broker.broker import Broker
from nsparq.broker.channel import Channel
from nsparq.broker.client import Client
from nsparq.broker.topic import Topic
from nsparq.broker.turn import Done
from nsparq.errors import ClientError
from nsparq.options import NsqdOptions
from nsparq.packed import PackedBodies
from nsparq.storage.files import Buffer, Files, RunEach, run_one_by_one
from nsparq.wire.identify import Identity

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
NODE_ID = 5

_FRAME = struct.Struct(">iiqH16s")


class Clock:
    """The two clocks of a machine. Time passes on both, only on demand. The wall clock can also be
    set."""

    def __init__(self) -> None:
        self.now_ns = 5_000 * SECOND
        self.wall_now_ns = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        """Monotonic."""
        return self.now_ns

    def wall(self) -> int:
        return self.wall_now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)
        self.wall_now_ns += round(seconds * SECOND)

    def set_wall(self, seconds: float) -> None:
        """Set the wall clock, forward or back. No time passes."""
        self.wall_now_ns += round(seconds * SECOND)

    def reboot(self) -> None:
        """Reboot: the monotonic clock starts anew."""
        self.now_ns = 7 * SECOND


class Delivered(NamedTuple):
    """The fields of a message frame."""

    id: int
    attempts: int
    timestamp_ns: int
    body: bytes
    block: bytes = b""
    """The header block."""


def parse_frames(data: bytes) -> list[Delivered]:
    found = []
    position = 0
    while position < len(data):
        size, kind, timestamp_ns, attempts, message_id = _FRAME.unpack_from(data, position)
        assert kind in (2, 3)
        body, block = data[position + _FRAME.size : position + 4 + size], b""
        assert len(body) == size - 30
        if kind == 3:
            width = 4 + int.from_bytes(body[:4])
            block, body = body[4:width], body[width:]
        found.append(Delivered(int(message_id, 16), attempts, timestamp_ns, body, block))
        position += 4 + size
    return found


class FakeClient(Client):
    """A client that collects its frames in a list."""

    def __init__(self, name: str = "client", *, address: str = "127.0.0.1:1", **identity: Any) -> None:
        super().__init__(
            identity=Identity(client_id=name, hostname=name, **identity),
            address=address,
            send=self._keep,
            close=self._note_close,
            connect_s=1_700_000_000,
        )
        self.sends: list[bytes] = []
        self.messages: list[Delivered] = []
        self.close_calls = 0
        self._taken = 0

    def _keep(self, data: bytes | memoryview) -> None:
        self.sends.append(bytes(data))
        self.messages += parse_frames(self.sends[-1])

    def _note_close(self) -> None:
        self.close_calls += 1

    def take(self) -> list[Delivered]:
        """The messages since the last call."""
        new = self.messages[self._taken :]
        self._taken = len(self.messages)
        return new

    def take_bodies(self) -> list[bytes]:
        return [message.body for message in self.take()]


class Receipt:
    """The answers that a publisher got."""

    def __init__(self) -> None:
        self.answers: list[Exception | None] = []

    def __call__(self, error: Exception | None) -> None:
        self.answers.append(error)

    @property
    def error(self) -> Exception | None:
        (error,) = self.answers
        return error

    @property
    def is_ok(self) -> bool:
        return bool(self.answers) and self.error is None


class Later:
    """Background work that runs when the test asks for it."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def __call__(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        self.jobs.append((work, then))

    def run(self) -> int:
        """Run the jobs so far, but not those that they add. Gives the number of jobs."""
        jobs, self.jobs = self.jobs, []
        for work, then in jobs:
            work()
            then()
        return len(jobs)

    def run_all(self) -> None:
        while self.run():
            pass


OPENING_CALLS = frozenset(
    (
        "open",
        "open_read",
        "duplicate",
        "read_whole",
        "list_directory",
        "remove_tree",
        "sync_directory",
        "replace",
    )
)
"""Calls that need a free descriptor."""


class TestFiles(Files):
    """Counts every call, and fails those that the test chooses."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.is_cold = False
        """Whether the page cache is empty: every read has to wait for the disk."""
        self.opening_calls = 0
        """Calls so far that need a free descriptor."""
        self._without_descriptors = range(0)
        self._failing: dict[tuple[str, str], OSError] = {}
        self._paths: dict[int, str] = {}
        self._is_inside = False
        """Whether this is part of a call that counts by itself."""

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def fail(self, call: str, suffix: str = "", error: int = errno.ENOSPC) -> None:
        """From now on `call` raises for files whose path ends in `suffix`."""
        self._failing[call, suffix] = OSError(error, os.strerror(error))

    def run_out_of_descriptors(self, after: int, times: int) -> None:
        """Of the calls that need a descriptor, the next `after` work and the `times` calls after
        them fail."""
        self._without_descriptors = range(self.opening_calls + after, self.opening_calls + after + times)

    def heal(self) -> None:
        self._failing.clear()
        self._without_descriptors = range(0)

    def _note(self, call: str, path: str) -> None:
        if self._is_inside:
            return
        self.calls[call] += 1
        if call in OPENING_CALLS:
            self.opening_calls += 1
            if self.opening_calls - 1 in self._without_descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        for (failing, suffix), error in self._failing.items():
            if failing == call and path.endswith(suffix):
                raise error

    def open(self, path: Path) -> int:
        self._note("open", str(path))
        fd = super().open(path)
        self._paths[fd] = str(path)
        return fd

    def open_read(self, path: Path) -> int:
        self._note("open_read", str(path))
        fd = super().open_read(path)
        self._paths[fd] = str(path)
        return fd

    def duplicate(self, fd: int) -> int:
        self._note("duplicate", self._paths.get(fd, ""))
        copy = super().duplicate(fd)
        self._paths[copy] = self._paths.get(fd, "")
        return copy

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        self._note("write", self._paths.get(fd, ""))
        super().write(fd, buffers, position)

    def read(self, fd: int, size: int, position: int) -> bytes:
        self._note("read", self._paths.get(fd, ""))
        return super().read(fd, size, position)

    def read_cached(self, fd: int, size: int, position: int) -> memoryview | None:
        self._note("read_cached", self._paths.get(fd, ""))
        return None if self.is_cold else super().read_cached(fd, size, position)

    def sync(self, fd: int) -> None:
        self._note("sync", self._paths.get(fd, ""))

    def unlink(self, path: Path) -> None:
        self._note("unlink", str(path))
        super().unlink(path)

    def read_whole(self, path: Path) -> bytes | None:
        self._note("read_whole", str(path))
        return super().read_whole(path)

    def list_directory(self, path: Path) -> list[str]:
        self._note("list_directory", str(path))
        return super().list_directory(path)

    def remove_tree(self, path: Path) -> None:
        self._note("remove_tree", str(path))
        super().remove_tree(path)

    def sync_directory(self, path: Path) -> None:
        """Without the real fsync."""
        self._note("sync_directory", str(path))

    def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
        """Without the real fsyncs, which only cost time here. `replace` counts all calls, `replace
        sync` those with a sync."""
        self._note("replace", str(path))
        if sync:
            self.calls["replace sync"] += 1
        with self._inside():
            super().replace(path, content, sync=sync)

    def add_version(self, path: Path, content: bytes) -> None:
        """Counts as a replacement, too."""
        self._note("replace", str(path))
        with self._inside():
            super().add_version(path, content)

    def sync_pending(self, run_each: RunEach = run_one_by_one) -> None:
        self._note("sync_pending", "")
        with self._inside():
            super().sync_pending(run_each)


def publish(
    broker: Broker,
    topic: str,
    bodies: Iterable[bytes],
    done: Done,
    defer_ms: int = 0,
    blocks: Sequence[bytes] = (),
) -> None:
    """Publish, with header blocks if there are any. Creates the topic if it does not exist."""
    packed = PackedBodies.of(bodies)
    if blocks:
        packed = packed.with_blocks(PackedBodies.of(blocks))
    broker.get_topic(topic).publishing.publish(packed, defer_ms * 1_000_000, done)


class Rig:
    """A data path, and the broker that uses it."""

    def __init__(
        self,
        data_path: Path,
        *,
        files: TestFiles | None = None,
        background: Later | None = None,
        clock: Clock | None = None,
        **flags: Any,
    ) -> None:
        self.data_path = data_path
        self.files = files or TestFiles()
        self.background = background
        self.clock = clock or Clock()
        self.options = NsqdOptions(**{"data_path": str(data_path), "node_id": NODE_ID, **flags})
        self.wakes = 0
        self._is_woken = False
        self.broker: Broker
        self.start()

    def start(self) -> None:
        extra = {"background": self.background} if self.background is not None else {}
        self.broker = Broker(
            self.options,
            files=self.files,
            wall_ns=self.clock.wall,
            monotonic_ns=self.clock,
            wake=self._wake,
            **extra,
        )
        self.broker.open()

    def _wake(self) -> None:
        self.wakes += 1
        self._is_woken = True

    def close(self) -> None:
        self.broker.close()

    def restart(self, **flags: Any) -> None:
        """Stop cleanly, and start with the same flags except for these."""
        self.broker.close()
        self.options = replace(self.options, **flags)
        self.start()

    def drop(self) -> None:
        """As `kill -9`: everything that was not handed to the system is lost."""
        broker = self.broker
        for topic in broker.topics.values():
            topic.log.discard()
        if broker.data_path._lock_fd >= 0:
            self.files.close(broker.data_path._lock_fd)
            broker.data_path._lock_fd = -1
        if self.background is not None:
            self.background.jobs.clear()

    def crash(self, seconds: float = 1.0) -> None:
        """Crash, and start again `seconds` later."""
        self.drop()
        self.clock.advance(seconds)
        self.start()

    # the calls of a server

    def topic(self, name: str = "t") -> Topic:
        return self.broker.get_topic(name)

    def channel(self, name: str = "c", topic: str = "t") -> Channel:
        return self.broker.get_topic(topic).get_channel(name)

    def send(self, topic: str, *bodies: bytes, defer_ms: int = 0, blocks: Sequence[bytes] = ()) -> Receipt:
        """Publish, without the end of the turn. `blocks` has the header block of each message."""
        receipt = Receipt()
        publish(self.broker, topic, bodies, receipt, defer_ms, blocks)
        return receipt

    def publish(self, topic: str, *bodies: bytes, defer_ms: int = 0, blocks: Sequence[bytes] = ()) -> Receipt:
        receipt = self.send(topic, *bodies, defer_ms=defer_ms, blocks=blocks)
        self.turn()
        return receipt

    def subscribe(self, topic: str = "t", channel: str = "c", rdy: int = 0, **identity: Any) -> FakeClient:
        client = FakeClient(f"client-{len(self.broker.clients)}", **identity)
        self.broker.clients.add(client)
        self.broker.subscribe(client, topic, channel)
        if rdy:
            self.ready(client, rdy)
        return client

    def ready(self, client: Client, count: int) -> None:
        assert client.channel is not None
        client.channel.set_ready(client, count)
        self.turn()

    def finish(self, client: Client, *messages: Delivered | int) -> list[ClientError]:
        """One FIN each."""
        assert client.channel is not None
        spans = [(_id(m), _id(m) + 1) for m in messages]
        errors = client.channel.delivery.finish(client, spans, self.clock())
        self.turn()
        return errors

    def requeue(self, client: Client, message: Delivered | int, timeout_ms: int = 0) -> None:
        assert client.channel is not None
        client.channel.delivery.requeue(client, _id(message), timeout_ms, self.clock())
        self.turn()

    def touch(self, client: Client, message: Delivered | int) -> None:
        assert client.channel is not None
        client.channel.delivery.touch(client, _id(message), self.clock())

    def disconnect(self, client: Client) -> None:
        if client.channel is not None:
            client.channel.remove_client(client)
        self.broker.clients.discard(client)
        self.turn()

    def turn(self) -> None:
        """End the turn, and the turns that it schedules."""
        for _ in range(1000):
            self._is_woken = False
            self.broker.turn()
            if not self._is_woken:
                self._check_depths()
                return
        raise AssertionError("the broker does not come to rest")

    def _check_depths(self) -> None:
        for topic in self.broker.topics.values():
            for channel in topic.channels.values():
                assert channel.depth >= 0, f"{channel}: a depth of {channel.depth}"

    def scan(self) -> None:
        for _ in self.broker.scan.scan(self.clock()):
            pass
        self.turn()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.scan()

    def maintain(self) -> None:
        self.broker.maintain()

    # the state

    def topic_directory(self, topic: str = "t") -> Path:
        return self.broker.data_path.topic_directory(topic)

    def names(self, pattern: str, topic: str = "t") -> list[str]:
        """Names of the topic's files that match."""
        return sorted(path.name for path in self.topic_directory(topic).glob(pattern))


def _id(message: Delivered | int) -> int:
    return message if isinstance(message, int) else message.id


def counts(channel: Channel) -> tuple[int, int, int]:
    """Depth, in flight, deferred."""
    return channel.depth, len(channel.unfinished.in_flight), len(channel.unfinished.deferred)


def bodies(count: int, start: int = 0, size: int = 0) -> list[bytes]:
    """Distinct bodies, padded to `size` bytes."""
    return [
        b"%d" % number + b"." * max(0, size - len(b"%d" % number)) for number in range(start, start + count)
    ]
