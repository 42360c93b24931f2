"""Message headers in the broker: they stay with their messages wherever these are kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.broker.broker import Broker
from nsparq.broker.data_directory import NEEDS_HEADERS
from nsparq.broker.peek import peek_channel, peek_topic
from nsparq.errors import StartError
from nsparq.headers import encode_headers
from nsparq.packed import PackedBodies
from nsparq.private_random import private_random
from tests.wire.harness import BUILDS, using

from .rig import Delivered, FakeClient, Rig

MakeRig = Callable[..., Rig]
Messages = list[tuple[bytes, bytes]]

A, B = encode_headers({"key": "a"}), encode_headers({"key": "b", "other": "ü" * 20})
BLOCKS = st.sampled_from([b"", b"", A, B])
GROUPS = st.lists(st.lists(st.tuples(st.binary(min_size=1, max_size=40), BLOCKS), min_size=1), max_size=6)


def publish(rig: Rig, *messages: tuple[bytes, bytes], topic: str = "t", defer_ms: int = 0) -> None:
    bodies, blocks = zip(*messages, strict=True)
    rig.publish(topic, *bodies, blocks=blocks, defer_ms=defer_ms)


def seen(messages: list[Delivered]) -> Messages:
    return [(one.body, one.block) for one in messages]


def plain(messages: Messages) -> Messages:
    return [(body, b"") for body, _ in messages]


@pytest.mark.parametrize("build", BUILDS)
@given(GROUPS, st.sampled_from([{}, {"durability": "memory"}, {"mem_queue_size": 1}]), st.booleans())
def test_any_messages_come_back_as_they_were_published(
    build: str, groups: list[Messages], flags: dict[str, object], is_clean: bool
) -> None:
    published = [message for group in groups for message in group]
    with using(build), tempfile.TemporaryDirectory() as directory:
        rig = Rig(Path(directory), max_bytes_per_file=500, **flags)
        for name in ("asked", "plain", "shared", "later"):
            rig.channel(name)
        for group in groups:
            publish(rig, *group)
        assert seen(rig.subscribe("t", "asked", rdy=2500, headers=True).take()) == published
        assert seen(rig.subscribe("t", "plain", rdy=2500).take()) == plain(published)
        # Two clients of one channel, one of them without headers; then each message again.
        clients = [rig.subscribe("t", "shared", rdy=3, headers=asks) for asks in (True, False)]
        assert all(one.block == b"" for one in clients[1].messages)
        for client in clients:
            rig.disconnect(client)
        again = rig.subscribe("t", "shared", rdy=2500, headers=True).take()
        assert sorted(seen(again)) == sorted(published)
        if is_clean or "durability" not in flags:
            (rig.restart if is_clean else rig.crash)()
            assert seen(rig.subscribe("t", "later", rdy=2500, headers=True).take()) == published
        rig.drop()


def test_deferred_and_requeued_messages_keep_headers(rig: Rig) -> None:
    client = rig.subscribe(rdy=10, headers=True)
    publish(rig, (b"deferred", A), defer_ms=1000)
    publish(rig, (b"requeued", B))
    (message,) = client.take()
    rig.requeue(client, message, 1000)
    rig.restart()
    client = rig.subscribe(rdy=10, headers=True)
    rig.pass_time(1)
    assert sorted(seen(client.take())) == [(b"deferred", A), (b"requeued", B)]


@pytest.mark.parametrize("topic", ["t", "t#ephemeral"])
def test_carried_over_messages_keep_headers(make_rig: MakeRig, topic: str) -> None:
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(topic, rdy=1000, headers=True)
    publish(rig, (b"one", A), (b"two", b""), *[(b"x", B)] * 40, topic=topic)
    for _ in range(5):
        publish(rig, *[(b"x" * 50, B)] * 40, topic=topic)
        rig.finish(client, *client.messages[2:])
        client.messages[2:] = []
        rig.maintain()
    held = client.messages
    assert set(rig.channel("c", topic).carried_over.store.kept) == {one.id & ((1 << 54) - 1) for one in held}
    shown = peek_channel(rig.channel("c", topic), ["in_flight"], 10, 1 << 20).read()
    assert [one.headers for one in shown] == [{"key": "a"}, {}]
    if topic == "t":
        rig.restart()
        client = rig.subscribe(rdy=10, headers=True)
    else:
        for message in [*held]:
            rig.requeue(client, message)
    assert seen(client.messages[-2:]) == [(b"one", A), (b"two", b"")]


def test_a_sample_and_a_paused_topic_keep_headers(rig: Rig) -> None:
    private_random.seed(5)
    rig.subscribe("t", "all", headers=True)
    client = rig.subscribe("t", "sample", rdy=1000, headers=True, sample_rate=50)
    without = rig.subscribe("t", "sample-plain", rdy=1000, sample_rate=50)
    rig.topic().pause()
    published = [(b"%d" % n, (b"", A, B)[n % 3]) for n in range(100)]
    publish(rig, *published)
    rig.topic().unpause()
    rig.turn()
    assert 0 < len(client.messages) < 100
    assert set(seen(client.messages)) <= set(published)
    assert set(seen(without.messages)) <= set(plain(published))


def test_staged_messages_keep_headers(rig: Rig) -> None:
    bodies = PackedBodies.of([b"one", b"two", b"three"]).with_blocks(PackedBodies.of([A, b"", B]))
    for topic in ("t", "u"):
        rig.subscribe(topic)
    rig.broker.transactions.stage("p", 1, "part", "t", bodies)
    rig.broker.transactions.stage("p", 1, "part", "u", PackedBodies.of([b"plain"]), defer_ms=1000)
    rig.broker.transactions.stage("p", 1, "part", "t", bodies, defer_ms=1000)
    rig.restart()
    _commit(rig.broker)
    rig.turn()
    rig.pass_time(1)
    expected = [(b"one", A), (b"two", b""), (b"three", B)]
    assert seen(rig.subscribe("t", rdy=10, headers=True).take()) == expected * 2
    assert seen(rig.subscribe("u", rdy=10, headers=True).take()) == [(b"plain", b"")]


def _commit(broker: Broker) -> None:
    transactions = broker.transactions
    transaction = transactions.promise("p", 1, {"part": 7})
    transactions.decide(transaction)
    for chunk in transaction.chunks:
        transactions.apply(transaction, chunk, chunk.read(broker.files))


def test_peek_shows_headers(rig: Rig) -> None:
    client: FakeClient = rig.subscribe(rdy=1)
    publish(rig, (b"one", A), (b"two", b""))
    for peek in (
        peek_topic(rig.topic(), None, 10, 1 << 20),
        peek_channel(rig.channel(), ["in_flight", "ready"], 10, 1 << 20),
    ):
        assert [(one.body, one.headers) for one in peek.read()] == [(b"one", {"key": "a"}), (b"two", {})]
    assert seen(client.messages) == [(b"one", b"")]
    assert len(peek_topic(rig.topic(), rig.topic().log.start, 10, 4).read()) == 1, "headers count, too"


def test_damage_in_the_headers_loses_the_batch_and_no_other(rig: Rig) -> None:
    rig.channel()
    for n in range(3):
        publish(rig, (b"%d" % n, encode_headers({"number": str(n)})))
    rig.close()
    (path,) = rig.topic_directory().glob("*.log")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"number\x00\x011", b"number\x00\x01x"))
    rig.start()
    assert rig.subscribe(rdy=10).take_bodies() == [b"0", b"2"]
    assert rig.topic().log.corrupt_messages == 1


# Versions


def test_the_first_message_with_headers_marks_the_data_path(rig: Rig) -> None:
    """An older version takes the mark for a topic that is not a directory, and does not start."""
    mark = rig.data_path / "topics" / NEEDS_HEADERS
    publish(rig, (b"plain", b""))
    publish(rig, (b"not on disk", A), topic="t#ephemeral")
    assert not mark.exists()
    publish(rig, (b"m", A))
    assert mark.is_file()
    rig.restart()
    assert sorted(rig.broker.topics) == ["t"]
    names = sorted(path.name for path in mark.parent.iterdir())
    assert names == [NEEDS_HEADERS, "t.topic"], "it comes before every topic: nothing else is touched"
    assert NEEDS_HEADERS < min("-.0A_a")


def test_staged_messages_with_headers_mark_the_data_path(rig: Rig) -> None:
    for block, is_marked in ((b"", False), (A, True)):
        bodies = PackedBodies.of([b"m"]).with_blocks(PackedBodies.of([block]))
        rig.broker.transactions.stage("p", 1, "part", "t", bodies)
        assert (rig.data_path / "topics" / NEEDS_HEADERS).exists() == is_marked


def test_a_message_is_refused_if_the_mark_cannot_be_written(rig: Rig) -> None:
    client = rig.subscribe(rdy=10)
    rig.files.fail("open", NEEDS_HEADERS)
    assert isinstance(rig.publish("t", b"m", blocks=[A]).error, OSError)
    rig.files.heal()
    publish(rig, (b"again", A))
    assert seen(client.take()) == [(b"again", b"")]


def test_a_data_path_of_a_newer_version_is_refused_and_left_alone(rig: Rig) -> None:
    publish(rig, (b"m", A))
    rig.close()
    (rig.data_path / "topics" / "!compressed-batches.topic").touch()
    before = {path: path.read_bytes() for path in rig.data_path.rglob("*") if path.is_file()}
    with pytest.raises(StartError, match="was used by a newer version of nsparq: compressed-batches"):
        rig.start()
    assert {path: path.read_bytes() for path in rig.data_path.rglob("*") if path.is_file()} == before
    (rig.data_path / "topics" / "!compressed-batches.topic").unlink()
    rig.start()
