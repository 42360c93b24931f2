"""The nodes that a query reads from, as they are now: who, how far their logs reach, what their channels do.

A node that is away costs nothing but its own messages: it is asked again in the background, ever more seldom,
and so are nsqlookupds. Used from one thread; a node's connection is used by one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from nsparq.errors import NsparqError
from nsparq.spark.api import Access, Client, Patience, Positions, Refused, Unreachable
from nsparq.spark.errors import NoAnswer, NoLog
from nsparq.spark.nodes import Cluster, Found, Node
from nsparq.spark.options import NsqOptions, OptionError

__all__ = ["Log", "Peer", "Peers", "View"]

logger = logging.getLogger(__name__)

CHANNEL_CHECK_S: Final = 1.0
"""How often the channels are looked at: whether they are there, and paused."""
FIRST_AWAY_S: Final = 0.1
MAX_AWAY_S: Final = 10.0
"""Between two attempts to reach a node that is away."""
SETTLE_S: Final = 5.0
"""How long those who do not answer are waited for at the start, if others do."""
THREADS: Final = 16

Log = tuple[str, str]
"""A topic and the name of a node."""


class View(NamedTuple):
    """What a node says about a topic."""

    positions: Positions | None
    """None if it does not have it."""
    has_channel: bool = True
    is_paused: bool = False
    """The query's channel. Where we may not look, it is there and it is not paused."""


@dataclass(eq=False)
class Peer:
    """A node, and how it is reached."""

    node: Node
    client: Client
    topics: frozenset[str] = frozenset()
    """What to ask it about."""
    error: NsparqError | None = None
    """Why it is away; None while it answers."""
    away_step: float = 0.0
    retry_at: float = 0.0
    asking: Future[dict[str, Positions | None]] | None = None
    channels: dict[str, bool] | None = None
    """Whether ours is paused, by topic; None if we do not know."""
    checked_at: float = float("-inf")
    may_check: bool = True
    first_id: int | None = None
    """The id that its message with number 0 would have had."""
    views: dict[str, View] = field(default_factory=dict)
    """What it said last."""


class Peers:
    """All of them."""

    def __init__(self, options: NsqOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._access = Access.of(options)
        self.cluster = Cluster(options)
        self._found: Found | None = None
        self._looking: Future[Found] | None = None
        self._looked_at = 0.0
        self._peers: dict[str, Peer] = {}
        self._threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Break off what is under way. Twice is safe."""
        for peer in self._peers.values():
            peer.client.abort()
        self.cluster.abort()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for peer in self._peers.values():
            peer.client.close()
        self.cluster.close()

    def answering(self, name: str) -> Peer | None:
        """A node that answers, to be asked more."""
        peer = self._peers.get(name)
        return peer if peer is not None and peer.error is None and peer.asking is None else None

    def known(self, name: str) -> Node:
        """A node by its name, whether it is there or not."""
        peer = self._peers.get(name)
        return peer.node if peer is not None else Node(name, f"http://{name}", "")

    def find(self, topic: str, incarnation: str, likely: str) -> str | None:
        """The node that has this very log, by what was said last: the likely one, or another."""
        for name, peer in sorted(self._peers.items(), key=lambda item: item[0] != likely):
            view = peer.views.get(topic)
            if view is not None and view.positions is not None and view.positions.incarnation == incarnation:
                return name
        return None

    def view(self, topic: str, name: str) -> View | None:
        """What a node said last about a topic."""
        peer = self._peers.get(name)
        return peer.views.get(topic) if peer is not None else None

    def lost(self, peer: Peer, error: NsparqError) -> None:
        """A request has failed: leave the node alone for a while."""
        if peer.error is None:
            logger.warning("nsqd %s is away, and is asked again: %s", peer.node.name, error)
        peer.error = error
        peer.away_step = min(max(FIRST_AWAY_S, peer.away_step * 2), MAX_AWAY_S)
        peer.retry_at = self._clock() + peer.away_step
        # Whoever comes back may be another.
        peer.first_id = None
        peer.checked_at = float("-inf")

    # asking

    def observe(self, also: Iterable[Log] = ()) -> dict[Log, View]:
        """What those who answer say now. `also` names logs to be asked for besides those that are found."""
        self._look()
        self._assign(also)
        now = self._clock()
        present = [
            peer
            for peer in self._peers.values()
            if peer.error is None and peer.asking is None and peer.topics
        ]
        for peer in self._peers.values():
            if peer.error is not None and peer.asking is None and peer.topics and now >= peer.retry_at:
                peer.asking = self._pool().submit(self._ask, peer, peer.topics)
        if len(present) == 1:
            self._take(present[0], lambda: self._ask(present[0], present[0].topics))
        else:
            futures = [(peer, self._pool().submit(self._ask, peer, peer.topics)) for peer in present]
            for peer, future in futures:
                self._take(peer, future.result)
        for peer in self._peers.values():
            if peer.asking is not None and peer.asking.done():
                future, peer.asking = peer.asking, None
                self._take(peer, future.result)
        return {
            (topic, name): view
            for name, peer in self._peers.items()
            if peer.error is None
            for topic, view in peer.views.items()
        }

    def ask_everybody(self, *, insist: bool) -> dict[Log, View]:
        """The same at a beginning, when those who are away are waited for. With `insist` all of them must
        answer, otherwise somebody. Raises NoAnswer, NoLog, and OptionError if we are not let in."""
        started = self._clock()
        patience = Patience(self._options.retry_for)
        while True:
            self._look(wait=True)
            views = self.observe()
            away = [peer for peer in self._peers.values() if peer.topics and peer.error is not None]
            for peer in away:
                if isinstance(peer.error, Refused) and peer.error.status in (401, 403):
                    raise OptionError(f"option authToken does not let us in: {peer.error}")
            assert self._found is not None
            if self._found.is_complete and not away:
                return views
            if not insist and self._clock() - started >= SETTLE_S and (views or self._found.answers):
                return views
            if not patience.wait():
                reasons = [*self._found.failures, *(str(peer.error) for peer in away)]
                raise NoAnswer(
                    f"no answer for {self._options.retry_for:g} seconds (options nsqlookupd, nsqd): "
                    + "; ".join(dict.fromkeys(reasons))
                )
            for peer in away:
                peer.retry_at = 0.0

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "nsq-ask")
        return self._threads

    def _look(self, *, wait: bool = False) -> None:
        """Find out who is there: the first time at once, then in the background."""
        if self._looking is not None and (wait or self._looking.done()):
            looking, self._looking = self._looking, None
            self._found = looking.result()
        if self._found is None or wait:
            self._found = self.cluster.look()
            self._looked_at = self._clock()
        elif self._looking is None and self._clock() - self._looked_at >= self._options.discovery_interval:
            self._looked_at = self._clock()
            self._looking = self._pool().submit(self.cluster.look)

    def _assign(self, also: Iterable[Log]) -> None:
        """Who is to be asked about what."""
        assert self._found is not None
        wanted: dict[str, set[str]] = {}
        for topic, names in self._found.topics.items():
            for name in names:
                wanted.setdefault(name, set()).add(topic)
        for topic, name in also:
            wanted.setdefault(name, set()).add(topic)
        for name, topics in wanted.items():
            node = self._found.nodes.get(name) or self.known(name)
            peer = self._peers.get(name)
            if peer is None or (peer.node.url != node.url and peer.asking is None):
                if peer is not None:
                    peer.client.close()
                peer = self._peers[name] = Peer(node, Client(node.url, self._access))
            peer.topics = frozenset(topics)
        for name, peer in self._peers.items():
            if name not in wanted:
                peer.topics, peer.views = frozenset(), {}

    def _take(self, peer: Peer, answer: Callable[[], dict[str, Positions | None]]) -> None:
        try:
            found = answer()
        except (Unreachable, Refused) as error:
            self.lost(peer, error)
            return
        except NoLog as error:
            if not peer.views:
                raise
            # It had one before: something else answers in its place.
            self.lost(peer, error)
            return
        if peer.error is not None:
            logger.info("nsqd %s answers again", peer.node.name)
        peer.error, peer.away_step = None, 0.0
        peer.views = {topic: self._view_of(peer, topic, positions) for topic, positions in found.items()}

    def _view_of(self, peer: Peer, topic: str, positions: Positions | None) -> View:
        if peer.channels is None:
            return View(positions)
        return View(positions, topic in peer.channels, peer.channels.get(topic, False))

    # in any thread

    def _ask(self, peer: Peer, topics: frozenset[str]) -> dict[str, Positions | None]:
        found: dict[str, Positions | None] = {}
        for topic in topics:
            try:
                found[topic] = peer.client.positions(topic)
            except Refused as refused:
                if refused.status != 404:
                    raise
                if refused.code != "TOPIC_NOT_FOUND":
                    raise NoLog(peer.node.name) from refused
                found[topic] = None
        if self._options.channel and self._clock() - peer.checked_at >= CHANNEL_CHECK_S:
            self._check_channels(peer, topics)
        return found

    def _check_channels(self, peer: Peer, topics: frozenset[str]) -> None:
        channel = self._options.channel or ""
        peer.checked_at = self._clock()
        try:
            if len(topics) == 1:
                stats = [one for topic in topics for one in peer.client.stats(topic, channel)]
            else:
                stats = peer.client.stats("", channel)
        except Refused as refused:
            if refused.status not in (401, 403):
                raise
            if peer.may_check:
                peer.may_check = False
                logger.info("nsqd %s does not let us look at its channels: %s", peer.node.name, refused)
            peer.channels = None
            return
        peer.channels = {
            str(one.get("topic_name")): bool(its.get("paused"))
            for one in stats
            for its in one.get("channels") or ()
            if its.get("channel_name") == channel
        }
