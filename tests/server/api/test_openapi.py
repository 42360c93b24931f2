"""The daemons follow their OpenAPI documents: schemathesis sends valid and invalid requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from nsparq.http.api import Api
from nsparq.http.describe import openapi
from nsparq.lookup.http_api import describe as describe_lookupd
from nsparq.names import is_valid_name
from nsparq.options import NsqdOptions
from nsparq.server.api.many_topics import MAX_WAIT_MS
from nsparq.server.api.table import NsqdApi
from nsparq.server.daemon import Nsqd
from tests.support import BrokerProcess
from tests.support.examples import examples
from tests.support.lookupd import LookupdProcess
from tests.support.polling import DEADLINE

pytestmark = pytest.mark.allow_leftovers("connections are kept from test to test")

TOPICS = ["known", "another", "gone#ephemeral"]
CHANNELS = ["known", "gone#ephemeral"]
SOME = settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Further statuses besides those that schemathesis expects: NSQ's for missing or malformed bodies,
# and ours for well-formed values that are gone, not there yet, or exclude each other.
REFUSALS = ["400", "401", "403", "404", "405", "409", "410", "413", "416"]
CHECKS = {
    "negative_data_rejection": {"expected-statuses": REFUSALS},
    "positive_data_acceptance": {"expected-statuses": ["2xx", "404", "409", "410", "416"]},
}
SLOW = "/debug/pprof/profile"


def load(document: dict[str, Any], *loose: str) -> Any:
    """The named paths have rules that a document cannot express."""
    rules = [
        {"include-path": path, "checks": {"positive_data_acceptance": {"enabled": False}}} for path in loose
    ]
    config = SchemathesisConfig.from_dict({"checks": CHECKS, "operations": rules})
    return schemathesis.openapi.from_dict(document, config=config)


def nsqd_api() -> Api:
    return NsqdApi(Nsqd(NsqdOptions()))


NSQD = openapi(nsqd_api())
LOOKUPD = openapi(describe_lookupd())


@pytest.fixture(scope="module")
def nsqd_schema() -> Any:
    return load(
        NSQD,
        "/channel/seek",  # exactly one of three parameters
        "/channel/settings",  # a delay that is not longer than the longest one
        "/config/{key}",  # a value that fits its key
        "/dead_letters",  # a value only with a field
        "/dead_letters/redrive",  # the same, and not for an ephemeral topic
        "/mpub",  # as many messages as the count says
        "/pub",  # with headers=true, a block of the size that is said
        "/topic/peek",  # at most one of three parameters
        "/topic/settings",  # not for an ephemeral topic
        "/transaction/stage",  # as for /mpub
        "/transaction/prepare",  # parts that were staged
        "/transaction/commit",
    )


@pytest.fixture(scope="module")
def lookupd_schema() -> Any:
    # Any text is a name there, but not every name can be created.
    return load(LOOKUPD, "/topic/create", "/channel/create", "/channel/delete")


@pytest.fixture(autouse=True)
def node_id(request: pytest.FixtureRequest) -> None:
    """schemathesis 4 needs this to name its cases. pytest 9 has removed it."""
    request.node._nodeid = request.node.nodeid


# From fixtures: otherwise each of pytest's workers generates all requests.
of_nsqd = schemathesis.pytest.from_fixture("nsqd_schema")
of_lookupd = schemathesis.pytest.from_fixture("lookupd_schema")


class Target:
    """A daemon in its own process, over one connection."""

    def __init__(self, daemon: BrokerProcess) -> None:
        self.session = requests.Session()
        self.session.trust_env = False
        assert daemon.http_address is not None
        self.url = "http://{}:{}".format(*daemon.http_address)
        self.may_have_changed = True
        self.with_names = 0
        """Requests so far that had names."""

    def get(self, path: str) -> requests.Response:
        return self.session.get(self.url + path, timeout=DEADLINE)

    def post(self, path: str, body: bytes = b"", **query: str) -> None:
        self.session.post(self.url + path, body, params=query, timeout=DEADLINE).raise_for_status()

    def check(self, case: Any) -> None:
        if case.query and str(case.query.get("wait")).isdigit():
            # As valid as before, but without a long wait.
            case.query["wait"] = case.query["wait"] if int(case.query["wait"]) > MAX_WAIT_MS else 1
        response = case.call(base_url=self.url, session=self.session)
        self.may_have_changed |= case.method != "GET" and response.status_code < 400
        # An empty text has no type: NSQ's way, of which OpenAPI has no notion.
        is_empty_text = case.operation.path == "/config/{key}" and not response.content
        left_out = [content_type_conformance, response_schema_conformance] if is_empty_text else []
        case.validate_response(response, excluded_checks=left_out)


@pytest.fixture(scope="module")
def nsqd() -> Iterator[Target]:
    with BrokerProcess() as broker:
        target = Target(broker)
        with target.session:
            yield target


@pytest.fixture(scope="module")
def lookupd() -> Iterator[Target]:
    with LookupdProcess() as daemon:
        target = Target(daemon)
        with target.session:
            yield target


def use_known_names(case: Any, target: Target) -> None:
    """Replace the valid names of every second request that has some by existing ones."""
    names = {
        parameter: known[len(value) % len(known)]
        for parameter, known in (("topic", TOPICS), ("channel", CHANNELS))
        if case.query and isinstance(value := case.query.get(parameter), str)
        if is_valid_name(value.encode("utf-8", "replace"))
    }
    target.with_names += bool(names)
    if names and target.with_names % 2:
        case.query.update(names)


def furnish_nsqd(target: Target) -> None:
    """Create every known name, with messages."""
    if not target.may_have_changed:
        return
    found = target.get("/stats?format=json&include_mem=false&include_clients=false").json()["topics"] or []
    there = {topic["topic_name"]: len(topic["channels"]) for topic in found if topic["message_count"]}
    for topic in TOPICS:
        if there.get(topic, 0) < len(CHANNELS):
            target.post("/topic/create", topic=topic)
            for channel in CHANNELS:
                target.post("/channel/create", topic=topic, channel=channel)
            target.post("/mpub", b"text\n\xff\n" + b"x" * 100, topic=topic)
            target.post("/pub", b"deferred", topic=topic, defer="60000")
    target.may_have_changed = False


def furnish_lookupd(target: Target) -> None:
    if not target.may_have_changed:
        return
    for topic in TOPICS:
        target.post("/channel/create", topic=topic, channel=CHANNELS[0])
    target.may_have_changed = False


def test_the_daemons_serve_these_descriptions(nsqd: Target, lookupd: Target) -> None:
    for target, document in ((nsqd, NSQD), (lookupd, LOOKUPD)):
        assert target.get("/openapi.json").json() == json.loads(json.dumps(document))


@pytest.mark.parametrize("path", ["/info", "/metrics", "/stats", "/transactions"])
def test_an_empty_nsqd_answers_as_described(path: str, nsqd: Target, nsqd_schema: Any) -> None:
    query = {"format": "json"} if path == "/stats" else {}
    nsqd.check(nsqd_schema[path]["GET"].Case(query=query))


@pytest.mark.parametrize("path", ["/topics", "/nodes", "/debug"])
def test_an_empty_nsqlookupd_answers_as_described(path: str, lookupd: Target, lookupd_schema: Any) -> None:
    lookupd.check(lookupd_schema[path]["GET"].Case())


# Of the generated requests that have names, every second one is sent with existing names. All
# others are sent as they are.


@of_nsqd.exclude(path=SLOW).parametrize()
@SOME
def test_nsqd_answers_as_described(case: Any, nsqd: Target) -> None:
    furnish_nsqd(nsqd)
    use_known_names(case, nsqd)
    nsqd.check(case)


@of_lookupd.parametrize()
@SOME
def test_nsqlookupd_answers_as_described(case: Any, lookupd: Target) -> None:
    furnish_lookupd(lookupd)
    use_known_names(case, lookupd)
    lookupd.check(case)
