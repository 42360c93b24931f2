"""Idempotent producers over cut connections and killed nsqds; `python -m tests.soak.idempotence`
does more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.idempotence import run


@pytest.mark.parametrize(("nodes", "durability"), [(1, "fsync"), (2, "os")])
def test_every_message_is_stored_once_and_no_publish_fails(
    tmp_path: Path, nodes: int, durability: str
) -> None:
    result = run(tmp_path, cuts=40, kills=2, nodes=nodes, durability=durability)
    assert result.is_good, result
