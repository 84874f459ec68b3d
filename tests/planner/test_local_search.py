"""Local search on functions whose optimum is known: numbers take the place of plans."""

from __future__ import annotations

import math

import pytest

from pdtool.planner.choice.local_search import LocalSearch

TIMES_S = [9, 8, 7, 3, 5, 6, 5.5, 4, 2, 1, math.inf, 0]  # a valley at 3, and a deeper one behind a hill


def searched(start: int, max_simulations: float = math.inf, **options):
    """A search that begins at a position in the list, and the positions in the order in which it simulates them."""
    order: list[int] = []

    def simulate(point: int, to_beat_s: float) -> float:
        order.append(point)
        assert to_beat_s <= tried.fastest_s
        return TIMES_S[point]

    tried = LocalSearch(start, simulate, max_simulations, **options)
    tried.add(start)
    return tried, order


def near(point: int) -> list[int]:
    """The positions on both sides."""
    return [other for other in (point + 1, point - 1) if 0 <= other < len(TIMES_S)]


@pytest.mark.parametrize(("start", "best"), [(0, 3), (4, 3), (5, 9), (9, 9)])
def test_it_ends_where_nothing_near_is_faster(start, best):
    tried, order = searched(start)
    tried.climb(near)
    assert (tried.best, tried.fastest_s) == (best, TIMES_S[best])
    assert all(TIMES_S[best] <= TIMES_S[point] for point in near(best))
    assert len(order) == len(set(order)) == tried.simulations


@pytest.mark.parametrize(("steps", "best"), [(1, 3), (3, 3), (5, 9)])
def test_more_steps_without_gain_cross_a_hill(steps, best):
    """But never to a point that cannot be executed, or from it."""
    tried, order = searched(2)
    tried.climb(near, steps_without_gain=steps)
    assert tried.best == best
    assert 11 not in order


def test_it_stops_when_its_effort_is_spent_and_when_the_time_is_good_enough():
    tried, order = searched(0, 3)
    tried.climb(near)
    assert (order, tried.best) == ([0, 1, 2], 2)
    assert not tried.add(3)
    tried, order = searched(0)
    tried.climb(near, enough_s=8)
    assert tried.best == 1


def test_a_bound_above_the_time_to_beat_saves_a_simulation():
    tried, order = searched(2, bound_s=lambda point: 100.0 if point == 3 else 0.0)
    tried.climb(near)
    assert (tried.best, order) == (2, [2, 1])
    assert tried.times_s[3] == math.inf


def test_a_gain_may_be_too_small_and_the_smaller_of_two_equal_points_is_better():
    tried, _ = searched(0, min_gain=0.2)  # 8 is 11 % less than 9
    tried.climb(near)
    assert tried.best == 0
    tried, _ = searched(9, size=lambda point: point)
    times_s = {9: 1.0, 8: 1.0, 10: 1.0}
    tried.simulate = lambda point, to_beat_s: times_s[point]
    assert not tried.add(10)
    assert tried.add(8)
