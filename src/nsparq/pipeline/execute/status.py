"""The status of running pipelines for other programs: a file, the same over HTTP, and metrics."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from nsparq.addresses import join_address, split_address
from nsparq.errors import StartError
from nsparq.fetch import FetchError, fetch
from nsparq.pipeline.durable import write_json
from nsparq.pipeline.execute.progress import Figures
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


class Endpoint:
    """Serves `/metrics`, `/status` and `/ping`, each request in its own thread."""

    def __init__(self, address: str, status: Status) -> None:
        """Raises StartError."""
        place = split_address(address)
        if place is None:
            raise StartError(f"metrics_address must be host:port, not {address!r}")

        class Handler(BaseHTTPRequestHandler):
            server_version = f"nsparq/{__version__}"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(
                        200, "text/plain; version=0.0.4; charset=utf-8", prometheus(status.pipelines)
                    )
                elif path == "/status":
                    self._answer(200, "application/json", json.dumps(status.as_json()))
                elif path == "/ping":
                    self._answer(200, "text/plain", "OK")
                else:
                    self._answer(404, "application/json", '{"message":"NOT_FOUND"}')

            def _answer(self, code: int, content_type: str, text: str) -> None:
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        try:
            self._server = _Server(place, Handler)
        except OSError as error:
            raise StartError(f"metrics_address: cannot listen on {address}: {error.strerror}") from error
        found = self._server.server_address
        self.address = join_address(str(found[0]), int(found[1]))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
