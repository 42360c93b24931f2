"""An event loop in which time, network and threads are simulated, so that a seed decides
everything.

Whatever runs in it belongs to a process, or to the world outside. A process can be killed, which
leaves its tasks where they are, and paused.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from functools import partial
from threading import Event, Semaphore, Thread, current_thread
from typing import Any

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class Killed(BaseException):
    """The process has ended in the middle of something."""


class Process:
    """One run of a node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.paused_until = 0.0
        self.calls_left: int | None = None
        """Calls that change its disk before it is killed."""
        self.held: deque[Callable[[], object]] = deque()
        """What it has to do after a pause."""
        self.threads: list[SimThread] = []
        self.background = 0
        """Works in threads that have not ended."""
        self.transports: list[SimTransport] = []
        self.fds: set[int] = set()


class SimThread(Thread):
    """Runs only while the loop waits for it."""

    def __init__(self, work: Callable[[], None], context: Context) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._context = context
        self._go, self._back = Semaphore(0), Semaphore(0)
        self.waits_for: Event | None = None
        self.is_done = self.is_killed = False
        self.start()

    def run(self) -> None:
        self._go.acquire()
        try:
            self._context.run(self._work)
        except Killed:
            pass
        finally:
            self.is_done = True
            self._back.release()

    def resume(self) -> None:
        self._go.release()
        self._back.acquire()

    @property
    def can_go_on(self) -> bool:
        return self.waits_for is None or self.waits_for.is_set()

    def wait(self, event: Event) -> None:
        """Called by the thread itself."""
        self.waits_for = event
        while not event.is_set():
            self._back.release()
            self._go.acquire()
            if self.is_killed:
                raise Killed
        self.waits_for = None


class Network:
    """Who reaches whom, and how fast. Bytes that are on their way stay in order, and wait while
    their way is cut."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.cut: set[tuple[str, str]] = set()
        """Ways in one direction."""
        self.delay_s = 0.002

    def delay(self) -> float:
        return self.delay_s * (0.1 + self.chance.random())

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cut


class SimTransport(asyncio.Transport):
    """One end of a connection."""

    peer: SimTransport

    def __init__(self, loop: SimLoop, protocol: Any, process: Process) -> None:
        super().__init__({"peername": (process.name, 0)})
        self._loop, self._protocol, self._process = loop, protocol, process
        self._context = copy_context()
        self._context.run(PROCESS.set, process)
        self._sent: deque[bytes | None] = deque()
        """On its way to the peer; None is the end."""
        process.transports.append(self)
        self._is_sending = self._is_closing = self._is_lost = self._is_paused = False

    def begin(self) -> None:
        self._loop.call_soon(self._protocol.connection_made, self, context=self._context)

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._sent.append(bytes(data))
            self._send()
            if not self._is_paused and self.get_write_buffer_size() > 256 << 10:
                self._is_paused = True
                self._protocol.pause_writing()

    def _send(self) -> None:
        if self._sent and not self._is_sending:
            self._is_sending = True
            # Bytes on their way do not belong to the process any more.
            self._loop.call_later(self._loop.network.delay(), self._arrive, context=Context())

    def _arrive(self) -> None:
        self._is_sending = False
        if self._loop.network.is_cut(self._process.name, self.peer._process.name):
            self._is_sending = True
            self._loop.call_later(0.05, self._arrive, context=Context())
            return
        if not self._sent:
            return
        data = self._sent.popleft()
        if data is None:
            self.peer._lose(None)
        else:
            size = self._loop.network.chance.randint(1, len(data))
            if size < len(data) and len(self._sent) < 4:
                self._sent.appendleft(data[size:])
                data = data[:size]
            self._loop.call_soon(self.peer._receive, data, context=self.peer._context)
        if self._is_paused and not self._sent:
            self._is_paused = False
            self._loop.call_soon(self._protocol.resume_writing, context=self._context)
        self._send()

    def _receive(self, data: bytes) -> None:
        if not self._is_lost:
            self._protocol.data_received(data)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._sent.append(None)
            self._send()
            self._loop.call_soon(self._lose, None, context=self._context)

    def abort(self) -> None:
        self._sent.clear()
        self.close()

    def end(self, *, is_silent: bool) -> None:
        """The process has ended."""
        self._is_closing = self._is_lost = True
        self._sent.clear()
        if not is_silent:
            self._sent.append(None)
            self._send()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return sum(len(data) for data in self._sent if data)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class SimServer:
    """Listens for the process that made it."""

    def __init__(self, loop: SimLoop, factory: Callable[[], Any], process: Process) -> None:
        self.factory, self.process = factory, process
        self.sockets = [self]
        self._loop = loop

    def getsockname(self) -> tuple[str, int]:
        return self.process.name, 1

    async def start_serving(self) -> None:
        self._loop.servers[self.process.name] = self

    def close(self) -> None:
        if self._loop.servers.get(self.process.name) is self:
            del self._loop.servers[self.process.name]


class SimLoop(asyncio.BaseEventLoop):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.now = 0.0
        self.servers: dict[str, SimServer] = {}
        self.disk_delay_s: dict[str, float] = {}
        """How long a call of a thread takes, by node."""
        self.is_ending = False
        self.killed: list[Process] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._selector = self
        self.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.errors: list[dict[str, Any]] = []

    # time

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        assert timeout is not None, "everybody waits for somebody else"
        self.now += max(0.0, timeout)
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    # processes

    def create_task(self, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        task = super().create_task(coroutine, **more)
        # Those of a killed process end when the world does.
        self.tasks.append(task)
        return task

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        context = context or copy_context()
        return super().call_soon(self._run, context.get(PROCESS), callback, args, context=context)

    def call_soon_threadsafe(self, *args: Any, context: Context | None = None) -> asyncio.Handle:
        return self.call_soon(*args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = context or copy_context()
        return super().call_at(when, self._run, context.get(PROCESS), callback, args, context=context)

    def _run(self, process: Process | None, callback: Any, args: tuple[Any, ...]) -> None:
        if process is not None and not self.is_ending:
            if not process.is_alive or self.now < process.paused_until:
                context = copy_context()
                process.held.append(partial(self.call_soon, callback, *args, context=context))
                return
        callback(*args)

    def resume(self, process: Process) -> None:
        """End a pause."""
        process.paused_until = 0.0
        while process.held:
            process.held.popleft()()

    def kill(self, process: Process, *, is_silent: bool) -> None:
        process.is_alive = False
        self.killed.append(process)
        for transport in process.transports:
            transport.end(is_silent=is_silent)
        # Whoever kills may hold a lock that they need.
        self.call_soon(self._end_threads, process, context=Context())
        server = self.servers.get(process.name)
        if server is not None and server.process is process:
            server.close()

    def _end_threads(self, process: Process) -> None:
        for thread in process.threads:
            if not thread.is_done:
                thread.is_killed = True
                thread.resume()

    # threads

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> asyncio.Future[Any]:
        """Runs at once, after some time. It must not wait for anything."""
        future: asyncio.Future[Any] = self.create_future()
        self.call_later(self._thread_delay(), self._run_work, future, function, args)
        return future

    def _run_work(self, future: asyncio.Future[Any], function: Any, args: tuple[Any, ...]) -> None:
        # A task that was cancelled does not end its thread.
        try:
            result = function(*args)
        except Exception as error:
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)

    def in_thread(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """For work that may wait for other nodes."""
        process = PROCESS.get()
        assert process is not None
        process.background += 1

        def begin() -> None:
            thread = SimThread(work, copy_context())
            process.threads.append(thread)
            self._go_on(process, thread, then)

        self.call_later(self._thread_delay(), begin)

    def _go_on(self, process: Process, thread: SimThread, then: Callable[[], None]) -> None:
        # Changing threads costs more than most of what they do.
        if not thread.is_done and thread.can_go_on:
            thread.resume()
        if thread.is_done:
            process.threads.remove(thread)
            process.background -= 1
            if process.is_alive:
                then()
        else:
            self.call_later(0.002, self._go_on, process, thread, then)

    @staticmethod
    def wait(event: Event) -> None:
        thread = current_thread()
        assert isinstance(thread, SimThread), "the event loop waits for other nodes"
        thread.wait(event)

    def _thread_delay(self) -> float:
        process = PROCESS.get()
        slow = self.disk_delay_s.get(process.name, 0.0) if process is not None else 0.0
        return (0.0003 + slow) * self.network.chance.random()

    # network

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        process = PROCESS.get()
        assert process is not None
        assert not more["start_serving"]
        return SimServer(self, factory, process)

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        process = PROCESS.get()
        assert process is not None
        await asyncio.sleep(self.network.delay())
        if self.network.is_cut(process.name, host) or self.network.is_cut(host, process.name):
            await asyncio.sleep(1.0)
            raise TimeoutError(f"{host} does not answer")
        server = self.servers.get(host)
        if server is None or not server.process.is_alive:
            raise ConnectionRefusedError(f"{host} does not listen")
        here = SimTransport(self, factory(), process)
        context = copy_context()
        context.run(PROCESS.set, server.process)
        there = context.run(lambda: SimTransport(self, server.factory(), server.process))
        here.peer, there.peer = there, here
        there.begin()
        here.begin()
        return here, here._protocol
