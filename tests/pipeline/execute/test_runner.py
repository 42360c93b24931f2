"""Pipelines from end to end, on a real broker and in one Spark session."""

from __future__ import annotations

import json
import re
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.execute.progress import State
from nsparq.pipeline.execute.status import read_status
from nsparq.testing import Broker
from tests.pipeline.conftest import Runs, bodies
from tests.support.polling import DEADLINE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")

ORDERS = "number INT NOT NULL, item STRING, price DOUBLE, at TIMESTAMP"


def order(number: int) -> bytes:
    at = datetime(2026, 11, 15, 12, number // 60, number % 60, tzinfo=UTC)
    content = {"number": number, "item": ("tea", "cake")[number % 2], "price": 1.5, "at": at.isoformat()}
    return json.dumps(content).encode()


COPY = f"""
[run]
metrics_address = "127.0.0.1:0"
[pipeline.copy]
source = {{ topic = "orders", max_rows_per_trigger = 40 }}
decode = {{ format = "json", schema = "{ORDERS}" }}
dead_letters = "orders.dead"
sql = "SELECT number, item FROM input"
sink = {{ topic = "copy" }}
trigger = "available-now"
"""


def test_every_message_is_in_the_result_or_a_dead_letter_also_after_a_restart(
    run: Runs, broker: Broker
) -> None:
    broker.publish("orders", *(order(number) for number in range(90)), b"junk", b'{"number": "x"}', b"\xff")
    first = run(COPY)["copy"]
    assert (first.state, first.error) == (State.FINISHED, "")
    assert (first.rows, first.rows_written, first.undecodable, first.dead_letters) == (93, 90, 3, 3)
    assert (first.lag, first.batches) == (0, 3)
    broker.publish("orders", order(90), b"{}")
    second = run(COPY)["copy"]
    assert (second.rows, second.rows_written, second.dead_letters) == (2, 1, 1)
    assert sorted(one["number"] for one in bodies(broker, "copy")) == list(range(91))
    assert bodies(broker, "copy")[0].keys() == {"number", "item"}
    letters = bodies(broker, "orders.dead")
    assert {(one["error"], one["text"] or one["base64"]) for one in letters} == {
        ("not JSON: Expecting value: line 1 column 1 (char 0)", "junk"),
        ('number: "x" is not INT', '{"number": "x"}'),
        ("not UTF-8: byte 0xff at position 0", "/w=="),
        ("number is missing", "{}"),
    }
    assert {(one["pipeline"], one["topic"], one["channel"]) for one in letters} == {
        ("copy", "orders", "copy")
    }
    status = read_status(run.directory / "checkpoints" / "p")
    assert status is not None
    assert (status["is_running"], status["pipelines"][0]["rows"]) == (False, 2)


def test_a_message_too_large_for_a_dead_letter_goes_there_as_it_is(
    run: Runs, broker: Broker, spark: SparkSession
) -> None:
    large = b"\xff" * 900_000
    broker.publish("orders", large, b"junk")
    found = run(COPY)["copy"]
    assert (found.state, found.error, found.dead_letters) == (State.FINISHED, "", 2)
    letters = spark.read.format("nsq").options(nsqd=broker.http_address, topic="orders.dead").load()
    small, as_it_was = sorted((bytes(row.body) for row in letters.collect()), key=len)
    assert as_it_was == large
    assert json.loads(small)["text"] == "junk"


def test_two_pipelines_run_until_they_are_stopped(run: Runs, broker: Broker) -> None:
    """Two pipelines of one topic: closed windows go to a topic, changed counts to another."""
    windows = """
[run]
metrics_address = "127.0.0.1:0"
[pipeline.windows]
source = "orders"
decode = "json"
watermark = { column = "at", delay = "1s" }
sql = "SELECT window.start AS minute, count(*) AS n FROM input GROUP BY window(at, '1 minute')"
sink = { topic = "minutes" }
trigger = "0s"
"""
    counts = """
[pipeline.counts]
source = "orders"
decode = "json"
sql = "SELECT item AS body, count(*) AS n FROM input GROUP BY item"
output_mode = "update"
sink = { topic = "counts", body_from = "body" }
trigger = "0s"
"""
    broker.publish("orders", *(order(number) for number in range(150)))
    seen: dict[str, str] = {}

    def both_are_there(figures: Any) -> bool:
        assert run.status is not None
        if not seen and figures["counts"].rows:
            with urlopen(f"http://{run.status.address}/metrics", timeout=DEADLINE) as answer:
                seen["metrics"] = answer.read().decode()
        return len(broker.peek("minutes")) == 2 and len(broker.peek("counts")) >= 2

    figures = run(windows + counts, until=both_are_there)
    assert {one.state for one in figures.values()} == {State.STOPPED}
    assert bodies(broker, "minutes") == [
        {"minute": f"2026-11-15T12:0{minute}:00.000Z", "n": 60} for minute in range(2)
    ]
    assert {message.body for message in broker.peek("counts")} == {b"tea", b"cake"}
    assert 'nsparq_pipeline_up{pipeline="counts"} 1' in seen["metrics"]
    assert 'nsparq_pipeline_rows_total{pipeline="counts"} 150' in seen["metrics"]
    # A stop between batches or during one leaves no trace.
    broker.publish("orders", order(200))
    run(windows, until=lambda _: len(broker.peek("minutes")) == 3)
    assert [one["n"] for one in bodies(broker, "minutes")] == [60, 60, 30]


STEPS = '''
def doubled(rows, all_rows):
    """Of a user's."""
    from pyspark.sql import functions as F

    @F.udf("double")
    def twice(price):
        return price * FACTOR

    return rows.withColumn("price", twice("price"))

FACTOR = 2.0
'''


def test_steps_and_parquet_by_date(run: Runs, broker: Broker, spark: SparkSession) -> None:
    (run.directory / "shop_steps.py").write_text(STEPS)
    text = f"""
[pipeline.files]
source = "orders"
decode = {{ format = "json", schema = "{ORDERS}" }}
trigger = "available-now"
sink = {{ parquet = "out", partition_by = ["item", "date"], date_from = "at", compact = 2 }}
[[pipeline.files.step]]
name = "tea"
sql = "SELECT * EXCEPT (_topic, _node, _offset, _attempts, _id) FROM input WHERE item = 'tea'"
[[pipeline.files.step]]
python = "shop_steps:doubled"
from = ["tea", "messages"]
[[pipeline.files.step]]
sql = "SELECT number, item, price, at FROM input"
"""
    try:
        for start in (0, 10):
            broker.publish("orders", *(order(number) for number in range(start, start + 10)))
            assert run(text)["files"].state is State.FINISHED
    finally:
        sys.modules.pop("shop_steps", None)
        sys.path.remove(str(run.directory))
    rows = spark.read.parquet(str(run.directory / "out")).sort("number").collect()
    assert [(row.number, row.item, row.price) for row in rows] == [(n, "tea", 3.0) for n in range(0, 20, 2)]
    files = list((run.directory / "out" / "item=tea" / "date=2026-11-15").iterdir())
    assert [file.name.partition("-")[0] for file in files] == ["joined"]


def test_a_permanent_failure_is_not_retried_and_does_not_stop_other_pipelines(
    run: Runs, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.publish("orders", order(1), b"junk")
    text = """
[pipeline.strict]
source = "orders"
decode = { format = "json", schema = "number INT" }
sink = "noop"
[pipeline.lenient]
source = "orders"
decode = { format = "json", schema = "number INT", on_error = "drop" }
sink = { memory = "lenient" }
trigger = "once"
[pipeline.circle]
source = { topics_pattern = "ord.*" }
sql = "SELECT body, 'orders' AS target FROM input"
sink = { topic_from = "target" }
"""
    figures = run(text)
    strict, lenient, circle = figures["strict"], figures["lenient"], figures["circle"]
    assert (strict.state, strict.failures, strict.restarts) == (State.FAILED, 1, 0)
    assert re.fullmatch("message [0-9]+ of topic orders at .* does not decode as json; .*", strict.error)
    assert "strict: failed: message" in caplog.text
    assert (lenient.state, lenient.rows, lenient.undecodable) == (State.FINISHED, 2, 1)
    # A row for a topic that the pipeline reads would be an endless loop.
    assert (circle.state, circle.failures, circle.restarts) == (State.FAILED, 1, 0)
    assert "orders is a topic that the query itself reads" in circle.error
    assert len(broker.peek("orders")) == 2


def test_a_stop_does_not_wait_for_an_unreachable_nsqd(run: Runs) -> None:
    """A stop that waited for nsqd would have failed."""
    text = """
[nsq]
nsqd = ["127.0.0.1:9"]
retry_for = "20s"
[run]
retries = 0
[pipeline.query]
source = "orders"
sink = "noop"
[pipeline.beginning]
source = "orders"
decode = { format = "json", schema = "number INT" }
dead_letters = "dead"
sink = "noop"
[pipeline.sample]
source = "orders"
decode = "json"
sink = "noop"
"""
    figures = run(text, until=lambda figures: figures["query"].state is State.RUNNING)
    assert {(one.state, one.failures, one.lag) for one in figures.values()} == {(State.STOPPED, 0, None)}


def test_tables_of_delta_and_of_a_database(run: Runs, broker: Broker, spark: SparkSession) -> None:
    deltalake = pytest.importorskip("deltalake")
    text = f"""
[pipeline.delta]
source = "orders"
decode = {{ format = "json", schema = "{ORDERS}" }}
sql = "SELECT number, item, at FROM input"
sink = {{ delta = "table", partition_by = ["item"] }}
trigger = "available-now"
[pipeline.database]
source = "orders"
decode = {{ format = "json", schema = "{ORDERS}" }}
sql = "SELECT number, item FROM input"
sink = {{ jdbc = "jdbc:derby:memory:shop;create=true", table = "orders", batch_column = "batch" }}
trigger = "available-now"
"""
    broker.publish("orders", *(order(number) for number in range(5)))
    assert {one.error for one in run(text).values()} == {""}
    # As after a crash: the sink has the batch, but Spark's checkpoint does not show it.
    for name in ("delta", "database"):
        commits = run.directory / "checkpoints" / "p" / name / "rows" / "commits"
        (commits / "0").unlink()
        (commits / ".0.crc").unlink(missing_ok=True)
    broker.publish("orders", *(order(number) for number in range(5, 10)))
    assert {one.error for one in run(text).values()} == {""}
    table = deltalake.DeltaTable(str(run.directory / "table"))
    assert table.version() == 2
    assert sorted(table.to_pyarrow_table().column("number").to_pylist()) == list(range(10))
    assert table.metadata().partition_columns == ["item"]
    rows = spark.read.jdbc("jdbc:derby:memory:shop", "orders").collect()
    assert sorted((row.number, row.batch) for row in rows) == [(n, n // 5) for n in range(10)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("sql = 'SELECT nothing FROM input'", r"\[pipeline.p\] sql: .*`nothing` cannot be resolved"),
        ("sql = 'SELEC'", r"\[pipeline.p\] sql: .*Syntax error"),
        (
            "sql = 'SELECT item, count(*) FROM input GROUP BY item'",
            r'\[pipeline.p\]: .*either set output_mode = "update", or add a watermark',
        ),
        (
            "watermark = { column = 'when', delay = 1 }",
            r"watermark: there is no column 'when'; there are number,",
        ),
        ("watermark = { column = 'item', delay = 1 }", r"watermark: 'item' is STRING; it must be TIMESTAMP"),
        ("python = 'no_such_module:f'", r"python: no_such_module cannot be imported"),
        ("python = 'json:f'", r"python: json has no function f"),
        ("python = 'json:dumps'", r"python: json:dumps raised TypeError"),
        ("python = 'builtins:repr'", r"python: builtins:repr must return a DataFrame, not str"),
    ],
)
def test_errors_that_spark_finds_name_the_table_and_the_key(
    spark: SparkSession, tmp_path: Path, lines: str, expected: str
) -> None:
    from nsparq.pipeline.execute import check
    from nsparq.pipeline.file.reading import parse

    text = f"""
[pipeline.p]
source = "orders"
decode = {{ format = "json", schema = "{ORDERS}" }}
sink = "noop"
{lines}
"""
    file = parse(text, tmp_path / "p.toml")
    try:
        with pytest.raises(PipelineError, match=expected):
            check.check(spark, file, file.pipelines[0])
    finally:
        if str(tmp_path) in sys.path:
            sys.path.remove(str(tmp_path))
    assert not {"input", "messages"} & {table.name for table in spark.catalog.listTables()}


@pytest.mark.parametrize(
    ("decode", "sink", "expected"),
    [
        ("{ format = 'json', schema = 'a INTT' }", "'noop'", r"\[pipeline.p.decode\] schema: .*INTT"),
        (
            "{ format = 'json', schema = '_id INT' }",
            "'noop'",
            r"'_id' is the name of a column that every message has",
        ),
        (
            "{ format = 'avro', schema_file = '/dev/null' }",
            "'noop'",
            r"\[pipeline.p.decode\] schema_file: is not an Avro schema: ",
        ),
        (
            "{ format = 'protobuf', message = 'shop.Order', descriptor_file = '/dev/null' }",
            "'noop'",
            r"\[pipeline.p.decode\] descriptor_file: has no message 'shop.Order'; there are none",
        ),
        (
            "{ format = 'json', schema = 'a INT', json_schema = '/dev/null' }",
            "'noop'",
            r"\[pipeline.p.decode\] json_schema: is not JSON: ",
        ),
        ("'text'", "{ topic = 'x', body_from = 'b' }", r"body_from: there is no column 'b'; there are text,"),
        (
            "'text'",
            "{ topic = 'x', body_from = '_offset' }",
            r"body_from: '_offset' is BIGINT, not STRING or BINARY",
        ),
        ("'text'", "{ parquet = 'x', partition_by = ['day'] }", r"partition_by: there is no column 'day'"),
        ("'raw'", "{ delta = 'x', partition_by = ['body'] }", r"partition_by: 'body' is BINARY"),
        (
            "'text'",
            "{ parquet = 'x', partition_by = ['date'], date_from = 'text' }",
            r"'date' is taken from the column 'text', which must be a TIMESTAMP",
        ),
    ],
)
def test_a_column_that_does_not_fit_a_schema_or_a_sink_is_refused(
    spark: SparkSession, broker: Broker, tmp_path: Path, decode: str, sink: str, expected: str
) -> None:
    from nsparq.pipeline.execute import check
    from nsparq.pipeline.file.reading import parse

    broker.create("orders")
    nsq = f'[nsq]\nnsqd = "{broker.http_address}"\n'
    text = f'{nsq}[pipeline.p]\nsource = "orders"\ndecode = {decode}\nsink = {sink}'
    file = parse(text, tmp_path / "p.toml")
    with pytest.raises(PipelineError, match=expected):
        check.check(spark, file, file.pipelines[0])


def test_without_a_schema_and_messages_the_columns_are_unknown_and_the_sql_is_parsed(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    from nsparq.pipeline.execute import check
    from nsparq.pipeline.file.reading import parse

    broker.create("orders")
    for nsqd in (broker.http_address, "127.0.0.1:9"):
        for sql, is_right in (("SELECT price FROM input", True), ("SELEC * FROM input", False)):
            text = f'source = "orders"\ndecode = "json"\nsql = "{sql}"\nsink = "noop"'
            file = parse(f'[nsq]\nnsqd = "{nsqd}"\n[pipeline.p]\n{text}', tmp_path / "p.toml")
            if is_right:
                assert check.check(spark, file, file.pipelines[0]) is None
            else:
                with pytest.raises(PipelineError, match=r"\[pipeline.p\] sql: .*Syntax error"):
                    check.check(spark, file, file.pipelines[0])
    # A check leaves nothing behind.
    assert not (tmp_path / "checkpoints").exists()


def test_the_command_has_spark_check_the_sql(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    root_logger_restored: None,
) -> None:
    from nsparq.pipeline.execute import runner
    from nsparq.tools.main import main

    monkeypatch.setattr(runner, "build_session", lambda *_: spark)
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    path, text = tmp_path / "p.toml", '[pipeline.p]\nsource = "orders"\nsink = "noop"\nsql = "{sql}"'
    path.write_text(text.format(sql="SELEC * FROM input"))
    assert main(["pipeline", "check", str(path)]) == 2
    assert "[pipeline.p] sql: [PARSE_SYNTAX_ERROR] Syntax error" in capsys.readouterr().err
    path.write_text(text.format(sql="SELECT _topic, length(body) AS size FROM input"))
    assert main(["pipeline", "check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {'_topic':<24} string", f"  {'size':<24} int"]
    sinks = """
sink = [{ topic = "sizes" }, { name = "b", from = "messages", memory = "t", output_mode = "MODE" }]
sql = "SELECT length(body) AS size, _id AS id FROM input" """
    path.write_text(text.partition("sink")[0] + sinks.replace("MODE", "append"))
    assert main(["pipeline", "check", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "p: orders -> raw -> 1 step -> topic sizes, memory t"
    assert shown[1:3] == ["  topic sizes:", f"    {'body':<24} string"]
    assert shown[3:5] == ["  memory t:", f"    {'body':<24} binary"]
    path.write_text(text.partition("sink")[0] + sinks.replace("MODE", "complete"))
    assert main(["pipeline", "check", str(path)]) == 2
    assert "[pipeline.p.sink b]: [STREAMING_OUTPUT_MODE" in capsys.readouterr().err


def test_a_checkpoint_has_one_runner(run: Runs, broker: Broker) -> None:
    broker.create("orders")
    text = '[pipeline.p]\nsource = "orders"\nsink = "noop"\n'

    def start_another(figures: Any) -> bool:
        with pytest.raises(PipelineError, match="is in use by another runner"):
            Runs(run._spark, broker, run.directory)(text)
        return True

    run(text, until=start_another)


def test_a_query_that_is_added_leaves_the_channels_of_the_others_alone(
    broker: Broker, tmp_path: Path, spark: SparkSession
) -> None:
    """If its channel moved to the new beginning, nsqd would drop messages it has not read yet."""
    from nsparq.pipeline.execute import queries
    from nsparq.pipeline.file.reading import parse

    text = COPY.replace("max_rows_per_trigger = 40", 'starting_position = "latest", own_channel = false')
    file = parse(f'[nsq]\nnsqd = "{broker.http_address}"\n{text}', tmp_path / "p.toml")
    (pipeline,) = file.pipelines
    offsets = Path(pipeline.checkpoint) / "rows" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text("what Spark has planned")
    broker.create("orders", "copy")
    broker.publish("orders", order(1), order(2))
    queries.settle_beginnings(spark, file, pipeline, threading.Event())
    depths = [broker.channel_stats("orders", name)["depth"] for name in ("copy", "copy.dead")]  # type: ignore[index]
    assert depths == [2, 0]


@pytest.mark.parametrize("is_old", [True, False])
def test_the_beginning_in_an_older_pipeline_json_is_read(tmp_path: Path, is_old: bool) -> None:
    from nsparq.pipeline.execute import queries
    from nsparq.pipeline.file.reading import parse
    from nsparq.pipeline.pipeline_json import PipelineJson

    (pipeline,) = parse(COPY, tmp_path / "p.toml").pipelines
    logs = {"orders": {"n": ["x", 5]}, "gone": {"n": ["y", 7]}}
    PipelineJson(pipeline).put("beginning", logs if is_old else {"logs": logs, "query": "q", "version": 2})
    beginnings = queries.Beginnings(pipeline)
    assert beginnings.missing == []
    for role in pipeline.roles:
        assert beginnings.of(role, pipeline.sources[0]) == {"orders": {"n": ["x", 5]}}


def test_rows_and_dead_letters_begin_at_the_same_place(
    broker: Broker, tmp_path: Path, spark: SparkSession
) -> None:
    """`latest` is determined once for both queries, and kept."""
    from nsparq.pipeline.execute import queries
    from nsparq.pipeline.file.reading import parse

    broker.publish("orders", order(1), b"old junk")
    text = COPY.replace("max_rows_per_trigger = 40", 'starting_position = "latest"')
    file = parse(f'[nsq]\nnsqd = "{broker.http_address}"\n{text}', tmp_path / "p.toml")
    (pipeline,) = file.pipelines
    for _ in range(2):
        queries.settle_beginnings(spark, file, pipeline, threading.Event())
        broker.publish("orders", order(2))
    beginnings = queries.Beginnings(pipeline)
    for role in ("rows", "letters"):
        ((_, sequence),) = beginnings.of(role, pipeline.sources[0])["orders"].values()  # type: ignore[index]
        assert sequence == broker.peek("orders")[1].sequence + 1
    # The channels exist, so nsqd keeps the messages.
    for channel in ("copy", "copy.dead"):
        assert broker.channel_stats("orders", channel)["depth"] == 2  # type: ignore[index]
