"""The `nsqadmin` command. nsparq.process handles its command line and signals."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsparq.admin.options import TABLE
from nsparq.process import Runner, load_runner, run_daemon

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    return run_daemon(TABLE, load_admin, argv)


def load_admin() -> "tuple[Runner, type[Nsqadmin]]":
    return load_runner(_import_nsqadmin)


def _import_nsqadmin() -> "type[Nsqadmin]":
    from nsparq.admin.daemon import Nsqadmin

    return Nsqadmin


if __name__ == "__main__":
    sys.exit(main())
