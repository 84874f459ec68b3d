"""Local search in the simulator: go on from a plan to one near it, for as long as that is faster.

A point of the search is whatever can be simulated: a plan, whose borders move, or a plan's numbers of minibatches in
flight. This is hill climbing: it finds no better point that is further away than its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


@dataclass
class LocalSearch(Generic[P]):
    """The points that were looked at, each once.

    Attributes:
        best: the best point; to begin with, the point to start from.
        simulate: returns the seconds per minibatch of a point, infinite if it cannot be executed. It may return
            infinity for a point that is slower than its second argument, the time to beat.
        max_simulations: how often.
        min_gain: fraction of the time per minibatch; a smaller gain does not count.
        bound_s: returns seconds per minibatch that a point cannot beat; if they are too many, it is not simulated.
        size: of two points that are equally fast, the smaller one is better.
        times_s: seconds per minibatch of each point.
        simulations: how many there were.
    """

    best: P
    simulate: Callable[[P, float], float]
    max_simulations: float
    min_gain: float = 0.0
    bound_s: Callable[[P], float] = lambda point: 0.0
    size: Callable[[P], int] = lambda point: 0
    times_s: dict[P, float] = field(default_factory=dict)
    simulations: int = 0

    @property
    def fastest_s(self) -> float:
        """Seconds per minibatch of the best point."""
        return self.times_s.get(self.best, math.inf)

    def add(self, point: P) -> bool:
        """Simulate a point, unless it was looked at, and return whether it is better than the best so far."""
        if point in self.times_s or self.simulations >= self.max_simulations:
            return False
        to_beat_s, time_s = self.fastest_s * (1 - self.min_gain), math.inf
        if self.bound_s(point) < to_beat_s:
            time_s, self.simulations = self.simulate(point, to_beat_s), self.simulations + 1
        is_smaller, self.times_s[point] = self.size(point) < self.size(self.best), time_s
        if is_better := time_s < to_beat_s or (is_smaller and time_s <= self.fastest_s):
            self.best = point
        return is_better

    def climb(self, near: Callable[[P], Iterable[P]], *, enough_s: float = 0.0, steps_without_gain: int = 1) -> None:
        """Look at the points near the best one, go on from the first better one, and so on.

        Args:
            near: yields the points near one.
            enough_s: a time that is good enough to stop.
            steps_without_gain: stop after so many points in a row, each the fastest that is left, have nothing better
                near them than the best.
        """
        exhausted: set[P] = set()
        without_gain = 0
        while without_gain < steps_without_gain and self.fastest_s > enough_s:
            rest = [point for point, time_s in self.times_s.items() if time_s < math.inf and point not in exhausted]
            if not rest or self.simulations >= self.max_simulations:
                break
            point = self.best if self.best in rest else min(rest, key=self.times_s.__getitem__)
            if any(map(self.add, near(point))):
                without_gain = 0
            else:
                exhausted.add(point)
                without_gain += 1
