"""The connection of a task: frames become rows, FINs are confirmed, refusals explained."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.client.config import Config
from nsparq.headers import encode_headers
from nsparq.spark.options import OptionError
from nsparq.spark.queue.connection import Away, QueueConnection, QueueError
from nsparq.spark.queue.frames import decode
from nsparq.spark.queue.reader import task_settings
from nsparq.testing.proxy import FaultProxy
from tests.spark.queue.support import address, options, tcp
from tests.support import REFERENCE, RawConnection, TestBroker, start_broker, wait_until
from tests.support.auth_server import AuthServer, entry, unused_port
from tests.support.certificates import certificates
from tests.support.with_headers import publish_with_headers

CONFIG = Config(msg_timeout=1.0, output_buffer_timeout=0.025)


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with start_broker(max_msg_size=4 << 20, max_body_size=16 << 20) as found:
        yield found


@pytest.fixture(autouse=True)
def fresh_topic(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "broker" in request.fixturenames:
        found = request.getfixturevalue("broker")
        if found.topic_stats("t"):
            found.control("delete", "t")


def connect(broker: TestBroker, config: Config = CONFIG) -> QueueConnection:
    return QueueConnection(tcp(broker), "t", "c", config)


def receive(connection: QueueConnection, count: int) -> None:
    """Wait until so many messages have come."""
    wait_until(lambda: connection.receive(0.05) or connection.waiting >= count)
    while connection.waiting < count:
        assert connection.receive(10)


# frames


def message_frame(
    timestamp_ns: int, attempts: int, message_id: bytes, body: bytes, headers: dict[str, str]
) -> bytes:
    if headers:
        block = encode_headers(headers)
        body = struct.pack(">I", len(block)) + block + body
    kind = 3 if headers else 2
    return struct.pack(">iiqH16s", 30 + len(body), kind, timestamp_ns, attempts, message_id) + body


messages = st.tuples(
    st.integers(0, 2**62),
    st.integers(0, 65535),
    st.text("0123456789abcdef", min_size=16, max_size=16).map(str.encode),
    st.binary(min_size=1, max_size=300),
    st.dictionaries(st.text("ab", min_size=1, max_size=3), st.text(max_size=3), max_size=3),
)
others = st.sampled_from([b"_heartbeat_", b"OK", b"CLOSE_WAIT"])


@given(st.lists(messages | others, max_size=30))
def test_frames_become_rows_whatever_lies_between_them(frames: list[Any]) -> None:
    data, starts, not_messages = b"", [], set()
    for frame in frames:
        if isinstance(frame, bytes):
            not_messages.add(len(starts))
        starts.append(len(data))
        data += (
            struct.pack(">ii", 4 + len(frame), 0) + frame
            if isinstance(frame, bytes)
            else message_frame(*frame)
        )
    taken = decode(data, starts, not_messages)
    wanted = [frame for frame in frames if not isinstance(frame, bytes)]
    taken.rows.validate(full=True)
    assert taken.ids == b"".join(message_id for _, _, message_id, *_ in wanted)
    times = taken.rows.column("timestamp").cast("int64").to_pylist()
    assert times == [timestamp_ns // 1000 for timestamp_ns, *_ in wanted]
    columns = (taken.rows.column(name).to_pylist() for name in ("attempts", "id", "body"))
    assert [*zip(*columns, strict=True)] == [
        (attempts, message_id.decode(), body) for _, attempts, message_id, body, _ in wanted
    ]
    assert [dict(one or ()) for one in taken.rows.column("headers").to_pylist()] == [
        headers for *_, headers in wanted
    ]


@pytest.mark.parametrize("block", [b"", b"\0\0\0\x09", b"\0\0\0\x01a"])
def test_a_header_block_that_breaks_the_rules_is_refused(block: bytes) -> None:
    frame = struct.pack(">iiqH16s", 30 + len(block), 3, 0, 1, b"0" * 16) + block
    with pytest.raises(ValueError, match="header block"):
        decode(frame, [0], set())


@pytest.mark.skipif(bool(REFERENCE), reason="NSQ has no headers")
def test_headers_come_only_if_they_are_wanted(broker: TestBroker) -> None:
    for wanted in (True, False):
        with QueueConnection(tcp(broker), "t", "c", CONFIG, headers=wanted) as connection:
            publish_with_headers(address(broker), "t", (b"x", {"kind": "new"}))
            connection.ready(10)
            receive(connection, 1)
            taken = connection.take()
            connection.finish(taken.ids)
            assert connection.confirm_fins()
        assert taken.rows.column("body").to_pylist() == [b"x"]
        assert taken.rows.column("headers").to_pylist() == [[("kind", "new")] if wanted else None]


def test_messages_of_any_size_and_content_arrive_whole(broker: TestBroker) -> None:
    bodies = [bytes([n]) * size for n, size in ((0, 1), (255, 1 << 20), (10, 3 << 20), (32, 70_000))]
    with connect(broker) as connection:
        broker.publish("t", *bodies)
        connection.ready(10)
        receive(connection, len(bodies))
        taken = connection.take()
    assert sorted(taken.rows.column("body").to_pylist()) == sorted(bodies)
    assert taken.rows.column("attempts").to_pylist() == [1] * len(bodies)


def test_messages_that_arrive_in_small_pieces_are_joined(broker: TestBroker) -> None:
    bodies = [b"%03d" % number * 50 for number in range(200)]
    with FaultProxy(tcp(broker)) as proxy:
        with QueueConnection(proxy.address, "t", "c", CONFIG) as connection:
            broker.publish("t", *bodies)
            proxy.throttle(200_000)
            connection.ready(200)
            receive(connection, 200)
            assert connection.take().rows.column("body").to_pylist() == bodies
            proxy.heal()


# commands


def test_the_window_is_what_nsqd_allows_at_most(broker: TestBroker) -> None:
    with connect(broker) as connection:
        connection.ready(1_000_000)
        assert connection.max_rdy_count == 2500
        wait_until(lambda: _client(broker)["ready_count"] == 2500)


def _client(broker: TestBroker) -> Any:
    channel = broker.channel_stats("t", "c")
    assert channel is not None
    return (channel["clients"] or [{"ready_count": 0}])[0]


def test_finished_messages_are_confirmed(broker: TestBroker) -> None:
    bodies = [b"%d" % number for number in range(3000)]
    with connect(broker) as connection:
        broker.publish("t", *bodies)
        connection.ready(2500)
        receive(connection, 2500)
        connection.finish(connection.take().ids)
        receive(connection, 500)
        connection.stop_taking(5)
        connection.stop_taking(5)
        connection.finish(connection.take().ids)
        assert connection.confirm_fins()
        # Without waiting: it has been carried out.
        channel = broker.channel_stats("t", "c")
        assert channel is not None
        assert (channel["depth"], channel["in_flight_count"], channel["message_count"]) == (0, 0, 3000)


def test_requeued_messages_come_again(broker: TestBroker) -> None:
    with connect(broker) as connection:
        broker.publish("t", b"one")
        connection.ready(10)
        receive(connection, 1)
        first = connection.take()
        connection.requeue(first.ids)
        receive(connection, 1)
        again = connection.take()
        assert again.ids == first.ids and again.rows.column("attempts").to_pylist() == [2]
        assert again.rows.column("timestamp").equals(first.rows.column("timestamp"))
        connection.requeue(b"")
        connection.finish(b"")
        connection.finish(again.ids)
        assert connection.confirm_fins()


def test_a_message_that_timed_out_is_not_confirmed(broker: TestBroker) -> None:
    with connect(broker) as connection:
        broker.publish("t", b"one")
        connection.ready(1)
        receive(connection, 1)
        ids = connection.take().ids
        receive(connection, 1)  # It is ours again, under another deadline.
        connection.stop_taking(5)
        connection.finish(ids)
        connection.finish(ids)
        assert not connection.confirm_fins()


def test_heartbeats_are_answered(broker: TestBroker) -> None:
    # nsqd drops a client that has missed two.
    with connect(broker, replace(CONFIG, heartbeat_interval=3.0)) as connection:
        for _ in range(3):
            assert connection.receive(15), "no heartbeat"
        broker.publish("t", b"one")
        connection.ready(1)
        receive(connection, 1)
        connection.finish(connection.take().ids)
        assert connection.confirm_fins()


def test_a_connection_that_breaks_is_told_from_one_that_is_refused(broker: TestBroker) -> None:
    with FaultProxy(tcp(broker)) as proxy:
        with QueueConnection(proxy.address, "t", "c", CONFIG) as connection:
            proxy.reset()
            with pytest.raises(Away):
                connection.receive(5)
            assert not connection.confirm_fins()


def test_an_nsqd_that_is_silent_is_not_waited_for_forever(broker: TestBroker) -> None:
    with FaultProxy(tcp(broker)) as proxy:
        with QueueConnection(proxy.address, "t", "c", CONFIG) as connection:
            proxy.stall()
            with pytest.raises(Away, match="CLS was not answered in time"):
                connection.stop_taking(0.1)
            with pytest.raises(Away, match="IDENTIFY was not answered in time"):
                QueueConnection(proxy.address, "t", "c", replace(CONFIG, handshake_timeout=0.1))
            proxy.heal()


# set-up


def test_an_absent_nsqd_is_away_and_no_error() -> None:
    with pytest.raises(Away, match="refused"):
        QueueConnection(f"127.0.0.1:{unused_port()}", "t", "c", CONFIG)


def test_a_port_of_another_server_is_an_error(broker: TestBroker) -> None:
    with pytest.raises(QueueError, match="not the TCP port of an nsqd"):
        QueueConnection(address(broker), "t", "c", CONFIG)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"max_rdy_count": "many"}',
        b'{"max_rdy_count": [2500]}',
        b'{"max_rdy_count": Infinity}',
        b'{"max_rdy_count": -1}',
        b'{"max_rdy_count": true}',
        b'{"max_rdy_count": ',
        b'{"x": ' + b"[" * 100_000,
    ],
    ids=lambda answer: str(answer[:30]),
)
def test_an_odd_answer_to_identify_is_an_error(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def answer_once() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(struct.pack(">ii", 4 + len(answer), 0) + answer)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=answer_once)
        thread.start()
        host, port = server.getsockname()
        with pytest.raises(QueueError, match="IDENTIFY was answered with"):
            QueueConnection(f"{host}:{port}", "t", "c", CONFIG)
        thread.join(10)


def test_a_name_that_nsqd_does_not_take_is_an_error(broker: TestBroker) -> None:
    with pytest.raises(QueueError, match="SUB failed: E_BAD_TOPIC"):
        QueueConnection(tcp(broker), "t!", "c", CONFIG)


def test_snappy_is_used_if_nsqd_has_it(broker: TestBroker) -> None:
    bodies = [b"compressible " * 100 + b"%d" % number for number in range(300)]
    with connect(broker, replace(CONFIG, snappy=True)) as connection:
        broker.publish("t", *bodies)
        connection.ready(300)
        receive(connection, 300)
        assert _client(broker)["snappy"]
        connection.stop_taking(5)
        taken = connection.take()
        assert taken.rows.column("body").to_pylist() == bodies
        connection.finish(taken.ids)
        assert connection.confirm_fins()


@pytest.fixture(scope="module")
def tls_broker() -> Iterator[TestBroker]:
    with start_broker(**certificates().server_flags()) as found:
        yield found


@pytest.mark.parametrize("snappy", [False, True])
def test_tls_with_the_options_for_it(tls_broker: TestBroker, snappy: bool) -> None:
    given = options(
        tls_broker,
        staging="/nowhere",
        tls="true",
        snappy=str(snappy).lower(),
        tlsCaFile=certificates().ca.cert,
    )
    topic = f"t{snappy}"
    with QueueConnection(tcp(tls_broker), topic, "c", task_settings(given).config) as connection:
        tls_broker.publish(topic, *(b"%d" % number for number in range(1000)))
        connection.ready(1000)
        receive(connection, 1000)
        connection.finish(connection.take().ids)
        assert connection.confirm_fins()


def test_a_certificate_that_is_not_trusted_is_an_error(tls_broker: TestBroker) -> None:
    config = replace(CONFIG, tls_v1=True, tls_root_ca_file=str(certificates().foreign.cert))
    with pytest.raises(QueueError, match="certificate"):
        connect(tls_broker, config)
    with connect(tls_broker, replace(config, tls_insecure_skip_verify=True)):
        pass


def test_an_nsqd_without_tls_gets_no_secret(broker: TestBroker) -> None:
    with pytest.raises(QueueError, match="option tls: nsqd does not offer TLS"):
        connect(broker, replace(CONFIG, tls_v1=True))


def test_auth_sends_the_secret_or_reports_that_it_is_missing() -> None:
    with AuthServer() as server:
        server.grant(entry(".*", "subscribe", "publish"))
        with start_broker(auth_http_address=(server.address,)) as broker:
            given = options(broker, staging="/nowhere", authToken="s3cret")
            with connect(broker, task_settings(given).config):
                pass
            assert server.queries[-1].fields["secret"] == "s3cret"
            with pytest.raises(QueueError, match="option authToken is not set"):
                connect(broker)
            server.grant()
            with pytest.raises(QueueError, match="AUTH failed: E_UNAUTHORIZED"):
                connect(broker, replace(CONFIG, auth_secret="wrong"))
            # It may be back in a moment.
            server.answer(b"", status=500)
            with pytest.raises(Away, match="AUTH failed: E_AUTH_FAILED"):
                connect(broker, replace(CONFIG, auth_secret="other"))


def test_a_connection_reads_while_it_writes(broker: TestBroker) -> None:
    # An nsqd that cannot get rid of what it sends may stop to listen, and both would wait forever.
    large = [b"x" * (1 << 20)] * 40
    with connect(broker, replace(CONFIG, msg_timeout=60.0)) as connection:
        with RawConnection(broker.address) as publisher:
            for body in large:
                publisher.pub("t", body)
        connection.ready(len(large))
        receive(connection, 1)
        nops = b"NOP\n" * (1 << 17)
        connection._send(nops)
        receive(connection, len(large))
        connection.finish(connection.take().ids)
        assert connection.confirm_fins()


def test_the_options_say_what_they_must_be() -> None:
    with pytest.raises(OptionError, match="messageTimeout must be from 1s to 15m"):
        options(staging="/nowhere", nsqd="127.0.0.1:1", messageTimeout="10ms")
