"""etcd and PostgreSQL keep what replication needs of a coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsparq.fetch import Answer
from nsparq.replication.coordinator import Coordinator, NoAnswer, State
from nsparq.replication.etcd import Etcd
from nsparq.replication.membership import Membership
from nsparq.replication.postgresql import PostgreSql
from tests.replication.coordinators import run_etcd, run_postgresql
from tests.support.aio import run

FIRST = Membership(1, "a", {"a": "1"}, {"a": "10.0.0.1:4160"})
NewClient = Callable[[float], Coordinator]


@pytest.fixture(params=["etcd", "postgresql"])
def new_client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewClient]:
    """Makes a client of a real coordinator, with the seconds that a sign of life holds."""
    made: list[Coordinator] = []

    def make(alive_s: float) -> Coordinator:
        made.append(
            Etcd(["http://127.0.0.1:1", url], "orders", alive_s)
            if request.param == "etcd"
            else PostgreSql(url, "orders", alive_s)
        )
        return made[-1]

    with (run_etcd if request.param == "etcd" else run_postgresql)(tmp_path / request.param) as url:
        yield make
        for client in made:
            client.close()


def test_the_record_changes_by_compare_and_set_alone(new_client: NewClient) -> None:
    async def scenario() -> None:
        one, other = new_client(60), new_client(60)
        assert await one.observe() == State(None, "")
        tries = [client.compare_and_set(0, FIRST) for client in (one, other, one, other)]
        made = await asyncio.gather(*tries)
        (first,) = [found for found in made if found is not None]
        assert await other.observe() == State(first, "")
        second = FIRST.with_copies({"a": "1", "b": "2"})
        found = await other.compare_and_set(first.version, second)
        assert found is not None and found.version > first.version
        assert await one.compare_and_set(first.version, FIRST.taken_over_by("b", "3")) is None
        assert await one.compare_and_set(0, FIRST) is None
        assert await one.observe() == State(found, "")

    run(scenario())


def test_a_sign_of_life_ends_by_itself_or_at_once(new_client: NewClient) -> None:
    async def scenario() -> None:
        primary, watcher = new_client(60), new_client(60)
        await primary.keep_alive("a")
        await primary.keep_alive("a")
        assert (await watcher.observe()).alive == "a"
        await primary.release()
        assert (await watcher.observe()).alive == ""
        # Renewed until it is seen, and not any more.
        brief = new_client(1)
        while (await watcher.observe()).alive != "b":
            await brief.keep_alive("b")
        while (await watcher.observe()).alive:
            pass

    run(scenario())


def test_a_coordinator_that_is_away_is_said_so() -> None:
    async def scenario() -> None:
        for client in (
            Etcd(["http://127.0.0.1:1"], "orders", 3),
            PostgreSql("postgresql://nobody@127.0.0.1:1/none", "orders", 3),
        ):
            with pytest.raises(NoAnswer, match="does not answer"):
                await client.observe()

    run(scenario())


@pytest.mark.parametrize("body", ["{}", "[]", "null", '{"error": {"message": "…"}}', '{"responses": [5]}'])
def test_an_answer_that_is_not_from_etcd_is_no_answer(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    answers = [body]

    def fetch(*_: object, **__: object) -> Answer:
        return Answer(200, (answers[0] if len(answers) == 1 else answers.pop()).encode(), {})

    monkeypatch.setattr("nsparq.replication.etcd.fetch", fetch)

    async def scenario() -> None:
        etcd = Etcd(["http://127.0.0.1:1"], "orders", 3)
        lease = json.dumps({"ID": "7"})
        for ask in (
            etcd.observe,
            lambda: etcd.compare_and_set(0, FIRST),
            lambda: etcd.keep_alive("a"),
            lambda: etcd.keep_alive("a"),
        ):
            with pytest.raises(NoAnswer, match="cannot be understood"):
                await ask()
        # It has a lease now.
        answers.extend(["{}", lease])
        await etcd.keep_alive("a")
        with pytest.raises(NoAnswer, match="cannot be understood"):
            await etcd.keep_alive("a")

    run(scenario())


def test_a_record_of_an_unknown_form_is_not_taken_for_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [{"response_range": {"kvs": [{"mod_revision": "5"}]}}, {"response_range": {}}]
    answer = Answer(200, json.dumps({"responses": ranges}).encode(), {})
    monkeypatch.setattr("nsparq.replication.etcd.fetch", lambda *_, **__: answer)
    with pytest.raises(ValueError, match="the record cannot be understood"):
        run(Etcd(["http://127.0.0.1:1"], "orders", 3).observe())


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", '{"epoch": 1, "primary": "a", "in_sync": {}}'])
def test_a_record_without_the_form_of_this_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the record cannot be understood"):
        Membership.from_json(text.encode())
