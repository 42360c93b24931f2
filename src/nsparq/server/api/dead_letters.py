"""Dead letters: what there is, and putting them back into the channels that they came from."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.letter_groups import LetterGroup, LetterGroups
from nsparq.broker.letters import Letter, LetterFilter, Origin, locate_letters, read_letters
from nsparq.broker.redrive import CANCELLED, FINISHED, RUNNING, Redrive, RedriveRunning
from nsparq.broker.redrive_choice import STATES, Columns, states_of
from nsparq.headers import decode_headers
from nsparq.http.api import ApiError, Endpoint, Param, Request, Result
from nsparq.server.api.parameters import (
    COUNT,
    INT,
    NAME,
    SEQUENCE,
    TEXT,
    TIME,
    TIME_HELP,
    TOPIC,
    TOPIC_ERRORS,
    archive_errors,
    fields,
    find_topic,
    is_valid,
    listed,
    name_of,
    number_of,
    obj,
    time_ns_of,
)

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

MAX_SCANS: Final = 2
"""Requests that read letters at the same time. Others wait."""
SCAN_BYTES: Final = 32 << 20
"""Bytes of letters that one request reads, at most."""
PART_BYTES: Final = 4 << 20
BODY_LIMIT: Final = 4 << 10
"""Bytes shown of the body of an example."""
HEADERS_LIMIT: Final = 4 << 10
"""Longer headers of an example are not shown."""
MAX_EXAMPLES: Final = 100
MAX_RATE: Final = 1_000_000_000

_ORIGIN: Final = "topic that the letters came from"
_FILTER: Final = (
    Param(name="channel", help="channel that the letters came from", schema=NAME),
    Param(name="reason", help="`requeued`, `timed out`, `disconnected`, `expired`", schema=TEXT),
    Param(name="since", help=f"given up at this time or later: {TIME_HELP}", schema=TIME),
    Param(name="until", help="given up before this time", schema=TIME),
    Param(name="text", help="text in the body", schema=TEXT),
    Param(
        name="field",
        help="the body is JSON and has a value here: a JSON pointer such as `/customer/id`",
        schema={"type": "string", "pattern": "^/([^~]|~[01])*$"},
    ),
    Param(name="value", help="the value is this: a text, or the JSON of another value", schema=TEXT),
)
_FILTER_ERRORS: Final = (
    (400, "INVALID_ARG_ORIGIN_TOPIC"),
    (400, "INVALID_ARG_CHANNEL"),
    (400, "INVALID_ARG_SINCE"),
    (400, "INVALID_ARG_UNTIL"),
    (400, "INVALID_ARG_FIELD"),
)
_STATES: Final = {"type": "object", "additionalProperties": COUNT}
_PROGRESS: Final = obj(
    fields(COUNT, "start", "end", "position", "letters", "foreign", "redriven")
    | fields(INT, "began", "ended")
    | {
        "topic": TEXT,
        "state": {"enum": [RUNNING, FINISHED, CANCELLED]},
        "filter": {"type": "object"},
        "rate": {"type": "number"},
        "skipped": _STATES,
        "waits_for": TEXT,
    }
)
_PROGRESS_HELP: Final = (
    "how far it has come: `position` goes from `start` to `end`. `redriven` letters were put back; "
    "`skipped` are those that match and cannot be put back, by state (see `/dead_letters`). `waits_for` "
    "says why it does not go on at the moment. Times are in nanoseconds"
)


class DeadLettersApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._broker = nsqd.broker
        self._scans = asyncio.Semaphore(MAX_SCANS)

    def topics(self, request: Request) -> list[str]:
        """For the guard: the topic of the letters, and the topic that they go back to."""
        return [request.parameters.get("topic", ""), request.parameters.get("origin_topic", "")]

    @Endpoint(
        method="GET",
        path="/dead_letters",
        summary="Get the dead letters of a topic, by channel and reason, with examples.",
        details="The parameters choose letters, and are those of `POST /dead_letters/redrive`: this request "
        "tells what that one would do. Letters that are `ready` can be put back. The others cannot: they "
        "were put back before (`redriven`), their channel is gone (`no_channel`), not kept on disk "
        "(`not_kept`) or of a Spark query (`owned`), the channel still has the message (`unfinished`), or "
        "it would expire at once (`expired`). One request reads 32 MiB of letters; `next` says where to "
        "continue, and is null at the end.",
        params=(
            TOPIC,
            Param(name="origin_topic", help=_ORIGIN, schema=NAME),
            *_FILTER,
            Param(
                name="start",
                help="sequence number to begin at; the oldest letter if not given",
                schema=SEQUENCE,
            ),
            Param(
                name="examples",
                help=f"letters to show of each group, the newest (default 1, at most {MAX_EXAMPLES})",
                schema={"type": "integer", "minimum": 1, "maximum": MAX_EXAMPLES},
            ),
        ),
        permission="subscribe",
        success="groups of letters. `letters` were looked at, and `foreign` messages that are not dead "
        "letters of nsqd. A body that is not UTF-8 comes as `body_base64`. Long bodies are cut. `headers` is "
        "there if the message has any, of at most 4 KiB. Times are in nanoseconds",
        success_schema=obj(
            fields(COUNT, "letters", "foreign")
            | {
                "next": {"type": ["integer", "null"]},
                "groups": listed(
                    obj(
                        fields(TEXT, "topic", "channel", "reason")
                        | fields(INT, "first", "last")
                        | {
                            "states": _STATES,
                            "examples": listed(
                                obj(
                                    fields(COUNT, "sequence", "attempts", "size")
                                    | fields(INT, "timestamp", "given_up")
                                    | fields(TEXT, "id", "client")
                                    | {"state": {"enum": [*STATES]}},
                                    fields(TEXT, "body", "body_base64")
                                    | {"headers": {"type": "object", "additionalProperties": TEXT}},
                                )
                            ),
                        }
                    )
                ),
            }
        ),
        errors=(
            *TOPIC_ERRORS,
            *_FILTER_ERRORS,
            (400, "INVALID_ARG_START"),
            (400, "INVALID_ARG_EXAMPLES"),
            (503, "ARCHIVE_UNAVAILABLE"),
        ),
    )
    async def show(self, request: Request) -> Result:
        topic = find_topic(self._broker, request)
        wanted = _filter_of(request)
        examples = number_of(request, "examples")
        examples = 1 if examples is None else examples
        if not 1 <= examples <= MAX_EXAMPLES:
            raise ApiError(400, "INVALID_ARG_EXAMPLES")
        topic.publishing.flush()
        position, end = max(number_of(request, "start") or 0, topic.log.start), topic.log.end
        groups = LetterGroups(examples)
        size = 0
        async with self._scans:
            while position < end and size < SCAN_BYTES and not topic.is_exiting:
                # The log may have lost its beginning meanwhile.
                position = max(position, topic.log.start)
                ranges = locate_letters(topic, position, end, PART_BYTES)
                read = partial(read_letters, ranges, position, end, wanted)
                is_remote = any(place.is_remote for place in ranges)
                with archive_errors():
                    part = await self._nsqd.in_disk_thread(read, is_remote=is_remote)
                states = {
                    origin: states_of(self._broker, topic.name, origin, Columns.of(found.matching))
                    for origin, found in part.origins.items()
                    if found.matching
                }
                await self._nsqd.in_disk_thread(partial(groups.add, part, states))
                size += sum(place.size for place in ranges)
                position = part.next
        return {
            "letters": groups.letters,
            "foreign": groups.foreign,
            "next": position if position < end else None,
            "groups": [
                _group(self._broker.first_id, origin, reason, group)
                for (origin, reason), group in sorted(groups.groups.items())
            ],
        }

    @Endpoint(
        method="POST",
        path="/dead_letters/redrive",
        summary="Put dead letters back into the channels that they came from.",
        details="The messages have their ids and publish times, and no attempts. A letter is put back at "
        "most once, also if nsqd is killed on the way; a message that fails again becomes a new letter. The "
        "answer comes at once. The redrive goes on over restarts, up to the letters that there are now. "
        "It needs the permission for both topics.",
        params=(
            TOPIC,
            Param(name="origin_topic", help=_ORIGIN, required=True, schema=NAME),
            *_FILTER,
            Param(
                name="rate",
                help="messages per second (default 0: no limit)",
                schema={"type": "number", "minimum": 0, "maximum": MAX_RATE},
            ),
        ),
        permission="admin",
        topics=topics,
        success=_PROGRESS_HELP,
        success_schema=_PROGRESS,
        errors=(
            *TOPIC_ERRORS,
            (400, "MISSING_ARG_ORIGIN_TOPIC"),
            *_FILTER_ERRORS,
            (400, "INVALID_ARG_RATE"),
            (400, "EPHEMERAL_TOPIC"),
            (409, "REDRIVE_RUNNING"),
        ),
    )
    async def start(self, request: Request) -> Result:
        topic = find_topic(self._broker, request)
        name_of(request, "origin_topic")
        wanted, rate = _filter_of(request), _rate_of(request)
        if topic.is_ephemeral:
            raise ApiError(400, "EPHEMERAL_TOPIC")
        try:
            redrive = self._broker.redrives.start(topic, wanted, rate)
        except RedriveRunning as error:
            raise ApiError(409, "REDRIVE_RUNNING") from error
        await self._nsqd.durable(topic)
        return _progress(topic.name, redrive)

    @Endpoint(
        method="GET",
        path="/dead_letters/redrive",
        summary="Get the redrive of a topic that is under way, or the last one.",
        params=(TOPIC,),
        permission="read",
        success=_PROGRESS_HELP,
        success_schema=_PROGRESS,
        errors=(*TOPIC_ERRORS, (404, "REDRIVE_NOT_FOUND")),
    )
    def progress(self, request: Request) -> Result:
        name, redrive = self._find(request)
        return _progress(name, redrive)

    @Endpoint(
        method="POST",
        path="/dead_letters/redrive/cancel",
        summary="End a redrive. Letters that it has not put back stay as they are.",
        params=(TOPIC,),
        permission="admin",
        success=_PROGRESS_HELP,
        success_schema=_PROGRESS,
        errors=(*TOPIC_ERRORS, (404, "REDRIVE_NOT_FOUND")),
    )
    async def cancel(self, request: Request) -> Result:
        name, redrive = self._find(request)
        redrive.cancel()
        await self._nsqd.durable(find_topic(self._broker, request))
        return _progress(name, redrive)

    def _find(self, request: Request) -> tuple[str, Redrive]:
        topic = find_topic(self._broker, request)
        redrive = self._broker.redrives.find(topic)
        if redrive is None:
            raise ApiError(404, "REDRIVE_NOT_FOUND")
        return topic.name, redrive


def _filter_of(request: Request) -> LetterFilter:
    given = request.parameters
    for name in ("origin_topic", "channel"):
        if name in given and not is_valid(given[name]):
            raise ApiError(400, f"INVALID_ARG_{name.upper()}")
    try:
        return LetterFilter(
            **{name: given.get(name, "") for name in ("origin_topic", "channel", "reason", "text", "field")},
            since_ns=time_ns_of(given["since"], "SINCE") if "since" in given else 0,
            until_ns=time_ns_of(given["until"], "UNTIL") if "until" in given else 0,
            value=given.get("value"),
        )
    except ValueError as error:
        raise ApiError(400, "INVALID_ARG_FIELD", reason=str(error)) from error


def _rate_of(request: Request) -> float:
    try:
        rate = float(request.parameters.get("rate", "0"))
    except ValueError:
        rate = -1
    if not 0 <= rate <= MAX_RATE:
        raise ApiError(400, "INVALID_ARG_RATE")
    return rate


def _progress(name: str, redrive: Redrive) -> dict[str, Any]:
    shown = asdict(redrive.progress) | {"filter": redrive.progress.filter.stored()}
    began, ended = shown.pop("began_ns"), shown.pop("ended_ns")
    return {"topic": name, **shown, "began": began, "ended": ended, "waits_for": redrive.waits_for}


def _group(first_id: int, origin: Origin, reason: str, group: LetterGroup) -> dict[str, Any]:
    return {
        "topic": origin[0],
        "channel": origin[1],
        "reason": reason,
        "states": dict(group.states),
        "first": group.first_ns,
        "last": group.last_ns,
        "examples": [_example(first_id, letter, state) for letter, state in reversed(group.examples)],
    }


def _example(first_id: int, letter: Letter, state: str) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "sequence": letter.number,
        "id": f"{first_id + letter.sequence:016x}",
        "timestamp": letter.timestamp_ns,
        "attempts": letter.attempts,
        "client": letter.client,
        "given_up": letter.given_up_ns,
        "state": state,
        "size": len(letter.body),
    }
    if letter.block and len(letter.block) <= HEADERS_LIMIT:
        shown["headers"] = decode_headers(letter.block)
    body = letter.body[:BODY_LIMIT]
    try:
        shown["body"] = body.decode()
    except UnicodeDecodeError:
        shown["body_base64"] = base64.b64encode(body).decode()
    return shown
