"""The reference page of the tools, generated from their option tables.

`python -m nsparq.tools.reference --markdown` prints the checked-in copy under docs/reference.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from nsparq.tools import (
    completion,
    dead_letters,
    listing,
    manage,
    messages,
    nsq_stat,
    nsq_tail,
    nsq_to_file,
    nsq_to_http,
    nsq_to_nsq,
    policy,
    publish,
    replay,
    replication,
    settings,
    to_nsq,
    top,
)
from nsparq.tools.options import ToolTable

__all__ = ["TABLES", "markdown"]

TABLES: Final[tuple[ToolTable[Any], ...]] = (
    top.TOP,
    listing.TOPICS,
    listing.CHANNELS,
    listing.NODES,
    messages.PEEK,
    messages.TAIL,
    publish.PUBLISH,
    manage.CREATE,
    manage.PAUSE,
    manage.UNPAUSE,
    manage.EMPTY,
    manage.DELETE,
    replay.REPLAY,
    policy.POLICY,
    settings.SETTINGS,
    dead_letters.DEAD_LETTERS,
    replication.REPLICATION,
    completion.COMPLETION,
    nsq_tail.TABLE,
    nsq_stat.TABLE,
    to_nsq.TABLE,
    nsq_to_file.TABLE,
    nsq_to_http.TABLE,
    nsq_to_nsq.TABLE,
)

HEAD: Final = """\
# Options of the tools

Generated from the source by `make docs`; do not edit. [What the tools are for](../tools.md), with examples.

Flags follow Go's syntax: `-flag value`, `--flag value` and `--flag=value` are the same. A boolean flag may
stand alone and takes a value only with `=`. If a flag is repeated, the last one counts, except for flags that
may be given several times. Durations are written like `250ms`, `1.5s` or `2h45m`, with the units
`ns us µs ms s m h`. Every tool also has `--version` and `--help`.
"""


def markdown() -> str:
    return "\n".join([HEAD, *(table.section() for table in TABLES)]).rstrip() + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--markdown"]:
        sys.exit("usage: python -m nsparq.tools.reference --markdown")
    sys.stdout.write(markdown())
