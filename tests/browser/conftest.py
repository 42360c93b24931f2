"""One browser for all these tests, and one cluster of real processes for it to look at.

Both end with the last test of this folder: while Playwright runs, it uses this thread's event loop,
and other tests need loops of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.admin.support import AdminProcess, Cluster, join
from tests.browser.visitor import NoChromium, Profile, Visitor, start_chromium
from tests.support import DEADLINE

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
    # Where a daemon takes long on a busy machine, the page waits, and does not leave it out.
    patient = {"http_client_connect_timeout": DEADLINE, "http_client_request_timeout": DEADLINE}
    return cluster.admin(poll_interval=POLL_S, **patient)  # type: ignore[return-value]  # a process, see above


@pytest.fixture(scope="package")
def profile(chromium: Browser) -> Profile:
    return Profile(chromium)


@pytest.fixture
def visit(chromium: Browser, profile: Profile) -> Iterator[Callable[..., Visitor]]:
    """A function that makes a visitor for an nsqadmin, with options of the browser context. Only
    one visitor at a time may have no options."""
    with ExitStack() as stack:

        def visit(admin: AdminProcess, **context: Any) -> Visitor:
            site = f"http://{join(admin.http_address)}"
            used = Profile(chromium, **context) if context else profile
            visitor = Visitor(used, site)
            stack.callback(visitor.close)
            if context:
                stack.callback(used.close)
            else:
                stack.callback(used.forget, site)
            return visitor

        yield visit


@pytest.fixture
def visitor(visit: Callable[..., Visitor], admin: AdminProcess) -> Visitor:
    return visit(admin)
