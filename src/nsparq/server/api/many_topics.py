"""Positions and cursors of many topics in one request, for readers of thousands of topics.

If a topic fails, its error stands beside its name, and the other topics are handled all the same.
The work is done in slices, so that other clients do not wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nsparq.errors import Exiting
from nsparq.http.api import ApiError, Endpoint, Param, Request, Result
from nsparq.names import is_valid_name
from nsparq.server.api.parameters import (
    BOOLEAN,
    CHANNEL,
    COUNT,
    INT,
    MAX_SEQUENCE,
    NAME,
    OWNER,
    SEQUENCE,
    TEXT,
    check_incarnation,
    check_owner,
    fields,
    name_of,
    number_of,
    obj,
    offset_errors,
    owner_of,
)

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

T = TypeVar("T")

MAX_BODY: Final = 8 << 20
MAX_WAIT_MS: Final = 10_000
SLICE: Final = 200
"""Topics to look at, or to commit to, before the event loop runs other work."""
SLICE_ON_DISK: Final = 10
"""The same if a file is written for each topic."""
LOOK_S: Final = 0.01
"""How often a waiting request checks whether anything was published. Waking it from the publish
would cost every publisher time."""
LOOK_PER_TOPIC_S: Final = 20e-6
"""Shortest time between two checks of all topics, per topic: keeps a waiting request below a few
hundredths of a core, however many topics it has."""
MASK: Final = (1 << 63) - 1
NO_TOPIC: Final = 0
"""The state of a topic that does not exist."""
Moved = dict[str, Any]
"""The answer for one topic: the position of its channel, or a refusal."""

_PLACE: Final = {
    "type": "array",
    "prefixItems": [TEXT, SEQUENCE],
    "minItems": 2,
    "maxItems": 2,
    "items": False,
}


def _by_topic(value: Any) -> dict[str, Any]:
    return obj({"topics": {"type": "object", "propertyNames": NAME, "additionalProperties": value}})


_DESCRIBED: Final = obj(
    fields(COUNT, "earliest", "latest", "visible", "messages", "bytes", "state")
    | {"channel": {"type": "string", "enum": ["missing", "there", "paused"]}}
    | fields(TEXT, "incarnation", "owner")
)
_MOVED: Final = _by_topic(
    {
        "anyOf": [
            obj({"cursor": COUNT, "depth": COUNT}, {"created": BOOLEAN}),
            obj({"message": TEXT, "status": INT}),
        ]
    }
)
_MOVE_ERRORS: Final = (
    (400, "MISSING_ARG_CHANNEL"),
    (400, "INVALID_ARG_CHANNEL"),
    (400, "INVALID_ARG_OWNER"),
    (400, "INVALID_BODY"),
)


class ManyTopicsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._broker = nsqd.broker

    def topics(self, request: Request) -> set[str]:
        """The topics in the body, for the guard. Empty for a malformed body."""
        try:
            return {*_topics(request)}
        except ApiError:
            return set()

    @Endpoint(
        method="POST",
        path="/topics/positions",
        summary="Get the start and end of many topics' logs, and the state of one channel of each.",
        details="As `/topic/positions` without the timestamps. Each topic also has `channel`: `missing`, "
        "`there` or `paused`, and the channel's `owner`. `state` is a number that changes with every other "
        "value. Send it with the next request in place of `null`: unchanged topics are then left out. A "
        "topic that does not exist is `null`, and its state is 0.",
        params=(
            Param(name="channel", help="the channel", schema=NAME),
            Param(
                name="wait",
                help="milliseconds to wait for a publish if nothing has changed yet (default 0, at most "
                f"{MAX_WAIT_MS}); other changes are reported when this time is over",
                schema={"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS},
            ),
        ),
        permission="subscribe",
        topics=topics,
        body_help='the last known state of each topic, or null: `{"topics": {"orders": null}}`',
        body_type="application/json",
        body_schema=_by_topic({"type": ["integer", "null"]}),
        max_body=MAX_BODY,
        success="an object by topic, of the topics whose state has changed",
        success_schema=_by_topic({"anyOf": [_DESCRIBED, {"type": "null"}]}),
        errors=((400, "INVALID_ARG_CHANNEL"), (400, "INVALID_ARG_WAIT"), (400, "INVALID_BODY")),
    )
    async def positions(self, request: Request) -> Result:
        channel = name_of(request, "channel") if "channel" in request.parameters else ""
        wait_ms = number_of(request, "wait") or 0
        if wait_ms > MAX_WAIT_MS:
            raise ApiError(400, "INVALID_ARG_WAIT")
        known = _topics(request)
        if not all(state is None or _is_whole(state) for state in known.values()):
            raise ApiError(400, "INVALID_BODY")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            use_count = self._broker.upkeep.use_count
            changed = await self._changed(known, channel)
            if changed or self._nsqd.is_stopping or loop.time() >= deadline:
                return {"topics": await self._described(changed, channel)}
            await self._wait_for_use(use_count, loop.time() + LOOK_PER_TOPIC_S * len(known), deadline)

    async def _wait_for_use(self, use_count: int, earliest: float, deadline: float) -> None:
        """Wait at least until `earliest` and until a topic is used, or until the deadline."""
        loop = asyncio.get_running_loop()
        while not self._nsqd.is_stopping and (left := deadline - loop.time()) > 0:
            await asyncio.sleep(min(LOOK_S, left))
            if self._broker.upkeep.use_count != use_count and loop.time() >= earliest:
                return

    async def _changed(self, known: Mapping[str, int | None], channel: str) -> list[str]:
        topics, states = self._broker.topics, _in_slices(known.items())
        return [name async for name, state in states if state != _state(topics.get(name), channel)]

    async def _described(self, names: Iterable[str], channel: str) -> dict[str, Any]:
        topics = self._broker.topics
        return {name: _describe(topics.get(name), channel) async for name in _in_slices(names)}

    @Endpoint(
        method="POST",
        path="/channels/commit",
        summary="Finish all messages of a channel before a sequence number, in many topics.",
        details="As `/channel/commit` for each topic. A refusal has a `message` and a `status`.",
        params=(CHANNEL, OWNER),
        permission="subscribe",
        topics=topics,
        body_help='incarnation and first unfinished number: `{"topics": {"orders": ["9865…", 17]}}`',
        body_type="application/json",
        body_schema=_by_topic(_PLACE),
        max_body=MAX_BODY,
        success="by topic, the channel's cursor and depth afterwards, or why it was refused",
        success_schema=_MOVED,
        errors=_MOVE_ERRORS,
    )
    async def commit(self, request: Request) -> Result:
        channel, owner = name_of(request, "channel"), owner_of(request)
        return await self._move(request, lambda topic, sequence: _commit(topic, sequence, channel, owner))

    @Endpoint(
        method="POST",
        path="/channels/seek",
        summary="Move a channel of many topics to sequence numbers. Missing channels are created.",
        details="As `/channel/seek` for each topic. A refusal has a `message` and a `status`.",
        params=(CHANNEL, OWNER),
        permission="admin",
        topics=topics,
        body_help='incarnation and sequence number: `{"topics": {"orders": ["9865…", 17]}}`',
        body_type="application/json",
        body_schema=_by_topic(_PLACE),
        max_body=MAX_BODY,
        success="by topic, the channel's cursor and depth afterwards and whether it was created; or why "
        "it was refused",
        success_schema=_MOVED,
        errors=_MOVE_ERRORS,
    )
    async def seek(self, request: Request) -> Result:
        channel, owner = name_of(request, "channel"), owner_of(request)
        return await self._move(request, lambda topic, sequence: _seek(topic, sequence, channel, owner))

    async def _move(self, request: Request, move: Callable[[Topic, int], tuple[Moved, bool]]) -> Result:
        """Move the channel of each topic in the body. `move` gives the answer, and whether it has
        written a file."""
        answers: dict[str, Moved] = {}
        written: list[Topic] = []
        for number, (name, incarnation, sequence) in enumerate(_places(request), 1):
            try:
                topic = self._broker.topics.get(name)
                if topic is None:
                    raise ApiError(404, "TOPIC_NOT_FOUND")
                check_incarnation(topic, incarnation)
                answers[name], is_written = move(topic, sequence)
                if is_written:
                    written.append(topic)
            except ApiError as error:
                answers[name] = _refusal(error)
            except Exiting:
                answers[name] = _refusal(ApiError(503, "EXITING"))
            except OSError as error:
                answers[name] = _refusal(ApiError(500, "DISK_REFUSES", reason=str(error)))
            if number % (SLICE_ON_DISK if written else SLICE) == 0:
                await asyncio.sleep(0)
        for topic in written:
            await self._nsqd.durable(topic)
        return {"topics": answers}


async def _in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """The items. After each SLICE of them the event loop runs other work."""
    for number, item in enumerate(items, 1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)


def _commit(topic: Topic, sequence: int, name: str, owner: str | None) -> tuple[Moved, bool]:
    """As /channel/commit."""
    channel = topic.channels.get(name)
    if channel is None:
        raise ApiError(404, "CHANNEL_NOT_FOUND")
    if owner is not None or sequence:
        check_owner(channel, owner or "")
    with offset_errors():
        channel.commit(sequence)
    is_claimed = owner is not None and owner != channel.owner
    if owner is not None:
        channel.claim(owner)
    return {"cursor": channel.cursor.position, "depth": channel.depth}, is_claimed


def _seek(topic: Topic, sequence: int, name: str, owner: str | None) -> tuple[Moved, bool]:
    """As /channel/seek, but a missing channel is created at the sequence number."""
    channel = topic.channels.get(name)
    is_new = channel is None
    if channel is not None and owner is not None:
        check_owner(channel, owner)
    if channel is None:
        channel = topic.get_channel(name, sequence)
    else:
        channel.seek(sequence)
    if owner is not None:
        channel.claim(owner)
    return {"cursor": channel.cursor.position, "depth": channel.depth, "created": is_new}, True


def _state(topic: Topic | None, channel: str) -> int:
    """A number that changes with any value of _describe(), and with each run of the daemon."""
    if topic is None:
        return NO_TOPIC
    start, end = topic.log.start, topic.log.end
    messages = topic.log.count(start, end)
    found = topic.channels.get(channel)
    channel_values = _channel_state(found), "" if found is None else found.owner
    return hash((topic.incarnation, start, end, topic.visible_end, messages, channel_values)) & MASK or 1


def _channel_state(channel: Channel | None) -> str:
    if channel is None:
        return "missing"
    return "paused" if channel.paused else "there"


def _describe(topic: Topic | None, channel: str) -> dict[str, Any] | None:
    if topic is None:
        return None
    positions, found = topic.positions(), topic.channels.get(channel)
    return {
        "incarnation": positions.incarnation,
        "earliest": positions.earliest,
        "latest": positions.latest,
        "visible": topic.visible_end,
        "messages": positions.messages,
        "bytes": positions.size_bytes,
        "channel": _channel_state(found),
        "owner": "" if found is None else found.owner,
        "state": _state(topic, channel),
    }


def _refusal(error: ApiError) -> dict[str, Any]:
    return {"message": error.code, "status": error.status, **error.more}


def _topics(request: Request) -> dict[str, Any]:
    """The values of the body by topic. Raises ApiError."""
    try:
        content = json.loads(request.body)
        topics = content["topics"]
        if not isinstance(topics, dict) or not all(is_valid_name(name.encode()) for name in topics):
            raise ValueError("not names of topics")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ApiError(400, "INVALID_BODY") from error
    return topics


def _is_whole(value: Any) -> bool:
    """Whether it is an integer. In JSON 1.0 is one, too."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _places(request: Request) -> list[tuple[str, str, int]]:
    """Topic, incarnation and sequence number. Raises ApiError."""
    places: list[tuple[str, str, int]] = []
    for topic, place in _topics(request).items():
        match place:
            case [str(incarnation), sequence] if _is_whole(sequence) and 0 <= sequence < MAX_SEQUENCE:
                places.append((topic, incarnation, int(sequence)))
            case _:
                raise ApiError(400, "INVALID_BODY")
    return places
