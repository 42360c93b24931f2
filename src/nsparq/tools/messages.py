"""`nsparq peek` and `nsparq tail`: look at messages. They consume nothing and need no channel."""

from __future__ import annotations

import heapq
import json
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nsparq.option_table import BOOL, INT, STRING, STRINGS, OptionError, choice, opt
from nsparq.tools import nsq_tail
from nsparq.tools.cluster import AskFailed
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.json_lines import body_fields, headers_prefix
from nsparq.tools.log_reader import LogReader, StoredMessage
from nsparq.tools.nsq_tail import headers_option
from nsparq.tools.output import moment, print_json, printable
from nsparq.tools.source import Source, SourceFlags
from nsparq.tools.times import TIME_HELP, parse_time

__all__ = ["PEEK", "TAIL", "peek", "tail"]

STATES: Final = ("ready", "requeued", "in_flight", "deferred")
WAIT_MS: Final = 2000
RETRY_S: Final = 1.0
REFRESH_S: Final = 10.0
"""How often nsqlookupd is asked for new nsqds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekFlags(SourceFlags):
    topic: str = opt("", "the topic", STRING)
    channel: str = opt("", "show the unfinished messages of this channel, instead of the topic's log", STRING)
    count: int = opt(10, "number of messages, at most 1000", INT, bound="positive")
    state: str = opt("", "only messages of the channel in this state", choice(*STATES, empty=""))
    sequence: int = opt(-1, "begin with this sequence number", INT, default_text="the newest messages")

    def validate(self) -> None:
        SourceFlags.validate(self)
        if self.count > 1000:
            raise OptionError("--count is at most 1000")
        if self.state and not self.channel:
            raise OptionError("--state needs a channel")
        if self.channel and self.sequence >= 0:
            raise OptionError("--sequence is for a topic, not for a channel")


PEEK: Final = CommandTable(
    "peek",
    PeekFlags,
    words=("topic", "channel"),
    required=1,
    about="""
Shows messages without consuming them: the newest messages of a topic, or the unfinished messages of
a channel with their state (ready, requeued, in flight, deferred). A long message is cut at 64 KiB.
""",
    examples=(
        "nsparq peek orders",
        "nsparq peek orders archive --state=deferred",
        "nsparq peek orders -n 100 --json | jq -r .body",
    ),
)


def _peek(options: PeekFlags) -> int:
    source = Source(options)
    query = {"topic": options.topic, "count": str(options.count)}
    query |= {"channel": options.channel} if options.channel else {}
    query |= {"state": options.state} if options.state else {}
    query |= {"from": str(options.sequence)} if options.sequence >= 0 else {}
    path = "/channel/peek" if options.channel else "/topic/peek"
    found = source.each_of(
        options.topic, lambda address: source.ask("GET", address, path, **query), options.channel
    )
    if options.sequence >= 0:
        found.require_one()
    messages = [
        {"topic": options.topic, "node": address, **message}
        for address, answer in found.done.items()
        for message in answer["messages"]
    ]
    if not options.channel:
        messages = sorted(messages, key=lambda one: one["timestamp"])
        messages = messages[: options.count] if options.sequence >= 0 else messages[-options.count :]
    for message in messages:
        if options.json:
            print_json(message)
        else:
            _show(message)
    if not messages and not options.json:
        print("There are no messages.")
    if missing := sum(answer["missing"] for answer in found.done.values()):
        sys.stderr.write(f"nsparq peek: {missing} messages are lost: the disk has damaged them\n")
    return found.report("nsparq peek")


def _show(message: Mapping[str, Any]) -> None:
    """Time, number and state on one line, headers and body below it."""
    notes = [moment(message["timestamp"]), f"#{message['sequence']}"]
    if message["state"] != "stored":
        notes.append(message["state"].replace("_", " "))
    if message["attempts"]:
        notes.append(f"attempts {message['attempts']}")
    if due := message.get("due"):
        notes.append(f"due {moment(due)}")
    if client := message.get("client"):
        notes.append(f"at {client}")
    print("  ".join([*notes, f"{message['size']} bytes"]))
    if headers := message.get("headers"):
        print(f"    {json.dumps(headers)}")
    body = message.get("body")
    if body is None:
        print(f"    {message.get('body_base64')}  (base64)")
    else:
        print("    " + printable(body, "\n\t").replace("\n", "\n    "))


peek = partial(run_command, PEEK, _peek)


# tail


@dataclass(frozen=True, slots=True, kw_only=True)
class TailFlags(SourceFlags):
    topic: tuple[str, ...] = opt((), "the topics", STRINGS)
    since: str = opt("", f"first print the stored messages from this time on: {TIME_HELP}", STRING)
    follow: bool = opt(False, "continue with new messages; this is the default without --since", BOOL)
    count: int = opt(0, "end after this many messages; 0: no limit", INT, bound="not negative")
    print_topic: bool = opt(False, "print the topic before each message: `orders | body`", BOOL)
    headers: bool = headers_option()

    def validate(self) -> None:
        SourceFlags.validate(self)
        if self.since:
            try:
                parse_time(self.since)
            except ValueError as error:
                raise OptionError(f"--since: {error}") from None


TAIL: Final = CommandTable(
    "tail",
    TailFlags,
    words=("topic",),
    required=1,
    about="""
Prints the messages of topics, one per line, as they arrive. It reads the topics' logs: it consumes
nothing, needs no channel and creates none. With --since it prints stored messages and ends; add
--follow to continue. How far back that reaches depends on retention: see `nsparq settings`.

With a flag of nsq_tail, such as --nsqd-tcp-address or --channel, it is nsq_tail.
""",
    examples=(
        "nsparq tail orders",
        "nsparq tail orders --since=10m --follow",
        "nsparq tail orders refunds --since=12:30 --json | jq .body",
    ),
)


class Printer:
    """Prints messages, up to the wanted number."""

    def __init__(self, options: TailFlags) -> None:
        self._options = options
        self.left = options.count or sys.maxsize

    def show(self, messages: Iterable[StoredMessage]) -> None:
        out = sys.stdout.buffer
        for message in messages:
            if not self.left:
                return
            self.left -= 1
            if self._options.json:
                print_json(_as_json(message))
            else:
                prefix = f"{message.topic} | ".encode() if self._options.print_topic else b""
                headers = headers_prefix(message.headers) if self._options.headers else b""
                out.write(prefix + headers + message.body + b"\n")
        out.flush()


def _as_json(message: StoredMessage) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "topic": message.topic,
        "node": message.node,
        "sequence": message.sequence,
        "timestamp": message.timestamp_ns,
        "size": len(message.body),
    }
    headers = {"headers": message.headers} if message.headers else {}
    return shown | headers | body_fields(message.body)


def _tail(options: TailFlags) -> int:
    source, printer = Source(options), Printer(options)
    follows = options.follow or not options.since
    since_ns = int(parse_time(options.since) * 1e9) if options.since else None
    begun_ns = time.time_ns()
    topics = list(dict.fromkeys(options.topic))

    def begin(node: str) -> list[LogReader]:
        readers = [LogReader(source, node, topic) for topic in topics]
        for reader in readers:
            reader.start(since_ns)
        return readers

    found = source.each(source.nsqds(), begin)
    readers = [reader for one in found.done.values() for reader in one]
    for topic in topics:
        if not any(reader.topic == topic and reader.next >= 0 for reader in readers):
            if not follows:
                raise AskFailed(f"there is no topic {topic}")
            sys.stderr.write(f"nsparq tail: there is no topic {topic} yet; waiting for it\n")
    if since_ns is not None:
        printer.show(heapq.merge(*(_stored(reader, found.failed) for reader in readers)))
        _report_lost(readers)
    if follows and printer.left:
        _follow(source, options, readers, printer, begun_ns if since_ns is None else since_ns)
    return found.report("nsparq tail")


def _stored(reader: LogReader, failed: dict[str, AskFailed]) -> Iterator[StoredMessage]:
    """The messages up to the present end of the log. A failure is noted: others are still shown."""
    try:
        positions = reader.positions() if reader.next >= 0 else None
        if positions is not None:
            yield from reader.read(positions["latest"])
    except AskFailed as error:
        failed[reader.node] = error


def _report_lost(readers: Sequence[LogReader]) -> None:
    for reader in readers:
        if reader.lost:
            what = f"{reader.lost} messages of {reader.topic} can no longer be read"
            sys.stderr.write(f"nsparq tail: {reader.node}: {what}\n")
            reader.lost = 0


def _follow(
    source: Source, options: TailFlags, readers: list[LogReader], printer: Printer, since_ns: int
) -> None:
    """Until it is interrupted, or has printed enough. An nsqd that could not be asked before may
    have old messages: of those it prints what is not older than `since_ns`."""
    topics = list(dict.fromkeys(options.topic))
    wait_ms = min(WAIT_MS, int(options.timeout * 500))
    arrived: queue.Queue[list[StoredMessage] | AskFailed] = queue.Queue(100)
    known: set[str] = set()
    refresh_at = 0.0

    def watch(reader: LogReader) -> None:
        state: int | None = None
        has_failed = False
        while True:
            try:
                if not reader.is_started:
                    reader.start(since_ns)
                for messages in reader.answers():
                    arrived.put(messages)
                _report_lost([reader])
                state = reader.wait(state, wait_ms)
                has_failed = False
            except AskFailed as error:
                if not has_failed:
                    arrived.put(error)
                has_failed = True
                time.sleep(RETRY_S)

    try:
        while printer.left:
            if time.monotonic() >= refresh_at:
                refresh_at = time.monotonic() + REFRESH_S
                readers += _new_readers(source, topics, known | {reader.node for reader in readers})
                for reader in readers:
                    known.add(reader.node)
                    threading.Thread(target=watch, args=(reader,), daemon=True).start()
                readers = []
            try:
                found = arrived.get(timeout=max(0.0, refresh_at - time.monotonic()))
            except queue.Empty:
                continue
            if isinstance(found, AskFailed):
                sys.stderr.write(f"nsparq tail: {found}; trying again\n")
            else:
                printer.show(found)
    except KeyboardInterrupt:
        # The usual way to end it.
        pass


def _new_readers(source: Source, topics: Sequence[str], known: set[str]) -> list[LogReader]:
    try:
        return [
            LogReader(source, node, topic) for node in source.nsqds() if node not in known for topic in topics
        ]
    except AskFailed as error:
        sys.stderr.write(f"nsparq tail: {error}; trying again\n")
        return []


def tail(argv: Sequence[str]) -> int:
    if _is_for_nsq_tail(argv):
        return nsq_tail.main(argv)
    return run_command(TAIL, _tail, argv)


def _is_for_nsq_tail(argv: Sequence[str]) -> bool:
    """Whether nsq_tail understands the flags, and one of them is its own."""
    theirs, ours = ({option.flag for option in table.options} for table in (nsq_tail.TABLE, TAIL))
    names = {argument.lstrip("-").partition("=")[0] for argument in argv if argument.startswith("-")}
    return bool(names & (theirs - ours - {"n"}))
