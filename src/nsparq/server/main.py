"""The `nsqd` command. See nsparq.process for what it does with the command line and with
signals."""

import logging
import sys
from collections.abc import Sequence

from nsparq.kernel import BUILD
from nsparq.options import TABLE
from nsparq.process import Make, run_daemon

__all__ = ["main"]

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    return run_daemon(TABLE, load, argv)


def load() -> Make:
    from nsparq.server.daemon import Nsqd
    from nsparq.server.memory import keep_freed_memory
    from nsparq.server.replication import ReplicatedNsqd

    keep_freed_memory()
    if BUILD == "python":
        logger.warning(
            "no compiled kernel: throughput is about half; docs/how-to/install.md says how to get it"
        )
    return lambda options: ReplicatedNsqd(options) if options.replication_cluster else Nsqd(options)


if __name__ == "__main__":
    sys.exit(main())
