"""Where reading begins and ends: options startingPosition and endingPosition as places in the
logs."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from functools import partial

from nsparq.errors import ArchiveUnavailable
from nsparq.spark.cluster.api import LogStatus, Positions
from nsparq.spark.cluster.http_client import Refused, Unreachable
from nsparq.spark.errors import NoAnswer
from nsparq.spark.options import NsqOptions, OptionError
from nsparq.spark.source.archived import ArchivedLogs, time_bounds
from nsparq.spark.source.channels import Channels
from nsparq.spark.source.filters import Filters
from nsparq.spark.source.peers import Log, Peers
from nsparq.spark.source.plan import BatchHeads, find_time
from nsparq.spark.source.positions import EARLIEST, LATEST, Offsets, Place, Rule, Rules
from nsparq.storage.batch import decode_head

__all__ = ["Bounds"]

logger = logging.getLogger(__name__)


class Bounds:
    """Asks the nodes for the places that the options describe."""

    def __init__(self, options: NsqOptions, peers: Peers, channels: Channels, archived: ArchivedLogs) -> None:
        """Raises OptionError."""
        self._options, self._peers, self._channels, self._archived = options, peers, channels, archived
        self._is_wanted = options.topic_filter()
        words = ("earliest", "latest", "channel")
        self._starting = Rules("startingPosition", options.starting_position, words, EARLIEST)
        self._ending = Rules("endingPosition", options.ending_position, ("latest",), LATEST)
        if self._starting.uses("channel") and options.channel is None:
            raise OptionError("option channel is missing: startingPosition is the channel's position")

    def initial(self) -> Offsets:
        """Where a stream without a checkpoint begins. Raises NoAnswer, NoLog, OptionError."""
        offsets = Offsets()
        logs = self._peers.poll_all(require_all=False)
        self._check_topics(self._starting, logs)
        for (topic, name), status in self._peers.distinct(logs):
            positions = status.positions or self._create(topic, name)
            if positions is not None:
                offsets.put(topic, name, self._place(self._starting, topic, name, positions))
        return offsets

    def _create(self, topic: str, name: str) -> Positions | None:
        """Create the topic and the channel on a node whose address was given, as SUB would."""
        peer = self._peers.reachable(name)
        if peer is None or not peer.node.is_given or topic not in self._options.wanted_topics:
            return None
        try:
            peer.client.create_channel(topic, self._options.channel or "")
            return peer.client.positions(topic)
        except (Refused, Unreachable) as error:
            logger.warning("cannot create the topic %s on %s: %s", topic, name, error)
            return None

    def batch(self, filters: Filters) -> tuple[Offsets, Offsets]:
        """Start and end of a batch, within the filters. Raises NoAnswer, NoLog, OptionError."""
        start, end = Offsets(), Offsets()
        found: set[str] = set()
        logs = self._peers.poll_all(require_all=True)
        for rules in (self._starting, self._ending):
            self._check_topics(rules, logs)
        for (topic, name), status in self._peers.distinct(logs):
            positions = status.positions
            if positions is None:
                continue
            found.add(topic)
            if not filters.wants(topic, name):
                continue
            first = self._place(self._starting, topic, name, positions)
            last = self._place(self._ending, topic, name, positions)
            self._check_order(topic, name, first, last)
            at_time = partial(self._at_time, topic, name, positions)
            low, high = filters.narrowed(first.sequence, last.sequence, at_time)
            start.put(topic, name, first._replace(sequence=low))
            end.put(topic, name, last._replace(sequence=high))
        for topic in self._options.wanted_topics:
            if topic not in found:
                raise OptionError(f"option topic: no nsqd has a topic {topic}")
        return start, end

    def _check_topics(self, rules: Rules, logs: dict[Log, LogStatus]) -> None:
        """A position for a topic that is not read, or does not exist, is a mistake."""
        existing = {topic for (topic, _), status in logs.items() if status.positions is not None}
        for topic in rules.topics:
            if not self._is_wanted(topic):
                raise OptionError(
                    f"option {rules.option} names the topic {topic}, which is not among the topics to be read"
                )
            is_named = topic in self._options.wanted_topics
            if topic not in existing and not is_named and self._peers.all_answered:
                raise OptionError(f"option {rules.option} names the topic {topic}, which no nsqd has")

    def _check_order(self, topic: str, name: str, first: Place, last: Place) -> None:
        start, end = self._starting.rule(topic, name), self._ending.rule(topic, name)
        is_before = last.sequence < first.sequence
        if start.time_ns is not None and end.time_ns is not None:
            # Without a message between two times, both are the same place.
            is_before = end.time_ns < start.time_ns
        if is_before:
            raise OptionError(
                f"option endingPosition is before startingPosition: topic {topic} on {name} would end at "
                f"{_shown(end, last)} and begin at {_shown(start, first)}"
            )

    def _place(self, rules: Rules, topic: str, name: str, positions: Positions) -> Place:
        rule, option = rules.rule(topic, name), rules.option
        incarnation = positions.incarnation
        if rule.word == "earliest":
            return Place(incarnation, positions.earliest)
        if rule.word == "latest":
            return Place(incarnation, positions.visible)
        if rule.word == "channel":
            try:
                cursor = self._channels.cursor(topic, name, incarnation)
            except (Refused, Unreachable) as error:
                raise NoAnswer(f"option {option}: cannot get the channel's position: {error}") from error
            return Place(incarnation, positions.earliest if cursor is None else cursor)
        if rule.time_ns is not None:
            return Place(incarnation, self._at_time(topic, name, positions, rule.time_ns))
        assert rule.sequence is not None
        if rule.incarnation not in (None, incarnation):
            raise OptionError(
                f"option {option}: topic {topic} on {name} no longer has the log {rule.incarnation}; "
                "the topic was deleted and created again"
            )
        if rule.sequence > positions.latest:
            raise OptionError(
                f"option {option}: topic {topic} on {name} ends at {positions.latest}, before {rule.sequence}"
            )
        return Place(incarnation, rule.sequence)

    def _at_time(self, topic: str, name: str, positions: Positions, time_ns: int) -> int:
        """The first message published at or after a time."""
        low, entry = positions.earliest, None
        manifest = self._archived.manifest(topic, positions.incarnation, low)
        if manifest is not None:
            low, entry = time_bounds(manifest, low, time_ns)
        if manifest is None or entry is None:
            return self._search(topic, name, positions, time_ns, low, positions.visible)
        found = self._search(topic, name, positions, time_ns, low, entry.base)
        if found < entry.base:
            return found
        try:
            found = self._archived.search_time(manifest, entry, time_ns)
        except ArchiveUnavailable as error:
            logger.warning("asking nsqd for a time, because the archive fails: %s", error)
            found = self._search(topic, name, positions, time_ns, entry.base, entry.end)
        return min(max(found, positions.earliest), positions.visible)

    def _search(self, topic: str, name: str, positions: Positions, time_ns: int, low: int, high: int) -> int:
        """The same by asking nsqd, for messages from `low` to before `high`; `high` if there is
        none."""

        def read(sequence: int) -> BatchHeads:
            chunk = self._peers.probe(topic, name, positions.incarnation, sequence)
            heads: list[tuple[int, int]] = []
            at = 0
            while chunk is not None and (head := decode_head(chunk.data, at)) is not None:
                heads.append((head.base, head.timestamp_ns))
                at += head.size
            return BatchHeads(heads, sequence + 1 if chunk is None else chunk.next)

        return min(find_time(low, high, time_ns, read), high)


def _shown(rule: Rule, place: Place) -> str:
    """A place, and how the user described it."""
    if rule.time_ns is not None:
        given = datetime.fromtimestamp(rule.time_ns / 1e9, UTC).isoformat()
        return f"{place.sequence} ({given})"
    return f"{place.sequence} ({rule.word})" if rule.word else str(place.sequence)
