"""A data directory written by an earlier revision opens with every message, attempt and delay.

`data/previous_revision.json` holds the files of two such directories, one left by a clean stop and
one by a crash, as {how it ended: {path: base64}}. The same steps led to both:

- Topic `orders`, in segments of about 1,000 bytes. Channel `work` received order-000 to order-239,
  requeued order-005 at once and order-010 for 90 s, and finished all but these and order-235.
  order-005 and order-010 were then carried over, and their segments removed.
- Channel `audit` came next, then order-240 to order-259, then `later` with a delay of 120 s.
- Topic `paused` has one channel and a setting of its own; it was paused before three messages.
- Transaction `query`/7 is prepared: two messages for topic `staged`, and one with a delay of 30 s.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from nsparq.broker.stats import broker_stats
from tests.broker.rig import FakeClient, Rig, counts

DIRECTORIES: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "data" / "previous_revision.json").read_text()
)
NEWEST = [b"order-%03d" % number for number in range(240, 260)]


@pytest.fixture(params=[*DIRECTORIES])
def old_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    for name, content in DIRECTORIES[request.param].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))
    rig = Rig(tmp_path)
    request.addfinalizer(rig.drop)
    return rig


def take(client: FakeClient) -> list[tuple[bytes, int]]:
    """Body and attempts of the messages since the last call."""
    return [(message.body, message.attempts) for message in client.take()]


def test_no_file_counts_as_damaged(old_rig: Rig):
    stats = broker_stats(old_rig.broker)
    assert stats["health"] == "OK"
    assert stats["corrupt_files"] == 0
    for topic in stats["topics"]:
        damage = topic["corrupt_batches"], topic["corrupt_messages"], topic["corrupt_files"]
        assert damage == (0, 0, 0), topic["topic_name"]


def test_requeued_and_new_messages_come_with_their_attempts(old_rig: Rig):
    assert counts(old_rig.channel("work", "orders")) == (22, 0, 2)
    client = old_rig.subscribe("orders", "work", rdy=100)
    requeued = [(b"order-235", 2), (b"order-005", 3)]
    received = take(client)
    assert sorted(received[:2]) == sorted(requeued)
    assert received[2:] == [(body, 1) for body in NEWEST]


def test_deferred_messages_come_when_they_are_due(old_rig: Rig):
    client = old_rig.subscribe("orders", "work", rdy=100)
    assert not old_rig.finish(client, *client.take())
    old_rig.pass_time(89)
    assert take(client) == []
    old_rig.pass_time(1)
    assert take(client) == [(b"order-010", 2)]
    old_rig.pass_time(29)
    assert take(client) == []
    old_rig.pass_time(1)
    assert take(client) == [(b"later", 1)]


def test_another_channel_gets_what_was_published_after_it_was_created(old_rig: Rig):
    client = old_rig.subscribe("orders", "audit", rdy=100)
    assert take(client) == [(body, 1) for body in NEWEST]
    assert not old_rig.finish(client, *client.messages)
    old_rig.pass_time(120)
    assert take(client) == [(b"later", 1)]


def test_a_paused_topic_is_still_paused_and_keeps_its_settings(old_rig: Rig):
    client = old_rig.subscribe("paused", "c", rdy=100)
    topic = old_rig.topic("paused")
    assert topic.paused
    assert topic.settings.durability == "fsync"
    assert take(client) == []
    topic.unpause()
    old_rig.turn()
    assert take(client) == [(b"one", 1), (b"two", 1), (b"three", 1)]


def test_a_prepared_transaction_can_be_committed(old_rig: Rig):
    transactions = old_rig.broker.transactions
    transaction = transactions.find("query", 7)
    assert transaction is not None
    assert (transaction.state, transaction.note, transaction.messages) == ("prepared", "a note", 3)
    transactions.decide(transaction)
    for chunk in transaction.chunks:
        transactions.apply(transaction, chunk, chunk.read(old_rig.files))
    client = old_rig.subscribe("staged", "c", rdy=100)
    assert take(client) == [(b"a", 1), (b"b", 1)]
    old_rig.finish(client, *client.messages)
    old_rig.pass_time(30)
    assert take(client) == [(b"c", 1)]


def test_new_messages_get_numbers_behind_the_old_ones(old_rig: Rig):
    client = old_rig.subscribe("orders", "work", rdy=100)
    old = {message.id for message in client.take()}
    old_rig.publish("orders", b"new")
    (new,) = client.take()
    assert new.id > max(old)
