"""Work that ends after its channel or topic was deleted: it changes nothing, also if there is a new
one of the same name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsparq.broker.carried_over import CarryJob
from nsparq.delivery_policy import parse_policy
from tests.broker.rig import Delivered, Later, Rig, bodies

MakeRig = Callable[..., Rig]
Jobs = list[tuple[Callable[[], None], Callable[[], None]]]


@pytest.fixture
def later() -> Later:
    return Later()


def hold_one(rig: Rig, start: int = 0) -> Delivered:
    """Finish all messages but one, in several segments. The client keeps that one."""
    client = rig.subscribe(rdy=200)
    for number in range(start, start + 100, 10):
        rig.publish("t", *bodies(10, start=number, size=150))
    held, *rest = client.take()
    rig.finish(client, *rest)
    return held


def take_jobs(later: Later) -> Jobs:
    """The jobs of a round of upkeep, which are late."""
    jobs, later.jobs = later.jobs, []
    return jobs


def run(jobs: Jobs) -> None:
    for work, then in jobs:
        work()
        then()


def carry_late(rig: Rig, later: Later) -> Jobs:
    """Work in the background that carries a message of channel c over. It has not begun."""
    hold_one(rig)
    later.run_all()
    rig.maintain()
    jobs = take_jobs(later)
    assert any(isinstance(getattr(work, "__self__", None), CarryJob) for work, _ in jobs)
    return jobs


def test_a_late_carry_job_writes_nothing_into_a_new_topic(make_rig: MakeRig, later: Later):
    rig = make_rig(background=later, max_bytes_per_file=2000)
    jobs = carry_late(rig, later)
    rig.broker.delete_topic("t")
    rig.channel("other")
    later.run_all()
    run(jobs)
    rig.maintain()
    later.run_all()
    assert rig.names("*.c*") == ["other.channel"]
    rig.restart()
    assert [*rig.topic().channels] == ["other"]
    assert rig.topic().corrupt_files == 0
    assert rig.broker.health.error is None


def test_a_late_carry_job_leaves_the_file_of_a_new_channel(make_rig: MakeRig, later: Later):
    rig = make_rig(background=later, max_bytes_per_file=2000)
    jobs = carry_late(rig, later)
    rig.topic().delete_channel("c")
    held = hold_one(rig, start=100)
    later.run_all()
    rig.maintain()
    later.run_all()
    assert rig.names("*.c*") == ["c.carry", "c.channel"]
    run(jobs)
    rig.maintain()
    later.run_all()
    rig.crash()
    assert rig.names("*.c*") == ["c.carry", "c.channel"]
    assert rig.subscribe(rdy=10).take_bodies() == [held.body]
    assert rig.channel().dropped_count == 0


def test_a_late_checkpoint_writes_nothing_into_a_new_topic(make_rig: MakeRig, later: Later):
    rig = make_rig(background=later)
    rig.channel("other")
    client = rig.subscribe()
    later.run_all()
    rig.publish("t", b"x")
    rig.ready(client, 1)
    rig.maintain()
    jobs = take_jobs(later)
    rig.topic().delete_channel("c")
    rig.broker.delete_topic("t")
    rig.channel("other")
    run(jobs)
    later.run_all()
    rig.maintain()
    later.run_all()
    assert rig.names("*.channel") == ["other.channel"]
    rig.restart()
    assert [*rig.topic().channels] == ["other"]
    assert rig.topic().corrupt_files == 0


# dead letters


def let_expire(rig: Rig) -> None:
    rig.channel("other")
    rig.channel().change_policy(parse_policy({"expire_after": 60}, "t"))


def test_a_hold_that_ends_after_the_deletion_makes_no_dead_letters(rig: Rig):
    let_expire(rig)
    channel = rig.channel()
    channel.start_hold("one")
    rig.publish("t", b"old")
    rig.topic().delete_channel("c")
    rig.pass_time(61)
    channel.end_hold("one")
    rig.turn()
    assert [*rig.broker.topics] == ["t"]


def test_a_read_that_ends_after_the_deletion_makes_no_dead_letters(make_rig: MakeRig, later: Later):
    rig = make_rig(background=later, mem_queue_size=1)
    let_expire(rig)
    for number in range(3):
        rig.publish("t", b"%d" % number)
    later.run_all()
    rig.files.is_cold = True
    rig.subscribe(rdy=1)
    assert rig.channel().delivery.reading is not None
    rig.topic().delete_channel("c")
    rig.pass_time(61)
    while later.run():
        rig.turn()
    assert [*rig.broker.topics] == ["t"]


def test_a_scan_that_goes_on_after_the_deletion_makes_no_dead_letters(rig: Rig):
    let_expire(rig)
    rig.publish("t", b"old")
    rig.publish("t", *bodies(1000), defer_ms=1000)
    rig.clock.advance(61)
    channel = rig.channel()
    scan = rig.broker.scan.scan(rig.clock())
    next(scan)
    rig.topic().delete_channel("c")
    requeued = len(channel.unfinished.requeued)
    assert requeued < 1000
    for _ in scan:
        rig.turn()
    rig.turn()
    assert [*rig.broker.topics] == ["t"]
    assert len(channel.unfinished.requeued) == requeued, "nobody needs them"


@pytest.mark.parametrize("error", [None, OSError(5, "Input/output error")], ids=["written", "failed"])
def test_letters_that_are_on_disk_after_the_deletion_are_the_last(
    make_rig: MakeRig, later: Later, error: OSError | None
):
    rig = make_rig(background=later, durability="fsync")
    let_expire(rig)
    later.run_all()
    rig.publish("t", b"first")
    rig.clock.advance(30)
    rig.publish("t", b"second")
    rig.clock.advance(31)
    rig.maintain()
    rig.turn()
    letters = rig.topic("t.dead").log
    assert letters.end - letters.start == 1
    assert rig.topic("t.dead").publishing.awaits_sync
    rig.topic().delete_channel("c")
    rig.clock.advance(31)
    if error is not None:
        rig.files.fail("sync", ".log", error.errno)
    while later.run():
        rig.turn()
    assert not rig.topic("t.dead").publishing.awaits_sync
    assert letters.end - letters.start == 1
    assert "dead letters t:c" not in rig.broker.health.errors
