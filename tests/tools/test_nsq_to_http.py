"""nsq_to_http: one request per message, which is finished after success."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from nsparq.option_table import OptionError
from nsparq.tools import nsq_to_http
from nsparq.tools.nsq_to_http import FLOAT, http_headers, parse_headers
from tests.support import TestBroker, start_broker, unique_name, wait_until
from tests.support.polling import DEADLINE

from .processes import (
    Tool,
    WebServer,
    free_address,
    http,
    publish_with_headers,
    tcp,
    wait_until_drained,
    with_headers,
)

# Failed messages are requeued without delay, and back-off takes milliseconds.
QUICK = ("--consumer-opt=default_requeue_delay,0", "--consumer-opt=backoff_multiplier,1ms")


def forward(broker: TestBroker, topic: str, *arguments: str) -> Tool:
    address = f"--nsqd-tcp-address={tcp(broker)}"
    return Tool("nsq_to_http", f"--topic={topic}", "--channel=c", address, *QUICK, *arguments)


def test_every_message_is_posted_as_it_is(broker: TestBroker, topic: str) -> None:
    bodies = [b"one", b"\xff\x00 \r\n binary", b"x" * 100_000]
    with WebServer(204) as server, forward(broker, topic, f"--post={server.url}/in?x=1") as tool:
        broker.publish(topic, *bodies)
        requests = server.wait_for(3)
        wait_until_drained(broker, topic, "c", 3)
        assert tool.terminate() == 0
        assert tool.out() == b""
    assert sorted(request.body for request in requests) == sorted(bodies)
    for request in requests:
        assert (request.method, request.path) == ("POST", "/in?x=1")
        assert request.headers["content-type"] == "application/octet-stream"
        assert request.headers["user-agent"] == "nsq_to_http v1.3.0"
        assert request.headers["host"] == server.url.removeprefix("http://")


def test_headers_and_type_can_be_given_and_replaced(broker: TestBroker, topic: str) -> None:
    given = ("--header=X-One: 1", "--header=user-agent:me: myself", "--content-type=text/plain")
    with WebServer() as server, forward(broker, topic, f"--post={server.url}", *given) as tool:
        broker.publish(topic, b"x")
        (request,) = server.wait_for(1)
        assert tool.terminate() == 0
    assert request.headers["x-one"] == "1"
    assert request.headers["user-agent"] == "me: myself"
    assert request.headers["content-type"] == "text/plain"


def test_a_get_has_the_message_in_its_url_and_only_200_counts(broker: TestBroker, topic: str) -> None:
    with WebServer(204, 200) as server, forward(broker, topic, f"--get={server.url}/?a=%20&d=%s") as tool:
        broker.publish(topic, b"a b&c=\xff/~_.-%s")
        requests = server.wait_for(2)
        wait_until_drained(broker, topic, "c", 1)
        assert tool.terminate() == 0
    assert [request.path for request in requests] == ["/?a=%20&d=a+b%26c%3D%FF%2F~_.-%25s"] * 2
    assert requests[0].method == "GET" and "content-type" not in requests[0].headers


def test_a_refused_message_is_sent_again_until_it_is_accepted(broker: TestBroker, topic: str) -> None:
    with WebServer(500, 503, 302, 200) as server, forward(broker, topic, f"--post={server.url}") as tool:
        broker.publish(topic, b"stubborn")
        server.wait_for(4)
        wait_until_drained(broker, topic, "c", 1)
        assert tool.terminate() == 0
        assert "status 503" in tool.err()
    assert server.bodies() == [b"stubborn"] * 4
    assert broker.channel_stats(topic, "c")["requeue_count"] == 3  # type: ignore[index]


def test_after_five_attempts_it_gives_up_and_says_so(broker: TestBroker, topic: str) -> None:
    with WebServer(500) as server, forward(broker, topic, f"--post={server.url}") as tool:
        broker.publish(topic, b"hopeless")
        tool.wait_for_log("giving up")
        wait_until_drained(broker, topic, "c", 1)
        assert tool.terminate() == 0
    assert len(server.requests) == 5


def test_an_unreachable_destination_is_retried(broker: TestBroker, topic: str) -> None:
    address = free_address()
    more = ("--consumer-opt=max_attempts,0",)
    with forward(broker, topic, f"--post=http://{address}", *more) as tool:
        broker.publish(topic, b"patient")
        tool.wait_for_log(f"http://{address}: message ")
        stats = broker.channel_stats(topic, "c")
        assert stats is not None and stats["depth"] + stats["in_flight_count"] + stats["deferred_count"] == 1
        assert tool.terminate() == 0


def test_headers_of_a_message_become_those_of_the_request(broker: TestBroker, topic: str) -> None:
    headers = {"traceparent": "00-1-2-01", "tenant": "ac\nme", "ce_specversion": "1.0"}
    publish_with_headers(
        broker, topic, b"{}", **headers, ce_subject="a \xfc", content_type="application/json", x_key="no"
    )
    with WebServer() as server:
        options = (f"--post={server.url}", "--header=X-Nsq-Header-x-key: yes")
        with forward(broker, topic, *options) as tool:
            (request,) = server.wait_for(1)
            assert tool.terminate() == 0
    expected = {
        "traceparent": "00-1-2-01",
        "ce-specversion": "1.0",
        "ce-subject": "a%20%C3%BC",
        "content-type": "application/json",
        "x-nsq-header-tenant": "ac%0Ame",
        "x-nsq-header-x-key": "yes",
    }
    assert {name: request.headers[name] for name in expected} == expected
    assert http_headers({"content-type": "text/plain"}) == {"X-Nsq-Header-content-type": "text/plain"}


def test_headers_come_back_over_http(broker: TestBroker, topic: str) -> None:
    """nsq_to_http and nsqd's /pub know the same table."""
    headers = {"tracestate": "a=1", "k": "v", "ce-specversion": "1.0", "ce-subject": '%"\xfc'}
    publish_with_headers(broker, topic, b"one", **headers)
    target = unique_name("target")
    with forward(broker, topic, f"--post=http://{http(broker)}/pub?topic={target}") as tool:
        assert with_headers(broker, target, 1) == [
            (b"one", {**headers, "content-type": "application/octet-stream"})
        ]
        assert tool.terminate() == 0


def test_round_robin_takes_addresses_in_turn_and_keeps_its_connections(
    broker: TestBroker, topic: str
) -> None:
    with WebServer() as one, WebServer() as two:
        addresses = (f"--post={one.url}", f"--post={two.url}")
        with forward(broker, topic, *addresses, "--mode=round-robin", "-n=1", "--status-every=5") as tool:
            broker.publish(topic, *(b"%d" % number for number in range(10)))
            wait_until_drained(broker, topic, "c", 10)
            assert tool.terminate() == 0
            assert tool.err().count("5 requests: average ") == 2
        assert [len(one.requests), len(two.requests)] == [5, 5]
        assert len({request.client for request in one.requests}) == 1


def test_a_host_that_fails_is_left_out_by_default(broker: TestBroker, topic: str) -> None:
    with WebServer(500) as bad, WebServer() as good:
        with forward(broker, topic, f"--post={bad.url}", f"--post={good.url}", "-n=1") as tool:
            broker.publish(topic, *(b"%d" % number for number in range(10)))
            wait_until_drained(broker, topic, "c", 10)
            assert tool.terminate() == 0
        assert len(bad.requests) == 1
        assert Counter(good.bodies()) == Counter(b"%d" % number for number in range(10))


def test_epsilon_greedy_prefers_the_faster_one(broker: TestBroker, topic: str) -> None:
    with WebServer(delay=0.05) as slow, WebServer() as fast:
        addresses = (f"--post={slow.url}", f"--post={fast.url}")
        with forward(broker, topic, *addresses, "--mode=epsilon-greedy", "-n=1") as tool:
            broker.publish(topic, *[b"x"] * 40)
            wait_until_drained(broker, topic, "c", 40)
            assert tool.terminate() == 0
        assert len(fast.requests) > 2 * len(slow.requests) > 0


@pytest.mark.parametrize(("mode", "warns"), [("multicast", False), ("everywhere", True)])
def test_in_any_other_mode_every_address_gets_every_message(
    broker: TestBroker, topic: str, mode: str, warns: bool
) -> None:
    with WebServer() as one, WebServer(500, 200) as two:
        with forward(broker, topic, f"--post={one.url}", f"--post={two.url}", f"--mode={mode}") as tool:
            broker.publish(topic, b"x")
            wait_until_drained(broker, topic, "c", 1)
            assert tool.terminate() == 0
            assert ("unknown mode everywhere" in tool.err()) is warns
        # The second failed at first, so both got it again.
        assert (len(one.requests), len(two.requests)) == (2, 2)


@pytest.mark.parametrize("sample", ["0", "0.5"])
def test_a_share_of_the_messages_can_be_left_out(broker: TestBroker, topic: str, sample: str) -> None:
    with WebServer() as server, forward(broker, topic, f"--post={server.url}", f"--sample={sample}") as tool:
        broker.publish(topic, *[b"x"] * 300)
        wait_until_drained(broker, topic, "c", 300)
        assert tool.terminate() == 0
        assert len(server.requests) == 0 if sample == "0" else 90 < len(server.requests) < 210


def test_running_requests_finish_before_the_end(topic: str) -> None:
    def state() -> int:
        """State of the only client: 3 is subscribed, 4 is closing."""
        return int(broker.channel_stats(topic, "c")["clients"][0]["state"])  # type: ignore[index]

    with start_broker() as broker, WebServer() as server:
        server.released.clear()
        with forward(broker, topic, f"--post={server.url}", "-n=2", "--max-in-flight=2") as tool:
            broker.publish(topic, b"1", b"2", b"3")
            server.wait_for(2)
            tool.signal(signal.SIGTERM)
            wait_until(lambda: state() == 4)
            server.released.set()
            assert tool.wait(DEADLINE) == 0
        stats = broker.channel_stats(topic, "c")
        assert stats is not None
        assert (stats["depth"], stats["in_flight_count"]) == (1, 0)
        assert len(server.requests) == 2


def test_n_limits_the_requests_at_a_time(broker: TestBroker, topic: str) -> None:
    with WebServer(delay=0.05) as server, forward(broker, topic, f"--post={server.url}", "-n=3") as tool:
        broker.publish(topic, *[b"x"] * 9)
        wait_until_drained(broker, topic, "c", 9)
        assert tool.terminate() == 0
        assert server.most_at_a_time == 3
        assert len({request.client for request in server.requests}) == 3


@pytest.mark.parametrize(
    ("texts", "headers"),
    [
        (["X-A: b"], {"X-A": "b"}),
        (["  X-A  :  b c "], {"X-A": "b c"}),
        (["A: b", "C:d"], {"A": "b", "C": "d"}),
        (["A: b: c"], {"A": "b: c"}),
    ],
)
def test_headers_are_names_and_values(texts: list[str], headers: dict[str, str]) -> None:
    assert parse_headers(texts) == headers


@pytest.mark.parametrize("text", ["", ":", "A", "A:", ":b", "  : b", "A b: c", "A: b\r\nC: d", "key=value"])
def test_an_invalid_header_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="should be of the form 'Name: value'"):
        parse_headers([text])


GOOD = ("--topic=t", "--nsqd-tcp-address=127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--topic and --channel are required"),
        (("--topic=t", "--channel="), "--topic and --channel are required"),
        (("--topic=t", "--post=http://a"), "--nsqd-tcp-address or --lookupd-http-address required"),
        (GOOD, "--get or --post required"),
        ((*GOOD, "--post=http://a", "--get=http://a/%s"), "use --get or --post not both"),
        ((*GOOD, "--get=http://a"), "--get http://a must contain %s once, in place of the message"),
        ((*GOOD, "--get=http://a/%s%s"), "--get http://a/%s%s must contain %s once, in place of the message"),
        ((*GOOD, "--post=a.example"), "--post a.example: not an http or https URL"),
        ((*GOOD, "--get=http://a/%s", "--content-type=x"), "--content-type only used with --post"),
        ((*GOOD, "--post=http://a", "--content-type="), "--content-type requires a value when used"),
        ((*GOOD, "--post=http://a", "--sample=1.1"), "--sample must be between 0.0 and 1.0"),
        ((*GOOD, "--post=http://a", "--header=x"), "--header 'x' should be of the form 'Name: value'"),
        ((*GOOD, "--post=http://a", "-n=0"), "--n must be positive"),
    ],
)
def test_invalid_options_are_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    assert nsq_to_http.main(arguments) == 1
    assert capsys.readouterr().err.endswith(f"FATAL: {text}\n")


def test_a_float_is_read_as_go_reads_it() -> None:
    assert FLOAT.from_text("0.5") == 0.5
    with pytest.raises(ValueError, match="parse error"):
        FLOAT.from_text("x")
