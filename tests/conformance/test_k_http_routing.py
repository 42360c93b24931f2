"""Group K: paths, methods, redirects, and the rules of HTTP/1.1."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

import pytest

from tests.support import JSON, NSQ_HEADER, TEXT, ConnectionClosed

METHODS = {
    "/ping": "GET",
    "/info": "GET",
    "/stats": "GET",
    "/pub": "POST",
    "/mpub": "POST",
    **{
        f"/{kind}/{action}": "POST"
        for kind in ("topic", "channel")
        for action in ("create", "delete", "empty", "pause", "unpause")
    },
    "/config/log_level": "GET, PUT",
    "/config/nope": "GET, PUT",
    "/debug/freememory": "POST",
}
EVERY_METHOD = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE")


def allowed(path):
    return ", ".join(sorted([*METHODS[path].split(", "), "OPTIONS"]))


def test_case_140_another_method_is_not_allowed(broker):
    """HEAD is not implied by GET."""
    with broker.http_connect() as connection:
        for path, method in product(METHODS, EVERY_METHOD):
            if method in METHODS[path].split(", "):
                continue
            answer = connection.request(method, path)
            assert answer.header("Allow") == allowed(path), (path, method, answer)
            if method == "HEAD":
                assert (answer.status, answer.header("Content-Length")) == (405, "32")
            else:
                answer.expect_error(405, "METHOD_NOT_ALLOWED")


@pytest.mark.parametrize("method", ["FOO", "get"])
def test_case_140_an_unknown_method_is_not_allowed_or_not_http(broker, method):
    """They are case-sensitive."""
    assert broker.request(method, "/ping").status in (400, 405)


def test_case_140_options_are_answered_with_what_is_allowed(broker):
    for path in METHODS:
        answer = broker.request("OPTIONS", path)
        assert (answer.status, answer.body, answer.header("Allow")) == (200, b"", allowed(path))
        assert answer.header("X-NSQ-Content-Type") is None
        assert answer.header("Content-Type") is None


UNKNOWN = ["/", "/pin", "/pingg", "/ping/x", "/topic", "/topic/", "/channel/create/x", "/config", "/config/"]
UNKNOWN += ["/config/log_level/x", "/static/../../etc/passwd", "/ping%00"]


def test_case_140_an_unknown_path_is_not_found(broker):
    with broker.http_connect() as connection:
        for method, path in product(("GET", "POST", "OPTIONS"), UNKNOWN):
            connection.request(method, path).expect_error(404, "NOT_FOUND")
        answer = connection.request("HEAD", "/nope")
        assert (answer.status, answer.header("Content-Length")) == (404, "23")


@pytest.mark.parametrize("path", [b"/%zz", b"/ping%2", b"/ping\xff"])
def test_case_140_what_cannot_be_a_path_is_not_found_or_not_http(broker, path):
    assert broker.request("GET", path).status in (400, 404)


def test_case_140_the_deprecated_forms_do_not_exist(broker):
    actions = ("create", "delete", "empty", "pause", "unpause")
    forms = [f"{action}_{kind}" for action, kind in product(actions, ("topic", "channel"))]
    for form in ["put", "mput", *forms]:
        broker.request("POST", f"/{form}?topic=t&channel=c", b"x").expect_error(404, "NOT_FOUND")


def test_case_140_escapes_in_the_path_are_undone(broker):
    assert broker.request("GET", "/%70in%67").body == b"OK"
    broker.request("GET", "/config/%6cog_level").expect_json()


def test_case_140_a_target_may_be_a_whole_address(broker):
    assert broker.request("GET", "http://somewhere:1234/ping?x").body == b"OK"


REDIRECTS = {
    "/ping/": "/ping",
    "/ping/?a=b&c=%20d": "/ping?a=b&c=%20d",
    "/PING": "/ping",
    "/Stats?format=json": "/stats?format=json",
    "//ping": "/ping",
    "/stats//": "/stats",
}


def test_case_152_get_is_redirected_to_the_proper_path(broker):
    for target, location in REDIRECTS.items():
        answer = broker.request("GET", target)
        assert (answer.status, answer.header("Location")) == (301, location)
        assert answer.header("X-NSQ-Content-Type") is None


@pytest.mark.parametrize("target", ["/PUB?topic=t", "/pub/?topic=t", "//pub?topic=t"])
def test_case_152_other_methods_are_redirected_with_their_method(broker, target):
    answer = broker.request("POST", target, b"x")
    # 307 or 308, depending on the build of NSQ.
    assert answer.status == 308 or (answer.status == 307 and broker.is_reference)
    assert answer.header("Location") == "/pub?topic=t"
    assert answer.header("X-NSQ-Content-Type") is None


def test_case_152_topics_and_channels_are_redirected_too(broker):
    answer = broker.request("POST", "/Topic/CREATE/?topic=t")
    assert answer.header("Location") == "/topic/create?topic=t"


def test_case_152_a_redirected_request_has_done_nothing(broker, topic):
    broker.request("POST", f"/pub/?topic={topic}", b"x")
    assert broker.topic_stats(topic) is None


@pytest.mark.parametrize(
    "target",
    [
        "/ping/?a=%0d%0aX-Injected:%20yes",
        "/PING?%0D%0A%0D%0A<html>",
        "/ping%0d%0aX-Injected:%20yes/",
        "//x/ping",
    ],
)
def test_case_152_a_redirect_leads_nowhere_else(broker, target):
    """It reaches neither the headers of the answer nor another host."""
    answer = broker.request("GET", target)
    assert answer.status in (301, 404)
    assert answer.header("X-Injected") is None
    location = answer.header("Location") or "/ping"
    assert location.startswith("/ping") and "\r" not in location and "\n" not in location


# Rules of HTTP/1.1 without a case number. More in tests/http/test_server.py.


def test_chunks_may_have_extensions_and_trailers(broker, topic):
    head = b"POST /pub?topic=%b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % topic.encode()
    with broker.http_connect() as connection:
        connection.send(head + b"3;name=value\r\none\r\n000004;x\r\nmore\r\n0\r\nTrailer: x\r\n\r\n")
        connection.read_answer().expect_ok()
        connection.send(head + b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n")
        connection.read_answer().expect_ok()
    with broker.connect() as consumer:
        consumer.sub(topic, "c", rdy=2)
        assert [message.body for message in consumer.read_messages(2)] == [b"onemore", b"0123456789" * 2]


def test_a_body_that_is_too_big_is_refused_before_it_is_sent(small_broker, topic):
    with small_broker.http_connect() as connection:
        connection.send(
            b"POST /pub?topic=%b HTTP/1.1\r\nHost: h\r\nContent-Length: 101\r\nExpect: 100-continue\r\n\r\n"
            % topic.encode()
        )
        connection.read_answer().expect_error(413, "MSG_TOO_BIG")


def test_http_1_0_closes_unless_asked_to_stay(broker):
    with broker.http_connect() as connection:
        connection.send(b"GET /ping HTTP/1.0\r\n\r\n")
        assert connection.read_answer().body == b"OK"
        connection.expect_closed()
    with broker.http_connect() as connection:
        for _ in range(2):
            connection.send(b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            answer = connection.read_answer()
            assert answer.body == b"OK" and answer.header("Connection") == "keep-alive"


NOT_HTTP = {
    "words": b"garbage\r\n\r\n",
    "zeros": b"\0\0\0\0\r\n\r\n",
    "the TCP protocol": b"  V2IDENTIFY\n\0\0\0\2{}",
    "TLS": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160) + b"\n\n",
    "no slash": b"GET ping HTTP/1.1\r\nHost: h\r\n\r\n",
    "no host": b"GET /ping HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /ping HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "header without a colon": b"GET /ping HTTP/1.1\r\nHost: h\r\nBad\r\n\r\n",
    "a blank before the colon": b"GET /ping HTTP/1.1\r\nHost : h\r\n\r\n",
    "bytes in the method": b"G\xffT /ping HTTP/1.1\r\nHost: h\r\n\r\n",
    "zero in the path": b"GET /pi\0ng HTTP/1.1\r\nHost: h\r\n\r\n",
    "delete in the query": b"GET /ping?\x7f HTTP/1.1\r\nHost: h\r\n\r\n",
    "zero in a header": b"GET /ping HTTP/1.1\r\nHost: h\r\nX: a\0b\r\n\r\n",
}


@pytest.mark.parametrize("case", NOT_HTTP)
def test_bytes_that_are_not_http_get_a_plain_400_and_the_end(broker, case):
    with broker.http_connect() as connection:
        connection.send(NOT_HTTP[case])
        answer = connection.read_answer()
        assert (answer.status, answer.header("Content-Type")) == (400, TEXT)
        assert answer.body.startswith(b"400 Bad Request") and answer.says_close
        connection.expect_closed()


@pytest.mark.parametrize("line", [b"GET /ping HTTP/2.0", b"GET /ping HTTP/0.9", b"GET /ping"])
def test_another_major_version_is_refused(broker, line):
    with broker.http_connect() as connection:
        connection.send(line + b"\r\nHost: h\r\n\r\n")
        assert connection.read_answer().status in (400, 505)
        connection.expect_closed()


@pytest.mark.parametrize(
    "body",
    [b"zz\r\nabc\r\n0\r\n\r\n", b"3\r\nabcX\r\n0\r\n\r\n", b"-3\r\nabc\r\n0\r\n\r\n", b"f" * 17 + b"\r\n"],
    ids=["no number", "no end", "negative", "too large"],
)
def test_an_invalid_chunked_body_stores_nothing(broker, topic, body):
    head = b"POST /pub?topic=%b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % topic.encode()
    with broker.http_connect() as connection:
        connection.send(head + body)
        answer = connection.read_answer()
        assert answer.status == 400 or (answer.status, answer.body) == (500, b'{"message":"INTERNAL_ERROR"}')
        connection.expect_closed()
    assert broker.topic_stats(topic) is None


@pytest.mark.parametrize(
    "head", [b"Content-Length: 10\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\nf\r\nabc"]
)
def test_a_body_that_breaks_off_stores_nothing(broker, topic, head):
    with broker.http_connect() as connection:
        connection.send(b"POST /pub?topic=%b HTTP/1.1\r\nHost: h\r\n%b" % (topic.encode(), head))
        connection.end_of_stream()
        try:
            assert connection.read_answer().status in (400, 500)
        except ConnectionClosed:
            assert not broker.is_reference
        connection.expect_closed()
    assert broker.topic_stats(topic) is None


def test_case_145_the_api_is_served_on_a_unix_socket_and_has_no_ports_then(own_broker, topic):
    with tempfile.TemporaryDirectory(prefix="nsparq-") as directory:
        path = Path(directory) / "http.sock"
        broker = own_broker(http_address=str(path), tcp_address=str(Path(directory) / "tcp.sock"))
        assert path.is_socket()
        with broker.http_connect() as connection:
            assert connection.request("GET", "/ping").body == b"OK"
            connection.request("POST", f"/pub?topic={topic}", b"x").expect_ok()
            assert connection.request("GET", "/stats?format=json").json()["topics"][0]["depth"] == 1
            info = connection.request("GET", "/info").json()
            assert (info["tcp_port"], info["http_port"]) == (-1, -1)
        broker.stop()


def test_no_http_without_an_address(own_process):
    broker = own_process(http_address="")
    assert broker.http_address is None
    with broker.connect() as connection:
        connection.pub("t", b"x")
    assert " HTTP: listening" not in broker.stderr_text()


@pytest.mark.parametrize("target", ["/ping", "/stats?format=json"])
def test_a_body_where_none_is_needed_is_ignored(broker, target):
    with broker.http_connect() as connection:
        for body in (b"GET /nope HTTP/1.1\r\n\r\n", [b"x" * 10_000]):
            answer = connection.request("GET", target, body)
            assert answer.status == 200
            if target != "/ping":
                assert (answer.header("Content-Type"), answer.header("X-NSQ-Content-Type")) == (
                    JSON,
                    NSQ_HEADER,
                )
