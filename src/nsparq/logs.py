"""Log lines in NSQ's shape: `[nsqd] 2026/01/31 12:00:00.123456 INFO: text`, local time, on stderr.

Only mains call `configure`; everything else just uses `logging.getLogger(__name__)`.
"""

import logging
import sys
from datetime import datetime
from typing import Final, TextIO

__all__ = ["NsqFormatter", "configure"]

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

# A client chooses some of the text that we log; it must not be able to begin a line of its own.
_ONE_LINE: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})


class NsqFormatter(logging.Formatter):
    """One line per event; only a traceback takes more."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%Y/%m/%d %H:%M:%S.%f")
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        line = f"{self.prefix}{time} {level}: {record.getMessage().translate(_ONE_LINE)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _NsqHandler(logging.StreamHandler[TextIO]):
    """Ours among the root logger's handlers, to be replaced when a main configures again."""


def configure(level: str, prefix: str) -> None:
    """Send everything from `level` (a name of --log-level) upwards to stderr."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _NsqHandler)]:
        root.removeHandler(handler)
    handler = _NsqHandler(sys.stderr)
    handler.setFormatter(NsqFormatter(prefix))
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
