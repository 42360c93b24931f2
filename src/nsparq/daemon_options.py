"""Options that all daemons have."""

from __future__ import annotations

from typing import Final

from nsparq.option_table import BOOL, STRING, STRINGS, CommandFlag, choice, opt

__all__ = ["COMMAND_FLAGS", "allowed_host_option", "log_level_option", "log_prefix_option"]

COMMAND_FLAGS: Final = (
    CommandFlag(flag="version", kind=BOOL, help="print the version and exit"),
    CommandFlag(flag="config", kind=STRING, help="path of a TOML file with options"),
    CommandFlag(flag="verbose", kind=BOOL, help="no effect, accepted for old scripts; see --log-level"),
)
LEVELS: Final = ("debug", "info", "warn", "error", "fatal")


def log_level_option() -> str:
    return opt("info", f"lowest level to log: {', '.join(LEVELS)}", choice(*LEVELS), heading="Logging")


def log_prefix_option(program: str) -> str:
    return opt(f"[{program}] ", "prefix of every log line", STRING)


def allowed_host_option(
    program: str, api: str = "the HTTP API", *, has_policy: bool = True
) -> tuple[str, ...]:
    """`has_policy`: whether the daemon has --auth-policy-file."""
    with_policy = ". With `--auth-policy-file` browsers may too" if has_policy else ""
    return opt(
        (),
        f"host name under which browsers may use {api}, in addition to IP addresses, names of this machine "
        "and names of private networks. Other names are refused, so that a foreign web page cannot reach "
        f"{program} through DNS rebinding. Other programs may use any name{with_policy}",
        STRINGS,
        file_key="allowed_hosts",
    )
