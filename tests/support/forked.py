"""Starts daemons and tools quickly: it forks them from a process that has already imported their
modules.

forked() does the same as Popen of `python -m nsparq.server.main ...`: it calls main() with the same
arguments in a new process, which ends like any Python process. Imports are three quarters of the
processor time of a start, and here they are already done.

The process that forks is started on first use, once for each process that runs tests, and ends with
it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from nsparq.process import load_runner

LOADED = {
    "nsparq.server.main": "nsparq.server.daemon",
    "nsparq.lookup.main": "nsparq.lookup.daemon",
    "nsparq.admin.main": "nsparq.admin.daemon",
}
"""Modules of daemons with a main(), and the modules that main() imports."""
TOOLS = [
    f"nsparq.tools.{name}" for name in ("nsq_stat", "nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq")
]
TOOLS += [f"nsparq.tools.{name}" for name in ("to_nsq", "main", "messages", "manage", "publish", "replay")]
MAX_REQUEST = 1 << 17


def _variables() -> dict[str, str]:
    """The environment without the variables that pytest and load_runner() set."""
    ignored = ("PYTEST_CURRENT_TEST", "OPENBLAS_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in ignored}


USUAL = _variables()


class ForkedProcess:
    """The part of subprocess.Popen that the tests use."""

    def __init__(self, parent: _Parent, pid: int, args: list[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._parent = parent

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.status(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._parent.status(self.pid, 0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # As with Popen: it may have ended by now.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Parent:
    """The process that forks. It reports in lines of JSON which processes it forked, and how they
    ended."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=_requests_end, stdout=subprocess.PIPE, env=environment
        )
        _requests_end.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._lock = threading.Lock()
        self._unread = b""
        self._forked: list[int] = []
        self._ended: dict[int, int] = {}
        atexit.register(self.close)

    def fork(self, module: str, arguments: list[str], is_strict: bool, files: Sequence[int]) -> ForkedProcess:
        request = {"module": module, "arguments": arguments, "is_strict": is_strict, "directory": os.getcwd()}
        with self._lock:
            socket.send_fds(_requests, [json.dumps(request).encode()], files)
            while not self._forked:
                self._listen(1.0)
            return ForkedProcess(self, self._forked.pop(), [module, *arguments])

    def status(self, pid: int, timeout: float) -> int | None:
        """Like Popen.returncode: minus the number of the signal that ended it, None while it
        runs."""
        with self._lock:
            if pid not in self._ended:
                self._listen(timeout)
            return self._ended.get(pid)

    def _listen(self, timeout: float) -> None:
        if not select.select([self._output], [], [], timeout)[0]:
            return
        read = os.read(self._output.fileno(), 1 << 16)
        assert read, "the process that forks others has ended"
        *lines, self._unread = (self._unread + read).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "status" in report:
                self._ended[report["pid"]] = report["status"]
            else:
                self._ended.pop(report["pid"], None)  # an earlier process with the same pid
                self._forked.append(report["pid"])

    def close(self) -> None:
        _requests.close()
        self._output.close()
        self._process.wait()


# Created at import: the guards would report a socket that a test creates and leaves.
_requests, _requests_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
atexit.register(_requests.close)
atexit.register(_requests_end.close)
_parents: list[_Parent] = []
_lock = threading.Lock()


def forked(
    command: Sequence[str], arguments: list[str], files: Sequence[int], environment: Mapping[str, str]
) -> ForkedProcess | None:
    """The command as a forked process; `files` are its standard input, output and error. None if it
    has to be started with Popen: another program, a terminal, or a changed environment on which
    imports may depend."""
    module = command[-1]
    is_daemon = module in LOADED and [*command] == [sys.executable, "-m", module]
    is_tool = module in TOOLS and [*command] == [sys.executable, "-W", "error", "-m", module]
    if not (is_daemon or is_tool) or _variables() != USUAL or any(map(os.isatty, files)):
        return None
    with _lock:
        if not _parents:
            _parents.append(_Parent(environment))
    return _parents[0].fork(module, arguments, is_tool, files)


# in the process that forks


def main() -> None:
    for module, late in LOADED.items():
        importlib.import_module(module)
        load_runner(partial(importlib.import_module, late))
    for module in TOOLS:
        importlib.import_module(module)
    _compile_templates()
    # The collector of a forked process would copy every page that it looks at.
    gc.freeze()
    _requests.close()
    _requests_end.close()
    requests = socket.socket(fileno=0)
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C in a terminal goes to all processes; this one ends when its input ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready = select.select([requests, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 1 << 16)
            _report_ended()
        if requests in ready:
            request, files, _, _ = socket.recv_fds(requests, MAX_REQUEST, 3)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(wake)
                os.close(woken)
                requests.detach()
                _become(**json.loads(request), files=files)
            for file in files:
                os.close(file)
            _report(pid=pid)


def _compile_templates() -> None:
    """Those of nsqadmin's pages. Their code is kept for all environments of a process."""
    from nsparq.admin.show.templating import Assets, make_environment

    environment = make_environment(Assets(""), "")
    for name in environment.list_templates():
        environment.get_template(name)


def _become(module: str, arguments: list[str], is_strict: bool, directory: str, files: list[int]) -> None:
    """Run the daemon or tool in the forked process. If it is strict, warnings are errors."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    if is_strict:
        warnings.simplefilter("error")
    sys.argv = [module, *arguments]
    status = sys.modules[module].main()
    if isinstance(status, int):
        _leave(status)
    sys.exit(status)


def _leave(status: int) -> None:
    """End as Python does, but leave the modules as they are: to take them apart would copy nearly
    every page that this process shares with its parent. If the output cannot be written, Python
    has to say so."""
    gc.collect()
    threading._shutdown()  # type: ignore[attr-defined]  # what Python calls
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _report_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _report(pid=pid, status=os.waitstatus_to_exitcode(status))


def _report(**facts: int) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    main()
