"""Reads the log of a topic on one nsqd: from a time, from the end, and on as it grows.

It uses GET /topic/read, so it needs no channel and consumes nothing. docs/internals/storage.md
describes the batches of the answer. nsqd has checked them (`verify`), so this needs only the
standard library.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import Any, Final, NamedTuple

from nsparq.headers import decode_headers
from nsparq.tools.cluster import AskFailed
from nsparq.tools.source import Source

__all__ = ["LogReader", "StoredMessage"]

HEADER: Final = struct.Struct("<4sIIHHQqqII")
WITH_HEADERS: Final = b"NQB2"
MAGICS: Final = (b"NQB1", WITH_HEADERS)
"""Of batches without and with headers. Headers follow the bodies."""


class StoredMessage(NamedTuple):
    timestamp_ns: int
    node: str
    sequence: int
    topic: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(slots=True)
class LogReader:
    """A position in the log of a topic on one nsqd. start() comes first. Methods raise
    AskFailed."""

    source: Source
    node: str
    topic: str
    incarnation: str = ""
    next: int = -1
    """The next sequence number to read; -1 as long as the topic is not there."""
    is_started: bool = False
    """Whether the nsqd has said where its log ends, or that it has no such topic."""
    lost: int = 0
    """Messages that were not read: retention had removed them, or the disk has damaged them."""

    def positions(self) -> Mapping[str, Any] | None:
        """Start and end of the log; None if the topic is not there."""
        try:
            return self.source.ask("GET", self.node, "/topic/positions", topic=self.topic)
        except AskFailed as error:
            if error.code == "TOPIC_NOT_FOUND":
                return None
            raise

    def start(self, since_ns: int | None) -> None:
        """Go to the first message of this time or later, or to the end."""
        found = self.positions()
        if found is not None:
            start = found["latest"]
            if since_ns is not None:
                start = self._search(found["earliest"], start, since_ns)
            self.incarnation, self.next = found["incarnation"], start
        self.is_started = True

    def _search(self, low: int, high: int, wanted_ns: int) -> int:
        """The first number in [low, high) whose message is not older than `wanted_ns`."""
        while low < high:
            middle = (low + high) // 2
            query = {"topic": self.topic, "from": str(middle), "count": "1"}
            try:
                messages = self.source.ask("GET", self.node, "/topic/peek", **query).get("messages")
            except AskFailed as error:
                if error.code != "OFFSET_GONE":
                    raise
                low = middle + 1
                continue
            # There may be a gap in the numbers, or none of them is left.
            if not messages or messages[0]["timestamp"] >= wanted_ns:
                high = middle
            else:
                low = messages[0]["sequence"] + 1
        return low

    def read(self, until: int | None = None) -> Iterator[StoredMessage]:
        """The messages from the position on, up to the present end of the log or to `until`."""
        for messages in self.answers(until):
            yield from messages

    def answers(self, until: int | None = None) -> Iterator[list[StoredMessage]]:
        """As read(), one list for each answer. The position moves when the next one is wanted: a
        failure then loses nothing."""
        while self.next >= 0 and (until is None or self.next < until):
            query = {"topic": self.topic, "from": str(self.next), "incarnation": self.incarnation}
            try:
                answer = self.source.fetch(self.node, "/topic/read", verify="true", **query)
            except AskFailed as error:
                if error.code not in ("OFFSET_GONE", "WRONG_INCARNATION", "TOPIC_NOT_FOUND", "OFFSET_AHEAD"):
                    raise
                if not self._recover(error.code):
                    return
                continue
            try:
                end, lost = (int(answer.headers[f"x-nsparq-{name}"]) for name in ("next", "lost"))
                gaps = json.loads(answer.headers["x-nsparq-gaps"])
                messages = [*self._messages(answer.body, gaps, until)]
            except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
                raise AskFailed(f"{self.node} sent an invalid batch of messages: {error}", 200) from error
            self.lost += lost
            if end <= self.next:
                return
            yield messages
            self.next = end if until is None else min(end, until)

    def _recover(self, code: str) -> bool:
        """The log does not have the position. Go to its start, or to its end if that was set back;
        False if the topic is gone."""
        found = self.positions()
        if found is None:
            self.incarnation, self.next = "", -1
            return False
        start = found["latest"] if code == "OFFSET_AHEAD" else found["earliest"]
        if found["incarnation"] == self.incarnation and code == "OFFSET_GONE":
            self.lost += start - self.next
        self.incarnation, self.next = found["incarnation"], start
        return True

    def _messages(self, data: bytes, gaps: list[list[int]], until: int | None) -> Iterator[StoredMessage]:
        position = 0
        while position < len(data):
            magic, _, size, _, _, base, timestamp_ns, _, count, _ = HEADER.unpack_from(data, position)
            if magic not in MAGICS:
                raise ValueError("unknown format")
            table = position + HEADER.size
            lengths = struct.unpack_from(f"<{count}I", data, table)
            ends = accumulate(lengths, initial=table + 4 * count)
            begin = next(ends)
            end_of_bodies = begin + sum(lengths)
            if not end_of_bodies <= position + size <= len(data):
                raise ValueError("wrong size")
            blocks = _blocks(data, end_of_bodies, count) if magic == WITH_HEADERS else repeat(b"")
            for sequence, (end, block) in enumerate(zip(ends, blocks, strict=False), base):
                is_wanted = self.next <= sequence and (until is None or sequence < until)
                if is_wanted and not any(low <= sequence < high for low, high in gaps):
                    body, headers = data[begin:end], decode_headers(block)
                    yield StoredMessage(timestamp_ns, self.node, sequence, self.topic, body, headers)
                begin = end
            position += size

    def wait(self, state: int | None, wait_ms: int) -> int | None:
        """Wait until the log may have grown. `state` is the result of the last call."""
        found = self.source.ask(
            "POST", self.node, "/topics/positions", {"topics": {self.topic: state}}, wait=str(wait_ms)
        )
        topics = found.get("topics") or {}
        if self.topic not in topics:
            return state
        described = topics[self.topic]
        if described is None:
            self.incarnation, self.next = "", -1
            return 0
        if self.next < 0:
            # The nsqd did not have the topic before: all of its messages are new.
            self.incarnation, self.next = described["incarnation"], described["earliest"]
        return int(described["state"])


def _blocks(data: bytes, table: int, count: int) -> Iterator[bytes]:
    """The header blocks of a batch. Their lengths are at `table`, the blocks behind them."""
    ends = [*accumulate(struct.unpack_from(f"<{count}I", data, table), initial=table + 4 * count)]
    return (data[begin:end] for begin, end in pairwise(ends))
