"""A transaction is published all or none, and once, wherever a crash interrupts it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nsparq.broker.broker import Broker
from nsparq.broker.tagged import count_tagged
from nsparq.broker.transaction import AlreadyCommitted, Incomplete, Transaction
from nsparq.errors import CorruptBatch
from nsparq.options import NsqdOptions
from nsparq.packed import PackedBodies
from nsparq.storage.batch import MAGIC
from nsparq.storage.files import Files
from nsparq.storage.staging import Chunk

TOPICS = ("one", "two")


class Photographer(Files):
    """Keeps a copy of the disk before each call that changes it, and in the middle of each
    write."""

    def __init__(self, data_path: Path, album: Path) -> None:
        super().__init__()
        self._data_path, self._album = data_path, album
        self.is_on = False
        self.count = 0

    def _take(self) -> None:
        if self.is_on:
            shutil.copytree(self._data_path, self._album / f"{self.count:04d}")
            self.count += 1

    def write(self, fd: int, buffers: Any, position: int) -> None:
        self._take()
        if self.is_on:
            whole = b"".join(buffers)
            super().write(fd, [whole[: len(whole) * 2 // 3]], position)
            self._take()
        super().write(fd, buffers, position)

    def rename(self, source: Path, target: Path) -> None:
        self._take()
        super().rename(source, target)

    def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
        self._take()
        is_on, self.is_on = self.is_on, False
        super().replace(path, content, sync=sync)
        self.is_on = is_on

    def make_directory(self, path: Path) -> None:
        self._take()
        super().make_directory(path)

    def remove_tree(self, path: Path) -> None:
        self._take()
        super().remove_tree(path)


def open_broker(path: Path, files: Files | None = None, **flags: Any) -> Broker:
    path.mkdir(exist_ok=True)
    broker = Broker(NsqdOptions(data_path=str(path), retention_bytes=1 << 30, **flags), files=files)
    broker.open()
    return broker


def bodies(sequence: int, topic: str, part: int) -> list[bytes]:
    # More than a batch holds, so that a torn write can leave the first of them.
    return [b"%d %s %d %d" % (sequence, topic.encode(), part, number) for number in range(1500)]


def stage_all(broker: Broker, sequence: int, attempt: str) -> dict[str, int]:
    held = {}
    for part in range(2):
        name = f"{part}-{attempt}"
        for topic in TOPICS:
            packed = PackedBodies.of(bodies(sequence, topic, part))
            held[name] = broker.transactions.stage("p", sequence, name, topic, packed)
    return held


def finish(broker: Broker, transaction: Transaction) -> None:
    transactions = broker.transactions
    for chunk in transaction.chunks[transaction.applied :]:
        try:
            messages = None if transaction.applied in transaction.lost else chunk.read(broker.files)
        except CorruptBatch as error:
            transactions.lose(transaction, chunk, error)
            transaction.write_promise(sync=False)
            messages = None
        if messages is None:
            transactions.pass_over(transaction, chunk)
        else:
            transactions.apply(transaction, chunk, messages)
        broker.turn()
    transactions.finish(transaction, transactions.write_committed(transaction, sync=False, remember_s=60))


def commit(broker: Broker, sequence: int, parts: dict[str, int]) -> None:
    transaction = broker.transactions.promise("p", sequence, parts)
    broker.transactions.decide(transaction)
    transaction.write_promise(sync=False)
    finish(broker, transaction)


def publish_once(broker: Broker, sequence: int, attempt: str) -> None:
    """As a producer that does not know the result of its commit."""
    try:
        commit(broker, sequence, stage_all(broker, sequence, attempt))
    except AlreadyCommitted:
        pass


def stored(broker: Broker, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    if topic not in broker.topics:
        return found
    log = broker.topics[topic].log
    sequence = log.start
    while (batch := log.read(sequence, wait=True)) is not None:
        found.update(batch.bodies())
        sequence = batch.end
    return found


def expected(topic: str, *sequences: int) -> Counter[bytes]:
    return Counter(
        body for sequence in sequences for part in range(2) for body in bodies(sequence, topic, part)
    )


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_crash_at_any_point_leaves_all_or_nothing(tmp_path: Path, durability: str) -> None:
    album = tmp_path / "album"
    files = Photographer(tmp_path / "data", album)
    broker = open_broker(tmp_path / "data", files, durability=durability)
    publish_once(broker, 0, "first")
    files.is_on = True
    publish_once(broker, 1, "first")
    files.is_on = False
    assert files.count > 20
    before = {topic: expected(topic, 0) for topic in TOPICS}
    after = {topic: expected(topic, 0, 1) for topic in TOPICS}
    outcomes: Counter[str] = Counter()
    for photo in sorted(album.iterdir()):
        again = open_broker(photo, durability=durability)
        for transaction in again.transactions.unfinished():
            finish(again, transaction)
        seen = {topic: stored(again, topic) for topic in TOPICS}
        assert seen in (before, after), photo.name
        outcomes["after" if seen == after else "before"] += 1
        publish_once(again, 1, "replay")
        assert {topic: stored(again, topic) for topic in TOPICS} == after, photo.name
        again.close()
    broker.close()
    assert min(outcomes["before"], outcomes["after"]) > 3


def test_a_damaged_chunk_loses_no_other_message_wherever_a_crash_comes(tmp_path: Path) -> None:
    """One chunk is damaged before the commit, and another one after each crash."""
    album = tmp_path / "album"
    files = Photographer(tmp_path / "data", album)
    broker = open_broker(tmp_path / "data", files)
    transactions = broker.transactions
    transaction = transactions.promise("p", 0, stage_all(broker, 0, "a"))
    damage(transaction.chunks[1])
    transactions.decide(transaction)
    transaction.write_promise(sync=False)
    files.is_on = True
    finish(broker, transaction)
    files.is_on = False
    lost = Counter(bodies(0, "two", 0))
    seen_later = set()
    for photo in sorted(album.iterdir()):
        for is_damaged_since in (False, True):
            copy = tmp_path / "copy"
            shutil.copytree(photo, copy)
            again = open_broker(copy)
            found = again.transactions.find("p", 0) if again.transactions.unfinished() else None
            if found is not None:
                is_published = found.present.get("one", 0) >= found.chunks[0].messages
                if is_damaged_since:
                    damage(found.chunks[0])
                    seen_later.add(is_published)
                finish(again, found)
                expected_one = expected("one", 0)
                if is_damaged_since and not is_published:
                    part = found.chunks[0].messages - found.lost[0]
                    expected_one -= Counter(bodies(0, "one", 0)[part:])
                assert stored(again, "one") == expected_one, photo.name
                assert stored(again, "two") == expected("two", 0) - lost, photo.name
                assert again.transactions.producers["p"].committed.lost == found.lost_messages
            again.close()
            shutil.rmtree(copy)
    broker.close()
    assert seen_later == {False, True}


def damage(chunk: Chunk) -> None:
    whole = bytearray(chunk.path.read_bytes())
    whole[chunk.position + chunk.size - 1] ^= 1
    chunk.path.write_bytes(whole)


def test_messages_that_show_the_progress_of_a_commit_are_not_reclaimed(tmp_path: Path) -> None:
    broker = open_broker(tmp_path, max_bytes_per_file=4096)
    broker.options = NsqdOptions(data_path=str(tmp_path))
    transactions = broker.transactions
    transaction = transactions.promise("p", 0, stage_all(broker, 0, "a"))
    transactions.decide(transaction)
    transaction.write_promise(sync=False)
    for chunk in transaction.chunks:
        transactions.apply(transaction, chunk, chunk.read(broker.files))
    low = {name: broker.topics[name].low() for name in TOPICS}
    assert transaction.decision is not None
    assert low == {name: end for name, (_, end) in transaction.decision.topics.items()}
    transactions.finish(transaction, transactions.write_committed(transaction, sync=False, remember_s=60))
    assert not any(broker.topics[name].holds for name in TOPICS)
    broker.close()


def test_an_expired_transaction_is_never_committed_as_empty(tmp_path: Path) -> None:
    """Also if it expires while its promise is being written."""
    broker = open_broker(tmp_path)
    transactions = broker.transactions
    transactions.stage("p", 0, "a", "t", PackedBodies.of([b"1", b"2"]))
    transaction = transactions.promise("p", 0, {"a": 2})
    transaction.touched_ns -= 1 << 62
    transactions.expire()
    with pytest.raises(FileNotFoundError):
        transaction.write_promise(sync=False)
    with pytest.raises(Incomplete, match="part a has 0 messages and should have 2"):
        transactions.promise("p", 0, {"a": 2})
    broker.close()
    again = open_broker(tmp_path)
    assert again.transactions.find("p", 0) is None
    again.close()


def test_a_tag_in_use_is_not_given_twice(tmp_path: Path) -> None:
    broker = open_broker(tmp_path)
    transactions = broker.transactions
    tags = []
    for producer in "abc":
        transactions.stage(producer, 0, "x", "t", PackedBodies.of([b"1"]))
        transaction = transactions.promise(producer, 0, {"x": 1})
        transactions._tag = 0
        transactions.decide(transaction)
        assert transaction.decision is not None
        tags.append(transaction.decision.tag)
    assert tags == [1, 2, 3]
    broker.close()


def test_a_topic_deleted_during_a_commit_is_created_again(tmp_path: Path) -> None:
    broker = open_broker(tmp_path)
    transactions = broker.transactions
    transaction = transactions.promise("p", 0, stage_all(broker, 0, "a"))
    transactions.decide(transaction)
    transaction.write_promise(sync=False)
    first, *others = transaction.chunks
    transactions.apply(transaction, first, first.read(broker.files))
    broker.delete_topic(first.topic)
    finish(broker, transaction)
    assert stored(broker, first.topic) == expected(first.topic, 0) - Counter(bodies(0, first.topic, 0))
    broker.close()


def test_batches_carry_the_tag_of_their_transaction(tmp_path: Path) -> None:
    broker = open_broker(tmp_path)
    topic = broker.get_topic("t")
    topic.publishing.append_tagged(PackedBodies.of([b"1", b"2"]), 0, 7)
    topic.publishing.append_tagged(PackedBodies.of([b"3"]), 0, 8)
    middle = topic.log.end
    topic.publishing.append_tagged(PackedBodies.of([b"4"]), 0, 7)
    assert [count_tagged(topic.log, tag, topic.log.start) for tag in (7, 8, 9)] == [3, 1, 0]
    assert count_tagged(topic.log, 7, middle) == 1
    written = b"".join(path.read_bytes() for path in (tmp_path / "topics" / "t.topic").glob("*.log"))
    assert written.count(MAGIC) == 3
    broker.close()
