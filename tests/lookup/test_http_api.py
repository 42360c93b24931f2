"""nsqlookupd's HTTP table as a whole; the endpoints one by one are in the conformance tests, group N."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsparq.http.describe import markdown, openapi
from nsparq.lookup.http_api import INTRODUCTION, describe
from tests.support.http import NSQ_HEADER
from tests.support.lookupd import LookupdThread

ENDPOINTS = {
    ("GET", "/ping"),
    ("GET", "/info"),
    ("GET", "/lookup"),
    ("GET", "/topics"),
    ("GET", "/channels"),
    ("GET", "/nodes"),
    ("GET", "/debug"),
    ("GET", "/openapi.json"),
    ("POST", "/topic/create"),
    ("POST", "/topic/delete"),
    ("POST", "/topic/tombstone"),
    ("POST", "/channel/create"),
    ("POST", "/channel/delete"),
}


@pytest.fixture(scope="module")
def lookupd() -> Iterator[LookupdThread]:
    with LookupdThread() as lookupd:
        yield lookupd


def test_every_endpoint_of_nsq_is_in_the_table() -> None:
    assert {(endpoint.method, endpoint.path) for endpoint in describe().endpoints} == ENDPOINTS


def test_the_daemon_serves_its_own_description(lookupd: LookupdThread) -> None:
    served = lookupd.request("GET", "/openapi.json").json()
    assert served == openapi(describe())
    assert {
        (method.upper(), path) for path, found in served["paths"].items() for method in found
    } == ENDPOINTS


def test_the_reference_page_has_every_endpoint_and_error() -> None:
    page = markdown(describe(), INTRODUCTION)
    for endpoint in describe().endpoints:
        assert f"### {endpoint.method} {endpoint.path}\n" in page
        assert all(f"{status} `{code}`" in page for status, code in endpoint.errors)


def test_every_parameter_that_is_missing_is_named(lookupd: LookupdThread) -> None:
    for endpoint in describe().endpoints:
        given: list[str] = []
        for param in endpoint.params:
            answer = lookupd.request(endpoint.method, f"{endpoint.path}?{'&'.join(given)}")
            answer.expect_error(400, f"MISSING_ARG_{param.name.upper()}")
            given.append(f"{param.name}=x")
        answer = lookupd.request(endpoint.method, f"{endpoint.path}?{'&'.join(given)}")
        assert answer.status in (200, 404), endpoint.path


def test_nothing_but_ping_is_without_the_nsq_header(lookupd: LookupdThread) -> None:
    for method, path in sorted(ENDPOINTS):
        header = lookupd.request(method, path).header("X-NSQ-Content-Type")
        assert header == (None if path == "/ping" else NSQ_HEADER), path


def test_go_profiles_are_not_there(lookupd: LookupdThread) -> None:
    assert lookupd.request("GET", "/debug/pprof/heap").status == 404


def test_names_that_are_no_text_are_merely_wrong(lookupd: LookupdThread) -> None:
    assert lookupd.request("GET", "/lookup?topic=%ff%fe").json() == {"message": "TOPIC_NOT_FOUND"}
    assert lookupd.request("POST", "/topic/create?topic=%ff").json() == {"message": "INVALID_ARG_TOPIC"}
    assert lookupd.request("POST", "/topic/delete?topic=%ff%0a").status == 200
    assert lookupd.request("POST", "/topic/tombstone?topic=%ff&node=%ff%0a").status == 200
