"""Brokers for tests: in a thread of this process, or as a real process (ours or another nsqd)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from .connection import Address, RawConnection
from .forked import ForkedProcess, forked
from .http import Answer, HttpConnection
from .polling import DEADLINE, busy_s

T = TypeVar("T")

# Another NSQ-compatible nsqd to run the conformance suite against; empty means ours.
REFERENCE = os.environ.get("NSPARQ_TEST_NSQD", "")
START_TIMEOUT = STOP_TIMEOUT = DEADLINE
SOURCE = Path(__file__).resolve().parents[2] / "src"
ADDRESSES = ("tcp_address", "http_address", "https_address")


class BrokerDied(Exception):
    """The process did not start; the text has its stderr, `status` its exit status if it ended."""

    def __init__(self, text: str, status: int | None) -> None:
        super().__init__(text)
        self.status = status


class TestBroker:
    """What every broker under test can do, in a thread or as a process. Flags are in snake_case.

    Flag values are Python values: a float is a duration in seconds, a tuple a repeated flag.
    """

    __test__ = False
    is_reference = False
    address: Address
    http_address: Address | None = None
    https_address: Address | None = None

    def __init__(self, data_path: Path | str | None = None, **flags: Any) -> None:
        self._own_directory = None if data_path else tempfile.mkdtemp(prefix="nsparq-")
        self.data_path = Path(data_path or self._own_directory or "")
        self.flags = {**dict.fromkeys(ADDRESSES, "127.0.0.1:0"), **flags}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def busy_s(self) -> float:
        """Processor time of its event loop so far, in seconds."""
        raise NotImplementedError

    # Start and stop, implemented by the subclasses

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Clean stop; twice is safe."""
        raise NotImplementedError

    def restart(self) -> None:
        """Clean stop and start on the same data path and flags; the address may change."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop, and remove the data path if it was created here."""
        try:
            self.stop()
        finally:
            if self._own_directory:
                shutil.rmtree(self._own_directory, ignore_errors=True)

    # Requests

    def connect(self, **arguments: Any) -> RawConnection:
        return RawConnection(self.address, **arguments)

    def publish(self, topic: str, *bodies: bytes) -> None:
        """Publish on a new connection, in MPUBs of at most 1,000 messages."""
        with self.connect() as connection:
            for start in range(0, len(bodies), 1000):
                connection.mpub(topic, bodies[start : start + 1000])

    def http_connect(self, *, https: bool = False, **arguments: Any) -> HttpConnection:
        """A connection to the HTTP port, or to the HTTPS port (with tls=, an SSL context)."""
        address = self.https_address if https else self.http_address
        if address is None:
            raise NotImplementedError("this broker serves no " + ("HTTPS" if https else "HTTP"))
        return HttpConnection(address, **arguments)

    def request(
        self,
        method: str,
        target: str | bytes,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One HTTP request on a new connection, and its answer with any status."""
        with self.http_connect() as connection:
            return connection.request(method, target, body, headers)

    def http(self, method: str, path: str, body: bytes = b"", **query: str) -> bytes:
        """The body of an answer that must have status 200."""
        answer = self.request(method, f"{path}?{urlencode(query)}" if query else path, body)
        assert answer.status == 200, (method, path, query, answer)
        return answer.body

    def stats(self, topic: str = "", channel: str = "", include_clients: bool = True) -> dict[str, Any]:
        raise NotImplementedError

    def topic_stats(self, topic: str) -> dict[str, Any] | None:
        """The topic's part of stats(), None while it does not exist."""
        topics = self.stats(topic)["topics"] or []
        return next((found for found in topics if found["topic_name"] == topic), None)

    def channel_stats(self, topic: str, channel: str) -> dict[str, Any] | None:
        """The channel's part of stats(), None while it does not exist."""
        channels = (self.topic_stats(topic) or {"channels": []})["channels"]
        return next((found for found in channels if found["channel_name"] == channel), None)

    def control(self, action: str, topic: str, channel: str = "") -> None:
        """create, delete, empty, pause or unpause a topic, or one of its channels."""
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        """The present content of nsqd.dat; empty lists in place of null."""
        path = self.data_path / "nsqd.dat"
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"topics": []}
        content["topics"] = content["topics"] or []
        for topic in content["topics"]:
            topic["channels"] = topic["channels"] or []
        return content


class BrokerThread(TestBroker):
    """Our daemon on an event loop in a background thread of this process."""

    def __init__(self, data_path: Path | str | None = None, *, files: Any = None, **flags: Any) -> None:
        super().__init__(data_path, **flags)
        self._files = files
        self.loop_errors: list[dict[str, Any]] = []  # unhandled exceptions; close() fails on them
        self._thread: threading.Thread | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        from nsparq.options import NsqdOptions
        from nsparq.server.daemon import Nsqd

        options = NsqdOptions(**{**self.flags, "data_path": str(self.data_path)})
        self._start_thread(partial(Nsqd, files=self._files), options)
        self.https_address = self.nsqd.https_address or None

    def _start_thread(self, factory: Callable[[Any], Any], options: Any) -> None:
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(factory, options, started), daemon=True)
        self._thread.start()
        try:
            started.result(START_TIMEOUT)
        except BaseException:
            self._thread = None
            raise
        self.address = getattr(self.nsqd, "tcp_address", None)
        self.http_address = self.nsqd.http_address or None

    def _run(self, factory: Callable[[Any], Any], options: Any, started: Future[None]) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.loop.set_exception_handler(lambda _, context: self.loop_errors.append(context))
            self._stopping = asyncio.Event()
            self.nsqd = factory(options)
            await self.nsqd.start()
            started.set_result(None)
            await self._stopping.wait()
            await self.nsqd.stop()

        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(serve())
        except BaseException as error:
            if started.done():
                self.loop_errors.append({"message": "the daemon failed", "exception": error})
            else:
                started.set_exception(error)

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.loop.call_soon_threadsafe(self._stopping.set)
        thread.join(STOP_TIMEOUT)
        assert not thread.is_alive(), f"the broker did not stop within {STOP_TIMEOUT} s"
        errors, self.loop_errors = self.loop_errors, []
        for context in errors:
            exception = context.get("exception")
            if _is_race_of_uvloop(context):
                continue
            raise AssertionError(f"unhandled in the event loop: {context}") from exception

    def busy_s(self) -> float:
        assert self._thread is not None
        return busy_s(thread=self._thread.native_id)

    def call(self, function: Callable[[Any], T]) -> T:
        """Run function(nsqd.broker) in the event loop thread and return its result."""
        return self.call_daemon(lambda nsqd: function(nsqd.broker))

    def call_daemon(self, function: Callable[[Any], T]) -> T:
        """The same with the daemon itself."""

        async def run() -> T:
            return function(self.nsqd)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(DEADLINE)

    def stats(self, topic: str = "", channel: str = "", include_clients: bool = True) -> dict[str, Any]:
        from nsparq.broker.stats import broker_stats

        found = self.call(lambda broker: json.dumps(broker_stats(broker, topic, channel, include_clients)))
        stats: dict[str, Any] = json.loads(found)
        return stats

    def control(self, action: str, topic: str, channel: str = "") -> None:
        def run(broker: Any) -> None:
            if action == "create":
                broker.get_topic(topic)
                if channel:
                    broker.topics[topic].get_channel(channel)
            elif action == "delete":
                if channel:
                    broker.topics[topic].delete_channel(channel)
                else:
                    broker.delete_topic(topic)
            else:
                found = broker.topics[topic]
                getattr(found.channels[channel] if channel else found, action)()

        self.call(run)


class BrokerProcess(TestBroker):
    """`python -m nsparq.server.main` (or the given command) as a real process, started by
    forked.py.

    stats() and control() use its HTTP API. stderr goes to the file `log`, and at close() to our
    stderr, where pytest shows it for failed tests.
    """

    def __init__(
        self, data_path: Path | str | None = None, *, command: tuple[str, ...] = (), **flags: Any
    ) -> None:
        super().__init__(data_path, **flags)
        self.command = command or (sys.executable, "-m", "nsparq.server.main")
        descriptor, name = tempfile.mkstemp(prefix="nsparq-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def arguments(self) -> list[str]:
        found = [f"--data-path={self.data_path}"]
        for name, value in self.flags.items():
            flag = "--" + name.replace("_", "-")
            values = map(str, value) if isinstance(value, tuple) else [_flag_value(value)]
            found += [f"{flag}={text}" for text in values]
        return found

    def launch(self) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start the process without waiting until it listens; for tests of starts that must
        fail."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(SOURCE), environment.get("PYTHONPATH")))
        )
        with self.log.open("ab") as stderr, open(os.devnull, "r+b") as nothing:
            files = [nothing.fileno(), nothing.fileno(), stderr.fileno()]
            return forked(self.command, self.arguments(), files, environment) or subprocess.Popen(
                [*self.command, *self.arguments()],
                stdin=nothing,
                stdout=nothing,
                stderr=stderr,
                env=environment,
            )

    def start(self) -> None:
        offset = self.log.stat().st_size
        self.process = self.launch()
        deadline = time.monotonic() + START_TIMEOUT
        self.address = self._await_address("TCP", offset, deadline)
        self.http_address = self.https_address = None
        if self.flags["http_address"]:
            self.http_address = self._await_address("HTTP", offset, deadline)
        if self.flags["https_address"] and self.flags.get("tls_cert"):
            self.https_address = self._await_address("HTTPS", offset, deadline)

    def _await_address(self, kind: str, offset: int, deadline: float) -> Address:
        """The address on which the process listens, from its log after `offset`."""
        assert self.process is not None
        while not (found := re.search(rf" {kind}: listening on (\S+)", self._log_since(offset))):
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = f"no {kind} address from {self.command}:\n{self.stderr_text()}"
                raise BrokerDied(text, self.process.poll())
            time.sleep(0.005)
        return _parse_address(found[1])

    def _log_since(self, offset: int) -> str:
        with self.log.open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")

    def stderr_text(self) -> str:
        """Everything the process wrote to stderr, over all restarts."""
        return self._log_since(0)

    def busy_s(self) -> float:
        return busy_s(self.pid)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout: float = STOP_TIMEOUT) -> int:
        """The exit status."""
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.stderr_text()}") from None

    def terminate(self, timeout: float = STOP_TIMEOUT) -> int:
        """Send SIGTERM and wait; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        """Send SIGKILL, like a crash; the data path stays for restart()."""
        if self.alive():
            self.signal(signal.SIGKILL)
            self.wait()

    def stop(self) -> None:
        if self.alive():
            try:
                status = self.terminate()
            except AssertionError:
                self.kill()
                raise
            assert status == 0, f"exit status {status} after SIGTERM:\n{self.stderr_text()}"

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.kill()
            sys.stderr.write(self.stderr_text()[-20_000:])
            self.log.unlink(missing_ok=True)

    # HTTP API

    def stats(self, topic: str = "", channel: str = "", include_clients: bool = True) -> dict[str, Any]:
        query = {"format": "json", "include_mem": "false", "include_clients": str(include_clients).lower()}
        wanted = {name: value for name, value in (("topic", topic), ("channel", channel)) if value}
        stats: dict[str, Any] = json.loads(self.http("GET", "/stats", **query, **wanted))
        return stats

    def control(self, action: str, topic: str, channel: str = "") -> None:
        if not channel:
            self.http("POST", f"/topic/{action}", topic=topic)
            return
        if action == "create":
            self.http("POST", "/topic/create", topic=topic)
        self.http("POST", f"/channel/{action}", topic=topic, channel=channel)


class ReferenceProcess(BrokerProcess):
    """The nsqd binary named by NSPARQ_TEST_NSQD."""

    is_reference = True

    def __init__(self, data_path: Path | str | None = None, **flags: Any) -> None:
        super().__init__(data_path, command=(REFERENCE,), **flags)


def start_broker(data_path: Path | str | None = None, **flags: Any) -> BrokerThread | ReferenceProcess:
    """The broker under test with full control: ours in a thread, or the reference as a process."""
    if REFERENCE:
        return ReferenceProcess(data_path, **flags)
    return BrokerThread(data_path, **flags)


def start_process(data_path: Path | str | None = None, **flags: Any) -> BrokerProcess:
    """The broker under test as a real process, for signals and crashes."""
    if REFERENCE:
        return ReferenceProcess(data_path, **flags)
    return BrokerProcess(data_path, **flags)


def _flag_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0").rstrip(".") + "s"
    return str(value)


def _parse_address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and port.isdigit() else text


def _is_race_of_uvloop(context: dict[str, Any]) -> bool:
    """A defect of uvloop: it answers a TLS peer that closes, even when the socket is already
    closed."""
    is_closed = "the handler is closed" in str(context.get("exception"))
    return is_closed and context.get("message") == "Fatal error on SSL protocol"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
