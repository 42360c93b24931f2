"""Producer(idempotent=True): what is sent again, where to, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nsparq.client import (
    Config,
    HeadersNotSupported,
    NotConnected,
    Producer,
    PublishFailed,
    PublishTimeout,
    sync,
)
from nsparq.client.payloads.numbers import Numbers
from nsparq.testing import Broker, FaultProxy, run_broker
from tests.support.aio import run, until
from tests.support.scripted_nsqd import ScriptedNsqd

QUICK: dict[str, Any] = {"reconnect_delay": 0.01, "max_reconnect_delay": 0.05, "publish_timeout": 30}


@asynccontextmanager
async def pair(publish: Any = b"OK", **options: Any) -> AsyncIterator[tuple[Producer, ScriptedNsqd]]:
    async with ScriptedNsqd({"headers": True}, publish=publish) as nsqd:
        config = Config(**QUICK | options)
        async with Producer(nsqd.address, idempotent=True, config=config) as producer:
            yield producer, nsqd


def count(broker: Broker, topic: str = "t") -> tuple[int, int]:
    """Messages stored, and repeats."""
    (found,) = broker.stats(topic)["topics"]
    return found["message_count"], found["repeated_count"]


def test_what_was_not_answered_is_sent_again_as_it_was() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            task = asyncio.create_task(producer.publish("t", b"x", headers={"k": "v"}))
            await until(lambda: "PUB t headers" in nsqd.commands)
            nsqd.publish = b"OK"
            nsqd.peers[0].abort()
            await task
            assert nsqd.peers[0].bodies[1] == nsqd.peers[1].bodies[1]

    run(main())


def test_a_publish_that_nsqd_could_not_store_is_sent_again() -> None:
    async def main() -> None:
        answers = [b"OK", "E_MPUB_FAILED MPUB failed no space left on device", "E_PUB_FAILED exiting"]
        async with pair(lambda _: answers.pop()) as (producer, nsqd):
            await producer.publish_many("t", [b"x"])
            assert len({peer.bodies[1] for peer in nsqd.peers}) == 1 < len(nsqd.peers)

    run(main())


def test_a_publish_that_nsqd_refuses_raises() -> None:
    async def main() -> None:
        async with pair("E_FENCED PUB epoch 1 of producer p is over") as (producer, nsqd):
            with pytest.raises(PublishFailed) as refused:
                await producer.publish("t", b"x")
            assert refused.value.code == "E_FENCED"
            assert len(nsqd.peers) == 1

    run(main())


def test_an_nsqd_without_headers_gets_nothing() -> None:
    async def main() -> None:
        async with (
            ScriptedNsqd(publish=b"OK") as nsqd,
            Producer(nsqd.address, idempotent=True) as producer,
        ):
            with pytest.raises(HeadersNotSupported):
                await producer.publish("t", b"x")

    run(main())


def test_only_idempotent_producers_have_names() -> None:
    with pytest.raises(ValueError, match="only an idempotent producer has a name"):
        Producer("127.0.0.1:1", name="p")


def test_the_child_of_a_fork_has_its_own_name() -> None:
    producer = Producer("127.0.0.1:1", idempotent=True, name="p")
    assert isinstance(producer._numbers, Numbers) and producer._numbers.name == "p"
    producer._begin_in_child()
    assert producer._numbers.name.startswith("p-")


def test_an_answer_that_was_lost_makes_no_duplicate() -> None:
    async def main() -> None:
        with run_broker() as broker, FaultProxy(broker.tcp_address) as proxy:
            config = Config(**QUICK)
            async with Producer(proxy.address, idempotent=True, config=config) as producer:
                await producer.publish("t", b"0")
                proxy.drop("to_client")
                tasks = [asyncio.create_task(producer.publish("t", b"%d" % n)) for n in range(1, 10)]
                await until(lambda: count(broker)[0] == 10)
                # In this order no answer gets through: nsqd may send some only now.
                for step in (proxy.refuse, proxy.reset, proxy.heal):
                    await asyncio.to_thread(step)
                await asyncio.gather(*tasks)
                assert count(broker) == (10, 9)

    run(main())


def test_a_publish_that_an_nsqd_may_have_goes_back_to_it() -> None:
    """New publishes use another nsqd meanwhile."""

    async def main() -> None:
        with run_broker() as first, run_broker() as second, FaultProxy(first.tcp_address) as proxy:
            config = Config(**QUICK)
            addresses = proxy.address, second.tcp_address
            async with Producer(*addresses, idempotent=True, config=config) as producer:
                await producer.publish("t", b"0")
                proxy.drop("to_client")
                in_doubt = [asyncio.create_task(producer.publish("t", b"%d" % n)) for n in range(3)]
                await until(lambda: count(first)[0] == 4)
                await asyncio.to_thread(proxy.refuse)
                await asyncio.to_thread(proxy.reset)
                # Before it has noticed, it would send the next message on the same connection.
                await until(lambda: producer._returns)
                await producer.publish("t", b"new")
                assert producer.address == second.tcp_address
                assert not any(task.done() for task in in_doubt)
                await asyncio.to_thread(proxy.heal)
                await asyncio.gather(*in_doubt)
                assert (count(first), count(second)) == ((4, 3), (1, 0))
                # What is left of it has been closed.
                await until(lambda: not producer._returns)
                await until(lambda: proxy.connection_count == 0)

    run(main())


def test_it_gives_up_after_the_publish_timeout() -> None:
    async def main() -> None:
        with run_broker() as second:
            async with ScriptedNsqd({"headers": True}, publish=None) as nsqd:
                config = Config(**QUICK | {"publish_timeout": 0.5})
                addresses = nsqd.address, second.tcp_address
                async with Producer(*addresses, idempotent=True, config=config) as producer:
                    task = asyncio.create_task(producer.publish("t", b"x"))
                    await until(lambda: "PUB t headers" in nsqd.commands)
                    nsqd.refuse()
                    nsqd.peers[0].abort()
                    with pytest.raises(PublishTimeout):
                        await task
                    await producer.publish("t", b"y")
                    assert count(second) == (1, 0)
                    assert not producer._returns

    run(main())


def test_stop_does_not_wait_for_a_broker_that_is_gone() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            task = asyncio.create_task(producer.publish("t", b"x"))
            await until(lambda: "PUB t headers" in nsqd.commands)
            nsqd.refuse()
            nsqd.peers[0].abort()
            await until(lambda: not producer.address)
            await producer.stop()
            with pytest.raises(NotConnected):
                await task

    run(main())


def test_after_stop_a_failure_of_the_broker_is_known() -> None:
    async def main() -> None:
        async with pair("E_PUB_FAILED PUB failed disk full", reconnect_delay=0.1) as (producer, nsqd):
            task = asyncio.create_task(producer.publish("t", b"x"))
            await until(lambda: "PUB t headers" in nsqd.commands)
            await producer.stop()
            with pytest.raises(PublishFailed, match="disk full"):
                await task

    run(main())


@pytest.mark.parametrize("answer", ["E_PUB_FAILED PUB failed disk full", None])
def test_a_failure_of_the_broker_does_not_hide_an_earlier_doubt(answer: str | None) -> None:
    """An nsqd that got the publish is gone, or full when it is back. Another one is in use."""

    async def main() -> None:
        async with ScriptedNsqd({"headers": True}) as other, ScriptedNsqd({"headers": True}) as nsqd:
            nsqd.publish = None
            config = Config(**QUICK)
            async with Producer(nsqd.address, other.address, idempotent=True, config=config) as producer:
                task = asyncio.create_task(producer.publish("t", b"x"))
                await until(lambda: "PUB t headers" in nsqd.commands)
                nsqd.refuse()
                nsqd.peers[0].abort()
                await until(lambda: producer._returns)
                if answer is not None:
                    nsqd.publish = answer
                    await nsqd.listen()
                    await until(lambda: len(nsqd.peers) >= 3)
                await producer.stop()
                with pytest.raises(NotConnected):
                    await task

    run(main())


def test_without_asyncio() -> None:
    with run_broker() as broker:
        broker.create("t", "c")
        with sync.Producer(broker.tcp_address, idempotent=True, name="shop") as producer:
            producer.publish("t", b"0")
            producer.publish_many("t", [b"1", b"2"], headers={"k": "v"})
        found = broker.peek("t", "c")
        assert [one.headers["nsq-number"] for one in found] == ["0", "1", "2"]
        assert {one.headers["nsq-producer"] for one in found} == {"shop"}
        with pytest.raises(ValueError, match="at most 200"):
            sync.Producer(broker.tcp_address, idempotent=True, name="p" * 300)
