"""The query's channel on each node: it stands where the query stands, so that its depth is the lag.

And nsqd keeps what comes after it. The offsets are the truth and the channel follows: what somebody else does
to it is undone, pausing aside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from nsparq.spark.api import Refused, Unreachable
from nsparq.spark.peers import Log, Peer, Peers
from nsparq.spark.positions import Place

__all__ = ["Channels"]

logger = logging.getLogger(__name__)

_NOT_NOW = ("TOPIC_NOT_FOUND", "WRONG_INCARNATION", "OFFSET_AHEAD")
"""The log is another, or paused at an earlier place: whoever plans the next batch sees to that."""


class Channels:
    """Moves the channels. Failure is no error: what was not moved now is moved the next time."""

    def __init__(self, name: str, peers: Peers) -> None:
        self._name = name
        self._peers = peers
        self._standing: dict[Log, tuple[Place, int]] = {}
        """Where they stand, as far as this run has moved them, and over which connection: an nsqd that was
        killed has forgotten the last second of it."""
        self._told: set[str] = set()

    def forget(self, log: Log) -> None:
        """It may be elsewhere now."""
        self._standing.pop(log, None)

    def settle(self, places: Iterable[tuple[str, str, Place]]) -> None:
        """Everything before these places is done."""
        for topic, node, place in places:
            peer = self._peers.answering(node)
            if peer is not None and self._standing.get((topic, node)) != (place, peer.client.opened):
                self.move(topic, node, place)

    def move(self, topic: str, node: str, place: Place) -> None:
        """To a place in the log; created if it is not there."""
        peer = self._peers.answering(node)
        if peer is None:
            return
        try:
            self._move(peer, topic, place)
            self._standing[topic, node] = place, peer.client.opened
            if peer.channels is not None:
                # It is there from now on, whatever was seen before.
                peer.channels.setdefault(topic, False)
        except Unreachable as error:
            self._peers.lost(peer, error)
        except Refused as refused:
            if refused.code not in _NOT_NOW:
                self._tell(f"cannot move the channel {topic}/{self._name}: {refused}")

    def cursor(self, topic: str, node: str, incarnation: str) -> int | None:
        """Where the channel is, created if need be by NSQ's rule: the first of a topic at its first message,
        any other at the end. Raises Refused, Unreachable."""
        peer = self._peers.answering(node)
        if peer is None:
            return None
        try:
            return peer.client.commit(topic, self._name, 0, incarnation)[0]
        except Refused as refused:
            if refused.code != "CHANNEL_NOT_FOUND":
                raise
        peer.client.post("/channel/create", topic=topic, channel=self._name)
        return peer.client.commit(topic, self._name, 0, incarnation)[0]

    def _move(self, peer: Peer, topic: str, place: Place) -> None:
        client = peer.client
        is_new = False
        try:
            cursor, _ = client.commit(topic, self._name, place.sequence, place.incarnation)
        except Refused as refused:
            if refused.code != "CHANNEL_NOT_FOUND":
                raise
            client.post("/channel/create", topic=topic, channel=self._name)
            is_new = True
            if (topic, peer.node.name) in self._standing:
                logger.warning(
                    "the channel %s/%s on %s had been deleted: created again",
                    *(topic, self._name, peer.node.name),
                )
            cursor, _ = client.commit(topic, self._name, 0, place.incarnation)
        if cursor == place.sequence:
            return
        if not is_new and cursor > place.sequence:
            # Past a gap it goes by itself, which does no harm. Anything else was somebody else.
            logger.info(
                "the channel %s/%s on %s is at %d, the query at %d: moved back",
                *(topic, self._name, peer.node.name, cursor, place.sequence),
            )
        client.seek(topic, self._name, place.sequence, place.incarnation)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)
