"""`nsq_tail`: messages of topics on standard output, one a line."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from nsparq.client import Consumer, Message
from nsparq.option_table import BOOL, INT, STRING, STRINGS, OptionError, opt
from nsparq.private_random import private_random
from nsparq.tools.common import (
    Ending,
    ToolTable,
    check_sources,
    check_topics,
    client_config,
    consumer_opt_option,
    lookupd_option,
    max_in_flight_option,
    nsqd_option,
    run_consumers,
    run_tool,
)

__all__ = ["TABLE", "NsqTailOptions", "main"]

PROGRAM: Final = "nsq_tail"
STDOUT: Final = 1
STUCK_MS: Final = 1000


def _random_channel() -> str:
    return f"tail{private_random.randrange(999_999):06d}#ephemeral"


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqTailOptions:
    topic: tuple[str, ...] = opt((), "topic to print", STRINGS, heading="What to print")
    channel: str = opt(
        _random_channel,
        "channel to read from; its messages are shared with whoever else reads from it",
        STRING,
        default_text="one of its own, which is gone afterwards",
    )
    n: int = opt(
        0, "end when so many messages of a topic have been printed; 0: go on", INT, bound="not negative"
    )
    print_topic: bool = opt(False, "put the topic before each message: `orders | body`", BOOL)

    nsqd_tcp_address: tuple[str, ...] = nsqd_option("Where it comes from")
    lookupd_http_address: tuple[str, ...] = lookupd_option()
    max_in_flight: int = max_in_flight_option()
    consumer_opt: tuple[str, ...] = consumer_opt_option()

    def validate(self) -> None:
        check_sources(self.nsqd_tcp_address, self.lookupd_http_address)
        if not self.topic:
            raise OptionError("--topic required")
        check_topics(self.topic, self.channel or None)
        client_config(PROGRAM, self.consumer_opt)


TABLE: Final = ToolTable(
    PROGRAM,
    NsqTailOptions,
    command="tail",
    about="""
Prints the messages of one or more topics as they come, one a line, until it is interrupted.
It reads from a channel of its own, so that it takes nothing away from other consumers; it sees
what is published from its start on.
""",
    examples=(
        "nsq_tail --topic=orders --nsqd-tcp-address=127.0.0.1:4150",
        "nsq_tail --topic=orders --topic=refunds --print-topic --lookupd-http-address=127.0.0.1:4161",
        "nsq_tail --topic=orders -n 1 --nsqd-tcp-address=127.0.0.1:4150 | jq .",
    ),
)


class Printer:
    """Writes the messages of one topic."""

    def __init__(self, topic: str, options: NsqTailOptions, ending: Ending) -> None:
        self._ending = ending
        self._has_failed = False
        self._remaining: int | None = options.n or None
        self._prefix = f"{topic} | ".encode() if options.print_topic else b""
        most = min(options.max_in_flight, options.n) if options.n else options.max_in_flight
        self._max_in_flight = most
        self.consumer = Consumer(
            topic,
            options.channel or _random_channel(),
            batch_handler=self._print,
            batch_size=most,
            batch_timeout=0.0,
            nsqlookupd=options.lookupd_http_address,
            max_in_flight=most,
            # It prints what it gets, however often that has been tried elsewhere.
            config=client_config(PROGRAM, options.consumer_opt, max_attempts=0),
        )

    async def _print(self, messages: list[Message]) -> None:
        wanted = messages if self._remaining is None else messages[: self._remaining]
        if self._has_failed:
            wanted = []
        self._give_back(messages[len(wanted) :])
        if not wanted:
            return
        data = b"".join(self._prefix + message.body + b"\n" for message in wanted)
        try:
            # A pipe whose reader is slow must not keep heartbeats from being answered.
            await asyncio.to_thread(write_all, STDOUT, data, lambda: self._ending.has_come)
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
            # Said before these are finished, so that no more come than will be printed.
            self.consumer.change_max_in_flight(min(self._max_in_flight, self._remaining))
            if not self._remaining:
                self._ending.end()

    def _give_back(self, messages: list[Message]) -> None:
        if messages:
            # They shall go to others, not come back here.
            self.consumer.change_max_in_flight(0)
        for message in messages:
            message.requeue(0, backoff=False)


def write_all(descriptor: int, data: bytes, is_ending: Callable[[], bool]) -> None:
    """For as long as it takes; but at the end of the tool nobody waits for a reader that does not read."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    view = memoryview(data)
    while view:
        if not poll.poll(STUCK_MS):
            if is_ending():
                raise TimeoutError(None, "nobody reads it")
            continue
        # A pipe that can be written to takes this much without blocking.
        view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]


async def work(options: NsqTailOptions, ending: Ending) -> None:
    printers = [Printer(topic, options, ending) for topic in dict.fromkeys(options.topic)]
    consumers = [printer.consumer for printer in printers]
    await run_consumers(consumers, options.nsqd_tcp_address, ending)


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(TABLE, work, argv)


if __name__ == "__main__":
    sys.exit(main())
