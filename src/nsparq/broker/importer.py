"""At the start, taking over the messages that NSQ's own nsqd has left in the data path.

What a topic's queue holds is for all of its channels, and is published as ever. What a channel's queue holds
is for that channel alone: it goes into the same log, and every other channel passes it by. Messages keep
their timestamps and attempts; their ids are new, since ours are positions in the log.

Topic by topic: append, sync, note where the channels stand, and only then move the files out of the way. A
crash before that note has the topic's import begin anew, one right after it has it repeated: nothing is lost,
whenever it comes.
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
"""Where NSQ's files go, beside our own, once their messages are in our log."""

MAX_BATCH = 1000
MAX_BATCH_BYTES = 1 << 20


def import_queues(broker: Broker) -> None:
    """Take over every queue of NSQ's in the data path. Raises StartError, with nothing lost."""
    by_topic: dict[str, list[DiskQueue]] = {}
    for queue in find_queues(broker.files, broker.data_path.path):
        if _is_ours_to_take(queue):
            by_topic.setdefault(queue.topic, []).append(queue)
    for name, queues in by_topic.items():
        try:
            _import_topic(broker, name, queues)
            _move_away(broker, [path for queue in queues for path in queue.paths])
        except (OSError, WriteFailed) as error:
            raise StartError(
                f"cannot take over the messages that NSQ has left of {name!r}: {error}"
            ) from error


def _is_ours_to_take(queue: DiskQueue) -> bool:
    names = [queue.topic, queue.channel] if queue.channel else [queue.topic]
    if not all(is_valid_name(name.encode(errors="replace")) for name in names):
        logger.warning("%s: not a valid name, its files are left alone", queue)
        return False
    if any(map(is_ephemeral, names)):
        logger.warning("%s: ephemeral, nothing of it is kept on disk here; NSQ's files are left alone", queue)
        return False
    return True


def _import_topic(broker: Broker, name: str, queues: list[DiskQueue]) -> None:
    # An empty queue brings nothing to life that the metadata does not list.
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
                # It has not been delivered to anyone yet: attempts are of no interest.
                logger.info(
                    "TOPIC(%s): imported %d messages from NSQ", topic, _append(topic, queue.records())
                )
        topic.log.close()
        let_import_count(topic)
        # The names of what has just been written must be on disk before NSQ's files go.
        broker.files.sync_names(broker.data_path.topic_directory(name))
    for queue in queues:
        for file_name, complaint in queue.complaints.items():
            logger.warning("%s: %s", file_name, complaint)


def _begin(topic: Topic) -> None:
    """Whatever is appended from here on does not count until let_import_count()."""
    topic.import_start = topic.log.end
    topic.write_state(clean=False, sync=True)


def _show(topic: Topic) -> None:
    """NSQ's channels had what has been appended so far: a paused topic does not hold it back."""
    if topic.paused and topic.channels and not topic.log.count(topic.pause_position, topic.import_start):
        topic.pause_position = topic.log.end


def let_import_count(topic: Topic) -> None:
    """Write down that what was imported counts, or that an undone import is forgotten. The channels' states
    come first: they must not speak of messages that the topic's state does not know."""
    for channel in topic.channels.values():
        channel.cursor.step_over()
        channel.checkpoint.save(sync=True)
    topic.import_start = -1
    topic.write_state(clean=False, sync=True)


def undo_import(topic: Topic, log: Log, start: int, states: Iterable[ChannelState]) -> None:
    """An import was broken off, and will begin anew: no channel may see the first part of it."""
    logger.warning("%s: taking over another nsqd's messages was broken off, and begins anew", topic)
    log.gaps.add(start, log.end)
    for state in states:
        state.drop_from(start)


def _import_channel(channel: Channel, queue: DiskQueue) -> int:
    """Append the queue in two ranges, messages not yet delivered and messages that have been: reading it
    twice keeps each of them whole, and so the number of ranges small."""
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
    """Append the records, in batches of one publish time each. Gives their number."""
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
    return topic.log.end - start


def _move_away(broker: Broker, paths: list[Path]) -> None:
    files, target = broker.files, broker.data_path.path / IMPORTED
    files.make_directory(target)
    taken = set(files.list_directory(target))
    for path in paths:
        name, number = path.name, 1
        while name in taken:
            # Left by an import of another time.
            number += 1
            name = f"{path.name}.{number}"
        files.rename(path, target / name)
    files.sync_names(target)
