"""Delivery policies of topics and channels, and the order of channels, on all nodes that have them.
Needs nsparq's own nsqd."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nsparq.admin.change.actions import Forbidden
from nsparq.admin.change.settings import BadSetting, error_reason, parse_age
from nsparq.admin.collect.cluster import NotFound
from nsparq.admin.collect.fields import as_object, text
from nsparq.admin.collect.merge import Node
from nsparq.admin.collect.upstream import BadStatus, RequestFailed
from nsparq.admin.security import Access, Actor
from nsparq.delivery_policy import DURATIONS, DeliveryPolicy, parse_policy
from nsparq.http.api import ApiError

if TYPE_CHECKING:
    from nsparq.admin.change.operations import Support
    from nsparq.admin.daemon import Nsqadmin

__all__ = [
    "FEATURE",
    "FIELDS",
    "NodePolicy",
    "Policies",
    "PolicyGroup",
    "by_order",
    "by_policy",
    "parse_fields",
]

FEATURE: Final = "/channel/settings"
FIELDS: Final = tuple(one.name for one in fields(DeliveryPolicy))


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """The policy of a topic, or the policy and the order of a channel, on one node."""

    node: str
    own: DeliveryPolicy | None
    effective: DeliveryPolicy | None
    """The topic's, if the channel has none of its own."""
    channels: tuple[str, ...] = ()
    """Channels of a topic that have policies of their own."""
    ordered_by: str | None = None
    """Where the keys of messages are, for a channel that is ordered."""

    def as_json(self) -> dict[str, Any]:
        own, effective = (None if one is None else asdict(one) for one in (self.own, self.effective))
        return {"node": self.node, "policy": own, "effective": effective}


class PolicyGroup(NamedTuple):
    """Nodes with the same policy, for the pages."""

    effective: DeliveryPolicy | None
    is_own: bool
    nodes: list[str]


def by_order(found: list[NodePolicy]) -> dict[str | None, list[str]]:
    """The nodes by what they order the channel by; None for no order."""
    groups: dict[str | None, list[str]] = {}
    for one in found:
        groups.setdefault(one.ordered_by, []).append(one.node)
    return groups


def by_policy(found: list[NodePolicy]) -> list[PolicyGroup]:
    groups: dict[tuple[DeliveryPolicy | None, bool], list[str]] = {}
    for one in found:
        groups.setdefault((one.effective, one.own is not None), []).append(one.node)
    return [PolicyGroup(*key, nodes) for key, nodes in groups.items()]


class Policies:
    """Raises ApiError."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._cluster = admin.cluster

    async def read(self, topic: str, channel: str = "") -> tuple[Support, list[NodePolicy]]:
        nodes = await self._admin.operations.nodes_with(topic, FEATURE)
        path, names = _target(topic, channel)

        async def ask(node: Node) -> NodePolicy | str:
            try:
                return _node_policy(node.address, topic, await self._cluster.get(node, path, **names))
            except BadStatus as error:
                # The channel may be missing on a node.
                return "" if error.status == 404 else f"{node.address}: {error_reason(error)}"
            except (RequestFailed, ValueError) as error:
                return f"{node.address}: {error_reason(error)}"

        answers = await asyncio.gather(*map(ask, nodes.able))
        nodes.errors.extend(one for one in answers if isinstance(one, str) and one)
        return nodes, [one for one in answers if isinstance(one, NodePolicy)]

    async def change(
        self, actor: Actor, access: Access, topic: str, channel: str, values: Mapping[str, Any] | None
    ) -> str:
        """Set the policy, or remove it (None). Returns a warning, or an empty text. If one node
        refuses the policy, none gets it."""
        action = "remove_policy" if values is None else "set_policy"
        if values is not None:
            try:
                letters = parse_policy(values, topic).dead_letter_topic(topic)
            except ValueError as error:
                raise ApiError(400, "INVALID_SETTINGS", reason=str(error)) from error
            # Otherwise a user could fill a topic of somebody else.
            if not access.may("admin", letters):
                raise Forbidden(action, actor, **_target(topic, channel)[1], dead_letters=letters)
        return await self._change(action, actor, topic, channel, {"policy": values}, "POLICY_REFUSED")

    async def order(self, actor: Actor, topic: str, channel: str, ordered_by: Any) -> str:
        """Order a channel by a key, or end its order (None). Returns a warning, or an empty text.
        If one node refuses it, none changes."""
        action = "remove_order" if ordered_by is None else "set_order"
        return await self._change(action, actor, topic, channel, {"ordered_by": ordered_by}, "ORDER_REFUSED")

    async def _change(
        self, action: str, actor: Actor, topic: str, channel: str, setting: Mapping[str, Any], refused: str
    ) -> str:
        """`refused` is the code of the error if a node refuses the rehearsal."""
        nodes = await self._admin.operations.nodes_with(topic, FEATURE)
        nodes.require()
        body = json.dumps(setting).encode()

        async def work() -> list[str]:
            rehearsed, errors = await self._put(nodes.able, topic, channel, body, refused, dry_run="true")
            done, more = await self._put(rehearsed, topic, channel, body)
            if not done:
                if not errors and not more:
                    raise NotFound("CHANNEL_NOT_FOUND" if channel else "TOPIC_NOT_FOUND")
                raise ApiError(409, "; ".join(errors + more))
            return nodes.errors + errors + more

        (value,) = setting.values()
        outcome = json.dumps(value) if value is not None else ""
        _, names = _target(topic, channel)
        return await self._admin.actions.run(action, actor, work, lambda: outcome, **names)

    async def _put(
        self, nodes: list[Node], topic: str, channel: str, body: bytes, refused: str = "", **more: str
    ) -> tuple[list[Node], list[str]]:
        """The nodes that accept it, and what failed on others. Raises ApiError with the code
        `refused`, if given, when a node refuses it."""
        path, names = _target(topic, channel)

        async def put(node: Node) -> Node | Exception:
            try:
                await self._cluster.ask(node, "PUT", path, body, **names, **more)
            except RequestFailed as error:
                return error
            return node

        done, errors = [], []
        answers = await asyncio.gather(*map(put, nodes))
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, Node):
                done.append(answer)
                continue
            status = answer.status if isinstance(answer, BadStatus) else 0
            if status != 404:
                errors.append(f"{node.address}: {error_reason(answer)}")
                if status and refused:
                    raise ApiError(409, refused, reason=errors[-1])
        return done, errors


def _target(topic: str, channel: str) -> tuple[str, dict[str, str]]:
    if channel:
        return "/channel/settings", {"topic": topic, "channel": channel}
    return "/topic/settings", {"topic": topic}


def parse_fields(form: Mapping[str, str]) -> dict[str, Any]:
    """A policy from the fields of a form. An empty field has its default. Raises BadSetting."""
    values: dict[str, Any] = {}
    for name, given in form.items():
        if not (wanted := given.strip()):
            continue
        if name in DURATIONS:
            values[name] = parse_age(wanted)
        elif name in ("max_attempts", "retry_factor", "retry_jitter"):
            try:
                values[name] = int(wanted) if name == "max_attempts" else float(wanted)
            except ValueError:
                raise BadSetting(f"{name}: {wanted!r} is not a number") from None
        else:
            values[name] = wanted
    return values


def _node_policy(address: str, topic: str, answer: Any) -> NodePolicy:
    """Raises ValueError for an answer that is not nsqd's."""
    found = as_object(answer)
    return NodePolicy(
        address,
        _parsed(found.get("policy"), topic),
        _parsed(as_object(found.get("effective")).get("policy"), topic),
        tuple(map(str, as_object(found.get("channel_policies")))),
        text(found, "ordered_by") or None,
    )


def _parsed(values: Any, topic: str) -> DeliveryPolicy | None:
    if not isinstance(values, dict):
        return None
    # A newer nsqd may have further fields.
    return parse_policy({name: values[name] for name in FIELDS if name in values}, topic)
