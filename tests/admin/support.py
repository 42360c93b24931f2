"""nsqadmin for tests, in a thread of this process or as a real process, and a cluster for it.

AdminThread(**flags), AdminProcess(**flags)     context managers; flags in snake_case, seconds as floats
    get(path, **query)                  the JSON of an answer with status 200
    call(method, path, body, headers)   any Answer; a body other than bytes is sent as JSON
    page(path) -> str                   the HTML of a page
start_admin(**flags), start_admin_process(**flags)      ours, or with NSPARQ_TEST_NSQADMIN=PATH another
    nsqadmin (is_reference is then True).

with Cluster(nsqds=2) as cluster:       an nsqlookupd and nsqds under test (see tests.support);
                                        as_processes=True: all of them as real processes
    cluster.lookupd, cluster.nsqds, cluster.addresses       the nodes, as nsqadmin calls them
    cluster.admin(**flags)              an nsqadmin that asks this nsqlookupd; ends with the cluster
    cluster.add(topic, *channels)       on every nsqd, known to nsqlookupd when it returns
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlencode

from tests.support import Answer, TestBroker, start_broker, start_process, wait_until
from tests.support.brokers import START_TIMEOUT, BrokerProcess, BrokerThread
from tests.support.lookupd import TestLookupd, start_lookupd, start_lookupd_process

# Another nsqadmin to run the conformance suite against; empty means ours.
REFERENCE_ADMIN = os.environ.get("NSPARQ_TEST_NSQADMIN", "")
FLAGS: dict[str, Any] = {"http_address": "127.0.0.1:0"}


class TestAdmin(TestBroker):
    """What every nsqadmin under test can do, however it runs."""

    __test__ = False

    def get(self, path: str, **query: str) -> Any:
        answer = self.call("GET", f"{path}?{urlencode(query)}" if query else path)
        assert answer.status == 200, answer
        return json.loads(answer.body)

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        return self.request(method, path, body, headers)

    def page(self, path: str) -> str:
        answer = self.call("GET", path)
        assert answer.status == 200, answer
        assert (answer.header("Content-Type") or "").startswith("text/html"), answer.headers
        return answer.body.decode()


class AdminThread(TestAdmin, BrokerThread):
    """Our nsqadmin on an event loop in a background thread; `daemon` is the Nsqadmin."""

    def start(self) -> None:
        from nsparq.admin.daemon import Nsqadmin
        from nsparq.admin.options import NsqadminOptions

        flags = {name: value for name, value in self.flags.items() if not _is_foreign(name)}
        options = NsqadminOptions(**{**FLAGS, **flags})
        options.validate()
        self._start_thread(Nsqadmin, options)

    @property
    def daemon(self) -> Any:
        return self.nsqd


class AdminProcess(TestAdmin, BrokerProcess):
    """`python -m nsparq.admin.main` (or the command given) as a real process."""

    def __init__(self, *, command: tuple[str, ...] = (), **flags: Any) -> None:
        command = command or (sys.executable, "-m", "nsparq.admin.main")
        super().__init__(None, command=command, **{**FLAGS, **flags})

    def start(self) -> None:
        import time

        offset = self.log.stat().st_size
        self.process = self.launch()
        self.http_address = self._await_address("HTTP", offset, time.monotonic() + START_TIMEOUT)

    def arguments(self) -> list[str]:
        foreign = ("--data-path=", "--https-address=", "--tcp-address=")
        return [argument for argument in super().arguments() if not argument.startswith(foreign)]


class ReferenceAdmin(AdminProcess):
    """The nsqadmin binary named by NSPARQ_TEST_NSQADMIN."""

    is_reference = True

    def __init__(self, **flags: Any) -> None:
        super().__init__(command=(REFERENCE_ADMIN,), **flags)


def start_admin(**flags: Any) -> AdminThread | ReferenceAdmin:
    """The nsqadmin under test: ours in a thread, or the reference as a process."""
    return ReferenceAdmin(**flags) if REFERENCE_ADMIN else AdminThread(**flags)


def start_admin_process(**flags: Any) -> AdminProcess:
    """The nsqadmin under test as a real process, for its command line and signals."""
    return ReferenceAdmin(**flags) if REFERENCE_ADMIN else AdminProcess(**flags)


def _is_foreign(flag: str) -> bool:
    return flag in ("tcp_address", "https_address", "data_path")


class Cluster:
    """An nsqlookupd and some nsqds that are registered there."""

    def __init__(self, nsqds: int = 1, *, as_processes: bool = False, **flags: Any) -> None:
        self._stack = ExitStack()
        self._as_processes = as_processes
        self.nsqds: list[TestBroker] = []
        try:
            lookupd = start_lookupd_process if as_processes else start_lookupd
            self.lookupd: TestLookupd = self._stack.enter_context(lookupd())
            for _ in range(nsqds):
                self.start_nsqd(**flags)
        except BaseException:
            self._stack.close()
            raise

    def start_nsqd(self, **flags: Any) -> TestBroker:
        start = start_process if self._as_processes else start_broker
        wanted = {"lookupd_tcp_address": (join(self.lookupd.address),), "broadcast_address": "127.0.0.1"}
        found: TestBroker = self._stack.enter_context(start(**wanted, **flags))
        self.nsqds.append(found)
        wait_until(lambda: len(self.lookupd.nodes()) == len(self.nsqds), what="registration")
        return found

    @property
    def addresses(self) -> list[str]:
        return [join(nsqd.http_address) for nsqd in self.nsqds]

    @property
    def lookupd_address(self) -> str:
        return join(self.lookupd.http_address)

    def admin(self, **flags: Any) -> AdminThread | AdminProcess:
        wanted = {"lookupd_http_address": (self.lookupd_address,), **flags}
        start = start_admin_process if self._as_processes else start_admin
        return self._stack.enter_context(start(**wanted))

    def add(self, topic: str, *channels: str) -> None:
        # Topics first: an nsqd with a new topic asks nsqlookupd for channels and creates them.
        for nsqd in self.nsqds:
            nsqd.http("POST", "/topic/create", topic=topic)
        wait_until(lambda: self._producers(topic) == len(self.nsqds), what=f"producers of {topic}")
        for nsqd in self.nsqds:
            for channel in channels:
                nsqd.http("POST", "/channel/create", topic=topic, channel=channel)
        # By all nodes: nsqlookupd keeps a name that is registered after its deletion.
        wait_until(lambda: all(self._registrations(topic, one) == len(self.nsqds) for one in channels))

    def clear(self) -> None:
        """Delete all topics."""
        for nsqd in self.nsqds:
            for topic in nsqd.stats()["topics"]:
                nsqd.control("delete", topic["topic_name"])
        for topic in self.lookupd.topics():
            self.lookupd.post("/topic/delete", topic=topic)

    def _producers(self, topic: str) -> int:
        answer = self.lookupd.request("GET", f"/lookup?{urlencode({'topic': topic})}")
        return len(json.loads(answer.body)["producers"]) if answer.status == 200 else 0

    def _registrations(self, topic: str, channel: str) -> int:
        return len(self.lookupd.debug().get(f"channel:{topic}:{channel}", ()))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(address: Any) -> str:
    host, port = address
    return f"{host}:{port}"
