"""Group J: publishing by HTTP."""

from __future__ import annotations

import struct
import threading
from urllib.parse import quote

import pytest

from tests.support import JSON, NSQ_HEADER, multi, wait_until
from tests.support.polling import DEADLINE

INT32 = struct.Struct(">i")


def pub(broker, topic, body, **query):
    rest = "".join(f"&{name}={quote(str(value))}" for name, value in query.items())
    return broker.request("POST", f"/pub?topic={topic}{rest}", body)


def mpub(broker, topic, body, **query):
    rest = "".join(f"&{name}={quote(str(value))}" for name, value in query.items())
    return broker.request("POST", f"/mpub?topic={topic}{rest}", body)


def depth(broker, topic):
    """Messages that the topic keeps for its first channel; None if it does not exist."""
    stats = broker.topic_stats(topic)
    return stats["depth"] if stats else None


def consume(broker, topic, count):
    """The bodies that the topic keeps, exactly this many."""
    assert depth(broker, topic) == count
    with broker.connect() as connection:
        connection.sub(topic, "c", rdy=max(count, 1))
        return [message.body for message in connection.read_messages(count, finish=True)]


def test_case_125_pub_stores_the_body_as_the_message(broker, topic):
    pub(broker, topic, b"first\nwith a line break\0").expect_ok()
    stats = broker.topic_stats(topic)
    assert (stats["depth"], stats["message_count"], stats["message_bytes"]) == (1, 1, 24)
    assert consume(broker, topic, 1) == [b"first\nwith a line break\0"]


def test_case_125_messages_of_http_and_tcp_share_the_topic_in_order(broker, topic):
    with broker.connect() as connection, broker.http_connect() as http:
        for number in range(10):
            connection.pub(topic, b"%d tcp" % number)
            http.request("POST", f"/pub?topic={topic}", b"%d http" % number).expect_ok()
    expected = [b"%d %b" % (number, way) for number in range(10) for way in (b"tcp", b"http")]
    assert consume(broker, topic, 20) == expected


def test_case_125_a_waiting_consumer_gets_the_message(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        pub(broker, topic, b"body").expect_ok()
        message = connection.read_message()
        assert (message.body, message.attempts, len(message.id)) == (b"body", 1, 16)


def test_case_125_an_empty_body_is_refused_and_stores_nothing(broker, topic):
    pub(broker, topic, b"one").expect_ok()
    pub(broker, topic, b"").expect_error(400, "MSG_EMPTY")
    pub(broker, topic, []).expect_error(400, "MSG_EMPTY")
    assert depth(broker, topic) == 1


def test_case_125_an_empty_body_does_not_create_the_topic(broker, topic):
    pub(broker, topic, b"").expect_error(400, "MSG_EMPTY")
    assert broker.topic_stats(topic) is None


def test_case_125_publish_while_the_topic_is_deleted_succeeds_or_fails_as_exiting(broker, topic):
    stop = threading.Event()
    unexpected, answered = [], []

    def publish():
        with broker.http_connect() as connection:
            while not stop.is_set() and not unexpected:
                answer = connection.request("POST", f"/pub?topic={topic}", b"body")
                answered.append(answer.status)
                if (answer.status, answer.body) not in ((200, b"OK"), (503, b'{"message":"EXITING"}')):
                    unexpected.append(answer)

    threads = [threading.Thread(target=publish) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            wait_until(lambda: depth(broker, topic) or unexpected)
            broker.control("delete", topic)
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
    assert not unexpected
    assert answered.count(200) >= 20


def test_case_126_pub_body_is_limited(small_broker, topic):
    pub(small_broker, topic, b"x" * 100).expect_ok()
    pub(small_broker, topic, b"x" * 101).expect_error(413, "MSG_TOO_BIG")
    assert depth(small_broker, topic) == 1


def test_case_126_a_chunked_pub_body_is_limited_by_what_it_holds(small_broker, topic):
    pub(small_broker, topic, [b"x" * 60, b"y" * 40]).expect_ok()
    pub(small_broker, topic, [b"x" * 60, b"y" * 41]).expect_error(413, "MSG_TOO_BIG")
    assert consume(small_broker, topic, 1) == [b"x" * 60 + b"y" * 40]


def test_case_126_the_declared_length_alone_decides(small_broker, topic):
    with small_broker.http_connect() as connection:
        connection.send(
            b"POST /pub?topic=%b HTTP/1.1\r\nHost: h\r\nContent-Length: 5000000000\r\n\r\n" % topic.encode()
        )
        connection.read_answer().expect_error(413, "MSG_TOO_BIG")
        connection.expect_closed()
    assert small_broker.topic_stats(topic) is None


def test_case_126_messages_of_the_default_maximum_arrive_whole(broker, topic):
    big = bytes(range(256)) * 4096
    pub(broker, topic, big).expect_ok()
    pub(broker, topic, [big[:500_000], big[500_000:]]).expect_ok()
    pub(broker, topic, big + b"x").expect_error(413, "MSG_TOO_BIG")
    assert consume(broker, topic, 2) == [big, big]


def test_case_127_pub_needs_a_topic(broker):
    broker.request("POST", "/pub", b"x").expect_error(400, "MISSING_ARG_TOPIC")
    broker.request("POST", "/pub?top=t", b"x").expect_error(400, "MISSING_ARG_TOPIC")
    broker.request("POST", "/pub?topic", b"x").expect_error(400, "INVALID_TOPIC")
    # Parameters in the body are not parameters.
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    broker.request("POST", "/pub", b"topic=t", form).expect_error(400, "MISSING_ARG_TOPIC")


def test_case_127_pub_needs_a_valid_topic(broker):
    for name in ("", "t!", "a/b", "é", "n" * 65, "#ephemeral", "t\n"):
        pub(broker, quote(name, safe=""), b"x").expect_error(400, "INVALID_TOPIC")


def test_case_127_ephemeral_topics_and_longest_names_are_valid(broker, topic):
    pub(broker, f"{topic}%23ephemeral", b"x").expect_ok()
    longest = topic + "." * (64 - len(topic))
    pub(broker, longest, b"x").expect_ok()
    assert depth(broker, longest) == 1


@pytest.mark.parametrize("query", ["topic=%zz", "topic=t&a=%", "topic=t&%f", "topic=t;x=y", "topic=t&;"])
def test_case_127_a_query_that_cannot_be_parsed_is_refused(broker, query):
    for path in ("/pub", "/mpub"):
        broker.request("POST", f"{path}?{query}", b"x").expect_error(400, "INVALID_REQUEST")


def test_case_127_of_a_repeated_parameter_the_first_counts(broker, topic):
    broker.request("POST", f"/pub?topic={topic}&topic=t!", b"x").expect_ok()
    broker.request("POST", f"/pub?topic=t!&topic={topic}", b"x").expect_error(400, "INVALID_TOPIC")
    assert depth(broker, topic) == 1


def test_case_127_parameters_are_unescaped(broker, topic):
    escaped = "".join(f"%{byte:02x}" for byte in topic.encode())
    broker.request("POST", f"/pub?%74opic={escaped}&&=&x", b"x").expect_ok()
    assert depth(broker, topic) == 1


def test_case_127_checks_come_in_order(small_broker, topic):
    """Size, emptiness, query, topic present, topic valid, defer."""
    post = small_broker.request
    post("POST", "/pub?%zz", b"x" * 101).expect_error(413, "MSG_TOO_BIG")
    post("POST", "/pub?%zz", [b"x" * 101]).expect_error(413, "MSG_TOO_BIG")
    post("POST", "/pub?%zz", b"").expect_error(400, "MSG_EMPTY")
    post("POST", "/pub", b"").expect_error(400, "MSG_EMPTY")
    post("POST", "/pub?%zz&defer=x", b"x").expect_error(400, "INVALID_REQUEST")
    post("POST", "/pub?defer=x", b"x").expect_error(400, "MISSING_ARG_TOPIC")
    post("POST", "/pub?topic=t!&defer=x", b"x").expect_error(400, "INVALID_TOPIC")
    post("POST", f"/pub?topic={topic}&defer=x", b"x").expect_error(400, "INVALID_DEFER")


def test_case_128_defer_delays_the_message(broker, topic, channel):
    broker.control("create", topic, channel)
    pub(broker, topic, b"later", defer=1000).expect_ok()
    stats = wait_until(
        lambda: (found := broker.channel_stats(topic, channel))["deferred_count"] == 1 and found
    )
    assert (stats["depth"], stats["message_count"]) == (0, 1)
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        connection.expect_silence(0.3)
        assert connection.read_message().body == b"later"


@pytest.mark.parametrize("value", ["1000", "+1000", "0000000500", "1"])
def test_case_128_defer_takes_integers_up_to_the_maximum(small_broker, topic, value):
    pub(small_broker, topic, b"x", defer=value).expect_ok()
    assert small_broker.topic_stats(topic)["message_count"] == 1


@pytest.mark.parametrize("value", ["0", "-0", "+0"])
def test_case_128_defer_of_0_is_an_ordinary_publish(broker, topic, channel, value):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        pub(broker, topic, b"now", defer=value).expect_ok()
        assert connection.read_message().body == b"now"


def test_case_128_other_values_of_defer_are_refused(small_broker, topic):
    for value in ("abc", "-1", "", "1001", "1.5", " 5", "1_0", "٣", "9" * 20):
        pub(small_broker, topic, b"x", defer=value).expect_error(400, "INVALID_DEFER")
    # The topic check came first, and created it.
    assert depth(small_broker, topic) == 0


def test_case_129_mpub_takes_a_message_per_line(broker, topic):
    mpub(broker, topic, b"one\ntwo\nthree\nfour").expect_ok()
    assert consume(broker, topic, 4) == [b"one", b"two", b"three", b"four"]


def test_case_129_a_final_newline_and_empty_lines_add_nothing(broker, topic):
    mpub(broker, topic, b"one\ntwo\n").expect_ok()
    mpub(broker, topic, b"\n\nthree\n\n\nfour\n\n").expect_ok()
    assert consume(broker, topic, 4) == [b"one", b"two", b"three", b"four"]


def test_case_129_mpub_chunked_lines_may_be_cut_anywhere(broker, topic):
    mpub(broker, topic, [b"on", b"e\n", b"two", b"\n", b"\n", b"three"]).expect_ok()
    assert consume(broker, topic, 3) == [b"one", b"two", b"three"]


def test_case_130_a_carriage_return_stays_part_of_the_message(broker, topic):
    mpub(broker, topic, b"one\r\n\r\ntwo\0three\r").expect_ok()
    assert consume(broker, topic, 3) == [b"one\r", b"\r", b"two\0three\r"]


@pytest.mark.parametrize("body", [b"", b"\n", b"\n\n\n", []], ids=["empty", "line", "lines", "chunked"])
def test_case_130_nothing_but_newlines_stores_nothing_and_is_ok(broker, topic, body):
    mpub(broker, topic, body).expect_ok()
    stats = broker.topic_stats(topic)
    assert (stats["depth"], stats["message_count"]) == (0, 0)


@pytest.mark.parametrize("value", ["true", "", "False", "2"])
def test_case_131_mpub_binary_takes_the_body_of_the_tcp_command(broker, topic, value):
    """Everything but false and 0 selects it."""
    bodies = [b"one", b"two\nlines", b"\0", b"\n", b"five"]
    mpub(broker, topic, multi(bodies), binary=value).expect_ok()
    assert consume(broker, topic, 5) == bodies


def test_case_131_mpub_binary_without_a_value_is_binary(broker, topic):
    broker.request("POST", f"/mpub?topic={topic}&binary", multi([b"one"])).expect_ok()
    assert consume(broker, topic, 1) == [b"one"]


@pytest.mark.parametrize("value", ["false", "0"])
def test_case_131_mpub_binary_false_is_text(broker, topic, value):
    mpub(broker, topic, b"one\ntwo", binary=value).expect_ok()
    assert consume(broker, topic, 2) == [b"one", b"two"]


def test_case_131_mpub_binary_may_come_chunked_and_have_a_tail(small_broker, topic):
    whole = multi([b"one", b"two"])
    mpub(small_broker, topic, [whole[:5], whole[5:12], whole[12:]], binary="true").expect_ok()
    mpub(small_broker, topic, multi([b"three"]) + b"ignored", binary="true").expect_ok()
    assert consume(small_broker, topic, 3) == [b"one", b"two", b"three"]


BAD_COUNTS = {
    "empty": b"",
    "cut": b"\0\0",
    "0": INT32.pack(0),
    "negative": INT32.pack(-1) + INT32.pack(1) + b"x",
    "more than fit": INT32.pack(200) + INT32.pack(1) + b"x",
    "largest": INT32.pack(2**31 - 1),
}
BAD_MESSAGES = {
    "no size": INT32.pack(1),
    "size cut": INT32.pack(1) + b"\0\0\0",
    "size 0": INT32.pack(2) + INT32.pack(1) + b"x" + INT32.pack(0),
    "size negative": INT32.pack(2) + INT32.pack(1) + b"x" + INT32.pack(-1),
    "too big": INT32.pack(2) + INT32.pack(1) + b"x" + INT32.pack(101) + b"x" * 101,
    "body cut": INT32.pack(2) + INT32.pack(1) + b"x" + INT32.pack(5) + b"four",
    "one missing": INT32.pack(3) + INT32.pack(1) + b"x" + INT32.pack(1) + b"y",
}


@pytest.mark.parametrize("case", BAD_COUNTS)
def test_case_132_mpub_binary_bad_count(small_broker, topic, case):
    body = BAD_COUNTS[case]
    for given in (body, [body] if body else body):  # whole and in chunks
        mpub(small_broker, topic, given, binary="true").expect_error(413, "BAD_BODY")
    assert depth(small_broker, topic) == 0


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_case_132_mpub_binary_bad_message_stores_nothing(small_broker, topic, case):
    for body in (BAD_MESSAGES[case], [BAD_MESSAGES[case]]):  # whole and in chunks
        mpub(small_broker, topic, body, binary="true").expect_error(413, "BAD_MESSAGE")
    assert depth(small_broker, topic) == 0


def test_case_132_mpub_binary_the_largest_count_is_accepted(small_broker, topic):
    mpub(small_broker, topic, multi([b"x"] * 199), binary="1").expect_ok()
    assert depth(small_broker, topic) == 199


@pytest.mark.parametrize("binary", ["true", "false"])
def test_case_132_mpub_body_is_limited(small_broker, topic, binary):
    mpub(small_broker, topic, b"x" * 1001, binary=binary).expect_error(413, "BODY_TOO_BIG")
    assert small_broker.topic_stats(topic) is None


def test_case_132_mpub_text_exactly_the_largest_body(small_broker, topic):
    mpub(small_broker, topic, b"x\n" * 500).expect_ok()
    mpub(small_broker, topic, [b"x\n" * 300, b"x\n" * 200]).expect_ok()
    assert depth(small_broker, topic) == 1000


def test_case_132_mpub_text_chunked_body_is_limited_by_what_it_holds(small_broker, topic):
    mpub(small_broker, topic, [b"x\n" * 300, b"x\n" * 200, b"y"]).expect_error(413, "BODY_TOO_BIG")
    # Whether the topic is there by now depends on when the body is read.
    assert not depth(small_broker, topic)


@pytest.mark.deviation("NSQ reads a chunked binary body of any length, as long as its messages go on")
def test_case_132_mpub_binary_chunked_body_is_limited_too(small_broker, topic):
    whole = multi([b"x" * 100] * 10)
    assert len(whole) == 1044
    mpub(small_broker, topic, [whole], binary="true").expect_error(413, "BODY_TOO_BIG")
    assert not depth(small_broker, topic)


@pytest.mark.parametrize("body", [b"x" * 101, b"ok\n" + b"x" * 101 + b"\nok", b"x" * 100 + b"\r\n"])
def test_case_132_mpub_text_one_message_too_big_stores_nothing(small_broker, topic, body):
    mpub(small_broker, topic, body).expect_error(413, "MSG_TOO_BIG")
    mpub(small_broker, topic, [body]).expect_error(413, "MSG_TOO_BIG")
    assert depth(small_broker, topic) == 0
    mpub(small_broker, topic, b"x" * 100 + b"\n" + b"y" * 100).expect_ok()
    assert depth(small_broker, topic) == 2


def test_case_132_mpub_checks_come_in_order(small_broker, topic):
    """Declared size, query, topic present, topic valid, contents."""
    post = small_broker.request
    post("POST", "/mpub?%zz", b"x" * 1001).expect_error(413, "BODY_TOO_BIG")
    post("POST", "/mpub?%zz", b"").expect_error(400, "INVALID_REQUEST")
    post("POST", "/mpub?binary=true", b"").expect_error(400, "MISSING_ARG_TOPIC")
    post("POST", "/mpub?topic=t!&binary=true", b"").expect_error(400, "INVALID_TOPIC")
    post("POST", f"/mpub?topic={topic}&binary=true", b"").expect_error(413, "BAD_BODY")
    # The topic check came first, and created it.
    assert depth(small_broker, topic) == 0


def test_case_132_mpub_ignores_defer(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=2)
        mpub(broker, topic, b"one\ntwo", defer="x").expect_ok()
        assert {message.body for message in connection.read_messages(2)} == {b"one", b"two"}


def test_case_133_answers_carry_the_header_of_nsq(broker, topic):
    """Every other case checks it too; only /ping lacks it."""
    for method, target, body in (
        ("POST", f"/pub?topic={topic}", b"x"),
        ("POST", f"/mpub?topic={topic}", b"x"),
        ("POST", "/pub", b"x"),
        ("POST", f"/topic/create?topic={topic}", None),
        ("GET", "/stats", None),
        ("GET", "/stats?format=json", None),
        ("GET", "/info", None),
        ("GET", "/config/log_level", None),
        ("GET", "/config/nope", None),
        ("GET", "/nope", None),
        ("GET", "/pub", None),
    ):
        answer = broker.request(method, target, body)
        assert answer.header("X-NSQ-Content-Type") == NSQ_HEADER, target
    assert broker.request("GET", "/ping").header("X-NSQ-Content-Type") is None


def test_case_133_what_clients_accept_is_ignored(broker, topic):
    headers = {"Accept": "application/vnd.nsq; version=1.0", "Accept-Encoding": "gzip", "User-Agent": "x"}
    broker.request("POST", f"/pub?topic={topic}", b"x", headers).expect_ok()
    answer = broker.request("GET", "/stats?format=json", None, {**headers, "Accept": "text/html"})
    assert (answer.status, answer.header("Content-Type")) == (200, JSON)
    assert answer.header("Content-Encoding") is None
