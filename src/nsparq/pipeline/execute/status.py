"""What others may know about running pipelines: a status file, an HTTP endpoint with the same, and Prometheus
metrics."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from nsparq.addresses import join_address, split_address
from nsparq.errors import StartError
from nsparq.fetch import FetchError, fetch
from nsparq.pipeline.execute.memory import write_json
from nsparq.pipeline.execute.progress import Figures, State
from nsparq.version import __version__

__all__ = ["FILE_NAME", "Endpoint", "Status", "is_alive", "prometheus", "read_status", "write_status"]

FILE_NAME: Final = "status.json"


@dataclass
class Status:
    """One runner and its pipelines."""

    file: str
    pipelines: Sequence[Figures]
    started: float
    address: str = ""
    """`host:port` of the endpoint, if there is one."""
    ui: str = ""
    """Spark's own pages."""
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
    """What the runner says now, or what it said last. None if there never was one."""
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

_METRICS: Final[tuple[tuple[str, str, str, Callable[[Figures], float | int | None]], ...]] = (
    ("up", "gauge", "whether the pipeline runs", lambda one: int(one.state is State.RUNNING)),
    ("rows_total", "counter", "messages read", lambda one: one.rows),
    ("rows_written_total", "counter", "rows written, by sinks that count them", lambda one: one.rows_written),
    ("rows_per_second", "gauge", "of the last micro-batch", lambda one: one.rows_per_second),
    ("lag_messages", "gauge", "messages published and not yet read", lambda one: one.lag),
    ("undecodable_total", "counter", "messages that did not decode", lambda one: one.undecodable),
    (
        "dead_letters_total",
        "counter",
        "messages written to the dead-letter topic",
        lambda one: one.dead_letters,
    ),
    ("late_total", "counter", "rows, or groups of them, behind the watermark", lambda one: one.late),
    ("batches_total", "counter", "micro-batches with rows", lambda one: one.batches),
    ("batch_duration_seconds", "gauge", "of the last micro-batch with rows", lambda one: one.batch_seconds),
    ("last_batch_timestamp_seconds", "gauge", "when that ended, in Unix time", lambda one: one.last_batch),
    ("failures_total", "counter", "times that the pipeline has failed", lambda one: one.failures),
    ("restarts_total", "counter", "times that it was started again", lambda one: one.restarts),
)


def prometheus(pipelines: Sequence[Figures]) -> str:
    lines = []
    for name, kind, help, value in _METRICS:
        full = f"nsparq_pipeline_{name}"
        lines += [f"# HELP {full} {help}", f"# TYPE {full} {kind}"]
        for one in pipelines:
            number = value(one)
            if number is not None:
                lines.append(f'{full}{{pipeline="{one.name}"}} {number:.10g}')
    return "\n".join(lines) + "\n"


class Endpoint:
    """`/metrics`, `/status` and `/ping` on an address of their own, each answered by a thread."""

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
