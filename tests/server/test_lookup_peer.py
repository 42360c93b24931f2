"""nsqd and its nsqlookupds: registrations, changes, and failures."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from nsparq.errors import FatalClientError
from nsparq.server import lookup_peer
from nsparq.server.lookup_peer import MAX_PENDING, MAX_PIPELINED, LookupPeers
from nsparq.wire.lookup import (
    OK,
    Command,
    Identify,
    LookupServerProtocol,
    PeerInfo,
    Ping,
    Register,
    encode_error,
    encode_identify_reply,
    encode_reply,
)
from tests.support.polling import DEADLINE

IDENTITY: dict[str, str | int] = {
    "version": "1.3.0",
    "tcp_port": 4150,
    "http_port": 4151,
    "hostname": "host1",
    "broadcast_address": "nsqd.example",
    "topology_zone": "zone",
    "topology_region": "region",
}
MAX_BODY = 10_000
ABOUT = {"tcp_port": 4160, "http_port": 4161, "hostname": "h", "broadcast_address": "lookup.example"}
ABOUT_REPLY = encode_identify_reply(**ABOUT, version="1.3.0")  # type: ignore[arg-type]  # mixed on purpose

Answer = Callable[[Command], bytes | None]


def agree(command: Command) -> bytes | None:
    return ABOUT_REPLY if isinstance(command, Identify) else OK


def spelled(command: Command) -> str:
    """The command as it was sent: as tuples, a REGISTER would equal an UNREGISTER."""
    verb = type(command).__name__.upper()
    return " ".join(filter(None, (verb, *command))) if verb.endswith("REGISTER") else verb


class FakeLookupd:
    """A scripted nsqlookupd: `answer` gives the reply to each command, or None."""

    def __init__(self, answer: Answer = agree) -> None:
        self.answer = answer
        self.told: list[str] = []
        """Commands of the current connection."""
        self.peer: PeerInfo | None = None
        self.connections = 0
        self.open = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def registered(self) -> list[tuple[str, str]]:
        words = [(*said.split(), "") for said in self.told if said.startswith("REGISTER")]
        return [(topic, channel) for _, topic, channel, *_ in words]

    async def start(self) -> None:
        if self._server is not None:
            return
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self.hang_up()
            await server.wait_closed()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def say(self, data: bytes) -> None:
        for writer in self._writers:
            writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        self.open += 1
        self.told = told = []
        protocol = LookupServerProtocol("")
        try:
            while data := await reader.read(1 << 16):
                for command in protocol.receive_data(data):
                    told.append(spelled(command))
                    if isinstance(command, Identify):
                        self.peer = command.peer
                    writer.write(self.answer(command) or b"")
        except FatalClientError as error:
            writer.write(encode_error(error))
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            self._writers.discard(writer)
            writer.close()
            # At the end of a test the loop cancels its tasks, which the streams report as an error.
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


class Broker:
    """The parts of nsqd that the peers need."""

    def __init__(self, *registrations: tuple[str, str]) -> None:
        self.registrations = [*registrations]

    def peers(self, *addresses: str, ping_interval: float = 15.0) -> LookupPeers:
        return LookupPeers(
            addresses,
            identity=lambda: IDENTITY,
            registrations=lambda: iter(self.registrations),
            max_body_size=MAX_BODY,
            ping_interval=ping_interval,
        )


@asynccontextmanager
async def running(*things: FakeLookupd | LookupPeers) -> AsyncIterator[None]:
    for thing in things:
        await thing.start()
    try:
        async with asyncio.timeout(DEADLINE):
            yield
    finally:
        for thing in reversed(things):
            await thing.stop()


async def until(fact: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not fact():  # noqa: ASYNC110  # facts of all kinds
            await asyncio.sleep(0.002)


Run = Callable[[Awaitable[None]], None]


@pytest.fixture
def run() -> Run:
    return uvloop.run  # type: ignore[return-value]  # the daemon's event loop


# registrations and changes


def test_a_peer_gets_identify_and_then_all_registrations(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        broker = Broker(("lonely", ""), ("t", "a"), ("t", "b#ephemeral"))
        await lookupd.start()
        async with running(lookupd, peers := broker.peers(lookupd.address)):
            await until(lambda: len(lookupd.told) == 4)
            assert lookupd.told == ["IDENTIFY", "REGISTER lonely", "REGISTER t a", "REGISTER t b#ephemeral"]
            assert lookupd.peer == PeerInfo(**IDENTITY)  # type: ignore[arg-type]  # mixed on purpose
            assert peers.http_addresses == ["lookup.example:4161"]

    run(scenario())


def test_changes_follow_in_order_and_at_once(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, peers := Broker().peers(lookupd.address)):
            await peers.settled()
            await until(lambda: peers._peers[lookupd.address]._link)
            peers.changed("REGISTER", "t")
            peers.changed("REGISTER", "t", "c")
            peers.changed("UNREGISTER", "t", "c")
            await until(lambda: len(lookupd.told) == 4)
            assert "PING" not in lookupd.told, "they do not wait for the next ping"
            peers.changed("UNREGISTER", "t")
            await until(lambda: len(lookupd.told) == 5)
            assert lookupd.told[1:] == ["REGISTER t", "REGISTER t c", "UNREGISTER t c", "UNREGISTER t"]

    run(scenario())


def test_changes_during_the_registration_come_after_it(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        broker = Broker(*((f"t{number}", "") for number in range(MAX_PIPELINED + 1)))
        peers = broker.peers(lookupd.address)

        def answer(command: Command) -> bytes | None:
            if spelled(command) == "REGISTER t0":
                peers.changed("UNREGISTER", "t0")
                peers.changed("REGISTER", "late", "c")
            return agree(command)

        lookupd.answer = answer
        async with running(lookupd, peers):
            await until(lambda: len(lookupd.told) == MAX_PIPELINED + 4)
            assert lookupd.told[-2:] == ["UNREGISTER t0", "REGISTER late c"]

    run(scenario())


def test_a_change_while_a_peer_is_disconnected_is_part_of_the_next_registration(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        broker = Broker(("old", ""))
        async with running(lookupd, peers := broker.peers(lookupd.address)):
            await until(lambda: lookupd.registered() == [("old", "")])
            await lookupd.stop()
            peer = peers._peers[lookupd.address]
            await until(lambda: peer._link is None)
            broker.registrations = [("new", "c")]
            peers.changed("UNREGISTER", "old")
            peers.changed("REGISTER", "new", "c")
            assert not peer._pending
            await lookupd.start()
            await until(lambda: lookupd.registered() == [("new", "c")])
            assert "UNREGISTER old" not in lookupd.told

    run(scenario())


def test_thousands_of_channels_are_registered_without_waiting_for_each_reply(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        broker = Broker(*((f"topic{number % 2000}", f"channel{number}") for number in range(10_000)))
        spent = time.process_time()
        async with running(lookupd, broker.peers(lookupd.address)):
            await until(lambda: len(lookupd.told) == 10_001)
            # Both sides compute in this process.
            assert time.process_time() - spent < 5

    run(scenario())


def test_pings_are_regular_and_go_on_between_changes(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, peers := Broker().peers(lookupd.address, ping_interval=0.05)):
            await peers.settled()
            while lookupd.told.count("PING") < 3:  # the changes go on meanwhile
                peers.changed("REGISTER", "t")
                await asyncio.sleep(0.01)
            assert lookupd.connections == 1

    run(scenario())


# peers that fail


def test_a_peer_that_comes_back_gets_everything_within_seconds(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, Broker(("t", "c")).peers(lookupd.address)):
            await until(lambda: lookupd.registered() == [("t", "c")])
            await lookupd.stop()
            await until(lambda: lookupd.open == 0)
            lookupd.told = []
            await lookupd.start()
            await until(lambda: lookupd.registered() == [("t", "c")])
            assert lookupd.connections == 2

    run(scenario())


def test_a_lost_connection_is_noticed_without_a_change(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, Broker(("t", "c")).peers(lookupd.address)):
            await until(lambda: lookupd.registered() == [("t", "c")])
            lookupd.hang_up()
            await until(lambda: lookupd.connections == 2 and lookupd.registered() == [("t", "c")])

    run(scenario())


def test_a_peer_may_close_between_two_commands(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()

        def answer(command: Command) -> bytes | None:
            if spelled(command) == f"REGISTER t{MAX_PIPELINED - 1}":
                asyncio.get_running_loop().call_soon(lookupd.hang_up)
            return agree(command)

        lookupd.answer = answer
        broker = Broker(*((f"t{number}", "") for number in range(2 * MAX_PIPELINED)))
        async with running(lookupd, broker.peers(lookupd.address)):
            await until(lambda: lookupd.connections == 3)

    run(scenario())
    assert "internal error" not in caplog.text


@pytest.mark.parametrize("mute", [Identify, Register, Ping])
def test_a_peer_without_a_reply_for_a_second_is_disconnected(run: Run, mute: type) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd(lambda command: None if isinstance(command, mute) else agree(command))
        await lookupd.start()
        started = time.perf_counter()
        async with running(lookupd, Broker(("t", "c")).peers(lookupd.address, ping_interval=0.1)):
            await until(lambda: lookupd.connections == 2)
            assert time.perf_counter() - started > 0.9

    run(scenario())


@pytest.mark.parametrize(
    "reply",
    [b"E_INVALID", b"E_BAD_BODY IDENTIFY missing fields", b"OK", b"[]", b"{" + b" " * MAX_BODY + b"}"],
    ids=["E_INVALID", "E_BAD_BODY", "OK", "list", "oversize"],
)
def test_an_invalid_identify_reply_ends_the_connection(run: Run, reply: bytes) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd(lambda command: encode_reply(reply))
        await lookupd.start()
        async with running(lookupd, peers := Broker(("t", "c")).peers(lookupd.address)):
            await peers.settled()
            await until(lambda: lookupd.connections == 2)
            assert lookupd.registered() == []
            assert peers.http_addresses == []

    run(scenario())


def test_a_refused_registration_is_logged_with_its_text(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, Broker(("t", ""), ("bad!", ""), ("u", "")).peers(lookupd.address)):
            await until(lambda: lookupd.connections >= 2)

    run(scenario())
    (text,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "disconnected - it replied \"E_BAD_TOPIC REGISTER topic name 'bad!' is not valid\"" in text


@pytest.mark.parametrize("unasked", [OK, b"\xff\xff\xff\xff", b"\x7f\0\0\0"], ids=["OK", "negative", "huge"])
def test_a_reply_without_a_command_ends_the_connection(run: Run, unasked: bytes) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, Broker(("t", "c")).peers(lookupd.address)):
            await until(lambda: lookupd.registered())
            await asyncio.sleep(0.05)  # until no reply is pending
            lookupd.say(unasked)
            await until(lambda: lookupd.connections == 2 and lookupd.registered())

    run(scenario())


def test_replies_to_registrations_are_read_and_ignored(run: Run) -> None:
    async def scenario() -> None:
        strange = encode_reply(b"E_WHATEVER")
        lookupd = FakeLookupd(lambda command: ABOUT_REPLY if isinstance(command, Identify) else strange)
        await lookupd.start()
        async with running(lookupd, peers := Broker(("t", "c")).peers(lookupd.address, ping_interval=0.05)):
            await until(lambda: lookupd.told.count("PING") == 3)
            peers.changed("UNREGISTER", "t")
            await until(lambda: "UNREGISTER t" in lookupd.told)
            assert lookupd.connections == 1

    run(scenario())


def test_a_peer_that_is_far_behind_is_registered_again(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        broker = Broker(("t", ""))
        async with running(lookupd, peers := broker.peers(lookupd.address)):
            await until(lambda: lookupd.registered())
            peer = peers._peers[lookupd.address]
            for number in range(3 * MAX_PENDING):
                peers.changed("REGISTER", f"t{number}")
                assert len(peer._pending) <= MAX_PENDING
            broker.registrations = [("all", "")]
            await until(lambda: lookupd.registered() == [("all", "")])
            assert lookupd.connections == 2

    run(scenario())


def test_a_silent_peer_delays_neither_the_others_nor_the_loop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_peer, "IO_TIMEOUT_S", 2 * DEADLINE)

    async def scenario() -> None:
        silent, lookupd = FakeLookupd(lambda command: None), FakeLookupd()
        await silent.start()
        await lookupd.start()
        peers = Broker(("t", "c")).peers(silent.address, "127.0.0.1:1", lookupd.address)
        async with running(silent, lookupd, peers):
            await until(lambda: lookupd.registered() == [("t", "c")])
            peers.changed("REGISTER", "u")
            await until(lambda: ("u", "") in lookupd.registered())
            assert silent.connections == 1, "nobody has given it up yet"
            assert peers.http_addresses == ["lookup.example:4161"]

    run(scenario())


def test_a_slow_name_lookup_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, go_on = socket.getaddrinfo, threading.Event()

    def slow(host: str, *arguments: int, **options: int) -> object:
        if host == "slow.example":
            go_on.wait(DEADLINE)
            raise socket.gaierror("no such name")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, peers := Broker(("t", "c")).peers("slow.example:4160", lookupd.address)):
            await until(lambda: lookupd.registered() == [("t", "c")])
            await asyncio.wait_for(peers.settled(), DEADLINE)
            go_on.set()

    asyncio.run(scenario())


def test_retries_become_rarer_and_are_not_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd(lambda command: encode_reply(b"E_INVALID"))
        await lookupd.start()
        clock = asyncio.get_running_loop().time
        began = clock()
        async with running(lookupd, Broker().peers(lookupd.address)):
            await until(lambda: lookupd.connections >= 4)
            # The delays double, and each is shortened by up to a half.
            assert clock() - began >= sum(lookup_peer.FIRST_RETRY_S * 2**n / 2 for n in (1, 2, 3))

    caplog.set_level(logging.INFO)
    run(scenario())
    lines = [record.message for record in caplog.records if "E_INVALID" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("LOOKUPD(127.0.0.1:")


def test_connecting_and_disconnecting_are_logged_once_each(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    lookupd = FakeLookupd()

    async def scenario() -> None:
        await lookupd.start()
        async with running(lookupd, Broker(("t", "c")).peers(lookupd.address)):
            await until(lambda: lookupd.registered())
            await asyncio.sleep(0.05)  # until the registration is complete
            await lookupd.stop()
            await asyncio.sleep(0.5)  # some retries
            await lookupd.start()
            await until(lambda: lookupd.registered() and lookupd.connections == 2)
            await asyncio.sleep(0.05)

    caplog.set_level(logging.INFO, lookup_peer.__name__)
    run(scenario())
    name = f"LOOKUPD({lookupd.address}): "
    connected = [name + "connected, version 1.3.0, HTTP at lookup.example:4161"]
    connected.append(name + "registered 1 topics and channels")
    lines = [record.message for record in caplog.records if record.name == lookup_peer.__name__]
    assert lines[0] == f"LOOKUP({lookupd.address}): adding peer"
    assert lines[1:3] == lines[4:] == connected
    assert lines[3].startswith(name + "disconnected - ")


# the list of peers


def test_peers_follow_the_list_of_addresses(run: Run) -> None:
    async def scenario() -> None:
        first, second, third = FakeLookupd(), FakeLookupd(), FakeLookupd()
        for lookupd in (first, second, third):
            await lookupd.start()
        async with running(first, second, third, peers := Broker(("t", "c")).peers()):
            assert peers.addresses == peers.http_addresses == []
            await peers.settled()
            peers.set_addresses([first.address])
            await until(lambda: first.registered() == [("t", "c")])
            peers.set_addresses([second.address, third.address])
            assert peers.addresses == [second.address, third.address]
            await until(lambda: second.registered() == third.registered() == [("t", "c")])
            await until(lambda: first.open == 0)
            peers.set_addresses([third.address, second.address, third.address])
            peers.changed("REGISTER", "u")
            await until(lambda: ("u", "") in second.registered() and ("u", "") in third.registered())
            assert (first.connections, second.connections, third.connections) == (1, 1, 1)
            assert ("u", "") not in first.registered()
            peers.set_addresses([])
            await until(lambda: not second.open and not third.open)
            assert peers.http_addresses == []

    run(scenario())


def test_an_address_that_was_removed_and_added_again_is_connected_once(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, peers := Broker(("t", "c")).peers(lookupd.address)):
            await until(lambda: lookupd.registered())
            peers.set_addresses([])
            peers.set_addresses([lookupd.address])
            await until(lambda: lookupd.connections == 2 and lookupd.registered() and lookupd.open == 1)

    run(scenario())


def test_an_address_without_a_port_is_logged_as_a_failure(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running(peers := Broker().peers("localhost")):
            await asyncio.wait_for(peers.settled(), DEADLINE)

    run(scenario())
    assert "LOOKUPD(localhost): disconnected - 'localhost' is not host:port" in caplog.text


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"broadcast_address": "::1", "http_port": 4161}, ["[::1]:4161"]),
        ({"broadcast_address": "", "http_port": 4161}, []),
        ({"broadcast_address": "a.example", "http_port": 0}, []),
        ({}, []),
    ],
)
def test_http_addresses_are_usable_or_left_out(
    run: Run, about: dict[str, object], expected: list[str]
) -> None:
    async def scenario() -> None:
        reply = encode_reply(json.dumps(about).encode())
        lookupd = FakeLookupd(lambda command: reply if isinstance(command, Identify) else OK)
        await lookupd.start()
        async with running(lookupd, peers := Broker(("t", "c")).peers(lookupd.address)):
            await until(lambda: lookupd.registered())
            assert peers.http_addresses == expected
            lookupd.hang_up()
            await lookupd.stop()
            assert peers.http_addresses == expected, "it may still answer, and is not forgotten"

    run(scenario())


# the end


def test_stopping_closes_the_connections_and_twice_is_safe(run: Run) -> None:
    async def scenario() -> None:
        lookupd = FakeLookupd()
        await lookupd.start()
        async with running(lookupd, peers := Broker(("t", "c")).peers(lookupd.address, "127.0.0.1:1")):
            await until(lambda: lookupd.registered())
            await peers.stop()
            await until(lambda: lookupd.open == 0)
            peers.changed("REGISTER", "t")
            peers.set_addresses([lookupd.address])
            await peers.stop()
            assert lookupd.connections == 1

    run(scenario())


def test_stopping_does_not_wait_for_a_peer_that_is_silent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_peer, "IO_TIMEOUT_S", 2 * DEADLINE)

    async def scenario() -> None:
        lookupd = FakeLookupd(lambda command: None)
        await lookupd.start()
        async with running(lookupd, peers := Broker().peers(lookupd.address)):
            await until(lambda: lookupd.told)
            await peers.stop()
            assert lookupd.connections == 1, "nobody has given it up yet"

    run(scenario())


def test_a_connect_that_is_given_up_just_as_it_succeeds_does_not_stop_the_peer() -> None:
    """SYN is sent again after one second, and the connect is given up then, too. uvloop closes such
    a connection without a word, and close() waited for that word for ever."""

    async def scenario() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        class GivenUp(lookup_peer._Link):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                connecting.cancel()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            link = GivenUp(100, asyncio.Event())
            loop = asyncio.get_running_loop()
            connecting = asyncio.ensure_future(
                loop.create_connection(lambda: link, *server.sockets[0].getsockname())
            )
            with pytest.raises(asyncio.CancelledError):
                await connecting
            async with asyncio.timeout(DEADLINE):
                await link.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
