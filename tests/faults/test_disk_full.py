"""A full disk: publishers get errors, consumers continue, and publishing works again with room."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import (
    ERROR,
    REFERENCE,
    RESPONSE,
    BrokerProcess,
    ConnectionClosed,
    multi,
    start_process,
    wait_until,
)
from tests.support.polling import DEADLINE

from .load import Batch, assert_whole_or_absent, drain

BODY_SIZE = 8 << 10


class Disk(ABC):
    """A disk that can be filled and emptied."""

    path: Path

    @abstractmethod
    def fill(self, broker: BrokerProcess) -> None:
        """Leave no room, or very little."""

    @abstractmethod
    def free(self, broker: BrokerProcess) -> None: ...


class SmallDisk(Disk):
    """A file system of a few megabytes, mostly filled by one file that can be removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ballast = path / "ballast"

    def fill(self, broker: BrokerProcess, room: int = 300 << 10) -> None:
        free = os.statvfs(self.path)
        with self.ballast.open("wb") as file:
            file.write(bytes(free.f_bavail * free.f_frsize - room))

    def free(self, broker: BrokerProcess) -> None:
        self.ballast.unlink()


class FileSizeLimit(Disk):
    """Needs no privilege: a limit on file sizes cuts writes short."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, broker: BrokerProcess) -> None:
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (BODY_SIZE // 2, resource.RLIM_INFINITY))

    def free(self, broker: BrokerProcess) -> None:
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system takes more rights than we have")
    try:
        yield SmallDisk(tmp_path)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.fixture(params=["small_disk", "file_size_limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    if request.param == "small_disk":
        found: Disk = request.getfixturevalue("small_disk")
        return found
    return FileSizeLimit(tmp_path)


class Publisher:
    """Publishes on any connection it gets, and sorts the batches by their answers."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.acknowledged: list[Batch] = []
        self.failed: list[Batch] = []
        self.count = 0

    def publish(self, command: str, size: int = 1) -> bytes:
        """The answer: OK, or the text of the error."""
        start, self.count = self.count, self.count + size
        batch = tuple((b"%08d" % i).ljust(BODY_SIZE, b".") for i in range(start, start + size))
        with self.broker.connect() as connection:
            match command:
                case "PUB":
                    connection.command("PUB", "t", body=batch[0])
                case "DPUB":
                    connection.command("DPUB", "t", 100, body=batch[0])
                case "MPUB":
                    connection.command("MPUB", "t", body=multi(batch))
            frame = connection.read_frame()
        if frame == (RESPONSE, b"OK"):
            self.acknowledged.append(batch)
        else:
            assert frame.type == ERROR
            self.failed.append(batch)
        return frame.data

    def publish_until_refused(self, command: str, size: int = 1) -> bytes:
        for _ in range(300):
            answer = self.publish(command, size)
            if answer != b"OK":
                return answer
        raise AssertionError(f"{command} never failed")

    def acknowledged_bodies(self) -> set[bytes]:
        return {body for batch in self.acknowledged for body in batch}


@pytest.mark.skipif(
    bool(REFERENCE), reason="the reference keeps half of a failed MPUB and takes PUBs in memory"
)
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_full_disk_refuses_publishers_and_nobody_else(disk: Disk, durability: str) -> None:
    with start_process(disk.path, durability=durability, max_bytes_per_file=1 << 20) as broker:
        publisher = Publisher(broker)
        with broker.connect() as consumer, broker.connect() as idle:
            idle.identify()
            idle.sub("t", "audit")
            consumer.identify()
            consumer.sub("t", "live")
            for _ in range(10):
                assert publisher.publish("MPUB", 20) == b"OK"
            received = {message.body for message in _take(consumer, 50)}

            disk.fill(broker)
            assert publisher.publish_until_refused("MPUB", 20).startswith(b"E_MPUB_FAILED MPUB failed ")
            assert publisher.publish_until_refused("PUB").startswith(b"E_PUB_FAILED PUB failed ")
            assert publisher.publish_until_refused("DPUB").startswith(b"E_DPUB_FAILED DPUB failed ")
            assert publisher.publish_until_refused("MPUB", 20).startswith(b"E_MPUB_FAILED MPUB failed ")

            # Consumers go on, through what is in memory and what is in files.
            received |= {message.body for message in _take(consumer, 100)}

            disk.free(broker)
            wait_until(lambda: publisher.publish("MPUB", 20) == b"OK", interval=0.1)
            for command in ("PUB", "DPUB"):
                assert publisher.publish(command) == b"OK"
            assert broker.alive()
            consumer.rdy(0)

        received |= set(drain(broker, "t", "live"))
        assert publisher.acknowledged_bodies() <= received
        assert_whole_or_absent(publisher.failed, received)

        # The same from the files alone.
        broker.kill()
        broker.start()
        audited = drain(broker, "t", "audit")
        assert publisher.acknowledged_bodies() <= set(audited)
        assert len(audited) == len(set(audited))
        assert_whole_or_absent(publisher.failed, set(audited))
        assert {body for batch in publisher.failed for body in batch}.isdisjoint(audited)


@pytest.mark.skipif(bool(REFERENCE), reason="the reference takes PUBs in memory")
def test_a_disk_that_is_full_at_the_clean_stop_loses_nothing_acknowledged(disk: Disk) -> None:
    with start_process(disk.path, max_bytes_per_file=1 << 20) as broker:
        publisher = Publisher(broker)
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c")
        assert publisher.publish("MPUB", 20) == b"OK"
        disk.fill(broker)
        publisher.publish_until_refused("MPUB", 20)
        publisher.publish_until_refused("PUB")
        # It may complain, but it has to end.
        broker.terminate(DEADLINE)
        if isinstance(disk, SmallDisk):
            disk.free(broker)
        broker.start()
        assert publisher.publish("PUB") == b"OK"
        found = drain(broker, "t", "c")
        assert publisher.acknowledged_bodies() <= set(found)
        assert_whole_or_absent(publisher.failed, set(found))


@pytest.mark.skipif(bool(REFERENCE), reason="the reference delivers them again")
def test_finished_messages_stay_finished_after_a_clean_stop_on_a_full_disk(small_disk: SmallDisk) -> None:
    with start_process(small_disk.path, checkpoint_interval=60.0) as broker:
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c")
            connection.mpub("t", [b"%d" % number for number in range(1500)])
            small_disk.fill(broker, room=0)
            connection.rdy(1000)
            connection.read_messages(1500, finish=True)
            connection.barrier()
        assert broker.terminate(10) == 0
        small_disk.free(broker)
        broker.start()
        broker.publish("t", b"last")
        assert drain(broker, "t", "c") == [b"last"]


@pytest.mark.skipif(bool(REFERENCE), reason="the reference keeps going in memory")
def test_a_file_size_limit_below_the_segment_size_stops_nobody(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (20 * BODY_SIZE, resource.RLIM_INFINITY))
        publisher = Publisher(broker)
        for _ in range(100):
            assert publisher.publish("PUB") == b"OK"
        assert len(list(tmp_path.rglob("*.log"))) > 5
        assert set(drain(broker, "t", "c")) == publisher.acknowledged_bodies()


@pytest.mark.skipif(bool(REFERENCE), reason="the reference keeps going in memory")
def test_new_topics_and_channels_on_a_full_disk_are_refused_or_work(small_disk: SmallDisk) -> None:
    with start_process(small_disk.path) as broker:
        broker.publish("old", b"x")
        small_disk.fill(broker, room=0)
        with broker.connect() as connection:
            connection.command("PUB", "new", body=b"x")
            frame = connection.read_frame()
            assert frame.type == ERROR
            assert frame.data.startswith(b"E_PUB_FAILED PUB failed ")
        with broker.connect() as connection:
            connection.identify()
            connection.command("SUB", "old", "c")
            frame = connection.read_frame()
            assert frame == (RESPONSE, b"OK") or frame.data.startswith(b"E_SUB_FAILED SUB failed "), frame
        small_disk.free(broker)
        broker.publish("new", b"y")
        assert drain(broker, "old", "c") == [b"x"]
        assert drain(broker, "new", "c") == [b"y"]
        assert "Traceback" not in broker.stderr_text()
        broker.kill()
        broker.start()
        broker.publish("new", b"z")
        assert b"z" in drain(broker, "new", "c")


@pytest.mark.skipif(bool(REFERENCE), reason="the reference has no segments to reclaim")
def test_an_unfinished_message_survives_a_full_disk_while_its_segment_is_reclaimed(
    small_disk: SmallDisk,
) -> None:
    """One unfinished message is carried over so that its segment can be removed; this may fail."""
    with start_process(small_disk.path, max_bytes_per_file=100_000, checkpoint_interval=0.2) as broker:
        straggler = b"straggler".ljust(BODY_SIZE, b".")
        with broker.connect() as holder, broker.connect() as connection:
            for each in (holder, connection):
                each.identify()
                each.sub("t", "c")
            holder.rdy(1)
            connection.mpub("t", [straggler])
            assert holder.read_message().body == straggler
            holder.rdy(0)
            holder.barrier()
            for _ in range(30):
                connection.mpub("t", [b"x" * BODY_SIZE for _ in range(10)])
            small_disk.fill(broker, room=0)
            connection.rdy(100)
            connection.read_messages(300, finish=True)
            connection.barrier()
            time.sleep(1)  # five times what it takes until segments are looked at
            small_disk.free(broker)
            connection.mpub("t", [b"more"])
            connection.read_messages(1, finish=True)
            time.sleep(1)
            # The segments are gone, the message is not.
            assert sum(file.stat().st_size for file in small_disk.path.rglob("*.log")) < 1 << 20
        # Memory does not count.
        broker.kill()
        broker.start()
        assert [body for body in drain(broker, "t", "c") if body == straggler] == [straggler]


def _take(connection, count):  # type: ignore[no-untyped-def]
    """Receive and finish exactly so many messages."""
    connection.rdy(1)
    try:
        found = connection.read_messages(count, finish=True)
        connection.rdy(0)
        connection.barrier()
    except ConnectionClosed:
        pytest.fail("the consumer was cut off")
    # One more may have come before the RDY 0; it stays unfinished and comes again.
    return found
