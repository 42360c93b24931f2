"""What becomes of members that end: with processes of their own kind, that die on purpose."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nsparq.errors import StartError
from nsparq.up import stack as stack_module
from nsparq.up.members import Cluster, Member, Plan
from nsparq.up.ports import Ports, Wanted
from nsparq.up.stack import Stack
from tests.support import wait_until
from tests.support.polling import DEADLINE

MODULE = """
import pathlib, sys, time

def main(arguments):
    kind, marks = arguments
    runs = pathlib.Path(marks)
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    if kind == "finishes":
        return 0
    print("no such luck", file=sys.stderr)
    if runs.read_text() == "x":
        # Only the first one gets as far as answering.
        answering = runs.with_name("answering")
        answering.touch()
        while answering.exists():
            time.sleep(0.01)
    return 5
"""


class Actor(Member):
    module = "actor"

    def __init__(self, cluster: Cluster, directory: Path, kind: str, *, is_vital: bool) -> None:
        super().__init__(cluster, "actor")
        self.marks, self._kind = directory / "marks", kind
        self.is_vital, self.may_finish = is_vital, not is_vital

    @property
    def runs(self) -> int:
        return len(self.marks.read_text()) if self.marks.exists() else 0

    def arguments(self) -> list[str]:
        return [self._kind, str(self.marks)]

    def why_not_ready(self) -> str:
        try:
            self.marks.with_name("answering").unlink()
        except FileNotFoundError:
            return "it does not answer"
        return ""

    def wanted(self) -> Iterator[Wanted]:
        return iter(())


class OneActor(Cluster):
    def __init__(self, plan: Plan, directory: Path, kind: str, *, is_vital: bool) -> None:
        super().__init__(plan)
        self.actor = Actor(self, directory, kind, is_vital=is_vital)

    @property
    def stages(self) -> list[Sequence[Member]]:
        return [[self.actor]]


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def line(self, name: str, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)


Act = Callable[[Stack, Actor, Heard], Awaitable[None]]
Play = Callable[..., Heard]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    (tmp_path / "actor.py").write_text(MODULE)
    source = Path(stack_module.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{source}:{tmp_path}")
    monkeypatch.setattr(stack_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(stack_module, "MAX_DELAY_S", 0.02)
    monkeypatch.setattr(stack_module, "MAX_RESTARTS", 2)

    def run(kind: str, act: Act, *, is_vital: bool) -> Heard:
        heard = Heard()

        async def acted() -> None:
            stack = Stack(Plan(data_path=tmp_path / "data", ports=Ports(base=0)), heard)
            cluster = OneActor(stack.plan, tmp_path, kind, is_vital=is_vital)
            stack.cluster = cluster
            async with stack:
                await act(stack, cluster.actor, heard)

        asyncio.run(acted())
        return heard

    return run


def test_a_member_that_dies_too_often_ends_the_stack_with_its_last_output(play: Play) -> None:
    async def act(stack: Stack, actor: Actor, heard: Heard) -> None:
        with pytest.raises(StartError) as caught:
            await asyncio.wait_for(stack.watch(), DEADLINE)
        assert str(caught.value).splitlines() == [
            "actor exited with status 5 after 2 restarts; its last output:",
            "  no such luck",
        ]
        assert actor.runs == 3

    heard = play("dies", act, is_vital=True)
    assert heard.said == [
        "actor exited with status 5; restarting it in 0.01 s",
        "actor exited with status 5; restarting it in 0.02 s",
    ]


def test_a_member_that_is_not_vital_is_restarted_for_ever(play: Play) -> None:
    async def act(stack: Stack, actor: Actor, heard: Heard) -> None:
        watching = asyncio.create_task(stack.watch())
        await asyncio.to_thread(wait_until, lambda: actor.runs >= 5, 20.0)
        assert not watching.done()
        watching.cancel()

    assert "exited with status 5" in play("dies", act, is_vital=False).said[-1]


def test_without_free_descriptors_a_member_is_restarted_later(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, calls = stack_module.Process.start, iter(range(100))

    async def start_or_fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await start(*arguments, **options)

    monkeypatch.setattr(stack_module.Process, "start", start_or_fail)

    async def act(stack: Stack, actor: Actor, heard: Heard) -> None:
        watching = asyncio.create_task(stack.watch())
        await asyncio.to_thread(wait_until, lambda: actor.runs >= 2 or watching.done())
        assert not watching.done()
        watching.cancel()

    heard = play("dies", act, is_vital=False)
    assert heard.said[1] == "actor cannot be started: Too many open files; restarting it in 0.02 s"


def test_a_member_that_has_finished_is_not_restarted(play: Play) -> None:
    async def act(stack: Stack, actor: Actor, heard: Heard) -> None:
        await asyncio.wait_for(stack.watch(), DEADLINE)
        assert actor.runs == 1

    assert play("finishes", act, is_vital=False).said == ["actor has finished"]


def test_a_vital_member_that_exits_at_once_is_an_error(play: Play) -> None:
    async def act(stack: Stack, actor: Actor, heard: Heard) -> None:
        raise AssertionError("it is not up")

    with pytest.raises(StartError, match="actor exited with status 0"):
        play("finishes", act, is_vital=True)
