"""Clients that stall, flood or dawdle: bounded memory for them, business as usual for everybody
else."""

from __future__ import annotations

import select
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nsparq.server import connection as connection_module
from nsparq.wire.limits import UNCOUNTED
from tests.support import (
    ERROR,
    MESSAGE,
    RESPONSE,
    BrokerProcess,
    ConnectionClosed,
    RawConnection,
    sized,
    start_broker,
    start_process,
    wait_until,
)
from tests.support.connection import wait_readable
from tests.support.polling import DEADLINE

from .bystander import well_served
from .flood import send_until_held_back
from .load import peak_mib, reset_peak, resident_mib

STALLED = LIVE = 200
MESSAGES = 6_400
BODY = b"x" * 10_000


@pytest.fixture
def socket_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """On a Unix socket, which holds 200 KiB for a client that does not read; on TCP it would be
    megabytes."""
    with start_process(tmp_path, tcp_address=str(tmp_path / "socket"), mem_queue_size=1000) as broker:
        yield broker


class LiveConsumers(threading.Thread):
    """Many subscribed connections served by one thread: FIN for messages, NOP for heartbeats."""

    def __init__(self, connections: list[RawConnection]) -> None:
        super().__init__(daemon=True)
        self.connections = connections
        self.bodies: set[bytes] = set()
        self.heartbeats = 0
        self.closed = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        poll = select.epoll()
        buffers = {}
        for connection in self.connections:
            poll.register(connection.socket, select.EPOLLIN)
            buffers[connection.socket.fileno()] = (connection.socket, bytearray())
        while not self.stopping.is_set():
            for fd, _ in poll.poll(0.1):
                sock, buffer = buffers[fd]
                received = sock.recv(1 << 16)
                if not received:
                    self.closed += 1
                    poll.unregister(fd)
                    continue
                buffer += received
                sock.sendall(b"".join(self.answers(buffer)))
        poll.close()

    def stop(self) -> None:
        self.stopping.set()
        self.join()

    def answers(self, buffer: bytearray) -> Iterator[bytes]:
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := struct.unpack_from(">i", buffer)[0]):
            frame_type = struct.unpack_from(">i", buffer, 4)[0]
            data = bytes(buffer[8 : 4 + size])
            del buffer[: 4 + size]
            if frame_type == MESSAGE:
                self.bodies.add(data[26:34])
                yield b"FIN " + data[10:26] + b"\n"
            else:
                assert (frame_type, data) == (RESPONSE, b"_heartbeat_"), (frame_type, data)
                self.heartbeats += 1
                yield b"NOP\n"


def ends(connection: RawConnection, deadline: float) -> bool:
    """Whether the stream ends, once everything in it has been read."""
    connection.socket.settimeout(0.5)
    while time.monotonic() < deadline:
        try:
            if not connection.socket.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_hundreds_of_connections_of_which_half_stall(socket_broker: BrokerProcess) -> None:
    broker = socket_broker
    with ExitStack() as stack:
        stalled = [stack.enter_context(broker.connect()) for _ in range(STALLED)]
        live = [stack.enter_context(broker.connect()) for _ in range(LIVE)]
        for number, connection in enumerate(stalled):
            # One half of these owes answers to heartbeats soon, the other holds on for longer than
            # this test.
            connection.identify(heartbeat_interval=1000 if number % 2 else 30_000)
            connection.sub("t", "stalled", rdy=2500)
        for connection in live:
            # Nobody answers for them until all have subscribed, which takes long on a busy machine.
            connection.identify(heartbeat_interval=4000)
            connection.sub("t", "live", rdy=5)
        consumers = LiveConsumers(live)
        consumers.start()
        stack.callback(consumers.stop)
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=2):
            started = time.monotonic()
            with broker.connect() as publisher:
                for start in range(0, MESSAGES, 100):
                    publisher.mpub("t", [b"%08d" % i + BODY for i in range(start, start + 100)])
            wait_until(lambda: len(consumers.bodies) == MESSAGES, what=lambda: len(consumers.bodies))
            took = time.monotonic() - started
            wait_until(lambda: consumers.heartbeats >= 2 * LIVE)
            # The stalled ones that owe an answer are shown out, and nobody else is.
            deadline = time.monotonic() + DEADLINE
            assert all(ends(connection, deadline) for connection in stalled[1::2])
            assert consumers.closed == 0
        consumers.stop()
        grown = peak_mib(broker.pid) - before
        sys.stdout.write(
            f"{MESSAGES} messages past {STALLED} stalled connections in {took:.1f} s, "
            f"{grown:.0f} MiB more at the peak\n"
        )
        # At most 384 KiB for each that stalls, and 64 MiB of recent messages.
        assert grown < 160


@pytest.mark.parametrize("magic", [b"  V2", b""], ids=["after the magic", "instead of the magic"])
def test_an_endless_line_is_cut_off(tmp_path: Path, magic: bytes) -> None:
    with start_process(tmp_path) as broker:
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=1), broker.connect(magic=magic) as connection:
            sent = 0
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                while sent < 64 << 20:
                    connection.send(b"A" * (64 << 10))
                    sent += 64 << 10
        assert peak_mib(broker.pid) - before < 20


def test_many_endless_lines_at_once_cost_little(tmp_path: Path) -> None:
    """Lines that stay just below the limit, on many connections: that is all they may hold."""
    with ExitStack() as stack:
        broker = stack.enter_context(start_process(tmp_path))
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=1):
            for _ in range(300):
                stack.enter_context(broker.connect()).send(b"A" * 16_000)
        assert peak_mib(broker.pid) - before < 40


def test_large_bodies_announced_but_never_sent_cost_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(start_process(tmp_path))
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=1):
            for _ in range(200):
                connection = stack.enter_context(broker.connect())
                connection.send(
                    b"MPUB t\n" + struct.pack(">ii", 5 << 20, 1000) + struct.pack(">i", 1 << 20) + b"x" * 100
                )
        assert peak_mib(broker.pid) - before < 60


FLOODS = {
    # an answer of 10 bytes to each of 25
    "PUB": (b"PUB flood#ephemeral\n" + sized(b"x"), (RESPONSE, b"OK")),
    # an answer of 66 bytes to each of 21
    "FIN": (b"FIN 0123456789abcdef\n", (ERROR, b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight")),
}


@pytest.mark.parametrize("kind", ["PUB", "FIN"])
def test_a_client_that_never_reads_its_answers_is_held_back(socket_broker: BrokerProcess, kind: str) -> None:
    command, answer = FLOODS[kind]
    block = command * 500
    broker = socket_broker
    with broker.connect() as connection:
        connection.identify()
        connection.sub("flood#ephemeral", "c")
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=2):
            sent = send_until_held_back(connection.socket, block, len(command))
        assert peak_mib(broker.pid) - before < 60

        # Once it reads, it gets every answer, in order.
        count = sent // len(command)
        for _ in range(count):
            assert connection.read_raw_frame() == answer
        assert broker.alive()


def test_a_consumer_that_never_reads_gets_no_more_than_it_can_hold(tmp_path: Path) -> None:
    """RDY 2500 of large messages would be 250 MB; the broker stops long before."""
    with start_process(tmp_path, mem_queue_size=100) as broker, broker.connect() as connection:
        connection.identify()
        connection.sub("t", "c", rdy=2500)
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=2), broker.connect() as publisher:
            for number in range(50):
                publisher.mpub("t", [b"%08d" % (number * 40 + i) + b"x" * 100_000 for i in range(40)])
        grown = peak_mib(broker.pid) - before
        assert grown < 100, f"{grown:.0f} MiB for 200 MB published"


def test_a_stalled_client_holds_its_own_message_in_memory_not_the_batch_it_came_in(
    socket_broker: BrokerProcess,
) -> None:
    broker = socket_broker
    with ExitStack() as stack:
        live = stack.enter_context(broker.connect())
        live.identify()
        live.sub("t", "c")
        publisher = stack.enter_context(broker.connect())
        before = resident_mib(broker.pid)
        for _ in range(60):
            stalled = stack.enter_context(broker.connect())
            stalled.identify()
            stalled.sub("t", "c", rdy=1)
            publisher.mpub("t", [b"x" * 300_000] * 10)
            # The stalled one has one of them, in part; the live one takes the others.
            wait_readable(stalled.socket, DEADLINE)
            live.rdy(9)
            live.read_messages(9, finish=True)
            live.rdy(0)
            live.barrier()
        grown = resident_mib(broker.pid) - before
        # 60 times 300 kB is theirs; 64 MiB is what the broker keeps of recent messages.
        assert grown < 18 + 64 + 30, f"{grown:.0f} MiB"


def test_a_conversation_sent_byte_by_byte_works(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker, well_served(broker, within=1), ExitStack() as stack:
        conversation = b"  V2IDENTIFY\n" + sized(b"{}") + b"PUB t\n" + sized(b"hello") + b"SUB t c\nRDY 1\n"
        connections = [stack.enter_context(broker.connect(magic=b"")) for _ in range(20)]
        for position in range(len(conversation)):
            for connection in connections:
                connection.send(conversation[position : position + 1])
        for connection in connections:
            for _ in range(3):
                connection.expect_ok()
            # Not finished: that would let this one take what is meant for the others.
            assert connection.read_message().body == b"hello"


def test_a_body_that_trickles_in_does_not_extend_the_deadline(tmp_path: Path) -> None:
    """Two heartbeat intervals are for the whole command, however lively the connection looks."""
    with start_process(tmp_path) as broker, broker.connect() as connection:
        started = time.monotonic()
        connection.identify(heartbeat_interval=1000)
        connection.send(b"PUB t\n" + struct.pack(">i", 1000))
        with pytest.raises((ConnectionClosed, ConnectionResetError, BrokenPipeError)):
            while time.monotonic() - started < DEADLINE:
                connection.send(b"x")
                try:
                    assert connection.read_raw_frame(0.1) in (
                        (RESPONSE, b"_heartbeat_"),
                        (ERROR, b"E_BAD_MESSAGE PUB failed to read message body"),
                    )
                except TimeoutError:
                    pass
        assert time.monotonic() - started > 1.8


def test_connections_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        for _ in range(200):  # warm up: what is allocated once
            broker.connect().close()
        descriptors = Path(f"/proc/{broker.pid}/fd")
        before = resident_mib(broker.pid), len(list(descriptors.iterdir()))
        for number in range(1500):
            connection = broker.connect()
            if number % 3 == 0:
                connection.identify()
                connection.sub("t", "c", rdy=10)
            if number % 2:
                connection.abort()
            else:
                connection.close()
        wait_until(lambda: len(list(descriptors.iterdir())) <= before[1] + 5)
        assert resident_mib(broker.pid) - before[0] < 20


def test_commands_that_never_end_are_bounded_over_all_connections(tmp_path: Path) -> None:
    limit, counted = 1 << 20, 128 << 10
    begun = b"MPUB parked\n" + struct.pack(">iii", limit, 5, 1 << 19) + b"x" * (UNCOUNTED + counted - 4)
    refusal = (ERROR, b"E_MPUB_FAILED MPUB failed unfinished commands of all clients exceed %d bytes" % limit)
    with (
        start_broker(tmp_path, max_body_size=limit, max_unfinished_bytes=limit) as broker,
        ExitStack() as stack,
    ):
        unfinished = broker.nsqd.unfinished
        parked = [stack.enter_context(broker.connect()) for _ in range(40)]
        for connection in parked:
            connection.send(begun)

        # All but eight of them are told so; those that got in first may stay.
        def refused() -> list[RawConnection]:
            return [connection for connection in parked if wait_readable(connection.socket, 0)]

        wait_until(lambda: len(refused()) >= 32)
        for connection in refused():
            assert connection.read_raw_frame() == refusal
            with pytest.raises((ConnectionClosed, ConnectionResetError)):
                connection.read_raw_frame()
            connection.close()
            parked.remove(connection)
        assert len(parked) == 8
        assert unfinished.size == 8 * counted == limit
        # Nobody with a command of usual size notices.
        with broker.connect() as bystander:
            bystander.pub("t", b"x" * 10_000)
        for connection in parked:
            connection.abort()
        wait_until(lambda: unfinished.size == 0)
        with broker.connect() as publisher:
            publisher.mpub("t", [b"x" * 100_000] * 10)


def test_without_heartbeats_a_command_that_never_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "UNFINISHED_S", 0.05)
    begun = b"PUB t\n" + struct.pack(">i", 2 * UNCOUNTED) + b"x" * (UNCOUNTED + 1)
    with start_broker(tmp_path) as broker, ExitStack() as stack:
        parked, idle = (stack.enter_context(broker.connect()) for _ in range(2))
        for connection in (parked, idle):
            connection.identify(heartbeat_interval=-1)
        parked.send(begun)
        with pytest.raises((ConnectionClosed, ConnectionResetError)):
            parked.read_raw_frame()
        wait_until(lambda: broker.nsqd.unfinished.size == 0)
        # A client that says nothing at all holds nothing, and stays.
        idle.pub("t", b"x")
