"""NSQ's tools as processes, forked where that is the same; and an HTTP server that remembers its
requests.

Tool("nsq_tail", "--topic=t", ...)      starts it; a context manager, which ends it
    write(data) end_input()             its standard input
    out() err()                         what it has written so far, bytes and text
    wait_for_out(data) wait_for_log(text)   until that has been written
    wait() -> status, terminate() -> status, signal(n), kill()
run_tool("to_nsq", ..., input=b"") -> Finished(status, out, err)

NSPARQ_TEST_TOOLS=/directory names other NSQ tools to run instead of ours.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import IO, Any, NamedTuple

from nsparq.client.sync import Producer
from tests.support import TestBroker, wait_until
from tests.support.forked import ForkedProcess, forked
from tests.support.polling import DEADLINE
from tests.support.web import HandlerServer

TOOLS = os.environ.get("NSPARQ_TEST_TOOLS", "")
SOURCE = Path(__file__).resolve().parents[2] / "src"


def command(name: str) -> list[str]:
    return (
        [str(Path(TOOLS, name))] if TOOLS else [sys.executable, "-W", "error", "-m", f"nsparq.tools.{name}"]
    )


def environment(**more: str) -> dict[str, str]:
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


class Finished(NamedTuple):
    status: int
    out: bytes
    err: str


def run_tool(
    name: str, *arguments: str, input: bytes = b"", timeout: float = DEADLINE, **variables: str
) -> Finished:
    """`variables` are environment variables."""
    with Tool(name, *arguments, variables=variables) as tool:
        with suppress(BrokenPipeError):  # it may end before it has read all
            tool.write(input)
        tool.end_input()
        return Finished(tool.wait(timeout), tool.out(), tool.err())


class Tool:
    """Its output goes to a file by default. `more` is passed to Popen."""

    def __init__(
        self,
        name: str,
        *arguments: str,
        stdout: int | IO[bytes] | None = None,
        variables: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        self._out = tempfile.TemporaryFile()
        self._err = tempfile.TemporaryFile()
        reading, writing = os.pipe()
        self._input = open(writing, "wb", buffering=0)
        out = self._out if stdout is None else stdout
        files = [reading, out if isinstance(out, int) else out.fileno(), self._err.fileno()]
        process = None
        if not variables and not more:
            process = forked(command(name), [*arguments], files, environment())
        self.process: subprocess.Popen[bytes] | ForkedProcess = process or subprocess.Popen(
            [*command(name), *arguments],
            **dict(zip(("stdin", "stdout", "stderr"), files, strict=True)),
            env=environment(**(variables or {})),
            **more,
        )
        os.close(reading)

    def __enter__(self) -> Tool:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.end_input()
        sys.stderr.write(self.err()[-10_000:])
        self._out.close()
        self._err.close()

    def write(self, data: bytes) -> None:
        assert self._input.write(data) == len(data)

    def end_input(self) -> None:
        self._input.close()

    def out(self) -> bytes:
        return os.pread(self._out.fileno(), 1 << 26, 0)

    def err(self) -> str:
        return os.pread(self._err.fileno(), 1 << 26, 0).decode()

    def _wait_for(self, fact: Callable[[], Any], what: object) -> None:
        def seen_or_over() -> bool:
            return bool(fact()) or self.process.poll() is not None

        wait_until(seen_or_over, what=what)
        assert fact(), f"ended with {self.process.returncode} before {what!r}:\n{self.err()}"

    def wait_for_out(self, data: bytes) -> None:
        self._wait_for(lambda: data in self.out(), data)

    def wait_for_log(self, text: str) -> None:
        self._wait_for(lambda: text in self.err(), text)

    def wait(self, timeout: float = DEADLINE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.err()}") from None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def terminate(self, timeout: float = DEADLINE) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def tcp(broker: TestBroker) -> str:
    """host:port for --nsqd-tcp-address."""
    return "{}:{}".format(*broker.address)


def http(broker: TestBroker) -> str:
    """host:port for --nsqd-http-address or --lookupd-http-address."""
    assert broker.http_address is not None
    return "{}:{}".format(*broker.http_address)


def consume(broker: TestBroker, topic: str, count: int, channel: str = "look") -> list[bytes]:
    """Read and finish the next messages of a channel."""
    with broker.connect() as connection:
        connection.identify()
        connection.sub(topic, channel, rdy=min(count, 2500))
        messages = connection.read_messages(count, finish=True)
        connection.barrier()
        return [message.body for message in messages]


def with_headers(broker: TestBroker, topic: str, count: int) -> list[tuple[bytes, dict[str, str]]]:
    """The bodies and headers of the next messages of a topic."""
    with broker.connect() as connection:
        connection.identify(headers=True)
        connection.sub(topic, "look", rdy=count)
        messages = connection.read_messages(count, finish=True)
        return [(message.body, message.headers) for message in messages]


def publish_with_headers(broker: TestBroker, topic: str, *bodies: bytes, **headers: str) -> None:
    """An underscore in a name stands for a hyphen."""
    with Producer(tcp(broker)) as producer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        producer.publish_many(topic, bodies, headers=named)


def wait_for_channel(broker: TestBroker, topic: str, channel: str) -> None:
    """Wait until a consumer is connected."""

    def connected() -> Any:
        stats = broker.channel_stats(topic, channel)
        return stats and stats["client_count"]

    wait_until(connected, what=f"a client of {topic}/{channel}")


def wait_until_drained(broker: TestBroker, topic: str, channel: str, count: int) -> None:
    """Wait until this many messages of the channel are finished."""

    def drained() -> bool:
        stats = broker.channel_stats(topic, channel)
        if not stats:
            return False
        left = stats["depth"] + stats["in_flight_count"] + stats["deferred_count"]
        return bool(stats["message_count"] >= count and not left)

    wait_until(drained, what=f"{topic}/{channel} is drained")


def free_address() -> str:
    """An address on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1:{}".format(*probe.getsockname()[1:])


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    client: tuple[str, int]


class WebServer:
    """Answers with `statuses` in turn, then always the last; after a delay, or when `released`."""

    def __init__(self, *statuses: int, delay: float = 0.0) -> None:
        self.requests: list[Request] = []
        self.released = threading.Event()
        self.released.set()
        self.most_at_a_time = 0
        active = 0
        self.statuses = list(statuses or (200,))
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                nonlocal active
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                with owner._lock:
                    status = owner.statuses.pop(0) if len(owner.statuses) > 1 else owner.statuses[0]
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    owner.requests.append(
                        Request(self.command, self.path, headers, body, self.client_address)
                    )
                    active += 1
                    owner.most_at_a_time = max(owner.most_at_a_time, active)
                time.sleep(delay)
                owner.released.wait(DEADLINE)
                with owner._lock:
                    active -= 1
                self.send_response(status)
                if status == 204:
                    self.end_headers()
                    return
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            do_GET = do_POST = answer

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = HandlerServer(Handler)
        self.url = f"http://{self._server.address}"

    def __enter__(self) -> WebServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def wait_for(self, count: int) -> list[Request]:
        wait_until(lambda: len(self.requests) >= count, what=f"{count} requests")
        return self.requests

    def bodies(self) -> list[bytes]:
        return [request.body for request in self.requests]
