"""Messages that a channel cannot read at once: their bytes are on a disk that would have to be
waited for, or only in the archive. A thread gets them, and the channel goes on afterwards.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from nsparq.storage.files import Files
from nsparq.storage.segment import READ_SIZE, Cold

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel

logger = logging.getLogger(__name__)


def cannot_read(channel: Channel, error: Cold | OSError) -> None:
    """The channel's next message cannot be read now. After an error of the disk or of the archive
    the channel tries again in the next round of upkeep."""
    broker = channel.topic.broker
    if not isinstance(error, Cold):
        broker.health.set(f"{channel}: cannot read the log: {error.strerror or error}", f"read {channel}")
        broker.upkeep.retry(channel)
        return
    channel.delivery.reading = error
    if error.fetch is None:
        broker.try_in_background(partial(_read, broker.files, error), partial(_was_read, channel, error))
    else:
        assert broker.archive is not None
        fetched = partial(_was_fetched, channel, error)
        broker.try_in_background(error.fetch, fetched, broker.archive.in_background)


def _read(files: Files, cold: Cold) -> None:
    """Have the operating system read the bytes into its cache."""
    with files.opened(cold.path, read_only=True) as fd:
        files.read(fd, 4 * READ_SIZE, cold.position)


def _was_read(channel: Channel, cold: Cold, error: OSError | None) -> None:
    if error is not None:
        # The read that follows on the loop meets the same error, and reports it.
        logger.warning("cannot read ahead in %s: %s", cold.path, error)
    if channel.delivery.reading is cold:
        channel.delivery.reading = None
        channel.delivery.must_wait = True
    channel.topic.broker.next_turn.add_channel(channel)


def _was_fetched(channel: Channel, cold: Cold, error: OSError | None) -> None:
    broker = channel.topic.broker
    if not channel.is_exiting:
        text = None if error is None else f"{channel}: waits for the archive: {error}"
        broker.health.warn(text, f"archive {channel}")
        if error is not None:
            broker.upkeep.retry(channel)
    if channel.delivery.reading is cold:
        channel.delivery.reading = None
    if error is None:
        broker.next_turn.add_channel(channel)
