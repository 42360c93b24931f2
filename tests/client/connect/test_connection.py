"""One connection to an nsqd: the handshake, the events it reports, and all ways it can end."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nsparq.client.config import Config
from nsparq.client.connect.connection import FLUSH_COMMANDS, Connection, checked_addresses
from nsparq.client.connect.handshake import Handshake
from nsparq.client.connect.secret import reason_to_withhold
from nsparq.client.errors import ConnectFailed, reason_of
from nsparq.wire import client as wire
from nsparq.wire.client import Received
from tests.support import aio
from tests.support.aio import run, until
from tests.support.certificates import certificates, issue
from tests.support.scripted_nsqd import RESPONSE, Peer, ScriptedNsqd, frame, message_frame

pytestmark = pytest.mark.usefixtures("any_loop")

HEARTBEAT = frame(RESPONSE, b"_heartbeat_")


class Recorder:
    """A listener that records."""

    def __init__(self) -> None:
        self.messages: list[Received] = []
        self.responses: list[bytes] = []
        self.errors: list[str] = []
        self.ends: list[Exception | None] = []
        self.writable_count = 0

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None:
        self.messages += messages

    def on_response(self, connection: Connection, data: bytes, count: int) -> None:
        self.responses += [data] * count

    def on_error(self, connection: Connection, text: str) -> None:
        self.errors.append(text)

    def on_closed(self, connection: Connection, reason: Exception | None) -> None:
        self.ends.append(reason)

    def on_writable(self, connection: Connection) -> None:
        self.writable_count += 1


async def connect(
    nsqd: ScriptedNsqd, listener: Recorder | None = None, **options: Any
) -> tuple[Connection, Peer]:
    connection = await Connection.open(nsqd.address, Config(**options), listener or Recorder())
    return connection, await nsqd.peer(len(nsqd.peers))


async def ended(connection: Connection) -> None:
    connection.close()
    await connection.closed.wait()


async def refusal(address: str, **options: Any) -> str:
    """The error of a failed connect."""
    recorder = Recorder()
    with pytest.raises(ConnectFailed) as caught:
        await Connection.open(address, Config(**options), recorder)
    await asyncio.sleep(0.01)
    assert recorder.ends == [], "what never was need not end"
    return str(caught.value)


# Set-up


def test_it_sends_identify_and_uses_the_reply() -> None:
    async def main() -> None:
        reply = {"max_rdy_count": 7, "msg_timeout": 1500, "version": "1.2.1"}
        async with ScriptedNsqd(reply) as nsqd:
            connection, peer = await connect(nsqd, client_id="me", msg_timeout=1.5)
            assert peer.commands == ["IDENTIFY"]
            assert json.loads(peer.bodies[0]) == Config(client_id="me", msg_timeout=1.5).identify()
            assert (connection.max_rdy_count, connection.msg_timeout) == (7, 1.5)
            assert str(connection) == nsqd.address
            await ended(connection)

    run(main())


@pytest.mark.parametrize("value", [None, "many", -1, 0, [], 1.5, True])
def test_invalid_numbers_in_the_reply_are_ignored(value: object) -> None:
    async def main() -> None:
        async with ScriptedNsqd({"max_rdy_count": value, "msg_timeout": value}) as nsqd:
            connection, _ = await connect(nsqd)
            assert (connection.max_rdy_count, connection.msg_timeout) == (2500, 60)
            await ended(connection)

    run(main())


def test_numbers_that_are_too_large_are_limited() -> None:
    async def main() -> None:
        async with ScriptedNsqd({"max_rdy_count": 10**400, "msg_timeout": 10**400}) as nsqd:
            connection, _ = await connect(nsqd)
            assert (connection.max_rdy_count, connection.msg_timeout) == (2**31 - 1, (2**31 - 1) / 1000)
            await ended(connection)

    run(main())


def test_a_compression_level_that_is_too_high_is_limited() -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as nsqd:
            opening = asyncio.create_task(Connection.open(nsqd.address, Config(deflate=True), Recorder()))
            peer = await nsqd.peer()
            compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            confirmed = compressor.compress(frame(RESPONSE, b"OK")) + compressor.flush(zlib.Z_SYNC_FLUSH)
            peer.send_response(b'{"deflate": true, "deflate_level": 99}')
            peer.send_bytes(confirmed)
            await ended(await opening)

    run(main())


@pytest.mark.parametrize("reply", [b'{"a":' + b"[" * 100_000, b'{"a":' + b"1" * 5000 + b"}", b'{"a":"\xff"}'])
def test_a_reply_that_cannot_be_parsed_is_a_connect_failure(reply: bytes) -> None:
    async def main() -> None:
        async with ScriptedNsqd(reply) as nsqd:
            assert "invalid reply to IDENTIFY: b'{" in await refusal(nsqd.address)
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


@pytest.mark.parametrize("error", [ValueError("no"), OverflowError("no"), RecursionError("no")])
def test_whatever_an_odd_reply_raises_is_a_connect_failure(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise error

    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            monkeypatch.setattr(Handshake, "_upgrade", fail)
            assert await refusal(nsqd.address) == f"{nsqd.address}: no"
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_a_server_without_negotiation_is_accepted() -> None:
    async def main() -> None:
        async with ScriptedNsqd(b"OK") as nsqd:
            connection, _ = await connect(nsqd, deflate=True, msg_timeout=5)
            assert (connection.max_rdy_count, connection.msg_timeout) == (2500, 5)
            await ended(connection)

    run(main())


@pytest.mark.parametrize("reply", [b"OK", {}])
def test_a_server_without_tls_is_refused_if_tls_is_wanted(reply: Any) -> None:
    async def main() -> None:
        async with ScriptedNsqd(reply) as nsqd:
            assert "the server does not offer TLS" in await refusal(nsqd.address, tls_v1=True)

    run(main())


def test_a_refusal_has_the_text_of_the_server() -> None:
    async def main() -> None:
        async with ScriptedNsqd("E_BAD_BODY IDENTIFY heartbeat interval (100) is invalid") as nsqd:
            text = await refusal(nsqd.address)
            assert text.endswith("IDENTIFY failed: E_BAD_BODY IDENTIFY heartbeat interval (100) is invalid")

    run(main())


def test_a_reply_that_is_not_json_is_in_the_error() -> None:
    async def main() -> None:
        async with ScriptedNsqd(b"{oops") as nsqd:
            assert "invalid reply to IDENTIFY: b'{oops'" in await refusal(nsqd.address)

    run(main())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "unexpected HTTP response, a nsqd TCP endpoint is required"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "a frame of type"),
        (message_frame("1"), "a message before the reply to IDENTIFY"),
        (b"", "the server closed the connection"),
        (frame(RESPONSE, b"OK")[:6], "the server closed the connection"),
    ],
)
def test_servers_other_than_nsqd_are_recognised(data: bytes, text: str) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1000)
            writer.write(data)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert text in await refusal(f"127.0.0.1:{port}")

    run(main())


def test_heartbeats_are_answered_during_the_handshake() -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as nsqd:
            opening = asyncio.create_task(Connection.open(nsqd.address, Config(), Recorder()))
            peer = await nsqd.peer()
            peer.send_bytes(HEARTBEAT + HEARTBEAT)
            await until(lambda: peer.nop_count == 2)
            peer.send_response(b"OK")
            await ended(await opening)

    run(main())


def test_frames_directly_after_the_handshake_are_not_lost() -> None:
    async def main() -> None:
        recorder = Recorder()
        async with ScriptedNsqd(lambda _: None) as nsqd:
            opening = asyncio.create_task(Connection.open(nsqd.address, Config(), recorder))
            peer = await nsqd.peer()
            peer.send_bytes(frame(RESPONSE, b"OK") + frame(RESPONSE, b"more") + message_frame("1")[:20])
            connection = await opening
            assert recorder.responses == [b"more"]
            peer.send_bytes(message_frame("1")[20:])
            await until(lambda: recorder.messages)
            await ended(connection)

    run(main())


def test_garbage_directly_after_the_handshake_ends_the_connection() -> None:
    async def main() -> None:
        recorder = Recorder()
        async with ScriptedNsqd(lambda _: None) as nsqd:
            opening = asyncio.create_task(Connection.open(nsqd.address, Config(), recorder))
            (await nsqd.peer()).send_bytes(frame(RESPONSE, b"OK") + frame(9, b""))
            with pytest.raises(ConnectFailed, match="a frame of type 9"):
                await opening
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_a_port_where_nobody_listens() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        assert await refusal(f"127.0.0.1:{port}") == f"127.0.0.1:{port}: Connection refused"

    run(main())


def test_connecting_ends_after_dial_timeout() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
            address = "{}:{}".format(*server.getsockname())
            # The accept queue is full: connections are neither accepted nor refused.
            crowd = [socket.socket() for _ in range(3)]
            for one in crowd:
                one.setblocking(False)
                one.connect_ex(server.getsockname())
            try:
                began = loop.time()
                assert await refusal(address, dial_timeout=0.1) == f"{address}: timed out"
                assert 0.1 <= loop.time() - began < 0.2
            finally:
                for one in crowd:
                    one.close()

    run(main(), timeless=True)


def test_a_silent_server_fails_after_handshake_timeout() -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as nsqd:
            assert await refusal(nsqd.address, handshake_timeout=0.1) == f"{nsqd.address}: timed out"
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_cancelled_during_the_handshake_it_leaves_nothing_open() -> None:
    async def main() -> None:
        async with ScriptedNsqd(auth=lambda _: None, identify={"auth_required": True}) as nsqd:
            for turns in range(12):
                recorder, config = Recorder(), Config(auth_secret="s")
                opening = asyncio.create_task(Connection.open(nsqd.address, config, recorder))
                for _ in range(turns):
                    await asyncio.sleep(0)
                opening.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await opening
                await until(lambda: all(peer.is_ended for peer in nsqd.peers))
                assert recorder.ends == []

    run(main())


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("a" * 70 + ".example:4150", "too long"),
        ("/nowhere/nsqd.sock", "No such file or directory"),
    ],
)
def test_an_impossible_address_is_a_connect_failure(address: str, text: str) -> None:
    assert text in run(refusal(address))


def test_addresses_are_host_and_port_or_a_path() -> None:
    assert checked_addresses(["a:1", "[::1]:2", "/run/nsqd.sock", "a:1"]) == [
        "a:1",
        "[::1]:2",
        "/run/nsqd.sock",
    ]
    for wrong in ("localhost", "", "127.0.0.1:", "http:", ":4150", "h:0", "h:65536"):
        with pytest.raises(ValueError, match="is not host:port"):
            checked_addresses([wrong])


def test_a_unix_socket_is_connected_to_by_its_path(tmp_path: Path) -> None:
    async def main() -> None:
        nsqd = ScriptedNsqd()
        path = str(tmp_path / "nsqd.sock")
        async with await asyncio.start_unix_server(nsqd._serve, path):
            connection = await Connection.open(path, Config(), Recorder())
            assert str(connection) == path
            await ended(connection)
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_the_local_address_is_used() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            connection, peer = await connect(nsqd, local_addr="127.0.0.2:0")
            assert peer._writer.get_extra_info("peername")[0] == "127.0.0.2"
            await ended(connection)

    run(main())


# AUTH


def test_the_secret_is_sent_if_the_server_asks_for_it() -> None:
    async def main() -> None:
        async with ScriptedNsqd({"auth_required": True}) as nsqd:
            connection, peer = await connect(nsqd, auth_secret="xyzzy")
            assert (peer.commands, peer.bodies[1]) == (["IDENTIFY", "AUTH"], b"xyzzy")
            await ended(connection)

    run(main())


def test_the_secret_is_not_sent_if_the_server_does_not_ask() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            connection, peer = await connect(nsqd, auth_secret="xyzzy")
            assert peer.commands == ["IDENTIFY"]
            await ended(connection)

    run(main())


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all servers as remote, and forget earlier warnings: ports are reused."""
    monkeypatch.setattr("nsparq.client.connect.secret._is_local", lambda host: False)
    monkeypatch.setattr("nsparq.client.connect.secret._warned_of", set())


def warnings_of_secrets(caplog: pytest.LogCaptureFixture) -> int:
    return sum("auth secret is sent without TLS" in record.getMessage() for record in caplog.records)


@pytest.mark.usefixtures("elsewhere")
def test_a_secret_without_tls_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with ScriptedNsqd({"auth_required": True}) as nsqd:
            for _ in range(3):
                connection, peer = await connect(nsqd, auth_secret="xyzzy")
                assert peer.commands == ["IDENTIFY", "AUTH"]
                await ended(connection)

    run(main())
    assert warnings_of_secrets(caplog) == 1
    assert "xyzzy" not in caplog.text


@pytest.mark.usefixtures("elsewhere")
def test_a_secret_can_be_withheld_without_tls() -> None:
    async def main() -> None:
        async with ScriptedNsqd({"auth_required": True}) as nsqd:
            text = await refusal(nsqd.address, auth_secret="xyzzy", auth_requires_tls=True)
            assert "requires AUTH, but tls_v1 is not set" in text
            assert nsqd.commands == ["IDENTIFY"]

    run(main())


@pytest.mark.usefixtures("elsewhere")
def test_with_tls_the_secret_is_sent_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with ScriptedNsqd({"auth_required": True}, tls=server_context()) as nsqd:
            for requires in (False, True):
                connection, peer = await connect(
                    nsqd,
                    tls_v1=True,
                    tls_insecure_skip_verify=True,
                    auth_secret="xyzzy",
                    auth_requires_tls=requires,
                )
                assert peer.commands == ["IDENTIFY", "AUTH"]
                await ended(connection)

    run(main())
    assert warnings_of_secrets(caplog) == 0


def test_on_this_machine_a_secret_needs_no_tls(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with ScriptedNsqd({"auth_required": True}) as nsqd:
            connection, peer = await connect(nsqd, auth_secret="xyzzy", auth_requires_tls=True)
            assert peer.commands == ["IDENTIFY", "AUTH"]
            await ended(connection)

    run(main())
    assert warnings_of_secrets(caplog) == 0


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.5", False),
        ("fe80::1%eth0", False),
        ("nsqd.example", False),
    ],
)
def test_local_hosts_are_recognised(host: str, is_here: bool) -> None:
    config = Config(auth_requires_tls=True)
    assert bool(reason_to_withhold(config, f"{host}:4150", host, is_encrypted=False)) is not is_here


def test_only_named_servers_get_the_secret() -> None:
    async def main() -> None:
        async with ScriptedNsqd({"auth_required": True}) as nsqd:
            for scope in ((), ("10.0.0.0/8", "*.example.com")):
                text = await refusal(nsqd.address, auth_secret="xyzzy", auth_secret_for=scope)
                assert "requires AUTH, but auth_secret_for does not include it" in text
            assert set(nsqd.commands) == {"IDENTIFY"}
            connection, peer = await connect(nsqd, auth_secret="xyzzy", auth_secret_for=("127.0.0.1",))
            assert peer.commands[-2:] == ["IDENTIFY", "AUTH"]
            await ended(connection)

    run(main())


def test_without_a_secret_the_error_names_the_option() -> None:
    async def main() -> None:
        async with ScriptedNsqd({"auth_required": True}) as nsqd:
            assert "requires AUTH, but auth_secret is not set" in await refusal(nsqd.address)

    run(main())


def test_a_refused_secret_has_the_text_of_the_server() -> None:
    async def main() -> None:
        async with ScriptedNsqd({"auth_required": True}, auth="E_AUTH_FAILED AUTH failed") as nsqd:
            text = await refusal(nsqd.address, auth_secret="no")
            assert text.endswith("AUTH failed: E_AUTH_FAILED AUTH failed")

    run(main())


# TLS


def server_context(tmp_path: Path | None = None, *hosts: str) -> ssl.SSLContext:
    found = certificates()
    pair = issue(tmp_path, "other", signer=found.ca, hosts=hosts) if tmp_path else found.server
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    return context


def test_tls_with_a_certificate_of_the_authority_given() -> None:
    async def main() -> None:
        async with ScriptedNsqd(tls=server_context()) as nsqd:
            recorder = Recorder()
            connection, peer = await connect(
                nsqd, recorder, tls_v1=True, tls_root_ca_file=str(certificates().ca.cert)
            )
            connection.write(wire.sub("t", "ch"))
            await until(lambda: recorder.responses == [b"OK"])
            peer.send_message("1", b"x" * 200_000)
            await until(lambda: recorder.messages)
            assert len(recorder.messages[0][3]) == 200_000
            await ended(connection)

    run(main())


def test_a_server_that_is_not_trusted_is_refused_and_told_so() -> None:
    async def main() -> None:
        async with ScriptedNsqd(tls=server_context()) as nsqd:
            text = await refusal(nsqd.address, tls_v1=True)
            assert "TLS: the server's certificate: unable to get local issuer certificate" in text
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with ScriptedNsqd(tls=server_context(tmp_path, "nsqd.example", "127.0.0.9")) as nsqd:
            ca = str(certificates().ca.cert)
            text = await refusal(nsqd.address, tls_v1=True, tls_root_ca_file=ca)
            assert "IP address mismatch, certificate is not valid for '127.0.0.1'" in text
            named = nsqd.address.replace("127.0.0.1", "localhost")
            text = await refusal(named, tls_v1=True, tls_root_ca_file=ca)
            assert "Hostname mismatch, certificate is not valid for 'localhost'" in text

    run(main())


def test_checks_can_be_switched_off(tmp_path: Path) -> None:
    async def main() -> None:
        async with ScriptedNsqd(tls=server_context(tmp_path, "nsqd.example")) as nsqd:
            connection, _ = await connect(nsqd, tls_v1=True, tls_insecure_skip_verify=True)
            await ended(connection)

    run(main())


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        missing = str(tmp_path / "missing.pem")
        async with ScriptedNsqd(tls=server_context()) as nsqd:
            text = await refusal(nsqd.address, tls_v1=True, tls_root_ca_file=missing)
            assert f"TLS: tls_root_ca_file {missing}: No such file or directory" in text
            text = await refusal(nsqd.address, tls_v1=True, tls_cert=missing, tls_key="key.pem")
            assert f"TLS: tls_cert {missing}, tls_key key.pem: No such file or directory" in text

    run(main())


def test_over_a_unix_socket_there_is_an_authority_to_check_but_no_name(tmp_path: Path) -> None:
    async def main() -> None:
        nsqd = ScriptedNsqd(tls=server_context(tmp_path, "nsqd.example"))
        path = str(tmp_path / "nsqd.sock")
        async with await asyncio.start_unix_server(nsqd._serve, path):
            assert "unable to get local issuer certificate" in await refusal(path, tls_v1=True)
            config = Config(tls_v1=True, tls_root_ca_file=str(certificates().ca.cert))
            await ended(await Connection.open(path, config, Recorder()))
            await until(lambda: all(peer.is_ended for peer in nsqd.peers))

    run(main())


def test_the_end_inside_tls_is_an_end() -> None:
    async def main() -> None:
        async with ScriptedNsqd(tls=server_context()) as nsqd:
            recorder = Recorder()
            _, peer = await connect(nsqd, recorder, tls_v1=True, tls_insecure_skip_verify=True)
            peer.close()
            await until(lambda: recorder.ends)
            assert "the server ended the connection" in str(recorder.ends[0])

    run(main())


# What it reports


def test_frames_are_reported_in_order_and_heartbeats_are_answered() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            recorder = Recorder()
            connection, peer = await connect(nsqd, recorder)
            data = message_frame("1") + HEARTBEAT + message_frame("2") + frame(RESPONSE, b"CLOSE_WAIT")
            for byte in data:
                peer.send_bytes(bytes([byte]))
            peer.send_error("E_FIN_FAILED FIN 1 failed")
            await until(lambda: recorder.errors)
            assert [message_id[-1:] for _, _, message_id, _, _ in recorder.messages] == [b"1", b"2"]
            assert (recorder.responses, recorder.errors) == ([b"CLOSE_WAIT"], ["E_FIN_FAILED FIN 1 failed"])
            await until(lambda: peer.nop_count == 1)
            await ended(connection)
            assert recorder.ends == [None]

    run(main())


def test_commands_of_a_turn_are_sent_together() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            connection, peer = await connect(nsqd)
            sent: list[bytes] = []
            send_now = connection.send_now

            def note(data: bytes) -> None:
                sent.append(data)
                send_now(data)

            connection.send_now = note  # type: ignore[method-assign]
            for count in range(5):
                connection.send_rdy(count)
            assert sent == []
            await until(lambda: len(peer.commands) == 6)
            assert len(sent) == 1
            for count in range(FLUSH_COMMANDS):
                connection.send_rdy(count)
            assert len(sent) == 2, "so many do not wait for the end of the turn"
            await ended(connection)

    run(main())


def test_a_frame_longer_than_max_msg_size_ends_it() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            recorder = Recorder()
            _, peer = await connect(nsqd, recorder, max_msg_size=500)
            peer.send_bytes(message_frame("1") + message_frame("2", b"x" * 500))
            await until(lambda: recorder.ends)
            assert "a frame of 530 bytes is longer than 500" in str(recorder.ends[0])
            assert len(recorder.messages) == 1, "what came before it counts"

    run(main())


# Ends


def test_the_end_is_reported_once_with_its_reason() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            recorder = Recorder()
            connection, peer = await connect(nsqd, recorder)
            peer.close()
            await until(lambda: recorder.ends)
            assert "the server closed the connection" in str(recorder.ends[0])
            assert connection.is_closing and connection.closed.is_set()
            # None of this has an effect any more.
            connection.write(wire.NOP)
            connection.close()
            connection.abort()
            await asyncio.sleep(0.02)
            assert len(recorder.ends) == 1

    run(main())


@pytest.mark.parametrize("with_reset", [False, True])
def test_an_end_in_the_middle_of_a_frame_is_an_end(with_reset: bool) -> None:
    async def main() -> None:
        for length in (1, 8, 33):
            async with ScriptedNsqd() as nsqd:
                recorder = Recorder()
                connection, peer = await connect(nsqd, recorder)
                peer.send_bytes(message_frame("1") + message_frame("2")[:length])
                await until(lambda found=recorder: found.messages)
                await asyncio.sleep(0.01)
                peer.abort() if with_reset else peer.close()
                await until(lambda found=recorder: found.ends)
                assert isinstance(recorder.ends[0], ConnectionError)
                assert len(recorder.messages) == 1

    run(main())


def test_a_silent_server_is_disconnected_after_read_timeout() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            recorder = Recorder()
            loop = asyncio.get_running_loop()
            began = loop.time()
            _, peer = await connect(nsqd, recorder, read_timeout=1, heartbeat_interval=0.5)
            await asyncio.sleep(0.6)
            peer.send_bytes(HEARTBEAT)
            await until(lambda: recorder.ends)
            assert 1.59 < loop.time() - began < 2.1
            assert str(recorder.ends[0]) == "the server sent nothing for 1 s"

    run(main(), timeless=True)


def test_without_heartbeats_a_server_may_be_silent() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            recorder = Recorder()
            connection, _ = await connect(nsqd, recorder, read_timeout=0.1, heartbeat_interval=-1)
            await asyncio.sleep(0.4)
            assert recorder.ends == []
            await ended(connection)

    run(main(), timeless=True)


def test_a_server_that_reads_nothing_is_disconnected_after_write_timeout() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            recorder = Recorder()
            connection, peer = await connect(nsqd, recorder, write_timeout=0.2)
            peer.is_reading = False
            connection.write(wire.NOP)
            await asyncio.sleep(0.05)
            assert connection.is_writable
            connection.write(wire.pub(b"PUB t", bytes(32 << 20)))
            await until(lambda: not connection.is_writable)
            began = asyncio.get_running_loop().time()
            await until(lambda: recorder.ends)
            assert 0.19 < asyncio.get_running_loop().time() - began < 0.5
            assert str(recorder.ends[0]) == "the server read nothing for 0.2 s"

    run(main(), timeless=True)


def test_a_server_that_reads_slowly_stays_connected() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            recorder = Recorder()
            connection, peer = await connect(nsqd, recorder, write_timeout=0.5)
            peer.is_reading = False
            connection.write(wire.pub(b"PUB t", bytes(16 << 20)))
            transport: Any = peer._writer.transport
            for _ in range(20):
                await asyncio.sleep(0.05)
                transport.resume_reading()
                peer._reader._transport = None  # type: ignore[attr-defined]  # it would pause and never resume
                peer.is_reading = True
                await asyncio.sleep(0.002)
                transport.pause_reading()
            assert recorder.ends == []
            transport.resume_reading()
            await until(lambda: recorder.responses == [b"OK"])
            assert recorder.writable_count > 0
            await ended(connection)

    run(main())


def test_close_sends_everything_that_was_written() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            recorder = Recorder()
            connection, peer = await connect(nsqd, recorder)
            connection.write(wire.pub(b"PUB t", bytes(4 << 20)))
            connection.write(wire.CLS)
            await ended(connection)
            await until(lambda: peer.is_ended)
            assert peer.commands == ["IDENTIFY", "PUB t", "CLS"]
            assert recorder.ends == [None]

    run(main())


def test_close_does_not_wait_for_a_server_that_reads_nothing() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            connection, peer = await connect(nsqd)
            peer.is_reading = False
            connection.write(wire.NOP)
            await asyncio.sleep(0.05)
            connection.write(wire.pub(b"PUB t", bytes(32 << 20)))
            began = asyncio.get_running_loop().time()
            await ended(connection)
            assert asyncio.get_running_loop().time() - began < 1.1

    run(main(), timeless=True)


# Reasons


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "closed"),
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 4150)"), "Connection refused"),
        (OSError(113, "Connect call failed ('10.0.0.1', 4150)"), "No route to host"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (
            # asyncio's error for a host with several addresses.
            OSError(
                "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), "
                "[Errno 111] Connect call failed ('127.0.0.1', 1), "
                "[Errno 113] Connect call failed ('10.0.0.1', 1)"
            ),
            "Connection refused, No route to host",
        ),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ConnectionResetError("the server closed the connection"), "the server closed the connection"),
        (TimeoutError(), "TimeoutError"),
        (ssl.SSLError(1, "[SSL] nonsense"), "[SSL] nonsense"),
        (ValueError("no"), "no"),
    ],
)
def test_a_reason_has_the_text_of_the_system(error: Exception | None, text: str) -> None:
    assert reason_of(error) == text


def test_the_same_error_of_several_addresses_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 1)) for host in ("127.0.0.1", "127.0.0.2")
        ]

        async def resolve(*_: Any, **__: Any) -> Any:
            return found

        monkeypatch.setattr(loop, "getaddrinfo", resolve, raising=False)
        assert await refusal("host.example:1") == "host.example:1: Connection refused"

    if aio.LOOP_FACTORY is None:
        run(main())
