"""Coordinators that the tests of clusters share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.replication.coordinators import run_etcd


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_etcd(tmp_path_factory.mktemp("etcd") / "data") as url:
        yield url.replace("http://", "etcd://")
