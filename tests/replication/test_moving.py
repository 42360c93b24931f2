"""Operators see a cluster in nsqadmin and on the command line, and move its primary."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nsparq.tools.main import main
from tests.admin.show.test_pages import Browser
from tests.admin.support import AdminThread
from tests.replication.cluster import run_cluster
from tests.support import wait_until
from tests.support.lookupd import LookupdProcess


def join(address: object) -> str:
    host, port = address  # type: ignore[misc]  # an address of a test's daemon is a pair
    return f"{host}:{port}"


def test_the_primary_moves_by_command_and_by_button(
    etcd: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    with (
        LookupdProcess() as lookupd,
        run_cluster(tmp_path, etcd, lookupd_tcp_address=(join(lookupd.address),)) as cluster,
        AdminThread(lookupd_http_address=(join(lookupd.http_address),), poll_interval=0.2) as admin,
    ):

        def nsparq(*arguments: str) -> tuple[int, str, str]:
            capfd.readouterr()
            status = main(arguments)
            sys.stdout.flush()
            return (status, *capfd.readouterr())

        def findings() -> list[str]:
            kinds = ("replication", "left", "not registered", "unreachable")
            problems = admin.get("/api/overview")["problems"]
            return [one["detail"] for one in problems if one["kind"] in kinds]

        first = cluster.primary("ab")
        name = cluster.name_of(first)
        other = "b" if name == "a" else "a"
        source = f"--lookupd-http-address={join(lookupd.http_address)}"
        first.publish("t", b"1")
        # nsqadmin goes on asking a node that it has seen.
        wait_until(lambda: f"{name}, primary" in admin.page("/nodes"))
        status, out, err = nsparq("replication", "status", source)
        assert (status, err) == (0, "")
        assert [line.split()[:3] for line in out.splitlines()[1:]] == [
            [tmp_path.name, name, "primary"],
            [tmp_path.name, other, "follower"],
        ]
        # Any node knows the primary.
        asked = f"--nsqd-http-address={cluster.nodes[other].flags['http_address']}"
        status, out, err = nsparq("replication", "status", asked, "--json")
        (found,) = json.loads(out)["clusters"]
        assert (found["node"], found["role"], found["in_sync"]) == (name, "primary", ["a", "b"])
        assert nsparq("replication", "status", "none", source)[0] == 1
        # Nobody can answer here.
        status, _, err = nsparq("replication", "switch-over", source)
        assert status == 1 and "add --yes" in err
        status, out, err = nsparq("replication", "switch-over", tmp_path.name, source, "--yes", "--json")
        moved = {"cluster": tmp_path.name, "from": name, "to": other, "epoch": 2}
        assert (status, json.loads(out)) == (0, moved), err
        second = cluster.primary("ab", other_than=name)

        browser = Browser(admin)
        address = second.flags["http_address"]
        wait_until(lambda: f"{other}, primary" in admin.page("/nodes"))
        # The node that was primary answers, and follows: no finding.
        wait_until(lambda: f"follows {other}" in admin.page("/nodes"))
        wait_until(lambda: findings() == [])
        page = browser.get(f"/nodes/{address}").body.decode()
        assert "Switch over now" in page and "2 in sync" in admin.page("/nodes")
        note = browser.act(action="switch_over", node=address, page="node")
        assert note == f"{address} hands over. A follower serves within seconds."
        assert cluster.primary("ab", other_than=other) is first
        wait_until(lambda: f"{name}, primary" in admin.page("/nodes"))

        wait_until(lambda: findings() == [])
        cluster.nodes[other].kill()
        degraded = f"{tmp_path.name}: node {other} is lost; no other node can take over"
        wait_until(lambda: degraded in findings())
        assert nsparq("replication", "status", source)[2].count("nsparq replication: ") == 2
        status, _, err = nsparq("replication", "switch-over", source, "--yes")
        assert status == 1 and "nobody could take over" in err
        answer = admin.call("POST", f"/api/nodes/{first.flags['http_address']}", {"action": "switch_over"})
        assert (answer.status, json.loads(answer.body)["message"]) == (409, "NOT_POSSIBLE")
