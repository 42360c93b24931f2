"""One broker for all tests of the tools; each test uses its own topics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from nsparq.tools.main import main
from tests.support import TestBroker, start_broker, unique_name

from .processes import Finished, http


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with start_broker(msg_timeout=10.0) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


Run = Callable[..., Finished]


@pytest.fixture
def nsparq(
    broker: TestBroker, capfdbinary: pytest.CaptureFixture[bytes], root_logger_restored: None
) -> Iterator[Run]:
    """Runs a command of nsparq in this process, with the broker's address in the environment."""

    def run(*arguments: str) -> Finished:
        capfdbinary.readouterr()
        status = main(arguments)
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return Finished(status, out, err.decode())

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSQ_NSQD_HTTP_ADDRESS", http(broker))
        patch.delenv("NSQ_LOOKUPD_HTTP_ADDRESS", raising=False)
        yield run
