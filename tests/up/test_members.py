"""Whether a member of the stack is ready, by its answers."""

from __future__ import annotations

from pathlib import Path

from nsparq.up.members import Cluster, Plan
from tests.support.auth_server import AuthServer


def test_a_member_whose_list_of_nodes_is_null_is_not_ready_yet(tmp_path: Path) -> None:
    cluster = Cluster(Plan(data_path=tmp_path))
    with AuthServer() as server:
        server.answer({"nodes": None, "producers": None})
        cluster.admin.ports["HTTP"] = server.port
        assert cluster.admin.why_not_ready() == "does not list all nsqds yet"
        (nsqd,) = cluster.nsqds
        assert nsqd._why_not_registered(server.address) == "not registered with nsqlookupd yet"
