"""The distribution of RDY over a consumer's connections, and back-off when handlers fail.

The rules of NSQ's reference client as a state machine without I/O: connections, answers and times
go in, `RDY n` for each connection comes out. Two limits always hold: no connection gets more than
its server allows, and all together never get more than `max_in_flight`. Where the reference client
breaks a limit, or leaves RDY unused, this one does more:

- If `max_in_flight` is lowered below the number of connections, some of them get RDY 0. A back-off
  probe obeys the lower limit too.
- The RDY of a lost connection goes to the others at the next redistribution. A lost back-off probe
  goes to the next connection that is opened.
- When RDY rotates, the connection that has waited longest is next, not a random one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

from nsparq.client.config import Config
from nsparq.private_random import private_random

RETRY_S: Final = 5.0
"""When no RDY was left for a connection, it is tried again after this time."""
PROBE_RETRY_S: Final = 1.0
"""The same for a back-off probe that found no connection."""
STARVED_SHARE: Final = 0.85


class Signal(Enum):
    """What an answer to a message means for back-off."""

    RESUME = "resume"  # finished: leave back-off step by step
    BACKOFF = "backoff"  # requeued after a failure
    CONTINUE = "continue"  # requeued, no change


class Peer(Protocol):
    """A connection."""

    max_rdy_count: int
    in_flight: int
    is_closing: bool
    last_message: float
    """When the latest message arrived, on the clock of `now`."""

    def send_rdy(self, count: int) -> None: ...


class _Share:
    """The RDY of one connection."""

    __slots__ = ("last_rdy", "rdy", "retry_at", "waits_since")

    def __init__(self, now: float) -> None:
        self.rdy = 0
        self.last_rdy = now
        """When RDY was last set to more than 0."""
        self.waits_since = now
        """When RDY became 0, if it is."""
        self.retry_at: float | None = None


class Distribution:
    """RDY of all connections of one consumer. Call tick() at the time of next_event()."""

    def __init__(
        self, config: Config, *, choose: Callable[[list[Peer]], Peer] = private_random.choice
    ) -> None:
        self._config = config
        self.max_in_flight = 1 if config.max_in_flight is None else config.max_in_flight
        self.backoff_count = 0
        """The level of back-off; 0 outside of it."""
        self._choose = choose
        self._shares: dict[Peer, _Share] = {}
        self._pause_until: float | None = None
        """Until then all RDY is 0, and answers have no effect on back-off."""
        self._must_redistribute = False
        """A connection with RDY was lost: its RDY has to go to another."""
        self._redistribute_at: float | None = None
        self.is_stopping = False

    # connections

    def add(self, peer: Peer, now: float) -> None:
        """Add a connection that has subscribed."""
        self._shares[peer] = _Share(now)
        if self._redistribute_at is None:
            self._redistribute_at = now + self._config.rdy_redistribute_interval
        if self.is_in_backoff:
            if self._pause_until is None and not self.total:
                # The connection with the probe was lost.
                self._probe(now)
            return
        for other in [*self._shares]:
            if other is not peer:
                self._update(other, now)
        self._update(peer, now)

    def remove(self, peer: Peer) -> None:
        """Forget a connection, and its RDY."""
        share = self._shares.pop(peer, None)
        if share is None:
            return
        left = len(self._shares)
        had = share.rdy > 0 or share.retry_at is not None
        if had and (left == self.max_in_flight or self.is_in_backoff):
            self._must_redistribute = True
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
        # Then raise the others, or set some to 0 if there are more connections than RDY.
        for peer in self._shares:
            self._update(peer, now)
        self._fill(now)

    def stop(self) -> None:
        """Send no more RDY."""
        self.is_stopping = True
        self._pause_until = self._redistribute_at = None
        for share in self._shares.values():
            share.retry_at = None

    @property
    def total(self) -> int:
        return sum(share.rdy for share in self._shares.values())

    @property
    def per_connection(self) -> int:
        """The equal share of each connection."""
        count = len(self._shares)
        return min(max(1, self.max_in_flight // count), self.max_in_flight) if count else self.max_in_flight

    @property
    def is_starved(self) -> bool:
        """Whether a connection has sent nearly all it may: answer what was collected."""
        return any(
            not peer.is_closing and peer.in_flight > 0 and peer.in_flight >= int(STARVED_SHARE * share.rdy)
            for peer, share in self._shares.items()
        )

    # back-off

    @property
    def is_in_backoff(self) -> bool:
        return self.backoff_count > 0

    def signal(self, signal: Signal, now: float) -> None:
        """A message is about to be answered. Call it before the answer is sent."""
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
        """When tick() has to be called next."""
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
        """End the pause: let one message through, to see whether it succeeds."""
        self._pause_until = None
        open_peers = [peer for peer in self._shares if not peer.is_closing]
        if not open_peers or not self._set(self._choose(open_peers), 1, now):
            self._pause_until = now + PROBE_RETRY_S

    def _redistribute(self, now: float) -> None:
        """Rotate RDY if there is not enough for every connection."""
        count = len(self._shares)
        if self._pause_until is not None or not count:
            return
        if not (self._must_redistribute or count > self.max_in_flight or (self.is_in_backoff and count > 1)):
            self._fill(now)
            return
        self._must_redistribute = False
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
        """Give unused RDY to connections that have less than their share."""
        for peer, share in self._shares.items():
            if share.rdy < self.per_connection:
                self._update(peer, now)

    def _update(self, peer: Peer, now: float) -> None:
        if not self.is_in_backoff:
            self._set(peer, self.per_connection, now)

    def _set(self, peer: Peer, count: int, now: float) -> bool:
        """Set RDY, at most to what is left. False if nothing is left, or it is closing."""
        if peer.is_closing or self.is_stopping:
            return False
        share = self._shares[peer]
        count = min(count, peer.max_rdy_count)
        share.retry_at = None
        room = max(0, self.max_in_flight - self.total + share.rdy)
        if count < share.rdy:
            # Lowering is always possible, even while others still have too much.
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
