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


@pytest.fixture(scope="module")
def second() -> Iterator[TestBroker]:
    with start_broker() as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


@pytest.fixture
def both(broker: TestBroker, second: TestBroker, topic: str) -> list[str]:
    """The options that name both brokers, which have a channel of the topic."""
    for one in (broker, second):
        one.control("create", topic, "c")
    return [f"--nsqd-http-address={http(one)}" for one in (broker, second)]


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
