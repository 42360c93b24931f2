"""Drive pynsq (Tornado) through the scenario: python drive_pynsq.py HOST PORT TOPIC."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import nsq
import nsq.reader
import scenario
import tornado.ioloop

# pynsq waits a fixed 15 s before it connects again, and refuses to within 10 s of the last attempt.
# A clock that runs ten times as fast for it leaves its logic alone and saves the test that wait.
SPEED = 10
nsq.reader.time = SimpleNamespace(time=lambda: time.time() * SPEED)
_call_later = tornado.ioloop.IOLoop.call_later


def fast_call_later(
    self: Any, delay: float, callback: Callable[..., Any], *args: Any, **kwargs: Any
) -> object:
    return _call_later(self, delay / SPEED, callback, *args, **kwargs)


async def publish(writer: nsq.Writer, command: str, *args: object) -> bool:
    """Whether the broker said OK."""
    answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def callback(connection: object, data: object) -> None:
        if not answered.done():
            answered.set_result(data == b"OK")

    getattr(writer, command)(*args, callback=callback)
    return await answered


async def publish_until_acknowledged(writer: nsq.Writer, command: str, *args: object) -> None:
    """Wait until pynsq is connected or reconnected."""
    while not await publish(writer, command, *args):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def touch_and_finish(run: scenario.Scenario, message: nsq.Message) -> None:
    await asyncio.sleep(scenario.TOUCH_AFTER)
    message.touch()
    await asyncio.sleep(scenario.FINISH_TOUCHED_AFTER - scenario.TOUCH_AFTER)
    message.finish()
    run.finish(message.body)


async def main() -> None:
    run = scenario.Scenario()
    tasks: set[asyncio.Task[None]] = set()

    def handle(message: nsq.Message) -> None:
        message.enable_async()
        match run.action(message.body, message.attempts):
            case "finish":
                message.finish()
                run.finish(message.body)
            case "requeue":
                message.requeue(backoff=False, delay=0)
            case "touch":
                tasks.add(asyncio.create_task(touch_and_finish(run, message)))

    tornado.ioloop.IOLoop.call_later = fast_call_later
    writer = nsq.Writer([run.address])
    await publish_until_acknowledged(writer, "pub", run.topic, scenario.SINGLE.encode())
    run.published("PUB", [scenario.SINGLE])
    await publish_until_acknowledged(writer, "mpub", run.topic, [body.encode() for body in scenario.MULTI])
    run.published("MPUB", scenario.MULTI)
    await publish_until_acknowledged(writer, "dpub", run.topic, scenario.DEFER_MS, scenario.DEFERRED.encode())
    run.published("DPUB", [scenario.DEFERRED])

    reader = nsq.Reader(
        run.topic,
        scenario.CHANNEL,
        message_handler=handle,
        nsqd_tcp_addresses=[run.address],
        max_in_flight=scenario.MAX_IN_FLIGHT,
    )
    await scenario.until(lambda: run.worked)
    run.report("worked")

    await publish_until_acknowledged(writer, "mpub", run.topic, [body.encode() for body in scenario.KEPT])
    run.published("MPUB", scenario.KEPT)
    await scenario.until(run.restarted.is_set)
    await publish_until_acknowledged(writer, "pub", run.topic, scenario.AFTER.encode())
    run.published("PUB", [scenario.AFTER])
    await scenario.until(lambda: run.recovered)
    await asyncio.sleep(0.2)
    reader.close()
    run.report("done")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
