"""A channel as a cursor over the log: seek, commit, hold and release."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final

from nsparq.http.api import ApiError, Endpoint, Param, Request, Result
from nsparq.server.api.parameters import (
    CHANNEL,
    CHANNEL_ERRORS,
    COUNT,
    FLAG,
    INCARNATION,
    OWNER,
    SEQUENCE,
    TEXT,
    TIME,
    TIME_HELP,
    TOPIC,
    archive_errors,
    check_incarnation,
    check_owner,
    find_channel,
    flag_of,
    number_of,
    obj,
    offset_errors,
    owner_of,
    time_ns_of,
)

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

DEFAULT_HOLD_S: Final = 60
MAX_HOLD_S: Final = 600

_HOLD: Final = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_OWNER_ERRORS: Final = ((400, "INVALID_ARG_OWNER"), (409, "CHANNEL_OWNED"))


class CursorsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._broker = nsqd.broker

    @Endpoint(
        method="POST",
        path="/channel/seek",
        summary="Move a channel. It delivers every message from the new position on, and none before it.",
        details="All messages before the new position are dropped, also those in flight, requeued or "
        "deferred. Messages in flight after it are sent again. Deferred messages after it keep their time. "
        "Exactly one of `to`, `sequence` and `time` must be given.",
        params=(
            TOPIC,
            CHANNEL,
            Param(name="to", help="`start` or `end`", schema={"type": "string", "enum": ["start", "end"]}),
            Param(name="sequence", help="a sequence number", schema=SEQUENCE),
            Param(
                name="time",
                help=f"the first message published at this time or later: {TIME_HELP}",
                schema=TIME,
            ),
            INCARNATION,
            OWNER,
            Param(name="dry_run", help="`true`: only report what would happen", schema=FLAG),
        ),
        permission="admin",
        success="the old position, the new one, how many messages are delivered again, and how many "
        "are skipped",
        success_schema=obj({"cursor": COUNT, "target": COUNT, "again": COUNT, "skipped": COUNT}),
        errors=(
            *CHANNEL_ERRORS,
            (400, "MISSING_ARG_TARGET"),
            (400, "INVALID_ARG_TO"),
            (400, "INVALID_ARG_SEQUENCE"),
            (400, "INVALID_ARG_TIME"),
            (400, "INVALID_ARG_DRY_RUN"),
            (409, "WRONG_INCARNATION"),
            *_OWNER_ERRORS,
            (503, "ARCHIVE_UNAVAILABLE"),
        ),
    )
    async def seek(self, request: Request) -> Result:
        channel = find_channel(self._broker, request)
        topic = channel.topic
        check_incarnation(topic, request.parameters.get("incarnation"))
        is_dry_run = flag_of(request, "dry_run")
        owner = owner_of(request)
        target = await self._target(request, topic)
        if channel.is_exiting:
            raise ApiError(404, "CHANNEL_NOT_FOUND")
        if owner is not None:
            check_owner(channel, owner)
        if is_dry_run:
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
            search = topic.log.search_time(time_ns_of(parameters["time"]))
            with archive_errors():
                return await self._nsqd.in_disk_thread(search.run, is_remote=search.is_remote)
        if parameters["to"] not in ("start", "end"):
            raise ApiError(400, "INVALID_ARG_TO")
        return topic.log.start if parameters["to"] == "start" else topic.visible_end

    @Endpoint(
        method="POST",
        path="/channel/commit",
        summary="Finish all messages of a channel before a sequence number.",
        details="For readers of ranges: the channel's depth is then their lag, and nsqd keeps the messages "
        "that they have not committed. A commit never moves a channel back, so repeating one is harmless. "
        "0 only asks for the position. A channel with an owner refuses any other number without `owner`.",
        params=(
            TOPIC,
            CHANNEL,
            Param(
                name="sequence", help="the first number that is not finished", required=True, schema=SEQUENCE
            ),
            INCARNATION,
            OWNER,
            Param(
                name="hold",
                help="commit only while this hold of `/channel/hold` lasts; otherwise 409 `NOT_HELD`",
                schema=_HOLD,
            ),
        ),
        permission="subscribe",
        success="the channel's cursor and depth afterwards",
        success_schema=obj({"cursor": COUNT, "depth": COUNT}),
        errors=(
            *CHANNEL_ERRORS,
            (400, "MISSING_ARG_SEQUENCE"),
            (400, "INVALID_ARG_SEQUENCE"),
            (409, "WRONG_INCARNATION"),
            *_OWNER_ERRORS,
            (409, "NOT_HELD"),
            (416, "OFFSET_AHEAD"),
        ),
    )
    def commit(self, request: Request) -> Result | Awaitable[Result]:
        channel = find_channel(self._broker, request)
        check_incarnation(channel.topic, request.parameters.get("incarnation"))
        sequence = number_of(request, "sequence")
        if sequence is None:
            raise ApiError(400, "MISSING_ARG_SEQUENCE")
        owner = owner_of(request)
        if owner is not None or sequence:
            check_owner(channel, owner or "")
        held = request.parameters.get("hold")
        if held is not None and (not held or held != channel.hold):
            raise ApiError(409, "NOT_HELD")
        with offset_errors():
            channel.commit(sequence)
        answer: Result = {"cursor": channel.cursor.position, "depth": channel.depth}
        if owner is None or owner == channel.owner:
            return answer
        return self._claim(channel, owner, answer)

    @Endpoint(
        method="POST",
        path="/channel/hold",
        summary="Stop sending messages to clients for some seconds.",
        details="For a client that looks at a channel's messages and then commits them: nothing changes in "
        "between. The hold ends by itself, and when nsqd stops. A later hold replaces it.",
        params=(
            TOPIC,
            CHANNEL,
            Param(
                name="for_seconds",
                help="duration, at most 600 (default 60); 0 only ends the hold that `hold` names",
                schema={"type": "integer", "minimum": 0, "maximum": 600},
            ),
            Param(
                name="hold",
                help="end this hold first; 409 `NOT_HELD` if it has already ended or was replaced",
                schema=_HOLD,
            ),
        ),
        permission="admin",
        success="the name of the new hold; empty if there is none",
        success_schema=obj({"hold": TEXT}),
        errors=(*CHANNEL_ERRORS, (400, "INVALID_ARG_FOR_SECONDS"), (409, "NOT_HELD")),
    )
    def hold(self, request: Request) -> Result:
        channel = find_channel(self._broker, request)
        seconds, held = number_of(request, "for_seconds"), request.parameters.get("hold")
        seconds = DEFAULT_HOLD_S if seconds is None else seconds
        if seconds > MAX_HOLD_S:
            raise ApiError(400, "INVALID_ARG_FOR_SECONDS")
        if held is not None and (not held or not channel.end_hold(held)):
            raise ApiError(409, "NOT_HELD")
        if not seconds:
            return {"hold": ""}
        name = secrets.token_hex(8)
        channel.start_hold(name)
        asyncio.get_running_loop().call_later(seconds, channel.end_hold, name)
        return {"hold": name}

    @Endpoint(
        method="POST",
        path="/channel/release",
        summary="Remove a channel's owner. The next client that commits with `owner` gets the channel.",
        details="For a query that will not run again, when a new query takes over its channel. Stop the "
        "owner first: an owner that is running takes its channel back.",
        params=(TOPIC, CHANNEL),
        permission="admin",
        success="the previous owner; empty if there was none",
        success_schema=obj({"owner": TEXT}),
        errors=CHANNEL_ERRORS,
    )
    async def release(self, request: Request) -> Result:
        channel = find_channel(self._broker, request)
        return await self._claim(channel, "", {"owner": channel.owner})

    async def _claim(self, channel: Channel, owner: str, answer: Result) -> Result:
        channel.claim(owner)
        await self._nsqd.durable(channel.topic)
        return answer
