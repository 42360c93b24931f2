"""Requests to guarded nsqds, graphite and pipeline runners, and what is shown of the answers."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsparq.pipeline.execute.progress import Figures, State
from nsparq.pipeline.execute.status import Status, serve
from nsparq.server.auth.policy_file import hash_generated, hash_password
from nsparq.status_server import StatusServer
from tests.admin.support import REFERENCE_ADMIN, AdminThread, Cluster, join, start_admin
from tests.support import TestBroker, start_broker, unique_name, wait_until
from tests.support.auth_server import AuthServer
from tests.support.certificates import certificates
from tests.support.lookupd import LookupdConnection, TestLookupd, start_lookupd

pytestmark = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="ours only")

# nsqds with a policy


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBroker]:
    policy = tmp_path_factory.mktemp("policy") / "policy.toml"
    allow = '[[identity.allow]]\ntopic = ".*"\npermissions = ["read", "admin", "publish", "subscribe"]\n'
    policy.write_text(
        f'[[identity]]\nname = "admin"\nsecret = "{hash_generated(b"the-secret")}"\n{allow}'
        f'[[identity]]\nname = "ada"\nsecret = "{hash_password(b"pass")}"\n{allow}'
    )
    with start_broker(broadcast_address="127.0.0.1", auth_policy_file=str(policy)) as nsqd:
        yield nsqd


@pytest.mark.parametrize("secret", ["the-secret", "ada:pass"])
def test_guarded_nsqds_get_the_secret_with_every_request(guarded: TestBroker, secret: str) -> None:
    topic = unique_name("t")
    with start_admin(nsqd_http_address=(join(guarded.http_address),), auth_secret=secret) as admin:
        for body in ({"topic": topic, "channel": "c"}, {"topic": f"{topic}.other"}):
            assert admin.call("POST", "/api/topics", body).status == 200
        assert admin.call("POST", f"/api/messages/{topic}", {"body": "x"}).status == 200
        assert admin.get(f"/api/messages/{topic}/c")["messages"][0]["body"] == "x"
        assert admin.call("POST", f"/api/replay/{topic}/c", {"to": "end", "dry_run": False}).status == 200
        assert admin.call("POST", f"/api/replay/{topic}/c", {"to": "start", "dry_run": False}).status == 200
        assert admin.call("POST", f"/api/move/{topic}/c", {"to": f"{topic}.other"}).json()["moved"] == 1
        assert admin.get(f"/api/topics/{topic}")["message_count"] == 1
        assert admin.call("DELETE", f"/api/topics/{topic}").status == 200


@pytest.mark.parametrize("secret", ["", "wrong"])
def test_without_the_right_secret_nothing_is_shown(guarded: TestBroker, secret: str) -> None:
    with start_admin(nsqd_http_address=(join(guarded.http_address),), auth_secret=secret) as admin:
        answer = admin.call("GET", "/api/topics")
        assert answer.status == 502 and "401" in answer.json()["message"]


def test_only_nsqds_get_the_secret(tmp_path: Path) -> None:
    """Neither to graphite, nor to a runner of pipelines, nor in the configuration."""
    with AuthServer() as elsewhere, start_broker(broadcast_address="127.0.0.1") as nsqd:
        elsewhere.answer(b"[]", 200)
        with start_admin(
            nsqd_http_address=(join(nsqd.http_address),),
            pipeline_http_address=(elsewhere.address,),
            graphite_url=f"http://{elsewhere.address}",
            notification_http_endpoint=f"http://{elsewhere.address}/told",
            auth_secret="the-secret",
        ) as admin:
            admin.call("GET", "/api/graphite?metric=rate&target=x")
            admin.call("POST", "/api/topics", {"topic": unique_name("t")})
            admin.call("GET", "/config/auth_secret").expect_error(400, "INVALID_OPTION")
            wait_until(
                lambda: (
                    {query.path.partition("?")[0] for query in elsewhere.queries}
                    >= {"/status", "/render", "/told"}
                )
            )
        assert not any("authorization" in query.headers for query in elsewhere.queries)


# nodes that anybody may have registered


def impostor(lookupd: TestLookupd, address: str) -> LookupdConnection:
    """Registers a node at nsqlookupd, as anybody may who reaches it."""
    host, _, port = address.rpartition(":")
    peer = lookupd.peer(broadcast_address=host, http_port=int(port), tcp_port=1)
    peer.register("t")
    return peer


@pytest.mark.parametrize("secret_for", [(), ("10.0.0.0/8", "127.0.0.1:1", "*.example.com")])
def test_a_node_found_by_nsqlookupd_does_not_get_the_secret(secret_for: tuple[str, ...]) -> None:
    with start_lookupd() as lookupd, AuthServer() as thief, impostor(lookupd, thief.address):
        thief.answer({"message": "AUTH_REQUIRED"}, 401)
        with start_admin(
            lookupd_http_address=(join(lookupd.http_address),),
            auth_secret="the-secret",
            auth_secret_for=secret_for,
            poll_interval=0.1,
        ) as admin:
            for body in ({"action": "pause"}, {"action": "empty"}):
                admin.call("POST", "/api/topics/t", body)
            admin.call("POST", "/api/messages/t", {"body": "x"})
            admin.call("DELETE", f"/api/nodes/{thief.address}", {"topic": "t"})
            answer = admin.call("GET", f"/api/nodes/{thief.address}")
            assert answer.status == 502 and "nsqadmin has none for it" in answer.json()["message"], answer
            wait_until(lambda: "--auth-secret-for" in json.dumps(admin.get("/api/overview")["problems"]))
        assert len(thief.queries) > 5
        assert not any("authorization" in query.headers for query in thief.queries)


@pytest.mark.parametrize("secret_for", [("127.0.0.0/8",), ("*",), ("10.0.0.0/8", "127.0.0.1")])
def test_a_found_node_named_by_the_operator_gets_the_secret(
    guarded: TestBroker, secret_for: tuple[str, ...]
) -> None:
    with start_lookupd() as lookupd, impostor(lookupd, join(guarded.http_address)):
        with start_admin(
            lookupd_http_address=(join(lookupd.http_address),),
            auth_secret="the-secret",
            auth_secret_for=secret_for,
        ) as admin:
            assert admin.get(f"/api/nodes/{join(guarded.http_address)}")["message"] == ""


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_found_node_with_our_certificate_gets_the_secret_over_https(is_ours: bool) -> None:
    """It says over plain HTTP where its HTTPS is, as nsqd does that requires TLS."""
    pair = certificates().server if is_ours else certificates().foreign
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    with start_lookupd() as lookupd, AuthServer(tls=context) as secure, AuthServer() as plain:
        secure.answer({"version": "1.3.0", "health": "OK", "topics": []}, 200)
        plain.answer({"message": "TLS_REQUIRED", "https_port": int(secure.address.rpartition(":")[2])}, 403)
        with impostor(lookupd, plain.address):
            with start_admin(
                lookupd_http_address=(join(lookupd.http_address),),
                auth_secret="the-secret",
                http_client_tls_root_ca_file=str(certificates().ca.cert),
            ) as admin:
                assert admin.call("GET", f"/api/nodes/{plain.address}").status == (200 if is_ours else 502)
        assert not any("authorization" in query.headers for query in plain.queries)
        assert all("authorization" in query.headers for query in secure.queries)
        assert bool(secure.queries) is is_ours


# Graphite


@pytest.fixture
def graphite() -> Iterator[AuthServer]:
    with AuthServer() as server:
        yield server


def test_the_rate_of_a_metric_comes_from_graphite(
    graphite: AuthServer, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"nsqd_http_address": ("127.0.0.1:1",), "graphite_url": f"http://user:pass@{graphite.address}/g"}
    with start_admin(**flags, statsd_interval=10.0) as admin:
        graphite.answer(json.dumps([{"target": "x", "datapoints": [[123.45, 1], [9, 2]]}]).encode(), 200)
        assert admin.get("/api/graphite", metric="rate", target="a b(c)") == {"rate": "12.35"}
        (query,) = graphite.queries
        assert query.path == "/g/render?format=json&from=-20sec&until=-10sec&target=a+b%28c%29"
        assert query.headers["authorization"] == "Basic dXNlcjpwYXNz"
        for said, rate in (([[None, 1]], "N/A"), ([[-5, 1]], "N/A"), ([], "N/A")):
            graphite.answer(json.dumps([{"datapoints": said}]).encode(), 200)
            assert admin.get("/api/graphite", metric="rate", target="x") == {"rate": rate}
        huge = b'[{"datapoints": [[1%s, 1]]}]' % (b"0" * 400)
        for body, status in ((b"nonsense", 200), (b"[]", 200), (b"", 500), (huge, 200)):
            graphite.answer(body, status)
            answer = admin.call("GET", "/api/graphite?metric=rate&target=x")
            answer.expect_error(500, "INTERNAL_ERROR")
        assert not [record for record in caplog.records if record.exc_info]
        admin.call("GET", "/api/graphite?metric=sum&target=x").expect_error(400, "INVALID_ARG_METRIC")
        admin.call("GET", "/api/graphite?metric=rate").expect_error(400, "INVALID_ARG_TARGET")
        admin.call("GET", "/render").expect_error(404, "NOT_FOUND")


def test_render_is_forwarded_with_proxy_graphite(graphite: AuthServer) -> None:
    graphite.answer(b"<script>alert(1)</script>", 200)
    url = f"http://{graphite.address}"
    with start_admin(nsqd_http_address=("127.0.0.1:1",), graphite_url=url, proxy_graphite=True) as admin:
        answer = admin.call("GET", "/render?target=a&target=b%20c")
        assert (answer.status, answer.body) == (200, b"<script>alert(1)</script>")
        assert answer.header("Content-Security-Policy") == "sandbox"
        assert graphite.queries[0].path == "/render?target=a&target=b%20c"
        assert admin.call("GET", "/config/statsd_prefix").body == b"nsq.%s"


def test_the_config_shows_urls_without_their_secrets() -> None:
    urls = {
        "graphite_url": "https://user:pass@graphite.example/g?key=s3cret",
        "notification_http_endpoint": "http://user:pass@told.example:8080/x?key=s3cret",
    }
    with start_admin(nsqd_http_address=("127.0.0.1:1",), **urls) as admin:
        assert admin.call("GET", "/config/graphite_url").body == b"https://graphite.example/g"
        shown = admin.call("GET", "/config/notification_http_endpoint").body
        assert shown == b"http://told.example:8080/x"


# Pipelines


@pytest.fixture
def runner() -> Iterator[tuple[StatusServer, Status]]:
    """The status of `nsparq pipeline run`, with figures that a test can change."""
    figures = [
        Figures("daily", "orders, refunds", "parquet /data/daily", State.RUNNING, rows=1200, lag=5),
        Figures("broken", "orders", "topic bills", State.FAILED, failures=2, error="no such column <b>x</b>"),
    ]
    figures[0].channel, figures[0].last_batch, figures[0].batches = "daily", time.time(), 3
    status = Status("p.toml", figures, started=time.time(), ui="http://127.0.0.1:4040")
    endpoint = serve("127.0.0.1:0", status)
    yield endpoint, status
    endpoint.close()


def test_pipelines_are_shown_as_their_runner_reports_them(
    runner: tuple[StatusServer, Status], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, status = runner
    with Cluster() as cluster:
        cluster.add("orders", "daily")
        cluster.nsqds[0].publish("orders", b"x")
        admin = cluster.admin(pipeline_http_address=(endpoint.address, "127.0.0.1:1"), poll_interval=0.1)
        assert isinstance(admin, AdminThread)

        def told(name: str, value: object) -> bool:
            found = admin.get("/api/pipelines")["pipelines"]
            return bool(found) and found[0][name] == value

        wait_until(lambda: told("rows", 1200))
        status.pipelines[0].rows = 1300
        status.pipelines[0].rows_per_second = 250.0
        wait_until(lambda: told("rows", 1300))
        found = admin.get("/api/pipelines")["pipelines"]
        assert [one["name"] for one in found] == ["daily", "broken", "127.0.0.1:1"]
        assert (found[0]["lag"], found[0]["channel"], found[0]["sink"]) == (5, "daily", "parquet /data/daily")
        assert "unreachable" in found[2]
        wait_until(lambda: "orders" in admin.daemon.watch.channels_of)
        shown = admin.page("/pipelines")
        assert 'href="/topics/orders/daily"' in shown and 'href="http://127.0.0.1:4040"' in shown
        assert "no such column &lt;b&gt;x&lt;/b&gt;" in shown and "does not answer" in shown
        problems = {one.get("pipeline"): one for one in admin.get("/api/overview")["problems"]}
        assert problems["broken"]["severity"] == "critical"
        assert problems["127.0.0.1:1"]["title"] == "pipeline runner does not answer"
        # The pipeline is no consumer of its channel, but it reads it.
        assert not any(one.get("channel") == "daily" for one in admin.get("/api/overview")["problems"])
        history = admin.get(f"/api/history/pipelines/{endpoint.address}/daily")
        assert history["values"]["lag"][-1] == 5 and 250.0 in history["values"]["rows_per_second"]
        status.pipelines[0].state = State.STOPPED
        wait_until(
            lambda: any(one.get("channel") == "daily" for one in admin.get("/api/overview")["problems"])
        )
