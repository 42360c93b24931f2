"""Guards over every test: nothing is left running or open, and on the build server nothing is
skipped.

Warnings are errors (pyproject.toml), which already finds files and sockets dropped without being
closed.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.support.examples import examples
from tests.support.spark import spark as spark
from tests.support.spark import spark_session as spark_session
from tests.support.spark import spark_settings as spark_settings

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
BROWSER = "tests/browser/"
SPARK = ("tests/spark/", "tests/pipeline/")
LONGEST = (
    BROWSER,
    "tests/faults/",
    "tests/property/",
    "tests/replication/",
    "tests/up/",
    "tests/spark/test_exactly_once.py",
    "tests/pipeline/test_demo.py",
)
GRACE = 20.0  # seconds that threads and sockets get to finish closing after a test

# In memory, where there is room: what syncs files, or creates many, takes a third less processor
# time. Subprocesses and workers inherit the variable.
IN_MEMORY, ROOM_BYTES = "/dev/shm", 4 << 30
if "TMPDIR" not in os.environ and os.access(IN_MEMORY, os.W_OK):
    if shutil.disk_usage(IN_MEMORY).free >= ROOM_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = IN_MEMORY

# A shell has what it starts in the background ignore interrupts, and so would whatever that starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Test machines are busy: how long one example took says nothing.
settings.register_profile("nsparq", deadline=None, print_blob=True, max_examples=examples(100))
settings.load_profile("nsparq")


# Before pytest chooses by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    for item in items:
        if item.nodeid.startswith(SPARK) and "spark_session" in getattr(item, "fixturenames", ()):
            item.add_marker("spark_session")


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end. Without them a collection of garbage takes
    milliseconds, not a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


class _ByFile(LoadFileScheduling):
    """A worker takes a whole file, or all tests that share a browser."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return BROWSER if file.startswith(BROWSER) else file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """On the build server a test that lacks what it needs has failed."""
    report = yield
    # Log lines may hold bytes of a client's that are no text; a worker could not send them to the
    # others.
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped on the build server: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a file that is skipped as a whole."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped on the build server: {report.longrepr}"
    return report


class _LoopErrors(logging.Handler):
    """What asyncio only logs: exceptions nobody retrieved, tasks destroyed while pending."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _sockets() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(descriptor))
        except OSError:  # the descriptor of this very listing
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add(f"socket:[{status.st_ino}]")
    return found


def _is_pool_worker(thread: threading.Thread) -> bool:
    return thread.name.startswith(("asyncio_", "ThreadPoolExecutor"))


def _leftovers(threads_before: set[threading.Thread], sockets_before: set[str]) -> list[str]:
    threads = _threads() - threads_before
    sockets = _sockets() - sockets_before
    if any(thread.daemon for thread in threading.enumerate()):
        # A broker shared by many tests runs in a daemon thread; its pool and its sockets come and
        # go.
        threads = {thread for thread in threads if not _is_pool_worker(thread)}
        sockets = set()
    return [*(f"thread {thread.name}" for thread in threads), *sorted(sockets)]


@pytest.fixture(autouse=True)
def nothing_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads or sockets behind, or errors that only the event loop
    noticed."""
    if request.node.get_closest_marker("allow_leftovers"):
        yield
        return
    loop_errors = _LoopErrors()
    logging.getLogger("asyncio").addHandler(loop_errors)
    threads, sockets = _threads(), _sockets()
    try:
        yield
        deadline = time.monotonic() + GRACE
        while left := _leftovers(threads, sockets):
            if time.monotonic() > deadline:
                break
            gc.collect()
            time.sleep(0.01)
    finally:
        logging.getLogger("asyncio").removeHandler(loop_errors)
    assert not left, f"left over: {left}"
    assert not loop_errors.texts, f"logged by the event loop: {loop_errors.texts}"


# What a main does to its process


@pytest.fixture
def root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def logs_unconfigured() -> Iterator[None]:
    """A main has them written to what stood for standard error in its test, which is closed by
    now."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [one for one in root.handlers if type(one).__name__ == "_NsqHandler"]:
        root.removeHandler(handler)
        root.setLevel(level)


@pytest.fixture
def signals_restored() -> Iterator[None]:
    signums = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {signum: signal.getsignal(signum) for signum in signums}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
