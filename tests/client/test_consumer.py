"""A consumer against a scripted nsqd: its answers, their order, and its end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nsparq.client import ClientError, Config, ConnectFailed, Consumer, Message, Reject, Requeue, Stopped
from nsparq.client.consumer import CLOSE_WAIT_S, PREFETCH
from tests.support.aio import run, until
from tests.support.polling import DEADLINE
from tests.support.scripted_nsqd import Peer, ScriptedNsqd, message_frame, message_id

# For tests where the order of callbacks, threads or sockets matters; the others are in
# test_connection.py.
any_loop = pytest.mark.usefixtures("any_loop")

M1, M2, M3 = (message_id(name) for name in ("m1", "m2", "m3"))
# No back-off by default: failures must not slow the tests down.
CALM = {"max_backoff_duration": 0.0, "reconnect_delay": 0.01}


@asynccontextmanager
async def consuming(
    handler: Callable[..., Any] | None = None,
    *,
    nsqd: ScriptedNsqd | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Consumer, ScriptedNsqd, Peer]]:
    """A connected consumer with RDY."""
    async with nsqd or ScriptedNsqd() as made:
        settings = Config(**{**CALM, **(config or {})})
        options = {"max_in_flight": 10, **options}
        async with Consumer("t", "ch", handler, nsqd=[made.address], config=settings, **options) as consumer:
            await made.told("IDENTIFY", "SUB t ch", f"RDY {consumer.max_in_flight}")
            try:
                yield consumer, made, await made.peer()
            except BaseException:
                # Show a failure at once, not after all handlers have ended.
                await consumer.stop(0)
                raise


class Handler:
    """Keeps messages until it is released."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.done: list[Message] = []
        self.cancelled: list[Message] = []
        self._go = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        try:
            await self._go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(message)
            raise
        self.done.append(message)

    def go(self) -> None:
        self._go.set()


async def ignore(message: Message) -> None:
    pass


# Construction


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("no good", "ch"), {}, "invalid topic name 'no good'"),
        (("t", ""), {}, "invalid channel name ''"),
        (("t", "ch", ignore), {"batch_handler": ignore}, "not both"),
        (("t", "ch"), {"concurrency": 0}, "at least 1"),
        (("t", "ch"), {"batch_size": 0}, "at least 1"),
        (("t", "ch"), {"max_in_flight": -1}, "invalid max_in_flight"),
        (("t", "ch"), {"dead_letter": "t"}, "its own dead letters"),
        (("t", "ch"), {"dead_letter": "no good"}, "invalid topic name 'no good'"),
        (("t", "ch"), {"nsqd": ["localhost"]}, "is not host:port"),
        (("t", "ch"), {"nsqlookupd": ["localhost"]}, "needs a port"),
    ],
)
def test_invalid_arguments_are_refused_at_once(
    arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Consumer(*arguments, **options)


def test_max_in_flight_has_an_order_of_precedence() -> None:
    def most(**options: Any) -> int:
        return Consumer("t", "ch", **options).max_in_flight

    assert most() == PREFETCH
    assert most(concurrency=5) == 5 * PREFETCH
    assert most(batch_handler=ignore, batch_size=50, concurrency=2) == 100
    assert most(config=Config(max_in_flight=1)) == 1
    assert most(config=Config(max_in_flight=3), max_in_flight=7) == 7
    assert most(max_in_flight=0) == 0


# Answers


def test_a_message_is_finished_when_its_handler_returns() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (consumer, nsqd, peer):
            peer.send_message("m1", b"body", attempts=2)
            (message,) = await until(lambda: handler.messages)
            assert (message.body, message.attempts, message.id) == (b"body", 2, M1.encode())
            assert (message.address, message.timestamp_ns) == (nsqd.address, 1)
            await nsqd.told_nothing_more()
            handler.go()
            await nsqd.told(f"FIN {M1}")
            assert message.is_answered
            assert (consumer.messages_received, consumer.messages_finished) == (1, 1)

    run(main())


@pytest.mark.parametrize(
    ("error", "delay_ms"),
    [
        (RuntimeError("no"), 180_000),
        (Requeue(), 180_000),
        (Requeue(1.5), 1500),
        (Requeue(0.29, backoff=False), 290),
        (asyncio.CancelledError(), 180_000),
        (ExceptionGroup("several", [ValueError()]), 180_000),
        (BaseExceptionGroup("worse", [asyncio.CancelledError()]), 180_000),
    ],
)
def test_a_message_is_requeued_when_its_handler_raises(error: BaseException, delay_ms: int) -> None:
    async def main() -> None:
        async def fail(message: Message) -> None:
            if message.body != b"good":
                raise error

        async with consuming(fail) as (consumer, nsqd, peer):
            peer.send_message("m1", b"bad", attempts=2)
            await nsqd.told(f"REQ {M1} {delay_ms}")
            assert consumer.messages_requeued == 1
            peer.send_message("m2", b"good")
            await nsqd.told(f"FIN {M2}")

    run(main())


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 1e10])
def test_an_impossible_delay_is_an_error_of_the_handler(delay: float) -> None:
    async def main() -> None:
        async def fail(message: Message) -> None:
            if message.body == b"raise":
                raise Requeue(delay)
            message.requeue(delay)

        async with consuming(fail) as (_, nsqd, peer):
            peer.send_message("m1", b"raise")
            peer.send_message("m2", b"call")
            await nsqd.told(f"REQ {M1} 90000", f"REQ {M2} 90000")

    run(main())


def test_a_message_can_be_answered_once() -> None:
    async def main() -> None:
        async def handle(message: Message) -> None:
            message.touch()
            message.requeue(1)
            message.finish()
            message.requeue(2)
            message.touch()

        async with consuming(handle) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await nsqd.told(f"TOUCH {M1}", f"REQ {M1} 1000")
            await nsqd.told_nothing_more()
            assert (consumer.messages_finished, consumer.messages_requeued) == (0, 1)

    run(main())


def test_a_handler_may_leave_the_answer_to_others() -> None:
    async def main() -> None:
        kept: list[Message] = []

        async def keep(message: Message) -> None:
            message.auto_response = False
            kept.append(message)

        async with consuming(keep) as (_, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            await until(lambda: len(kept) == 2)
            await nsqd.told_nothing_more()
            kept[1].finish()
            kept[0].requeue(0)
            await nsqd.told(f"FIN {M2}", f"REQ {M1} 0")

    run(main())


def test_concurrency_limits_the_running_handlers() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler, concurrency=3) as (_, nsqd, peer):
            for number in range(5):
                peer.send_message(f"m{number}")
            await until(lambda: len(handler.messages) == 3)
            await nsqd.told_nothing_more()
            assert len(handler.messages) == 3
            handler.go()
            await until(lambda: len(handler.done) == 5)

    run(main())


def test_a_handler_that_never_waits_does_not_keep_the_loop() -> None:
    async def main() -> None:
        turns = 0

        async def spin(message: Message) -> None:
            until_then = asyncio.get_running_loop().time() + 0.002
            while asyncio.get_running_loop().time() < until_then:
                pass

        async with consuming(spin, max_in_flight=200) as (consumer, _, peer):
            for number in range(100):
                peer.send_message(str(number))
            while consumer.messages_finished < 100:
                await asyncio.sleep(0)
                turns += 1
            assert turns >= 10

    run(main())


def test_a_message_has_its_headers() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler, concurrency=2) as (_, nsqd, peer):
            peer.send_bytes(message_frame("m1", b"one", block=b"\x06tenant\x00\x04acme\x01k\x00\x00"))
            peer.send_message("m2", b"two")
            await until(lambda: len(handler.messages) == 2)
            assert [message.body for message in handler.messages] == [b"one", b"two"]
            assert [message.headers for message in handler.messages] == [{"tenant": "acme", "k": ""}, {}]
            handler.go()
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")

    run(main())


def test_a_message_is_shown_without_its_body() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (_, _, peer):
            peer.send_message("m1", b"x" * 1000)
            (message,) = await until(lambda: handler.messages)
            assert repr(message) == f"<Message {M1} attempts=1 1000 bytes>"
            message.body = b'{"a": [1]}'
            assert message.json() == {"a": [1]}
            handler.go()

    run(main())


# Handlers in threads


@any_loop
def test_a_plain_function_runs_in_a_thread_and_may_answer_from_there() -> None:
    async def main() -> None:
        threads = set()

        def handle(message: Message) -> None:
            threads.add(threading.current_thread())
            if message.body == b"touch":
                message.touch()
            elif message.body == b"requeue":
                message.requeue(1)
                message.finish()
            elif message.body == b"raise":
                raise ValueError

        async with consuming(handle, concurrency=1) as (_, nsqd, peer):
            for name, body in (("m1", b"touch"), ("m2", b"requeue"), ("m3", b"raise")):
                peer.send_message(name, body)
            await nsqd.told(f"TOUCH {M1}", f"FIN {M1}", f"REQ {M2} 1000", f"REQ {M3} 90000")
            assert threading.current_thread() not in threads
            assert {thread.name for thread in threads} == {"nsq-t_0"}

    run(main())


def test_a_blocked_function_delays_nothing_else() -> None:
    async def main() -> None:
        release = threading.Event()

        def block(message: Message) -> None:
            if message.body == b"block":
                release.wait(DEADLINE)

        async with consuming(block, concurrency=2) as (_, nsqd, peer):
            peer.send_message("m1", b"block")
            peer.send_message("m2")
            await nsqd.told(f"FIN {M2}")
            peer.send_response(b"_heartbeat_")
            await until(lambda: peer.nop_count == 1)
            release.set()
            await nsqd.told(f"FIN {M1}")

    run(main())


def test_an_awaitable_result_of_a_plain_function_is_awaited() -> None:
    async def main() -> None:
        seen = []

        async def handle(message: Message) -> None:
            seen.append(message.body)

        async with consuming(lambda message: handle(message)) as (_, nsqd, peer):
            peer.send_message("m1")
            await nsqd.told(f"FIN {M1}")
            assert seen == [b"body"]

    run(main())


def test_stop_iteration_from_a_thread_is_a_failure_like_any_other() -> None:
    async def main() -> None:
        def fail(message: Message) -> None:
            next(iter([]))

        async with consuming(fail) as (_, nsqd, peer):
            peer.send_message("m1")
            await nsqd.told(f"REQ {M1} 90000")

    run(main())


def test_context_variables_reach_handlers_in_threads() -> None:
    async def main() -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
        variable.set("there")
        seen = []

        async with consuming(lambda message: seen.append(variable.get())) as (_, nsqd, peer):
            peer.send_message("m1")
            await nsqd.told(f"FIN {M1}")
            assert seen == ["there"]

    run(main())


def test_an_object_with_an_async_call_runs_on_the_loop() -> None:
    async def main() -> None:
        class Counter:
            thread = None

            async def __call__(self, message: Message) -> None:
                self.thread = threading.current_thread()

        counter = Counter()
        async with consuming(counter) as (_, nsqd, peer):
            peer.send_message("m1")
            await nsqd.told(f"FIN {M1}")
            assert counter.thread is threading.current_thread()

    run(main())


# Batches


class BatchHandler:
    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.error: Exception | None = None
        self.own_answers: dict[str, Callable[[Message], None]] = {}

    async def __call__(self, messages: list[Message]) -> None:
        self.batches.append([message.id.decode().lstrip("0") for message in messages])
        for message in messages:
            own = self.own_answers.get(message.id.decode().lstrip("0"))
            if own is not None:
                own(message)
        if self.error is not None:
            raise self.error


def test_a_batch_is_handled_when_it_is_full() -> None:
    async def main() -> None:
        handler = BatchHandler()
        async with consuming(batch_handler=handler, batch_size=2, batch_timeout=60) as (_, nsqd, peer):
            for name in ("m1", "m2", "m3"):
                peer.send_message(name)
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")
            await nsqd.told_nothing_more()
            peer.send_message("m4")
            await nsqd.told(f"FIN {M3}", f"FIN {message_id('m4')}")
            assert handler.batches == [["m1", "m2"], ["m3", "m4"]]

    run(main())


def test_a_batch_is_handled_when_its_time_is_up() -> None:
    async def main() -> None:
        handler = BatchHandler()
        async with consuming(batch_handler=handler, batch_timeout=0.1) as (_, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")
            assert handler.batches == [["m1", "m2"]]

    run(main())


def test_a_batch_does_not_wait_for_messages_that_cannot_come() -> None:
    """The server has sent nearly all it may. More messages come only after some answers."""

    async def main() -> None:
        handler = BatchHandler()
        async with consuming(batch_handler=handler, batch_timeout=60, max_in_flight=3) as (_, nsqd, peer):
            for name in ("m1", "m2"):
                peer.send_message(name)
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")

    run(main())


def test_a_failed_batch_is_requeued_except_answered_messages() -> None:
    async def main() -> None:
        handler = BatchHandler()
        handler.error = ValueError("no")
        handler.own_answers = {"m2": Message.finish}
        async with consuming(batch_handler=handler, batch_size=3) as (_, nsqd, peer):
            for name in ("m1", "m2", "m3"):
                peer.send_message(name)
            await nsqd.told(f"FIN {M2}", f"REQ {M1} 90000", f"REQ {M3} 90000")
            handler.error = Requeue(2, backoff=False)
            for name in ("m1", "m2", "m3"):
                peer.send_message(name)
            await nsqd.told(f"FIN {M2}", f"REQ {M1} 2000", f"REQ {M3} 2000")

    run(main())


def test_a_batch_is_finished_at_each_of_its_brokers() -> None:
    async def main() -> None:
        def later(message: Message) -> None:
            message.auto_response = False

        handler = BatchHandler()
        handler.own_answers = {"m2": later, "n1": Message.finish, "n2": lambda one: one.requeue(1)}
        async with ScriptedNsqd() as other, ScriptedNsqd() as one:
            async with Consumer(
                "t",
                "ch",
                batch_handler=handler,
                batch_size=6,
                batch_timeout=60,
                nsqd=[one.address, other.address],
                max_in_flight=12,
                config=Config(**CALM),
            ) as consumer:
                await until(lambda: "RDY 6" in one.commands and "RDY 6" in other.commands)
                for nsqd, letter in ((one, "m"), (other, "n")):
                    for number in (1, 2, 3):
                        (await nsqd.peer()).send_message(f"{letter}{number}")
                await until(lambda: f"FIN {M3}" in one.commands and len(other.commands) >= 6)
                assert [line for line in one.commands if line[:3] in ("FIN", "REQ")] == [
                    f"FIN {M1}",
                    f"FIN {M3}",
                ]
                ids = [message_id(name) for name in ("n1", "n2", "n3")]
                assert [line for line in other.commands if line[:3] in ("FIN", "REQ")] == [
                    f"FIN {ids[0]}",
                    f"REQ {ids[1]} 1000",
                    f"FIN {ids[2]}",
                ]
                assert (consumer.messages_finished, consumer.messages_requeued) == (4, 1)
                await consumer.stop(0)

    run(main())


def test_a_batch_that_succeeds_ends_a_backoff() -> None:
    async def main() -> None:
        handler = BatchHandler()
        handler.error = Requeue(0)
        config = {"max_backoff_duration": 10, "backoff_multiplier": 0.01}
        async with consuming(batch_handler=handler, batch_size=1, config=config) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await nsqd.told("RDY 0", f"REQ {M1} 0", "RDY 1")
            handler.error = None
            peer.send_message("m1")
            await nsqd.told("RDY 10", f"FIN {M1}")
            assert not consumer.is_in_backoff

    run(main())


def test_messages_that_are_given_up_do_not_reach_a_batch() -> None:
    async def main() -> None:
        handler, given_up = BatchHandler(), []

        async def note(message: Message) -> None:
            given_up.append(message.id.decode())

        async with consuming(batch_handler=handler, batch_size=3, on_give_up=note) as (_, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2", attempts=6)
            peer.send_message("m3")
            await nsqd.told(f"FIN {M2}", f"FIN {M1}", f"FIN {M3}")
            assert (handler.batches, given_up) == ([["m1", "m3"]], [M2])
            # Without other messages there is no batch.
            for name in ("m1", "m2", "m3"):
                peer.send_message(name, attempts=6)
            await nsqd.told(f"FIN {M1}", f"FIN {M2}", f"FIN {M3}")
            peer.send_message("m1")
            peer.send_message("m2")
            peer.send_message("m3")
            await nsqd.told(f"FIN {M1}", f"FIN {M2}", f"FIN {M3}")
            assert len(handler.batches) == 2

    run(main())


def test_a_rejected_batch_is_given_up() -> None:
    async def main() -> None:
        handler, given_up = BatchHandler(), []
        handler.error = Reject("all of them")
        async with consuming(
            batch_handler=handler, batch_size=2, dead_letter=lambda message: given_up.append(message.id)
        ) as (_, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")
            assert given_up == [M1.encode(), M2.encode()]

    run(main())


def test_stop_handles_a_partial_batch_at_once() -> None:
    async def main() -> None:
        handler = BatchHandler()
        async with consuming(batch_handler=handler, batch_timeout=60) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await until(lambda: consumer.messages_received)
            await asyncio.sleep(0.01)
            await consumer.stop()
            assert sorted(nsqd.commands[3:]) == ["CLS", f"FIN {M1}"]

    run(main())


def test_a_batch_does_not_hold_messages_of_a_lost_connection() -> None:
    async def main() -> None:
        handler = BatchHandler()
        async with consuming(batch_handler=handler, batch_size=3, batch_timeout=60) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await until(lambda: consumer.messages_received)
            peer.abort()
            await nsqd.told("IDENTIFY", "SUB t ch", "RDY 10")
            again = await nsqd.peer(2)
            again.send_message("m2")
            again.send_message("m3")
            await nsqd.told(f"FIN {M2}", f"FIN {M3}")
            assert handler.batches == [["m2", "m3"]]

    run(main())


# Giving up


def test_a_message_with_too_many_attempts_is_finished_without_its_handler() -> None:
    async def main() -> None:
        handled, given_up = [], []

        async def handle(message: Message) -> None:
            handled.append(message.attempts)

        async def note(message: Message) -> None:
            given_up.append(message.attempts)

        async with consuming(handle, on_give_up=note) as (consumer, nsqd, peer):
            for attempts in (1, 5, 6, 65535):
                peer.send_message("m1", attempts=attempts)
                await nsqd.told(f"FIN {M1}")
            assert (handled, given_up) == ([1, 5], [6, 65535])
            assert (consumer.messages_finished, consumer.messages_given_up) == (4, 2)

    run(main())


def test_with_max_attempts_of_zero_nothing_is_given_up() -> None:
    async def main() -> None:
        seen = []
        async with consuming(lambda message: seen.append(message.attempts), config={"max_attempts": 0}) as (
            _,
            nsqd,
            peer,
        ):
            peer.send_message("m1", attempts=65535)
            await nsqd.told(f"FIN {M1}")
            assert seen == [65535]

    run(main())


def test_a_rejected_message_is_given_up_at_once() -> None:
    async def main() -> None:
        async def reject(message: Message) -> None:
            raise Reject("it is not JSON")

        given_up = []
        async with consuming(
            reject, on_give_up=lambda message: given_up.append(message.attempts), config={"max_attempts": 0}
        ) as (_, nsqd, peer):
            peer.send_message("m1")
            await nsqd.told(f"FIN {M1}")
            assert given_up == [1]

    run(main())


@pytest.mark.parametrize("option", ["on_give_up", "dead_letter"])
@pytest.mark.parametrize("is_async", [True, False])
def test_if_a_hook_fails_the_message_is_requeued(option: str, is_async: bool) -> None:
    async def main() -> None:
        def fail(message: Message) -> None:
            raise OSError("disk full")

        async def fail_async(message: Message) -> None:
            fail(message)

        hook = fail_async if is_async else fail
        async with consuming(ignore, **{option: hook}) as (consumer, nsqd, peer):
            peer.send_message("m1", attempts=6)
            await nsqd.told(f"REQ {M1} 540000")
            assert consumer.messages_given_up == 0

    run(main())


def test_a_hook_may_take_as_long_as_it_likes_in_its_thread() -> None:
    async def main() -> None:
        release = threading.Event()

        def block(message: Message) -> None:
            release.wait(DEADLINE)

        async with consuming(ignore, on_give_up=block) as (_, nsqd, peer):
            peer.send_message("m1", attempts=6)
            peer.send_response(b"_heartbeat_")
            await until(lambda: peer.nop_count == 1)
            await nsqd.told_nothing_more()
            release.set()
            await nsqd.told(f"FIN {M1}")

    run(main())


def test_dead_letters_are_published_where_they_came_from_and_then_finished() -> None:
    async def main() -> None:
        acknowledged = asyncio.Event()
        nsqd = ScriptedNsqd(publish=None)
        async with consuming(ignore, nsqd=nsqd, dead_letter="t.dead") as (consumer, _, peer):
            peer.send_message("m1", b"the very body", attempts=6)
            await nsqd.told("IDENTIFY", "PUB t.dead")
            publisher = nsqd.peers[1]
            assert publisher.bodies[1] == b"the very body"
            await nsqd.told_nothing_more()
            assert not acknowledged.is_set()
            publisher.send_response(b"OK")
            await nsqd.told(f"FIN {M1}")
            assert consumer.messages_given_up == 1
            peer.send_message("m2", b"more", attempts=7)
            await nsqd.told("PUB t.dead")
            publisher.send_response(b"OK")
            await nsqd.told(f"FIN {M2}")
        await until(lambda: publisher.is_ended)

    run(main())


def test_a_dead_letter_keeps_its_headers() -> None:
    async def main() -> None:
        nsqd = ScriptedNsqd({"headers": True})
        options: dict[str, Any] = {"nsqd": nsqd, "config": {"max_attempts": 1}, "dead_letter": "t.dead"}
        async with consuming(ignore, **options) as (_, _, peer):
            peer.send_bytes(message_frame("m1", b"one", attempts=2, block=b"\x01k\x00\x01v"))
            await nsqd.told("IDENTIFY", "PUB t.dead headers", f"FIN {M1}")
            assert nsqd.peers[1].bodies[1] == b"\0\0\0\x05\x01k\x00\x01vone"

    run(main())


def test_a_dead_letter_that_is_refused_stays_with_the_broker() -> None:
    async def main() -> None:
        nsqd = ScriptedNsqd(publish="E_PUB_FAILED PUB failed disk full")
        async with consuming(ignore, nsqd=nsqd, dead_letter="t.dead") as (consumer, _, peer):
            peer.send_message("m1", attempts=6)
            await nsqd.told("IDENTIFY", "PUB t.dead", f"REQ {M1} 540000")
            assert consumer.messages_given_up == 0

    run(main())


def test_the_hook_is_told_before_the_dead_letter_is_taken() -> None:
    async def main() -> None:
        order = []
        async with consuming(
            ignore, on_give_up=lambda _: order.append("hook"), dead_letter=lambda _: order.append("letter")
        ) as (_, nsqd, peer):
            peer.send_message("m1", attempts=6)
            await nsqd.told(f"FIN {M1}")
            assert order == ["hook", "letter"]

    run(main())


def test_cancelled_while_giving_up_nothing_is_finished() -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def wait(message: Message) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with consuming(ignore, on_give_up=wait) as (consumer, nsqd, peer):
            peer.send_message("m1", attempts=6)
            await begun.wait()
            await consumer.stop(0.05)
            assert nsqd.commands[3:] == ["CLS"]

    run(main())


# Loops over messages


def test_a_message_is_finished_when_the_next_one_is_asked_for() -> None:
    async def main() -> None:
        async with consuming() as (consumer, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            seen = []
            async for message in consumer:
                seen.append(message.id.decode())
                if len(seen) == 1:
                    await nsqd.told_nothing_more()
                else:
                    await nsqd.told(f"FIN {M1}")
                    message.requeue(1)
                    break
            await nsqd.told(f"REQ {M2} 1000")
            assert seen == [M1, M2]

    run(main())


@pytest.mark.parametrize("how", ["break", "raise", "return", "cancel"])
def test_a_message_whose_loop_is_left_is_requeued_at_once(how: str) -> None:
    async def main() -> None:
        async with consuming() as (consumer, nsqd, peer):
            peer.send_message("m1")

            async def loop() -> None:
                async for _ in consumer:
                    if how == "break":
                        break
                    if how == "return":
                        return
                    if how == "raise":
                        raise ZeroDivisionError
                    task.cancel()
                    await asyncio.sleep(1)

            task = asyncio.create_task(loop())
            await asyncio.wait({task})
            await nsqd.told(f"REQ {M1} 0")
            if how == "raise":
                assert isinstance(task.exception(), ZeroDivisionError)

    run(main())


@any_loop
def test_cancelled_while_waiting_for_a_message_nothing_is_lost() -> None:
    async def main() -> None:
        async with consuming() as (consumer, nsqd, peer):
            waiting = asyncio.ensure_future(anext(aiter(consumer)))
            await asyncio.sleep(0.01)
            peer.send_message("m1")
            # It has arrived, but the task may not run yet.
            await until(lambda: consumer.messages_received)
            waiting.cancel()
            await asyncio.wait({waiting})
            if waiting.cancelled():
                message = await anext(aiter(consumer))
                message.finish()
                await nsqd.told(f"FIN {M1}")

    run(main())


def test_several_loops_share_the_messages() -> None:
    async def main() -> None:
        seen: list[bytes] = []

        async def loop(consumer: Consumer) -> None:
            async for message in consumer:
                seen.append(message.body)
                await asyncio.sleep(0.001)

        async with consuming() as (consumer, _, peer):
            loops = [asyncio.create_task(loop(consumer)) for _ in range(3)]
            for number in range(9):
                peer.send_message(f"m{number}", b"%d" % number)
            await until(lambda: len(seen) == 9 and consumer.messages_finished == 9)
            await consumer.stop()
            await asyncio.gather(*loops)
            assert sorted(seen) == [b"%d" % number for number in range(9)]

    run(main())


def test_messages_out_of_attempts_do_not_reach_a_loop() -> None:
    async def main() -> None:
        async with consuming(dead_letter=lambda message: None) as (consumer, nsqd, peer):
            peer.send_message("m1", attempts=6)
            peer.send_message("m2")
            async for message in consumer:
                assert message.id == M2.encode()
                message.finish()
                break
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")

    run(main())


def test_a_loop_may_give_up_a_message_itself() -> None:
    async def main() -> None:
        letters = []
        async with consuming(dead_letter=lambda message: letters.append(message.id)) as (
            consumer,
            nsqd,
            peer,
        ):
            peer.send_message("m1")
            async for message in consumer:
                await consumer.give_up(message, "it is not for us")
                break
            await nsqd.told(f"FIN {M1}")
            assert letters == [M1.encode()]

    run(main())


def test_stop_ends_a_loop_after_its_message_and_gives_back_the_others() -> None:
    async def main() -> None:
        async with consuming() as (consumer, nsqd, peer):
            for name in ("m1", "m2", "m3"):
                peer.send_message(name)
            seen = []
            in_hand, go_on = asyncio.Event(), asyncio.Event()

            async def loop() -> None:
                async for message in consumer:
                    seen.append(message.id.decode())
                    in_hand.set()
                    await go_on.wait()

            looping = asyncio.create_task(loop())
            await in_hand.wait()
            await until(lambda: consumer.messages_received == 3)
            stopping = asyncio.create_task(consumer.stop())
            await nsqd.told("CLS", f"REQ {M2} 0", f"REQ {M3} 0")
            assert not stopping.done()
            go_on.set()
            await asyncio.gather(looping, stopping)
            await nsqd.told(f"FIN {M1}")
            assert seen == [M1]

    run(main())


def test_stop_within_a_loop_returns_at_once_and_the_loop_ends() -> None:
    async def main() -> None:
        async with consuming() as (consumer, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            await until(lambda: consumer.messages_received == 2)
            async for message in consumer:
                assert message.id == M1.encode()
                await consumer.stop()
            await consumer.wait_stopped()
            assert nsqd.commands[3:] == ["CLS", f"REQ {M2} 0", f"FIN {M1}"]

    run(main())


def test_leaving_a_loop_and_the_context_is_quick() -> None:
    async def main() -> None:
        async with consuming() as (consumer, nsqd, peer):
            for name in ("m1", "m2", "m3"):
                peer.send_message(name)
            await until(lambda: consumer.messages_received == 3)
            began = asyncio.get_running_loop().time()
            async with consumer_left(consumer):
                async for message in consumer:
                    message.finish()
                    break
            assert asyncio.get_running_loop().time() - began < CLOSE_WAIT_S
            assert nsqd.commands[3:] == [f"FIN {M1}", "CLS", f"REQ {M2} 0", f"REQ {M3} 0"]

    run(main())


@any_loop
@pytest.mark.parametrize("how", ["break", "raise", "stop", "cancel"])
def test_messages_requeued_at_the_end_do_not_come_back(how: str) -> None:
    """A server that still had our RDY would send it again at once, as another attempt."""

    async def main() -> None:
        async with ScriptedNsqd() as nsqd:

            async def work() -> None:
                async with Consumer("t", "ch", nsqd=[nsqd.address]) as consumer:
                    await nsqd.told("IDENTIFY", "SUB t ch", f"RDY {PREFETCH}")
                    peer = await nsqd.peer()
                    peer.send_bytes(message_frame("m1") + message_frame("m2"))
                    await until(lambda: consumer.messages_received == 2)
                    async for _ in consumer:
                        if how == "break":
                            break
                        if how == "raise":
                            raise ZeroDivisionError
                        if how == "stop":
                            await consumer.stop()
                            break
                        task.cancel()
                        await asyncio.sleep(5)

            task = asyncio.create_task(work())
            await asyncio.gather(task, return_exceptions=True)
            assert nsqd.commands[3] == "CLS"
            assert sorted(nsqd.commands[4:]) == [f"REQ {M1} 0", f"REQ {M2} 0"]

    run(main())


@asynccontextmanager
async def consumer_left(consumer: Consumer) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await consumer.__aexit__(None, None, None)


def test_an_open_iterator_does_not_block_the_end_of_the_context() -> None:
    async def main() -> None:
        async with consuming() as (consumer, nsqd, peer):
            peer.send_message("m1")
            iterator = aiter(consumer)
            message = await anext(iterator)
            began = asyncio.get_running_loop().time()
            async with consumer_left(consumer):
                pass
            assert asyncio.get_running_loop().time() - began < CLOSE_WAIT_S
            assert message.is_answered
            await nsqd.told("CLS", f"REQ {M1} 0")
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)

    run(main())


def test_a_loop_needs_a_consumer_without_handlers_that_was_started() -> None:
    async def main() -> None:
        async with consuming(ignore) as (consumer, _, _):
            with pytest.raises(RuntimeError, match="has a handler"):
                await anext(aiter(consumer))
        with pytest.raises(RuntimeError, match="not started"):
            await anext(aiter(Consumer("t", "ch")))

    run(main())


# Touching


def test_messages_are_kept_from_timing_out_while_handled_and_while_waiting() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler, nsqd=ScriptedNsqd({"msg_timeout": 300})) as (_, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            await until(lambda: nsqd.commands.count(f"TOUCH {M1}") >= 3)
            assert nsqd.commands.count(f"TOUCH {M2}") >= 2
            handler.go()
            await until(lambda: f"FIN {M2}" in nsqd.commands)
            count = len(nsqd.commands)
            await asyncio.sleep(0.3)
            assert len(nsqd.commands) == count, "what is answered is not touched"

    run(main(), timeless=True)


def test_touches_come_before_the_timeout_with_room_to_spare() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler, nsqd=ScriptedNsqd({"msg_timeout": 3000})) as (_, nsqd, peer):
            loop = asyncio.get_running_loop()
            began = loop.time()
            peer.send_message("m1")
            await nsqd.told(f"TOUCH {M1}")
            assert 0.95 < loop.time() - began < 2
            handler.go()

    run(main(), timeless=True)


def test_a_message_that_was_touched_by_hand_is_touched_later() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler, nsqd=ScriptedNsqd({"msg_timeout": 6000})) as (_, nsqd, peer):
            peer.send_message("m1")
            (message,) = await until(lambda: handler.messages)
            for _ in range(8):
                await asyncio.sleep(0.35)
                message.touch()
            await nsqd.told(*[f"TOUCH {M1}"] * 8)
            await nsqd.told_nothing_more()
            handler.go()

    run(main(), timeless=True)


def test_touching_can_be_switched_off() -> None:
    async def main() -> None:
        handler = Handler()
        nsqd = ScriptedNsqd({"msg_timeout": 60})
        async with consuming(handler, nsqd=nsqd, auto_touch=False) as (_, _, peer):
            peer.send_message("m1")
            await nsqd.told_nothing_more(0.2)
            handler.go()

    run(main())


def test_a_message_that_timed_out_is_not_touched_again() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler, nsqd=ScriptedNsqd({"msg_timeout": 150})) as (_, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            await nsqd.told(f"TOUCH {M1}", f"TOUCH {M2}")
            peer.send_error(f"E_TOUCH_FAILED TOUCH {M1} failed ID not in flight")
            await until(lambda: nsqd.commands.count(f"TOUCH {M2}") >= 10)
            assert nsqd.commands.count(f"TOUCH {M1}") <= 4, "one or two until the answer is here"
            handler.go()

    run(main())


def test_thousands_of_held_messages_are_touched_in_little_time() -> None:
    async def main() -> None:
        async def keep(message: Message) -> None:
            message.auto_response = False

        nsqd = ScriptedNsqd({"msg_timeout": 1000, "max_rdy_count": 10_000})
        async with consuming(keep, nsqd=nsqd, max_in_flight=5000) as (consumer, _, peer):
            for number in range(5000):
                peer.send_message(str(number))
            await until(lambda: consumer.messages_received == 5000)
            # Processor time: the machine may be busy.
            longest, before = 0.0, time.thread_time()
            while len(nsqd.commands) < 3 + 5000:
                await asyncio.sleep(0)
                longest, before = max(longest, time.thread_time() - before), time.thread_time()
            assert longest < 0.3, "nothing else could run meanwhile"
            await consumer.stop(0)

    run(main())


# Connections


@any_loop
def test_a_connection_that_was_lost_is_made_again() -> None:
    async def main() -> None:
        async with consuming(ignore) as (consumer, nsqd, peer):
            assert consumer.connections == [nsqd.address]
            peer.abort()
            await nsqd.told("IDENTIFY", "SUB t ch", "RDY 10")
            again = await nsqd.peer(2)
            again.send_message("m1")
            await nsqd.told(f"FIN {M1}")

    run(main())


def test_messages_of_a_lost_connection_are_forgotten() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (_, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            (message,) = await until(lambda: handler.messages)
            peer.abort()
            await nsqd.told("IDENTIFY", "SUB t ch", "RDY 10")
            assert message.is_answered
            message.touch()
            handler.go()
            again = await nsqd.peer(2)
            again.send_message("m3")
            await nsqd.told(f"FIN {M3}")
            assert [one.id for one in handler.messages] == [M1.encode(), M3.encode()], "m2 is not begun"

    run(main())


def test_unreachable_brokers_are_tried_again_and_again() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            nsqd.refuse()
            config = Config(reconnect_delay=0.01)
            async with Consumer("t", "ch", ignore, nsqd=[nsqd.address], config=config) as consumer:
                await asyncio.sleep(0.1)
                assert consumer.connections == []
                await nsqd.listen()
                await nsqd.told("IDENTIFY", "SUB t ch", "RDY 8")

    run(main(), timeless=True)


@pytest.mark.parametrize(
    "reply",
    [
        b'{"a":' + b"[" * 100_000,
        b'{"msg_timeout": 1%s}' % (b"0" * 400),
        b'{"deflate": true, "deflate_level": 99}',
    ],
    ids=["nested", "msg_timeout", "deflate_level"],
)
def test_a_broker_that_answers_oddly_once_is_tried_again(reply: bytes) -> None:
    async def main() -> None:
        async with ScriptedNsqd(reply) as nsqd:
            config = Config(**CALM, deflate=True, handshake_timeout=1)
            async with Consumer("t", "ch", ignore, nsqd=[nsqd.address], config=config) as consumer:
                (await nsqd.peer()).close()
                nsqd.identify = {}
                await nsqd.peer(2)
                await until(lambda: consumer.connections)

    run(main())


def test_a_broker_that_refuses_the_subscription_is_asked_less_and_less_often() -> None:
    async def main() -> None:
        async with ScriptedNsqd(sub="E_UNAUTHORIZED AUTH failed") as nsqd:
            nsqd_sub = nsqd.sub

            def refuse(line: str) -> str:
                asyncio.get_running_loop().call_soon(nsqd.peers[-1].close)
                return str(nsqd_sub)

            nsqd.sub = refuse
            config = Config(reconnect_delay=0.01, max_reconnect_delay=15)
            async with Consumer("t", "ch", ignore, nsqd=[nsqd.address], config=config):
                await asyncio.sleep(0.6)
                assert 3 <= len(nsqd.peers) <= 8

    run(main(), timeless=True)


def test_connecting_by_hand() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd, Consumer("t", "ch", ignore, config=Config(**CALM)) as consumer:
            await consumer.connect(nsqd.address)
            assert consumer.connections == [nsqd.address]
            with pytest.raises(ClientError, match="already connected"):
                await consumer.connect(nsqd.address)
            await nsqd.told("IDENTIFY", "SUB t ch", "RDY 8")
            nsqd.peers[0].abort()
            await nsqd.told("IDENTIFY", "SUB t ch", "RDY 8")
            with pytest.raises(ClientError, match="not connected"):
                await consumer.disconnect("127.0.0.1:1")
            await consumer.disconnect(nsqd.address)
            await nsqd.told("CLS")
            await until(lambda: not consumer.connections)
            with pytest.raises(ClientError, match="not connected"):
                await consumer.disconnect(nsqd.address)
            await asyncio.sleep(0.1)
            assert len(nsqd.peers) == 2, "it is forgotten"
            await consumer.connect(nsqd.address)

    run(main(), timeless=True)


def test_a_failed_connect_by_hand_is_not_tried_again() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd, Consumer("t", "ch", ignore, config=Config(**CALM)) as consumer:
            nsqd.refuse()
            with pytest.raises(ConnectFailed):
                await consumer.connect(nsqd.address)
            await nsqd.listen()
            await asyncio.sleep(0.1)
            assert nsqd.peers == []
            with pytest.raises(ValueError):
                await consumer.connect("localhost")

    run(main(), timeless=True)


def test_connecting_by_hand_needs_a_consumer_that_runs() -> None:
    async def main() -> None:
        consumer = Consumer("t", "ch", ignore)
        with pytest.raises(RuntimeError, match="not started"):
            await consumer.connect("127.0.0.1:1")
        await consumer.stop()
        with pytest.raises(Stopped):
            await consumer.connect("127.0.0.1:1")

    run(main())


def test_a_connect_that_is_cancelled_is_forgotten() -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as nsqd, Consumer("t", "ch", ignore) as consumer:
            connecting = asyncio.create_task(consumer.connect(nsqd.address))
            await nsqd.peer()
            with pytest.raises(ClientError, match="already connected"):
                await consumer.connect(nsqd.address)
            connecting.cancel()
            await asyncio.wait({connecting})
            await until(lambda: nsqd.peers[0].is_ended)
            with pytest.raises(ClientError, match="not connected"):
                await consumer.disconnect(nsqd.address)

    run(main())


def test_stop_ends_a_connect() -> None:
    async def main() -> None:
        async with ScriptedNsqd(lambda _: None) as nsqd, Consumer("t", "ch", ignore) as consumer:
            connecting = asyncio.create_task(consumer.connect(nsqd.address))
            await nsqd.peer()
            await consumer.stop()
            with pytest.raises(Stopped):
                await connecting
            await until(lambda: nsqd.peers[0].is_ended)

    run(main())


def test_disconnecting_waits_for_what_is_in_flight() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await until(lambda: handler.messages)
            await consumer.disconnect(nsqd.address)
            await nsqd.told("CLS")
            # Sent before the server got RDY 0; they are handled all the same.
            peer.send_message("m2")
            await asyncio.sleep(0.02)
            assert not peer.is_ended
            handler.go()
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")
            await until(lambda: peer.is_ended)

    run(main())


def test_what_a_disconnected_broker_had_is_given_to_the_others() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as one, ScriptedNsqd() as other:
            config = Config(rdy_redistribute_interval=0.05, **CALM)
            async with Consumer(
                "t", "ch", ignore, nsqd=[one.address, other.address], max_in_flight=10, config=config
            ) as consumer:
                await until(lambda: "RDY 5" in one.commands and "RDY 5" in other.commands)
                await consumer.disconnect(one.address)
                await until(lambda: other.commands[-1] == "RDY 10")

    run(main())


def test_late_answers_are_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with consuming(ignore) as (_, nsqd, peer):
            peer.send_error(f"E_FIN_FAILED FIN {M1} failed ID not in flight")
            peer.send_message("m2")
            await nsqd.told(f"FIN {M2}")

    run(main())
    assert "E_FIN_FAILED" in caplog.text


# Flow


def test_max_in_flight_can_be_changed_and_zero_pauses() -> None:
    async def main() -> None:
        async with consuming(ignore) as (consumer, nsqd, _):
            consumer.change_max_in_flight(0)
            consumer.change_max_in_flight(4)
            await nsqd.told("RDY 0", "RDY 4")
            assert consumer.max_in_flight == 4
            with pytest.raises(ValueError):
                consumer.change_max_in_flight(-1)

    run(main())


def test_max_in_flight_can_be_changed_before_the_start() -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            consumer = Consumer("t", "ch", ignore, nsqd=[nsqd.address])
            consumer.change_max_in_flight(3)
            async with consumer:
                await nsqd.told("IDENTIFY", "SUB t ch", "RDY 3")

    run(main())


def test_a_server_s_limit_is_kept() -> None:
    async def main() -> None:
        async with ScriptedNsqd({"max_rdy_count": 4}) as nsqd:
            async with Consumer("t", "ch", ignore, nsqd=[nsqd.address], max_in_flight=100):
                await nsqd.told("IDENTIFY", "SUB t ch", "RDY 4")

    run(main())


def test_starved_means_nearly_all_messages_are_in_flight() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler, max_in_flight=2) as (consumer, _, peer):
            assert not consumer.is_starved
            peer.send_message("m1")
            await until(lambda: consumer.is_starved)
            handler.go()
            await until(lambda: not consumer.is_starved)

    run(main())


def test_a_failing_handler_backs_off_and_recovers() -> None:
    async def main() -> None:
        fails = True

        async def handle(message: Message) -> None:
            if fails:
                raise ValueError

        config = {"max_backoff_duration": 1.0, "backoff_multiplier": 0.02}
        async with consuming(handle, config=config) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await nsqd.told("RDY 0", f"REQ {M1} 90000", "RDY 1")
            assert consumer.is_in_backoff
            fails = False
            peer.send_message("m2")
            await nsqd.told("RDY 10", f"FIN {M2}")
            assert not consumer.is_in_backoff

    run(main())


def test_a_backoff_without_pauses_continues_at_once() -> None:
    async def main() -> None:
        async def fail(message: Message) -> None:
            if message.attempts < 5:
                raise ValueError

        config = {"max_backoff_duration": 1.0, "backoff_multiplier": 0.0, "default_requeue_delay": 0.0}
        async with consuming(fail, config=config, concurrency=3) as (consumer, nsqd, peer):
            for attempts in range(1, 6):
                for name in ("m1", "m2", "m3"):
                    peer.send_message(name, attempts=attempts)
                answered = 3 * attempts
                await until(lambda answered=answered: consumer.messages_received == answered)
                await until(
                    lambda answered=answered: (
                        consumer.messages_requeued + consumer.messages_finished == answered
                    )
                )
            assert (consumer.messages_requeued, consumer.messages_finished) == (12, 3)
            await until(lambda: nsqd.commands[-1].startswith(("RDY 1", "FIN")))

    run(main())


def test_a_worker_that_fails_is_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.client.consume.workers.RESTART_S", 0.01)
    is_broken = False

    def clock() -> float:
        if is_broken:
            raise ZeroDivisionError
        return time.monotonic()

    monkeypatch.setattr("nsparq.client.consume.workers.monotonic", clock)

    async def main() -> None:
        nonlocal is_broken
        async with consuming(ignore) as (_, nsqd, peer):
            is_broken = True
            peer.send_message("m1")
            await until(lambda: "ZeroDivisionError" in caplog.text)
            is_broken = False
            peer.send_message("m2")
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")

    run(main())


# The end


def test_stop_finishes_what_is_in_flight() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (consumer, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            await until(lambda: consumer.messages_received == 2)
            stopping = asyncio.create_task(consumer.stop())
            await nsqd.told("CLS")
            await asyncio.sleep(0.02)
            assert not stopping.done()
            handler.go()
            await stopping
            await nsqd.told(f"FIN {M1}", f"FIN {M2}")
            await until(lambda: peer.is_ended)
            assert consumer.connections == []

    run(main())


def test_messages_sent_before_the_server_got_cls_are_handled() -> None:
    async def main() -> None:
        nsqd = ScriptedNsqd(cls=None)
        async with consuming(ignore, nsqd=nsqd) as (consumer, _, peer):
            stopping = asyncio.create_task(consumer.stop())
            await nsqd.told("CLS")
            peer.send_message("m1")
            peer.send_response(b"CLOSE_WAIT")
            await stopping
            await nsqd.told(f"FIN {M1}")

    run(main())


def test_in_a_loop_messages_sent_before_the_server_got_cls_are_requeued() -> None:
    async def main() -> None:
        nsqd = ScriptedNsqd(cls=None)
        async with consuming(nsqd=nsqd) as (consumer, _, peer):
            stopping = asyncio.create_task(consumer.stop())
            await nsqd.told("CLS")
            peer.send_message("m1")
            peer.send_response(b"CLOSE_WAIT")
            await stopping
            await nsqd.told(f"REQ {M1} 0")

    run(main())


def test_a_server_that_does_not_confirm_is_not_waited_for_long() -> None:
    async def main() -> None:
        async with consuming(ignore, nsqd=ScriptedNsqd(cls=None)) as (consumer, _, _):
            began = asyncio.get_running_loop().time()
            await consumer.stop()
            assert asyncio.get_running_loop().time() - began < CLOSE_WAIT_S + 2

    run(main())


def test_messages_are_touched_while_stop_waits_for_them() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler, nsqd=ScriptedNsqd({"msg_timeout": 150})) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await until(lambda: handler.messages)
            stopping = asyncio.create_task(consumer.stop())
            await until(lambda: nsqd.commands.count(f"TOUCH {M1}") >= 4)
            handler.go()
            await stopping
            assert nsqd.commands[-1] == f"FIN {M1}"

    run(main())


def test_messages_beyond_the_grace_are_left_to_the_server() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (consumer, nsqd, peer):
            peer.send_message("m1")
            peer.send_message("m2")
            await until(lambda: handler.messages)
            await consumer.stop(0.1)
            assert [message.id for message in handler.cancelled] == [M1.encode()]
            assert nsqd.commands[3:] == ["CLS"], "neither is finished"

    run(main())


def test_a_thread_that_takes_longer_than_the_grace_is_left_behind() -> None:
    async def main() -> None:
        release, begun = threading.Event(), threading.Event()

        def block(message: Message) -> None:
            begun.set()
            release.wait(DEADLINE)
            message.finish()

        async with consuming(block) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await until(begun.is_set)
            await consumer.stop(0.1)
            release.set()
            await asyncio.sleep(0.05)
            assert nsqd.commands[3:] == ["CLS"]

    run(main())


def test_a_handler_that_cannot_be_cancelled_does_not_block_stop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.client.consumer.CANCEL_S", 0.1)

    async def main() -> None:
        ended = False

        async def stubborn(message: Message) -> None:
            while not ended:
                try:
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    pass

        async with consuming(stubborn) as (consumer, _, peer):
            peer.send_message("m1")
            await until(lambda: consumer.messages_received)
            await asyncio.sleep(0.01)
            await consumer.stop(0)
            ended = True
            await asyncio.sleep(0.05)

    run(main())
    assert "handlers still run after they were cancelled" in caplog.text


def test_stop_from_a_handler_returns_at_once_and_its_message_is_finished() -> None:
    async def main() -> None:
        async def handle(message: Message) -> None:
            await consumer.stop()

        async with consuming(handle) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await consumer.wait_stopped()
            assert nsqd.commands[3:] == ["CLS", f"FIN {M1}"] or nsqd.commands[3:] == [f"FIN {M1}", "CLS"]

    run(main())


def test_stop_may_be_called_by_many_and_again() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await until(lambda: handler.messages)
            stops = [asyncio.create_task(consumer.stop()) for _ in range(3)]
            waiting = asyncio.create_task(consumer.wait_stopped())
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in [*stops, waiting])
            handler.go()
            await asyncio.gather(*stops, waiting)
            await consumer.stop()
            assert nsqd.commands.count("CLS") == 1
            with pytest.raises(Stopped):
                await consumer.start()

    run(main())


def test_a_second_stop_with_less_grace_holds() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await until(lambda: handler.messages)
            first = asyncio.create_task(consumer.stop())
            await nsqd.told("CLS")
            await consumer.stop(0.1)
            await first
            assert len(handler.cancelled) == 1

    run(main())


@any_loop
def test_a_cancelled_stop_leaves_nothing_open() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (consumer, _, peer):
            peer.send_message("m1")
            await until(lambda: handler.messages)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await consumer.stop()
            assert consumer.connections == []
            assert len(handler.cancelled) == 1
            await consumer.stop()
            await consumer.wait_stopped()

    run(main())


@pytest.mark.parametrize("is_handling", [False, True])
def test_stop_ends_if_the_event_loop_cancels_all_tasks(is_handling: bool) -> None:
    """As asyncio.run() does at its end: before the stop has begun, or while a handler ends."""
    ending, released = asyncio.Event(), asyncio.Event()

    async def slow_to_end(message: Message) -> None:
        try:
            await released.wait()
        except asyncio.CancelledError:
            ending.set()
            await released.wait()

    async def main() -> None:
        async with consuming(slow_to_end) as (consumer, _, peer):
            if is_handling:
                peer.send_message("m1")
                await until(lambda: consumer.messages_received)
            stopping = asyncio.create_task(consumer.stop(0))
            await (ending.wait() if is_handling else asyncio.sleep(0))
            ours = ("Consumer", "Discovery", "Workers")
            for task in asyncio.all_tasks():
                if any(name in repr(task.get_coro()) for name in ours):
                    task.cancel()
            try:
                await until(stopping.done, within=1.0)
            finally:
                # Nothing else would end this test.
                consumer._stopped.set()
                released.set()

    run(main(), timeless=True)


def test_stop_without_connections_is_quick() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for nsqd in ([], ["127.0.0.1:1"]):
            for handler in (None, ignore):
                consumer = Consumer("t", "ch", handler, nsqd=nsqd)
                await consumer.start()
                await asyncio.sleep(0.01)
                began = loop.time()
                await consumer.stop()
                assert loop.time() - began < 0.1

    run(main(), timeless=True)


def test_stop_before_start_is_final() -> None:
    async def main() -> None:
        consumer = Consumer("t", "ch", ignore)
        await consumer.stop()
        await consumer.wait_stopped()
        with pytest.raises(Stopped):
            await consumer.start()

    run(main())


def test_start_can_be_called_once() -> None:
    async def main() -> None:
        async with Consumer("t", "ch", ignore) as consumer:
            with pytest.raises(RuntimeError, match="already started"):
                await consumer.start()

    run(main())


@any_loop
def test_stop_while_the_server_goes_away_does_not_hang() -> None:
    async def main() -> None:
        handler = Handler()
        async with consuming(handler) as (consumer, nsqd, peer):
            peer.send_message("m1")
            await until(lambda: handler.messages)
            stopping = asyncio.create_task(consumer.stop())
            await nsqd.told("CLS")
            peer.abort()
            await asyncio.sleep(0.02)
            handler.go()
            await stopping
            assert len(handler.done) == 1, "it may finish what it does, though nobody waits for it"

    run(main())


@any_loop
@pytest.mark.parametrize("turns", range(0, 40, 5))
def test_leaving_the_context_at_any_moment_leaves_nothing_open(turns: int) -> None:
    async def main() -> None:
        handler = Handler()
        async with ScriptedNsqd() as nsqd:

            async def use() -> None:
                async with Consumer("t", "ch", handler, nsqd=[nsqd.address], config=Config(**CALM)):
                    await asyncio.Event().wait()

            task = asyncio.create_task(use())
            for turn in range(turns):
                await asyncio.sleep(0)
                if turn > 10 and nsqd.peers:
                    nsqd.peers[0].send_message(f"m{turn}")
            handler.go()
            task.cancel()
            await asyncio.wait({task})
            await until(lambda: all(peer.is_ended for peer in nsqd.peers))

    run(main())
