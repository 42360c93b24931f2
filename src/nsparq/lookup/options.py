"""The options of nsqlookupd: flags, TOML keys, help and reference page come from this table.

`python -m nsparq.lookup.options --markdown` (or `--toml`) prints the copies in docs/reference.
"""

import socket
import sys
from dataclasses import dataclass
from typing import Final

from nsparq.daemon_options import COMMAND_FLAGS, allowed_host_option, log_level_option, log_prefix_option
from nsparq.option_table import DURATION, INT, STRING, OptionTable, opt


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqlookupdOptions:
    """Durations are in seconds."""

    log_level: str = log_level_option()
    log_prefix: str = log_prefix_option("nsqlookupd")

    tcp_address: str = opt("0.0.0.0:4160", "`host:port` where nsqds register", STRING, heading="Addresses")
    http_address: str = opt("0.0.0.0:4161", "`host:port` for HTTP clients", STRING)
    broadcast_address: str = opt(
        socket.gethostname,
        "address at which nsqds reach this nsqlookupd over HTTP, to ask for the channels of a new topic",
        STRING,
        default_text="the hostname",
    )

    allowed_host: tuple[str, ...] = allowed_host_option("nsqlookupd", has_policy=False)

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
    COMMAND_FLAGS,
)


if __name__ == "__main__":
    TABLE.print_page(sys.argv[1:])
