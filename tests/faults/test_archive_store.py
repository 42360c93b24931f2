"""A store that refuses, is slow or full, loses connections, answers late or lists late: publishers
and consumers see nothing of it, and nsqd catches up by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsparq.testing import FaultProxy
from tests.support import start_broker, wait_until
from tests.support.s3 import run_s3
from tests.support.s3_front import S3Front

from .load import drain

pytest.importorskip("moto")

BODY = 20_000
COUNT = 60
FLAGS: dict[str, Any] = {
    "max_bytes_per_file": 200_000,
    "archive_local_bytes": 1,
    "mem_queue_size": 1,
    "sync_timeout": 0.1,
    "checkpoint_interval": 0.1,
}


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with run_s3("lake") as settings:
        yield settings


@pytest.fixture
def proxy(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Between nsqd and the store."""
    with FaultProxy(s3["AWS_ENDPOINT_URL"].removeprefix("http://")) as proxy:
        for name, value in s3.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
        yield proxy


def body(number: int) -> bytes:
    return (b"%06d" % number).ljust(BODY, b".")


def archive_of(broker: Any, topic: str = "t") -> dict[str, Any]:
    (found,) = broker.stats(topic)["topics"]
    archive: dict[str, Any] = found["archive"]
    return archive


FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "refuses": lambda proxy: proxy.refuse(),
    "is slow": lambda proxy: proxy.throttle(300_000),
    "loses connections in mid-upload": lambda proxy: proxy.cut_after(100_000, "to_broker"),
    "takes requests and loses the answers": lambda proxy: proxy.cut_after(10, "to_client"),
    "answers late": lambda proxy: proxy.delay(0.3),
    "does not answer": lambda proxy: proxy.stall(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nobody_notices_a_store_that(fault: str, tmp_path: Path, proxy: FaultProxy) -> None:
    url = f"s3://lake/{fault.replace(' ', '-')}"
    with start_broker(tmp_path, archive=url, **FLAGS) as broker:
        broker.control("create", "t")
        broker.control("create", "t", "late")
        broker.control("create", "t", "live")
        FAULTS[fault](proxy)
        for number in range(COUNT):
            broker.publish("t", body(number))
        assert drain(broker, "t", "live", 0.2) == [body(number) for number in range(COUNT)]
        assert broker.http("GET", "/ping") == b"OK"
        if fault in ("refuses", "loses connections in mid-upload"):
            wait_until(lambda: archive_of(broker)["error"])
            assert archive_of(broker)["waiting_bytes"] > 0
        proxy.heal()
        wait_until(lambda: archive_of(broker)["waiting_segments"] == 0, what=lambda: archive_of(broker))
        assert archive_of(broker)["segments"] >= COUNT * BODY // 250_000
        wait_until(lambda: len([*tmp_path.glob("topics/t.topic/*.log")]) == 1)
        assert drain(broker, "t", "late", 0.2) == [body(number) for number in range(COUNT)]


@pytest.fixture
def front(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Front]:
    """Between nsqd and the store, and knows S3."""
    with S3Front(s3["AWS_ENDPOINT_URL"]) as front:
        for name, value in s3.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        yield front


def test_nobody_notices_a_store_that_is_full(tmp_path: Path, front: S3Front) -> None:
    with start_broker(tmp_path, archive="s3://lake/full", **FLAGS) as broker:
        broker.control("create", "t")
        broker.control("create", "t", "late")
        broker.control("create", "t", "live")
        front.refuse_puts(403, "QuotaExceeded")
        for number in range(COUNT):
            broker.publish("t", body(number))
        assert drain(broker, "t", "live", 0.2) == [body(number) for number in range(COUNT)]
        # Ceph and MinIO say it in different ways.
        for status, code in ((403, "QuotaExceeded"), (507, "XMinioStorageFull")):
            front.refuse_puts(status, code)
            text = f"<Code>{code}</Code><Message>There is no room left."
            wait_until(lambda text=text: text in archive_of(broker)["error"], what=lambda: archive_of(broker))
        assert archive_of(broker)["waiting_bytes"] > 0
        assert broker.http("GET", "/ping") == b"OK"
        front.heal()
        wait_until(lambda: archive_of(broker)["waiting_segments"] == 0, what=lambda: archive_of(broker))
        assert archive_of(broker)["error"] == ""
        assert drain(broker, "t", "late", 0.2) == [body(number) for number in range(COUNT)]


def test_nobody_notices_a_store_that_lists_what_was_there_before(tmp_path: Path, front: S3Front) -> None:
    url = "s3://lake/stale"
    published = 0

    def publish_and_archive(broker: Any) -> None:
        nonlocal published
        for number in range(published, published + COUNT):
            broker.publish("t", body(number))
        published += COUNT
        wait_until(lambda: archive_of(broker)["waiting_segments"] == 0, what=lambda: archive_of(broker))
        assert archive_of(broker)["error"] == ""

    (tmp_path / "first").mkdir()
    with start_broker(tmp_path / "first", archive=url, node_id=5, **FLAGS) as broker:
        broker.control("create", "t")
        broker.control("create", "t", "late")
        publish_and_archive(broker)
        front.freeze_lists("lake")
        publish_and_archive(broker)
    with start_broker(tmp_path / "first", archive=url, node_id=5, **FLAGS) as broker:
        publish_and_archive(broker)
        archived = archive_of(broker)["segments"]
        assert archived >= 3 * COUNT * BODY // 250_000
    # The disk is lost, too. What the store does not list yet is found all the same.
    (tmp_path / "second").mkdir()
    with start_broker(tmp_path / "second", archive=url, node_id=5, restore=True, **FLAGS) as broker:
        assert archive_of(broker)["segments"] == archived
        found = drain(broker, "t", "late", 0.2)
        assert found == [body(number) for number in range(len(found))]
        assert len(found) > 2.5 * COUNT
        publish_and_archive(broker)


def test_a_range_read_says_that_the_store_is_away_and_works_again(tmp_path: Path, proxy: FaultProxy) -> None:
    with start_broker(tmp_path, archive="s3://lake/ranges", **FLAGS) as broker:
        broker.control("create", "t")
        broker.control("create", "t", "c")
        for number in range(COUNT):
            broker.publish("t", body(number))
        wait_until(lambda: len([*tmp_path.glob("topics/t.topic/*.log")]) == 1)
        positions = json.loads(broker.http("GET", "/topic/positions", topic="t"))
        assert positions["messages"] == COUNT
        assert positions["bytes"] >= COUNT * BODY, "the archive counts"
        path = f"/topic/read?topic=t&from={positions['earliest']}&max_bytes=100000"
        proxy.refuse()
        answer = broker.request("GET", path)
        assert (answer.status, json.loads(answer.body)["message"]) == (503, "ARCHIVE_UNAVAILABLE")
        assert broker.http("GET", "/ping") == b"OK"
        proxy.heal()
        found = wait_until(lambda: (read := broker.request("GET", path)).status == 200 and read)
        assert body(0) in found.body
        query = {"topic": "t", "from": str(positions["earliest"]), "count": "1"}
        (peeked,) = json.loads(broker.http("GET", "/topic/peek", **query))["messages"]
        assert peeked["sequence"] == positions["earliest"]
