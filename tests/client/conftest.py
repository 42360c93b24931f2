"""What the tests of the client share."""

from __future__ import annotations

import pytest

from tests.support import aio


@pytest.fixture(params=["asyncio", "uvloop"])
def any_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs bring their own event loop, and the two differ in details."""
    if request.param == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        monkeypatch.setattr(aio, "LOOP_FACTORY", uvloop.new_event_loop)
