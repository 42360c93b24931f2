"""The `nsqd` command. See nsparq.process for what it does with the command line and with
signals."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsparq.options import TABLE
from nsparq.process import Runner, load_runner, run_daemon

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    return run_daemon(TABLE, load_server, argv)


def load_server() -> "tuple[Runner, type[Nsqd]]":
    return load_runner(_import_nsqd)


def _import_nsqd() -> "type[Nsqd]":
    from nsparq.server.daemon import Nsqd
    from nsparq.server.memory import keep_freed_memory

    keep_freed_memory()
    return Nsqd


if __name__ == "__main__":
    sys.exit(main())
