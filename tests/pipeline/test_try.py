"""`nsparq pipeline try`: shows what would be written, and leaves no trace."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from nsparq.testing import Broker
from nsparq.tools import pipeline_try
from nsparq.tools.main import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("root_logger_restored")

Command = Callable[..., tuple[int, str, str]]

SHOP = """
[nsq]
nsqd = ["{address}"]
[pipeline.large]
source = "orders"
decode = {{ format = "json", schema = "number INT NOT NULL, price DOUBLE" }}
dead_letters = "orders.dead"
sql = "SELECT number, price FROM input WHERE price > 10"
sink = {{ topic = "orders.large" }}
[pipeline.strict]
source = "orders"
decode = {{ format = "json", schema = "number INT NOT NULL" }}
sql = "SELECT number, number * 2 AS twice FROM input"
sink = {{ parquet = "out" }}
"""
MESSAGES = (b'{"number": 1, "price": 5}', b'{"number": 2, "price": 50}', b"junk\x1b[31m")


@pytest.fixture
def command(
    spark: SparkSession,
    broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Runs the command in the session of the tests: exit status, output, errors."""
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    (tmp_path / "shop.toml").write_text(SHOP.format(address=broker.http_address))

    def command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["pipeline", "try", str(tmp_path / "shop.toml"), *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return command


def test_the_first_messages_of_a_topic_are_shown_and_nothing_is_left_behind(
    command: Command, broker: Broker, tmp_path: Path
) -> None:
    broker.publish("orders", *MESSAGES, *[b'{"number": 9, "price": 90}'] * 3)
    status, output, _ = command("--count=3")
    reason = r"not JSON: Expecting value: line 1 column 1 (char 0): junk\x1b[31m"
    assert output.splitlines() == [
        "large: 3 messages of orders",
        "-> topic orders.large: 1 row",
        "body",
        '{"number":2,"price":50.0}',
        f"-> topic orders.dead, does not decode: {reason}",
        "strict: 3 messages of orders",
        f"-> parquet {tmp_path}/out: 2 rows",
        "number  twice",
        "1       2",
        "2       4",
        f"does not decode, FAILS the pipeline: {reason}",
    ]
    assert status == 1
    (topic,) = broker.stats()["topics"]
    assert (topic["topic_name"], topic["channels"]) == ("orders", [])
    assert [path.name for path in tmp_path.iterdir()] == ["shop.toml"]


def test_messages_of_a_file_need_no_nsqd(
    command: Command, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop.toml").write_text(SHOP.format(address="127.0.0.1:9"))
    (tmp_path / "messages").write_bytes(b"\n".join(MESSAGES))
    status, output, _ = command("--only=large", "--json", f"--messages={tmp_path / 'messages'}")
    row, letter = map(json.loads, output.splitlines())
    assert (status, row) == (
        0,
        {
            "pipeline": "large",
            "output": "",
            "sink": "topic orders.large",
            "row": {"body": '{"number":2,"price":50.0}'},
        },
    )
    assert (letter["fate"], letter["undecoded"]["offset"]) == ("dead letter", 2)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGES[1] + b"\n")))
    status, output, _ = command("--only=strict", "--messages=orders=-")
    assert (status, output.splitlines()[-1]) == (0, "2       4")


def test_errors_are_reported_as_by_check(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "shop.toml"
    path.write_text(path.read_text().replace("SELECT number, price", "SELECT prize"))
    status, _, errors = command("--only=large", "--messages=/dev/null")
    assert status == 2
    assert errors.startswith(f"{path}: [pipeline.large] sql: [UNRESOLVED_COLUMN")
    assert command("--only=huge")[0] == 2
    path.write_text(SHOP.format(address="127.0.0.1:9"))
    status, _, errors = command("--only=large")
    assert (status, "127.0.0.1:9" in errors) == (1, True)
    status, _, errors = command("--messages=returns=-")
    assert (status, "No such file" in errors) == (1, True)


def test_dates_of_any_year_are_shown() -> None:
    pa = pytest.importorskip("pyarrow")
    day = pa.array([2_932_897], pa.int32()).cast(pa.date32())
    time = pa.array([253_402_300_800_000_000], pa.timestamp("us", "UTC"))
    inner = pa.StructArray.from_arrays([time, pa.array([1])], ["at", "n"])
    listed, mapped = pa.ListArray.from_arrays([0, 1], day), pa.MapArray.from_arrays([0, 1], ["k"], time)
    table = pa.table({"day": day, "inner": inner, "listed": listed, "mapped": mapped})
    at = "10000-01-01 00:00:00.000000Z"
    (row,) = pipeline_try._rows(table)
    assert row == {
        "day": "10000-01-01",
        "inner": {"at": at, "n": 1},
        "listed": ["10000-01-01"],
        "mapped": {"k": at},
    }


def test_of_a_key_that_is_twice_in_a_map_the_last_value_is_shown() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"m": pa.MapArray.from_arrays([0, 2], ["k", "k"], [1, 2])})
    with pytest.warns(UserWarning, match="'k' which was already encountered"):
        assert pipeline_try._rows(table) == [{"m": {"k": 2}}]


def test_rows_are_cut_to_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["id", "item", "text"], ["1", "tea", "x" * 100], ["2", "c" * 30, ""]]
    monkeypatch.setattr(pipeline_try, "_width", lambda: 40)
    lines = list(pipeline_try._table(rows))
    assert lines == [
        "id  item               text",
        f"1   tea                {'x' * 16}…",
        f"2   {'c' * 16}…",
    ]
    monkeypatch.setattr(pipeline_try, "_width", lambda: 5)
    assert max(map(len, pipeline_try._table(rows))) == 2 + 8 + 8 + 4
