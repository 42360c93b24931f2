"""nsqadmin in front of a large cluster, and another beside it:
`python -m benchmarks.macro.admin --help`.

nsqlookupd, nsqds and nsqadmin are real processes. Every topic, with all its channels, is on every
nsqd, which is the most that there can be to add up. Latencies are from sending a request on a kept
connection to the last byte of the answer, compressed as for a browser; with --browser also from
opening a page in Chromium until it is drawn.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote, urlencode

from benchmarks.macro.brokers import ANY_PORT, HTTP_LISTENING, OURS, BrokerFailed, Spawned
from benchmarks.macro.lookupd import OURS as LOOKUPD
from benchmarks.macro.lookupd import Lookupd
from benchmarks.macro.report import describe_machine, print_facts
from benchmarks.macro.wire import Address

ADMIN = f"{shlex.quote(sys.executable)} -m nsparq.admin.main"
DEADLINE_S = 120.0
ANSWER_S = 60.0


class Admin(Spawned):
    """An nsqadmin process that is ours to start, measure and end."""

    def start(self, timeout: float = DEADLINE_S) -> float:
        command = [*shlex.split(self.template), f"--http-address={ANY_PORT}", *self.extra]
        began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not (found := HTTP_LISTENING.search(self.log.read_bytes())):
            if self.process.poll() is not None or time.monotonic() - began > timeout:
                raise BrokerFailed(f"{shlex.join(command)} does not listen:\n{self.last_words()}")
            time.sleep(0.002)
        self.address = (found[1].decode().strip("[]"), int(found[2]))
        return time.monotonic() - began


class Connection:
    """One that is kept."""

    def __init__(self, address: Address) -> None:
        self._http = http.client.HTTPConnection(*address, timeout=ANSWER_S)

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        self._http.request(method, path, body, {"Accept-Encoding": "gzip"})
        answer = self._http.getresponse()
        found = answer.read()
        if answer.status != 200:
            raise BrokerFailed(f"{method} {path}: {answer.status} {found[:200]!r}")
        return found

    def close(self) -> None:
        self._http.close()


# The cluster


def fill(nsqd: Spawned, topics: int, channels: int) -> None:
    connection = Connection(nsqd.http_address)
    for topic in map(topic_name, range(topics)):
        connection.ask("POST", f"/topic/create?{urlencode({'topic': topic})}", b"")
        for channel in map(channel_name, range(channels)):
            connection.ask("POST", f"/channel/create?{urlencode({'topic': topic, 'channel': channel})}", b"")
        bodies = b"\n".join(b'{"n": %d}' % number for number in range(len(topic) % 7 + 1))
        connection.ask("POST", f"/mpub?{urlencode({'topic': topic})}", bodies)
    connection.close()


def topic_name(number: int) -> str:
    return f"events.of.service_{number:04}"


def channel_name(number: int) -> str:
    return f"consumer_{number:02}"


def wait_until_known(lookupd: Lookupd, topics: int, nsqds: int) -> None:
    """Until nsqlookupd knows that every nsqd has every topic."""
    connection = Connection(lookupd.http_address)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        nodes = json.loads(connection.ask("GET", "/nodes"))["producers"]
        if len(nodes) == nsqds and all(len(node["topics"]) == topics for node in nodes):
            connection.close()
            return
        time.sleep(0.1)
    raise BrokerFailed("nsqlookupd does not know all topics")


# Measuring


def pages(node: str) -> dict[str, str]:
    topic, channel = topic_name(7), channel_name(3)
    return {
        "overview": "/",
        "overview, live part": "/?live=1",
        "all topics": "/topics",
        "all topics, live part": "/topics?live=1",
        "topics, filtered": "/topics?q=service_0042",
        "topics, sorted": "/topics?sort=-backlog",
        "search": "/search?q=service_0042",
        "a topic": f"/topics/{topic}",
        "a channel": f"/topics/{topic}/{channel}",
        "messages of a topic": f"/messages/{topic}",
        "messages of a channel": f"/messages/{topic}/{channel}",
        "nodes": "/nodes",
        "a node": f"/nodes/{quote(node)}",
        "lookup": "/lookup",
        "pipelines": "/pipelines",
        "counter": "/counter",
        "/api/overview": "/api/overview",
        "/api/history": "/api/history",
    }


def api(node: str) -> dict[str, str]:
    """What NSQ's has too."""
    topic, channel = topic_name(7), channel_name(3)
    found = ["/api/topics", f"/api/topics/{topic}", f"/api/topics/{topic}/{channel}", "/api/nodes"]
    found += [f"/api/nodes/{quote(node)}", "/api/topics?inactive=true", "/api/counter"]
    return {path.replace(topic, "T").replace(channel, "C").replace(quote(node), "N"): path for path in found}


def measure(address: Address, paths: dict[str, str], rounds: int) -> Iterator[tuple[str, float, float, int]]:
    """Of each: median and worst in milliseconds, and bytes on the wire."""
    connection = Connection(address)
    for name, path in paths.items():
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            answer = connection.ask("GET", path)
            took.append(1000 * (time.perf_counter() - began))
        yield name, statistics.median(took), max(took), len(answer)
    connection.close()


def print_figures(title: str, address: Address, paths: dict[str, str], rounds: int) -> None:
    print(f"\n{title:<28}{'median ms':>12}{'worst ms':>12}{'bytes':>12}")
    for name, middle, worst, size in measure(address, paths, rounds):
        print(f"{name:<28}{middle:>12.1f}{worst:>12.1f}{size:>12,}", flush=True)


def print_process(admin: Admin, seconds: float) -> None:
    """What it takes while nobody looks."""
    time.sleep(seconds)
    before = admin.cpu_seconds()
    time.sleep(seconds)
    share = (admin.cpu_seconds() - before) / seconds
    memory = admin.memory_mib()
    connection = Connection(admin.address)
    history = json.loads(gzip.decompress(connection.ask("GET", "/api/overview")))["history_bytes"]
    connection.close()
    print(f"\n{'processor time while nobody looks':<40}{share:>10.1%}")
    print(f"{'memory, MiB: now, peak':<40}{memory['VmRSS']:>10.0f}{memory['VmHWM']:>10.0f}")
    print(f"{'history after a week, MiB, at the most':<40}{history / 2**20:>10.0f}")


def print_browser(address: Address, paths: dict[str, str]) -> None:
    from tests.browser.visitor import Profile, Visitor, start_chromium

    print(f"\n{'in Chromium, until drawn':<28}{'median ms':>12}{'worst ms':>12}")
    with start_chromium() as browser:
        visitor = Visitor(Profile(browser), f"http://{address[0]}:{address[1]}")
        for name, path in paths.items():
            if "live part" in name or path.startswith("/api/"):
                continue
            took = []
            for _ in range(3):
                began = time.perf_counter()
                visitor.go(path)
                took.append(1000 * (time.perf_counter() - began))
            print(f"{name:<28}{statistics.median(took):>12.0f}{max(took):>12.0f}", flush=True)
        visitor.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--topics", type=int, default=1000)
    parser.add_argument("--channels", type=int, default=10, help="of each topic")
    parser.add_argument("--nsqds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="requests of each kind")
    parser.add_argument(
        "--idle", type=float, default=15, help="seconds over which the idle nsqadmin is measured"
    )
    parser.add_argument("--browser", action="store_true", help="also measure pages in Chromium")
    parser.add_argument("--peer-command", default="", help="another nsqadmin, to ask what both have")
    parser.add_argument("--data", type=Path, help="where the daemons keep their data")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    commands = {"nsqadmin": ADMIN} | ({"peer": arguments.peer_command} if arguments.peer_command else {})
    print_facts(describe_machine(commands).items())
    print_facts([("nsqds", arguments.nsqds), ("topics on each", arguments.topics)])
    print_facts([("channels of each", arguments.channels)])
    with ExitStack() as stack:
        lookupd = stack.enter_context(Lookupd(LOOKUPD, [], arguments.data))
        registry = f"--lookupd-tcp-address={lookupd.address[0]}:{lookupd.address[1]}"
        flags = [registry, "--broadcast-address=127.0.0.1"]
        nsqds = [stack.enter_context(Spawned(OURS, flags, arguments.data)) for _ in range(arguments.nsqds)]
        for nsqd in nsqds:
            fill(nsqd, arguments.topics, arguments.channels)
        wait_until_known(lookupd, arguments.topics, arguments.nsqds)
        host, port = lookupd.http_address
        asked = [f"--lookupd-http-address={host}:{port}"]
        node = "{}:{}".format(*nsqds[0].http_address)
        admin = stack.enter_context(Admin(ADMIN, asked, arguments.data))
        began = time.monotonic()
        first = Connection(admin.address)
        first.ask("GET", "/")
        first.close()
        print(f"\nfirst overview after the start: {time.monotonic() - began:.2f} s")
        print_figures("pages", admin.address, pages(node), arguments.rounds)
        print_figures("NSQ's API", admin.address, api(node), arguments.rounds)
        print_process(admin, arguments.idle)
        if arguments.browser:
            print_browser(admin.address, pages(node))
        if arguments.peer_command:
            peer = stack.enter_context(Admin(arguments.peer_command, asked, arguments.data))
            print_figures("NSQ's API of the peer", peer.address, api(node), arguments.rounds)
            memory = peer.memory_mib()
            print(f"{'memory, MiB: now, peak':<40}{memory['VmRSS']:>10.0f}{memory['VmHWM']:>10.0f}")


if __name__ == "__main__":
    main()
