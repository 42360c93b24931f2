"""The options of nsqlookupd: the one table behind its flags, its TOML file, its help and its reference page.

`python -m nsparq.lookup.options --markdown` (or `--toml`) prints the checked-in copies under docs/reference.
"""

import socket
import sys
from dataclasses import dataclass
from typing import Final

from nsparq.option_table import BOOL, DURATION, INT, STRING, STRINGS, CommandFlag, OptionTable, choice, opt

__all__ = ["TABLE", "NsqlookupdOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqlookupdOptions:
    """What an operator can set. Durations are in seconds."""

    log_level: str = opt(
        "info",
        "least severe level that is logged: debug, info, warn, error, fatal",
        choice("debug", "info", "warn", "error", "fatal"),
        heading="Logging",
    )
    log_prefix: str = opt("[nsqlookupd] ", "start of every log line", STRING)

    tcp_address: str = opt("0.0.0.0:4160", "`host:port` that nsqds register at", STRING, heading="Addresses")
    http_address: str = opt("0.0.0.0:4161", "`host:port` for HTTP clients", STRING)
    broadcast_address: str = opt(
        socket.gethostname,
        "address told to nsqds, which ask there over HTTP for the channels of a new topic",
        STRING,
        default_text="the hostname",
    )

    allowed_host: tuple[str, ...] = opt(
        (),
        "host name under which browsers may use the HTTP API, besides IP addresses, our own names, and names "
        "that only a private network has. Others are refused, so that no foreign page can reach us through a "
        "name of its own; programs may use any",
        STRINGS,
        file_key="allowed_hosts",
    )

    inactive_producer_timeout: float = opt(
        300.0,
        "time since the last sign of life of an nsqd after which it is not listed",
        DURATION,
        heading="Producers",
        bound="positive",
    )
    tombstone_lifetime: float = opt(
        45.0,
        "time that a tombstoned nsqd stays hidden from lookups of that topic",
        DURATION,
        bound="not negative",
    )
    max_registrations: int = opt(
        100_000, "topics and channels that one nsqd may register", INT, bound="positive"
    )

    def validate(self) -> None:
        """Raise OptionError for a value that nsqlookupd cannot start with."""
        TABLE.check_bounds(self)


TABLE: Final = OptionTable(
    "nsqlookupd",
    NsqlookupdOptions,
    (
        CommandFlag(flag="version", kind=BOOL, help="print the version and exit"),
        CommandFlag(flag="config", kind=STRING, help="path of a TOML file with options"),
        CommandFlag(flag="verbose", kind=BOOL, help="accepted for old scripts, no effect; see --log-level"),
    ),
)


if __name__ == "__main__":
    TABLE.print_page(sys.argv[1:])
