"""The HTTP calls of nsqd and nsqlookupd that Spark's processes use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from nsparq.spark.cluster.http_client import Answer, HttpClient, Refused, Unreachable

__all__ = ["Client", "LogChunk", "LogStatus", "MoveResult", "Positions", "valid_answer"]


class LogChunk(NamedTuple):
    """Consecutive batches of a log, as they are on disk. See /topic/read."""

    data: bytes
    first: int
    """Its first number. It is before the requested number, or behind it if a gap lies between."""
    next: int
    """The number to read from next."""
    latest: int
    gaps: list[tuple[int, int]]
    """Ranges of numbers in it that were emptied."""
    lost: int
    """Messages that are missing because of damage; known only of a verified chunk."""
    removed_before: int = 0
    """If the requested number was removed: the number at which the log begins now."""


class Positions(NamedTuple):
    """The extent of a topic's log on a node. See /topic/positions."""

    incarnation: str
    earliest: int
    latest: int
    visible: int
    messages: int
    bytes: int

    @property
    def bytes_per_message(self) -> float:
        return self.bytes / self.messages if self.messages else 0.0

    @property
    def has_gaps(self) -> bool:
        return self.messages != self.latest - self.earliest


class LogStatus(NamedTuple):
    """A topic's log on a node, and the query's channel there. See /topics/positions."""

    positions: Positions | None
    """None if the node does not have the topic."""
    has_channel: bool = True
    """True also for a batch, which has no channel."""
    is_paused: bool = False
    owner: str | None = None
    """Owner of the channel: empty if nobody owns it, None if unknown."""
    state: int = 0
    """Sent back with the next request; nsqd then answers only with topics that have changed."""


class MoveResult(NamedTuple):
    """Result of moving one channel of many. See /channels/commit."""

    cursor: int = -1
    code: str = ""
    """Error code, such as CHANNEL_NOT_FOUND; empty if the channel was moved."""
    owner: str = ""
    since: str = ""
    """With CHANNEL_OWNED: the owner, and since when."""


class Client(HttpClient):
    # nsqd and nsqlookupd

    def info(self) -> dict[str, Any]:
        return self.get("/info").object()

    def create_channel(self, topic: str, channel: str) -> None:
        """Creates the topic too, if it is missing."""
        self.post("/topic/create", topic=topic)
        self.post("/channel/create", topic=topic, channel=channel)

    # nsqlookupd

    def lookup(self, topic: str) -> list[dict[str, Any]]:
        try:
            return _listed(self.get("/lookup", topic=topic), "producers")
        except Refused as refused:
            if refused.status == 404 and refused.code == "TOPIC_NOT_FOUND":
                return []
            raise

    def nodes(self) -> list[dict[str, Any]]:
        """All nsqd, each with its topics."""
        return _listed(self.get("/nodes"), "producers")

    # nsqd

    def stats(self, topic: str = "", channel: str = "") -> list[dict[str, Any]]:
        """Topics with their channels, without clients."""
        given = {name: value for name, value in (("topic", topic), ("channel", channel)) if value}
        answer = self.get("/stats", format="json", include_clients="false", include_mem="false", **given)
        return _listed(answer, "topics")

    # the log of nsparq's nsqd

    def positions(self, topic: str) -> Positions:
        found = self.get("/topic/positions", topic=topic).object()
        with valid_answer():
            return _positions(found)

    def gaps(self, topic: str) -> list[tuple[int, int]]:
        """Half-open ranges of numbers that have no message."""
        found = self.get("/topic/positions", topic=topic).object()
        with valid_answer():
            return [(int(low), int(high)) for low, high in found["gaps"]]

    def statuses(
        self, known: Mapping[str, int | None], channel: str | None, wait: float = 0.0
    ) -> dict[str, LogStatus]:
        """Topics whose state has changed. If none has, nsqd waits up to `wait` seconds."""
        given: dict[str, str | int] = {"channel": channel} if channel else {}
        if wait:
            given["wait"] = int(wait * 1000)
        limit = self._access.timeout and self._access.timeout + wait
        body = json.dumps({"topics": known}).encode()
        answer = self.request("POST", "/topics/positions", given, body, timeout=limit)
        with valid_answer():
            found = answer.object()["topics"]
            return {topic: _status(content, bool(channel)) for topic, content in found.items()}

    def read(
        self, topic: str, start: int, max_bytes: int, incarnation: str, *, verify: bool = False
    ) -> LogChunk:
        more = {"verify": "true"} if verify else {}
        answer = self.get(
            "/topic/read",
            topic=topic,
            max_bytes=max_bytes,
            incarnation=incarnation,
            **{"from": start},
            **more,
        )
        found = answer.headers
        with valid_answer():
            first, following, latest, lost = (
                int(found[f"x-nsparq-{name}"]) for name in ("first", "next", "latest", "lost")
            )
            gaps = [(int(low), int(high)) for low, high in json.loads(found["x-nsparq-gaps"])]
            return LogChunk(answer.body, first, following, latest, gaps, lost)

    def first_id(self, topic: str, sequence: int | None) -> int | None:
        """The id of message number 0 of this node, even if no message ever had that number. None if
        there is no readable message to compute it from: the first one from `sequence` on, or the
        newest."""
        start = {} if sequence is None else {"from": sequence}
        answer = self.get("/topic/peek", topic=topic, count=1, **start)
        messages = answer.object().get("messages") or ()
        with valid_answer():
            return int(messages[0]["id"], 16) - int(messages[0]["sequence"]) if messages else None

    def commit(self, topic: str, channel: str, sequence: int, incarnation: str) -> tuple[int, int]:
        """Mark everything before `sequence` as done. Returns the cursor, which never moves back,
        and the depth."""
        answer = self.post(
            "/channel/commit", topic=topic, channel=channel, sequence=sequence, incarnation=incarnation
        )
        found = answer.object()
        with valid_answer():
            return int(found["cursor"]), int(found["depth"])

    def commit_many(
        self, channel: str, owner: str, places: Mapping[str, tuple[str, int]]
    ) -> dict[str, MoveResult]:
        """commit() for many topics: incarnation and sequence of each. `owner` may be empty."""
        return self._move_many("/channels/commit", channel, owner, places)

    def seek_many(
        self, channel: str, owner: str, places: Mapping[str, tuple[str, int]]
    ) -> dict[str, MoveResult]:
        """Move a channel of many topics, forward or back. Creates missing channels."""
        return self._move_many("/channels/seek", channel, owner, places)

    def _move_many(
        self, path: str, channel: str, owner: str, places: Mapping[str, tuple[str, int]]
    ) -> dict[str, MoveResult]:
        body = json.dumps({"topics": places}).encode()
        given: dict[str, str | int] = {"channel": channel}
        if owner:
            given["owner"] = owner
        answer = self.request("POST", path, given, body)
        with valid_answer():
            found = answer.object()["topics"]
            return {topic: _move_result(found[topic]) for topic in places}


def _listed(answer: Answer, name: str) -> list[dict[str, Any]]:
    """Objects in an answer; none if it has null, as Go writes an empty list."""
    found = answer.object().get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Unreachable(f"not an answer of nsqd or nsqlookupd: {name} is no list of objects")
    return found


def _positions(content: dict[str, Any]) -> Positions:
    return Positions(str(content["incarnation"]), *(int(content[name]) for name in Positions._fields[1:]))


def _status(content: dict[str, Any] | None, has_channel_option: bool) -> LogStatus:
    if content is None:
        return LogStatus(None, has_channel=not has_channel_option)
    positions, state, channel = _positions(content), int(content["state"]), str(content["channel"])
    if not has_channel_option:
        return LogStatus(positions, state=state)
    return LogStatus(positions, channel != "missing", channel == "paused", content.get("owner"), state)


def _move_result(content: dict[str, Any]) -> MoveResult:
    if "message" in content:
        owner, since = (str(content.get(name, "")) for name in ("owner", "since"))
        return MoveResult(code=str(content["message"]), owner=owner, since=since)
    return MoveResult(int(content["cursor"]))


@contextmanager
def valid_answer() -> Iterator[None]:
    """An answer in another form comes from another server: Unreachable."""
    try:
        yield
    except (AttributeError, LookupError, ValueError, TypeError) as error:
        raise Unreachable(f"not an answer of nsqd or nsqlookupd: {error!r}") from error
