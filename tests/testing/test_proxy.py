from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Literal

import pytest

from nsparq.client import Producer
from nsparq.testing import FaultProxy, run_broker
from tests.support import wait_until
from tests.support.polling import DEADLINE

DIRECTIONS: tuple[Literal["to_broker", "to_client"], ...] = ("to_broker", "to_client")


class Echo:
    """A server on a thread that sends back what it gets, and notes how its connections ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.received = bytearray()
        self.ends: list[str] = []
        self.read = True
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    self.received += data
                    connection.sendall(data)
                self.ends.append("end")
            except OSError:
                self.ends.append("reset")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.address) as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def read(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = client.recv(count - len(data))
        if not piece:
            break
        data += piece
    return data


def assert_silent(client: socket.socket, seconds: float = 0.05) -> None:
    client.settimeout(seconds)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(DEADLINE)


def test_without_faults_everything_passes_both_ways(proxy: FaultProxy) -> None:
    data = bytes(range(256)) * 4000
    with connect(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        assert read(client, len(data)) == data
        sender.join()
    # Counted after they have passed: whoever gets the last ones may look too early.
    for direction in DIRECTIONS:
        wait_until(lambda direction=direction: proxy.passed_bytes(direction) >= len(data))
        assert proxy.passed_bytes(direction) == len(data)


def test_the_end_of_the_stream_passes_after_the_data(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)
        assert read(client, 100) == b"last words"
    proxy.wait_connections(0)
    wait_until(lambda: echo.ends == ["end"])


def test_a_stalled_connection_is_silent_and_flows_on_when_healed(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"a")
        assert read(client, 1) == b"a"
        proxy.stall()
        client.sendall(b"b")
        assert_silent(client)
        assert echo.received == b"a"
        proxy.heal()
        assert read(client, 1) == b"b"


def test_one_direction_can_be_stalled(proxy: FaultProxy, echo: Echo) -> None:
    proxy.stall("to_client")
    with connect(proxy) as client:
        client.sendall(b"heard")
        wait_until(lambda: echo.received == b"heard")
        assert_silent(client)
        proxy.heal()
        assert read(client, 5) == b"heard"


def test_a_stalled_sender_soon_blocks(proxy: FaultProxy) -> None:
    proxy.stall("to_broker")
    with connect(proxy) as client:
        client.settimeout(0.2)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 1 << 30:
                sent += client.send(b"x" * 65536)
        assert sent < 32 << 20


def test_a_stall_holds_back_the_end_of_the_stream(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"x")
        read(client, 1)
        proxy.stall("to_broker")
    time.sleep(0.02)  # long enough for it to pass, if it did
    assert echo.ends == []
    proxy.heal()
    wait_until(lambda: echo.ends)


def test_dropped_data_stays_lost(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        proxy.drop("to_broker")
        client.sendall(b"lost")
        assert_silent(client)
        proxy.heal()
        client.sendall(b"found")
        assert read(client, 5) == b"found"
    assert echo.received == b"found"


def test_delayed_bytes_come_late_and_in_order(proxy: FaultProxy) -> None:
    proxy.delay(1, "to_client")
    with connect(proxy) as client:
        began = time.monotonic()
        client.sendall(b"a")
        time.sleep(0.03)
        client.sendall(b"b")
        assert read(client, 1) == b"a"
        assert time.monotonic() - began >= 1
        assert read(client, 1) == b"b"


def test_healing_ends_a_delay_at_once(proxy: FaultProxy) -> None:
    proxy.delay(60)
    with connect(proxy) as client:
        client.sendall(b"a")
        assert_silent(client)
        proxy.heal()
        assert read(client, 1) == b"a"


def test_a_throttle_limits_the_rate(proxy: FaultProxy) -> None:
    proxy.throttle(10_000, "to_client")
    with connect(proxy) as client:
        began = time.monotonic()
        client.sendall(b"x" * 2000)
        assert read(client, 2000) == b"x" * 2000
        assert time.monotonic() - began >= 0.15


def test_a_throttle_must_be_positive(proxy: FaultProxy) -> None:
    with pytest.raises(ValueError, match="stall"):
        proxy.throttle(0)


def test_a_cut_comes_after_exactly_the_given_bytes(proxy: FaultProxy) -> None:
    proxy.cut_after(7)
    for _ in range(2):  # every connection, until healed
        with connect(proxy) as client:
            client.sendall(b"0123456789")
            assert read(client, 7) == b"0123456"
            with pytest.raises(ConnectionResetError):
                client.recv(1)
    proxy.heal()
    with connect(proxy) as client:
        client.sendall(b"0123456789")
        assert read(client, 10) == b"0123456789"


def test_a_cut_counts_from_when_it_is_set(proxy: FaultProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"before")
        assert read(client, 6) == b"before"
        proxy.cut_after(3, reset=False)
        client.sendall(b"after")
        assert read(client, 100) == b"aft"


def test_a_cut_can_be_on_the_way_to_the_broker(proxy: FaultProxy, echo: Echo) -> None:
    proxy.cut_after(4, "to_broker")
    with connect(proxy) as client:
        client.sendall(b"halfway")
        with pytest.raises(ConnectionResetError):
            read(client, 100)
    wait_until(lambda: echo.ends == ["reset"])
    assert echo.received == b"half"


def test_a_cut_after_0_bytes_is_immediate(proxy: FaultProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"x")
        assert read(client, 1) == b"x"
        proxy.cut_after(0)
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_a_reset_is_seen_as_such_at_both_ends(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"x")
        read(client, 1)
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        wait_until(lambda: echo.ends == ["reset"])
        assert proxy.connection_count == 0
    with connect(proxy) as client:
        client.sendall(b"y")
        assert read(client, 1) == b"y"
    assert proxy.accepted_count == 2


def test_a_disconnect_is_a_clean_close(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"x")
        read(client, 1)
        proxy.disconnect()
        assert client.recv(1) == b""
        wait_until(lambda: echo.ends == ["end"])


def test_refuse_keeps_open_connections_and_heal_listens_on_the_same_port(proxy: FaultProxy) -> None:
    address = proxy.address
    with connect(proxy) as client:
        client.sendall(b"a")
        read(client, 1)
        proxy.refuse()
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        client.sendall(b"b")
        assert read(client, 1) == b"b"
    proxy.heal()
    assert proxy.address == address
    with connect(proxy) as client:
        client.sendall(b"c")
        assert read(client, 1) == b"c"


def test_a_missing_target_resets_the_connection(echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with FaultProxy(f"127.0.0.1:{port}") as proxy:
        # As early as in connect(), if the proxy is quick.
        with pytest.raises(ConnectionResetError), connect(proxy) as client:
            client.recv(1)
        proxy.wait_connections(0)


def test_a_server_that_resets_is_passed_on(proxy: FaultProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with FaultProxy(f"127.0.0.1:{server.getsockname()[1]}") as proxy, connect(proxy) as client:
            inner, _ = server.accept()
            client.sendall(b"never read")
            time.sleep(0.02)  # closing with something unread resets
            inner.close()
            with pytest.raises(ConnectionResetError):
                client.recv(1)


def test_waiting_for_connections_says_how_many_there_are(proxy: FaultProxy) -> None:
    with connect(proxy):
        proxy.wait_connections(1)
        with pytest.raises(AssertionError, match="after 0.02 s 1 connections are open, not 2"):
            proxy.wait_connections(2, timeout=0.02)


def test_the_target_is_a_host_and_a_port() -> None:
    with pytest.raises(ValueError, match="host:port"):
        FaultProxy("/tmp/nsqd.sock")


@pytest.mark.parametrize("fault", ["none", "stall", "drop", "delay", "throttle", "refuse"])
def test_closing_leaves_nothing_whatever_the_fault(echo: Echo, fault: str) -> None:
    threads = {*threading.enumerate()}
    arguments = {"delay": (60,), "throttle": (1,)}.get(fault, ())
    with FaultProxy(echo.address) as proxy, connect(proxy) as client:
        proxy.wait_connections(1)
        if fault != "none":
            getattr(proxy, fault)(*arguments)
        client.sendall(b"x" * 100_000)
        proxy.close()
    left = {thread for thread in threading.enumerate() if "proxy" in thread.name}
    assert left <= threads
    proxy.close()


def test_asyncio_code_uses_it_too() -> None:
    async def main(proxy: FaultProxy) -> None:
        async with Producer(proxy.address, retry=True) as producer:
            await producer.publish("t", b"x")
            proxy.reset()
            await producer.publish("t", b"y")

    with run_broker() as broker, FaultProxy(broker.tcp_address) as proxy:
        asyncio.run(main(proxy))
        assert proxy.accepted_count == 2
        assert [message.body for message in broker.peek("t")] == [b"x", b"y"]
