"""What operators, load balancers and nsqlookupd see of a cluster of real nsqd processes."""

from __future__ import annotations

import json
import socket
import ssl
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGSTOP
from typing import Any

import pytest

from nsparq.testing import FaultProxy
from tests.replication.cluster import ClusterProcesses, NodeProcess, run_cluster
from tests.replication.coordinators import run_etcd
from tests.replication.test_failover import TOO_FEW, consume
from tests.server.auth.test_guard import bearer, identity
from tests.support import BrokerThread, wait_until
from tests.support.certificates import issue
from tests.support.lookupd import LookupdProcess


def other(cluster: ClusterProcesses, node: NodeProcess) -> NodeProcess:
    return next(one for one in cluster.nodes.values() if one is not node)


def metrics(node: NodeProcess) -> dict[str, float]:
    """Samples of replication by their names and labels."""
    lines = node.http("GET", "/metrics").decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("nsqd_replication"))
    return {name.removeprefix("nsqd_replication_"): float(value) for name, value in pairs}


def problems(node: NodeProcess) -> list[str]:
    found: list[str] = (node.status() or {})["problems"]
    return found


def test_a_follower_says_who_serves(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd) as cluster:
        first = cluster.primary("ab")
        follower = other(cluster, first)
        name, follows = cluster.name_of(first), cluster.name_of(follower)
        http, tcp = first.flags["http_address"], first.flags["tcp_address"]
        wait_until(lambda: (follower.status() or {}).get("in_sync") == ["a", "b"])
        status = follower.status()
        assert status is not None
        expected = {
            "cluster": tmp_path.name,
            "node": follows,
            "role": "follower",
            "epoch": 1,
            "primary": name,
            "primary_tcp_address": tcp,
            "primary_http_address": http,
            "in_sync": ["a", "b"],
            "min_in_sync": 1,
            "followers": [],
            "problems": [],
        }
        assert status == {**expected, "changes": status["changes"]}
        ping = follower.request("GET", "/ping")
        assert (ping.status, ping.body) == (503, f"NOK - node {follows} follows {name}".encode())
        info = json.loads(follower.http("GET", "/info"))
        assert (info["tcp_port"], info["replication"]["role"]) == (4150, "follower")
        for method, path in (("GET", "/stats"), ("POST", "/pub?topic=t"), ("GET", "/no/such/path")):
            refused = follower.request(method, path, b"body" if method == "POST" else None)
            assert (refused.status, json.loads(refused.body)) == (503, {
                "message": "NOT_PRIMARY",
                "reason": f"node {follows} follows {name}",
                "primary_tcp_address": tcp,
                "primary_http_address": http,
            })  # fmt: skip
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(follower.address)
        found = metrics(follower)
        labels = f'info{{cluster="{tmp_path.name}",node="{follows}",role="follower"}}'
        assert (found[labels], found["primary"], found["connected"], found["in_sync"]) == (1, 0, 1, 2)
        # The primary, as long as all is well.
        assert problems(first) == []
        first.publish("t", b"1")
        (described,) = wait_until(lambda: list((first.status() or {})["followers"]))
        assert (described["name"], described["is_in_sync"], described["is_joining"]) == (follows, True, False)
        wait_until(lambda: (first.status() or {})["followers"][0]["bytes_behind"] == 0)
        found = metrics(first)
        assert (found["primary"], found["problems"], found["coordinator_up"]) == (1, 0, 1)
        assert found[f'follower_in_sync{{follower="{follows}"}}'] == 1
        assert json.loads(first.http("GET", "/stats", format="json"))["replication"]["role"] == "primary"


def test_a_degraded_primary_says_so_and_goes_on(etcd: str, tmp_path: Path) -> None:
    link = FaultProxy(etcd.removeprefix("etcd://"))
    with link, run_cluster(tmp_path, f"etcd://{link.address}") as cluster:
        first = cluster.primary("ab")
        follower = other(cluster, first)
        lost = [f"node {cluster.name_of(follower)} is lost", "no other node can take over"]
        follower.kill()
        wait_until(lambda: problems(first) == lost)
        assert first.request("GET", "/ping").body == b"OK"
        wait_until(lambda: f"degraded: {lost[0]}" in first.stderr_text())
        follower.start()
        wait_until(lambda: problems(first) == [])
        wait_until(lambda: "no longer degraded" in first.stderr_text())
        # Without its coordinator it works, until it has to record that a follower is lost.
        link.refuse()
        (silence,) = wait_until(lambda: problems(first))
        assert silence.startswith("etcd does not answer")
        assert metrics(first)["coordinator_up"] == 0
        first.publish("t", b"both have it")
        assert first.request("GET", "/ping").body == b"OK"


def test_the_health_of_a_primary_recovers_without_a_publish(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd, min_in_sync=2) as cluster:
        first = cluster.primary("ab")
        follower = other(cluster, first)
        follower.kill()
        wait_until(lambda: TOO_FEW.encode() in first.request("GET", "/ping").body)
        with first.connect() as connection:
            connection.command("PUB", "t", body=b"refused")
            connection.expect_fatal(f"E_PUB_FAILED PUB failed {TOO_FEW}")
        follower.start()
        cluster.primary("ab")
        assert first.request("GET", "/ping").body == b"OK"


def test_a_silent_primary_leaves_nsqlookupd(etcd: str, tmp_path: Path) -> None:
    with LookupdProcess() as lookupd:
        address = "{}:{}".format(*lookupd.address)
        with run_cluster(tmp_path, etcd, lookupd_tcp_address=(address,)) as cluster:

            def listed() -> list[str]:
                return [one["broadcast_address"] for one in lookupd.lookup("t")["producers"]]

            first = cluster.primary("ab")
            second = other(cluster, first)
            first.publish("t", b"1")
            wait_until(lambda: "t" in lookupd.topics())
            assert listed() == [first.flags["broadcast_address"]]
            first.signal(SIGSTOP)
            cluster.primary(other_than=cluster.name_of(first))
            wait_until(lambda: listed() == [second.flags["broadcast_address"]])
            first.signal(SIGCONT)
            cluster.primary("ab")
            # The one that was silent may have tried to register again.
            assert [one["broadcast_address"] for one in lookupd.nodes()] == [
                second.flags["broadcast_address"]
            ]


def tls_flags(directory: Path, name: str, signer: Any) -> dict[str, str]:
    pair = issue(directory, name, signer=signer, is_for_both=True)
    return {"replication_tls_cert": str(pair.cert), "replication_tls_key": str(pair.key)}


def test_nodes_with_tls_fail_over_and_let_nobody_else_in(etcd: str, tmp_path: Path) -> None:
    authority = issue(tmp_path, "authority", is_authority=True)
    flags = tls_flags(tmp_path, "node", authority) | {"replication_tls_root_ca_file": str(authority.cert)}
    with run_cluster(tmp_path, etcd, **flags) as cluster:
        first = cluster.primary("ab")
        first.publish("t", b"over TLS")
        host, _, port = first.flags["replication_address"].partition(":")
        # Neither a plain client nor one without a certificate gets the greeting.
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"hello")
            assert plain.recv(100)[:1] in (b"", b"\x15")  # nothing, or a TLS alert
        context = ssl.create_default_context(cafile=authority.cert)
        context.check_hostname = False
        with pytest.raises((ssl.SSLError, ConnectionError)):
            with context.wrap_socket(socket.create_connection((host, int(port)))) as nameless:
                assert nameless.recv(100) == b""
                raise ConnectionError("closed at once")
        # The secret alone is not enough.
        stranger = tls_flags(tmp_path, "stranger", issue(tmp_path, "another", is_authority=True))
        third = cluster.add("c", **stranger)
        wait_until(lambda: "not connected to the primary" in third.stderr_text())
        (reason,) = problems(third)
        assert reason.startswith("node c waits for a primary: not connected to the primary: ")
        assert (first.status() or {})["in_sync"] == ["a", "b"]
        third.kill()
        # A certificate that was renewed is used after SIGHUP, in whatever role.
        renewed = issue(tmp_path, "node", signer=authority, is_for_both=True)
        for node in (first, other(cluster, first)):
            node.signal(SIGHUP)
            wait_until(lambda node=node: "certificates of replication reloaded" in node.stderr_text())
        first.kill()
        second = cluster.primary(other_than=cluster.name_of(first))
        assert consume(second, "t", 1) == [b"over TLS"]
        first.start()
        assert cluster.primary("ab") is second
        host, _, port = second.flags["replication_address"].partition(":")
        context.load_cert_chain(renewed.cert, renewed.key)
        with context.wrap_socket(socket.create_connection((host, int(port)))) as member:
            der = member.getpeercert(binary_form=True)
            assert der is not None
            shown = ssl.DER_cert_to_PEM_cert(der)
        assert shown.strip() == renewed.cert.read_text().strip()


def test_a_node_with_another_secret_is_refused_and_says_why(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd, names="a") as cluster:
        first = cluster.primary()
        secret = tmp_path / "another"
        secret.write_text("the secret of another cluster")
        node = cluster.add("b", replication_secret_file=str(secret))
        refused = "the primary refuses this node: it has another secret than the primary"
        wait_until(lambda: refused in node.stderr_text())
        assert refused in problems(node)[0]
        assert (first.status() or {})["in_sync"] == ["a"]
        # It never takes over, and a secret that is too short does not even start.
        node.stop()
        secret.write_text("short")
        node.start()
        assert node.wait() == 1
        assert f"--replication-secret-file {secret} must have at least 16 characters" in node.stderr_text()


def test_with_a_policy_file_every_role_asks_for_a_secret(etcd: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(identity("reader", "read") + identity("operator", "read", "admin"))
    with run_cluster(tmp_path, etcd, auth_policy_file=str(policy)) as cluster:

        def status(node: NodeProcess, method: str, path: str, name: str = "") -> int:
            return node.request(method, path, headers=bearer(name) if name else {}).status

        def role(node: NodeProcess, name: str = "operator") -> str:
            try:
                answer = node.request("GET", "/replication", headers=bearer(name))
            except OSError:
                return ""
            return str(json.loads(answer.body).get("role", answer.status))

        def are(*roles: str) -> bool:
            return sorted(map(role, cluster.nodes.values())) == sorted(roles)

        wait_until(lambda: are("primary", "follower"))
        first = next(node for node in cluster.nodes.values() if role(node) == "primary")
        follower = other(cluster, first)
        for node in (first, follower):
            assert [status(node, "GET", path) for path in ("/replication", "/info", "/metrics")] == [401] * 3
            assert status(node, "GET", "/replication", "reader") == 200
        assert status(first, "POST", "/replication/switch_over") == 401
        assert status(first, "POST", "/replication/switch_over", "reader") == 403
        # Where the primary is, only those with a secret learn.
        refused = json.loads(follower.request("GET", "/stats").body)
        assert refused == {"message": "NOT_PRIMARY", "reason": "this node is not the primary"}
        wait_until(lambda: status(first, "POST", "/replication/switch_over", "operator") == 200)
        wait_until(lambda: role(follower) == "primary" and role(first) == "follower")
        # A reload holds for the present role and for the next one.
        policy.write_text(identity("operator", "read", "admin"))
        for node in (first, follower):
            node.signal(SIGHUP)
            wait_until(lambda node=node: status(node, "GET", "/replication", "reader") == 401)
        wait_until(lambda: status(follower, "POST", "/replication/switch_over", "operator") == 200)
        wait_until(lambda: role(first) == "primary")
        assert status(first, "GET", "/replication", "reader") == 401


def test_a_pair_survives_the_loss_of_both_at_once_and_of_its_coordinator(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd) as cluster:
        first = cluster.primary("ab")
        first.publish("t", b"1")
        for node in cluster.nodes.values():
            node.kill()
        for node in cluster.nodes.values():
            node.start()
        second = cluster.primary("ab")
        second.publish("t", b"2")
        for node in cluster.nodes.values():
            node.kill()
        # The record is gone for good. The node that has everything starts first, at another
        # coordinator.
        with run_etcd(tmp_path / "new-etcd") as url:
            for node in cluster.nodes.values():
                node.flags["replication_coordinator"] = url.replace("http://", "etcd://")
            second.start()
            assert cluster.primary() is second
            other(cluster, second).start()
            cluster.primary("ab")
            assert sorted(consume(second, "t", 2)) == [b"1", b"2"]
            for node in cluster.nodes.values():
                node.kill()


def test_no_topic_of_a_cluster_acknowledges_from_memory(etcd: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    wanted = "/topic/settings?topic=t", b'{"durability": "memory"}'
    with BrokerThread(tmp_path / "a") as alone:
        alone.control("create", "t")
        alone.request("PUT", *wanted).expect_json()
    with run_cluster(tmp_path, etcd, names="a") as cluster:
        node = cluster.primary()
        settings = json.loads(node.http("GET", "/topic/settings", topic="t"))
        assert (settings["durability"], settings["effective"]["durability"]) == (None, "os")
        assert "t: durability memory does not work in a cluster" in node.stderr_text()
        answer = node.request("PUT", *wanted)
        error = json.loads(answer.body)
        assert (answer.status, error["message"]) == (400, "INVALID_SETTINGS")
        assert error["reason"].startswith('durability "memory" does not work with --replication-cluster')
        # A follower would notice the mistake only when it takes over.
        (tmp_path / "topics.toml").write_text('[topics.t]\ndurability = "memory"')
        follower = cluster.add("b", topics_file=str(tmp_path / "topics.toml"))
        assert follower.wait() == 1
        assert 'topics.t.durability: durability "memory" does not work' in follower.stderr_text()
