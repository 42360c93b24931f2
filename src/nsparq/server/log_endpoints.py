"""The table of what nsqd's HTTP API adds to NSQ's: see log_api for the handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsparq.http.api import JSON_TYPE, Endpoint, Param
from nsparq.server.arguments import CHANNEL, CHANNEL_ERRORS, OWNER, TOPIC, TOPIC_ERRORS
from nsparq.server.schemas import COUNT, INT, SEQUENCE, TEXT, listed, obj

if TYPE_CHECKING:
    from nsparq.server.log_api import LogApi

BATCHES_TYPE: Final = "application/vnd.nsparq.batches"
DEFAULT_PEEK: Final = 10
MAX_PEEK: Final = 1000
MAX_SETTINGS: Final = 64 << 10

_HOLD: Final = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_FLAG: Final = {"type": "string", "enum": ["true", "1", "false", "0"]}
_STATE: Final = "(ready|requeued|in_flight|deferred)"
_INCARNATION: Final = Param(
    name="incarnation", help="the log that the numbers are of; 409 `WRONG_INCARNATION` if it is another now"
)
_OWNER_ERRORS: Final = ((400, "INVALID_ARG_OWNER"), (409, "CHANNEL_OWNED"))
_POSITIONS: Final = obj(
    {
        "topic": TEXT,
        "incarnation": TEXT,
        "earliest": COUNT,
        "latest": COUNT,
        "visible": COUNT,
        "messages": COUNT,
        "bytes": COUNT,
        "first_timestamp": INT,
        "last_timestamp": INT,
    }
)
_MESSAGES: Final = obj(
    {
        "messages": listed(
            obj(
                {
                    "id": TEXT,
                    "sequence": COUNT,
                    "timestamp": INT,
                    "attempts": COUNT,
                    "state": {
                        "type": "string",
                        "enum": ["stored", "ready", "requeued", "in_flight", "deferred"],
                    },
                    "size": COUNT,
                },
                {"due": INT, "deadline": INT, "client": TEXT, "body": TEXT, "body_base64": TEXT},
            )
        ),
        "missing": COUNT,
    }
)
_SETTINGS: Final = obj(
    {
        "retention_age": {"type": ["number", "null"]},
        "retention_bytes": {"type": ["integer", "null"]},
        "durability": {"type": ["string", "null"]},
        "effective": {"type": "object"},
    }
)

_CHANGES: Final = {
    "type": "object",
    "properties": {
        "retention_age": {
            "anyOf": [
                {"type": ["number", "null"], "minimum": 0},
                {"type": "string", "pattern": "^[0-9]{1,9}(ms|s|m|h)$"},
            ]
        },
        "retention_bytes": {"type": ["integer", "null"], "minimum": 0},
        "durability": {"enum": ["os", "fsync", "memory", None]},
    },
    "additionalProperties": False,
}

_PEEK_PARAMS: Final = (
    Param(
        name="count",
        help=f"how many (default {DEFAULT_PEEK}, at most {MAX_PEEK})",
        schema={"type": "integer", "minimum": 1, "maximum": MAX_PEEK},
    ),
)
_PEEK_ERRORS: Final = ((400, "INVALID_ARG_COUNT"),)
_PEEKED: Final = (
    "an object; a body that is not UTF-8 comes as `body_base64`, of a long one only the beginning; `missing` "
    "counts messages that a damaged disk has lost"
)


def log_endpoints(api: LogApi) -> list[Endpoint]:
    return [
        Endpoint(
            group="The log",
            method="GET",
            path="/topic/positions",
            handler=api.positions,
            summary="Where a topic's log begins and ends.",
            details="`earliest` is the oldest sequence number that can be read, `latest` the one that "
            "the next message gets, `visible` where channels stop: `latest`, or the position at which "
            "the topic was paused. Timestamps are nanoseconds, 0 for an empty log.",
            params=(TOPIC,),
            permission="subscribe",
            success="an object",
            success_type=JSON_TYPE,
            success_schema=_POSITIONS,
            errors=TOPIC_ERRORS,
        ),
        Endpoint(
            group="The log",
            method="GET",
            path="/topic/read",
            handler=api.read,
            summary="A range of a topic's log, as it lies on disk.",
            details="Whole batches, each with the table of its messages' lengths: see "
            "docs/architecture.md for the format. The first batch may begin before `from`. "
            "An empty answer: nothing more yet. Each batch has a checksum; a reader that meets a bad one "
            "asks again from there with `verify`, and gets what can be read. Beside its code, 410 names "
            "the `earliest` number there is, 416 the `latest`, 409 the `incarnation`.",
            params=(
                TOPIC,
                Param(name="from", help="the first sequence number wanted", required=True, schema=SEQUENCE),
                Param(
                    name="max_bytes",
                    help="about how many bytes (default 4 MiB, at most 16 MiB)",
                    schema=SEQUENCE | {"minimum": 1},
                ),
                _INCARNATION,
                Param(
                    name="verify",
                    help="`true`: check each batch and leave out what is damaged",
                    schema=_FLAG,
                ),
            ),
            permission="subscribe",
            success="batches",
            success_type=BATCHES_TYPE,
            success_headers=(
                ("X-Nsparq-Incarnation", "names the log that the numbers are of"),
                ("X-Nsparq-First", "the number that the first batch begins with"),
                ("X-Nsparq-Next", "`from` of the next request"),
                ("X-Nsparq-Latest", "the number that the next message gets"),
                ("X-Nsparq-Gaps", "half-open ranges in it that do not count, as JSON: `[[5, 8]]`"),
                ("X-Nsparq-Lost", "how many messages in it are lost to damage, with `verify`"),
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
                (500, "LOG_DAMAGED"),
            ),
        ),
        Endpoint(
            group="The log",
            method="GET",
            path="/topic/peek",
            handler=api.peek_topic,
            summary="Messages of a topic, without consuming them.",
            params=(
                TOPIC,
                Param(
                    name="from",
                    help="sequence number to begin at (default: so that the newest come)",
                    schema=SEQUENCE,
                ),
                *_PEEK_PARAMS,
            ),
            permission="subscribe",
            success=_PEEKED,
            success_type=JSON_TYPE,
            success_schema=_MESSAGES,
            errors=(
                *TOPIC_ERRORS,
                (400, "INVALID_ARG_FROM"),
                *_PEEK_ERRORS,
                (410, "OFFSET_GONE"),
                (416, "OFFSET_AHEAD"),
            ),
        ),
        Endpoint(
            group="The log",
            method="GET",
            path="/topic/settings",
            handler=api.settings,
            summary="A topic's own settings; null where the daemon's flags hold.",
            params=(TOPIC,),
            permission="read",
            success="the settings, and those in effect; ages in seconds",
            success_type=JSON_TYPE,
            success_schema=_SETTINGS,
            errors=TOPIC_ERRORS,
        ),
        Endpoint(
            group="The log",
            method="PUT",
            path="/topic/settings",
            handler=api.change_settings,
            summary="Change a topic's settings. Kept over restarts.",
            details="A JSON object with any of `retention_age` (seconds, or a duration such as `24h`), "
            "`retention_bytes`, `durability` (`os`, `fsync`, `memory`); null goes back to the flag.",
            params=(TOPIC,),
            permission="admin",
            keeps_body=True,
            body_help="a JSON object",
            body_type="application/json",
            body_schema=_CHANGES,
            max_body=MAX_SETTINGS,
            success="the settings, and those in effect",
            success_type=JSON_TYPE,
            success_schema=_SETTINGS,
            errors=(*TOPIC_ERRORS, (400, "INVALID_SETTINGS")),
        ),
        Endpoint(
            group="The log",
            method="POST",
            path="/channel/seek",
            handler=api.seek,
            summary="Move a channel: everything from there on is delivered (again), nothing before it.",
            details="What is in flight, requeued or deferred is dropped with what lies before; deferred "
            "messages from the target on keep their time. Exactly one of `to`, `sequence` and `time`.",
            params=(
                TOPIC,
                CHANNEL,
                Param(
                    name="to",
                    help="`start` or `end`",
                    schema={"type": "string", "enum": ["start", "end"]},
                ),
                Param(name="sequence", help="a sequence number", schema=SEQUENCE),
                Param(
                    name="time",
                    help="the first message published then or later: Unix seconds or RFC 3339",
                    schema={
                        "anyOf": [
                            {"type": "number", "minimum": 0, "maximum": 9e9},
                            {"type": "string", "format": "date-time"},
                        ]
                    },
                ),
                _INCARNATION,
                OWNER,
                Param(name="dry_run", help="`true`: only say what would happen", schema=_FLAG),
            ),
            permission="admin",
            success="where it was, where it goes, how many messages come again, how many are skipped",
            success_type=JSON_TYPE,
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
            ),
        ),
        Endpoint(
            group="The log",
            method="POST",
            path="/channel/commit",
            handler=api.commit,
            summary="Finish everything of a channel that lies before a sequence number.",
            details="For readers of ranges: the channel's depth is then their lag, and the log keeps what "
            "they have not committed. A commit never moves a channel back, so repeating one does no harm; 0 "
            "only asks where the channel is. A channel that has an owner refuses other numbers without one.",
            params=(
                TOPIC,
                CHANNEL,
                Param(name="sequence", help="the first number not done", required=True, schema=SEQUENCE),
                _INCARNATION,
                OWNER,
                Param(
                    name="hold",
                    help="only while this hold of `/channel/hold` lasts; 409 `NOT_HELD` otherwise",
                    schema=_HOLD,
                ),
            ),
            permission="subscribe",
            success="the channel's cursor and depth afterwards",
            success_type=JSON_TYPE,
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
        ),
        Endpoint(
            group="The log",
            method="POST",
            path="/channel/hold",
            handler=api.hold,
            summary="Stop the flow to clients for some seconds.",
            details="For somebody who looks at what a channel holds and then commits it, while nothing must "
            "change. It ends by itself, and with nsqd: unlike a pause it cannot be left behind. A later hold "
            "replaces it.",
            params=(
                TOPIC,
                CHANNEL,
                Param(
                    name="for_seconds",
                    help="for how long, at most 600 (default 60); 0 only ends the hold that `hold` names",
                    schema={"type": "integer", "minimum": 0, "maximum": 600},
                ),
                Param(
                    name="hold",
                    help="end this one first; 409 `NOT_HELD` if it has ended, or was replaced, already",
                    schema=_HOLD,
                ),
            ),
            permission="admin",
            success="the name of the hold; an empty text if it has ended",
            success_type=JSON_TYPE,
            success_schema=obj({"hold": TEXT}),
            errors=(*CHANNEL_ERRORS, (400, "INVALID_ARG_FOR_SECONDS"), (409, "NOT_HELD")),
        ),
        Endpoint(
            group="The log",
            method="POST",
            path="/channel/release",
            handler=api.release,
            summary="Take a channel from its owner: the next who commits with `owner` gets it.",
            details="For a query that is gone for good, and a new one that is to go on with its channel. "
            "Stop the owner first: one that runs takes its channel back.",
            params=(TOPIC, CHANNEL),
            permission="admin",
            success="whose it was; an empty text if it was nobody's",
            success_type=JSON_TYPE,
            success_schema=obj({"owner": TEXT}),
            errors=CHANNEL_ERRORS,
        ),
        Endpoint(
            group="The log",
            method="GET",
            path="/channel/peek",
            handler=api.peek_channel,
            summary="Messages that a channel holds, without consuming them.",
            details="In flight (with attempts, deadline and client), requeued, deferred (with the time "
            "at which they are due), and ready.",
            params=(
                TOPIC,
                CHANNEL,
                Param(
                    name="state",
                    help="only `ready`, `requeued`, `in_flight` or `deferred`; several with commas",
                    schema={"type": "string", "pattern": f"^{_STATE}(,{_STATE})*$"},
                ),
                *_PEEK_PARAMS,
            ),
            permission="subscribe",
            success=_PEEKED,
            success_type=JSON_TYPE,
            success_schema=_MESSAGES,
            errors=(*CHANNEL_ERRORS, (400, "INVALID_ARG_STATE"), *_PEEK_ERRORS),
        ),
    ]
