"""`nsq_stat`: prints the figures of a channel every few seconds."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from nsparq.option_table import DURATION, INT, STRING, STRINGS, OptionError, opt
from nsparq.tools.cluster import AskFailed, ChannelFigures, Cluster
from nsparq.tools.options import (
    ToolTable,
    check_sources,
    check_topics,
    client_config,
    connect_timeout_option,
    lookupd_option,
    request_timeout_option,
)
from nsparq.tools.run import Ending, on_signal, run_tool, unless_ended

__all__ = ["TABLE", "NsqStatOptions", "main"]

PROGRAM: Final = "nsq_stat"
HEADER_EVERY: Final = 25
"""Lines between two headers."""

GROUPS: Final = (
    ("rate", (("ingress", 7), ("egress", 7))),
    ("depth", (("total", 7), ("mem", 7), ("disk", 7), ("inflt", 5), ("def", 5))),
    ("metadata", (("req", 7), ("t-o", 7), ("msgs", 12), ("clients", 7))),
    ("lag", (("age", 6), ("drain", 6))),
)
"""Columns and their widths, as in NSQ, and the lag after them."""
Figure = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqStatOptions:
    topic: str = opt("", "topic of the channel", STRING, heading="What to watch")
    channel: str = opt("", "channel to watch", STRING)
    interval: float = opt(2.0, "time between two lines", DURATION)
    count: int | None = opt(None, "end after this many lines", INT, default_text="never")  # type: ignore[arg-type]  # never from a file

    nsqd_http_address: tuple[str, ...] = opt(
        (), "`host:port` of an nsqd's HTTP API", STRINGS, heading="Where to ask"
    )
    lookupd_http_address: tuple[str, ...] = lookupd_option(
        "`host:port` of an nsqlookupd, to ask all nsqds of the topic"
    )
    http_client_connect_timeout: float = connect_timeout_option()
    http_client_request_timeout: float = request_timeout_option(5.0)

    def validate(self) -> None:
        if not self.topic or not self.channel:
            raise OptionError("--topic and --channel are required")
        check_topics([self.topic], self.channel)
        if self.interval <= 0:
            raise OptionError("--interval should be positive")
        if self.count is not None and self.count <= 0:
            raise OptionError("--count should be positive")
        for flag, addresses in (
            ("nsqd-http-address", self.nsqd_http_address),
            ("lookupd-http-address", self.lookupd_http_address),
        ):
            if any("://" in address for address in addresses):
                raise OptionError(f"--{flag} is host:port, without http://")
        check_sources(self.nsqd_http_address, self.lookupd_http_address, "nsqd-http-address")


TABLE: Final = ToolTable(
    PROGRAM,
    NsqStatOptions,
    command="stat",
    about="""
Prints the figures of a channel, summed over all nsqds, every two seconds until it is interrupted.

  ingress, egress    messages per second that arrived, and that consumers finished
  total, mem, disk   messages that wait: all, in memory, on disk
  inflt, def         messages in flight, and deferred
  req, t-o           messages requeued and timed out so far
  msgs, clients      messages so far, and consumers connected now
  age, drain         age of the oldest waiting message, and the time until nothing waits at the rate
                     of the last minutes; "never" if the depth does not fall, "-" if unknown
""",
    examples=(
        "nsq_stat --topic=orders --channel=archive --nsqd-http-address=127.0.0.1:4151",
        "nsq_stat --topic=orders --channel=archive --lookupd-http-address=127.0.0.1:4161 --interval=10s",
        "nsq_stat --topic=orders --channel=archive --count=1 --nsqd-http-address=127.0.0.1:4151",
    ),
)


def header() -> str:
    """Two lines: the names of the groups, and those of the columns."""
    names = [" ".join(f"{name:>{width}}" for name, width in columns) for _, columns in GROUPS]
    bars = []
    for place, ((group, _), text) in enumerate(zip(GROUPS, names, strict=True)):
        # Columns are joined by " | ", so a group is one wider on each inner side.
        width = len(text) + (place > 0) + (place < len(GROUPS) - 1)
        bars.append(f"{group:-^{width}}")
    return "+".join(bars) + "\n" + " | ".join(names)


def row(before: ChannelFigures, now: ChannelFigures, interval: float) -> list[list[Figure]]:
    """The figures of one line, by group. Rates are rounded down."""
    arrived = now.message_count - before.message_count
    finished = arrived - (now.depth - before.depth)
    return [
        [int(arrived / interval), int(finished / interval)],
        [now.depth, now.memory_depth, now.backend_depth, now.in_flight_count, now.deferred_count],
        [now.requeue_count, now.timeout_count, now.message_count, now.client_count],
        [short(now.age_s), short(now.drain_s)],
    ]


def short(seconds: float | None) -> str:
    """A duration in at most five characters: 0s, 45s, 12m, 3.5h, 20d."""
    if seconds is None:
        return "-"
    if seconds == math.inf:
        return "never"
    for unit, length in (("d", 86400), ("h", 3600)):
        if seconds >= length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f}{unit}"
    return f"{seconds / 60:.0f}m" if seconds >= 100 else f"{seconds:.0f}s"


def format_row(figures: Sequence[Sequence[Figure]]) -> str:
    return " | ".join(
        " ".join(f"{figure:>{width}}" for figure, (_, width) in zip(group, columns, strict=True))
        for group, (_, columns) in zip(figures, GROUPS, strict=True)
    )


class PlainView:
    """For files and pipes, and for terminals if rich is not installed."""

    def show_header(self) -> None:
        sys.stdout.write(header() + "\n")
        sys.stdout.flush()

    def show(self, figures: Sequence[Sequence[Figure]]) -> None:
        sys.stdout.write(format_row(figures) + "\n")
        sys.stdout.flush()


class TerminalView(PlainView):
    """The same text in colour: zeros are dimmed, growing figures that matter are yellow."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.text import Text

        self._console = Console(highlight=False)
        self._text: Callable[..., Text] = Text
        self._before: Sequence[Sequence[Figure]] | None = None

    def show_header(self) -> None:
        bars, names = header().split("\n")
        self._console.print(self._text(bars, "dim"), self._text(names, "bold"), sep="\n", soft_wrap=True)

    def show(self, figures: Sequence[Sequence[Figure]]) -> None:
        line = self._text()
        for place, (group, (_, columns)) in enumerate(zip(figures, GROUPS, strict=True)):
            line.append(" | " if place else "", "dim")
            for column, (figure, (name, width)) in enumerate(zip(group, columns, strict=True)):
                before = self._before[place][column] if self._before is not None else figure
                has_grown = name in ("req", "t-o", "total") and int(figure) > int(before)
                style = "yellow" if has_grown or figure == "never" else ""
                line.append(" " if column else "")
                line.append(f"{figure:>{width}}", style or ("dim" if not figure else ""))
        self._before = figures
        self._console.print(line, soft_wrap=True)


def make_view() -> PlainView:
    if sys.stdout.isatty():
        try:
            return TerminalView()
        except ModuleNotFoundError:
            pass
    return PlainView()


async def work(options: NsqStatOptions, ending: Ending) -> None:
    on_signal(signal.SIGHUP, ending.end)
    loop = asyncio.get_running_loop()
    cluster = Cluster(
        options.http_client_connect_timeout, options.http_client_request_timeout, client_config(PROGRAM, ())
    )
    view = make_view()
    before: ChannelFigures | None = None
    polls = 0
    at = loop.time()
    while options.count is None or polls <= options.count:
        if polls % HEADER_EVERY == 0:
            view.show_header()
        try:
            now = await unless_ended(ending, asyncio.to_thread(poll, cluster, options))
        except AskFailed as error:
            ending.fail("%s", error)
            return
        if now is None:
            return
        if before is not None:
            view.show(row(before, now, options.interval))
        before = now
        polls += 1
        # At regular times, however long a poll takes: the rates assume the interval.
        at = max(at + options.interval, loop.time())
        if polls <= (options.count or polls) and await ending.wait(at - loop.time()):
            return


def poll(cluster: Cluster, options: NsqStatOptions) -> ChannelFigures:
    nsqds: Sequence[str] = options.nsqd_http_address
    if options.lookupd_http_address:
        nsqds = cluster.producers(options.lookupd_http_address, options.topic)
        if not nsqds:
            raise AskFailed(f"no nsqd has the topic {options.topic}")
    found = cluster.channel(dict.fromkeys(nsqds), options.topic, options.channel)
    if found is None:
        raise AskFailed(f"the topic {options.topic} has no channel {options.channel}")
    return found


main = partial(run_tool, TABLE, work)


if __name__ == "__main__":
    sys.exit(main())
