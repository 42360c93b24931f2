"""The status of running pipelines: figures, status file, HTTP, Prometheus, terminal."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nsparq.errors import StartError
from nsparq.pipeline.decode.formats import DECODED
from nsparq.pipeline.execute.progress import Figures, OutputFigures, State, decoded_name, lag_of
from nsparq.pipeline.execute.status import Status, prometheus, read_status, serve, write_status
from nsparq.pipeline.execute.view import HEADINGS, LogView, TerminalView, cells, describe
from nsparq.status_server import StatusServer
from tests.support.polling import DEADLINE


def progress(batch: int = 0, rows: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "batchId": batch,
        "numInputRows": rows,
        "batchDuration": 500,
        "timestamp": "2026-11-15T12:00:00.000Z",
        "sink": {"numOutputRows": rows},
        "observedMetrics": {DECODED: {"rows": rows, "bad": 2}},
        "sources": [
            {
                "endOffset": json.dumps({"orders": {"n1": ["x", 100], "n2": ["y", 7]}}),
                "latestOffset": {"orders": {"n1": ["x", 130], "n2": ["y", 9]}},
            }
        ],
        **more,
    }


def test_figures_add_up() -> None:
    figures = Figures("p")
    figures.add_rows(progress(0))
    figures.add_rows(progress(1, rows=20))
    figures.add_letters({"sink": {"numOutputRows": 4}})
    assert (figures.rows, figures.rows_written, figures.undecodable, figures.dead_letters) == (30, 30, 4, 4)
    assert (figures.batch, figures.batches, figures.batch_seconds) == (1, 2, 0.5)
    assert (figures.rows_per_second, figures.lag) == (40.0, 32)
    assert figures.last_batch == 1_794_744_000.5
    figures.quiet()
    assert figures.rows_per_second == 0


def test_a_message_counts_once_however_many_outputs_read_it() -> None:
    def of(batch: int, lag: int, **rows: int) -> dict[str, Any]:
        ends = {"endOffset": {"t": {"n": ["x", 5]}}, "latestOffset": {"t": {"n": ["x", 5 + lag]}}}
        observed = {decoded_name(source): {"rows": count, "bad": 1} for source, count in rows.items()}
        return progress(batch, sum(rows.values()), observedMetrics=observed, sources=[ends])

    figures = Figures("p", outputs=[OutputFigures("", "noop"), OutputFigures("b", "topic b")])
    figures.add_rows(of(0, 3, orders=10, payments=4))
    assert (figures.rows, figures.lag) == (14, None)
    figures.add_rows(of(7, 8, orders=12), "b")
    assert (figures.rows, figures.rows_written, figures.undecodable, figures.batches) == (16, 26, 2, 2)
    assert (figures.lag, figures.batch, figures.rows_per_second) == (8, 0, 28.0)
    told = figures.as_json()["outputs"]
    assert [(one["name"], one["sink"], one["rows"], one["lag"]) for one in told] == [
        ("", "noop", 14, 3), ("b", "topic b", 12, 8),
    ]  # fmt: skip
    figures.failed("no more")
    assert (figures.lag, figures.rows_per_second, figures.failures) == (None, 0.0, 1)
    figures.add_rows(of(8, 0, orders=1), "b")
    assert figures.lag is None


def test_a_message_counts_once_however_often_a_query_reads_its_source() -> None:
    figures = Figures("p")
    figures.add_rows(progress(rows=20, observedMetrics={DECODED: {"rows": 10, "bad": 0}}))
    assert figures.rows == 10


def test_a_window_that_closes_gives_rows_in_a_batch_without_rows() -> None:
    figures = Figures("p")
    figures.add_rows(progress(3, rows=0, sink={"numOutputRows": 5}))
    assert (figures.rows, figures.rows_written, figures.batches, figures.batch) == (0, 5, 0, 3)


def test_rows_dropped_by_a_watermark_are_counted_and_shown_even_in_a_batch_without_rows() -> None:
    figures = Figures("p")
    operators = [{"numRowsDroppedByWatermark": 3}, {"numRowsDroppedByWatermark": 2}]
    figures.add_rows(progress(3, rows=0, stateOperators=operators))
    figures.add_rows(progress(4, stateOperators=operators[:1]))
    assert figures.late == 8
    assert "8 too late (watermark)" in describe(figures)
    assert 'nsparq_pipeline_late_total{pipeline="p"} 8' in prometheus([figures])


def test_a_sink_that_does_not_count_counts_as_nothing() -> None:
    figures = Figures("p")
    figures.add_rows(progress(sink={"numOutputRows": -1}, observedMetrics=None))
    assert (figures.rows, figures.rows_written, figures.undecodable) == (10, 0, 0)


@pytest.mark.parametrize(
    ("end", "latest", "expected"),
    [
        ({"t": {"n": ["x", 5]}}, {"t": {"n": ["x", 9]}}, 4),
        ({"t": {"n": ["x", 9]}}, {"t": {"n": ["x", 5]}}, 0),
        ({"t": {"n": ["x", 5]}}, {"t": {"m": ["x", 9], "n": ["x", 7]}}, 4),
        # A log that is new, or that no batch has read yet: unknown before the next batch.
        ({"t": {"n": ["x", 5]}}, {"t": {"n": ["y", 9]}}, None),
        ({}, {"t": {"n": ["x", 9]}}, None),
        # An nsqd that has not answered yet.
        ({"t": {"n": ["x", 5]}}, {}, None),
        ({"offset": 5}, {"offset": 9}, None),
        (None, None, None),
        ("no json", "{}", None),
    ],
)
def test_lag_counts_messages_published_and_not_read(end: Any, latest: Any, expected: int | None) -> None:
    assert lag_of({"sources": [{"endOffset": end, "latestOffset": latest}]}) == expected
    # The lag of two sources is unknown if that of one is.
    other = {"endOffset": {"t": {"n": ["x", 5]}}, "latestOffset": {"t": {"n": ["x", 7]}}}
    both = lag_of({"sources": [other, {"endOffset": end, "latestOffset": latest}]})
    assert both == (None if expected is None else expected + 2)


@pytest.fixture
def status() -> Status:
    running = Figures("orders", "orders", "console", State.RUNNING, rows=1200, rows_per_second=300.4, lag=5)
    failed = Figures(
        "bills", "bills", "topic x", State.FAILED, failures=2, error="no such column", undecodable=3
    )
    return Status("p.toml", [running, failed], started=time.time(), ui="http://127.0.0.1:4040")


def test_the_status_file_outlives_the_runner(tmp_path: Path, status: Status) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, status)
    found = read_status(tmp_path)
    assert found is not None
    assert found["is_running"]
    assert found["pid"] == os.getpid()
    assert [one["state"] for one in found["pipelines"]] == ["running", "failed"]
    content = json.loads((tmp_path / "status.json").read_text())
    # A process with that number is unlikely to exist.
    (tmp_path / "status.json").write_text(json.dumps({**content, "pid": 2**22 - 3}))
    found = read_status(tmp_path)
    assert found is not None
    assert not found["is_running"]


@pytest.fixture
def endpoint(status: Status) -> Iterator[StatusServer]:
    endpoint = serve("127.0.0.1:0", status)
    status.address = endpoint.address
    yield endpoint
    endpoint.close()


def get(endpoint: StatusServer, path: str) -> bytes:
    with urlopen(f"http://{endpoint.address}{path}", timeout=DEADLINE) as answer:
        body: bytes = answer.read()
    return body


def test_the_endpoint_tells_the_present_state(tmp_path: Path, status: Status, endpoint: StatusServer) -> None:
    write_status(tmp_path, status)
    status.pipelines[0].rows = 1500
    found = read_status(tmp_path)
    assert found is not None
    assert found["pipelines"][0]["rows"] == 1500
    assert json.loads(get(endpoint, "/status"))["ui"] == "http://127.0.0.1:4040"
    assert get(endpoint, "/ping") == b"OK"
    with pytest.raises(Exception, match="404"):
        get(endpoint, "/other")


def test_prometheus_can_read_the_metrics(status: Status, endpoint: StatusServer) -> None:
    text = get(endpoint, "/metrics").decode()
    assert text == prometheus(status.pipelines)
    found = {
        (sample.name, sample.labels["pipeline"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["nsparq_pipeline_up", "orders"] == 1
    assert found["nsparq_pipeline_up", "bills"] == 0
    assert found["nsparq_pipeline_rows_total", "orders"] == 1200
    assert found["nsparq_pipeline_lag_messages", "orders"] == 5
    assert ("nsparq_pipeline_lag_messages", "bills") not in found
    assert found["nsparq_pipeline_failures_total", "bills"] == 2


def test_an_address_in_use_or_invalid_is_refused(status: Status, endpoint: StatusServer) -> None:
    with pytest.raises(StartError, match="cannot listen on"):
        serve(endpoint.address, status)
    with pytest.raises(StartError, match="must be host:port"):
        serve("nowhere", status)


def test_figures_as_a_line_and_as_a_sentence(status: Status) -> None:
    orders, bills = status.pipelines
    assert cells(orders) == ("orders", "running", "300", "5", "", "1,200", "", "", "", "")
    assert cells(bills) == ("bills", "failed", "0", "unknown", "", "0", "", "", "3", "2")
    assert describe(orders) == "orders: running, 1,200 rows (300/s), lag 5"
    assert describe(bills) == "bills: failed, 0 rows (0/s), lag unknown, 3 did not decode, 2 failures"


def behind(second: int, lag: int, rows: int = 100) -> dict[str, Any]:
    """The report of a micro-batch that began at a second and left so many messages."""
    latest = {"orders": {"n": ["x", 10_000 + lag]}}
    sources = [{"endOffset": {"orders": {"n": ["x", 10_000]}}, "latestOffset": latest}]
    return progress(second, rows, timestamp=f"2026-11-15T12:00:{second:02d}.000Z", sources=sources)


def test_an_estimate_says_when_a_backlog_will_have_been_read() -> None:
    figures = Figures("p", outputs=[OutputFigures("")], state=State.RUNNING)

    def after(*report: int) -> tuple[float | None, str]:
        figures.add_rows(behind(*report))
        return figures.catch_up_seconds, cells(figures)[4]

    assert after(0, 9000) == (None, "unknown")
    # 100 messages are read each second, and 10 published.
    assert after(10, 8100) == (90.0, "1m30s")
    assert "lag 8,100, caught up in 1m30s" in describe(figures)
    assert "nsparq_pipeline_catch_up_seconds{" in prometheus([figures])
    assert after(20, 7200) == (80.0, "1m20s")
    # A trigger that found nothing to start says nothing new; nor does more than is read.
    assert after(21, 7300, 0) == (80.0, "1m20s")
    assert after(30, 9001) == (None, "unknown")
    assert after(40, 100) == (0.0, "")
    assert after(41, 0, 0) == (0.0, "")
    figures.failed("nsqd is away")
    assert (figures.catch_up_seconds, cells(figures)[4]) == (None, "")


def test_gaps_in_the_numbers_are_no_lag() -> None:
    report = behind(0, 1 << 40)
    assert lag_of(report) == 1 << 40
    report["sources"][0]["latestOffset"] = json.dumps(
        {"version": 2, "query": "", "logs": {"orders": {"n": ["x", 1 << 40]}}, "behind": {"rows": 7}}
    )
    assert lag_of(report) == 7


def test_a_log_has_a_line_when_something_has_changed(
    status: Status, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    view = LogView(every=0.0)
    for _ in range(3):
        view.show(status)
    assert caplog.text.count("orders: running") == 1
    status.pipelines[0].rows += 1
    view.show(status)
    assert "1,201 rows" in caplog.text
    quiet = LogView(every=3600.0)
    caplog.clear()
    quiet.show(status)
    assert not caplog.text
    status.is_running = False
    quiet.show(status)  # the last line comes at once
    assert "orders" in caplog.text


def test_a_terminal_has_a_table(status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    view = TerminalView()
    with view._console.capture() as captured, view:
        view.show(status)
    shown = captured.get()
    assert "orders" in shown and "300" in shown and "http://127.0.0.1:4040" in shown
    assert "no such column" in shown


@pytest.mark.parametrize("page", ["pipelines.md", "tutorial-spark.md"])
def test_pages_show_the_columns_of_a_status(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    shown = re.findall(r"^pipeline  +state .*$", text, re.MULTILINE)
    assert shown and all(re.split(" {2,}", line) == [*HEADINGS] for line in shown)
