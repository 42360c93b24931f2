"""The data of the polls: the overview, the figures behind the charts, the Spark pipelines."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

import numpy as np

from nsparq.admin.collect.history import RANGES, Table
from nsparq.admin.routing import path_values, with_etag
from nsparq.admin.show.api.table import Handlers, look
from nsparq.http.api import JSON_TYPE, ApiError, Endpoint, Param, Request, Response, Result, encode_json

__all__ = ["History"]

GROUP: Final = "Overview and history"


class History(Handlers):
    def endpoints(self) -> list[Endpoint]:
        overview, pipelines = super().endpoints()
        return [overview, *self._history_endpoints(), pipelines]

    @look("/api/overview", "What needs attention, the most urgent first, and the totals.", group=GROUP)
    async def overview(self, request: Request) -> Response:
        watch = self._admin.watch
        await watch.wait_for_first()
        totals = watch.totals.latest(()) or {}
        return _json(
            request,
            {
                "polled": round(watch.polled_s, 3),
                "interval": round(watch.interval_s, 3),
                "topics": len(watch.channels_of),
                "channels": sum(map(len, watch.channels_of.values())),
                "nodes": len(watch.nodes),
                "messages": watch.message_count,
                "totals": {name: _rounded(value) for name, value in totals.items()},
                "problems": [one.as_json() for one in self._admin.problems()],
                "errors": watch.errors,
                "history_bytes": watch.history_bytes,
            },
        )

    @look("/api/pipelines", "Spark pipelines, as their runners report them.", group="Pipelines")
    def pipelines(self, request: Request) -> Result:
        return {"pipelines": self._admin.pipelines.found}

    def _history_endpoints(self) -> list[Endpoint]:
        """One path for each table of history; the names in the path are the key of the series."""
        watch = self._admin.watch
        histories: list[tuple[str, Table, str]] = [
            ("", watch.totals, "Figures of the whole cluster over time."),
            ("/topics/{topic}", watch.topics, "Figures of a topic over time."),
            ("/topics/{topic}/{channel}", watch.channels, "Figures of a channel over time."),
            ("/nodes/{node}", watch.nodes_table, "Figures of a node over time."),
            (
                "/clients/{topic}/{channel}/{node}/{client}",
                watch.clients,
                "Figures of one consumer over time, by its address.",
            ),
            (
                "/pipelines/{runner}/{pipeline}",
                self._admin.pipelines.history,
                "Figures of a pipeline over time, by the address of its runner.",
            ),
        ]
        return [
            Endpoint(
                method="GET",
                path=f"/api/history{path}",
                handler=partial(_points, table),
                summary=summary,
                group=GROUP,
                permission="read",
                params=(
                    Param(
                        name="range",
                        help="`now` (every poll), `hours` (a point a minute), `day` (ten minutes), "
                        "`week` (two hours)",
                        schema={"type": "string", "enum": [*RANGES]},
                    ),
                ),
                success="`times` in Unix seconds, and `values` by figure; null where a figure is unknown. "
                "No times for a series that was never seen or has only just appeared",
                success_type=JSON_TYPE,
                errors=((400, "INVALID_ARG_RANGE"),),
            )
            for path, table, summary in histories
        ]


def _points(table: Table, request: Request) -> Response:
    wanted = request.parameters.get("range", RANGES[0])
    if wanted not in RANGES:
        raise ApiError(400, "INVALID_ARG_RANGE")
    resolution = RANGES.index(wanted)
    key = tuple(path_values(request)) if request.path_value else ()
    points = table.points(key, resolution)
    columns = points.values.astype(np.float64).T
    values = {
        name: [_rounded(value) for value in column.tolist()]
        for name, column in zip(table.figures, columns, strict=True)
    }
    return _json(request, {"step": table.step_s(resolution), "times": points.times, "values": values})


def _json(request: Request, value: Any) -> Response:
    headers = (("Cache-Control", "no-cache"),)
    return with_etag(request, Response(body=encode_json(value), content_type=JSON_TYPE, headers=headers))


def _rounded(value: float) -> float | None:
    """None for an unknown figure."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
