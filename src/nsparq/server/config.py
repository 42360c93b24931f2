"""/config: the daemon's options as programs read them, and the two that may change while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from nsparq.http.api import ApiError, Result
from nsparq.http.config import LOG_LEVELS, parse_addresses, parse_log_level
from nsparq.option_table import DURATION
from nsparq.options import TABLE, TlsRequired
from nsparq.server.statsd import expand_prefix

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

_TLS_REQUIRED: Final = {TlsRequired.NO: 0, TlsRequired.EXCEPT_HTTP: 1, TlsRequired.YES: 2}
_TLS_VERSIONS: Final = {"tls1.0": 769, "tls1.1": 770, "tls1.2": 771, "tls1.3": 772}

KEYS: Final = {option.file_key: option for option in TABLE.options}
CHANGEABLE: Final = ("nsqlookupd_tcp_addresses", "log_level")


def get_config(nsqd: Nsqd, key: str) -> Result:
    """The value of an option as NSQ shows it. Raises ApiError."""
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
    shown: Result = list(value) if isinstance(value, tuple) else value
    return shown


def put_config(nsqd: Nsqd, key: str, body: bytes) -> Result:
    """Change an option of the running daemon; it is not kept over a restart. Raises ApiError."""
    if not 0 < len(body) <= nsqd.options.max_msg_size:
        raise ApiError(413, "INVALID_VALUE")
    if key == "nsqlookupd_tcp_addresses":
        nsqd.change_lookupds(parse_addresses(body))
    elif key == "log_level":
        nsqd.change_log_level(parse_log_level(body))
    else:
        raise ApiError(400, "INVALID_OPTION")
    return get_config(nsqd, key)
