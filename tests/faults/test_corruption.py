"""Damage to the files of a stopped broker: flipped bits, and tails cut off anywhere."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import REFERENCE, BrokerThread, start_process

from .load import drain

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason="the reference has no checksums")

BATCHES = 40
BATCH = 10


def batch(number: int) -> list[bytes]:
    return [b"batch-%03d-message-%d:" % (number, i) + bytes([65 + i]) * 300 for i in range(BATCH)]


def write_batches(path: Path, **flags: Any) -> None:
    """Forty batches over several segments, and a channel that has read none of them."""
    with start_process(path, max_bytes_per_file=30_000, **flags) as broker, broker.connect() as connection:
        connection.identify()
        connection.sub("t", "c")
        for number in range(BATCHES):
            connection.mpub("t", batch(number))


def locate(path: Path, body: bytes) -> tuple[Path, int]:
    """The file with this body, and the body's position."""
    for file in sorted(path.rglob("*")):
        if file.is_file() and (position := file.read_bytes().find(body)) >= 0:
            return file, position
    raise AssertionError(f"{body[:24]!r} is in no file")


def flip(file: Path, position: int) -> None:
    """Flip one bit: the highest set bit, so that a number shrinks, or the lowest bit of a zero."""
    content = bytearray(file.read_bytes())
    content[position] ^= (1 << content[position].bit_length() >> 1) or 1
    file.write_bytes(content)


HEADER = 48
PLACES = {
    "magic": 0,
    "magic, last byte": 3,
    "checksum": 4,
    "size, low byte": 8,
    "size, high byte": 11,
    "flags": 12,
    "sequence number, lowest byte": 16,
    "sequence number, next byte": 17,
    "sequence number, in the middle": 20,
    "publish time": 24,
    "due time": 32,
    "due time, highest byte": 39,
    "count": 40,
    "count, high byte": 43,
    "bytes of the bodies": 44,
    "first length": HEADER,
    "last length": HEADER + 4 * (BATCH - 1),
    "first body": HEADER + 4 * BATCH,
    "last body": HEADER + 4 * BATCH + (BATCH - 1) * len(batch(0)[0]) + 7,
}


def damage(path: Path) -> dict[int, str]:
    """Flip a bit in every other batch, in each part of a batch; gives the batch numbers."""
    damaged = {}
    for number, (what, offset) in enumerate(PLACES.items()):
        file, first = locate(path, batch(2 * number + 1)[0])
        flip(file, first - 4 * BATCH - HEADER + offset)
        damaged[2 * number + 1] = what
    return damaged


def numbers(bodies: list[bytes]) -> set[int]:
    return {int(re.match(rb"batch-(\d+)-", body)[1]) for body in bodies}  # type: ignore[index]


@pytest.mark.parametrize("crash", [False, True], ids=["clean stop", "kill -9"])
def test_a_flipped_bit_is_reported_and_loses_only_its_batch(tmp_path: Path, crash: bool) -> None:
    if crash:
        with start_process(tmp_path, max_bytes_per_file=30_000) as broker:
            with broker.connect() as connection:
                connection.identify()
                connection.sub("t", "c")
                for number in range(BATCHES):
                    connection.mpub("t", batch(number))
            broker.kill()
    else:
        write_batches(tmp_path)
    damaged = damage(tmp_path)

    with start_process(tmp_path, max_bytes_per_file=30_000) as broker:
        found = drain(broker, "t", "c")
        log = broker.stderr_text()
    whole = {body for number in range(BATCHES) if number not in damaged for body in batch(number)}
    missing = {
        damaged.get(number, f"batch {number}, undamaged") for number in numbers(sorted(whole - set(found)))
    }
    assert not missing
    assert set(found) == whole
    assert len(found) == len(set(found))
    reports = [line for line in log.splitlines() if re.search(r"(WARNING|ERROR): .*\.log", line)]
    assert len(reports) >= len(damaged), log


def test_corruption_is_counted_in_the_stats_and_leaves_no_depth_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_batches(tmp_path)
    damaged = damage(tmp_path)
    with caplog.at_level(logging.WARNING), BrokerThread(tmp_path, max_bytes_per_file=30_000) as broker:
        found = drain(broker, "t", "c")
        assert len(found) == (BATCHES - len(damaged)) * BATCH
        topic = broker.topic_stats("t")
        channel = broker.channel_stats("t", "c")
    counts = {key: value for key, value in _walk(topic) if "corrupt" in key}
    assert any(value >= len(damaged) for value in counts.values()), json.dumps(topic, indent=1)
    assert channel is not None
    assert (channel["depth"], channel["in_flight_count"], channel["deferred_count"]) == (0, 0, 0)


def _walk(value: Any) -> list[tuple[str, int]]:
    if isinstance(value, dict):
        here = [(key, number) for key, number in value.items() if isinstance(number, int)]
        return here + [found for inner in value.values() for found in _walk(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in _walk(inner)]
    return []


@pytest.mark.parametrize("kind", ["index", "channel", "topic.json"])
def test_damage_to_files_beside_the_log_loses_no_message(tmp_path: Path, kind: str) -> None:
    with start_process(tmp_path, max_bytes_per_file=30_000) as broker:
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c")
            for number in range(BATCHES):
                connection.mpub("t", batch(number))
            connection.rdy(1)
            connection.read_messages(10, finish=True)
    files = list(tmp_path.rglob(f"*{kind}"))
    assert files
    for file in files:
        flip(file, file.stat().st_size // 2)
    with start_process(tmp_path, max_bytes_per_file=30_000) as broker:
        found = set(drain(broker, "t", "c"))
    # What was finished may come again if the note of it is the damaged one.
    assert found >= {body for number in range(1, BATCHES) for body in batch(number)}


@pytest.mark.parametrize("crash", [False, True], ids=["clean stop", "kill -9"])
def test_a_log_cut_anywhere_gives_a_prefix(tmp_path: Path, crash: bool) -> None:
    written = tmp_path / "written"
    written.mkdir()
    with start_process(written) as broker:
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c")
            for number in range(BATCHES):
                connection.mpub("t", batch(number))
        if crash:
            broker.kill()
    everything = [body for number in range(BATCHES) for body in batch(number)]
    segment, position = locate(written, everything[-1])
    size = segment.stat().st_size
    assert position + len(everything[-1]) == size

    choose = random.Random(1)
    cuts = {0, 1, size - 1, size, position, position - 4 * BATCH}
    cuts |= {choose.randrange(size) for _ in range(7)}
    for cut in sorted(cuts):
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(written, copy)
        with (copy / segment.relative_to(written)).open("r+b") as file:
            file.truncate(cut)
        with BrokerThread(copy) as broker:
            found = drain(broker, "t", "c", quiet=0.1)
            assert found == everything[: len(found)], f"cut at {cut}"
            # Everything that is whole in front of the cut is there.
            assert len(found) == BATCH * sum(
                locate(written, batch(number)[-1])[1] + len(batch(number)[-1]) <= cut
                for number in range(BATCHES)
            )
            broker.publish("t", b"afterwards")
            broker.restart()
            assert drain(broker, "t", "c", quiet=0.1) == [b"afterwards"]
        shutil.rmtree(copy)


def test_a_message_that_looks_like_a_batch_is_not_taken_for_one(tmp_path: Path) -> None:
    """A publisher may send a segment's bytes as a message; damage must not turn them into
    messages."""
    written = tmp_path / "forged"
    written.mkdir()
    with start_process(written) as broker:
        broker.publish("other", b"forged")
    forged = locate(written, b"forged")[0].read_bytes()

    path = tmp_path / "data"
    path.mkdir()
    with start_process(path) as broker, broker.connect() as connection:
        connection.identify()
        connection.sub("t", "c")
        connection.mpub("t", [b"first of a damaged batch", forged])
        connection.mpub("t", [b"second"])
    file, position = locate(path, b"first of a damaged batch")
    flip(file, position)
    for index in path.rglob("*.index"):
        index.unlink()
    with start_process(path) as broker:
        assert drain(broker, "t", "c") == [b"second"]
