"""The producers of dead letters."""

from __future__ import annotations

import asyncio

import pytest

from nsparq.client.config import Config
from nsparq.client.consume.dead_letters import DeadLetters
from tests.support.aio import run, until
from tests.support.scripted_nsqd import ScriptedNsqd


@pytest.mark.parametrize("turns", range(1, 5))
def test_a_stop_that_is_cancelled_closes_every_connection(turns: int) -> None:
    async def main() -> None:
        async with ScriptedNsqd(publish=None) as one, ScriptedNsqd(publish=None) as other:
            letters = DeadLetters(Config())
            tasks = [asyncio.create_task(letters.publish(nsqd.address, "t", b"x")) for nsqd in (one, other)]
            await until(lambda: all("PUB t" in nsqd.commands for nsqd in (one, other)))
            stopping = asyncio.create_task(letters.stop())
            for _ in range(turns):
                await asyncio.sleep(0)
            assert not stopping.done(), "it waits for the answers"
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            await until(lambda: one.peers[0].is_ended and other.peers[0].is_ended)
            await asyncio.wait(tasks)
            assert [type(task.exception()).__name__ for task in tasks] == ["NotConnected"] * 2

    run(main())
