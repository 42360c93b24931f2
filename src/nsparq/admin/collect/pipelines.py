"""Spark pipelines that read or write here, as their runners tell: see docs/pipelines.md for what they say.

A runner is named with --pipeline-http-address, the `metrics_address` of its file.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from nsparq.admin.collect.history import Table, steady_clock
from nsparq.admin.collect.merge import objects, real, text
from nsparq.admin.collect.upstream import AskFailed, Upstream

__all__ = ["PIPELINE", "Pipelines", "readers"]

logger = logging.getLogger(__name__)

NUMBERS: Final = (
    "rows",
    "rows_written",
    "undecodable",
    "dead_letters",
    "late",
    "rows_per_second",
    "lag",
    "batches",
    "batch_seconds",
    "last_batch",
    "failures",
    "restarts",
)
PIPELINE: Final = ("lag", "rows_per_second", "batch_seconds")
"""What is kept over time."""
HISTORY_BYTES: Final = 4 << 20
"""Enough for 500 pipelines."""


class Pipelines:
    """Asks the runners now and then; `found` is what they said last."""

    def __init__(self, upstream: Upstream, addresses: Sequence[str], interval_s: float) -> None:
        self._upstream = upstream
        self.addresses = tuple(addresses)
        self._interval_s = interval_s
        self._clock = steady_clock()
        self.found: list[dict[str, Any]] = []
        """A pipeline each; for a runner that does not answer an entry with `unreachable`."""
        self.history = Table(PIPELINE, poll_s=interval_s, peaks=PIPELINE, max_bytes=HISTORY_BYTES)
        """By runner and name."""
        self.was_asked = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.addresses:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.poll()
            except Exception:
                logger.exception("asking for pipelines failed")
            await asyncio.sleep(self._interval_s)

    async def poll(self) -> None:
        answers = await asyncio.gather(*(self._ask(address) for address in self.addresses))
        self.found = [one for answer in answers for one in answer]
        self.was_asked = True
        self.history.begin(self._clock())
        for one in self.found:
            if "unreachable" not in one:
                figures = [math.nan if one[name] is None else one[name] for name in PIPELINE]
                self.history.put((one["runner"], one["name"]), figures)
        self.history.commit()

    async def _ask(self, address: str) -> list[dict[str, Any]]:
        try:
            said = await self._upstream.get_json(f"http://{address}/status")
        except AskFailed as error:
            return [{"name": address, "runner": address, "unreachable": str(error)}]
        if not isinstance(said, dict):
            return [{"name": address, "runner": address, "unreachable": "what it says is no status"}]
        return [_pipeline(one, address, said) for one in objects(said, "pipelines")]


def _pipeline(said: Mapping[str, Any], address: str, runner: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "topics", "channel", "sink", "state", "error")
    ui = text(runner, "ui")
    return {
        "runner": address,
        "file": text(runner, "file"),
        # Shown as a link, so it must be one that leads to a page and does nothing else.
        "ui": ui if ui.startswith(("http://", "https://")) else "",
        **{name: text(said, name) for name in names},
        "channels": _channels(said),
        # None where the runner does not know it.
        **{name: real(said, name) for name in NUMBERS},
    }


def _channels(said: Mapping[str, Any]) -> dict[str, str]:
    """By which the pipeline reads, and the topics of each."""
    given = said.get("channels")
    if isinstance(given, dict) and given:
        return {str(channel): str(topics) for channel, topics in given.items()}
    # A runner from before pipelines had several.
    channel, topics = text(said, "channel"), text(said, "topics")
    return {channel: topics, f"{channel}.dead": topics} if channel else {}


def readers(pipelines: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Topics and channels that a pipeline reads at present. It does so by ranges of the log, and is not among
    the consumers that nsqd counts."""
    found = set()
    for one in pipelines:
        if one.get("state") in ("running", "starting"):
            for channel, topics in one["channels"].items():
                found |= {(topic.strip(), channel) for topic in topics.split(",")}
    return found
