"""POST /pub and /mpub, and the headers of a request that become headers of its messages:
docs/reference/headers.md has the table."""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from nsparq.broker.idempotence import MAX_DIGITS
from nsparq.broker.seen_numbers import NumberRefused
from nsparq.errors import Exiting, FatalClientError, StorageError, SyncFailed
from nsparq.headers import decode_headers, encode_headers
from nsparq.http.api import LATER, TEXT_TYPE, ApiError, Endpoint, Later, Param, Request, Result
from nsparq.packed import PackedBodies
from nsparq.server.api.parameters import FLAG, TOPIC, flag_of
from nsparq.server.api.topics import NEW_TOPIC_ERRORS, new_topic_name
from nsparq.wire.header_blocks import take_headers
from nsparq.wire.mpub import decode_multiple

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

_DEFER = re.compile(r"[+-]?[0-9]{1,19}")
_OK: Final = {"type": "string", "const": "OK"}
_HEADERS: Final = (
    "`X-Nsq-Header-…`, `traceparent` and some other headers of the request become "
    "[headers of the message](headers.md#http)."
)

_HEADER_PREFIX: Final = b"x-nsq-header-"
_CLOUD_EVENT: Final = b"ce-"
_TRACE: Final = frozenset((b"traceparent", b"tracestate", b"baggage"))
_BEGINNINGS: Final = frozenset(b"xXtTbBcC")
"""First letters of the names that count here."""


class PublishApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._broker = nsqd.broker
        self._options = nsqd.options

    @Endpoint(
        method="POST",
        path="/pub",
        summary="Publish one message.",
        details="The answer comes when the message is as durable as `--durability`, or the topic's own "
        f"setting, requires. {_HEADERS}",
        params=(
            TOPIC,
            Param(
                name="defer",
                help="milliseconds before delivery, up to `--max-req-timeout`",
                schema={"type": "integer", "minimum": 0, "maximum": 3_600_000},
            ),
            Param(
                name="headers",
                help="`true`: the message begins with the 32-bit size of its header block, and the block; "
                "headers of the request are ignored",
                schema=FLAG,
            ),
        ),
        permission="publish",
        body_help="the message",
        body_schema={"type": "string", "format": "binary", "minLength": 1},
        max_body_of=lambda api: api._options.max_msg_size,
        too_big="MSG_TOO_BIG",
        success="`OK`",
        success_type=TEXT_TYPE,
        success_schema=_OK,
        errors=(
            (400, "MSG_EMPTY"),
            *NEW_TOPIC_ERRORS,
            (400, "INVALID_DEFER"),
            (400, "INVALID_ARG_HEADERS"),
            (400, "INVALID_HEADERS"),
            (413, "BAD_MESSAGE"),
            (409, "FENCED"),
            (409, "NUMBER_TOO_OLD"),
            (503, "EXITING"),
            (503, "FSYNC_FAILED"),
        ),
    )
    def publish_one(self, request: Request) -> Result | Later:
        body = request.body
        if not body:
            raise ApiError(400, "MSG_EMPTY")
        topic = new_topic_name(self._broker, request)
        parameters = request.parameters
        defer = parameters.get("defer")
        defer_ms = 0
        if defer is not None:
            self._create_topic(topic)
            defer_ms = int(defer) if _DEFER.fullmatch(defer) else -1
            if not 0 <= defer_ms <= self._options.max_req_timeout * 1000:
                raise ApiError(400, "INVALID_DEFER")
        bodies = PackedBodies(array("I", (len(body),)), body)
        if "headers" in parameters and flag_of(request, "headers"):
            try:
                bodies = take_headers(bodies, "PUB")
            except FatalClientError as error:
                raise ApiError(413, error.code.removeprefix("E_")) from error
        elif block := _block_of(request):
            bodies = _with_headers(bodies, block, self._options.max_msg_size)
        return self._publish(request, topic, bodies, defer_ms)

    @Endpoint(
        method="POST",
        path="/mpub",
        summary="Publish several messages, all or none.",
        details="One message per line; empty lines are skipped. With `binary`: a 32-bit count, then "
        f"for each message its 32-bit size and its bytes. Integers are big-endian. {_HEADERS} "
        "`X-Nsq-Header-nsq-number` is the number of the first message; the others have the next ones.",
        params=(
            TOPIC,
            Param(name="binary", help="any value but `false` and `0`: the binary form"),
            Param(
                name="headers",
                help="`true`, with `binary`: each message begins with the 32-bit size of its header block, "
                "and the block; headers of the request are ignored",
                schema=FLAG,
            ),
        ),
        permission="publish",
        body_help="the messages",
        max_body_of=lambda api: api._options.max_body_size,
        success="`OK`",
        success_type=TEXT_TYPE,
        success_schema=_OK,
        errors=(
            *NEW_TOPIC_ERRORS,
            (400, "INVALID_ARG_HEADERS"),
            (400, "INVALID_HEADERS"),
            (413, "MSG_TOO_BIG"),
            (413, "BAD_BODY"),
            (413, "BAD_MESSAGE"),
            (409, "FENCED"),
            (409, "NUMBER_TOO_OLD"),
            (503, "EXITING"),
            (503, "FSYNC_FAILED"),
        ),
    )
    def publish_many(self, request: Request) -> Result | Later:
        topic = new_topic_name(self._broker, request)
        self._create_topic(topic)
        is_binary = request.parameters.get("binary", "false") not in ("false", "0")
        has_blocks = flag_of(request, "headers")
        if has_blocks and not is_binary:
            raise ApiError(400, "INVALID_ARG_HEADERS")
        block = b"" if has_blocks else _block_of(request)
        if is_binary:
            try:
                bodies = decode_multiple(request.body, self._nsqd.limits, has_headers=has_blocks)
            except FatalClientError as error:
                raise ApiError(413, error.code.removeprefix("E_")) from error
        else:
            bodies = self._split_lines(request.body)
        if block:
            bodies = _with_headers(bodies, block, self._options.max_msg_size)
        return self._publish(request, topic, bodies, 0) if bodies else "OK"

    def _split_lines(self, body: bytes) -> PackedBodies:
        lines = [line for line in body.split(b"\n") if line]
        if lines and max(map(len, lines)) > self._options.max_msg_size:
            raise ApiError(413, "MSG_TOO_BIG")
        return PackedBodies.of(lines)

    def _create_topic(self, name: str) -> None:
        """NSQ creates the topic before it checks the rest of the request."""
        try:
            self._broker.get_topic(name)
        except (Exiting, StorageError, OSError) as error:
            raise ApiError(503, "EXITING") from error

    def _publish(self, request: Request, topic: str, bodies: PackedBodies, defer_ms: int) -> Later:
        def done(error: Exception | None) -> None:
            code = "FSYNC_FAILED" if isinstance(error, SyncFailed) else "EXITING"
            request.answer("OK" if error is None else ApiError(503, code))

        try:
            found = self._broker.topics.get(topic) or self._broker.get_topic(topic)
            found.publishing.publish(bodies, defer_ms * 1_000_000, done)
        except NumberRefused as error:
            status = 400 if error.code == "BAD_MESSAGE" else 409
            code = "INVALID_HEADERS" if status == 400 else error.code
            raise ApiError(status, code, reason=str(error)) from error
        except (Exiting, StorageError, OSError) as error:
            raise ApiError(503, "EXITING") from error
        return LATER


def _block_of(request: Request) -> bytes:
    """The header block for the messages of a request; empty if it names no headers. Raises
    ApiError."""
    found: dict[bytes, list[bytes]] = {}
    for raw_name, value in request.headers:
        if raw_name[0] not in _BEGINNINGS:
            continue
        name = raw_name.lower()
        if name.startswith(_HEADER_PREFIX):
            found.setdefault(name.removeprefix(_HEADER_PREFIX), []).append(value)
        elif name.startswith(_CLOUD_EVENT):
            # CloudEvents' HTTP binding has other characters than printable ASCII as %xx.
            found.setdefault(name, []).append(unquote_to_bytes(value))
        elif name in _TRACE:
            found.setdefault(name, []).append(value)
    if not found:
        return b""
    if b"ce-specversion" in found and (content_type := request.header("Content-Type")):
        found[b"content-type"] = [content_type.encode("latin-1")]
    try:
        # A field that a client sends in several lines counts as one, as in HTTP.
        return encode_headers({name.decode(): b",".join(values).decode() for name, values in found.items()})
    except ValueError as error:
        raise ApiError(400, "INVALID_HEADERS", reason=str(error)) from error


def _with_headers(bodies: PackedBodies, block: bytes, max_size: int) -> PackedBodies:
    """The same messages, each with this header block. Raises ApiError if one is too big then."""
    if not block or not bodies.lengths:
        return bodies
    if max(bodies.lengths) + 4 + len(block) > max_size:
        raise ApiError(413, "MSG_TOO_BIG")
    return bodies.with_blocks(PackedBodies.of(_blocks(block, len(bodies.lengths))))


def _blocks(block: bytes, count: int) -> list[bytes]:
    """A block for each of the messages. The number of a producer is that of the first message."""
    number = decode_headers(block).get("nsq-number", "") if count > 1 else ""
    if not number.isdecimal() or len(number) > MAX_DIGITS:
        # Refused if the messages have a producer.
        return [block] * count
    headers = decode_headers(block)
    return [encode_headers(headers | {"nsq-number": str(int(number) + index)}) for index in range(count)]
