"""The order in which a producer tries brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from nsparq.client.config import Config
from nsparq.client.connect.candidates import AVOID_S, Candidates
from nsparq.client.connect.lookup import Lookup, LookupFailed
from tests.support.aio import run


class FakeLookup(Lookup):
    def __init__(self, *answers: list[str] | None) -> None:
        super().__init__(["lookupd:1"], Config())
        self.answers: list[list[str] | None] = [*answers]
        self.asked_count = 0

    async def nodes(self) -> AsyncGenerator[list[str] | None, None]:
        self.asked_count += 1
        for answer in self.answers:
            yield answer
        if not any(answer is not None for answer in self.answers):
            raise LookupFailed("none answered")


def order(candidates: Candidates) -> list[str]:
    async def main() -> list[str]:
        return [address async for address in candidates.in_order()]

    return run(main())


def test_named_brokers_come_first_and_each_broker_once() -> None:
    found = order(Candidates(["a:1", "b:1", "a:1"], FakeLookup(["b:1", "c:1"], ["a:1", "c:1", "d:1"])))
    assert found == ["a:1", "b:1", "c:1", "d:1"]


def test_nsqlookupd_is_not_asked_before_the_named_brokers_were_tried() -> None:
    async def main() -> None:
        lookup = FakeLookup(["b:1"])
        candidates = Candidates(["a:1"], lookup).in_order()
        assert (await anext(candidates), lookup.asked_count) == ("a:1", 0)
        assert (await anext(candidates), lookup.asked_count) == ("b:1", 1)
        await candidates.aclose()

    run(main())


def test_a_broker_that_failed_comes_after_the_others_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("nsparq.client.connect.candidates.monotonic", lambda: now)
    candidates = Candidates(["a:1", "b:1"], FakeLookup(["c:1"]))
    candidates.failed("b:1")
    now += 1
    candidates.failed("a:1")
    assert order(candidates) == ["c:1", "b:1", "a:1"]
    now += AVOID_S - 0.5
    assert order(candidates) == ["b:1", "c:1", "a:1"]
    now += 1
    assert order(candidates) == ["a:1", "b:1", "c:1"]


@pytest.mark.parametrize("answers", [[None], [], None], ids=["silent", "failed", "no nsqlookupd"])
def test_named_brokers_that_failed_need_no_answer(answers: list[list[str] | None] | None) -> None:
    candidates = Candidates(["a:1"], Lookup([], Config()) if answers is None else FakeLookup(*answers))
    candidates.failed("a:1")
    assert order(candidates) == ["a:1"]


def test_without_an_answer_and_without_a_named_broker_there_is_none() -> None:
    with pytest.raises(LookupFailed):
        order(Candidates([], FakeLookup(None)))


@pytest.mark.parametrize("first", [["b:1"], []], ids=["with brokers", "empty"])
def test_after_an_answer_a_silent_nsqlookupd_is_not_waited_for_long(
    first: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsparq.client.connect.candidates.LATE_S", 0.01)

    class Silent(FakeLookup):
        async def nodes(self) -> AsyncGenerator[list[str] | None, None]:
            yield None
            yield first
            await asyncio.Event().wait()

    assert order(Candidates([], Silent())) == first
    assert "silent for 0.01 s" in caplog.text
