"""The poll loop for Spark pipelines: asks each runner of --pipeline-http-address for its /status.

The address of a runner is the `metrics_address` of its file. docs/pipelines.md describes the
answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from nsparq.admin.collect.fields import objects, real, text
from nsparq.admin.collect.history import Table, steady_clock
from nsparq.admin.collect.upstream import RequestFailed, Upstream
from nsparq.tasks import cancel_all

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
    "catch_up_seconds",
    "batches",
    "batch_seconds",
    "last_batch",
    "failures",
    "restarts",
)
PIPELINE: Final = ("lag", "rows_per_second", "batch_seconds")
"""The figures in the history."""
HISTORY_BYTES: Final = 4 << 20
"""Enough for 500 pipelines."""


class Pipelines:
    """`found` is the runners' last answer."""

    def __init__(self, upstream: Upstream, addresses: Sequence[str], interval_s: float) -> None:
        self._upstream = upstream
        self.addresses = tuple(addresses)
        self._interval_s = interval_s
        self._clock = steady_clock()
        self.found: list[dict[str, Any]] = []
        """A dict for each pipeline; one with `unreachable` for a runner that does not answer."""
        self.history = Table(PIPELINE, poll_s=interval_s, peaks=PIPELINE, max_bytes=HISTORY_BYTES)
        """Keys are (runner, pipeline)."""
        self.was_asked = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.addresses:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await cancel_all([task])

    async def _run(self) -> None:
        while True:
            try:
                await self.poll()
            except Exception:
                logger.exception("polling the pipelines failed")
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
            status = await self._upstream.get_json(f"http://{address}/status")
        except RequestFailed as error:
            return [{"name": address, "runner": address, "unreachable": str(error)}]
        if not isinstance(status, dict):
            return [{"name": address, "runner": address, "unreachable": "its answer is not a status"}]
        return [_pipeline(one, address, status) for one in objects(status, "pipelines")]


def _pipeline(fields: Mapping[str, Any], address: str, runner: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "topics", "channel", "sink", "state", "error")
    ui = text(runner, "ui")
    return {
        "runner": address,
        "file": text(runner, "file"),
        # Shown as a link: no javascript: and the like.
        "ui": ui if ui.startswith(("http://", "https://")) else "",
        **{name: text(fields, name) for name in names},
        "channels": _channels(fields),
        # None if the runner does not know it.
        **{name: real(fields, name) for name in NUMBERS},
    }


def _channels(fields: Mapping[str, Any]) -> dict[str, str]:
    """The channels that the pipeline reads, and the topics of each."""
    given = fields.get("channels")
    if isinstance(given, dict) and given:
        return {str(channel): str(topics) for channel, topics in given.items()}
    # An older runner reports one channel.
    channel, topics = text(fields, "channel"), text(fields, "topics")
    return {channel: topics, f"{channel}.dead": topics} if channel else {}


def readers(pipelines: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """The (topic, channel) pairs that running pipelines read. Pipelines read the log by ranges, so
    nsqd does not count them as consumers."""
    found = set()
    for one in pipelines:
        if one.get("state") in ("running", "starting"):
            for channel, topics in one["channels"].items():
                found |= {(topic.strip(), channel) for topic in topics.split(",")}
    return found
