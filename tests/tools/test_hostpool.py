"""Which destination is next, with the time as an argument."""

from __future__ import annotations

import pytest

from nsparq.tools.hostpool import EpsilonGreedy, HostPool, RoundRobin, make_pool

HOSTS = ["a", "b", "c"]


def picks(pool: RoundRobin, count: int, now: float = 0.0) -> str:
    return "".join(pool.pick(now) for _ in range(count))


def test_round_robin_takes_hosts_in_turn_even_if_they_fail() -> None:
    pool = RoundRobin(HOSTS)
    assert picks(pool, 4) == "abca"
    pool.report("b", False, 1.0, 0.0)
    assert picks(pool, 3) == "bca"


def test_a_failed_host_is_skipped_for_30_seconds() -> None:
    pool = HostPool(HOSTS)
    pool.report("b", False, 0.0, 100.0)
    assert picks(pool, 4, 100.0) == "acac"
    assert picks(pool, 4, 129.9) == "acac"
    assert picks(pool, 3, 130.0) == "abc"


def test_while_it_keeps_failing_the_time_doubles_up_to_15_minutes() -> None:
    pool = HostPool(["a", "b"])
    now = 0.0
    pool.report("b", False, 0.0, now)
    waits = []
    for _ in range(8):
        start = now
        while "b" not in picks(pool, 2, now):
            now += 1.0
        waits.append(now - start)
        pool.report("b", False, 0.0, now)
    assert waits == [30, 60, 120, 240, 480, 900, 900, 900]
    pool.report("b", True, 0.0, now)
    assert sorted(picks(pool, 4, now)) == ["a", "a", "b", "b"]
    pool.report("b", False, 0.0, now)
    assert picks(pool, 2, now + 29) == "aa"
    assert "b" in picks(pool, 2, now + 30)


def test_a_failed_host_gets_one_try_at_a_time() -> None:
    pool = HostPool(["a", "b"])
    pool.report("b", False, 0.0, 0.0)
    assert picks(pool, 6, 30.0).count("b") == 1


def test_when_all_have_failed_all_are_tried_again() -> None:
    pool = HostPool(HOSTS)
    for host in HOSTS:
        pool.report(host, False, 0.0, 0.0)
    assert picks(pool, 3, 1.0) == "abc"


def test_mostly_the_fastest_host_is_taken_and_sometimes_another() -> None:
    draws = iter([0.9] * 100)
    pool = EpsilonGreedy(HOSTS, draw=lambda: next(draws))
    for host, seconds in (("a", 0.3), ("b", 0.1), ("c", 0.2)):
        assert pool.pick(0.0) == host  # first of all each of them once
        pool.report(host, True, seconds, 0.0)
    assert picks(pool, 5, 1.0) == "bbbbb"
    pool.report("b", False, 0.0, 1.0)
    assert picks(pool, 5, 1.0) == "ccccc"


def test_how_often_another_is_taken_falls_from_30_to_1_percent() -> None:
    def share(now: float) -> float:
        drawn = iter([number / 1000 for number in range(1000)])
        pool = EpsilonGreedy(["a", "b"], draw=lambda: next(drawn))
        pool.pick(0.0)
        pool.report("a", True, 0.1, 0.0)
        pool.report("b", True, 0.2, 0.0)
        return picks(pool, 1000, now).count("b") / 1000 * 2

    assert share(0.0) == pytest.approx(0.3, abs=0.01)
    assert 0.02 < share(30.0) < 0.2
    assert share(1000.0) == pytest.approx(0.01, abs=0.002)


def test_response_times_are_forgotten_after_minutes() -> None:
    pool = EpsilonGreedy(["a", "b"], draw=lambda: 0.99)
    for _ in range(20):
        pool.report("a", True, 0.01, 0.0)
        pool.report("b", True, 0.05, 0.0)
    assert pool.pick(0.0) == "a"
    pool.report("a", True, 1.0, 1500.0)
    assert pool.pick(1500.0) == "b"


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("round-robin", RoundRobin), ("hostpool", HostPool), ("epsilon-greedy", EpsilonGreedy)],
)
def test_modes_have_the_names_of_nsq(mode: str, kind: type[RoundRobin]) -> None:
    assert type(make_pool(mode, HOSTS)) is kind
    assert make_pool("another", HOSTS) is None
    pool = make_pool(mode, ["a", "a"])
    assert pool is not None and pool.hosts == ["a"]
