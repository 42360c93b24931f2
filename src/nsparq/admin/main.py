"""The `nsqadmin` command. nsparq.process handles its command line and signals."""

import sys
from collections.abc import Sequence

from nsparq.admin.options import TABLE
from nsparq.process import Make, run_daemon

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    return run_daemon(TABLE, load, argv)


def load() -> Make:
    from nsparq.admin.daemon import Nsqadmin

    return Nsqadmin


if __name__ == "__main__":
    sys.exit(main())
