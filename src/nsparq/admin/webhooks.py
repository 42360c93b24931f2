"""Webhooks: POSTs a finding when it appears, changes its severity, or clears.

    changes of the findings ─► Alerts ─► events ─► Webhook, one for each URL ─► POST, retried

An event is a JSON object. It may arrive twice, and in rare cases never, so its `finding` has an id
that stays the same, and `--history-path` keeps what was sent over a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import socket
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

from nsparq.admin.collect.upstream import Upstream
from nsparq.admin.health import Problem, Severity
from nsparq.tasks import cancel_all

__all__ = ["OWN_KIND", "Alerts", "Webhook"]

logger = logging.getLogger(__name__)

OWN_KIND: Final = "webhook"
"""Findings of this kind are not sent: they say that sending fails."""
CLEAR_S: Final = 120.0
"""A finding clears when it was absent for this long. So one that comes and goes makes no noise, and
neither does a restart, after which rates are unknown for a while."""
MAX_WAITING: Final = 1000
"""Events that wait for one URL. Further ones push out the oldest."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
GIVE_UP_S: Final = 3600.0
"""An event is dropped after this time of failures."""
DRAIN_S: Final = 2.0
"""Time to send what waits when nsqadmin stops."""
AGAIN: Final = (408, 425, 429)
"""Statuses below 500 after which a POST is repeated. Others mean that the receiver refuses it."""


@dataclass(slots=True)
class _Active:
    problem: Problem
    since_s: float
    seen_s: float


class Alerts:
    """Finds out what has changed from poll to poll."""

    def __init__(self) -> None:
        self._active: dict[str, _Active] = {}
        """By id."""

    def compare(self, problems: Sequence[Problem], now_s: float) -> Iterator[dict[str, Any]]:
        """The events since the last call, the most urgent first."""
        # Not all of a kind are listed. One that is missing may be among the others.
        cut = {one.title.partition(":")[0] for one in problems if one.kind == "more"}
        for problem in problems:
            if problem.kind in (OWN_KIND, "more"):
                continue
            name = _name(problem)
            known = self._active.get(name)
            if known is None:
                self._active[name] = _Active(problem, now_s, now_s)
                yield _event("appeared", problem, now_s, now_s)
                continue
            before, known.problem, known.seen_s = known.problem, problem, now_s
            if before.severity is not problem.severity:
                yield _event("changed", problem, now_s, known.since_s, before.severity)
        for name, one in [*self._active.items()]:
            if now_s - one.seen_s >= CLEAR_S and one.problem.kind not in cut:
                del self._active[name]
                yield _event("cleared", one.problem, now_s, one.since_s)

    # Over a restart

    def dump(self) -> list[dict[str, Any]]:
        return [{**one.problem.as_json(), "since": one.since_s} for one in self._active.values()]

    def load(self, saved: Any, now_s: float) -> None:
        """What dump() gave. Anything else is left out: it is sent again."""
        for one in saved if isinstance(saved, list) else ():
            try:
                problem = Problem.from_json(one)
                since_s = min(float(one["since"]), now_s)
            except (KeyError, TypeError, ValueError):
                continue
            self._active[_name(problem)] = _Active(problem, since_s, now_s)


def _name(problem: Problem) -> str:
    return "/".join(part for part in problem.key if part)


def _event(
    event: str, problem: Problem, now_s: float, since_s: float, before: Severity | None = None
) -> dict[str, Any]:
    """`id` names this event and is the same when it is sent again."""
    found: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "event": event,
        "time": _iso(now_s),
        "nsqadmin": socket.gethostname(),
        "finding": {"id": _name(problem), "since": _iso(since_s), **problem.as_json()},
    }
    return found if before is None else {**found, "previous_severity": before.name.lower()}


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def sign(secret: str, body: bytes) -> str:
    """The value of the signature header."""
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


class Webhook:
    """Sends events to one URL, in order, one at a time. start() and close() once each."""

    def __init__(
        self,
        upstream: Upstream,
        url: str,
        secret: str = "",
        *,
        sleep: Callable[[float], Any] = asyncio.sleep,
        clock: Callable[[], float],
    ) -> None:
        self._upstream = upstream
        self._url = url
        self._secret = secret
        self._sleep = sleep
        self._clock = clock
        self.host = urlsplit(url).netloc.rpartition("@")[2]
        """Shown in place of the URL, whose path may be a secret."""
        self._waiting: deque[tuple[dict[str, Any], float]] = deque()
        """Events, and when they were added."""
        self._has_work = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.sent = self.failures = self.dropped = 0
        """Events sent; attempts that failed; events that were given up."""
        self.error = ""
        """Why the last attempt failed; empty if it worked."""
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send what waits, for at most DRAIN_S."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with asyncio.timeout(0 if self.error else DRAIN_S):
                await self._is_empty.wait()
        except TimeoutError:
            logger.warning("webhook %s: %d events are not sent at shutdown", self.host, self.waiting)
        await cancel_all([task])

    def add(self, event: dict[str, Any]) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._drop("too many events wait")
        self._waiting.append((event, self._clock()))
        self._is_empty.clear()
        self._has_work.set()

    def _drop(self, reason: str) -> None:
        event, _ = self._waiting.popleft()
        self.dropped += 1
        finding = event["finding"]["id"]
        logger.error("webhook %s: %s, %s of %s is dropped", self.host, reason, event["event"], finding)

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            if not self._waiting:
                self._is_empty.set()
                self._has_work.clear()
                await self._has_work.wait()
            event, added_s = self._waiting[0]
            refused = await self._post(event)
            is_first = bool(self._waiting) and self._waiting[0][0] is event
            if not self.error:
                self.sent += 1
                pause_s = FIRST_PAUSE_S
                if is_first:
                    self._waiting.popleft()
                continue
            if is_first and (refused or self._clock() - added_s >= GIVE_UP_S):
                self._drop(self.error)
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _post(self, event: dict[str, Any]) -> bool:
        """Sets `error`. Gives whether the receiver refuses this event for good."""
        body = json.dumps(event).encode()
        headers = [("X-Nsparq-Event", event["event"])]
        if self._secret:
            headers.append(("X-Nsparq-Signature", sign(self._secret, body)))
        try:
            answer = await self._upstream.exchange(
                "POST", self._url, body, content_type="application/json", headers=headers
            )
        except Exception as error:
            # Whatever it is, the next attempt may work.
            reason, refused = str(error).rpartition('": ')[2] or type(error).__name__, False
        else:
            if 200 <= answer.status < 300:
                if self.error:
                    logger.info("webhook %s: works again", self.host)
                self.error = ""
                return False
            reason = f"got status {answer.status}"
            refused = answer.status < 500 and answer.status not in AGAIN
        if not self.error:
            logger.warning("webhook %s: %s", self.host, reason)
        self.failures += 1
        self.error = reason
        return refused
