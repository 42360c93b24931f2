"""A producer polls briefly for its answer before it sleeps."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from itertools import count

import pytest

from nsparq import busy_poll
from nsparq.busy_poll import BusyPoll
from nsparq.client import Config, Producer, PublishTimeout, sync
from nsparq.client.connect import producer_connection
from tests.support.aio import run, until
from tests.support.scripted_nsqd import ScriptedNsqd

pytestmark = pytest.mark.usefixtures("any_loop")

LOOK_S = 0.01


class Looks:
    """How often the event loop polled for an answer instead of waiting."""

    count = 0


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks, look = Looks(), BusyPoll._poll

    def counted(self: BusyPoll) -> None:
        looks.count += 1
        look(self)

    monkeypatch.setattr(BusyPoll, "_poll", counted)
    monkeypatch.setattr(busy_poll, "usable_cores", lambda: 2)
    return looks


async def publish_in_vain(config: Config) -> None:
    async with ScriptedNsqd(publish=None) as nsqd, Producer(nsqd.address, config=config) as producer:
        with suppress(PublishTimeout):
            await producer.publish("t", b"m")


def test_it_polls_for_the_answer_and_then_sleeps(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    # The time is over after so many looks at the clock, however long a turn of the loop takes.
    times = count(0, LOOK_S / 10)
    patient = partial(BusyPoll, clock=lambda: next(times))
    monkeypatch.setattr(producer_connection, "BusyPoll", patient)

    async def main() -> None:
        config = Config(publish_timeout=1, busy_poll=LOOK_S)
        async with ScriptedNsqd(publish=None) as nsqd, Producer(nsqd.address, config=config) as producer:
            await producer.connect()
            publish = asyncio.ensure_future(producer.publish("t", b"m"))
            await until(lambda: looks.count > 1)
            for _ in range(100):
                await asyncio.sleep(0)
            assert 9 <= looks.count <= 11
            with pytest.raises(PublishTimeout):
                await publish

    run(main())


def test_it_stops_polling_when_the_answer_arrives(looks: Looks) -> None:
    async def main() -> None:
        async with (
            ScriptedNsqd() as nsqd,
            Producer(nsqd.address, config=Config(busy_poll=LOOK_S)) as producer,
        ):
            for _ in range(3):
                await producer.publish("t", b"m")
                before = looks.count
                await asyncio.sleep(LOOK_S / 5)
                assert 0 < looks.count <= before + 1

    run(main())


def test_polling_can_be_disabled(looks: Looks) -> None:
    run(publish_in_vain(Config(publish_timeout=0.05, busy_poll=0)))
    assert not looks.count


def test_where_there_is_only_one_core_it_sleeps(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "usable_cores", lambda: 1)
    run(publish_in_vain(Config(publish_timeout=0.05, busy_poll=LOOK_S)))
    assert not looks.count


def test_a_script_s_other_threads_are_left_alone(looks: Looks) -> None:
    def publish(address: str) -> None:
        with sync.Producer(address, config=Config(busy_poll=LOOK_S)) as producer:
            producer.publish("t", b"m")

    async def main() -> None:
        async with ScriptedNsqd() as nsqd:
            await asyncio.to_thread(publish, nsqd.address)

    run(main())
    assert not looks.count
