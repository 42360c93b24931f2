"""The `nsqlookupd` command. See nsparq.process for its command line and signals."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsparq.lookup.options import TABLE
from nsparq.process import Runner, load_runner, run_daemon

if TYPE_CHECKING:
    from nsparq.lookup.daemon import Nsqlookupd

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    return run_daemon(TABLE, load_server, argv)


def load_server() -> "tuple[Runner, type[Nsqlookupd]]":
    return load_runner(_import_nsqlookupd)


def _import_nsqlookupd() -> "type[Nsqlookupd]":
    from nsparq.lookup.daemon import Nsqlookupd

    return Nsqlookupd


if __name__ == "__main__":
    sys.exit(main())
