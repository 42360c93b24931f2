"""What nsqd's HTTP API adds to NSQ's: the topic as a log, the channel as a cursor over it.

Sequence numbers are the log's own. A reader names the incarnation that its numbers belong to: a topic that
was deleted and created again has the same name and other messages.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nsparq.broker.peek import STATES, PeekedMessage, peek_channel, peek_topic
from nsparq.errors import CorruptBatch
from nsparq.flags import parse_duration
from nsparq.http.api import ApiError, Request, Response, Result
from nsparq.server.arguments import check_owner, find_channel, find_topic, number_of, owner_of
from nsparq.server.log_endpoints import BATCHES_TYPE, DEFAULT_PEEK, MAX_PEEK
from nsparq.storage.ranges import OffsetAhead, OffsetGone

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

DEFAULT_READ: Final = 4 << 20
MAX_READ: Final = 16 << 20
MAX_READERS: Final = 8
"""Ranges read at a time; others wait."""
MAX_PEEK_BYTES: Final = 4 << 20
NS_PER_S: Final = 1_000_000_000
DEFAULT_HOLD_S: Final = 60
MAX_HOLD_S: Final = 600
MAX_TIME_S: Final = (1 << 63) // NS_PER_S

T = TypeVar("T")


class LogApi:
    """The handlers of one nsqd."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._readers = asyncio.Semaphore(MAX_READERS)

    # reading

    def positions(self, request: Request) -> Result:
        topic = find_topic(self._nsqd.broker, request)
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
        }

    async def read(self, request: Request) -> Response:
        topic = find_topic(self._nsqd.broker, request)
        _check_incarnation(request, topic)
        start = number_of(request, "from")
        if start is None:
            raise ApiError(400, "MISSING_ARG_FROM")
        wanted = number_of(request, "max_bytes")
        if wanted == 0:
            raise ApiError(400, "INVALID_ARG_MAX_BYTES")
        size = min(DEFAULT_READ if wanted is None else wanted, MAX_READ)
        is_verified = _flag(request, "verify")
        async with self._readers:
            if topic.is_exiting:
                raise ApiError(404, "TOPIC_NOT_FOUND")
            try:
                found = topic.log.locate(start, size)
            except OffsetGone as error:
                raise ApiError(410, "OFFSET_GONE", earliest=error.earliest) from error
            except OffsetAhead as error:
                raise ApiError(416, "OFFSET_AHEAD", latest=error.latest) from error
            lost = 0
            if is_verified:
                verified = await self._in_thread(found.read_verified)
                data = verified.data
                if verified.lost and not topic.is_exiting:
                    topic.log.note_lost(found, verified.lost)
                lost = sum(damage.next - damage.first for damage in verified.lost)
            else:
                try:
                    data = await self._in_thread(found.read) if found.size else b""
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

    async def peek_topic(self, request: Request) -> Result:
        topic = find_topic(self._nsqd.broker, request)
        start = number_of(request, "from")
        try:
            peek = peek_topic(topic, start, _peek_count(request), MAX_PEEK_BYTES)
        except OffsetGone as error:
            raise ApiError(410, "OFFSET_GONE", earliest=error.earliest) from error
        except OffsetAhead as error:
            raise ApiError(416, "OFFSET_AHEAD", latest=error.latest) from error
        found = await self._in_thread(peek.read)
        return {"messages": [_shown(message) for message in found], "missing": peek.missing}

    async def peek_channel(self, request: Request) -> Result:
        channel = find_channel(self._nsqd.broker, request)
        asked = request.parameters.get("state")
        states = STATES if asked is None else tuple(dict.fromkeys(asked.split(",")))
        if not set(STATES).issuperset(states):
            raise ApiError(400, "INVALID_ARG_STATE")
        peek = peek_channel(channel, states, _peek_count(request), MAX_PEEK_BYTES)
        found = await self._in_thread(peek.read)
        return {"messages": [_shown(message) for message in found], "missing": peek.missing}

    # moving

    async def seek(self, request: Request) -> Result:
        channel = find_channel(self._nsqd.broker, request)
        topic = channel.topic
        _check_incarnation(request, topic)
        is_rehearsal = _flag(request, "dry_run")
        owner = owner_of(request)
        target = await self._target(request, topic)
        if channel.is_exiting:
            raise ApiError(404, "CHANNEL_NOT_FOUND")
        if owner is not None:
            check_owner(channel, owner)
        if is_rehearsal:
            return channel.plan_seek(target)._asdict()
        if owner is not None:
            channel.claim(owner)
        plan = channel.seek(target)
        await self._nsqd.durable(topic)
        return plan._asdict()

    async def _target(self, request: Request, topic: Topic) -> int:
        parameters = request.parameters
        given = [name for name in ("to", "sequence", "time") if name in parameters]
        if len(given) != 1:
            raise ApiError(400, "MISSING_ARG_TARGET")
        if given == ["sequence"]:
            sequence = number_of(request, "sequence")
            assert sequence is not None
            return sequence
        if given == ["time"]:
            search = topic.log.search_time(_time_ns(parameters["time"]))
            return await self._in_thread(search.run)
        if parameters["to"] not in ("start", "end"):
            raise ApiError(400, "INVALID_ARG_TO")
        return topic.log.start if parameters["to"] == "start" else topic.visible_end

    def commit(self, request: Request) -> Result | Awaitable[Result]:
        channel = find_channel(self._nsqd.broker, request)
        _check_incarnation(request, channel.topic)
        sequence = number_of(request, "sequence")
        if sequence is None:
            raise ApiError(400, "MISSING_ARG_SEQUENCE")
        owner = owner_of(request)
        if owner is not None or sequence:
            check_owner(channel, owner or "")
        held = request.parameters.get("hold")
        if held is not None and held != channel.hold:
            raise ApiError(409, "NOT_HELD")
        try:
            channel.commit(sequence)
        except OffsetAhead as error:
            raise ApiError(416, "OFFSET_AHEAD", latest=error.latest) from error
        said = {"cursor": channel.cursor.position, "depth": channel.depth}
        if owner is None or owner == channel.owner:
            return said
        return self._claimed(channel, owner, said)

    def hold(self, request: Request) -> Result:
        channel = find_channel(self._nsqd.broker, request)
        seconds, held = number_of(request, "for_seconds"), request.parameters.get("hold")
        seconds = DEFAULT_HOLD_S if seconds is None else seconds
        if seconds > MAX_HOLD_S:
            raise ApiError(400, "INVALID_ARG_FOR_SECONDS")
        if held is not None and not channel.end_hold(held):
            raise ApiError(409, "NOT_HELD")
        if not seconds:
            return {"hold": ""}
        name = secrets.token_hex(8)
        channel.start_hold(name)
        asyncio.get_running_loop().call_later(seconds, channel.end_hold, name)
        return {"hold": name}

    async def release(self, request: Request) -> Result:
        channel = find_channel(self._nsqd.broker, request)
        return await self._claimed(channel, "", {"owner": channel.owner})

    async def _claimed(self, channel: Channel, owner: str, answer: Result) -> Result:
        channel.claim(owner)
        await self._nsqd.durable(channel.topic)
        return answer

    # settings

    def settings(self, request: Request) -> Result:
        return _settings_of(find_topic(self._nsqd.broker, request))

    async def change_settings(self, request: Request) -> Result:
        topic = find_topic(self._nsqd.broker, request)
        try:
            wanted = json.loads(request.body)
            if not isinstance(wanted, dict):
                raise ValueError("not an object")
            age = wanted.get("retention_age")
            if isinstance(age, str):
                wanted["retention_age"] = _duration(age)
            topic.change_settings(wanted)
        except (ValueError, OverflowError, RecursionError) as error:
            raise ApiError(400, "INVALID_SETTINGS", reason=str(error)) from error
        changed = _settings_of(topic)
        await self._nsqd.durable(topic)
        return changed

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._nsqd.in_disk_thread(work)


def _flag(request: Request, parameter: str) -> bool:
    """Yes or no. Where a wrong guess would do the real thing instead of a rehearsal, nothing is guessed."""
    text = request.parameters.get(parameter, "false")
    if text not in ("true", "1", "false", "0"):
        raise ApiError(400, f"INVALID_ARG_{parameter.upper()}")
    return text in ("true", "1")


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        raise ValueError(f"retention_age must be a duration such as 24h, not {text!r}") from None


def _peek_count(request: Request) -> int:
    count = number_of(request, "count")
    if count is None:
        return DEFAULT_PEEK
    if not 1 <= count <= MAX_PEEK:
        raise ApiError(400, "INVALID_ARG_COUNT")
    return count


def _time_ns(text: str) -> int:
    """Unix seconds, with a fraction if need be, or RFC 3339. Exact: a message's own time leads to it."""
    try:
        seconds = Decimal(text)
    except InvalidOperation:
        seconds = _unix_time(text)
    if not seconds.is_finite() or not 0 <= seconds < MAX_TIME_S:
        raise ApiError(400, "INVALID_ARG_TIME")
    return int(seconds * NS_PER_S)


def _unix_time(text: str) -> Decimal:
    try:
        since = datetime.fromisoformat(text) - datetime.fromtimestamp(0, UTC)
    except (ValueError, TypeError, OverflowError):  # a TypeError: it has no time zone
        raise ApiError(400, "INVALID_ARG_TIME") from None
    return Decimal(since // timedelta(microseconds=1)) / 1_000_000


def _check_incarnation(request: Request, topic: Topic) -> None:
    wanted = request.parameters.get("incarnation")
    if wanted is not None and wanted != topic.incarnation:
        raise ApiError(409, "WRONG_INCARNATION", incarnation=topic.incarnation)


def _settings_of(topic: Topic) -> dict[str, Any]:
    options = topic.broker.options
    own = dataclasses.asdict(topic.settings)
    flags = {
        "retention_age": options.retention_age,
        "retention_bytes": options.retention_bytes,
        "durability": options.durability,
    }
    if topic.is_ephemeral:
        flags = {"retention_age": 0.0, "retention_bytes": 0, "durability": "memory"}
    effective = {name: flags[name] if value is None else value for name, value in own.items()}
    return {**own, "effective": effective}


def _shown(message: PeekedMessage) -> dict[str, Any]:
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
    try:
        shown["body"] = message.body.decode()
    except UnicodeDecodeError:
        shown["body_base64"] = base64.b64encode(message.body).decode()
    return shown
