"""nsq_tail prints messages to standard output, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.support import BrokerProcess, TestBroker, start_broker, unique_name, wait_until
from tests.support.lookupd import start_lookupd
from tests.support.polling import DEADLINE

from .processes import (
    Tool,
    command,
    consume,
    environment,
    free_address,
    http,
    publish_with_headers,
    run_tool,
    tcp,
    wait_for_channel,
    wait_until_drained,
)


def tail(broker: TestBroker, *arguments: str, **more: Any) -> Tool:
    return Tool("nsq_tail", f"--nsqd-tcp-address={tcp(broker)}", *arguments, **more)


def test_messages_are_printed_as_they_come_until_a_signal(broker: TestBroker, topic: str) -> None:
    with tail(broker, f"--topic={topic}", "--channel=c") as tool:
        wait_for_channel(broker, topic, "c")
        broker.publish(topic, b"one", b"two\r", b"\xff\x00binary")
        tool.wait_for_out(b"one\ntwo\r\n\xff\x00binary\n")
        broker.publish(topic, b"three")
        tool.wait_for_out(b"three\n")
        wait_until_drained(broker, topic, "c", 4)
        assert tool.terminate() == 0
        assert tool.out() == b"one\ntwo\r\n\xff\x00binary\nthree\n"
        assert "connected to" in tool.err()


def test_headers_are_printed_before_the_message(broker: TestBroker, topic: str) -> None:
    publish_with_headers(broker, topic, b"one", tenant="ac\nme")
    broker.publish(topic, b"two")
    with tail(broker, f"--topic={topic}", "--headers", "--print-topic", "-n=2") as tool:
        assert tool.wait() == 0
        assert tool.out().decode() == f'{topic} | {{"tenant": "ac\\nme"}} | one\n{topic} | {{}} | two\n'
    with tail(broker, f"--topic={topic}", "-n=2") as tool:
        assert tool.wait() == 0
        assert tool.out() == b"one\ntwo\n"


def test_an_interrupt_ends_it_with_status_0(broker: TestBroker, topic: str) -> None:
    with tail(broker, f"--topic={topic}", "--channel=c") as tool:
        wait_for_channel(broker, topic, "c")
        tool.signal(signal.SIGINT)
        assert tool.wait() == 0


def test_without_a_channel_it_uses_an_ephemeral_one(broker: TestBroker, topic: str) -> None:
    broker.control("create", topic)
    with tail(broker, f"--topic={topic}") as tool:
        channels = wait_until(lambda: broker.topic_stats(topic)["channels"])  # type: ignore[index]
        assert re.fullmatch(r"tail\d{6}#ephemeral", channels[0]["channel_name"])
        assert tool.terminate() == 0
    wait_until(lambda: not broker.topic_stats(topic)["channels"])  # type: ignore[index]


@pytest.mark.parametrize("most", ["", "--max-in-flight=3"])
def test_n_ends_it_after_this_many_messages(broker: TestBroker, topic: str, most: str) -> None:
    broker.publish(topic, *(b"%d" % number for number in range(20)))
    done = run_tool(
        "nsq_tail",
        f"--nsqd-tcp-address={tcp(broker)}",
        f"--topic={topic}",
        "--channel=c",
        "-n",
        "7",
        *filter(None, [most]),
    )
    assert (done.status, done.out) == (0, b"".join(b"%d\n" % number for number in range(7)))
    stats = broker.channel_stats(topic, "c")
    assert stats is not None
    assert (stats["depth"], stats["in_flight_count"], stats["requeue_count"]) == (13, 0, 0)
    # Printed messages are finished, also the last one.
    assert consume(broker, topic, 1, "c") == [b"7"]


def test_several_topics_each_with_its_name_and_n_of_one_of_them(broker: TestBroker) -> None:
    first, second = unique_name("topic"), unique_name("topic")
    with tail(
        broker, f"--topic={first}", f"--topic={second}", "--channel=c", "--print-topic", "-n=2"
    ) as tool:
        wait_for_channel(broker, second, "c")
        broker.publish(second, b"2")
        tool.wait_for_out(b"2\n")
        broker.publish(first, b"1", b"1")
        assert tool.wait() == 0
        expected = [f"{first} | 1", f"{first} | 1", f"{second} | 2"]
        assert sorted(tool.out().decode().splitlines()) == sorted(expected)


def test_the_topic_is_found_through_nsqlookupd(topic: str) -> None:
    with start_lookupd() as lookupd:
        address = "{}:{}".format(*lookupd.address)
        with start_broker(lookupd_tcp_address=(address,), broadcast_address="127.0.0.1") as broker:
            broker.publish(topic, b"found")
            wait_until(lambda: topic in lookupd.topics())
            done = run_tool("nsq_tail", f"--topic={topic}", f"--lookupd-http-address={http(lookupd)}", "-n=1")
            assert (done.status, done.out) == (0, b"found\n")


def test_an_unreachable_nsqd_is_fatal_at_the_start(topic: str) -> None:
    address = free_address()
    done = run_tool("nsq_tail", f"--topic={topic}", f"--nsqd-tcp-address={address}")
    assert (done.status, done.out) == (1, b"")
    assert f"FATAL: {address}: " in done.err


def test_an_nsqd_that_is_lost_later_is_reconnected(topic: str) -> None:
    port = free_address()
    with BrokerProcess(tcp_address=port) as broker, tail(broker, f"--topic={topic}", "--channel=c") as tool:
        wait_for_channel(broker, topic, "c")
        broker.restart()
        broker.publish(topic, b"after")
        tool.wait_for_out(b"after\n")
        assert tool.terminate() == 0


def test_messages_that_a_closed_reader_did_not_get_are_not_finished(broker: TestBroker, topic: str) -> None:
    reading, writing = os.pipe()
    with tail(broker, f"--topic={topic}", "--channel=c", stdout=writing) as tool:
        os.close(writing)
        wait_for_channel(broker, topic, "c")
        broker.publish(topic, b"one")
        assert os.read(reading, 100) == b"one\n"
        wait_until_drained(broker, topic, "c", 1)
        os.close(reading)
        broker.publish(topic, b"two")
        assert tool.wait() == 1
        assert "Traceback" not in tool.err() and "FATAL" not in tool.err()
    assert consume(broker, topic, 1, "c") == [b"two"]


def test_a_stuck_reader_stops_neither_heartbeats_nor_the_end(topic: str) -> None:
    reading, writing = os.pipe()
    try:
        with start_broker() as broker:
            arguments = (f"--topic={topic}", "--channel=c", "--consumer-opt=heartbeat_interval,1s")
            with tail(broker, *arguments, stdout=writing) as tool:
                wait_for_channel(broker, topic, "c")
                # More than a pipe holds: writing blocks.
                broker.publish(topic, *[b"x" * 100_000] * 3)
                wait_until(lambda: broker.channel_stats(topic, "c")["in_flight_count"] == 3)  # type: ignore[index]
                before = broker.channel_stats(topic, "c")["clients"][0]["remote_address"]  # type: ignore[index]
                with broker.connect() as connection:
                    # Two unanswered heartbeats would end the tool's connection.
                    connection.identify(heartbeat_interval=1000)
                    connection.sub(topic, "other")
                    while connection.heartbeats_seen < 3:
                        with pytest.raises(TimeoutError):
                            connection.read_frame(timeout=1.0)
                clients = broker.channel_stats(topic, "c")["clients"]  # type: ignore[index]
                assert [client["remote_address"] for client in clients] == [before]
                assert tool.terminate() == 1
                assert "nothing reads the output" in tool.err()
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_fatal(broker: TestBroker, topic: str) -> None:
    broker.publish(topic, b"one")
    with (
        open("/dev/full", "wb") as full,
        tail(broker, f"--topic={topic}", "--channel=c", stdout=full) as tool,
    ):
        assert tool.wait() == 1
        assert "FATAL: cannot write to standard output: No space left on device" in tool.err()
    assert consume(broker, topic, 1, "c") == [b"one"]


def test_options_of_the_consumer_reach_the_broker(broker: TestBroker, topic: str) -> None:
    options = ("--consumer-opt=client_id,me", "--consumer-opt=max_in_flight,1", "--max-in-flight=33")
    with tail(broker, f"--topic={topic}", "--channel=c", *options) as tool:
        wait_for_channel(broker, topic, "c")
        client = broker.channel_stats(topic, "c")["clients"][0]  # type: ignore[index]
        assert client["client_id"] == "me"
        assert re.match(r"nsq_tail/1\.3\.0 ", client["user_agent"])
        # The flag takes precedence.
        wait_until(lambda: broker.channel_stats(topic, "c")["clients"][0]["ready_count"] == 33)  # type: ignore[index]
        assert tool.terminate() == 0


def test_it_works_with_the_standard_library_alone(broker: TestBroker, topic: str) -> None:
    broker.publish(topic, b"plain")
    blocked = ("uvloop", "numpy", "crc32c", "cramjam", "rich", "httptools", "OpenSSL", "cryptography")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked})); "
        "from nsparq.tools.nsq_tail import main; sys.exit(main())"
    )
    arguments = ["--topic", topic, "--nsqd-tcp-address", tcp(broker), "-n", "1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, env=environment(), timeout=DEADLINE
    )
    assert (done.returncode, done.stdout) == (0, b"plain\n"), done.stderr


def test_a_second_interrupt_does_not_wait(broker: TestBroker, topic: str) -> None:
    reading, writing = os.pipe()
    try:
        with tail(broker, f"--topic={topic}", "--channel=c", stdout=writing) as tool:
            wait_for_channel(broker, topic, "c")
            broker.publish(topic, *[b"x" * 100_000] * 3)
            wait_until(lambda: broker.channel_stats(topic, "c")["in_flight_count"] == 3)  # type: ignore[index]
            while tool.process.poll() is None:
                tool.signal(signal.SIGINT)
                time.sleep(0.01)
            assert tool.process.returncode == 130
    finally:
        os.close(reading)
        os.close(writing)


def test_it_can_be_run_by_its_path_as_well() -> None:
    done = subprocess.run(
        [*command("nsq_tail"), "--version"], capture_output=True, env=environment(), text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("nsq_tail v1.3.0")


def test_a_topic_without_a_channel_keeps_its_messages(broker: TestBroker, topic: str) -> None:
    broker.publish(topic, b"one", b"two", b"three")
    done = run_tool("nsq_tail", f"--nsqd-tcp-address={tcp(broker)}", f"--topic={topic}", "-n=3")
    assert (done.status, done.out) == (0, b"one\ntwo\nthree\n")
    stats = broker.topic_stats(topic)
    assert stats is not None and (stats["depth"], stats["channels"]) == (3, [])
    assert consume(broker, topic, 3, "first") == [b"one", b"two", b"three"]
