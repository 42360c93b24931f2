"""/config/{key}: read the daemon's options, and change two of them while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from nsparq.fetch import without_secrets
from nsparq.http.api import JSON_TYPE, TEXT_TYPE, ApiError, Endpoint, Request, Result
from nsparq.http.config import LOG_LEVELS, parse_addresses, parse_log_level
from nsparq.option_table import DURATION
from nsparq.options import TABLE, TlsRequired
from nsparq.server.api.parameters import TEXT
from nsparq.server.statsd import expand_prefix

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

_TLS_REQUIRED: Final = {TlsRequired.NO: 0, TlsRequired.EXCEPT_HTTP: 1, TlsRequired.YES: 2}
_TLS_VERSIONS: Final = {"tls1.0": 769, "tls1.1": 770, "tls1.2": 771, "tls1.3": 772}

KEYS: Final = {option.file_key: option for option in TABLE.options}
URLS: Final = ("auth_http_addresses", "replication_coordinator")
"""Options that are shown without user, password and query."""
CHANGEABLE: Final = ("nsqlookupd_tcp_addresses", "log_level")


class ConfigApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd

    @Endpoint(
        method="GET",
        path="/config/{key}",
        path_schema={"type": "string", "enum": sorted(KEYS)},
        summary="Get the value of an option by its key in the configuration file.",
        details="A text is sent as it is, any other value as JSON. Durations are in nanoseconds. Addresses "
        "of auth servers and of the coordinator come without user, password and query.",
        permission="admin",
        success="the value; nothing for an empty text",
        success_type=JSON_TYPE,
        other_types=(TEXT_TYPE,),
        errors=((400, "INVALID_OPTION"),),
    )
    def read(self, request: Request) -> Result:
        nsqd, key = self._nsqd, request.path_value
        option = KEYS.get(key)
        if option is None:
            raise ApiError(400, "INVALID_OPTION")
        value: Any = getattr(nsqd.options, option.attribute)
        match key:
            case "log_level":
                return LOG_LEVELS.index(str(value)) + 1
            case "tls_required":
                return _TLS_REQUIRED[value]
            case "tls_min_version":
                return _TLS_VERSIONS[str(value)]
            case "broadcast_tcp_port":
                return nsqd.broadcast_tcp_port
            case "broadcast_http_port":
                return nsqd.broadcast_http_port
            case "statsd_prefix":
                return expand_prefix(value, nsqd.options.broadcast_address, nsqd.broadcast_http_port)
        if option.kind is DURATION:
            return int(round(value * 1e9))
        if key in URLS:
            return without_secrets(value) if isinstance(value, str) else [*map(without_secrets, value)]
        shown: Result = list(value) if isinstance(value, tuple) else value
        return shown

    @Endpoint(
        method="PUT",
        path="/config/{key}",
        path_schema={"type": "string", "enum": sorted(CHANGEABLE)},
        summary="Change `nsqlookupd_tcp_addresses` (a JSON list) or `log_level` (a bare word).",
        details="The change takes effect at once, and lasts until the daemon stops.",
        permission="admin",
        body_help="the new value",
        body_type="text/plain",
        body_schema=TEXT | {"minLength": 1},
        max_body_of=lambda api: api._nsqd.options.max_msg_size,
        too_big="INVALID_VALUE",
        success="the value",
        success_type=JSON_TYPE,
        errors=((400, "INVALID_OPTION"), (400, "INVALID_VALUE"), (413, "INVALID_VALUE")),
    )
    def change(self, request: Request) -> Result:
        nsqd, key, body = self._nsqd, request.path_value, request.body
        if not 0 < len(body) <= nsqd.options.max_msg_size:
            raise ApiError(413, "INVALID_VALUE")
        if key == "nsqlookupd_tcp_addresses":
            nsqd.change_lookupds(parse_addresses(body))
        elif key == "log_level":
            nsqd.change_log_level(parse_log_level(body))
        else:
            raise ApiError(400, "INVALID_OPTION")
        return self.read(request)
