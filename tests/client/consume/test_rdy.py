"""RDY distribution and back-off, rule by rule, with a fake clock and fake connections."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nsparq.client.config import Config
from nsparq.client.consume.rdy import PROBE_RETRY_S, RETRY_S, Distribution, Signal
from tests.support.examples import examples

RESUME, BACKOFF, CONTINUE = Signal.RESUME, Signal.BACKOFF, Signal.CONTINUE


class FakePeer:
    def __init__(self, rig: Rig, max_rdy_count: int = 2500) -> None:
        self.max_rdy_count = max_rdy_count
        self.in_flight = 0
        self.is_closing = False
        self.last_message = rig.now
        self.sent: list[int] = []
        self._rig = rig

    @property
    def rdy(self) -> int:
        """The RDY that the server has."""
        return self.sent[-1] if self.sent else 0

    def send_rdy(self, count: int) -> None:
        assert count != self.rdy, "the server knows that already"
        assert 0 <= count <= self.max_rdy_count
        is_more = count > self.rdy
        self.sent.append(count)
        if is_more:
            total = sum(peer.rdy for peer in self._rig.peers)
            assert total <= self._rig.distribution.max_in_flight, "more than there is was given away"


class Rig:
    """A distribution, its connections and its clock."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.peers: list[FakePeer] = []
        self.choices: list[int] = []
        """Indexes of the next choices; the first one by default."""
        self.config = Config(**{"max_in_flight": 1, **options})
        self.distribution = Distribution(self.config, choose=self._choose)  # type: ignore[arg-type]

    def _choose(self, peers: list[FakePeer]) -> FakePeer:
        return peers[(self.choices.pop(0) if self.choices else 0) % len(peers)]

    def add(self, count: int = 1, **options: Any) -> list[FakePeer]:
        added = []
        for _ in range(count):
            peer = FakePeer(self, **options)
            self.peers.append(peer)
            added.append(peer)
            self.distribution.add(peer, self.now)
        return added

    def lose(self, peer: FakePeer) -> None:
        self.peers.remove(peer)
        self.distribution.remove(peer)

    def signal(self, signal: Signal) -> None:
        self.distribution.signal(signal, self.now)

    def change(self, max_in_flight: int) -> None:
        self.distribution.change_max_in_flight(max_in_flight, self.now)

    def advance(self, seconds: float, *, busy: bool = False) -> None:
        """Let time pass. With `busy`, every connection with RDY sends messages all the time."""
        until = self.now + seconds
        while (at := self.distribution.next_event()) is not None and at <= until:
            self.now = max(at, self.now)
            if busy:
                self.send_messages()
            self.distribution.tick(self.now)
        self.now = until

    def send_messages(self) -> None:
        for peer in self.peers:
            if peer.rdy:
                peer.last_message = self.now

    @property
    def rdys(self) -> list[int]:
        for peer in self.peers:
            share = self.distribution._shares.get(peer)
            assert (share.rdy if share else 0) == peer.rdy
        return [peer.rdy for peer in self.peers]


# Shares


@pytest.mark.parametrize(
    ("max_in_flight", "connections", "share"),
    [(0, 1, 0), (0, 5, 0), (1, 1, 1), (1, 4, 1), (5, 1, 5), (5, 2, 2), (5, 3, 1), (5, 9, 1), (100, 3, 33)],
)
def test_the_share_of_a_connection(max_in_flight: int, connections: int, share: int) -> None:
    rig = Rig(max_in_flight=max_in_flight)
    rig.add(connections)
    assert rig.distribution.per_connection == share


def test_the_only_connection_gets_everything() -> None:
    rig = Rig(max_in_flight=7)
    (peer,) = rig.add()
    assert peer.sent == [7]


def test_a_new_connection_takes_from_the_others_what_it_is_given() -> None:
    rig = Rig(max_in_flight=10)
    first, second, third = rig.add(3)
    assert (first.sent, second.sent, third.sent) == ([10, 5, 3], [5, 3], [3])


def test_no_connection_gets_more_than_its_server_allows() -> None:
    rig = Rig(max_in_flight=100)
    (small,) = rig.add(max_rdy_count=10)
    (large,) = rig.add()
    assert (small.sent, large.sent) == ([10], [50])


def test_a_connection_without_room_tries_again_after_five_seconds() -> None:
    rig = Rig(max_in_flight=2, rdy_redistribute_interval=5)
    rig.add(2)
    (third,) = rig.add()
    assert third.sent == []
    rig.lose(rig.peers[0])
    rig.advance(RETRY_S - 0.01)
    assert third.sent == []
    rig.advance(0.02)
    assert third.sent == [1]


def test_rdy_is_not_sent_again_as_messages_come() -> None:
    rig = Rig(max_in_flight=5)
    (peer,) = rig.add()
    for _ in range(20):
        peer.in_flight += 1
        rig.signal(RESUME)
    assert peer.sent == [5]


def test_a_closing_connection_is_left_alone() -> None:
    rig = Rig(max_in_flight=4)
    first, second = rig.add(2)
    first.is_closing = True
    rig.change(8)
    assert (first.sent, second.sent) == ([4, 2], [2, 4])


# max_in_flight while running


def test_zero_pauses_and_more_than_zero_resumes() -> None:
    rig = Rig(max_in_flight=5)
    (peer,) = rig.add()
    rig.change(0)
    rig.change(5)
    assert peer.sent == [5, 0, 5]


def test_a_lower_limit_is_told_to_each_connection_at_once_and_once() -> None:
    rig = Rig(max_in_flight=90)
    peers = rig.add(3)
    before = [len(peer.sent) for peer in peers]
    rig.change(45)
    assert [peer.sent[count:] for peer, count in zip(peers, before, strict=True)] == [[15], [15], [15]]


def test_a_lower_limit_holds_at_once_even_for_more_connections_than_it_allows() -> None:
    rig = Rig(max_in_flight=10)
    rig.add(5)
    assert rig.rdys == [2] * 5
    rig.change(2)
    assert sorted(rig.rdys) == [0, 0, 0, 1, 1]
    rig.change(0)
    assert rig.rdys == [0] * 5
    rig.change(10)
    assert rig.rdys == [2] * 5


def test_a_lower_limit_reaches_the_probe_of_a_backoff_and_a_higher_one_brings_it_back() -> None:
    rig = Rig(max_in_flight=5)
    (peer,) = rig.add()
    rig.signal(BACKOFF)
    rig.advance(2)
    assert peer.sent == [5, 0, 1]
    rig.change(0)
    assert peer.rdy == 0
    rig.advance(60)
    assert peer.rdy == 0
    rig.change(3)
    assert peer.rdy == 1
    rig.signal(RESUME)
    assert peer.rdy == 3


def test_a_paused_consumer_in_backoff_probes_when_it_is_resumed() -> None:
    """A probe that found no room does not count as sent."""
    rig = Rig(max_in_flight=5)
    (peer,) = rig.add()
    rig.signal(BACKOFF)
    rig.change(0)
    rig.advance(30)
    assert peer.rdy == 0
    rig.change(5)
    rig.advance(PROBE_RETRY_S)
    assert peer.rdy == 1


# Lost connections


def test_rdy_of_a_lost_connection_is_redistributed() -> None:
    rig = Rig(max_in_flight=10)
    first, second = rig.add(2)
    rig.lose(second)
    assert first.rdy == 5
    rig.advance(rig.config.rdy_redistribute_interval)
    assert first.rdy == 10


def test_with_more_connections_than_rdy_a_lost_one_frees_its_rdy() -> None:
    rig = Rig(max_in_flight=2)
    rig.add(3)
    assert rig.rdys == [1, 1, 0]
    rig.lose(rig.peers[0])
    rig.advance(5)
    assert rig.rdys == [1, 1]


def test_losing_the_connection_of_the_probe_gives_it_to_another() -> None:
    rig = Rig(max_in_flight=4)
    first, second = rig.add(2)
    rig.signal(BACKOFF)
    rig.advance(2)
    assert (first.rdy, second.rdy) == (1, 0)
    rig.lose(first)
    rig.advance(5)
    assert second.rdy == 1


def test_losing_all_connections_in_backoff_leaves_the_next_one_to_probe() -> None:
    rig = Rig(max_in_flight=4)
    (peer,) = rig.add()
    rig.signal(BACKOFF)
    rig.advance(2)
    assert peer.rdy == 1
    rig.lose(peer)
    rig.advance(100)
    (again,) = rig.add()
    assert again.sent == [1]


def test_losing_an_unknown_connection_has_no_effect() -> None:
    rig = Rig()
    rig.distribution.remove(FakePeer(rig))
    assert rig.distribution.next_event() is None


# Redistribution


def test_an_idle_connection_gives_its_rdy_to_another() -> None:
    rig = Rig(max_in_flight=1)
    first, second = rig.add(2)
    assert rig.rdys == [1, 0]
    rig.advance(rig.config.low_rdy_idle_timeout)
    assert rig.rdys == [0, 1]
    assert first.sent == [1, 0]


def test_a_busy_connection_keeps_its_rdy_for_low_rdy_timeout() -> None:
    rig = Rig(max_in_flight=1)
    rig.add(2)
    rig.advance(29, busy=True)
    assert rig.rdys == [1, 0]
    rig.advance(2, busy=True)
    assert rig.rdys == [0, 1]


def test_nothing_is_redistributed_while_everybody_has_some() -> None:
    rig = Rig(max_in_flight=4)
    rig.add(2)
    rig.advance(1000)
    assert [peer.sent for peer in rig.peers] == [[4, 2], [2]]


def test_in_backoff_an_idle_probe_moves_to_another_connection() -> None:
    rig = Rig(max_in_flight=10)
    rig.add(3)
    rig.signal(BACKOFF)
    rig.advance(2)
    assert rig.rdys == [1, 0, 0]
    rig.advance(12)
    assert sum(rig.rdys) == 1 and rig.rdys[0] == 0
    assert rig.distribution.is_in_backoff


def test_nothing_is_redistributed_in_the_pause_of_a_backoff() -> None:
    rig = Rig(max_in_flight=1, backoff_multiplier=50)
    rig.add(3)
    rig.signal(BACKOFF)
    rig.advance(99)
    assert rig.rdys == [0, 0, 0]


@given(
    count=st.integers(2, 9),
    max_in_flight=st.integers(1, 8),
    choices=st.lists(st.integers(0, 8), max_size=300),
    busy=st.booleans(),
)
def test_no_connection_starves_whatever_is_chosen(
    count: int, max_in_flight: int, choices: list[int], busy: bool
) -> None:
    """With more connections than max_in_flight, each gets RDY again within a known time."""
    rig = Rig(max_in_flight=max_in_flight)
    rig.choices = choices
    rig.add(count)
    longest = (math.ceil(count / max_in_flight) + 1) * (rig.config.low_rdy_timeout + 10)
    for _ in range(3):
        before = [len(peer.sent) for peer in rig.peers]
        had_all_along = [peer.rdy for peer in rig.peers]
        rig.advance(longest, busy=busy)
        for peer, sent, had in zip(rig.peers, before, had_all_along, strict=True):
            assert had or any(peer.sent[sent:]), f"{peer.sent} of {rig.rdys}"
    assert sum(rig.rdys) == max_in_flight if count > max_in_flight else all(rig.rdys)


# Back-off


def test_a_failure_stops_everything_and_then_one_message_is_let_through() -> None:
    rig = Rig(max_in_flight=10)
    rig.add(2)
    rig.signal(BACKOFF)
    assert rig.rdys == [0, 0]
    rig.advance(1.99)
    assert rig.rdys == [0, 0]
    rig.choices = [1]
    rig.advance(0.02)
    assert rig.rdys == [0, 1]


def test_a_success_of_the_probe_ends_a_backoff_of_depth_one() -> None:
    rig = Rig(max_in_flight=10)
    rig.add(2)
    rig.signal(BACKOFF)
    rig.advance(2)
    rig.signal(RESUME)
    assert (rig.rdys, rig.distribution.backoff_count) == ([5, 5], 0)


def test_each_failure_doubles_the_pause_and_each_success_halves_it() -> None:
    rig = Rig(max_in_flight=10)
    (peer,) = rig.add()
    pauses = []
    for signal in (BACKOFF, BACKOFF, BACKOFF, RESUME, RESUME):
        rig.signal(signal)
        assert peer.rdy == 0
        began, at = rig.now, rig.distribution.next_event()
        while peer.rdy == 0:
            at = rig.distribution.next_event()
            assert at is not None
            rig.advance(at - rig.now)
        pauses.append(rig.now - began)
    assert pauses == [2, 4, 8, 4, 2]
    rig.signal(RESUME)
    assert peer.rdy == 10


def test_signals_during_the_pause_do_not_count() -> None:
    rig = Rig(max_in_flight=10)
    rig.add()
    for _ in range(10):
        rig.signal(BACKOFF)
    assert rig.distribution.backoff_count == 1
    for _ in range(10):
        rig.signal(RESUME)
    assert rig.distribution.backoff_count == 1


def test_requeued_without_backoff_in_backoff_pauses_as_long_again() -> None:
    rig = Rig(max_in_flight=1)
    (peer,) = rig.add()
    rig.signal(BACKOFF)
    rig.advance(2)
    rig.signal(CONTINUE)
    assert (peer.rdy, rig.distribution.backoff_count) == (0, 1)
    rig.advance(1.99)
    assert peer.rdy == 0
    rig.advance(0.02)
    assert peer.rdy == 1


def test_requeued_without_backoff_outside_of_backoff_changes_nothing() -> None:
    rig = Rig(max_in_flight=3)
    (peer,) = rig.add()
    rig.signal(CONTINUE)
    assert peer.sent == [3]


def test_the_depth_stops_growing_where_the_pause_would_pass_its_maximum() -> None:
    rig = Rig(max_in_flight=1, max_backoff_duration=8)
    rig.add()
    depths = []
    for _ in range(6):
        rig.signal(BACKOFF)
        depths.append(rig.distribution.backoff_count)
        rig.advance(8)
    assert depths == [1, 2, 3, 3, 3, 3]


def test_a_maximum_of_zero_switches_backoff_off() -> None:
    rig = Rig(max_in_flight=5, max_backoff_duration=0)
    (peer,) = rig.add()
    rig.signal(BACKOFF)
    assert (peer.sent, rig.distribution.is_in_backoff) == ([5], False)


def test_without_a_connection_the_probe_waits_a_second_at_a_time() -> None:
    rig = Rig(max_in_flight=5)
    (peer,) = rig.add()
    rig.signal(BACKOFF)
    rig.lose(peer)
    rig.advance(10)
    (again,) = rig.add()
    assert again.sent == []
    rig.advance(PROBE_RETRY_S)
    assert again.sent == [1]


def test_a_closing_connection_is_not_probed() -> None:
    rig = Rig(max_in_flight=5)
    first, second = rig.add(2)
    rig.signal(BACKOFF)
    first.is_closing = True
    rig.advance(2)
    assert (first.rdy, second.rdy) == (0, 1)


def test_a_new_connection_gets_nothing_in_backoff() -> None:
    rig = Rig(max_in_flight=5)
    rig.add()
    rig.signal(BACKOFF)
    (new,) = rig.add()
    rig.advance(2)
    assert new.sent == []


def test_with_full_jitter_a_drawn_pause_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_in_flight=1, backoff_strategy="full_jitter", max_backoff_duration=3)
    rig.add()
    monkeypatch.setattr("nsparq.client.config.private_random.uniform", lambda low, high: high)
    rig.signal(BACKOFF)
    assert rig.distribution.backoff_count == 1
    rig.advance(3)
    rig.signal(BACKOFF)
    assert rig.distribution.backoff_count == 1, "4 s drawn, which is more than the maximum"
    rig.advance(3)
    monkeypatch.setattr("nsparq.client.config.private_random.uniform", lambda low, high: 0.5)
    rig.signal(BACKOFF)
    assert rig.distribution.backoff_count == 2
    assert rig.distribution.next_event() == rig.now + 0.5


# Starved


@pytest.mark.parametrize(
    ("rdy", "in_flight", "is_starved"),
    [
        (10, 0, False),
        (10, 7, False),
        (10, 8, True),
        (10, 10, True),
        (1, 1, True),
        (100, 84, False),
        (100, 85, True),
    ],
)
def test_starved_means_that_85_percent_are_in_flight(rdy: int, in_flight: int, is_starved: bool) -> None:
    rig = Rig(max_in_flight=rdy)
    (peer,) = rig.add()
    peer.in_flight = in_flight
    assert rig.distribution.is_starved is is_starved
    peer.is_closing = True
    assert not rig.distribution.is_starved


def test_one_starved_connection_is_enough() -> None:
    rig = Rig(max_in_flight=20)
    first, second = rig.add(2)
    second.in_flight = 9
    assert rig.distribution.is_starved


# The end


def test_after_stop_nothing_is_sent() -> None:
    rig = Rig(max_in_flight=5)
    (peer,) = rig.add()
    rig.distribution.stop()
    rig.signal(BACKOFF)
    rig.change(9)
    rig.advance(1000)
    assert (peer.sent, rig.distribution.next_event()) == ([5], None)


def test_stop_ends_a_pause() -> None:
    rig = Rig(max_in_flight=5)
    rig.add()
    rig.signal(BACKOFF)
    rig.distribution.stop()
    assert rig.distribution.next_event() is None


# Everything at once


class AnyCourseOfEvents(RuleBasedStateMachine):
    """Random connections, messages, failures, limits and times. FakePeer checks every RDY."""

    rig: Rig

    @initialize(
        max_in_flight=st.integers(0, 12),
        strategy=st.sampled_from(["exponential", "full_jitter"]),
        multiplier=st.sampled_from([0.0, 0.5, 10.0]),
    )
    def begin(self, max_in_flight: int, strategy: str, multiplier: float) -> None:
        self.rig = Rig(max_in_flight=max_in_flight, backoff_strategy=strategy, backoff_multiplier=multiplier)

    @precondition(lambda self: len(self.rig.peers) < 8)
    @rule(max_rdy_count=st.sampled_from([1, 3, 2500]))
    def connect(self, max_rdy_count: int) -> None:
        self.rig.add(max_rdy_count=max_rdy_count)

    @precondition(lambda self: self.rig.peers)
    @rule(index=st.integers(0, 7))
    def lose(self, index: int) -> None:
        self.rig.lose(self.rig.peers[index % len(self.rig.peers)])

    @precondition(lambda self: self.rig.peers)
    @rule(index=st.integers(0, 7))
    def begin_closing(self, index: int) -> None:
        self.rig.peers[index % len(self.rig.peers)].is_closing = True

    @precondition(lambda self: self.rig.peers)
    @rule(index=st.integers(0, 7))
    def message(self, index: int) -> None:
        peer = self.rig.peers[index % len(self.rig.peers)]
        if peer.rdy > peer.in_flight:
            peer.in_flight += 1
            peer.last_message = self.rig.now

    @rule(signal=st.sampled_from(Signal))
    def answer(self, signal: Signal) -> None:
        for peer in self.rig.peers:
            peer.in_flight = max(0, peer.in_flight - 1)
        self.rig.signal(signal)

    @rule(max_in_flight=st.integers(0, 12))
    def change(self, max_in_flight: int) -> None:
        self.rig.change(max_in_flight)

    @rule(
        seconds=st.sampled_from([0.0, 0.3, 1.0, 5.0, 31.0]), choices=st.lists(st.integers(0, 7), max_size=4)
    )
    def wait(self, seconds: float, choices: list[int]) -> None:
        self.rig.choices = choices
        self.rig.advance(seconds)

    @invariant()
    def sums_hold(self) -> None:
        rig = self.rig
        open_peers = [peer for peer in rig.peers if not peer.is_closing]
        assert sum(peer.rdy for peer in open_peers) <= rig.distribution.max_in_flight
        assert sum(rig.rdys) == rig.distribution.total
        assert all(peer.rdy <= peer.max_rdy_count for peer in rig.peers)
        if rig.distribution.is_in_backoff:
            assert sum(peer.rdy for peer in open_peers) <= 1
        at = rig.distribution.next_event()
        assert at is None or rig.peers or rig.distribution.is_in_backoff

    def teardown(self) -> None:
        """In the end, with time, successes and working connections, all get their share."""
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        for peer in [peer for peer in rig.peers if peer.is_closing]:
            rig.lose(peer)
        rig.change(12)
        rig.add()
        for _ in range(200):
            if not rig.distribution.is_in_backoff:
                break
            rig.advance(700)
            assert sum(rig.rdys) == 1, "a probe is out"
            rig.signal(RESUME)
        assert not rig.distribution.is_in_backoff
        rig.advance(10)
        share = rig.distribution.per_connection
        assert rig.rdys == [min(share, peer.max_rdy_count) for peer in rig.peers]


AnyCourseOfEvents.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestAnyCourseOfEvents = AnyCourseOfEvents.TestCase
