"""Channels of clients that only look at a topic: IDENTIFY with `observe`, as nsq_tail sends it.

The first channel of a topic gets the messages that wait there. The channel of an observer gets them
too, but it does not count: the topic keeps them, by a hold, for its first other channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsparq.names import is_ephemeral

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

OBSERVED: Final = "observed"
"""The hold on the messages of a topic that has only channels of observers."""


def channel_for(topic: Topic, name: str, observes: bool) -> Channel:
    """The channel that a client subscribes to. Only a new ephemeral one can be an observer's."""
    if not observes or name in topic.channels or topic.is_ephemeral or not is_ephemeral(name):
        return topic.get_channel(name)
    kept = topic.unseen_from if _is_unread(topic) else None
    channel = topic.get_channel(name, start=kept)
    channel.is_observer = True
    if kept is not None:
        topic.holds[OBSERVED] = kept
    return channel


def channel_deleted(topic: Topic) -> None:
    """A channel has gone. Decide where the next first channel starts."""
    if topic.channels:
        if _is_unread(topic):
            topic.holds.setdefault(OBSERVED, topic.visible_end)
        return
    kept = topic.holds.pop(OBSERVED, None)
    if kept is None:
        topic.origin = topic.visible_end
        topic.drop_held_back_before(topic.origin)
    else:
        topic.origin = kept
        due_at = topic.broker.due_times()
        topic.held_back = [(sequence, due_at(due_ns)) for sequence, due_ns in topic.log.deferred_since(kept)]
    topic.checkpoint.is_stale = True
    topic.checkpoint.write_if_stale()


def _is_unread(topic: Topic) -> bool:
    """Whether the topic has no channel, or only channels of observers."""
    return all(channel.is_observer for channel in topic.channels.values())
