"""The archive in Spark: its files, its figures, and a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nsparq.headers import decode_headers
from nsparq.pipeline.execute.batch_read import archived, messages_of
from nsparq.pipeline.file import ready_made
from nsparq.testing import Broker
from tests.pipeline.conftest import Runs
from tests.support.with_headers import publish_with_headers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")

THROUGH_SPARK = """\
SELECT body, _topic AS topic, _node AS node, _offset AS offset, _timestamp AS timestamp, _id AS id FROM input
"""
DECODE = 'decode = { format = "message", headers = true }'


def text(
    broker: Broker,
    output: Path,
    *,
    through_spark: bool = False,
    headers: bool = True,
    compact: int = 0,
    channel: str = "archive",
) -> str:
    topics = ready_made.Topics(nsq={"nsqd": [broker.http_address]}, pattern="orders|clicks|more")
    made = ready_made.archive(topics, output, trigger="available-now", compact=compact, channel=channel)
    if through_spark:
        # As older versions wrote the archive: through Spark.
        select = THROUGH_SPARK.replace(" FROM", ", _headers AS headers FROM") if headers else THROUGH_SPARK
        raw = "decode = { format = 'raw', headers = true }"
        made = made.replace(DECODE, f"{raw}\nsql = {json.dumps(select)}")
        assert "sql" in made
    return made


def rows(spark: SparkSession, table: Path) -> list[Any]:
    return spark.read.parquet(str(table)).sort("topic", "offset").collect()


def files(table: Path) -> list[Path]:
    return sorted(table.glob("topic=*/date=*/*.parquet"))


def test_the_files_are_those_that_spark_would_have_written(
    run: Runs, broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    broker.publish("orders", *(b"%d" % number for number in range(500)))
    broker.publish("clicks", bytes(range(256)), b"\xff" * (1 << 20))
    publish_with_headers(broker.http_address, "orders", (b"traced", {"traceparent": "00-1"}))
    broker.publish("clicks", b"later", defer=3600.0)
    ours = run(text(broker, tmp_path / "ours"))["archive"]
    # Another archive would move the channel of this one.
    refused = run(text(broker, tmp_path / "refused"))["archive"]
    assert "the channel archive of topic orders" in refused.error
    assert "belongs to another query" in refused.error
    assert files(tmp_path / "refused") == []
    theirs = run(text(broker, tmp_path / "theirs", through_spark=True, channel="theirs"))["archive"]
    assert rows(spark, tmp_path / "ours") == rows(spark, tmp_path / "theirs")
    found, wanted = (pq.read_schema(files(tmp_path / name)[0]) for name in ("ours", "theirs"))
    assert found.remove_metadata() == wanted.remove_metadata()
    # The figures count messages, although Spark only sees files.
    assert (ours.rows, ours.rows_written, ours.lag) == (theirs.rows, theirs.rows_written, theirs.lag)
    assert (ours.rows, ours.rows_written, ours.lag) == (504, 504, 0)
    (traced,) = [row.headers for row in rows(spark, tmp_path / "ours") if row.headers]
    assert traced == {"traceparent": "00-1"}


def test_an_archive_of_an_older_version_can_be_continued_and_read(
    run: Runs, broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    table = tmp_path / "archive"
    topics = ready_made.Topics(nsq={}, pattern=".*")
    for number in (b"1", b"2"):
        broker.publish("orders", number)
        # Through Spark, and without headers.
        run(text(broker, table, through_spark=True, headers=False))
        assert [one[1] for one in messages_of(archived(spark, table, topics))][-1] == number
    named = {"nsq-producer": "a", "nsq-epoch": "1", "nsq-number": "1", "kind": "new"}
    publish_with_headers(broker.http_address, "orders", (b"3", named))
    broker.publish("more", b"4")
    assert run(text(broker, table, compact=2))["archive"].rows == 2
    assert [bytes(row.body) for row in rows(spark, table)] == [b"4", b"1", b"2", b"3"]
    # Old files were joined with each other, but not with new ones, which have another column.
    assert len(files(table)) == 3
    again = [(decode_headers(block), body) for block, body in messages_of(archived(spark, table, topics))]
    assert again == [({}, b"1"), ({}, b"2"), ({"kind": "new"}, b"3"), ({}, b"4")]
    assert run(text(broker, table))["archive"].rows == 0


def test_a_batch_that_is_run_again_changes_nothing(
    run: Runs, broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    """First the whole batch is committed already, then its files are not renamed yet."""
    table = tmp_path / "archive"
    broker.publish("orders", b"1", b"2")
    broker.publish("clicks", b"3")
    run(text(broker, table))
    before = files(table)
    checkpoint = table / "_nsparq" / "checkpoint" / "archive" / "rows"
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    last = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))

    def forget() -> None:
        """As if Spark had died before it logged the batch as done."""
        for path in (checkpoint / "commits").glob(f"*{last}*"):
            path.unlink()

    forget()
    assert run(text(broker, table))["archive"].rows == 3
    assert files(table) == before

    waiting = table / "_nsparq" / "new" / query / str(last)
    waiting.mkdir(parents=True)
    moves = []
    for number, path in enumerate(before):
        part = waiting / f"{number}.part"
        path.rename(part)
        moves.append([str(part), str(path.relative_to(table))])
    record = table / "_nsparq" / "commits" / query / f"{last}.json"
    record.with_suffix(".done").rename(record)
    record.write_text(json.dumps({"moves": moves}))
    left_over = table / "_nsparq" / "new" / query / str(last + 1) / "of a batch that was never done.part"
    left_over.parent.mkdir()
    left_over.touch()
    forget()
    run(text(broker, table))
    assert files(table) == before
    assert [bytes(row.body) for row in rows(spark, table)] == [b"3", b"1", b"2"]
    assert not list(table.rglob("*.part"))


def test_a_task_that_fails_fails_the_pipeline_and_leaves_the_archive_as_it_was(
    run: Runs, broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    table = tmp_path / "archive"
    broker.publish("orders", b"1")
    run(text(broker, table))
    broker.publish("orders", b"2")
    broken = text(broker, table).replace(DECODE, f"{DECODE}\nretries = 0")
    assert "retries" in broken
    (hidden,) = (table / "_nsparq" / "new").iterdir()
    hidden.rmdir()
    hidden.write_text("in the way")
    failed = run(broken)["archive"]
    assert (failed.state, failed.failures) == ("failed", 1)
    assert "Not a directory" in failed.error
    assert [bytes(row.body) for row in rows(spark, table)] == [b"1"]
    hidden.unlink()
    run(text(broker, table))
    assert [bytes(row.body) for row in rows(spark, table)] == [b"1", b"2"]
