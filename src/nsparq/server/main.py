"""The `nsqd` command: command line in, signals in, log lines and an exit status out.

Status 0 after a clean stop, 1 after a FATAL line, 2 for a wrong command line.
"""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from nsparq.errors import StartError
from nsparq.options import CommandLineExit, NsqdOptions, parse_command_line
from nsparq.server import logs

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

__all__ = ["main"]

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    logs.configure("info", "[nsqd] ")
    try:
        options, warnings = parse_command_line(sys.argv[1:] if argv is None else argv)
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
        run, nsqd_class = load_server()
        run(serve(nsqd_class, options))
    except StartError as error:
        logger.critical("failed to instantiate nsqd - %s", error)
        return 1
    except Exception:
        logger.critical("stopped by an unexpected error", exc_info=True)
        return 1
    return 0


def load_server() -> tuple[Callable[[Coroutine[Any, Any, None]], None], "type[Nsqd]"]:
    """What runs a coroutine, and the daemon. Imported late: --help and --version need no extra packages."""
    try:
        import uvloop

        from nsparq.server.daemon import Nsqd
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "nsparq":
            raise
        raise StartError(f"the package {error.name} is missing: pip install 'nsparq[server]'") from error
    return uvloop.run, Nsqd


async def serve(nsqd_class: "type[Nsqd]", options: NsqdOptions) -> None:
    """Run one nsqd until SIGTERM or SIGINT. Raises StartError."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_stop(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop.set)

    def on_hangup(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(reload)

    def reload() -> None:
        try:
            nsqd.reload()
        except Exception:
            logger.exception("reload failed")

    # Not loop.add_signal_handler: when the loop closes that restores the default action, and a second SIGTERM
    # in the last moments would kill a process that was about to leave with status 0.
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for signum in STOP_SIGNALS:
            signal.signal(signum, on_stop)
        nsqd = nsqd_class(options)
        await nsqd.start()
        _calm_collector()
        signal.signal(signal.SIGHUP, on_hangup)
        await stop.wait()
        await nsqd.stop()
    finally:
        for signum in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)


def _calm_collector() -> None:
    """What has been loaded stays, and what the broker makes per message is freed by reference count: looking
    for cycles often would cost more the more topics there are."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


if __name__ == "__main__":
    sys.exit(main())
