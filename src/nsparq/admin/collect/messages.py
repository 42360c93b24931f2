"""Messages as they are shown: peeked from nsqds, JSON indented, bytes as a hex dump, dead letters
opened.

Peeking consumes nothing. It needs nsparq's own nsqd.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from nsparq.admin.collect.cluster import Cluster
from nsparq.admin.collect.fields import as_object, number, objects, text
from nsparq.admin.collect.merge import Node
from nsparq.admin.collect.upstream import BadStatus, RequestFailed
from nsparq.dead_letter import DeadLetter as StoredLetter

__all__ = ["DeadLetter", "Peeked", "ShownMessage", "peek", "read_letter", "readable", "reason"]

DEFAULT_COUNT: Final = 50
MAX_COUNT: Final = 1000
MAX_SHOWN: Final = 64 << 10
"""Characters of a body that are shown."""
MAX_PREVIEW: Final = 240
"""Characters of a body in the list of messages."""
MAX_REASON: Final = 200
_VARYING: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|\b[0-9a-f]{12,}\b|[0-9]+")
"""Parts of an error that differ from message to message: ids and numbers."""
STATES: Final = ("in_flight", "requeued", "deferred", "ready")


class Readable:
    """What is shown of a body is made when it is asked for: a filter reads many messages that are
    not shown."""

    body: bytes

    @cached_property
    def value(self) -> Any:
        """The JSON value of the body; None if it is not JSON."""
        return _parse(self.body)

    @cached_property
    def _readable(self) -> tuple[str, str]:
        return readable(self.body)

    @property
    def kind(self) -> str:
        """`json`, `text` or `binary`."""
        return self._readable[0]

    @property
    def shown(self) -> str:
        """The body in readable form."""
        return self._readable[1]


@dataclass(frozen=True)
class DeadLetter(Readable):
    """A message that could not be processed, as our client library and pipelines wrap it."""

    topic: str
    channel: str
    id: str
    attempts: int
    error: str
    body: bytes
    """Of the wrapped message, as the headers."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def reason(self) -> str:
        """The first line of the error. Numbers and ids become `#`, so that dead letters with the
        same cause have the same reason."""
        return _VARYING.sub("#", self.error.strip().partition("\n")[0])[:MAX_REASON]


def readable(body: bytes) -> tuple[str, str]:
    """The kind of body (`json`, `text` or `binary`) and its readable form."""
    try:
        decoded = body.decode()
    except UnicodeDecodeError:
        return "binary", _hex_dump(body[:1024])
    if decoded[:1] in ("{", "["):
        try:
            value = json.loads(decoded)
            return "json", json.dumps(value, indent=2, ensure_ascii=False)[:MAX_SHOWN]
        except (ValueError, RecursionError):
            pass
    if any(character < " " and character not in "\t\r\n" for character in decoded[:1024]):
        return "binary", _hex_dump(body[:1024])
    return "text", decoded[:MAX_SHOWN]


def _hex_dump(body: bytes) -> str:
    lines = []
    for place in range(0, len(body), 16):
        row = body[place : place + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{place:06x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)


def _parse(body: bytes) -> Any:
    if body[:1] not in (b"{", b"["):
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def read_letter(body: bytes, headers: Mapping[str, str]) -> DeadLetter | None:
    """The dead letter that a message is; None if it is not one, or if its JSON is cut off."""
    found = StoredLetter.from_message(body, headers)
    if found is None:
        return None
    return DeadLetter(
        topic=found.topic,
        channel=found.channel,
        id=found.id,
        attempts=found.attempts,
        error=found.error,
        body=found.body,
        headers=found.headers or {},
    )


@dataclass(frozen=True)
class ShownMessage(Readable):
    """A message of a node."""

    node: str
    id: str
    sequence: int
    timestamp_ns: int
    attempts: int
    state: str
    size: int
    body: bytes
    """Only the beginning of a long body."""
    due_ns: int = 0
    deadline_ns: int = 0
    client: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def letter(self) -> DeadLetter | None:
        return read_letter(self.body, self.headers)

    @property
    def preview(self) -> str:
        """The body in one line; the wrapped message of a dead letter."""
        body = self.letter.body if self.letter else self.body
        if (self.letter or self).kind == "binary":
            return body[:MAX_PREVIEW].hex(" ")[:MAX_PREVIEW]
        return " ".join(body[: 4 * MAX_PREVIEW].decode("utf-8", "replace").split())[:MAX_PREVIEW]

    @property
    def is_cut(self) -> bool:
        return len(self.body) < self.size

    @property
    def original_headers(self) -> Mapping[str, str]:
        """Headers of the message inside a dead letter that the letter does not have itself. nsqd
        keeps them in the letter; letters in JSON have them in their bodies."""
        inner = self.letter.headers if self.letter is not None else {}
        return {} if inner.items() <= self.headers.items() else inner

    def contains(self, words: str) -> bool:
        """In upper or lower case: in the body, in a header's value, in a dead letter's message and
        error, or in the id."""
        wanted = words.lower()
        texts = [self.body.decode("utf-8", "replace"), self.id, *self.headers.values()]
        if self.letter is not None:
            texts += [self.letter.body.decode("utf-8", "replace"), self.letter.error]
        return any(wanted in one.lower() for one in texts)

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
        more |= {"headers": dict(self.headers)}
        found |= {name: value for name, value in more.items() if value}
        if self.letter is not None:
            letter = self.letter
            found["dead_letter"] = {
                "topic": letter.topic,
                "channel": letter.channel,
                "id": letter.id,
                "attempts": letter.attempts,
                "error": letter.error,
                "reason": letter.reason,
            }
        return found


@dataclass(slots=True)
class Peeked:
    """Messages of several nodes, in the order of each."""

    messages: list[ShownMessage] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    missing: int = 0
    """Messages lost to a damaged disk."""


async def peek(
    cluster: Cluster,
    nodes: Iterable[Node],
    topic: str,
    channel: str = "",
    *,
    count: int = DEFAULT_COUNT,
    **where: str,
) -> Peeked:
    """Messages of the topic's log, or those that the channel holds, from each of the nodes. `where`
    goes to nsqd: `from`, `before`, `time`, `state`."""
    query = {"topic": topic, "count": str(max(1, min(count, MAX_COUNT))), **where}
    if channel:
        query["channel"] = channel
    found = Peeked()
    for node in nodes:
        try:
            answer = await _peek_one(cluster, node, "/channel/peek" if channel else "/topic/peek", query)
        except RequestFailed as error:
            found.errors.append(f"{node.address}: {reason(error)}")
            continue
        fields = as_object(answer)
        found.messages += [_shown(node.address, one) for one in objects(fields, "messages")]
        found.missing += number(fields, "missing")
    return found


async def _peek_one(cluster: Cluster, node: Node, path: str, query: dict[str, str]) -> Any:
    """A place before the log's start is its start, and a place after its end has no messages."""
    try:
        return await cluster.get(node, path, **query)
    except BadStatus as error:
        if error.code == "OFFSET_AHEAD":
            return {}
        if error.code != "OFFSET_GONE":
            raise
        fields = json.loads(error.body)
        return await cluster.get(node, path, **query | {"from": str(number(fields, "earliest"))})


def _shown(node: str, fields: Mapping[str, Any]) -> ShownMessage:
    body = text(fields, "body").encode("utf-8", "replace")
    if encoded := text(fields, "body_base64"):
        try:
            body = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            body = b""
    return ShownMessage(
        node=node,
        id=text(fields, "id"),
        sequence=number(fields, "sequence"),
        timestamp_ns=number(fields, "timestamp"),
        attempts=number(fields, "attempts"),
        state=text(fields, "state"),
        size=number(fields, "size"),
        body=body,
        due_ns=number(fields, "due"),
        deadline_ns=number(fields, "deadline"),
        client=text(fields, "client"),
        headers=_headers_of(as_object(fields.get("headers"))),
    )


def _headers_of(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: text(fields, name) for name in fields if isinstance(fields[name], str) and name.isascii()}


def reason(error: Exception) -> str:
    """Why a request to a node failed: NSQ's code if there is one."""
    return (error.code or str(error)) if isinstance(error, BadStatus) else str(error)
