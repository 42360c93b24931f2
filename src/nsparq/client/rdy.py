"""Who may send how much: RDY over a consumer's connections, and what a failing handler does to it.

The rules of NSQ's reference client as a state machine without I/O: connections, answers and times come in,
`RDY n` per connection comes out. Two numbers are kept at all times: no connection has more than the server
allows it, and all together never more than `max_in_flight`. Where the reference would break that, or leave
something lying, we go further than it does:

- a lower `max_in_flight` takes RDY from some connections where one for each is too much already, and it
  reaches the probe of a back-off too
- what has become free by the loss of a connection is given to the others at the next redistribution, and the
  probe of a back-off to the next connection that is made
- where RDY goes round, the one that has waited longest is next, not just any
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

from nsparq.client.config import Config
from nsparq.private_random import private_random

RETRY_S: Final = 5.0
"""How long a connection without RDY waits when there was none left for it."""
PROBE_RETRY_S: Final = 1.0
"""The same for the probe of a back-off that found no connection."""
STARVED_SHARE: Final = 0.85


class Signal(Enum):
    """What an answer to a message says about how things are going."""

    RESUME = "resume"  # finished
    BACKOFF = "backoff"  # requeued
    CONTINUE = "continue"  # requeued, and nobody's fault


class Peer(Protocol):
    """A connection as seen from here. send_rdy() puts the command on its way."""

    max_rdy_count: int
    in_flight: int
    is_closing: bool
    last_message: float
    """When the latest message came, on the clock of `now`."""

    def send_rdy(self, count: int) -> None: ...


class _Share:
    """What is known of one connection."""

    __slots__ = ("last_rdy", "rdy", "retry_at", "waits_since")

    def __init__(self, now: float) -> None:
        self.rdy = 0
        self.last_rdy = now
        """When it was last set to more than 0."""
        self.waits_since = now
        """Since when it is 0, if it is."""
        self.retry_at: float | None = None


class Distribution:
    """RDY of all connections of one consumer. Call tick() when next_event() says so."""

    def __init__(
        self, config: Config, *, choose: Callable[[list[Peer]], Peer] = private_random.choice
    ) -> None:
        self._config = config
        self.max_in_flight = 1 if config.max_in_flight is None else config.max_in_flight
        self.backoff_count = 0
        """How deep in back-off; 0 outside of it."""
        self._choose = choose
        self._shares: dict[Peer, _Share] = {}
        self._pause_until: float | None = None
        """While it runs nothing is let through, and answers do not count."""
        self._is_lopsided = False
        """A connection with RDY was lost: what it had is to be given to another."""
        self._redistribute_at: float | None = None
        self.is_stopping = False

    # connections

    def add(self, peer: Peer, now: float) -> None:
        """A connection has subscribed."""
        self._shares[peer] = _Share(now)
        if self._redistribute_at is None:
            self._redistribute_at = now + self._config.rdy_redistribute_interval
        if self.is_in_backoff:
            if self._pause_until is None and not self.total:
                # The one that was to let a message through is gone.
                self._probe(now)
            return
        for other in [*self._shares]:
            if other is not peer:
                self._update(other, now)
        self._update(peer, now)

    def remove(self, peer: Peer, now: float) -> None:
        """It is gone, with what it was allowed."""
        share = self._shares.pop(peer, None)
        if share is None:
            return
        left = len(self._shares)
        had = share.rdy > 0 or share.retry_at is not None
        if had and (left == self.max_in_flight or self.is_in_backoff):
            self._is_lopsided = True
        if not left:
            self._redistribute_at = None

    def change_max_in_flight(self, count: int, now: float) -> None:
        """0 pauses everything."""
        self.max_in_flight = count
        if self.is_in_backoff:
            if self.total > count:
                self._clear(now)
            elif self._pause_until is None and not self.total:
                self._probe(now)
            return
        for peer, share in self._shares.items():
            if share.rdy > self.per_connection:
                self._update(peer, now)
        # Then those that can have more, or must do without where one for each is too much.
        for peer in self._shares:
            self._update(peer, now)
        self._fill(now)

    def stop(self) -> None:
        """Nothing further is let through."""
        self.is_stopping = True
        self._pause_until = self._redistribute_at = None
        for share in self._shares.values():
            share.retry_at = None

    @property
    def total(self) -> int:
        return sum(share.rdy for share in self._shares.values())

    def rdy_of(self, peer: Peer) -> int:
        share = self._shares.get(peer)
        return share.rdy if share else 0

    @property
    def per_connection(self) -> int:
        """The share of each."""
        count = len(self._shares)
        return min(max(1, self.max_in_flight // count), self.max_in_flight) if count else self.max_in_flight

    @property
    def is_starved(self) -> bool:
        """Whether some connection has sent nearly all it may: time to answer what is being collected."""
        return any(
            not peer.is_closing and peer.in_flight > 0 and peer.in_flight >= int(STARVED_SHARE * share.rdy)
            for peer, share in self._shares.items()
        )

    # back-off

    @property
    def is_in_backoff(self) -> bool:
        return self.backoff_count > 0

    def signal(self, signal: Signal, now: float) -> None:
        """A message has been answered. To be told before the answer itself is sent."""
        config = self._config
        if self._pause_until is not None or not config.max_backoff_duration or self.is_stopping:
            return
        before = self.backoff_count
        if signal is Signal.RESUME and before:
            self.backoff_count -= 1
        elif signal is Signal.BACKOFF and config.backoff(before + 1) <= config.max_backoff_duration:
            self.backoff_count += 1
        if self.backoff_count:
            self._clear(now)
            pause = min(config.backoff(self.backoff_count), config.max_backoff_duration)
            self._pause_until = now + pause
        elif before:
            for peer in [*self._shares]:
                self._update(peer, now)

    # time

    def next_event(self) -> float | None:
        """When tick() has something to do."""
        times = [share.retry_at for share in self._shares.values()]
        times += (self._pause_until, self._redistribute_at)
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> None:
        if self.is_stopping:
            return
        if self._pause_until is not None and now >= self._pause_until:
            self._probe(now)
        for peer, share in [*self._shares.items()]:
            if share.retry_at is not None and now >= share.retry_at:
                share.retry_at = None
                self._update(peer, now)
        if self._redistribute_at is not None and now >= self._redistribute_at:
            self._redistribute_at = now + self._config.rdy_redistribute_interval
            self._redistribute(now)

    def _probe(self, now: float) -> None:
        """The pause is over: one message is let through, to see how it goes."""
        self._pause_until = None
        open_peers = [peer for peer in self._shares if not peer.is_closing]
        if not open_peers or not self._set(self._choose(open_peers), 1, now):
            self._pause_until = now + PROBE_RETRY_S

    def _redistribute(self, now: float) -> None:
        """Where not every connection can have RDY, let it go round."""
        count = len(self._shares)
        if self._pause_until is not None or not count:
            return
        if not (self._is_lopsided or count > self.max_in_flight or (self.is_in_backoff and count > 1)):
            self._fill(now)
            return
        self._is_lopsided = False
        config = self._config
        for peer, share in self._shares.items():
            is_idle = now - peer.last_message >= config.low_rdy_idle_timeout
            is_old = now - share.last_rdy >= config.low_rdy_timeout
            if share.rdy and (is_idle or is_old):
                self._set(peer, 0, now)
        waiting = [peer for peer, share in self._shares.items() if not share.rdy and not peer.is_closing]
        available = (1 if self.is_in_backoff else self.max_in_flight) - self.total
        for _ in range(min(available, len(waiting))):
            longest = min(self._shares[peer].waits_since for peer in waiting)
            chosen = self._choose([peer for peer in waiting if self._shares[peer].waits_since == longest])
            waiting.remove(chosen)
            self._set(chosen, 1, now)

    # setting

    def _clear(self, now: float) -> None:
        for peer in [*self._shares]:
            self._set(peer, 0, now)

    def _fill(self, now: float) -> None:
        """Give what is left to those that have less than their share."""
        for peer, share in self._shares.items():
            if share.rdy < self.per_connection:
                self._update(peer, now)

    def _update(self, peer: Peer, now: float) -> None:
        if not self.is_in_backoff:
            self._set(peer, self.per_connection, now)

    def _set(self, peer: Peer, count: int, now: float) -> bool:
        """Set a connection's RDY as far as there is room. False if it is closing, or if there is none."""
        if peer.is_closing or self.is_stopping:
            return False
        share = self._shares[peer]
        count = min(count, peer.max_rdy_count)
        share.retry_at = None
        room = max(0, self.max_in_flight - self.total + share.rdy)
        if count < share.rdy:
            # Less is always possible, though others may still have too much.
            room = max(room, count)
        is_refused = count > 0 and not room
        if is_refused:
            share.retry_at = now + RETRY_S
        count = min(count, room)
        if count:
            share.last_rdy = now
        if count != share.rdy:
            share.rdy, share.waits_since = count, now
            peer.send_rdy(count)
        return not is_refused
