"""Starts the members one after the other, keeps them running, and stops them in order.

async with Stack(plan, told) as stack:     # everything answers
    await stack.watch()                    # until it is cancelled; what dies is started again
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
from nsparq.up.members import Cluster, Member, Plan
from nsparq.up.ports import check_free
from nsparq.up.process import Process, describe_status

__all__ = ["Stack", "Told", "together"]

POLL_S: Final = 0.05
FIRST_DELAY_S: Final = 0.5
MAX_DELAY_S: Final = 30.0
STEADY_S: Final = 30.0
"""Who has run for so long has recovered: a death after that is the first one again."""
MAX_RESTARTS: Final = 6
"""In a row. Then all are stopped, unless it is one that the others can do without."""
_LISTENING: Final = re.compile(r"INFO: (TCP|HTTP|metrics): listening on \S*:(\d+)$")


class Told(Protocol):
    """Who hears what goes on."""

    def line(self, name: str, text: str) -> None:
        """A child has said something."""

    def say(self, text: str) -> None:
        """We have something to say."""


class Stack:
    """Start, watch and stop once each. All of it on one event loop."""

    def __init__(self, plan: Plan, told: Told) -> None:
        """Raises StartError for a plan that cannot be carried out."""
        self.plan = plan
        self.cluster = Cluster(plan)
        self._told = told
        self._processes: dict[str, Process] = {}
        self._lock = -1
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.is_clean = True
        """Nobody had to be killed."""

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
        """Of the process that is, or was last, the member of this name."""
        process = self._processes.get(name)
        return None if process is None else process.pid

    # start

    async def start(self) -> None:
        """Returns when all of them answer. Raises StartError, after which stop() ends what was started."""
        self._lock = _lock(self.plan.data_path)
        check_free(self.plan.host, self.cluster.wanted())
        for stage in self.cluster.stages:
            await together(self._begin(member) for member in stage)
        for member in self.cluster.members:
            self._keepers[member.name] = asyncio.create_task(self._keep(member))

    async def _begin(self, member: Member) -> None:
        """Start it and wait until it answers. Raises StartError."""
        try:
            process = await self._launch(member)
            reason = await self._answers(member, process)
        except OSError as error:
            raise StartError(f"{member.name} cannot be started: {error}") from error
        if reason:
            raise StartError(_with_tail(f"{member.name} {reason}", process))

    async def _launch(self, member: Member) -> Process:
        def heard(line: str) -> None:
            found = _LISTENING.search(line)
            if found is not None and not member.ports.get(found[1], 1):
                # It was free to choose. Should it be started again, it is to be found in the same place.
                member.ports[found[1]] = int(found[2])
            self._told.line(member.name, line)

        process = await Process.start(
            member.module, member.arguments(), heard, grace_s=self.plan.stop_timeout
        )
        self._processes[member.name] = process
        return process

    async def _answers(self, member: Member, process: Process) -> str:
        """Wait for that. Empty, or what has happened instead."""
        deadline = time.monotonic() + member.ready_within_s
        while True:
            if not process.is_running:
                status = process.ended.result()
                return "" if status == 0 and member.may_finish else describe_status(status)
            reason = "it has not said where it listens"
            if all(member.ports.values()):
                reason = await asyncio.to_thread(member.why_not_ready)
            if not reason and process.is_running:
                return ""
            if time.monotonic() > deadline:
                return f"does not answer after {member.ready_within_s:.0f} s: {reason}"
            await asyncio.wait({process.ended}, timeout=POLL_S)

    # watch

    async def watch(self) -> None:
        """Until it is cancelled. Raises StartError when one of them cannot be brought back."""
        done, _ = await asyncio.wait(self._keepers.values(), return_when=asyncio.FIRST_EXCEPTION)
        for keeper in done:
            if not keeper.cancelled():
                keeper.result()

    async def _keep(self, member: Member) -> None:
        """Start it again whenever it dies. Raises StartError after too many deaths in a row."""
        deaths = 0
        while True:
            process, began = self._processes[member.name], time.monotonic()
            # Whoever stops looking after it has not ended it.
            status = await asyncio.shield(process.ended)
            if status == 0 and member.may_finish:
                self._told.say(f"{member.name} has done its work, and ended")
                return
            if time.monotonic() - began > STEADY_S:
                deaths = 0
            deaths = await self._bring_back(member, describe_status(status), deaths)

    async def _bring_back(self, member: Member, what: str, deaths: int) -> int:
        """Try until it answers; `what` has happened to it, after so many deaths. How many there are now."""
        while what:
            deaths += 1
            if deaths > MAX_RESTARTS and member.is_vital:
                text = f"{member.name} {what}, and was started again {MAX_RESTARTS} times before"
                raise StartError(_with_tail(text, self._processes[member.name]))
            delay = min(FIRST_DELAY_S * 2 ** min(deaths - 1, 10), MAX_DELAY_S)
            self._told.say(f"{member.name} {what}; it is started again in {delay:g} s")
            await asyncio.sleep(delay)
            try:
                process = await self._launch(member)
            except OSError as error:
                raise StartError(f"{member.name} cannot be started again: {error}") from error
            what = await self._answers(member, process)
            if what:
                # It may be there, and not answer.
                await process.stop(self.plan.stop_timeout)
        self._told.say(f"{member.name} answers again, as process {self.pid(member.name)}")
        return deaths

    # stop

    async def stop(self) -> bool:
        """All of them, those last that others depend on. Whether nobody had to be killed. Twice is safe."""
        await self._let_go(self.cluster.members)
        for stage in reversed(self.cluster.stages):
            await self._stop(stage)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        return self.is_clean

    async def stop_pipelines(self) -> bool:
        """Only those: what they have written is final then."""
        await self._let_go(self.cluster.pipelines)
        return await self._stop(self.cluster.pipelines)

    async def _let_go(self, members: Sequence[Member]) -> None:
        """From now on their end is no surprise."""
        keepers = [self._keepers[one.name] for one in members if one.name in self._keepers]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    async def _stop(self, members: Sequence[Member]) -> bool:
        running = [one for one in members if one.name in self._processes]
        timeout = self.plan.stop_timeout
        went = await asyncio.gather(*(self._processes[one.name].stop(timeout) for one in running))
        for member, by_itself in zip(running, went, strict=True):
            if not by_itself:
                self.is_clean = False
                self._told.say(f"{member.name} did not stop within {timeout:g} s, and was killed")
        return all(went)

    def kill(self) -> None:
        """All of them, now. stop() is still to be awaited."""
        self.is_clean = False
        for process in self._processes.values():
            process.kill()


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Together; the first that fails ends the others, and is raised as it is."""
    tasks = [asyncio.create_task(one) for one in work]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _lock(directory: Path) -> int:
    """Two stacks in one folder would ruin each other's data. Raises StartError."""
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
    lines = [f"{text}; its last lines:", *(f"  {line}" for line in process.tail)]
    return "\n".join(lines) if process.tail else text
