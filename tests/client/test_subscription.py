from __future__ import annotations

import asyncio
import functools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import msgspec
import pydantic
import pytest

from nsparq.client import Config, Message, Reject, Requeue
from nsparq.client.subscription import DeadLetter, DecodeFailed, Subscriptions
from nsparq.testing import Broker, FaultProxy, run_broker, run_lookupd
from tests.support import aio, unique_name, wait_until
from tests.support.aio import until
from tests.support.polling import DEADLINE

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]

GOOD = b'{"number": 1, "item": "tea"}'
BAD = b'{"number": "one"}'
QUICK = Config(default_requeue_delay=0, max_backoff_duration=0, max_attempts=3)


@dataclass
class Order:
    number: int
    item: str = ""


class OrderModel(pydantic.BaseModel):
    number: int
    item: str = ""


class OrderStruct(msgspec.Struct):
    number: int
    item: str = ""


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


@pytest.fixture
def topic(broker: Broker) -> Iterator[str]:
    name = unique_name("orders")
    broker.create(name, "ch")
    yield name
    broker.delete(name)
    broker.delete(f"{name}.dead")


@pytest.fixture
def app(broker: Broker) -> Subscriptions:
    return Subscriptions(nsqd=[broker.tcp_address], config=QUICK)


def work(
    app: Subscriptions, broker: Broker, topic: str, then: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Run the subscriptions until the channel is empty."""

    async def main() -> None:
        async with app:
            await broker.wait_empty_async(topic, "ch")
            if then is not None:
                await then()

    asyncio.run(main())


def letters(broker: Broker, topic: str) -> list[DeadLetter]:
    return [DeadLetter(**json.loads(message.body)) for message in broker.peek(f"{topic}.dead")]


# parameters of a handler


@pytest.mark.parametrize("kind", [Order, OrderModel, OrderStruct], ids=lambda kind: kind.__name__)
def test_a_handler_gets_the_payload_as_its_type(
    app: Subscriptions, broker: Broker, topic: str, kind: Any
) -> None:
    seen = []

    @app.subscribe(topic, "ch", payload=kind)
    async def handle(order: Any) -> None:
        seen.append(order)

    broker.publish(topic, GOOD)
    work(app, broker, topic)
    assert seen == [kind(number=1, item="tea")]


def test_the_annotation_says_the_type(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch")
    async def handle(order: Order) -> None:
        seen.append(order)

    broker.publish(topic, GOOD)
    work(app, broker, topic)
    assert seen == [Order(1, "tea")]


def test_types_of_the_enclosing_function_are_found(app: Subscriptions, broker: Broker, topic: str) -> None:
    @dataclass
    class Line:
        count: int

    @dataclass
    class Basket:
        lines: list[Line]

    seen = []

    @app.subscribe(topic, "ch")
    async def handle(basket: Basket) -> None:
        seen.append(basket)

    broker.publish(topic, b'{"lines": [{"count": 2}]}')
    work(app, broker, topic)
    assert seen == [Basket([Line(2)])]


def test_a_second_parameter_gets_the_message(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch")
    async def handle(body: bytes, message: Message) -> None:
        seen.append((body, message.body, message.attempts))

    broker.publish(topic, b"\xff")
    work(app, broker, topic)
    assert seen == [(b"\xff", b"\xff", 1)]


def test_a_parameter_with_a_default_keeps_it(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch")
    async def handle(body: str, database: str = "main", *, dry: bool = False) -> None:
        seen.append((body, database, dry))

    broker.publish(topic, b"x")
    work(app, broker, topic)
    assert seen == [("x", "main", False)]


def test_a_handler_may_take_the_message_itself(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch")
    async def handle(message: Message) -> None:
        seen.append(message.body)

    broker.publish(topic, b"x")
    work(app, broker, topic)
    assert seen == [b"x"]


def test_annotations_that_are_not_needed_need_not_resolve(app: Subscriptions) -> None:
    @app.subscribe("t", "ch")
    async def handle(order: Order, message: Unknown) -> Unknown: ...


def test_a_plain_function_runs_in_a_thread(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch", concurrency=2)
    def handle(order: Order) -> None:
        seen.append(threading.current_thread() is threading.main_thread())
        both.wait(DEADLINE)

    both = threading.Barrier(2)
    broker.publish(topic, GOOD, GOOD)
    work(app, broker, topic)
    assert seen == [False, False]


class Handler:
    def __init__(self) -> None:
        self.seen: list[Order] = []

    async def method(self, order: Order) -> None:
        self.seen.append(order)

    async def __call__(self, order: Order) -> None:
        self.seen.append(order)

    async def with_more(self, database: str, order: Order) -> None:
        self.seen.append(order)


@pytest.mark.parametrize("which", ["method", "object", "partial"])
def test_any_callable_is_a_handler(app: Subscriptions, broker: Broker, topic: str, which: str) -> None:
    handler = Handler()
    called: Any = {
        "method": handler.method,
        "object": handler,
        "partial": functools.partial(handler.with_more, "main"),
    }[which]
    assert app.subscribe(topic, "ch")(called) is called
    broker.publish(topic, GOOD)
    work(app, broker, topic)
    assert handler.seen == [Order(1, "tea")]


def test_concurrency_is_how_many_run_at_a_time(app: Subscriptions, broker: Broker, topic: str) -> None:
    running = most = 0

    @app.subscribe(topic, "ch", concurrency=3)
    async def handle(order: Order) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    broker.publish(topic, *[GOOD] * 12)
    work(app, broker, topic)
    assert most == 3


# errors in the declaration of a handler


def test_a_handler_must_annotate_its_payload(app: Subscriptions) -> None:
    with pytest.raises(TypeError, match="handle has no type for its payload: annotate 'order'"):

        @app.subscribe("t", "ch")
        async def handle(order):  # type: ignore[no-untyped-def]
            pass

    assert app.subscriptions == []


def test_a_handler_takes_at_most_a_payload_and_a_message(app: Subscriptions) -> None:
    async def none() -> None: ...
    async def three(order: Order, message: Message, more: int) -> None: ...
    async def keyword(order: Order, *, more: int) -> None: ...

    for handler in (none, three, keyword):
        with pytest.raises(TypeError, match=f"{handler.__name__} must take the payload"):
            app.subscribe("t", "ch")(handler)


def test_an_annotation_that_does_not_resolve_is_an_error(app: Subscriptions) -> None:
    with pytest.raises(TypeError, match="'Unknown' cannot be resolved"):

        @app.subscribe("t", "ch")
        async def handle(order: Unknown) -> None: ...


def test_a_type_without_a_json_form_is_an_error(app: Subscriptions) -> None:
    with pytest.raises(TypeError, match="complex"):

        @app.subscribe("t", "ch")
        async def handle(number: complex) -> None: ...


@pytest.mark.parametrize(
    "names", [("no blanks", "ch", "d"), ("t", "no blanks", "d"), ("t", "ch", "no blanks")]
)
def test_names_are_checked(app: Subscriptions, names: tuple[str, str, str]) -> None:
    topic, channel, dead_letter = names
    with pytest.raises(ValueError, match="invalid .* name 'no blanks'"):

        @app.subscribe(topic, channel, dead_letter=dead_letter)
        async def handle(order: Order) -> None: ...


def test_a_topic_cannot_take_its_own_dead_letters(app: Subscriptions) -> None:
    with pytest.raises(ValueError, match="its own dead letters"):
        app.subscribe("t", "ch", dead_letter="t")


def test_subscriptions_need_an_address() -> None:
    with pytest.raises(ValueError, match="address"):
        Subscriptions()


def test_subscriptions_are_declared_before_they_start(app: Subscriptions) -> None:
    async def main() -> None:
        async with app:
            with pytest.raises(RuntimeError, match="before"):
                app.subscribe("t", "ch")
            with pytest.raises(RuntimeError, match="already started"):
                await app.start()

    asyncio.run(main())


# undecodable payloads


def test_an_undecodable_payload_goes_to_the_dead_letter_topic_and_not_to_the_handler(
    app: Subscriptions, broker: Broker, topic: str
) -> None:
    seen = []

    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    async def handle(order: Order) -> None:
        seen.append(order.number)

    broker.publish(topic, BAD, GOOD, b"\xff")
    work(app, broker, topic)
    assert seen == [1]
    bad, binary = letters(broker, topic)
    assert (bad.topic, bad.channel, bad.attempts, bad.body) == (topic, "ch", 1, BAD)
    assert bad.error == 'DecodeFailed: number: expected an integer, got "one"'
    assert len(bad.id) == 16 and bad.timestamp_ns > 0
    assert (bad.text, bad.base64) == (BAD.decode(), None)
    assert (binary.body, binary.text) == (b"\xff", None)
    assert binary.error.startswith("DecodeFailed: not JSON: ")
    (subscription,) = app.subscriptions
    assert (subscription.undecodable_count, subscription.dead_letter_count) == (2, 2)
    assert subscription.consumer.messages_requeued == 0


@pytest.mark.parametrize("is_async", [True, False])
def test_a_dead_letter_function_gets_the_message_and_the_error(
    app: Subscriptions, broker: Broker, topic: str, is_async: bool
) -> None:
    seen = []

    def plain(message: Message, error: Exception) -> None:
        seen.append((message.body, error, threading.current_thread() is threading.main_thread()))

    async def hook(message: Message, error: Exception) -> None:
        plain(message, error)

    @app.subscribe(topic, "ch", dead_letter=hook if is_async else plain)
    async def handle(order: Order) -> None:
        raise AssertionError("never called")

    broker.publish(topic, BAD)
    work(app, broker, topic)
    ((body, error, in_main),) = seen
    assert body == BAD and in_main is is_async
    assert isinstance(error, DecodeFailed) and error.path == "number"


def test_without_a_dead_letter_topic_undecodable_payloads_are_logged(
    app: Subscriptions, broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    @app.subscribe(topic, "ch")
    async def handle(order: Order) -> None:
        raise AssertionError("never called")

    broker.publish(topic, BAD)
    work(app, broker, topic)
    (record,) = [r for r in caplog.records if r.name == "nsparq.client.subscription"]
    assert record.levelname == "ERROR"
    assert f"{topic}/ch: <Message" in record.getMessage()
    assert 'number: expected an integer, got "one"' in record.getMessage()
    assert app.subscriptions[0].undecodable_count == 1


def test_a_dead_letter_can_be_subscribed_to(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    async def handle(order: Order) -> None: ...

    @app.subscribe(f"{topic}.dead", "ch")
    async def inspect(letter: DeadLetter) -> None:
        seen.append(letter.body)

    broker.publish(topic, BAD, b"\xff\x00", "Grüße".encode())

    async def all_seen() -> None:
        await broker.wait_empty_async(f"{topic}.dead", "ch")

    work(app, broker, topic, all_seen)
    assert seen == [BAD, b"\xff\x00", "Grüße".encode()]


def test_dead_letters_of_nsqd_have_their_origin_in_headers(
    app: Subscriptions, broker: Broker, topic: str
) -> None:
    """A handler gets them as it gets those of a subscription, which are JSON."""
    seen: list[DeadLetter] = []

    @app.subscribe(topic, "ch", retries=9)
    async def fail(order: Order) -> None:
        raise ValueError

    @app.subscribe(f"{topic}.again", "ch", dead_letter=f"{topic}.dead")
    async def reject(order: Order) -> None:
        raise Reject("never")

    @app.subscribe(f"{topic}.dead", "ch")
    async def inspect(letter: DeadLetter) -> None:
        seen.append(letter)

    policy = {"policy": {"max_attempts": 2, "dead_letters": f"{topic}.dead"}}
    url = f"http://{broker.http_address}/topic/settings?topic={topic}"
    urlopen(Request(url, json.dumps(policy).encode(), method="PUT")).close()
    broker.create(f"{topic}.again", "ch")
    broker.create(f"{topic}.dead", "ch")
    broker.publish(topic, b'{"number": 1}', headers={"tenant": "acme"})
    broker.publish(f"{topic}.again", b'{"number": 2}', headers={"tenant": "apex"})

    async def both_seen() -> None:
        await until(lambda: len(seen) == 2)

    work(app, broker, topic, both_seen)
    seen.sort(key=lambda letter: letter.topic)
    assert [(one.topic, one.channel, one.attempts, one.body, one.headers) for one in seen] == [
        (topic, "ch", 2, b'{"number": 1}', {"tenant": "acme"}),
        (f"{topic}.again", "ch", 1, b'{"number": 2}', {"tenant": "apex"}),
    ]
    assert seen[0].client and seen[1].error == "Reject: never"


def test_a_lone_surrogate_does_not_break_a_dead_letter(
    app: Subscriptions, broker: Broker, topic: str
) -> None:
    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    async def handle(order: Order) -> None: ...

    broker.publish(topic, rb'{"number": "\ud800"}')
    work(app, broker, topic)
    (letter,) = letters(broker, topic)
    assert "\ud800" in letter.error and letter.body == rb'{"number": "\ud800"}'


def test_a_message_too_large_for_a_dead_letter_is_published_unchanged(topic: str) -> None:
    body = b"x" * 200
    with run_broker(max_msg_size=200) as broker:
        broker.create(topic, "ch")
        app = Subscriptions(nsqd=[broker.tcp_address], config=QUICK)

        @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
        async def handle(order: Order) -> None: ...

        broker.publish(topic, body)
        work(app, broker, topic)
        assert [message.body for message in broker.peek(f"{topic}.dead")] == [body]


def test_a_message_is_kept_until_its_dead_letter_is_published(broker: Broker, topic: str) -> None:
    async def main(proxy: FaultProxy) -> None:
        config = Config(
            publish_timeout=0.5, default_requeue_delay=0.02, max_backoff_duration=0, reconnect_delay=0
        )
        app = Subscriptions(nsqd=[proxy.address], config=config)

        @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
        async def handle(order: Order) -> None: ...

        async with app:
            await asyncio.to_thread(proxy.wait_connections, 1)
            proxy.refuse()  # the consumer has its connection, the producer gets none
            broker.publish(topic, BAD)
            consumer = app.subscriptions[0].consumer
            await asyncio.to_thread(wait_until, lambda: consumer.messages_requeued)
            assert app.subscriptions[0].dead_letter_count == 0
            proxy.heal()
            await broker.wait_empty_async(topic, "ch")

    with FaultProxy(broker.tcp_address) as proxy:
        asyncio.run(main(proxy))
    # A letter whose answer comes too late is published again.
    assert {letter.body for letter in letters(broker, topic)} == {BAD}


# handlers that fail


def test_a_message_is_a_dead_letter_after_its_last_attempt(
    app: Subscriptions, broker: Broker, topic: str
) -> None:
    attempts = []

    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    async def handle(order: Order, message: Message) -> None:
        attempts.append(message.attempts)
        raise RuntimeError("no paper")

    broker.publish(topic, GOOD)
    work(app, broker, topic)
    assert attempts == [1, 2, 3]
    (letter,) = letters(broker, topic)
    assert (letter.attempts, letter.error, letter.body) == (3, "RuntimeError: no paper", GOOD)
    assert app.subscriptions[0].undecodable_count == 0


def test_a_message_that_was_never_answered_is_a_dead_letter_too(broker: Broker, topic: str) -> None:
    config = Config(max_attempts=1, default_requeue_delay=0, max_backoff_duration=0)
    app = Subscriptions(nsqd=[broker.tcp_address], config=config)

    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    async def handle(order: Order) -> None:
        raise Requeue(0)

    broker.publish(topic, GOOD)
    work(app, broker, topic)
    assert [letter.error for letter in letters(broker, topic)] == ["GivenUp: tried 1 times"]


def test_a_rejected_message_is_a_dead_letter_at_once(app: Subscriptions, broker: Broker, topic: str) -> None:
    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    async def handle(order: Order) -> None:
        raise Reject("unknown item")

    broker.publish(topic, GOOD)
    work(app, broker, topic)
    assert [(one.attempts, one.error) for one in letters(broker, topic)] == [(1, "Reject: unknown item")]


def test_a_failed_last_attempt_counts_for_the_back_off(broker: Broker, topic: str) -> None:
    config = Config(max_attempts=1, backoff_multiplier=0.05)
    app = Subscriptions(nsqd=[broker.tcp_address], config=config)

    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    async def handle(order: Order) -> None:
        raise RuntimeError

    backoffs = []

    async def look() -> None:
        backoffs.append(app.subscriptions[0].consumer.is_in_backoff)

    broker.publish(topic, GOOD)
    work(app, broker, topic, look)
    assert backoffs == [True]


def test_without_a_dead_letter_topic_the_last_failure_ends_the_message(
    app: Subscriptions, broker: Broker, topic: str
) -> None:
    attempts = []

    @app.subscribe(topic, "ch")
    async def handle(order: Order, message: Message) -> None:
        attempts.append(message.attempts)
        raise RuntimeError

    broker.publish(topic, GOOD)
    work(app, broker, topic)
    assert attempts == [1, 2, 3]
    assert app.subscriptions[0].dead_letter_count == 1


# batches


def test_a_batch_handler_gets_lists(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch", batch_size=3, batch_timeout=0.1)
    async def handle(orders: list[Order], messages: list[Message]) -> None:
        seen.append(([order.number for order in orders], len(messages)))

    broker.publish(topic, *(b'{"number": %d}' % number for number in range(5)))
    work(app, broker, topic)
    assert [number for numbers, _ in seen for number in numbers] == [0, 1, 2, 3, 4]
    assert all(len(numbers) == count <= 3 for numbers, count in seen)


def test_a_plain_batch_handler_runs_in_a_thread(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch", batch_size=10, batch_timeout=0.01)
    def handle(bodies: Sequence[bytes]) -> None:
        seen.extend(bodies)
        assert threading.current_thread() is not threading.main_thread()

    broker.publish(topic, b"a", b"b")
    work(app, broker, topic)
    assert seen == [b"a", b"b"]


def test_undecodable_payloads_are_taken_out_of_a_batch(
    app: Subscriptions, broker: Broker, topic: str
) -> None:
    seen = []

    @app.subscribe(topic, "ch", batch_size=4, batch_timeout=0.05, dead_letter=f"{topic}.dead")
    async def handle(orders: list[Order]) -> None:
        seen.extend(orders)

    broker.publish(topic, BAD, GOOD, BAD, GOOD, BAD)
    work(app, broker, topic)
    assert len(seen) == 2
    assert [letter.body for letter in letters(broker, topic)] == [BAD] * 3


def test_a_failed_batch_is_tried_again_until_the_last_attempt_of_each(
    app: Subscriptions, broker: Broker, topic: str
) -> None:
    @app.subscribe(topic, "ch", batch_size=2, batch_timeout=0.01, dead_letter=f"{topic}.dead")
    async def handle(orders: list[Order]) -> None:
        raise RuntimeError("disk full")

    broker.publish(topic, GOOD, GOOD)
    work(app, broker, topic)
    found = letters(broker, topic)
    assert [(letter.attempts, letter.error) for letter in found] == [(3, "RuntimeError: disk full")] * 2


def test_a_batch_handler_takes_a_list(app: Subscriptions) -> None:
    with pytest.raises(TypeError, match="annotate 'order' as a list of something"):

        @app.subscribe("t", "ch", batch_size=10)
        async def handle(order: Order) -> None: ...


# start and stop


def test_several_subscriptions_run_side_by_side(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch")
    async def first(order: Order) -> None:
        seen.append("first")

    @app.subscribe(topic, "other")
    async def second(order: Order) -> None:
        seen.append("second")

    broker.create(topic, "other")
    broker.publish(topic, GOOD)

    async def both() -> None:
        await broker.wait_empty_async(topic, "other")

    work(app, broker, topic, both)
    assert sorted(seen) == ["first", "second"]


def test_they_can_be_started_again(app: Subscriptions, broker: Broker, topic: str) -> None:
    seen = []

    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    async def handle(order: Order) -> None:
        seen.append(order.number)

    for _ in range(2):
        broker.publish(topic, GOOD, BAD)
        work(app, broker, topic)
    assert seen == [1, 1]
    assert len(letters(broker, topic)) == 2


def test_stopping_lets_handlers_finish(app: Subscriptions, broker: Broker, topic: str) -> None:
    ended = []

    async def main() -> None:
        begun = asyncio.Event()

        @app.subscribe(topic, "ch")
        async def handle(order: Order) -> None:
            begun.set()
            await asyncio.sleep(0.1)
            ended.append(order.number)

        async with app:
            broker.publish(topic, GOOD)
            await begun.wait()

    asyncio.run(main())
    assert ended == [1]
    broker.wait_empty(topic, "ch")


class Lifespan:
    """Records how often it was entered and left."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def __aenter__(self) -> None:
        self.events.append("entered")

    async def __aexit__(self, *_: object) -> None:
        self.events.append("left")


@pytest.mark.parametrize("turns", range(1, 5))
def test_a_stop_that_is_cancelled_leaves_nothing_open(broker: Broker, topic: str, turns: int) -> None:
    lifespan = Lifespan()
    app = Subscriptions(nsqd=[broker.tcp_address], lifespan=lambda: lifespan, config=QUICK)

    async def main() -> None:
        begun, threads = asyncio.Event(), []

        @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
        async def stay(order: Order) -> None:
            begun.set()
            await asyncio.Event().wait()

        @app.subscribe(topic, "other")
        def in_thread(body: bytes) -> None:
            threads.append(threading.current_thread())

        broker.create(topic, "other")
        broker.publish(topic, BAD)
        await app.start()
        await until(lambda: threads and letters(broker, topic))
        broker.publish(topic, GOOD)
        await asyncio.wait_for(begun.wait(), DEADLINE)
        stopping = asyncio.create_task(app.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert (lifespan.events, app.is_running) == (["entered", "left"], False)
        await until(lambda: not threads[0].is_alive())
        # The connection for dead letters.
        await until(lambda: not broker.stats()["producers"])
        async with app:
            pass
        assert lifespan.events == ["entered", "left"] * 2

    aio.run(main())


def test_a_stop_that_is_cancelled_at_the_dead_letters_leaves_the_lifespan(broker: Broker, topic: str) -> None:
    lifespan = Lifespan()
    app = Subscriptions(nsqd=[broker.tcp_address], lifespan=lambda: lifespan, config=QUICK)

    async def main() -> None:
        waiting = asyncio.Event()

        async def wait() -> None:
            waiting.set()
            await asyncio.Event().wait()

        app._dead_letters.stop = wait  # type: ignore[method-assign]
        await app.start()
        stopping = asyncio.create_task(app.stop())
        await waiting.wait()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert (lifespan.events, app.is_running) == (["entered", "left"], False)

    aio.run(main())


def test_topics_are_found_by_nsqlookupd() -> None:
    async def main() -> None:
        async with app:
            await broker.wait_empty_async("orders", "ch")
            await broker.wait_empty_async("orders.dead", "look")

    with run_lookupd() as lookupd, run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as broker:
        broker.create("orders", "ch")
        broker.create("orders.dead", "look")
        broker.publish("orders", BAD)
        wait_until(lambda: lookupd.producers("orders") and lookupd.producers("orders.dead"))
        app = Subscriptions(nsqlookupd=[lookupd.http_address])

        @app.subscribe("orders", "ch", dead_letter="orders.dead")
        async def handle(order: Order) -> None: ...

        @app.subscribe("orders.dead", "look")
        async def look(letter: DeadLetter) -> None:
            seen.append(letter.body)

        seen: list[bytes] = []
        asyncio.run(main())
        assert seen == [BAD]


PROGRAM = """
import sys, time
from dataclasses import dataclass
from nsparq.client.subscription import Subscriptions

app = Subscriptions(nsqd=[sys.argv[1]])

@dataclass
class Order:
    number: int

@app.subscribe(sys.argv[2], "ch")
def handle(order: Order) -> None:
    print("begun", flush=True)
    time.sleep(0.2)
    print("billed", order.number, flush=True)

app.run()
print("over")
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_run_ends_cleanly_after_a_signal(broker: Broker, topic: str, signum: int) -> None:
    broker.publish(topic, b'{"number": 5}')
    command = [sys.executable, "-W", "error", "-c", PROGRAM, broker.tcp_address, topic]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signum)
        output, errors = process.communicate(timeout=DEADLINE)
    assert (output, errors, process.returncode) == ("billed 5\nover\n", "", 0)
    broker.wait_empty(topic, "ch")


def test_a_second_signal_ends_run_at_once(broker: Broker, topic: str) -> None:
    broker.publish(topic, GOOD)
    code = PROGRAM.replace("time.sleep(0.2)", "time.sleep(2)")
    command = [sys.executable, "-c", code, broker.tcp_address, topic]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.send_signal(signal.SIGTERM) or process.poll() is not None)
        output, _ = process.communicate(timeout=DEADLINE)
    assert (output, process.returncode) == ("", -signal.SIGTERM)


def test_run_needs_the_main_thread(app: Subscriptions) -> None:
    errors = []

    def run() -> None:
        try:
            app.run()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == ["run() needs the main thread, for signals: use `async with` here"]
