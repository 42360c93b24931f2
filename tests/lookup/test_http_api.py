"""nsqlookupd's table of endpoints. Group N of tests/conformance tests each endpoint."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterator

import pytest

from nsparq.http.api import Request
from nsparq.lookup.http_api import SLICE, LookupApi, describe
from nsparq.lookup.registry import Registry
from nsparq.wire.lookup import PeerInfo
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


def test_debug_is_made_in_slices_between_which_the_registry_may_change() -> None:
    registry = Registry(inactive_timeout_ns=1, tombstone_lifetime_ns=1, max_registrations=10_000)
    peer = PeerInfo(broadcast_address="host", tcp_port=1, http_port=2, version="1")
    producer = registry.identify(peer, 1)
    for number in range(2000):
        registry.register(producer, f"t{number:04}", "c")
    work = LookupApi(registry, lambda: 1).debug(Request("GET", "/debug", "", []))
    assert isinstance(work, Coroutine)
    slices = 0
    while True:
        try:
            work.send(None)
        except StopIteration as done:
            found = json.loads(done.value.body)
            break
        slices += 1
        registry.delete_topic(f"t{2000 - slices:04}")
        registry.create(f"new{slices}", "c")
    assert slices >= 2000 // SLICE
    registered = {f"topic:t{number:04}:" for number in range(2000 - slices)}
    assert {key for key in found if key.startswith("topic:")} == registered
