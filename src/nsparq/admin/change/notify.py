"""Notifications: each change is POSTed to an endpoint, in the background, one at a time.

NSQ's nsqadmin ends when the endpoint cannot be reached; here that is a line in the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any, Final

from nsparq.admin.change.actor import Actor
from nsparq.admin.collect.upstream import AskFailed, Upstream
from nsparq.fetch import without_secrets

__all__ = ["Notifier"]

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 1000
"""Notifications that may wait for a slow endpoint; further ones are given up, and the log says so."""
DRAIN_S: Final = 2.0
"""How long what waits may take at shutdown."""


class Notifier:
    """start() and close() once each; without an endpoint it does nothing."""

    def __init__(self, upstream: Upstream, endpoint: str) -> None:
        self._upstream = upstream
        self._endpoint = endpoint
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._endpoint:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send what waits, for a moment."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._waiting.join()
        except TimeoutError:
            logger.warning("notifications: %d given up at shutdown", self._waiting.qsize())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def notify(self, action: str, actor: Actor, *, topic: str, channel: str = "", node: str = "") -> None:
        if self._task is None:
            return
        about: dict[str, Any] = {"action": action, "topic": topic}
        about |= {name: value for name, value in (("channel", channel), ("node", node)) if value}
        about["timestamp"] = int(time.time())
        if actor.user:
            about["user"] = actor.user
        about |= {
            "remote_ip": actor.remote_address,
            "user_agent": actor.user_agent,
            "url": actor.url,
            "via": socket.gethostname(),
        }
        try:
            self._waiting.put_nowait(json.dumps(about).encode())
        except asyncio.QueueFull:
            logger.error("notifications: the endpoint is too slow; %s of topic %s is not told", action, topic)

    async def _run(self) -> None:
        while True:
            body = await self._waiting.get()
            try:
                await self._upstream.exchange("POST", self._endpoint, body, content_type="application/json")
            except AskFailed as error:
                logger.warning("notifications: %s: %s", without_secrets(self._endpoint), error)
            finally:
                self._waiting.task_done()
