"""EMFILE at any call that needs a descriptor: who gets an error, and that it ends by itself. A
publish is refused only if it is not stored. A failure after the append shows in health, and upkeep
tries again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.broker.rig import FakeClient, Later, Receipt, Rig, TestFiles, bodies

MakeRig = Callable[..., Rig]

FOR_LONG = 1000
TOPICS = ("a", "b")


class Life:
    """A broker with two topics and a consumer for each, whose segments are full after two
    messages."""

    def __init__(self, make_rig: MakeRig, **flags: Any) -> None:
        self.later = Later()
        flags = {"max_bytes_per_file": 1500, "sync_every": 1, "mem_queue_size": 3, **flags}
        self.rig = make_rig(files=TestFiles(), background=self.later, **flags)
        self.receipts: dict[bytes, Receipt] = {}
        self.finished: set[bytes] = set()
        self.consumers: list[FakeClient] = []
        for name in TOPICS:
            self.consumers.append(self.rig.subscribe(name, "channel", rdy=100))
        self.later.run_all()

    def run(self) -> None:
        """Publish to all topics in each turn, finish some messages, and run the upkeep."""
        for turn in range(4):
            for name in TOPICS:
                (body,) = bodies(1, start=turn, size=600)
                self.publish(name, name.encode() + body)
            self.rig.turn()
            self.finish_some()
            self.later.run_all()
            self.rig.clock.advance(1)
            self.rig.maintain()
            self.later.run_all()

    def publish(self, topic: str, body: bytes) -> None:
        self.receipts[body] = self.rig.send(topic, body)

    def finish_some(self) -> None:
        for consumer in self.consumers:
            for message in consumer.take():
                if message.body[1] in b"02":
                    self.rig.finish(consumer, message)
                    self.finished.add(message.body)

    def recover(self) -> None:
        """Let some seconds pass after descriptors are free again."""
        self.rig.files.heal()
        for name in TOPICS:
            self.publish(name, name.encode() + b" afterwards")
        for _ in range(4):
            self.rig.turn()
            self.later.run_all()
            self.rig.clock.advance(1)
            self.rig.maintain()
            self.later.run_all()

    def delivered(self) -> list[bytes]:
        return [message.body for consumer in self.consumers for message in consumer.messages]

    def check(self) -> None:
        answered = {body: receipt.error for body, receipt in self.receipts.items()}  # exactly one answer each
        stored = {body for body, error in answered.items() if error is None}
        assert sorted(self.delivered()) == sorted(stored)
        assert self.rig.broker.health.error is None
        self.rig.restart()
        again = [self.rig.subscribe(name, "channel", rdy=100) for name in TOPICS]
        assert {body for client in again for body in client.take_bodies()} == stored - self.finished


@pytest.fixture(params=["os", "fsync", "memory"])
def durability(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def count_calls(make_rig: MakeRig, durability: str) -> int:
    life = Life(make_rig, durability=durability)
    before = life.rig.files.opening_calls
    life.run()
    calls = life.rig.files.opening_calls - before
    assert all(receipt.is_ok for receipt in life.receipts.values())
    life.check()
    return calls


@pytest.mark.parametrize("times", [1, FOR_LONG])
def test_out_of_descriptors_at_any_call_a_publish_is_refused_or_delivered(
    make_rig: MakeRig, durability: str, times: int
):
    for after in range(count_calls(make_rig, durability)):
        life = Life(make_rig, durability=durability)
        life.rig.files.run_out_of_descriptors(after, times)
        life.run()
        life.recover()
        life.check()
        life.rig.drop()
