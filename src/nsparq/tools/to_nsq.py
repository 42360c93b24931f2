"""`to_nsq`: publishes records from standard input."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Final

from nsparq.client import ClientError, NotConnected, Producer, PublishFailed, PublishTimeout
from nsparq.option_table import BOOL, INT, STRING, STRINGS, OptionError, opt
from nsparq.tools.json_lines import Record, Records, parse_headers, unzip, with_headers
from nsparq.tools.options import ToolTable, check_nsqd, check_topics, client_config, producer_opt_option
from nsparq.tools.run import Ending, run_tool, unless_ended

__all__ = ["TABLE", "ToNsqOptions", "main"]

logger = logging.getLogger(__name__)

PROGRAM: Final = "to_nsq"
STDIN: Final = 0
CHUNK: Final = 64 << 10
READ_AHEAD: Final = 2
"""Chunks read while others are being published."""
MAX_RECORD: Final = 256 << 20
"""Longest record: input without a delimiter must not fill the memory."""
ESCAPES: Final = {r"\n": b"\n", r"\r": b"\r", r"\t": b"\t", r"\0": b"\0"}
"""Delimiters that are hard or impossible to give as an argument."""


def delimiter_byte(text: str) -> bytes:
    return ESCAPES.get(text) or os.fsencode(text)


def header_option() -> tuple[str, ...]:
    return opt((), "header of every message, as `name=value`; needs nsparq's nsqd", STRINGS)


def json_lines_option() -> bool:
    return opt(
        False,
        "each record is a JSON object with `body` or `body_base64`, and optionally `headers`, as "
        "`nsq_to_file --json-lines` writes them",
        BOOL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToNsqOptions:
    topic: str = opt("", "topic to publish to", STRING, heading="What to publish")
    delimiter: str = opt("\n", r"byte between two messages; also written `\n`, `\r`, `\t` or `\0`", STRING)
    header: tuple[str, ...] = header_option()
    json_lines: bool = json_lines_option()
    rate: int = opt(0, "maximum number of messages per second; 0: no limit", INT, bound="not negative")

    nsqd_tcp_address: tuple[str, ...] = opt(
        (), "`host:port` of an nsqd; every message is published to each", STRINGS, heading="Destination"
    )
    producer_opt: tuple[str, ...] = producer_opt_option()

    def validate(self) -> None:
        if not self.topic:
            raise OptionError("--topic required")
        check_topics([self.topic])
        if len(delimiter_byte(self.delimiter)) != 1:
            raise OptionError("--delimiter must be a single byte")
        if not self.nsqd_tcp_address:
            raise OptionError("--nsqd-tcp-address required")
        check_nsqd("nsqd-tcp-address", self.nsqd_tcp_address)
        client_config(PROGRAM, self.producer_opt)
        parse_headers(self.header)


TABLE: Final = ToolTable(
    PROGRAM,
    ToNsqOptions,
    command="publish",
    about="""
Publishes what it reads from standard input: each line is a message, empty lines are skipped.
The exit status is 0 when nsqd has acknowledged all of the input. At the first record that was not
acknowledged it stops with status 1 and names the record.
""",
    examples=(
        "echo 'hello' | to_nsq --topic=greetings --nsqd-tcp-address=127.0.0.1:4150",
        "tail -f access.log | to_nsq --topic=access --rate=1000 --nsqd-tcp-address=127.0.0.1:4150",
        r"find . -print0 | to_nsq --topic=files --delimiter='\0' --nsqd-tcp-address=127.0.0.1:4150",
    ),
)


async def read_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """Chunks of input, read in a thread that is never joined: nothing can wake it."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(READ_AHEAD)

    def read() -> None:
        chunk: bytes | OSError = b"-"
        while chunk and isinstance(chunk, bytes):
            room.acquire()
            try:
                chunk = os.read(descriptor, CHUNK)
            except OSError as error:
                chunk = error
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the loop is closed: the tool has ended
                return

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk
        room.release()


async def read_records(chunks: AsyncIterator[bytes], delimiter: bytes) -> AsyncIterator[list[bytes]]:
    """The records of each chunk, without empty ones. The last record needs no delimiter."""
    partial: list[bytes] = []
    size = 0
    async for chunk in chunks:
        first, *rest = chunk.split(delimiter)
        partial.append(first)
        size += len(first)
        if size > MAX_RECORD:
            raise OSError(f"a record has more than {MAX_RECORD} bytes")
        if rest:
            size = len(rest[-1])
            records = [b"".join(partial), *rest[:-1]]
            partial = [rest[-1]]
            if records := [record for record in records if record]:
                yield records
    if last := b"".join(partial):
        yield [last]


class Throttle:
    """Limits the rate; after a pause, up to one second's worth may go at once."""

    def __init__(self, rate: int, now: float) -> None:
        self._rate = rate
        self._allowed = 1.0
        self._since = now

    def take(self, wanted: int, now: float) -> tuple[int, float]:
        """How many may go now; if none, the seconds until one may."""
        if not self._rate:
            return wanted, 0.0
        self._allowed = min(self._allowed + (now - self._since) * self._rate, float(self._rate))
        self._since = now
        count = min(wanted, int(self._allowed))
        self._allowed -= count
        return count, 0.0 if count else (1 - self._allowed) / self._rate


async def publish(
    producer: Producer, topic: str, records: Sequence[bytes | Record], defer: float = 0.0
) -> tuple[int, ClientError | None]:
    """Publish records in order. Returns how many were acknowledged, and the error."""
    bodies, headers = unzip(records)
    if len(records) > 1 and not defer:
        try:
            await producer.publish_many(topic, bodies, headers=headers)
            return len(records), None
        except PublishFailed as error:
            # One record is invalid, so nsqd took none. Those before it are published one by one.
            if error.code not in ("E_BAD_MESSAGE", "E_BAD_BODY"):
                return 0, error
        except ClientError as error:
            return 0, error
    for done, body in enumerate(bodies):
        try:
            await producer.publish(topic, body, defer=defer, headers=headers[done] if headers else None)
        except ClientError as error:
            return done, error
    return len(records), None


async def work(options: ToNsqOptions, ending: Ending) -> None:
    config = client_config(PROGRAM, options.producer_opt)
    producers = [Producer(address, config=config) for address in dict.fromkeys(options.nsqd_tcp_address)]
    records = read_records(read_chunks(STDIN), delimiter_byte(options.delimiter))
    source = with_headers(records, options.header, options.json_lines)
    try:
        await pump(options.topic, source, producers, ending, rate=options.rate)
    finally:
        await asyncio.gather(*(producer.stop() for producer in producers))


async def pump(
    topic: str,
    source: Records,
    producers: Sequence[Producer],
    ending: Ending,
    *,
    rate: int = 0,
    defer: float = 0.0,
) -> int:
    """Publish until the input ends or the ending is due. Waits for a publish that has begun.
    Returns how many records it has read and tried to publish."""
    throttle = Throttle(rate, monotonic())
    published = 0
    while records := await unless_ended(ending, _next(source, ending)):
        while records and not ending.is_due:
            count, pause = throttle.take(len(records), monotonic())
            if not count:
                await ending.wait(pause)
                continue
            now, records = records[:count], records[count:]
            outcomes = await asyncio.gather(*(publish(producer, topic, now, defer) for producer in producers))
            for done, error in outcomes:
                if error is not None:
                    place = published + done + 1
                    # nsqd may have stored it without the answer getting here.
                    is_unknown = isinstance(error, NotConnected | PublishTimeout)
                    what = "acknowledged" if is_unknown else "published"
                    ending.fail("record %d of the input was not %s: %s", place, what, error)
            published += count
    return published


async def _next(source: Records, ending: Ending) -> Sequence[bytes | Record] | None:
    try:
        return await anext(source, None)
    except OSError as error:
        ending.fail("cannot read the input: %s", error.strerror or error)
        return None


main = partial(run_tool, TABLE, work)


if __name__ == "__main__":
    sys.exit(main())
