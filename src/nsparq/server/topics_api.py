"""The log and its cursors for many topics at a time: a reader of thousands of topics asks once for all.

The single-topic endpoints are in log_api. A topic that fails here has its error beside its name, and the
others are answered all the same. All of it is done in slices, so that clients of other topics are served in
between.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsparq.errors import Exiting
from nsparq.http.api import ApiError, Request, Result
from nsparq.names import is_valid_name
from nsparq.server.arguments import MAX_SEQUENCE, check_owner, name_of, number_of, owner_of
from nsparq.storage.ranges import OffsetAhead

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

MAX_WAIT_MS: Final = 10_000
SLICE: Final = 200
"""Topics that are looked at, or committed to, before the event loop has its turn."""
SLICE_ON_DISK: Final = 10
"""The same where each topic has a file written."""
LOOK_S: Final = 0.01
LOOK_PER_TOPIC_S: Final = 20e-6
"""While a request waits, how often to see whether anything was published; and if so, how often to look at its
topics, so that it costs a few hundredths of a core, however many they are. To wake the request with the
publish would cost every publisher something. Other changes are found when the time is up."""
MASK: Final = (1 << 63) - 1
NOT_THERE: Final = 0
"""The state of a topic that does not exist."""


class TopicsApi:
    """The handlers of one nsqd."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd

    def topics(self, request: Request) -> set[str]:
        """The names in the body, for the guard; none if the body makes no sense, which the handler says."""
        try:
            return {*_topics(request)}
        except ApiError:
            return set()

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
            seen = self._nsqd.broker.upkeep.use_count
            changed = await self._changed(known, channel)
            if changed or self._nsqd.is_stopping or loop.time() >= deadline:
                return {"topics": await self._described(changed, channel)}
            await self._published(seen, loop.time() + LOOK_PER_TOPIC_S * len(known), deadline)

    async def _published(self, seen: int, earliest: float, deadline: float) -> None:
        """Wait until something was published, but not less than to `earliest`; or until the time is up."""
        nsqd, loop = self._nsqd, asyncio.get_running_loop()
        while not nsqd.is_stopping and (left := deadline - loop.time()) > 0:
            await asyncio.sleep(min(LOOK_S, left))
            if nsqd.broker.upkeep.use_count != seen and loop.time() >= earliest:
                return

    async def _changed(self, known: Mapping[str, int | None], channel: str) -> list[str]:
        topics = self._nsqd.broker.topics
        found: list[str] = []
        for number, (name, state) in enumerate(known.items()):
            if state != _state(topics.get(name), channel):
                found.append(name)
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
        return found

    async def _described(self, names: Iterable[str], channel: str) -> dict[str, Any]:
        described: dict[str, Any] = {}
        for number, name in enumerate(names):
            topic = self._nsqd.broker.topics.get(name)
            described[name] = None if topic is None else _describe(topic, channel)
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
        return described

    async def commit(self, request: Request) -> Result:
        channel, owner = name_of(request, "channel"), owner_of(request)
        answers: dict[str, Any] = {}
        claimed: list[Topic] = []
        for number, (name, incarnation, sequence) in enumerate(_places(request)):
            try:
                topic = self._find(name, incarnation)
                found = _existing(topic, channel)
                if owner is not None or sequence:
                    check_owner(found, owner or "")
                answers[name] = _commit(found, sequence)
                if owner is not None and owner != found.owner:
                    _claim(found, owner)
                    claimed.append(topic)
            except ApiError as error:
                answers[name] = _refusal(error)
            turn = SLICE_ON_DISK if claimed else SLICE
            if number % turn == turn - 1:
                await asyncio.sleep(0)
        for topic in claimed:
            await self._nsqd.durable(topic)
        return {"topics": answers}

    async def seek(self, request: Request) -> Result:
        channel, owner = name_of(request, "channel"), owner_of(request)
        answers: dict[str, Any] = {}
        moved: list[Topic] = []
        for number, (name, incarnation, sequence) in enumerate(_places(request)):
            try:
                topic = self._find(name, incarnation)
                answers[name] = _seek(topic, channel, sequence, owner)
                moved.append(topic)
            except ApiError as error:
                answers[name] = _refusal(error)
            if number % SLICE_ON_DISK == SLICE_ON_DISK - 1:
                await asyncio.sleep(0)
        for topic in moved:
            await self._nsqd.durable(topic)
        return {"topics": answers}

    def _find(self, name: str, incarnation: str) -> Topic:
        topic = self._nsqd.broker.topics.get(name)
        if topic is None:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        if incarnation != topic.incarnation:
            raise ApiError(409, "WRONG_INCARNATION", incarnation=topic.incarnation)
        return topic


def _existing(topic: Topic, name: str) -> Channel:
    channel = topic.channels.get(name)
    if channel is None:
        raise ApiError(404, "CHANNEL_NOT_FOUND")
    return channel


def _commit(channel: Channel, sequence: int) -> dict[str, Any]:
    try:
        channel.commit(sequence)
    except OffsetAhead as error:
        raise ApiError(416, "OFFSET_AHEAD", latest=error.latest) from error
    return {"cursor": channel.cursor.position, "depth": channel.depth}


def _claim(channel: Channel, owner: str) -> None:
    try:
        channel.claim(owner)
    except OSError as error:
        raise ApiError(500, "DISK_REFUSES", reason=str(error)) from error


def _seek(topic: Topic, name: str, sequence: int, owner: str | None) -> dict[str, Any]:
    """Like the endpoint for a single topic, but a channel that is not there is created at the number."""
    channel = topic.channels.get(name)
    is_new = channel is None
    if channel is not None and owner is not None:
        check_owner(channel, owner)
    try:
        if channel is None:
            channel = topic.get_channel(name, sequence)
        else:
            channel.seek(sequence)
    except Exiting as error:
        raise ApiError(503, "EXITING") from error
    except OSError as error:
        raise ApiError(500, "DISK_REFUSES", reason=str(error)) from error
    if owner is not None:
        _claim(channel, owner)
    return {"cursor": channel.cursor.position, "depth": channel.depth, "created": is_new}


def _state(topic: Topic | None, channel: str) -> int:
    """Changes with everything that is said about a topic. The next run of the daemon has other numbers."""
    if topic is None:
        return NOT_THERE
    start, end = topic.log.start, topic.log.end
    messages = topic.log.count(start, end)
    ours = topic.channels.get(channel)
    said = _channel_state(ours), "" if ours is None else ours.owner
    return hash((topic.incarnation, start, end, topic.visible_end, messages, said)) & MASK or 1


def _channel_state(channel: Channel | None) -> str:
    if channel is None:
        return "missing"
    return "paused" if channel.paused else "there"


def _describe(topic: Topic, channel: str) -> dict[str, Any]:
    found, ours = topic.positions(), topic.channels.get(channel)
    return {
        "incarnation": found.incarnation,
        "earliest": found.earliest,
        "latest": found.latest,
        "visible": topic.visible_end,
        "messages": found.messages,
        "bytes": found.size_bytes,
        "channel": _channel_state(ours),
        "owner": "" if ours is None else ours.owner,
        "state": _state(topic, channel),
    }


def _refusal(error: ApiError) -> dict[str, Any]:
    return {"message": error.code, "status": error.status, **error.more}


def _topics(request: Request) -> dict[str, Any]:
    """What the body says, by topic. Raises ApiError."""
    try:
        content = json.loads(request.body)
        topics = content["topics"]
        if not isinstance(topics, dict) or not all(is_valid_name(name.encode()) for name in topics):
            raise ValueError("not names of topics")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ApiError(400, "INVALID_BODY") from error
    return topics


def _is_whole(value: Any) -> bool:
    """To JSON 1.0 is an integer too."""
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
