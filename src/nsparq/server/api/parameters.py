"""Parameters that several endpoints take, with their checks, errors and JSON schemas.

Names are checked in NSQ's order, with NSQ's errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

from nsparq.errors import ArchiveUnavailable
from nsparq.http.api import ApiError, Param, Request
from nsparq.names import is_valid_name
from nsparq.storage.log_range import OffsetAhead, OffsetGone

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

MAX_OWNER: Final = 100
MAX_SEQUENCE: Final = 1 << 63
NS_PER_S: Final = 1_000_000_000
MAX_TIME_S: Final = (1 << 63) // NS_PER_S

NAME: Final = {"type": "string", "pattern": "^[.a-zA-Z0-9_-]+(#ephemeral)?$", "maxLength": 64}
"""The name of a topic or channel."""
SEQUENCE: Final = {"type": "integer", "minimum": 0, "maximum": MAX_SEQUENCE - 1}
INT: Final = {"type": "integer"}
COUNT: Final = {"type": "integer", "minimum": 0}
TEXT: Final = {"type": "string"}
BOOLEAN: Final = {"type": "boolean"}
FLAG: Final = {"type": "string", "enum": ["true", "1", "false", "0"]}
TIME: Final = {
    "anyOf": [
        {"type": "number", "minimum": 0, "maximum": 9e9},
        {"type": "string", "format": "date-time"},
    ]
}
TIME_HELP: Final = "Unix seconds or RFC 3339"


def obj(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these properties. Later versions may add others."""
    return {"type": "object", "required": [*required], "properties": required | (optional or {})}


def fields(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    """Properties of the same type."""
    return dict.fromkeys(names, schema)


def listed(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


TOPIC: Final = Param(name="topic", help="name of the topic", required=True, schema=NAME)
CHANNEL: Final = Param(name="channel", help="name of the channel", required=True, schema=NAME)
INCARNATION: Final = Param(
    name="incarnation",
    help="the incarnation that the sequence numbers belong to; 409 `WRONG_INCARNATION` if the topic "
    "has another one now",
)
OWNER: Final = Param(
    name="owner",
    help="the client's name. The client owns the channel from now on: nobody else may commit until "
    "the channel is released or deleted. 409 `CHANNEL_OWNED`, with `owner` and `since`, if somebody "
    "else owns it",
    schema={"type": "string", "minLength": 1, "maxLength": MAX_OWNER, "pattern": "^[ -~]+$"},
)

TOPIC_NAME_ERRORS: Final = ((400, "MISSING_ARG_TOPIC"), (400, "INVALID_ARG_TOPIC"))
TOPIC_ERRORS: Final = (*TOPIC_NAME_ERRORS, (404, "TOPIC_NOT_FOUND"))
"""Errors of find_topic()."""
CHANNEL_NAME_ERRORS: Final = (
    *TOPIC_NAME_ERRORS,
    (400, "MISSING_ARG_CHANNEL"),
    (400, "INVALID_ARG_CHANNEL"),
    (404, "TOPIC_NOT_FOUND"),
)
"""Errors of find_topic_and_name()."""
CHANNEL_ERRORS: Final = (*CHANNEL_NAME_ERRORS, (404, "CHANNEL_NOT_FOUND"))
"""Errors of find_channel()."""


def is_valid(name: str) -> bool:
    return is_valid_name(name.encode("utf-8", "surrogateescape"))


def name_of(request: Request, parameter: str) -> str:
    """A valid name of a topic or channel."""
    value = request.parameters.get(parameter)
    if value is None:
        raise ApiError(400, f"MISSING_ARG_{parameter.upper()}")
    if not is_valid(value):
        raise ApiError(400, f"INVALID_ARG_{parameter.upper()}")
    return value


def find_topic(broker: Broker, request: Request) -> Topic:
    topic = broker.topics.get(name_of(request, "topic"))
    if topic is None:
        raise ApiError(404, "TOPIC_NOT_FOUND")
    return topic


def find_topic_and_name(broker: Broker, request: Request) -> tuple[Topic, str]:
    """An existing topic, and the name of a channel that may not exist."""
    name_of(request, "topic")
    channel = name_of(request, "channel")
    return find_topic(broker, request), channel


def find_channel(broker: Broker, request: Request) -> Channel:
    topic, name = find_topic_and_name(broker, request)
    channel = topic.channels.get(name)
    if channel is None:
        raise ApiError(404, "CHANNEL_NOT_FOUND")
    return channel


def check_incarnation(topic: Topic, wanted: str | None) -> None:
    if wanted is not None and wanted != topic.incarnation:
        raise ApiError(409, "WRONG_INCARNATION", incarnation=topic.incarnation)


@contextmanager
def offset_errors() -> Iterator[None]:
    """Turn the errors of a position in the log into ApiError."""
    try:
        yield
    except OffsetGone as error:
        raise ApiError(410, "OFFSET_GONE", earliest=error.earliest) from error
    except OffsetAhead as error:
        raise ApiError(416, "OFFSET_AHEAD", latest=error.latest) from error


@contextmanager
def archive_errors() -> Iterator[None]:
    """Turn the error of an archive that is away into ApiError. Trying again helps."""
    try:
        yield
    except ArchiveUnavailable as error:
        raise ApiError(503, "ARCHIVE_UNAVAILABLE", reason=str(error)) from error


def owner_of(request: Request) -> str | None:
    owner = request.parameters.get("owner")
    if owner is not None and not (1 <= len(owner) <= MAX_OWNER and owner.isascii() and owner.isprintable()):
        raise ApiError(400, "INVALID_ARG_OWNER")
    return owner


def check_owner(channel: Channel, owner: str) -> None:
    """Raise ApiError if somebody else owns the channel."""
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


def flag_of(request: Request, parameter: str) -> bool:
    """A boolean that is false by default. Any other value is an error: a mistyped `dry_run` must
    not do the real thing."""
    text = request.parameters.get(parameter, "false")
    if text not in ("true", "1", "false", "0"):
        raise ApiError(400, f"INVALID_ARG_{parameter.upper()}")
    return text in ("true", "1")


def time_ns_of(text: str, name: str = "TIME") -> int:
    """Unix seconds, possibly with a fraction, or RFC 3339. Exact to the nanosecond, so that the
    timestamp of a message finds that message. `name` is for the error."""
    try:
        seconds = Decimal(text)
    except InvalidOperation:
        seconds = _unix_time(text, name)
    if not seconds.is_finite() or not 0 <= seconds < MAX_TIME_S:
        raise ApiError(400, f"INVALID_ARG_{name}")
    return int(seconds * NS_PER_S)


def _unix_time(text: str, name: str) -> Decimal:
    try:
        since = datetime.fromisoformat(text) - datetime.fromtimestamp(0, UTC)
    except (ValueError, TypeError, OverflowError):  # TypeError: no time zone
        raise ApiError(400, f"INVALID_ARG_{name}") from None
    return Decimal(since // timedelta(microseconds=1)) / 1_000_000
