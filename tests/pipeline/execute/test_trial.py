"""Pipelines tried on a few messages: `nsparq.testing.try_pipeline` and `trial`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from nsparq.pipeline.errors import NothingYet, PipelineError
from nsparq.pipeline.file.reading import parse
from nsparq.pipeline.pipeline_json import NAME, write_json
from nsparq.testing import PipelineResult, given, try_pipeline
from tests.support.spark import settings_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Try = Callable[..., PipelineResult]

ORDERS = """
[pipeline.p]
source = "orders"
decode = { format = "json", schema = "number INT NOT NULL, item STRING" }
"""


@pytest.fixture
def tried(spark: SparkSession, tmp_path: Path) -> Iterator[Try]:
    """Tries a pipeline file on messages, and checks that nothing is left behind."""
    before = settings_text(spark)

    def tried(text: str, messages: Any, **more: Any) -> PipelineResult:
        return try_pipeline(parse(text, tmp_path / "p.toml"), "p", messages, spark=spark, **more)

    yield tried
    assert settings_text(spark) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"trial_steps.py", "__pycache__", "checkpoints"}


def test_messages_in_rows_out(tried: Try) -> None:
    """Each way to give a message, and the columns of every message."""
    text = f"""{ORDERS}
    sql = "SELECT number, _topic, _offset, _timestamp, _attempts, _id FROM input"
    sink = "noop"
    """
    late = datetime(2026, 11, 15, 12, tzinfo=UTC)
    messages = [
        {"number": 1},
        b'{"number": 2}',
        given('{"number": 3}', timestamp=late, attempts=2),
        given({"number": 4}, timestamp="2026-11-15T12:00:00"),
    ]
    result = tried(text, {"orders": messages})
    assert [tuple(row.values()) for row in result.rows] == [
        (1, "orders", 0, datetime(2026, 1, 1, tzinfo=UTC), 0, "0" * 16),
        (2, "orders", 1, datetime(2026, 1, 1, 0, 0, 0, 1000, tzinfo=UTC), 0, f"{1:016x}"),
        (3, "orders", 2, late, 2, f"{2:016x}"),
        (4, "orders", 3, late, 0, f"{3:016x}"),
    ]
    assert result.letters == result.dropped == []


def test_a_message_that_does_not_decode_goes_where_the_pipeline_would_send_it(tried: Try) -> None:
    messages = [{"number": 1}, {"item": "tea"}]
    letters = tried(f'{ORDERS}\ndead_letters = "dead"\nsink = "noop"', messages)
    (letter,) = letters.letters
    assert (len(letters.rows), letters.dropped) == (1, [])
    assert (letter["error"], letter["topic"], letter["offset"]) == ("number is missing", "orders", 1)
    text = ORDERS.replace('item STRING"', 'item STRING", on_error = "drop"')
    dropped = tried(f'{text}\nsink = "noop"', messages)
    assert (len(dropped.rows), dropped.letters) == (1, [])
    assert [one["error"] for one in dropped.dropped] == ["number is missing"]
    with pytest.raises(PipelineError, match="message 1 of topic orders does not decode.*: number is missing"):
        tried(f'{ORDERS}\nsink = "noop"', messages)


def test_windows_give_the_complete_result(tried: Try) -> None:
    """Even windows that a watermark has not closed yet, and rows that would be too late."""
    text = """
    [pipeline.p]
    source = "orders"
    decode = { format = "json", schema = "at TIMESTAMP" }
    watermark = { column = "at", delay = "1s" }
    sql = "SELECT window.start AS minute, count(*) AS n FROM input GROUP BY window(at, '1 minute')"
    sink = { topic = "minutes" }
    """
    times = ("12:05:00", "12:00:01", "12:00:59")
    result = tried(text, [{"at": f"2026-11-15T{time}Z"} for time in times])
    assert sorted((one["minute"], one["n"]) for one in result.messages) == [
        ("2026-11-15T12:00:00.000Z", 2),
        ("2026-11-15T12:05:00.000Z", 1),
    ]


def test_several_sources_and_outputs(tried: Try) -> None:
    text = """
    [pipeline.p.sources.orders]
    topic = "orders"
    decode = { format = "json", schema = "number INT, item STRING" }
    watermark = { column = "_timestamp", delay = "1h" }
    [pipeline.p.sources.payments]
    topic = "payments"
    decode = { format = "json", schema = "number INT, paid DOUBLE" }
    dead_letters = "payments.dead"
    watermark = { column = "_timestamp", delay = "1h" }
    [[pipeline.p.step]]
    name = "paid"
    sql = "SELECT number, item, paid FROM orders JOIN payments USING (number)"
    [[pipeline.p.sink]]
    topic = "paid"
    [[pipeline.p.sink]]
    name = "seen"
    from = "orders"
    topic = "seen"
    body_from = "item"
    """
    payments = [{"number": 2, "paid": 3.5}, {"number": 3, "paid": 1.0}, b"junk"]
    result = tried(
        text, {"orders": [{"number": 1, "item": "tea"}, {"number": 2, "item": "cake"}], "payments": payments}
    )
    assert result.messages_of("") == [{"number": 2, "item": "cake", "paid": 3.5}]
    assert result.rows_of("seen") == [{"body": "tea"}, {"body": "cake"}]
    assert [(one["topic"], one["text"]) for one in result.letters] == [("payments", "junk")]
    with pytest.raises(KeyError, match="there is no output 'x'; there are '', 'seen'"):
        result.rows_of("x")
    with pytest.raises(KeyError, match="several outputs: '', 'seen'"):
        assert result.rows


def test_tables_can_be_given(tried: Try) -> None:
    text = f"""{ORDERS}
    sql = "SELECT number, price FROM input LEFT JOIN prices USING (item)"
    sink = "noop"
    [pipeline.p.tables.prices]
    csv = "there/is/no/such/file.csv"
    schema = "item STRING, price DOUBLE"
    """
    orders = [{"number": 1, "item": "tea"}, {"number": 2, "item": "cake"}]
    rows = tried(text, orders, tables={"prices": [{"item": "tea", "price": 3.0}]}).rows
    assert sorted(map(str, rows)) == [str({"number": 1, "price": 3.0}), str({"number": 2, "price": None})]
    with pytest.raises(PipelineError, match=r"\[pipeline.p.tables.prices\].*PATH_NOT_FOUND"):
        tried(text, orders)
    with pytest.raises(ValueError, match="p has no table 'price'; it has prices"):
        tried(text, orders, tables={"price": []})


def test_a_query_that_spark_refuses_for_streams_is_refused(tried: Try) -> None:
    with pytest.raises(PipelineError, match=r'\[pipeline.p\]: .*either set output_mode = "update"'):
        tried(f'{ORDERS}\nsql = "SELECT item, count(*) FROM input GROUP BY item"\nsink = "noop"', [])
    with pytest.raises(PipelineError, match=r"\[pipeline.p\] sql: .*nothing"):
        tried(f'{ORDERS}\nsql = "SELECT nothing FROM input"\nsink = "noop"', [])


def test_a_query_that_fails_in_a_run_fails_in_a_trial(tried: Try) -> None:
    with pytest.raises(PipelineError, match=r"\[pipeline.p\]: .*DIVIDE_BY_ZERO"):
        tried(f'{ORDERS}\nsql = "SELECT 1 / number AS share FROM input"\nsink = "noop"', [{"number": 0}])


def test_columns_are_inferred_from_the_messages_not_from_a_checkpoint(tried: Try, tmp_path: Path) -> None:
    text = '[pipeline.p]\nsource = "orders"\ndecode = "json"\nsql = "SELECT a, b FROM input"\nsink = "noop"'
    write_json(tmp_path / "checkpoints" / "p" / "p" / NAME, {"schema": "b INT"})
    assert tried(text, [{"a": 1}, {"b": ["x"]}]).rows == [{"a": 1, "b": None}, {"a": None, "b": ["x"]}]
    with pytest.raises(NothingYet, match="orders has no messages yet"):
        tried(text, [])


def test_values_have_python_types(tried: Try) -> None:
    text = """
    [pipeline.p]
    source = "orders"
    sql = "SELECT map('a', 1) AS m, struct(body AS b) AS s, date(_timestamp) AS d, 1.5BD AS n FROM input"
    sink = "noop"
    """
    (row,) = tried(text, [b"\xff"]).rows
    assert row["m"] == {"a": 1}
    assert (row["s"], row["d"], float(row["n"])) == ({"b": b"\xff"}, date(2026, 1, 1), 1.5)


STEPS = """
from pyspark.sql import functions as F

def doubled(rows):
    @F.udf("int")
    def twice(number):
        return number * FACTOR
    return rows.select(twice("number").alias("number"))

FACTOR = 2
"""


def test_steps_in_python_are_found_beside_the_file(tried: Try, tmp_path: Path) -> None:
    (tmp_path / "trial_steps.py").write_text(STEPS)
    path = sys.path[:]
    try:
        assert tried(f'{ORDERS}\npython = "trial_steps:doubled"\nsink = "noop"', [{"number": 4}]).rows == [
            {"number": 8}
        ]
    finally:
        sys.path[:] = path
        sys.modules.pop("trial_steps", None)


def test_messages_must_be_of_a_topic_that_is_read(tried: Try) -> None:
    with pytest.raises(ValueError, match="p does not read the topic 'returns': it reads orders"):
        tried(f'{ORDERS}\nsink = "noop"', {"returns": []})
    with pytest.raises(ValueError, match="give the messages by topic"):
        tried('[pipeline.p]\nsource = { topics_pattern = "shop.*" }\nsink = "noop"', [b"x"])
