"""The end of tasks."""

from __future__ import annotations

import asyncio

from nsparq.tasks import cancel_all


def test_all_have_ended_whatever_they_raise() -> None:
    async def main() -> list[str]:
        ended = []

        async def work(name: str, error: Exception | None) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append(name)
                if error is not None:
                    raise error

        tasks = {asyncio.create_task(work("a", None)), asyncio.create_task(work("b", ValueError()))}
        for task in tasks:
            # As most owners keep them: the set changes while they end.
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0)
        await cancel_all(tasks)
        assert not tasks
        await cancel_all([])
        return sorted(ended)

    assert asyncio.run(main()) == ["a", "b"]
