"""Imports, at the start, the messages that NSQ's own nsqd left in the data path.

Messages of a topic's queue are for all of its channels, and are published as usual. Messages of a
channel's queue are for that channel alone: they go into the same log, and every other channel
skips them. Messages keep their timestamps and attempts. Their ids are new, because ours are
positions in the log.

For each topic: append, sync, write the channels' states, and only then move NSQ's files away. A
crash before the states are written undoes the import, and the next start begins it anew. A crash
right after that repeats it. No message is lost in either case.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from nsparq.errors import StartError, WriteFailed
from nsparq.names import is_ephemeral, is_valid_name
from nsparq.storage.diskqueue import DiskQueue, Record, find_queues
from nsparq.storage.log import Log
from nsparq.storage.state_files import ChannelState

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

IMPORTED = "imported-from-nsq"
"""Directory for NSQ's files after the import, in the data path."""

MAX_BATCH = 1000
MAX_BATCH_BYTES = 1 << 20


def import_queues(broker: Broker) -> None:
    """Import every queue of NSQ in the data path. Raises StartError, with nothing lost."""
    by_topic: dict[str, list[DiskQueue]] = {}
    for queue in find_queues(broker.files, broker.data_path.path):
        if _can_import(queue):
            by_topic.setdefault(queue.topic, []).append(queue)
    for name, queues in by_topic.items():
        try:
            _import_topic(broker, name, queues)
            _move_away(broker, [path for queue in queues for path in queue.paths])
        except (OSError, WriteFailed) as error:
            raise StartError(f"cannot import NSQ's messages of topic {name!r}: {error}") from error


def _can_import(queue: DiskQueue) -> bool:
    names = [queue.topic, queue.channel] if queue.channel else [queue.topic]
    if not all(is_valid_name(name.encode(errors="replace")) for name in names):
        logger.warning("%s: not a valid name, not imported", queue)
        return False
    if any(map(is_ephemeral, names)):
        logger.warning("%s: ephemeral, so it has no files here; not imported", queue)
        return False
    return True


def _import_topic(broker: Broker, name: str, queues: list[DiskQueue]) -> None:
    # An empty queue creates no topic or channel: nsqd.dat lists those.
    full = [queue for queue in queues if queue.has_records()]
    if full:
        logger.info("TOPIC(%s): importing from NSQ: %s", name, ", ".join(map(str, full)))
        topic = broker.get_topic(name)
        channels = [(topic.get_channel(queue.channel), queue) for queue in full if queue.channel]
        _begin(topic)
        for channel, queue in channels:
            logger.info(
                "CHANNEL(%s): imported %d messages from NSQ", channel, _import_channel(channel, queue)
            )
        _show(topic)
        for queue in full:
            if not queue.channel:
                # These messages were never delivered, so attempts do not matter.
                logger.info(
                    "TOPIC(%s): imported %d messages from NSQ", topic, _append(topic, queue.records())
                )
        topic.log.close()
        let_import_count(topic)
        # The names of the new files must be on disk before NSQ's files are moved.
        broker.files.sync_names(broker.data_path.topic_directory(name))
    for queue in queues:
        for file_name, complaint in queue.complaints.items():
            logger.warning("%s: %s", file_name, complaint)


def _begin(topic: Topic) -> None:
    """Messages appended from here on do not count until let_import_count()."""
    topic.import_start = topic.log.end
    topic.checkpoint.write(sync=True)


def _show(topic: Topic) -> None:
    """Show the channels their own messages, even if the topic is paused: NSQ's channels had
    them."""
    if topic.paused and topic.channels and not topic.log.count(topic.visible_end, topic.import_start):
        topic.visible_end = topic.log.end


def let_import_count(topic: Topic) -> None:
    """Make an import, or its undoing, permanent. The channels' states are written before the
    topic's, because they must not name messages that the topic's state does not know."""
    for channel in topic.channels.values():
        channel.cursor.step_over()
        channel.checkpoint.save(sync=True)
    topic.import_start = -1
    topic.checkpoint.write(sync=True)


def undo_import(topic: Topic, log: Log, start: int, states: Iterable[ChannelState]) -> None:
    """Hide the messages of an import that was not finished: it begins anew."""
    logger.warning("%s: an import from NSQ was interrupted; it starts again", topic)
    log.gaps.add(start, log.end)
    for state in states:
        state.drop_from(start)


def _import_channel(channel: Channel, queue: DiskQueue) -> int:
    """Append messages without attempts first, then those with attempts. Reading the queue twice
    gives two ranges to note instead of many."""
    topic = channel.topic
    attempts: list[int] = []
    start = topic.log.end
    _append(topic, (record for record in queue.records() if not record.attempts))
    tried_start = topic.log.end
    _append(topic, _noting_attempts(queue.records(), attempts))
    channel.add_tried(tried_start, attempts)
    for other in topic.channels.values():
        if other is not channel:
            other.cursor.skips.add(start, topic.log.end)
    return topic.log.end - start


def _noting_attempts(records: Iterable[Record], attempts: list[int]) -> Iterator[Record]:
    for record in records:
        if record.attempts:
            attempts.append(record.attempts)
            yield record


def _append(topic: Topic, records: Iterable[Record]) -> int:
    """Append the records, in batches with one publish time each. Gives their number."""
    start = topic.log.end
    for timestamp_ns, group in groupby(records, attrgetter("timestamp_ns")):
        bodies: list[bytes] = []
        size = 0
        for record in group:
            if len(bodies) == MAX_BATCH or size + len(record.body) > MAX_BATCH_BYTES and bodies:
                topic.log.append([(bodies, 0)], timestamp_ns)
                bodies, size = [], 0
            bodies.append(record.body)
            size += len(record.body)
        topic.log.append([(bodies, 0)], timestamp_ns)
    if not topic.paused:
        topic.visible_end = topic.log.end
    return topic.log.end - start


def _move_away(broker: Broker, paths: list[Path]) -> None:
    files, target = broker.files, broker.data_path.path / IMPORTED
    files.make_directory(target)
    taken = set(files.list_directory(target))
    for path in paths:
        name, number = path.name, 1
        while name in taken:
            # Left by an earlier import.
            number += 1
            name = f"{path.name}.{number}"
        files.rename(path, target / name)
    files.sync_names(target)
