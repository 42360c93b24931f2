"""The supervisor of `nsparq run`: it never loads the program itself, only starts its workers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from nsparq.client import metrics
from nsparq.errors import StartError
from nsparq.runner.watch import FileWatch
from nsparq.runner.worker import CANNOT_LOAD, MARGIN_S
from nsparq.status_server import Answer, StatusServer
from nsparq.up.process import describe_status

__all__ = ["Plan", "Supervisor"]

logger = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.5
MAX_DELAY_S: Final = 30.0
STEADY_S: Final = 60.0
"""A worker that ran this long was fine: the next restart has the first delay again."""
ANSWER_S: Final = 5.0
"""How long a status may take."""
BLOCKED_S: Final = 60.0
"""A worker that has not reported for so long is not alive."""
WATCH_S: Final = 0.3
DRAIN_S: Final = 2.0
"""Time to read the last report of a process that has ended."""
REPORT_LIMIT: Final = 64 << 20
"""Longest report, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, from the command line."""

    target: str
    workers: int = 1
    reload_dirs: tuple[Path, ...] = ()
    """Empty: no reload."""
    http_address: tuple[str, int] | None = None
    stop_timeout: float = 30.0
    log_level: str = "info"


@dataclass
class _Worker:
    """One place for a worker process, over all its restarts."""

    number: int
    process: asyncio.subprocess.Process | None = None
    """None while it waits to be started."""
    is_ready: bool = False
    is_replaced: bool = False
    """It was told to stop, to be started again at once."""
    started_at: float = 0.0
    reported_at: float = 0.0
    ended: int = 0
    """Its processes that have ended, or could not be started."""
    failures: int = 0
    """Deaths in a row."""
    figures: list[metrics.Figures] = field(default_factory=list)

    def __str__(self) -> str:
        return f"worker {self.number}" + (f" (process {self.process.pid})" if self.process else "")


class Supervisor:
    """run() returns the exit status."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._workers = [_Worker(number) for number in range(1, plan.workers + 1)]
        self._past: list[metrics.Figures] = []
        """Counters of processes that have ended."""
        self._restarts = 0
        self._stopping = asyncio.Event()
        self._change = asyncio.Event()
        """A file has changed: a program that could not be loaded is worth another try."""
        self._replacing: asyncio.Task[None] | None = None
        self._failure: StartError | None = None
        self._is_clean = True
        self._was_loaded = False
        """Whether a worker could load the program."""
        self._was_ready = False

    async def run(self) -> int:
        """Run until a signal. Raises StartError."""
        loop = asyncio.get_running_loop()
        server = None
        if self._plan.http_address:
            server = StatusServer(self._plan.http_address, partial(self._ask, loop))
            logger.info("status on http://%s/ready, /live and /metrics", server.address)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._replace_all, "SIGHUP")
        watching = asyncio.create_task(self._watch_files()) if self._plan.reload_dirs else None
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(self._keep(worker))
        finally:
            if server is not None:
                await asyncio.to_thread(server.close)
            for task in (watching, self._replacing):
                if task is not None:
                    task.cancel()
                    await asyncio.wait({task})
        if self._failure is not None:
            raise self._failure
        logger.info("stopped")
        return 0 if self._is_clean else 1

    # one worker

    async def _keep(self, worker: _Worker) -> None:
        """Run it, and start it again whenever it ends, until all stop."""
        while not self._stopping.is_set():
            status = await self._run_once(worker)
            worker.ended += 1
            if self._stopping.is_set() or self._failure is not None:
                return
            if worker.is_replaced:
                worker.is_replaced = False
                worker.failures = 0
            elif status == CANNOT_LOAD and self._plan.reload_dirs:
                logger.warning("%s waits until a file is changed", worker)
                await self._until_stop_or_change()
            elif status == CANNOT_LOAD and not self._was_loaded:
                # A wrong name or a mistake in the program: it would fail the same way again.
                self._failure = StartError(f"{self._plan.target} cannot be loaded")
                self._stop()
            else:
                await self._pause(worker)

    async def _run_once(self, worker: _Worker) -> int:
        """Run a process to its end. Returns its status."""
        self._change.clear()
        worker.started_at = worker.reported_at = time.monotonic()
        try:
            process, reader = await self._spawn()
        except OSError as error:
            logger.error("%s cannot be started: %s", worker, error)
            return 1
        worker.process = process
        logger.info("%s started", worker)
        if self._stopping.is_set():
            self._tell_to_stop(worker)
        reading = asyncio.create_task(self._read_reports(worker, reader))
        status = await process.wait()
        # A process that it has started may keep the pipe open.
        await asyncio.wait({reading}, timeout=DRAIN_S)
        reading.cancel()
        self._past = metrics.total([*self._past, *map(metrics.only_counters, worker.figures)])
        worker.figures, worker.is_ready = [], False
        if not self._stopping.is_set() and not worker.is_replaced:
            logger.error("%s %s", worker, describe_status(status))
        worker.process = None
        return status

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        """A process, and its reports. Raises OSError."""
        plan = self._plan
        reader, pipe = await _open_pipe()
        try:
            # -P: a file of the user must not be imported in place of a module of the worker.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "nsparq.runner.worker",
                plan.target, str(pipe), str(plan.stop_timeout), plan.log_level,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(pipe,),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(pipe)
        return process, reader

    async def _read_reports(self, worker: _Worker, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            try:
                self._take_report(worker, json.loads(line))
            except ValueError:
                # It was killed in the middle of a line.
                return

    def _take_report(self, worker: _Worker, report: dict[str, Any]) -> None:
        worker.reported_at = time.monotonic()
        worker.figures, is_ready = report["subscriptions"], report["is_ready"]
        self._was_loaded = True
        if is_ready and not worker.is_ready:
            logger.info("%s is ready", worker)
        worker.is_ready = is_ready
        if self._is_ready and not self._was_ready:
            self._was_ready = True
            _notify_systemd("READY=1")

    async def _pause(self, worker: _Worker) -> None:
        """It died: wait before it is started again, longer each time."""
        if time.monotonic() - worker.started_at >= STEADY_S:
            worker.failures = 0
        delay = min(FIRST_DELAY_S * 2 ** min(worker.failures, 10), MAX_DELAY_S)
        worker.failures += 1
        self._restarts += 1
        logger.warning("%s is started again in %g s", worker, delay)
        await self._until_stop_or_change(delay)

    async def _until_stop_or_change(self, at_most: float | None = None) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._stopping, self._change)]
        await asyncio.wait(waits, timeout=at_most, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    # all workers

    def _stop(self) -> None:
        """The first signal: wait for messages in flight. The second: do not wait."""
        if self._stopping.is_set():
            for worker in self._workers:
                self._kill(worker)
            return
        logger.info("stopping: waiting up to %g s for messages in flight", self._plan.stop_timeout)
        _notify_systemd("STOPPING=1")
        self._stopping.set()
        for worker in self._workers:
            self._tell_to_stop(worker)

    def _tell_to_stop(self, worker: _Worker) -> None:
        process = worker.process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        loop = asyncio.get_running_loop()
        loop.call_later(self._plan.stop_timeout + MARGIN_S, self._kill, worker, process)

    def _kill(self, worker: _Worker, expected: asyncio.subprocess.Process | None = None) -> None:
        process = worker.process
        if process is None or process.returncode is not None or expected not in (None, process):
            return
        logger.error("%s is killed; nsqd requeues its messages", worker)
        self._is_clean = False
        with suppress(ProcessLookupError):
            # It leads a process group: its own children end too.
            os.killpg(process.pid, signal.SIGKILL)

    def _replace_all(self, reason: str) -> None:
        """Stop and start each worker, one after the other. If that is under way, begin again."""
        if self._stopping.is_set():
            return
        logger.info("%s: replacing the workers", reason)
        self._change.set()
        if self._replacing is not None:
            self._replacing.cancel()
        self._replacing = asyncio.create_task(self._replace_each())

    async def _replace_each(self) -> None:
        for worker in self._workers:
            ended = worker.ended
            if worker.process is not None:
                worker.is_replaced = True
                self._tell_to_stop(worker)
                ended += 1
            # The next one only when this one works again.
            while worker.ended < ended or (worker.ended == ended and not worker.is_ready):  # noqa: ASYNC110  # a state, not an event
                await asyncio.sleep(0.05)
            if worker.ended > ended and not self._stopping.is_set():
                logger.error("%s ended before it was ready: the other workers are not replaced", worker)
                return

    async def _watch_files(self) -> None:
        watch = await asyncio.to_thread(FileWatch, self._plan.reload_dirs)
        while True:
            await asyncio.sleep(WATCH_S)
            if changed := await asyncio.to_thread(watch.changed):
                self._replace_all(f"{changed[0]} has changed")

    # status

    @property
    def _is_ready(self) -> bool:
        return not self._stopping.is_set() and all(worker.is_ready for worker in self._workers)

    def _ask(self, loop: asyncio.AbstractEventLoop, path: str) -> Answer:
        """Called in a thread: the answer is made on the event loop."""

        async def work() -> Answer:
            return self._answer(path)

        try:
            return asyncio.run_coroutine_threadsafe(work(), loop).result(ANSWER_S)
        except (TimeoutError, RuntimeError):  # the loop is blocked, or has ended
            return Answer(503, "text/plain", b"the supervisor does not answer\n")

    def _answer(self, path: str) -> Answer:
        if path == "/ready":
            return self._as_json(200 if self._is_ready else 503)
        if path == "/live":
            return self._as_json(503 if any(map(self._is_blocked, self._workers)) else 200)
        if path == "/metrics":
            return Answer(200, metrics.CONTENT_TYPE, self._metrics().encode())
        return Answer(404, "text/plain", b"not found\n")

    def _is_blocked(self, worker: _Worker) -> bool:
        return worker.process is not None and time.monotonic() - worker.reported_at > BLOCKED_S

    def _as_json(self, status: int) -> Answer:
        workers = [
            {
                "worker": worker.number,
                "pid": worker.process.pid if worker.process is not None else None,
                "ready": worker.is_ready,
                "blocked": self._is_blocked(worker),
                "unconnected": [
                    f"{one['topic']}/{one['channel']}" for one in worker.figures if not one["connections"]
                ],
            }
            for worker in self._workers
        ]
        found = {"ready": self._is_ready, "stopping": self._stopping.is_set(), "workers": workers}
        return Answer(status, "application/json", json.dumps(found).encode() + b"\n")

    def _metrics(self) -> str:
        lines = []
        for name, kind, help_text, value in (
            ("nsparq_run_workers", "gauge", "worker processes wanted", len(self._workers)),
            ("nsparq_run_workers_ready", "gauge", "worker processes that are ready",
             sum(worker.is_ready for worker in self._workers)),
            ("nsparq_run_restarts_total", "counter", "worker processes started again after they died",
             self._restarts),
        ):  # fmt: skip
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        live = [figures for worker in self._workers for figures in worker.figures]
        return "\n".join(lines) + "\n" + metrics.text([*self._past, *live])


async def _open_pipe() -> tuple[asyncio.StreamReader, int]:
    """A pipe from a worker: its end to read, and the descriptor of the other."""
    read, write = os.pipe()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=REPORT_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", 0))
    return reader, write


def _notify_systemd(state: str) -> None:
    """Tell systemd, if it started us with Type=notify."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        sock.send(state.encode())
