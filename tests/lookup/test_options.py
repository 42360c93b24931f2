"""The options of nsqlookupd: NSQ's flags, keys and defaults, and invalid values."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from nsparq.lookup.options import TABLE, NsqlookupdOptions
from nsparq.option_table import OptionError

# Every flag of NSQ's nsqlookupd: file key and default, as NSQ documents them.
NSQ_OPTIONS: dict[str, tuple[str, Any]] = {
    "log-level": ("log_level", "info"),
    "log-prefix": ("log_prefix", "[nsqlookupd] "),
    "tcp-address": ("tcp_address", "0.0.0.0:4160"),
    "http-address": ("http_address", "0.0.0.0:4161"),
    "broadcast-address": ("broadcast_address", socket.gethostname()),
    "inactive-producer-timeout": ("inactive_producer_timeout", 300.0),
    "tombstone-lifetime": ("tombstone_lifetime", 45.0),
}
OURS = {"allowed-host", "max-registrations"}


def test_every_flag_of_nsq_is_there_with_its_file_key_and_default() -> None:
    found = {option.flag: (option.file_key, option.default) for option in TABLE.options}
    assert {flag: found[flag] for flag in found if flag not in OURS} == NSQ_OPTIONS
    assert {flag.flag for flag in TABLE.command_flags} == {"version", "config", "verbose"}


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = tmp_path / "nsqlookupd.toml"
    path.write_text('inactive_producer_timeout = "1m"\ntombstone_lifetime = 5000\n')
    options, warnings = TABLE.read_command_line(["-config", str(path), "-tombstone-lifetime=7s", "-verbose"])
    assert warnings == []
    assert (options.inactive_producer_timeout, options.tombstone_lifetime) == (60.0, 7.0)
    assert options.tcp_address == "0.0.0.0:4160"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"inactive_producer_timeout": 0.0}, "--inactive-producer-timeout must be positive"),
        ({"tombstone_lifetime": -1.0}, "--tombstone-lifetime must not be negative"),
        ({"max_registrations": 0}, "--max-registrations must be positive"),
    ],
)
def test_an_invalid_value_is_refused_with_the_name_of_its_flag(values: dict[str, Any], text: str) -> None:
    NsqlookupdOptions().validate()
    with pytest.raises(OptionError, match=f"^{text}$"):
        NsqlookupdOptions(**values).validate()
