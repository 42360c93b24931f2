"""The commands for ready-made pipelines: archive, compact, stats, replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsparq.pipeline.file import ready_made
from nsparq.testing import Broker
from nsparq.tools.main import main
from tests.pipeline.conftest import Runs, bodies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.usefixtures("spark", "signals_restored"),
]


@pytest.fixture
def command(
    spark: SparkSession, broker: Broker, root_logger_restored: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """`nsparq pipeline …` in the session of the tests, which it does not stop."""
    from nsparq.pipeline.execute import runner

    spark.conf.set("spark.sql.session.timeZone", "UTC")
    monkeypatch.setattr(runner, "build_session", lambda *_: spark)
    monkeypatch.setattr(type(spark), "stop", lambda self: None)

    def run(*arguments: str) -> None:
        assert main(["pipeline", *arguments, f"--nsqd-http-address={broker.http_address}"]) == 0

    return run


def test_what_is_archived_can_be_counted_and_published_again(
    command: Callable[..., None],
    broker: Broker,
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    archive = tmp_path / "archive"
    orders = [json.dumps({"n": n, "at": "2026-11-15T12:00:00Z"}).encode() for n in range(50)]
    for start in (0, 20, 40):
        broker.publish("orders", *orders[start : start + 20])
        broker.publish("clicks", b"\x00\xff%d" % start)
        command(
            "archive",
            "--topic-pattern=orders|clicks",
            f"--output-dir={archive}",
            "--available-now",
            "--compact=3",
        )
    rows = spark.read.parquet(str(archive)).sort("topic", "offset").collect()
    assert [bytes(row.body) for row in rows] == [b"\x00\xff0", b"\x00\xff20", b"\x00\xff40", *orders]
    assert {row.topic for row in rows} == {"orders", "clicks"}
    names = {"body", "node", "offset", "timestamp", "id", "headers", "topic", "date"}
    assert rows[0].asDict().keys() == names
    # Three files of each topic have become one.
    assert len(list(archive.glob("topic=*/date=*/*.parquet"))) == 2
    assert broker.channel_stats("orders", "archive")["depth"] == 0  # type: ignore[index]
    capsys.readouterr()

    command("stats", "--topic=orders", "--topic=clicks", "--every=1 day", "--event-time=at")
    heading, clicks, counted = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "time", "topic", "messages", "bytes", "mean_bytes", "max_bytes", "p50_ms", "p95_ms", "max_ms",
    ]  # fmt: skip
    assert clicks.split()[2:] == ["clicks", "3", "11", "4", "4"]
    assert counted.split()[2:4] == ["orders", "50"]

    command("replay", f"--from-dir={archive}", "--topic=orders", "--to=again", "--name=all")
    command("replay", f"--from-dir={archive}", "--topic=orders", "--to=again", "--name=all")
    assert [message.body for message in broker.peek("again", count=1000)] == orders
    command("replay", "--topic=clicks", "--to=again.clicks", "--until=2001-01-01T00:00:00Z")
    command("replay", "--topic=clicks", "--to=again.clicks", "--rate=1000")
    assert [message.body[:2] for message in broker.peek("again.clicks")] == [b"\x00\xff"] * 3


def test_stats_of_what_comes(run: Runs, broker: Broker) -> None:
    topics = ready_made.Topics(nsq={"nsqd": [broker.http_address]}, topics=["orders"])
    text = ready_made.stats(
        topics,
        run.directory / "stats",
        sink='sink = { topic = "stats" }',
        trigger="0s",
        channel="stats#ephemeral",
    )
    broker.publish("orders", b"abc", b"defgh")
    run(text, until=lambda _: broker.peek("stats"))
    (found,) = bodies(broker, "stats")
    assert (found["topic"], found["messages"], found["bytes"], found["max_bytes"]) == ("orders", 2, 8, 5)
    assert 0 <= found["p50_ms"] <= found["max_ms"] < 120_000
