"""Log lines in NSQ's format: `[nsqd] 2026/01/31 12:00:00.123456 INFO: text`, local time, on stderr.

Only mains call configure(). All other modules use `logging.getLogger(__name__)`.
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

# Some logged text comes from clients. It must not start a new line in the log.
_ONE_LINE: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})


class NsqFormatter(logging.Formatter):
    """One line per event. A traceback follows on further lines."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%Y/%m/%d %H:%M:%S.%f")
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        line = f"{self.prefix}{time} {level}: {record.getMessage().translate(_ONE_LINE)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _NsqHandler(logging.StreamHandler[TextIO]):
    """The handler of configure(), which a second call replaces."""


def configure(level: str, prefix: str) -> None:
    """Log to stderr, from `level` (a value of --log-level) upwards."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _NsqHandler)]:
        root.removeHandler(handler)
    handler = _NsqHandler(sys.stderr)
    handler.setFormatter(NsqFormatter(prefix))
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
