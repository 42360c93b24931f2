"""Prometheus' text format, for the /metrics of all daemons.

Written without prometheus-client, because its registry needs ten times as long for each sample. An
nsqd with 10,000 channels has about 100,000 samples, and the same event loop delivers messages. The
tests parse the result with prometheus-client.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from typing import Final

from nsparq.http.api import Response

__all__ = ["CONTENT_TYPE", "Exposition", "add_process", "number"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PAGE: Final = resource.getpagesize()
_START_S: Final = round(time.time(), 3)


class Exposition:
    """Samples, grouped by metric, in the order in which the metrics were added."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def family(self, name: str, kind: str, help_text: str) -> list[str]:
        """The lines of one metric, to which the caller appends its samples."""
        lines = self._families.get(name)
        if lines is None:
            lines = self._families[name] = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        return lines

    def add(self, name: str, kind: str, help_text: str, value: float, labels: str = "") -> None:
        self.family(name, kind, help_text).append(f"{name}{labels} {number(value)}")

    def text(self) -> str:
        return "\n".join("\n".join(lines) for lines in self._families.values()) + "\n"

    def response(self) -> Response:
        return Response(body=self.text().encode(), content_type=CONTENT_TYPE)


def add_process(out: Exposition) -> None:
    """Metrics that every Prometheus client library has."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    out.add("process_cpu_seconds_total", "counter", "CPU time used", round(cpu_s, 6))
    out.add("process_max_fds", "gauge", "limit on open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident = int(statm.read().split()[1]) * _PAGE
        out.add("process_resident_memory_bytes", "gauge", "resident memory", resident)
        out.add("process_open_fds", "gauge", "open files", len(os.listdir("/proc/self/fd")))
    out.add("process_start_time_seconds", "gauge", "start of the process, Unix time", _START_S)


def number(value: float) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "+Inf" if value == math.inf else repr(value)
