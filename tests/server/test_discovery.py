"""A topic that is new on this nsqd gets the channels that nsqlookupd knows, from its first message
on."""

from __future__ import annotations

import gc
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nsparq.server import lookup_peer
from tests.support import BrokerProcess, BrokerThread, unique_name, wait_until
from tests.support.auth_server import AuthServer, entry, unused_port
from tests.support.lookupd import LookupdThread


class ScriptedLookupd:
    """Answers OK to nsqd. The test decides about the answers for channels, and when they are
    sent."""

    def __init__(self, *channels: str) -> None:
        self.http = AuthServer()
        self.http.answer({"channels": list(channels)})
        self.about = {"broadcast_address": "127.0.0.1", "http_port": self.http.port}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> ScriptedLookupd:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        # From here on no connection is added to those that are closed.
        self._threads[0].join()
        self._listener.close()
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        self.http.close()

    @property
    def asked(self) -> list[str]:
        return [query.path for query in self.http.queries]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        rest = {"tcp_port": 1, "version": "1.3.0", "hostname": "h"}
        about = json.dumps({**rest, **self.about}).encode()
        try:
            with connection, connection.makefile("rb") as stream:
                stream.read(4)
                while line := stream.readline():
                    if line == b"IDENTIFY\n":
                        stream.read(struct.unpack(">i", stream.read(4))[0])
                    reply = about if line == b"IDENTIFY\n" else b"OK"
                    connection.sendall(struct.pack(">i", len(reply)) + reply)
        except OSError:
            pass


@pytest.fixture
def lookupd() -> Iterator[ScriptedLookupd]:
    with ScriptedLookupd() as lookupd:
        yield lookupd


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., BrokerThread]]:
    with ExitStack() as stack:

        def run(*lookupds: ScriptedLookupd | str, **flags: Any) -> BrokerThread:
            addresses = tuple(one if isinstance(one, str) else one.address for one in lookupds)
            broker = BrokerThread(tmp_path, lookupd_tcp_address=addresses, **flags)
            stack.enter_context(broker)
            return broker

        yield run


def channels(broker: BrokerThread | BrokerProcess, topic: str) -> dict[str, int]:
    """The depth of each channel."""
    stats = broker.topic_stats(topic)
    assert stats is not None
    return {channel["channel_name"]: channel["depth"] for channel in stats["channels"]}


def is_held(broker: BrokerThread, topic: str) -> bool:
    return broker.call(lambda inner: bool(inner.topics[topic].holds))


Start = Callable[..., BrokerThread]


def test_channels_see_what_was_published_before_they_were_known(
    start: Start, lookupd: ScriptedLookupd
) -> None:
    lookupd.http.answer({"channels": ["first", "second"]})
    lookupd.http.stalled.set()
    broker = start(lookupd)
    broker.publish("t", b"1", b"2")
    wait_until(lambda: lookupd.asked == ["/channels?topic=t"])
    broker.publish("t", b"3")
    assert channels(broker, "t") == {} and is_held(broker, "t")
    lookupd.http.stalled.clear()
    wait_until(lambda: channels(broker, "t") == {"first": 3, "second": 3})
    wait_until(lambda: not is_held(broker, "t"))
    for name in ("first", "second"):
        with broker.connect() as consumer:
            consumer.sub("t", name, rdy=10)
            assert [message.body for message in consumer.read_messages(3)] == [b"1", b"2", b"3"]


def test_no_message_is_reclaimed_before_nsqlookupd_has_answered(
    start: Start, lookupd: ScriptedLookupd
) -> None:
    lookupd.http.answer({"channels": ["late", "own"]})
    lookupd.http.stalled.set()
    broker = start(lookupd, max_bytes_per_file=2_000, checkpoint_interval=0.02)
    with broker.connect() as consumer:
        consumer.sub("t", "own", rdy=100)
        for i in range(20):
            broker.publish("t", *[b"%d %0100d" % (i, 0)] * 20)
            consumer.read_messages(20, finish=True)
        consumer.barrier()

        def segments() -> int:
            return broker.call(lambda inner: len(inner.topics["t"].log.sealed_segments()))

        assert segments() > 5
        time.sleep(0.1)  # some rounds of maintenance, which remove nothing
        assert segments() > 5
        lookupd.http.stalled.clear()
        wait_until(lambda: channels(broker, "t") == {"late": 400, "own": 0})
    with broker.connect() as consumer:
        consumer.sub("t", "late", rdy=500)
        found = consumer.read_messages(400, finish=True)
        assert sorted(int(message.body.split()[0]) for message in found) == [i // 20 for i in range(400)]
        # Both channels have them now, so they are removed.
        wait_until(lambda: segments() <= 3)


def test_a_subscription_does_not_wait_for_nsqlookupd(start: Start, lookupd: ScriptedLookupd) -> None:
    lookupd.http.answer({"channels": ["other", "mine"]})
    lookupd.http.stalled.set()
    broker = start(lookupd)
    with broker.connect() as consumer:
        consumer.sub("t", "mine", rdy=10)
        broker.publish("t", b"1")
        consumer.fin(consumer.read_message().id)
        consumer.barrier()
        lookupd.http.stalled.clear()
        wait_until(lambda: channels(broker, "t") == {"mine": 0, "other": 1})


def test_a_channel_deleted_while_nsqlookupd_is_asked_does_not_come_back(
    start: Start, lookupd: ScriptedLookupd
) -> None:
    lookupd.http.answer({"channels": ["deleted", "kept", "made again"]})
    lookupd.http.stalled.set()
    broker = start(lookupd)
    broker.control("create", "t")
    wait_until(lambda: lookupd.asked == ["/channels?topic=t"])
    for name in ("deleted", "made again"):
        broker.control("create", "t", name)
        broker.control("delete", "t", name)
    broker.control("create", "t", "made again")
    lookupd.http.stalled.clear()
    wait_until(lambda: not is_held(broker, "t"))
    assert channels(broker, "t").keys() == {"kept", "made again"}


def test_ephemeral_and_impossible_names_are_not_created(start: Start, lookupd: ScriptedLookupd) -> None:
    names = [
        "good",
        "bad name",
        "",
        "gone#ephemeral",
        "x" * 65,
        "ä",
        "\ud800",
        "zebra",
        "../x",
        7,
        None,
        ["a"],
    ]
    lookupd.http.answer(json.dumps({"channels": names}).encode())
    broker = start(lookupd)
    broker.control("create", "t")
    wait_until(lambda: not is_held(broker, "t"))
    assert channels(broker, "t") == {"good": 0, "zebra": 0}
    gc.collect()


ANSWERS: dict[str, tuple[int, bytes]] = {
    "channels in an error": (500, b'{"channels":["x"]}'),
    "a redirect": (302, b'{"channels":["x"]}'),
    "nothing": (200, b""),
    "no text": (200, b"\xff\xfe\x00"),
    "a list": (200, b'["x"]'),
    "null": (200, b"null"),
    "no channels": (200, b'{"topics":["x"]}'),
    "channels null": (200, b'{"channels":null}'),
    "channels a text": (200, b'{"channels":"xyz"}'),
    "channels an object": (200, b'{"channels":{"x":1}}'),
    "deep nesting": (200, b'{"channels":' + b"[" * 200_000),
    "a number beyond measure": (200, b'{"channels":' + b"9" * 5_000 + b"}"),
}


def test_an_invalid_answer_of_one_nsqlookupd_does_not_affect_the_others(
    start: Start, lookupd: ScriptedLookupd, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedLookupd("known") as sane:
        broker = start(lookupd, sane)
        for number, (name, (status, body)) in enumerate(ANSWERS.items()):
            topic = f"t{number}"
            lookupd.http.answer(body, status)
            broker.publish(topic, b"x")
            wait_until(partial(lambda topic: not is_held(broker, topic), topic))
            assert lookupd.asked[number:] == sane.asked[number:] == [f"/channels?topic={topic}"], name
            assert channels(broker, topic) == {"known": 1}, name
        # The error of a task is reported only when the task is collected.
        gc.collect()
        broker.stop()
    assert not [record for record in caplog.records if record.exc_info]


def test_the_channels_of_all_nsqlookupds_are_taken_together(start: Start, lookupd: ScriptedLookupd) -> None:
    lookupd.http.answer({"channels": ["a", "b"]})
    with ScriptedLookupd("b", "c") as other:
        broker = start(lookupd, other)
        broker.publish("t", b"x")
        wait_until(lambda: channels(broker, "t") == {"a": 1, "b": 1, "c": 1})


def test_unreachable_nsqlookupds_delay_nothing_for_long(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_peer, "IO_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [f"127.0.0.1:{silent.getsockname()[1]}", f"127.0.0.1:{unused_port()}", "no address"]
        broker = start(*addresses)
        broker.publish("t", b"x")
        wait_until(lambda: not is_held(broker, "t"))
        assert channels(broker, "t") == {}


def test_an_nsqlookupd_whose_http_port_does_not_answer(start: Start, lookupd: ScriptedLookupd) -> None:
    lookupd.http.stalled.set()
    with ScriptedLookupd("known") as sane:
        broker = start(lookupd, sane, http_client_request_timeout=0.2)
        broker.publish("t", b"x")
        wait_until(lambda: channels(broker, "t") == {"known": 1})
        lookupd.http.stalled.clear()


def test_an_nsqlookupd_that_does_not_answer_keeps_nobody_from_authenticating(
    start: Start, lookupd: ScriptedLookupd
) -> None:
    lookupd.http.stalled.set()
    with AuthServer() as auth_server:
        auth_server.grant(entry(".*", "publish"))
        broker = start(lookupd, auth_http_address=(auth_server.address,), http_client_request_timeout=60.0)
        for number in range(32):
            broker.control("create", f"t{number}")
        wait_until(lambda: len(lookupd.asked) == 16)
        with broker.connect() as client:
            client.command("AUTH", body=b"secret")
            assert b"permission_count" in client.read_frame().data
        lookupd.http.stalled.clear()


@pytest.mark.parametrize("about", [{"broadcast_address": ""}, {"http_port": 0}, {"http_port": 1}])
def test_an_nsqlookupd_that_does_not_name_its_http_port(
    start: Start, lookupd: ScriptedLookupd, about: dict[str, Any]
) -> None:
    lookupd.about.update(about)
    broker = start(lookupd)
    broker.publish("t", b"x")
    wait_until(lambda: not is_held(broker, "t"))
    assert (lookupd.asked, channels(broker, "t")) == ([], {})


def test_without_nsqlookupd_messages_are_not_kept(start: Start) -> None:
    broker = start()
    broker.control("create", "t")
    assert not is_held(broker, "t")


def test_only_new_topics_are_looked_up(start: Start, lookupd: ScriptedLookupd) -> None:
    broker = start(lookupd)
    broker.control("create", "t")
    wait_until(lambda: not is_held(broker, "t"))
    lookupd.http.answer({"channels": ["later"]})
    broker.publish("t", b"x")
    broker.restart()
    broker.publish("t", b"x")
    assert not is_held(broker, "t")
    assert (lookupd.asked, channels(broker, "t")) == (["/channels?topic=t"], {})


def test_a_topic_that_was_deleted_before_the_answer(start: Start, lookupd: ScriptedLookupd) -> None:
    lookupd.http.answer({"channels": ["a"]})
    lookupd.http.stalled.set()
    broker = start(lookupd)
    broker.control("create", "t")
    wait_until(lambda: lookupd.asked)
    broker.control("delete", "t")
    broker.publish("t", b"second life")
    wait_until(lambda: len(lookupd.asked) == 2)
    lookupd.http.stalled.clear()
    wait_until(lambda: channels(broker, "t") == {"a": 1})


def test_a_channel_that_the_disk_refuses_is_logged_and_keeps_no_messages(
    start: Start, lookupd: ScriptedLookupd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lookupd.http.answer({"channels": ["a"]})
    lookupd.http.stalled.set()
    broker = start(lookupd)
    broker.control("create", "t")
    wait_until(lambda: lookupd.asked)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broker.nsqd.broker.topics["t"], "get_channel", refuse)
        lookupd.http.stalled.clear()
        wait_until(lambda: not is_held(broker, "t"))
    assert "TOPIC(t): channels could not be created: [Errno 28] No space left on device" in caplog.text


def test_an_ephemeral_topic_gets_its_channels_too(start: Start, lookupd: ScriptedLookupd) -> None:
    lookupd.http.answer({"channels": ["a"]})
    broker = start(lookupd)
    name = "t#ephemeral"
    broker.publish(name, b"x")
    wait_until(lambda: channels(broker, name) == {"a": 1})
    assert lookupd.asked == ["/channels?topic=t%23ephemeral"]


def test_a_daemon_that_stops_does_not_wait_for_the_answer(start: Start, lookupd: ScriptedLookupd) -> None:
    lookupd.http.stalled.set()
    broker = start(lookupd)
    broker.publish("t", b"x")
    wait_until(lambda: lookupd.asked)
    broker.stop()
    lookupd.http.stalled.clear()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_topic_that_was_not_looked_up_before_a_stop_is_looked_up_after_it(
    tmp_path: Path, lookupd: ScriptedLookupd, end: str
) -> None:
    lookupd.http.answer({"channels": ["late"]})
    lookupd.http.stalled.set()
    with BrokerProcess(tmp_path, lookupd_tcp_address=(lookupd.address,)) as broker:
        broker.control("create", "t", "own")
        broker.publish("t", b"acknowledged")
        wait_until(lambda: lookupd.asked)
        getattr(broker, end)()
        lookupd.http.stalled.clear()
        broker.start()
        wait_until(lambda: channels(broker, "t") == {"own": 1, "late": 1})


def test_a_topic_is_looked_up_once(start: Start, lookupd: ScriptedLookupd) -> None:
    lookupd.http.answer({"channels": ["a"]})
    broker = start(lookupd)
    broker.publish("t", b"x")
    wait_until(lambda: channels(broker, "t") == {"a": 1})
    wait_until(lambda: not is_held(broker, "t"))
    broker.restart()
    assert not is_held(broker, "t")
    assert lookupd.asked == ["/channels?topic=t"]


def test_an_address_given_at_run_time_is_asked_too(start: Start, lookupd: ScriptedLookupd) -> None:
    lookupd.http.answer({"channels": ["a"]})
    broker = start()
    body = json.dumps([lookupd.address]).encode()
    assert broker.request("PUT", "/config/nsqlookupd_tcp_addresses", body).status == 200
    broker.publish("t", b"x")
    wait_until(lambda: channels(broker, "t") == {"a": 1})


def test_with_a_real_nsqlookupd_a_second_node_has_the_channels_of_the_first(tmp_path: Path) -> None:
    topic = unique_name()
    with LookupdThread() as lookupd:
        address = "{}:{}".format(*lookupd.address)
        flags: dict[str, Any] = {"lookupd_tcp_address": (address,), "broadcast_address": "127.0.0.1"}
        with BrokerThread(tmp_path / "", **flags) as first, BrokerThread(**flags) as second:
            first.control("create", topic, "a")
            first.control("create", topic, "gone#ephemeral")
            lookupd.post("/channel/create", topic=topic, channel="b")
            wait_until(lambda: len(lookupd.channels(topic)) == 3)
            second.publish(topic, b"x")
            wait_until(lambda: channels(second, topic) == {"a": 1, "b": 1})
            wait_until(lambda: len(lookupd.lookup(topic)["producers"]) == 2)
