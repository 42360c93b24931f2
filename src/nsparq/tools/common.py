"""What NSQ's tools have in common: flags and help, logging, signals, exit status, and how they consume.

Data goes to standard output, everything else to standard error. Status 0 when the work is done or a signal
has ended it, 1 after a FATAL line, 2 for a wrong command line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

from nsparq import logs
from nsparq.client import ClientError, Config, ConfigError, Consumer
from nsparq.client.connection import checked_addresses
from nsparq.client.lookup import lookup_url
from nsparq.errors import StartError
from nsparq.flags import FlagError, HelpWanted
from nsparq.names import is_valid_name
from nsparq.option_table import (
    BOOL,
    DURATION,
    INT,
    STRINGS,
    CommandFlag,
    CommandLineExit,
    Kind,
    Option,
    OptionError,
    OptionTable,
    format_number,
    opt,
)
from nsparq.version import NSQ_VERSION, __version__, version_line

__all__ = [
    "FLOAT",
    "GRACE_S",
    "SCOPE_VARIABLE",
    "SECRET_VARIABLE",
    "Ending",
    "Timings",
    "ToolTable",
    "check_nsqd",
    "check_sources",
    "check_topics",
    "client_config",
    "connect_timeout_option",
    "consumer_opt_option",
    "lookupd_option",
    "max_in_flight_option",
    "nsqd_option",
    "on_signal",
    "producer_opt_option",
    "request_timeout_option",
    "run_consumers",
    "run_tool",
    "unless_ended",
]

logger = logging.getLogger(__name__)

GRACE_S: Final = 30.0
"""How long messages in flight may take once the tool is to end."""
SECRET_VARIABLE: Final = "NSQ_SECRET"
"""In the environment: what is shown to those that want a secret. Other users of the machine can see flags."""
SCOPE_VARIABLE: Final = "NSQ_SECRET_FOR"
"""In the environment: which nsqds may be shown it, as the client's `auth_secret_for`, separated by commas."""
FAILED_GRACE_S: Final = 1.0
"""The same after a failure: time to give them back."""


# Options


class _Options(Protocol):
    def validate(self) -> None:
        """Raise OptionError for what the tool cannot work with."""


R = TypeVar("R")
T = TypeVar("T", bound=_Options)


class ToolTable(OptionTable[T]):
    """The options of one tool, with what a newcomer wants to know first."""

    def __init__(
        self, program: str, options_class: type[T], *, command: str, about: str, examples: Sequence[str]
    ) -> None:
        """`command` is its name under `nsparq`; `about` says in plain lines what the tool does."""
        version = CommandFlag(flag="version", kind=BOOL, help="print the version and exit")
        super().__init__(program, options_class, (version,))
        self.command, self.about, self.examples = command, about.strip(), tuple(examples)

    def read(self, arguments: Sequence[str]) -> T:
        """The options, not yet validated. Raises CommandLineExit."""
        try:
            commands, values = self.read_flags(arguments)
        except HelpWanted:
            raise CommandLineExit(self.usage(), 0) from None
        except FlagError as error:
            self.refuse(str(error))
        if commands.get("version"):
            raise CommandLineExit(version_line(self.program) + "\n", 0)
        return self._options_class(**values)

    def refuse(self, reason: str) -> NoReturn:
        """The command line makes no sense."""
        text = f"{self.program}: {reason}\n`{self.program} --help` lists the flags\n"
        raise CommandLineExit(text, 2) from None

    def usage(self) -> str:
        lines = [f"Usage: {self.program} FLAGS      (or: nsparq {self.command} FLAGS)", "", self.about, ""]
        lines += ["Examples:", *(f"  {example}" for example in self.examples), "", "Flags:"]
        return "\n".join([*lines, *super().usage().splitlines()[1:]]) + "\n"

    def section(self) -> str:
        """Its part of the reference page. Tools have no configuration file."""
        # What is set off in the help becomes a block of its own.
        about = re.sub("^  ", "    ", self.about, flags=re.MULTILINE)
        lines = [f"## {self.program}", "", about, "", "```sh", *self.examples, "```"]
        lines += ["", f"Also as `nsparq {self.command}`."]
        for option in self.options:
            if option.heading:
                lines += [
                    "",
                    f"**{option.heading}**",
                    "",
                    "| flag | default | meaning |",
                    "| --- | --- | --- |",
                ]
            lines.append(_row(option))
        return "\n".join([*lines, ""])


def _row(option: Option) -> str:
    default = option.default_text or f"`{option.kind.to_toml(option.default)}`"
    if option.default in ("", ()) and not option.default_text:
        default = ""
    meaning = "; ".join((option.help, *option.notes)).replace("|", "\\|")
    return f"| `--{option.flag}` | {default} | {meaning} |"


def _float(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError("parse error") from None


FLOAT: Final[Kind[float]] = Kind(name="float", from_text=_float, from_file=_float, to_toml=format_number)


# A field belongs to one class only: each of these makes a new one.


def nsqd_option(heading: str = "") -> tuple[str, ...]:
    help = "`host:port` of an nsqd to consume from, where nsqlookupd is not in use"
    return opt((), help, STRINGS, heading=heading)


def lookupd_option(
    help: str = "`host:port` of an nsqlookupd, which knows where topics are",
) -> tuple[str, ...]:
    return opt((), help, STRINGS)


def max_in_flight_option() -> int:
    help = "messages that may be under way to this tool at a time, from all nsqds together"
    return opt(200, help, INT, bound="positive")


def consumer_opt_option(more: str = "") -> tuple[str, ...]:
    help = (
        "option of the consumer as `name,value`, such as `tls_v1` (true, when there is no value), "
        "`auth_secret,abc` or `msg_timeout,2m`" + more
    )
    return opt((), help, STRINGS)


def producer_opt_option() -> tuple[str, ...]:
    return opt((), "option of the producer as `name,value`, such as `tls_v1` or `auth_secret,abc`", STRINGS)


def connect_timeout_option() -> float:
    return opt(2.0, "time for an HTTP connection to come about", DURATION, bound="positive")


def request_timeout_option(seconds: float) -> float:
    return opt(seconds, "time for a whole HTTP request", DURATION, bound="positive")


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
            raise OptionError(f"--topic {topic!r} is not a valid topic name")
    if channel == "":
        raise OptionError("--channel is required")
    if channel is not None and not is_valid_name(channel.encode()):
        raise OptionError(f"--channel {channel!r} is not a valid channel name")


def client_config(program: str, options: Iterable[str], **more: Any) -> Config:
    """From the texts of --consumer-opt or --producer-opt, which win over `more` and over the environment.
    Raises ConfigError."""
    agent = f"{program}/{NSQ_VERSION} nsparq/{__version__}"
    secret = os.environ.get(SECRET_VARIABLE, "")
    if scope := os.environ.get(SCOPE_VARIABLE, ""):
        more["auth_secret_for"] = tuple(part.strip() for part in scope.split(","))
    return Config.from_strings(options, user_agent=agent, auth_secret=secret, **more)


# Running


class Ending:
    """When a tool ends and with which status: its work is done, a signal has come, or something failed."""

    def __init__(self) -> None:
        self.status = 0
        self._event = asyncio.Event()

    def end(self) -> None:
        self._event.set()

    def fail(self, text: str, *arguments: object) -> None:
        """There is no way on. Messages that are not finished go to whoever consumes next."""
        if not self.status:
            logger.critical(text, *arguments)
        self.status = 1
        self._event.set()

    @property
    def has_come(self) -> bool:
        return self._event.is_set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Whether it has come within the time."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


Work = Callable[[T, Ending], Coroutine[Any, Any, None]]


def run_tool(table: ToolTable[T], work: Work[T], argv: Sequence[str] | None = None) -> int:
    """The whole of a tool's main; `work` is to return soon after the ending has come."""
    logs.configure("info", f"[{table.program}] ")
    try:
        options = table.read(sys.argv[1:] if argv is None else argv)
        level, prefix = getattr(options, "log_level", "info"), getattr(options, "log_prefix", None)
        logs.configure(level, f"[{table.program}] " if prefix is None else prefix)
        table.check_bounds(options)
        try:
            options.validate()
        except ConfigError as error:
            table.refuse(f"invalid value of --consumer-opt or --producer-opt: {error}")
        return asyncio.run(_run(work, options))
    except CommandLineExit as leave:
        (sys.stderr if leave.status else sys.stdout).write(leave.text)
        return leave.status
    except (StartError, ClientError) as error:
        logger.critical("%s", error)
        return 1
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter must not complain at its end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


async def _run(work: Work[T], options: T) -> int:
    ending = Ending()

    def interrupt() -> None:
        # Somebody at a keyboard who asks twice does not want to wait for what is in flight; nothing is lost.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        ending.end()

    try:
        on_signal(signal.SIGINT, interrupt)
        on_signal(signal.SIGTERM, ending.end)
        await work(options, ending)
    finally:
        # A further signal in the last moments must not change the status.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    return ending.status


def on_signal(signum: signal.Signals, callback: Callable[[], None]) -> None:
    """Have the callback run in the event loop whenever the signal comes."""
    loop = asyncio.get_running_loop()
    signal.signal(signum, lambda *_: loop.call_soon_threadsafe(callback))


async def run_consumers(consumers: Sequence[Consumer], nsqd: Sequence[str], ending: Ending) -> None:
    """Consume until the end has come, then finish what is in flight. An nsqd given by address must be there
    at the start; later it is waited for. Raises ConnectFailed."""
    try:
        await unless_ended(ending, _start(consumers, nsqd))
        await ending.wait()
    finally:
        grace = FAILED_GRACE_S if ending.status else GRACE_S
        await asyncio.gather(*(consumer.stop(grace) for consumer in consumers))


async def unless_ended(ending: Ending, work: Coroutine[Any, Any, R]) -> R | None:
    """What the work gives, or nothing: when the end comes first, the work is cancelled."""
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(ending.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def _start(consumers: Sequence[Consumer], nsqd: Sequence[str]) -> None:
    for consumer in consumers:
        await consumer.start()
    for consumer in consumers:
        for address in nsqd:
            await consumer.connect(address)


class Timings:
    """How long requests take, logged every so many of them."""

    def __init__(self, every: int, what: str) -> None:
        self._every, self._what = every, what
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        if self._every <= 0:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < self._every:
            return
        ordered, self._seconds = sorted(self._seconds), []
        count = len(ordered)
        p50, p95, p99 = (ordered[min(int(share * count), count - 1)] * 1000 for share in (0.5, 0.95, 0.99))
        average = sum(ordered) / count * 1000
        logger.info(
            "%d %s: average %.1f ms, 50 %% within %.1f ms, 95 %% within %.1f ms, 99 %% within %.1f ms",
            count, self._what, average, p50, p95, p99,
        )  # fmt: skip
