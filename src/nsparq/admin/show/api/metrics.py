"""GET /metrics of nsqadmin: what it sees of the cluster, and how it is itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsparq.admin.health import Severity
from nsparq.admin.show.api.table import Handlers
from nsparq.http.api import Endpoint, Request, Response
from nsparq.http.metrics import Exposition, add_process
from nsparq.version import NSQ_VERSION, __version__

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["Metrics"]


class Metrics(Handlers):
    @Endpoint(
        group="The daemon",
        method="GET",
        path="/metrics",
        summary="The figures for Prometheus.",
        permission="read",
        success="the text exposition format",
        success_type="text/plain",
    )
    def metrics(self, request: Request) -> Response:
        admin, out = self._admin, Exposition()
        labels = f'{{version="{__version__}",nsq_version="{NSQ_VERSION}"}}'
        out.add("nsqadmin_info", "gauge", "version of the daemon", 1, labels)
        _add_cluster(out, admin)
        for severity in Severity:
            count = sum(one.severity is severity for one in admin.problems())
            labels = f'{{severity="{severity.name.lower()}"}}'
            out.add("nsqadmin_problems", "gauge", "problems that need attention", count, labels)
        _add_webhooks(out, admin)
        if admin.history_file is not None:
            saved_s, failures = admin.history_file.saved_s, admin.history_file.failures
            out.add("nsqadmin_history_saved_timestamp_seconds", "gauge", "last save, Unix time", saved_s)
            out.add("nsqadmin_history_save_failures_total", "counter", "saves that failed", failures)
        add_process(out)
        return out.response()


def _add_cluster(out: Exposition, admin: Nsqadmin) -> None:
    watch = admin.watch
    for name, kind, help_text, value in (
        ("nodes", "gauge", "nsqds", len(watch.nodes)),
        ("unreachable_nodes", "gauge", "nsqds without an answer to the last poll", watch.unreachable),
        ("topics", "gauge", "topics", len(watch.channels_of)),
        ("channels", "gauge", "channels", sum(map(len, watch.channels_of.values()))),
        ("polls_total", "counter", "polls of all nsqds", watch.number),
        ("poll_interval_seconds", "gauge", "time from poll to poll", watch.interval_s),
        ("last_poll_timestamp_seconds", "gauge", "last poll, Unix time", watch.polled_s),
        ("history_bytes", "gauge", "memory that the history can take", watch.history_bytes),
    ):
        out.add(f"nsqadmin_{name}", kind, help_text, value)


def _add_webhooks(out: Exposition, admin: Nsqadmin) -> None:
    """Without URLs as labels: they may hold secrets."""
    for name, kind, help_text in (
        ("waiting", "gauge", "events that are not sent yet"),
        ("failing", "gauge", "webhooks whose last attempt failed"),
        ("sent_total", "counter", "events sent"),
        ("failures_total", "counter", "attempts that failed"),
        ("dropped_total", "counter", "events that were given up"),
    ):
        attribute = {"failing": "error"}.get(name, name.removesuffix("_total"))
        values = [getattr(one, attribute) for one in admin.webhooks]
        total = sum(map(bool, values)) if name == "failing" else sum(values)
        out.add(f"nsqadmin_webhook_{name}", kind, help_text, total)
