"""What a child process of `nsparq up` begins with: it sees to it that it does not outlive its parent.

    python -m nsparq.up.child MODULE ARGUMENTS      runs MODULE.main(ARGUMENTS)

Standard input is a pipe that only the parent can write to, and never does. It ends when the parent does,
however that came about; then we stop as for SIGTERM, and by force if that takes too long.
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
"""In the environment: seconds that a clean stop may take once the parent is gone."""
GRACE_S: Final = 10.0


def main(argv: Sequence[str]) -> int:
    module, *arguments = argv
    watch_parent(float(os.environ.get(GRACE_VARIABLE, GRACE_S)))
    run: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return run(arguments)


def watch_parent(grace_s: float) -> None:
    """Whatever else reads standard input finds it empty from now on."""
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
    # We lead a process group: what we have started goes with us.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
