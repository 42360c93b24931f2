"""A daemon as a process: command line in, signals in, log lines and an exit status out.

Status 0 after a clean stop, 1 after a FATAL line, 2 for a wrong command line.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any, Protocol

from nsparq import logs
from nsparq.errors import StartError, StopError
from nsparq.option_table import CommandLineExit, OptionTable

__all__ = ["Daemon", "load_runner", "open_standard_files", "raise_file_limit", "run_daemon", "serve"]

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Runner = Callable[[Coroutine[Any, Any, None]], None]


class Daemon(Protocol):
    """start() raises StartError with nothing left open; reload() is SIGHUP; stop() is clean and complete, or
    raises StopError with nothing left open."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def reload(self) -> None: ...


def run_daemon(
    table: OptionTable[Any],
    load: Callable[[], tuple[Runner, Callable[[Any], Daemon]]],
    argv: Sequence[str] | None = None,
) -> int:
    """The whole of a daemon's main. `load` gives what runs a coroutine and what makes the daemon; it is
    called late, so that --help and --version need no extra packages."""
    open_standard_files()
    program = table.program
    logs.configure("info", f"[{program}] ")
    try:
        options, warnings = table.read_command_line(sys.argv[1:] if argv is None else argv)
    except CommandLineExit as leave:
        (sys.stderr if leave.status else sys.stdout).write(leave.text)
        return leave.status
    except StartError as error:
        logger.critical("failed to load config file %s", error)
        return 1
    logs.configure(options.log_level, options.log_prefix)
    for warning in warnings:
        logger.warning("%s", warning)
    try:
        options.validate()
        run, make = load()
        run(serve(make, options))
    except StartError as error:
        logger.critical("failed to instantiate %s - %s", program, error)
        return 1
    except StopError as error:
        logger.critical("%s", error)
        return 1
    except Exception:
        logger.critical("stopped by an unexpected error", exc_info=True)
        return 1
    return 0


def open_standard_files() -> None:
    """Open /dev/null in place of standard input, output and error, as far as they are closed (`nsqd >&-`).

    The next file or socket would get their number, with the log written into it; and libuv aborts when it is
    to close one of these."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free: those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))


def load_runner(load: Callable[[], Any]) -> tuple[Runner, Any]:
    """uvloop, and what `load` imports. A missing package of an extra is a StartError that names it."""
    # NumPy brings a linear algebra that no daemon calls. It would start a thread for each core, and those
    # would spin for the first tenth of a second.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import uvloop

        loaded = load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "nsparq":
            raise
        raise StartError(f"the package {error.name} is missing: pip install 'nsparq[server]'") from error
    return uvloop.run, loaded


async def serve(make: Callable[[Any], Daemon], options: Any) -> None:
    """Run one daemon until SIGTERM or SIGINT. Raises StartError."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_stop(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop.set)

    def on_hangup(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(reload)

    def reload() -> None:
        try:
            daemon.reload()
        except Exception:
            logger.exception("reload failed")

    # Not loop.add_signal_handler: when the loop closes that restores the default action, and a second SIGTERM
    # in the last moments would kill a process that was about to leave with status 0.
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for signum in STOP_SIGNALS:
            signal.signal(signum, on_stop)
        daemon = make(options)
        await daemon.start()
        _calm_collector()
        signal.signal(signal.SIGHUP, on_hangup)
        await stop.wait()
        await daemon.stop()
    finally:
        for signum in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)


def raise_file_limit() -> None:
    """A connection is a file, and so is a topic: take what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            logger.warning("cannot raise the limit of open files above %d: %s", soft, error)


def _calm_collector() -> None:
    """What has been loaded stays, and what a daemon makes per message is freed by reference count: looking
    for cycles often would cost more the more topics there are."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
