"""Rigs that are closed when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.rig import Rig


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Rig(tmp_path, **flags); several in one test get a directory each."""
    rigs: list[Rig] = []

    def make(**arguments: Any) -> Rig:
        directory = tmp_path / str(len(rigs))
        directory.mkdir()
        rigs.append(Rig(directory, **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.drop()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()
