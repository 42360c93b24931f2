"""/config beyond NSQ's rules, which are in tests/conformance/test_k_config.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nsparq.options import TABLE, NsqdOptions, TlsRequired
from nsparq.server.api.config import CHANGEABLE, KEYS
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


def test_our_own_options_are_shown_as_those_of_nsq() -> None:
    given = {"durability": "fsync", "retention_bytes": 12, "mem_queue_bytes": 1 << 20}
    durations = {"retention_age": 1.5, "checkpoint_interval": 0.25}
    with BrokerThread(**given, **durations) as broker:
        broker.request("GET", "/config/durability").expect_text("fsync")
        for key in ("retention_bytes", "mem_queue_bytes"):
            assert broker.request("GET", f"/config/{key}").expect_json() == given[key]
        for key, seconds in durations.items():
            assert broker.request("GET", f"/config/{key}").expect_json() == seconds * 1_000_000_000


def test_addresses_are_shown_without_their_secrets() -> None:
    login = "user:" + "password"
    given = (f"https://{login}@10.0.0.1/auth?key=password", "10.0.0.2:4180")
    with BrokerThread(auth_http_address=given) as broker:
        shown = broker.request("GET", "/config/auth_http_addresses").expect_json()
        assert shown == ["https://10.0.0.1/auth", "10.0.0.2:4180"]
        coordinator = f"postgresql://{login}@10.0.0.3/nsparq"
        broker.nsqd.options = replace(broker.nsqd.options, replication_coordinator=coordinator)
        answer = broker.request("GET", "/config/replication_coordinator")
        answer.expect_text("postgresql://10.0.0.3/nsparq")


@pytest.mark.parametrize(
    ("required", "shown"), [(TlsRequired.NO, 0), (TlsRequired.EXCEPT_HTTP, 1), (TlsRequired.YES, 2)]
)
def test_tls_required_is_shown_as_a_number(required: TlsRequired, shown: int) -> None:
    flags = certificates().server_flags(tls_required=required)
    with BrokerThread(**flags) as broker:
        tls = certificates().client_context()
        with broker.http_connect(https=True, tls=tls) as connection:
            assert connection.request("GET", "/config/tls_required").expect_json() == shown
            assert connection.request("GET", "/config/tls_cert").body.decode() == flags["tls_cert"]


def test_only_the_changeable_options_are_offered(broker: BrokerThread) -> None:
    for key in KEYS:
        answer = broker.request("PUT", f"/config/{key}", b"?")
        answer.expect_error(400, "INVALID_VALUE" if key in CHANGEABLE else "INVALID_OPTION")
    document = broker.request("GET", "/openapi.json").json()["paths"]["/config/{key}"]
    assert document["put"]["parameters"][0]["schema"]["enum"] == sorted(CHANGEABLE)
    assert document["get"]["parameters"][0]["schema"]["enum"] == sorted(KEYS)


def test_a_value_that_is_not_a_list_is_invalid(
    broker: BrokerThread, caplog: pytest.LogCaptureFixture
) -> None:
    for body in (b"[" * 100_000, b'["a",' * 50_000, b"9" * 10_000, b'"\\ud800"'):
        broker.request("PUT", "/config/nsqlookupd_tcp_addresses", body).expect_error(400, "INVALID_VALUE")
    assert broker.request("GET", "/config/nsqlookupd_tcp_addresses").expect_json() == []
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_unreachable_addresses_do_no_harm(broker: BrokerThread) -> None:
    path = "/config/nsqlookupd_tcp_addresses"
    odd = '["", "no port", "host:99999", "[::1", "\\ud800:1", "127.0.0.1:1", "127.0.0.1:1"]'
    assert len(broker.request("PUT", path, odd.encode()).expect_json()) == 7
    topic = unique_name()
    broker.publish(topic, b"x")
    assert broker.topic_stats(topic) is not None
    assert broker.request("PUT", path, b"[]").expect_json() == []


def test_a_change_lasts_until_the_daemon_stops(broker: BrokerThread) -> None:
    before = broker.nsqd.options
    assert broker.request("PUT", "/config/log_level", b"error").expect_json() == 4
    assert broker.nsqd.options.log_level == "error" and before.log_level == "info"
    assert logging.getLogger().level == logging.ERROR
    assert broker.request("PUT", "/config/log_level", b"info").expect_json() == 2
    assert NsqdOptions().log_level == "info"
