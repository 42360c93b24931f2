"""The first code of a child process of `nsparq up`: it stops the child when the parent dies.

    python -m nsparq.up.child MODULE ARGUMENTS      runs MODULE.main(ARGUMENTS)

Standard input is a pipe from the parent, which never writes to it. The pipe ends when the parent
dies, however it dies. Then the child stops as for SIGTERM, and is killed if that takes too long.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["GRACE_VARIABLE", "main", "watch_parent"]

GRACE_VARIABLE: Final = "NSPARQ_UP_GRACE"
"""Environment variable: seconds that a clean stop may take after the parent's death."""
GRACE_S: Final = 10.0


def main(argv: Sequence[str]) -> int:
    module, *arguments = argv
    watch_parent(float(os.environ.get(GRACE_VARIABLE, GRACE_S)))
    run: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return run(arguments)


def watch_parent(grace_s: float) -> None:
    """Takes over standard input: other readers find it empty from now on."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_watch, args=(pipe, grace_s), name="parent", daemon=True).start()


def _watch(pipe: int, grace_s: float) -> None:
    while os.read(pipe, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    # The child leads a process group: its own children are killed too.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
