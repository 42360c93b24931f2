"""nsqd on a disk that can be made slow: python -m tests.soak.slow_nsqd CONTROL FLAG...

While the file CONTROL exists, each write and each sync takes as many seconds as it says, or until
the file is removed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from nsparq.server.main import main
from nsparq.storage.files import Files

P = ParamSpec("P")
T = TypeVar("T")


def slowed(call: Callable[P, T], control: Path) -> Callable[P, T]:
    @wraps(call)
    def slow(*args: P.args, **kwargs: P.kwargs) -> T:
        began = time.monotonic()
        while (pause := _pause(control)) and time.monotonic() - began < pause:
            time.sleep(0.02)
        return call(*args, **kwargs)

    return slow


def _pause(control: Path) -> float:
    try:
        return float(control.read_text() or 0)
    except FileNotFoundError:
        return 0.0


if __name__ == "__main__":
    for name in ("write", "sync", "sync_directory"):
        setattr(Files, name, slowed(getattr(Files, name), Path(sys.argv[1])))
    sys.exit(main(sys.argv[2:]))
