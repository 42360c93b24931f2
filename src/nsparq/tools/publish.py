"""`nsparq publish`: publishes its arguments, a file, or standard input, the way to_nsq does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from nsparq.addresses import heard_address, split_address
from nsparq.client import Producer
from nsparq.errors import StartError
from nsparq.option_table import BOOL, DURATION, INT, STRING, STRINGS, OptionError, opt
from nsparq.tools.cluster import AskFailed
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.json_lines import parse_headers, with_headers
from nsparq.tools.options import check_nsqd, client_config, producer_opt_option
from nsparq.tools.output import print_json
from nsparq.tools.run import Ending, run_work
from nsparq.tools.source import Source, SourceFlags, environment_addresses
from nsparq.tools.to_nsq import (
    STDIN,
    delimiter_byte,
    header_option,
    json_lines_option,
    pump,
    read_chunks,
    read_records,
)

__all__ = ["PUBLISH", "publish"]

TCP_VARIABLE: Final = "NSQ_NSQD_TCP_ADDRESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFlags(SourceFlags):
    topic: str = opt("", "the topic", STRING)
    message: tuple[str, ...] = opt((), "a message; without any, messages come from the input", STRINGS)
    file: str = opt("", "read the messages from this file, instead of standard input", STRING)
    delimiter: str = opt(
        "\n", r"byte between two messages of the input; also `\n`, `\r`, `\t` or `\0`", STRING
    )
    whole: bool = opt(False, "the whole input is one message", BOOL)
    header: tuple[str, ...] = header_option()
    json_lines: bool = json_lines_option()
    defer: float = opt(0.0, "deliver the messages only after this time", DURATION, bound="not negative")
    rate: int = opt(0, "maximum number of messages per second; 0: no limit", INT, bound="not negative")
    nsqd_tcp_address: tuple[str, ...] = opt(
        (),
        f"`host:port` of an nsqd's TCP port, instead of {TCP_VARIABLE} in the environment; every message is "
        "published to each (default: one nsqd, found as below)",
        STRINGS,
    )
    producer_opt: tuple[str, ...] = producer_opt_option()

    def validate(self) -> None:
        SourceFlags.validate(self)
        if len(delimiter_byte(self.delimiter)) != 1:
            raise OptionError("--delimiter must be a single byte")
        if self.message and (self.file or self.whole):
            raise OptionError("use messages as arguments, or --file and --whole, not both")
        if not all(self.message):
            raise OptionError("a message must not be empty")
        check_nsqd("nsqd-tcp-address", self.nsqd_tcp_address)
        client_config("nsparq", self.producer_opt)
        parse_headers(self.header)


PUBLISH: Final = CommandTable(
    "publish",
    PublishFlags,
    words=("topic", "message"),
    required=1,
    about="""
Publishes messages: its arguments, or the lines of a file or of standard input. Empty lines are
skipped. The exit status is 0 when nsqd has acknowledged all of them. At the first message that was
not acknowledged it stops with status 1 and names it.
""",
    examples=(
        "nsparq publish orders '{\"id\": 1}'",
        "tail -f access.log | nsparq publish access",
        "nsparq publish orders --file=order.json --whole --defer=10m",
    ),
)


def destinations(options: PublishFlags) -> list[str]:
    """TCP addresses of the nsqds that get the messages. Raises AskFailed."""
    given = options.nsqd_tcp_address
    if not given and not options.nsqd_http_address and not options.lookupd_http_address:
        given = environment_addresses(TCP_VARIABLE)
    if given:
        return list(dict.fromkeys(given))
    source = Source(options)
    if source.lookupds:
        nodes = source.cluster.nodes(source.lookupds, options.topic) or source.cluster.nodes(source.lookupds)
        found = [node.tcp_address for node in nodes if node.tcp_address]
    else:
        found = [*source.each(source.nsqds(), partial(_tcp_address, source)).done.values()]
    if not found:
        raise AskFailed(f"nsqlookupd {', '.join(source.lookupds)} knows no nsqd")
    return found[:1]


def _tcp_address(source: Source, address: str) -> str:
    """Of the nsqd at this HTTP address."""
    port = source.ask("GET", address, "/info")["tcp_port"]
    found = heard_address((split_address(address) or ("", 0))[0], port)
    if found is None:
        raise AskFailed(f"{address} names no TCP port: use --nsqd-tcp-address", 200)
    return found


async def records(options: PublishFlags, descriptor: int) -> AsyncIterator[list[bytes]]:
    if options.message:
        yield [os.fsencode(message) for message in options.message]
    elif options.whole:
        if whole := b"".join([chunk async for chunk in read_chunks(descriptor)]):
            yield [whole]
    else:
        async for found in read_records(read_chunks(descriptor), delimiter_byte(options.delimiter)):
            yield found


async def work(options: PublishFlags, ending: Ending) -> None:
    addresses = await asyncio.to_thread(destinations, options)
    descriptor = STDIN
    if options.file:
        try:
            descriptor = os.open(options.file, os.O_RDONLY)
        except OSError as error:
            raise StartError(f"{options.file}: {error.strerror}") from error
    elif not options.message and sys.stdin is not None and sys.stdin.isatty():
        sys.stderr.write("Type messages, one per line. Ctrl-D ends.\n")
    config = client_config("nsparq", options.producer_opt)
    producers = [Producer(address, config=config) for address in addresses]
    try:
        source = with_headers(records(options, descriptor), options.header, options.json_lines)
        count = await pump(options.topic, source, producers, ending, rate=options.rate, defer=options.defer)
    finally:
        await asyncio.gather(*(producer.stop() for producer in producers))
    if ending.status:
        return
    if options.json:
        print_json({"topic": options.topic, "published": count, "nodes": addresses})
    else:
        messages = "1 message" if count == 1 else f"{count} messages"
        print(f"Published {messages} to the topic {options.topic} on {', '.join(addresses)}.")


publish = partial(run_command, PUBLISH, partial(run_work, work))
