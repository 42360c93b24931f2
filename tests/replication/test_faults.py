"""Ten rounds of tests/soak/failover.py: real nodes, coordinators and clients in network namespaces.

Judged by what was lost. How long clients stood still is in the output only, since the machine may
be busy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import namespaces

ROOT = Path(__file__).parents[2]
FAULTS = {
    "etcd": "kill_primary,isolate_primary,fill_disk_of_follower,stall_disk_of_follower,pause_follower",
    "postgresql": "kill_primary,cut_primary_and_follower,cut_primary_and_coordinator,fill_disk_of_primary,"
    "restart_everything",
}


@pytest.mark.parametrize("coordinator", FAULTS)
def test_nothing_acknowledged_is_lost_and_no_id_has_two_bodies(coordinator: str) -> None:
    if not namespaces.are_possible() or (coordinator == "postgresql" and os.getuid() != 0):
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail("this machine has no network namespaces for this user")
        pytest.skip("needs network namespaces; PostgreSQL in one needs root")
    rounds = str(len(FAULTS[coordinator].split(",")))
    command = ["--coordinator", coordinator, "--faults", FAULTS[coordinator], "--rounds", rounds]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.failover", *command, "--lease", "2", "--scale", "0.5"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0
    assert f"{rounds} faults" in done.stdout and " 0 lost, 0 ids with two bodies" in done.stdout
