"""Drive ansq (asyncio) through the scenario: python drive_ansq.py HOST PORT TOPIC."""

from __future__ import annotations

import asyncio

import ansq
import scenario
from ansq.tcp.types import ConnectionFeatures, ConnectionOptions, NSQMessage

OPTIONS = ConnectionOptions(features=ConnectionFeatures(msg_timeout=scenario.MSG_TIMEOUT_MS))


async def publish(writer: ansq.tcp.writer.Writer, command: str, *args: object) -> None:
    response = await getattr(writer, command)(*args)
    assert response.is_ok, response


async def connect_writer(run: scenario.Scenario) -> ansq.tcp.writer.Writer:
    """A new writer, as soon as the broker answers.

    ansq reconnects by itself too, but a command that it sends before it has noticed the loss keeps
    waiting at the head of its queue, and takes the answer to the IDENTIFY of the next connection
    for its own.
    """
    while True:
        try:
            return await ansq.create_writer([run.address], connection_options=OPTIONS)
        except ConnectionError:
            await asyncio.sleep(0.05)


async def touch_and_finish(run: scenario.Scenario, message: NSQMessage) -> None:
    await asyncio.sleep(scenario.TOUCH_AFTER)
    await message.touch()
    await asyncio.sleep(scenario.FINISH_TOUCHED_AFTER - scenario.TOUCH_AFTER)
    await message.fin()
    run.finish(message.body)


async def consume(run: scenario.Scenario, reader: ansq.tcp.reader.Reader) -> None:
    async with asyncio.TaskGroup() as tasks:
        async for message in reader.messages():
            match run.action(message.body, message.attempts):
                case "finish":
                    await message.fin()
                    run.finish(message.body)
                case "requeue":
                    await message.req(0)
                case "touch":
                    tasks.create_task(touch_and_finish(run, message))


async def main() -> None:
    run = scenario.Scenario()
    writer = await connect_writer(run)
    await publish(writer, "pub", run.topic, scenario.SINGLE)
    run.published("PUB", [scenario.SINGLE])
    await publish(writer, "mpub", run.topic, *scenario.MULTI)
    run.published("MPUB", scenario.MULTI)
    await publish(writer, "dpub", run.topic, scenario.DEFERRED, scenario.DEFER_MS)
    run.published("DPUB", [scenario.DEFERRED])

    reader = await ansq.create_reader(run.topic, scenario.CHANNEL, [run.address], connection_options=OPTIONS)
    # The reader requests one message at a time.
    await reader.connections[0].rdy(scenario.MAX_IN_FLIGHT)
    consumer = asyncio.create_task(consume(run, reader))
    await scenario.until(lambda: run.worked)
    run.report("worked")

    await publish(writer, "mpub", run.topic, *scenario.KEPT)
    run.published("MPUB", scenario.KEPT)
    await scenario.until(run.restarted.is_set)
    writer = await connect_writer(run)
    await publish(writer, "pub", run.topic, scenario.AFTER)
    run.published("PUB", [scenario.AFTER])
    await scenario.until(lambda: run.recovered)
    await asyncio.sleep(0.2)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    await reader.close()
    await writer.close()
    run.report("done")


if __name__ == "__main__":
    asyncio.run(main())
