"""HTTP clients that stall, flood, lie or try the doors: bounded memory, documented errors, nobody
hurt."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from nsparq.http import limits
from tests.support import (
    BrokerProcess,
    BrokerThread,
    HttpConnection,
    encode_request,
    multi,
    sized,
    start_process,
    unique_name,
    wait_until,
)
from tests.support.certificates import certificates
from tests.support.connection import wait_readable
from tests.support.polling import DEADLINE

from .bystander import well_served
from .flood import send_until_held_back
from .load import peak_mib, reset_peak, resident_mib

MIB = 1 << 20
HEAD = b"POST /pub?topic=t HTTP/1.1\r\nHost: h\r\n"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A real process, whose log must show no traceback at the end."""
    with start_process(tmp_path) as process:
        yield process
        assert process.alive()
        assert "Traceback" not in process.stderr_text()


@pytest.fixture(scope="module")
def modest_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One for all tests that cost it next to nothing: its memory stays as telling as that of a
    fresh one."""
    with start_process(tmp_path_factory.mktemp("modest")) as process:
        yield process
        assert process.alive()
        assert "Traceback" not in process.stderr_text()


@pytest.fixture
def modest(modest_process: BrokerProcess) -> BrokerProcess:
    assert modest_process.alive()
    return modest_process


@pytest.fixture
def socket_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """HTTP on a Unix socket, which holds 200 KiB for a client that does not read; TCP holds
    megabytes."""
    with start_process(tmp_path, http_address=str(tmp_path / "http")) as process:
        yield process
        assert "Traceback" not in process.stderr_text()


@pytest.fixture
def hasty_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerThread]:
    """Every time limit of HTTP is a second here."""
    for name in ("HEAD_S", "BODY_S", "IDLE_S", "LINGER_S"):
        monkeypatch.setattr(limits, name, 1.0)
    monkeypatch.setattr(limits, "SWEEP_S", 0.1)
    with BrokerThread(tmp_path, **certificates().server_flags()) as thread:
        yield thread


class Growth:
    """How much more memory the process had at its peak, since now."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.pid = broker.pid
        self.before = resident_mib(self.pid)
        reset_peak(self.pid)

    def mib(self) -> float:
        return peak_mib(self.pid) - self.before


def send_until_refused(connection: HttpConnection, data: bytes) -> None:
    """Send the same bytes again and again, until the server hangs up, which it must in time.

    After a refusal the server reads on for two seconds and throws away what comes. It gets the
    first 30 MB of that at full speed. The rest is sent slowly: a flood of two seconds would keep
    both cores busy.
    """
    deadline = time.monotonic() + DEADLINE
    after_refusal = 0
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while time.monotonic() < deadline:
            connection.send(data)
            if after_refusal or wait_readable(connection.socket, 0):
                after_refusal += len(data)
            if after_refusal > 30_000_000:
                time.sleep(0.05)


def send_for_what_it_is_worth(connection: HttpConnection, data: bytes) -> None:
    """The server may have hung up already, having read enough."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(data)


# Time: slow clients


TRICKLES = {
    "request line": (b"GET /pi", b"n"),
    "header": (b"GET /ping HTTP/1.1\r\nHost: h\r\nX: ", b"y"),
    "headers": (b"GET /ping HTTP/1.1\r\nHost: h\r\n", b"X: y\r\n"),
    "body": (HEAD + b"Content-Length: 1000\r\n\r\n", b"x"),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "chunk extension": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
    "trailer": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: ", b"y"),
    "nothing": (b"", b""),
    "blank lines": (b"", b"\r\n"),
}


@pytest.mark.parametrize("kind", TRICKLES)
def test_a_request_that_trickles_in_runs_out_of_time(hasty_broker: BrokerThread, kind: str) -> None:
    """However lively the connection looks: the time is for the whole head, or the whole body."""
    start, drop = TRICKLES[kind]
    with ExitStack() as stack:
        stack.enter_context(well_served(hasty_broker, within=1))
        connections = [stack.enter_context(hasty_broker.http_connect()) for _ in range(20)]
        for connection in connections:
            connection.send(start)
        began = time.monotonic()
        waiting = set(connections)
        while waiting:
            assert time.monotonic() - began < DEADLINE, f"{len(waiting)} are still served"
            time.sleep(0.1)
            for connection in [*waiting]:
                try:
                    connection.send(drop)
                    connection.socket.settimeout(0)
                    if not connection.socket.recv(1000):
                        waiting.discard(connection)
                except BlockingIOError:
                    pass
                except OSError:
                    waiting.discard(connection)
        assert time.monotonic() - began > 0.8
    assert hasty_broker.topic_stats("t") is None


def test_a_tls_handshake_that_stalls_runs_out_of_time(hasty_broker: BrokerThread) -> None:
    with ExitStack() as stack:
        stack.enter_context(well_served(hasty_broker, within=1))
        for start in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"):
            connection = stack.enter_context(hasty_broker.http_connect(https=True))
            connection.send(start)
            assert connection.read_to_end()[:1] in (b"", b"\x15")


def test_an_idle_connection_ends_and_a_busy_one_does_not(hasty_broker: BrokerThread) -> None:
    with hasty_broker.http_connect() as idle, hasty_broker.http_connect() as busy:
        assert idle.request("GET", "/ping").body == b"OK"
        while not wait_readable(idle.socket, 0.05):
            assert busy.request("GET", "/ping").body == b"OK"
        idle.expect_closed()
        assert busy.request("GET", "/ping").body == b"OK"


def test_a_client_that_never_reads_runs_out_of_time(hasty_broker: BrokerThread, tmp_path: Path) -> None:
    for number in range(100):
        hasty_broker.control("create", f"topic_{number}", "channel")
    with hasty_broker.http_connect() as connection, well_served(hasty_broker, within=1):
        request = encode_request("GET", "/stats?format=json")
        deadline = time.monotonic() + DEADLINE
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() < deadline:
                connection.socket.setblocking(False)
                try:
                    connection.socket.send(request * 50)
                except BlockingIOError:
                    time.sleep(0.05)


def test_a_client_that_is_refused_cannot_go_on_for_long(hasty_broker: BrokerThread) -> None:
    """It gets a moment to read the refusal, however much it sends meanwhile."""
    with hasty_broker.http_connect() as connection:
        connection.send(b"garbage\r\n\r\n")
        assert connection.read_answer().status == 400
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            deadline = time.monotonic() + DEADLINE
            while time.monotonic() < deadline:
                connection.send(b"x" * 1000)
                time.sleep(0.05)


# Number: many clients


def test_hundreds_of_connections_that_do_nothing_cost_little(broker: BrokerProcess) -> None:
    starts = (
        b"",
        b"GET /ping HTT",
        b"GET /ping HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 1000,
        HEAD + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n10000\r\n" + b"x" * 1000,
        b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n",
    )
    growth = Growth(broker)
    descriptors = Path(f"/proc/{broker.pid}/fd")
    open_before = len(list(descriptors.iterdir()))
    with ExitStack() as stack, well_served(broker, within=1):
        for number in range(900):
            stack.enter_context(broker.http_connect()).send(starts[number % len(starts)])
        wait_until(lambda: len(list(descriptors.iterdir())) >= open_before + 900)
        for _ in range(20):
            assert broker.request("GET", "/ping").body == b"OK"
            broker.request("POST", "/pub?topic=u", b"x").expect_ok()
    assert growth.mib() < 50
    wait_until(lambda: len(list(descriptors.iterdir())) <= open_before + 5)
    assert broker.topic_stats("t") is None


def test_connections_that_come_and_go_leave_nothing_behind(broker: BrokerProcess) -> None:
    def visit(number: int) -> None:
        connection = broker.http_connect()
        if number % 3 == 0:
            connection.request("POST", "/pub?topic=u#ephemeral".replace("#", "%23"), b"x").expect_ok()
        elif number % 3 == 1:
            connection.send(HEAD + b"Content-Length: 10\r\n\r\nx")
        if number % 2:
            connection.abort()
        else:
            connection.close()

    for number in range(200):  # warm up: what is allocated once
        visit(number)
    descriptors = Path(f"/proc/{broker.pid}/fd")
    before = len(list(descriptors.iterdir()))
    growth = Growth(broker)
    with well_served(broker, within=1):
        for number in range(1500):
            visit(number)
    wait_until(lambda: len(list(descriptors.iterdir())) <= before + 5)
    assert growth.mib() < 20


# Size: heads


OVERSIZE = {
    "path": b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "query": b"GET /ping?" + b"a=b&" * (MIB // 4) + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "header": b"GET /ping HTTP/1.1\r\nHost: h\r\nX: " + b"y" * MIB + b"\r\n\r\n",
    "header name": b"GET /ping HTTP/1.1\r\nHost: h\r\n" + b"y" * MIB + b": x\r\n\r\n",
    "headers": b"GET /ping HTTP/1.1\r\nHost: h\r\n" + b"X: y\r\n" * (MIB // 6) + b"\r\n",
    "method": b"G" * MIB + b" /ping HTTP/1.1\r\nHost: h\r\n\r\n",
    "version": b"GET /ping HTTP/1." + b"1" * MIB + b"\r\nHost: h\r\n\r\n",
    "line without end": b"x" * MIB,
}


@pytest.mark.parametrize("part", OVERSIZE)
def test_a_head_that_is_too_long_is_refused(modest: BrokerProcess, part: str) -> None:
    growth = Growth(modest)
    with well_served(modest, within=1):
        for _ in range(10):
            with modest.http_connect() as connection:
                send_for_what_it_is_worth(connection, OVERSIZE[part])
                answer = connection.read_answer()
                # Where there is no telling what is too long, it is not HTTP.
                vague = part in ("method", "version", "line without end")
                assert answer.status in (414, 431) or (vague and answer.status == 400)
                assert answer.says_close
                connection.expect_closed()
    assert growth.mib() < 20


@pytest.mark.parametrize(
    "start, more",
    [
        (b"GET /", b"a" * 60_000),
        (b"GET /ping HTTP/1.1\r\nHost: h\r\nX: ", b"y" * 60_000),
        (b"GET /ping HTTP/1.1\r\nHost: h\r\n", b"X: y\r\n" * 10_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: ", b"y" * 60_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"X: y\r\n" * 10_000),
    ],
    ids=["request line", "header", "headers", "trailer", "trailers"],
)
def test_a_head_or_tail_without_end_is_cut_off(modest: BrokerProcess, start: bytes, more: bytes) -> None:
    growth = Growth(modest)
    with well_served(modest, within=1), modest.http_connect() as connection:
        connection.send(start)
        send_until_refused(connection, more)
    assert growth.mib() < 20


def test_many_heads_just_below_the_limit_cost_no_more_than_they_are(broker: BrokerProcess) -> None:
    growth = Growth(broker)
    with ExitStack() as stack, well_served(broker, within=1):
        for _ in range(300):
            connection = stack.enter_context(broker.http_connect())
            connection.send(b"GET /ping HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 30_000)
    # 9 MiB in them
    assert growth.mib() < 50


def test_a_thousand_headers_are_no_reason_to_stall(modest: BrokerProcess) -> None:
    head = b"GET /ping HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(1500)) + b"\r\n"
    with well_served(modest, within=1), modest.http_connect() as connection:
        for _ in range(50):
            connection.send(head)
            assert connection.read_answer().body == b"OK"


def test_a_long_query_is_taken_apart_in_time(modest: BrokerProcess) -> None:
    queries = ("a&" * 15_000, "a=%41&" * 5_000, "%41" * 10_000 + "=1", "topic=" + "a" * 30_000, "=&" * 15_000)
    with well_served(modest, within=1), modest.http_connect() as connection:
        for query in queries:
            for _ in range(10):
                assert connection.request("GET", f"/stats?format=json&{query}").status == 200
                answer = connection.request("POST", f"/pub?{query}", b"x")
                assert answer.status == 400


# Size: bodies


def test_a_body_that_is_declared_too_big_is_refused_unread(modest: BrokerProcess) -> None:
    growth = Growth(modest)
    with well_served(modest, within=1):
        for length in (2 * MIB, 1 << 31, 1 << 40, (1 << 63) - 1):
            for path, code in ((b"/pub", "MSG_TOO_BIG"), (b"/mpub", "BODY_TOO_BIG")):
                if path == b"/mpub" and length < 5 * MIB:
                    continue
                with modest.http_connect() as connection:
                    connection.send(
                        b"POST %b?topic=t HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (path, length)
                    )
                    connection.read_answer().expect_error(413, code)
                    connection.expect_closed()
    assert growth.mib() < 10


@pytest.mark.parametrize(
    "path, chunk",
    [("/mpub?topic=t", 100), ("/mpub?topic=t&binary=1", 60_000), ("/topic/create?topic=t", 60_000)],
)
def test_a_chunked_body_without_end_is_cut_off(broker: BrokerProcess, path: str, chunk: int) -> None:
    start = f"POST {path} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    block = b"%x\r\n%b\r\n" % (chunk, b"x" * chunk) * (60_000 // chunk)
    growth = Growth(broker)
    with well_served(broker, within=1), broker.http_connect() as connection:
        connection.send(start)
        send_until_refused(connection, block)
    assert growth.mib() < 60
    assert not broker.topic_stats("t") or broker.topic_stats("t")["depth"] == 0


def test_a_body_for_nobody_is_not_kept(modest: BrokerProcess) -> None:
    """Where there is no endpoint, or none that wants a body."""
    growth = Growth(modest)
    with well_served(modest, within=1):
        for path, status in ((b"/nope", 404), (b"/ping", 405), (b"/topic/create?topic=t", 200)):
            with modest.http_connect() as connection:
                connection.send(b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n" % path)
                for _ in range(10):
                    connection.send(b"x" * 100_000)
                assert connection.read_answer().status == status
    assert growth.mib() < 20


def test_bodies_for_nobody_do_not_use_up_the_room_of_others(broker: BrokerProcess) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(broker.http_connect())
            connection.send(b"POST /nope HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(63):
                send_for_what_it_is_worth(connection, b"100000\r\n" + b"x" * MIB + b"\r\n")
        with broker.http_connect() as connection:
            connection.request("POST", "/mpub?topic=t", b"\n".join([b"x" * MIB] * 4)).expect_ok()


def test_half_sent_bodies_are_bounded_over_all_connections(broker: BrokerProcess) -> None:
    """Each is within its limit; together they would be half a gigabyte."""
    growth = Growth(broker)
    refused = 0
    with ExitStack() as stack, well_served(broker, within=2):
        connections = [stack.enter_context(broker.http_connect()) for _ in range(110)]
        start = b"POST /mpub?topic=t HTTP/1.1\r\nHost: h\r\nContent-Length: 5000000\r\n\r\n"
        for connection in connections:
            connection.send(start)
        for connection in connections:
            try:
                connection.send(b"x" * 4_900_000)
            except (BrokenPipeError, ConnectionResetError):
                refused += 1
        # Whoever got in is still served.
        assert broker.request("GET", "/ping").body == b"OK"
    # 256 MiB are what they may hold together.
    assert growth.mib() < 256 + 100
    assert "Traceback" not in broker.stderr_text()


def test_a_body_in_tiny_chunks_costs_what_it_holds(broker: BrokerProcess) -> None:
    growth = Growth(broker)
    with ExitStack() as stack, well_served(broker, within=2):
        connection = stack.enter_context(broker.http_connect())
        connection.send(b"POST /mpub?topic=t HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(10):
            connection.send(b"2\r\nxy\r\n" * 100_000)
        # 2 MB, of which each piece would take 43 bytes and more if it were kept as it came
        wait_until(lambda: broker.request("GET", "/ping").body == b"OK")
    assert growth.mib() < 20


def test_a_body_in_tiny_pieces_arrives_whole(broker: BrokerProcess) -> None:
    body = bytes(range(256)) * 400
    with broker.http_connect() as connection:
        connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 10_240):
            piece = body[start : start + 10_240]
            connection.send(b"".join(b"1\r\n%b\r\n" % piece[i : i + 1] for i in range(len(piece))))
        connection.send(b"0\r\n\r\n")
        connection.read_answer().expect_ok()
    with broker.connect() as consumer:
        consumer.sub("t", "c", rdy=1)
        assert consumer.read_message().body == body


def test_many_messages_in_one_body_are_bounded(broker: BrokerProcess) -> None:
    """A million messages of a byte: accepted, without stalling the others for long."""
    growth = Growth(broker)
    with well_served(broker, within=3), broker.http_connect() as connection:
        connection.request("POST", "/mpub?topic=t", b"x\n" * 2_000_000).expect_ok()
        connection.request("POST", "/mpub?topic=t&binary=1", multi([b"x"] * 1_000_000)).expect_ok()
        connection.request("POST", "/mpub?topic=t", b"\n" * 5_000_000).expect_ok()
        stats = broker.topic_stats("t")
        assert stats and stats["depth"] == 3_000_000
    assert growth.mib() < 500


# Framing: requests that two readers could read in two ways


def smuggled(topic: str) -> bytes:
    """A request that nobody has sent, if all goes well."""
    return encode_request("POST", f"/topic/create?topic={topic}", b"")


CHUNKED = b"3\r\nabc\r\n0\r\n\r\n"
AMBIGUOUS = {
    "length and chunked": (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", CHUNKED),
    "chunked and length": (b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", CHUNKED),
    "chunked and length 0": (b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n", CHUNKED),
    "two lengths": (b"Content-Length: 3\r\nContent-Length: 4\r\n", b"abcd"),
    "two equal lengths": (b"Content-Length: 3\r\nContent-Length: 3\r\n", b"abc"),
    "list of lengths": (b"Content-Length: 3, 3\r\n", b"abc"),
    "signed length": (b"Content-Length: +3\r\n", b"abc"),
    "negative length": (b"Content-Length: -3\r\n", b"abc"),
    "hexadecimal length": (b"Content-Length: 0x3\r\n", b"abc"),
    "length with a blank": (b"Content-Length: 3 0\r\n", b"abc"),
    "length with an underscore": (b"Content-Length: 0_3\r\n", b"abc"),
    "empty length": (b"Content-Length:\r\n", b"abc"),
    "length beyond 64 bits": (b"Content-Length: 18446744073709551619\r\n", b"abc"),
    "length of other digits": ("Content-Length: ٣\r\n".encode(), b"abc"),
    "blank before the colon": (b"Content-Length : 3\r\n", b"abc"),
    "chunked with a blank before the colon": (b"Transfer-Encoding : chunked\r\n", CHUNKED),
    "chunked twice": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", CHUNKED),
    "chunked twice in a list": (b"Transfer-Encoding: chunked, chunked\r\n", CHUNKED),
    "chunked and then something": (b"Transfer-Encoding: chunked, identity\r\n", CHUNKED),
    "something and then chunked": (b"Transfer-Encoding: gzip, chunked\r\n", CHUNKED),
    "identity": (b"Transfer-Encoding: identity\r\n", CHUNKED),
    "an encoding like chunked": (b"Transfer-Encoding: xchunked\r\n", CHUNKED),
    "chunked in quotes": (b'Transfer-Encoding: "chunked"\r\n', CHUNKED),
    "chunked after a tab and a control": (b"Transfer-Encoding: \x0bchunked\r\n", CHUNKED),
    "empty encoding": (b"Transfer-Encoding:\r\n", CHUNKED),
    "folded encoding": (b"Transfer-Encoding:\r\n chunked\r\n", CHUNKED),
    "folded length": (b"X: y\r\n Content-Length: 3\r\n", b"abc"),
    "carriage return in a header": (b"X: y\rContent-Length: 3\r\n", b"abc"),
    "line feed alone": (b"X: y\nContent-Length: 3\r\n", b"abc"),
    "zero in a header": (b"X: \0\r\nContent-Length: 3\r\n", b"abc"),
    "zero in a name": (b"Content-Length\0: 3\r\n", b"abc"),
    "chunk size is no number": (b"Transfer-Encoding: chunked\r\n", b"zz\r\nabc\r\n0\r\n\r\n"),
    "chunk size is empty": (b"Transfer-Encoding: chunked\r\n", b"\r\nabc\r\n0\r\n\r\n"),
    "chunk size is signed": (b"Transfer-Encoding: chunked\r\n", b"+3\r\nabc\r\n0\r\n\r\n"),
    "chunk size is negative": (b"Transfer-Encoding: chunked\r\n", b"-3\r\nabc\r\n0\r\n\r\n"),
    "chunk size has a prefix": (b"Transfer-Encoding: chunked\r\n", b"0x3\r\nabc\r\n0\r\n\r\n"),
    "chunk size has a blank": (b"Transfer-Encoding: chunked\r\n", b" 3\r\nabc\r\n0\r\n\r\n"),
    "chunk size overflows": (b"Transfer-Encoding: chunked\r\n", b"10000000000000003\r\nabc\r\n0\r\n\r\n"),
    "chunk is longer than its size": (b"Transfer-Encoding: chunked\r\n", b"2\r\nabc\r\n0\r\n\r\n"),
    "chunk is shorter than its size": (b"Transfer-Encoding: chunked\r\n", b"4\r\nabc\r\n0\r\n\r\n"),
    "chunk without its line end": (b"Transfer-Encoding: chunked\r\n", b"3\r\nabc0\r\n\r\n"),
    "chunk ends in a line feed": (b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\n0\r\n\r\n"),
    "chunk size ends in a line feed": (b"Transfer-Encoding: chunked\r\n", b"3\nabc\r\n0\r\n\r\n"),
    "chunk size ends in a carriage return": (b"Transfer-Encoding: chunked\r\n", b"3\rabc\r\n0\r\n\r\n"),
}


@pytest.fixture(scope="module")
def shared_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with start_process(tmp_path_factory.mktemp("broker")) as process:
        yield process
        assert "Traceback" not in process.stderr_text()


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_request_whose_end_is_open_to_doubt_is_refused_and_ends_the_connection(
    shared_process: BrokerProcess, case: str
) -> None:
    """Whatever follows may be body or request: nobody must ever find out."""
    headers, body = AMBIGUOUS[case]
    topic = unique_name("doubt")
    start = b"POST /pub?topic=%b HTTP/1.1\r\nHost: h\r\n" % topic.encode()
    with shared_process.http_connect() as connection:
        connection.send(start + headers + b"\r\n" + body + smuggled(f"{topic}_smuggled"))
        answer = connection.read_answer()
        assert answer.status in (400, 413, 501), answer
        assert answer.says_close
        connection.expect_closed()
    names = [found["topic_name"] for found in shared_process.stats()["topics"]]
    assert not [name for name in names if name.startswith(topic)]


def test_a_body_is_never_read_as_a_request(shared_process: BrokerProcess) -> None:
    inside = smuggled("inside")
    with shared_process.http_connect() as connection:
        for method, target, status in (
            ("GET", "/ping", 200),
            ("GET", "/nope", 404),
            ("DELETE", "/pub", 405),
            ("POST", "/pub?topic=t!", 400),
            ("POST", "/channel/create", 400),
            ("OPTIONS", "/pub", 200),
            ("GET", "/ping/", 301),
        ):
            for body in (inside, [inside, inside]):
                assert connection.request(method, target, body).status == status
    assert shared_process.topic_stats("inside") is None


def test_what_follows_the_last_request_of_a_connection_is_not_looked_at(
    shared_process: BrokerProcess,
) -> None:
    with shared_process.http_connect() as connection:
        connection.send(b"GET /ping HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + smuggled("behind"))
        assert connection.read_answer().body == b"OK"
        connection.expect_closed()
    with shared_process.http_connect() as connection:
        upgrade = b"GET /ping HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        connection.send(upgrade)
        assert connection.read_answer().status in (200, 400)
    assert shared_process.topic_stats("behind") is None


def test_an_endless_chunk_extension_costs_nothing(modest: BrokerProcess) -> None:
    growth = Growth(modest)
    with well_served(modest, within=1), modest.http_connect() as connection:
        connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;")
        try:
            for _ in range(500):
                connection.send(b"x" * 100_000)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert growth.mib() < 20


def test_chunk_extensions_are_no_way_to_keep_the_parser_busy_for_nothing(modest: BrokerProcess) -> None:
    """A byte of body for each kilobyte of extension: slow, but nobody else has to wait for it."""
    with well_served(modest, within=1), modest.http_connect() as connection:
        connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        block = (b"1;" + b"x" * 1000 + b"\r\ny\r\n") * 60
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(500):
                connection.send(block)


# Back-pressure: requests sent, answers not read


@pytest.mark.parametrize(
    "request_bytes, answer",
    [
        (encode_request("GET", "/ping"), (200, b"OK")),
        (encode_request("GET", "/nope"), (404, b'{"message":"NOT_FOUND"}')),
        (encode_request("POST", "/pub?topic=t%23ephemeral", b"x"), (200, b"OK")),
        (encode_request("POST", "/mpub?topic=t%23ephemeral", [b"x\n" * 100] * 3), (200, b"OK")),
    ],
    ids=["ping", "not found", "pub", "mpub"],
)
def test_a_client_that_never_reads_its_answers_is_held_back(
    socket_broker: BrokerProcess, request_bytes: bytes, answer: tuple[int, bytes]
) -> None:
    broker = socket_broker
    with broker.http_connect() as connection:
        growth = Growth(broker)
        with well_served(broker, within=2):
            sent = send_until_held_back(connection.socket, request_bytes * 300, len(request_bytes))
        assert growth.mib() < 60
        # Once it reads, it gets every answer, in order.
        for _ in range(sent // len(request_bytes)):
            found = connection.read_answer()
            assert (found.status, found.body) == answer


def test_large_answers_that_are_not_read_do_not_pile_up(socket_broker: BrokerProcess) -> None:
    broker = socket_broker
    for number in range(300):
        broker.control("create", f"topic_{number}", "channel")
    size = len(broker.http("GET", "/stats", format="json"))
    assert size > 100_000
    request = encode_request("GET", "/stats?format=json")
    with ExitStack() as stack:
        growth = Growth(broker)
        stack.enter_context(well_served(broker, within=2))
        connections = [stack.enter_context(broker.http_connect()) for _ in range(20)]
        for connection in connections:
            connection.socket.setblocking(False)
            with suppress(BlockingIOError):
                connection.socket.send(request * 1000)
        time.sleep(1)
    # A megabyte each, and one answer more.
    assert growth.mib() < 20 * (2 + size / MIB) + 30


def test_many_requests_in_one_piece_do_not_keep_the_others_waiting(broker: BrokerProcess) -> None:
    block = encode_request("GET", "/stats?format=json&topic=none") * 5000
    with well_served(broker, within=1), broker.http_connect() as connection:
        connection.socket.setblocking(False)
        view, received = memoryview(block), 0
        deadline = time.monotonic() + DEADLINE
        connection.socket.settimeout(0.01)
        while view and time.monotonic() < deadline:
            with suppress(TimeoutError):
                view = view[connection.socket.send(view) :]
            with suppress(TimeoutError):
                received += len(connection.socket.recv(1 << 20))
        assert not view


# Names and paths


def test_hundreds_of_topics_by_http(broker: BrokerProcess) -> None:
    count = 300
    growth = Growth(broker)
    with well_served(broker, within=2), broker.http_connect() as connection:
        for number in range(count):
            connection.request("POST", f"/pub?topic=topic_{number}", b"x").expect_ok()
        stats = connection.request("GET", "/stats?format=json&include_mem=0").expect_json()
        assert len(stats["topics"]) == count + 1
        for number in range(count):
            connection.request("POST", f"/topic/delete?topic=topic_{number}").expect_empty()
        stats = connection.request("GET", "/stats?format=json&include_mem=0").expect_json()
        assert [found["topic_name"] for found in stats["topics"]] == ["side"]
    assert growth.mib() < 45


def test_names_that_come_to_nothing_are_not_remembered(broker: BrokerProcess) -> None:
    def ask(connection: HttpConnection, number: int) -> None:
        for method, target in (
            ("POST", f"/pub?topic=bad!{number}"),
            ("GET", f"/stats?format=json&topic=none_{number}"),
            ("GET", f"/nope/{number}"),
            ("GET", f"/config/none_{number}"),
            ("POST", f"/channel/pause?topic=none_{number}&channel=c"),
            ("GET", f"/ping?{number}"),
        ):
            connection.send_request(method, target, b"x" if method == "POST" else None)
        for _ in range(6):
            connection.read_answer()

    with broker.http_connect() as connection, well_served(broker, within=1):
        for number in range(500):
            ask(connection, number)
        growth = Growth(broker)
        for number in range(500, 1500):
            ask(connection, number)
    assert growth.mib() < 3


PATHS = [
    b"/../../../etc/passwd",
    b"/%2e%2e/%2e%2e/etc/passwd",
    b"/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    b"/config/..%2f..%2fetc%2fpasswd",
    b"/config/../stats",
    b"/config/%2e%2e",
    b"/config/%00",
    b"/config/log_level%00",
    b"/config/__class__",
    b"/config/options.data_path",
    b"/config/{key}",
    b"/{key}",
    b"/ping%00",
    b"/ping%0a",
    b"/ping;x=y",
    b"/ping\\",
    b"\\ping",
    b"/%c0%af",
    b"/%ff%fe",
    b"/\xff\xfe",
    b"/%u0070ing",
    b"/" + b"%2f" * 1000,
    b"/" + b"../" * 1000,
    b"/" + b"/" * 5000 + b"x",
    b"//evil.example/%2e%2e",
    b"/debug/pprof/../../etc/passwd",
    b"/debug/pprof/%2e%2e",
    b"/topic/create/../delete?topic=t",
    b"/static/..%5c..%5cetc",
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:30].decode("latin-1"))
def test_paths_lead_nowhere(shared_process: BrokerProcess, path: bytes) -> None:
    with shared_process.http_connect() as connection:
        for method in ("GET", "POST", "PUT"):
            try:
                answer = connection.request(method, path, b"x" if method != "GET" else None)
            except (BrokenPipeError, ConnectionResetError):
                break
            assert answer.status in (400, 404, 405), answer
            assert b"root:" not in answer.body
            if answer.says_close:
                break


@pytest.mark.parametrize(
    "name", ["..", ".", "../x", "a/../../b", "%2e%2e", "nul\0", "\xff", "x" * 64 + "/y", "a:b"]
)
def test_names_of_topics_and_channels_are_no_paths(
    shared_process: BrokerProcess, tmp_path: Path, name: str
) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in name.encode("latin-1"))
    before = sorted(shared_process.data_path.parent.iterdir())
    for target in (f"/pub?topic={quoted}", f"/mpub?topic={quoted}", f"/topic/create?topic={quoted}"):
        answer = shared_process.request("POST", target, b"x")
        # Dots alone make a valid name in NSQ; it must stay one.
        assert answer.status == (200 if name in ("..", ".") else 400)
    assert sorted(shared_process.data_path.parent.iterdir()) == before
    assert shared_process.alive()
    if name in ("..", "."):
        shared_process.request("POST", f"/topic/delete?topic={quoted}").expect_empty()
        assert sorted(shared_process.data_path.parent.iterdir()) == before


@pytest.mark.parametrize(
    "target",
    [
        b"/PING?x=%0d%0aSet-Cookie:%20a=b",
        b"/ping/?x=%0aSet-Cookie:%20a=b",
        b"/ping/%0d%0aSet-Cookie:%20a=b",
        b"/ping/?x=y\rSet-Cookie:a=b",
        b"/PING?\xe5\x98\x8a\xe5\x98\x8dSet-Cookie:a=b",
        b"//ping?//evil.example",
        b"//evil.example/ping/",
        b"/\\evil.example/ping/",
        b"/ping//evil.example",
    ],
)
def test_nothing_of_the_request_becomes_a_header_or_another_host(
    shared_process: BrokerProcess, target: bytes
) -> None:
    with shared_process.http_connect() as connection:
        connection.send(b"GET %b HTTP/1.1\r\nHost: evil.example\r\n\r\n" % target)
        answer = connection.read_answer()
    assert answer.header("Set-Cookie") is None
    location = answer.header("Location")
    assert location is None or (location.startswith("/ping") and not location.startswith("//"))
    assert answer.status in (301, 400, 404)


# The HTTPS port


@pytest.fixture(scope="module")
def tls_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    flags = certificates().server_flags()
    with start_process(tmp_path_factory.mktemp("tls"), **flags) as process:
        yield process
        assert "Traceback" not in process.stderr_text()


CLIENT_HELLO = (
    bytes.fromhex("160301004a010000460303") + bytes(range(32)) + bytes.fromhex("000002c02f0100001b")
)
TLS_GARBAGE = {
    "plain HTTP": b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n",
    "zeros": bytes(1000),
    "random": bytes((number * 97 + 13) % 256 for number in range(5000)),
    "half a hello": CLIENT_HELLO[:20],
    "a hello that breaks off": CLIENT_HELLO,
    "a hello and garbage": CLIENT_HELLO + b"\xff" * 3000,
    "a record of another type": b"\x17\x03\x03\x00\x10" + bytes(16),
    "an old version": b"\x80\x2e\x01\x00\x02" + bytes(40),
    "a record too long": b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "an alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "the TCP protocol": b"  V2IDENTIFY\n" + sized(b"{}"),
}


@pytest.mark.parametrize("kind", TLS_GARBAGE)
def test_what_is_not_tls_ends_the_connection(tls_process: BrokerProcess, kind: str) -> None:
    with well_served(tls_process, within=1):
        for _ in range(20):
            with tls_process.http_connect(https=True) as connection:
                send_for_what_it_is_worth(connection, TLS_GARBAGE[kind])
                with suppress(OSError):
                    connection.end_of_stream()
                said = connection.read_to_end()
                assert said[:1] in (b"", b"\x15", b"\x16") or said.startswith(b"HTTP/1.")
    context = certificates().client_context()
    with tls_process.http_connect(https=True, tls=context) as connection:
        assert connection.request("GET", "/ping").body == b"OK"


def test_hundreds_of_handshakes_that_stall_cost_little(tls_process: BrokerProcess) -> None:
    growth = Growth(tls_process)
    context = certificates().client_context()
    with ExitStack() as stack, well_served(tls_process, within=2):
        for number in range(300):
            connection = stack.enter_context(tls_process.http_connect(https=True))
            connection.send((b"", CLIENT_HELLO[:30], b"\x16\x03\x01\x40\x00" + bytes(1000))[number % 3])
        with tls_process.http_connect(https=True, tls=context) as connection:
            for _ in range(20):
                connection.request("POST", "/pub?topic=t", b"x").expect_ok()
    assert growth.mib() < 80


def test_a_reset_in_the_middle_of_tls_hurts_nobody(tls_process: BrokerProcess) -> None:
    context = certificates().client_context()
    with well_served(tls_process, within=1):
        for number in range(60):
            connection = tls_process.http_connect(https=True, tls=context)
            if number % 3 == 0:
                connection.send(encode_request("POST", "/pub?topic=t", b"x" * 1000)[:-10])
            elif number % 3 == 1:
                connection.send(encode_request("GET", "/stats") * 20)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


def test_bytes_changed_under_tls_end_the_connection(tls_process: BrokerProcess) -> None:
    context = certificates().client_context()
    with tls_process.http_connect(https=True, tls=context) as connection:
        assert connection.request("GET", "/ping").body == b"OK"
        plain = socket.socket(fileno=connection.socket.detach())
        with plain:
            plain.settimeout(DEADLINE)
            plain.sendall(b"\x17\x03\x03\x00\x20" + b"\xff" * 32)
            received = b""
            with suppress(ConnectionResetError):
                while block := plain.recv(1000):
                    received += block
            assert b"HTTP" not in received


def test_https_answers_that_are_not_read_do_not_pile_up(tls_process: BrokerProcess) -> None:
    context = certificates().client_context()
    for number in range(300):
        tls_process.control("create", f"topic_{number}", "channel")
    with ExitStack() as stack:
        growth = Growth(tls_process)
        stack.enter_context(well_served(tls_process, within=2))
        for _ in range(10):
            connection = stack.enter_context(tls_process.http_connect(https=True, tls=context))
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            connection.socket.settimeout(0.2)
            with suppress(TimeoutError):
                connection.send(encode_request("GET", "/stats?format=json") * 500)
        time.sleep(1)
    assert growth.mib() < 150


# Stopping


def test_a_stop_does_not_wait_for_those_who_dawdle(tmp_path: Path) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(start_process(tmp_path))
        connections: list[HttpConnection] = []
        for start in (b"", b"GET /ping HT", HEAD + b"Content-Length: 100\r\n\r\nx", b"garbage\r\n\r\n"):
            connection = stack.enter_context(broker.http_connect())
            connection.send(start)
            connections.append(connection)
        idle = stack.enter_context(broker.http_connect())
        assert idle.request("GET", "/ping").body == b"OK"
        deaf = stack.enter_context(broker.http_connect())
        deaf.socket.setblocking(False)
        with suppress(BlockingIOError):
            deaf.socket.send(encode_request("GET", "/stats") * 1000)
        assert broker.terminate() == 0
        for connection in (connections[0], connections[1], idle):
            connection.expect_closed()


def test_a_publish_that_was_answered_survives_a_kill(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        with broker.http_connect() as connection:
            for number in range(200):
                connection.request("POST", "/pub?topic=t", b"%d" % number).expect_ok()
        broker.kill()
        broker.start()
        with broker.connect() as consumer:
            consumer.sub("t", "c", rdy=200)
            assert [message.body for message in consumer.read_messages(200)] == [
                b"%d" % n for n in range(200)
            ]
