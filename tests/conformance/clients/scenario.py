"""What every published client is put through, whatever its event loop.

A driver script publishes the bodies below with its client, asks `Scenario.action` what to do with a
message that arrives, and prints what happened as JSON lines. It asserts nothing: a driver reports,
the test judges.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

SINGLE: Final = "single"
MULTI: Final = tuple(f"multi-{i}" for i in range(10))
DEFERRED: Final = "deferred"
DEFER_MS: Final = 600
REQUEUED: Final = MULTI[3]
TOUCHED: Final = MULTI[4]
POISON: Final = MULTI[5]
POISON_ATTEMPTS: Final = 3
"""The delivery policy of our nsqd gives the message up then. NSQ's has none: there the client
finishes it at the next attempt."""
KEPT: Final = tuple(f"kept-{i}" for i in range(20))
AFTER: Final = "after"

CHANNEL: Final = "work"
MAX_IN_FLIGHT: Final = 5
# The broker's message timeout. The touched message is held longer, with one TOUCH.
MSG_TIMEOUT_MS: Final = 2000
TOUCH_AFTER: Final = 1.2
FINISH_TOUCHED_AFTER: Final = 2.6


class Scenario:
    """Decides, records and reports, independently of the client library."""

    def __init__(self) -> None:
        self.host, port, self.topic = sys.argv[1:4]
        self.port = int(port)
        self.address = f"{self.host}:{self.port}"
        self.finished: set[str] = set()
        self.held: set[str] = set()
        self.poison_attempts = 0
        self.kept_acknowledged = False
        # Set when the test reports on stdin that the broker was killed and restarted.
        self.restarted = threading.Event()
        threading.Thread(target=self._await_restart, daemon=True).start()

    def _await_restart(self) -> None:
        for line in sys.stdin:
            if line.strip() == "restarted":
                self.restarted.set()

    def report(self, event: str, **details: object) -> None:
        sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **details}) + "\n")
        sys.stdout.flush()

    def published(self, command: str, bodies: Iterable[str]) -> None:
        bodies = tuple(bodies)
        self.report("published", command=command, bodies=bodies)
        if bodies == KEPT:
            self.kept_acknowledged = True
            self._report_holding()

    def _report_holding(self) -> None:
        # Only acknowledged messages must survive, so the broker is killed after it has answered.
        if self.kept_acknowledged and len(self.held) >= MAX_IN_FLIGHT:
            self.report("holding", bodies=sorted(self.held))

    def action(self, body: bytes, attempts: int) -> str:
        """One of finish, requeue, touch (and finish later), hold (no answer)."""
        text = body.decode()
        self.report("message", body=text, attempts=attempts)
        if (text == REQUEUED and attempts == 1) or (text == POISON and attempts <= POISON_ATTEMPTS):
            self.poison_attempts = max(self.poison_attempts, attempts if text == POISON else 0)
            return "requeue"
        if text == TOUCHED and attempts == 1:
            return "touch"
        if text in KEPT and not self.restarted.is_set():
            self.held.add(text)
            self._report_holding()
            return "hold"
        return "finish"

    def finish(self, body: bytes) -> None:
        self.finished.add(body.decode())
        self.report("finished", body=body.decode())

    @property
    def worked(self) -> bool:
        is_poison_tried = self.poison_attempts == POISON_ATTEMPTS
        return self.finished >= {SINGLE, DEFERRED, *MULTI} - {POISON} and is_poison_tried

    @property
    def recovered(self) -> bool:
        return self.finished >= {AFTER, *KEPT}


async def until(fact: Callable[[], bool]) -> None:
    """For drivers on asyncio. It polls, because facts change in callbacks and threads."""
    while not fact():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
