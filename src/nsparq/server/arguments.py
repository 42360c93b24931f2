"""What the endpoints of nsqd's HTTP API are about: a topic and a channel, by name. With NSQ's checks in its
order, and their errors as the tables list them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from nsparq.http.api import ApiError, Param, Request
from nsparq.names import is_valid_name
from nsparq.server.schemas import NAME

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

TOPIC: Final = Param(name="topic", help="name of the topic", required=True, schema=NAME)
CHANNEL: Final = Param(name="channel", help="name of the channel", required=True, schema=NAME)

NAMED_TOPIC_ERRORS: Final = ((400, "MISSING_ARG_TOPIC"), (400, "INVALID_ARG_TOPIC"))
TOPIC_ERRORS: Final = (*NAMED_TOPIC_ERRORS, (404, "TOPIC_NOT_FOUND"))
"""Of find_topic."""
NAMED_CHANNEL_ERRORS: Final = (
    *NAMED_TOPIC_ERRORS,
    (400, "MISSING_ARG_CHANNEL"),
    (400, "INVALID_ARG_CHANNEL"),
    (404, "TOPIC_NOT_FOUND"),
)
"""Of find_topic_and_name."""
CHANNEL_ERRORS: Final = (*NAMED_CHANNEL_ERRORS, (404, "CHANNEL_NOT_FOUND"))
"""Of find_channel."""

OWNER: Final = Param(
    name="owner",
    help="who does this. The channel is theirs from now on: nobody else may commit until it is released or "
    "deleted. 409 `CHANNEL_OWNED`, with `owner` and `since`, if it is somebody else's",
    schema={"type": "string", "minLength": 1, "maxLength": 100, "pattern": "^[ -~]+$"},
)

MAX_OWNER: Final = 100
MAX_SEQUENCE: Final = 1 << 63


def is_valid(name: str) -> bool:
    return is_valid_name(name.encode("utf-8", "surrogateescape"))


def find_topic(broker: Broker, request: Request) -> Topic:
    topic = broker.topics.get(name_of(request, "topic"))
    if topic is None:
        raise ApiError(404, "TOPIC_NOT_FOUND")
    return topic


def find_topic_and_name(broker: Broker, request: Request) -> tuple[Topic, str]:
    """A topic that exists, and the name of a channel, which may not."""
    name_of(request, "topic")
    channel = name_of(request, "channel")
    return find_topic(broker, request), channel


def find_channel(broker: Broker, request: Request) -> Channel:
    topic, name = find_topic_and_name(broker, request)
    channel = topic.channels.get(name)
    if channel is None:
        raise ApiError(404, "CHANNEL_NOT_FOUND")
    return channel


def name_of(request: Request, parameter: str) -> str:
    """A valid name of a topic or channel."""
    value = request.parameters.get(parameter)
    if value is None:
        raise ApiError(400, f"MISSING_ARG_{parameter.upper()}")
    if not is_valid(value):
        raise ApiError(400, f"INVALID_ARG_{parameter.upper()}")
    return value


def owner_of(request: Request) -> str | None:
    """Who commits or seeks, if that is said."""
    owner = request.parameters.get("owner")
    if owner is not None and not (1 <= len(owner) <= MAX_OWNER and owner.isascii() and owner.isprintable()):
        raise ApiError(400, "INVALID_ARG_OWNER")
    return owner


def check_owner(channel: Channel, owner: str) -> None:
    """A channel that nobody owns is anybody's."""
    if channel.owner not in ("", owner):
        since = datetime.fromtimestamp(channel.owned_since_ns // 1_000_000_000, UTC)
        raise ApiError(409, "CHANNEL_OWNED", owner=channel.owner, since=since.isoformat())


def number_of(request: Request, parameter: str) -> int | None:
    text = request.parameters.get(parameter)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) < MAX_SEQUENCE):
        raise ApiError(400, f"INVALID_ARG_{parameter.upper()}")
    return int(text)
