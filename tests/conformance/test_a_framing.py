"""Group A: connection, lines, framing; the same over a Unix socket in case 14."""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ConnectionClosed, sized, wait_until
from tests.support.polling import DEADLINE


@pytest.fixture(scope="module")
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="nsparq-") as directory:
        yield str(Path(directory) / "nsqd.sock")


def test_case_001_magic_is_accepted_without_a_reply(broker, topic):
    with broker.connect() as connection:
        connection.expect_silence(0.1)
        connection.pub(topic, b"works")


def test_case_002_wrong_magic_gets_bad_protocol_and_is_closed(broker):
    with broker.connect(magic=b"  V1") as connection:
        connection.expect_fatal("E_BAD_PROTOCOL")


def test_case_003_end_of_stream_inside_the_magic_closes_silently(broker):
    with broker.connect(magic=b"  V") as connection:
        connection.end_of_stream()
        connection.expect_closed()


def test_case_004_empty_line_is_an_invalid_command(broker, topic):
    with broker.connect() as connection:
        connection.send(b"\n\n")
        connection.expect_fatal("E_INVALID invalid command ")
    broker.publish(topic, b"the broker is still there")


def test_case_005_unknown_command_is_fatal(broker):
    with broker.connect() as connection:
        connection.send(b"ASDF one two\n")
        connection.expect_fatal("E_INVALID invalid command ASDF")


def test_case_006_commands_in_lower_case_are_unknown(broker):
    with broker.connect() as connection:
        connection.send(b"pub t\n")
        connection.expect_fatal("E_INVALID invalid command pub")


def test_case_007_a_line_may_end_in_crlf(broker, topic, channel):
    with broker.connect() as connection:
        connection.send(b"NOP\r\nPUB %s\r\n" % topic.encode() + sized(b"body"))
        connection.expect_ok()
        connection.send(f"SUB {topic} {channel}\r\nRDY 1\r\n".encode())
        connection.expect_ok()
        assert connection.read_message().body == b"body"


def test_case_007_only_one_cr_is_removed(broker):
    with broker.connect() as connection:
        connection.send(b"NOP\r\r\n")
        connection.expect_fatal(b"E_INVALID invalid command NOP\r")


def test_case_008_longest_line_is_read_and_answered(broker):
    line = b"A" * 16_383
    with broker.connect() as connection:
        connection.send(line + b"\n")
        connection.expect_fatal(b"E_INVALID invalid command " + line)


@pytest.mark.parametrize("line", [b"A" * 16_384 + b"\n", b"A" * 20_000], ids=["longer", "endless"])
def test_case_008_longer_line_is_closed_without_a_frame(broker, line):
    with broker.connect() as connection:
        connection.send(line)
        connection.expect_closed()


def test_case_008_the_limit_is_per_line_not_for_bodies(broker, topic):
    with broker.connect() as connection:
        connection.pub(topic, b"x" * 50_000)


def test_case_009_two_commands_in_one_segment_are_executed_in_order(broker, topic, channel):
    with broker.connect() as connection:
        first = f"PUB {topic}\n".encode() + sized(b"first")
        connection.send(first + f"SUB {topic} {channel}\nRDY 1\nASDF\n".encode())
        connection.expect_ok()
        connection.expect_ok()
        frames = []
        with pytest.raises((ConnectionClosed, ConnectionResetError)):
            while True:
                frames.append(connection.read_frame())
        # The message may or may not be sent before the last command ends the connection.
        assert frames[-1].data == b"E_INVALID invalid command ASDF"
        assert len(frames) <= 2


def test_case_010_a_command_may_come_byte_by_byte(broker, topic, channel):
    stream = f"PUB {topic}\n".encode() + sized(b"body") + f"SUB {topic} {channel}\nRDY 1\n".encode()
    with broker.connect(magic=b"") as connection:
        for position in range(4):
            connection.send(b"  V2"[position : position + 1])
        for position in range(len(stream)):
            connection.send(stream[position : position + 1])
        connection.expect_ok()
        connection.expect_ok()
        assert connection.read_message().body == b"body"


def test_case_011_extra_parameters_are_ignored(broker, topic, channel):
    with broker.connect() as connection:
        connection.command("NOP", "more", "words")
        connection.command("IDENTIFY", "more", "words", body=b"{}")
        connection.expect_ok()
        connection.command("PUB", topic, "more", body=b"body")
        connection.expect_ok()
        connection.command("SUB", topic, channel, "more", "words")
        connection.expect_ok()
        connection.command("RDY", 1, "more")
        message = connection.read_message()
        connection.command("FIN", message.id, "more")
        connection.barrier()
        connection.command("CLS", "more")
        connection.expect_response(b"CLOSE_WAIT")
    stats = broker.channel_stats(topic, channel)
    assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (0, 0, 0)


def test_case_012_frame_size_counts_type_and_data_big_endian(broker, topic, channel):
    with broker.connect() as connection:
        connection.command("PUB", topic, body=b"body")
        assert receive_exactly(connection.socket, 10) == b"\x00\x00\x00\x06\x00\x00\x00\x00OK"
        connection.sub(topic, channel, rdy=1)
        size, kind = struct.unpack(">ii", receive_exactly(connection.socket, 8))
        assert (size, kind) == (4 + 26 + len(b"body"), 2)
        data = receive_exactly(connection.socket, size - 4)
        assert data[8:10] == b"\x00\x01"
        assert set(data[10:26]) <= set(b"0123456789abcdef")
        assert data[26:] == b"body"
        connection.send(b"ASDF\n")
        text = b"E_INVALID invalid command ASDF"
        assert (
            receive_exactly(connection.socket, 8 + len(text)) == struct.pack(">ii", len(text) + 4, 1) + text
        )


def test_case_013_v2_client_on_the_http_port_gets_an_http_answer(shared_broker):
    with socket.create_connection(shared_broker().http_address, timeout=DEADLINE) as connection:
        connection.sendall(b"  V2IDENTIFY\n" + sized(b"{}"))
        assert receive_exactly(connection, 12) == b"HTTP/1.1 400"


def test_case_014_unix_socket_serves_publishers_and_consumers(shared_broker, socket_path, topic, channel):
    broker = shared_broker(tcp_address=socket_path)
    with broker.connect() as connection:
        reply = connection.identify(client_id="over-unix")
        assert reply["max_rdy_count"] == 2500
        connection.sub(topic, channel, rdy=2)
        broker.publish(topic, b"one", b"two")
        messages = connection.read_messages(2, finish=True)
        assert {message.body for message in messages} == {b"one", b"two"}
        connection.barrier()
        (client,) = broker.channel_stats(topic, channel)["clients"]
        assert client["client_id"] == "over-unix"
        assert client["finish_count"] == 2


def test_case_014_unix_socket_is_gone_after_stop_and_a_stale_one_is_replaced(own_broker, topic):
    with tempfile.TemporaryDirectory(prefix="nsparq-") as directory:
        path = Path(directory) / "nsqd.sock"
        broker = own_broker(tcp_address=str(path))
        assert path.is_socket()
        broker.restart()
        broker.publish(topic, b"again")
        wait_until(lambda: broker.topic_stats(topic)["depth"] == 1)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (b"PUB t\n\x00\x00\x00\x04abc", "E_BAD_MESSAGE PUB failed to read message body"),
        (
            b"MPUB t\n\x00\x00\x00\x10\x00\x00\x00\x02\x00\x00\x00\x01a\x00",
            "E_BAD_MESSAGE MPUB failed to read message(1) body size",
        ),
        (b"IDENTIFY\n\x00", "E_BAD_BODY IDENTIFY failed to read body size"),
    ],
)
def test_end_of_stream_inside_a_command_is_answered_with_what_was_missing(broker, command, text):
    with broker.connect() as connection:
        connection.send(command)
        connection.end_of_stream()
        connection.expect_fatal(text)


def test_end_of_stream_inside_a_line_closes_silently(broker):
    with broker.connect() as connection:
        connection.send(b"PUB t")
        connection.end_of_stream()
        connection.expect_closed()


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = connection.recv(count - len(data))
        assert received, f"the stream ended after {data!r}"
        data += received
    return data
