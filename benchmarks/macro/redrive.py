"""Putting dead letters back: `python -m benchmarks.macro.redrive --help`.

Messages expire and become dead letters. Then the policy is removed and a redrive puts them back:
once while the log of their topic still has them, and once when it does not, so that every body is
written again. The rate counts from the request to the last message that may be sent, as nsqd says.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from typing import Any

from benchmarks.macro.brokers import OURS
from benchmarks.macro.http import HttpBroker
from benchmarks.macro.loads import Figure, Figures
from benchmarks.macro.report import Results, describe_machine, print_facts, print_table

DEADLINE_S = 300.0
BATCH = 1000
SEGMENT = 4 << 20
IN_LOG = "in the log"


def ask(nsqd: HttpBroker, method: str, path: str, body: bytes | None = None) -> Any:
    host, port = nsqd.http_address
    request = urllib.request.Request(f"http://{host}:{port}{path}", body, method=method)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        data = answer.read()
    return json.loads(data) if data[:1] == b"{" else None


def wait(what: str, is_done: Any) -> Any:
    until = time.monotonic() + DEADLINE_S
    while not (found := is_done()):
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.02)
    return found


def stats(nsqd: HttpBroker, topic: str) -> Any:
    return ask(nsqd, "GET", f"/stats?format=json&topic={topic}")["topics"][0]["channels"][0]


def measure(count: int, size: int, kind: str) -> Figures:
    is_gone = kind != IN_LOG
    with HttpBroker(OURS, [f"--max-bytes-per-file={SEGMENT}"], None) as nsqd:
        ask(nsqd, "POST", "/topic/create?topic=t")
        ask(nsqd, "POST", "/channel/create?topic=t&channel=c")
        if not is_gone:
            ask(nsqd, "PUT", "/topic/settings?topic=t", b'{"retention_bytes": 1000000000000}')
        settings = "/channel/settings?topic=t&channel=c"
        ask(nsqd, "PUT", settings, b'{"policy": {"expire_after": 0.001, "max_attempts": 0}}')
        body = b"\n".join([b"x" * size] * BATCH)
        for _ in range(count // BATCH):
            ask(nsqd, "POST", "/mpub?topic=t", body)
        wait("letters", lambda: stats(nsqd, "t")["dead_letter_count"] >= count)
        if is_gone:
            for _ in range(7):
                ask(nsqd, "POST", "/pub?topic=t", b"." * (SEGMENT // 5))
            first = ask(nsqd, "GET", "/topic/positions?topic=t")["latest"] - 7
            wait("removal", lambda: ask(nsqd, "GET", "/topic/positions?topic=t")["earliest"] >= first - BATCH)
        ask(nsqd, "PUT", settings, b'{"policy": null}')
        used = nsqd.cpu_seconds()
        ask(nsqd, "POST", "/dead_letters/redrive?topic=t.dead&origin_topic=t&text=xx")
        path = "/dead_letters/redrive?topic=t.dead"
        done = wait("redrive", lambda: (p := ask(nsqd, "GET", path))["state"] == "finished" and p)
        if done["redriven"] < count or stats(nsqd, "t")["depth"] < count:
            raise AssertionError(f"not all letters were put back: {done}")
        rate, used = count / (done["ended"] - done["began"]) * 1e9, nsqd.cpu_seconds() - used
        return {
            f"redrive, {kind}": Figure(rate, "msg/s"),
            f"redrive, {kind}, broker CPU": Figure(used / count * 1e6, "us"),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macro.redrive", description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000, metavar="N", help="letters (%(default)s)")
    parser.add_argument("--size", type=int, default=100, metavar="BYTES", help="of a body (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each kind (%(default)s)")
    options = parser.parse_args()
    facts = [("letters", options.messages), ("bytes of a body", options.size)]
    print_facts([*facts, *describe_machine({}).items()])
    results = Results()
    for _ in range(options.rounds):
        for kind in (IN_LOG, "gone from the log"):
            results.add("ours", measure(options.messages, options.size, kind))
    print_table(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
