"""The nodes that a query reads from: which of them answer, and the state of their logs and
channels.

One request asks a node about all its topics. The node answers with what has changed since the last
request; if nothing has, it can hold the request until something changes. All nodes are asked at the
same time. A node that is away or slow delays only its own messages: the driver asks it again in the
background, at growing intervals. The same holds for nsqlookupd. Only one thread uses this module's
objects, and only one thread at a time uses a node's connection.
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
from nsparq.spark.cluster.api import Client, LogChunk, LogStatus
from nsparq.spark.cluster.http_client import Access, Backoff, Refused, Unreachable
from nsparq.spark.cluster.nodes import Cluster, Found, Node
from nsparq.spark.errors import NoAnswer, NoLog
from nsparq.spark.options import NsqOptions, OptionError
from nsparq.spark.source.positions import Offsets

__all__ = ["Log", "Peer", "Peers"]

logger = logging.getLogger(__name__)

LATE_S: Final = 2.0
"""How long to wait for a node's answer before continuing without it."""
PAUSE_S: Final = 0.05
"""Pause between two polls while no node is asked."""
FIRST_AWAY_S: Final = 0.1
MAX_AWAY_S: Final = 10.0
"""Shortest and longest time between two attempts to reach a node that is away."""
SETTLE_S: Final = 5.0
"""How long the start of a stream waits for nodes that do not answer, if others do."""
THREADS: Final = 256
"""Limit on threads: one for each node that is being asked."""

Log = tuple[str, str]
"""A topic and the name of a node."""


class PendingPoll(NamedTuple):
    """A request for log states that is under way."""

    answer: Future[dict[str, LogStatus]]
    late_at: float
    """From this time on the node counts as away."""
    waits_for_change: bool
    """The node answers when something changes. Until then its last answer holds."""


@dataclass(eq=False)
class Peer:
    """A node and its connections."""

    node: Node
    client: Client
    """For all requests except polls."""
    poller: Client
    """For polls, which nsqd may hold for a while."""
    topics: frozenset[str] = frozenset()
    error: NsparqError | None = None
    """Why it is away; None while it answers."""
    away_step: float = 0.0
    retry_at: float = 0.0
    poll: PendingPoll | None = None
    moving: Future[Any] | None = None
    """A request that moves channels, while it is under way."""
    first_id: int | None = None
    """The id of its message number 0; see Client.first_id()."""
    logs: dict[str, LogStatus] = field(default_factory=dict)
    """Its last answer, by topic."""
    states: dict[str, int] = field(default_factory=dict)
    """The states to send with the next poll; empty if the next answer must have everything."""

    def abort(self) -> None:
        self.client.abort()
        self.poller.abort()

    def close(self) -> None:
        self.client.close()
        self.poller.close()


class Peers:
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
        """Grows whenever poll() may return something new."""
        self.all_answered = False
        """Whether poll_all() heard from all nodes: a topic that none of them has does not exist."""
        self._peers: dict[str, Peer] = {}
        self._duplicates: set[Log] = set()
        """Logs that were logged as the same log under another name."""
        self._threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Break off all requests. Can be called twice."""
        for peer in self._peers.values():
            peer.abort()
        self.cluster.abort()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for peer in self._peers.values():
            peer.close()
        self.cluster.close()

    def reachable(self, name: str) -> Peer | None:
        """A node that answers and whose connection is free."""
        peer = self._peers.get(name)
        return peer if peer is not None and self._is_present(peer) and peer.moving is None else None

    def _is_present(self, peer: Peer) -> bool:
        is_late = peer.poll is not None and self._clock() >= peer.poll.late_at
        return peer.error is None and not is_late

    def node(self, name: str) -> Node:
        """A node by its name, whether it answers or not."""
        peer = self._peers.get(name)
        return peer.node if peer is not None else Node(name, f"http://{name}", "")

    def status(self, topic: str, name: str) -> LogStatus | None:
        """The last answer of a node about a topic."""
        peer = self._peers.get(name)
        return peer.logs.get(topic) if peer is not None else None

    def find_log(self, topic: str, incarnation: str, likely: str) -> str | None:
        """The node with this log, by the last answers. The likely one is tried first."""
        for name, peer in sorted(self._peers.items(), key=lambda item: item[0] != likely):
            log = peer.logs.get(topic)
            if log is not None and log.positions is not None and log.positions.incarnation == incarnation:
                return name
        return None

    def distinct(
        self, logs: dict[Log, LogStatus], start: Offsets | None = None
    ) -> list[tuple[Log, LogStatus]]:
        """All logs in order. A log found under two names is included once, as in `start`."""
        chosen: dict[tuple[str, str], Log] = {}
        for log, status in sorted(logs.items()):
            if status.positions is not None:
                key = log[0], status.positions.incarnation
                if key not in chosen or (start is not None and start.find(*key) == log[1]):
                    chosen[key] = log
        included = {*chosen.values(), *(log for log, status in logs.items() if status.positions is None)}
        for log in logs.keys() - included - self._duplicates:
            self._duplicates.add(log)
            logger.warning("%s on %s is the same log as on another address", *log)
        return [(log, status) for log, status in sorted(logs.items()) if log in included]

    def mark_away(self, peer: Peer, error: NsparqError) -> None:
        """A request has failed: do not ask the node for a while."""
        if peer.error is None:
            logger.warning("nsqd %s does not answer; trying again: %s", peer.node.name, error)
        self.changes += 1
        peer.error = error
        peer.away_step = min(max(FIRST_AWAY_S, peer.away_step * 2), MAX_AWAY_S)
        peer.retry_at = self._clock() + peer.away_step
        # Another nsqd may answer next time.
        peer.first_id = None
        peer.states = {}

    # polling

    def poll(
        self, also: Iterable[Log] = (), *, wait: float = 0.0, late: float | None = None
    ) -> dict[Log, LogStatus]:
        """The logs on all nodes that answer.

        `also` names logs to ask for besides those that discovery finds. With `wait`, nodes answer
        when something changes, at the latest after so many seconds. `late` is how long to wait for
        a node that does not answer.
        """
        self._discover()
        self._assign_topics(also)
        late = LATE_S if late is None else late
        now = self._clock()
        for peer in self._peers.values():
            if peer.topics and peer.poll is None and (peer.error is None or now >= peer.retry_at):
                known = {topic: peer.states.get(topic) for topic in peer.topics}
                answer = self.pool().submit(self._ask, peer, known, wait)
                peer.poll = PendingPoll(answer, now + wait + late, wait > 0)
        self._await_answers(wait, late)
        for peer in self._peers.values():
            if peer.poll is not None and peer.poll.answer.done():
                poll, peer.poll = peer.poll, None
                self._take_answer(peer, poll.answer)
        return {
            (topic, name): log
            for name, peer in self._peers.items()
            if self._is_present(peer)
            for topic, log in peer.logs.items()
        }

    def _await_answers(self, wait: float, late: float) -> None:
        """Wait for all nodes that are present or, with `wait`, for the first of them."""
        polls = [peer.poll for peer in self._peers.values() if peer.poll and self._is_present(peer)]
        if wait:
            if polls:
                wait_for([poll.answer for poll in polls], wait + late, FIRST_COMPLETED)
            else:
                self._sleep(min(wait, PAUSE_S))
            return
        # A node that still holds its request has nothing new.
        wait_for([poll.answer for poll in polls if not poll.waits_for_change], late)

    def poll_all(self, *, require_all: bool) -> dict[Log, LogStatus]:
        """poll() at the start of a read, which waits for nodes that are away.

        With `require_all` every node must answer, otherwise one is enough. Raises NoAnswer, NoLog,
        and OptionError if nsqd does not accept the token.
        """
        started = self._clock()
        backoff = Backoff(self._options.retry_for)
        while True:
            self._discover(wait=True)
            # A stream starts without nodes that hang. A batch waits until their requests end.
            late = self._options.request_timeout if require_all else max(SETTLE_S, LATE_S)
            logs = self.poll(late=late or None)
            away = [peer for peer in self._peers.values() if peer.topics and not self._is_present(peer)]
            for peer in away:
                if isinstance(peer.error, Refused) and peer.error.status in (401, 403):
                    raise OptionError(f"option authToken: nsqd does not accept it: {peer.error}")
            assert self._found is not None
            self.all_answered = self._found.is_complete and not away
            if self.all_answered:
                return logs
            if not require_all and self._clock() - started >= SETTLE_S and (logs or self._found.answers):
                return logs
            if not backoff.wait():
                hangs = "nsqd {} does not answer"
                reasons = [
                    *self._found.failures,
                    *(str(peer.error or hangs.format(peer.node.name)) for peer in away),
                ]
                raise NoAnswer(
                    f"no answer for {self._options.retry_for:g} seconds (options nsqlookupd, nsqd and "
                    f"retryFor): {'; '.join(dict.fromkeys(reasons))}"
                )
            for peer in away:
                peer.retry_at = 0.0

    def pool(self) -> ThreadPoolExecutor:
        """Threads for requests to several nodes at the same time."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "nsq-ask")
        return self._threads

    def await_all(self, futures: Iterable[Future[Any]]) -> None:
        """Wait for requests, but not for slow nodes."""
        wait_for([*futures], LATE_S)

    def _discover(self, *, wait: bool = False) -> None:
        """Look for nodes: the first time at once, then in the background."""
        if self._looking is not None and (wait or self._looking.done()):
            looking, self._looking = self._looking, None
            self._found = looking.result()
        if self._found is None or wait:
            self._found = self.cluster.look()
            self._looked_at = self._clock()
        elif self._looking is None and self._clock() - self._looked_at >= self._options.discovery_interval:
            self._looked_at = self._clock()
            self._looking = self.pool().submit(self.cluster.look)

    def _assign_topics(self, also: Iterable[Log]) -> None:
        """Decide which node to ask about which topics."""
        assert self._found is not None
        wanted: dict[str, set[str]] = {}
        for topic, names in self._found.topics.items():
            for name in names:
                wanted.setdefault(name, set()).add(topic)
        for topic, name in also:
            wanted.setdefault(name, set()).add(topic)
        for name, topics in wanted.items():
            node = self._found.nodes.get(name) or self.node(name)
            peer = self._peers.get(name)
            if peer is None or (peer.node.url != node.url and peer.poll is None and peer.moving is None):
                if peer is not None:
                    peer.close()
                client, poller = Client(node.url, self._access), Client(node.url, self._access)
                peer = self._peers[name] = Peer(node, client, poller)
            self._set_topics(peer, topics)
        for name, peer in self._peers.items():
            if name not in wanted:
                self._set_topics(peer, set())

    def _set_topics(self, peer: Peer, topics: set[str]) -> None:
        if peer.topics != topics:
            self.changes += 1
            peer.topics = frozenset(topics)
            peer.logs = {topic: log for topic, log in peer.logs.items() if topic in topics}
            peer.states = {topic: state for topic, state in peer.states.items() if topic in topics}

    def _take_answer(self, peer: Peer, answer: Future[dict[str, LogStatus]]) -> None:
        try:
            found = answer.result()
        except (Unreachable, Refused) as error:
            self.mark_away(peer, error)
            return
        except NoLog as error:
            if not peer.logs:
                raise
            # The node had a log before, so this answer comes from another server.
            self.mark_away(peer, error)
            return
        self.changes += bool(found) or peer.error is not None
        if peer.error is not None:
            logger.info("nsqd %s answers again", peer.node.name)
        peer.error, peer.away_step = None, 0.0
        for topic, log in found.items():
            if topic in peer.topics:
                peer.logs[topic], peer.states[topic] = log, log.state

    def _ask(self, peer: Peer, known: dict[str, int | None], wait: float) -> dict[str, LogStatus]:
        """Runs in a thread of the pool."""
        try:
            return peer.poller.statuses(known, self._options.channel, wait)
        except Refused as refused:
            if refused.status == 404:
                raise NoLog(peer.node.name) from refused
            raise

    # reading a little of a log

    def probe(self, topic: str, name: str, incarnation: str, sequence: int) -> LogChunk | None:
        """The smallest piece that nsqd returns, about 64 KiB, from a number on, or from the first
        number that is still there. None if the node cannot return it."""
        peer = self.reachable(name)
        if peer is None:
            return None
        try:
            return peer.client.read(topic, sequence, 1, incarnation)
        except Unreachable as error:
            self.mark_away(peer, error)
        except Refused as refused:
            earliest = int(refused.details.get("earliest", 0))
            if refused.code == "OFFSET_GONE" and earliest > sequence:
                chunk = self.probe(topic, name, incarnation, earliest)
                return chunk and chunk._replace(removed_before=max(earliest, chunk.removed_before))
            logger.info("%s on %s at %d: %s", topic, name, sequence, refused)
        return None

    def gaps(self, topic: str, name: str) -> list[tuple[int, int]] | None:
        """All numbers of a log that have no message. None if the node does not say."""
        peer = self.reachable(name)
        if peer is None:
            return None
        try:
            return peer.client.gaps(topic)
        except Unreachable as error:
            self.mark_away(peer, error)
        except Refused as refused:
            logger.info("%s on %s: %s", topic, name, refused)
        return None

    def first_id(self, topic: str, name: str, sequence: int) -> int | None:
        """See Client.first_id(). None also if the node does not answer."""
        peer = self.reachable(name)
        if peer is not None and peer.first_id is None:
            try:
                peer.first_id = peer.client.first_id(topic, sequence)
            except Unreachable as error:
                self.mark_away(peer, error)
            except Refused:
                return None
        return peer.first_id if peer is not None else None
