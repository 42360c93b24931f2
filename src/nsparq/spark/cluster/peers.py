"""The nodes that a query reads from, as they are now: who, how far their logs reach, what their channels do.

A node is asked for all its topics in one request, and answers with what has changed since the last one; if
nothing has, it may keep the request until something does. All nodes are asked side by side. A node that is
away, or slow to answer, costs nothing but its own messages: it is asked again in the background, ever more
seldom, and so are nsqlookupds. Used from one thread; a node's connection is used by one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from nsparq.errors import NsparqError
from nsparq.spark.cluster.http_client import (
    Access,
    Client,
    Described,
    Patience,
    Positions,
    Refused,
    Unreachable,
)
from nsparq.spark.cluster.nodes import Cluster, Found, Node
from nsparq.spark.errors import NoAnswer, NoLog
from nsparq.spark.options import NsqOptions, OptionError

__all__ = ["Log", "Peer", "Peers", "View"]

logger = logging.getLogger(__name__)

LATE_S: Final = 2.0
"""How long to wait for a node's answer before going on without it."""
PAUSE_S: Final = 0.05
"""Between two looks while there is nobody to wait for."""
FIRST_AWAY_S: Final = 0.1
MAX_AWAY_S: Final = 10.0
"""Between two attempts to reach a node that is away."""
SETTLE_S: Final = 5.0
"""How long those who do not answer are waited for at the start, if others do."""
THREADS: Final = 256
"""At most: one for a node, and only while it is asked."""

Log = tuple[str, str]
"""A topic and the name of a node."""


class View(NamedTuple):
    """What a node says about a topic."""

    positions: Positions | None
    """None if it does not have it."""
    has_channel: bool = True
    is_paused: bool = False
    """The query's channel. For a batch, which has none, it is there and it is not paused."""
    owner: str | None = None
    """Whose the channel is: empty for nobody's, None if that is not known."""


class Asking(NamedTuple):
    """A request for positions that is under way."""

    answer: Future[dict[str, Described]]
    late_at: float
    """When it should have been answered."""
    may_wait: bool
    """The node answers when something has changed. Until then what it said last holds."""


@dataclass(eq=False)
class Peer:
    """A node, and how it is reached."""

    node: Node
    client: Client
    """For everything but positions, whose requests may wait: these have a connection of their own."""
    watcher: Client
    topics: frozenset[str] = frozenset()
    """What to ask it about."""
    error: NsparqError | None = None
    """Why it is away; None while it answers."""
    away_step: float = 0.0
    retry_at: float = 0.0
    asking: Asking | None = None
    moving: Future[Any] | None = None
    """Channels are being moved there, and that takes long."""
    first_id: int | None = None
    """The id that its message with number 0 would have had."""
    views: dict[str, View] = field(default_factory=dict)
    """What it said last."""
    states: dict[str, int] = field(default_factory=dict)
    """The states that go with them."""

    def abort(self) -> None:
        self.client.abort()
        self.watcher.abort()

    def close(self) -> None:
        self.client.close()
        self.watcher.close()


class Peers:
    """All of them."""

    def __init__(
        self,
        options: NsqOptions,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._clock, self._sleep = clock, sleep
        self._access = Access.of(options)
        self.cluster = Cluster(options)
        self._found: Found | None = None
        self._looking: Future[Found] | None = None
        self._looked_at = 0.0
        self.changes = 0
        """Grows with everything that observe() may give otherwise than before."""
        self.has_heard_everybody = False
        """At the beginning: what nobody has then is nowhere."""
        self._peers: dict[str, Peer] = {}
        self._threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Break off what is under way. Twice is safe."""
        for peer in self._peers.values():
            peer.abort()
        self.cluster.abort()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for peer in self._peers.values():
            peer.close()
        self.cluster.close()

    def answering(self, name: str) -> Peer | None:
        """A node that answers, to be asked more."""
        peer = self._peers.get(name)
        return peer if peer is not None and self._is_present(peer) and peer.moving is None else None

    def _is_present(self, peer: Peer) -> bool:
        is_late = peer.asking is not None and self._clock() >= peer.asking.late_at
        return peer.error is None and not is_late

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
        self.changes += 1
        peer.error = error
        peer.away_step = min(max(FIRST_AWAY_S, peer.away_step * 2), MAX_AWAY_S)
        peer.retry_at = self._clock() + peer.away_step
        # Whoever comes back may be another.
        peer.first_id = None
        peer.states = {}

    # asking

    def observe(
        self, also: Iterable[Log] = (), *, wait: float = 0.0, late: float | None = None
    ) -> dict[Log, View]:
        """What those who answer say now. `also` names logs to be asked for besides those that are found. With
        `wait`, what they say when something has changed, or after so many seconds. `late` is how long to wait
        for somebody who does not answer at all."""
        self._look()
        self._assign(also)
        late = LATE_S if late is None else late
        now = self._clock()
        for peer in self._peers.values():
            if peer.topics and peer.asking is None and (peer.error is None or now >= peer.retry_at):
                known = {topic: peer.states.get(topic) for topic in peer.topics}
                # One that was away is asked for everything, and answers at once.
                answer = self.pool().submit(self._ask, peer, known, wait)
                peer.asking = Asking(answer, now + wait + late, wait > 0)
        self._await_answers(wait, late)
        for peer in self._peers.values():
            if peer.asking is not None and peer.asking.answer.done():
                asking, peer.asking = peer.asking, None
                self._take(peer, asking.answer)
        return {
            (topic, name): view
            for name, peer in self._peers.items()
            if self._is_present(peer)
            for topic, view in peer.views.items()
        }

    def _await_answers(self, wait: float, late: float) -> None:
        """Of those who are present: of all of them or, with `wait`, of the first."""
        asked = [peer.asking for peer in self._peers.values() if peer.asking and self._is_present(peer)]
        if wait:
            if asked:
                wait_for([one.answer for one in asked], wait + late, FIRST_COMPLETED)
            else:
                self._sleep(min(wait, PAUSE_S))
            return
        # Where a request waits for a change there is nothing new.
        wait_for([one.answer for one in asked if not one.may_wait], late)

    def ask_everybody(self, *, insist: bool) -> dict[Log, View]:
        """The same at a beginning, when those who are away are waited for. With `insist` all of them must
        answer, otherwise somebody. Raises NoAnswer, NoLog, and OptionError if we are not let in."""
        started = self._clock()
        patience = Patience(self._options.retry_for)
        while True:
            self._look(wait=True)
            # A stream begins without those who hang; a batch waits for what their requests come to.
            late = self._options.request_timeout if insist else max(SETTLE_S, LATE_S)
            views = self.observe(late=late or None)
            away = [peer for peer in self._peers.values() if peer.topics and not self._is_present(peer)]
            for peer in away:
                if isinstance(peer.error, Refused) and peer.error.status in (401, 403):
                    raise OptionError(f"option authToken does not let us in: {peer.error}")
            assert self._found is not None
            self.has_heard_everybody = self._found.is_complete and not away
            if self.has_heard_everybody:
                return views
            if not insist and self._clock() - started >= SETTLE_S and (views or self._found.answers):
                return views
            if not patience.wait():
                hangs = "nsqd {} does not answer"
                reasons = [
                    *self._found.failures,
                    *(str(peer.error or hangs.format(peer.node.name)) for peer in away),
                ]
                raise NoAnswer(
                    f"no answer for {self._options.retry_for:g} seconds (options nsqlookupd, nsqd): "
                    + "; ".join(dict.fromkeys(reasons))
                )
            for peer in away:
                peer.retry_at = 0.0

    def pool(self) -> ThreadPoolExecutor:
        """For what is done at several nodes side by side."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "nsq-ask")
        return self._threads

    def await_all(self, futures: Iterable[Future[Any]]) -> None:
        """Until they are done; but not for nodes that are slow to answer."""
        wait_for([*futures], LATE_S)

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
            self._looking = self.pool().submit(self.cluster.look)

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
            if peer is None or (peer.node.url != node.url and peer.asking is None and peer.moving is None):
                if peer is not None:
                    peer.close()
                client, watcher = Client(node.url, self._access), Client(node.url, self._access)
                peer = self._peers[name] = Peer(node, client, watcher)
            self._set_topics(peer, topics)
        for name, peer in self._peers.items():
            if name not in wanted:
                self._set_topics(peer, set())

    def _set_topics(self, peer: Peer, topics: set[str]) -> None:
        if peer.topics != topics:
            self.changes += 1
            peer.topics = frozenset(topics)
            peer.views = {topic: view for topic, view in peer.views.items() if topic in topics}
            peer.states = {topic: state for topic, state in peer.states.items() if topic in topics}

    def _take(self, peer: Peer, answer: Future[dict[str, Described]]) -> None:
        try:
            found = answer.result()
        except (Unreachable, Refused) as error:
            self.lost(peer, error)
            return
        except NoLog as error:
            if not peer.views:
                raise
            # It had one before: something else answers in its place.
            self.lost(peer, error)
            return
        self.changes += bool(found) or peer.error is not None
        if peer.error is not None:
            logger.info("nsqd %s answers again", peer.node.name)
        peer.error, peer.away_step = None, 0.0
        for topic, one in found.items():
            if topic in peer.topics:
                peer.views[topic], peer.states[topic] = self._view_of(one), one.state

    def _view_of(self, said: Described) -> View:
        if not self._options.channel:
            return View(said.positions)
        return View(said.positions, said.channel != "missing", said.channel == "paused", said.owner)

    # in any thread

    def _ask(self, peer: Peer, known: dict[str, int | None], wait: float) -> dict[str, Described]:
        try:
            return peer.watcher.positions_of(known, self._options.channel, wait)
        except Refused as refused:
            if refused.status == 404:
                raise NoLog(peer.node.name) from refused
            raise
