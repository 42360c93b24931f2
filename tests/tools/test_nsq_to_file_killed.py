"""nsq_to_file is killed at random moments: every acknowledged message is in a file, unchanged,
perhaps twice."""

from __future__ import annotations

import gzip
import random
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import BrokerProcess, TestBroker, start_broker, wait_until

from .processes import Tool, free_address, tcp, wait_for_channel, wait_until_drained

ROUNDS = 6


class Load:
    """Publishes unique messages and records those that were acknowledged."""

    def __init__(self, broker: TestBroker, topic: str, seed: int) -> None:
        self._broker, self._topic = broker, topic
        self._random = random.Random(seed)
        self.acknowledged: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish)

    def _publish(self) -> None:
        with self._broker.connect() as connection:
            while not self._stop.is_set():
                start = len(self.acknowledged)
                sizes = [self._random.choice((0, 10, 100, 1000, 60_000)) for _ in range(50)]
                bodies = [b"<%d " % (start + place) + b"x" * size + b">" for place, size in enumerate(sizes)]
                connection.mpub(self._topic, bodies)
                self.acknowledged += bodies
                self._stop.wait(0.01)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()


def lines_of(path: Path) -> list[bytes]:
    """Also of a compressed file, up to where it was cut off."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        whole = b""
        while data:
            member = zlib.decompressobj(31)
            try:
                whole += member.decompress(data)
            except zlib.error:
                break
            data = member.unused_data
        data = whole
    return data.split(b"\n")


MODES = {
    "appended": ("--filename-format=<TOPIC>.log",),
    "compressed in place": ("--gzip", "--rotate-size=2000000"),
    "moved": ("--work-dir={work}", "--rotate-size=500000"),
    "compressed and moved": ("--work-dir={work}", "--gzip", "--rotate-interval=150ms", "--skip-empty-files"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_acknowledged_message_is_in_a_file(mode: str, tmp_path: Path) -> None:
    topic = "t"
    out, work = tmp_path / "out", tmp_path / "work"
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    sys.stdout.write(f"seed {seed}\n")
    flags = [flag.format(work=work) for flag in MODES[mode]]
    moves = any("work-dir" in flag for flag in flags)
    with start_broker(mem_queue_size=1000, msg_timeout=3.0) as broker:
        address = f"--nsqd-tcp-address={tcp(broker)}"
        arguments = (f"--topic={topic}", "--channel=c", address, f"--output-dir={out}", *flags)
        load = Load(broker, topic, seed)
        with load.running():
            for _ in range(ROUNDS):
                sync = chance.choice(("5ms", "20ms", "100ms"))
                with Tool("nsq_to_file", *arguments, f"--sync-interval={sync}") as tool:
                    wait_for_channel(broker, topic, "c")
                    time.sleep(chance.uniform(0, 0.2))
                    tool.kill()
            wait_until(lambda: len(load.acknowledged) > 500)
        with Tool("nsq_to_file", *arguments, "--sync-interval=20ms") as tool:
            tool.wait_for_log("connected to")
            wait_until_drained(broker, topic, "c", len(load.acknowledged))
            assert tool.terminate() == 0
    acknowledged = set(load.acknowledged)
    assert len(acknowledged) == len(load.acknowledged)
    found = [line for path in out.rglob("*") if path.is_file() for line in lines_of(path) if line]
    assert acknowledged <= set(found)
    strange = [line for line in found if line not in acknowledged]
    if moves:
        # The next run has completed the files that were left, so these can be trusted.
        assert strange == []
        assert [path for path in work.rglob("*") if path.is_file()] == []
        for path in out.rglob("*.gz"):
            gzip.decompress(path.read_bytes())
    else:
        # The last line before a crash may be a partial message, which is written again in full.
        assert len(strange) <= ROUNDS
        assert all(any(body.startswith(line) for body in acknowledged) for line in strange)


def test_a_killed_nsqd_loses_nothing_either(tmp_path: Path) -> None:
    topic = "t"
    with BrokerProcess(tcp_address=free_address()) as broker:
        arguments = (f"--topic={topic}", "--channel=c", f"--nsqd-tcp-address={tcp(broker)}")
        acknowledged: list[bytes] = []
        with Tool("nsq_to_file", *arguments, f"--output-dir={tmp_path}", "--sync-interval=20ms") as tool:
            for part in range(2):
                wait_for_channel(broker, topic, "c")
                bodies = [b"%d of %d" % (number, part) for number in range(500)]
                broker.publish(topic, *bodies)
                acknowledged += bodies
                broker.kill()
                broker.start()
            wait_until_drained(broker, topic, "c", 0)
            assert tool.terminate() == 0
        found = {line for path in tmp_path.iterdir() for line in lines_of(path) if line}
        assert found == set(acknowledged)
