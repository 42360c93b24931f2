"""Connections that wait for AUTH, and connections with layers: nothing is lost, reordered or left
over."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nsparq.options import NsqdOptions
from nsparq.server import connection as connection_module
from nsparq.server.auth.grants import AuthFailed, Authorization, Grant, Permission, Validity
from nsparq.server.auth.patterns import Pattern
from nsparq.server.daemon import Nsqd
from nsparq.server.outbox import MAX_UNANSWERED
from nsparq.transport.layers import MAX_PIECE
from nsparq.wire.frames import OK
from tests.server.test_connection import HeldFiles, running
from tests.support import (
    ERROR,
    RESPONSE,
    BrokerThread,
    ConnectionClosed,
    RawConnection,
    multi,
    sized,
    unique_name,
    wait_until,
)
from tests.support.certificates import certificates
from tests.support.layered import IDENTIFIER, Deflate, LayeredConnection, Snappy, Tls
from tests.support.polling import DEADLINE

COMBINATIONS = [
    pytest.param(
        {"tls": tls, inner: True} if inner else {"tls": tls}, id=f"{'tls' if tls else ''} {inner}".strip()
    )
    for tls in (False, True)
    for inner in ("", "snappy", "deflate")
    if tls or inner
]


@pytest.fixture(scope="module")
def secure() -> Iterator[BrokerThread]:
    with BrokerThread(**certificates().server_flags()) as broker:
        yield broker


def upgraded(broker: BrokerThread, layers: dict[str, bool], **fields: Any) -> LayeredConnection:
    connection = LayeredConnection(broker.address)
    context = certificates().client_context() if layers.get("tls") else None
    try:
        connection.upgrade(**{**layers, "tls": context}, **fields)
    except BaseException:
        connection.close()
        raise
    return connection


def command(line: bytes, body: bytes | None = None) -> bytes:
    return line + b"\n" + (b"" if body is None else sized(body))


def pub(topic: str, body: bytes = b"x") -> bytes:
    return command(b"PUB " + topic.encode(), body)


AUTH = command(b"AUTH", b"secret")


def bodies_of(broker: BrokerThread, topic: str) -> list[str]:
    answer = broker.request("GET", f"/topic/peek?topic={topic}&count=1000")
    return [message["body"] for message in answer.json()["messages"]] if answer.status == 200 else []


# Waiting for AUTH


def grant(*topics: str, validity: Validity | None = None) -> Grant:
    allowed = tuple(
        Authorization(Pattern(topic), (Pattern(".*"),), frozenset(Permission)) for topic in topics or (".*",)
    )
    return Grant("me", "", allowed, validity=validity)


class ScriptedAuthenticator:
    """Gives the grants in `answers` in turn, and repeats the last one. Waits until `gate` is
    open."""

    anonymous: Grant | None = None

    def __init__(self, *answers: Grant | Exception) -> None:
        self.answers = [*answers]
        self.asked = 0
        self.cancelled = 0
        self.gate = threading.Event()
        self.gate.set()

    async def authenticate(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        self.asked += 1
        try:
            while not self.gate.is_set():  # noqa: ASYNC110  # set by another thread
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reload(self) -> None:
        pass


Guarded = Callable[..., tuple[BrokerThread, ScriptedAuthenticator]]


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    with ExitStack() as stack:

        def start(*answers: Grant | Exception, **flags: Any) -> tuple[BrokerThread, ScriptedAuthenticator]:
            broker = stack.enter_context(BrokerThread(**flags))
            authenticator = ScriptedAuthenticator(*answers)
            broker.nsqd.authenticator = authenticator
            return broker, authenticator

        yield start


def expect_grant(connection: RawConnection) -> None:
    frame = connection.read_frame()
    assert frame.type == RESPONSE and json.loads(frame.data)["identity"] == "me", frame


def expired() -> Grant:
    over = Validity()
    over.is_over = True
    return grant(validity=over)


def test_commands_after_auth_are_executed_after_it_in_order(guarded: Guarded) -> None:
    broker, authenticator = guarded(grant())
    authenticator.gate.clear()
    with broker.connect() as connection:
        connection.send(AUTH + pub("t", b"1") + command(b"MPUB t", multi([b"2", b"3"])) + pub("t", b"4")[:-1])
        wait_until(lambda: authenticator.asked == 1)
        # More arrives meanwhile, in pieces of any size.
        for piece in (b"4", pub("t", b"5")[:3], pub("t", b"5")[3:], command(b"SUB t c") + command(b"RDY 10")):
            connection.send(piece)
            time.sleep(0.005)
        assert broker.topic_stats("t") is None
        connection.expect_silence(0.02)
        authenticator.gate.set()
        expect_grant(connection)
        for _ in range(5):
            connection.expect_ok()
        assert [message.body for message in connection.read_messages(5)] == [b"1", b"2", b"3", b"4", b"5"]
    assert authenticator.asked == 1


def test_a_client_whose_auth_is_being_checked_is_not_read_from(guarded: Guarded) -> None:
    broker, authenticator = guarded(grant())
    authenticator.gate.clear()
    with broker.connect() as connection:
        connection.send(AUTH)
        wait_until(lambda: authenticator.asked)
        connection.socket.setblocking(False)
        block = pub("t", b"x" * 100_000)
        sent = 0
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 0.2:
            try:
                sent += connection.socket.send(block[sent % len(block) :])
                quiet_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        (held,) = broker.nsqd.connections
        assert sum(map(len, held.inbox._received)) <= 1 << 20, "one read of the loop's at the most"
        authenticator.gate.set()
        connection.socket.settimeout(DEADLINE)
        connection.socket.sendall(block[sent % len(block) :] if sent % len(block) else b"")
        expect_grant(connection)
        for _ in range(-(-sent // len(block))):
            connection.expect_ok()


def test_after_a_failed_auth_no_further_command_is_executed(guarded: Guarded) -> None:
    for answer, error in (
        (AuthFailed("no"), "E_AUTH_FAILED AUTH failed"),
        (Grant("me", "", ()), "E_UNAUTHORIZED AUTH no authorizations found"),
    ):
        broker, authenticator = guarded(answer)
        authenticator.gate.clear()
        with broker.connect() as connection:
            connection.send(AUTH + pub("t"))
            wait_until(lambda: authenticator.asked)  # noqa: B023  # used at once
            connection.send(pub("t"))
            authenticator.gate.set()
            connection.expect_fatal(error)
        assert broker.topic_stats("t") is None


def test_a_bug_while_waiting_ends_the_connection(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    broker, _ = guarded(RuntimeError("bug"))
    with broker.connect() as connection:
        connection.send(AUTH + pub("t"))
        connection.expect_closed()
    assert broker.topic_stats("t") is None
    assert any(record.exc_info and "bug" in str(record.exc_info[1]) for record in caplog.records)


def test_a_client_that_disconnects_during_auth_leaves_nothing_behind(guarded: Guarded) -> None:
    """nsqd does not read from the client, so it notices the disconnect only after the wait."""
    broker, authenticator = guarded(grant())
    ways = (RawConnection.close, RawConnection.abort, RawConnection.end_of_stream)
    for number, leave in enumerate(ways, 1):
        authenticator.gate.clear()
        with broker.connect() as connection:
            connection.send(AUTH + pub("t"))
            wait_until(lambda: authenticator.asked == number)  # noqa: B023  # used at once
            leave(connection)
            connection.socket.close()
        authenticator.gate.set()
        wait_until(lambda: not broker.nsqd.connections)


def test_a_stopping_daemon_does_not_wait_for_auth(guarded: Guarded) -> None:
    broker, authenticator = guarded(grant())
    authenticator.gate.clear()
    with broker.connect() as connection:
        connection.send(AUTH + pub("t"))
        wait_until(lambda: authenticator.asked)
        broker.stop()
        assert authenticator.cancelled == 1
        connection.expect_closed()


def test_a_client_is_not_disconnected_while_it_waits_for_auth(guarded: Guarded) -> None:
    broker, authenticator = guarded(grant())
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        authenticator.gate.clear()
        connection.send(AUTH)
        # After twice the interval without a command it would be disconnected.
        for _ in range(3):
            assert connection.read_raw_frame().data == b"_heartbeat_"
        authenticator.gate.set()
        expect_grant(connection)
        connection.send(pub("t"))
        connection.expect_ok()


def test_an_expired_grant_is_renewed_before_the_command_is_executed(guarded: Guarded) -> None:
    broker, authenticator = guarded(expired(), grant())
    with broker.connect() as connection:
        connection.send(AUTH)
        expect_grant(connection)
        connection.send(b"".join(pub("t", b"%d" % i) for i in range(50)))
        for _ in range(50):
            connection.expect_ok()
    assert authenticator.asked == 2, "one question for all of them"
    assert bodies_of(broker, "t") == [str(i) for i in range(50)]


def test_a_grant_that_is_expired_when_it_arrives_is_requested_once_more(guarded: Guarded) -> None:
    broker, authenticator = guarded(expired(), expired(), expired(), grant())
    with broker.connect() as connection:
        connection.send(AUTH)
        expect_grant(connection)
        connection.send(b"".join(pub("t", b"%d" % i) for i in range(5)) + command(b"SUB t c"))
        for _ in range(6):
            connection.expect_ok()
    assert authenticator.asked == 4
    assert bodies_of(broker, "t") == [str(i) for i in range(5)]


def test_after_a_refused_renewal_no_further_command_is_executed(guarded: Guarded) -> None:
    broker, _ = guarded(expired(), grant("^allowed$"))
    with broker.connect() as connection:
        connection.send(AUTH)
        expect_grant(connection)
        connection.send(pub("forbidden") + pub("allowed") * 3)
        connection.expect_fatal('E_UNAUTHORIZED AUTH failed for PUB on "forbidden" ""')
    assert broker.topic_stats("allowed") is None and broker.topic_stats("forbidden") is None


def test_a_publish_with_a_known_line_waits_for_the_grant(guarded: Guarded) -> None:
    """A PUB that arrives alone, with a line that the protocol knows."""
    over = Validity()
    broker, authenticator = guarded(grant(validity=over), grant())
    with broker.connect() as connection:
        connection.send(AUTH)
        expect_grant(connection)
        connection.pub("t", b"1")
        over.is_over = True
        authenticator.gate.clear()
        connection.send(pub("t", b"2"))
        wait_until(lambda: authenticator.asked == 2)
        connection.send(pub("t", b"3"))
        time.sleep(0.01)
        connection.send(pub("t", b"4"))
        authenticator.gate.set()
        for _ in range(3):
            connection.expect_ok()
    assert bodies_of(broker, "t") == ["1", "2", "3", "4"]


@pytest.mark.parametrize("kind", ["snappy", "deflate"])
def test_auth_directly_after_identify_inside_the_new_layer(guarded: Guarded, kind: str) -> None:
    broker, authenticator = guarded(grant())
    authenticator.gate.clear()
    coding = Snappy() if kind == "snappy" else Deflate()
    wanted = json.dumps({"feature_negotiation": True, kind: True}).encode()
    with LayeredConnection(broker.address, magic=b"") as connection:
        inside = AUTH + b"".join(pub("t", b"%d" % i) for i in range(3))
        connection.send_wire(b"  V2" + command(b"IDENTIFY", wanted) + coding.encode(inside))
        wait_until(lambda: authenticator.asked)
        connection.send_wire(coding.encode(pub("t", b"3")))
        assert json.loads(connection.read_frame().data)[kind]
        if isinstance(coding, Snappy):
            connection.begin_snappy(coding)
        else:
            connection.begin_deflate(coding)
        connection.expect_ok()
        connection.expect_silence(0.02)
        authenticator.gate.set()
        expect_grant(connection)
        for _ in range(4):
            connection.expect_ok()
    assert bodies_of(broker, "t") == ["0", "1", "2", "3"]


@pytest.mark.parametrize("layers", COMBINATIONS)
def test_auth_and_further_commands_in_many_pieces_of_a_layer(
    guarded: Guarded, layers: dict[str, bool]
) -> None:
    broker, authenticator = guarded(grant(), **certificates().server_flags())
    count, body = 20, bytes(range(256)) * 100
    with upgraded(broker, layers) as connection:
        authenticator.gate.clear()
        connection.send(AUTH + b"".join(pub("t", b"%02d" % i + body) for i in range(count)))
        wait_until(lambda: authenticator.asked)
        connection.send(pub("t", b"last"))
        authenticator.gate.set()
        expect_grant(connection)
        for _ in range(count + 1):
            connection.expect_ok()
    stats = broker.topic_stats("t")
    assert stats is not None and stats["message_count"] == count + 1


# Decoding in slices


@pytest.mark.parametrize("layers", COMBINATIONS)
def test_decoding_in_slices_keeps_all_commands_in_order(
    secure: BrokerThread, layers: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "EXECUTE_S", 0.0)
    topic = unique_name("slices")
    sent = [b"%d" % i + b"x" * (i * 7919 % 50_000) for i in range(100)]
    with upgraded(secure, layers) as connection:
        # Two writes: the second arrives while the first is being decoded.
        connection.send(b"".join(pub(topic, body) for body in sent[:50]))
        connection.send(
            b"".join(pub(topic, body) for body in sent[50:]) + command(b"SUB " + topic.encode() + b" c")
        )
        for _ in range(101):
            connection.expect_ok()
        connection.rdy(200)
        assert [message.body for message in connection.read_messages(100)] == sent


def written(broker: BrokerThread) -> int:
    """Bytes that clients have not read."""

    def look(_: object) -> int:
        return sum(one._transport.get_write_buffer_size() for one in broker.nsqd.connections)

    return broker.call(look)


def test_a_compressed_flood_of_commands_waits_until_its_replies_are_read() -> None:
    count = 300_000
    bomb = Deflate(9).encode(command(b"FIN 0123456789abcdef") * count)
    with BrokerThread() as broker, LayeredConnection(broker.address) as connection:
        connection.upgrade(deflate=True, heartbeat_interval=60_000)
        connection.sub("t", "c")
        connection.send_wire(bomb)
        most = 0
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 0.5:
            now = written(broker)
            if now > most:
                most, quiet_since = now, time.monotonic()
            time.sleep(0.005)
        assert most < 4 << 20, "the answers to a piece or two beyond the limit"
        found = 0
        while found < count:
            assert connection.read_frame().type == ERROR
            found += 1


def test_a_compressed_flood_of_publishes_waits_for_the_disk(tmp_path: Path) -> None:
    files = HeldFiles()
    count = 30 * MAX_UNANSWERED
    layer = Deflate(9)
    bomb = layer.encode(pub("t") * count)

    async def scenario() -> None:
        options = NsqdOptions(
            tcp_address="127.0.0.1:0",
            http_address="",
            https_address="",
            data_path=str(tmp_path),
            durability="fsync",
        )
        nsqd = Nsqd(options, files=files)
        await nsqd.start()
        try:
            reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
            wanted = json.dumps({"feature_negotiation": True, "deflate": True}).encode()
            writer.write(b"  V2" + command(b"IDENTIFY", wanted) + bomb)
            size = struct.unpack(">i", await reader.readexactly(4))[0]
            await reader.readexactly(size)
            (connection,) = nsqd.connections
            most = 0
            for _ in range(50):
                await asyncio.sleep(0.01)
                most = max(most, connection.outbox.unanswered)
            # A piece is always decoded whole.
            assert most < MAX_UNANSWERED + MAX_PIECE // len(pub("t")) + 1
            files.go.set()
            inflate = zlib.decompressobj(-15)
            found = b""
            while len(found) < (count + 1) * len(OK):
                found += inflate.decompress(await reader.read(1 << 20))
            assert found == OK * (count + 1)
            writer.close()
            await writer.wait_closed()
        finally:
            files.go.set()
            await nsqd.stop()

    async def main() -> None:
        async with asyncio.timeout(DEADLINE):
            await scenario()

    asyncio.run(main())


# The handshake's time


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_an_unfinished_handshake_ends_the_connection(
    secure: BrokerThread, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_S", 0.1)
    hello, _ = Tls(certificates().client_context(), "localhost").shake(b"")
    with LayeredConnection(secure.address) as connection:
        connection.identify(tls_v1=True)
        connection.send_wire(hello[: int(len(hello) * part)])
        found = connection.read_to_end()
        assert found.endswith(b"E_IDENTIFY_FAILED IDENTIFY failed TLS handshake timed out")
    wait_until(lambda: not secure.nsqd.connections)


def test_the_handshake_timer_ignores_a_finished_handshake(secure: BrokerThread) -> None:
    def only_one() -> Any:
        wait_until(lambda: len(secure.nsqd.connections) == 1)
        return next(iter(secure.nsqd.connections))

    with upgraded(secure, {"tls": True}) as connection:
        served = only_one()
        secure.call_daemon(lambda _: served._check_handshake())
        connection.pub("t", b"x")
    wait_until(lambda: not secure.nsqd.connections)
    # A closed connection has no timer any more.
    with LayeredConnection(secure.address) as connection:
        connection.identify(tls_v1=True)
        served = only_one()
        timer = wait_until(lambda: served._handshake_timer)
    wait_until(lambda: not secure.nsqd.connections)
    wait_until(timer.cancelled)
    assert served._handshake_timer is None


def test_nothing_is_sent_before_the_handshake_is_finished(secure: BrokerThread) -> None:
    with LayeredConnection(secure.address) as connection:
        connection.identify(tls_v1=True, heartbeat_interval=1000)
        # One heartbeat would be due.
        with pytest.raises(TimeoutError):
            connection.read_raw_frame(1.3)
        connection.begin_tls(certificates().client_context())
        connection.expect_ok()
        connection.pub("t", b"x")


# Identifying twice, and too late


@pytest.mark.parametrize("again", [{"snappy": True}, {"tls_v1": True}, {"deflate": True}])
def test_layers_can_be_negotiated_once(secure: BrokerThread, again: dict[str, bool]) -> None:
    with upgraded(secure, {"tls": True, "snappy": True}) as connection:
        connection.command("IDENTIFY", body=json.dumps({"feature_negotiation": True, **again}).encode())
        assert connection.read_frame().type == RESPONSE
        connection.expect_fatal("E_IDENTIFY_FAILED IDENTIFY failed the layers are up already")


def test_a_second_identify_without_layers_keeps_the_first_ones(secure: BrokerThread) -> None:
    with upgraded(secure, {"deflate": True}) as connection:
        connection.identify(client_id="other")
        connection.pub("t", b"x")


def test_layers_cannot_start_while_publishes_are_unanswered(tmp_path: Path) -> None:
    files = HeldFiles()
    wanted = json.dumps({"feature_negotiation": True, "snappy": True}).encode()

    async def scenario() -> None:
        async with running(tmp_path, files) as nsqd:
            reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
            writer.write(b"  V2" + pub("t") + pub("t") + command(b"IDENTIFY", wanted))
            await asyncio.sleep(0.05)
            files.go.set()
            found = await reader.read(-1)
            assert found.startswith(OK * 2)
            assert b'"snappy":true' in found
            assert found.endswith(b"E_IDENTIFY_FAILED IDENTIFY failed publishes are unanswered")
            writer.close()
            await writer.wait_closed()

    asyncio.run(scenario())


# Frames that are sent together


def test_frames_of_one_turn_are_encoded_together(secure: BrokerThread) -> None:
    with upgraded(secure, {"snappy": True}) as connection:
        connection.sub("together", "c", rdy=500)
        assert connection.snappy is not None
        before = len(connection.snappy.chunks)
        secure.publish("together", *[b"x" * 10] * 500)
        connection.read_messages(500)
        assert len(connection.snappy.chunks) - before <= 3


@pytest.mark.parametrize("layers", COMBINATIONS)
def test_more_frames_than_fit_are_sent_before_the_turn_ends(
    secure: BrokerThread, layers: dict[str, bool]
) -> None:
    topic = unique_name("large")
    sent = [b"%d" % i + bytes(range(256)) * 400 for i in range(30)]
    with upgraded(secure, layers) as connection:
        connection.sub(topic, "c", rdy=100)
        for body in sent:
            secure.publish(topic, body)
        assert sorted(message.body for message in connection.read_messages(30)) == sorted(sent)


# The end


def rest_of(connection: LayeredConnection) -> None:
    """Read until the server closes. No further frame may come."""
    with pytest.raises((ConnectionClosed, ConnectionResetError)):
        connection.read_frame()


@pytest.mark.parametrize("layers", COMBINATIONS)
def test_the_last_error_is_sent_through_the_layers(secure: BrokerThread, layers: dict[str, bool]) -> None:
    with upgraded(secure, layers) as connection:
        connection.send(pub("t") + command(b"NONSENSE") + pub("after"))
        connection.expect_ok()
        connection.expect_error("E_INVALID invalid command NONSENSE")
        rest_of(connection)
        assert connection.tls is None or connection.tls.is_ended
    assert secure.topic_stats("after") is None


@pytest.mark.parametrize("layers", COMBINATIONS)
def test_a_stopping_daemon_closes_the_layers(layers: dict[str, bool]) -> None:
    with BrokerThread(**certificates().server_flags()) as broker, upgraded(broker, layers) as connection:
        connection.sub("t", "c", rdy=10)
        broker.publish("t", b"x")
        broker.stop()
        assert connection.read_message().body == b"x"
        rest_of(connection)
        assert connection.tls is None or connection.tls.is_ended


def test_a_daemon_may_stop_while_publishers_wait_for_the_disk(tmp_path: Path) -> None:
    files = HeldFiles()

    async def scenario() -> None:
        async with running(tmp_path, files) as nsqd:
            reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
            writer.write(b"  V2" + pub("t") * 10)
            while not nsqd.broker.topics:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.001)
            # These wait for the fsync after the one that is under way.
            writer.write(pub("t") * 10)
            while nsqd.broker.topics["t"].message_count < 20:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.001)
            asyncio.get_running_loop().call_later(0.1, files.go.set)
            await nsqd.stop()
            writer.close()
            await writer.wait_closed()
            assert len(await reader.read(-1)) % len(OK) == 0

    asyncio.run(scenario())
    with BrokerThread(tmp_path) as broker:
        stats = broker.topic_stats("t")
        assert stats is not None and stats["depth"] == 20


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_daemon_may_stop_in_the_middle_of_a_handshake(part: float) -> None:
    hello, _ = Tls(certificates().client_context(), "localhost").shake(b"")
    with (
        BrokerThread(**certificates().server_flags()) as broker,
        LayeredConnection(broker.address) as connection,
    ):
        connection.identify(tls_v1=True)
        connection.send_wire(hello[: int(len(hello) * part)])
        time.sleep(0.02)
        broker.stop()


@pytest.mark.parametrize(
    ("layers", "garbage"),
    [
        ({"snappy": True}, IDENTIFIER + b"\x00\x05\x00\x00abcde"),
        ({"deflate": True}, b"\xff\xff\xff"),
        ({"tls": True}, b"\x17\x03\x03\x00\x10" + b"z" * 16),
    ],
    ids=["snappy", "deflate", "tls"],
)
def test_bytes_that_a_layer_cannot_decode_end_the_connection_without_plain_text(
    secure: BrokerThread, layers: dict[str, bool], garbage: bytes
) -> None:
    with upgraded(secure, layers) as connection:
        connection.send(pub("before"))
        connection.expect_ok()
        begin = len(connection.wire)
        connection.send_wire(garbage)
        with pytest.raises(Exception):  # noqa: B017  # the layer's own error, or the end
            connection.read_frame()
        assert b"E_" not in connection.wire[begin:]
    wait_until(lambda: not secure.nsqd.connections)


@pytest.mark.parametrize("kind", ["tls", "deflate"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_end_of_the_inner_stream_ends_the_connection(
    secure: BrokerThread, kind: str, is_whole: bool
) -> None:
    topic = f"end_{kind}_{is_whole}".lower()
    with upgraded(secure, {kind: True}) as connection:
        said = pub(topic) if is_whole else pub(topic, b"xyz")[:-1]
        if kind == "tls":
            assert connection.tls is not None
            goodbye = connection.tls.encode(said)
            with pytest.raises(Exception):  # noqa: B017  # it waits for the answer, which is ours to see
                connection.tls.tls.unwrap()
            goodbye += connection.tls._outgoing.read()
        else:
            layer = connection._codings[0]
            assert isinstance(layer, Deflate)
            goodbye = layer._compressor.compress(said) + layer._compressor.flush(zlib.Z_FINISH)
        connection.send_wire(goodbye)
        if kind == "deflate":
            if is_whole:
                connection.expect_ok()
            else:
                connection.expect_error("E_BAD_MESSAGE PUB failed to read message body")
            rest_of(connection)
    stats = secure.topic_stats(topic)
    assert (stats is not None) == is_whole
    wait_until(lambda: not secure.nsqd.connections)
