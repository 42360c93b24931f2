"""`nsq_to_http`: sends every message of a topic as an HTTP request."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Final
from urllib.parse import quote, quote_plus

from nsparq.client import Message, Requeue
from nsparq.fetch import without_secrets
from nsparq.headers import without_origin
from nsparq.option_table import FLOAT, INT, STRING, STRINGS, OptionError, opt
from nsparq.private_random import private_random
from nsparq.tools.hostpool import make_pool
from nsparq.tools.http_client import HttpClient, RequestFailed, parse_target
from nsparq.tools.options import (
    SourceOptions,
    ToolTable,
    check_topics,
    connect_timeout_option,
    request_timeout_option,
)
from nsparq.tools.run import Ending, Timings, run_consumers, run_tool
from nsparq.version import NSQ_VERSION

__all__ = ["TABLE", "NsqToHttpOptions", "main", "parse_headers"]

logger = logging.getLogger(__name__)

PROGRAM: Final = "nsq_to_http"
CONTENT_TYPE: Final = "application/octet-stream"
PLACE: Final = "%s"
"""Placeholder for the message in the URL of a GET."""
EVERY_ADDRESS: Final = ("multicast", "all")
SAME_NAME: Final = ("traceparent", "tracestate", "baggage")
"""Headers with the same name in a message and in a request."""
_CLOUD_EVENT_SAFE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqToHttpOptions(SourceOptions):
    program = PROGRAM

    topic: str = opt("", "topic to consume", STRING, heading="What to send")
    channel: str = opt("nsq_to_http", "channel to consume from", STRING)
    sample: float = opt(
        1.0, "share of the messages to send, from 0 to 1; the others are finished without a request", FLOAT
    )

    post: tuple[str, ...] = opt(
        (), "URL for POST requests with the message as body", STRINGS, heading="Destination"
    )
    get: tuple[str, ...] = opt((), "URL for GET requests, with `%s` in place of the message", STRINGS)
    mode: str = opt(
        "hostpool",
        "which of several URLs gets a message: `hostpool` (in turn, skipping those that fail), "
        "`round-robin`, `epsilon-greedy` (mostly the fastest) or `multicast` (every one)",
        STRING,
    )
    content_type: str = opt(CONTENT_TYPE, "content type of POST requests", STRING)
    header: tuple[str, ...] = opt((), "header of every request, as `Name: value`", STRINGS)
    n: int = opt(100, "requests at a time", INT, bound="positive")
    http_client_connect_timeout: float = connect_timeout_option()
    http_client_request_timeout: float = request_timeout_option(20.0)
    status_every: int = opt(250, "log how long requests take, after this many of them; 0: never", INT)

    def validate(self) -> None:
        if not self.topic or not self.channel:
            raise OptionError("--topic and --channel are required")
        check_topics([self.topic], self.channel)
        if not self.content_type:
            raise OptionError("--content-type requires a value when used")
        if self.get and self.content_type != CONTENT_TYPE:
            raise OptionError("--content-type only used with --post")
        SourceOptions.validate(self)
        if not self.get and not self.post:
            raise OptionError("--get or --post required")
        if self.get and self.post:
            raise OptionError("use --get or --post not both")
        for address in self.get:
            if address.count(PLACE) != 1:
                raise OptionError(f"--get {address} must contain {PLACE} once, in place of the message")
        for address in (*self.get, *self.post):
            try:
                parse_target(address.replace(PLACE, "x"))
            except ValueError as error:
                raise OptionError(f"--{'get' if self.get else 'post'} {error}") from None
        if not 0 <= self.sample <= 1:
            raise OptionError("--sample must be between 0.0 and 1.0")
        parse_headers(self.header)


TABLE: Final = ToolTable(
    PROGRAM,
    NsqToHttpOptions,
    command="to-http",
    about="""
Sends an HTTP request for every message of a topic: a POST with the message as its body, or a GET
with the message in the URL. A message is finished when the answer has status 200 (any 2xx for a
POST). Otherwise it is requeued, with growing delays, and given up after five attempts (never,
with --consumer-opt=max_attempts,0).
""",
    examples=(
        "nsq_to_http --topic=orders --post=http://127.0.0.1:8000/orders --nsqd-tcp-address=127.0.0.1:4150",
        "nsq_to_http --topic=orders --post=https://a.example/in --post=https://b.example/in \\",
        "            --header='Authorization: Bearer abc' --lookupd-http-address=127.0.0.1:4161",
        "nsq_to_http --topic=clicks --get='http://127.0.0.1:8000/click?data=%s' --sample=0.1 \\",
        "            --nsqd-tcp-address=127.0.0.1:4150",
    ),
)


def parse_headers(texts: Sequence[str]) -> dict[str, str]:
    """Name and value of each `Name: value`. Raises OptionError."""
    headers = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition(":"))
        if not name or not value or " " in name or not text.isprintable():
            raise OptionError(f"--header {text!r} should be of the form 'Name: value'")
        headers[name] = value
    return headers


class Forwarder:
    """Sends messages to the URLs that the mode selects."""

    def __init__(self, options: NsqToHttpOptions) -> None:
        self._is_post = bool(options.post)
        self._addresses = options.post or options.get
        self._targets = {address: parse_target(address) for address in options.post}
        self._sample = options.sample
        self._client = HttpClient(options.http_client_connect_timeout, options.http_client_request_timeout)
        self._timings = Timings(options.status_every, "requests")
        headers = {"User-Agent": f"{PROGRAM} v{NSQ_VERSION}"}
        if self._is_post:
            headers["Content-Type"] = options.content_type
        given = parse_headers(options.header)
        replaced = {name.lower() for name in given}
        self._headers = {name: text for name, text in headers.items() if name.lower() not in replaced} | given
        self._fixed = replaced
        """Names of the headers that are the same in every request."""
        self._pool = make_pool(options.mode, self._addresses)
        if self._pool is None and options.mode not in EVERY_ADDRESS:
            logger.warning("unknown mode %s: every URL gets every message", options.mode)

    async def handle(self, message: Message) -> None:
        if self._sample < 1 and private_random.random() >= self._sample:
            return
        if self._pool is None:
            for address in self._addresses:
                if not await self._send(address, message):
                    raise Requeue
            return
        address = self._pool.pick(monotonic())
        began = monotonic()
        ok = await self._send(address, message)
        now = monotonic()
        self._pool.report(address, ok, now - began, now)
        if not ok:
            raise Requeue

    async def _send(self, address: str, message: Message) -> bool:
        began = monotonic()
        try:
            if self._is_post:
                target = self._targets[address]
                status = await self._client.request("POST", target, self._headers_of(message), message.body)
                ok = 200 <= status < 300
            else:
                target = parse_target(address.replace(PLACE, quote_plus(message.body)))
                status = await self._client.request("GET", target, self._headers_of(message))
                ok = status == 200
        except RequestFailed as error:
            logger.warning("%s: message %s: %s", without_secrets(address), message.id.decode(), error)
            return False
        if not ok:
            logger.warning("%s: message %s: status %d", without_secrets(address), message.id.decode(), status)
        self._timings.add(monotonic() - began)
        return ok

    def _headers_of(self, message: Message) -> dict[str, str]:
        """Headers of the request, with those of the message. The flags win."""
        found = http_headers(message.headers)
        if not found:
            return self._headers
        found = {name: value for name, value in found.items() if name.lower() not in self._fixed}
        return {**self._headers, **found}

    async def close(self) -> None:
        await self._client.close()


def http_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """A message's headers as those of a request: the reverse of what nsqd's /pub does."""
    found = {}
    for name, value in without_origin(headers).items():
        if name in SAME_NAME or name.startswith("ce-"):
            shown = name
        elif name == "content-type" and "ce-specversion" in headers:
            shown = "Content-Type"
        else:
            shown = f"X-Nsq-Header-{name}"
        # CloudEvents wants %xx in its headers. Elsewhere only a line feed, for example, would do
        # harm.
        found[shown] = quote(value, safe=_CLOUD_EVENT_SAFE) if shown.startswith("ce-") else _escaped(value)
    return found


def _escaped(value: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f]", lambda found: quote(found[0]), value)


async def work(options: NsqToHttpOptions, ending: Ending) -> None:
    forwarder = Forwarder(options)
    consumer = options.consumer(options.topic, options.channel, forwarder.handle, concurrency=options.n)
    try:
        await run_consumers([consumer], options.nsqd_tcp_address, ending)
    finally:
        await forwarder.close()


main = partial(run_tool, TABLE, work)


if __name__ == "__main__":
    sys.exit(main())
