"""Q. Tools. `NSPARQ_TEST_TOOLS=/directory` runs the cases against the NSQ tools in it."""

from __future__ import annotations

import re
import signal
import socket

import pytest

from tests.support import unique_name, wait_until
from tests.tools.processes import (
    TOOLS,
    Tool,
    WebServer,
    consume,
    http,
    run_tool,
    tcp,
    wait_for_channel,
    wait_until_drained,
)

HOST = socket.gethostname().partition(".")[0]
HOUR = r"\d{4}-\d\d-\d\d_\d\d"
# NSQ's, with the lag of ours behind it.
HEADER = (
    "------rate------+----------------depth----------------+---------------metadata---------------"
    "+-----lag------\n"
    "ingress  egress |   total     mem    disk inflt   def |     req     t-o         msgs clients "
    "|    age  drain\n"
)

ours_only = pytest.mark.skipif(bool(TOOLS), reason="we differ from NSQ on purpose")


def files(path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())} if path.exists() else {}


def archive(broker, topic, out, *arguments) -> Tool:
    addresses = (f"--nsqd-tcp-address={tcp(broker)}", f"--topic={topic}", "--channel=c")
    return Tool("nsq_to_file", *addresses, f"--output-dir={out}", *arguments)


def in_flight(broker, topic) -> int:
    return (broker.channel_stats(topic, "c") or {"in_flight_count": 0})["in_flight_count"]


# nsq_to_http


def test_case_222_a_header_of_name_and_value_is_sent(broker, topic):
    with WebServer() as server:
        arguments = (f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}", f"--post={server.url}")
        with Tool("nsq_to_http", *arguments, "--header=header1: value1", "--header= header2 : value2 "):
            broker.publish(topic, b"x")
            (request,) = server.wait_for(1)
    assert (request.headers["header1"], request.headers["header2"]) == ("value1", "value2")
    assert request.headers["user-agent"] == "nsq_to_http v1.3.0"


@pytest.mark.parametrize("header", ["header1", "header1:", ":value1"])
def test_case_222_other_shapes_of_headers_are_refused(header):
    arguments = ("--topic=t", "--nsqd-tcp-address=127.0.0.1:1", "--post=http://127.0.0.1:1")
    assert run_tool("nsq_to_http", *arguments, f"--header={header}").status == 1


# nsq_tail, to_nsq, nsq_stat


def test_case_223_tail_ends_after_n_messages(broker, topic):
    broker.publish(topic, b"one", b"two", b"three", b"four")
    done = run_tool(
        "nsq_tail", f"--topic={topic}", "--channel=c", f"--nsqd-tcp-address={tcp(broker)}", "-n", "3"
    )
    assert (done.status, done.out) == (0, b"one\ntwo\nthree\n")


@ours_only
def test_case_223_every_message_that_tail_printed_is_finished(broker, topic):
    broker.publish(topic, b"one", b"two", b"three")
    arguments = (f"--topic={topic}", "--channel=c", f"--nsqd-tcp-address={tcp(broker)}", "-n=2")
    assert run_tool("nsq_tail", *arguments).out == b"one\ntwo\n"
    assert consume(broker, topic, 1, "c") == [b"three"]


def test_case_223_tail_prints_the_topic_before_each_message(broker):
    topics = [unique_name("topic"), unique_name("topic")]
    arguments = (*(f"--topic={topic}" for topic in topics), "--print-topic", "--channel=c")
    with Tool("nsq_tail", *arguments, f"--nsqd-tcp-address={tcp(broker)}") as tool:
        for topic in topics:
            wait_for_channel(broker, topic, "c")
            broker.publish(topic, b"hello")
            tool.wait_for_out(f"{topic} | hello\n".encode())
        assert tool.terminate() == 0


def test_case_223_records_of_to_nsq_are_messages_and_empty_ones_are_skipped(broker, topic):
    address = f"--nsqd-tcp-address={tcp(broker)}"
    done = run_tool("to_nsq", f"--topic={topic}", address, "--delimiter=;", input=b"one;;two\nlines;")
    assert (done.status, done.out) == (0, b"")
    assert consume(broker, topic, 2) == [b"one", b"two\nlines"]


@ours_only
def test_case_223_the_last_record_of_to_nsq_needs_no_delimiter(broker, topic):
    done = run_tool("to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}", input=b"one\nthree")
    assert done.status == 0
    assert consume(broker, topic, 2) == [b"one", b"three"]


def test_case_223_stat_shows_a_header_and_count_lines(broker, topic):
    broker.control("create", topic, "c")
    broker.publish(topic, b"x")
    arguments = (f"--topic={topic}", "--channel=c", f"--nsqd-http-address={http(broker)}")
    done = run_tool("nsq_stat", *arguments, "--interval=50ms", "--count=2")
    line = "      0       0 |       1       1       0     0     0 |       0       0            1       0 |"
    lag = r" +\d+m?s +-\n"
    assert done.status == 0
    assert re.fullmatch(re.escape(HEADER) + 2 * (re.escape(line) + lag), done.out.decode())


def test_case_223_stat_repeats_the_header_every_25_polls(broker, topic):
    broker.control("create", topic, "c")
    arguments = (f"--topic={topic}", "--channel=c", f"--nsqd-http-address={http(broker)}")
    done = run_tool("nsq_stat", *arguments, "--interval=10ms", "--count=26")
    assert done.status == 0
    assert [block.count("\n") for block in done.out.decode().split(HEADER)] == [0, 24, 2]


@pytest.mark.parametrize("flag", ["--count=0", "--interval=0s", "--channel=other"])
def test_case_223_stat_refuses_invalid_options(broker, topic, flag):
    broker.control("create", topic, "c")
    arguments = (f"--topic={topic}", "--channel=c", f"--nsqd-http-address={http(broker)}")
    assert run_tool("nsq_stat", *arguments, flag).status == 1


# nsq_to_file


def test_case_224_the_file_is_named_after_topic_host_and_hour(broker, topic, tmp_path):
    with archive(broker, topic, tmp_path, "--sync-interval=50ms") as tool:
        broker.publish(topic, b"one", b"two")
        wait_until_drained(broker, topic, "c", 2)
        assert tool.terminate() == 0
    ((name, content),) = files(tmp_path).items()
    assert re.fullmatch(rf"{topic}\.{re.escape(HOST)}\.{HOUR}\.log", name)
    assert content == b"one\ntwo\n"


def test_case_224_a_new_revision_when_the_size_is_exceeded(broker, topic, tmp_path):
    with archive(broker, topic, tmp_path, "--rotate-size=8", "--sync-interval=1h") as tool:
        broker.publish(topic, b"aaaa", b"bbbb", b"cccc", b"dddd")
        wait_until(lambda: [*files(tmp_path).values()] == [b"aaaa\nbbbb\n", b"cccc\ndddd\n"])
        assert tool.terminate() == 0
    wait_until_drained(broker, topic, "c", 4)
    start = rf"{topic}\.{re.escape(HOST)}"
    for number, name in enumerate(files(tmp_path)):
        assert re.fullmatch(rf"{start}-00000{number}\.{HOUR}\.log", name)


def test_case_224_without_a_place_for_the_revision_it_does_not_archive(broker, topic, tmp_path):
    with archive(broker, topic, tmp_path, "--rotate-size=8", "--filename-format=<TOPIC>.log") as tool:
        tool.wait_for_log("missing <REV> in --filename-format when gzip, rotation, or work dir enabled")
    assert files(tmp_path) == {}


def test_case_224_complete_files_are_moved_out_of_the_work_directory(broker, topic, tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    with archive(broker, topic, out, f"--work-dir={work}", "--sync-interval=50ms") as tool:
        broker.publish(topic, b"one")
        wait_until_drained(broker, topic, "c", 1)
        assert [*files(work).values()] == [b"one\n"] and files(out) == {}
        assert tool.terminate() == 0
    assert [*files(out).values()] == [b"one\n"] and files(work) == {}


def test_case_224_messages_are_finished_when_they_are_synced(broker, topic, tmp_path):
    with archive(broker, topic, tmp_path, "--sync-interval=1h", "--max-in-flight=100") as tool:
        wait_for_channel(broker, topic, "c")
        wait_until(lambda: broker.channel_stats(topic, "c")["clients"][0]["ready_count"] == 100)
        broker.publish(topic, b"one", b"two")
        wait_until(lambda: [*files(tmp_path).values()] == [b"one\ntwo\n"])
        # NSQ syncs the first one at once.
        assert in_flight(broker, topic) in ((1, 2) if TOOLS else (2,))
        assert tool.terminate() == 0
        wait_until_drained(broker, topic, "c", 2)


def test_case_224_a_hangup_syncs_and_ends_the_file(broker, topic, tmp_path):
    with archive(broker, topic, tmp_path, "--sync-interval=1h", "--rotate-size=1000000") as tool:
        wait_for_channel(broker, topic, "c")
        broker.publish(topic, b"one")
        wait_until(lambda: [*files(tmp_path).values()] == [b"one\n"])
        tool.signal(signal.SIGHUP)
        wait_until(lambda: in_flight(broker, topic) == 0)
        assert tool.terminate() == 0


@ours_only
def test_case_224_after_sighup_the_next_message_starts_another_file(broker, topic, tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    with archive(broker, topic, out, f"--work-dir={work}", "--sync-interval=50ms") as tool:
        broker.publish(topic, b"one")
        wait_until_drained(broker, topic, "c", 1)
        tool.signal(signal.SIGHUP)
        wait_until(lambda: [*files(out).values()] == [b"one\n"])
        broker.publish(topic, b"two")
        wait_until_drained(broker, topic, "c", 2)
        assert tool.terminate() == 0
    assert [*files(out).values()] == [b"one\n", b"two\n"]
