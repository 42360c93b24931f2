"""Which HTTP layer the daemons use: a protocol of our own on httptools, a general ASGI server, or
aiohttp.

    python -m benchmarks.decisions.http_layer [--requests 40000] [--connections 16] [--rounds 5]

Chosen: our own, `nsparq.http`. On the same parser and the same event loop it takes about a third of
the processor time per request that the general servers take. That a publish is answered without a
task is part of it; the rest is that nothing general is done.

                        best/s  median/s  x ours  server CPU, us
    ours                99,857    85,046    1.00            11.0
    ours, a task each   73,998    71,041    0.84            13.5
    uvicorn, ASGI       33,629    32,596    0.38            30.0
    aiohttp.web         25,063    24,716    0.29            40.3

(2 cores shared with the load, Python 3.11, httptools 0.9, uvloop 0.23, uvicorn 0.54, aiohttp 3.14.)
The price is that the limits, timeouts and odd cases of HTTP/1.1 are ours to get right: tests/http
and tests/faults.

The handler is the same in each, and does next to nothing: it looks at the topic and at the body of
a POST /pub, and says OK. Each server is a process of its own on uvloop. What is not installed is
left out, and said.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import multiprocessing
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import uvloop

from benchmarks.macro.brokers import cpu_seconds
from benchmarks.macro.http import encode_post
from benchmarks.macro.report import describe_machine, print_facts
from benchmarks.macro.wire import Address
from nsparq.http.api import Api, ApiError, Endpoint, Request, parse_query
from nsparq.http.server import HttpServer

START_S = 30.0
DEADLINE_S = 60.0
ANY_ADDRESS = ("127.0.0.1", 0)


class Failed(Exception):
    """A server did not start, or did not answer as it should."""


def is_good(parameters: Any, body: bytes) -> bool:
    """All that the handlers do."""
    return parameters.get("topic") == "load" and len(body) > 0


# The servers: each runs in a process of its own, and tells its address when it listens.


def serve_ours(parent: Connection) -> None:
    def pub(request: Request) -> str:
        if not is_good(request.parameters, request.body):
            raise ApiError(400, "BAD")
        return "OK"

    _serve_api(parent, pub)


def serve_ours_with_tasks(parent: Connection) -> None:
    """The same, answered by a coroutine as in the general servers."""

    async def pub(request: Request) -> str:
        if not is_good(request.parameters, request.body):
            raise ApiError(400, "BAD")
        return "OK"

    _serve_api(parent, pub)


def _serve_api(parent: Connection, handler: Callable[[Request], Any]) -> None:
    endpoint = Endpoint(
        method="POST", path="/pub", handler=handler, summary="publish", keeps_body=True, max_body=1 << 20
    )

    async def run() -> None:
        server = HttpServer(Api(title="decision", version="1", endpoints=[endpoint]))
        parent.send(await server.listen(ANY_ADDRESS))
        await asyncio.Event().wait()

    uvloop.run(run())


def serve_uvicorn(parent: Connection) -> None:
    import uvicorn

    plain = [(b"content-type", b"text/plain; charset=utf-8")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        good = is_good(parse_query(scope["query_string"].decode("latin-1")), body)
        answer = b"OK" if good else b"BAD"
        headers = [*plain, (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200 if good else 400, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    listener = socket.create_server(ANY_ADDRESS, backlog=128)
    parent.send(listener.getsockname())
    config = uvicorn.Config(
        app, http="httptools", loop="uvloop", lifespan="off", log_level="warning", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])


def serve_aiohttp(parent: Connection) -> None:
    from aiohttp import web

    async def pub(request: web.Request) -> web.Response:
        good = is_good(request.query, await request.read())
        return web.Response(text="OK" if good else "BAD", status=200 if good else 400)

    async def run() -> None:
        application = web.Application()
        application.router.add_post("/pub", pub)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        listener = socket.create_server(ANY_ADDRESS, backlog=128)
        await web.SockSite(runner, listener).start()
        parent.send(listener.getsockname())
        await asyncio.Event().wait()

    uvloop.run(run())


SERVERS: dict[str, tuple[Callable[[Connection], None], tuple[str, ...]]] = {
    "ours": (serve_ours, ("httptools", "uvloop")),
    "ours, a task each": (serve_ours_with_tasks, ("httptools", "uvloop")),
    "uvicorn, ASGI": (serve_uvicorn, ("uvicorn", "httptools", "uvloop")),
    "aiohttp.web": (serve_aiohttp, ("aiohttp", "uvloop")),
}


def versions(packages: tuple[str, ...]) -> str | None:
    """Of what a server is made; None if something is missing."""
    try:
        return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    except importlib.metadata.PackageNotFoundError:
        return None


def start(serve: Callable[[Connection], None]) -> tuple[BaseProcess, Address]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(START_S):
        process.kill()
        raise Failed(f"{serve.__name__} does not listen after {START_S:.0f} s")
    try:
        return process, ours.recv()
    except EOFError as error:
        raise Failed(f"{serve.__name__} ended by itself") from error


def drive(address: Address, request: bytes, connections: int, count: int) -> float:
    """So many requests, one unanswered per connection; how many a second."""
    sockets: dict[int, socket.socket] = {}
    poll = select.epoll()
    for _ in range(connections):
        connection = socket.create_connection(address, timeout=10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN)
    begun: dict[int, bytes] = {}
    started = time.monotonic()
    to_send, unanswered = count, 0
    for connection in list(sockets.values())[:count]:
        connection.sendall(request)
        to_send -= 1
        unanswered += 1
    try:
        while unanswered:
            for number, _ in poll.poll(1.0):
                answer = sockets[number].recv(4096)
                if not answer.endswith(b"\r\n\r\nOK") or number in begun:
                    # Some servers write head and body apart.
                    answer = begun.pop(number, b"") + answer
                    if not answer.endswith(b"\r\n\r\nOK"):
                        begun[number] = answer
                        if b"\r\n\r\n" in answer and not answer.endswith((b"\r\n\r\n", b"\r\n\r\nO")):
                            raise Failed(f"not what was expected: {answer[:200]!r}")
                        continue
                if not answer.startswith(b"HTTP/1.1 200 OK\r\n"):
                    raise Failed(f"not what was expected: {answer[:200]!r}")
                if to_send:
                    sockets[number].sendall(request)
                    to_send -= 1
                else:
                    unanswered -= 1
            if time.monotonic() - started > DEADLINE_S:
                raise Failed(f"{unanswered + to_send} of {count} requests are not answered")
        return count / (time.monotonic() - started)
    finally:
        poll.close()
        for connection in sockets.values():
            connection.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decisions.http_layer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=40_000, metavar="N", help="of a round (%(default)s)")
    parser.add_argument("--connections", type=int, default=16, metavar="N", help="kept alive (%(default)s)")
    parser.add_argument("--size", type=int, default=200, metavar="N", help="bytes in a body (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each server (%(default)s)")
    options = parser.parse_args(arguments)
    print_facts([*describe_machine({}).items(), *vars(options).items()])
    print()
    request = encode_post("/pub?topic=load", b"x" * options.size)
    running: dict[str, tuple[BaseProcess, Address]] = {}
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    try:
        for name, (serve, packages) in SERVERS.items():
            made_of = versions(packages)
            if made_of is None:
                print(f"{name}: left out, needs {', '.join(packages)}")
                continue
            print(f"{name}: {made_of}")
            running[name] = start(serve)
            rates[name], costs[name] = [], []
            drive(running[name][1], request, options.connections, max(1, options.requests // 20))
        for number in range(options.rounds):
            for name in [*running] if number % 2 == 0 else [*reversed(running)]:
                process, address = running[name]
                assert process.pid is not None
                before = cpu_seconds(process.pid)
                rates[name].append(drive(address, request, options.connections, options.requests))
                costs[name].append((cpu_seconds(process.pid) - before) / options.requests * 1e6)
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()
    print(f"\n{'':20}{'best/s':>10}{'median/s':>10}{'x ours':>8}{'server CPU, us':>16}")
    ours = statistics.median(rates["ours"])
    for name, values in rates.items():
        median, cost = statistics.median(values), statistics.median(costs[name])
        print(f"{name:20}{max(values):>10,.0f}{median:>10,.0f}{median / ours:>8.2f}{cost:>16.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
