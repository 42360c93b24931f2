"""The topics file: topics and channels that nsqd creates, with their settings.

    [topics.orders]
    durability = "fsync"                     # or retention_age, retention_bytes; "default": nsqd's flag
    policy = { max_attempts = 4, retry_delay = "5s" }

    [topics.orders.channels.billing]
    policy = { max_attempts = 10 }           # "none": the topic's applies
    ordered_by = "/customer"                 # "none": the channel is not ordered

The file wins over what was set before. What it does not name stays as it is. A file with a mistake
changes nothing.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from nsparq.broker.message_key import key_reader
from nsparq.broker.settings import TopicSettings
from nsparq.delivery_policy import DeliveryPolicy
from nsparq.errors import NsparqError, StartError
from nsparq.names import is_ephemeral, is_valid_name
from nsparq.options import NsqdOptions

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.topic import Topic

__all__ = ["TopicsFile", "TopicsFileError", "read_topics_file"]

logger = logging.getLogger(__name__)

UNSET: Final = {"policy": "none", "ordered_by": "none"}
"""The word for no value of a setting, if it is not `default`."""

Changes = Mapping[str, Any]
"""Settings by name, as in the file. None restores the flag of nsqd; a policy and an order have none
and are removed."""
CHANNEL_SETTINGS: Final = ("policy", "ordered_by")


class TopicsFileError(StartError):
    """The text names the file, the key and the reason."""


@dataclass(frozen=True, slots=True)
class DeclaredTopic:
    """A topic in the file."""

    changes: Changes
    channels: Mapping[str, Changes]


@dataclass(frozen=True, slots=True)
class TopicsFile:
    """A file without mistakes in its keys and values."""

    path: Path = Path()
    topics: Mapping[str, DeclaredTopic] = field(default_factory=dict)

    def apply(self, broker: Broker) -> None:
        """Create what is missing, and change what differs. Raises TopicsFileError, with nothing
        changed unless the disk fails."""
        for name in self._order(broker.topics):
            declared = self.topics[name]
            try:
                topic = broker.get_topic(name)
                if topic.settings.changed(declared.changes, name) != topic.settings:
                    topic.change_settings(declared.changes)
                    logger.info("TOPIC(%s): settings changed by %s", name, self.path)
                for channel_name, changes in declared.channels.items():
                    channel = topic.get_channel(channel_name)
                    before = channel.retries.own_policy, channel.ordering.ordered_by
                    wanted = _policy(changes, name, before[0]), changes.get("ordered_by", before[1]) or ""
                    if wanted != before:
                        channel.change_settings(*wanted)
                        logger.info("CHANNEL(%s): settings changed by %s", channel, self.path)
            except (NsparqError, OSError) as error:
                raise TopicsFileError(f"{self.path}: topics.{name}: {error}") from error

    def _order(self, topics: Mapping[str, Topic]) -> list[str]:
        """The topics of the file, those that take dead letters first: so no change makes a cycle
        together with a policy that is replaced only later. Raises TopicsFileError."""
        graph = {
            name: {policy.dead_letter_topic(name) for policy in self._policies(name, topics.get(name))}
            for name in {*topics, *self.topics}
        }
        try:
            order = [*TopologicalSorter(graph).static_order()]
        except CycleError as error:
            cycle = _from_file_on([*reversed(error.args[1])][1:], self.topics)
            reason = f"dead letters would go in a circle: {' → '.join(cycle)}"
            if others := ", ".join(name for name in dict.fromkeys(cycle) if not self._has_policy(name)):
                reason += f"; the policy of {others} was set before and is not in the file"
            raise TopicsFileError(f"{self.path}: {reason}") from None
        return [name for name in order if name in self.topics]

    def _policies(self, name: str, topic: Topic | None) -> Iterator[DeliveryPolicy]:
        """The policies of a topic and its channels after the file is applied. None of them may
        lead back to the topic."""
        declared = self.topics.get(name, DeclaredTopic({}, {}))
        found = [_policy(declared.changes, name, None if topic is None else topic.settings.policy)]
        own = {} if topic is None else {one.name: one.retries.own_policy for one in topic.channels.values()}
        found += [
            _policy(declared.channels.get(channel, {}), name, own.get(channel))
            for channel in {*own, *declared.channels}
        ]
        return (policy for policy in found if policy is not None)

    def _has_policy(self, name: str) -> bool:
        declared = self.topics.get(name)
        return declared is not None and any(
            "policy" in changes for changes in (declared.changes, *declared.channels.values())
        )


def _from_file_on(cycle: list[str], topics: Container[str]) -> list[str]:
    """The same cycle, closed. It begins with a topic that the file names."""
    first = cycle.index(min(cycle, key=lambda name: (name not in topics, name)))
    return [*cycle[first:], *cycle[: first + 1]]


def _policy(changes: Changes, topic: str, before: DeliveryPolicy | None) -> DeliveryPolicy | None:
    wanted = {name: value for name, value in changes.items() if name == "policy"}
    return TopicSettings(policy=before).changed(wanted, topic).policy


def read_topics_file(path: Path, options: NsqdOptions) -> TopicsFile:
    """For an nsqd with these flags. Raises TopicsFileError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TopicsFileError(f"{path}: {reason}") from error
    return _Reader(path, options).read(content)


class _Reader:
    """Checks the content of a file."""

    def __init__(self, path: Path, options: NsqdOptions) -> None:
        self._path = path
        self._options = options

    def read(self, content: Mapping[str, Any]) -> TopicsFile:
        for key in content:
            if key != "topics":
                self._refuse(key, "the file has only [topics.NAME] tables")
        tables = self._tables("topics", content.get("topics", {}), "topic")
        return TopicsFile(self._path, {name: self._topic(*entry) for name, entry in tables.items()})

    def _topic(self, place: str, name: str, table: dict[str, Any]) -> DeclaredTopic:
        channels = self._tables(f"{place}.channels", table.pop("channels", {}), "channel")
        return DeclaredTopic(
            self._changes(place, name, table, TopicSettings.__slots__),
            {
                channel: self._changes(where, name, values, CHANNEL_SETTINGS)
                for channel, (where, _, values) in channels.items()
            },
        )

    def _tables(self, place: str, found: Any, kind: str) -> dict[str, tuple[str, str, dict[str, Any]]]:
        """For each name its place in the file, the name, and the values."""
        if not isinstance(found, dict):
            self._refuse(place, f"must be a table for each {kind}, such as [{place}.NAME]")
        for name, table in found.items():
            if not is_valid_name(name.encode()):
                self._refuse(f"{place}.{name}", f"not a valid name of a {kind}")
            if is_ephemeral(name):
                self._refuse(f"{place}.{name}", f"an ephemeral {kind} is not kept, so it cannot be declared")
            if not isinstance(table, dict):
                self._refuse(f"{place}.{name}", "must be a table")
        return {name: (f"{place}.{name}", name, table) for name, table in found.items()}

    def _changes(self, place: str, topic: str, values: dict[str, Any], known: Iterable[str]) -> Changes:
        changes: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                keys = ", ".join([*known, "channels"] if "durability" in known else known)
                hint = "; a name with dots needs quotes" if isinstance(value, dict) else ""
                self._refuse(f"{place}.{key}", f"there is no such key; there are {keys}{hint}")
            changes[key] = None if value == UNSET.get(key, "default") else value
            try:
                if key != "ordered_by":
                    TopicSettings().changed({key: changes[key]}, topic).check(self._options)
                elif changes[key] is not None:
                    key_reader(changes[key])
            except (ValueError, OverflowError) as error:
                self._refuse(f"{place}.{key}", str(error))
        return changes

    def _refuse(self, place: str, reason: str) -> NoReturn:
        raise TopicsFileError(f"{self._path}: {place}: {reason}")
