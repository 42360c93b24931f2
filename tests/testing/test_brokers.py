from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from nsparq.errors import StartError
from nsparq.testing import Broker, run_broker, run_lookupd
from tests.support import RawConnection, unique_name, wait_until


def connect(address: str) -> RawConnection:
    host, _, port = address.rpartition(":")
    return RawConnection((host, int(port)))


def test_a_broker_takes_and_delivers_messages_over_tcp() -> None:
    with run_broker() as broker, connect(broker.tcp_address) as client:
        client.pub("events", b"one")
        client.sub("events", "ch", rdy=1)
        assert client.read_message().body == b"one"


def test_a_broker_serves_http_at_its_address() -> None:
    with run_broker() as broker, urlopen(f"http://{broker.http_address}/ping", timeout=5) as answer:
        assert answer.read() == b"OK"


def test_a_broker_starts_and_stops_in_milliseconds() -> None:
    run_broker().close()  # loads what has to be loaded once
    spent = []
    for _ in range(5):
        began = time.process_time()
        run_broker().close()
        spent.append(time.process_time() - began)
    # Of the processor: what else the machine does is not to count. About 4 ms.
    assert min(spent) < 0.05


def test_nothing_of_a_broker_is_left_at_its_end() -> None:
    threads = {*threading.enumerate()}
    with run_broker() as broker:
        broker.publish("t", b"x")
        broker.peek("t")
        path = broker.data_path
        assert path.is_dir()
    assert not path.exists()
    assert {*threading.enumerate()} <= threads
    broker.close()


def test_options_are_those_of_nsqd() -> None:
    with run_broker(msg_timeout=0.1, max_msg_size=10) as broker:
        with connect(broker.tcp_address) as client:
            assert client.identify()["msg_timeout"] == 100
        with connect(broker.tcp_address) as client:
            client.command("PUB", "t", body=b"x" * 11)
            client.expect_fatal("E_BAD_MESSAGE PUB message too big 11 > 10")


def test_an_option_may_be_a_list_or_a_tuple() -> None:
    with run_lookupd() as lookupd, run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as broker:
        broker.create("t")
        wait_until(lambda: lookupd.producers("t") == [broker.tcp_address])


def test_an_unknown_option_is_an_error_and_leaves_nothing() -> None:
    threads = {*threading.enumerate()}
    with pytest.raises(TypeError, match="mem_queue"):
        run_broker(mem_queue=1)
    assert {*threading.enumerate()} <= threads


def test_a_broker_that_cannot_start_says_why_and_leaves_nothing() -> None:
    threads = {*threading.enumerate()}
    with run_broker() as broker, pytest.raises(StartError, match="listen"):
        run_broker(tcp_address=broker.tcp_address)
    assert {*threading.enumerate()} <= threads


def test_data_in_a_given_directory_is_kept(tmp_path: Path) -> None:
    with run_broker(tmp_path) as broker:
        broker.publish("t", b"kept")
    with run_broker(tmp_path) as broker:
        assert [message.body for message in broker.peek("t")] == [b"kept"]


def test_a_restart_keeps_addresses_and_messages() -> None:
    with run_broker() as broker:
        addresses = broker.tcp_address, broker.http_address
        broker.publish("t", b"x")
        broker.restart()
        assert (broker.tcp_address, broker.http_address) == addresses
        with connect(broker.tcp_address) as client:
            client.sub("t", "ch", rdy=1)
            assert client.read_message().body == b"x"


def test_a_stopped_broker_refuses_connections_until_it_is_started() -> None:
    with run_broker() as broker:
        broker.stop()
        with pytest.raises(ConnectionRefusedError):
            connect(broker.tcp_address)
        with pytest.raises(RuntimeError, match="not running"):
            broker.publish("t", b"x")
        broker.start()
        broker.publish("t", b"x")
        with pytest.raises(RuntimeError, match="already running"):
            broker.start()


def test_a_unix_socket_is_an_address_too(tmp_path: Path) -> None:
    path = str(tmp_path / "nsqd.sock")
    with run_broker(tcp_address=path) as broker:
        assert broker.tcp_address == path
        with RawConnection(path) as client:
            client.pub("t", b"x")


# messages


@pytest.fixture(scope="module")
def shared() -> object:
    with run_broker() as broker:
        yield broker


def test_publish_needs_a_name_and_messages(shared: Broker) -> None:
    with pytest.raises(ValueError, match="invalid topic name"):
        shared.publish("no blanks", b"x")
    with pytest.raises(ValueError, match="none may be empty"):
        shared.publish("t", b"x", b"")
    with pytest.raises(ValueError, match="at least one message is needed"):
        shared.publish("t")


def test_peek_shows_where_the_messages_of_a_channel_are(shared: Broker) -> None:
    shared.create("peeked", "ch")
    shared.publish("peeked", b"first", b"second")
    shared.publish("peeked", b"later", defer=60)
    with connect(shared.tcp_address) as client:
        client.sub("peeked", "ch", rdy=1)
        client.read_message()
        found = {message.body: message.state for message in shared.peek("peeked", "ch")}
        assert found == {b"first": "in_flight", b"second": "ready", b"later": "deferred"}


def test_messages_may_have_headers(shared: Broker) -> None:
    topic = unique_name("topic")
    shared.publish(topic, b"one", {"two": 2}, headers={"Tenant": "acme"})
    assert [(one.body, one.headers) for one in shared.peek(topic)] == [
        (b"one", {"tenant": "acme"}),
        (b'{"two":2}', {"tenant": "acme"}),
    ]


def test_peek_shows_a_large_message_whole(shared: Broker) -> None:
    body = b"x" * 1_000_000
    shared.publish("large", body)
    assert shared.peek("large")[0].body == body


def test_peek_at_a_missing_topic_finds_nothing(shared: Broker) -> None:
    assert shared.peek("absent") == []
    shared.create("empty", "ch")
    assert shared.peek("empty") == []
    assert shared.peek("empty", "ch") == []
    assert shared.peek("empty", "absent") == []


def test_a_deleted_topic_is_gone_and_deleting_it_again_does_nothing(shared: Broker) -> None:
    shared.publish("deleted", b"x")
    shared.delete("deleted")
    assert not shared.stats("deleted")["topics"]
    shared.delete("deleted")


def test_wait_empty_returns_when_every_message_is_finished(shared: Broker) -> None:
    shared.create("drained", "ch")
    shared.publish("drained", b"a", b"b")

    def finish() -> None:
        with connect(shared.tcp_address) as client:
            client.sub("drained", "ch", rdy=2)
            client.read_messages(2, finish=True)
            client.barrier()

    thread = threading.Thread(target=finish)
    thread.start()
    try:
        shared.wait_empty("drained", "ch")
    finally:
        thread.join()
    assert shared.peek("drained", "ch") == []


@pytest.mark.parametrize(
    ("prepare", "left"),
    [
        (lambda broker, topic: None, "there is no channel {}/ch"),
        (lambda broker, topic: broker.publish(topic, b"x"), "there is no channel {}/ch"),
        (
            lambda broker, topic: (
                broker.create(topic, "ch"),
                broker.publish(topic, b"x", b"y"),
                broker.publish(topic, b"z", defer=60),
            ),
            "{}/ch has 2 waiting, 1 deferred",
        ),
    ],
    ids=["no topic", "no channel", "messages"],
)
def test_wait_empty_says_what_is_left(
    shared: Broker, request: pytest.FixtureRequest, prepare: object, left: str
) -> None:
    topic = "left_" + request.node.callspec.id.replace(" ", "_")
    prepare(shared, topic)  # type: ignore[operator]
    with pytest.raises(AssertionError, match="after 0.02 s " + left.format(topic)):
        shared.wait_empty(topic, "ch", within=0.02)


def test_wait_empty_does_not_block_an_event_loop(shared: Broker) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="await wait_empty_async"):
            shared.wait_empty("t", "ch")
        shared.create("awaited", "ch")
        await shared.wait_empty_async("awaited", "ch")
        shared.publish("awaited", b"x")
        with pytest.raises(AssertionError, match="awaited/ch has 1 waiting"):
            await shared.wait_empty_async("awaited", "ch", within=0.02)

    asyncio.run(main())


# nsqlookupd


def test_a_broker_registers_with_and_leaves_nsqlookupd() -> None:
    with run_lookupd() as lookupd, run_broker() as broker:
        broker.create("t", "ch")
        assert lookupd.producers("t") == []
        broker.register_with(lookupd)
        wait_until(lambda: lookupd.producers("t") == [broker.tcp_address])
        with urlopen(f"http://{lookupd.http_address}/lookup?topic=t", timeout=5) as answer:
            assert json.load(answer)["channels"] == ["ch"]
        broker.register_with()
        wait_until(lambda: lookupd.producers("t") == [])


def test_nsqlookupd_comes_back_on_its_addresses() -> None:
    with run_lookupd() as lookupd:
        addresses = lookupd.tcp_address, lookupd.http_address
        lookupd.restart()
        assert (lookupd.tcp_address, lookupd.http_address) == addresses


# what it needs


@pytest.mark.parametrize("call", ["run_broker()", "run_lookupd()"])
def test_without_the_server_extra_the_error_names_it(call: str) -> None:
    code = (
        "import sys, threading\n"
        "sys.modules.update(dict.fromkeys(['uvloop', 'numpy', 'httptools', 'crc32c']))\n"
        "from nsparq import testing\n"
        "try:\n"
        f"    testing.{call}\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error, threading.active_count())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout == "StartError the package uvloop is missing: pip install 'nsparq[server]' 1\n"


def test_the_proxy_needs_no_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['uvloop', 'numpy', 'httptools', 'crc32c']))\n"
        "from nsparq.testing import FaultProxy\n"
        "FaultProxy('127.0.0.1:1').close()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_stop_raises_an_error_of_the_daemons_loop() -> None:
    broker = run_broker()
    broker._call(lambda: broker._thread.loop.call_soon(lambda: 1 / 0))
    with pytest.raises(AssertionError, match="unhandled error in the daemon"):
        broker.close()
    assert not broker.data_path.exists()
