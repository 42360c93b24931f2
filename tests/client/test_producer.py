"""A producer against a scripted nsqd: commands, answers, and all ways to fail."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

import nsparq.client.producer as producer_module
from nsparq.client import (
    Config,
    ConnectFailed,
    HeadersNotSupported,
    NotConnected,
    Producer,
    PublishFailed,
    PublishTimeout,
    Stopped,
)
from nsparq.client.connect import producer_connection
from tests.support.aio import run, until
from tests.support.auth_server import AuthServer, unused_port
from tests.support.connection import multi, with_headers
from tests.support.polling import DEADLINE
from tests.support.scripted_nsqd import RESPONSE, ScriptedNsqd, frame, message_frame

Reply = bytes | str | None
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def timeless_run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a test whose clock jumps instead of waiting; see tests.support.aio."""
    for module in (producer_module, producer_connection):
        monkeypatch.setattr(module, "monotonic", lambda: asyncio.get_running_loop().time())
    return partial(run, timeless=True)


@asynccontextmanager
async def pair(
    publish: Reply | Callable[[str], Reply] = b"OK",
    *,
    retry: bool = False,
    max_pending: int = 1000,
    identify: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Producer, ScriptedNsqd]]:
    async with ScriptedNsqd(identify, publish=publish) as nsqd:
        config = Config(**{"publish_timeout": 5, **options})
        async with Producer(nsqd.address, retry=retry, max_pending=max_pending, config=config) as producer:
            yield producer, nsqd


def begin(work: Awaitable[None]) -> asyncio.Task[None]:
    return asyncio.ensure_future(work)  # type: ignore[arg-type]


async def sent(nsqd: ScriptedNsqd, count: int) -> None:
    """Wait until this many publishes have arrived."""
    await until(lambda: sum("PUB" in command for command in nsqd.commands) >= count)


async def outcomes(tasks: list[asyncio.Task[None]]) -> list[str]:
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return ["" if result is None else type(result).__name__ for result in results]


# Publishing


def test_it_connects_at_the_first_publish() -> None:
    async def main() -> None:
        async with pair() as (producer, nsqd):
            assert (producer.address, nsqd.peers) == ("", [])
            await producer.publish("t", b"body")
            assert producer.address == nsqd.address
            assert nsqd.commands == ["IDENTIFY", "PUB t"]
            assert nsqd.peers[0].bodies[1] == b"body"

    run(main())


def test_connect_and_ping_connect_before_the_first_publish() -> None:
    async def main() -> None:
        async with pair() as (producer, nsqd):
            await producer.connect()
            await producer.ping()
            peer = await nsqd.peer()
            await until(lambda: peer.nop_count == 1)
            assert nsqd.commands == ["IDENTIFY"]

    run(main())


def test_deferred_and_several_messages() -> None:
    async def main() -> None:
        async with pair() as (producer, nsqd):
            await producer.publish("t", b"later", defer=0.57)
            await producer.publish_many("t", [b"a", b"bc"])
            assert nsqd.commands[1:] == ["DPUB t 570", "MPUB t"]
            expected = struct.pack(">i", 2) + struct.pack(">i", 1) + b"a" + struct.pack(">i", 2) + b"bc"
            assert nsqd.peers[0].bodies[1:] == [b"later", expected]

    run(main())


@pytest.mark.parametrize(
    "work",
    [
        lambda p: p.publish("no good", b"x"),
        lambda p: p.publish("t", b""),
        lambda p: p.publish("t", b"x", defer=-1),
        lambda p: p.publish("t", b"x", defer=float("nan")),
        lambda p: p.publish("t", b"x", defer=float("inf")),
        lambda p: p.publish_many("t", []),
        lambda p: p.publish_many("t", [b"a", b""]),
        lambda p: p.publish_many("t", [b"a", None]),
        lambda p: p.publish_many("t", "ab"),
        lambda p: p.publish_many("t", {"a": b"b"}),
        lambda p: p.publish("t", object()),
        lambda p: p.publish("t", b"", headers={"k": "v"}),
        lambda p: p.publish("t", b"x", headers={"no good": "v"}),
        lambda p: p.publish("t", b"x", headers={"k": 1}),
        lambda p: p.publish("t", b"x", headers={"k": "v" * 65536}),
        lambda p: p.publish("t", b"x", headers={"K": "1", "k": "2"}),
        lambda p: p.publish_many("t", [b"a", b""], headers={"k": "v"}),
        lambda p: p.publish_many("t", [b"a", b"b"], headers=[{"k": "v"}]),
        lambda p: p.publish_many("t\n", [b"a"]),
    ],
)
def test_invalid_publishes_are_refused_before_they_are_sent(work: Callable[[Producer], Any]) -> None:
    async def main() -> None:
        async with pair() as (producer, nsqd):
            with pytest.raises((ValueError, TypeError)):
                await work(producer)
            await producer.publish("t", b"x")
            assert nsqd.commands == ["IDENTIFY", "PUB t"]

    run(main())


def test_headers_stand_before_the_body() -> None:
    async def main() -> None:
        async with pair(identify={"headers": True}) as (producer, nsqd):
            assert await sent_as(producer.publish("t", b"x", headers={"Tenant": "acme"}), nsqd) == (
                "PUB t headers",
                with_headers(b"x", {"tenant": "acme"}),
            )
            assert await sent_as(producer.publish("t", {"a": 1}, defer=1, headers={"k": "v"}), nsqd) == (
                "DPUB t 1000 headers",
                with_headers(b'{"a":1}', {"k": "v"}),
            )
            assert await sent_as(producer.publish_many("t", [b"x", "y"], headers={"k": "v"}), nsqd) == (
                "MPUB t headers",
                multi([with_headers(b"x", {"k": "v"}), with_headers(b"y", {"k": "v"})]),
            )
            each = producer.publish_many("t", iter([b"x", b"y", b"z"]), headers=[{"k": "1"}, None, {}])
            assert await sent_as(each, nsqd) == (
                "MPUB t headers",
                multi([with_headers(b"x", {"k": "1"}), with_headers(b"y", {}), with_headers(b"z", {})]),
            )

    run(main())


async def sent_as(work: Awaitable[None], nsqd: ScriptedNsqd) -> tuple[str, bytes]:
    """The command line of a publish, and what follows it."""
    await work
    return nsqd.peers[0].commands[-1], nsqd.peers[0].bodies[-1]


def test_without_headers_the_commands_are_those_of_nsq() -> None:
    """Also at a broker that knows headers."""

    async def main() -> None:
        async with pair(identify={"headers": True}) as (producer, nsqd):
            await producer.publish("t", b"a", headers={})
            await producer.publish("t", b"b", defer=1, headers=None)
            for nothing in ({}, None, [None, {}]):
                await producer.publish_many("t", iter([b"c", b"d"]), headers=nothing)
            assert nsqd.commands[1:] == ["PUB t", "DPUB t 1000", *["MPUB t"] * 3]
            assert nsqd.peers[0].bodies[-1] == multi([b"c", b"d"])

    run(main())


@pytest.mark.parametrize("retry", [False, True])
def test_a_broker_without_headers_gets_no_message_that_has_some(retry: bool) -> None:
    """NSQ's own nsqd would drop them."""

    async def main() -> None:
        async with pair(retry=retry) as (producer, nsqd):
            # The first publish has to connect, the second one finds a connection.
            for _ in range(2):
                with pytest.raises(HeadersNotSupported, match=f"{nsqd.address}: this nsqd does not support"):
                    await producer.publish("t", b"x", headers={"k": "v"})
            with pytest.raises(HeadersNotSupported):
                await producer.publish_many("t", [b"x"], headers=[{"k": "v"}])
            await producer.publish("t", b"plain")
            assert nsqd.commands == ["IDENTIFY", "PUB t"]

    run(main())


@pytest.mark.parametrize("body", [bytearray(b"abcd"), memoryview(b"abcd"), memoryview(b"abcd").cast("i")])
def test_any_buffer_can_be_published(body: Any) -> None:
    async def main() -> None:
        async with pair() as (producer, nsqd):
            await producer.publish("t", body)
            await producer.publish("t", body, defer=1)
            assert nsqd.peers[0].bodies[1:] == [b"abcd", b"abcd"]

    run(main())


def test_many_tasks_share_one_connection() -> None:
    async def main() -> None:
        async with pair() as (producer, nsqd):
            await asyncio.gather(*(producer.publish("t", b"%d" % n) for n in range(500)))
            assert len(nsqd.peers) == 1
            assert sorted(map(int, nsqd.peers[0].bodies[1:])) == list(range(500))

    run(main())


def test_publishes_of_one_task_arrive_in_their_order() -> None:
    async def main() -> None:
        async with pair(max_pending=2) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"%d" % n)) for n in range(20)]
            await asyncio.gather(*tasks)
            assert [*map(int, nsqd.peers[0].bodies[1:])] == list(range(20))

    run(main())


def test_a_producer_needs_somewhere_to_publish_to() -> None:
    with pytest.raises(ValueError, match="needs the address"):
        Producer()
    with pytest.raises(ValueError, match="is not host:port"):
        Producer("localhost")
    with pytest.raises(ValueError, match="needs a port"):
        Producer(nsqlookupd=["localhost"])
    with pytest.raises(ValueError, match="max_pending"):
        Producer("127.0.0.1:4150", max_pending=0)


# Order of answers


def test_publishes_are_pipelined_and_answered_in_order() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(3)]
            await sent(nsqd, 3)
            assert not any(task.done() for task in tasks)
            for number in range(3):
                nsqd.peers[0].send_response(b"OK")
                await tasks[number]
                assert not any(task.done() for task in tasks[number + 1 :])

    run(main())


def test_a_cancelled_publish_keeps_its_place() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            first, second, third = (begin(producer.publish("t", b"x")) for _ in range(3))
            await sent(nsqd, 3)
            first.cancel()
            second.cancel()
            nsqd.peers[0].send_response(b"OK")
            nsqd.peers[0].send_response(b"OK")
            nsqd.peers[0].send_error("E_BAD_MESSAGE PUB no")
            assert await outcomes([first, second, third]) == [
                "CancelledError",
                "CancelledError",
                "PublishFailed",
            ]

    run(main())


def test_a_timed_out_publish_keeps_its_place(timeless_run: Run) -> None:
    async def main() -> None:
        async with pair(None, publish_timeout=1) as (producer, nsqd):
            early, late = (begin(producer.publish("t", b"x")) for _ in range(2))
            await sent(nsqd, 2)
            await asyncio.sleep(0.5)
            nsqd.peers[0].send_response(b"OK")
            await early
            behind = begin(producer.publish("t", b"x"))
            with pytest.raises(PublishTimeout):
                await late
            assert not behind.done()
            nsqd.peers[0].send_response(b"OK")
            nsqd.peers[0].send_error("E_BAD_MESSAGE PUB no")
            assert await outcomes([behind]) == ["PublishFailed"]
            assert len(nsqd.peers) == 1

    timeless_run(main())


def test_an_unexpected_answer_ends_the_connection() -> None:
    async def main() -> None:
        async with pair() as (producer, nsqd):
            await producer.connect()
            nsqd.peers[0].send_response(b"OK")
            await until(lambda: nsqd.peers[0].is_ended)
            await producer.publish("t", b"x")
            assert len(nsqd.peers) == 2

    run(main())


def test_answers_that_arrive_together_belong_to_one_publish_each() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(5)]
            await sent(nsqd, 5)
            tasks[1].cancel()
            nsqd.peers[0].send_bytes(frame(RESPONSE, b"OK") * 3)
            assert await outcomes(tasks[:3]) == ["", "CancelledError", ""]
            assert not any(task.done() for task in tasks[3:])
            # One answer too many, in the same piece.
            nsqd.peers[0].send_bytes(frame(RESPONSE, b"OK") * 3)
            assert await outcomes(tasks) == ["", "CancelledError", "", "", ""]
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_an_answer_other_than_ok_is_a_refusal() -> None:
    async def main() -> None:
        async with pair(b"PERHAPS") as (producer, _):
            with pytest.raises(PublishFailed, match="PERHAPS"):
                await producer.publish("t", b"x")

    run(main())


def test_a_message_ends_the_connection() -> None:
    async def main() -> None:
        async with pair() as (producer, nsqd):
            await producer.connect()
            nsqd.peers[0].send_bytes(message_frame("1"))
            await until(lambda: nsqd.peers[0].is_ended and not producer.address)

    run(main())


# Refused


def test_a_refusal_has_the_text_of_the_broker() -> None:
    async def main() -> None:
        async with pair("E_BAD_MESSAGE PUB message too big 2 > 1") as (producer, _):
            with pytest.raises(PublishFailed) as caught:
                await producer.publish("t", b"xx")
            assert caught.value.code == "E_BAD_MESSAGE"
            assert caught.value.description == "PUB message too big 2 > 1"
            assert str(caught.value) == "E_BAD_MESSAGE PUB message too big 2 > 1"

    run(main())


def test_publishes_after_a_refused_one_are_sent_again() -> None:
    """The broker closed the connection because of one publish; the others must not fail."""

    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"%d" % n)) for n in range(4)]
            await sent(nsqd, 4)
            nsqd.publish = b"OK"
            nsqd.peers[0].send_response(b"OK")
            nsqd.peers[0].send_error("E_BAD_MESSAGE PUB no")
            nsqd.peers[0].close()
            assert await outcomes(tasks) == ["", "PublishFailed", "", ""]
            assert nsqd.peers[1].bodies[1:] == [b"2", b"3"]

    run(main())


def test_publishes_after_a_broker_failure_may_have_been_stored() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(3)]
            await sent(nsqd, 3)
            nsqd.peers[0].send_error("E_PUB_FAILED PUB failed disk full")
            nsqd.peers[0].close()
            assert await outcomes(tasks) == ["PublishFailed", "NotConnected", "NotConnected"]
            assert len(nsqd.peers) == 1

    run(main())


# Lost connections


@pytest.mark.parametrize("with_reset", [False, True])
def test_unacknowledged_publishes_fail_with_the_connection(with_reset: bool) -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(3)]
            await sent(nsqd, 3)
            nsqd.publish = b"OK"
            nsqd.peers[0].abort() if with_reset else nsqd.peers[0].close()
            assert await outcomes(tasks) == ["NotConnected"] * 3
            await producer.publish("t", b"next")
            assert [len(peer.bodies) for peer in nsqd.peers] == [4, 2]

    run(main())


def test_with_retry_it_is_sent_again_in_order() -> None:
    async def main() -> None:
        async with pair(None, retry=True) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"%d" % n)) for n in range(3)]
            await sent(nsqd, 3)
            nsqd.publish = b"OK"
            nsqd.peers[0].abort()
            assert await outcomes(tasks) == ["", "", ""]
            assert nsqd.peers[1].bodies[1:] == [b"0", b"1", b"2"]

    run(main())


def test_with_retry_a_broker_that_comes_back_in_time_is_waited_for(timeless_run: Run) -> None:
    async def main() -> None:
        async with pair(retry=True, reconnect_delay=0.01) as (producer, nsqd):
            await producer.publish("t", b"x")
            nsqd.refuse()
            nsqd.peers[0].abort()
            await until(lambda: not producer.address)
            waiting = begin(producer.publish("t", b"y"))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await nsqd.listen()
            await waiting

    timeless_run(main())


def test_with_retry_it_still_ends_after_publish_timeout(timeless_run: Run) -> None:
    async def main() -> None:
        async with pair(retry=True, publish_timeout=0.3, reconnect_delay=0.01) as (producer, nsqd):
            await producer.connect()
            nsqd.refuse()
            nsqd.publish = lambda _: nsqd.peers[0].abort()
            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(PublishTimeout):
                await producer.publish("t", b"y")
            assert loop.time() - began == pytest.approx(0.3, abs=0.002)

    timeless_run(main())


# Several brokers


def test_the_first_reachable_broker_is_used() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as first, ScriptedNsqd() as second:
            async with Producer(f"127.0.0.1:{unused_port()}", first.address, second.address) as producer:
                await producer.publish("t", b"x")
                assert (producer.address, second.peers) == (first.address, [])

    run(main())


def test_the_next_broker_is_used_when_one_is_lost() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as first, ScriptedNsqd() as second:
            async with Producer(first.address, second.address) as producer:
                await producer.publish("t", b"x")
                first.peers[0].abort()
                await until(lambda: not producer.address)
                await producer.publish("t", b"y")
                assert producer.address == second.address
                assert len(first.peers) == 1, "it has just failed"
                second.peers[0].abort()
                await until(lambda: not producer.address)
                await producer.publish("t", b"z")
                assert producer.address == first.address, "that is longer ago"

    run(main())


def test_a_silent_broker_is_left_for_the_next() -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as silent, ScriptedNsqd() as good:
            config = Config(handshake_timeout=0.1)
            async with Producer(silent.address, good.address, config=config) as producer:
                await producer.publish("t", b"x")
                assert producer.address == good.address

    run(main())


def test_a_broker_that_acknowledges_nothing_is_left_for_the_next() -> None:
    async def main() -> None:
        async with ScriptedNsqd(publish=None) as silent, ScriptedNsqd() as good:
            config = Config(publish_timeout=0.2)
            async with Producer(silent.address, good.address, config=config) as producer:
                with pytest.raises(PublishTimeout, match="not acknowledged within 0.2 s"):
                    await producer.publish("t", b"x")
                await producer.publish("t", b"y")
                assert producer.address == good.address

    run(main())


def test_if_no_broker_can_be_reached_all_reasons_are_reported() -> None:
    async def main() -> None:
        ports = [unused_port(), unused_port()]
        async with ScriptedNsqd("E_INVALID no") as rude:
            addresses = [*(f"127.0.0.1:{port}" for port in ports), rude.address]
            async with Producer(*addresses) as producer:
                with pytest.raises(ConnectFailed) as caught:
                    await producer.publish("t", b"x")
                text = str(caught.value)
                assert all(address in text for address in addresses) and "E_INVALID no" in text

    run(main())


# nsqlookupd


def node(nsqd: ScriptedNsqd) -> dict[str, Any]:
    host, _, port = nsqd.address.partition(":")
    return {"broadcast_address": host, "tcp_port": int(port)}


def test_brokers_are_found_through_nsqlookupd() -> None:
    async def main() -> None:
        with AuthServer() as lookupd:
            async with ScriptedNsqd() as nsqd:
                lookupd.answer({"producers": [node(nsqd)]})
                async with Producer(nsqlookupd=[lookupd.address]) as producer:
                    await producer.publish("t", b"x")
                    assert lookupd.queries[0].path == "/nodes"
                    nsqd.peers[0].abort()
                    await until(lambda: not producer.address)
                    await producer.publish("t", b"y")
                    assert len(lookupd.queries) == 2, "they are looked for again when one is lost"

    run(main())


def test_producers_spread_over_the_brokers_that_are_found() -> None:
    async def main() -> None:
        with AuthServer() as lookupd:
            async with ScriptedNsqd() as one, ScriptedNsqd() as other:
                lookupd.answer({"producers": [node(one), node(other)]})
                for _ in range(20):
                    async with Producer(nsqlookupd=[lookupd.address]) as producer:
                        await producer.connect()
                assert one.peers and other.peers

    run(main())


def test_a_filter_decides_which_brokers_are_used() -> None:
    async def main() -> None:
        with AuthServer() as lookupd:
            async with ScriptedNsqd() as one, ScriptedNsqd() as other:
                lookupd.answer({"producers": [node(one), node(other)]})

                def not_one(addresses: list[str]) -> list[str]:
                    return [address for address in addresses if address != one.address]

                for _ in range(5):
                    config = Config(discovery_filter=not_one)
                    async with Producer(nsqlookupd=[lookupd.address], config=config) as producer:
                        await producer.connect()
                        assert producer.address == other.address
                config = Config(discovery_filter=lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
                async with Producer(nsqlookupd=[lookupd.address], config=config) as producer:
                    with pytest.raises(ConnectFailed, match="the discovery_filter failed: ZeroDivisionError"):
                        await producer.publish("t", b"x")

    run(main())


def test_named_brokers_come_first_and_need_no_nsqlookupd() -> None:
    async def main() -> None:
        with AuthServer() as lookupd:
            lookupd.answer(b"", status=500)
            async with ScriptedNsqd() as nsqd:
                async with Producer(nsqd.address, nsqlookupd=[lookupd.address]) as producer:
                    await producer.publish("t", b"x")

    run(main())


def test_a_named_broker_is_tried_before_nsqlookupd_is_asked() -> None:
    async def main() -> None:
        with AuthServer() as lookupd:
            async with ScriptedNsqd() as nsqd:
                async with Producer(nsqd.address, nsqlookupd=[lookupd.address]) as producer:
                    await producer.publish("t", b"x")
                    assert lookupd.queries == []

    run(main())


def test_a_named_broker_that_failed_needs_no_answer_of_nsqlookupd() -> None:
    """An nsqlookupd that is silent for a minute does not keep producers from a restarted nsqd."""

    async def main() -> None:
        with AuthServer() as lookupd:
            lookupd.stalled.set()
            async with ScriptedNsqd() as nsqd:
                async with Producer(nsqd.address, nsqlookupd=[lookupd.address]) as producer:
                    await producer.publish("t", b"x")
                    nsqd.peers[0].abort()
                    await until(lambda: not producer.address)
                    await producer.publish("t", b"y")
                    assert (len(nsqd.peers), len(lookupd.queries)) == (2, 1)

    run(main())


@pytest.mark.parametrize("turn", [1, -1], ids=["silent first", "silent last"])
def test_one_nsqlookupd_that_answers_is_enough(turn: int) -> None:
    async def main() -> None:
        with AuthServer() as silent, AuthServer() as good:
            silent.stalled.set()
            async with ScriptedNsqd() as nsqd:
                good.answer({"producers": [node(nsqd)]})
                async with Producer(nsqlookupd=[silent.address, good.address][::turn]) as producer:
                    await producer.publish("t", b"x")
                    assert producer.address == nsqd.address

    run(main())


def test_what_a_slow_nsqlookupd_knows_is_tried_when_the_others_do_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsparq.client.connect.lookup.PATIENCE_S", 0.01)
    monkeypatch.setattr("nsparq.client.connect.candidates.LATE_S", DEADLINE)

    async def main() -> None:
        with AuthServer() as slow, AuthServer() as good:
            slow.stalled.set()
            async with ScriptedNsqd("E_INVALID no") as rude, ScriptedNsqd() as nsqd:
                good.answer({"producers": [node(rude)]})
                slow.answer({"producers": [node(rude), node(nsqd)]})
                async with Producer(nsqlookupd=[slow.address, good.address]) as producer:
                    publishing = begin(producer.publish("t", b"x"))
                    await until(lambda: rude.peers)
                    slow.stalled.clear()
                    await publishing
                    assert (producer.address, len(rude.peers)) == (nsqd.address, 1)

    run(main())


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "from another nsqlookupd"])
def test_a_silent_nsqlookupd_does_not_keep_a_broker_from_being_tried_again(
    is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.client.connect.lookup.PATIENCE_S", 0.01)
    monkeypatch.setattr("nsparq.client.connect.candidates.LATE_S", 0.01)

    async def main() -> None:
        with AuthServer() as silent, AuthServer() as good:
            silent.stalled.set()
            async with ScriptedNsqd() as nsqd:
                nsqd.refuse()
                good.answer({"producers": [node(nsqd)]})
                named = [nsqd.address] if is_named else []
                lookups = [silent.address] if is_named else [silent.address, good.address]
                config = Config(reconnect_delay=0.01)
                async with Producer(*named, nsqlookupd=lookups, retry=True, config=config) as producer:
                    publishing = begin(producer.publish("t", b"x"))
                    await until(lambda: len(silent.queries) >= 2)
                    await nsqd.listen()
                    await publishing

    run(main())


def test_without_any_other_broker_a_slow_nsqlookupd_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.client.connect.lookup.PATIENCE_S", 0.01)
    monkeypatch.setattr("nsparq.client.connect.candidates.LATE_S", 0.01)

    async def main() -> None:
        with AuthServer() as slow:
            slow.stalled.set()
            async with ScriptedNsqd() as nsqd:
                slow.answer({"producers": [node(nsqd)]})
                async with Producer(nsqlookupd=[slow.address]) as producer:
                    publishing = begin(producer.publish("t", b"x"))
                    await until(lambda: slow.queries)
                    await asyncio.sleep(0.05)
                    slow.stalled.clear()
                    await publishing
                    assert len(slow.queries) == 1

    run(main())


def test_all_brokers_that_were_tried_are_in_the_error() -> None:
    async def main() -> None:
        with AuthServer() as lookupd:
            async with ScriptedNsqd("E_INVALID no") as named, ScriptedNsqd("E_INVALID no") as found:
                lookupd.answer({"producers": [node(named), node(found)]})
                async with Producer(named.address, nsqlookupd=[lookupd.address]) as producer:
                    for _ in range(2):
                        with pytest.raises(ConnectFailed) as caught:
                            await producer.publish("t", b"x")
                        text = str(caught.value)
                        assert (text.count(named.address), text.count(found.address)) == (1, 1)

    run(main())


@pytest.mark.parametrize(
    ("status", "text"), [(500, "none of 127.0.0.1:[0-9]+ answered"), (404, "nsqlookupd knows no nsqd")]
)
def test_without_any_broker_the_error_says_why(status: int, text: str) -> None:
    async def main() -> None:
        with AuthServer() as lookupd:
            lookupd.answer(b"{}", status=status)
            async with Producer(nsqlookupd=[lookupd.address]) as producer:
                with pytest.raises(ConnectFailed, match=text):
                    await producer.publish("t", b"x")

    run(main())


# Time


def test_without_an_answer_it_raises_and_the_broker_is_given_up(timeless_run: Run) -> None:
    async def main() -> None:
        async with pair(None, publish_timeout=0.2) as (producer, nsqd):
            loop = asyncio.get_running_loop()
            began = loop.time()
            tasks = [begin(producer.publish("t", b"x")) for _ in range(3)]
            assert await outcomes(tasks) == ["PublishTimeout"] * 3
            assert loop.time() - began == pytest.approx(0.2, abs=0.002)
            await until(lambda: nsqd.peers[0].is_ended)
            nsqd.publish = b"OK"
            await producer.publish("t", b"x")
            assert len(nsqd.peers) == 2

    timeless_run(main())


def test_without_an_answer_it_is_a_timeout_whenever_the_last_answer_came(timeless_run: Run) -> None:
    """The timer of an answered publish must not affect the next one."""

    async def main() -> None:
        async with pair(publish_timeout=0.4) as (producer, nsqd):
            clock = asyncio.get_running_loop().time
            for wait in (0.0, 0.04, 0.2, 0.36):
                nsqd.publish = b"OK"
                await producer.publish("t", b"x")
                nsqd.publish = None
                await asyncio.sleep(wait)
                began = clock()
                with pytest.raises(PublishTimeout, match=r"not acknowledged within 0\.4 s"):
                    await producer.publish("t", b"y")
                assert clock() - began == pytest.approx(0.4, abs=0.002)

    timeless_run(main())


def test_publishes_after_a_timed_out_one_time_out_too(timeless_run: Run) -> None:
    async def main() -> None:
        async with pair(None, publish_timeout=0.5) as (producer, nsqd):
            first = begin(producer.publish("t", b"x"))
            await sent(nsqd, 1)
            await asyncio.sleep(0.2)
            later = begin(producer.publish("t", b"y"))
            with pytest.raises(PublishTimeout, match=r"not acknowledged within 0\.5 s"):
                await first
            with pytest.raises(
                PublishTimeout, match=rf"{nsqd.address}: the server acknowledged nothing for 0\.\d s"
            ):
                await later
            assert not producer.address

    timeless_run(main())


def test_with_retry_later_publishes_go_to_the_next_broker(timeless_run: Run) -> None:
    async def main() -> None:
        async with ScriptedNsqd(publish=None) as silent, ScriptedNsqd() as good:
            config = Config(publish_timeout=0.5)
            async with Producer(silent.address, good.address, retry=True, config=config) as producer:
                first = begin(producer.publish("t", b"x"))
                await sent(silent, 1)
                await asyncio.sleep(0.2)
                later = begin(producer.publish("t", b"y"))
                assert await outcomes([first, later]) == ["PublishTimeout", ""]
                assert good.peers[0].bodies[1:] == [b"y"], "the first was out of time"

    timeless_run(main())


def test_a_slow_broker_that_answers_at_all_is_kept(timeless_run: Run) -> None:
    async def main() -> None:
        async with pair(None, publish_timeout=2) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(5)]
            await sent(nsqd, 5)
            for _ in range(3):
                await asyncio.sleep(0.3)
                nsqd.peers[0].send_response(b"OK")
            assert await outcomes(tasks) == ["", "", "", "PublishTimeout", "PublishTimeout"]
            await asyncio.sleep(0.05)
            assert not nsqd.peers[0].is_ended

    timeless_run(main())


def test_connecting_counts_as_a_part_of_the_time(timeless_run: Run) -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as nsqd:
            async with Producer(nsqd.address, config=Config(publish_timeout=0.2)) as producer:
                with pytest.raises(PublishTimeout):
                    await producer.publish("t", b"x")

    timeless_run(main())


# Room


def test_at_most_max_pending_publishes_are_unanswered() -> None:
    async def main() -> None:
        async with pair(None, max_pending=3) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"%d" % n)) for n in range(8)]
            await sent(nsqd, 3)
            await asyncio.sleep(0.02)
            assert len(nsqd.peers[0].bodies) == 1 + 3
            nsqd.peers[0].send_response(b"OK")
            await sent(nsqd, 4)
            assert nsqd.peers[0].bodies[-1] == b"3", "whoever has waited longest is next"
            # From here on, the others are answered as they arrive.
            nsqd.publish = b"OK"
            for _ in range(3):
                nsqd.peers[0].send_response(b"OK")
            assert await outcomes(tasks) == [""] * 8

    run(main())


def test_publishes_that_wait_for_room_are_not_overtaken() -> None:
    async def main() -> None:
        async with pair(None, max_pending=1) as (producer, nsqd):
            first = begin(producer.publish("t", b"0"))
            await sent(nsqd, 1)
            waiting = [begin(producer.publish("t", b"%d" % n)) for n in (1, 2)]
            await asyncio.sleep(0.01)
            nsqd.publish = b"OK"
            nsqd.peers[0].send_response(b"OK")
            await first
            waiting += [begin(producer.publish("t", b"%d" % n)) for n in (3, 4)]
            assert await outcomes(waiting) == [""] * 4
            assert nsqd.peers[0].bodies[1:] == [b"0", b"1", b"2", b"3", b"4"]

    run(main())


def test_a_publish_that_stops_waiting_lets_the_next_one_pass() -> None:
    async def main() -> None:
        async with pair(None, max_pending=1) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"%d" % n)) for n in range(4)]
            await sent(nsqd, 1)
            tasks[1].cancel()
            tasks[2].cancel()
            nsqd.publish = b"OK"
            nsqd.peers[0].send_response(b"OK")
            assert await outcomes(tasks) == ["", "CancelledError", "CancelledError", ""]

    run(main())


def test_a_full_socket_holds_publishers_back() -> None:
    async def main() -> None:
        async with pair(write_timeout=5) as (producer, nsqd):
            await producer.connect()
            nsqd.peers[0].is_reading = False
            body = bytes(1 << 20)
            tasks = [begin(producer.publish("t", body)) for _ in range(40)]
            await asyncio.sleep(0.1)
            assert producer._connection is not None
            transport = producer._connection.raw._transport
            assert transport is not None
            # At most one body beyond the limit is buffered, not all.
            assert transport.get_write_buffer_size() < 3 << 20
            nsqd.peers[0].abort()
            assert {"NotConnected", ""} >= set(await outcomes(tasks))

    run(main())


# Cancelled


def test_a_cancelled_publish_does_not_cancel_the_connect_of_others() -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as nsqd:
            async with Producer(nsqd.address) as producer:
                first, second = (begin(producer.publish("t", b"x")) for _ in range(2))
                peer = await nsqd.peer()
                first.cancel()
                await asyncio.sleep(0.01)
                peer.send_response(b"OK")
                assert await outcomes([first, second]) == ["CancelledError", ""]
                assert len(nsqd.peers) == 1

    run(main())


# The end


def test_stop_waits_for_unanswered_publishes() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            task = begin(producer.publish("t", b"x"))
            await sent(nsqd, 1)
            stopping = begin(producer.stop())
            await asyncio.sleep(0.02)
            assert not stopping.done()
            with pytest.raises(Stopped):
                await producer.publish("t", b"y")
            nsqd.peers[0].send_response(b"OK")
            assert await outcomes([task, stopping]) == ["", ""]
            assert nsqd.peers[0].is_ended or await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_after_stop_nothing_is_published() -> None:
    async def main() -> None:
        async with pair() as (producer, _):
            await producer.publish("t", b"x")
            await asyncio.gather(producer.stop(), producer.stop())
            await producer.stop()
            for work in (producer.publish("t", b"x"), producer.connect(), producer.ping()):
                with pytest.raises(Stopped, match="stopped"):
                    await work

    run(main())


def test_stop_before_anything_was_published() -> None:
    async def main() -> None:
        producer = Producer("127.0.0.1:1")
        await producer.stop()
        with pytest.raises(Stopped):
            await producer.publish("t", b"x")

    run(main())


def test_publishes_that_wait_for_room_raise_stopped() -> None:
    async def main() -> None:
        async with pair(None, max_pending=1) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(3)]
            await sent(nsqd, 1)
            stopping = begin(producer.stop())
            assert await outcomes(tasks[1:]) == ["Stopped", "Stopped"]
            nsqd.peers[0].send_response(b"OK")
            assert await outcomes([tasks[0], stopping]) == ["", ""]
            assert len(nsqd.peers[0].bodies) == 2

    run(main())


def test_stop_while_connecting_raises_stopped() -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as nsqd:
            producer = Producer(nsqd.address)
            tasks = [begin(producer.publish("t", b"x")) for _ in range(2)]
            await nsqd.peer()
            await producer.stop()
            assert await outcomes(tasks) == ["Stopped", "Stopped"]
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_stop_does_not_wait_forever() -> None:
    async def main() -> None:
        async with pair(None, publish_timeout=0.2, retry=True) as (producer, nsqd):
            task = begin(producer.publish("t", b"x"))
            await sent(nsqd, 1)
            await producer.stop()
            assert await outcomes([task]) == ["PublishTimeout"]

    run(main())


def test_a_stop_that_is_cancelled_leaves_nothing_open() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            task = begin(producer.publish("t", b"x"))
            await sent(nsqd, 1)
            stopping = begin(producer.stop())
            await asyncio.sleep(0.01)
            stopping.cancel()
            assert await outcomes([stopping, task]) == ["CancelledError", "NotConnected"]
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_with_retry_a_stop_ends_the_retrying() -> None:
    async def main() -> None:
        async with pair(None, retry=True, reconnect_delay=0.01) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(2)]
            await sent(nsqd, 2)
            nsqd.refuse()
            nsqd.peers[0].abort()
            await asyncio.sleep(0.05)
            await producer.stop()
            assert await outcomes(tasks) == ["NotConnected"] * 2, "they may have been published"

    run(main())


def test_with_retry_a_publish_that_was_never_processed_raises_stopped() -> None:
    async def main() -> None:
        async with pair(None, retry=True, reconnect_delay=0.01) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(2)]
            await sent(nsqd, 2)
            nsqd.refuse()
            nsqd.peers[0].send_error("E_BAD_MESSAGE PUB no")
            nsqd.peers[0].close()
            await until(lambda: not producer.address)
            await producer.stop()
            assert await outcomes(tasks) == ["PublishFailed", "Stopped"]

    run(main())


def test_with_retry_a_refusal_of_another_publish_does_not_hide_the_doubt() -> None:
    """First the connection was lost, then a refusal of another publish closed it."""

    async def main() -> None:
        async with pair(None, retry=True, reconnect_delay=0.01) as (producer, nsqd):
            tasks = [begin(producer.publish("t", b"x")) for _ in range(2)]
            await sent(nsqd, 2)
            nsqd.peers[0].abort()
            await sent(nsqd, 4)
            stopping = begin(producer.stop())
            nsqd.peers[1].send_error("E_BAD_MESSAGE PUB no")
            nsqd.peers[1].close()
            assert await outcomes([*tasks, stopping]) == ["NotConnected", "NotConnected", ""]

    run(main())


def test_with_retry_a_broker_without_headers_does_not_hide_the_doubt() -> None:
    async def main() -> None:
        async with pair(None, retry=True, identify={"headers": True}) as (producer, nsqd):
            task = begin(producer.publish("t", b"x", headers={"k": "v"}))
            await sent(nsqd, 1)
            nsqd.identify = {}
            nsqd.peers[0].abort()
            assert await outcomes([task]) == ["NotConnected"]

    run(main())


def test_with_retry_a_refusal_of_the_repeat_does_not_hide_the_doubt() -> None:
    async def main() -> None:
        answers: list[Reply] = ["E_PUB_FAILED PUB failed disk full", None]
        async with pair(lambda _: answers.pop(), retry=True) as (producer, nsqd):
            task = begin(producer.publish("t", b"x"))
            await until(lambda: "PUB t" in nsqd.commands)
            nsqd.peers[0].abort()
            text = "^lost .*; sent again, it was refused: E_PUB_FAILED PUB failed disk full$"
            with pytest.raises(NotConnected, match=text):
                await task

    run(main())


def test_not_connected_has_the_reason() -> None:
    async def main() -> None:
        async with pair(None) as (producer, nsqd):
            task = begin(producer.publish("t", b"x"))
            await sent(nsqd, 1)
            nsqd.peers[0].close()
            with pytest.raises(NotConnected, match=f"lost {nsqd.address}: the server closed the connection"):
                await task

    run(main())
