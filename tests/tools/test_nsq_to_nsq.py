"""nsq_to_nsq: a message is finished when its destination has acknowledged it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from nsparq.client import Requeue
from nsparq.names import VALID_NAME
from nsparq.tools import nsq_to_nsq
from nsparq.tools.nsq_to_nsq import Copier, JsonFilter, NsqToNsqOptions
from tests.support import BrokerProcess, TestBroker, start_broker, unique_name, wait_until
from tests.support.aio import until
from tests.support.scripted_nsqd import ScriptedNsqd

from .processes import (
    Tool,
    consume,
    free_address,
    publish_with_headers,
    tcp,
    wait_for_channel,
    wait_until_drained,
    with_headers,
)

QUICK = ("--consumer-opt=default_requeue_delay,0", "--consumer-opt=backoff_multiplier,1ms")


def copy(broker: TestBroker, *arguments: str, to: str = "") -> Tool:
    source, target = (
        f"--nsqd-tcp-address={tcp(broker)}",
        f"--destination-nsqd-tcp-address={to or tcp(broker)}",
    )
    return Tool("nsq_to_nsq", source, target, "--channel=c", *QUICK, *arguments)


def count(broker: TestBroker, topic: str) -> int:
    stats = broker.topic_stats(topic)
    return int(stats["message_count"]) if stats else 0


def test_messages_are_copied_to_the_same_topic_elsewhere(broker: TestBroker) -> None:
    topics = [unique_name("topic"), unique_name("topic")]
    bodies = [b"one", b"\xff\x00binary", b"x" * 50_000, *(b"%d" % number for number in range(500))]
    with start_broker() as other:
        with copy(broker, *(f"--topic={topic}" for topic in topics), to=tcp(other)) as tool:
            for topic in topics:
                broker.publish(topic, *bodies)
            for topic in topics:
                wait_until_drained(broker, topic, "c", len(bodies))
            assert tool.terminate() == 0
            assert tool.out() == b""
        for topic in topics:
            assert consume(other, topic, len(bodies)) == bodies


def test_messages_are_copied_with_their_headers(broker: TestBroker, topic: str) -> None:
    target = unique_name("target")
    publish_with_headers(broker, topic, b"one", tenant="acme")
    broker.publish(topic, b"two")
    with copy(broker, f"--topic={topic}", f"--destination-topic={target}") as tool:
        assert with_headers(broker, target, 2) == [(b"one", {"tenant": "acme"}), (b"two", {})]
        assert tool.terminate() == 0


def test_headers_that_the_destination_does_not_know_are_not_dropped_unless_told(
    broker: TestBroker, topic: str
) -> None:
    """A scripted nsqd in place of NSQ's own."""
    publish_with_headers(broker, topic, b"one", tenant="acme")

    async def main() -> None:
        async with ScriptedNsqd() as other:
            flags = (f"--topic={topic}", "--consumer-opt=max_attempts,0")
            with copy(broker, *flags, to=other.address) as tool:
                await asyncio.to_thread(tool.wait_for_log, "this nsqd does not support message headers")
                assert await asyncio.to_thread(tool.terminate) == 0
            assert "PUB" not in str(other.commands)
            with copy(broker, *flags, "--drop-headers", to=other.address) as tool:
                await until(lambda: f"PUB {topic}" in other.commands)
                await asyncio.to_thread(wait_until_drained, broker, topic, "c", 1)
                assert await asyncio.to_thread(tool.terminate) == 0

    asyncio.run(main())


def test_messages_without_headers_are_copied_beside_those_with_headers(
    broker: TestBroker, topic: str
) -> None:
    plain = [b"plain%02d" % number for number in range(40)]
    # Headers that a copy does not have need nothing of the destination.
    publish_with_headers(broker, topic, plain[0], nsq_producer="p", nsq_epoch="1", nsq_number="1")
    for part in (plain[1:20], plain[20:]):
        broker.publish(topic, *part)
        publish_with_headers(broker, topic, b"headed", tenant="acme")

    async def main() -> None:
        async with ScriptedNsqd() as other:
            flags = (f"--topic={topic}", "--consumer-opt=max_attempts,2")
            with copy(broker, *flags, to=other.address) as tool:
                await asyncio.to_thread(wait_until_drained, broker, topic, "c", 42)
                assert await asyncio.to_thread(tool.terminate) == 0
                bodies = b"".join(body for peer in other.peers for body in peer.bodies)
                assert [body for body in plain if body not in bodies] == [] and b"headed" not in bodies
                counts = re.findall(r"(\d+) messages with headers were not .*--drop-headers", tool.err())
                # Each of them twice.
                assert sum(map(int, counts)) == 4
                assert f"WARNING: {topic}/c: 2 messages were given up" in tool.err()

    asyncio.run(main())


@dataclass
class Requeued:
    """In place of a Message. Remembers how it was requeued."""

    body: bytes
    headers: dict[str, str]
    answers: list[bool] = field(default_factory=list)
    """For each time, whether with a back-off."""

    def requeue(self, *, backoff: bool = True) -> None:
        self.answers.append(backoff)


def test_messages_that_no_destination_takes_do_not_slow_down_the_others() -> None:
    """As a back-off would."""

    async def main() -> None:
        async with ScriptedNsqd() as other, ScriptedNsqd(publish="E_BAD_MESSAGE no") as refusing:
            for address in (other.address, refusing.address):
                options = NsqToNsqOptions(destination_nsqd_tcp_address=(address,))
                copier = Copier(options)
                message: Any = Requeued(b"one", {"tenant": "acme"} if address == other.address else {})
                await copier.copy("t", [message])
                await copier.close()
                assert message.answers == [False]

    asyncio.run(main())


def test_messages_with_headers_go_to_the_destination_that_knows_them(broker: TestBroker, topic: str) -> None:
    async def main() -> None:
        async with ScriptedNsqd() as other:
            with start_broker() as knows:
                more = (f"--topic={topic}", f"--destination-nsqd-tcp-address={tcp(knows)}")
                with copy(broker, *more, "--consumer-opt=max_attempts,2", to=other.address) as tool:
                    await asyncio.to_thread(publish_with_headers, broker, topic, *[b"x"] * 50, tenant="acme")
                    await asyncio.to_thread(wait_until_drained, broker, topic, "c", 50)
                    assert count(knows, topic) == 50
                    # The other one still gets its share.
                    await asyncio.to_thread(broker.publish, topic, *[b"plain"] * 50)
                    await asyncio.to_thread(wait_until_drained, broker, topic, "c", 100)
                    assert await asyncio.to_thread(tool.terminate) == 0
                    assert "given up" not in tool.err()
                bodies = b"".join(body for peer in other.peers for body in peer.bodies)
                assert (bodies.count(b"plain"), count(knows, topic)) == (25, 75)

    asyncio.run(main())


def test_a_message_that_is_refused_does_not_take_its_destination_out_of_the_pool(
    broker: TestBroker, topic: str
) -> None:
    with start_broker(max_msg_size=100) as one, start_broker(max_msg_size=100) as two:
        more = (f"--topic={topic}", f"--destination-nsqd-tcp-address={tcp(two)}")
        with copy(broker, *more, "--consumer-opt=max_attempts,1", to=tcp(one)) as tool:
            broker.publish(topic, b"x" * 101)
            tool.wait_for_log(f"lost {tcp(one)}")
            wait_until_drained(broker, topic, "c", 1)
            broker.publish(topic, *[b"plain"] * 50)
            wait_until_drained(broker, topic, "c", 51)
            assert tool.terminate() == 0
            assert f"WARNING: {topic}/c: 1 messages were given up" in tool.err()
        assert (count(one, topic), count(two, topic)) == (25, 25)


def test_messages_are_copied_to_another_topic(broker: TestBroker, topic: str) -> None:
    target = unique_name("target")
    with copy(broker, f"--topic={topic}", f"--destination-topic={target}", "--status-every=2") as tool:
        broker.publish(topic, b"one", b"two")
        wait_until_drained(broker, topic, "c", 2)
        assert tool.terminate() == 0
        assert f"2 publishes to {tcp(broker)}: average " in tool.err()
    assert consume(broker, target, 2) == [b"one", b"two"]


@pytest.mark.parametrize("mode", ["round-robin", "hostpool", "epsilon-greedy", "unheard-of"])
def test_several_destinations_share_the_messages(broker: TestBroker, topic: str, mode: str) -> None:
    with start_broker() as one, start_broker() as two:
        more = f"--destination-nsqd-tcp-address={tcp(two)}"
        with copy(broker, f"--topic={topic}", more, f"--mode={mode}", to=tcp(one)) as tool:
            broker.publish(topic, *(b"%d" % number for number in range(100)))
            wait_until_drained(broker, topic, "c", 100)
            assert tool.terminate() == 0
        counts = count(one, topic), count(two, topic)
        assert sum(counts) == 100
        assert counts == (50, 50) if mode != "epsilon-greedy" else min(counts) > 0


def test_a_destination_that_was_down_gets_everything_later(broker: TestBroker, topic: str) -> None:
    address = free_address()
    with copy(broker, f"--topic={topic}", "--consumer-opt=max_attempts,0", to=address) as tool:
        broker.publish(topic, *(b"%d" % number for number in range(20)))
        tool.wait_for_log("messages were not published")
        with start_broker(tcp_address=address) as other:
            wait_until_drained(broker, topic, "c", 20)
            assert tool.terminate() == 0
            assert Counter(consume(other, topic, 20)) == Counter(b"%d" % number for number in range(20))


def test_one_of_two_destinations_may_die_without_loss(broker: TestBroker, topic: str) -> None:
    bodies = [b"%d" % number for number in range(2000)]
    with BrokerProcess() as dying, start_broker() as other:
        more = f"--destination-nsqd-tcp-address={tcp(other)}"
        with copy(broker, f"--topic={topic}", more, "--max-in-flight=10", to=tcp(dying)) as tool:
            broker.publish(topic, *bodies[:1000])
            wait_until(lambda: count(dying, topic) > 50)
            dying.kill()
            broker.publish(topic, *bodies[1000:])
            wait_until_drained(broker, topic, "c", 2000)
            assert tool.terminate() == 0
        dying.start()
        # Acknowledged by one of them, each at least once.
        kept = dying.topic_stats(topic)
        assert kept is not None
        found = {*consume(dying, topic, kept["depth"]), *consume(other, topic, count(other, topic))}
        assert found == set(bodies)


def test_a_refused_message_does_not_delay_the_others(broker: TestBroker, topic: str) -> None:
    good = [b"%d" % number for number in range(50)]
    with start_broker(max_msg_size=100) as other:
        with copy(broker, f"--topic={topic}", to=tcp(other)) as tool:
            wait_for_channel(broker, topic, "c")
            broker.publish(topic, *good[:25], b"x" * 101, *good[25:])
            tool.wait_for_log("giving up")
            wait_until_drained(broker, topic, "c", 51)
            assert tool.terminate() == 0
            assert "1 messages were not published: E_BAD_MESSAGE" in tool.err()
        assert Counter(consume(other, topic, 50)) == Counter(good)


def test_json_objects_are_chosen_by_a_field_and_reduced(broker: TestBroker, topic: str) -> None:
    target = unique_name("target")
    flags = (
        "--require-json-field=level",
        "--require-json-value=error",
        "--whitelist-json-field=text",
        "--whitelist-json-field=code",
    )
    with copy(broker, f"--topic={topic}", f"--destination-topic={target}", *flags) as tool:
        broker.publish(
            topic,
            b'{"level": "error", "text": "a\xc3\xa4", "code": 5.0, "more": 1}',
            b'{"level": "info", "text": "b"}',
            b"no json",
            b'{"text": "no level"}',
            b'{"level": "error", "other": true}',
        )
        wait_until_drained(broker, topic, "c", 5)
        assert tool.terminate() == 0
        assert "dropped a message that is not JSON" in tool.err()
        assert "a message has no field level" in tool.err()
    assert consume(broker, target, 2) == ['{"code":5,"text":"aä"}'.encode(), b"{}"]
    assert count(broker, target) == 2


# The filter


def passes(body: str, field: str = "f", value: str = "") -> bool:
    return JsonFilter(field, value, ()).apply(body.encode()) is not None


@pytest.mark.parametrize(
    ("body", "value", "result"),
    [
        ('{"f":"x"}', "", True),
        ('{"f":null}', "", True),
        ('{"g":1}', "", False),
        ('{"f":"x"}', "x", True),
        ('{"f":"X"}', "x", False),
        ('{"f":5}', "5", True),
        ('{"f":5.0}', "5", True),
        ('{"f":5}', "5e0", True),
        ('{"f":"5"}', "5", True),
        ('{"f":"5"}', "5.0", False),
        ('{"f":6}', "5", False),
        ('{"f":5}', "x", False),
        ('{"f":true}', "true", False),
        ('{"f":true}', "1", False),
        ('{"f":null}', "null", False),
        ('{"f":["5"]}', "5", False),
    ],
)
def test_the_required_value_is_compared_by_type(body: str, value: str, result: bool) -> None:
    assert passes(body, value=value) is result


@pytest.mark.parametrize(
    "body", ["", "x", "[1]", "5", '"f"', "null", '{"f":1', '{"f":NaN}', '{"f":1}x', "[" * 100_000]
)
def test_messages_that_are_not_json_objects_are_dropped(body: str) -> None:
    assert not passes(body)


def test_a_number_that_no_float_holds_is_not_copied_as_infinity() -> None:
    assert JsonFilter("", "", ("a",)).apply(b'{"a":-1e400}') is None


def test_a_message_without_the_required_field_is_requeued() -> None:
    with pytest.raises(Requeue):
        passes("{}", value="x")


def test_without_filters_anything_passes_untouched() -> None:
    assert JsonFilter("", "", ()).apply(b"\xff no json") == b"\xff no json"
    assert JsonFilter("f", "", ()).apply(b'{ "f" : 1.0 }') == b'{ "f" : 1.0 }'


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("1.0", "1"),
        ("1e3", "1000"),
        ("-2.50", "-2.5"),
        ("123456789012345678901234", "123456789012345678901234"),
        ('[1.0,{"b":2.0,"a":0.1}]', '[1,{"a":0.1,"b":2}]'),
        ('"\\u00e4\\n"', '"ä\\n"'),
        ("null", "null"),
    ],
)
def test_reduced_objects_are_compact_json_with_integers(value: str, written: str) -> None:
    kept = JsonFilter("", "", ("a", "b", "a")).apply(f'{{"b": {value}, "c": 1, "a": "x"}}'.encode())
    assert kept is not None
    assert kept.decode() == f'{{"a":"x","b":{written}}}'
    json.loads(kept)


GOOD = ("--topic=t", "--nsqd-tcp-address=127.0.0.1:1")
NO_ADDRESS = "--destination-nsqd-tcp-address 'x' is not host:port or the path of a Unix socket"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--topic and --channel are required"),
        (("--topic=t",), "--nsqd-tcp-address or --lookupd-http-address required"),
        (GOOD, "--destination-nsqd-tcp-address required"),
        ((*GOOD, "--destination-topic=a b"), "--destination-topic is invalid"),
        ((*GOOD, "--destination-nsqd-tcp-address=x"), NO_ADDRESS),
        ((*GOOD, "--channel=a b"), f"--channel 'a b' is not a valid channel name: {VALID_NAME}"),
    ],
)
def test_invalid_options_are_refused(
    arguments: tuple[str, ...], text: str, capsys: Any, root_logger_restored: None
) -> None:
    assert nsq_to_nsq.main(arguments) == 1
    assert capsys.readouterr().err.endswith(f"FATAL: {text}\n")
