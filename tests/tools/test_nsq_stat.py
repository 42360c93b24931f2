"""nsq_stat: the sum over all nsqds, line by line, in NSQ's layout."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import signal
import sys
import time
from typing import Any

import pytest

from nsparq.client import Config
from nsparq.fetch import Answer
from nsparq.tools import nsq_stat
from nsparq.tools.cluster import AskFailed, ChannelFigures, Cluster
from tests.support import TestBroker, start_broker, wait_until
from tests.support.lookupd import start_lookupd
from tests.support.polling import DEADLINE

from .processes import Tool, WebServer, command, environment, free_address, http, run_tool, tcp

HEADER = (
    "------rate------+----------------depth----------------+---------------metadata---------------"
    "+-----lag------\n"
    "ingress  egress |   total     mem    disk inflt   def |     req     t-o         msgs clients "
    "|    age  drain\n"
)
ROW = re.compile(r" *-?\d+ +-?\d+ \| +\d+ +\d+ +\d+ +\d+ +\d+ \| +\d+ +\d+ +\d+ +\d+ \| +\w+ +[-\w]+\n")


def stat(broker: TestBroker, topic: str, *arguments: str) -> tuple[str, ...]:
    return (f"--topic={topic}", "--channel=c", f"--nsqd-http-address={http(broker)}", *arguments)


def test_it_prints_a_header_and_the_requested_number_of_lines(broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, b"1", b"2", b"3", b"4", b"5")
    with broker.connect() as connection:
        connection.identify()
        connection.sub(topic, "c", rdy=3)
        first, second, _ = connection.read_messages(3)
        connection.rdy(0)
        connection.fin(first.id)
        connection.req(second.id, 0)
        connection.barrier()
        done = run_tool("nsq_stat", *stat(broker, topic, "--count=2", "--interval=100ms"))
    assert (done.status, done.err) == (0, "")
    line = "      0       0 |       3       3       0     1     0 |       1       0            5       1"
    assert done.out.decode().startswith(HEADER)
    rows = done.out.decode().removeprefix(HEADER).splitlines()
    assert [row.rpartition(" |")[0] for row in rows] == [line, line]
    # The time to drain is unknown at first.
    assert all(re.fullmatch(r" +\d+[sm] +\S+", row.rpartition(" |")[2]) for row in rows)


def test_a_lag_is_shown_in_few_characters_and_that_of_the_slowest_nsqd() -> None:
    shown = [nsq_stat.short(one) for one in (None, math.inf, 0.0, 99.4, 100, 5999, 12_600, 36_000, 2e6)]
    assert shown == ["-", "never", "0s", "99s", "2m", "1.7h", "3.5h", "10h", "23d"]
    slow, fast = ChannelFigures(1, age_s=9.0, drain_s=math.inf), ChannelFigures(1, age_s=2.0, drain_s=4)
    foreign = ChannelFigures(1)
    total = slow + fast + foreign
    assert (total.depth, total.age_s, total.drain_s) == (3, 9.0, math.inf)
    assert (foreign + foreign).age_s is None


def test_rates_are_per_second_and_the_header_comes_again(broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "c")
    with Tool("nsq_stat", *stat(broker, topic, "--interval=20ms", "--count=50")) as tool:
        tool.wait_for_out(b"\n")
        while tool.process.poll() is None:
            broker.publish(topic, b"x", b"y")
            time.sleep(0.01)
        assert tool.wait() == 0
        text = tool.out().decode()
    assert text.startswith(HEADER)
    blocks = text.split(HEADER)[1:]
    # The first poll has no earlier one to compare with.
    assert [block.count("\n") for block in blocks] == [24, 25, 1]
    rows = [line for block in blocks for line in block.splitlines(keepends=True)]
    assert all(ROW.fullmatch(row) for row in rows)
    assert any(int(row.split()[0]) > 0 for row in rows)


def test_figures_of_several_nsqds_are_summed(topic: str) -> None:
    with start_lookupd() as lookupd:
        flags = {
            "lookupd_tcp_address": ("{}:{}".format(*lookupd.address),),
            "broadcast_address": "127.0.0.1",
        }
        with start_broker(**flags) as one, start_broker(**flags) as two, start_broker(**flags) as other:
            for broker, count in ((one, 2), (two, 3)):
                broker.control("create", topic, "c")
                broker.publish(topic, *[b"x"] * count)
            other.publish("another", b"x")
            # Until the first has registered it, /lookup answers 404.
            wait_until(lambda: sum(topic in node["topics"] for node in lookupd.nodes()) == 2)
            wanted = ("--count=1", "--interval=50ms")
            by_lookup = run_tool(
                "nsq_stat",
                f"--topic={topic}",
                "--channel=c",
                f"--lookupd-http-address={http(lookupd)}",
                *wanted,
            )
            more = [f"--nsqd-http-address={http(broker)}" for broker in (two, other)]
            by_address = run_tool("nsq_stat", *stat(one, topic, *more, *wanted))
    line = "      0       0 |       5       5       0     0     0 |       0       0            5       0 |"
    assert (by_lookup.status, by_address.status) == (0, 0)
    assert by_lookup.out.decode().startswith(HEADER + line)
    assert by_address.out.decode().startswith(HEADER + line)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_status_0(broker: TestBroker, topic: str, signum: int) -> None:
    broker.control("create", topic, "c")
    with Tool("nsq_stat", *stat(broker, topic)) as tool:
        tool.wait_for_out(HEADER.encode())
        tool.signal(signum)
        assert tool.wait(DEADLINE) == 0


def test_a_missing_channel_or_nsqd_is_fatal(broker: TestBroker, topic: str) -> None:
    def refused(*arguments: str) -> str:
        done = run_tool("nsq_stat", f"--topic={topic}", "--channel=c", *arguments)
        assert (done.status, done.out.decode()) == (1, HEADER)
        return done.err

    assert f"FATAL: the topic {topic} has no channel c\n" in refused(f"--nsqd-http-address={http(broker)}")
    broker.control("create", topic)
    assert "has no channel c" in refused(f"--nsqd-http-address={http(broker)}")
    assert "Connection refused" in refused(f"--nsqd-http-address={free_address()}")
    assert "Connection refused" in refused(
        f"--nsqd-http-address={http(broker)}", f"--nsqd-http-address={free_address()}"
    )
    with start_lookupd() as lookupd:
        found = refused(f"--lookupd-http-address={http(lookupd)}")
    assert f"no nsqd has the topic {topic}" in found


def test_a_lost_nsqd_ends_it(topic: str) -> None:
    with start_broker() as broker:
        broker.control("create", topic, "c")
        with Tool("nsq_stat", *stat(broker, topic, "--interval=20ms")) as tool:
            wait_until(lambda: tool.out().count(b"\n") > 3)
            broker.stop()
            assert tool.wait() == 1
            assert "FATAL: GET http://" in tool.err()


def test_a_closed_reader_prints_no_traceback(broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "c")
    reading, writing = os.pipe()
    with Tool("nsq_stat", *stat(broker, topic, "--interval=10ms"), stdout=writing) as tool:
        os.close(writing)
        assert os.read(reading, 10)
        os.close(reading)
        assert tool.wait() == 1
        assert tool.err() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--topic and --channel are required"),
        (("--topic=t",), "--topic and --channel are required"),
        (("--topic=t", "--channel=c"), "--nsqd-http-address or --lookupd-http-address required"),
        (
            ("--topic=t", "--channel=c", "--nsqd-http-address=a:1", "--lookupd-http-address=a:1"),
            "use --nsqd-http-address or --lookupd-http-address not both",
        ),
        (
            ("--topic=t", "--channel=c", "--nsqd-http-address=http://a:1"),
            "--nsqd-http-address is host:port, without http://",
        ),
        (
            ("--topic=t", "--channel=c", "--lookupd-http-address=http://a:1"),
            "--lookupd-http-address is host:port, without http://",
        ),
        (("--topic=t", "--channel=c", "--interval=0s"), "--interval should be positive"),
        (("--topic=t", "--channel=c", "--count=0"), "--count should be positive"),
        (
            ("--topic=t", "--channel=c", "--http-client-connect-timeout=0s"),
            "--http-client-connect-timeout must be positive",
        ),
    ],
)
def test_invalid_options_are_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    assert nsq_stat.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(f"FATAL: {text}\n")


# On a terminal


def on_a_terminal(*arguments: str, **variables: str) -> tuple[int, str]:
    """The exit status, and the output on the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.execve(sys.executable, [*command("nsq_stat"), *arguments], environment(**variables))
        finally:
            os._exit(127)
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # the process has ended
        pass
    finally:
        os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, shown.decode().replace("\r\n", "\n")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_terminal_gets_the_same_lines_in_colour(broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "c")
    arguments = stat(broker, topic, "--count=1", "--interval=20ms")
    status, shown = on_a_terminal(*arguments, TERM="xterm-256color", COLUMNS="40")
    line = "      0       0 |       0       0       0     0     0 |       0       0            0       0"
    line += " |     0s     0s\n"
    assert status == 0
    assert "\x1b[" in shown
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == HEADER + line
    status, shown = on_a_terminal(*arguments, TERM="dumb")
    assert (status, shown) == (0, HEADER + line)


def test_without_rich_a_terminal_gets_the_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(nsq_stat.make_view(), nsq_stat.TerminalView)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert type(nsq_stat.make_view()) is nsq_stat.PlainView


# Figures


def test_rates_are_whole_numbers_and_may_be_negative() -> None:
    before = ChannelFigures(message_count=100, depth=10)
    now = ChannelFigures(message_count=107, depth=30, backend_depth=8)
    rates, depth, *_ = nsq_stat.row(before, now, 2.0)
    assert rates == [3, -6]
    assert depth == [30, 22, 8, 0, 0]


def test_wide_figures_do_not_run_together() -> None:
    figures = [[12345678, 1], [1, 2, 3, 4, 5], [1, 2, 123456789012345, 7], ["12345678d", "-"]]
    line = "12345678       1 |       1       2       3     4     5 |       1       2 123456789012345       7"
    assert nsq_stat.format_row(figures) == f"{line} | 12345678d      -"


def test_an_nsqd_that_requires_tls_is_asked_over_https(monkeypatch: pytest.MonkeyPatch) -> None:

    asked: list[str] = []

    def fetch(url: str, **_: object) -> Answer:
        asked.append(url)
        if url.startswith("http:"):
            return Answer(403, b'{"message":"TLS_REQUIRED","https_port":4152}', {})
        return Answer(200, b'{"topics":[]}', {})

    monkeypatch.setattr("nsparq.tools.cluster.fetch", fetch)
    assert Cluster(1, 1).channel(["host:4151"], "t", "c") is None
    assert [url.partition("?")[0] for url in asked] == ["http://host:4151/stats", "https://host:4152/stats"]


def test_only_servers_that_ask_get_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port that only names the HTTPS port does not get it."""

    asked: list[tuple[str, str]] = []

    def fetch(url: str, *, headers: list[tuple[str, str]], **_: object) -> Answer:
        secret = dict(headers).get("Authorization", "")
        asked.append((url.partition("/stats")[0], secret))
        if url.startswith("http://tls:"):
            return Answer(403, b'{"message":"TLS_REQUIRED","https_port":4152}', {})
        if not url.startswith("http://open:") and secret != "Bearer xyzzy":
            return Answer(401, b'{"message":"AUTH_REQUIRED"}', {})
        return Answer(200, b'{"topics":[]}', {})

    monkeypatch.setattr("nsparq.tools.cluster.fetch", fetch)
    cluster = Cluster(1, 1, Config(auth_secret="xyzzy"))
    for _ in range(2):
        for address in ("open:1", "tls:2", "guarded:3"):
            cluster.channel([address], "t", "c")
    first = [
        ("http://open:1", ""),
        ("http://tls:2", ""),
        ("https://tls:4152", ""),
        ("https://tls:4152", "Bearer xyzzy"),
        ("http://guarded:3", ""),
        ("http://guarded:3", "Bearer xyzzy"),
    ]
    # The second time the client knows who asks for it.
    assert asked == [*first, first[0], first[1], first[3], first[5]]
    strict = Cluster(1, 1, Config(auth_secret="xyzzy", auth_requires_tls=True))
    with pytest.raises(AskFailed, match="status 401: it does not get the secret: tls_v1 is not set"):
        strict.channel(["guarded:3"], "t", "c")
    limited = Cluster(1, 1, Config(auth_secret="xyzzy", auth_secret_for=("*.example.com",)))
    asked.clear()
    with pytest.raises(AskFailed, match="auth_secret_for does not include it .see NSQ_SECRET_FOR"):
        limited.channel(["guarded:3"], "t", "c")
    assert asked == [("http://guarded:3", "")]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, b"", "status 500"),
        (403, b'{"message":"FORBIDDEN"}', "status 403"),
        (200, b"not json", "Expecting value"),
        (200, b"[]", "not an answer of NSQ"),
    ],
)
def test_an_unusable_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, reason: str
) -> None:

    monkeypatch.setattr("nsparq.tools.cluster.fetch", lambda *_, **__: Answer(status, body, {}))
    with pytest.raises(AskFailed, match=reason):
        Cluster(1, 1).topics(["host:4161"])


def test_answers_of_old_nsqlookupds_are_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:

    body = b'{"status_code":200,"data":{"topics":["a","b"]}}'
    monkeypatch.setattr("nsparq.tools.cluster.fetch", lambda *_, **__: Answer(200, body, {}))
    assert Cluster(1, 1).topics(["one:4161", "two:4161"]) == {"a", "b"}


def test_a_server_that_never_answers_does_not_outlast_the_timeout(topic: str) -> None:
    with WebServer(delay=1.0) as server:
        address = server.url.removeprefix("http://")
        done = run_tool(
            "nsq_stat",
            f"--topic={topic}",
            "--channel=c",
            f"--nsqd-http-address={address}",
            "--http-client-request-timeout=100ms",
        )
    assert done.status == 1 and "timed out" in done.err


def test_the_address_of_a_tcp_port_is_recognised(broker: TestBroker, topic: str) -> None:
    done = run_tool("nsq_stat", f"--topic={topic}", "--channel=c", f"--nsqd-http-address={tcp(broker)}")
    assert done.status == 1 and f"GET http://{tcp(broker)}/stats" in done.err


ODD = [None, True, -1, 0.5, 10**400, "a..b", "\ud800", "x@y", [], {}, [None, {}, "a"], {"": 1}]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:10])
def test_invalid_answers_are_a_failure_or_left_out(monkeypatch: pytest.MonkeyPatch, odd: object) -> None:
    """A node with an invalid address or answer must not cause a traceback."""
    good = {"broadcast_address": "good", "http_port": 4151}
    channel = {"channel_name": "c", "depth": 3}
    producers = [odd, good | {"broadcast_address": odd}, good | {"http_port": odd}, good]
    said: dict[str, Any] = {
        "/topics": {"topics": [odd, "t"]},
        "/lookup": {"producers": producers},
        "/stats": {
            "topics": [
                odd,
                {"topic_name": "t", "channels": odd},
                {"topic_name": "t", "channels": [odd, channel | {"message_count": odd, "drain_time_s": odd}]},
            ]
        },
    }
    monkeypatch.setattr(
        "nsparq.tools.cluster.fetch",
        lambda url, **_: Answer(
            200, json.dumps(said["/" + url.split("/")[3].partition("?")[0]]).encode(), {}
        ),
    )
    cluster = Cluster(1, 1)
    assert "t" in cluster.topics(["lookupd:4161"])
    assert cluster.producers(["lookupd:4161"], "t") == ["good:4151"]
    found = cluster.channel(["good:4151"], "t", "c")
    assert found is not None and found.depth == 3
    assert nsq_stat.format_row(nsq_stat.row(ChannelFigures(), found, 1.5))
    for body in (b"[", b"[]", b"\xff", b"[" * 100_000, json.dumps(odd).encode()):
        monkeypatch.setattr("nsparq.tools.cluster.fetch", lambda *_, found=body, **__: Answer(200, found, {}))
        with contextlib.suppress(AskFailed):
            assert cluster.producers(["lookupd:4161"], "t") == []
