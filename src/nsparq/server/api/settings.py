"""Settings of a topic (retention, durability, delivery policy) and of a channel (delivery policy,
ordering)."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.message_key import key_reader
from nsparq.broker.retries import refuse_cycle
from nsparq.delivery_policy import DeliveryPolicy, parse_policy
from nsparq.http.api import ApiError, Endpoint, Param, Request, Result
from nsparq.server.api.parameters import (
    CHANNEL,
    CHANNEL_ERRORS,
    FLAG,
    TOPIC,
    TOPIC_ERRORS,
    find_channel,
    find_topic,
    flag_of,
    obj,
)

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.settings import TopicSettings
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

_SETTINGS: Final = obj(
    {
        "retention_age": {"type": ["number", "null"]},
        "retention_bytes": {"type": ["integer", "null"]},
        "durability": {"type": ["string", "null"]},
        "archive": {"type": ["boolean", "null"]},
        "archive_retention_age": {"type": ["number", "null"]},
        "archive_retention_bytes": {"type": ["integer", "null"]},
        "archive_local_bytes": {"type": ["integer", "null"]},
        "policy": {"type": ["object", "null"]},
        "effective": {"type": "object"},
        "channel_policies": {"type": "object"},
    }
)
_CHANNEL_SETTINGS: Final = obj(
    {
        "policy": {"type": ["object", "null"]},
        "ordered_by": {"type": ["string", "null"]},
        "effective": obj({"policy": {"type": ["object", "null"]}}),
    }
)
_DRY_RUN: Final = Param(name="dry_run", help="`true`: check the change and do not make it", schema=FLAG)
_CHANGE_ERRORS: Final = ((400, "INVALID_SETTINGS"), (400, "INVALID_ARG_DRY_RUN"))
_DURATION: Final = {
    "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": "^[0-9]{1,5}(ms|s|m)$"}]
}
_POLICY: Final = {
    "type": ["object", "null"],
    "properties": {
        "max_attempts": {"type": "integer", "minimum": 0, "maximum": 65_535},
        "count": {"enum": ["failures", "deliveries"]},
        "retry_delay": _DURATION,
        "retry_factor": {"type": "number", "minimum": 1},
        "max_retry_delay": _DURATION,
        "retry_jitter": {"type": "number", "minimum": 0, "maximum": 1},
        "dead_letters": {"type": "string"},
        "expire_after": _DURATION,
        "expired": {"enum": ["dead_letters", "drop"]},
    },
    "additionalProperties": False,
}
_POLICY_HELP: Final = (
    "`policy` is an object with any of `max_attempts`, `count`, `retry_delay`, `retry_factor`, "
    "`max_retry_delay`, `retry_jitter`, `dead_letters`, `expire_after`, `expired`; see Delivery policies. "
    "Times are seconds, or durations such as `5m`. It needs the permission for the topic of the dead "
    "letters, too."
)
_AGE: Final = {
    "anyOf": [
        {"type": ["number", "null"], "minimum": 0},
        {"type": "string", "pattern": "^[0-9]{1,9}(ms|s|m|h)$"},
    ]
}
_BYTES: Final = {"type": ["integer", "null"], "minimum": 0}
_CHANGES: Final = {
    "type": "object",
    "properties": {
        "retention_age": _AGE,
        "retention_bytes": _BYTES,
        "durability": {"enum": ["os", "fsync", "memory", None]},
        "archive": {"type": ["boolean", "null"]},
        "archive_retention_age": _AGE,
        "archive_retention_bytes": _BYTES,
        "archive_local_bytes": _BYTES,
        "policy": _POLICY,
    },
    "additionalProperties": False,
}
_CHANNEL_CHANGES: Final = {
    "type": "object",
    "properties": {
        "policy": _POLICY,
        "ordered_by": {"type": ["string", "null"], "pattern": "^(/[^~]*|header:[a-z0-9._-]{1,255})$"},
    },
    "minProperties": 1,
    "additionalProperties": False,
}


class SettingsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd

    def topics(self, request: Request) -> list[str]:
        """For the guard: the topic and, with a policy, the topic of its dead letters."""
        topic = request.parameters.get("topic", "")
        try:
            policy = _read_object(request).get("policy")
            letters = parse_policy(policy, topic).dead_letter_topic(topic) if policy is not None else ""
        except (ValueError, OverflowError, RecursionError):
            # The handler refuses it.
            letters = ""
        return [topic, letters] if letters else [topic]

    @Endpoint(
        method="GET",
        path="/topic/settings",
        summary="Get a topic's own settings. Null means that the daemon's flag applies.",
        params=(TOPIC,),
        permission="read",
        success="the settings, those in effect, and the policies of channels that have their own; ages in "
        "seconds",
        success_schema=_SETTINGS,
        errors=TOPIC_ERRORS,
    )
    def read(self, request: Request) -> Result:
        return _settings_of(find_topic(self._nsqd.broker, request))

    @Endpoint(
        method="PUT",
        path="/topic/settings",
        summary="Change a topic's settings. A restart keeps them.",
        details="A JSON object with any of `retention_age` (seconds, or a duration such as `24h`), "
        "`retention_bytes`, `durability` (`os`, `fsync`, `memory`), `archive` (true needs an nsqd with "
        "`--archive`), `archive_retention_age`, `archive_retention_bytes`, `archive_local_bytes` and "
        f"`policy`. Null restores the daemon's flag; there is none for a policy. {_POLICY_HELP}",
        params=(TOPIC, _DRY_RUN),
        permission="admin",
        body_help="a JSON object",
        body_type="application/json",
        body_schema=_CHANGES,
        topics=topics,
        max_body=64 << 10,
        success="the settings, and those in effect",
        success_schema=_SETTINGS,
        errors=(*TOPIC_ERRORS, *_CHANGE_ERRORS),
    )
    async def change(self, request: Request) -> Result:
        topic = find_topic(self._nsqd.broker, request)
        is_dry_run = flag_of(request, "dry_run")
        try:
            wanted = _read_object(request)
            if is_dry_run:
                return _settings_of(topic, topic.checked_settings(wanted))
            topic.change_settings(wanted)
        except (ValueError, OverflowError, RecursionError) as error:
            raise ApiError(400, "INVALID_SETTINGS", reason=str(error)) from error
        changed = _settings_of(topic)
        await self._nsqd.durable(topic)
        return changed

    @Endpoint(
        method="GET",
        path="/channel/settings",
        summary="Get a channel's own settings, and the delivery policy in effect.",
        params=(TOPIC, CHANNEL),
        permission="read",
        success="the settings; null for a policy that the channel does not have, or that is not in effect, "
        "and for a channel that is not ordered",
        success_schema=_CHANNEL_SETTINGS,
        errors=CHANNEL_ERRORS,
    )
    def read_channel(self, request: Request) -> Result:
        return _settings_of_channel(find_channel(self._nsqd.broker, request))

    @Endpoint(
        method="PUT",
        path="/channel/settings",
        summary="Change a channel's own settings. A restart keeps them.",
        details="A JSON object with `policy`, `ordered_by` or both. `ordered_by` tells where the key of a "
        "message is: `header:` and a name, or a JSON pointer such as `/customer/id`; see Ordered channels. "
        f"Null removes a setting: without a policy the topic's applies. {_POLICY_HELP}",
        params=(TOPIC, CHANNEL, _DRY_RUN),
        permission="admin",
        body_help="a JSON object",
        body_type="application/json",
        body_schema=_CHANNEL_CHANGES,
        topics=topics,
        max_body=64 << 10,
        success="the settings, and the policy in effect",
        success_schema=_CHANNEL_SETTINGS,
        errors=(*CHANNEL_ERRORS, *_CHANGE_ERRORS),
    )
    async def change_channel(self, request: Request) -> Result:
        channel = find_channel(self._nsqd.broker, request)
        is_dry_run = flag_of(request, "dry_run")
        try:
            wanted = _read_object(request)
            if not wanted or wanted.keys() - {"policy", "ordered_by"}:
                raise ValueError("a channel has the settings policy and ordered_by")
            policy, ordered_by = channel.retries.own_policy, channel.ordering.ordered_by
            if "policy" in wanted:
                values = wanted["policy"]
                policy = None if values is None else parse_policy(values, channel.topic.name)
                if policy is not None:
                    refuse_cycle(channel.topic, policy)
            if "ordered_by" in wanted:
                ordered_by = wanted["ordered_by"]
                if ordered_by is not None:
                    key_reader(ordered_by)
            if is_dry_run:
                return _channel_settings(policy, ordered_by or "", channel.topic)
            channel.change_settings(policy, ordered_by or "")
        except (ValueError, OverflowError, RecursionError) as error:
            raise ApiError(400, "INVALID_SETTINGS", reason=str(error)) from error
        changed = _settings_of_channel(channel)
        await self._nsqd.durable(channel.topic)
        return changed


def _read_object(request: Request) -> dict[str, Any]:
    wanted = json.loads(request.body)
    if not isinstance(wanted, dict):
        raise ValueError("not an object")
    return wanted


def _settings_of(topic: Topic, settings: TopicSettings | None = None) -> dict[str, Any]:
    """The topic's settings, or others for the topic."""
    options = topic.broker.options
    own = dataclasses.asdict(settings or topic.settings)
    flags = {
        "retention_age": options.retention_age,
        "retention_bytes": options.retention_bytes,
        "durability": options.durability,
        "archive": bool(options.archive),
        "archive_retention_age": options.archive_retention_age,
        "archive_retention_bytes": options.archive_retention_bytes,
        "archive_local_bytes": options.archive_local_bytes,
        "policy": None,
    }
    if topic.is_ephemeral:
        flags |= {"retention_age": 0.0, "retention_bytes": 0, "durability": "memory", "archive": False}
    effective = {name: flags[name] if value is None else value for name, value in own.items()}
    own_policies = ((name, channel.retries.own_policy) for name, channel in sorted(topic.channels.items()))
    of_channels = {name: dataclasses.asdict(policy) for name, policy in own_policies if policy is not None}
    return {**own, "effective": effective, "channel_policies": of_channels}


def _settings_of_channel(channel: Channel) -> dict[str, Any]:
    return _channel_settings(channel.retries.own_policy, channel.ordering.ordered_by, channel.topic)


def _channel_settings(own: DeliveryPolicy | None, ordered_by: str, topic: Topic) -> dict[str, Any]:
    """The settings of a channel with this policy of its own, and this order."""
    shown = (None if one is None else dataclasses.asdict(one) for one in (own, own or topic.settings.policy))
    return {"policy": next(shown), "ordered_by": ordered_by or None, "effective": {"policy": next(shown)}}
