"""The query's channel on each node: it stands where the query stands, so that its depth is the lag.

And nsqd keeps what comes after it. The offsets are the truth and the channel follows: what somebody else does
to it is undone, pausing aside. It belongs to the query: nsqd refuses commits of any other. All topics of a
node are moved in one request, and all nodes side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from nsparq.spark.cluster.http_client import Moved, Refused, Unreachable
from nsparq.spark.cluster.peers import Log, Peer, Peers
from nsparq.spark.errors import ChannelOwned
from nsparq.spark.source.positions import Place

__all__ = ["Channels"]

logger = logging.getLogger(__name__)

_NOT_NOW = ("TOPIC_NOT_FOUND", "WRONG_INCARNATION", "OFFSET_AHEAD")
"""The log is another, or paused at an earlier place: whoever plans the next batch sees to that."""
_GONE = "CHANNEL_NOT_FOUND"
_OWNED = "CHANNEL_OWNED"

Places = dict[str, Place]
"""By topic, of one node."""


class Channels:
    """Moves the channels. Failure is no error: what was not moved now is moved the next time."""

    def __init__(self, name: str, peers: Peers) -> None:
        self._name = name
        self._peers = peers
        self.owner = ""
        """The query's name in its checkpoint. Empty as long as it is not certain that it is there: a channel
        whose owner nobody knows any more could not be used."""
        self._standing: dict[Log, tuple[Place, int, str]] = {}
        """Where they stand, as far as this run has moved them, over which connection, and whose they are: an
        nsqd that was killed has forgotten the last second of it."""
        self._moving: list[tuple[Peer, int, str]] = []
        """Nodes that have not answered yet, and the connection to each and the owner when it was asked."""
        self._conflict: ChannelOwned | None = None
        self._told: set[str] = set()

    def is_ours(self, log: Log, owner: str | None) -> bool:
        """Whether a channel with this owner has kept everything since the query began to use it. One that
        was deleted and created again has no owner."""
        return owner is None or owner == self.owner or (not owner and log in self._standing)

    def forget(self, log: Log) -> None:
        """It may be elsewhere now."""
        self._standing.pop(log, None)

    def settle(self, places: Iterable[tuple[str, str, Place]]) -> None:
        """Everything before these places is done. A channel that is not there stays so: what is lost has to
        be judged first. Raises ChannelOwned."""
        self._take_answers()
        wanted: dict[str, Places] = {}
        for topic, node, place in places:
            peer = self._peers.answering(node)
            if peer is not None and self._standing.get((topic, node)) != (
                place,
                peer.watcher.opened,
                self.owner,
            ):
                wanted.setdefault(node, {})[topic] = place
        self._move_all(wanted, may_create=False)
        self._check()

    def move(self, places: Iterable[tuple[str, str, Place]]) -> None:
        """To places in the logs; created if they are not there. Raises ChannelOwned."""
        self._move_to(places)
        self._check()

    def begin(self, places: Iterable[tuple[str, str, Place]]) -> None:
        """The same at the beginning of a query. A channel that is somebody else's is left alone, and is no
        error yet: after a crash in the first batch Spark asks for a beginning, and goes on with another."""
        self._move_to(places)
        self._conflict = None

    def _check(self) -> None:
        conflict, self._conflict = self._conflict, None
        if conflict is not None:
            raise conflict

    def _move_to(self, places: Iterable[tuple[str, str, Place]]) -> None:
        wanted: dict[str, Places] = {}
        for topic, node, place in places:
            wanted.setdefault(node, {})[topic] = place
        self._move_all(wanted, may_create=True)

    def _move_all(self, wanted: Mapping[str, Places], *, may_create: bool) -> None:
        """All nodes at a time. A node that does not answer soon is left behind, and not waited for again."""
        asked: list[Future[Places]] = []
        for name, places in wanted.items():
            peer = self._peers.answering(name)
            if peer is not None:
                peer.moving = self._peers.pool().submit(self._move, peer, places, may_create)
                self._moving.append((peer, peer.watcher.opened, self.owner))
                asked.append(peer.moving)
        self._peers.await_all(asked)
        self._take_answers()

    def _take_answers(self) -> None:
        under_way, self._moving = self._moving, []
        for peer, opened, owner in under_way:
            if peer.moving is None or not peer.moving.done():
                self._moving.append((peer, opened, owner))
                continue
            moving, peer.moving = peer.moving, None
            try:
                standing = moving.result()
            except Unreachable as error:
                self._peers.lost(peer, error)
                continue
            except Refused as refused:
                self._tell(f"cannot move the channel {self._name}: {refused}")
                continue
            for topic, place in standing.items():
                self._standing[topic, peer.node.name] = place, opened, owner
                view = peer.views.get(topic)
                if view is not None:
                    # It is there from now on, whatever was seen before.
                    peer.views[topic] = view._replace(has_channel=True, owner=owner or view.owner)

    def cursor(self, topic: str, node: str, incarnation: str) -> int | None:
        """Where the channel is, created if need be by NSQ's rule: the first of a topic at its first message,
        any other at the end. Raises Refused, Unreachable."""
        peer = self._peers.answering(node)
        if peer is None:
            return None
        try:
            return peer.client.commit(topic, self._name, 0, incarnation)[0]
        except Refused as refused:
            if refused.code != _GONE:
                raise
        peer.client.post("/channel/create", topic=topic, channel=self._name)
        return peer.client.commit(topic, self._name, 0, incarnation)[0]

    # in any thread

    def _move(self, peer: Peer, wanted: Places, may_create: bool) -> Places:
        """Those that have been moved. Raises Refused, Unreachable."""
        node, client = peer.node.name, peer.client
        done, back = Places(), Places()
        for topic, found in self._ask(client.commit_many, wanted).items():
            place = wanted[topic]
            if found.cursor == place.sequence:
                done[topic] = place
            elif found.code == _GONE and not may_create:
                continue
            elif found.code == _GONE:
                back[topic] = place
                if (topic, node) in self._standing:
                    logger.warning(
                        "the channel %s/%s on %s had been deleted: created again", topic, self._name, node
                    )
            elif not found.code:
                # Past a gap it goes by itself, which does no harm. Anything else was somebody else.
                back[topic] = place
                logger.info(
                    "the channel %s/%s on %s is at %d, the query at %d: moved back",
                    *(topic, self._name, node, found.cursor, place.sequence),
                )
            else:
                self._note_refused(topic, node, found)
        for topic, found in self._ask(client.seek_many, back).items() if back else ():
            if found.code:
                self._note_refused(topic, node, found)
            else:
                done[topic] = back[topic]
        return done

    def _ask(
        self, request: Callable[[str, str, Mapping[str, Place]], dict[str, Moved]], places: Places
    ) -> dict[str, Moved]:
        try:
            return request(self._name, self.owner, places)
        except Refused as refused:
            if refused.status not in (401, 403) or len(places) == 1:
                raise
        # Not allowed for all of them; perhaps for some.
        found: dict[str, Moved] = {}
        for topic, place in places.items():
            try:
                found |= request(self._name, self.owner, {topic: place})
            except Refused as refused:
                found[topic] = Moved(code=str(refused))
        return found

    def _note_refused(self, topic: str, node: str, found: Moved) -> None:
        if found.code == _OWNED:
            self._conflict = ChannelOwned(topic, self._name, node, found.owner, found.since)
        elif found.code not in _NOT_NOW:
            self._tell(f"cannot move the channel {topic}/{self._name}: {found.code}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)
