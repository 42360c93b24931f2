"""Options of NSQ's tools: flags, help, reference page, and what several tools share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Protocol, TypeVar

from nsparq.client import Config, Consumer
from nsparq.client.connect.connection import checked_addresses
from nsparq.client.connect.lookup import lookup_url
from nsparq.names import VALID_NAME, is_valid_name
from nsparq.option_table import (
    BOOL,
    DURATION,
    INT,
    STRINGS,
    CommandFlag,
    Option,
    OptionError,
    OptionTable,
    opt,
)
from nsparq.version import NSQ_VERSION, __version__

__all__ = [
    "SCOPE_VARIABLE",
    "SECRET_VARIABLE",
    "SourceOptions",
    "ToolTable",
    "check_nsqd",
    "check_sources",
    "check_topics",
    "client_config",
    "connect_timeout_option",
    "lookupd_option",
    "producer_opt_option",
    "request_timeout_option",
    "table_row",
]

SECRET_VARIABLE: Final = "NSQ_SECRET"
"""Environment variable with the auth secret: other users can see flags."""
SCOPE_VARIABLE: Final = "NSQ_SECRET_FOR"
"""Environment variable: which nsqds may get the secret (`auth_secret_for`), separated by commas."""


class _Options(Protocol):
    def validate(self) -> None:
        """Raise OptionError for values that the tool cannot work with."""


T = TypeVar("T", bound=_Options)


class ToolTable(OptionTable[T]):
    """The options of one tool, with a description and examples for its help."""

    def __init__(
        self, program: str, options_class: type[T], *, command: str, about: str, examples: Sequence[str]
    ) -> None:
        """`command` is the name of the tool under `nsparq`."""
        version = CommandFlag(flag="version", kind=BOOL, help="print the version and exit")
        super().__init__(program, options_class, (version,))
        # The options that tools share are inherited, and so come first in the class. Show them
        # last.
        base = options_class.__mro__[-2]  # below `object`
        shared = len(fields(base))
        self.options = (*self.options[shared:], *self.options[:shared])
        self.command, self.about, self.examples = command, about.strip(), tuple(examples)

    def read(self, arguments: Sequence[str]) -> T:
        """The options, not yet validated. Raises CommandLineExit."""
        return self._options_class(**self.read_flags_or_exit(arguments)[1])

    def check(self, options: T) -> None:
        """Raises OptionError or ConfigError."""
        self.check_bounds(options)
        options.validate()

    def usage(self) -> str:
        lines = [f"Usage: {self.program} FLAGS      (or: nsparq {self.command} FLAGS)", "", self.about, ""]
        lines += ["Examples:", *(f"  {example}" for example in self.examples), "", "Flags:"]
        return "\n".join([*lines, *super().usage().splitlines()[1:]]) + "\n"

    def section(self) -> str:
        """The section of the reference page, without file keys: tools have no file."""
        lines = [f"## {self.program}", "", self.about_block, "", "```sh", *self.examples, "```"]
        lines += ["", f"Also as `nsparq {self.command}`."]
        for option in self.options:
            if option.heading:
                head = ["| flag | default | meaning |", "| --- | --- | --- |"]
                lines += ["", f"**{option.heading}**", "", *head]
            lines.append(table_row(option))
        return "\n".join([*lines, ""])

    @property
    def about_block(self) -> str:
        """The description for Markdown: its indented lines become a block."""
        return re.sub("^  ", "    ", self.about, flags=re.MULTILINE)


def table_row(option: Option) -> str:
    default = option.default_text or f"`{option.kind.to_toml(option.default)}`"
    if option.default in ("", ()) and not option.default_text:
        default = ""
    meaning = "; ".join((option.help, *option.notes)).replace("|", "\\|")
    return f"| `--{option.flag}` | {default} | {meaning} |"


def lookupd_option(help: str = "`host:port` of an nsqlookupd, which finds the nsqds") -> tuple[str, ...]:
    return opt((), help, STRINGS)


def producer_opt_option() -> tuple[str, ...]:
    return opt((), "option of the producer as `name,value`, such as `tls_v1` or `auth_secret,abc`", STRINGS)


def connect_timeout_option() -> float:
    return opt(2.0, "time limit for an HTTP connection", DURATION, bound="positive")


def request_timeout_option(seconds: float) -> float:
    return opt(seconds, "time limit for a whole HTTP request", DURATION, bound="positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Where a tool that consumes gets its messages from."""

    nsqd_tcp_address: tuple[str, ...] = opt(
        (), "`host:port` of an nsqd to consume from, instead of nsqlookupd", STRINGS, heading="Source"
    )
    lookupd_http_address: tuple[str, ...] = lookupd_option()
    max_in_flight: int = opt(
        200, "messages in flight to this tool at a time, from all nsqds together", INT, bound="positive"
    )
    consumer_opt: tuple[str, ...] = opt(
        (),
        "option of the consumer as `name,value`, such as `tls_v1` (`true` if there is no value), "
        "`auth_secret,abc` or `msg_timeout,2m`",
        STRINGS,
    )

    program: ClassVar[str]
    max_attempts: ClassVar[int] = 5
    """Attempts before a message is given up, unless --consumer-opt says otherwise; 0: never."""

    def validate(self) -> None:
        check_sources(self.nsqd_tcp_address, self.lookupd_http_address)
        self.consumer_config()

    def consumer_config(self) -> Config:
        return client_config(self.program, self.consumer_opt, max_attempts=self.max_attempts)

    def consumer(
        self, topic: str, channel: str, handler: Callable[..., Any] | None = None, **options: Any
    ) -> Consumer:
        """A consumer of one topic. run_consumers() connects it to `nsqd_tcp_address`."""
        options.setdefault("max_in_flight", self.max_in_flight)
        config, lookupd = self.consumer_config(), self.lookupd_http_address
        return Consumer(topic, channel, handler, nsqlookupd=lookupd, config=config, **options)


def check_sources(nsqd: Sequence[str], lookupd: Sequence[str], nsqd_flag: str = "nsqd-tcp-address") -> None:
    if not nsqd and not lookupd:
        raise OptionError(f"--{nsqd_flag} or --lookupd-http-address required")
    if nsqd and lookupd:
        raise OptionError(f"use --{nsqd_flag} or --lookupd-http-address not both")
    check_nsqd(nsqd_flag, nsqd)
    try:
        for address in lookupd:
            lookup_url(address, "/lookup")
    except ValueError as error:
        raise OptionError(f"--lookupd-http-address {error}") from None


def check_nsqd(flag: str, addresses: Sequence[str]) -> None:
    try:
        checked_addresses(addresses)
    except ValueError as error:
        raise OptionError(f"--{flag} {error}") from None


def check_topics(topics: Iterable[str], channel: str | None = None) -> None:
    for topic in topics:
        if not is_valid_name(topic.encode()):
            raise OptionError(f"--topic {topic!r} is not a valid topic name: {VALID_NAME}")
    if channel == "":
        raise OptionError("--channel is required")
    if channel is not None and not is_valid_name(channel.encode()):
        raise OptionError(f"--channel {channel!r} is not a valid channel name: {VALID_NAME}")


def client_config(program: str, options: Iterable[str], **more: Any) -> Config:
    """A client's Config from the values of --consumer-opt or --producer-opt, which override `more`
    and the environment. Raises ConfigError."""
    agent = f"{program}/{NSQ_VERSION} nsparq/{__version__}"
    secret = os.environ.get(SECRET_VARIABLE, "")
    if scope := os.environ.get(SCOPE_VARIABLE, ""):
        more["auth_secret_for"] = tuple(part.strip() for part in scope.split(","))
    return Config.from_strings(options, user_agent=agent, auth_secret=secret, **more)
