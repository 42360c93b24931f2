"""Create, delete, empty, pause and unpause topics and channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsparq.http.api import LATER, ApiError, Endpoint, Later, Request
from nsparq.server.api.parameters import (
    CHANNEL,
    CHANNEL_ERRORS,
    CHANNEL_NAME_ERRORS,
    TOPIC,
    find_channel,
    find_topic_and_name,
    is_valid,
)

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

NEW_TOPIC_ERRORS: Final = ((400, "MISSING_ARG_TOPIC"), (400, "INVALID_TOPIC"))
"""Errors of new_topic_name()."""
_KNOWN_TOPIC_ERRORS: Final = ((400, "MISSING_ARG_TOPIC"), (404, "TOPIC_NOT_FOUND"))


def new_topic_name(broker: Broker, request: Request) -> str:
    """The name of a topic that may not exist yet."""
    topic = request.parameters.get("topic")
    if topic is None:
        raise ApiError(400, "MISSING_ARG_TOPIC")
    if topic not in broker.topics and not is_valid(topic):
        raise ApiError(400, "INVALID_TOPIC")
    return topic


def _for_topic(action: str, summary: str, errors: tuple[tuple[int, str], ...]) -> Endpoint:
    return Endpoint(
        method="POST",
        path=f"/topic/{action}",
        summary=summary,
        params=(TOPIC,),
        permission="admin",
        errors=errors,
    )


def _for_channel(action: str, summary: str, errors: tuple[tuple[int, str], ...] = CHANNEL_ERRORS) -> Endpoint:
    return Endpoint(
        method="POST",
        path=f"/channel/{action}",
        summary=summary,
        params=(TOPIC, CHANNEL),
        permission="admin",
        errors=errors,
    )


class TopicsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._broker = nsqd.broker

    @_for_topic("create", "Create a topic. Not an error if it exists.", NEW_TOPIC_ERRORS)
    def create(self, request: Request) -> Later | None:
        topic = self._broker.get_topic(new_topic_name(self._broker, request))
        return _answer_new(self._broker, request, topic)

    @_for_topic("delete", "Delete a topic with its channels and messages.", _KNOWN_TOPIC_ERRORS)
    def delete(self, request: Request) -> Later:
        self._broker.delete_topic(self._find(request).name)
        return _answer_when_durable(self._broker, request)

    @_for_topic(
        "empty",
        "Drop the messages that no channel has received.",
        (*NEW_TOPIC_ERRORS, (404, "TOPIC_NOT_FOUND")),
    )
    def empty(self, request: Request) -> Later:
        new_topic_name(self._broker, request)
        self._find(request).empty()
        return _answer_when_durable(self._broker, request)

    @_for_topic("pause", "Stop passing messages from a topic to its channels.", _KNOWN_TOPIC_ERRORS)
    def pause(self, request: Request) -> Later:
        self._find(request).pause()
        return _answer_when_durable(self._broker, request)

    @_for_topic("unpause", "Pass messages to the channels again.", _KNOWN_TOPIC_ERRORS)
    def unpause(self, request: Request) -> Later:
        self._find(request).unpause()
        return _answer_when_durable(self._broker, request)

    def _find(self, request: Request) -> Topic:
        name = request.parameters.get("topic")
        if name is None:
            raise ApiError(400, "MISSING_ARG_TOPIC")
        topic = self._broker.topics.get(name)
        if topic is None:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return topic


class ChannelsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._broker = nsqd.broker

    @_for_channel("create", "Create a channel of a topic. Not an error if it exists.", CHANNEL_NAME_ERRORS)
    def create(self, request: Request) -> Later | None:
        topic, channel = find_topic_and_name(self._broker, request)
        topic.get_channel(channel)
        return _answer_new(self._broker, request, topic)

    @_for_channel("delete", "Delete a channel.")
    def delete(self, request: Request) -> Later:
        channel = find_channel(self._broker, request)
        channel.topic.delete_channel(channel.name)
        return _answer_when_durable(self._broker, request)

    @_for_channel("empty", "Drop all messages of a channel: waiting, in flight and deferred.")
    def empty(self, request: Request) -> Later:
        find_channel(self._broker, request).empty()
        return _answer_when_durable(self._broker, request)

    @_for_channel("pause", "Stop sending messages to clients.")
    def pause(self, request: Request) -> Later:
        find_channel(self._broker, request).pause()
        return _answer_when_durable(self._broker, request)

    @_for_channel("unpause", "Send messages to clients again.")
    def unpause(self, request: Request) -> Later:
        find_channel(self._broker, request).unpause()
        return _answer_when_durable(self._broker, request)


def _answer_when_durable(broker: Broker, request: Request) -> Later:
    """Answer once the change is on disk, so that a crash after the answer does not undo it."""
    broker.changes.when_durable(request.answer)
    return LATER


def _answer_new(broker: Broker, request: Request, topic: Topic) -> Later | None:
    """Wait for the disk only if the topic's durability requires it."""
    return _answer_when_durable(broker, request) if topic.is_synchronous else None
