"""Clusters of real nsqd processes with real coordinators: nodes die, come back and hand over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from tests.replication.cluster import NodeProcess, run_cluster
from tests.replication.coordinators import run_etcd, run_postgresql
from tests.support import wait_until
from tests.support.connection import ERROR, ConnectionClosed

TOO_FEW = "1 of at least 2 nodes are in sync: publishes are refused"
REFUSED = "that has everything: it is a backup, or another node has the same name"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_etcd(tmp_path_factory.mktemp("etcd") / "data") as url:
        yield url.replace("http://", "etcd://")


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_postgresql(tmp_path_factory.mktemp("postgresql") / "data") as url:
        yield url


def consume(node: NodeProcess, topic: str, count: int) -> list[bytes]:
    """Bodies of `count` messages, which are finished."""
    with node.connect() as connection:
        connection.sub(topic, "c", rdy=2500)
        bodies = []
        for _ in range(count):
            message = connection.read_message()
            bodies.append(message.body)
            connection.fin(message.id)
        connection.barrier()
        return bodies


@pytest.mark.parametrize("coordinator", ["etcd", "postgresql"])
def test_an_acknowledged_message_survives_the_primary(
    coordinator: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with run_cluster(tmp_path, request.getfixturevalue(coordinator)) as cluster:
        first = cluster.primary("ab")
        name = cluster.name_of(first)
        first.control("create", "t", "c")
        bodies = [b"%d" % number for number in range(5000)]
        first.publish("t", *bodies)
        first.kill()
        second = cluster.primary(other_than=name)
        assert sorted(consume(second, "t", len(bodies))) == sorted(bodies)
        # The one that was killed comes back as a follower.
        first.start()
        assert cluster.primary("ab") is second
        second.publish("another", b"later")
        second.kill()
        assert consume(cluster.primary(other_than=cluster.name_of(second)), "another", 1) == [b"later"]


def test_a_switch_over_loses_nothing_and_forgets_no_finish(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd) as cluster:
        first = cluster.primary("ab")
        first.control("create", "t", "c")
        first.publish("t", *[b"%d" % number for number in range(100)])
        finished = consume(first, "t", 40)
        first.http("POST", "/replication/switch_over")
        second = cluster.primary("ab", other_than=cluster.name_of(first))
        assert json.loads(second.http("GET", "/replication"))["epoch"] == 2
        # As after a clean stop: what was finished does not come again.
        assert {*consume(second, "t", 60)}.isdisjoint(finished)
        assert second.channel_stats("t", "c")["depth"] == 0
        second.http("POST", "/replication/switch_over")
        assert cluster.primary("ab", other_than=cluster.name_of(second)) is first


def test_a_switch_over_without_a_follower_is_refused(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd, names="a") as cluster:
        answer = cluster.primary().request("POST", "/replication/switch_over")
        assert (answer.status, json.loads(answer.body)["message"]) == (409, "NOT_POSSIBLE")


def test_a_primary_that_was_thought_dead_acknowledges_nothing(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd) as cluster:
        first = cluster.primary("ab")
        name = cluster.name_of(first)
        first.control("create", "t", "c")
        with first.connect() as connection:
            connection.pub("t", b"before")
            first.signal(SIGSTOP)
            second = cluster.primary(other_than=name)
            connection.command("PUB", "t", body=b"to the one that stands still")
            first.signal(SIGCONT)
            try:
                answer = connection.read_frame()
            except (ConnectionClosed, ConnectionError):
                pass
            else:
                assert answer[0] == ERROR
        second.publish("t", b"after")
        assert sorted(consume(second, "t", 2)) == [b"after", b"before"]
        # It follows now.
        assert cluster.primary("ab") is second


def test_publishes_are_refused_while_too_few_nodes_have_a_copy(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd, min_in_sync=2) as cluster:
        first = cluster.primary("ab")
        other = next(node for node in cluster.nodes.values() if node is not first)
        first.publish("t", b"two copies")
        other.kill()
        # The silent follower leaves the set before anything is acknowledged without it.
        wait_until(lambda: (first.status() or {})["in_sync"] == [cluster.name_of(first)])
        with first.connect() as connection:
            connection.command("PUB", "t", body=b"one copy")
            connection.expect_fatal(f"E_PUB_FAILED PUB failed {TOO_FEW}")
        assert TOO_FEW.encode() in first.request("GET", "/ping").body
        other.start()
        cluster.primary("ab")
        first.publish("t", b"two copies again")
        assert first.request("GET", "/ping").body == b"OK"


def test_a_data_path_that_is_no_copy_is_not_emptied(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd, names="a") as cluster:
        cluster.primary()
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "nsqd.dat").write_text("{}")
        node = cluster.add("b")
        assert node.wait() == 1
        assert "is not a copy of cluster" in node.stderr_text()
        assert (tmp_path / "b" / "nsqd.dat").read_text() == "{}"


def test_a_node_whose_disk_was_replaced_does_not_take_over(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd, names="a") as cluster:
        node = cluster.primary()
        node.publish("t", b"the only copy")
        node.kill()
        kept = (tmp_path / "a").rename(tmp_path / "kept")
        (tmp_path / "a").mkdir()
        node.start()
        wait_until(lambda: "cannot take over: the record says" in node.stderr_text())
        node.stop()
        (tmp_path / "a").rmdir()
        kept.rename(tmp_path / "a")
        node.start()
        assert consume(cluster.primary(), "t", 1) == [b"the only copy"]


def test_only_the_copy_that_confirmed_takes_over_under_its_name(etcd: str, tmp_path: Path) -> None:
    """Not a backup that was put back, and not another node that was given the same name."""
    with run_cluster(tmp_path, etcd, names="a") as cluster:
        first, second = cluster.primary(), cluster.add("b")
        cluster.primary("ab")
        second.stop()
        backup = shutil.copytree(tmp_path / "b", tmp_path / "backup")
        wait_until(lambda: (first.status() or {})["in_sync"] == ["a"])
        second.start()
        cluster.primary("ab")
        first.publish("t", b"acknowledged")
        # Both are in the record.
        first.kill()
        second.kill()
        shutil.rmtree(tmp_path / "b")
        backup.rename(tmp_path / "b")
        second.start()
        wait_until(lambda: REFUSED in second.stderr_text() or cluster.find())
        assert REFUSED in second.stderr_text()
        wait_until(lambda: REFUSED in " ".join((second.status() or {})["problems"]))
        first.start()
        assert cluster.primary("ab") is first
        assert consume(first, "t", 1) == [b"acknowledged"]


def test_a_backup_of_the_primary_does_not_take_over(etcd: str, tmp_path: Path) -> None:
    with run_cluster(tmp_path, etcd, names="a") as cluster:
        node = cluster.primary()
        node.stop()
        backup = shutil.copytree(tmp_path / "a", tmp_path / "backup")
        node.start()
        cluster.primary().publish("t", b"acknowledged")
        node.kill()
        kept = (tmp_path / "a").rename(tmp_path / "kept")
        backup.rename(tmp_path / "a")
        node.start()
        wait_until(lambda: REFUSED in node.stderr_text() or cluster.find())
        assert REFUSED in node.stderr_text()
        node.stop()
        shutil.rmtree(tmp_path / "a")
        kept.rename(tmp_path / "a")
        node.start()
        assert consume(cluster.primary(), "t", 1) == [b"acknowledged"]
