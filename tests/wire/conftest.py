"""Runs the tests that ask for it once with the compiled inner loops and once without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wire.harness import BUILDS, using


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param
