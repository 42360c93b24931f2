"""Messages: looking at them, publishing, bringing dead letters back. All but publishing needs nsqds of ours.

Looking takes nothing away. Moving does: messages are published where they are to go, and only then finished
where they were, so that a failure in between leaves them in both places and never in none.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from nsparq.admin.collect.cluster import Cluster
from nsparq.admin.collect.merge import Node, number, objects, text
from nsparq.admin.collect.upstream import Answer, AskFailed, Refused
from nsparq.admin.show.bodies import DeadLetter, for_people, read_letter
from nsparq.errors import NsparqError
from nsparq.names import is_valid_name
from nsparq.storage.decode import CorruptRange, iter_batches

__all__ = ["MessagesFailed", "Peeked", "Shown", "Target", "copy", "move", "peek", "publish"]

DEFAULT_COUNT: Final = 50
MAX_COUNT: Final = 1000
MAX_BODY: Final = 1 << 20
"""Bytes of a message that can be published here."""
MOVED_AT_ONCE: Final = 1000
HOLD_S: Final = 60
"""How long nothing is delivered from a channel while so many are moved. What takes longer is refused."""
CHUNK: Final = 1 << 20
"""Bytes that are published at a time."""
STATES: Final = ("in_flight", "requeued", "deferred", "ready")


class MessagesFailed(NsparqError):
    """It cannot be done; the text is for the person who asked."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A message as it is shown."""

    node: str
    id: str
    sequence: int
    timestamp_ns: int
    attempts: int
    state: str
    size: int
    body: bytes
    """Its beginning, if it is long."""
    due_ns: int = 0
    deadline_ns: int = 0
    client: str = ""
    letter: DeadLetter | None = None
    kind: str = "text"
    """`json`, `text` or `binary`."""
    shown: str = ""
    """The body for people: JSON indented, bytes as a hex dump."""

    @property
    def is_cut(self) -> bool:
        return len(self.body) < self.size

    def contains(self, words: str) -> bool:
        wanted = words.lower()
        return wanted in self.shown.lower() or wanted in self.id or wanted in self.node

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "node": self.node,
            "id": self.id,
            "sequence": self.sequence,
            "timestamp": self.timestamp_ns,
            "attempts": self.attempts,
            "state": self.state,
            "size": self.size,
            "kind": self.kind,
        }
        if self.kind == "binary":
            found["body_base64"] = base64.b64encode(self.body).decode()
        else:
            found["body"] = self.body.decode("utf-8", "replace")
        more = {"due": self.due_ns, "deadline": self.deadline_ns, "client": self.client}
        found |= {name: value for name, value in more.items() if value}
        if self.letter is not None:
            letter = self.letter
            found["dead_letter"] = {
                "topic": letter.topic,
                "channel": letter.channel,
                "id": letter.id,
                "attempts": letter.attempts,
                "error": letter.error,
            }
        return found


@dataclass(slots=True)
class Peeked:
    """What was found, the newest first, and what was not."""

    messages: list[Shown] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    missing: int = 0
    """Messages that a damaged disk has lost."""
    next_from: dict[str, int] = field(default_factory=dict)
    """For each node, the sequence number behind the last message."""


# Looking


async def peek(
    cluster: Cluster,
    nodes: Iterable[Node],
    topic: str,
    channel: str = "",
    *,
    count: int = DEFAULT_COUNT,
    start: int | None = None,
    state: str = "",
) -> Peeked:
    """Messages of the topic, or those that the channel holds, from each of the nodes."""
    query = {"topic": topic, "count": str(max(1, min(count, MAX_COUNT)))}
    if channel:
        query["channel"] = channel
        if state in STATES:
            query["state"] = state
    elif start is not None:
        query["from"] = str(start)
    found = Peeked()
    for node in nodes:
        try:
            said = await cluster.get(node, "/channel/peek" if channel else "/topic/peek", **query)
        except AskFailed as error:
            found.errors.append(f"{node.address}: {_reason(error)}")
            continue
        if not isinstance(said, dict):
            continue
        shown = [_shown(node.address, one) for one in objects(said, "messages")]
        found.messages += shown
        found.missing += number(said, "missing")
        if shown:
            found.next_from[node.address] = max(one.sequence for one in shown) + 1
    if not channel:
        found.messages.sort(key=lambda one: (-one.timestamp_ns, -one.sequence))
    return found


def _shown(node: str, said: Mapping[str, Any]) -> Shown:
    body = text(said, "body").encode("utf-8", "replace")
    if encoded := text(said, "body_base64"):
        try:
            body = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            body = b""
    kind, shown = for_people(body)
    return Shown(
        node=node,
        id=text(said, "id"),
        sequence=number(said, "sequence"),
        timestamp_ns=number(said, "timestamp"),
        attempts=number(said, "attempts"),
        state=text(said, "state"),
        size=number(said, "size"),
        body=body,
        due_ns=number(said, "due"),
        deadline_ns=number(said, "deadline"),
        client=text(said, "client"),
        letter=read_letter(body),
        kind=kind,
        shown=shown,
    )


# Publishing


async def publish(cluster: Cluster, node: Node, topic: str, body: bytes, *, defer_ms: int = 0) -> None:
    """Raises MessagesFailed."""
    query = {"topic": topic}
    if defer_ms:
        query["defer"] = str(defer_ms)
    try:
        await cluster.ask(node, "POST", "/pub", body, **query)
    except AskFailed as error:
        raise MessagesFailed(f"{node.address}: {_reason(error)}") from error


async def _publish_all(cluster: Cluster, node: Node, by_topic: Mapping[str, Sequence[bytes]]) -> None:
    for topic, bodies in by_topic.items():
        for chunk in _chunks(bodies):
            packed = struct.pack(">i", len(chunk)) + b"".join(
                struct.pack(">i", len(body)) + body for body in chunk
            )
            try:
                await cluster.ask(node, "POST", "/mpub", packed, topic=topic, binary="true")
            except AskFailed as error:
                raise MessagesFailed(f"{node.address}: {_reason(error)}") from error


def _chunks(bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Each small enough for nsqd's default limits, if its messages are."""
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


# Bringing back


@dataclass(frozen=True, slots=True)
class Target:
    """Where messages go."""

    to: str
    """A topic; if empty, dead letters go to where they came from."""
    unwrap: bool
    """Whether of a dead letter what it holds is published, and not the letter."""
    source: str = ""
    """The topic that they are taken from: nothing goes there, where it would be found again."""
    may_publish: Callable[[str], bool] = lambda topic: True

    def address(self, bodies: Iterable[bytes]) -> dict[str, list[bytes]]:
        """What is to be published, by topic. Raises MessagesFailed."""
        found: dict[str, list[bytes]] = {}
        for body in bodies:
            letter = read_letter(body) if self.unwrap else None
            held, topic = (body, self.to) if letter is None else (letter.body, self.to or letter.topic)
            if not topic:
                raise MessagesFailed("one of the messages does not say which topic it came from: name one")
            if not is_valid_name(topic.encode("utf-8", "replace")):
                raise MessagesFailed(f"{topic!r} is no name of a topic")
            if topic == self.source:
                raise MessagesFailed("one of the messages came from this topic: name another")
            if not held:
                raise MessagesFailed("one of the dead letters holds an empty message: NSQ has no such thing")
            found.setdefault(topic, []).append(held)
        for topic in found:
            if not self.may_publish(topic):
                raise MessagesFailed(f"you may not publish to {topic}")
        return found


async def copy(cluster: Cluster, node: Node, topic: str, sequences: Iterable[int], target: Target) -> int:
    """Publish messages of the topic's log once more. They stay where they are. Raises MessagesFailed."""
    bodies = await _bodies(cluster, node, topic, sorted(set(sequences)))
    by_topic = target.address(bodies)
    await _publish_all(cluster, node, by_topic)
    return len(bodies)


async def move(
    cluster: Cluster, node: Node, topic: str, channel: str, target: Target, count: int
) -> tuple[int, int]:
    """Publish what the channel holds, the oldest first, and finish it in the channel. How many were moved,
    and how many are left. Raises MessagesFailed, with nothing finished that was not published.

    Only where nobody else works on the channel, and while nothing is delivered from it: what is finished is
    everything up to a number, so nothing must come to be below it that was not published. The hold ends by
    itself, whatever becomes of us.
    """
    if await _channel_state(cluster, node, topic, channel) is None:
        return 0, 0
    where = {"topic": topic, "channel": channel}
    answer = await _post(cluster, node, "/channel/hold", **where, for_seconds=str(HOLD_S))
    hold = text(answer.json(), "hold")
    try:
        return await _move_held(cluster, node, topic, channel, target, count, hold)
    finally:
        with contextlib.suppress(MessagesFailed):
            await _post(cluster, node, "/channel/hold", **where, for_seconds="0", hold=hold)


async def _move_held(
    cluster: Cluster, node: Node, topic: str, channel: str, target: Target, count: int, hold: str
) -> tuple[int, int]:
    # With nothing in flight now, nothing will be: the channel is held. If that ends, the commit is refused.
    await _check_idle(cluster, node, topic, channel)
    ready = await peek(cluster, [node], topic, channel, count=min(count, MOVED_AT_ONCE), state="ready")
    _check(ready)
    # What was deferred below the last of these has either come due by now, and is among those put back, or is
    # seen here; what is deferred later gets a higher number.
    await _check_idle(cluster, node, topic, channel)
    requeued = await peek(cluster, [node], topic, channel, count=MAX_COUNT, state="requeued")
    _check(requeued)
    if len(requeued.messages) >= MAX_COUNT:
        raise MessagesFailed(f"{node.address}: too many messages of the channel were put back")
    chosen = sorted({one.sequence for one in (*requeued.messages, *ready.messages)})
    if not chosen:
        return 0, 0
    by_topic = target.address(await _bodies(cluster, node, topic, chosen))
    await _publish_all(cluster, node, by_topic)
    try:
        answer = await _post(
            cluster,
            node,
            "/channel/commit",
            topic=topic,
            channel=channel,
            sequence=str(chosen[-1] + 1),
            hold=hold,
        )
    except MessagesFailed as error:
        raise MessagesFailed(f"{len(chosen)} messages were published, but not finished: {error}") from error
    return len(chosen), number(answer.json(), "depth")


def _check(found: Peeked) -> None:
    if found.errors:
        raise MessagesFailed(found.errors[0])
    if found.missing:
        raise MessagesFailed(f"{found.missing} messages are damaged; see the node's log")


class _ChannelState(NamedTuple):
    """How a channel is on one node."""

    clients: int
    in_flight: int
    deferred: int
    owner: str
    """The query of Spark that it belongs to; empty for none."""


async def _channel_state(cluster: Cluster, node: Node, topic: str, channel: str) -> _ChannelState | None:
    """None if the node has no such channel. Raises MessagesFailed."""
    try:
        said = await cluster.get(node, "/stats", format="json", topic=topic, channel=channel)
    except AskFailed as error:
        raise MessagesFailed(f"{node.address}: {_reason(error)}") from error
    for its_topic in objects(said if isinstance(said, dict) else {}, "topics"):
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
    """Raises MessagesFailed where somebody works on the channel, or messages wait for their time."""
    state = await _channel_state(cluster, node, topic, channel)
    if state is None:
        raise MessagesFailed(f"{node.address}: the channel has gone")
    if state.owner:
        raise MessagesFailed(
            f"{node.address}: the channel belongs to a query of Spark, {state.owner}, which reads the "
            "topic's log; copy messages instead"
        )
    if state.clients or state.in_flight:
        raise MessagesFailed(
            f"{node.address}: the channel has consumers; stop them, or copy messages instead"
        )
    if state.deferred:
        raise MessagesFailed(
            f"{node.address}: messages of the channel wait for their time; copy them instead"
        )


async def _post(cluster: Cluster, node: Node, path: str, **query: str) -> Answer:
    """Raises MessagesFailed."""
    try:
        return await cluster.ask(node, "POST", path, **query)
    except AskFailed as error:
        raise MessagesFailed(f"{node.address}: {_reason(error)}") from error


async def _bodies(cluster: Cluster, node: Node, topic: str, sequences: Sequence[int]) -> list[bytes]:
    """Whole bodies, from the log itself: what is shown of a message may be its beginning only."""
    wanted = set(sequences)
    found: dict[int, bytes] = {}
    for sequence in sequences:
        if sequence not in found:
            found |= await _read(cluster, node, topic, sequence, wanted)
        if sequence not in found:
            raise MessagesFailed(f"{node.address}: message {sequence} is not there any more")
    return [found[sequence] for sequence in sequences]


async def _read(cluster: Cluster, node: Node, topic: str, start: int, wanted: set[int]) -> dict[int, bytes]:
    query = {"topic": topic, "from": str(start), "max_bytes": str(4 << 20), "verify": "true"}
    found = {}
    try:
        answer = await cluster.ask(node, "GET", "/topic/read", **query)
        for batch in iter_batches(answer.body):
            for sequence, body in enumerate(batch.bodies(), batch.base):
                if sequence in wanted:
                    found[sequence] = bytes(body)
    except (AskFailed, CorruptRange) as error:
        raise MessagesFailed(f"{node.address}: {_reason(error)}") from error
    return found


def _reason(error: Exception) -> str:
    return (error.code or str(error)) if isinstance(error, Refused) else str(error)
