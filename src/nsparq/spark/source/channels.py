"""Moves the query's channel on each node to the query's offsets, so that its depth is the query's
lag.

nsqd keeps all messages after the channel's cursor. The offsets decide and the channel follows: if
somebody else moves, empties or deletes the channel, the query restores it; only pausing is
respected. The channel belongs to the query, and nsqd refuses commits of other queries. One request
moves the channels of all topics of a node, and all nodes are asked at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from nsparq.spark.cluster.api import MoveResult
from nsparq.spark.cluster.http_client import Refused, Unreachable
from nsparq.spark.errors import ChannelOwned
from nsparq.spark.source.peers import Log, Peer, Peers
from nsparq.spark.source.positions import Place

__all__ = ["Channels"]

logger = logging.getLogger(__name__)

_NOT_NOW = ("TOPIC_NOT_FOUND", "WRONG_INCARNATION", "OFFSET_AHEAD")
"""The log was replaced, or ends before this place. Planning the next batch deals with that."""
_GONE = "CHANNEL_NOT_FOUND"
_OWNED = "CHANNEL_OWNED"

Places = dict[str, Place]
"""By topic, of one node."""


class Channels:
    """The channels of one query. A move that fails is no error: the next call tries again."""

    def __init__(self, name: str, peers: Peers) -> None:
        self._name = name
        self._peers = peers
        self.owner = ""
        """The query's id; empty until the checkpoint has it, since a lost id blocks the channel."""
        self._cursors: dict[Log, tuple[Place, int, str]] = {}
        """Where this run has moved each channel, over which connection, and for which owner. A new
        connection means that nsqd may have been killed, and has forgotten the last second."""
        self._pending: list[tuple[Peer, int, str]] = []
        """Moves under way: node, and its connection and the owner when the request was sent."""
        self._conflict: ChannelOwned | None = None
        self._logged: set[str] = set()

    def is_ours(self, log: Log, owner: str | None) -> bool:
        """Whether a channel with this owner has kept everything for the query. One that was deleted
        and created again has no owner."""
        return owner is None or owner == self.owner or (not owner and log in self._cursors)

    def forget(self, log: Log) -> None:
        """The channel may have been moved by somebody else."""
        self._cursors.pop(log, None)

    def settle(self, places: Iterable[tuple[str, str, Place]]) -> None:
        """Everything before these places is in the sink: move the channels there. Missing channels
        are not created, since lost messages have to be noticed first. Raises ChannelOwned."""
        self._take_answers()
        wanted: dict[str, Places] = {}
        for topic, node, place in places:
            peer = self._peers.reachable(node)
            if peer is not None and self._cursors.get((topic, node)) != (
                place,
                peer.poller.opened,
                self.owner,
            ):
                wanted.setdefault(node, {})[topic] = place
        self._move_all(wanted, may_create=False)
        self._raise_conflict()

    def move(self, places: Iterable[tuple[str, str, Place]]) -> None:
        """Move channels, and create those that are missing. Raises ChannelOwned."""
        self._move_or_create(places)
        self._raise_conflict()

    def begin(self, places: Iterable[tuple[str, str, Place]]) -> None:
        """move() at the start of a query. A channel of another owner is no error yet: after a crash
        in the first batch Spark asks for the initial offset, and then continues from another."""
        self._move_or_create(places)
        self._conflict = None

    def _raise_conflict(self) -> None:
        conflict, self._conflict = self._conflict, None
        if conflict is not None:
            raise conflict

    def _move_or_create(self, places: Iterable[tuple[str, str, Place]]) -> None:
        wanted: dict[str, Places] = {}
        for topic, node, place in places:
            wanted.setdefault(node, {})[topic] = place
        self._move_all(wanted, may_create=True)

    def _move_all(self, wanted: Mapping[str, Places], *, may_create: bool) -> None:
        """Ask all nodes at the same time. _take_answers() also handles late answers."""
        moves: list[Future[Places]] = []
        for name, places in wanted.items():
            peer = self._peers.reachable(name)
            if peer is not None:
                peer.moving = self._peers.pool().submit(self._move, peer, places, may_create)
                self._pending.append((peer, peer.poller.opened, self.owner))
                moves.append(peer.moving)
        self._peers.await_all(moves)
        self._take_answers()

    def _take_answers(self) -> None:
        pending, self._pending = self._pending, []
        for peer, opened, owner in pending:
            if peer.moving is None or not peer.moving.done():
                self._pending.append((peer, opened, owner))
                continue
            moving, peer.moving = peer.moving, None
            try:
                moved = moving.result()
            except Unreachable as error:
                self._peers.mark_away(peer, error)
                continue
            except Refused as refused:
                self._warn_once(f"cannot move the channel {self._name}: {refused}")
                continue
            for topic, place in moved.items():
                self._cursors[topic, peer.node.name] = place, opened, owner
                log = peer.logs.get(topic)
                if log is not None:
                    # The channel exists now, whatever the last poll said.
                    peer.logs[topic] = log._replace(has_channel=True, owner=owner or log.owner)

    def cursor(self, topic: str, node: str, incarnation: str) -> int | None:
        """The channel's position. A missing channel is created by NSQ's rule: the first channel of
        a topic starts at its first message, any other at the end. Raises Refused, Unreachable."""
        peer = self._peers.reachable(node)
        if peer is None:
            return None
        try:
            return peer.client.commit(topic, self._name, 0, incarnation)[0]
        except Refused as refused:
            if refused.code != _GONE:
                raise
        peer.client.post("/channel/create", topic=topic, channel=self._name)
        return peer.client.commit(topic, self._name, 0, incarnation)[0]

    # in a thread of the pool

    def _move(self, peer: Peer, wanted: Places, may_create: bool) -> Places:
        """Returns the channels that were moved. Raises Refused, Unreachable."""
        node, client = peer.node.name, peer.client
        moved, seeks = Places(), Places()
        for topic, result in self._request(client.commit_many, wanted).items():
            place = wanted[topic]
            if result.cursor == place.sequence:
                moved[topic] = place
            elif result.code == _GONE and not may_create:
                continue
            elif result.code == _GONE:
                seeks[topic] = place
                if (topic, node) in self._cursors:
                    logger.warning(
                        "the channel %s/%s on %s had been deleted: created again", topic, self._name, node
                    )
            elif not result.code:
                # The channel skips gaps by itself; otherwise somebody moved it.
                seeks[topic] = place
                logger.info(
                    "the channel %s/%s on %s is at %d, the query at %d: moved back",
                    *(topic, self._name, node, result.cursor, place.sequence),
                )
            else:
                self._note_refusal(topic, node, result)
        for topic, result in self._request(client.seek_many, seeks).items() if seeks else ():
            if result.code:
                self._note_refusal(topic, node, result)
            else:
                moved[topic] = seeks[topic]
        return moved

    def _request(
        self, request: Callable[[str, str, Mapping[str, Place]], dict[str, MoveResult]], places: Places
    ) -> dict[str, MoveResult]:
        try:
            return request(self._name, self.owner, places)
        except Refused as refused:
            if refused.status not in (401, 403) or len(places) == 1:
                raise
        # The token does not cover all topics. Try each of them.
        found: dict[str, MoveResult] = {}
        for topic, place in places.items():
            try:
                found |= request(self._name, self.owner, {topic: place})
            except Refused as refused:
                found[topic] = MoveResult(code=str(refused))
        return found

    def _note_refusal(self, topic: str, node: str, result: MoveResult) -> None:
        if result.code == _OWNED:
            self._conflict = ChannelOwned(topic, self._name, node, result.owner, result.since)
        elif result.code not in _NOT_NOW:
            self._warn_once(f"cannot move the channel {topic}/{self._name}: {result.code}")

    def _warn_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("%s", text)
