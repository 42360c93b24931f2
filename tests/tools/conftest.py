"""One broker for all tests of the tools; each test uses its own topics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import TestBroker, start_broker, unique_name


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with start_broker(msg_timeout=10.0) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return unique_name("topic")
