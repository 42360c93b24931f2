"""Browsers may use only our host names. Programs may use any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsparq.http.api import ApiError, Request
from nsparq.http.hosts import HostNames
from tests.admin.support import AdminThread
from tests.support import TestBroker, start_broker
from tests.support.lookupd import start_lookupd

BROWSERS = [
    {"Origin": "http://evil.example.com"},
    {"Referer": "http://evil.example.com/"},
    {"Sec-Fetch-Site": "same-origin"},
    {"accept-language": ""},
    {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},
]
PROGRAMS = [{}, {"User-Agent": "Prometheus/2.53"}, {"User-Agent": "curl/8", "Accept-Encoding": "gzip"}]
OURS = [
    "127.0.0.1:4151",
    "10.1.2.3",
    "[::1]:4151",
    "[fe80::1%25eth0]:4151",
    "localhost",
    "LOCALHOST.:4151",
    "nsqd",
    "nsqd.default.svc",
    "nsqd.default.svc.cluster.local:4151",
    "box.home.arpa",
    "queue.example.com",
    "Allowed.example.com:8080",
    "",
]
THEIRS = [
    "evil.example.com",
    "evil.example.com:4151",
    "127.0.0.1.evil.example.com",
    "queue.example.com.evil.org",
]


@pytest.fixture
def hosts() -> HostNames:
    return HostNames("queue.example.com", "0.0.0.0:4151", allowed=["allowed.example.com"])


def is_refused(
    hosts: HostNames, host: str, *, secure: object = None, peer: str = "127.0.0.1", **more: str
) -> bool:
    headers = [(name.encode(), value.encode()) for name, value in {"host": host, **more}.items()]
    request = Request("GET", "/stats", "", headers)
    request.peer, request.secure = peer, secure
    try:
        hosts.check(request)
    except ApiError as error:
        assert error.status == 403 and "--allowed-host" in str(error.more["reason"])
        return True
    return False


@pytest.mark.parametrize("headers", BROWSERS)
def test_a_browser_is_answered_only_under_our_names(hosts: HostNames, headers: dict[str, str]) -> None:
    for _ in range(2):
        assert [host for host in OURS if is_refused(hosts, host, **headers)] == []
        assert [host for host in THEIRS if not is_refused(hosts, host, **headers)] == []


@pytest.mark.parametrize("headers", PROGRAMS)
def test_a_program_may_use_any_name(hosts: HostNames, headers: dict[str, str]) -> None:
    assert [host for host in OURS + THEIRS if is_refused(hosts, host, **headers)] == []
    # And that does not let browsers in.
    assert is_refused(hosts, THEIRS[0], **BROWSERS[0])


def test_no_host_too_long_for_a_name_is_kept(hosts: HostNames) -> None:
    known = {*hosts._good}
    assert not is_refused(hosts, "a" * 60_000)
    assert hosts._good == known


def test_tls_and_unix_sockets_need_no_check(hosts: HostNames) -> None:
    assert not is_refused(hosts, THEIRS[0], secure=object(), **BROWSERS[0])
    assert not is_refused(hosts, THEIRS[0], peer="", **BROWSERS[0])


@pytest.fixture(scope="module", params=["nsqd", "nsqlookupd", "nsqadmin"])
def daemon(request: pytest.FixtureRequest) -> Iterator[TestBroker]:
    flags = {"allowed_host": ("allowed.example.com",)}
    if request.param == "nsqd":
        started: TestBroker = start_broker(**flags)
    elif request.param == "nsqlookupd":
        started = start_lookupd(**flags)
    else:
        started = AdminThread(lookupd_http_address=("127.0.0.1:1",), **flags)
    with started as daemon:
        yield daemon


def test_every_daemon_checks_host_names(daemon: TestBroker) -> None:
    if daemon.is_reference:
        pytest.skip("ours only")
    for method, path in (("GET", "/ping"), ("POST", "/topic/create?topic=t"), ("POST", "/api/topics")):
        foreign = {"Host": "evil.example.com", "Accept-Language": "en"}
        answer = daemon.request(method, path, None, foreign)
        if answer.status != 404:
            assert answer.status == 403 and "--allowed-host" in answer.json()["reason"], answer
    for headers in ({"Host": "evil.example.com"}, {"Host": "allowed.example.com", "Accept-Language": "en"}):
        assert daemon.request("GET", "/ping", None, headers).status == 200
