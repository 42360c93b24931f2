"""After a power cut at any moment the promises of docs/guarantees.md hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.power_cut import DURABILITIES, campaign


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory where that can be: thousands of small files are made."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.parametrize("durability", DURABILITIES)
def test_what_was_promised_survives_a_power_cut(directory: Path, durability: str) -> None:
    outcomes = [*campaign(directory, durability, 0, lives=6, cuts=30)]
    assert len(outcomes) == 180
    assert [line for lines in outcomes for line in lines] == []
