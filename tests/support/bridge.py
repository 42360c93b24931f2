"""Machines in network namespaces, joined by a bridge, whose packets to each other can get lost.

    network = Network(["a", "b"])                 in a network namespace of its own: see enter()
    subprocess.Popen([*network.inside("a"), "nsqd"])
    network.cut("a", "b")                         packets from a to b get lost, and nobody is told
    network.heal()

This process is a machine, too: HERE.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.polling import DEADLINE

HERE = "here"
MARK = "NSPARQ_TEST_OWN_NETWORK"
"""Set in a process that enter() has started."""
NOBODY = "02:00:00:00:ff:ff"
"""A hardware address that no machine has: packets for it get lost."""


def enter() -> None:
    """Run this program anew in a network namespace and a mount namespace of its own. Both end with
    it. Returns if that was done already."""
    if MARK not in os.environ:
        # PostgreSQL does not run in a user namespace with one user.
        user = [] if os.getuid() == 0 else ["--map-root-user"]
        command = ["unshare", *user, "--net", "--mount", sys.executable, *sys.orig_argv[1:]]
        os.execvpe(command[0], command, {**os.environ, MARK: "1"})


class Network:
    def __init__(self, names: Sequence[str]) -> None:
        self._machines = {HERE: 1, **{name: 10 + number for number, name in enumerate(names)}}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        """A process in each namespace, which keeps it."""
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "eth0", "address", self._hardware(HERE), "type", "bridge")
        for name in names:
            holder = self._holders[name] = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; read line"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert holder.stdout and holder.stdout.readline() == b"\n"
            port = f"port-{self._machines[name]}"
            _run("ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", str(holder.pid))
            _run("ip", "link", "set", port, "master", "eth0", "up")
            self._run(name, "ip", "link", "set", "lo", "up")
            self._run(name, "ip", "link", "set", "eth0", "address", self._hardware(name))
        for name in self._machines:
            self._run(name, "ip", "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._run(name, "ip", "link", "set", "eth0", "up")
        self.heal()

    def close(self) -> None:
        for holder in self._holders.values():
            holder.communicate(timeout=DEADLINE)

    def address(self, name: str) -> str:
        return f"10.77.0.{self._machines[name]}"

    def inside(self, name: str) -> list[str]:
        """What a command begins with that runs on this machine."""
        return ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net"] if name != HERE else []

    def cut(self, source: str, target: str) -> None:
        """Packets from one machine to the other get lost from now on."""
        self._set_neighbour(source, target, NOBODY)

    def heal(self) -> None:
        for source in self._machines:
            for target in self._machines:
                if source != target:
                    self._set_neighbour(source, target, self._hardware(target))

    def _set_neighbour(self, source: str, target: str, hardware: str) -> None:
        self._run(
            source, "ip", "neighbour", "replace", self.address(target),
            "lladdr", hardware, "dev", "eth0", "nud", "permanent",
        )  # fmt: skip

    def _hardware(self, name: str) -> str:
        return f"02:00:00:00:00:{self._machines[name]:02x}"

    def _run(self, name: str, *command: str) -> None:
        _run(*self.inside(name), *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
