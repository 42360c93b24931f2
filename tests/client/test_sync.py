from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from nsparq.client import Config, ConnectFailed, Message, NotConnected, PublishFailed, PublishTimeout, Stopped
from nsparq.client.loop_thread import LoopThread
from nsparq.client.sync import Producer, consume
from nsparq.testing import Broker, FaultProxy, run_broker, run_lookupd
from tests.support import unique_name, wait_until
from tests.support.auth_server import unused_port
from tests.support.polling import DEADLINE


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Checks daemon threads, which the general guard does not."""
    yield
    gc.collect()
    wait_until(lambda: not client_threads(), what=client_threads())


def client_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(("nsq-producer", "nsq-consumer"))]


def bodies(broker: Broker, topic: str) -> list[bytes]:
    return [message.body for message in broker.peek(topic)]


# producer


def test_a_publish_is_stored_when_the_call_returns(broker: Broker) -> None:
    topic = unique_name("sync")
    with Producer(broker.tcp_address) as producer:
        producer.publish(topic, b"one")
        assert bodies(broker, topic) == [b"one"]
        producer.publish_many(topic, [b"two", b"three"])
        assert bodies(broker, topic) == [b"one", b"two", b"three"]


def test_a_deferred_message_waits(broker: Broker) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    with Producer(broker.tcp_address) as producer:
        producer.publish(topic, b"later", defer=60)
    assert [message.state for message in broker.peek(topic, "ch")] == ["deferred"]


def test_a_producer_has_one_thread_that_ends_with_it(broker: Broker) -> None:
    producer = Producer(broker.tcp_address)
    producer.connect()
    assert client_threads() == ["nsq-producer"]
    producer.close()
    assert client_threads() == []
    producer.close()


def test_several_threads_may_share_a_producer(broker: Broker) -> None:
    topic = unique_name("sync")
    with Producer(broker.tcp_address) as producer:

        def publish(name: bytes) -> None:
            for number in range(50):
                producer.publish(topic, b"%b %d" % (name, number))

        threads = [threading.Thread(target=publish, args=(name,)) for name in (b"a", b"b", b"c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert broker.stats(topic)["topics"][0]["message_count"] == 150


def test_a_closed_producer_raises_stopped(broker: Broker) -> None:
    producer = Producer(broker.tcp_address)
    producer.close()
    for call in (lambda: producer.publish("t", b"x"), producer.connect):
        with pytest.raises(Stopped):
            call()


def test_wrong_arguments_raise_before_anything_starts(broker: Broker) -> None:
    with pytest.raises(ValueError, match="needs the address"):
        Producer()
    assert client_threads() == []
    with Producer(broker.tcp_address) as producer:
        with pytest.raises(ValueError, match="invalid topic name"):
            producer.publish("no blanks", b"x")
        with pytest.raises(ValueError, match="empty"):
            producer.publish("t", b"")


def test_a_refusal_is_raised_with_the_text_of_the_broker() -> None:
    with run_broker(max_msg_size=10) as broker, Producer(broker.tcp_address) as producer:
        with pytest.raises(PublishFailed, match="PUB message too big 11 > 10") as caught:
            producer.publish("t", b"x" * 11)
        assert caught.value.code == "E_BAD_MESSAGE"
        producer.publish("t", b"x" * 10)


def test_no_broker_is_an_error_and_not_a_wait() -> None:
    with Producer(f"127.0.0.1:{unused_port()}") as producer:
        with pytest.raises(ConnectFailed, match="127.0.0.1:"):
            producer.publish("t", b"x")
        with pytest.raises(ConnectFailed, match="127.0.0.1:"):
            producer.connect()


def test_a_silent_broker_is_a_timeout(broker: Broker) -> None:
    config = Config(publish_timeout=0.2)
    with FaultProxy(broker.tcp_address) as proxy:
        proxy.stall()
        with Producer(proxy.address, config=config) as producer:
            with pytest.raises(PublishTimeout):
                producer.publish("t", b"x")
            with pytest.raises(ConnectFailed, match=r"not connected within 0\.2 s|timed out"):
                producer.connect()


def test_a_lost_connection_is_an_error_and_the_next_call_connects_anew(broker: Broker) -> None:
    topic = unique_name("sync")
    with FaultProxy(broker.tcp_address) as proxy, Producer(proxy.address) as producer:
        producer.publish(topic, b"a")
        proxy.stall("to_client")
        threading.Timer(0.05, proxy.reset).start()
        with pytest.raises(NotConnected):
            producer.publish(topic, b"b")
        proxy.heal()
        producer.publish(topic, b"c")
    assert bodies(broker, topic)[-1] == b"c"


def test_a_publish_that_finds_its_loop_closed_raises_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes the producer just after this one has looked."""
    producer = Producer("127.0.0.1:1")
    producer.close()
    monkeypatch.setattr(producer, "_is_closed", False)
    monkeypatch.setattr(LoopThread, "is_running", True)
    for call in (producer.connect, lambda: producer.publish("t", b"x")):
        with pytest.raises(Stopped):
            call()


def test_closing_does_not_say_that_a_publish_in_doubt_was_not_published(broker: Broker) -> None:
    """nsqd has stored it, and its answer is lost. Another thread closes the producer."""
    topic, outcome = unique_name("sync"), []
    config = Config(reconnect_delay=60, max_reconnect_delay=60)
    with FaultProxy(broker.tcp_address) as proxy, Producer(proxy.address, retry=True, config=config) as it:
        it.publish(topic, b"a")

        def publish() -> None:
            try:
                it.publish(topic, b"b")
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=publish)
        proxy.drop("to_client")
        thread.start()
        wait_until(lambda: bodies(broker, topic) == [b"a", b"b"])
        proxy.refuse()
        proxy.reset()
        resource = it._thread.resource
        # It waits for a minute before it connects again.
        wait_until(lambda: not resource.address and resource._opening is None)
        it.close()
        thread.join()
    assert [type(error) for error in outcome] == [NotConnected]


def test_a_producer_finds_a_broker_by_nsqlookupd() -> None:
    with run_lookupd() as lookupd, run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as broker:
        broker.create("t")
        wait_until(lambda: lookupd.producers("t"))
        with Producer(nsqlookupd=[lookupd.http_address]) as producer:
            producer.publish("t", b"x")
        assert bodies(broker, "t") == [b"x"]


# consume


def test_a_message_is_finished_when_the_next_is_requested(broker: Broker) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    broker.publish(topic, b"a", b"b", b"c")
    messages = [*consume(topic, "ch", nsqd=[broker.tcp_address], idle_timeout=1)]
    assert [message.body for message in messages] == [b"a", b"b", b"c"]
    assert {(message.attempts, message.address) for message in messages} == {(1, broker.tcp_address)}
    broker.wait_empty(topic, "ch")


def test_a_message_is_not_finished_before_the_next_is_asked_for(broker: Broker) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    broker.publish(topic, b"a")
    messages = consume(topic, "ch", nsqd=[broker.tcp_address], idle_timeout=1)
    next(messages)
    assert [message.state for message in broker.peek(topic, "ch")] == ["in_flight"]
    assert next(messages, None) is None
    broker.wait_empty(topic, "ch")


@pytest.mark.parametrize("leave", ["raise", "break", "close", "drop"])
def test_a_message_whose_loop_is_left_is_sent_again_at_once(broker: Broker, leave: str) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    broker.publish(topic, b"a", b"b", b"c")
    if leave == "raise":
        with pytest.raises(ZeroDivisionError):
            for _ in consume(topic, "ch", nsqd=[broker.tcp_address]):
                1 / 0  # noqa: B018
    elif leave == "break":
        for _ in consume(topic, "ch", nsqd=[broker.tcp_address]):
            break
    elif leave == "close":
        with closing(consume(topic, "ch", nsqd=[broker.tcp_address])) as messages:
            next(messages)
    else:
        messages = consume(topic, "ch", nsqd=[broker.tcp_address])
        next(messages)
        del messages
    assert client_threads() == []
    # Messages fetched ahead are requeued too, without a delay.
    found = broker.peek(topic, "ch")
    assert {message.body for message in found} == {b"a", b"b", b"c"}
    assert {message.state for message in found} <= {"ready", "requeued"}
    # Requeued for others, and not sent here again.
    assert {message.attempts for message in found} == {1}


def test_an_answer_by_hand_counts(broker: Broker) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    broker.publish(topic, b"a", b"b")
    for message in consume(topic, "ch", nsqd=[broker.tcp_address], idle_timeout=1):
        if message.body == b"a":
            message.requeue(60, backoff=False)
            message.finish()  # too late: it has its answer
        else:
            message.finish()
            break
    assert [(m.body, m.state) for m in broker.peek(topic, "ch")] == [(b"a", "deferred")]


def test_a_message_kept_longer_than_its_timeout_stays_ours() -> None:
    with run_broker(msg_timeout=1.0) as broker:
        broker.create("t", "ch")
        broker.publish("t", b"a")
        for message in consume("t", "ch", nsqd=[broker.tcp_address], idle_timeout=1):
            assert message.attempts == 1
            time.sleep(2.2)
        broker.wait_empty("t", "ch")
        stats = broker.channel_stats("t", "ch")
        assert stats is not None and stats["timeout_count"] == 0


def test_a_broker_that_comes_back_is_found_again() -> None:
    with run_broker() as broker:
        broker.create("t", "ch")
        broker.publish("t", b"a", b"b")
        config = Config(reconnect_delay=0.02)
        seen = []
        for message in consume("t", "ch", nsqd=[broker.tcp_address], idle_timeout=2, config=config):
            seen.append(message.body)
            if len(seen) == 1:
                broker.restart()
            elif seen.count(b"a") == 2 and b"b" in seen:
                message.finish()
                break
        # The message in flight at the restart comes again: its answer was lost.
        broker.wait_empty("t", "ch")


def test_messages_out_of_attempts_go_to_the_hook_not_to_the_loop(broker: Broker) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    broker.publish(topic, b"bad")
    given_up, tries = [], 0
    config = Config(max_attempts=2, max_backoff_duration=0)
    for message in consume(
        topic,
        "ch",
        nsqd=[broker.tcp_address],
        idle_timeout=1,
        on_give_up=lambda message: given_up.append(message.body),
        dead_letter=f"{topic}.dead",
        config=config,
    ):
        tries += 1
        message.requeue(0)
    assert tries == 2
    assert given_up == [b"bad"]
    assert bodies(broker, f"{topic}.dead") == [b"bad"]


@pytest.mark.parametrize("is_slow", [False, True], ids=["within its time", "not even then"])
@pytest.mark.parametrize("leave", ["close", "raise", "idle"])
def test_a_loop_ends_while_a_message_is_being_given_up(
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    leave: str,
    is_slow: bool,
) -> None:
    """That may take longer than the end of a loop may. The message is not lost."""
    monkeypatch.setattr("nsparq.client.sync.GRACE_S", DEADLINE if is_slow else 0.05)
    if is_slow:
        monkeypatch.setattr("nsparq.client.sync.STOP_S", 0.05)
    topic = unique_name("sync")
    broker.create(topic, "ch")
    broker.publish(topic, b"bad")
    begun, released = threading.Event(), threading.Event()

    def give_up(message: Message) -> None:
        begun.set()
        released.wait(DEADLINE)
        raise ConnectionError

    config = Config(max_attempts=1, max_backoff_duration=0)
    messages = consume(
        topic, "ch", nsqd=[broker.tcp_address], on_give_up=give_up, idle_timeout=1, config=config
    )
    next(messages).requeue(0)
    assert begun.wait(DEADLINE)
    try:
        if leave == "close":
            messages.close()
        elif leave == "raise":
            with pytest.raises(ZeroDivisionError):
                messages.throw(ZeroDivisionError())
        else:
            assert next(messages, None) is None
    finally:
        released.set()
    assert ("nsq-consumer did not stop within" in caplog.text) is is_slow
    wait_until(lambda: not client_threads())
    wait_until(lambda: {m.state for m in broker.peek(topic, "ch")} <= {"ready", "requeued", "deferred"})
    assert [message.body for message in broker.peek(topic, "ch")] == [b"bad"]


def test_wrong_names_raise_before_the_loop_begins(broker: Broker) -> None:
    with pytest.raises(ValueError, match="invalid topic name"):
        consume("no blanks", "ch", nsqd=[broker.tcp_address])
    assert client_threads() == []


def test_nothing_runs_before_the_first_message_is_asked_for(broker: Broker) -> None:
    messages = consume("t", "ch", nsqd=[broker.tcp_address])
    assert client_threads() == []
    messages.close()


def test_an_idle_timeout_of_a_channel_without_messages_ends_the_loop(broker: Broker) -> None:
    began = time.monotonic()
    assert [*consume(unique_name("sync"), "ch", nsqd=[broker.tcp_address], idle_timeout=0.1)] == []
    assert time.monotonic() - began >= 0.1


# in another process


WAIT_FOR_EVER = """
import sys, threading
from nsparq.client.sync import Producer, consume

try:
    for message in consume("{topic}", "ch", nsqd=["{address}"]):
        print(message.body.decode(), flush=True)
        {body}
except KeyboardInterrupt:
    print("interrupted with", threading.active_count(), "thread")
"""


@pytest.mark.parametrize("body", ["pass", "threading.Event().wait()"], ids=["waiting", "in the body"])
def test_an_interrupt_ends_cleanly(broker: Broker, body: str) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    broker.publish(topic, b"hello", b"world")
    code = WAIT_FOR_EVER.format(topic=topic, address=broker.tcp_address, body=body)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hello\n"
        if body == "pass":
            assert process.stdout.readline() == "world\n"
            broker.wait_empty(topic, "ch")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE)
    assert (output, errors, process.returncode) == ("interrupted with 1 thread\n", "", 0)
    if body != "pass":
        assert {message.state for message in broker.peek(topic, "ch")} <= {"ready", "requeued"}


def test_an_interrupt_ends_a_publish(broker: Broker) -> None:
    code = (
        "import sys, threading\n"
        "from nsparq.client.sync import Producer\n"
        "try:\n"
        "    with Producer(sys.argv[1]) as producer:\n"
        "        producer.publish('t', b'x')\n"
        "        print('connected', flush=True)\n"
        "        sys.stdin.readline()\n"
        "        print('publishing', flush=True)\n"
        "        producer.publish('t', b'y')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted with', threading.active_count(), 'thread')\n"
    )
    with FaultProxy(broker.tcp_address) as proxy:
        command = [sys.executable, "-W", "error", "-c", code, proxy.address]
        with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "connected\n"
            proxy.stall("to_client")
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "publishing\n"
            wait_until(lambda: b"y" in bodies(broker, "t"))
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=DEADLINE)
    assert (output, errors, process.returncode) == ("interrupted with 1 thread\n", "", 0)


def test_a_script_that_closes_nothing_still_ends(broker: Broker) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    broker.publish(topic, b"a", b"b")
    code = (
        "import sys\n"
        "from nsparq.client.sync import Producer, consume\n"
        "producer = Producer(sys.argv[1])\n"
        "producer.publish('t', b'x')\n"
        "messages = consume(sys.argv[2], 'ch', nsqd=[sys.argv[1]])\n"
        "print(next(messages).body.decode())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, broker.tcp_address, topic],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert (result.stdout, result.stderr, result.returncode) == ("a\n", "", 0)
    wait_until(lambda: {m.state for m in broker.peek(topic, "ch")} <= {"ready", "requeued"})


FORKING = """
import os, sys
from nsparq.client.sync import Producer, consume
producer = Producer(sys.argv[1])
topic = sys.argv[2]
producer.publish(topic, b"before")
messages = consume(topic, "ch", nsqd=[sys.argv[1]])
next(messages)
child = os.fork()
name = b"parent" if child else b"child"
for number in range(3):
    producer.publish(topic, name + b"%d" % number)
if not child:
    try:
        next(messages)
    except RuntimeError as error:
        producer.publish(topic, str(error).encode())
    producer.close()
    producer.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
producer.publish(topic, b"after")
print(next(messages).body.decode())
messages.close()
producer.close()
if not os.fork():
    try:
        producer.publish(topic, b"closed")
    except Exception as error:
        os._exit(0 if type(error).__name__ == "Stopped" else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def test_a_producer_works_in_parent_and_child_after_a_fork(broker: Broker) -> None:
    topic = unique_name("sync")
    broker.create(topic, "ch")
    command = [sys.executable, "-W", "error", "-c", FORKING, broker.tcp_address, topic]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert (result.stderr, result.returncode) == ("", 0)
    # The parent's loop over messages continues too.
    assert result.stdout.strip() in {f"{who}{number}" for who in ("parent", "child") for number in range(3)}
    found = [message.body for message in broker.peek(topic)]
    assert sorted(found) == sorted(
        [b"before", b"after", *(b"%s%d" % (who, n) for who in (b"parent", b"child") for n in range(3))]
        + [b"the loop over messages belongs to the parent of the fork: start another one"]
    )
