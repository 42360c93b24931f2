"""Delta tables: small files are joined, and old versions and unused files removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
deltalake = pytest.importorskip("deltalake")

from nsparq.pipeline.errors import PipelineError  # noqa: E402
from nsparq.pipeline.write import delta_upkeep  # noqa: E402
from nsparq.pipeline.write.delta import DeltaFiles  # noqa: E402
from nsparq.pipeline.write.delta_upkeep import Stopped, Tended, compact, expire  # noqa: E402
from nsparq.tools.main import main  # noqa: E402
from tests.pipeline.write.test_delta import add, found  # noqa: E402
from tests.support.s3 import run_s3  # noqa: E402

pytestmark = pytest.mark.allow_leftovers("deltalake has threads with sockets, which stay")

ALL = 1
"""Join all small files."""


@pytest.fixture(params=["disk", "store"])
def tended(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tended]:
    if request.param == "disk":
        yield Tended(str(tmp_path), fan_in=ALL)
        return
    with run_s3("lake") as storage:
        yield Tended("s3://lake/table", storage, ALL)


def fill(tended: Tended, retention: float = 0.0) -> DeltaFiles:
    """Four batches for two partitions. The last two have another column."""
    table = DeltaFiles(tended.uri, ("item",), tended.storage, retention)
    for batch in (0, 1):
        add(table, batch, "n INTEGER, item STRING", n=[batch, batch + 10], item=["a/b %", "c"])
    for batch in (2, 3):
        columns = {"n": [batch, batch + 10], "item": ["a/b %", "c"], "new": [batch, None]}
        add(table, batch, "n INTEGER, item STRING, new INTEGER", **columns)
    return table


def sizes(tended: Tended) -> list[int]:
    table = tended.open()
    assert table is not None
    rows: list[int] = pa.table(table.get_add_actions())["num_records"].to_pylist()
    return rows


def test_small_files_of_a_partition_become_one(tended: Tended) -> None:
    fill(tended)
    before = found(tended.uri, dict(tended.storage))
    joined = [*compact(tended)]
    assert [(files, part.rows) for files, part in joined] == [(4, 4), (4, 4)]
    assert [json.loads(part.stats)["maxValues"] for _, part in joined] == [{"n": 3, "new": 3}, {"n": 13}]
    assert (found(tended.uri, dict(tended.storage)), sizes(tended)) == (before, [4, 4])
    assert [*compact(tended)] == []


def test_files_are_joined_when_there_are_enough_or_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = DeltaFiles(str(tmp_path), ())
    for number in range(5):
        add(table, number, "n INTEGER", n=[number])
    assert [*compact(Tended(str(tmp_path), fan_in=6))] == []
    assert [files for files, _ in compact(Tended(str(tmp_path), fan_in=5))] == [5]
    for number in range(5, 8):
        add(table, number, "n INTEGER", n=[number])
    # Two of the files are large together, and then large.
    table_size = min(
        pa.table(deltalake.DeltaTable(str(tmp_path)).get_add_actions())["size_bytes"].to_pylist()
    )
    monkeypatch.setattr(delta_upkeep, "LARGE", table_size + 1)
    joined = [files for files, _ in compact(Tended(str(tmp_path), fan_in=100))]
    assert joined and set(joined) == {2}
    assert [row["n"] for row in found(tmp_path)] == [*range(8)]


def test_of_two_that_join_the_same_files_one_is_refused(tended: Tended) -> None:
    table = fill(tended)
    stale = tended.open()
    assert stale is not None
    group = delta_upkeep._group(delta_upkeep._files(stale), ALL)
    assert len([*compact(tended)]) == 2
    before = found(tended.uri, dict(tended.storage))
    assert delta_upkeep._join(stale, tended, group, lambda: False) is None
    # A batch that is added meanwhile is no obstacle.
    add(table, 4, "n INTEGER, item STRING", n=[20], item=["c"])
    stale = tended.open()
    assert stale is not None
    group = delta_upkeep._group(delta_upkeep._files(stale), ALL)
    add(table, 5, "n INTEGER, item STRING", n=[21], item=["c"])
    part = delta_upkeep._join(stale, tended, group, lambda: False)
    assert part is not None and part.rows == 5
    rows = found(tended.uri, dict(tended.storage))
    assert rows == [*before, {"n": 20, "item": "c", "new": None}, {"n": 21, "item": "c", "new": None}]


def test_a_commit_whose_answer_was_lost_keeps_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltalake.exceptions import CommitFailedError

    tended = Tended(str(tmp_path), fan_in=ALL)
    fill(tended)
    before = found(tmp_path)
    commit = deltalake.DeltaTable.create_write_transaction

    def lost(self: object, *arguments: object, **named: object) -> None:
        commit(self, *arguments, **named)
        raise CommitFailedError("the version exists")

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", lost)
    assert [files for files, _ in compact(tended)] == [4, 4]
    assert found(tmp_path) == before


def test_a_table_that_other_writers_read_differently_is_left_alone(tmp_path: Path) -> None:
    deltalake.DeltaTable.create(
        str(tmp_path), pa.schema([("n", pa.int32())]), configuration={"delta.enableDeletionVectors": "true"}
    )
    with pytest.raises(PipelineError, match="uses deletionVectors.*: only its own writer can join its files"):
        [*compact(Tended(str(tmp_path), fan_in=ALL))]


def test_a_stop_leaves_no_file_and_changes_nothing(tmp_path: Path) -> None:
    tended = Tended(str(tmp_path), fan_in=ALL)
    fill(tended)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(Stopped):
        [*compact(tended, lambda: True)]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def test_old_versions_and_files_of_failed_tasks_are_removed(tmp_path: Path) -> None:
    tended = Tended(str(tmp_path), fan_in=ALL, retention=3600.0)
    table = fill(tended, 3600.0)
    left_over, checkpoint = tmp_path / "item=c" / "failed.parquet", tmp_path / "_nsparq" / "checkpoint"
    left_over.write_bytes(b"not finished")
    checkpoint.mkdir(parents=True)
    (checkpoint / "offsets").write_text("ours")
    assert len([*compact(tended)]) == 2
    before = found(tmp_path)
    assert expire(tended) == 0, "nothing is old yet"
    for path in (*tmp_path.glob("_delta_log/*.json"), *tmp_path.glob("item=*/*")):
        os.utime(path, (0, 0))
    # The log says when a file was removed from the table, so that is still to come.
    assert expire(tended) == 1 and not left_over.exists()
    assert (found(tmp_path), (checkpoint / "offsets").exists()) == (before, True)
    logged = sorted(path.name for path in tmp_path.glob("_delta_log/*.json"))
    assert logged[0] != "00000000000000000000.json"
    add(table, 4, "n INTEGER, item STRING", n=[20], item=["c"])
    assert len(found(tmp_path)) == 9


def test_the_process_does_what_is_due_and_ends_with_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    tended = Tended(str(tmp_path), fan_in=2)
    fill(tended)
    tables = [{"uri": f"{tended.uri}/nothing", "fan_in": 2}, {"uri": tended.uri, "fan_in": 2}]
    command = [sys.executable, "-m", delta_upkeep.__name__]
    for once, expected in ((False, [1] * 8), (True, [4, 4])):
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"once": once, "tables": tables}).encode() + b"\n")
            if once:
                process.stdin.flush()
                assert process.wait(60) == 0
        # Without input it ends before it begins.
        assert (process.returncode, sizes(tended)) == (0, expected)
    assert main(["pipeline", "compact", str(tmp_path), "--retention=1h"]) == 0
    assert capsys.readouterr().out == "there are no files to join\n0 unused files were removed\n"
    assert main(["pipeline", "compact", str(tmp_path), "--retention=1s"]) == 1
