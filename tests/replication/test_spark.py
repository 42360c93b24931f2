"""Spark's tasks go on over a fail-over in mid-batch: another node has the log, and what was staged.

`python -m tests.soak.exactly_once --replicated --victims nsqd` does the same with whole queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.pandas.types import to_arrow_schema

from nsparq.spark.datasource import SCHEMA
from nsparq.spark.options import Use
from nsparq.spark.source import range_reader
from nsparq.spark.source.driver import LogSource
from nsparq.spark.source.range_reader import close_idle, read_range
from tests.replication.cluster import run_cluster
from tests.replication.coordinators import run_etcd
from tests.spark.sink import support as sink
from tests.spark.source.support import numbered, options
from tests.support.lookupd import LookupdThread


def test_a_batch_is_read_and_written_once_over_a_fail_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "CHUNK", 64 << 10)
    monkeypatch.setattr(range_reader, "MARGIN", 1)
    with LookupdThread() as lookupd, run_etcd(tmp_path / "etcd") as url:
        tcp, http = (":".join(map(str, one)) for one in (lookupd.address, lookupd.http_address or ()))
        where = {"nsqlookupd": http, "retryFor": "60s"}
        coordinator = url.replace("http://", "etcd://")
        with run_cluster(tmp_path, coordinator, lookupd_tcp_address=tcp) as cluster:
            first = cluster.primary("ab")
            first.control("create", "t")
            first.http("PUT", "/topic/settings", b'{"retention_bytes": 1000000000}', topic="t")
            bodies = [number + b"x" * 1000 for number in numbered(1000)]
            first.publish("t", *bodies)
            chosen = options(Use.LOG_BATCH, **where, partitionBytes="1g")
            source = LogSource(chosen)
            try:
                found = source.ranges(*source.batch())
            finally:
                source.close()
            work = replace(found[0], end=found[-1].end)

            def killed_in_between() -> Iterator[pa.RecordBatch]:
                """What the task reads, and writes. The primary dies in the middle of both."""
                is_first = True
                for batch in read_range(work, chosen, to_arrow_schema(SCHEMA, timezone="UTC")):
                    yield sink.rows(*batch["body"].to_pylist())
                    if is_first:
                        is_first = False
                        first.kill()

            writer = sink.stream_writer(**{**where, "topic": "result", "chunkBytes": 1 << 16})
            try:
                written = sink.run_task(monkeypatch, writer, killed_in_between())
            finally:
                close_idle()
            writer.commit([written], 0)
            second = cluster.primary(other_than=cluster.name_of(first))
            assert sink.stored(second, "result") == bodies
            # The batch is repeated, as after the death of the driver.
            first.start()
            cluster.primary("ab")
            second.kill()
            again = sink.stream_writer(**{**where, "topic": "result"})
            written = sink.run_task(monkeypatch, again, [sink.rows(*bodies)], attempt=1)
            again.commit([written], 0)
            assert sink.stored(cluster.primary(), "result") == bodies
