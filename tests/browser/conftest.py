"""One browser for all these tests, and one cluster of real processes for it to look at.

Both end with the folder's last test on a worker: while Playwright runs, its event loop is this thread's, and
tests elsewhere have loops of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.admin.support import AdminProcess, Cluster, join
from tests.browser.visitor import NoChromium, Visitor, start_chromium

POLL_S = 0.4


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    try:
        with start_chromium() as browser:
            yield browser
    except NoChromium as error:
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with Cluster(nsqds=2, as_processes=True, max_heartbeat_interval=600.0) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def admin(cluster: Cluster) -> AdminProcess:
    return cluster.admin(poll_interval=POLL_S)  # type: ignore[return-value]  # a process, see above


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Callable[..., Visitor]]:
    """A function of an nsqadmin and of what is special about the browser, for a new visitor."""
    with ExitStack() as stack:

        def visit(admin: AdminProcess, **context: Any) -> Visitor:
            visitor = Visitor(chromium, f"http://{join(admin.http_address)}", **context)
            stack.callback(visitor.close)
            return visitor

        yield visit


@pytest.fixture
def visitor(visit: Callable[..., Visitor], admin: AdminProcess) -> Visitor:
    return visit(admin)
