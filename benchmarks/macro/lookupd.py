"""A large cluster in one nsqlookupd, and in another beside it:
`python -m benchmarks.macro.lookupd --help`.

Every nsqd is a real connection on loopback, all held by this process. Latencies are from sending a
request on a kept connection to the last byte of its answer, while every nsqd goes on sending its
PING each 15 seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import select
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.macro.brokers import ANY_PORT, BrokerFailed, Spawned
from benchmarks.macro.loads import Figure, Figures
from benchmarks.macro.report import Results, describe_machine, print_facts, print_table
from benchmarks.macro.wire import Address

OURS = f"{shlex.quote(sys.executable)} -m nsparq.lookup.main"
LISTENING = re.compile(rb" (TCP|HTTP): listening on (\S+):(\d+)\s")
PING_S = 15.0
DEADLINE_S = 60.0
LOOK_S = 4.0
"""How long one kind of request is measured at the most."""
LAYOUTS = {"same": False, "own": True}
OK = b"\0\0\0\x02OK"


class Lookupd(Spawned):
    """An nsqlookupd process that is ours to start, measure and end."""

    def start(self, timeout: float = DEADLINE_S) -> float:
        flags = [f"--tcp-address={ANY_PORT}", f"--http-address={ANY_PORT}", "--log-level=info"]
        command = [*shlex.split(self.template), *flags]
        began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while len(found := {kind: (host, port) for kind, host, port in LISTENING.findall(self.said())}) < 2:
            if self.process.poll() is not None or time.monotonic() - began > timeout:
                raise BrokerFailed(f"{shlex.join(command)} does not listen:\n{self.last_words()}")
            time.sleep(0.002)
        host, port = found[b"TCP"]
        self.address = host.decode().strip("[]"), int(port)
        return time.monotonic() - began

    def said(self) -> bytes:
        return self.log.read_bytes()


class Cluster:
    """The nsqds: connections that register, ping, and leave."""

    def __init__(self, address: Address, count: int) -> None:
        self.connections = [socket.create_connection(address) for _ in range(count)]
        self._next_ping = 0.0
        self._ping_index = 0

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def identify(self) -> None:
        for number, connection in enumerate(self.connections):
            fields = {
                "broadcast_address": f"nsqd-{number:04d}.cluster.example.com",
                "hostname": f"nsqd-{number:04d}",
                "tcp_port": 4150,
                "http_port": 4151,
                "version": "1.3.0",
            }
            body = json.dumps(fields).encode()
            connection.sendall(b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body)
            (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            connection.recv(size, socket.MSG_WAITALL)

    def register(self, names: Callable[[int], Iterator[str]]) -> int:
        """REGISTER everything, each connection's in one go; how many commands that were."""
        commands = [
            "".join(f"REGISTER {name}\n" for name in names(number)).encode()
            for number in range(len(self.connections))
        ]
        waiting = {}
        poll = select.poll()
        for connection, data in zip(self.connections, commands, strict=True):
            connection.sendall(data)
            waiting[connection.fileno()] = (connection, [data.count(b"\n") * len(OK)])
            poll.register(connection, select.POLLIN)
        deadline = time.monotonic() + DEADLINE_S
        while waiting:
            if time.monotonic() > deadline:
                raise BrokerFailed(f"{len(waiting)} connections without all their answers")
            for fd, _ in poll.poll(1000):
                connection, missing = waiting[fd]
                received = connection.recv(1 << 16)
                if not received:
                    raise BrokerFailed("a connection was closed")
                missing[0] -= len(received)
                if missing[0] <= 0:
                    poll.unregister(fd)
                    del waiting[fd]
        return sum(data.count(b"\n") for data in commands)

    def ping_some(self) -> None:
        """Send the pings that are due, each connection's once in 15 seconds; answers are
        dropped."""
        now = time.monotonic()
        self._next_ping = self._next_ping or now
        while self._next_ping <= now:
            connection = self.connections[self._ping_index % len(self.connections)]
            if self._ping_index >= len(self.connections):
                connection.recv(len(OK))
            connection.sendall(b"PING\n")
            self._ping_index += 1
            self._next_ping += PING_S / len(self.connections)


class Client:
    """One kept HTTP connection."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection(address, timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(4 << 20)

    def get(self, path: str) -> bytes:
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
        view = memoryview(self._buffer)
        have = 0
        while (end := self._buffer.find(b"\r\n\r\n", 0, have)) < 0:
            have += self._receive(view[have:])
        head = bytes(self._buffer[:end])
        assert head.startswith(b"HTTP/1.1 200 "), head
        if length := re.search(rb"(?i)content-length: (\d+)", head):
            size = end + 4 + int(length[1])
            if size > len(self._buffer):
                view.release()
                self._buffer.extend(bytes(size - len(self._buffer)))
                view = memoryview(self._buffer)
            while have < size:
                have += self._receive(view[have:])
            return bytes(view[end + 4 : size])
        # NSQ sends what is large in chunks.
        while not bytes(self._buffer[max(0, have - 7) : have]).endswith(b"\r\n0\r\n\r\n"):
            if have == len(self._buffer):
                view.release()
                self._buffer.extend(bytes(len(self._buffer)))
                view = memoryview(self._buffer)
            have += self._receive(view[have:])
        return _unchunk(bytes(view[end + 4 : have]))

    def _receive(self, view: memoryview) -> int:
        count = self.socket.recv_into(view)
        if not count:
            raise BrokerFailed("the connection was closed")
        return count


def _unchunk(data: bytes) -> bytes:
    parts = []
    position = 0
    while True:
        end = data.index(b"\r\n", position)
        size = int(data[position:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        position = end + 4 + size


def percentiles(name: str, seconds: list[float]) -> Figures:
    ordered = sorted(seconds)
    return {
        f"{name} p50": Figure(ordered[len(ordered) // 2] * 1000, "ms"),
        f"{name} p99": Figure(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000, "ms"),
    }


def measure(client: Client, cluster: Cluster, path: str, count: int, *, churn: bool = False) -> list[float]:
    """How long each of so many requests took, or of as many as there was time for; with churn,
    something has changed before each."""
    took: list[float] = []
    deadline = time.monotonic() + LOOK_S
    for number in range(count):
        if took and time.monotonic() > deadline:
            break
        cluster.ping_some()
        if churn:
            connection = cluster.connections[number % len(cluster.connections)]
            verb = "UNREGISTER" if number % 2 else "REGISTER"
            connection.sendall(f"{verb} churn#ephemeral\n".encode())
        started = time.perf_counter()
        client.get(path)
        took.append(time.perf_counter() - started)
    return took


def run_round(lookupd: Lookupd, options: argparse.Namespace, own_topics: bool) -> Figures:
    def names(node: int) -> Iterator[str]:
        for number in range(options.topics):
            topic = f"topic-{node:04d}-{number:03d}" if own_topics else f"topic-number-{number:03d}"
            yield from (f"{topic} channel-{channel}" for channel in range(options.channels))

    layout = "own topics" if own_topics else "same topics"
    before = lookupd.memory_mib()["RssAnon"]
    cluster = Cluster(lookupd.address, options.nodes)
    client = Client(lookupd.http_address)
    figures: Figures = {}
    try:
        cluster.identify()
        started, cpu = time.perf_counter(), lookupd.cpu_seconds()
        commands = cluster.register(names)
        took = time.perf_counter() - started
        figures["REGISTER"] = Figure(commands / took, "commands/s")
        figures["REGISTER, CPU"] = Figure((lookupd.cpu_seconds() - cpu) / commands * 1e6, "us")
        figures["memory for it"] = Figure(lookupd.memory_mib()["RssAnon"] - before, "MiB")
        topic = "topic-0000-000" if own_topics else "topic-number-000"
        answer = json.loads(client.get(f"/lookup?topic={topic}"))
        assert len(answer["producers"]) == (1 if own_topics else options.nodes), answer
        assert len(answer["channels"]) == options.channels, answer
        nodes = json.loads(client.get("/nodes"))["producers"]
        assert len(nodes) == options.nodes and len(nodes[0]["topics"]) == options.topics
        figures["/nodes, first"] = Figure(measure(client, cluster, "/nodes", 1)[0] * 1000, "ms")
        for name, path in (
            ("/lookup", f"/lookup?topic={topic}"),
            ("/channels", f"/channels?topic={topic}"),
            ("/topics", "/topics"),
            ("/nodes", "/nodes"),
        ):
            figures |= percentiles(name, measure(client, cluster, path, options.requests))
        figures |= percentiles(
            "/nodes after a change", measure(client, cluster, "/nodes", options.requests, churn=True)
        )
        figures["memory, peak"] = Figure(lookupd.memory_mib()["VmHWM"], "MiB")
        cluster.close()
        started = time.perf_counter()
        while json.loads(client.get("/nodes"))["producers"]:
            if time.perf_counter() - started > DEADLINE_S:
                raise BrokerFailed("nodes that left are still listed")
        figures["all gone after"] = Figure(time.perf_counter() - started, "s")
    finally:
        cluster.close()
        client.socket.close()
    return {f"{layout}: {name}": figure for name, figure in figures.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macro.lookupd", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000, help="nsqds (default: 1000)")
    parser.add_argument("--topics", type=int, default=100, help="topics of each (default: 100)")
    parser.add_argument("--channels", type=int, default=1, help="channels of each topic (default: 1)")
    parser.add_argument("--requests", type=int, default=200, help="requests of each kind (default: 200)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds on each side (default: 2)")
    parser.add_argument(
        "--layout", choices=LAYOUTS, action="append", help="the same topics on every nsqd, or its own on each"
    )
    parser.add_argument("--ours-command", metavar="COMMAND", default=OURS, help="what to measure")
    parser.add_argument("--peer-command", metavar="COMMAND", help="compare with this nsqlookupd")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    options = parser.parse_args(arguments)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sides = {"ours": options.ours_command} | ({"peer": options.peer_command} if options.peer_command else {})
    machine = describe_machine({"ours": options.ours_command, "peer": options.peer_command or "none"})
    parameters = {name: getattr(options, name) for name in ("nodes", "topics", "channels", "requests")}
    print_facts([*machine.items(), *parameters.items(), ("rounds", options.rounds)])
    print()
    results = Results()
    for number in range(options.rounds):
        for own_topics in (LAYOUTS[layout] for layout in options.layout or LAYOUTS):
            for side in list(sides) if number % 2 == 0 else list(reversed(sides)):
                try:
                    with Lookupd(sides[side], [], None) as lookupd:
                        results.add(side, run_round(lookupd, options, own_topics))
                except (BrokerFailed, OSError, AssertionError) as error:
                    results.failures.append(f"{side}, round {number + 1}: {error}")
    print_table(results)
    return results.finish(options.json, {**parameters, "rounds": options.rounds}, machine)


if __name__ == "__main__":
    sys.exit(main())
