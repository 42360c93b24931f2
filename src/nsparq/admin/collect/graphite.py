"""Graphite, for those who have it: the rate of a metric, its pictures passed on. Our charts need none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from nsparq.admin.collect.upstream import AskFailed
from nsparq.http.api import ApiError, Request, Response, Result

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["Graphite"]

logger = logging.getLogger(__name__)


class Graphite:
    def __init__(self, admin: Nsqadmin) -> None:
        self._upstream = admin.upstream
        self._url = admin.options.graphite_url.rstrip("/")
        self._interval_s = max(1, round(admin.options.statsd_interval))

    async def rate(self, request: Request) -> Result:
        if request.parameters.get("metric") != "rate":
            raise ApiError(400, "INVALID_ARG_METRIC")
        target = request.parameter("target", "INVALID_ARG_TARGET")
        interval = self._interval_s
        query = {
            "format": "json",
            "from": f"-{2 * interval}sec",
            "until": f"-{interval}sec",
            "target": target.encode("utf-8", "replace"),
        }
        try:
            if not self._url:
                raise AskFailed("there is no --graphite-url")
            answer = await self._upstream.ask("GET", f"{self._url}/render?{urlencode(query)}")
            points = answer.json()[0]["datapoints"]
            value = points[0][0] if points else None
            rate = -1.0 if value is None else float(value) / interval
        except (AskFailed, LookupError, TypeError, ValueError) as error:
            logger.error("graphite request failed - %s", error)
            raise ApiError(500, "INTERNAL_ERROR") from error
        return {"rate": "N/A" if rate < 0 else f"{rate:.2f}"}

    async def render(self, request: Request) -> Response:
        query = f"?{request.query}" if request.query else ""
        try:
            answer = await self._upstream.exchange("GET", f"{self._url}/render{query}")
        except AskFailed as error:
            logger.error("%s", error)
            raise ApiError(502, f"UPSTREAM_ERROR: {error}") from error
        return Response(
            status=answer.status,
            body=answer.body,
            content_type=answer.headers.get("content-type", "application/octet-stream"),
            # Whatever graphite serves, it is no page of ours.
            headers=(("Content-Security-Policy", "sandbox"), ("X-Content-Type-Options", "nosniff")),
            nsq_header=False,
        )
