"""`nsq_to_nsq`: copies the messages of topics to other nsqds."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Final

from nsparq.client import (
    ClientError,
    Config,
    Consumer,
    HeadersNotSupported,
    Message,
    Producer,
    PublishFailed,
    Requeue,
)
from nsparq.headers import without_origin
from nsparq.names import is_valid_name
from nsparq.option_table import BOOL, INT, STRING, STRINGS, OptionError, opt
from nsparq.private_random import private_random
from nsparq.tools.hostpool import RoundRobin, make_pool
from nsparq.tools.options import (
    SourceOptions,
    ToolTable,
    check_nsqd,
    check_topics,
    client_config,
    producer_opt_option,
)
from nsparq.tools.run import Ending, Timings, run_consumers, run_tool

__all__ = ["TABLE", "JsonFilter", "NsqToNsqOptions", "main"]

logger = logging.getLogger(__name__)

PROGRAM: Final = "nsq_to_nsq"
BATCH_SIZE: Final = 200
BATCH_BYTES: Final = 1 << 20
REFUSED: Final = ("E_BAD_MESSAGE", "E_BAD_BODY")
"""The message is at fault, and not the destination."""
AT_A_TIME: Final = 4
"""Batches at a time, so that one is read while another waits for its acknowledgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqToNsqOptions(SourceOptions):
    program = PROGRAM

    topic: tuple[str, ...] = opt((), "topic to consume", STRINGS, heading="What to copy")
    channel: str = opt("nsq_to_nsq", "channel to consume from", STRING)
    require_json_field: str = opt("", "copy only JSON objects with this field", STRING)
    require_json_value: str = opt("", "copy only those whose required field has this value", STRING)
    whitelist_json_field: tuple[str, ...] = opt((), "copy only this field of JSON objects", STRINGS)

    destination_nsqd_tcp_address: tuple[str, ...] = opt(
        (), "`host:port` of an nsqd to publish to", STRINGS, heading="Destination"
    )
    destination_topic: str = opt("", "topic to publish to", STRING, default_text="the topic of the message")
    mode: str = opt(
        "hostpool",
        "which of several destinations gets a message: `hostpool` (in turn, skipping those that fail), "
        "`round-robin` or `epsilon-greedy` (mostly the fastest)",
        STRING,
    )
    drop_headers: bool = opt(
        False, "copy only the bodies of messages with headers; for destinations that know none", BOOL
    )
    producer_opt: tuple[str, ...] = producer_opt_option()
    status_every: int = opt(250, "log how long publishes take, after this many of them; 0: never", INT)

    def consumer_config(self) -> Config:
        return replace(SourceOptions.consumer_config(self), headers=not self.drop_headers)

    def validate(self) -> None:
        if not self.topic or not self.channel:
            raise OptionError("--topic and --channel are required")
        check_topics(self.topic, self.channel)
        if self.destination_topic and not is_valid_name(self.destination_topic.encode()):
            raise OptionError("--destination-topic is invalid")
        SourceOptions.validate(self)
        if not self.destination_nsqd_tcp_address:
            raise OptionError("--destination-nsqd-tcp-address required")
        check_nsqd("destination-nsqd-tcp-address", self.destination_nsqd_tcp_address)
        client_config(PROGRAM, self.producer_opt)


TABLE: Final = ToolTable(
    PROGRAM,
    NsqToNsqOptions,
    command="to-nsq",
    about="""
Copies the messages of topics, with their headers, to other nsqds, to the same topic or another one.
A message is finished when its destination has acknowledged it. Otherwise it is requeued, with
growing delays, and given up after five attempts (never, with --consumer-opt=max_attempts,0). JSON
objects can be selected by a field and reduced to some fields; messages that are not JSON objects
are then dropped.
""",
    examples=(
        "nsq_to_nsq --topic=orders --nsqd-tcp-address=127.0.0.1:4150 \\",
        "           --destination-nsqd-tcp-address=10.0.0.5:4150",
        "nsq_to_nsq --topic=events --destination-topic=errors --lookupd-http-address=127.0.0.1:4161 \\",
        "           --require-json-field=level --require-json-value=error \\",
        "           --destination-nsqd-tcp-address=10.0.0.5:4150",
    ),
)


class JsonFilter:
    """Selects messages by a field, and reduces them to some fields."""

    def __init__(self, field: str, value: str, whitelist: Sequence[str]) -> None:
        self._field, self._value = field, value
        self._whitelist = tuple(dict.fromkeys(whitelist))
        self._number = _number(value)
        if value and not field:
            logger.warning("--require-json-value has no effect without --require-json-field")

    def apply(self, body: bytes) -> bytes | None:
        """The body to publish; None to drop it. Raises Requeue if a required field is missing."""
        if not self._field and not self._whitelist:
            return body
        try:
            content = json.loads(body, parse_float=_parse_float, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            logger.error("dropped a message that is not JSON (%s): %r", error, body[:100])
            return None
        if not isinstance(content, dict):
            logger.error("dropped a message that is not a JSON object: %r", body[:100])
            return None
        if self._field:
            if self._field not in content:
                if self._value:
                    logger.error("a message has no field %s: %r", self._field, body[:100])
                    raise Requeue
                return None
            if self._value and not self._matches(content[self._field]):
                return None
        if not self._whitelist:
            return body
        kept = {name: content[name] for name in self._whitelist if name in content}
        text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return text.encode("utf-8", "replace")

    def _matches(self, found: object) -> bool:
        if isinstance(found, str):
            return found == self._value
        if isinstance(found, int | float) and not isinstance(found, bool):
            return self._number is not None and found == self._number
        return False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_float(text: str) -> float | int:
    """Whole numbers become integers: 1.0 is written as 1, as NSQ does."""
    number = float(text)
    if math.isinf(number):
        # It would be written as Infinity, which is not JSON.
        raise ValueError(f"{text[:100]} is too large a number")
    return int(number) if number.is_integer() and abs(number) < 1e21 else number


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class Copier:
    """Publishes messages to the nsqds that the mode selects, those for one nsqd together."""

    def __init__(self, options: NsqToNsqOptions) -> None:
        addresses = list(dict.fromkeys(options.destination_nsqd_tcp_address))
        config = client_config(PROGRAM, options.producer_opt)
        self._producers = {address: Producer(address, config=config) for address in addresses}
        self._pool = make_pool(options.mode, addresses) or RoundRobin(addresses)
        self._timings = {
            address: Timings(options.status_every, f"publishes to {address}") for address in addresses
        }
        self._filter = JsonFilter(
            options.require_json_field, options.require_json_value, options.whitelist_json_field
        )
        self._destination = options.destination_topic
        self._without_headers: set[str] = set()
        """Destinations that have refused messages with headers."""

    async def copy(self, topic: str, messages: list[Message]) -> None:
        """Requeues the messages that have to be tried again; the caller can finish all others."""
        groups: dict[str, list[tuple[Message, bytes]]] = {}
        for message in messages:
            try:
                body = self._filter.apply(message.body)
            except Requeue:
                message.requeue()
                continue
            if body is not None:
                groups.setdefault(self._pick(message), []).append((message, body))
        target = self._destination or topic
        await asyncio.gather(*(self._publish(address, target, group) for address, group in groups.items()))

    def _pick(self, message: Message) -> str:
        """The next destination; for a message with headers one that knows them, if there is one."""
        address = self._pool.pick(monotonic())
        if address in self._without_headers and _has_headers(message):
            return self._instead_of(address)
        return address

    def _instead_of(self, address: str) -> str:
        """A destination that has not refused headers; if all have, the same."""
        others = [one for one in self._producers if one not in self._without_headers]
        return private_random.choice(others) if others else address

    async def _publish(self, address: str, topic: str, group: list[tuple[Message, bytes]]) -> None:
        for part in _parts(group):
            try:
                await self._publish_together(address, topic, part)
            except HeadersNotSupported as error:
                self._without_headers.add(address)
                await self._publish_apart(address, topic, part, error)
            except PublishFailed as error:
                if len(part) > 1 and error.code in REFUSED:
                    # One message is invalid: publish the others without it.
                    for single in part:
                        await self._publish(address, topic, [single])
                else:
                    self._failed(address, part, error)
            except ClientError as error:
                self._failed(address, part, error)

    async def _publish_apart(
        self, address: str, topic: str, part: list[tuple[Message, bytes]], error: HeadersNotSupported
    ) -> None:
        """Messages without headers go to this destination, those with headers to another."""
        headed = [one for one in part if _has_headers(one[0])] or part
        if len(headed) < len(part):
            await self._publish(address, topic, [one for one in part if not _has_headers(one[0])])
        if (other := self._instead_of(address)) != address:
            await self._publish(other, topic, headed)
            return
        logger.warning(
            "%s: %d messages with headers were not published: %s; --drop-headers copies their bodies",
            address, len(headed), error,
        )  # fmt: skip
        for message, _ in headed:
            # The others need not wait for a back-off.
            message.requeue(backoff=False)

    async def _publish_together(self, address: str, topic: str, part: list[tuple[Message, bytes]]) -> None:
        producer = self._producers[address]
        headers = [message.headers for message, _ in part]
        began = monotonic()
        if len(part) == 1:
            await producer.publish(topic, part[0][1], headers=headers[0])
        else:
            await producer.publish_many(topic, [body for _, body in part], headers=headers)
        now = monotonic()
        self._pool.report(address, True, now - began, now)
        if address in self._without_headers and any(_has_headers(message) for message, _ in part):
            # The nsqd there has been upgraded.
            self._without_headers.discard(address)
        for _ in part:
            self._timings[address].add(now - began)

    def _failed(self, address: str, part: list[tuple[Message, bytes]], error: ClientError) -> None:
        logger.warning("%s: %d messages were not published: %s", address, len(part), error)
        is_refused = isinstance(error, PublishFailed) and error.code in REFUSED
        if not is_refused:
            self._pool.report(address, False, 0.0, monotonic())
        for message, _ in part:
            message.requeue(backoff=not is_refused)

    def consumer(self, topic: str, options: NsqToNsqOptions) -> Consumer:
        async def handle(messages: list[Message]) -> None:
            await self.copy(topic, messages)

        return options.consumer(
            topic,
            options.channel,
            batch_handler=handle,
            batch_size=BATCH_SIZE,
            batch_timeout=0.0,
            concurrency=AT_A_TIME,
        )

    async def close(self) -> None:
        await asyncio.gather(*(producer.stop() for producer in self._producers.values()))


def _has_headers(message: Message) -> bool:
    """Whether its copy will have headers."""
    return bool(without_origin(message.headers))


def _parts(group: list[tuple[Message, bytes]]) -> Iterator[list[tuple[Message, bytes]]]:
    """Split a group, in order, into parts small enough for any nsqd."""
    part: list[tuple[Message, bytes]] = []
    size = 0
    for message, body in group:
        if part and size + len(body) > BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append((message, body))
        size += len(body)
    yield part


async def work(options: NsqToNsqOptions, ending: Ending) -> None:
    copier = Copier(options)
    consumers = [copier.consumer(topic, options) for topic in dict.fromkeys(options.topic)]
    try:
        await run_consumers(consumers, options.nsqd_tcp_address, ending)
    finally:
        await copier.close()


main = partial(run_tool, TABLE, work)


if __name__ == "__main__":
    sys.exit(main())
