"""Drive pynsq (Tornado) over TLS, compression and AUTH: see secure_scenario.py."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

import nsq
import secure_scenario as scenario
from nsq.deflate_socket import DeflateSocket
from nsq.snappy_socket import SnappySocket


def receive(self: DeflateSocket | SnappySocket, size: int, read: Callable[[int], bytes]) -> bytes:
    """Replaces pynsq's, which fails on a chunk that arrives in parts: Tornado does not know its
    "would block" error."""
    data, self._bootstrapped = self._bootstrapped, None
    while not data and (chunk := read(size)):
        data = self._decompressor.decompress(chunk)
    return data or b""


DeflateSocket._recv = SnappySocket._recv = receive


async def publish(writer: nsq.Writer, command: str, *args: object) -> None:
    """Wait until pynsq is connected and the broker has answered OK."""
    while True:
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def callback(connection: object, data: object, answered: asyncio.Future[bool] = answered) -> None:
            if not answered.done():
                answered.set_result(data == b"OK")

        getattr(writer, command)(*args, callback=callback)
        if await answered:
            return
        await asyncio.sleep(0.02)


async def use(host: str, connections: scenario.Connections) -> None:
    run = scenario.Run(connections)
    address, options = f"{host}:{connections.port}", connections.options()

    def handle(message: nsq.Message) -> bool:
        run.finished(message.body)
        return True

    writer = nsq.Writer([address], **options)
    nsq.Reader(
        connections.topic,
        scenario.CHANNEL,
        message_handler=handle,
        nsqd_tcp_addresses=[address],
        max_in_flight=scenario.MAX_IN_FLIGHT,
        **options,
    )
    for body in (scenario.SINGLE, scenario.LARGE_TEXT, scenario.LARGE_NOISE):
        await publish(writer, "pub", connections.topic, body)
        run.published([body])
    await publish(writer, "mpub", connections.topic, scenario.SEVERAL)
    run.published(scenario.SEVERAL)
    while not run.is_done:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    run.report("done")


async def main() -> None:
    host, kinds = scenario.host_and_connections()
    await asyncio.gather(*(use(host, connections) for connections in kinds))
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
