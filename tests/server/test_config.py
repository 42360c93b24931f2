"""/config beyond what NSQ has: see tests/conformance/test_k_config.py for that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from nsparq.options import TABLE, NsqdOptions, TlsRequired
from nsparq.server.config import CHANGEABLE, KEYS
from tests.support import BrokerThread, unique_name
from tests.support.certificates import certificates


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


@pytest.fixture(autouse=True)
def level_restored() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_every_option_can_be_read(broker: BrokerThread) -> None:
    assert [*KEYS] == [option.file_key for option in TABLE.options]
    for key in KEYS:
        answer = broker.request("GET", f"/config/{key}")
        assert answer.status == 200, key


@pytest.mark.parametrize(
    ("flag", "key", "given", "shown"),
    [
        ("durability", "durability", "fsync", "fsync"),
        ("retention_age", "retention_age", 1.5, 1_500_000_000),
        ("retention_bytes", "retention_bytes", 12, 12),
        ("mem_queue_bytes", "mem_queue_bytes", 1 << 20, 1 << 20),
        ("checkpoint_interval", "checkpoint_interval", 0.25, 250_000_000),
    ],
)
def test_our_own_options_are_shown_as_those_of_nsq(flag: str, key: str, given: Any, shown: Any) -> None:
    with BrokerThread(**{flag: given}) as broker:
        answer = broker.request("GET", f"/config/{key}")
        if isinstance(shown, str):
            answer.expect_text(shown)
        else:
            assert answer.expect_json() == shown


@pytest.mark.parametrize(
    ("required", "shown"), [(TlsRequired.NO, 0), (TlsRequired.EXCEPT_HTTP, 1), (TlsRequired.YES, 2)]
)
def test_what_tls_is_required_of_is_a_number(required: TlsRequired, shown: int) -> None:
    flags = certificates().server_flags(tls_required=required)
    with BrokerThread(**flags) as broker:
        tls = certificates().client_context()
        with broker.http_connect(https=True, tls=tls) as connection:
            assert connection.request("GET", "/config/tls_required").expect_json() == shown
            assert connection.request("GET", "/config/tls_cert").body.decode() == flags["tls_cert"]


def test_exactly_what_can_be_changed_is_offered(broker: BrokerThread) -> None:
    for key in KEYS:
        answer = broker.request("PUT", f"/config/{key}", b"?")
        answer.expect_error(400, "INVALID_VALUE" if key in CHANGEABLE else "INVALID_OPTION")
    document = broker.request("GET", "/openapi.json").json()["paths"]["/config/{key}"]
    assert document["put"]["parameters"][0]["schema"]["enum"] == sorted(CHANGEABLE)
    assert document["get"]["parameters"][0]["schema"]["enum"] == sorted(KEYS)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'["a",' * 50_000, b"9" * 10_000, b'"\\ud800"', b"{}"])
def test_a_list_that_is_none_is_an_invalid_value(
    broker: BrokerThread, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    broker.request("PUT", "/config/nsqlookupd_tcp_addresses", body).expect_error(400, "INVALID_VALUE")
    assert broker.request("GET", "/config/nsqlookupd_tcp_addresses").expect_json() == []
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_addresses_that_lead_nowhere_do_no_harm(broker: BrokerThread) -> None:
    path = "/config/nsqlookupd_tcp_addresses"
    odd = '["", "no port", "host:99999", "[::1", "\\ud800:1", "127.0.0.1:1", "127.0.0.1:1"]'
    assert len(broker.request("PUT", path, odd.encode()).expect_json()) == 7
    topic = unique_name()
    broker.publish(topic, b"x")
    assert broker.topic_stats(topic) is not None
    assert broker.request("PUT", path, b"[]").expect_json() == []


def test_a_change_is_one_of_the_running_daemon_alone(broker: BrokerThread) -> None:
    before = broker.nsqd.options
    assert broker.request("PUT", "/config/log_level", b"error").expect_json() == 4
    assert broker.nsqd.options.log_level == "error" and before.log_level == "info"
    assert logging.getLogger().level == logging.ERROR
    assert broker.request("PUT", "/config/log_level", b"info").expect_json() == 2
    assert NsqdOptions().log_level == "info"
