"""Peers that do not keep to the protocol: with and without the cluster's secret."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from nsparq.replication.frames import VERSION, BadFrame, Frame, FrameKind, proof
from nsparq.replication.link import Link
from nsparq.replication.membership import Membership
from nsparq.replication.primary import Primary
from tests.replication.test_link import SECRET, Cluster, cluster, new_follower
from tests.support.aio import run, until

GOOD = {"version": VERSION, "name": "b", "nonce": "00", "epoch": 0, "number": -1, "process": "1", "copy": ""}


@contextmanager
def ends_with_a_line(caplog: pytest.LogCaptureFixture, reason: str) -> Iterator[None]:
    """The log says so. The guards of the tests would show a task that has failed otherwise."""
    caplog.clear()
    yield
    (shown,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"connection ended: {reason}" in shown


async def connect(made: Cluster) -> tuple[Link, bytes]:
    """A connection, with the challenge."""
    _, link = await asyncio.get_running_loop().create_connection(Link, "127.0.0.1", made.port)
    return link, bytes((await link.take(FrameKind.CHALLENGE)).data)


async def greet(made: Cluster, data: bytes) -> None:
    link, _ = await connect(made)
    link.write(Frame(FrameKind.HELLO, data).encode())
    await until(lambda: link.is_closing() and not made.primary._links)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"proof": "é"}, "the follower does not know the cluster's secret"),
        ({"proof": "\ud800"}, "HELLO cannot be understood"),
        ({"proof": None}, "HELLO cannot be understood"),
        ({"proof": "", "name": "\ud800"}, "HELLO cannot be understood"),
        ({"proof": "", "name": ["b"]}, "HELLO cannot be understood"),
        ({}, "HELLO cannot be understood"),
    ],
)
def test_a_peer_without_the_secret_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], reason: str
) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            with ends_with_a_line(caplog, reason):
                await greet(made, json.dumps({**GOOD, **changed}).encode())

    run(scenario())


def test_nested_json_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            with ends_with_a_line(caplog, "HELLO cannot be understood"):
                await greet(made, b"[" * 60_000)

    run(scenario())


@pytest.mark.parametrize(
    "changed",
    [
        {"nonce": "no digits"},
        {"nonce": 5},
        {"epoch": "1"},
        {"number": None},
        {"number": 1.5},
        {"copy": 5},
        {"process": None},
    ],
    ids=str,
)
def test_a_greeting_with_the_secret_is_checked_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            link, challenge = await connect(made)
            hello = {**GOOD, "proof": proof(SECRET, "follower", challenge, "b"), **changed}
            with ends_with_a_line(caplog, "HELLO cannot be understood"):
                link.write(Frame.of_fields(FrameKind.HELLO, hello).encode())
                await until(lambda: link.is_closing() and not made.primary._links)

    run(scenario())


@pytest.mark.parametrize("files", [[], {"a": 5}, {"a": ["x", ""]}, {"a": [1]}, {"a": [None, ""]}], ids=str)
def test_an_inventory_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture, files: Any) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            link, challenge = await connect(made)
            hello = {**GOOD, "proof": proof(SECRET, "follower", challenge, "b")}
            link.write(Frame.of_fields(FrameKind.HELLO, hello).encode())
            await link.take(FrameKind.WELCOME)
            with ends_with_a_line(caplog, "INVENTORY cannot be understood"):
                link.write(Frame.of_fields(FrameKind.INVENTORY, {"files": files}).encode())
                await until(lambda: link.is_closing() and not made.primary._links)

    run(scenario())


@pytest.mark.parametrize(
    "changed", [{"proof": "é"}, {"proof": 5}, {"epoch": "1"}, {"name": "\ud800"}], ids=str
)
def test_a_follower_checks_who_answers(tmp_path: Path, changed: dict[str, Any]) -> None:
    answer = {"epoch": 1, "resumes": False, "proof": "", "name": "a", "copy": "", **changed}

    class Impostor(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(Frame(FrameKind.CHALLENGE, b"0").encode())
            transport.write(Frame.of_fields(FrameKind.WELCOME, answer).encode())

    async def scenario() -> None:
        server = await asyncio.get_running_loop().create_server(Impostor, "127.0.0.1", 0)
        with pytest.raises(
            BadFrame, match=r"WELCOME cannot be understood|does not know the cluster's secret"
        ):
            await new_follower(tmp_path).follow("127.0.0.1", server.sockets[0].getsockname()[1])
        server.close()

    run(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_a_primary_that_is_stopped_while_it_begins_to_listen_leaves_nothing_open(
    tmp_path: Path, turns: int
) -> None:
    """The guards of the tests look for sockets that are left."""

    async def scenario() -> None:
        primary = Primary(tmp_path, Membership(1, "a", {"a": "1"}), SECRET, lambda wanted: None)
        listening = asyncio.create_task(primary.listen("127.0.0.1", 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening
        await primary.close()

    run(scenario())
    gc.collect()
