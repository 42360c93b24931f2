"""nsparq replication: the address that a node names as its primary's is checked before it is asked.

tests/replication runs the command with real clusters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from nsparq.fetch import Answer

from .conftest import Run

NODE, PRIMARY = "10.0.0.1:4151", "10.0.0.2:4151"
Play = Callable[..., list[str]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Makes nodes that ask for the secret and give these answers in turn. Returns the requests:
    address and secret."""

    def play(**answers: list[dict[str, Any]]) -> list[str]:
        asked: list[str] = []

        def fetch(url: str, *, headers: list[tuple[str, str]], **_: object) -> Answer:
            place, secret = urlsplit(url).netloc, dict(headers).get("Authorization", "")
            asked.append(f"{place} {secret}".strip())
            if not secret:
                return Answer(401, b'{"message":"AUTH_REQUIRED"}', {})
            found = answers["node" if place == NODE else "primary"].pop(0)
            return Answer(200, json.dumps(found).encode(), {})

        monkeypatch.setattr("nsparq.tools.cluster.fetch", fetch)
        monkeypatch.setenv("NSQ_SECRET", "xyzzy")
        monkeypatch.setenv("NSQ_SECRET_FOR", "10.0.0.0/8")
        return asked

    return play


def status(role: str, primary: str, **more: Any) -> dict[str, Any]:
    return {
        "cluster": "orders",
        "node": "a",
        "role": role,
        "epoch": 1,
        "primary_http_address": primary,
        "in_sync": ["a", "b"],
        "followers": [],
        "problems": [],
        **more,
    }


def test_the_primary_that_a_node_names_is_asked(nsparq: Run, play: Play) -> None:
    asked = play(node=[status("follower", PRIMARY)], primary=[status("primary", PRIMARY, node="b")])
    done = nsparq("replication", "status", f"--nsqd-http-address={NODE}", "--json")
    (found,) = json.loads(done.out)["clusters"]
    assert (done.status, found["node"]) == (0, "b")
    assert asked == [NODE, f"{NODE} Bearer xyzzy", PRIMARY, f"{PRIMARY} Bearer xyzzy"]


@pytest.mark.parametrize(
    "named",
    ["evil.example", "evil.example:0", "10.0.0.2", "/evil:80", "u@evil.example:80", "evil.example:80/x:1"],
)
def test_an_address_without_a_port_is_not_asked(nsparq: Run, play: Play, named: str) -> None:
    """A URL without a port means port 80, and NSQ_SECRET_FOR is about hosts with ports."""
    asked = play(node=[status("follower", named)])
    done = nsparq("replication", "status", f"--nsqd-http-address={NODE}")
    assert done.status == 1
    assert done.err.endswith(
        f"nsparq replication: {NODE} names an invalid address as its primary's: {named!r}\n"
    )
    # What the node itself says is shown.
    assert b"orders" in done.out
    assert {one.partition(" ")[0] for one in asked} == {NODE}


def test_a_switch_over_asks_no_such_address_either(nsparq: Run, play: Play) -> None:
    begins, names_evil = status("primary", NODE), status("follower", "evil.example", epoch=2)
    for answers in ([status("primary", "evil.example")], [begins, {}, names_evil]):
        asked = play(node=answers)
        done = nsparq("replication", "switch-over", f"--nsqd-http-address={NODE}", "--yes")
        assert (done.status, answers) == (1, [])
        assert "names an invalid address as its primary's: 'evil.example'" in done.err
        assert {one.partition(" ")[0] for one in asked} == {NODE}
