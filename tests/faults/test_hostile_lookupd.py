"""Peers of nsqlookupd that send garbage, flood, stall or hoard: bounded memory, and nobody else
notices."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nsparq.lookup.registry import MAX_UNUSED
from nsparq.wire.lookup import MAX_IDENTIFY_BODY, MAX_LINE
from tests.support import ConnectionClosed, wait_until
from tests.support.connection import sized
from tests.support.lookupd import NSQD, LookupdProcess
from tests.support.polling import DEADLINE

from .bystander import ENOUGH
from .flood import send_until_held_back
from .load import peak_mib, reset_peak, resident_mib

OK = b"\0\0\0\x02OK"
CODES = {b"E_INVALID", b"E_BAD_BODY", b"E_BAD_TOPIC", b"E_BAD_CHANNEL", b"E_BAD_PROTOCOL"}
IDENTIFY = b"IDENTIFY\n" + sized(json.dumps(NSQD).encode())


@pytest.fixture
def lookupd() -> Iterator[LookupdProcess]:
    with LookupdProcess() as lookupd:
        yield lookupd
        assert lookupd.alive()
        assert "Traceback" not in lookupd.stderr_text()


class Bystander(threading.Thread):
    """An nsqd that registers, pings and unregisters, and a consumer that looks it up, again and
    again."""

    def __init__(self, lookupd: LookupdProcess) -> None:
        super().__init__(daemon=True)
        self.lookupd = lookupd
        self.stopping = threading.Event()
        self.longest = 0.0
        self.count = 0
        self.problem: BaseException | None = None
        self.nsqd = lookupd.peer(broadcast_address="bystander")
        self.consumer = lookupd.http_connect()

    def run(self) -> None:
        try:
            while not self.stopping.wait(0.01 if self.count < ENOUGH else 0.03):
                started = self.lookupd.busy_s()
                topic = f"side_{self.count % 5}#ephemeral"
                self.nsqd.register(topic)
                self.nsqd.ping()
                answer = self.consumer.request("GET", f"/lookup?topic={topic.replace('#', '%23')}")
                assert [found["broadcast_address"] for found in answer.json()["producers"]] == ["bystander"]
                self.nsqd.unregister(topic)
                self.longest = max(self.longest, self.lookupd.busy_s() - started)
                self.count += 1
        except BaseException as problem:
            self.problem = problem
        finally:
            self.nsqd.close()
            self.consumer.close()


@contextmanager
def unnoticed(lookupd: LookupdProcess, *, within: float = 1.0, mib: float = 20.0) -> Iterator[Bystander]:
    """Somebody else is served throughout, the daemon computes less than `within` seconds in each
    round (see bystander.py), and memory grows by less than so much."""
    side = Bystander(lookupd)
    before = resident_mib(lookupd.pid)
    reset_peak(lookupd.pid)
    side.start()
    try:
        yield side
        wait_until(lambda: side.count >= ENOUGH or side.problem, what="ten lookups")
    finally:
        side.stopping.set()
        side.join(DEADLINE)
    assert side.problem is None, side.problem
    assert side.longest < within, f"{side.longest:.3f} s of work in one round (of {side.count})"
    grown = peak_mib(lookupd.pid) - before
    assert grown < mib, f"{grown:.0f} MiB more"


# Garbage


def garbage(seed: int) -> bytes:
    """Random bytes, or a conversation with something wrong in it, from the seed alone."""
    choose = random.Random(seed)
    if choose.random() < 0.2:
        return choose.choice([b"", b"  V1"]) + choose.randbytes(choose.randint(0, 1000))
    names = [b"t", b"t#ephemeral", b"bad!", b"", b"*", b"n" * 65, b"\xff", b"a b c"]
    commands = [b"PING", b"PING\r", b"REGISTER", b"UNREGISTER", b"REGISTER " + choose.choice(names)]
    commands += [
        verb + b" " + choose.choice(names) + b" " + choose.choice(names)
        for verb in (b"REGISTER", b"UNREGISTER")
    ]
    commands += [choose.randbytes(choose.randint(0, 30)), b"IDENTIFY"]
    data = bytearray(b"  V1" + (IDENTIFY if choose.random() < 0.7 else b""))
    for _ in range(choose.randint(1, 8)):
        data += choose.choice(commands) + b"\n"
        if choose.random() < 0.1:
            data += struct.pack(">i", choose.choice([-(2**31), -1, 0, 2, 1 << 20, 2**31 - 1]))
        if choose.random() < 0.1:
            bodies = [[], {}, None, {**NSQD, "tcp_port": -1}, {**NSQD, "version": []}, {"a": [[[[]]]]}]
            data += b"IDENTIFY\n" + sized(json.dumps(choose.choice(bodies)).encode())
    for _ in range(choose.choice([0, 0, 1, 3])):
        at = choose.randrange(len(data) or 1)
        match choose.randrange(4):
            case 0 if data:
                data[at] ^= 1 << choose.randrange(8)
            case 1:
                del data[at : at + choose.randint(1, 8)]
            case 2:
                data[at:at] = choose.choice([b"\n", b"\0", b"A" * 20_000, b"\xff\xff\xff\xff", b"[" * 5000])
            case _:
                del data[at:]
    return bytes(data)


def play(address: tuple[str, int], data: bytes, choose: random.Random) -> list[str]:
    """Send it in pieces, then the end of the stream; what the daemon did that it must not do."""
    received = bytearray()
    reset = False
    with socket.create_connection(address, timeout=DEADLINE) as connection:
        try:
            while data:
                size = choose.choice([len(data), choose.randint(1, len(data))])
                connection.sendall(data[:size])
                data = data[size:]
            connection.shutdown(socket.SHUT_WR)
            while block := connection.recv(1 << 16):
                received += block
        except TimeoutError:
            return ["does not close after the end of the stream"]
        except OSError:
            reset = True
    return judge(bytes(received), reset)


def judge(received: bytes, reset: bool) -> list[str]:
    problems = []
    ended = False
    while len(received) >= 4:
        (size,) = struct.unpack_from(">i", received)
        reply, received = received[4 : 4 + size], received[4 + max(size, 0) :]
        if size < 0 or len(reply) < size:
            return problems if reset else [*problems, f"half a reply of {size} bytes"]
        if ended:
            problems.append(f"goes on after an error: {reply!r}")
        code = re.match(rb"E_[A-Z_]+(?= |$)", reply)
        if code:
            ended = True
        known = code[0] in CODES if code else reply == b"OK" or reply.startswith(b'{"broadcast_address":')
        if not known:
            problems.append(f"unknown reply {reply!r}")
    return problems


def test_garbage_gets_documented_errors_and_hurts_nobody(lookupd: LookupdProcess) -> None:
    problems = []
    deadline = time.monotonic() + 15
    with unnoticed(lookupd):
        for seed in range(2000):
            found = play(lookupd.address, garbage(seed), random.Random(seed))
            problems += [f"seed {seed}: {problem}" for problem in found]
            if time.monotonic() > deadline:
                break
    assert not problems, "\n".join(problems[:20])
    assert seed > 300


# Hoarding


@pytest.mark.parametrize("magic", [b"  V1", b""], ids=["after the magic", "instead of the magic"])
def test_an_endless_line_is_cut_off(lookupd: LookupdProcess, magic: bytes) -> None:
    with unnoticed(lookupd), lookupd.connect(magic=magic) as connection:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(1000):
                connection.send(b"A" * (64 << 10))


def test_a_line_up_to_the_limit_is_answered_and_a_longer_one_refused(lookupd: LookupdProcess) -> None:
    with lookupd.connect() as connection:
        connection.send(b"PING" + b" " * (MAX_LINE - 5) + b"\n")
        connection.expect_ok()
        connection.send(b"PING" + b" " * (MAX_LINE - 4) + b"\n")
        connection.expect_fatal(f"E_INVALID line longer than {MAX_LINE} bytes")


def test_commands_that_many_peers_never_finish_cost_little(lookupd: LookupdProcess) -> None:
    count = 200
    line = b"REGISTER " + b"A" * (MAX_LINE - 100)
    body = b"IDENTIFY\n" + struct.pack(">i", MAX_IDENTIFY_BODY) + b"{" * (MAX_IDENTIFY_BODY - 1)
    mib = count * (len(line) + len(body)) / 2**20
    with ExitStack() as stack, unnoticed(lookupd, mib=1.5 * mib + 20):
        for _ in range(count):
            stack.enter_context(lookupd.connect()).send(line)
            stack.enter_context(lookupd.connect()).send(body)


def test_large_bodies_announced_but_never_sent_cost_nothing(lookupd: LookupdProcess) -> None:
    with ExitStack() as stack, unnoticed(lookupd):
        for _ in range(300):
            connection = stack.enter_context(lookupd.connect())
            connection.send(b"IDENTIFY\n" + struct.pack(">i", MAX_IDENTIFY_BODY) + b"{")


def test_a_peer_with_endless_names_is_stopped_at_its_limit() -> None:
    with LookupdProcess(max_registrations=20_000) as lookupd:
        with unnoticed(lookupd, mib=60), lookupd.peer() as hoarder:
            hoarder.send(b"".join(b"REGISTER name_%d\n" % number for number in range(20_001)))
            for _ in range(20_000):
                hoarder.expect_ok()
            hoarder.expect_fatal("E_INVALID REGISTER too many registrations")
        assert lookupd.nodes() == []


def test_peers_that_come_and_go_under_ever_new_names_leave_a_bounded_memory(lookupd: LookupdProcess) -> None:
    def visit(number: int) -> None:
        with lookupd.peer() as visitor:
            names = (b"REGISTER topic_%d_%d\n" % (number, each) for each in range(MAX_UNUSED // 4))
            visitor.send(b"".join(names))
            for _ in range(MAX_UNUSED // 4):
                visitor.expect_ok()

    for number in range(4):
        visit(number)
    with unnoticed(lookupd, mib=60):
        for number in range(4, 10):
            visit(number)
    assert len(lookupd.topics()) <= MAX_UNUSED + MAX_UNUSED // 4


def test_connections_that_come_and_go_leave_nothing_behind(lookupd: LookupdProcess) -> None:
    descriptors = Path(f"/proc/{lookupd.pid}/fd")
    for _ in range(200):  # warm up: what is allocated once
        lookupd.connect().close()
    before = len(list(descriptors.iterdir()))
    with unnoticed(lookupd, mib=10):
        for number in range(1500):
            connection = lookupd.peer() if number % 3 == 0 else lookupd.connect()
            if number % 6 == 0:
                connection.register("t", "c")
            if number % 2:
                connection.abort()
            else:
                connection.close()
    wait_until(lambda: len(list(descriptors.iterdir())) <= before + 5)
    assert lookupd.nodes() == []


# Stalling and flooding


def test_a_peer_that_floods_and_never_reads_is_held_back(lookupd: LookupdProcess) -> None:
    command = b"REGISTER t c\nPING\nUNREGISTER t\n"
    with unnoticed(lookupd), lookupd.peer() as flooder:
        send_until_held_back(flooder.socket, command * 2000, len(command))


def test_peers_that_flood_and_read_do_not_starve_others(lookupd: LookupdProcess) -> None:
    stopping = threading.Event()

    def flood() -> None:
        with lookupd.peer() as flooder:
            while not stopping.is_set():
                flooder.send(b"PING\nREGISTER t c\nUNREGISTER t\n" * 3000)
                missing = 9000 * len(OK)
                while missing:
                    missing -= len(flooder.socket.recv(1 << 20))

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(4)]
    with unnoticed(lookupd) as side:
        for thread in threads:
            thread.start()
        served = side.count + 2 * ENOUGH
        wait_until(lambda: side.count >= served or side.problem, what="lookups during the flood")
        stopping.set()
        for thread in threads:
            thread.join(DEADLINE)


def test_clients_that_never_read_large_answers_are_held_back(lookupd: LookupdProcess) -> None:
    with ExitStack() as stack:
        for number in range(100):
            peer = stack.enter_context(lookupd.peer(hostname=f"{number}" * 200))
            peer.send(b"".join(b"REGISTER topic_number_%d\n" % each for each in range(200)))
            for _ in range(200):
                peer.expect_ok()
        size = len(lookupd.http("GET", "/nodes"))
        with unnoticed(lookupd, mib=30 * size / 2**20 + 40):
            for _ in range(30):
                # A hundred answers each would be gigabytes.
                client = stack.enter_context(lookupd.http_connect())
                client.send(b"GET /nodes HTTP/1.1\r\nHost: x\r\n\r\n" * 100)


def test_half_requests_and_half_commands_hold_nobody_up(lookupd: LookupdProcess) -> None:
    with ExitStack() as stack, unnoticed(lookupd, mib=40):
        for _ in range(300):
            stack.enter_context(lookupd.http_connect()).send(b"GET /lookup?topic=t HTTP/1.1\r\nHo")
            stack.enter_context(lookupd.peer()).send(b"REGIST")


def test_a_conversation_sent_byte_by_byte_works(lookupd: LookupdProcess) -> None:
    with unnoticed(lookupd), lookupd.connect(magic=b"") as connection:
        for byte in b"  V1PING\n" + IDENTIFY + b"REGISTER t c\nUNREGISTER t c\nPING\n":
            connection.send(bytes([byte]))
        connection.expect_ok()
        assert json.loads(connection.read_reply())["version"] == "1.3.0"
        for _ in range(3):
            connection.expect_ok()


def test_bytes_meant_for_another_port_end_at_once(lookupd: LookupdProcess) -> None:
    with lookupd.connect(magic=b"GET /nodes HTTP/1.1\r\n\r\n") as connection:
        connection.expect_fatal("E_BAD_PROTOCOL")
    with lookupd.http_connect() as wrong:
        wrong.send(b"  V1PING\n")
        assert wrong.read_answer().status == 400
    with lookupd.connect(magic=b"\x16\x03\x01\x02\x00") as tls:
        with pytest.raises((ConnectionClosed, ConnectionResetError)):
            tls.expect_reply("E_BAD_PROTOCOL")
            tls.read_reply()
