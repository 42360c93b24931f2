"""The broker for taskiq: its receiver and its command line with a real nsqd."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from taskiq import Context, InMemoryBroker, TaskiqDepends, TaskiqMessage, TaskiqMiddleware, TaskiqResult
from taskiq.exceptions import SendTaskError
from taskiq.receiver import Receiver
from taskiq.result_backends.dummy import DummyResultBackend

from nsparq.client import Config
from nsparq.integrations.taskiq import NsqBroker, RequeueMiddleware
from nsparq.testing import Broker, run_broker
from tests.support import unique_name, wait_until
from tests.support.aio import run, until
from tests.support.polling import DEADLINE
from tests.support.scripted_nsqd import ScriptedNsqd

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/taskiq/tasks.py"


@pytest.fixture(scope="module")
def nsqd() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


class Results(DummyResultBackend[Any]):
    """Keeps what a result backend would get."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, bool]] = []

    async def set_result(self, task_id: str, result: TaskiqResult[Any]) -> None:
        self.kept.append((result.return_value, result.is_err))


def make(nsqd: Broker, *middlewares: TaskiqMiddleware, **options: Any) -> NsqBroker:
    broker = NsqBroker(nsqd.tcp_address, topic=unique_name("tasks"), **options)
    return broker.with_middlewares(*middlewares).with_result_backend(Results())


@asynccontextmanager
async def working(broker: NsqBroker, at_a_time: int = 10) -> AsyncIterator[None]:
    """A worker, as `taskiq worker` runs it in each of its processes."""
    broker.is_worker_process = True
    stop = asyncio.Event()
    await broker.startup()
    receiver = Receiver(broker, max_async_tasks=at_a_time, run_startup=False)
    listening = asyncio.create_task(receiver.listen(stop))
    try:
        yield
    finally:
        stop.set()
        await listening
        await broker.shutdown()


def counts(nsqd: Broker, broker: NsqBroker) -> dict[str, int]:
    stats = nsqd.channel_stats(broker.topic, broker.channel) or {}
    names = ("depth", "in_flight_count", "deferred_count", "requeue_count", "message_count")
    return {name.removesuffix("_count"): stats[name] for name in names if stats.get(name)}


def test_a_task_is_finished_after_it_has_run(nsqd: Broker) -> None:
    async def main() -> None:
        broker = make(nsqd)
        begun, go = asyncio.Event(), asyncio.Event()

        @broker.task
        async def slow(number: int) -> int:
            begun.set()
            await go.wait()
            return number * 2

        @broker.task
        def plain(text: str) -> str:
            return text.upper()

        async with working(broker):
            await slow.kiq(21)
            await begun.wait()
            assert counts(nsqd, broker) == {"in_flight": 1, "message": 1}
            go.set()
            await plain.kiq("hello")
            await nsqd.wait_empty_async(broker.topic, broker.channel, DEADLINE)
        assert counts(nsqd, broker) == {"message": 2}
        assert sorted(map(str, broker.result_backend.kept)) == ["('HELLO', False)", "(42, False)"]  # type: ignore[attr-defined]

    run(main())


def test_a_failed_task_is_requeued_until_it_has_failed_for_the_last_time(nsqd: Broker) -> None:
    async def main() -> None:
        broker = make(nsqd, RequeueMiddleware(default_retry_count=2, delay=0), dead_letter="failed")
        runs: list[str] = []

        @broker.task
        async def unlucky_once() -> str:
            runs.append("once")
            if runs.count("once") == 1:
                raise OSError("busy")
            return "done"

        @broker.task
        async def hopeless() -> None:
            runs.append("hopeless")
            raise OSError("gone")

        @broker.task(retry_on_error=False)
        async def careless() -> None:
            runs.append("careless")
            raise OSError("never mind")

        @broker.task(ack_type="when_received")
        async def early() -> None:
            runs.append("early")
            raise OSError("too late")

        @broker.task(max_retries=9)
        async def rejected(context: Context = TaskiqDepends()) -> None:  # noqa: B008  # how taskiq does it
            runs.append("rejected")
            context.reject()

        async with working(broker):
            for task in (unlucky_once, hopeless, careless, early, rejected):
                await task.kiq()
            await until(lambda: len(broker.result_backend.kept) == 5)  # type: ignore[attr-defined]
            await nsqd.wait_empty_async(broker.topic, broker.channel, DEADLINE)
        assert sorted(runs) == ["careless", "early", "hopeless", "hopeless", "once", "once", "rejected"]
        # There is a result for the last run only.
        kept = broker.result_backend.kept  # type: ignore[attr-defined]
        assert sorted(kept, key=str) == [("done", False), *[(None, True)] * 4]
        assert counts(nsqd, broker) == {"message": 5, "requeue": 2}
        letters = [json.loads(message.body)["task_name"] for message in nsqd.peek("failed")]
        assert sorted(letters) == [f"{__name__}:hopeless", f"{__name__}:rejected"]

    run(main())


def test_a_delay_is_a_deferred_publish(nsqd: Broker) -> None:
    async def main() -> None:
        broker = make(nsqd)
        ran = asyncio.Event()

        @broker.task
        async def later() -> None:
            ran.set()

        async with working(broker):
            await later.kicker().with_labels(delay=1800).kiq()
            await until(lambda: counts(nsqd, broker) == {"deferred": 1, "message": 1})
            await later.kicker().with_labels(delay=0.05).kiq()
            await ran.wait()
            for bad in ("soon", -1):
                with pytest.raises(SendTaskError) as caught:
                    await later.kicker().with_labels(delay=bad).kiq()
                assert f"the label delay='{bad}' is not in seconds" in str(caught.value.__cause__)

    run(main())


def test_what_this_worker_cannot_run_is_not_lost(nsqd: Broker) -> None:
    async def main() -> None:
        broker = make(nsqd, dead_letter="unreadable")

        @broker.task
        async def known() -> None: ...

        newer = NsqBroker(nsqd.tcp_address, topic=broker.topic)

        @newer.task(task_name="not_deployed_here")
        async def unknown() -> None: ...

        async with working(broker):
            nsqd.publish(broker.topic, b"not a task")
            await newer.startup()
            await unknown.kiq()
            await newer.shutdown()
            # taskiq by itself would finish both.
            await until(lambda: counts(nsqd, broker) == {"deferred": 1, "message": 2, "requeue": 1})
            await until(lambda: [message.body for message in nsqd.peek("unreadable")] == [b"not a task"])

    run(main())


def test_a_task_without_acknowledgement_is_requeued(nsqd: Broker) -> None:
    """A middleware that fails ends a task's processing before taskiq acknowledges it."""

    class Broken(TaskiqMiddleware):
        def post_execute(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
            if message.task_name == "unfortunate":
                raise RuntimeError("broken middleware")

    async def main() -> None:
        broker = make(nsqd, Broken())
        runs: list[str] = []

        @broker.task(task_name="unfortunate")
        async def unfortunate() -> None:
            runs.append("unfortunate")

        @broker.task(ack_type="manual")
        async def forgetful() -> None:
            runs.append("forgetful")

        @broker.task(ack_type="manual")
        async def careful(context: Context = TaskiqDepends()) -> None:  # noqa: B008
            await context.ack()

        # taskiq never looks at the exception of the middleware.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with working(broker):
            for task in (unfortunate, forgetful, careful):
                await task.kiq()
            await until(lambda: counts(nsqd, broker) == {"deferred": 2, "message": 3, "requeue": 2})
        assert sorted(runs) == ["forgetful", "unfortunate"]

    run(main())


def test_a_worker_that_stops_finishes_running_tasks_and_gives_back_the_others(nsqd: Broker) -> None:
    async def main() -> None:
        broker = make(nsqd)
        begun, go = asyncio.Event(), asyncio.Event()

        @broker.task
        async def slow(number: int) -> None:
            begun.set()
            await go.wait()

        await broker.startup()
        for number in range(5):
            await slow.kiq(number)
        async with working(broker, at_a_time=1):
            await begun.wait()
            await until(lambda: counts(nsqd, broker) == {"in_flight": 5, "message": 5})
            asyncio.get_running_loop().call_later(0.05, go.set)
        left = counts(nsqd, broker)
        assert (left.get("depth"), left.get("in_flight")) == (4, None)
        assert broker.result_backend.kept == [(None, False)]  # type: ignore[attr-defined]

    run(main())


def test_a_long_task_is_touched() -> None:
    async def main() -> None:
        async with ScriptedNsqd(identify={"msg_timeout": 30}) as nsqd:
            broker = NsqBroker(nsqd.address, topic="tasks", config=Config(reconnect_delay=0.01))
            touched = asyncio.Event()

            @broker.task(task_name="long")
            async def long() -> None:
                await touched.wait()

            body = broker.formatter.dumps(
                TaskiqMessage(task_id="1", task_name="long", labels={}, args=[], kwargs={})
            ).message
            async with working(broker):
                peer = await nsqd.peer()
                await until(lambda: "RDY 100" in nsqd.commands)
                peer.send_message("m1", body)
                await until(lambda: sum("TOUCH" in command for command in nsqd.commands) > 3)
                touched.set()
                await until(lambda: any("FIN" in command for command in nsqd.commands))

    run(main())


def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="invalid topic name 'a b'"):
        NsqBroker("127.0.0.1:4150", topic="a b")
    with pytest.raises(ValueError, match="needs the address of an nsqd or of an nsqlookupd"):
        NsqBroker()
    with pytest.raises(TypeError, match="needs an NsqBroker, not InMemoryBroker"):
        InMemoryBroker().add_middlewares(RequeueMiddleware())

    async def unstarted() -> None:
        broker = NsqBroker("127.0.0.1:4150")

        @broker.task
        async def task() -> None: ...

        with pytest.raises(SendTaskError) as caught:
            await task.kiq()
        assert "await broker.startup()" in str(caught.value.__cause__)

    run(unstarted())


def test_the_page_shows_the_example() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```\n" in (ROOT / "docs/how-to/taskiq.md").read_text()


def test_two_worker_processes_of_the_example_lose_nothing_when_one_is_killed(
    nsqd: Broker, tmp_path: Path
) -> None:
    text = EXAMPLE.read_text().replace("127.0.0.1:4150", nsqd.tcp_address)
    # So slow that the killed worker has tasks in flight.
    slow = text.replace('print(f"welcome', 'await asyncio.sleep(0.02)\n    print(f"welcome')
    slow = slow.replace('await welcome.kiq("Ada")', "for n in range(200): await welcome.kiq(str(n))")
    (tmp_path / "tasks.py").write_text(slow)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    sender = [sys.executable, "tasks.py"]
    subprocess.run(sender, cwd=tmp_path, check=True, timeout=DEADLINE, env=environment)
    command = [sys.executable, "-m", "taskiq", "worker", "tasks:broker", "-w", "2", "--max-async-tasks", "2"]
    output = tmp_path / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=file, env=environment) as workers,
    ):
        try:
            children = Path(f"/proc/{workers.pid}/task/{workers.pid}/children")
            wait_until(lambda: output.read_text().count("welcome, ") > 10, what=output.read_text)
            assert (nsqd.channel_stats("tasks", "workers") or {})["in_flight_count"] > 4
            os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
            nsqd.wait_empty("tasks", "workers", DEADLINE)
        finally:
            workers.send_signal(signal.SIGTERM)
            status = workers.wait(DEADLINE)
    said = output.read_text()
    assert status == 0, said
    # Lines of two processes may begin in the middle of one another.
    assert {*re.findall(r"welcome, (\d+)", said)} == {str(number) for number in range(200)}
    assert "come back, Ada" in said
