"""Fixtures for the tests of the client."""

from __future__ import annotations

import pytest

from tests.support import aio


@pytest.fixture(params=["asyncio", "uvloop"])
def any_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test on asyncio's and on uvloop's event loop: they differ in details."""
    if request.param == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        monkeypatch.setattr(aio, "LOOP_FACTORY", uvloop.new_event_loop)
