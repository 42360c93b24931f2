"""The client library when brokers die, networks fail, handlers are slow or raise, and tasks are
cancelled.

What holds in every case: a publish that was acknowledged is not lost, a message that was not
handled is not finished, nothing takes longer than it may, and nothing is left running or open.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from nsparq.addresses import join_address
from nsparq.client import ClientError, Config, Consumer, Message, NotConnected, Producer, PublishTimeout
from nsparq.testing import FaultProxy
from tests.support import REFERENCE, BrokerProcess, TestBroker, start_process, unique_name
from tests.support.aio import run, until
from tests.support.lookupd import LookupdProcess
from tests.support.polling import DEADLINE

QUICK: dict[str, Any] = {
    "reconnect_delay": 0.01,
    "max_reconnect_delay": 0.2,
    "default_requeue_delay": 0,
    "max_attempts": 0,
    "backoff_multiplier": 0.005,
    "max_backoff_duration": 0.05,
    # The reference takes messages of a lost connection back only then.
    "msg_timeout": 1.0,
}


def address(broker: TestBroker) -> str:
    return join_address(*broker.address)  # type: ignore[misc]  # not a Unix socket


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    # Not in this process: whatever socket is left here is then the client's.
    with start_process() as broker:
        yield broker


@pytest.fixture
def proxy(broker: TestBroker) -> Iterator[FaultProxy]:
    with FaultProxy(address(broker)) as proxy:
        yield proxy


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


class Account:
    """What was acknowledged, and what was handled."""

    def __init__(self, broker: TestBroker, topic: str) -> None:
        self.broker, self.topic = broker, topic
        self.published: set[bytes] = set()
        """All that a broker may have been asked to take."""
        self.acknowledged: set[bytes] = set()
        self.handled: Counter[bytes] = Counter()

    async def publish(self, producer: Producer, body: bytes) -> None:
        self.published.add(body)
        await producer.publish(self.topic, body)
        self.acknowledged.add(body)

    async def publish_at_last(self, producer: Producer, body: bytes) -> None:
        """The connection that is there may just have been cut."""
        while body not in self.acknowledged:
            with suppress(ClientError):
                await self.publish(producer, body)

    async def handle(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.handled[message.body] += 1

    @property
    def is_settled(self) -> bool:
        return self.acknowledged <= set(self.handled)

    async def settle(self, within: float = DEADLINE) -> None:
        """Have a consumer that nothing happens to take the rest; then all that was promised was
        kept."""
        config = Config(**QUICK)
        async with Consumer(
            self.topic, "ch", self.handle, nsqd=[address(self.broker)], max_in_flight=50, config=config
        ):
            await until(lambda: self.is_settled, within=within, what="every acknowledged message is handled")
        self.check()

    def check(self) -> None:
        assert self.acknowledged <= set(self.handled), "lost"
        assert set(self.handled) <= self.published, "never published"


# Daemons


def on_a_fixed_port(process: BrokerProcess) -> BrokerProcess:
    """So that clients find it again after a restart."""
    process.flags["tcp_address"] = address(process)
    return process


@pytest.mark.skipif(bool(REFERENCE), reason="the reference loses what it holds in memory")
def test_nsqd_killed_and_restarted_under_load() -> None:
    with start_process() as process:
        on_a_fixed_port(process)
        account = Account(process, "t")

        async def main() -> None:
            config = Config(**QUICK, publish_timeout=DEADLINE)
            is_over = False

            async def publish(producer: Producer, name: int) -> None:
                number = 0
                while not is_over:
                    number += 1
                    try:
                        await account.publish(producer, b"%d.%d" % (name, number))
                    except ClientError:
                        await asyncio.sleep(0.01)

            async with (
                Producer(address(process), config=config) as producer,
                Consumer("t", "ch", account.handle, nsqd=[address(process)], max_in_flight=20, config=config),
            ):
                publishers = [asyncio.create_task(publish(producer, name)) for name in range(5)]
                for _ in range(3):
                    count = len(account.acknowledged)
                    await until(lambda count=count: len(account.acknowledged) > count + 200)
                    await asyncio.to_thread(process.kill)
                    before = len(account.acknowledged)
                    await asyncio.sleep(0.1)
                    await asyncio.to_thread(process.start)
                    await until(lambda before=before: len(account.acknowledged) > before)
                is_over = True
                await asyncio.gather(*publishers)
                await until(lambda: account.is_settled)
            account.check()

        run(main())


def test_nsqd_restarted_in_order_with_retry_needs_no_errors() -> None:
    with start_process() as process:
        on_a_fixed_port(process)
        account = Account(process, "t")

        async def main() -> None:
            config = Config(**QUICK)
            async with (
                Producer(address(process), retry=True, config=config) as producer,
                Consumer("t", "ch", account.handle, nsqd=[address(process)], max_in_flight=20, config=config),
            ):

                async def publish(name: int) -> None:
                    for number in range(300):
                        await account.publish(producer, b"%d.%d" % (name, number))

                publishing = asyncio.gather(*(publish(name) for name in range(4)))
                await until(lambda: len(account.acknowledged) > 100)
                await asyncio.to_thread(process.restart)
                await publishing
                await until(lambda: account.is_settled)
            assert len(account.acknowledged) == 1200
            account.check()

        run(main())


def test_nsqlookupd_gone_and_back() -> None:
    """Consumers go on without it, and find what is new when it is back."""
    with LookupdProcess() as lookupd:
        tcp, http = (join_address(*one) for one in (lookupd.address, lookupd.http_address))  # type: ignore[misc]
        lookupd.flags.update(tcp_address=tcp, http_address=http)
        flags = {"lookupd_tcp_address": (tcp,), "broadcast_address": "127.0.0.1"}
        with start_process(**flags) as first, start_process(**flags) as second:
            account = Account(first, "t")

            async def main() -> None:
                config = Config(**QUICK, lookupd_poll_interval=0.1, lookupd_poll_jitter=0)
                async with Producer(address(first), config=config) as producer:
                    await account.publish(producer, b"1")
                    async with Consumer(
                        "t", "ch", account.handle, nsqlookupd=[http], config=config
                    ) as consumer:
                        await until(lambda: account.is_settled)
                        await asyncio.to_thread(lookupd.kill)
                        await account.publish(producer, b"2")
                        await until(lambda: account.is_settled)
                        assert consumer.connections == [address(first)]
                        async with Producer(address(second), config=config) as other:
                            await account.publish(other, b"3")
                        await asyncio.sleep(0.3)
                        assert b"3" not in account.handled
                        await asyncio.to_thread(lookupd.start)
                        await until(lambda: account.is_settled)
                        assert set(consumer.connections) == {address(first), address(second)}

            run(main())


def test_without_any_nsqlookupd_a_consumer_stops_at_once() -> None:
    async def main() -> None:
        consumer = Consumer("t", "ch", lambda message: None, nsqlookupd=["127.0.0.1:1", "127.0.0.1:2"])
        await consumer.start()
        await asyncio.sleep(0.3)
        await consumer.stop()

    run(main())


def test_a_nsqlookupd_that_stalls_does_not_hold_up_the_end_of_a_program() -> None:
    with FaultProxy("127.0.0.1:1") as silent:
        silent.stall()

        async def main() -> None:
            async with Consumer("t", "ch", lambda message: None, nsqlookupd=[silent.address]):
                await until(lambda: silent.accepted_count)

        run(main())


# Networks


@pytest.mark.parametrize("cut", [1, 9, 30, 61, 100, 777, 2000])
@pytest.mark.parametrize("direction", ["to_client", "to_broker"])
def test_connections_that_end_in_the_middle_of_a_frame(
    broker: TestBroker, proxy: FaultProxy, topic: str, cut: int, direction: Any
) -> None:
    account = Account(broker, topic)

    async def main() -> None:
        config = Config(**QUICK)
        async with (
            Producer(proxy.address, config=config) as producer,
            Consumer(topic, "ch", account.handle, nsqd=[proxy.address], max_in_flight=10, config=config),
        ):
            await producer.connect()
            await until(lambda: proxy.connection_count == 2)
            for number in range(60):
                if number % 20 == 10:
                    proxy.cut_after(cut, direction)
                if number % 20 == 15:
                    proxy.heal()
                with suppress(ClientError):
                    await account.publish(producer, b"%d" % number)
                await asyncio.sleep(0.002)
            proxy.heal()
            await account.publish_at_last(producer, b"last")
        await account.settle()

    run(main())
    assert len(account.acknowledged) >= 30


def test_a_stalled_producer_raises_in_time_and_never_lies(
    broker: TestBroker, proxy: FaultProxy, topic: str
) -> None:
    account = Account(broker, topic)

    async def main() -> None:
        config = Config(**QUICK, publish_timeout=0.5)
        async with Producer(proxy.address, config=config) as producer:
            await account.publish(producer, b"before")
            proxy.stall()
            tasks = [asyncio.create_task(account.publish(producer, b"%d" % number)) for number in range(10)]
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, PublishTimeout | NotConnected) for one in outcomes)
            proxy.heal()
            await account.publish(producer, b"after")
        await account.settle()
        assert account.acknowledged == {b"before", b"after"}

    run(main())


@pytest.mark.parametrize("direction", ["to_client", "to_broker", "both"])
def test_a_stalled_broker_is_left_for_another(
    broker: TestBroker, proxy: FaultProxy, topic: str, direction: Any
) -> None:
    account = Account(broker, topic)

    async def main() -> None:
        config = Config(**QUICK, publish_timeout=0.5, handshake_timeout=0.2)
        async with Producer(proxy.address, address(broker), config=config) as producer:
            await account.publish(producer, b"1")
            assert producer.address == proxy.address
            proxy.stall(direction)
            with pytest.raises((PublishTimeout, NotConnected)):
                await account.publish(producer, b"2")
            await account.publish(producer, b"3")
            assert producer.address == address(broker)
        await account.settle()

    run(main())


@pytest.mark.parametrize("direction", ["to_client", "both"])
def test_a_stalled_consumer_notices_and_comes_back(
    broker: TestBroker, proxy: FaultProxy, topic: str, direction: Any
) -> None:
    account = Account(broker, topic)

    async def main() -> None:
        config = Config(**QUICK, heartbeat_interval=1, read_timeout=1.2, handshake_timeout=0.3)
        async with (
            Producer(address(broker)) as producer,
            Consumer(topic, "ch", account.handle, nsqd=[proxy.address], config=config) as consumer,
        ):
            await account.publish(producer, b"1")
            await until(lambda: account.is_settled)
            proxy.stall(direction)
            await account.publish(producer, b"2")
            await until(lambda: not consumer.connections)
            proxy.heal()
            await until(lambda: account.is_settled)
        account.check()

    run(main())


def test_a_slow_network_is_not_taken_for_a_stalled_one(
    broker: TestBroker, proxy: FaultProxy, topic: str
) -> None:
    account = Account(broker, topic)

    async def main() -> None:
        config = Config(**QUICK, write_timeout=0.3)
        async with Producer(proxy.address, config=config) as producer:
            await producer.connect()
            proxy.throttle(3_000_000, "to_broker")
            # More than the sockets on the way hold, and seconds long; not an end of it for a
            # moment.
            bodies = [bytes([number]) * 900_000 for number in range(1, 9)]
            await asyncio.gather(*(account.publish(producer, body) for body in bodies))
            assert proxy.accepted_count == 1
        proxy.heal()
        await account.settle()

    run(main())


def test_a_broker_that_reads_no_answers_does_not_make_the_consumer_grow(
    broker: TestBroker, proxy: FaultProxy, topic: str
) -> None:
    """What it holds are answers to what is in flight, and touches; then the connection is given
    up."""
    account = Account(broker, topic)

    async def main() -> None:
        config = Config(**QUICK, heartbeat_interval=1, read_timeout=1.2, write_timeout=0.2)
        async with (
            Producer(address(broker)) as producer,
            Consumer(
                topic, "ch", account.handle, nsqd=[proxy.address], max_in_flight=100, config=config
            ) as consumer,
        ):
            await until(lambda: _ready(broker, topic) == 100)
            proxy.stall("to_broker")
            await asyncio.gather(*(account.publish(producer, b"%d" % number) for number in range(500)))
            await until(lambda: consumer.messages_received >= 50)
            connection = consumer._discovery.connections[proxy.address]
            assert connection._transport is not None
            assert connection._transport.get_write_buffer_size() < 100 * 30
            assert consumer.messages_received <= 110, "the broker keeps to RDY"
            # It gets no answers to its heartbeats and ends the connection.
            await until(lambda: not consumer.connections or proxy.accepted_count > 1)
            proxy.heal()
            await until(lambda: account.is_settled)
        account.check()

    run(main())


def test_connections_reset_again_and_again(broker: TestBroker, proxy: FaultProxy, topic: str) -> None:
    account = Account(broker, topic)

    async def main() -> None:
        config = Config(**QUICK)
        async with (
            Producer(proxy.address, retry=True, config=config) as producer,
            Consumer(
                topic,
                "ch",
                account.handle,
                nsqd=[proxy.address],
                max_in_flight=10,
                concurrency=4,
                config=config,
            ),
        ):
            tasks = [asyncio.create_task(account.publish(producer, b"%d" % number)) for number in range(300)]
            for number in range(20):
                await asyncio.sleep(0.01)
                proxy.reset() if number % 2 else proxy.disconnect()
            await asyncio.gather(*tasks)
            await until(lambda: account.is_settled)
        assert len(account.acknowledged) == 300
        account.check()

    run(main())


# Handlers


def test_a_loop_that_is_left_costs_its_message_one_attempt(broker: TestBroker, topic: str) -> None:
    """And not a second one, by going back to a consumer that is about to leave."""
    seen: list[int] = []

    async def take_one() -> None:
        async with Consumer(topic, "ch", nsqd=[address(broker)], config=Config(**QUICK)) as consumer:
            async for message in consumer:
                seen.append(message.attempts)
                break

    async def main() -> None:
        async with Producer(address(broker)) as producer:
            await producer.publish(topic, b"x")
        for _ in range(10):
            await take_one()

    run(main())
    assert seen == list(range(1, 11))


@pytest.mark.parametrize("is_async", [True, False], ids=["coroutine", "thread"])
def test_a_slow_handler_keeps_its_message_and_its_connection(
    broker: TestBroker, topic: str, is_async: bool
) -> None:
    """Twice the message's timeout, and two heartbeats long; the second message waits as long before
    that."""
    attempts: list[int] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(4.4)
        attempts.append(message.attempts)

    def block(message: Message) -> None:
        time.sleep(4.4)
        attempts.append(message.attempts)

    async def main() -> None:
        config = Config(msg_timeout=2, heartbeat_interval=2)
        async with Producer(address(broker)) as producer:
            await producer.publish_many(topic, [b"1", b"2"])
        async with Consumer(
            topic, "ch", handle if is_async else block, nsqd=[address(broker)], config=config
        ) as consumer:
            await until(lambda: len(attempts) == 2)
        assert attempts == [1, 1]
        assert (consumer.messages_received, consumer.messages_finished) == (2, 2)

    run(main())
    stats = broker.channel_stats(topic, "ch")
    assert stats is not None and stats["timeout_count"] == 0


def test_blocked_threads_do_not_keep_the_others_from_working(broker: TestBroker, topic: str) -> None:
    release = threading.Event()
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        if message.body == b"block":
            release.wait(DEADLINE)
        handled.append(message.body)

    async def main() -> None:
        config = Config(heartbeat_interval=1)
        async with (
            Producer(address(broker)) as producer,
            Consumer(topic, "ch", handle, nsqd=[address(broker)], concurrency=3, config=config) as consumer,
        ):
            await producer.publish_many(topic, [b"block", b"block"])
            await until(lambda: consumer.messages_received == 2)
            await producer.publish_many(topic, [b"%d" % number for number in range(50)])
            await until(lambda: len(handled) == 50)
            release.set()
            await until(lambda: len(handled) == 52)

    run(main())


@pytest.mark.parametrize("is_async", [True, False], ids=["coroutine", "thread"])
def test_handlers_that_raise_get_everything_again(broker: TestBroker, topic: str, is_async: bool) -> None:
    account = Account(broker, topic)
    chance = random.Random(7)
    failed: Counter[bytes] = Counter()

    def fail_often(message: Message) -> None:
        if chance.random() < 0.3:
            failed[message.body] += 1
            raise chance.choice([ValueError, KeyError, OSError, StopIteration, MemoryError])()
        account.handled[message.body] += 1

    async def fail_often_async(message: Message) -> None:
        await asyncio.sleep(0)
        fail_often(message)

    async def main() -> None:
        options = {**QUICK, "backoff_multiplier": 0.0005, "max_backoff_duration": 0.004}
        async with Producer(address(broker)) as producer:
            await asyncio.gather(*(account.publish(producer, b"%d" % number) for number in range(150)))
        handler: Callable[[Message], Any] = fail_often_async if is_async else fail_often
        async with Consumer(
            topic, "ch", handler, nsqd=[address(broker)], concurrency=5, config=Config(**options)
        ) as consumer:
            await until(lambda: account.is_settled)
            await until(lambda: consumer.messages_finished == 150)
        assert set(account.handled.values()) == {1}, "none was handled well twice"
        assert consumer.messages_requeued == failed.total() > 0

    run(main())


# Cancelled at any point


@pytest.mark.parametrize("seed", range(12))
def test_publishes_cancelled_at_any_point(
    broker: TestBroker, proxy: FaultProxy, topic: str, seed: int
) -> None:
    """The others are not confused: an answer is never taken for that of another."""
    account = Account(broker, topic)
    chance = random.Random(seed)

    async def main() -> None:
        config = Config(**QUICK, publish_timeout=DEADLINE)
        async with Producer(
            proxy.address, config=config, retry=seed % 2 == 0, max_pending=chance.choice([1, 3, 1000])
        ) as producer:
            tasks = []
            if seed % 3:
                await account.publish(producer, b"first")
            for number in range(120):
                tasks.append(asyncio.create_task(account.publish(producer, b"%d" % number)))
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.choice([0, 0, 0.0005, 0.002]))
                if chance.random() < 0.3:
                    chance.choice(tasks).cancel()
                if chance.random() < 0.02:
                    proxy.reset()
            if chance.random() < 0.5:
                await producer.stop()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for outcome in outcomes:
                assert outcome is None or isinstance(outcome, asyncio.CancelledError | ClientError)
        await account.settle()

    run(main())


@pytest.mark.parametrize("kind", ["handler", "thread", "batch", "loop"])
@pytest.mark.parametrize("seed", range(3))
def test_consumers_cancelled_at_any_point(broker: TestBroker, topic: str, kind: str, seed: int) -> None:
    """Again and again, in the middle of whatever they do; what they did not handle is not
    finished."""
    account = Account(broker, topic)
    chance = random.Random(f"{kind}{seed}")

    async def handle(message: Message) -> None:
        await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))
        account.handled[message.body] += 1

    async def handle_batch(messages: list[Message]) -> None:
        await asyncio.sleep(chance.choice([0, 0.002]))
        account.handled.update(message.body for message in messages)

    def handle_in_thread(message: Message) -> None:
        time.sleep(chance.choice([0, 0.001]))
        account.handled[message.body] += 1

    async def use() -> None:
        options: dict[str, Any] = {"nsqd": [address(broker)], "max_in_flight": 8, "config": Config(**QUICK)}
        if kind == "batch":
            options.update(batch_handler=handle_batch, batch_size=4, batch_timeout=0.01)
        elif kind != "loop":
            options.update(handler=handle if kind == "handler" else handle_in_thread, concurrency=2)
        async with Consumer(topic, "ch", **options) as consumer:
            if kind != "loop":
                await asyncio.Event().wait()
            async for message in consumer:
                await handle(message)

    async def main() -> None:
        async with Producer(address(broker)) as producer:
            await asyncio.gather(*(account.publish(producer, b"%d" % number) for number in range(200)))
        for _ in range(25):
            task = asyncio.create_task(use())
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
            await asyncio.sleep(chance.choice([0, 0, 0.002, 0.01, 0.03]))
            task.cancel()
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            # Also in the middle of its stop.
            if chance.random() < 0.3:
                task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not others, others
        await account.settle()

    run(main())


def test_a_dead_letter_is_never_lost_when_its_publish_is_cut_off(
    broker: TestBroker, proxy: FaultProxy, topic: str
) -> None:
    """Through a network that fails again and again, every message that is given up is in the other
    topic."""
    account = Account(broker, topic)
    dead = f"{topic}.dead"

    async def fail(message: Message) -> None:
        raise ValueError

    async def main() -> None:
        options = {**QUICK, "max_attempts": 1, "publish_timeout": 1}
        async with Producer(address(broker)) as producer:
            await producer.publish_many(topic, [b"%d" % number for number in range(30)])
        buried: Counter[bytes] = Counter()

        async def bury(message: Message) -> None:
            buried[message.body] += 1

        async with (
            Consumer(dead, "ch", bury, nsqd=[address(broker)], config=Config(**QUICK)),
            Consumer(topic, "ch", fail, nsqd=[proxy.address], dead_letter=dead, config=Config(**options)),
        ):
            for _ in range(10):
                await asyncio.sleep(0.03)
                proxy.reset()
            await until(lambda: len(buried) == 30)
            await until(lambda: _left(broker, topic) == 0)
        assert set(buried) == {b"%d" % number for number in range(30)}
        account.check()

    run(main())


def _ready(broker: TestBroker, topic: str) -> int:
    """RDY of the clients, as the broker knows it."""
    stats = broker.channel_stats(topic, "ch")
    return sum(client["ready_count"] for client in stats["clients"] or []) if stats else 0


def _left(broker: TestBroker, topic: str) -> int:
    stats = broker.channel_stats(topic, "ch")
    assert stats is not None
    left: int = stats["depth"] + stats["in_flight_count"] + stats["deferred_count"]
    return left
