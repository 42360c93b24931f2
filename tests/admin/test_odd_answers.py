"""Odd answers of daemons: nsqadmin shows what it can, keeps polling, and never fails itself.

An ordinary run looks at a third of the pages after each answer, and each run at others."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Awaitable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from nsparq.admin.change.messages import MessagesFailed, Target, move
from nsparq.admin.collect.cluster import Cluster
from nsparq.admin.collect.upstream import Answer, Upstream
from nsparq.admin.daemon import Nsqadmin
from nsparq.admin.options import NsqadminOptions
from nsparq.http.api import Request
from tests.support.examples import examples

ADDRESS = "127.0.0.1:4151"
# What may stand where something else is expected.
ODD: list[Any] = [
    None,
    True,
    -1,
    0.5,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "a..b",
    "x" * 5000,
    "9" * 5000,
    "\ud800",
    "<b>&\n\x00",
    "../../x?y#z@h:1",
    [],
    {},
    [None, [], {}, "a", 1],
    {"": None},
]
BODIES = [b"", b"\xff\xfe", b"{", b"[" * 100_000]

NODE = {
    "broadcast_address": "127.0.0.1",
    "hostname": "h",
    "http_port": 4151,
    "tcp_port": 4150,
    "version": "1.3.0",
    "remote_address": "127.0.0.1:9",
    "topics": ["t"],
    "tombstones": [False],
}
CLIENT = {
    "client_id": "x",
    "hostname": "h",
    "remote_address": "1.2.3.4:5",
    "version": "V2",
    "in_flight_count": 1,
    "ready_count": 1,
    "finish_count": 1,
    "connect_ts": 1,
    "user_agent": "u",
    "tls": True,
}
LATENCY = {"count": 1, "percentiles": [{"quantile": 0.99, "value": 5}]}
CHANNEL = {
    "channel_name": "c",
    "depth": 1,
    "backend_depth": 0,
    "in_flight_count": 0,
    "deferred_count": 0,
    "message_count": 1,
    "requeue_count": 0,
    "timeout_count": 0,
    "dead_letter_count": 0,
    "client_count": 1,
    "clients": [CLIENT],
    "paused": False,
    "e2e_processing_latency": LATENCY,
    "zone_local_msg_count": 1,
}
TOPIC = {
    "topic_name": "t",
    "depth": 1,
    "backend_depth": 0,
    "message_count": 1,
    "corrupt_messages": 1,
    "paused": False,
    "channels": [CHANNEL],
    "e2e_processing_latency": LATENCY,
}
MESSAGE = {
    "id": "1",
    "sequence": 1,
    "timestamp": 1,
    "attempts": 1,
    "state": "ready",
    "size": 1,
    "body": "x",
    "due": 1,
    "deadline": 1,
    "client": "x",
}
PIPELINE = {"name": "p", "topics": "t", "channel": "c", "state": "running", "lag": 1, "rows_per_second": 1.5}
SAID: dict[str, Any] = {
    "/topics": {"topics": ["t", "of no node"]},
    "/channels": {"channels": ["c"]},
    "/nodes": {"producers": [NODE]},
    "/lookup": {"channels": ["c"], "producers": [NODE]},
    "/stats": {"health": "OK", "start_time": 1, "topics": [TOPIC], "producers": [CLIENT]},
    "/openapi.json": {"paths": {"/topic/peek": {}, "/channel/seek": {}, "/metrics": {}}},
    "/topic/peek": {"messages": [MESSAGE], "missing": 0},
    "/channel/peek": {"messages": [MESSAGE], "missing": 0},
    "/channel/seek": {"again": 1, "skipped": 0},
    "/status": {"file": "f", "ui": "http://x", "pipelines": [PIPELINE]},
}
ALONE = {"topic_name", "channel_name", "broadcast_address", "http_port"}
"""Fields that decide whether the others are looked at."""


class OddUpstream(Upstream):
    """Answers as an nsqlookupd, an nsqd and a runner, without a network; one answer can be bent."""

    def __init__(self) -> None:
        super().__init__(connect_timeout=1, request_timeout=1)
        self.bent = ""
        self.body = b""
        self.asked: list[str] = []

    async def exchange(self, method: str, url: str, body: bytes | None = None, **more: Any) -> Answer:
        path = urlsplit(url).path
        self.asked.append(path)
        if path == "/metrics":
            said = b"nsqd_disk_free_bytes 1e999\nnsqd_disk_size_bytes nan\nnsqd_disk_size_bytes x\n"
        else:
            said = self.body if path == self.bent else json.dumps(SAID.get(path, {})).encode()
        return Answer(200, {}, said)


def bends(said: Any, place: tuple[Any, ...] = ()) -> Iterator[list[tuple[Any, ...]]]:
    """Places that are bent together: the plain fields of an object; everything else alone."""
    yield [place]
    if isinstance(said, dict):
        plain = [key for key, value in said.items() if not isinstance(value, dict | list)]
        if together := [(*place, key) for key in plain if key not in ALONE]:
            yield together
        yield from ([(*place, key)] for key in plain if key in ALONE)
    pairs = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    for key, inner in pairs:
        if isinstance(inner, dict | list):
            yield from bends(inner, (*place, key))


def bend(path: str, places: list[tuple[Any, ...]], value: Any) -> bytes:
    whole = {"": json.loads(json.dumps(SAID[path]))}
    for place in places:
        inside: Any = whole
        *way, last = ("", *place)
        for step in way:
            inside = inside[step]
        inside[last] = value
    return json.dumps(whole[""]).encode()


async def look(admin: Nsqadmin, paths: Iterable[str]) -> None:
    """Poll, and have these pages and answers of the API made. Raises whatever would be a 500."""
    await admin.watch.poll()
    await admin.pipelines.poll()
    for path in paths:
        target, _, query = path.partition("?")
        request = Request("GET", target, query, [])
        assert admin.api.route(request) is None, path
        try:
            result = admin.api.handle(request)
            if isinstance(result, Awaitable):
                await result
        except Exception as error:
            raise AssertionError(f"{path}: {error!r}") from error


def everything(admin: Nsqadmin) -> list[str]:
    names = {"topic": "t", "channel": "c", "node": ADDRESS, "client": "1.2.3.4:5"}
    names |= {"runner": ADDRESS, "pipeline": "p"}
    paths = [one.path for one in admin.api.endpoints if one.method == "GET" and one.permission]
    paths = [path for path in paths if not re.search("{key}|graphite|openapi", path)]
    found = [re.sub(r"\{(\w+)\}", lambda found: names[found[1]], path) for path in paths]
    return [*found, "/api/topics?inactive=true", "/replay/t/c?to=start"]


async def concerned(admin: Nsqadmin, upstream: OddUpstream, path: str) -> list[str]:
    """Pages that ask for this path; for a polled path also those that show the last poll."""
    await look(admin, [])
    is_polled = path in upstream.asked
    found = []
    for one in everything(admin):
        before = len(upstream.asked)
        await look(admin, [])
        polled = len(upstream.asked) - before
        before = len(upstream.asked)
        await look(admin, [one])
        asked = upstream.asked[before + polled :]
        if path in asked or (is_polled and not asked):
            found.append(one)
    return found


@pytest.mark.parametrize("path", SAID)
def test_an_odd_answer_does_not_break_nsqadmin(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.admin.daemon.Upstream", lambda **_: OddUpstream())

    async def main() -> list[str]:
        options = NsqadminOptions(lookupd_http_address=(ADDRESS,), pipeline_http_address=(ADDRESS,))
        admin = Nsqadmin(options)
        upstream = admin.upstream
        assert isinstance(upstream, OddUpstream)
        cases = [
            (f"{places} = {value!r:.30}", bend(path, places, value))
            for places in bends(SAID[path])
            for value in ODD
        ]
        cases += [(f"{body!r:.30}", body) for body in BODIES]
        failures = []
        pages = await concerned(admin, upstream, path)
        assert pages
        for name, body in cases:
            upstream.bent, upstream.body = path, body
            upstream.asked.clear()
            for node in admin.watch.nodes.values():
                node.asked_s = -math.inf  # its description was asked for long ago
            try:
                await look(admin, random.sample(pages, examples(len(pages)) or 1))
            except Exception as error:
                failures.append(f"{name}: {error!r:.200}")
            assert path in upstream.asked
            upstream.bent = ""
        await look(admin, everything(admin))
        assert [*admin.watch.channels_of] == ["t"]
        await upstream.close()
        return failures

    assert asyncio.run(main()) == []


def test_a_move_that_gets_nonsense_in_place_of_a_hold_fails_as_a_move() -> None:
    async def main() -> None:
        upstream = OddUpstream()
        upstream.bent, upstream.body = "/channel/hold", b"nonsense"
        cluster = Cluster(upstream, lookupds=[ADDRESS], nsqds=())
        node, _ = await cluster.node(ADDRESS)
        with pytest.raises(MessagesFailed, match="not JSON"):
            await move(cluster, node, "t", "c", Target("u", unwrap=False), 1)

    asyncio.run(main())
