"""Group I: AUTH: queries to the auth server, its answers, permissions and their end."""

from __future__ import annotations

import json
import ssl
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support import REFERENCE, BrokerDied, RawConnection, TestBroker, multi, wait_until
from tests.support.auth_server import AuthServer, entry, unused_port

ALL = entry(".*", "publish", "subscribe")
PUBLISHES = {
    "PUB": lambda topic: b"PUB %b\n\x00\x00\x00\x01x" % topic,
    "DPUB": lambda topic: b"DPUB %b 100\n\x00\x00\x00\x01x" % topic,
    "MPUB": lambda topic: b"MPUB %b\n\x00\x00\x00\x09" % topic + multi([b"x"]),
}


@pytest.fixture(scope="session")
def server() -> Iterator[AuthServer]:
    with AuthServer() as server:
        yield server


@pytest.fixture(scope="session")
def guarded(server: AuthServer, shared_broker: Callable[..., TestBroker]) -> TestBroker:
    """A broker with the auth server, and a small limit for bodies."""
    return shared_broker(auth_http_address=(server.address,), max_body_size=5000)


def authenticate(connection: RawConnection, secret: bytes = b"secret") -> bytes:
    """AUTH that must succeed; its reply."""
    connection.command("AUTH", body=secret)
    frame = connection.read_frame()
    assert frame.type == 0, frame
    return frame.data


def refused(broker: TestBroker, text: str, secret: bytes = b"secret") -> None:
    with broker.connect() as connection:
        connection.command("AUTH", body=secret)
        connection.expect_fatal(text)


def test_case_112_without_an_auth_server_auth_is_disabled(broker):
    refused(broker, "E_AUTH_DISABLED AUTH disabled")


def test_case_112_it_is_so_in_any_case_after_the_body_has_been_checked(broker):
    with broker.connect() as connection:
        connection.command("AUTH", body=b"")
        connection.expect_fatal("E_BAD_BODY AUTH invalid body size 0")


@pytest.mark.parametrize("verb", PUBLISHES)
def test_case_113_publishing_needs_auth_first(verb, guarded, topic):
    with guarded.connect() as connection:
        connection.send(PUBLISHES[verb](topic.encode()))
        connection.expect_fatal(f"E_AUTH_FIRST AUTH required before {verb}")
    assert guarded.topic_stats(topic) is None


def test_case_113_subscribing_needs_auth_first(guarded, topic, channel):
    with guarded.connect() as connection:
        connection.identify()
        connection.command("SUB", topic, channel)
        connection.expect_fatal("E_AUTH_FIRST AUTH required before SUB")
    assert guarded.topic_stats(topic) is None


def test_case_113_names_and_sizes_are_checked_before(guarded):
    with guarded.connect() as connection:
        connection.command("PUB", "bad!", body=b"x")
        connection.expect_fatal('E_BAD_TOPIC PUB topic name "bad!" is not valid')
    with guarded.connect() as connection:
        connection.command("PUB", "t", body=b"")
        connection.expect_fatal("E_BAD_MESSAGE PUB invalid message body size 0")
    with guarded.connect() as connection:
        connection.command("SUB", "t", "bad!")
        connection.expect_fatal('E_BAD_CHANNEL SUB channel name "bad!" is not valid')


def test_case_113_commands_without_a_topic_need_no_auth(guarded):
    with guarded.connect() as connection:
        connection.identify()
        connection.nop()
        connection.command("RDY", "1")
        connection.expect_fatal("E_INVALID cannot RDY in current state")


def test_case_114_no_authorization_at_all(guarded, server):
    server.grant()
    refused(guarded, "E_UNAUTHORIZED AUTH no authorizations found")
    server.grant(authorizations=None)
    refused(guarded, "E_UNAUTHORIZED AUTH no authorizations found")


def test_case_115_the_reply_has_three_keys_in_order(guarded, server):
    server.grant(ALL)
    with guarded.connect() as connection:
        assert authenticate(connection) == b'{"identity":"","identity_url":"","permission_count":1}'
    server.grant(ALL, ALL, ALL, identity="i<&>é", identity_url="http://u")
    with guarded.connect() as connection:
        expected = '{"identity":"i\\u003c\\u0026\\u003eé","identity_url":"http://u","permission_count":3}'
        assert authenticate(connection) == expected.encode()


def test_case_115_then_everything_works(guarded, server, topic, channel):
    server.grant(ALL)
    with guarded.connect() as connection:
        connection.identify()
        authenticate(connection)
        connection.pub(topic, b"one")
        connection.mpub(topic, [b"two"])
        connection.dpub(topic, 0, b"three")
        connection.sub(topic, channel, rdy=10)
        bodies = {message.body for message in connection.read_messages(3, finish=True)}
        assert bodies == {b"one", b"two", b"three"}


def test_case_115_commands_sent_without_waiting_for_the_answer_are_done_after_it(
    guarded, server, topic, channel
):
    server.grant(ALL)
    lines = b"AUTH\n\x00\x00\x00\x01sSUB %b %b\nRDY 5\n" % (topic.encode(), channel.encode())
    with guarded.connect() as connection:
        connection.send(lines + PUBLISHES["PUB"](topic.encode()) + b"NOP\n")
        assert b"permission_count" in connection.read_frame().data
        connection.expect_ok()
        frames = [connection.read_frame(), connection.read_frame()]
        assert sorted(frame.type for frame in frames) == [0, 2]


def test_case_115_stats_show_who_it_is(guarded, server, topic, channel):
    server.grant(ALL, identity="me", identity_url="http://u")
    with guarded.connect() as connection:
        authenticate(connection)
        connection.sub(topic, channel)
        (client,) = guarded.channel_stats(topic, channel)["clients"]
    assert (client["authed"], client["auth_identity"], client["auth_identity_url"]) == (
        True,
        "me",
        "http://u",
    )


def test_case_116_get_asks_with_a_query(guarded, server):
    server.grant(ALL)
    server.queries.clear()
    with guarded.connect() as connection:
        authenticate(connection, "s&c +é/~".encode() + b"\n\xff")
    (query,) = server.queries
    assert query.method == "GET"
    wanted = "/auth?common_name=&remote_ip=127.0.0.1&secret=s%26c+%2B%C3%A9%2F~%0A%FF&tls=false"
    assert query.path == wanted
    assert query.headers["accept"] == "application/vnd.nsq; version=1.0"
    assert query.headers["host"] == server.address


def test_case_116_post_asks_with_json_of_lists(server, own_broker):
    server.grant(ALL)
    try:
        broker = own_broker(auth_http_address=(server.address,), auth_http_request_method="post")
    except BrokerDied as died:
        if not REFERENCE or "not defined: -auth-http-request-method" not in str(died):
            raise
        pytest.skip("this nsqd is older than the flag")
    server.queries.clear()
    with broker.connect() as connection:
        authenticate(connection, b'a"b')
    (query,) = server.queries
    assert (query.method, query.path) == ("POST", "/auth")
    assert query.headers["content-type"] == "application/json"
    assert query.headers["accept"] == "application/vnd.nsq; version=1.0"
    wanted = {"common_name": [""], "remote_ip": ["127.0.0.1"], "secret": ['a"b'], "tls": ["false"]}
    assert json.loads(query.body) == wanted


def test_case_116_the_address_may_be_a_url(server, own_broker):
    server.grant(ALL)
    broker = own_broker(auth_http_address=(f"http://{server.address}/some/where",))
    server.queries.clear()
    with broker.connect() as connection:
        authenticate(connection)
    assert server.queries[0].path.startswith("/some/where?common_name=&")


def test_case_116_over_a_unix_socket_there_is_no_remote_address(server, own_broker, tmp_path):
    server.grant(ALL)
    broker = own_broker(
        auth_http_address=(server.address,),
        tcp_address=str(tmp_path / "t.sock"),
        http_address="" if not REFERENCE else str(tmp_path / "h.sock"),
    )
    server.queries.clear()
    with broker.connect() as connection:
        authenticate(connection)
    assert server.queries[0].fields["remote_ip"] == ""


def test_case_117_over_tls_the_query_says_so_and_names_the_certificate(server, own_broker):
    from tests.support.certificates import certificates
    from tests.support.layered import LayeredConnection

    found = certificates()
    server.grant(ALL)
    asking = {"tls_client_auth_policy": "require-verify", "tls_root_ca_file": str(found.ca.cert)}
    for flags, name in ((asking, "client"), ({}, "")):
        broker = own_broker(auth_http_address=(server.address,), **found.server_flags(**flags))
        server.queries.clear()
        with LayeredConnection(broker.address) as connection:
            connection.upgrade(tls=found.client_context(found.client))
            authenticate(connection)
        (query,) = server.queries
        wanted = {"common_name": name, "remote_ip": "127.0.0.1", "secret": "secret", "tls": "true"}
        assert query.fields == wanted


UNUSABLE = {
    "status 500": ({"ttl": 5, "authorizations": [ALL]}, 500),
    "no JSON": (b"{", 200),
    "no ttl": ({"authorizations": [ALL]}, 200),
    "ttl text": ({"ttl": "5", "authorizations": [ALL]}, 200),
    "upper case": ({"ttl": 5, "authorizations": [entry(".*", "Publish")]}, 200),
    "look-ahead": ({"ttl": 5, "authorizations": [entry("(?=t)", "publish")]}, 200),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_case_118_an_unusable_answer_is_a_failure(name, guarded, server):
    server.answer(*UNUSABLE[name])
    refused(guarded, "E_AUTH_FAILED AUTH failed")


def test_case_118_no_auth_server_at_all(own_broker):
    broker = own_broker(auth_http_address=(f"127.0.0.1:{unused_port()}",))
    refused(broker, "E_AUTH_FAILED AUTH failed")


def test_case_118_the_next_auth_server_is_asked(server, own_broker):
    server.grant(ALL)
    with AuthServer() as broken:
        addresses = (f"127.0.0.1:{unused_port()}", broken.address, server.address)
        broker = own_broker(auth_http_address=addresses)
        for _ in range(10):
            with broker.connect() as connection:
                authenticate(connection)


def test_case_118_a_silent_auth_server_is_a_failure(own_broker):
    with AuthServer() as stalled:
        stalled.stalled.set()
        broker = own_broker(auth_http_address=(stalled.address,), http_client_request_timeout=0.5)
        begin = time.monotonic()
        refused(broker, "E_AUTH_FAILED AUTH failed")
        assert time.monotonic() - begin > 0.4


def test_case_118_a_403_that_names_a_port_means_https(own_broker):
    from tests.support.certificates import certificates

    found = certificates()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(found.server.cert, found.server.key)
    with AuthServer() as plain, AuthServer(tls=context) as secure:
        plain.answer({"message": "TLS_REQUIRED", "https_port": secure.port}, 403)
        secure.grant(ALL, identity="safe")
        trusting = own_broker(auth_http_address=(plain.address,), tls_root_ca_file=str(found.ca.cert))
        with trusting.connect() as connection:
            assert b'"identity":"safe"' in authenticate(connection)
        assert [query.path for query in secure.queries] == [query.path for query in plain.queries]
        distrusting = own_broker(auth_http_address=(plain.address,))
        refused(distrusting, "E_AUTH_FAILED AUTH failed")


def test_case_119_a_second_auth_is_refused(guarded, server):
    server.grant(ALL)
    with guarded.connect() as connection:
        authenticate(connection)
        connection.command("AUTH", body=b"again")
        connection.expect_fatal("E_INVALID AUTH already set")


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [
        (entry(".*", "publish"), ("t", "c")),
        (entry("^t$", "subscribe", channels=("^c$",)), ("t", "cc")),
        (entry("^t$", "subscribe", channels=("^c$",)), ("tt", "c")),
        (entry("^t$", "subscribe", channels=()), ("t", "c")),
        (entry(".*"), ("t", "c")),
    ],
)
def test_case_120_subscribing_without_permission(allowed, wanted, guarded, server):
    server.grant(allowed)
    with guarded.connect() as connection:
        authenticate(connection)
        connection.command("SUB", *wanted)
        connection.expect_fatal('E_UNAUTHORIZED AUTH failed for SUB on "{}" "{}"'.format(*wanted))


@pytest.mark.parametrize(
    "allowed",
    [
        entry("opi", "subscribe", channels=("^x$", "hanne")),
        entry("^topic_[0-9]+$", "subscribe", "publish"),
        entry("", "subscribe", channels=("",)),
        entry("(?i)TOPIC", "subscribe", channels=("[[:alpha:]]\\z", "^[^.]*$")),
    ],
)
def test_case_120_patterns_match_anywhere_in_the_name(allowed, guarded, server, topic, channel):
    server.grant(entry("^other$", "subscribe"), allowed)
    with guarded.connect() as connection:
        authenticate(connection)
        connection.sub(topic, channel)


@pytest.mark.parametrize("verb", PUBLISHES)
def test_case_121_publishing_needs_a_channel_pattern_that_matches_nothing(verb, guarded, server, topic):
    def send(granted):
        server.grant(granted)
        authenticate(connection)
        connection.send(PUBLISHES[verb](topic.encode()))

    for granted in (
        entry("^topic", "publish", channels=("^c$",)),
        entry("^topic", "publish", channels=()),
        entry("^topic", "subscribe"),
        entry("^other", "publish"),
    ):
        with guarded.connect() as connection:
            send(granted)
            connection.expect_fatal(f'E_UNAUTHORIZED AUTH failed for {verb} on "{topic}" ""')
    assert guarded.topic_stats(topic) is None
    for granted in (entry("^topic", "publish"), entry("^topic", "publish", channels=("^c$", ""))):
        with guarded.connect() as connection:
            send(granted)
            connection.expect_ok()


def publish_until_asked(connection, server, topic):
    """Publish until the permission has expired and the server is asked again."""
    known = len(server.queries)

    def asked_again():
        connection.pub(topic, b"x")
        return len(server.queries) > known

    wait_until(asked_again, interval=0.05)


def test_case_122_after_its_time_the_permission_is_asked_for_again(guarded, server, topic):
    server.grant(ALL, ttl=1)
    server.queries.clear()
    with guarded.connect() as connection:
        authenticate(connection, b"the secret")
        connection.pub(topic, b"x")
        assert len(server.queries) == 1
        publish_until_asked(connection, server, topic)
        assert [query.fields["secret"] for query in server.queries] == ["the secret"] * 2
        assert server.queries[0].path == server.queries[1].path


def test_case_122_what_has_been_taken_away_is_gone_then(guarded, server, topic):
    server.grant(ALL, ttl=1)
    with guarded.connect() as connection:
        authenticate(connection)
        connection.pub(topic, b"x")
        server.grant(entry("^other$", "publish"))
        server.queries.clear()

        def refused_frame():
            connection.command("PUB", topic, body=b"x")
            frame = connection.read_frame()
            return frame if frame.type == 1 else None

        frame = wait_until(refused_frame, interval=0.05)
        assert frame.data.decode() == f'E_UNAUTHORIZED AUTH failed for PUB on "{topic}" ""'
        connection.expect_closed()
        assert len(server.queries) == 1


def test_case_122_a_failure_then_is_fatal(guarded, server, topic, channel):
    server.grant(ALL, ttl=1)
    with guarded.connect() as connection:
        authenticate(connection)
        expiry = time.monotonic() + 1
        server.answer(b"", 500)
        while time.monotonic() <= expiry:
            time.sleep(0.05)
        connection.command("SUB", topic, channel)
        connection.expect_fatal("E_AUTH_FAILED AUTH failed")


def test_case_122_a_subscription_is_not_asked_about_again(guarded, server, topic, channel):
    server.grant(ALL, ttl=1)
    with guarded.connect() as consumer, guarded.connect() as producer:
        authenticate(consumer)
        consumer.sub(topic, channel, rdy=100)
        authenticate(producer)
        publish_until_asked(producer, server, topic)
        server.answer(b"", 500)
        count = guarded.topic_stats(topic)["message_count"]
        consumer.read_messages(count, finish=True)
        consumer.rdy(5)
        consumer.barrier()


def test_case_123_auth_takes_no_parameters(guarded):
    with guarded.connect() as connection:
        connection.command("AUTH", "x", body=b"secret")
        connection.expect_fatal("E_INVALID AUTH invalid number of parameters")


@pytest.mark.parametrize("size", [0, -1])
def test_case_123_the_secret_must_not_be_empty(size, guarded):
    with guarded.connect() as connection:
        connection.send(b"AUTH\n" + struct.pack(">i", size))
        connection.expect_fatal(f"E_BAD_BODY AUTH invalid body size {size}")


def test_case_123_the_secret_has_a_limit(guarded, server):
    with guarded.connect() as connection:
        connection.send(b"AUTH\n" + struct.pack(">i", 5001))
        connection.expect_fatal("E_BAD_BODY AUTH body too big 5001 > 5000")
    server.grant(ALL)
    with guarded.connect() as connection:
        authenticate(connection, b"x" * 5000)
    assert server.queries[-1].fields["secret"] == "x" * 5000


def test_case_123_end_of_stream_in_the_middle(guarded):
    with guarded.connect() as connection:
        connection.send(b"AUTH\n\x00\x00")
        connection.end_of_stream()
        connection.expect_fatal("E_BAD_BODY AUTH failed to read body size")
    with guarded.connect() as connection:
        connection.send(b"AUTH\n\x00\x00\x00\x05abc")
        connection.end_of_stream()
        connection.expect_fatal("E_BAD_BODY AUTH failed to read body")


def test_case_123_auth_comes_before_sub(guarded, server, topic, channel):
    server.grant(ALL)
    with guarded.connect() as connection:
        authenticate(connection)
        connection.sub(topic, channel)
        connection.command("AUTH", body=b"x")
        connection.expect_fatal("E_INVALID cannot AUTH in current state")


def test_case_124_identify_says_whether_auth_is_required(guarded, broker):
    with guarded.connect() as connection:
        assert connection.identify()["auth_required"] is True
    with broker.connect() as connection:
        assert connection.identify()["auth_required"] is False
