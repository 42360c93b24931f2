"""The status of running pipelines for other programs: a file, the same over HTTP, and metrics."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nsparq.addresses import split_address
from nsparq.errors import StartError
from nsparq.fetch import FetchError, fetch
from nsparq.pipeline.durable import write_json
from nsparq.pipeline.execute.progress import Figures
from nsparq.status_server import Answer, StatusServer
from nsparq.version import __version__

FILE_NAME: Final = "status.json"


@dataclass
class Status:
    """The status of one runner and its pipelines."""

    file: str
    pipelines: Sequence[Figures]
    started: float
    address: str = ""
    """`host:port` of the HTTP endpoint. Empty if there is none."""
    ui: str = ""
    """URL of Spark's web pages."""
    is_running: bool = True

    def as_json(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "file": self.file,
            "pid": os.getpid(),
            "is_running": self.is_running,
            "started": self.started,
            "updated": time.time(),
            "address": self.address,
            "ui": self.ui,
            "pipelines": [figures.as_json() for figures in self.pipelines],
        }


def write_status(directory: Path, status: Status) -> None:
    """Raises OSError."""
    write_json(directory / FILE_NAME, status.as_json())


def read_status(directory: Path) -> dict[str, Any] | None:
    """The current status from the runner, or the last one in the file. None without a file."""
    try:
        found: dict[str, Any] = json.loads((directory / FILE_NAME).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    found["is_running"] = bool(found["is_running"] and is_alive(found["pid"]))
    if found["is_running"] and found["address"]:
        try:
            answer = fetch(f"http://{found['address']}/status", connect_timeout=1.0, request_timeout=2.0)
            now = json.loads(answer.body)
            if answer.status == 200 and now.get("pid") == found["pid"]:
                return dict(now)
        except (FetchError, ValueError):
            pass
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# Prometheus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_METRICS: Final = (
    ("up", "gauge", "1 if the pipeline is running", "is_running"),
    ("rows_total", "counter", "messages read", "rows"),
    ("rows_written_total", "counter", "rows written, by sinks that count them", "rows_written"),
    ("rows_per_second", "gauge", "rate of the last micro-batch", "rows_per_second"),
    ("lag_messages", "gauge", "messages published and not yet read", "lag"),
    ("catch_up_seconds", "gauge", "estimate of the time until everything is read", "catch_up_seconds"),
    ("undecodable_total", "counter", "messages that did not decode", "undecodable"),
    ("dead_letters_total", "counter", "messages written to the dead-letter topic", "dead_letters"),
    ("late_total", "counter", "rows, or groups of rows, that came after the watermark", "late"),
    ("batches_total", "counter", "micro-batches with rows", "batches"),
    ("batch_duration_seconds", "gauge", "duration of the last micro-batch with rows", "batch_seconds"),
    ("last_batch_timestamp_seconds", "gauge", "end of that micro-batch, in Unix time", "last_batch"),
    ("failures_total", "counter", "failures of the pipeline", "failures"),
    ("restarts_total", "counter", "restarts of the pipeline", "restarts"),
)
"""Name, type and help of each metric, and the attribute of Figures that it shows."""


def prometheus(pipelines: Sequence[Figures]) -> str:
    lines = []
    for name, kind, help, attribute in _METRICS:
        full = f"nsparq_pipeline_{name}"
        lines += [f"# HELP {full} {help}", f"# TYPE {full} {kind}"]
        for one in pipelines:
            if (number := getattr(one, attribute)) is not None:
                lines.append(f'{full}{{pipeline="{one.name}"}} {number:.10g}')
    return "\n".join(lines) + "\n"


def serve(address: str, status: Status) -> StatusServer:
    """Serves `/metrics`, `/status` and `/ping`. Raises StartError."""
    place = split_address(address)
    if place is None:
        raise StartError(f"metrics_address must be host:port, not {address!r}")

    def answer(path: str) -> Answer:
        if path == "/metrics":
            return Answer(200, CONTENT_TYPE, prometheus(status.pipelines).encode())
        if path == "/status":
            return Answer(200, "application/json", json.dumps(status.as_json()).encode())
        if path == "/ping":
            return Answer(200, "text/plain", b"OK")
        return Answer(404, "application/json", b'{"message":"NOT_FOUND"}')

    try:
        return StatusServer(place, answer)
    except StartError as error:
        raise StartError(f"metrics_address: {error}") from error
