"""Repeated messages of idempotent producers, over turns, restarts, crashes and failures of the
disk."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.broker.idempotence import PRODUCERS_FILE, SAVE_INTERVAL_NS, read_numbers
from nsparq.broker.seen_numbers import NumberRefused
from nsparq.broker.stats import topic_stats
from nsparq.headers import decode_headers, encode_headers
from nsparq.packed import PackedBodies
from tests.broker.rig import SECOND, Later, Receipt, Rig
from tests.wire.harness import both_builds, using

MakeRig = Callable[..., Rig]


def block(number: int | str, epoch: int | str = 1, producer: str = "p", **more: str) -> bytes:
    names = {"nsq-producer": producer, "nsq-epoch": str(epoch), "nsq-number": str(number)}
    return encode_headers(names | more)


def publish(rig: Rig, *numbers: int, send: bool = False, epoch: int = 1, **more: Any) -> Receipt:
    """Messages whose bodies are their numbers."""
    blocks = [block(number, epoch) for number in numbers]
    method = rig.send if send else rig.publish
    return method("t", *(b"%d" % number for number in numbers), blocks=blocks, **more)


def stored(rig: Rig) -> list[int]:
    """The bodies in the log, in order."""
    log = rig.topic().log
    found: list[int] = []
    sequence = log.start
    while (batch := log.read(sequence, wait=True)) is not None and batch.end > sequence:
        found += map(int, batch.bodies())
        sequence = batch.end
    return found


def repeated(rig: Rig) -> int:
    count: int = topic_stats(rig.topic())["repeated_count"]
    return count


def save(rig: Rig) -> None:
    """Let the file be written: a round that captures, an fsync, and a round that writes."""
    rig.clock.advance(SAVE_INTERVAL_NS / SECOND)
    for _ in range(3):
        rig.maintain()


def test_a_repeat_is_acknowledged_and_not_stored(rig: Rig) -> None:
    client = rig.subscribe(rdy=100)
    assert publish(rig, 0).is_ok
    assert publish(rig, 0).is_ok
    assert publish(rig, 2, 3).is_ok
    # Number 1 was overtaken. Of the batch only it is new.
    assert publish(rig, 1, 2).is_ok
    assert stored(rig) == [0, 2, 3, 1]
    assert client.take_bodies() == [b"0", b"2", b"3", b"1"]
    assert (repeated(rig), rig.topic().message_count) == (2, 4)


def test_a_repeat_in_the_same_turn_is_answered_with_the_original(rig: Rig) -> None:
    first, second = publish(rig, 0, send=True), publish(rig, 0, send=True)
    assert first.answers == second.answers == []
    rig.turn()
    assert first.is_ok and second.is_ok
    assert stored(rig) == [0]


def test_deferred_messages_are_known_again_too(rig: Rig) -> None:
    assert publish(rig, 0, defer_ms=1000).is_ok
    assert publish(rig, 0, defer_ms=1000).is_ok
    assert stored(rig) == [0]


def test_other_messages_are_left_alone(rig: Rig) -> None:
    blocks = [b"", encode_headers({"a": "\x0cnsq-producer"}), block(1), block(1), block(1, producer="q")]
    rig.publish("t", b"1", b"2", b"3", b"4", b"5", blocks=blocks)
    rig.publish("t", b"1", b"2", b"3", b"4", b"5", blocks=blocks)
    assert stored(rig) == [1, 2, 3, 5, 1, 2]
    assert rig.publish("u", b"1", blocks=[block(1)]).is_ok
    assert rig.topic("u").message_count == 1


def numbers_by_index(blocks: list[bytes]) -> dict[int, tuple[str, int, int]]:
    runs = read_numbers(PackedBodies.of(blocks))
    return {
        run.place + step: (*run.origin, run.first + step)
        for run in runs
        for step in range(run.end - run.first)
    }


@both_builds
@pytest.mark.parametrize(
    "headers",
    [
        {"nsq-number": "7", "a": "b", "nsq-epoch": "1", "nsq-producer": "p"},
        {"nsq-producer": "p", "nsq-epoch": "1", "nsq-number": "7", "a": "b"},
    ],
)
def test_the_order_of_the_headers_does_not_matter(headers: dict[str, str], build: str) -> None:
    blocks = [encode_headers(headers), encode_headers(headers | {"nsq-number": "8"})]
    with using(build):
        assert numbers_by_index(blocks) == {0: ("p", 1, 7), 1: ("p", 1, 8)}


NUMBERED = st.builds(
    block,
    st.one_of(st.integers(0, 5), st.sampled_from(["0", "00", "7" * 18, "9" * 18])),
    st.integers(0, 1),
    st.sampled_from(["p", "q", "\x0cnsq-producer"]),
    more=st.sampled_from(["", "x"]),
)
OTHERS = st.sampled_from(
    [b"", encode_headers({"a": "\x0cnsq-producer"}), encode_headers({"nsq-number": "1"})]
)


@both_builds
@given(runs=st.lists(st.tuples(st.one_of(NUMBERED, OTHERS), st.integers(1, 4))))
def test_numbers_are_read_whatever_stands_beside_them(runs: list[tuple[bytes, int]], build: str) -> None:
    blocks, expected = [], {}
    for first, count in runs:
        headers = decode_headers(first)
        for step in range(count):
            if "nsq-producer" in headers:
                number = int(headers["nsq-number"]) + step
                if number >= 10**18:
                    break
                origin = headers["nsq-producer"], int(headers["nsq-epoch"])
                expected[len(blocks)] = (*origin, number)
                blocks.append(encode_headers(headers | {"nsq-number": str(number)}))
            else:
                blocks.append(first)
    with using(build):
        assert numbers_by_index(blocks) == expected


def test_consecutive_numbers_are_one_run() -> None:
    blocks = [block(number) for number in (8, 9, 10, 3)]
    read_numbers(PackedBodies.of(blocks))  # The first block of an origin is read by itself.
    assert read_numbers(PackedBodies.of(blocks)) == [(0, ("p", 1), 8, 11), (3, ("p", 1), 3, 4)]


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"nsq-producer": "p", "nsq-epoch": "1"}, "a message with nsq-producer needs nsq-number"),
        ({"nsq-producer": "p", "nsq-number": "1"}, "a message with nsq-producer needs nsq-epoch"),
        ({"nsq-producer": "", "nsq-epoch": "1", "nsq-number": "1"}, "nsq-producer must have 1 to 255"),
        ({"nsq-producer": "p", "nsq-epoch": "1", "nsq-number": "-1"}, "nsq-number must be a whole number"),
        ({"nsq-producer": "p", "nsq-epoch": "1", "nsq-number": "٣"}, "nsq-number must be a whole number"),
        ({"nsq-producer": "p", "nsq-epoch": "1", "nsq-number": ""}, "nsq-number must be a whole number"),
        ({"nsq-producer": "p", "nsq-epoch": "1", "nsq-number": "1" * 19}, "of at most 18 digits"),
    ],
)
def test_incomplete_numbers_are_refused(headers: dict[str, str], text: str) -> None:
    blocks = PackedBodies.of([block(1), encode_headers(headers), block(2)])
    with pytest.raises(NumberRefused, match=text) as refused:
        read_numbers(blocks)
    assert (refused.value.code, refused.value.index) == ("BAD_MESSAGE", 1)


def test_nothing_of_a_publish_is_stored_if_one_number_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(producer_window_count=10)
    publish(rig, *range(100), epoch=2)
    for numbers, epoch, code in (((100, 5), 2, "NUMBER_TOO_OLD"), ((101,), 1, "FENCED")):
        with pytest.raises(NumberRefused) as refused:
            publish(rig, *numbers, epoch=epoch)
        assert (refused.value.code, refused.value.index) == (code, len(numbers) - 1)
    assert publish(rig, 100, epoch=2).is_ok
    assert stored(rig) == [*range(101)]


def test_a_failed_append_forgets_the_number(rig: Rig) -> None:
    publish(rig, 0)
    rig.files.fail("write", ".log")
    assert publish(rig, 1).error is not None
    rig.files.heal()
    assert publish(rig, 1).is_ok
    assert stored(rig) == [0, 1]


# restarts


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("ends", [Rig.restart, Rig.crash])
def test_repeats_are_known_after_a_restart(
    make_rig: MakeRig, ends: Callable[[Rig], None], durability: str, saves: bool
) -> None:
    rig = make_rig(durability=durability)
    rig.publish("t", b"99")
    publish(rig, 0, 1)
    if saves:
        save(rig)
    publish(rig, 3)
    for _ in range(2):
        ends(rig)
        assert publish(rig, 0, 1, 2, 3).is_ok
    assert stored(rig) == [99, 0, 1, 3, 2]
    with pytest.raises(NumberRefused):
        publish(rig, 5, epoch=0)


def test_the_file_follows_the_log_and_lets_segments_go(make_rig: MakeRig) -> None:
    rig = make_rig(max_bytes_per_file=2000, mem_queue_size=10)
    client = rig.subscribe(rdy=1000)
    for number in range(100):
        publish(rig, number)
        rig.finish(client, *client.take())
    save(rig)
    rig.maintain()
    assert len(rig.names("*.log")) == 1
    rig.crash()
    publish(rig, *range(101))
    assert rig.topic().message_count == 1


def test_segments_stay_until_the_file_has_their_numbers(make_rig: MakeRig) -> None:
    rig = make_rig(max_bytes_per_file=2000, mem_queue_size=10)
    client = rig.subscribe(rdy=1000)
    for number in range(100):
        publish(rig, number)
        rig.finish(client, *client.take())
        rig.maintain()
    rig.crash()
    publish(rig, *range(101))
    assert rig.topic().message_count == 1


def test_the_file_is_not_ahead_of_the_disk(make_rig: MakeRig) -> None:
    """Otherwise a power cut loses the message, and its repeat is acknowledged."""
    rig = make_rig()
    publish(rig, 0)
    path = rig.topic_directory() / PRODUCERS_FILE
    before = path.read_bytes()
    rig.files.fail("sync", ".log", errno.EIO)
    save(rig)
    assert path.read_bytes() == before
    rig.files.heal()
    # The segment whose fsync failed is copied first.
    rig.clock.advance(20)
    save(rig)
    assert path.read_bytes() != before


def test_a_repeat_waits_for_the_fsync_of_the_original(make_rig: MakeRig) -> None:
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    first = publish(rig, 0)
    second = publish(rig, 0)
    assert first.answers == second.answers == []
    later.run_all()
    assert first.is_ok and second.is_ok
    assert stored(rig) == [0]


def test_a_message_whose_fsync_failed_is_stored_again(make_rig: MakeRig) -> None:
    rig = make_rig(durability="fsync")
    publish(rig, 0)
    rig.files.fail("sync", ".log", errno.EIO)
    assert publish(rig, 1).error is not None
    rig.files.heal()
    assert publish(rig, 0, 1).is_ok
    assert stored(rig) == [0, 1, 1]


def test_after_a_crash_the_log_is_synced_before_repeats_are_acknowledged(make_rig: MakeRig) -> None:
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    assert publish(rig, 0).answers == []
    later.jobs.clear()
    synced = rig.files.calls["sync"]
    rig.crash()
    assert rig.files.calls["sync"] > synced


def test_numbers_are_known_if_a_power_cut_took_the_name_of_the_file(make_rig: MakeRig) -> None:
    rig = make_rig(max_bytes_per_file=300)
    for number in range(20):
        publish(rig, number)
    (rig.topic_directory() / PRODUCERS_FILE).unlink()
    for _ in range(2):
        rig.crash()
        publish(rig, *range(20))
    assert stored(rig) == [*range(20)]


def test_a_damaged_file_costs_the_old_numbers_alone(rig: Rig) -> None:
    publish(rig, 0)
    save(rig)
    rig.clock.advance(2000)
    publish(rig, 1)
    save(rig)
    path = rig.topic_directory() / PRODUCERS_FILE
    rig.drop()
    path.write_bytes(b"\n{}\n")
    rig.start()
    assert rig.topic().corrupt_files == 1
    publish(rig, 1)
    assert stored(rig) == [0, 1]


def test_ephemeral_topics_know_repeats_without_a_file(rig: Rig) -> None:
    for _ in range(2):
        rig.publish("t#ephemeral", b"1", blocks=[block(1)])
    rig.maintain()
    assert rig.topic("t#ephemeral").message_count == 1


def test_topics_without_numbers_have_no_file(rig: Rig) -> None:
    rig.publish("t", b"1", blocks=[encode_headers({"a": "b"})])
    rig.maintain()
    rig.restart()
    assert not rig.names(PRODUCERS_FILE)
    assert rig.topic().idempotence is None


def test_a_deleted_topic_takes_its_numbers_along(make_rig: MakeRig) -> None:
    later = Later()
    rig = make_rig(background=later)
    publish(rig, 0)
    rig.clock.advance(SAVE_INTERVAL_NS / SECOND)
    rig.maintain()
    later.run_all()
    rig.maintain()
    # The write of the file comes too late.
    assert later.jobs
    rig.broker.delete_topic("t")
    publish(rig, 0)
    content = (rig.topic_directory() / PRODUCERS_FILE).read_bytes()
    later.run_all()
    assert (rig.topic_directory() / PRODUCERS_FILE).read_bytes() == content
    assert stored(rig) == [0]


def test_transactions_do_not_look_at_numbers(rig: Rig) -> None:
    append = partial(rig.topic().publishing.append_tagged, defer_ns=0, tag=7)
    for _ in range(2):
        append(PackedBodies.of([b"1"]).with_blocks(PackedBodies.of([block(1)])))
    assert publish(rig, 1).is_ok
    rig.crash()
    assert publish(rig, 1).is_ok
    assert stored(rig) == [1, 1, 1]
