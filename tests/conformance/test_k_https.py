"""Group K: HTTPS, and the plain port while TLS is required."""

from __future__ import annotations

import ssl

import pytest

from nsparq.options import TlsRequired
from tests.support import JSON, NSQ_HEADER, ConnectionClosed
from tests.support.certificates import certificates


@pytest.fixture(scope="module")
def tls_broker(shared_broker):
    return lambda **more: shared_broker(**certificates().server_flags(**more))


def https(broker, pair=None):
    return broker.http_connect(https=True, tls=certificates().client_context(pair))


def verifying(broker_of):
    """A broker that requires certificates of our authority, and so TLS."""
    return broker_of(tls_client_auth_policy="require-verify", tls_root_ca_file=str(certificates().ca.cert))


def test_https_serves_the_same_api(tls_broker, topic):
    broker = tls_broker()
    with https(broker) as connection:
        assert connection.request("GET", "/ping").body == b"OK"
        connection.request("POST", f"/pub?topic={topic}", b"secret").expect_ok()
        connection.request("POST", f"/mpub?topic={topic}", [b"x" * 50_000 + b"\n", b"y" * 50_000]).expect_ok()
        connection.request("POST", f"/topic/pause?topic={topic}").expect_empty()
        stats = connection.request("GET", f"/stats?format=json&topic={topic}").expect_json()
        assert stats["topics"][0]["depth"] == 3
        connection.request("GET", "/nope").expect_error(404, "NOT_FOUND")
    # The plain port is still there.
    assert broker.request("GET", "/ping").body == b"OK"


@pytest.mark.parametrize(
    "method, target", [("GET", "/ping"), ("POST", "/pub?topic=t"), ("PUT", "/nope"), ("GET", "/")]
)
def test_case_149_plain_http_is_refused_while_tls_is_required(tls_broker, method, target):
    broker = tls_broker(tls_required=TlsRequired.YES)
    with broker.http_connect() as connection:
        for body in (None, b"x" * 1000):
            answer = connection.request(method, target, body)
            assert answer.status == 403
            # With exactly these blanks.
            text = '{"message": "TLS_REQUIRED", "https_port": %d}'
            assert answer.body.decode() == text % broker.https_address[1]
            assert answer.header("Content-Type") == JSON
            assert answer.header("X-NSQ-Content-Type") == NSQ_HEADER


def test_case_149_https_works_while_tls_is_required(tls_broker, topic):
    broker = tls_broker(tls_required=TlsRequired.YES)
    with https(broker) as connection:
        connection.request("POST", f"/pub?topic={topic}", b"x").expect_ok()
        assert connection.request("GET", "/config/tls_required").expect_json() == 2


def test_case_149_require_verify_takes_certificates_of_its_authority(tls_broker, topic):
    with https(verifying(tls_broker), certificates().client) as connection:
        connection.request("POST", f"/pub?topic={topic}", b"x").expect_ok()
        assert connection.request("GET", "/config/tls_client_auth_policy").body == b"require-verify"


@pytest.mark.parametrize("shown", ["none", "foreign"])
def test_case_149_require_verify_refuses_any_other(tls_broker, topic, shown):
    broker = verifying(tls_broker)
    pair = certificates().foreign if shown == "foreign" else None
    # In TLS 1.3 the refusal comes after the client's side of the handshake is done.
    with pytest.raises((ssl.SSLError, ConnectionError, ConnectionClosed)):
        with https(broker, pair) as connection:
            connection.request("POST", f"/pub?topic={topic}", b"x")
    with https(broker, certificates().client) as connection:
        stats = connection.request("GET", f"/stats?format=json&topic={topic}").expect_json()
        assert stats["topics"] is None


def test_case_149_a_policy_implies_that_tls_is_required(tls_broker):
    broker = verifying(tls_broker)
    assert broker.request("GET", "/ping").status == 403


@pytest.mark.parametrize("shown, served", [("none", False), ("foreign", True), ("client", True)])
def test_case_149_require_takes_any_certificate_but_not_none(tls_broker, shown, served):
    broker = tls_broker(tls_client_auth_policy="require")
    pair = getattr(certificates(), shown) if shown != "none" else None
    try:
        with https(broker, pair) as connection:
            assert connection.request("GET", "/ping").body == b"OK"
            assert served
    except (ssl.SSLError, ConnectionError, ConnectionClosed):
        assert not served


def test_case_150_plain_http_stays_open_with_tcp_https(tls_broker, topic):
    broker = tls_broker(tls_required=TlsRequired.EXCEPT_HTTP)
    broker.request("POST", f"/pub?topic={topic}", b"x").expect_ok()
    assert broker.request("GET", "/config/tls_required").expect_json() == 1
    with https(broker) as connection:
        assert connection.request("GET", "/ping").body == b"OK"


def test_case_150_plain_http_stays_open_with_tcp_https_and_a_policy(tls_broker):
    broker = tls_broker(
        tls_required=TlsRequired.EXCEPT_HTTP,
        tls_client_auth_policy="require-verify",
        tls_root_ca_file=str(certificates().ca.cert),
    )
    assert broker.request("GET", "/ping").body == b"OK"
    with pytest.raises((ssl.SSLError, ConnectionError, ConnectionClosed)):
        with https(broker) as connection:
            connection.request("GET", "/ping")


def test_plain_http_on_the_https_port_is_answered_or_closed(tls_broker):
    broker = tls_broker()
    with broker.http_connect(https=True) as connection:
        connection.send(b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n")
        said = connection.read_to_end()
        # NSQ answers 400 in plain text; a TLS alert or nothing is accepted too.
        assert said.startswith(b"HTTP/1.0 400 ") or said[:1] in (b"", b"\x15")


def test_config_has_the_paths_of_the_certificates(tls_broker):
    broker = tls_broker()
    broker.request("GET", "/config/tls_cert").expect_text(str(certificates().server.cert))
    broker.request("GET", "/config/tls_key").expect_text(str(certificates().server.key))
