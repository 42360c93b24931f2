"""nsqlookupd for tests, in a thread of this process or as a real process, and a raw connection to
it.

LookupdThread(**flags), LookupdProcess(**flags)
                                    context managers; flags in snake_case, floats are seconds
    start()  stop()  restart()  close()         like BrokerThread and BrokerProcess
    connect() -> LookupdConnection  a V1 connection that has sent only its magic
    peer(**fields) -> LookupdConnection         one that has identified itself as an nsqd
    get(path, **query), post(path, **query)     the body of a 200, parsed if it is JSON
    lookup(topic)  nodes()  topics()  channels(topic)  debug()
    request(method, target)         the answer, with any status
LookupdConnection
    identify(**fields) -> dict      with NSQD's fields unless given; None leaves one out
    register(topic, channel="")  unregister(topic, channel="")  ping()      wait for OK
    command(...)  read_reply() -> bytes
    expect_reply(data)  expect_fatal(text)  expect_closed()

start_lookupd(**flags), start_lookupd_process(**flags)
    Ours, or the nsqlookupd named by the environment variable
    NSPARQ_TEST_NSQLOOKUPD=/path/to/nsqlookupd (is_reference is then True).
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from typing import Any

from .brokers import BrokerProcess, BrokerThread, TestBroker
from .connection import Address, ConnectionClosed, RawConnection, as_bytes
from .polling import DEADLINE

# Another nsqlookupd to run the conformance suite against; empty means ours.
REFERENCE_LOOKUPD = os.environ.get("NSPARQ_TEST_NSQLOOKUPD", "")
FLAGS = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "broadcast_address": "127.0.0.1"}
NSQD: dict[str, Any] = {
    "broadcast_address": "nsqd.test",
    "tcp_port": 4150,
    "http_port": 4151,
    "version": "1.3.0",
    "hostname": "host1",
}


class LookupdConnection(RawConnection):
    """One blocking V1 connection: replies have no type."""

    def __init__(self, address: Address, *, magic: bytes = b"  V1", timeout: float = DEADLINE) -> None:
        super().__init__(address, magic=magic, timeout=timeout)

    def read_reply(self, timeout: float | None = None) -> bytes:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        self._fill(4, deadline)
        (size,) = struct.unpack_from(">i", self._input)
        assert 0 <= size <= 1 << 20, f"reply of {size} bytes"
        self._fill(4 + size, deadline)
        data = bytes(self._input[4 : 4 + size])
        del self._input[: 4 + size]
        return data

    def expect_reply(self, data: bytes | str, timeout: float | None = None) -> None:
        reply = self.read_reply(timeout)
        assert reply == as_bytes(data), f"expected {data!r}, got {reply!r}"

    def expect_ok(self, timeout: float | None = None) -> None:
        self.expect_reply(b"OK", timeout)

    def expect_fatal(self, text: bytes | str, timeout: float | None = None) -> None:
        """Exactly this error, then end of stream."""
        self.expect_reply(text, timeout)
        self.expect_closed(timeout)

    def expect_closed(self, timeout: float | None = None) -> None:
        try:
            reply = self.read_reply(timeout)
        except (ConnectionClosed, ConnectionResetError, BrokenPipeError):
            return
        except TimeoutError:
            raise AssertionError("the server kept the connection open") from None
        raise AssertionError(f"expected end of stream, got {reply!r}")

    def identify(self, **fields: Any) -> dict[str, Any]:
        wanted = {name: value for name, value in {**NSQD, **fields}.items() if value is not None}
        self.command("IDENTIFY", body=json.dumps(wanted).encode())
        reply: dict[str, Any] = json.loads(self.read_reply())
        return reply

    def ping(self) -> None:
        self.command("PING")
        self.expect_ok()

    def register(self, topic: str, channel: str = "") -> None:
        self.command("REGISTER", topic, *filter(None, [channel]))
        self.expect_ok()

    def unregister(self, topic: str, channel: str = "") -> None:
        self.command("UNREGISTER", topic, *filter(None, [channel]))
        self.expect_ok()


class TestLookupd(TestBroker):
    """What every nsqlookupd under test can do, in a thread or as a process."""

    __test__ = False

    def connect(self, **arguments: Any) -> LookupdConnection:
        return LookupdConnection(self.address, **arguments)

    def peer(self, **fields: Any) -> LookupdConnection:
        connection = self.connect()
        try:
            connection.identify(**fields)
        except BaseException:
            connection.close()
            raise
        return connection

    def get(self, path: str, **query: str) -> Any:
        return _parsed(self.http("GET", path, **query))

    def post(self, path: str, **query: str) -> Any:
        return _parsed(self.http("POST", path, **query))

    def lookup(self, topic: str) -> Any:
        return self.get("/lookup", topic=topic)

    def nodes(self) -> list[dict[str, Any]]:
        producers: list[dict[str, Any]] = self.get("/nodes")["producers"]
        return producers

    def topics(self) -> list[str]:
        topics: list[str] = self.get("/topics")["topics"]
        return topics

    def channels(self, topic: str) -> list[str]:
        channels: list[str] = self.get("/channels", topic=topic)["channels"]
        return channels

    def debug(self) -> dict[str, list[dict[str, Any]]]:
        registrations: dict[str, list[dict[str, Any]]] = self.get("/debug")
        return registrations


class LookupdThread(TestLookupd, BrokerThread):
    """Our nsqlookupd on an event loop in a background thread of this process; `lookupd` is the
    daemon."""

    def start(self) -> None:
        from nsparq.lookup.daemon import Nsqlookupd
        from nsparq.lookup.options import NsqlookupdOptions

        options = NsqlookupdOptions(**{**FLAGS, **_without_https(self.flags)})
        self._start_thread(Nsqlookupd, options)

    @property
    def lookupd(self) -> Any:
        return self.nsqd


class LookupdProcess(TestLookupd, BrokerProcess):
    """`python -m nsparq.lookup.main` (or the given command) as a real process."""

    def __init__(self, *, command: tuple[str, ...] = (), **flags: Any) -> None:
        command = command or (sys.executable, "-m", "nsparq.lookup.main")
        super().__init__(None, command=command, **{**FLAGS, "https_address": "", **flags})

    def arguments(self) -> list[str]:
        return [
            argument
            for argument in super().arguments()
            if not argument.startswith(("--data-path=", "--https-address="))
        ]


class ReferenceLookupd(LookupdProcess):
    """The nsqlookupd binary named by NSPARQ_TEST_NSQLOOKUPD."""

    is_reference = True

    def __init__(self, **flags: Any) -> None:
        super().__init__(command=(REFERENCE_LOOKUPD,), **flags)


def start_lookupd(**flags: Any) -> LookupdThread | ReferenceLookupd:
    """The nsqlookupd under test: ours in a thread, or the reference as a process."""
    return ReferenceLookupd(**flags) if REFERENCE_LOOKUPD else LookupdThread(**flags)


def start_lookupd_process(**flags: Any) -> LookupdProcess:
    """The nsqlookupd under test as a real process, for signals and restarts."""
    return ReferenceLookupd(**flags) if REFERENCE_LOOKUPD else LookupdProcess(**flags)


def _parsed(body: bytes) -> Any:
    return json.loads(body) if body[:1] in (b"{", b"[") else body


def _without_https(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if name != "https_address"}
