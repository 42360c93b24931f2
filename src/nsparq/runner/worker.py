"""A worker process of `nsparq run`: loads the program, consumes until SIGTERM, and reports.

Reports are lines of JSON, on a pipe to the supervisor: once a second, and when the worker becomes
ready or ends. The worker stops as for SIGTERM if the supervisor dies.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final

from nsparq import logs
from nsparq.client import Subscriptions
from nsparq.up.child import watch_parent

__all__ = ["CANNOT_LOAD", "LoadFailed", "load", "main"]

logger = logging.getLogger(__name__)

CANNOT_LOAD: Final = 3
"""Exit status: the program could not be imported, or has no such subscriptions."""
REPORT_S: Final = 1.0
START_S: Final = 0.05
"""How often a worker that is not ready looks whether it is."""
MARGIN_S: Final = 5.0
"""What a stop may take beyond the time for messages in flight."""


class LoadFailed(Exception):
    """The program cannot be run; the text says why."""


def main(argv: Sequence[str]) -> int:
    target, pipe, grace, level = argv
    # Ctrl-C reaches the whole terminal: the supervisor says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_parent(float(grace) + MARGIN_S)
    logs.configure(level, f"[{target} {os.getpid()}] ")
    try:
        app = load(target)
    except LoadFailed as error:
        sys.stderr.write(f"nsparq run: {error}\n")
        return CANNOT_LOAD
    asyncio.run(_serve(app, int(pipe), float(grace)))
    return 0


def load(target: str) -> Subscriptions:
    """The subscriptions that `module:name` means. Raises LoadFailed."""
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise LoadFailed(f"{module_name} cannot be imported:\n{traceback.format_exc()}") from error
        raise LoadFailed(f"there is no module {error.name!r} in {os.getcwd()} or on the path") from error
    except Exception as error:
        raise LoadFailed(f"{module_name} cannot be imported:\n{traceback.format_exc()}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            choices = [key for key, value in vars(found).items() if isinstance(value, Subscriptions)]
            hint = f"; it has {', '.join(choices)}" if choices else ""
            raise LoadFailed(f"{module_name} has no {name!r}{hint}")
        found = getattr(found, part)
    if not isinstance(found, Subscriptions):
        raise LoadFailed(f"{target} has the type {type(found).__name__}, not nsparq.client.Subscriptions")
    if not found.subscriptions:
        raise LoadFailed(f"{target} has no subscription: declare one with @{name}.subscribe(…)")
    return found


async def _serve(app: Subscriptions, pipe: int, grace: float) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(pipe, "wb", buffering=0)
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        await app.start()
        while not stopping.is_set():
            is_ready = await _report(writer, app, stopping)
            try:
                async with asyncio.timeout(REPORT_S if is_ready else START_S):
                    await stopping.wait()
            except TimeoutError:
                pass
        await app.stop(grace)
        await _report(writer, app, stopping)
    finally:
        writer.close()


async def _report(writer: asyncio.StreamWriter, app: Subscriptions, stopping: asyncio.Event) -> bool:
    """Returns whether the worker is ready."""
    is_ready = all(one.consumer.is_ready for one in app.subscriptions)
    figures = [one.figures() for one in app.subscriptions]
    writer.write(json.dumps({"is_ready": is_ready, "subscriptions": figures}).encode() + b"\n")
    try:
        await writer.drain()
    except ConnectionError:
        # The supervisor is gone: nobody reads reports.
        stopping.set()
    return is_ready


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
