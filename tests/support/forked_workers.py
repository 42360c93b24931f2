"""Starts Spark's Python processes quickly: it forks them from a process that has imported their
modules.

Spark starts a Python process for each stream, and others that plan reads and writes. Importing
pyspark, NumPy and Arrow is most of their processor time. python_for_spark() returns the path of a
program that Spark uses as its Python. To run a module, the program sends its arguments,
environment, directory and standard files to the process that forks, and waits until the forked
process ends. If the program is ended, so is the forked process.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOADED = (
    "pyspark.worker",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.connect.conversion",
    "nsparq.spark.datasource",
    "nsparq.spark.source.batch",
    "nsparq.spark.source.stream",
    "nsparq.spark.sink.writers",
    "deltalake",
    "nsparq.pipeline.write.delta",
)

# It starts in a hundredth of a second: without the site module and with few imports.
PROGRAM = """\
#!{starter} -IS
import _socket, marshal, os, sys
if sys.argv[1] != "-m":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
forking = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
forking.connect({address!r})
standard = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
forking.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, standard)])
forking.sendall(marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ))))
os._exit((forking.recv(1) or b"\\1")[0])
"""


@contextmanager
def python_for_spark(directory: Path, python: str = sys.executable) -> Iterator[Path]:
    """The path of the program, which replaces `python` and works inside the block."""
    program, address = directory / "python", str(directory / "forking")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        process = subprocess.Popen(
            [python, __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            # Threads of NumPy's linear algebra would not exist in forked processes.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    program.write_text(PROGRAM.format(starter=sys.executable, python=python, address=address))
    program.chmod(0o700)
    try:
        yield program
    finally:
        process.communicate()


# in the process that forks


def main() -> None:
    # Not the directory of this file: its modules have the same names as others.
    sys.path[0] = os.getcwd()
    for module in LOADED:
        # An import may fail with an older Spark or without nsparq. If a test needs it, the test
        # will fail.
        with suppress(Exception):
            importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Ctrl-C in a terminal goes to all processes; this one ends when its input ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        while 0 not in select.select([0, listener], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _become(connection)


def _become(connection: socket.socket) -> None:
    """Run the module in the forked process, as the program's Python would."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _, standard, _, _ = socket.recv_fds(connection, 1, 3)
    for number, given in enumerate(standard):
        os.dup2(given, number)
        os.close(given)
    with connection.makefile("rb") as file:
        (_, module, *arguments), directory, environment = marshal.load(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:1] = [directory, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *arguments]
    # When the program ends, the connection closes and this process gets SIGTERM.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)
    status = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, 0)
        connection.sendall(bytes([status & 0xFF]))


if __name__ == "__main__":
    main()
