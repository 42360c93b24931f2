"""/config: the daemon's options as programs read them, and the two that may change while it runs."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any, Final

from nsparq.admin.options import TABLE, network
from nsparq.http.api import ApiError, Request, Result
from nsparq.http.config import LOG_LEVELS, parse_addresses, parse_log_level
from nsparq.option_table import DURATION

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

MAX_VALUE: Final = 1 << 20
KEYS: Final = {option.file_key: option for option in TABLE.options}
SECRET: Final = ("auth_secret",)
"""Not shown to anybody."""


def check_client(request: Request, cidr: str) -> None:
    """Raise ApiError for one that may not see the configuration."""
    allowed = network(cidr)
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


def get_config(admin: Nsqadmin, key: str) -> Result:
    """The value of an option as NSQ shows it. Raises ApiError."""
    option = KEYS.get(key)
    if option is None or key in SECRET:
        raise ApiError(400, "INVALID_OPTION")
    value: Any = getattr(admin.options, option.attribute)
    if key == "log_level":
        return LOG_LEVELS.index(str(value)) + 1
    if option.kind is DURATION:
        return int(round(value * 1e9))
    shown: Result = list(value) if isinstance(value, tuple) else value
    return shown


def put_config(admin: Nsqadmin, key: str, body: bytes) -> Result:
    """Change an option of the running daemon; it is not kept over a restart. Raises ApiError."""
    if not 0 < len(body) <= MAX_VALUE:
        raise ApiError(413, "INVALID_VALUE")
    if key == "nsqlookupd_http_addresses":
        admin.change_lookupds(parse_addresses(body))
    elif key == "log_level":
        admin.change_log_level(parse_log_level(body))
    else:
        raise ApiError(400, "INVALID_OPTION")
    return get_config(admin, key)
