"""The main of every daemon: command line, signals, and exit status.

The status is 0 after a clean stop, 1 after a FATAL line, and 2 for a wrong command line.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol

from nsparq import logs
from nsparq.errors import StartError, StopError
from nsparq.option_table import CommandLineExit, OptionTable
from nsparq.streams import run_with_output

__all__ = ["Daemon", "load_runner", "raise_file_limit", "run_daemon", "serve"]

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Runner = Callable[[Coroutine[Any, Any, None]], None]


class Daemon(Protocol):
    """start() raises StartError, stop() raises StopError, both with nothing left open. reload() is
    called on SIGHUP."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def reload(self) -> None: ...


Make = Callable[[Any], Daemon]
"""Makes a daemon with its options."""


def run_daemon(table: OptionTable[Any], load: Callable[[], Make], argv: Sequence[str] | None = None) -> int:
    """A daemon's main. `load` gives the function that makes the daemon. It is called late, so that
    --help and --version need no extra packages."""
    return run_with_output(partial(_run, table, load, argv), partial(logger.critical, "%s"))


def _run(table: OptionTable[Any], load: Callable[[], Make], argv: Sequence[str] | None) -> int:
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
        run, make = load_runner(load)
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


def load_runner(load: Callable[[], Any]) -> tuple[Runner, Any]:
    """uvloop, and the result of `load`. Raises StartError if a package of an extra is missing."""
    # No daemon uses NumPy's linear algebra. It would start a thread for each core, which spins for
    # the first tenth of a second.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import uvloop

        loaded = load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "nsparq":
            raise
        raise StartError(f"the package {error.name} is missing: pip install 'nsparq[server]'") from error
    return uvloop.run, loaded


async def serve(make: Make, options: Any) -> None:
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

    # Not loop.add_signal_handler: when the loop closes, it restores the default action. A second
    # SIGTERM at the end would then kill a process that is about to exit with status 0.
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
    """Raise the limit of open files to the maximum: every connection and every topic needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            logger.warning("cannot raise the limit of open files above %d: %s", soft, error)


def _calm_collector() -> None:
    """Run the garbage collector rarely. Loaded objects stay anyway, and objects of messages are
    freed by reference count. The cost of a collection grows with the number of topics."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
