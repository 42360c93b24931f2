"""Daemons and tools as processes that start quickly: a process that has loaded their modules forks them.

forked() does what Popen of `python -m nsparq.server.main ...` would do: the same main() is called with the
same arguments, in a process of its own, which ends as any Python process does. But its modules have been
loaded already, which is three quarters of a start's processor time.

The process that forks is started on demand, once for each process that runs tests, and ends with it.
"""

from __future__ import annotations

import atexit
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
from functools import partial

from nsparq.process import load_runner

LOADED = {
    "nsparq.server.main": "nsparq.server.daemon",
    "nsparq.lookup.main": "nsparq.lookup.daemon",
    "nsparq.admin.main": "nsparq.admin.daemon",
}
"""Daemons' modules with a main(), and what that imports late."""
TOOLS = [
    f"nsparq.tools.{name}" for name in ("nsq_stat", "nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq")
]
TOOLS.append("nsparq.tools.to_nsq")
LONGEST_WISH = 1 << 17


def _variables() -> dict[str, str]:
    """Those of the environment that may matter to a daemon. pytest sets the one, load_runner() the other."""
    ignored = ("PYTEST_CURRENT_TEST", "OPENBLAS_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in ignored}


USUAL = _variables()


class ForkedProcess:
    """As much of a subprocess.Popen as the tests use."""

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
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Parent:
    """The process that forks. It says in lines of JSON whom it has forked, and how each of them ended."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=_taken, stdout=subprocess.PIPE, env=environment
        )
        _taken.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._lock = threading.Lock()
        self._unread = b""
        self._forked: list[int] = []
        self._ended: dict[int, int] = {}
        atexit.register(self.close)

    def fork(self, module: str, arguments: list[str], is_strict: bool, files: Sequence[int]) -> ForkedProcess:
        wish = {"module": module, "arguments": arguments, "is_strict": is_strict, "directory": os.getcwd()}
        with self._lock:
            socket.send_fds(_wishes, [json.dumps(wish).encode()], files)
            while not self._forked:
                self._listen(1.0)
            return ForkedProcess(self, self._forked.pop(), [module, *arguments])

    def status(self, pid: int, timeout: float) -> int | None:
        """As Popen.returncode: minus the signal's number if one has ended it, None while it runs."""
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
            said = json.loads(line)
            if "status" in said:
                self._ended[said["pid"]] = said["status"]
            else:
                self._ended.pop(said["pid"], None)  # of one that had this number before
                self._forked.append(said["pid"])

    def close(self) -> None:
        _wishes.close()
        self._output.close()
        self._process.wait()


# Made here, since a test that left a socket of its own would fail.
_wishes, _taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
atexit.register(_wishes.close)
atexit.register(_taken.close)
_parents: list[_Parent] = []
_lock = threading.Lock()


def forked(
    command: Sequence[str], arguments: list[str], files: Sequence[int], environment: Mapping[str, str]
) -> ForkedProcess | None:
    """The command as a forked process; `files` are its standard input, output and error. None if it has to be
    started in the ordinary way: for another program, for a terminal, or for an environment on which what is
    loaded may depend."""
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
    _wishes.close()
    _taken.close()
    wishes = socket.socket(fileno=0)
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Whoever stops the tests from a terminal sends it to all; this process ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready = select.select([wishes, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 1 << 16)
            _tell_who_ended()
        if wishes in ready:
            wish, files, _, _ = socket.recv_fds(wishes, LONGEST_WISH, 3)
            if not wish:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(wake)
                os.close(woken)
                wishes.detach()
                _become(**json.loads(wish), files=files)
            for file in files:
                os.close(file)
            _say(pid=pid)


def _become(module: str, arguments: list[str], is_strict: bool, directory: str, files: list[int]) -> None:
    """The daemon or tool itself, which ends as any program does. A strict one has warnings as errors."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    if is_strict:
        warnings.simplefilter("error")
    sys.argv = [module, *arguments]
    sys.exit(sys.modules[module].main())


def _tell_who_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(pid=pid, status=os.waitstatus_to_exitcode(status))


def _say(**facts: int) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    main()
