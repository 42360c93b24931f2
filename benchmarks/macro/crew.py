"""The load processes: started once, given one role after another.

A process per producer and consumer keeps Python's own lock out of the figures; keeping them between
loads saves their start. The parent says what to be, waits until all are connected, and says go.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from benchmarks.macro import roles as acts
from benchmarks.macro.wire import BrokerRefused

SLOTS = 16  # processes at most, and their places in the shared progress


class LoadFailed(Exception):
    """A load did not do all of what it was to do; its figures would mean nothing."""


class Crew:
    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.progress = self.context.RawArray("q", SLOTS)
        self.members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.dismiss()

    def work(self, roles: Sequence[tuple[str | type, dict[str, Any]]], deadline: float) -> list[acts.Span]:
        """Play the roles at the same time, a process each: (class or its name in roles.py,
        arguments)."""
        if len(roles) > SLOTS:
            raise LoadFailed(f"{len(roles)} processes wanted; this tool is made for {SLOTS}")
        self._hire(len(roles))
        self.progress[:] = [0] * SLOTS
        team = [connection for _, connection in self.members[: len(roles)]]
        # A role has its own deadline too; the margin lets it say what went wrong.
        give_up = time.monotonic() + deadline + 15.0
        try:
            for connection, role in zip(team, roles, strict=True):
                connection.send(role)
            self._gather(team, give_up)
            for connection in team:
                connection.send("go")
            return self._gather(team, give_up)
        except BaseException:
            self.dismiss()
            raise

    def dismiss(self) -> None:
        for process, connection in self.members:
            connection.close()
            process.terminate()
        for process, _ in self.members:
            process.join()
        self.members = []

    def _hire(self, count: int) -> None:
        while len(self.members) < count:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=serve, args=(theirs, self.progress), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def _gather(self, team: Sequence[Connection], give_up: float) -> list[acts.Span]:
        answers = []
        for connection in team:
            if not connection.poll(max(0.0, give_up - time.monotonic())):
                raise LoadFailed("a load process did not answer before the deadline")
            try:
                answer = connection.recv()
            except EOFError as error:
                raise LoadFailed("a load process ended by itself") from error
            if isinstance(answer, str):
                raise LoadFailed(answer)
            answers.append(answer)
        return answers


def serve(parent: Connection, progress: acts.Progress) -> None:
    """A load process: one role after another until the parent hangs up. A failure is answered as
    its text."""
    try:
        while True:
            kind, arguments = parent.recv()
            name = kind if isinstance(kind, str) else kind.__name__
            try:
                role = (getattr(acts, kind) if isinstance(kind, str) else kind)(**arguments)
                parent.send(None)
                parent.recv()
                began = time.process_time()
                span = role.run(progress)
                span.cpu_s = time.process_time() - began
                parent.send(span)
            except (BrokerRefused, acts.OutOfTime, OSError) as error:
                parent.send(f"{name}: {type(error).__name__}: {error}")
            except Exception:
                parent.send(f"{name}: {traceback.format_exc()}")
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        pass
