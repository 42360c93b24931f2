"""Reading a pipeline file: the values, and all problems with their places and hints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nsparq.pipeline.file.reading import load, parse
from nsparq.pipeline.file.sinks import (
    Console,
    Delta,
    Format,
    Jdbc,
    Memory,
    Noop,
    Parquet,
    Python,
    Topic,
    describe,
)
from nsparq.pipeline.file.spec import Decode, Output, PipelineFile, Source, SpecError, Trigger, Watermark
from nsparq.pipeline.file.tables import CsvTable, DeltaTable, FormatTable, JdbcTable, JsonTable, ParquetTable

SHORT = """
[pipeline.revenue]
source = "orders"
decode = { format = "json", schema = "item STRING, price DOUBLE, at TIMESTAMP" }
dead_letters = "orders.dead"
watermark = { column = "at", delay = "10s" }
sql = "SELECT window.start AS minute, sum(price) AS revenue FROM input GROUP BY window(at, '1 minute');"
sink = { topic = "revenue" }
"""

FORMATS = "json, csv, avro, protobuf, text, raw, message"


def read(text: str) -> PipelineFile:
    return parse(text, "/data/p.toml")


def problems(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        read(text)
    assert str(caught.value) == "\n".join(f"/data/p.toml: {one}" for one in caught.value.problems)
    return caught.value.problems


def of_pipeline(lines: str, source: str = 'source = "orders"', sink: str = 'sink = "console"') -> str:
    return f"[pipeline.p]\n{source}\n{sink}\n{lines}\n"


def test_a_newcomers_file() -> None:
    (pipeline,) = (file := read(SHORT)).pipelines
    assert file.nsq == {"nsqd": "127.0.0.1:4151"}
    assert file.run.checkpoint == "/data/checkpoints/p"
    assert file.spark.app_name == "p"
    assert pipeline.name == "revenue"
    assert pipeline.sources == (
        Source(
            name="messages",
            options={"topic": "orders", "channel": "revenue"},
            decode=Decode(format="json", schema="item STRING, price DOUBLE, at TIMESTAMP"),
            dead_letters="orders.dead",
            watermark=Watermark(column="at", delay=10.0),
        ),
    )
    assert [step.sql.endswith("'1 minute')") for step in pipeline.steps] == [True]
    assert pipeline.outputs == (
        Output(name="", result="result", output_mode="append", sink=Topic(topic="revenue")),
    )
    assert pipeline.roles == ("rows", "letters")
    assert pipeline.trigger == Trigger(1.0)
    assert pipeline.checkpoint == "/data/checkpoints/p/revenue"


def test_all_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    file = read(
        """
[nsq]
nsqlookupd = ["a:4161", "b:4161"]
auth_token = "${SECRET}"
tls_ca_file = "certs/ca.pem"
[spark]
master = "spark://host:7077"
app_name = "${APP:-shop}"
ui_port = 0
conf = { "spark.sql.shuffle.partitions" = 4, "spark.eventLog.enabled" = true }
[run]
checkpoint = "/var/lib/p"
metrics_address = "127.0.0.1:9464"
retries = 3
retry_delay = "500ms"
[pipeline.a]
trigger = "available-now"
output_mode = "update"
retries = 0
checkpoint = "own"
[pipeline.a.source]
topic = ["x", "y"]
starting_position = 2026-11-15T12:00:00Z
max_bytes_per_trigger = "64m"
fail_on_data_loss = false
[[pipeline.a.step]]
name = "paid"
sql = "SELECT * FROM input WHERE paid = '${not a variable}'"
[[pipeline.a.step]]
python = "lib.steps:join"
from = ["paid", "messages"]
watermark = { column = "at", delay = 500 }
[pipeline.a.sink]
topic_from = "t"
body_from = "b"
defer_from = "d"
delivery = "exactly-once"
"""
    )
    (pipeline,) = file.pipelines
    assert file.nsq == {
        "nsqlookupd": "a:4161,b:4161",
        "authToken": "s3cret",
        "tlsCaFile": "/data/certs/ca.pem",
    }
    assert file.spark.app_name == "shop"
    assert file.spark.conf == {"spark.sql.shuffle.partitions": "4", "spark.eventLog.enabled": "true"}
    assert (file.run.checkpoint, file.run.retries, file.run.retry_delay) == ("/var/lib/p", 3, 0.5)
    assert pipeline.sources[0].options == {
        "topics": "x,y",
        "startingPosition": "2026-11-15T12:00:00+00:00",
        "maxBytesPerTrigger": "64m",
        "failOnDataLoss": "false",
        "channel": "a",
    }
    assert pipeline.trigger == Trigger(0.0, "available-now")
    assert pipeline.trigger.ends
    assert (pipeline.checkpoint, pipeline.retries) == ("/data/own", 0)
    paid, joined = pipeline.steps
    assert paid.sql.endswith("'${not a variable}'")
    assert (joined.name, joined.sources) == ("step2", ("paid", "messages"))
    assert joined.watermark == Watermark(column="at", delay=0.5)
    assert pipeline.outputs[0].sink == Topic(
        topic_from="t", body_from="b", defer_from="d", options={"delivery": "exactly-once"}
    )


@pytest.mark.parametrize(
    ("sink", "expected", "shown"),
    [
        ('"console"', Console(), "console"),
        ("{ console = 5 }", Console(rows=5), "console"),
        ("{ console = true }", Console(), "console"),
        ('"noop"', Noop(), "noop"),
        ('{ memory = "t" }', Memory(table="t"), "memory t"),
        ('{ parquet = "out" }', Parquet(path="/data/out"), "parquet /data/out"),
        (
            '{ parquet = "s3a://b/out", partition_by = "date" }',
            Parquet(path="s3a://b/out", partition_by=("date",)),
            "parquet s3a://b/out",
        ),
        (
            '{ delta = "/t", partition_by = ["a", "b"] }',
            Delta(path="/t", partition_by=("a", "b")),
            "delta /t",
        ),
        (
            '{ jdbc = "jdbc:x", table = "t", options = { a = 1 } }',
            Jdbc(url="jdbc:x", table="t", options={"a": "1"}),
            "jdbc t",
        ),
        (
            '{ jdbc = "jdbc:h2:mem:x", table = "t", key = "id", latest_by = ["a", "b"] }',
            Jdbc(url="jdbc:h2:mem:x", table="t", key_columns=("id",), latest_by=("a", "b")),
            "jdbc t",
        ),
        ('{ delta = "t", key = ["id"] }', Delta(path="/data/t", key_columns=("id",)), "delta /data/t"),
        (
            '{ format = "csv", path = "out", batches = true, options = { header = true } }',
            Format(format="csv", path="/data/out", batches=True, options={"header": "true"}),
            "format csv",
        ),
        (
            '{ format = "iceberg", table = "lake.db.t" }',
            Format(format="iceberg", table="lake.db.t"),
            "format iceberg",
        ),
        ('{ python = "m.n:f" }', Python(function="m.n:f"), "python m.n:f"),
    ],
)
def test_sinks(sink: str, expected: object, shown: str) -> None:
    (pipeline,) = read(of_pipeline("", sink=f"sink = {sink}")).pipelines
    assert pipeline.outputs[0].sink == expected
    assert describe(pipeline.outputs[0].sink) == shown


@pytest.mark.parametrize(("path", "by_spark"), [("out", False), ("s3a://b/out", True)])
def test_spark_writes_parquet_files_to_urls_or_if_the_file_says_so(path: str, by_spark: bool) -> None:
    for writer, expected in (("", by_spark), ("spark", True)):
        assert Parquet(path=path, writer=writer).is_written_by_spark is expected
    assert not Parquet(path="out", writer="nsparq").is_written_by_spark


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = [", "is not valid TOML: Invalid value (at end of document)"),
        ("", "there is no pipeline: add a table [pipeline.NAME]"),
        ("[pipelin.a]", "[pipelin]: unknown table; did you mean 'pipeline'?"),
        ("pipeline = 1", "pipeline: must be a table"),
        ("[pipeline]\na = 1", "[pipeline.a]: must be a table"),
        ("[nsq]\nnsqds = 1", "[nsq] nsqds: unknown key; did you mean 'nsqd'?"),
        (
            '[nsq]\nnsqd = "x"',
            "[nsq] nsqd: must be host:port or http://host:port, not 'x'",
        ),
        ('[nsq]\nauth_token = "${NOT_SET}"', "[nsq] auth_token: the environment variable NOT_SET is not set"),
        ("[nsq]\nnsqd = { a = 1 }", "[nsq] nsqd: must not be a table, not {'a': 1}"),
        ("[spark]\nui_port = -1", "[spark] ui_port: must be a whole number, 0 or more, not -1"),
        (
            '[nsq]\nnsqd = ["http://me:secret@a"]',
            "[nsq] nsqd: must be host:port or http://host:port, not ['http://a']",
        ),
        ("[spark]\nmaster = 1", "[spark] master: must be a string, not 1"),
        ("[spark]\nconf = { a = [] }", "[spark] conf: 'a' must be a string, a number, or true or false"),
        ("[run]\nretry = 1", "[run] retry: unknown key; did you mean 'retry_delay'?"),
        (
            '[run]\nretry_delay = "soon"',
            (
                "[run] retry_delay: must be a duration such as 250ms, 5s or 1m, or a number of milliseconds, "
                "not 'soon'"
            ),
        ),
        ("[run]\nretry_delay = true", "[run] retry_delay: must be a duration, not True"),
        (
            '["pipeline"."a b"]',
            "[pipeline.a b]: the name of a pipeline has at most 48 letters, digits, _ - and . only",
        ),
    ],
)
def test_problems_of_the_file(text: str, expected: str) -> None:
    assert expected in problems(text)


@pytest.mark.parametrize("password", ["8364921", '"8364921${NOT_SET}"'])
def test_a_refused_password_is_not_shown(password: str) -> None:
    of_sink = f'{{ jdbc = "jdbc:h2:x", table = "t", password = {password} }}'
    (problem,) = problems(f'[pipeline.p]\nsource = "orders"\nsink = {of_sink}')
    assert problem.startswith("[pipeline.p.sink] password: ") and "8364921" not in problem


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("sourc = 1", "[pipeline.p] sourc: unknown key; did you mean 'source'?"),
        ("outputmode = 1", "[pipeline.p] outputmode: unknown key; did you mean 'output_mode'?"),
        (
            'output_mode = "all"',
            "[pipeline.p] output_mode: must be one of append, update, complete, not 'all'",
        ),
        (
            'trigger = "often"',
            '[pipeline.p] trigger: must be a duration such as "5s", "available-now" or "once", not \'often\'',
        ),
        (
            'decode = "jsn"',
            f"[pipeline.p.decode] format: must be one of {FORMATS}, not 'jsn'",
        ),
        ("decode = 1", "[pipeline.p] decode: must be a string or a table"),
        ("decode = { schema = 'a INT' }", "[pipeline.p.decode] format: is missing"),
        (
            "decode = { format = 'json', shema = 'a INT' }",
            "[pipeline.p.decode] shema: unknown key; did you mean 'schema'?",
        ),
        (
            "decode = { format = 'text', schema = 'a INT' }",
            "[pipeline.p.decode] schema: does not apply to format 'text'",
        ),
        ("decode = 'avro'", "[pipeline.p.decode] schema_file: is missing"),
        (
            "decode = { format = 'avro', schema_file = 'order.avsc' }",
            "[pipeline.p.decode] schema_file: cannot be read: No such file or directory: /data/order.avsc",
        ),
        (
            "decode = { format = 'avro', schema_file = 'order.avsc', schema = 'a INT' }",
            "[pipeline.p.decode] schema: does not apply to format 'avro'",
        ),
        (
            "decode = { format = 'protobuf', descriptor_file = '/dev/null' }",
            "[pipeline.p.decode] message: is missing",
        ),
        (
            "decode = { format = 'csv', json_schema = '/dev/null' }",
            "[pipeline.p.decode] json_schema: does not apply to format 'csv'",
        ),
        (
            "decode = { format = 'json', framing = 1 }",
            "[pipeline.p.decode] framing: must be confluent or confluent:ID, the id of a schema, not 1",
        ),
        (
            'dead_letters = "x y"',
            (
                "[pipeline.p] dead_letters: must be an NSQ name: 1 to 64 of the characters A-Z a-z 0-9 . _ "
                "- and optionally #ephemeral, not 'x y'"
            ),
        ),
        (
            'dead_letters = "x"',
            (
                "[pipeline.p] dead_letters: every message decodes with format 'raw': set 'decode', or remove "
                "this key"
            ),
        ),
        (
            'decode = "json"\ndead_letters = "orders"',
            "[pipeline.p] dead_letters: is a topic that the pipeline reads: that would be an endless loop",
        ),
        (
            "watermark = 'at'",
            '[pipeline.p] watermark: must be a table: { column = "at", delay = "10s" }',
        ),
        ("watermark = { column = 'at' }", "[pipeline.p.watermark] delay: is missing"),
        (
            "watermark = { column = 'a b', delay = 1 }",
            "[pipeline.p.watermark] column: must be a name that SQL can use: letters, digits, _, not 'a b'",
        ),
        ("sql = ' '", "[pipeline.p] sql: must be a SQL query, not ' '"),
        ("python = 'f'", "[pipeline.p] python: must name a function as module:function, not 'f'"),
        (
            "sql = 'SELECT 1'\npython = 'm:f'",
            "[pipeline.p] python: cannot be combined with 'sql'; use [[pipeline.p.step]] for several steps",
        ),
        ("step = 1", "[pipeline.p.step]: must be an array of tables: [[pipeline.p.step]]"),
        ("[[pipeline.p.step]]", "[pipeline.p.step 1]: needs either 'sql' or 'python'"),
        (
            "[[pipeline.p.step]]\nsql = 'x'\nname = 'input'",
            "[pipeline.p.step 1] name: 'input' is already used",
        ),
        (
            "[[pipeline.p.step]]\nsql = 'x'\nfrom = 'message'",
            "[pipeline.p.step 1] from: there is no earlier step 'message'; did you mean 'messages'?",
        ),
        (
            "[[pipeline.p.step]]\nsql = 'x'\nwatermark = {}",
            "[pipeline.p.step 1.watermark] column: is missing",
        ),
    ],
)
def test_problems_of_a_pipeline(lines: str, expected: str) -> None:
    assert expected in problems(of_pipeline(lines))


def test_a_pattern_must_not_match_what_the_pipeline_writes() -> None:
    source, more = 'source = { topics_pattern = "x|ord.*" }', 'decode = "json"\ndead_letters = "orders.dead"'
    assert problems(of_pipeline(more, source, 'sink = { topic = "x" }')) == [
        "[pipeline.p] dead_letters: is a topic that the pipeline reads: that would be an endless loop",
        "[pipeline.p.sink] topic: is a topic that the pipeline reads: that would be an endless loop",
    ]
    more = 'decode = "json"\ndead_letters = "dead.orders"'
    (pipeline,) = read(of_pipeline(more, source, 'sink = { topic = "xy" }')).pipelines
    assert [pipeline.reads(topic) for topic in ("x", "orders", "xy", "dead.orders")] == [
        *(True, True),
        *(False, False),
    ]


SHOP = """
[pipeline.shop.sources.orders]
topic = ["orders", "returns"]
decode = "text"
dead_letters = "orders.dead"
watermark = { column = "_timestamp", delay = "10s" }
[pipeline.shop.sources]
payments = "payments"
[[pipeline.shop.step]]
name = "both"
sql = "SELECT * FROM orders JOIN payments USING (number)"
[[pipeline.shop.sink]]
topic = "both"
[[pipeline.shop.sink]]
name = "paid"
from = "payments"
output_mode = "update"
topic = "paid"
"""


def test_several_sources_and_sinks() -> None:
    (pipeline,) = read(SHOP).pipelines
    orders, payments = pipeline.sources
    assert orders == Source(
        name="orders",
        options={"topics": "orders,returns", "channel": "shop.orders"},
        decode=Decode(format="text"),
        dead_letters="orders.dead",
        watermark=Watermark(column="_timestamp", delay=10.0),
    )
    assert payments == Source(name="payments", options={"topic": "payments", "channel": "shop.payments"})
    assert pipeline.outputs == (
        Output(name="", result="both", output_mode="append", sink=Topic(topic="both")),
        Output(name="paid", result="payments", output_mode="update", sink=Topic(topic="paid")),
    )
    assert pipeline.roles == ("rows", "rows-paid", "letters-orders")
    assert [one.channel(output.name) for output in pipeline.outputs for one in pipeline.sources] == [
        *("shop.orders", "shop.payments"),
        *("shop.orders.paid", "shop.payments.paid"),
    ]
    assert orders.letters_channel == "shop.orders.dead"
    assert (pipeline.topics, pipeline.sinks) == ("orders,returns,payments", "topic both, topic paid")


def test_a_source_called_messages_and_a_sink_without_a_name_are_what_the_only_ones_are() -> None:
    source, decode, letters, watermark, sql, _ = SHORT.splitlines()[2:]
    text = "\n".join(
        [
            *("[pipeline.revenue]", sql),
            *("[pipeline.revenue.sources.messages]", source.replace("source", "topic")),
            *(decode, letters, watermark),
            *("[[pipeline.revenue.sink]]", 'topic = "revenue"'),
        ]
    )
    assert read(text) == read(SHORT)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('{ parquet = "p" }', ParquetTable(name="t", path="/data/p")),
        ('{ csv = "c", schema = "a INT" }', CsvTable(name="t", path="/data/c", schema="a INT")),
        ('{ json = "s3a://b/j" }', JsonTable(name="t", path="s3a://b/j")),
        ('{ delta = "d" }', DeltaTable(name="t", path="/data/d")),
        ('{ jdbc = "jdbc:x", table = "y" }', JdbcTable(name="t", url="jdbc:x", table="y")),
        ('{ format = "f", options = { a = 1 } }', FormatTable(name="t", format="f", options={"a": "1"})),
    ],
)
def test_tables(table: str, expected: object) -> None:
    step = '[[pipeline.p.step]]\nsql = "SELECT 1"\nfrom = ["messages", "t"]'
    (pipeline,) = read(of_pipeline(f"tables.t = {table}\n{step}")).pipelines
    assert pipeline.tables == (expected,)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            "tables = 1",
            "[pipeline.p.tables]: must be tables, each with a name: [pipeline.p.tables.countries]",
        ),
        ("tables.t = 1", '[pipeline.p.tables.t]: must be a table, such as { csv = "countries.csv" }'),
        (
            "tables.t-1 = { csv = 'x' }",
            "[pipeline.p.tables.t-1]: the name of a table must be a name that SQL can use: ",
        ),
        ("tables.t = {}", "[pipeline.p.tables.t]: needs one of parquet, csv, json, delta, jdbc, format"),
        ("tables.t = { csv = 'x', json = 'y' }", "[pipeline.p.tables.t]: has both 'csv' and 'json'"),
        (
            "tables.t = { csv = 'x', scheme = 'y' }",
            "[pipeline.p.tables.t] scheme: unknown key; did ",
        ),
        ("tables.Messages = { csv = 'x' }", "[pipeline.p.tables.Messages] name: 'Messages' is already used"),
        (
            "tables.t = { csv = 'x' }\nsink = { topic = 'y', from = 't' }",
            "[pipeline.p.sink] from: there is no ",
        ),
    ],
)
def test_problems_of_tables(lines: str, expected: str) -> None:
    sink = "" if "sink" in lines else 'sink = "console"'
    found = problems(of_pipeline(lines, sink=sink))
    assert any(one.startswith(expected) for one in found), found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("sources.orders]", "sources.input]", "[pipeline.shop.sources.input] name: 'input' is already used"),
        (
            "sources.orders]",
            "sources.a-b]",
            "[pipeline.shop.sources.a-b]: the name of a source must be a name that SQL ",
        ),
        ('"both"\nsql', '"Orders"\nsql', "[pipeline.shop.step 1] name: 'Orders' is already used"),
        (
            'decode = "text"',
            'decod = "text"',
            "[pipeline.shop.sources.orders] decod: unknown key; did you mean 'decode'?",
        ),
        ('"payments"\n[[', "1\n[[", "[pipeline.shop.sources.payments]: must be a string or a table"),
        (
            "[pipeline.shop.sources]",
            '[pipeline.shop]\nsource = "x"\n[pipeline.shop.sources]',
            "[pipeline.shop] sources: cannot be combined with 'source'",
        ),
        (
            "[pipeline.shop.sources]",
            '[pipeline.shop]\ndecode = "text"\n[pipeline.shop.sources]',
            "[pipeline.shop] decode: belongs in each source: [pipeline.shop.sources.orders]",
        ),
        (
            'from = "payments"',
            'from = "payment"',
            "[pipeline.shop.sink 2] from: there is no source or step 'payment'; did you mean 'payments'?",
        ),
        ('name = "paid"\n', "", "[pipeline.shop.sink 2] name: is missing: another sink has none"),
        ('name = "paid"', 'name = "a b"', "[pipeline.shop.sink 2] name: must be a name of letters, digits, "),
        (
            'name = "paid"',
            'name = "dead"',
            "[pipeline.shop]: the channel 'shop.orders.dead' of source 'orders' is used twice: ",
        ),
        (
            'name = "paid"',
            f'name = "{"x" * 60}"',
            f"[pipeline.shop]: the channel 'shop.orders.{'x' * 60}' of source 'orders' is too long: set its ",
        ),
        (
            'payments = "payments"',
            'payments = { topic = "payments", channel = "shop.orders" }',
            "[pipeline.shop]: the channel 'shop.orders' of source 'payments' and of source 'orders' is used ",
        ),
        (
            'payments = "payments"',
            'payments = { topic = "payments", mode = "queue" }',
            "[pipeline.shop.sources.payments] mode: 'queue' allows one sink only, because each sink ",
        ),
        (
            'topic = "paid"',
            'topic = "returns"',
            "[pipeline.shop.sink 2] topic: is a topic that the pipeline reads: that would be an endless loop",
        ),
        (
            'dead_letters = "orders.dead"',
            'dead_letters = "payments"',
            "[pipeline.shop.sources.orders] dead_letters: is a topic that the pipeline reads: ",
        ),
        (
            'topic = "paid"',
            'parquet = "paid"',
            "[pipeline.shop.sink 2] output_mode: files can only be appended to: use 'append', with a ",
        ),
        (
            'topic = "paid"',
            """jdbc = "jdbc:x"\ntable = "t"
            [[pipeline.shop.sink]]\nname = "b"\njdbc = "jdbc:x"\ntable = "t"\nbatch_column = "c" """,
            "[pipeline.shop.sink 3] table: is also that of another sink: with 'batch_column' only one ",
        ),
        (
            'sql = "SELECT * FROM orders JOIN payments USING (number)"',
            'python = "m:f"',
            "[pipeline.shop.step 1] from: is missing: name one or more of orders, payments",
        ),
        (
            SHOP[SHOP.index("[[pipeline.shop.step]]") : SHOP.index("[[pipeline.shop.sink]]")],
            "",
            "[pipeline.shop.sink 1] from: is missing: name one of orders, payments",
        ),
    ],
)
def test_problems_of_several_sources_and_sinks(old: str, new: str, expected: str) -> None:
    assert old in SHOP
    found = problems(SHOP.replace(old, new))
    assert any(one.startswith(expected) for one in found), found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", "[pipeline.p] source: is missing"),
        ("source = 1", "[pipeline.p] source: must be a string or a table"),
        (
            "sources = 1",
            "[pipeline.p.sources]: must be tables, each with a name: [pipeline.p.sources.orders]",
        ),
        (
            "source = {}",
            "[pipeline.p.source]: option topic is missing: use one of topic, topics, topicsPattern",
        ),
        ('source = { topc = "x" }', "[pipeline.p.source] topc: unknown key; did you mean 'topic'?"),
        (
            'source = { topic = "x", max_rows = 1 }',
            "[pipeline.p.source] max_rows: unknown key; did you mean 'max_rows_per_trigger'?",
        ),
        ('source = { topic = "x", nsqd = "a:1" }', "[pipeline.p.source] nsqd: unknown key; "),
        (
            'source = { topic = "x", topics_pattern = "y" }',
            "[pipeline.p.source]: option topic cannot be combined with topicsPattern: ",
        ),
        (
            'source = { topic = ["a", 1] }',
            "[pipeline.p.source] topics: must be an array of strings, not ['a', 1]",
        ),
    ],
)
def test_problems_of_a_source(source: str, expected: str) -> None:
    assert any(one.startswith(expected) for one in problems(of_pipeline("", source=source)))


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        ("", "[pipeline.p] sink: is missing"),
        ("sink = 1", '[pipeline.p.sink]: must be a table, such as { topic = "results" }'),
        (
            'sink = "consol"',
            "[pipeline.p.sink]: must be 'console', 'noop' or a table, not 'consol'; did you mean 'console'?",
        ),
        (
            'sink = "results"',
            (
                "[pipeline.p.sink]: must be 'console', 'noop' or a table, not 'results'; for a topic, write "
                '{ topic = "results" }'
            ),
        ),
        (
            'sink = "parquet"',
            "[pipeline.p.sink]: must be 'console', 'noop' or a table, not 'parquet'; write { parquet = ",
        ),
        (
            'sink = { parket = "x" }',
            (
                "[pipeline.p.sink]: needs one of topic, parquet, delta, jdbc, format, python, console, "
                "memory, noop; did you mean 'parquet'?"
            ),
        ),
        (
            'sink = { topic = "x", parquet = "y" }',
            "[pipeline.p.sink]: has both 'topic' and 'parquet': each sink is of one kind",
        ),
        (
            'sink = { topic = "orders" }',
            "[pipeline.p.sink] topic: is a topic that the pipeline reads: that would be an endless loop",
        ),
        ('sink = { topic = "x", deliver = "y" }', "[pipeline.p.sink] deliver: unknown key; "),
        (
            'sink = { topic = "x", delivery = "twice" }',
            "[pipeline.p.sink] delivery: must be one of auto, exactly-once, at-least-once, not 'twice'",
        ),
        ('sink = { jdbc = "x" }', "[pipeline.p.sink] table: is missing"),
        (
            'sink = { jdbc = "jdbc:db9:x;password=secret", table = "t", key = "id" }',
            (
                "[pipeline.p.sink] key: upserts are not supported for 'db9'; they are for derby, h2, "
                "mariadb, mysql, oracle, postgresql, sqlite, sqlserver"
            ),
        ),
        (
            'sink = { jdbc = "jdbc:h2:x", table = "t", key = "id", batch_column = "b" }',
            "[pipeline.p.sink] batch_column: cannot be combined with 'key', which is exactly once without it",
        ),
        (
            'sink = { delta = "x", latest_by = "at" }',
            "[pipeline.p.sink] latest_by: needs 'key'",
        ),
        (
            'sink = { delta = "x", key = "id" }\noutput_mode = "complete"',
            "[pipeline.p] output_mode: a sink with 'key' takes changed rows only: use 'update'",
        ),
        (
            'sink = { delta = "x" }\noutput_mode = "update"',
            (
                "[pipeline.p] output_mode: files can only be appended to: use 'append', with a watermark, or "
                "set 'key'"
            ),
        ),
        (
            'sink = { format = "csv", path = "x", table = "t" }',
            "[pipeline.p.sink] table: cannot be combined with 'path'",
        ),
        ('sink = { format = "nsq" }', '[pipeline.p.sink] format: for a topic, write { topic = "…" }'),
        (
            'sink = { format = "csv", batches = 1 }',
            "[pipeline.p.sink] batches: must be true or false, not 1",
        ),
        (
            'sink = { python = "f" }',
            "[pipeline.p.sink] python: must name a function as module:function, not 'f'",
        ),
        (
            'sink = { parquet = "x", partition = "y" }',
            "[pipeline.p.sink] partition: unknown key; did you mean 'partition_by'?",
        ),
        (
            'sink = { parquet = "s3a://x", writer = "nsparq" }',
            "[pipeline.p.sink] writer: 'nsparq' cannot write to a URL such as 's3a://x': use 'spark'",
        ),
        (
            'sink = { parquet = "s3a://x", compact = 5 }',
            "[pipeline.p.sink] compact: needs the writer 'nsparq'",
        ),
        (
            'sink = { parquet = "x", compact = 5 }',
            (
                "[pipeline.p.sink] compact: needs 'partition_by': files in the table's own directory cannot "
                "be replaced in one step"
            ),
        ),
        (
            'output_mode = "complete"\nsink = { parquet = "x" }',
            "[pipeline.p] output_mode: files can only be appended to: use 'append', with a watermark",
        ),
    ],
)
def test_problems_of_a_sink(sink: str, expected: str) -> None:
    assert any(one.startswith(expected) for one in problems(of_pipeline("", sink=sink)))


def test_queue_mode_allows_neither_a_second_read_nor_an_inferred_schema() -> None:
    queue = 'source = { topic = "orders", mode = "queue" }'
    assert problems(of_pipeline('decode = "json"\ndead_letters = "d"', source=queue)) == [
        "[pipeline.p] dead_letters: reads the source a second time, which mode 'queue' does not allow",
        (
            "[pipeline.p.decode] schema: is missing: it cannot be inferred in mode 'queue', where reading "
            "takes the messages"
        ),
    ]
    read(of_pipeline('decode = "text"', source=queue))
    read(of_pipeline("decode = { format = 'json', json_schema = '/dev/null' }", source=queue))


def test_all_problems_are_reported_at_once() -> None:
    found = problems("[run]\nretry = 1\n[pipeline.a]\nsink = 1\n[pipeline.b]\nsource = 'x'\ntrigger = 'y'")
    assert [one.partition(":")[0] for one in found] == [
        "[run] retry",
        "[pipeline.a.sink]",
        "[pipeline.a] source",
        "[pipeline.b] trigger",
        "[pipeline.b] sink",
    ]


def test_a_schema_file_is_beside_the_pipeline_file(tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_bytes(b"{}")
    text = of_pipeline("decode = { format = 'avro', schema_file = 'order.avsc' }")
    decode = parse(text, tmp_path / "p.toml").pipelines[0].sources[0].decode
    assert decode.definition == b"{}" and not decode.is_inferred


def test_two_pipelines_cannot_share_a_checkpoint() -> None:
    text = "\n".join(
        f'[pipeline.{name}]\nsource = "x"\nsink = "noop"\ncheckpoint = "same"' for name in ("a", "b")
    )
    assert problems(text) == [
        "[pipeline.b] checkpoint: is also that of [pipeline.a]: each pipeline needs its own"
    ]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file or directory"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        load(tmp_path / "bad.toml")


def test_a_file_is_checked_without_spark(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(SHORT)
    block = "import sys; sys.modules.update(dict.fromkeys(('pyspark', 'pyarrow', 'numpy', 'rich')))"
    code = f"{block}; from nsparq.tools.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-W", "error", "-c", code, "pipeline", "check", str(tmp_path / "p.toml")]
    done = subprocess.run(command, capture_output=True, text=True)
    note = "PySpark is not installed: schemas and SQL have not been checked\n"
    assert (done.returncode, done.stderr) == (0, note)
    assert done.stdout == "revenue: orders -> json (dead letters: orders.dead) -> 1 step -> topic revenue\n"


def test_the_reference_page_is_up_to_date() -> None:
    from nsparq.pipeline.file.reference import markdown

    page = Path(__file__).parents[3] / "docs" / "reference" / "pipeline-file.md"
    assert page.read_text() == markdown(), "run `make docs`"
