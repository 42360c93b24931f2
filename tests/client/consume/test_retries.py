from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nsparq.client import Config, Message, Requeue, Subscriptions
from nsparq.client.consume.retries import REPEAT_S, FailureLog, RetryRules
from nsparq.testing import Broker, run_broker
from tests.support import unique_name

NO_PAUSES = Config(max_backoff_duration=0)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


def consume(
    broker: Broker, handle: Callable[[Message], Any], config: Config = NO_PAUSES, **options: Any
) -> Any:
    """Publish one message and run its subscription until it is finished. Returns the dead letters
    and what the consumer said about back-off at the end."""
    topic, dead = unique_name("retries"), []
    broker.create(topic, "ch")
    broker.publish(topic, "hello")
    app = Subscriptions(nsqd=[broker.tcp_address], config=config)
    app.subscribe(
        topic,
        "ch",
        payload=Message,
        dead_letter=lambda message, error: dead.append((message.attempts, repr(error))),
        **options,
    )(handle)

    async def main() -> bool:
        async with app:
            await broker.wait_empty_async(topic, "ch")
            return app.subscriptions[0].consumer.is_in_backoff

    is_in_backoff = asyncio.run(main())
    broker.delete(topic)
    return dead, is_in_backoff


def test_a_message_is_tried_again_as_often_and_as_late_as_the_subscription_says(broker: Broker) -> None:
    attempts, retries = [], []

    def delay(retry: int) -> float:
        retries.append(retry)
        return 0.01

    async def handle(message: Message) -> None:
        attempts.append(message.attempts)
        raise ConnectionError("down")

    # The configuration would wait for 90 seconds, and try five times.
    dead, _ = consume(broker, handle, retries=2, retry_delay=delay)
    assert (attempts, retries) == ([1, 2, 3], [1, 2])
    assert dead == [(3, "ConnectionError('down')")]


def test_other_exceptions_than_those_of_retry_on_are_not_retried_and_cause_no_back_off(
    broker: Broker,
) -> None:
    async def handle(message: Message) -> None:
        if message.attempts == 1:
            raise TimeoutError
        raise KeyError("wrong")

    dead, is_in_backoff = consume(
        broker,
        handle,
        Config(backoff_multiplier=0.001),
        retry_on=(TimeoutError, ConnectionError),
        retry_delay=0,
    )
    assert dead == [(2, "KeyError('wrong')")]
    assert not is_in_backoff


def test_without_retries_the_first_failure_is_the_last(broker: Broker) -> None:
    async def handle(message: Message) -> None:
        raise RuntimeError

    assert consume(broker, handle, retries=0)[0] == [(1, "RuntimeError()")]


def test_nsqd_counts_every_delivery_also_those_that_were_requeued_by_hand(broker: Broker) -> None:
    async def handle(message: Message) -> None:
        if message.attempts == 1:
            raise Requeue(0)
        raise RuntimeError

    assert consume(broker, handle, retries=1)[0] == [(2, "RuntimeError()")]


def rules(config: Config | None = None, **options: Any) -> RetryRules:
    given = {"retries": None, "delay": None, "on": None} | options
    return RetryRules.of(config or Config(), **given)


def test_a_number_as_delay_doubles_up_to_the_longest_requeue_delay() -> None:
    config = Config(max_requeue_delay=30)
    assert [*map(rules(config, delay=5).delay, (1, 2, 3, 4, 1000))] == [5, 10, 20, 30, 30]
    assert rules(config, delay=60).delay(1) == 60
    assert [*map(rules().delay, (1, 2, 100))] == [90, 180, 900]


def test_a_delay_function_that_fails_does_not_lose_the_message(caplog: pytest.LogCaptureFixture) -> None:
    for wrong in (lambda retry: -1, lambda retry: 1 / 0, lambda retry: "soon"):
        assert rules(delay=wrong).delay(2) == 180
    assert "retry_delay failed for retry 2; the delay is 180 s" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"retries": -1},
        {"retries": 65535},
        {"retries": True},
        {"retries": 1.5},
        {"delay": -1},
        {"delay": float("nan")},
        {"on": ()},
        {"on": KeyboardInterrupt},
        {"on": "KeyError"},
    ],
)
def test_wrong_values_are_refused_when_the_function_is_declared(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="retries|retry_on|delayed"):
        rules(**wrong)


def test_the_log_has_the_first_failure_of_a_kind_and_counts_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = FailureLog(lambda: now[0])

    def fail(text: str, attempts: int, kind: type[Exception] = ValueError) -> None:
        try:
            raise kind(text)
        except Exception as error:
            log.add("orders/billing: the handler failed on it", error, delay=1.5, attempts=attempts, limit=4)

    with caplog.at_level(logging.INFO):
        fail("no stock", 1)
        for attempt in (2, 3):
            fail("no stock", attempt)
        fail("other", 1, KeyError)
        now[0] += REPEAT_S
        fail("no stock", 1)
    line = "orders/billing: the handler failed on it: ValueError: no stock; attempt 1 of 4, retry in 1.5 s"
    assert [record.getMessage() for record in caplog.records] == [
        line,
        "orders/billing: the handler failed on it: KeyError: 'other'; attempt 1 of 4, retry in 1.5 s",
        f"{line}; 2 more failures like this since the last line",
    ]
    assert all(record.exc_info for record in caplog.records)
