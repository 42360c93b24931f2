"""Every example of pipelines is run as by a user, and the pages show what was run."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

from nsparq.pipeline.execute.progress import State
from nsparq.pipeline.execute.status import read_status
from nsparq.pipeline.file.reading import load
from nsparq.pipeline.file.spec import Trigger
from nsparq.testing import Broker
from nsparq.tools.main import main
from nsparq.tools.pipeline_common import Stopping
from tests.pipeline.conftest import Runs, bodies
from tests.support import wait_until
from tests.support.polling import DEADLINE, SPARK_DEADLINE
from tests.support.spark import connect_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = ("pipelines.md", "tutorial-spark.md")
PATIENCE_S = SPARK_DEADLINE


def copy(directory: Path, name: str, broker: Broker, **more: str) -> Path:
    """An example as in the documentation, except for the addresses."""
    addresses = {
        "127.0.0.1:4150": broker.tcp_address,
        "127.0.0.1:4151": broker.http_address,
        "127.0.0.1:9464": "127.0.0.1:0",
        **more,
    }
    # All at once: a real address may look like one in the example.
    written = "|".join(map(re.escape, addresses))
    text = re.sub(written, lambda found: addresses[found[0]], (EXAMPLES / name).read_text())
    path = directory / Path(name).name
    path.write_text(text)
    return path


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_python(path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# pipeline files


def order(number: int, **more: Any) -> bytes:
    content = {"number": number, "item": "tea", "price": 50.0 * number, "at": f"2026-11-15T12:0{number}:00Z"}
    return json.dumps({**content, **more}).encode()


@pytest.fixture
def orders(broker: Broker) -> None:
    broker.publish("orders", *(order(number, phone="+49 30 1") for number in range(5)), b"one tea please")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Removes what the user's module leaves in this process."""
    path = sys.path[:]
    yield
    sys.path[:] = path
    for name in ("lake_steps", "current_sinks"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("orders", "forgotten")
def test_pipeline_files(run: Runs, broker: Broker, spark: SparkSession) -> None:
    """Runs all of them at once, until they have read the existing messages."""
    deltalake = pytest.importorskip("deltalake")
    for module in ("pipelines/lake_steps.py", "pipelines/current_sinks.py"):
        copy(run.directory, module, broker)
    names = (
        "pipelines/large_orders.toml",
        "pipelines/revenue.toml",
        "pipelines/lake.toml",
        "pipelines/current.toml",
    )
    files = [load(copy(run.directory, name, broker)) for name in names]
    until_now = Trigger(0.0, "available-now")
    pipelines = [replace(one, trigger=until_now) for file in files for one in file.pipelines]
    figures = run.file(replace(files[1], pipelines=tuple(pipelines)))
    assert {(one.state, one.error) for one in figures.values()} == {(State.FINISHED, "")}

    assert [one["number"] for one in bodies(broker, "orders.large")] == [3, 4]
    assert sorted((one["minute"][14:16], one["revenue"]) for one in bodies(broker, "revenue")) == [
        ("00", 0.0), ("01", 50.0), ("02", 100.0),
    ]  # fmt: skip
    assert bodies(broker, "sold") == [{"item": "tea", "sold": 5}]
    letters = bodies(broker, "orders.dead")
    assert sorted(one["pipeline"] for one in letters) == ["lake", "large-orders", "revenue"]
    assert {one["text"] for one in letters} == {"one tea please"}
    rows = spark.read.parquet(str(run.directory / "data" / "orders")).collect()
    assert sorted((row.number, row.country, str(row.date)) for row in rows) == [
        (number, "DE", "2026-11-15") for number in range(5)
    ]
    sold = deltalake.DeltaTable(str(run.directory / "data" / "sold")).to_pyarrow_table().to_pylist()
    assert sold == [{"item": "tea", "orders": 5, "revenue": 500.0}]
    delivered = spark.read.json(str(run.directory / "data" / "deliveries")).collect()
    assert sorted((row.number, row.batch) for row in delivered) == [(number, 0) for number in range(5)]


def avro_order(number: int, **more: Any) -> bytes:
    import fastavro

    stream = io.BytesIO()
    content = {"item": "tea", "price": None, "at": datetime(2026, 11, 15, 12, tzinfo=UTC), **more}
    schema = json.loads((EXAMPLES / "pipelines" / "order.avsc").read_text())
    fastavro.schemaless_writer(stream, schema, {"number": number, **content})
    return stream.getvalue()


def protobuf_order(number: int) -> bytes:
    # Fields 1, 2 and 4, which is a message with a field 1: seconds.
    return bytes([0x08, number]) + b"\x12\x03tea" + b"\x22\x06\x08\xc0\xbd\xe6\xd7\x06"


def test_formats(run: Runs, broker: Broker) -> None:
    for name in ("order.avsc", "shop.desc", "order.schema.json"):
        shutil.copy(EXAMPLES / "pipelines" / name, run.directory)
    broker.publish("orders.avro", *(avro_order(number) for number in range(1, 4)), b"\xff", b"junk")
    broker.publish("orders.protobuf", *(protobuf_order(number) for number in range(4, 7)), b"junk")
    at = "2026-11-15T12:00:00Z"
    broker.publish("orders.json", *(order(number, price=None, at=at) for number in range(7, 9)), order(0))
    file = load(copy(run.directory, "pipelines/formats.toml", broker))
    until_now = Trigger(0.0, "available-now")
    pipelines = tuple(replace(one, trigger=until_now) for one in file.pipelines)
    figures = run.file(replace(file, pipelines=pipelines))
    assert {(one.state, one.error) for one in figures.values()} == {(State.FINISHED, "")}
    assert {one.name: (one.rows, one.dead_letters) for one in figures.values()} == {
        "avro-orders": (5, 2),
        "protobuf-orders": (4, 1),
        "checked-orders": (3, 1),
    }
    read = sorted(bodies(broker, "orders.read"), key=lambda row: row["number"])
    same = {"item": "tea", "price": None, "at": "2026-11-15T12:00:00.000Z"}
    assert read == [{"number": number, **same} for number in range(1, 9)]
    assert sorted((one["topic"], one["error"]) for one in bodies(broker, "orders.dead")) == [
        ("orders.avro", "item: the message ends within its value"),
        ("orders.avro", "number: the message ends within its value"),
        ("orders.json", "number: 0 is less than the minimum of 1"),
        ("orders.protobuf", "field 13: the message ends within its value"),
    ]


@pytest.mark.usefixtures("forgotten")
def test_the_tests_beside_the_pipeline_files_pass(spark: SparkSession) -> None:
    """In the session of our tests, which stands for the fixture `nsq_spark`."""
    found = runpy.run_path(str(EXAMPLES / "pipelines/test_orders.py"))
    tests = [one for name, one in found.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test(nsq_spark=spark)


@pytest.mark.usefixtures("orders")
def test_a_pipeline_that_a_program_builds(
    run: Runs,
    broker: Broker,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is that of the file, with a join of streams, a table and two sinks. Each sink gets each
    row once, also after a restart."""
    from nsparq.spark.session import build as session

    # In the session of the tests, which it does not stop.
    monkeypatch.setattr(session, "build_session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["shop.py", "--available-now"])
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    # No result depends on a batch without rows, which takes as long as one with rows.
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    program = copy(run.directory, "pipelines/shop.py", broker)
    file = copy(run.directory, "pipelines/shop.toml", broker)
    copy(run.directory, "pipelines/countries.csv", broker)

    def pay(*orders: int) -> None:
        payments = [{"order_number": one, "paid_at": f"2026-11-15T12:0{one}:30Z"} for one in orders]
        broker.publish("payments", *(json.dumps(one).encode() for one in payments))

    def paid() -> list[tuple[int, str]]:
        return sorted((one["number"], one["country"]) for one in bodies(broker, "orders.paid"))

    pay(1, 3)
    built = runpy.run_path(str(program), run_name="__main__")
    assert replace(built["shop"](), path=file) == load(file)
    # Each message counts once, although two queries read the orders, and one more their dead
    # letters.
    assert capsys.readouterr().out == "shop finished 8 messages \n"
    status = read_status(run.directory / "checkpoints" / "shop")
    assert status is not None
    (figures,) = status["pipelines"]
    assert (figures["undecodable"], figures["dead_letters"], figures["lag"]) == (1, 1, 0)
    assert [(one["name"], one["rows"]) for one in figures["outputs"]] == [("", 8), ("lake", 6)]
    assert paid() == [(1, "DE"), (3, "DE")]

    # A payment that comes later finds its order in the state of the query.
    pay(4, 5)
    broker.publish("orders", order(5, phone="+44 20 1"))
    built["main"]()
    assert capsys.readouterr().out == "shop finished 3 messages \n"
    assert paid() == [(1, "DE"), (3, "DE"), (4, "DE"), (5, "GB")]
    rows = spark.read.parquet(str(run.directory / "data" / "located")).collect()
    assert sorted((row.number, row.country) for row in rows) == [
        *((number, "DE") for number in range(5)),
        (5, "GB"),
    ]
    assert [one["text"] for one in bodies(broker, "orders.dead")] == ["one tea please"]
    # No channel keeps messages for an output that does not read them.
    assert broker.channel_stats("payments", "shop.payments") is not None
    assert broker.channel_stats("orders", "shop.orders.lake") is not None
    assert broker.channel_stats("payments", "shop.payments.lake") is None


# the tutorial


class Command:
    """`nsparq pipeline run` in the session of the tests, until it is told to stop. test_demo.py
    runs pipelines in a process of their own, which a signal stops."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # A signal would reach all tests, and its time limit would end the process.
        self._stopping: list[Stopping] = []
        monkeypatch.setattr(Stopping, "install", lambda stopping: self._stopping.append(stopping))
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(name,))

    def _run(self, name: str) -> None:
        self._status = main(["pipeline", "run", name, "--conf=spark.sql.shuffle.partitions=1"])

    def __enter__(self) -> Command:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int | None:
        """The status of the command."""
        for stopping in self._stopping:
            stopping.event.set()
        self._thread.join(DEADLINE)
        return self._status

    def wait_for(self, fact: Callable[[], Any], what: str) -> None:
        wait_until(lambda: fact() or not self._thread.is_alive(), PATIENCE_S, what=what)
        assert self._thread.is_alive(), self._status


def test_the_tutorial_works_as_written(
    tmp_path: Path,
    broker: Broker,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    root_logger_restored: None,
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    monkeypatch.chdir(tmp_path)

    def nsparq(*arguments: str) -> tuple[int, str]:
        """The status and the output of a command."""
        capsys.readouterr()
        return main(["pipeline", *arguments]), capsys.readouterr().out

    sell = copy(tmp_path, "tutorial_spark/sell.py", broker)
    assert run_python(sell, "200") == "200 orders\n"
    new = nsparq("new", "orders.toml", "--topic=orders", f"--nsqd-http-address={broker.http_address}")
    assert new == (0, "nsparq pipeline run orders.toml\n")
    shown = (ROOT / "docs" / "tutorial-spark.md").read_text()
    heart = (tmp_path / "orders.toml").read_text().partition("[pipeline.orders]")[2].partition("\n\n")[0]
    assert f"[pipeline.orders]{heart}\n```" in shown

    path = copy(tmp_path, "tutorial_spark/revenue.toml", broker)
    status, checked = nsparq("check", path.name)
    assert status == 0 and f"\n{checked}$ " in shown
    with Command(path.name, monkeypatch) as command:
        command.wait_for(lambda: len(broker.peek("revenue")) >= 9, "revenue of three minutes")
        found = [message.body.decode() for message in broker.peek("revenue")]
        for line in re.findall(r'^{"minute".*$', shown, re.MULTILINE):
            assert line in found
        broker.publish("orders", b"one tea please")
        command.wait_for(lambda: broker.peek("orders.dead"), "a dead letter")
        (letter,) = bodies(broker, "orders.dead")
        assert f'"error": "{letter["error"]}", "text": "{letter["text"]}"' in shown

        def is_counted() -> bool:
            status = read_status(tmp_path / "checkpoints" / "revenue")
            found = status["pipelines"][0] if status is not None else {}
            return (found.get("rows"), found.get("dead_letters")) == (201, 1)

        command.wait_for(is_counted, "the letter among the figures")
        status, told = nsparq("status", path.name)
        assert status == 0 and f"running, process {os.getpid()}" in told
        assert re.search(r"revenue +running +\d+ +0 +201 ", told), told
        address = json.loads((tmp_path / "checkpoints" / "revenue" / "status.json").read_text())["address"]
        with urlopen(f"http://{address}/metrics", timeout=DEADLINE) as answer:
            assert 'nsparq_pipeline_dead_letters_total{pipeline="revenue"} 1' in answer.read().decode()
        capsys.readouterr()
        assert command.stop() == 0
        assert "revenue: stopped" in capsys.readouterr().err
    status, told = nsparq("status", path.name)
    assert status == 1 and "not running since" in told


def test_the_notebook_runs(
    tmp_path: Path,
    broker: Broker,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from nsparq.spark.session import build as session

    # In the session of the tests, which it does not stop.
    monkeypatch.setattr(session, "build_session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    monkeypatch.chdir(tmp_path)
    broker.publish("orders", *(order(number, price=3.0 + number) for number in range(4)), b"junk")
    runpy.run_path(str(copy(tmp_path, "notebook_spark.py", broker)))
    output = capsys.readouterr().out
    assert "5 messages" in output
    assert "number BIGINT, item STRING, price DOUBLE, at TIMESTAMP" in output
    assert "cheap finished 5 rows 1 dead letters" in output
    assert "1 cheap orders" in output
    assert [one["sold"] for one in bodies(broker, "sold") if one.get("item")] == [4]


def test_avro_without_a_pipeline(
    tmp_path: Path,
    broker: Broker,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import nsparq.spark

    monkeypatch.setattr(nsparq.spark, "build_session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "pipelines" / "order.avsc", tmp_path)
    broker.publish("orders.avro", avro_order(1, price=4.5), b"\xff")
    runpy.run_path(str(copy(tmp_path, "pipelines/avro_spark.py", broker)))
    output = capsys.readouterr().out
    assert re.search(r"\|\s*1\|\s*tea\|\s*4.5\|2026-11-15 12:00:00\|", output), output
    assert re.search(r"\|\d+\s*\|number: the message ends within its value\|", output), output


# Spark's own pipelines


def test_declarative_pipelines(tmp_path: Path, broker: Broker, spark: SparkSession) -> None:
    pytest.importorskip("grpc")
    project = tmp_path / "declarative"
    shutil.copytree(EXAMPLES / "declarative", project)
    settings = project / "spark-pipeline.yml"
    settings.write_text(settings.read_text().replace("/tmp/nsparq-shop", str(tmp_path / "storage")))
    broker.publish("orders", *(order(number, price=3.0 + number) for number in range(4)))
    with connect_server(spark) as address:
        done = subprocess.run(
            [sys.executable, "-m", "pyspark.pipelines.cli", "run"],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**environment(), "SPARK_REMOTE": address, "NSQD": broker.http_address},
        )
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(row.number for row in spark.table("default.orders").collect()) == [0, 1, 2, 3]
        assert [tuple(row) for row in spark.table("default.revenue").collect()] == [("tea", 18.0, 4)]
        assert sorted(one["number"] for one in bodies(broker, "orders.large")) == [2, 3]
        assert broker.channel_stats("orders", "shop") is not None
    finally:
        for table in ("orders", "revenue"):
            spark.sql(f"DROP TABLE IF EXISTS default.{table}")


# what the documentation shows


def mine() -> list[str]:
    found = [
        *EXAMPLES.glob("notebook_spark.py"),
        *(
            path
            for name in ("pipelines", "tutorial_spark", "declarative")
            for path in (EXAMPLES / name).rglob("*.*")
        ),
    ]
    return sorted(str(path.relative_to(EXAMPLES)) for path in found if path.suffix in (".py", ".toml"))


@pytest.mark.parametrize("name", mine())
def test_every_example_is_run_and_shown(name: str) -> None:
    text = Path(__file__).read_text()
    assert f'"{name}"' in text or name.startswith("declarative/"), "no test runs it"
    pages = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    assert f"examples/{name}" in pages


@pytest.mark.parametrize("name", [name for name in mine() if name.endswith(".toml")])
def test_every_pipeline_file_is_right(name: str) -> None:
    assert load(EXAMPLES / name).pipelines


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_what_was_run(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"<!-- examples/(\S+) -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert blocks
    for name, block in blocks:
        assert block in (EXAMPLES / name).read_text(), f"{name} has changed"


def test_the_commands_of_a_page_exist() -> None:
    from nsparq.tools.pipeline import make_parser

    pages = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    lines = re.findall(
        r"(?m)^(?:\$ )?nsparq pipeline ((?:archive|stats|replay|run|check|try|status|new) .*)$", pages
    )
    assert len(lines) > 8
    for line in lines:
        make_parser().parse_args(shlex.split(line))
