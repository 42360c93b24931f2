"""Publishing, copying and moving messages. All but publishing needs nsparq's own nsqd.

A move publishes the messages first and finishes them in their channel afterwards. So a failure
half-way leaves messages in both places, and never in none.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from nsparq.admin.collect.cluster import Cluster
from nsparq.admin.collect.fields import as_object, number, objects, text
from nsparq.admin.collect.merge import Node
from nsparq.admin.collect.messages import MAX_COUNT, Peeked, peek, read_letter, reason
from nsparq.admin.collect.upstream import Answer, RequestFailed
from nsparq.errors import NsparqError
from nsparq.headers import decode_headers, encode_headers
from nsparq.names import is_valid_name
from nsparq.storage.raw_batch import CorruptRange, iter_batches

__all__ = ["MessagesFailed", "Target", "copy", "move", "publish", "read_messages"]

MAX_BODY: Final = 1 << 20
"""Bytes of a message that can be published here."""
MOVED_AT_ONCE: Final = 1000
HOLD_S: Final = 60
"""How long nsqd holds a channel while messages are moved. A slower move is refused."""
CHUNK: Final = 1 << 20
"""Bytes in one publish request."""


class MessagesFailed(NsparqError):
    """A message operation failed. The text is for the user."""


# Publishing


async def publish(
    cluster: Cluster, node: Node, topic: str, body: bytes, *, defer_ms: int = 0, block: bytes = b""
) -> None:
    """`block` has the headers of the message; NSQ's own nsqd would take it for a part of the body.
    Raises MessagesFailed."""
    query = {"topic": topic}
    if defer_ms:
        query["defer"] = str(defer_ms)
    if block:
        query["headers"] = "true"
        body = _sized(block) + body
    await _ask(cluster, node, "POST", "/pub", body, **query)


class Stored(NamedTuple):
    """A message of a log."""

    body: bytes
    headers: Mapping[str, str]


async def _publish_all(cluster: Cluster, node: Node, by_topic: Mapping[str, Sequence[Stored]]) -> None:
    for topic, messages in by_topic.items():
        query = {"topic": topic, "binary": "true"}
        bodies = [message.body for message in messages]
        if any(message.headers for message in messages):
            query["headers"] = "true"
            try:
                bodies = [_sized(encode_headers(headers)) + body for body, headers in messages]
            except ValueError as error:
                raise MessagesFailed(str(error)) from error
        for chunk in _chunks(bodies):
            packed = struct.pack(">i", len(chunk)) + b"".join(map(_sized, chunk))
            await _ask(cluster, node, "POST", "/mpub", packed, **query)


def _sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def _chunks(bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Chunks within nsqd's default limit for a request, unless a single message is larger."""
    chunk: list[bytes] = []
    size = 0
    for body in bodies:
        if chunk and size + len(body) > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(body)
        size += len(body) + 4
    if chunk:
        yield chunk


# Copying and moving


@dataclass(frozen=True, slots=True)
class Target:
    """Where messages are published."""

    to: str
    """A topic. If it is empty, dead letters go to the topics that they came from."""
    unwrap: bool
    """Whether to publish the message inside a dead letter, and not the letter."""
    source: str = ""
    """The topic that the messages come from. Nothing may be published there."""
    may_publish: Callable[[str], bool] = lambda topic: True

    def by_topic(self, messages: Iterable[Stored]) -> dict[str, list[Stored]]:
        """The messages to publish, by topic. Raises MessagesFailed."""
        found: dict[str, list[Stored]] = {}
        for message in messages:
            letter = read_letter(*message) if self.unwrap else None
            content, topic = message, self.to
            if letter is not None:
                content, topic = Stored(letter.body, letter.headers), self.to or letter.topic
            if not topic:
                raise MessagesFailed("a message does not say which topic it came from: enter a topic")
            if not is_valid_name(topic.encode("utf-8", "replace")):
                raise MessagesFailed(f"{topic!r} is not a valid topic name")
            if topic == self.source:
                raise MessagesFailed("a message came from this topic: enter another topic")
            if not content.body:
                raise MessagesFailed("the message inside a dead letter is empty, which NSQ does not allow")
            found.setdefault(topic, []).append(content)
        for topic in found:
            if not self.may_publish(topic):
                raise MessagesFailed(f"you are not allowed to publish to {topic}")
        return found


async def copy(cluster: Cluster, node: Node, topic: str, sequences: Iterable[int], target: Target) -> int:
    """Publish messages again. They also stay where they are. Raises MessagesFailed."""
    found = await read_messages(cluster, node, topic, sorted(set(sequences)))
    by_topic = target.by_topic(found)
    await _publish_all(cluster, node, by_topic)
    return len(found)


async def move(
    cluster: Cluster, node: Node, topic: str, channel: str, target: Target, count: int
) -> tuple[int, int]:
    """Publish the channel's messages, the oldest first, and finish them in the channel. Returns how
    many were moved and how many are left. Raises MessagesFailed; then nothing is finished that was
    not published.

    The commit finishes everything below a sequence number. So the channel must have no consumers,
    and nsqd must deliver nothing meanwhile: no unpublished message may end up below that number.
    nsqd ends the hold by itself if nsqadmin dies.
    """
    if await _channel_state(cluster, node, topic, channel) is None:
        return 0, 0
    where = {"topic": topic, "channel": channel}
    held = await _ask_fields(cluster, node, "POST", "/channel/hold", **where, for_seconds=str(HOLD_S))
    hold = text(held, "hold")
    try:
        return await _move_held(cluster, node, topic, channel, target, count, hold)
    finally:
        with contextlib.suppress(MessagesFailed):
            await _ask(cluster, node, "POST", "/channel/hold", **where, for_seconds="0", hold=hold)


async def _move_held(
    cluster: Cluster, node: Node, topic: str, channel: str, target: Target, count: int, hold: str
) -> tuple[int, int]:
    # The channel is held: if nothing is in flight now, nothing will be. If the hold ends, nsqd
    # refuses the commit.
    await _check_idle(cluster, node, topic, channel)
    ready = await peek(cluster, [node], topic, channel, count=min(count, MOVED_AT_ONCE), state="ready")
    _check(node, ready)
    # A message deferred below the last of these has either come due, and is then among the requeued
    # ones, or this check finds it. A message deferred later gets a higher number.
    await _check_idle(cluster, node, topic, channel)
    requeued = await peek(cluster, [node], topic, channel, count=MAX_COUNT, state="requeued")
    _check(node, requeued)
    if len(requeued.messages) >= MAX_COUNT:
        raise MessagesFailed(f"{node.address}: the channel has too many requeued messages")
    chosen = sorted({one.sequence for one in (*requeued.messages, *ready.messages)})
    if not chosen:
        return 0, 0
    by_topic = target.by_topic(await read_messages(cluster, node, topic, chosen))
    await _publish_all(cluster, node, by_topic)
    commit = {"topic": topic, "channel": channel, "sequence": str(chosen[-1] + 1), "hold": hold}
    try:
        committed = await _ask_fields(cluster, node, "POST", "/channel/commit", **commit)
    except MessagesFailed as error:
        raise MessagesFailed(f"{len(chosen)} messages were published, but not finished: {error}") from error
    return len(chosen), number(committed, "depth")


def _check(node: Node, found: Peeked) -> None:
    if found.errors:
        raise MessagesFailed(found.errors[0])
    if found.missing:
        raise MessagesFailed(f"{found.missing} messages are damaged; see the log of {node.address}")


class _ChannelState(NamedTuple):
    """A channel on one node."""

    clients: int
    in_flight: int
    deferred: int
    owner: str
    """The Spark query that owns the channel; empty if none does."""


async def _channel_state(cluster: Cluster, node: Node, topic: str, channel: str) -> _ChannelState | None:
    """None if the node has no such channel. Raises MessagesFailed."""
    where = {"topic": topic, "channel": channel}
    stats = await _ask_fields(cluster, node, "GET", "/stats", format="json", **where)
    for its_topic in objects(stats, "topics"):
        for one in objects(its_topic, "channels"):
            if text(one, "channel_name") == channel:
                return _ChannelState(
                    number(one, "client_count"),
                    number(one, "in_flight_count"),
                    number(one, "deferred_count"),
                    text(one, "owner"),
                )
    return None


async def _check_idle(cluster: Cluster, node: Node, topic: str, channel: str) -> None:
    """Raises MessagesFailed if the channel has consumers, an owner, or deferred messages."""
    state = await _channel_state(cluster, node, topic, channel)
    if state is None:
        raise MessagesFailed(f"{node.address}: the channel was deleted")
    if state.owner:
        raise MessagesFailed(
            f"{node.address}: the channel belongs to the Spark query {state.owner}, which reads the topic's "
            "log; copy the messages instead"
        )
    if state.clients or state.in_flight:
        raise MessagesFailed(
            f"{node.address}: the channel has consumers; stop them, or copy the messages instead"
        )
    if state.deferred:
        raise MessagesFailed(f"{node.address}: the channel has deferred messages; copy them instead")


async def _ask(
    cluster: Cluster, node: Node, method: str, path: str, body: bytes | None = None, /, **query: str
) -> Answer:
    """Raises MessagesFailed."""
    try:
        return await cluster.ask(node, method, path, body, **query)
    except RequestFailed as error:
        raise MessagesFailed(f"{node.address}: {reason(error)}") from error


async def _ask_fields(
    cluster: Cluster, node: Node, method: str, path: str, /, **query: str
) -> Mapping[str, Any]:
    """The JSON object of the answer. Raises MessagesFailed."""
    answer = await _ask(cluster, node, method, path, **query)
    try:
        return as_object(answer.json())
    except RequestFailed as error:
        raise MessagesFailed(f"{node.address}: {error}") from error


async def read_messages(cluster: Cluster, node: Node, topic: str, sequences: Sequence[int]) -> list[Stored]:
    """Whole messages, from the log: a peek may return only the beginning of a body. Raises
    MessagesFailed."""
    wanted = set(sequences)
    found: dict[int, Stored] = {}
    for sequence in sequences:
        if sequence not in found:
            found |= await _read(cluster, node, topic, sequence, wanted)
        if sequence not in found:
            raise MessagesFailed(f"{node.address}: message {sequence} is no longer there")
    return [found[sequence] for sequence in sequences]


async def _read(cluster: Cluster, node: Node, topic: str, start: int, wanted: set[int]) -> dict[int, Stored]:
    query = {"topic": topic, "from": str(start), "max_bytes": str(4 << 20), "verify": "true"}
    answer = await _ask(cluster, node, "GET", "/topic/read", **query)
    found: dict[int, Stored] = {}
    try:
        for batch in iter_batches(answer.body):
            messages = zip(range(batch.base, batch.end), batch.bodies(), batch.blocks(), strict=True)
            found |= {
                sequence: Stored(body, decode_headers(block))
                for sequence, body, block in messages
                if sequence in wanted
            }
    except CorruptRange as error:
        raise MessagesFailed(f"{node.address}: {error}") from error
    return found
