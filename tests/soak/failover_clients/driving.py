"""What the drivers in Python share."""

from __future__ import annotations

import sys
import threading
from itertools import count
from typing import Final

CHANNEL: Final = "c"
ANSWER_S: Final = 2.0
"""A publish without an answer for so long has failed."""
PAUSE_S: Final = 0.05
"""Between two publishes."""
HEARTBEAT_S: Final = 2
"""How soon a client notices that nsqd is silent depends on this."""
POLL_S: Final = 1
"""How often a consumer asks nsqlookupd."""
IN_FLIGHT: Final = 50


class Driver:
    """The command line, and what the driver reports."""

    def __init__(self) -> None:
        self.lookupd, self.topic, *self.nsqd = sys.argv[1:]
        self.is_over = threading.Event()
        self._numbers = count()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        sys.stdin.read()
        self.is_over.set()

    def next_body(self) -> bytes:
        return b"%s-%d" % (self.topic.encode(), next(self._numbers))

    def acknowledged(self, body: bytes) -> None:
        self._say(f"acknowledged {body.decode()}")

    def received(self, message_id: bytes, body: bytes) -> None:
        self._say(f"received {message_id.decode()} {body.decode()}")

    def _say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
