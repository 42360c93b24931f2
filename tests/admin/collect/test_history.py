"""The rings of figures: what is kept, for how long, in how much memory."""

from __future__ import annotations

import math

import numpy as np

from nsparq.admin.collect.history import BLOCK, SLOTS, Table


def table(max_bytes: int = 1 << 24, **more: object) -> Table:
    return Table(("a", "b"), poll_s=5.0, max_bytes=max_bytes, peaks=("b",), **more)  # type: ignore[arg-type]


def poll(into: Table, time_s: float, **figures: tuple[float, float]) -> None:
    into.begin(time_s)
    for name, values in figures.items():
        into.put(name, values)
    into.commit()


def test_points_are_in_order_of_time() -> None:
    kept = table()
    for number in range(10):
        poll(kept, 1000.0 + 5 * number, x=(number, 2 * number))
    points = kept.points("x")
    assert points.times == [1000.0 + 5 * number for number in range(10)]
    assert points.values[:, 0].tolist() == [*range(10)]
    assert kept.latest("x") == {"a": 9.0, "b": 18.0}


def test_the_finest_ring_keeps_as_many_points_as_it_has_slots() -> None:
    kept = table()
    for number in range(SLOTS[0] + 50):
        poll(kept, 10_000.0 + 5 * number, x=(number, 0))
    values = kept.points("x").values[:, 0].tolist()
    assert values == [*range(50, SLOTS[0] + 50)]


def test_a_coarse_point_is_the_mean_or_the_peak_of_its_time() -> None:
    kept = table()
    for number in range(37):
        poll(kept, 6000.0 + 5 * number, x=(number, number))
    points = kept.points("x", 1)
    assert points.times == [6060.0, 6120.0]
    assert points.values[:, 0].tolist() == [np.mean(range(12, 24)), np.mean(range(24, 36))]
    assert points.values[:, 1].tolist() == [23, 35]


def test_no_coarse_point_is_lost_if_polls_are_far_apart() -> None:
    kept = table()
    for number in range(20):
        poll(kept, 6030.0 + 90 * number, x=(number, 0))
    points = kept.points("x", 1)
    # The last minute is not over yet.
    assert points.values[:, 0].tolist()[-18:] == [*range(1, 19)]
    assert points.times[-18:] == [(6030.0 + 90 * number) // 60 * 60 for number in range(1, 19)]


def test_what_was_before_a_pause_is_in_the_coarse_points_too() -> None:
    """nsqadmin was stopped for hours, for instance."""
    kept = table()
    for number in range(25):
        poll(kept, 6030.0 + 60 * number, x=(number, number))
    poll(kept, 14_700.0, x=(99, 99))
    assert kept.points("x", 1).values[:, 0].tolist() == [*range(1, 25)]
    assert kept.points("x", 2).values[:, 1].tolist() == [19, 24]
    assert kept.points("x", 3).values[:, 1].tolist() == [24]
    # A day later the minutes are too old, and the rest is still there.
    poll(kept, 92_000.0, x=(99, 99))
    assert kept.points("x", 1).times == []
    assert kept.points("x", 2).values[:, 1].tolist() == [19, 24, 99]
    assert kept.points("x", 3).values[:, 1].tolist() == [24, 99]


def test_a_series_without_a_value_is_unknown() -> None:
    kept = table()
    poll(kept, 1000.0, x=(1, 1), y=(2, 2))
    poll(kept, 1005.0, y=(3, 3))
    assert math.isnan((kept.latest("x") or {})["a"])
    assert np.isnan(kept.points("x").values[-1]).all()


def test_a_series_that_comes_later_has_no_points_from_before() -> None:
    kept = table()
    for number in range(5):
        poll(kept, 1000.0 + 5 * number, x=(1, 1))
    poll(kept, 1025.0, x=(1, 1), y=(7, 7))
    assert kept.points("y").times == [1025.0]
    before = kept.before(20.0, "a")
    assert before is not None and math.isnan(before[0][kept.find("y")])
    assert before[0][kept.find("x")] == 1


def test_memory_is_bounded_and_series_without_room_keep_their_latest_figures() -> None:
    kept = table(max_bytes=table().bytes_per_series * BLOCK)
    kept.begin(1000.0)
    for number in range(BLOCK + 10):
        kept.put(number, (number, 0))
    kept.commit()
    assert kept.size_bytes <= table().bytes_per_series * BLOCK
    assert sum(not kept.points(number).times for number in range(BLOCK + 10)) == 10
    assert kept.latest(BLOCK + 5) == {"a": BLOCK + 5, "b": 0}
    assert kept.points(BLOCK + 5).times == []


def test_a_series_that_is_gone_gives_its_place_to_another() -> None:
    kept = table()
    poll(kept, 1000.0, x=(1, 1))
    place = kept.find("x")
    for number in range(400):
        poll(kept, 1005.0 + 5 * number, y=(2, 2))
    assert "x" not in kept
    poll(kept, 4000.0, y=(2, 2), z=(3, 3))
    assert kept.find("z") == place
    assert kept.points("z").times == [4000.0]


def test_a_recent_mean_leaves_out_unknown_values() -> None:
    kept = table()
    for number in range(20):
        poll(kept, 1000.0 + 5 * number, x=(10, 1))
    poll(kept, 1100.0, x=(34, 1))
    assert kept.recent("a", 60.0)[kept.find("x")] == 12


def test_the_series_with_the_highest_figures_are_found() -> None:
    kept = table()
    poll(kept, 1000.0, x=(3, 0), y=(7, 1), z=(0, 0), unknown=(math.nan, 0), w=(5, 0))
    assert kept.top("a", 2) == ["y", "w"]
    assert kept.top("a", 10) == ["y", "w", "x"]
    assert kept.top("b", 10) == ["y"]
    assert table().top("a", 3) == []
