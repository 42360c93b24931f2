"""`nsq_tail`: prints the messages of topics to standard output, one per line."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from nsparq.client import Config, Message
from nsparq.option_table import BOOL, INT, STRING, STRINGS, OptionError, opt
from nsparq.private_random import private_random
from nsparq.tools.json_lines import headers_prefix
from nsparq.tools.options import SourceOptions, ToolTable, check_topics
from nsparq.tools.run import Ending, run_consumers, run_tool

__all__ = ["TABLE", "NsqTailOptions", "main"]

PROGRAM: Final = "nsq_tail"
STDOUT: Final = 1
STUCK_MS: Final = 1000


def headers_option() -> bool:
    return opt(False, 'print the headers before each message, as JSON: `{"tenant": "acme"} | body`', BOOL)


def _random_channel() -> str:
    return f"tail{private_random.randrange(999_999):06d}#ephemeral"


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqTailOptions(SourceOptions):
    program = PROGRAM
    # It prints every message, no matter how many attempts there were.
    max_attempts = 0

    topic: tuple[str, ...] = opt((), "topic to print", STRINGS, heading="What to print")
    channel: str = opt(
        _random_channel,
        "channel to consume from; other consumers of the same channel get a part of the messages",
        STRING,
        default_text="a new ephemeral channel",
    )
    n: int = opt(0, "end after this many messages of a topic; 0: never", INT, bound="not negative")
    print_topic: bool = opt(False, "print the topic before each message: `orders | body`", BOOL)
    headers: bool = headers_option()

    def consumer_config(self) -> Config:
        return replace(SourceOptions.consumer_config(self), observe=True, headers=self.headers)

    def validate(self) -> None:
        SourceOptions.validate(self)
        if not self.topic:
            raise OptionError("--topic required")
        check_topics(self.topic, self.channel or None)


TABLE: Final = ToolTable(
    PROGRAM,
    NsqTailOptions,
    command="tail",
    about="""
Prints the messages of one or more topics as they arrive, one per line, until it is interrupted.
By default it uses a new ephemeral channel, so that it takes no messages from other consumers: it
prints what is published after its start. If the topic has no other channel, it also prints what
waits there, and leaves it for the first channel. (NSQ's own nsqd does not leave it.)
`nsparq tail` needs no channel at all, and also prints stored messages.
""",
    examples=(
        "nsq_tail --topic=orders --nsqd-tcp-address=127.0.0.1:4150",
        "nsq_tail --topic=orders --topic=refunds --print-topic --lookupd-http-address=127.0.0.1:4161",
        "nsq_tail --topic=orders -n 1 --nsqd-tcp-address=127.0.0.1:4150 | jq .",
    ),
)


class Printer:
    """Prints the messages of one topic."""

    def __init__(self, topic: str, options: NsqTailOptions, ending: Ending) -> None:
        self._ending = ending
        self._has_failed = False
        self._remaining: int | None = options.n or None
        self._prefix = f"{topic} | ".encode() if options.print_topic else b""
        self._has_headers = options.headers
        most = min(options.max_in_flight, options.n) if options.n else options.max_in_flight
        self._max_in_flight = most
        self.consumer = options.consumer(
            topic,
            options.channel or _random_channel(),
            batch_handler=self._print,
            batch_size=most,
            batch_timeout=0.0,
            max_in_flight=most,
        )

    async def _print(self, messages: list[Message]) -> None:
        wanted = messages if self._remaining is None else messages[: self._remaining]
        if self._has_failed:
            wanted = []
        self._give_back(messages[len(wanted) :])
        if not wanted:
            return
        data = b"".join(self._line(message) for message in wanted)
        try:
            # In a thread: a slow reader of a pipe must not delay heartbeats.
            await asyncio.to_thread(write_all, STDOUT, data, lambda: self._ending.is_due)
        except OSError as error:
            self._has_failed = True
            self._give_back(wanted)
            if isinstance(error, BrokenPipeError):
                self._ending.status = 1
                self._ending.end()
            else:
                self._ending.fail("cannot write to standard output: %s", error.strerror)
            return
        if self._remaining is not None:
            self._remaining -= len(wanted)
            # Before these are finished, so that nsqd sends no more than will be printed.
            self.consumer.change_max_in_flight(min(self._max_in_flight, self._remaining))
            if not self._remaining:
                self._ending.end()

    def _line(self, message: Message) -> bytes:
        headers = headers_prefix(message.headers) if self._has_headers else b""
        return self._prefix + headers + message.body + b"\n"

    def _give_back(self, messages: list[Message]) -> None:
        if messages:
            # Otherwise nsqd would send them to this tool again.
            self.consumer.change_max_in_flight(0)
        for message in messages:
            message.requeue(0, backoff=False)


def write_all(descriptor: int, data: bytes, is_ending: Callable[[], bool]) -> None:
    """Write everything, but do not wait for a stuck reader when the tool ends."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    view = memoryview(data)
    while view:
        if not poll.poll(STUCK_MS):
            if is_ending():
                raise TimeoutError(None, "nothing reads the output")
            continue
        # poll() guarantees that a pipe takes this much without blocking.
        view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]


async def work(options: NsqTailOptions, ending: Ending) -> None:
    printers = [Printer(topic, options, ending) for topic in dict.fromkeys(options.topic)]
    consumers = [printer.consumer for printer in printers]
    await run_consumers(consumers, options.nsqd_tcp_address, ending)


main = partial(run_tool, TABLE, work)


if __name__ == "__main__":
    sys.exit(main())
