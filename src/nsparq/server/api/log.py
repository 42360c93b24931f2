"""Read a topic's log: its positions, ranges of it, and single messages without consuming them.

Sequence numbers are the log's own. A reader names the incarnation that its numbers belong to: a
topic that was deleted and created again has the same name and other messages.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.peek import (
    READY,
    STATES,
    STORED,
    Peek,
    PeekedMessage,
    peek_channel,
    peek_topic,
)
from nsparq.errors import CorruptBatch
from nsparq.http.api import ApiError, Endpoint, Param, Request, Response, Result
from nsparq.server.api.parameters import (
    CHANNEL,
    CHANNEL_ERRORS,
    COUNT,
    FLAG,
    INCARNATION,
    INT,
    SEQUENCE,
    TEXT,
    TIME,
    TIME_HELP,
    TOPIC,
    TOPIC_ERRORS,
    archive_errors,
    check_incarnation,
    fields,
    find_channel,
    find_topic,
    flag_of,
    listed,
    number_of,
    obj,
    offset_errors,
    time_ns_of,
)

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

BATCHES_TYPE: Final = "application/vnd.nsparq.batches"
DEFAULT_READ: Final = 4 << 20
MAX_READ: Final = 16 << 20
MAX_READERS: Final = 8
"""Ranges that are read at the same time. Other requests wait."""
DEFAULT_PEEK: Final = 10
MAX_PEEK: Final = 1000
MAX_PEEK_BYTES: Final = 4 << 20

_STATE: Final = "(ready|requeued|in_flight|deferred)"
_COUNT: Final = Param(
    name="count",
    help=f"number of messages (default {DEFAULT_PEEK}, at most {MAX_PEEK})",
    schema={"type": "integer", "minimum": 1, "maximum": MAX_PEEK},
)
_PEEKED: Final = (
    "an object. A body that is not UTF-8 comes as `body_base64`. Long bodies are cut. `headers` is there "
    "if the message has any. `missing` counts messages that a damaged disk has lost"
)
_MESSAGES: Final = obj(
    {
        "messages": listed(
            obj(
                fields(COUNT, "sequence", "attempts", "size")
                | {"id": TEXT, "timestamp": INT, "state": {"type": "string", "enum": [STORED, *STATES]}},
                fields(INT, "due", "deadline")
                | fields(TEXT, "client", "body", "body_base64")
                | {"headers": {"type": "object", "additionalProperties": TEXT}},
            )
        ),
        "missing": COUNT,
    }
)


class LogApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._broker = nsqd.broker
        self._readers = asyncio.Semaphore(MAX_READERS)

    @Endpoint(
        method="GET",
        path="/topic/positions",
        summary="Get the start and end of a topic's log.",
        details="`earliest` is the oldest sequence number that can be read. `latest` is the number of "
        "the next message. `visible` is where channels stop: `latest`, or the position at which the "
        "topic was paused. `bytes` includes what is only in the archive. `gaps` are half-open ranges of "
        "numbers that have no message. Timestamps are in nanoseconds, 0 for an empty log.",
        params=(TOPIC,),
        permission="subscribe",
        success="an object",
        success_schema=obj(
            fields(TEXT, "topic", "incarnation")
            | fields(COUNT, "earliest", "latest", "visible", "messages", "bytes")
            | fields(INT, "first_timestamp", "last_timestamp")
            | {"gaps": listed(listed(COUNT))}
        ),
        errors=TOPIC_ERRORS,
    )
    def positions(self, request: Request) -> Result:
        topic = find_topic(self._broker, request)
        found = topic.positions()
        return {
            "topic": topic.name,
            "incarnation": found.incarnation,
            "earliest": found.earliest,
            "latest": found.latest,
            "visible": topic.visible_end,
            "messages": found.messages,
            "bytes": found.size_bytes,
            "first_timestamp": found.first_ns,
            "last_timestamp": found.last_ns,
            "gaps": topic.log.gaps.ranges,
        }

    @Endpoint(
        method="GET",
        path="/topic/read",
        summary="Read a range of a topic's log, in the format of the files on disk.",
        details="The answer consists of whole batches, each with a table of its messages' lengths: see "
        "docs/internals/storage.md for the format. The first batch may begin before `from`. An empty answer "
        "means that there is nothing more yet. Each batch has a checksum. A reader that finds a wrong "
        "one asks again from there with `verify`, and gets the messages that can be read. The JSON of "
        "a 410 also has the `earliest` number, that of a 416 the `latest`, that of a 409 the "
        "`incarnation`.",
        params=(
            TOPIC,
            Param(name="from", help="the first sequence number to read", required=True, schema=SEQUENCE),
            Param(
                name="max_bytes",
                help="approximate size of the answer (default 4 MiB, at most 16 MiB)",
                schema=SEQUENCE | {"minimum": 1},
            ),
            INCARNATION,
            Param(name="verify", help="`true`: check each batch and leave out damaged ones", schema=FLAG),
        ),
        permission="subscribe",
        success="batches",
        success_type=BATCHES_TYPE,
        success_headers=(
            ("X-Nsparq-Incarnation", "incarnation that the numbers belong to"),
            ("X-Nsparq-First", "the first number of the first batch"),
            ("X-Nsparq-Next", "`from` of the next request"),
            ("X-Nsparq-Latest", "the number of the next message to be published"),
            ("X-Nsparq-Gaps", "half-open ranges of unused numbers in the range, as JSON: `[[5, 8]]`"),
            ("X-Nsparq-Lost", "how many messages of the range are damaged, with `verify`"),
        ),
        errors=(
            *TOPIC_ERRORS,
            (400, "MISSING_ARG_FROM"),
            (400, "INVALID_ARG_FROM"),
            (400, "INVALID_ARG_MAX_BYTES"),
            (400, "INVALID_ARG_VERIFY"),
            (409, "WRONG_INCARNATION"),
            (410, "OFFSET_GONE"),
            (416, "OFFSET_AHEAD"),
            (503, "ARCHIVE_UNAVAILABLE"),
            (500, "LOG_DAMAGED"),
        ),
    )
    async def read(self, request: Request) -> Response:
        topic = find_topic(self._broker, request)
        check_incarnation(topic, request.parameters.get("incarnation"))
        start = number_of(request, "from")
        if start is None:
            raise ApiError(400, "MISSING_ARG_FROM")
        wanted = number_of(request, "max_bytes")
        if wanted == 0:
            raise ApiError(400, "INVALID_ARG_MAX_BYTES")
        size = min(DEFAULT_READ if wanted is None else wanted, MAX_READ)
        is_verified = flag_of(request, "verify")
        async with self._readers:
            if topic.is_exiting:
                raise ApiError(404, "TOPIC_NOT_FOUND")
            with offset_errors():
                found = topic.log.locate(start, size)
            lost = 0
            if is_verified:
                with archive_errors():
                    verified = await self._nsqd.in_disk_thread(found.read_verified, is_remote=found.is_remote)
                data = verified.data
                if verified.lost and not topic.is_exiting:
                    topic.log.note_lost(found, verified.lost)
                lost = sum(damage.next - damage.first for damage in verified.lost)
            else:
                try:
                    with archive_errors():
                        read = self._nsqd.in_disk_thread
                        data = await read(found.read, is_remote=found.is_remote) if found.size else b""
                except CorruptBatch as error:
                    raise ApiError(500, "LOG_DAMAGED") from error
        headers = (
            ("X-Nsparq-Incarnation", topic.incarnation),
            ("X-Nsparq-First", str(found.first)),
            ("X-Nsparq-Next", str(found.next)),
            ("X-Nsparq-Latest", str(topic.log.end)),
            ("X-Nsparq-Gaps", json.dumps(found.gaps)),
            ("X-Nsparq-Lost", str(lost)),
        )
        return Response(body=data, content_type=BATCHES_TYPE, headers=headers)

    @Endpoint(
        method="GET",
        path="/topic/peek",
        summary="Look at messages of a topic without consuming them.",
        details="The newest ones, or those that `from`, `before` or `time` names; give at most one of these. "
        "They come in the order of their numbers.",
        params=(
            TOPIC,
            Param(name="from", help="the first sequence number", schema=SEQUENCE),
            Param(name="before", help="the messages just before this sequence number", schema=SEQUENCE),
            Param(
                name="time", help=f"from the first message of this time or later on: {TIME_HELP}", schema=TIME
            ),
            _COUNT,
        ),
        permission="subscribe",
        success=_PEEKED,
        success_schema=_MESSAGES,
        errors=(
            *TOPIC_ERRORS,
            (400, "INVALID_ARG_FROM"),
            (400, "INVALID_ARG_BEFORE"),
            (400, "INVALID_ARG_TIME"),
            (400, "INVALID_ARG_COUNT"),
            (410, "OFFSET_GONE"),
            (416, "OFFSET_AHEAD"),
            (503, "ARCHIVE_UNAVAILABLE"),
        ),
    )
    async def peek_topic(self, request: Request) -> Result:
        topic = find_topic(self._broker, request)
        start, count = number_of(request, "from"), _peek_count(request)
        if sum(name in request.parameters for name in ("from", "before", "time")) > 1:
            raise ApiError(400, "INVALID_ARG_FROM")
        if (time := request.parameters.get("time")) is not None:
            search = topic.log.search_time(time_ns_of(time))
            with archive_errors():
                start = await self._nsqd.in_disk_thread(search.run, is_remote=search.is_remote)
            start = max(start, topic.log.start)
        with offset_errors():
            peek = peek_topic(topic, start, count, MAX_PEEK_BYTES, before=number_of(request, "before"))
        return await self._peeked(peek)

    @Endpoint(
        method="GET",
        path="/channel/peek",
        summary="Look at the messages of a channel without consuming them.",
        details="In flight (with attempts, deadline and client), requeued, deferred (with the time at "
        "which they are due), and ready. With `from`, only ready ones, unless `state` says otherwise.",
        params=(
            TOPIC,
            CHANNEL,
            Param(
                name="state",
                help="only `ready`, `requeued`, `in_flight` or `deferred`; several with commas",
                schema={"type": "string", "pattern": f"^{_STATE}(,{_STATE})*$"},
            ),
            Param(name="from", help="of the ready messages, the first sequence number", schema=SEQUENCE),
            _COUNT,
        ),
        permission="subscribe",
        success=_PEEKED,
        success_schema=_MESSAGES,
        errors=(
            *CHANNEL_ERRORS,
            (400, "INVALID_ARG_STATE"),
            (400, "INVALID_ARG_FROM"),
            (400, "INVALID_ARG_COUNT"),
            (503, "ARCHIVE_UNAVAILABLE"),
        ),
    )
    async def peek_channel(self, request: Request) -> Result:
        channel = find_channel(self._broker, request)
        asked = request.parameters.get("state")
        start = number_of(request, "from")
        default = STATES if start is None else (READY,)
        states = default if asked is None else tuple(dict.fromkeys(asked.split(",")))
        if not set(STATES).issuperset(states):
            raise ApiError(400, "INVALID_ARG_STATE")
        count = _peek_count(request)
        return await self._peeked(peek_channel(channel, states, count, MAX_PEEK_BYTES, start=start or 0))

    async def _peeked(self, peek: Peek) -> Result:
        with archive_errors():
            found = await self._nsqd.in_disk_thread(peek.read, is_remote=peek.is_remote)
        return {"messages": [_message(one) for one in found], "missing": peek.missing}


def _peek_count(request: Request) -> int:
    count = number_of(request, "count")
    if count is None:
        return DEFAULT_PEEK
    if not 1 <= count <= MAX_PEEK:
        raise ApiError(400, "INVALID_ARG_COUNT")
    return count


def _message(message: PeekedMessage) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": message.id,
        "sequence": message.sequence,
        "timestamp": message.timestamp_ns,
        "attempts": message.attempts,
        "state": message.state,
        "size": message.size,
    }
    if message.due_ns is not None:
        shown["due"] = message.due_ns
    if message.deadline_ns is not None:
        shown["deadline"] = message.deadline_ns
    if message.client:
        shown["client"] = message.client
    if message.headers:
        shown["headers"] = message.headers
    try:
        shown["body"] = message.body.decode()
    except UnicodeDecodeError:
        shown["body_base64"] = base64.b64encode(message.body).decode()
    return shown
