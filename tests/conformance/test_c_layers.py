"""C. Transport layers: TLS, snappy, deflate, and one inside the other."""

from __future__ import annotations

import random
import shutil
import signal
import ssl
import time
import warnings
import zlib
from contextlib import ExitStack, suppress

import pytest

from nsparq.options import TlsRequired
from tests.support import RESPONSE, BrokerDied, ConnectionClosed, Frame, sized, wait_until
from tests.support.certificates import Pair, certificates, issue
from tests.support.layered import (
    IDENTIFIER,
    Deflate,
    LayeredConnection,
    Snappy,
    Tls,
    snappy_checksum,
    snappy_chunk,
)

OK_FRAME = b"\x00\x00\x00\x06\x00\x00\x00\x00OK"
SYNC = b"\x00\x00\xff\xff"
VERSIONS = {
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}
COMBINATIONS = {
    "tls": {"tls": True},
    "snappy": {"snappy": True},
    "deflate": {"deflate": True},
    "tls+snappy": {"tls": True, "snappy": True},
    "tls+deflate": {"tls": True, "deflate": True},
}


@pytest.fixture(scope="session")
def tls_broker(shared_broker):
    """With a certificate; TLS is optional."""
    return shared_broker(**certificates().server_flags())


@pytest.fixture(scope="session")
def strict_broker(shared_broker):
    """TCP clients must use TLS."""
    return shared_broker(**certificates().server_flags(tls_required=TlsRequired.EXCEPT_HTTP))


def policy_broker(shared_broker, policy):
    found = certificates()
    flags = found.server_flags(tls_client_auth_policy=policy, tls_root_ca_file=str(found.ca.cert))
    return shared_broker(**flags)


def connect(broker):
    return LayeredConnection(broker.address)


def client_context(pair: Pair | None = None, version: str = "") -> ssl.SSLContext:
    context = certificates().client_context(pair)
    if version:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = VERSIONS[version]
        context.set_ciphers("ALL:@SECLEVEL=0")
    return context


def upgrade(connection, *, tls=False, **layers):
    return connection.upgrade(tls=client_context() if tls else None, **layers)


def is_refused(broker, context: ssl.SSLContext) -> bool:
    """Whether the handshake fails, or the first read: in TLS 1.3 a refusal arrives after it."""
    with connect(broker) as connection:
        assert connection.identify(tls_v1=True)["tls_v1"] is True
        try:
            connection.begin_tls(context)
            connection.expect_ok()
        except (ssl.SSLError, ConnectionClosed, ConnectionResetError):
            return True
        return False


def works(connection, topic: str) -> None:
    """Publish a message and receive it on the same connection."""
    connection.sub(topic, "ch", rdy=1)
    connection.pub(topic, b"there and back")
    message = connection.read_message()
    assert message.body == b"there and back"
    connection.fin(message.id)
    connection.barrier()


# TLS


def test_case_036_tls_is_announced_and_confirmed_inside(tls_broker, topic):
    with connect(tls_broker) as connection:
        assert connection.identify(tls_v1=True)["tls_v1"] is True
        connection.begin_tls(client_context())
        connection.expect_ok()
        works(connection, topic)


def test_case_036_tls_shows_in_stats(tls_broker, topic, channel):
    with connect(tls_broker) as connection:
        upgrade(connection, tls=True)
        connection.sub(topic, channel)
        (client,) = tls_broker.channel_stats(topic, channel)["clients"]
        assert (client["tls"], client["snappy"], client["deflate"]) == (True, False, False)
        assert client["tls_version"] == "TLS1.3"
        assert client["tls_cipher_suite"]
        assert client["tls_negotiated_protocol"] == ""
        assert client["tls_negotiated_protocol_is_mutual"] is True


def test_case_036_the_cipher_suite_of_tls_1_2_is_shown_by_name(tls_broker, topic, channel):
    with connect(tls_broker) as connection:
        context = client_context(version="tls1.2")
        context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        connection.upgrade(tls=context)
        connection.sub(topic, channel)
        (client,) = tls_broker.channel_stats(topic, channel)["clients"]
        assert client["tls_version"] == "TLS1.2"
        assert client["tls_cipher_suite"] == "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"


def test_case_036_a_client_that_does_not_ask_stays_plain(tls_broker, topic):
    with connect(tls_broker) as connection:
        assert connection.identify()["tls_v1"] is False
        works(connection, topic)


def test_case_036_the_server_proves_who_it_is(tls_broker):
    with connect(tls_broker) as connection:
        connection.identify(tls_v1=True)
        with pytest.raises(ssl.SSLCertVerificationError):
            connection.begin_tls(ssl.create_default_context())


@pytest.mark.parametrize("spoken", [b"NOP\n" * 10, bytes(100), b"\x16\x03\x01\x02\x00" + b"\xff" * 512])
def test_case_036_bytes_other_than_a_handshake_end_the_connection(tls_broker, topic, spoken):
    with connect(tls_broker) as connection, connect(tls_broker) as bystander:
        bystander.upgrade(tls=client_context())
        connection.identify(tls_v1=True)
        connection.send_wire(spoken)
        # The last bytes depend on its progress: an alert, a plain error frame, or both.
        with suppress(ConnectionResetError):
            while connection.socket.recv(1 << 16):
                pass
        works(bystander, topic)


def test_case_036_a_handshake_must_be_done_within_five_seconds(tls_broker):
    with LayeredConnection(tls_broker.address) as connection:
        asked = time.monotonic()
        connection.identify(tls_v1=True)
        with suppress(ConnectionResetError):
            connection.read_to_end()
        assert time.monotonic() - asked >= 5.0


def test_case_036_errors_and_the_end_come_through_tls(tls_broker):
    with connect(tls_broker) as connection:
        upgrade(connection, tls=True)
        connection.command("PUB", "bad!", body=b"x")
        connection.expect_fatal('E_BAD_TOPIC PUB topic name "bad!" is not valid')


# Snappy


def test_case_037_snappy_is_announced_and_confirmed_inside(broker, topic):
    with connect(broker) as connection:
        assert connection.identify(snappy=True)["snappy"] is True
        connection.begin_snappy()
        connection.expect_ok()
        assert connection.wire == IDENTIFIER + snappy_chunk(1, snappy_checksum(OK_FRAME) + OK_FRAME)
        works(connection, topic)
        # The identifier arrived once.
        assert [kind for kind, _ in connection.snappy.chunks].count(0xFF) == 1


@pytest.mark.parametrize("noise", [False, True], ids=["text", "noise"])
def test_case_037_a_message_of_128000_bytes_arrives_intact(broker, topic, channel, noise):
    body = random.Random(1).randbytes(128_000) if noise else b"0123456789abcdef" * 8000
    with connect(broker) as publisher, connect(broker) as consumer:
        upgrade(consumer, snappy=True)
        consumer.sub(topic, channel, rdy=1)
        upgrade(publisher, snappy=True)
        publisher.pub(topic, body)
        assert consumer.read_message().body == body
        # Data that does not shrink is stored uncompressed.
        kinds = {kind for kind, contents in consumer.snappy.chunks if len(contents) > 10_000}
        assert kinds == ({1} if noise else {0})


def test_case_037_snappy_shows_in_stats(broker, topic, channel):
    with connect(broker) as connection:
        upgrade(connection, snappy=True)
        connection.sub(topic, channel)
        (client,) = broker.channel_stats(topic, channel)["clients"]
        assert (client["tls"], client["snappy"], client["deflate"]) == (False, True, False)


# Deflate


def test_case_038_deflate_is_announced_and_confirmed_inside(broker, topic):
    with connect(broker) as connection:
        assert connection.identify(deflate=True)["deflate"] is True
        connection.begin_deflate()
        connection.expect_ok()
        works(connection, topic)


@pytest.mark.parametrize("level", [1, 6])
def test_case_038_every_flush_can_be_decoded_at_once(broker, topic, level):
    with connect(broker) as connection:
        assert connection.identify(deflate=True, deflate_level=level)["deflate_level"] == level
        connection.begin_deflate(Deflate(level))
        connection.expect_ok()
        for number in range(20):
            connection.pub(topic, b"%d " % number * 1000)
        connection.expect_silence(0.05)
        assert connection.wire.endswith(SYNC)
        # One stream, in the raw format.
        assert zlib.decompressobj(-15).decompress(connection.wire) == OK_FRAME * 21


def test_case_038_deflate_shows_in_stats(broker, topic, channel):
    with connect(broker) as connection:
        upgrade(connection, deflate=True)
        connection.sub(topic, channel)
        (client,) = broker.channel_stats(topic, channel)["clients"]
        assert (client["tls"], client["snappy"], client["deflate"]) == (False, False, True)


# One inside the other


@pytest.mark.parametrize("inner", ["snappy", "deflate"])
def test_case_039_compression_inside_tls_is_confirmed_twice_in_order(tls_broker, topic, inner):
    with connect(tls_broker) as connection:
        reply = connection.identify(tls_v1=True, **{inner: True})
        assert (reply["tls_v1"], reply[inner]) == (True, True)
        connection.begin_tls(client_context())
        connection.expect_ok()
        connection.begin_snappy() if inner == "snappy" else connection.begin_deflate()
        connection.expect_ok()
        connection.expect_silence(0.1)
        works(connection, topic)


def test_case_039_both_layers_show_in_stats(tls_broker, topic, channel):
    with connect(tls_broker) as connection:
        upgrade(connection, tls=True, snappy=True)
        connection.sub(topic, channel)
        (client,) = tls_broker.channel_stats(topic, channel)["clients"]
        assert (client["tls"], client["snappy"], client["deflate"]) == (True, True, False)


# TLS required


@pytest.mark.parametrize(
    ("line", "name"),
    [(b"PUB t\n" + sized(b"body"), "PUB"), (b"SUB t ch\n", "SUB"), (b"what is this\n", "what")],
)
def test_case_040_without_tls_every_command_but_identify_is_refused(strict_broker, line, name):
    with connect(strict_broker) as connection:
        connection.send(line)
        connection.expect_fatal(f"E_INVALID cannot {name} in current state (TLS required)")


def test_case_040_identify_without_tls_is_answered_and_the_rest_refused(strict_broker):
    with connect(strict_broker) as connection:
        assert connection.identify()["tls_v1"] is False
        connection.nop()
        connection.expect_fatal("E_INVALID cannot NOP in current state (TLS required)")


def test_case_040_compression_does_not_replace_tls(strict_broker):
    with connect(strict_broker) as connection:
        upgrade(connection, snappy=True)
        connection.command("PUB", "t", body=b"body")
        connection.expect_fatal("E_INVALID cannot PUB in current state (TLS required)")


@pytest.mark.parametrize("layers", [{}, {"snappy": True}, {"deflate": True}])
def test_case_040_with_tls_everything_works(strict_broker, topic, layers):
    with connect(strict_broker) as connection:
        upgrade(connection, tls=True, **layers)
        works(connection, topic)


# Client certificates


@pytest.mark.parametrize("version", ["tls1.2", "tls1.3"])
def test_case_041_require_wants_a_certificate_and_takes_any(shared_broker, topic, version):
    broker = policy_broker(shared_broker, "require")
    found = certificates()
    assert is_refused(broker, client_context(version=version))
    for pair in (found.client, found.foreign):
        with connect(broker) as connection:
            connection.upgrade(tls=client_context(pair, version))
            works(connection, f"{topic}_{pair.cert.stem}")


@pytest.mark.parametrize("version", ["tls1.2", "tls1.3"])
def test_case_042_require_verify_takes_certificates_of_the_authority_only(shared_broker, topic, version):
    broker = policy_broker(shared_broker, "require-verify")
    found = certificates()
    assert is_refused(broker, client_context(version=version))
    assert is_refused(broker, client_context(found.foreign, version))
    with connect(broker) as connection:
        connection.upgrade(tls=client_context(found.client, version))
        works(connection, topic)


def test_case_042_require_verify_refuses_an_expired_certificate(shared_broker, tmp_path):
    broker = policy_broker(shared_broker, "require-verify")
    expired = issue(tmp_path, "expired", signer=certificates().ca, is_expired=True)
    assert is_refused(broker, client_context(expired))


@pytest.mark.parametrize("policy", ["require", "require-verify"])
def test_case_043_a_policy_alone_requires_tls(shared_broker, policy):
    broker = policy_broker(shared_broker, policy)
    with connect(broker) as connection:
        connection.command("PUB", "t", body=b"body")
        connection.expect_fatal("E_INVALID cannot PUB in current state (TLS required)")


# Accepted snappy streams


def test_case_044_a_stream_identifier_with_every_write_is_accepted(broker, topic):
    with connect(broker) as connection:
        connection.upgrade(snappy=Snappy(identify_always=True))
        works(connection, topic)


def test_case_044_identifiers_between_the_parts_of_a_command_are_accepted(broker, topic):
    with connect(broker) as connection:
        connection.upgrade(snappy=Snappy(identify_always=True))
        for part in (b"PU", b"B " + topic.encode() + b"\n\0\0", b"\0\x04bo", b"dy"):
            connection.send(part)
        connection.expect_ok()


@pytest.mark.parametrize("size", [10, 65_536, 200_000])
def test_case_045_stored_chunks_are_accepted(broker, topic, channel, size):
    body = random.Random(2).randbytes(size)
    with connect(broker) as connection:
        connection.upgrade(snappy=Snappy(stored=True))
        connection.pub(topic, body)
        connection.sub(topic, channel, rdy=1)
        assert connection.read_message().body == body


@pytest.mark.parametrize(("kind", "body"), [(0xFE, bytes(50)), (0x80, b"?"), (0xFD, b"")])
def test_case_045_padding_and_skippable_chunks_are_passed_over(broker, topic, kind, body):
    with connect(broker) as connection:
        connection.upgrade(snappy=Snappy(before=snappy_chunk(kind, body)))
        works(connection, topic)


NOT_SNAPPY = {
    "plain commands": b"NOP\nNOP\n",
    "no identifier": snappy_chunk(1, snappy_checksum(b"NOP\n") + b"NOP\n"),
    "bad checksum": IDENTIFIER + snappy_chunk(1, b"\0\0\0\0NOP\n"),
    "reserved chunk": IDENTIFIER + snappy_chunk(2, b"NOP\n"),
    "corrupt chunk": IDENTIFIER + snappy_chunk(0, b"\0\0\0\0\x04\xff\xff"),
    "chunk longer than allowed": IDENTIFIER + snappy_chunk(1, snappy_checksum(bytes(70_000)) + bytes(70_000)),
}


@pytest.mark.parametrize("spoken", NOT_SNAPPY.values(), ids=NOT_SNAPPY)
def test_case_045_invalid_snappy_ends_the_connection(broker, topic, spoken):
    with connect(broker) as connection:
        upgrade(connection, snappy=True)
        connection.send_wire(spoken)
        connection.expect_closed()


def test_case_038_invalid_deflate_ends_the_connection(broker):
    with connect(broker) as connection:
        upgrade(connection, deflate=True)
        connection.send_wire(b"\xff" * 100)
        connection.expect_closed()


# Versions


@pytest.mark.parametrize("version", VERSIONS)
def test_case_046_by_default_every_version_is_accepted(tls_broker, topic, version):
    with connect(tls_broker) as connection:
        connection.upgrade(tls=client_context(version=version))
        assert connection.tls.tls.version() == version.upper().replace("TLS", "TLSv").replace("v1.0", "v1")
        works(connection, topic)


@pytest.mark.parametrize(
    ("older", "minimum"), [("tls1.0", "tls1.1"), ("tls1.1", "tls1.2"), ("tls1.2", "tls1.3")]
)
def test_case_046_versions_below_the_minimum_are_refused(shared_broker, topic, older, minimum):
    broker = shared_broker(**certificates().server_flags(tls_min_version=minimum))
    assert is_refused(broker, client_context(version=older))
    with connect(broker) as connection:
        connection.upgrade(tls=client_context(version=minimum))
        works(connection, topic)


def test_case_046_ssl3_is_not_a_version(own_process):
    with pytest.raises(BrokerDied) as died:
        own_process(**certificates().server_flags(tls_min_version="ssl3.0"))
    assert died.value.status


# Large messages


@pytest.mark.parametrize("layers", COMBINATIONS.values(), ids=COMBINATIONS)
@pytest.mark.parametrize("noise", [False, True], ids=["text", "noise"])
def test_case_047_a_large_message_over_every_combination(tls_broker, topic, channel, layers, noise):
    body = random.Random(3).randbytes(100_000) if noise else b"0123456789" * 10_000
    with connect(tls_broker) as publisher, connect(tls_broker) as consumer:
        upgrade(consumer, **layers)
        consumer.sub(topic, channel, rdy=3)
        upgrade(publisher, **layers)
        publisher.pub(topic, body)
        publisher.mpub(topic, [body, body])
        assert {message.body for message in consumer.read_messages(3, finish=True)} == {body}
        consumer.barrier()


@pytest.mark.parametrize("layers", COMBINATIONS.values(), ids=COMBINATIONS)
def test_case_047_many_messages_over_every_combination(tls_broker, topic, channel, layers):
    bodies = [b"message %d" % number for number in range(3000)]
    with connect(tls_broker) as publisher, connect(tls_broker) as consumer:
        upgrade(consumer, **layers)
        consumer.sub(topic, channel, rdy=500)
        upgrade(publisher, **layers)
        for start in range(0, 2000, 100):
            publisher.mpub(topic, bodies[start : start + 100])
        for body in bodies[2000:]:
            publisher.command("PUB", topic, body=body)
        for _ in bodies[2000:]:
            publisher.expect_ok()
        received = consumer.read_messages(3000, finish=True)
        assert sorted(message.body for message in received) == sorted(bodies)
        consumer.barrier()


# Beyond the numbered cases


def test_heartbeats_come_through_every_combination(tls_broker):
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(tls_broker)) for _ in COMBINATIONS]
        for connection, layers in zip(connections, COMBINATIONS.values(), strict=True):
            upgrade(connection, heartbeat_interval=1000, **layers)
        for connection in connections:
            assert connection.read_raw_frame() == Frame(RESPONSE, b"_heartbeat_")


def identify_for(*layers: str) -> bytes:
    fields = ",".join(f'"{name}":true' for name in ("feature_negotiation", *layers))
    return b"IDENTIFY\n" + sized(f"{{{fields}}}".encode())


@pytest.mark.deviation("NSQ throws away what came behind IDENTIFY")
@pytest.mark.parametrize("kind", [Snappy, Deflate])
def test_compressed_commands_directly_after_identify_are_not_lost(broker, topic, kind):
    with connect(broker) as connection:
        layer = kind()
        command = b"PUB " + topic.encode() + b"\n" + sized(b"early")
        connection.send(identify_for(kind.__name__.lower()) + layer.encode(command))
        connection.read_frame()
        connection.begin_snappy(layer) if kind is Snappy else connection.begin_deflate(layer)
        connection.expect_ok()
        connection.expect_ok()
        connection.sub(topic, "ch", rdy=1)
        assert connection.read_message().body == b"early"


@pytest.mark.deviation("NSQ throws away what came behind IDENTIFY")
@pytest.mark.parametrize("inner", ["", "snappy"])
def test_a_tls_handshake_directly_after_identify_is_not_lost(tls_broker, topic, inner):
    with connect(tls_broker) as connection:
        tls = Tls(client_context(), "localhost")
        hello, _ = tls.shake(b"")
        connection.send(identify_for("tls_v1", *filter(None, [inner])) + hello)
        connection.read_frame()
        connection.begin_tls(client_context(), begun=tls)
        connection.expect_ok()
        if inner:
            connection.begin_snappy()
            connection.expect_ok()
        works(connection, topic)


@pytest.mark.deviation("NSQ keeps the certificates that it started with")
def test_certificates_are_reloaded_on_sighup_and_connections_go_on(own_process, tmp_path, topic):
    found = certificates()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(pair: Pair) -> None:
        shutil.copy(pair.key, key)
        shutil.copy(pair.cert, cert)

    def serial() -> str:
        with connect(broker) as connection:
            upgrade(connection, tls=True)
            return connection.tls.tls.getpeercert()["serialNumber"]

    install(found.server)
    broker = own_process(tls_cert=str(cert), tls_key=str(key))
    first = serial()
    with connect(broker) as old:
        upgrade(old, tls=True)
        install(issue(tmp_path, "renewed", signer=found.ca, hosts=("localhost",)))
        broker.signal(signal.SIGHUP)
        second = wait_until(lambda: (now := serial()) != first and now)
        cert.write_text("this is not a certificate")
        broker.signal(signal.SIGHUP)
        wait_until(lambda: "--tls-cert" in broker.stderr_text())
        assert serial() == second
        works(old, topic)
