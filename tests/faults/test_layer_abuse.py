"""Abuse of the transport layers: bombs, garbage, handshakes without end. Others go on, memory is
bounded."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import BrokerProcess, sized, start_process, wait_until
from tests.support.certificates import certificates
from tests.support.layered import IDENTIFIER, LayeredConnection, Tls, snappy_checksum, snappy_chunk
from tests.support.polling import DEADLINE

from .bystander import well_served
from .load import peak_mib, reset_peak, resident_mib

EXPANDED = 32 << 20
"""What a bomb becomes, in bytes."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with start_process(tmp_path, **certificates().server_flags()) as process:
        yield process


def deflated(command: bytes) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = command * (EXPANDED // 32 // len(command))
    return b"".join(compressor.compress(block) for _ in range(32)) + compressor.flush(zlib.Z_SYNC_FLUSH)


BOMBS = {
    "commands without an answer": b"NOP x x\n",
    "publishes": b"PUB bomb#ephemeral\n" + sized(b"x" * 200),
    "errors": b"FIN 0123456789abcdef\n",
    "an endless line": b"x",
}


@pytest.mark.parametrize("command", BOMBS.values(), ids=BOMBS)
def test_a_deflate_bomb_hurts_nobody(broker: BrokerProcess, command: bytes) -> None:
    bomb = deflated(command)
    assert len(bomb) < EXPANDED // 200
    with LayeredConnection(broker.address) as connection:
        connection.upgrade(deflate=True)
        connection.sub("bomb#ephemeral", "c")
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=1.0) as side:
            connection.send_wire(bomb)
            wait_until(lambda: side.count >= 15 or side.problem, what="fifteen round trips")
        assert peak_mib(broker.pid) - before < 24


def test_large_publishes_out_of_a_bomb_are_bounded_by_the_memory_queue(broker: BrokerProcess) -> None:
    # A mebibyte of zeros each, which deflate makes of a kilobyte.
    command = b"PUB bomb\n" + sized(bytes(1 << 20))
    with LayeredConnection(broker.address) as connection:
        connection.upgrade(deflate=True)
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=1.0):
            compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
            bomb = b"".join(compressor.compress(command) for _ in range(200))
            connection.send_wire(bomb + compressor.flush(zlib.Z_SYNC_FLUSH))
            for _ in range(200):
                connection.expect_ok()
        # In memory are the newest messages (--mem-queue-bytes for all topics), and what is on its
        # way.
        assert peak_mib(broker.pid) - before < 160


SNAPPY_ABUSE = {
    "a chunk that claims four gigabytes": IDENTIFIER
    + snappy_chunk(0, b"\0\0\0\0" + b"\xff\xff\xff\xff\x0f" + b"\0" * 20),
    "a chunk that is too long": IDENTIFIER + b"\x01\xff\xff\xff" + bytes(1 << 20),
    "chunks without contents": IDENTIFIER + snappy_chunk(1, snappy_checksum(b"")) * 100_000,
    "identifiers only": IDENTIFIER * 100_000,
    "padding only": IDENTIFIER + snappy_chunk(0xFE, bytes((1 << 24) - 1)) * 2,
}


@pytest.mark.parametrize("spoken", SNAPPY_ABUSE.values(), ids=SNAPPY_ABUSE)
def test_odd_snappy_costs_no_memory(broker: BrokerProcess, spoken: bytes) -> None:
    with LayeredConnection(broker.address) as connection:
        connection.upgrade(snappy=True)
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=1.0):
            try:
                connection.send_wire(spoken)
            except OSError:
                pass  # refused before all of it was taken
        assert peak_mib(broker.pid) - before < 16


def test_handshakes_that_are_never_finished_are_cut_off(broker: BrokerProcess) -> None:
    hello, _ = Tls(certificates().client_context(), "localhost").shake(b"")
    with ExitStack() as stack:
        connections = [stack.enter_context(LayeredConnection(broker.address)) for _ in range(300)]
        before = resident_mib(broker.pid)
        with well_served(broker, within=1.0):
            for number, connection in enumerate(connections):
                connection.identify(tls_v1=True)
                # Nothing, half a greeting, a whole one: none goes on after that.
                connection.send_wire(hello[: (0, len(hello) // 2, len(hello))[number % 3]])
            for connection in connections:
                connection.socket.settimeout(DEADLINE)
                try:
                    while connection.socket.recv(1 << 16):
                        pass
                except ConnectionResetError:
                    pass
        assert resident_mib(broker.pid) - before < 40


def test_garbage_in_place_of_tls_is_refused_and_forgotten(broker: BrokerProcess) -> None:
    source = random.Random(7)
    before = resident_mib(broker.pid)
    with well_served(broker, within=1.0):
        for number in range(300):
            with LayeredConnection(broker.address) as connection:
                connection.identify(tls_v1=True)
                hello = bytearray(Tls(certificates().client_context(), "localhost").shake(b"")[0])
                if number % 2:
                    hello[source.randrange(len(hello))] ^= source.randrange(1, 256)
                else:
                    hello = bytearray(source.randbytes(200))
                connection.send_wire(bytes(hello))
    assert resident_mib(broker.pid) - before < 16
    with LayeredConnection(broker.address) as connection:
        connection.upgrade(tls=certificates().client_context())
        connection.pub("after", b"all is well")
