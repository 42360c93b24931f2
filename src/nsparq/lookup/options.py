"""The options of nsqlookupd: flags, TOML keys, help and reference page come from this table.

`python -m nsparq.lookup.options --markdown` (or `--toml`) prints the copies in docs/reference.
"""

import socket
import sys
from dataclasses import dataclass
from typing import Final

from nsparq.option_table import BOOL, DURATION, INT, STRING, STRINGS, CommandFlag, OptionTable, choice, opt


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqlookupdOptions:
    """Durations are in seconds."""

    log_level: str = opt(
        "info",
        "lowest level to log: debug, info, warn, error, fatal",
        choice("debug", "info", "warn", "error", "fatal"),
        heading="Logging",
    )
    log_prefix: str = opt("[nsqlookupd] ", "prefix of every log line", STRING)

    tcp_address: str = opt("0.0.0.0:4160", "`host:port` where nsqds register", STRING, heading="Addresses")
    http_address: str = opt("0.0.0.0:4161", "`host:port` for HTTP clients", STRING)
    broadcast_address: str = opt(
        socket.gethostname,
        "address at which nsqds reach this nsqlookupd over HTTP, to ask for the channels of a new topic",
        STRING,
        default_text="the hostname",
    )

    allowed_host: tuple[str, ...] = opt(
        (),
        "host name under which browsers may use the HTTP API, in addition to IP addresses, names of this "
        "machine and names of private networks. Other names are refused, so that a foreign web page cannot "
        "reach nsqlookupd through DNS rebinding. Other programs may use any name",
        STRINGS,
        file_key="allowed_hosts",
    )

    inactive_producer_timeout: float = opt(
        300.0,
        "time without a command after which an nsqd is no longer listed",
        DURATION,
        heading="Producers",
        bound="positive",
    )
    tombstone_lifetime: float = opt(
        45.0,
        "time for which a tombstone hides an nsqd from lookups of the topic",
        DURATION,
        bound="not negative",
    )
    max_registrations: int = opt(
        100_000, "limit on topics and channels that one nsqd registers", INT, bound="positive"
    )

    def validate(self) -> None:
        """Raise OptionError for an invalid value."""
        TABLE.check_bounds(self)


TABLE: Final = OptionTable(
    "nsqlookupd",
    NsqlookupdOptions,
    (
        CommandFlag(flag="version", kind=BOOL, help="print the version and exit"),
        CommandFlag(flag="config", kind=STRING, help="path of a TOML file with options"),
        CommandFlag(flag="verbose", kind=BOOL, help="no effect, accepted for old scripts; see --log-level"),
    ),
)


if __name__ == "__main__":
    TABLE.print_page(sys.argv[1:])
