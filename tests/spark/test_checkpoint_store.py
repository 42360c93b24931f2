"""A checkpoint in an object store: what a driver on another machine finds, and two drivers at
once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from nsparq.archive.store import Store
from nsparq.errors import ArchiveUnavailable, NsparqError
from nsparq.spark.checkpoint import fingerprint
from nsparq.spark.checkpoint_store import KEEP, NAME, PREFIX, CheckpointStore, CheckpointTaken
from tests.support.s3 import run_s3

pytestmark = pytest.mark.allow_leftovers("obstore has threads with sockets, which stay")

URL = "s3://lake/checkpoints/orders"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with run_s3("lake") as storage:
        yield storage


@pytest.fixture(autouse=True)
def store(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    found = Store(URL)
    yield found
    found.delete([one.key for one in found.list("")])


class Driver:
    """Writes the files that Spark writes, in a directory of its own."""

    def __init__(self, directory: Path, query: str = "q1") -> None:
        directory.mkdir()
        (directory / NAME).write_text(json.dumps({"url": URL}))
        self.rows = directory / "rows"
        CheckpointStore(URL).fetch(directory, ["rows", "letters"])
        for name in ("offsets", "commits"):
            (self.rows / name).mkdir(parents=True, exist_ok=True)
        if not (self.rows / "metadata").exists():
            (self.rows / "metadata").write_text(query)

    def plan(self, batch: int, content: str) -> str:
        """What the sink gets before it commits."""
        path = self.rows / "offsets" / str(batch)
        if not path.exists():
            path.write_text(content)
        return fingerprint(f"file://{self.rows}", batch)

    def done(self, batch: int) -> None:
        (self.rows / "commits" / str(batch)).write_text(f"done {batch}")

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.rows)): path.read_text()
            for path in self.rows.rglob("*")
            if path.is_file() and path.name != "begun"
        }


def test_a_driver_on_another_machine_runs_the_last_batch_again(tmp_path: Path) -> None:
    first = Driver(tmp_path / "first")
    for batch in range(3):
        planned = first.plan(batch, f"at {batch}")
        first.done(batch)
    second = Driver(tmp_path / "second", "other")
    assert second.files() == {
        "metadata": "q1", "offsets/1": "at 1", "offsets/2": "at 2", "commits/1": "done 1",
    }  # fmt: skip
    assert second.plan(2, "somewhere else") == planned
    second.done(2)
    assert second.plan(3, "at 3")
    assert Driver(tmp_path / "third").files()["offsets/3"] == "at 3"


def test_a_batch_that_was_not_committed_may_be_missing(tmp_path: Path) -> None:
    """A batch without rows does not reach the sink."""
    first = Driver(tmp_path / "first")
    (first.rows / "offsets" / "0").write_text("at 0")
    first.done(0)
    first.plan(1, "at 1")
    found = Driver(tmp_path / "second").files()
    assert found == {"metadata": "q1", "offsets/0": "at 0", "offsets/1": "at 1", "commits/0": "done 0"}


def test_one_of_two_drivers_is_refused(tmp_path: Path) -> None:
    first = Driver(tmp_path / "first")
    other = Driver(tmp_path / "other", "q2")
    first.plan(0, "at 0")
    with pytest.raises(CheckpointTaken, match="rows/metadata was written by another driver"):
        other.plan(0, "at 0")
    second = Driver(tmp_path / "second")
    for driver in (first, second):
        driver.plan(0, "")
        driver.done(0)
    second.plan(1, "by the second")
    with pytest.raises(CheckpointTaken, match=r"rows/batches/0+1 was written by another driver"):
        first.plan(1, "by the first")
    # The same again is no conflict: the answer may have been lost.
    second.plan(1, "")


def test_a_directory_that_was_cleaned_up_is_noticed(tmp_path: Path) -> None:
    home = tmp_path / f"{PREFIX}x"
    home.mkdir()
    driver = Driver(home / "first")
    (home / "first" / NAME).unlink()
    with pytest.raises(NsparqError, match="was removed while the pipeline runs"):
        driver.plan(0, "at 0")


def test_old_batches_leave_the_store(tmp_path: Path, store: Store) -> None:
    driver = Driver(tmp_path / "first")
    for batch in range(2 * KEEP + 1):
        driver.plan(batch, f"at {batch}")
        driver.done(batch)
    assert len([*store.list("rows/batches/")]) == KEEP
    assert Driver(tmp_path / "second").files()["offsets/40"] == "at 40"


def test_what_a_pipeline_keeps_is_written_once(store: Store) -> None:
    mine, other = CheckpointStore(URL), CheckpointStore(URL)
    assert mine.read() == {}
    for number in range(4):
        mine.keep({"format": 1, "n": number})
        assert other.read() == {"format": 1, "n": number}
    assert len([*store.list("pipeline/")]) == 2
    store.put_new("pipeline/00000005.json", b'{"format": 2}')
    with pytest.raises(NsparqError, match="has format 2: use the nsparq that wrote it"):
        mine.read()


def test_a_store_that_is_away_keeps_the_sink_from_committing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path / "first")

    def away(self: Store, key: str, data: bytes) -> bool:
        raise ArchiveUnavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", away)
        with pytest.raises(ArchiveUnavailable):
            driver.plan(0, "at 0")
    assert driver.plan(0, "at 0")
