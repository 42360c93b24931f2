"""Brokers for the conformance cases: one per set of flags, with new topic names per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support import REFERENCE, TestBroker, start_broker, start_process, unique_name

SharedBroker = Callable[..., TestBroker]

# Small limits, like those of the reference's tests.
LIMITS: dict[str, Any] = {
    "max_msg_size": 100,
    "max_body_size": 1000,
    "max_rdy_count": 50,
    "max_channel_consumers": 1,
    "max_req_timeout": 1.0,
    "max_msg_timeout": 1.5,
    "max_heartbeat_interval": 5.0,
    "max_output_buffer_size": 1024,
    "max_output_buffer_timeout": 1.0,
    "max_deflate_level": 3,
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "deviation(reason): we differ from NSQ on purpose; skipped against another nsqd"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("deviation")
        if marker and REFERENCE:
            reason = marker.args[0] if marker.args else "ours only"
            item.add_marker(pytest.mark.skip(reason=f"deviates from NSQ: {reason}"))


@pytest.fixture(scope="session")
def shared_broker() -> Iterator[SharedBroker]:
    """shared_broker(**flags): a running broker, started once per set of flags."""
    running: dict[str, TestBroker] = {}
    with ExitStack() as stack:

        def get(**flags: Any) -> TestBroker:
            key = repr(sorted(flags.items()))
            if key not in running:
                running[key] = stack.enter_context(start_broker(**flags))
            return running[key]

        yield get


@pytest.fixture(scope="session")
def broker(shared_broker: SharedBroker) -> TestBroker:
    """Default flags."""
    return shared_broker()


@pytest.fixture(scope="session")
def small_broker(shared_broker: SharedBroker) -> TestBroker:
    """All limits are small."""
    return shared_broker(**LIMITS)


@pytest.fixture
def own_broker() -> Iterator[Callable[..., TestBroker]]:
    """own_broker(**flags): a broker for this test alone, for restarts and checks of its files."""
    with ExitStack() as stack:
        yield lambda **flags: stack.enter_context(start_broker(**flags))


@pytest.fixture
def own_process() -> Iterator[Callable[..., Any]]:
    """own_process(**flags): a real process for this test alone, for signals."""
    with ExitStack() as stack:
        yield lambda **flags: stack.enter_context(start_process(**flags))


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


@pytest.fixture
def channel() -> str:
    return unique_name("channel")
