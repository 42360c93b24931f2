"""Starts the members in order, restarts those that die, and stops them in reverse order.

async with Stack(plan, output) as stack:   # everything answers
    await stack.watch()                    # restarts the dead, until it is cancelled
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from nsparq.errors import StartError
from nsparq.tasks import cancel_all
from nsparq.up.members import Cluster, Member, Plan
from nsparq.up.ports import check_free
from nsparq.up.process import Process, describe_status

__all__ = ["Stack", "Listener", "together"]

POLL_S: Final = 0.05
FIRST_DELAY_S: Final = 0.5
MAX_DELAY_S: Final = 30.0
STEADY_S: Final = 30.0
"""A member that has run for this long has recovered: its next death counts as the first."""
MAX_RESTARTS: Final = 6
"""In a row. Then the whole stack stops, if the member is vital."""
_LISTENING: Final = re.compile(r"INFO: (TCP|HTTP|metrics): listening on \S*:(\d+)$")


class Listener(Protocol):
    """Gets the lines of the children, and those of the stack itself."""

    def line(self, name: str, text: str) -> None:
        """A line of a child."""

    def say(self, text: str) -> None:
        """A line of the stack."""


class Stack:
    """Start, watch and stop once each. All of it on one event loop."""

    def __init__(self, plan: Plan, listener: Listener) -> None:
        """Raises StartError for an impossible plan."""
        self.plan = plan
        self.cluster = Cluster(plan)
        self._listener = listener
        self._processes: dict[str, Process] = {}
        self._lock = -1
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.is_clean = True
        """No member had to be killed."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def pid(self, name: str) -> int | None:
        """Of the member's last process, running or not."""
        process = self._processes.get(name)
        return None if process is None else process.pid

    # start

    async def start(self) -> None:
        """Returns when all members answer. Raises StartError; then stop() stops those that run."""
        self._lock = _lock(self.plan.data_path)
        check_free(self.plan.host, self.cluster.wanted())
        for stage in self.cluster.stages:
            await together(self._start_member(member) for member in stage)
        for member in self.cluster.members:
            self._keepers[member.name] = asyncio.create_task(self._keep(member))

    async def _start_member(self, member: Member) -> None:
        """Start it and wait until it answers. Raises StartError."""
        try:
            process = await self._launch(member)
            reason = await self._wait_until_ready(member, process)
        except OSError as error:
            raise StartError(f"{member.name} cannot be started: {error}") from error
        if reason:
            raise StartError(_with_tail(f"{member.name} {reason}", process))

    async def _launch(self, member: Member) -> Process:
        def on_line(line: str) -> None:
            found = _LISTENING.search(line)
            if found is not None and not member.ports.get(found[1], 1):
                # It has chosen a free port. After a restart it must use the same.
                member.ports[found[1]] = int(found[2])
            self._listener.line(member.name, line)

        process = await Process.start(
            member.module, member.arguments(), on_line, grace_s=self.plan.stop_timeout
        )
        self._processes[member.name] = process
        return process

    async def _wait_until_ready(self, member: Member, process: Process) -> str:
        """Wait until it answers. Returns an empty text, or what happened instead."""
        deadline = time.monotonic() + member.ready_within_s
        while True:
            if not process.is_running:
                status = process.ended.result()
                return "" if status == 0 and member.may_finish else describe_status(status)
            reason = "it has not reported its ports"
            if all(member.ports.values()):
                reason = await asyncio.to_thread(member.why_not_ready)
            if not reason and process.is_running:
                return ""
            if time.monotonic() > deadline:
                return f"does not answer after {member.ready_within_s:.0f} s: {reason}"
            await asyncio.wait({process.ended}, timeout=POLL_S)

    # watch

    async def watch(self) -> None:
        """Until it is cancelled. Raises StartError if a vital member cannot be restarted."""
        done, _ = await asyncio.wait(self._keepers.values(), return_when=asyncio.FIRST_EXCEPTION)
        for keeper in done:
            if not keeper.cancelled():
                keeper.result()

    async def _keep(self, member: Member) -> None:
        """Restart it whenever it dies. Raises StartError after too many deaths in a row."""
        deaths = 0
        while True:
            process, began = self._processes[member.name], time.monotonic()
            # Cancelling this task must not cancel the wait for the process.
            status = await asyncio.shield(process.ended)
            if status == 0 and member.may_finish:
                self._listener.say(f"{member.name} has finished")
                return
            if time.monotonic() - began > STEADY_S:
                deaths = 0
            deaths = await self._restart(member, describe_status(status), deaths)

    async def _restart(self, member: Member, what: str, deaths: int) -> int:
        """Restart until it answers. `what` has happened to it, after `deaths` deaths in a row.
        Returns the new number of deaths."""
        while what:
            deaths += 1
            if deaths > MAX_RESTARTS and member.is_vital:
                text = f"{member.name} {what} after {MAX_RESTARTS} restarts"
                raise StartError(_with_tail(text, self._processes[member.name]))
            delay = min(FIRST_DELAY_S * 2 ** min(deaths - 1, 10), MAX_DELAY_S)
            self._listener.say(f"{member.name} {what}; restarting it in {delay:g} s")
            await asyncio.sleep(delay)
            try:
                process = await self._launch(member)
            except OSError as error:
                # No free descriptor or process, for example: there may be one later.
                what = f"cannot be started: {error.strerror or error}"
                continue
            what = await self._wait_until_ready(member, process)
            if what:
                # It may run without answering.
                await process.stop(self.plan.stop_timeout)
        self._listener.say(f"{member.name} answers again (process {self.pid(member.name)})")
        return deaths

    # stop

    async def stop(self) -> bool:
        """In reverse order of the start. Returns whether none had to be killed. Twice is safe."""
        await self._stop_restarting(self.cluster.members)
        for stage in reversed(self.cluster.stages):
            await self._stop(stage)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        return self.is_clean

    async def stop_pipelines(self) -> bool:
        """Afterwards their output is final."""
        await self._stop_restarting(self.cluster.pipelines)
        return await self._stop(self.cluster.pipelines)

    async def _stop_restarting(self, members: Sequence[Member]) -> None:
        """Do not restart them any more."""
        await cancel_all(self._keepers[one.name] for one in members if one.name in self._keepers)

    async def _stop(self, members: Sequence[Member]) -> bool:
        running = [one for one in members if one.name in self._processes]
        timeout = self.plan.stop_timeout
        went = await asyncio.gather(*(self._processes[one.name].stop(timeout) for one in running))
        for member, by_itself in zip(running, went, strict=True):
            if not by_itself:
                self.is_clean = False
                self._listener.say(f"{member.name} did not stop within {timeout:g} s and was killed")
        return all(went)

    def kill(self) -> None:
        """Kill all members now. stop() must still be awaited."""
        self.is_clean = False
        for process in self._processes.values():
            process.kill()


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once. The first error cancels the others and is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await cancel_all(tasks)


def _lock(directory: Path) -> int:
    """Only one stack may use a folder. Raises StartError."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(directory / "up.lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise StartError(f"--data-path={directory}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StartError(f"--data-path={directory} is in use by another `nsparq up`") from None
    return descriptor


def _with_tail(text: str, process: Process) -> str:
    lines = [f"{text}; its last output:", *(f"  {line}" for line in process.tail)]
    return "\n".join(lines) if process.tail else text
