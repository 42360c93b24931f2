"""Message operations of nsqadmin that fail half-way: nothing is lost, and the error is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nsparq.admin.change import messages
from tests.admin.faulty import FaultyNsqd
from tests.admin.support import REFERENCE_ADMIN, AdminThread, join, start_admin
from tests.support import TestBroker, start_broker, unique_name, wait_until

pytestmark = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="ours only")

COUNT = 6


@pytest.fixture(scope="module")
def nsqd() -> Iterator[TestBroker]:
    with start_broker(broadcast_address="127.0.0.1") as nsqd:
        yield nsqd


@pytest.fixture
def faulty(nsqd: TestBroker) -> Iterator[FaultyNsqd]:
    with FaultyNsqd(nsqd) as faulty:
        yield faulty


@pytest.fixture
def admin(faulty: FaultyNsqd) -> Iterator[AdminThread]:
    # The watch must not use up the faults.
    with start_admin(
        nsqd_http_address=(faulty.address,), poll_interval=60.0, http_client_request_timeout=60.0
    ) as admin:
        yield admin  # type: ignore[misc]  # ours


@pytest.fixture
def letters(nsqd: TestBroker) -> str:
    """A topic of dead letters, numbered, from two topics, with the channel `review`."""
    topic = unique_name("letters")
    nsqd.control("create", topic, "review")
    nsqd.publish(topic, *(letter(topic, number) for number in range(COUNT)))
    return topic


def letter(topic: str, number: int) -> bytes:
    said = {"topic": f"{topic}.source{number % 2}", "error": "broken", "channel": "work"}
    return json.dumps({**said, "text": str(number), "base64": None}).encode()


def move(admin: AdminThread, topic: str, **more: Any) -> Any:
    return admin.call("POST", f"/api/move/{topic}/review", more)


def bodies(nsqd: TestBroker, topic: str, channel: str = "") -> list[int]:
    """What is there: in the channel, or else in the log of the topic."""
    query = {"topic": topic, "count": "1000", **({"channel": channel} if channel else {})}
    try:
        found = json.loads(nsqd.http("GET", "/channel/peek" if channel else "/topic/peek", **query))
    except AssertionError:  # there is no such topic
        return []
    texts = (json.loads(one["body"]) for one in found["messages"])
    return sorted(int(one["text"] if isinstance(one, dict) else one) for one in texts)


def published(nsqd: TestBroker, topic: str) -> list[int]:
    return sorted(bodies(nsqd, f"{topic}.source0") + bodies(nsqd, f"{topic}.source1"))


def is_paused(nsqd: TestBroker, topic: str) -> bool:
    found = nsqd.channel_stats(topic, "review")
    return bool(found and found["paused"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("path", "on"),
    [
        ("/channel/hold", 1),
        ("/channel/peek", 1),
        ("/channel/peek", 2),
        ("/topic/read", 1),
        ("/mpub", 1),
        ("/mpub", 2),
        ("/channel/commit", 1),
        ("/channel/hold", 2),
    ],
)
def test_a_move_that_fails_half_way_leaves_every_message_somewhere(
    nsqd: TestBroker, faulty: FaultyNsqd, admin: AdminThread, letters: str, path: str, on: int, when: str
) -> None:
    faulty.fail(path, when, on=on)
    answer = move(admin, letters)
    everywhere = {*published(nsqd, letters), *bodies(nsqd, letters, "review")}
    assert everywhere == {*range(COUNT)}
    assert path in faulty.seen and answer.status in (200, 409), answer
    if answer.status == 200:  # a GET is asked for once more
        assert published(nsqd, letters) == [*range(COUNT)]
        return
    assert not is_paused(nsqd, letters)
    faulty.heal()
    moved = move(admin, letters)
    assert moved.status == 200 and moved.json()["left"] == 0
    assert {*published(nsqd, letters)} == {*range(COUNT)}
    assert bodies(nsqd, letters, "review") == []


def test_a_failed_move_reports_what_was_done_before(
    nsqd: TestBroker, faulty: FaultyNsqd, admin: AdminThread, letters: str
) -> None:
    faulty.fail("/channel/commit", "before")
    said = move(admin, letters).json()["message"]
    assert f"{COUNT} messages were published, but not finished" in said
    faulty.fail("/channel/commit", "before", on=2)
    nsqd.publish(letters, *(letter(letters, number) for number in range(COUNT, 1500)))
    said = move(admin, letters).json()["message"]
    assert said.startswith("1,000 were moved, then: ") and "500 messages were published" in said


def test_a_channel_is_delivered_again_after_nsqadmin_is_killed_during_a_move(
    nsqd: TestBroker, faulty: FaultyNsqd, admin: AdminThread, letters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody ends the hold; it ends by itself, and a commit that comes after is refused."""
    monkeypatch.setattr(messages, "HOLD_S", 1)
    faulty.fail("/channel/hold", "before", on=2)

    def is_held() -> bool:
        return bool(nsqd.call(lambda broker: broker.topics[letters].channels["review"].hold))

    def wait_for_the_end() -> None:
        assert is_held()
        wait_until(lambda: not is_held())

    faulty.do("/channel/peek", wait_for_the_end)
    answer = move(admin, letters)
    assert answer.status == 409 and "messages were published, but not finished: " in answer.json()["message"]
    assert "NOT_HELD" in answer.json()["message"]
    with nsqd.connect() as consumer:
        consumer.identify()
        consumer.sub(letters, "review", rdy=COUNT)
        assert len(consumer.read_messages(COUNT)) == COUNT


def test_a_message_deferred_during_a_move_is_not_finished_with_the_others(
    nsqd: TestBroker, faulty: FaultyNsqd, admin: AdminThread, letters: str
) -> None:
    """Its number is below that of the last message that is moved."""

    def publish() -> None:
        with nsqd.connect() as producer:
            producer.dpub(letters, 60_000, letter(letters, COUNT))
            producer.pub(letters, letter(letters, COUNT + 1))

    faulty.do("/channel/peek", publish)
    answer = move(admin, letters)
    assert answer.status == 409 and "has deferred messages" in answer.json()["message"]
    assert bodies(nsqd, letters, "review") == [*range(COUNT + 2)]


def test_a_consumer_that_comes_and_goes_during_a_move_loses_nothing(
    nsqd: TestBroker, faulty: FaultyNsqd, admin: AdminThread, letters: str
) -> None:
    def consume() -> None:
        with nsqd.connect() as consumer:
            consumer.identify()
            consumer.sub(letters, "review", rdy=5)
            consumer.expect_silence(0.05)  # held

    faulty.do("/channel/peek", consume)
    assert move(admin, letters).status in (200, 409)
    assert {*published(nsqd, letters), *bodies(nsqd, letters, "review")} == {*range(COUNT)}


def test_requeued_messages_are_moved_too_and_a_pause_is_kept(
    nsqd: TestBroker, admin: AdminThread, letters: str
) -> None:
    with nsqd.connect() as consumer:
        consumer.identify()
        consumer.sub(letters, "review", rdy=2)
        for message in consumer.read_messages(2):
            consumer.req(message.id)
        consumer.rdy(0)
        consumer.barrier()
    nsqd.control("pause", letters, "review")
    answer = move(admin, letters)
    assert (answer.status, answer.json()["moved"]) == (200, COUNT), answer
    assert published(nsqd, letters) == [*range(COUNT)]
    assert is_paused(nsqd, letters)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_copy_is_reported_and_removes_nothing(
    nsqd: TestBroker, faulty: FaultyNsqd, admin: AdminThread, letters: str, when: str
) -> None:
    found = admin.get(f"/api/messages/{letters}")["messages"]
    chosen = [{"node": one["node"], "sequence": one["sequence"]} for one in found]
    faulty.fail("/mpub", when, on=2)
    answer = admin.call("POST", f"/api/copy/{letters}", {"messages": chosen})
    assert answer.status == 409
    assert bodies(nsqd, letters, "review") == [*range(COUNT)]
    faulty.heal()
    answer = admin.call("POST", f"/api/copy/{letters}", {"messages": chosen})
    assert (answer.status, answer.json()["copied"]) == (200, COUNT)
    assert {*published(nsqd, letters)} == {*range(COUNT)}


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "5.7", "true", '"x"', "null", "[]", "{}"])
def test_what_is_no_whole_number_is_refused(admin: AdminThread, letters: str, number: str) -> None:
    for path, body in (
        (f"/api/copy/{letters}", '{"to": "q", "messages": [{"node": "n", "sequence": %s}]}'),
        (f"/api/move/{letters}/review", '{"to": "q", "count": %s}'),
        (f"/api/messages/{letters}", '{"body": "x", "defer_ms": %s}'),
    ):
        admin.call("POST", path, (body % number).encode()).expect_error(400, "INVALID_BODY")


def test_an_impossible_move_is_refused_before_anything_is_published(
    nsqd: TestBroker, admin: AdminThread, letters: str
) -> None:
    nsqd.publish(letters, b"no letter")
    answer = move(admin, letters)
    assert answer.status == 409 and "does not say which topic" in answer.json()["message"]
    assert published(nsqd, letters) == []
    move(admin, letters, to="bad name").expect_error(400, "INVALID_TOPIC")
    move(admin, letters, to=letters).expect_error(400, "SAME_TOPIC")
    own = unique_name("own")
    nsqd.control("create", own, "review")
    nsqd.publish(own, json.dumps({"topic": own, "error": "x", "text": "1"}).encode())
    answer = move(admin, own)
    assert answer.status == 409 and "came from this topic" in answer.json()["message"]


def test_a_node_that_does_not_report_its_features_is_asked_again(
    nsqd: TestBroker, faulty: FaultyNsqd, letters: str
) -> None:
    """A failed answer is not taken for NSQ's own nsqd, which answers 404."""
    faulty.fail("/openapi.json", "before", on=1)
    with start_admin(nsqd_http_address=(faulty.address,), poll_interval=0.1) as admin:
        found = wait_until(lambda: (one := admin.get(f"/api/messages/{letters}"))["messages"] and one)
        assert found["unable"] == []
    assert faulty.seen.count("/openapi.json") > 1


@pytest.fixture
def limited(faulty: FaultyNsqd) -> FaultyNsqd:
    """As NSQ's own nsqd is; asked for before `admin`, which must not see it otherwise."""
    faulty.hide("/openapi.json", "/topic/peek", "/channel/peek", "/channel/seek", "/topic/positions")
    return faulty


def test_features_of_our_nsqd_are_shown_as_absent_with_nsqs_own(
    nsqd: TestBroker, limited: FaultyNsqd, admin: AdminThread, letters: str
) -> None:
    shown = admin.page(f"/topics/{letters}/review")
    assert 'id="no-peek"' in shown and 'id="messages-link"' not in shown and 'id="replay-link"' not in shown
    assert 'id="unable"' in admin.page(f"/messages/{letters}/review")
    assert 'id="unable"' in admin.page(f"/replay/{letters}/review")
    assert admin.get(f"/api/messages/{letters}")["unable"] == [join(nsqd.http_address)]
    move(admin, letters).expect_error(501, "NOT_SUPPORTED")
    replay = admin.call("POST", f"/api/replay/{letters}/review", {"to": "start", "dry_run": False})
    replay.expect_error(501, "NOT_SUPPORTED")
    assert admin.call("POST", f"/api/messages/{letters}", {"body": "x"}).status == 200
    # It would take the headers for a part of the body.
    headed = admin.call("POST", f"/api/messages/{letters}", {"body": "y", "headers": {"a": "1"}})
    assert headed.status == 501 and "does not know headers" in headed.json()["reason"]


def test_an_nsqd_that_does_not_report_its_features_is_not_taken_for_nsqs_own(
    nsqd: TestBroker, faulty: FaultyNsqd, letters: str
) -> None:
    faulty.cut_off("/openapi.json")
    with start_admin(nsqd_http_address=(faulty.address,), poll_interval=60.0) as admin:
        answer = move(admin, letters)
        assert answer.status == 502 and b"UPSTREAM_ERROR" in answer.body
        found = admin.get(f"/api/messages/{letters}")
        assert found["unable"] == [] and faulty.address in found["errors"][0]
        for page in ("messages", "replay"):
            shown = admin.page(f"/{page}/{letters}/review")
            assert 'id="unable"' not in shown and faulty.address in shown
        faulty.heal()
        assert move(admin, letters).status == 200


def test_a_replay_that_fails_on_a_node_says_so(
    nsqd: TestBroker, faulty: FaultyNsqd, admin: AdminThread, letters: str
) -> None:
    faulty.fail("/channel/seek", "before")
    answer = admin.call("POST", f"/api/replay/{letters}/review", {"to": "end", "dry_run": False})
    assert answer.status == 409 and join(nsqd.http_address) in answer.json()["message"]
    assert bodies(nsqd, letters, "review") == [*range(COUNT)]


AWAY = "127.0.0.1:1"


@pytest.fixture
def partly_away(nsqd: TestBroker) -> Iterator[AdminThread]:
    """One of its two nsqds does not answer. It may have the topic, too."""
    addresses = (join(nsqd.http_address), AWAY)
    with start_admin(nsqd_http_address=addresses, poll_interval=60.0) as admin:
        yield admin  # type: ignore[misc]  # ours


def test_a_move_names_the_nodes_that_it_could_not_ask(partly_away: AdminThread, letters: str) -> None:
    moved = move(partly_away, letters).json()
    assert (moved["moved"], moved["left"]) == (COUNT, 0)
    assert AWAY in moved["message"]


@pytest.mark.parametrize("is_dry", [True, False])
def test_a_replay_names_the_nodes_that_it_could_not_ask(
    partly_away: AdminThread, letters: str, is_dry: bool
) -> None:
    body = {"to": "end", "dry_run": is_dry}
    found = partly_away.call("POST", f"/api/replay/{letters}/review", body).json()
    assert [one["skipped"] for one in found["nodes"]] == [COUNT]
    assert AWAY in found["message"]


def test_messages_of_a_node_that_is_away_are_not_left_out_of_a_copy(
    nsqd: TestBroker, partly_away: AdminThread, letters: str
) -> None:
    (first, *_) = partly_away.get(f"/api/messages/{letters}")["messages"]
    chosen = [{"node": node, "sequence": first["sequence"]} for node in (first["node"], AWAY)]
    answer = partly_away.call("POST", f"/api/copy/{letters}", {"messages": chosen})
    assert answer.status == 409 and AWAY in answer.json()["message"]
    assert published(nsqd, letters) == []
