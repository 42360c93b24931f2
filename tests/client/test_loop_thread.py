from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nsparq.client import loop_thread
from nsparq.client.loop_thread import LoopThread, NotRunning
from tests.support import wait_until
from tests.support.polling import DEADLINE


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    wait_until(lambda: not any(thread.name == "test-loop" for thread in threading.enumerate()))


class Resource:
    """Records its events."""

    def __init__(self, opening: Exception | None = None, closing: Exception | None = None) -> None:
        self.opening, self.closing = opening, closing
        self.history: list[str] = []
        self.thread = threading.main_thread()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Resource]:
        self.thread = threading.current_thread()
        if self.opening:
            raise self.opening
        self.history.append("opened")
        try:
            yield self
        finally:
            self.history.append("closed")
            if self.closing:
                raise self.closing


def start(resource: Resource) -> LoopThread[Resource]:
    return LoopThread(resource, name="test-loop")


def test_the_resource_is_open_until_stop() -> None:
    resource = Resource()
    thread = start(resource)
    assert thread.resource is resource
    assert resource.history == ["opened"]
    assert resource.thread.name == "test-loop" and resource.thread.daemon
    thread.stop()
    assert resource.history == ["opened", "closed"]
    assert not thread.is_running
    thread.stop()


def test_an_error_of_opening_is_raised() -> None:
    with pytest.raises(ValueError, match="no"):
        start(Resource(opening=ValueError("no")))


def test_an_error_of_closing_is_raised_once() -> None:
    thread = start(Resource(closing=ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        thread.stop()
    thread.stop()


def test_functions_and_coroutines_are_called_on_the_loop() -> None:
    thread = start(Resource())

    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    assert thread.call(double, 4) == 8
    assert thread.call(threading.current_thread).name == "test-loop"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)
    thread.stop()
    with pytest.raises(RuntimeError, match="test-loop has been stopped"):
        thread.call(double, 4)


def test_a_call_that_takes_too_long_is_cancelled() -> None:
    thread = start(Resource())
    ends = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        thread.call(wait, timeout=0.02)
    wait_until(lambda: ends == ["cancelled"])
    thread.stop()


def test_a_call_from_the_loop_itself_is_refused() -> None:
    thread = start(Resource())
    with pytest.raises(RuntimeError, match="called from the thread"):
        thread.call(lambda: thread.call(lambda: None))
    thread.stop()


def test_a_call_that_comes_too_late_for_the_loop_does_not_wait_for_it() -> None:
    """The loop takes it, and closes before it runs."""
    failures: list[BaseException] = []

    def call() -> None:
        try:
            thread.call(asyncio.sleep, 0, timeout=DEADLINE)
        except BaseException as error:
            failures.append(error)

    caller = threading.Thread(target=call)

    def run_and_close_late(main: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main)
        caller.start()
        wait_until(lambda: loop._ready)  # type: ignore[attr-defined]  # what has been scheduled
        loop.close()

    thread = LoopThread(Resource(), name="test-loop", run=run_and_close_late)
    thread.stop()
    caller.join()
    assert [type(one) for one in failures] == [NotRunning]


def test_a_post_after_the_end_does_nothing() -> None:
    thread = start(Resource())
    posted = []
    thread.post(posted.append, 1)
    wait_until(lambda: posted == [1])
    thread.stop()
    thread.post(posted.append, 2)
    assert posted == [1]


def test_stop_from_its_own_thread_does_not_wait_for_itself() -> None:
    resource = Resource()
    thread = start(resource)
    thread.post(thread.stop)
    wait_until(lambda: not thread.is_running)
    assert resource.history == ["opened", "closed"]


def test_stop_waits_no_longer_than_its_timeout() -> None:
    release = asyncio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        yield
        await release.wait()

    thread = LoopThread(slow, name="test-loop")
    with pytest.raises(TimeoutError, match="test-loop did not stop within 0.02 s"):
        thread.stop(0.02)
    thread.post(release.set)
    thread.stop()


def test_an_interrupt_while_opening_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "START_S", 0.02)
    ends = []

    @asynccontextmanager
    async def never() -> AsyncIterator[None]:
        try:
            await asyncio.sleep(3600)
            yield
        finally:
            ends.append("ended")

    with pytest.raises(TimeoutError):
        LoopThread(never, name="test-loop")
    assert ends == ["ended"]


def test_errors_of_the_loop_are_reported() -> None:
    errors: list[dict[str, object]] = []
    thread = LoopThread(Resource(), name="test-loop", on_loop_error=errors.append)
    thread.post(lambda: 1 / 0)
    wait_until(lambda: errors)
    assert isinstance(errors[0]["exception"], ZeroDivisionError)
    thread.stop()
