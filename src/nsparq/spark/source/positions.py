"""Offsets of log mode, as Spark keeps them in the checkpoint, and positions that a user may write.

    {
        "logs": {"orders": {"10.0.0.5:4151": ["986586ac824442cfa187e6e47a79…", 7351273428881409]}},
        "query": "5d2c8a70c0f94f3f9c3c0a1d1c8a6a52",
        "version": 2
    }

`logs`: by topic and node, the incarnation of the log and the first unread sequence number. `query`:
the id that owns the channel, made when the query begins; empty if the query owns none. `began`,
only in the first offset: the logs at the beginning, which Spark does not write down and would ask
for again after a crash. Version 1 had only the logs, and no version.

Spark compares offsets as texts, so the keys are always sorted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

from nsparq.errors import NsparqError
from nsparq.spark.options import OptionError

__all__ = ["BadOffset", "Offsets", "Place", "Rule", "Rules", "decode", "encode"]

VERSION: Final = 2
MAX_SEQUENCE: Final = 1 << 54


class BadOffset(NsparqError):
    """The offset in the checkpoint is not one of ours: the checkpoint belongs to another source."""

    retry_helps = False


class Place(NamedTuple):
    """A place in the log of a topic on a node."""

    incarnation: str
    """Identifies the log: a topic that was deleted and created again has another one."""
    sequence: int
    """The first unread number."""


class Offsets(dict[str, dict[str, Place]]):
    """Places by topic and node. Offsets are equal if their places are."""

    query: str = ""
    """Id of the query, which owns the channel; empty if nobody owns it."""
    began: Offsets | None = None
    """Where the first batch begins; None in the offsets of later batches."""

    def place(self, topic: str, node: str) -> Place | None:
        return self.get(topic, {}).get(node)

    def put(self, topic: str, node: str, place: Place) -> None:
        self.setdefault(topic, {})[node] = place

    def drop(self, topic: str, node: str) -> None:
        self.get(topic, {}).pop(node, None)

    def items_flat(self) -> Iterator[tuple[str, str, Place]]:
        for topic in sorted(self):
            for node in sorted(self[topic]):
                yield topic, node, self[topic][node]

    def copy(self) -> Offsets:
        copied = Offsets({topic: dict(nodes) for topic, nodes in self.items()})
        copied.query, copied.began = self.query, self.began
        return copied

    def find(self, topic: str, incarnation: str) -> str | None:
        """The name under which these offsets have a log; the node may have another name now."""
        for node, place in self.get(topic, {}).items():
            if place.incarnation == incarnation:
                return node
        return None


def encode(offsets: Offsets) -> dict[str, Any]:
    began = {} if offsets.began is None else {"began": _encode_logs(offsets.began)}
    return {**began, "logs": _encode_logs(offsets), "query": offsets.query, "version": VERSION}


def _encode_logs(offsets: Offsets) -> dict[str, Any]:
    """A topic without nodes is left out."""
    return {
        topic: {node: [*place] for node, place in sorted(nodes.items())}
        for topic, nodes in sorted(offsets.items())
        if nodes
    }


def decode(content: Any) -> Offsets:
    """Raises BadOffset."""
    version = version_of(content)
    if version > VERSION:
        raise BadOffset(
            f"this offset is from a newer nsparq: its version is {version}, and this one knows {VERSION}"
        )
    try:
        if version == 1:
            return _decode_logs(content)
        offsets = _decode_logs(content["logs"])
        if type(content["query"]) is not str:
            raise ValueError
        offsets.query = content["query"]
        if "began" in content:
            offsets.began = _decode_logs(content["began"])
    except (AttributeError, KeyError, TypeError, ValueError):
        shown = json.dumps(content)[:200]
        raise BadOffset(f"not an offset of format nsq in log mode: {shown}") from None
    return offsets


def version_of(content: Any) -> int:
    """1 if there is no number `version`. In version 1 `version` may be a topic."""
    version = content.get("version") if isinstance(content, dict) else None
    return version if type(version) is int else 1


def _decode_logs(content: Any) -> Offsets:
    offsets = Offsets()
    for topic, nodes in content.items():
        for node, (incarnation, sequence) in nodes.items():
            if type(incarnation) is not str or not _is_sequence(sequence):
                raise ValueError
            offsets.put(topic, node, Place(incarnation, sequence))
    return offsets


def _is_sequence(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_SEQUENCE


# positions written by a user


class Rule(NamedTuple):
    """How to find a place: a word (`earliest`, `latest`, `channel`), a time or a number."""

    word: str = ""
    time_ns: int | None = None
    sequence: int | None = None
    incarnation: str | None = None
    """The log that the number is from, if the user named it."""


EARLIEST: Final = Rule("earliest")
LATEST: Final = Rule("latest")


class Rules:
    """The parsed value of startingPosition or endingPosition."""

    def __init__(self, option: str, text: str, words: tuple[str, ...], default: Rule) -> None:
        """`default` is for logs that the JSON does not name. Raises OptionError."""
        self.option, self._words, self._default = option, words, default
        self._all: Rule | None = None
        self._by_topic: dict[str, Rule | dict[str, Rule]] = {}
        if not text.startswith("{"):
            self._all = self._rule(text)
            return
        try:
            content = json.loads(text)
        except ValueError as error:
            raise OptionError(f"option {option} is not valid JSON: {error}") from None
        if version_of(content) == VERSION:
            content = content.get("logs", {})
        for topic, given in content.items():
            if isinstance(given, dict):
                self._by_topic[topic] = {node: self._rule(value) for node, value in given.items()}
            else:
                self._by_topic[topic] = self._rule(given)

    def rule(self, topic: str, node: str) -> Rule:
        if self._all is not None:
            return self._all
        found = self._by_topic.get(topic, self._default)
        return found.get(node, self._default) if isinstance(found, dict) else found

    @property
    def topics(self) -> list[str]:
        """Topics that the JSON names."""
        return [*self._by_topic]

    def uses(self, word: str) -> bool:
        given: list[Rule] = [self._all] if self._all is not None else []
        for value in self._by_topic.values():
            given += value.values() if isinstance(value, dict) else [value]
        return any(rule.word == word for rule in given)

    def _rule(self, value: Any) -> Rule:
        if isinstance(value, str):
            if value.lower() in self._words:
                return Rule(value.lower())
            time_ns = _time_ns(value)
            if time_ns is not None:
                return Rule(time_ns=time_ns)
        if _is_sequence(value):
            return Rule(sequence=value)
        if isinstance(value, list) and len(value) == 2 and type(value[0]) is str and _is_sequence(value[1]):
            return Rule(incarnation=value[0], sequence=value[1])
        words = ", ".join(self._words)
        raise OptionError(
            f"option {self.option} must be one of {words}, a time such as 2026-11-15T12:00:00Z, or JSON "
            f"by topic and node, not {str(value)[:100]!r}"
        )


def _time_ns(text: str) -> int | None:
    """From Unix seconds, or RFC 3339 with a time zone. None for other texts."""
    try:
        seconds = Decimal(text)
        if not seconds.is_finite() or not 0 <= seconds < 1 << 33:
            return None
        return int(seconds * 1_000_000_000)
    except InvalidOperation:
        pass
    try:
        since = datetime.fromisoformat(text) - datetime.fromtimestamp(0, UTC)
    except (ValueError, TypeError, OverflowError):  # TypeError: no time zone
        return None
    return max(0, since // timedelta(microseconds=1) * 1000)
