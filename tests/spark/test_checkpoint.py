"""What tells a batch that is run again from one that was planned anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsparq.spark.checkpoint import CheckpointBehind, check_batch, fingerprint


def test_a_fingerprint_is_that_of_sparks_own_record(tmp_path: Path) -> None:
    directory = tmp_path / "a b"
    (directory / "offsets").mkdir(parents=True)
    record = directory / "offsets" / "3"
    record.write_text("v1\n{}\n[5, 9]")
    first = fingerprint(str(directory), 3)
    assert 0 < int(first, 16) < 1 << 63
    assert fingerprint(f"file://{tmp_path}/a%20b", 3) == first
    record.write_text("v1\n{}\n[5, 8]")
    assert fingerprint(str(directory), 3) not in ("", first)
    assert fingerprint(str(directory), 4) == fingerprint("s3a://bucket/a", 3) == fingerprint("", 3) == ""


@pytest.mark.parametrize(
    ("batch", "planned", "expected"),
    [(6, "x", False), (5, "a", True), (5, "", True), (5, "x", None), (4, "a", None), (4, "", None)],
)
def test_only_the_last_batch_is_run_again(batch: int, planned: str, expected: bool | None) -> None:
    if expected is None:
        with pytest.raises(CheckpointBehind, match=f"batch {batch} is refused: the table has .* older copy"):
            check_batch("the table", batch, planned, 5, "a")
    else:
        assert check_batch("the table", batch, planned, 5, "a") is expected
