"""nsqlookupd's table of endpoints. Group N of tests/conformance tests each endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsparq.lookup.http_api import describe
from tests.support.http import NSQ_HEADER
from tests.support.lookupd import LookupdThread

GET = ("/ping", "/info", "/lookup", "/topics", "/channels", "/nodes", "/debug", "/metrics", "/openapi.json")
POST = ("/topic/create", "/topic/delete", "/topic/tombstone", "/channel/create", "/channel/delete")
ENDPOINTS = {("GET", path) for path in GET} | {("POST", path) for path in POST}


@pytest.fixture(scope="module")
def lookupd() -> Iterator[LookupdThread]:
    with LookupdThread() as lookupd:
        yield lookupd


def test_every_endpoint_of_nsq_is_in_the_table() -> None:
    assert {(endpoint.method, endpoint.path) for endpoint in describe().endpoints} == ENDPOINTS


def test_every_missing_parameter_is_named(lookupd: LookupdThread) -> None:
    for endpoint in describe().endpoints:
        given: list[str] = []
        for param in endpoint.params:
            answer = lookupd.request(endpoint.method, f"{endpoint.path}?{'&'.join(given)}")
            answer.expect_error(400, f"MISSING_ARG_{param.name.upper()}")
            given.append(f"{param.name}=x")
        answer = lookupd.request(endpoint.method, f"{endpoint.path}?{'&'.join(given)}")
        assert answer.status in (200, 404), endpoint.path


def test_only_ping_lacks_the_nsq_header(lookupd: LookupdThread) -> None:
    for method, path in sorted(ENDPOINTS):
        header = lookupd.request(method, path).header("X-NSQ-Content-Type")
        assert header == (None if path == "/ping" else NSQ_HEADER), path


def test_there_are_no_go_profiles(lookupd: LookupdThread) -> None:
    assert lookupd.request("GET", "/debug/pprof/heap").status == 404


def test_names_that_are_not_utf_8_are_invalid(lookupd: LookupdThread) -> None:
    assert lookupd.request("GET", "/lookup?topic=%ff%fe").json() == {"message": "TOPIC_NOT_FOUND"}
    assert lookupd.request("POST", "/topic/create?topic=%ff").json() == {"message": "INVALID_ARG_TOPIC"}
    assert lookupd.request("POST", "/topic/delete?topic=%ff%0a").status == 200
    assert lookupd.request("POST", "/topic/tombstone?topic=%ff&node=%ff%0a").status == 200
