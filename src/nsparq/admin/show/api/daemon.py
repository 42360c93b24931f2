"""nsqadmin itself: /ping, /config, /openapi.json, and graphite for those who still have it."""

from __future__ import annotations

import ipaddress
import logging
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from nsparq.admin.change.actions import audit
from nsparq.admin.collect.upstream import RequestFailed
from nsparq.admin.options import TABLE, network
from nsparq.admin.routing import describe_paths
from nsparq.admin.show.api.table import TEXT, UPSTREAM, Handlers, look, object_of
from nsparq.fetch import without_secrets
from nsparq.http.api import JSON_TYPE, TEXT_TYPE, ApiError, Endpoint, Param, Request, Response, Result
from nsparq.http.config import LOG_LEVELS, parse_addresses, parse_log_level
from nsparq.option_table import DURATION

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["Daemon"]

logger = logging.getLogger(__name__)

GROUP: Final = "The daemon"
MAX_VALUE: Final = 1 << 20
OPTIONS: Final = {option.file_key: option for option in TABLE.options}
HIDDEN: Final = ("auth_secret", "webhook_secret", "webhook_urls")
"""Options that /config does not show."""
URLS: Final = ("graphite_url", "notification_http_endpoint")
"""Options that it shows without user, password and query."""
_CONFIG_ERRORS: Final = ((403, "FORBIDDEN"), (400, "INVALID_REMOTE_ADDR"), (400, "INVALID_OPTION"))


class Daemon(Handlers):
    def __init__(self, admin: Nsqadmin) -> None:
        super().__init__(admin)
        self._graphite = admin.options.graphite_url.rstrip("/")

    def endpoints(self) -> list[Endpoint]:
        found = super().endpoints()
        if self._admin.options.proxy_graphite:
            return found
        return [one for one in found if one.path != "/render"]

    @Endpoint(
        group=GROUP,
        method="GET",
        path="/ping",
        summary="Whether the daemon is there.",
        success="`OK`",
        success_type=TEXT_TYPE,
        success_schema={"type": "string", "const": "OK"},
    )
    def ping(self, request: Request) -> Response:
        return Response(body=b"OK", content_type=TEXT_TYPE, nsq_header=False)

    # Configuration

    @Endpoint(
        group=GROUP,
        method="GET",
        path="/config/{key}",
        summary="The value of an option, by its key in the config file.",
        details="From `--allow-config-from-cidr` only. Durations in nanoseconds.",
        permission="read",
        success="a text as it is, anything else as JSON",
        success_type=JSON_TYPE,
        other_types=(TEXT_TYPE,),
        errors=_CONFIG_ERRORS,
    )
    def get_config(self, request: Request) -> Result:
        self._check_client(request)
        return self._value(request.path_value)

    @Endpoint(
        group=GROUP,
        method="PUT",
        path="/config/{key}",
        summary="Change `nsqlookupd_http_addresses` (a JSON list) or `log_level`, until the next start.",
        permission="admin",
        keeps_body=True,
        body_help="the value",
        too_big="INVALID_VALUE",
        success="the new value",
        success_type=JSON_TYPE,
        errors=(*_CONFIG_ERRORS, (400, "INVALID_VALUE"), (413, "INVALID_VALUE")),
    )
    def put_config(self, request: Request) -> Result:
        self._check_client(request)
        key = request.path_value
        try:
            self._change(key, request.body)
        except ApiError as error:
            audit("put_config", self._actor(request), f"failed - {error.code}", key=key)
            raise
        value = self._value(key)
        audit("put_config", self._actor(request), f"done, it is {value}", key=key)
        return value

    def _check_client(self, request: Request) -> None:
        """Raises ApiError for a client outside --allow-config-from-cidr."""
        allowed = network(self._admin.options.allow_config_from_cidr)
        if allowed is None:
            return
        try:
            address = ipaddress.ip_address(request.peer.partition("%")[0])
        except ValueError:
            raise ApiError(400, "INVALID_REMOTE_ADDR") from None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if address not in allowed:
            raise ApiError(403, "FORBIDDEN")

    def _value(self, key: str) -> Result:
        """The value of an option as NSQ shows it. Raises ApiError."""
        option = OPTIONS.get(key)
        if option is None or key in HIDDEN:
            raise ApiError(400, "INVALID_OPTION")
        value: Any = getattr(self._admin.options, option.attribute)
        if key == "log_level":
            return LOG_LEVELS.index(str(value)) + 1
        if option.kind is DURATION:
            return int(round(value * 1e9))
        if key in URLS:
            return without_secrets(value)
        shown: Result = list(value) if isinstance(value, tuple) else value
        return shown

    def _change(self, key: str, body: bytes) -> None:
        """Raises ApiError."""
        if not 0 < len(body) <= MAX_VALUE:
            raise ApiError(413, "INVALID_VALUE")
        if key == "nsqlookupd_http_addresses":
            self._admin.change_lookupds(parse_addresses(body))
        elif key == "log_level":
            self._admin.change_log_level(parse_log_level(body))
        else:
            raise ApiError(400, "INVALID_OPTION")

    # Graphite

    @look(
        "/api/graphite",
        "The present rate of a metric, from graphite.",
        group=GROUP,
        params=(
            Param(name="metric", help="`rate`", required=True),
            Param(name="target", help="a target of graphite's", required=True),
        ),
        success_schema=object_of(rate=TEXT),
        errors=((400, "INVALID_ARG_METRIC"), (400, "INVALID_ARG_TARGET"), (500, "INTERNAL_ERROR")),
    )
    async def graphite_rate(self, request: Request) -> Result:
        if request.parameters.get("metric") != "rate":
            raise ApiError(400, "INVALID_ARG_METRIC")
        target = request.parameter("target", "INVALID_ARG_TARGET")
        interval = max(1, round(self._admin.options.statsd_interval))
        query = {
            "format": "json",
            "from": f"-{2 * interval}sec",
            "until": f"-{interval}sec",
            "target": target.encode("utf-8", "replace"),
        }
        try:
            if not self._graphite:
                raise RequestFailed("--graphite-url is not set")
            answer = await self._admin.upstream.ask("GET", f"{self._graphite}/render?{urlencode(query)}")
            points = answer.json()[0]["datapoints"]
            value = points[0][0] if points else None
            rate = -1.0 if value is None else float(value) / interval
        except (RequestFailed, LookupError, TypeError, ValueError, OverflowError) as error:
            logger.error("graphite request failed - %s", error)
            raise ApiError(500, "INTERNAL_ERROR") from error
        return {"rate": "N/A" if rate < 0 else f"{rate:.2f}"}

    @look("/openapi.json", "This API as an OpenAPI document.", group=GROUP, success="an OpenAPI 3.1 document")
    def openapi(self, request: Request) -> Result:
        return describe_paths(self._admin.api)

    @look(
        "/render",
        "Forwarded to graphite. Only with `--proxy-graphite`.",
        group=GROUP,
        success="graphite's answer",
        errors=(UPSTREAM,),
    )
    async def render(self, request: Request) -> Response:
        query = f"?{request.query}" if request.query else ""
        try:
            answer = await self._admin.upstream.exchange("GET", f"{self._graphite}/render{query}")
        except RequestFailed as error:
            raise ApiError(502, f"UPSTREAM_ERROR: {error}") from error
        return Response(
            status=answer.status,
            body=answer.body,
            content_type=answer.headers.get("content-type", "application/octet-stream"),
            # Graphite's pages get none of our rights.
            headers=(("Content-Security-Policy", "sandbox"), ("X-Content-Type-Options", "nosniff")),
            nsq_header=False,
        )
