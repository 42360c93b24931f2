"""Pages of messages over several nodes, against nodes that answer as they like."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nsparq.admin.collect import browse as module
from nsparq.admin.collect.browse import BadPlace, Page, Place, Wanted, browse
from nsparq.admin.collect.filter import Filter
from nsparq.admin.collect.merge import Node
from nsparq.admin.collect.upstream import BadStatus, RequestFailed


def message(sequence: int, at: int) -> dict[str, Any]:
    about = {"id": f"{sequence:016x}", "sequence": sequence, "timestamp": at, "attempts": 0}
    return {**about, "state": "stored", "size": 1, "body": str(at)}


class FakeCluster:
    """Logs of messages by node. A node answers with at most `at_once` messages."""

    def __init__(self, logs: dict[str, list[tuple[int, int]]], at_once: int = 1000) -> None:
        self.nodes = [Node(name, name, 0, 1, "1") for name in logs]
        self._logs = {f"{name}:1": [message(*one) for one in log] for name, log in logs.items()}
        self._at_once = at_once
        self.asked: list[dict[str, str]] = []

    async def get(self, node: Node, path: str, **query: str) -> Any:
        self.asked.append(query)
        log = self._logs[node.address]
        count = min(int(query["count"]), self._at_once)
        if "from" in query or "time" in query:
            start = int(query.get("from", 0))
            if "from" in query and log and start < log[0]["sequence"]:
                raise BadStatus(410, b'{"message": "OFFSET_GONE", "earliest": %d}' % log[0]["sequence"])
            if "from" in query and log and start > log[-1]["sequence"] + 1:
                raise BadStatus(416, b'{"message": "OFFSET_AHEAD"}')
            since = float(query.get("time", 0))
            return {
                "messages": [m for m in log if m["sequence"] >= start and m["timestamp"] >= since][:count]
            }
        end = int(query.get("before", 1 << 62))
        return {"messages": [m for m in log if m["sequence"] < end][-count:]}


def look(cluster: FakeCluster, **wanted: Any) -> Page:
    return asyncio.run(browse(cluster, cluster.nodes, "t", "", Wanted(**wanted)))  # type: ignore[arg-type]


def times(page: Page) -> list[int]:
    return [one.timestamp_ns for one in page.messages]


def walk(cluster: FakeCluster, first: Page, back: bool, count: int) -> list[list[int]]:
    found, page = [times(first)], first
    while (place := page.older if back else page.newer) is not None:
        page = look(cluster, count=count, **{"before" if back else "after": Place.parse(str(place))})
        found.append(times(page))
    return [one for one in found if one]


A = [(10 + n, 100 + 3 * n) for n in range(20)]
B = [(500 + 7 * n, 101 + n) for n in range(15)]
ALL = sorted(at for _, at in A + B)


@pytest.mark.parametrize("at_once", [1000, 3, 1])
def test_every_message_is_on_one_page_in_order_both_ways(at_once: int) -> None:
    """Also if a node answers with fewer messages than it has, as nsqd does with large ones."""
    cluster = FakeCluster({"a": A, "b": B, "empty": []}, at_once)
    back = walk(cluster, look(cluster, count=8), True, 8)
    assert [at for page in back for at in page] == ALL[::-1]
    assert {len(page) for page in back[:-1]} == {8}
    forward = walk(cluster, look(cluster, count=8, start=0), False, 8)
    assert [at for page in forward for at in page[::-1]] == ALL


def test_a_page_leads_back_to_where_it_came_from() -> None:
    cluster = FakeCluster({"a": A, "b": B})
    first = look(cluster, count=10)
    second = look(cluster, count=10, before=first.older)
    assert times(look(cluster, count=10, after=second.newer)) == times(first)
    at_time = look(cluster, count=5, time="120")
    assert times(at_time) == [at for at in ALL if at >= 120][:5][::-1]
    assert times(look(cluster, count=5, before=at_time.older)) == [at for at in ALL if at < 120][::-1][:5]


def test_a_filter_reads_a_limited_number_and_goes_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SCANNED", 10)
    cluster = FakeCluster({"a": A, "b": B}, at_once=5)
    page = look(cluster, count=5, filter=Filter("100"))
    found, scanned, asked = times(page), page.scanned, 1
    while page.older is not None:
        page = look(cluster, count=5, before=page.older, filter=Filter("100"))
        found += times(page)
        scanned += page.scanned
        asked += 1
    assert (found, scanned) == ([100], len(ALL))
    assert asked >= 3


@pytest.mark.parametrize("wanted", [{}, {"start": 0}])
def test_a_node_that_always_gives_the_same_answer_ends_the_walk(wanted: dict[str, Any]) -> None:
    cluster = FakeCluster({"a": [(1, 1)]})

    async def same(node: Node, path: str, **query: str) -> Any:
        cluster.asked.append(query)
        return {"messages": [message(5, 5)]}

    cluster.get = same  # type: ignore[method-assign]
    page = look(cluster, filter=Filter("nothing"), **wanted)
    assert (page.scanned, len(cluster.asked), page.messages) == (1, 2, [])


def test_a_channel_with_an_unknown_state_ends_the_walk() -> None:
    cluster = FakeCluster({"a": []})

    async def same(node: Node, path: str, **query: str) -> Any:
        cluster.asked.append(query)
        return {"messages": [{**message(5, 5), "state": "unheard of"}]}

    cluster.get = same  # type: ignore[method-assign]
    page = asyncio.run(browse(cluster, cluster.nodes, "t", "c", Wanted(), with_reasons=True))  # type: ignore[arg-type]
    assert (len(page.messages), page.scanned, len(cluster.asked)) == (1, 1, 2)


def test_a_node_that_fails_is_named_and_the_others_are_shown() -> None:
    cluster = FakeCluster({"a": A, "b": B})
    answer = cluster.get

    async def get(node: Node, path: str, **query: str) -> Any:
        if node.broadcast_address == "b":
            raise RequestFailed("it is down")
        return await answer(node, path, **query)

    cluster.get = get  # type: ignore[method-assign]
    page = look(cluster, count=50)
    assert times(page) == [at for _, at in reversed(A)] and page.errors == ["b:1: it is down"]


@pytest.mark.parametrize("text", ["x@n", "1", "@n", "-1@n", "1@", f"{10**19}@n"])
def test_a_bad_place_is_refused(text: str) -> None:
    with pytest.raises(BadPlace):
        Place.parse(text)
