"""The HTTP client of Spark's processes: one connection, plain errors, TLS and tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsparq.options import TlsRequired
from nsparq.server.auth.policy_file import hash_generated
from nsparq.spark.cluster import http_client
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Backoff, Refused, Unreachable, base_url
from nsparq.spark.cluster.nodes import Cluster
from nsparq.spark.errors import NoLog
from nsparq.spark.options import NsqOptions, OptionError, Use
from nsparq.spark.queue.planner import QueuePlanner
from nsparq.spark.queue.staging import Staging
from nsparq.spark.source.range_reader import close_idle
from nsparq.spark.trigger import Limit
from nsparq.testing import Broker, FaultProxy, run_broker
from tests.spark.source.support import Query, bodies, numbered, options, read_batch
from tests.support.certificates import certificates


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as running:
        running.publish("t", b"x")
        yield running


def test_requests_share_a_connection_which_is_opened_again_when_it_was_closed(broker: Broker) -> None:
    with FaultProxy(broker.http_address) as proxy, Client(proxy.address, Access()) as client:
        for _ in range(3):
            client.get("/ping")
        assert (proxy.accepted_count, client.opened) == (1, 1)
        proxy.disconnect()
        client.get("/ping")
        assert (proxy.accepted_count, client.opened) == (2, 2)


def test_an_answer_that_is_not_200_says_why(broker: Broker) -> None:
    with Client(broker.http_address, Access()) as client:
        with pytest.raises(Refused) as caught:
            client.positions("absent")
        assert (caught.value.status, caught.value.code) == (404, "TOPIC_NOT_FOUND")
        assert "/topic/positions: 404 TOPIC_NOT_FOUND" in str(caught.value)
        with pytest.raises(Refused) as caught:
            client.read("t", 1, 1, client.positions("t").incarnation)
        assert caught.value.code == "OFFSET_GONE" and "earliest" in caught.value.details


def test_nobody_there_is_unreachable_and_the_text_has_no_password() -> None:
    with Client("http://me:hush@127.0.0.1:1", Access()) as client, pytest.raises(Unreachable) as caught:
        client.get("/ping")
    assert "http://127.0.0.1:1/ping: Connection refused" in str(caught.value)
    assert "hush" not in str(caught.value) + repr(client)


def test_an_answer_that_breaks_off_is_unreachable_and_the_next_is_whole(broker: Broker) -> None:
    with FaultProxy(broker.http_address) as proxy, Client(proxy.address, Access()) as client:
        client.get("/ping")
        proxy.cut_after(50, reset=False)
        with pytest.raises(Unreachable):
            client.stats()
        proxy.heal()
        assert [topic["topic_name"] for topic in client.stats()] == ["t"]


def test_an_answer_that_does_not_come_is_given_up(broker: Broker) -> None:
    with FaultProxy(broker.http_address) as proxy:
        with Client(proxy.address, Access(timeout=0.1)) as client:
            proxy.stall()
            with pytest.raises(Unreachable, match="timed out"):
                client.get("/ping")
            proxy.heal()


def test_another_thread_can_break_off_a_request(broker: Broker) -> None:
    with FaultProxy(broker.http_address) as proxy, Client(proxy.address, Access()) as client:
        client.get("/ping")
        proxy.stall()
        breaking = threading.Timer(0.1, client.abort)
        breaking.start()
        with pytest.raises(Unreachable):
            client.get("/ping", **{"try": 1})
        breaking.join()
        proxy.heal()


def test_addresses() -> None:
    assert base_url("h:1") == "http://h:1"
    assert base_url("https://h:1/path?x=1") == "https://h:1"
    assert base_url("[::1]:5") == "http://[::1]:5"


def test_backoff_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(http_client, "time", clock)
    patience = Backoff(0.5, 0.125)
    while patience.wait():
        assert len(slept) < 10
    assert slept == [0.125, 0.25, 0.125]
    assert not Backoff(0.0).wait()


class Foreign(BaseHTTPRequestHandler):
    """Answers anything: as NSQ's own nsqd does, or as something else entirely."""

    answers: dict[str, tuple[int, bytes]] = {}

    def do_GET(self) -> None:
        default = (404, b'{"message":"NOT_FOUND"}')
        status, body = self.answers.get(self.path.partition("?")[0], default)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    host, port = server.server_address[:2]
    Foreign.answers = {}
    yield f"{host!s}:{port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_of_another_server_is_unreachable(foreign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(foreign, Access()) as client:
        for body in (b"<html>", b"[]", b"5"):
            Foreign.answers = {"/info": (200, body), "/topic/read": (200, b"")}
            with pytest.raises(Unreachable, match="not an answer of NSQ"):
                client.info()
        with pytest.raises(Unreachable, match="not an answer of nsqd"):
            client.read("t", 0, 1, "x")
        monkeypatch.setattr(http_client, "MAX_ANSWER", 3)
        with pytest.raises(Unreachable, match="more than 3 bytes"):
            Foreign.answers = {"/info": (200, b"{    }")}
            client.info()


_ODD = '{"broadcast_address": "h", "http_port": 1, "tcp_port": 2, '


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/nodes", '{"producers": 5}'),
        ("/nodes", '{"producers": [null]}'),
        ("/nodes", f'{{"producers": [{_ODD}"topics": 5}}]}}'),
        ("/nodes", f'{{"producers": [{_ODD}"replication": "x"}}]}}'),
        ("/nodes", '{"producers": ' + "[" * 100_000),
        ("/stats", '{"topics": {"a": 1}}'),
        ("/stats", '{"topics": [{"channels": []}]}'),
    ],
    ids=lambda text: text[:40],
)
def test_an_odd_answer_does_not_end_the_search_for_nodes(foreign: str, path: str, body: str) -> None:
    Foreign.answers = {"/info": (200, b"{}"), path: (200, body.encode())}
    option = "nsqlookupd" if path == "/nodes" else "nsqd"
    cluster = Cluster(NsqOptions.parse({"topicsPattern": ".*", option: foreign}, Use.LOG_BATCH))
    try:
        (failure,) = cluster.look().failures
    finally:
        cluster.close()
    assert "not an answer of" in failure


def test_an_odd_backlog_does_not_end_a_query_in_queue_mode(foreign: str, tmp_path: Path) -> None:
    topic = {"topic_name": "t", "message_count": 1, "depth": 0, "paused": False}
    channel = {"channel_name": "c", "depth": "many", "paused": False, "in_flight_count": 0}
    stats = {"topics": [{**topic, "channels": [channel]}]}
    Foreign.answers = {"/info": (200, b"{}"), "/stats": (200, json.dumps(stats).encode())}
    given = {"topic": "t", "channel": "c", "nsqd": foreign, "staging": str(tmp_path)}
    planner = QueuePlanner(NsqOptions.parse(given, Use.QUEUE_STREAM), Staging(tmp_path), False)
    try:
        assert planner.plan(Limit(), wait=0.0) == {}
    finally:
        planner.cluster.close()


def test_an_old_nsq_wraps_its_answers(foreign: str) -> None:
    with Client(foreign, Access()) as client:
        Foreign.answers = {
            "/nodes": (200, b'{"status_code":200,"status_txt":"OK","data":{"producers":[{}]}}')
        }
        assert client.nodes() == [{}]


def test_an_nsqd_without_a_log_is_named_with_the_way_out(foreign: str) -> None:
    host, _, port = foreign.partition(":")
    info = f'{{"broadcast_address":"{host}","http_port":{port},"tcp_port":1}}'.encode()
    Foreign.answers = {"/info": (200, info), "/topic/create": (200, b""), "/channel/create": (200, b"")}
    with pytest.raises(NoLog, match=f"the nsqd {foreign} has no log .* Set option mode to queue"):
        read_batch(nsqd=foreign)
    with Query(nsqd=foreign) as query, pytest.raises(NoLog):
        query.start()


# who we are, whom we trust


POLICY = """
[[identity]]
name = "spark"
secret = "{all}"
[[identity.allow]]
topic = "^t$"
permissions = ["subscribe", "read", "admin", "publish"]
[[identity]]
name = "reader"
secret = "{some}"
[[identity.allow]]
topic = "^t$"
permissions = ["subscribe"]
"""


def test_a_guarded_nsqd_is_read_with_a_token(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(all=hash_generated(b"all"), some=hash_generated(b"some")))
    with run_broker(auth_policy_file=str(policy)) as broker:
        broker.publish("t", *numbered(3))
        for token in (None, "wrong"):
            with Query(nsqd=broker.http_address, authToken=token) as query:
                with pytest.raises(OptionError, match="option authToken: nsqd does not accept it"):
                    query.start()
        with Query(nsqd=broker.http_address, authToken="all", ownChannel="false") as query:
            assert query.run_until(3).drain().bodies == numbered(3)
            stats = broker.channel_stats("t", "c")
            assert stats is not None and stats["depth"] == 0
        # Who may subscribe can read; the channel has to be there already.
        assert bodies(read_batch(nsqd=broker.http_address, authToken="some")) == numbered(3)
        with Query(nsqd=broker.http_address, authToken="some") as query:
            assert query.run_until(3).drain().bodies == numbered(3)
    close_idle()


def test_tls_with_our_own_authority_and_a_certificate_to_show() -> None:
    made = certificates()
    flags = made.server_flags(
        tls_required=TlsRequired.EXCEPT_HTTP,
        tls_client_auth_policy="require-verify",
        tls_root_ca_file=str(made.ca.cert),
        tls_min_version="tls1.2",
    )
    with run_broker(**flags) as broker:
        broker.publish("t", *numbered(3))
        given = {
            "tlsCaFile": made.ca.cert,
            "tlsCertFile": made.client.cert,
            "tlsKeyFile": made.client.key,
        }
        https = f"https://{broker.https_address}"
        with Query(nsqd=https, **given) as query:
            assert query.run_until(3).bodies == numbered(3)
        assert bodies(read_batch(nsqd=https, **given)) == numbered(3)
        with Client(https, Access()) as client, pytest.raises(Unreachable, match="certificate verify failed"):
            client.info()
        with Client(
            https, Access(verify=False, cert_file=str(made.client.cert), key_file=str(made.client.key))
        ) as c:
            assert c.info()["http_port"]
    close_idle()


def test_an_nsqd_that_requires_tls_is_asked_over_https() -> None:
    made = certificates()
    with run_broker(**made.server_flags(tls_required=TlsRequired.YES)) as broker:
        broker.publish("t", b"x")
        with Client(broker.http_address, Access(ca_file=str(made.ca.cert))) as client:
            assert client.positions("t").messages == 1
            assert client.url == f"https://{broker.https_address}"
        assert bodies(read_batch(nsqd=broker.http_address, tlsCaFile=made.ca.cert)) == [b"x"]
    close_idle()


def test_the_token_goes_only_to_allowed_addresses() -> None:
    access = Access.of(
        options(nsqd="given:4151", nsqlookupd="lookup:4161", authToken="x", authTokenFor="10.0.0.0/8")
    )
    for url in ("http://given:4151", "https://given:4152", "http://lookup:4161", "http://10.1.2.3:4151"):
        assert access.token_of(url) == "x", url
    assert access.token_of("http://registered.by.anybody:4151") is None
