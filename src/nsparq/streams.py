"""Standard input, output and error as users give them: closed, full, or a pipe without a reader."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Final

__all__ = ["run_with_output"]

CANNOT_WRITE: Final = (
    errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN,
)  # fmt: skip
"""Errors of standard output. Commands handle those of other files and of connections themselves."""


def run_with_output(run: Callable[[], int], say: Callable[[str], object]) -> int:
    """The exit status of `run`; 1 if standard output cannot be written to. `say` gets the reason,
    unless the reader of a pipe has closed it."""
    _open_closed_files()
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Characters that its encoding lacks are escaped, as on standard error.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return run()
        finally:
            # Now: if Python's own flush at exit fails, it prints a message.
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in CANNOT_WRITE:
            raise
        # What is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            say(f"cannot write to standard output: {os.strerror(error.errno)}")
        return 1


def _open_closed_files() -> None:
    """Open /dev/null for those that are closed (`nsq_tail >&-`), so that no file or socket gets the
    number: messages and log lines would be written into it. Also, libuv aborts if it has to close
    one of these numbers. To read the input or write the output still fails."""
    modes = ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY))
    for number, name, mode in modes:
        if getattr(sys, name) is None:
            # It gets the lowest free number, and all lower ones are open by now.
            os.set_inheritable(os.open(os.devnull, mode), True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))
