"""The borders of a plan's stages, and the plans with one of them moved to another cut."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdtool.planner.plan_cost import Candidate
from pdtool.planner.search.cuts import CutSpace
from pdtool.planner.search.search import PlanSearch

_MAX_MOVES = 8  # places with fewer divided modules that are tried for a border
_NEAREST_CUTS = 3  # on each side of a border


def with_moved_borders(search: PlanSearch, plan: Candidate) -> Iterator[Candidate]:
    """Yield the plan with each of its borders moved to each of the nearest cuts, as far as it fits."""
    borders = Borders(search, plan)
    return (moved for border in borders.inner for moved in borders.neighbours(plan, border))


class Borders:
    """The borders of one plan, as cuts of its search space.

    Attributes:
        inner: numbers of the stages whose first border may be moved.
    """

    def __init__(self, search: PlanSearch, candidate: Candidate) -> None:
        placement = candidate.placement
        self._search = search
        self._cuts = search.space(placement.used_workers // placement.execution.copies)
        self._work_s = self._cuts.loads.forward_backward_s
        self._replicas = placement.replicas
        is_found = self._numbers(candidate) and placement.execution.chunks == 1
        self.inner = range(1, len(placement.stages)) if is_found else range(0)

    @cached_property
    def _divided(self) -> NDArray[np.int64]:
        return modules_divided(self._cuts)

    def neighbours(self, candidate: Candidate, border: int) -> Iterator[Candidate]:
        """Yield the plan with a border moved to each of the nearest cuts on both sides, if it fits."""
        numbers = self._numbers(candidate)
        before, cut, after = numbers[border - 1 : border + 2]
        is_allowed = self._cuts.contains[before] & self._cuts.contains[:, after]
        is_allowed &= self._cuts.allowed_before(border, len(numbers) - 1)
        further_s = self._work_s - self._work_s[cut]
        for side in (1, -1):
            cuts = np.flatnonzero(is_allowed & (side * further_s >= 0))
            nearest = sorted(set(cuts.tolist()) - {cut}, key=lambda c: (abs(further_s[c]), c))
            yield from self._moved(candidate, numbers, border, nearest[:_NEAREST_CUTS])

    def dividing_fewer_modules(self, candidate: Candidate, border: int, limit_s: float) -> Iterator[Candidate]:
        """Yield the plan with a border moved to where it divides fewer modules, the fewest first, then the nearest, if
        it fits and takes at most `limit_s` seconds per minibatch by the formulas."""
        numbers = self._numbers(candidate)
        before, cut, after = numbers[border - 1 : border + 2]
        fewest_s = self._work_s - self._work_s[before], self._work_s[after] - self._work_s
        shares_s = [work_s / self._replicas[border - 1 + side] for side, work_s in enumerate(fewest_s)]
        is_allowed = self._cuts.contains[before] & self._cuts.contains[:, after] & (self._divided < self._divided[cut])
        is_allowed &= self._cuts.allowed_before(border, len(numbers) - 1) & (np.maximum(*shares_s) <= limit_s)
        distance_s = np.abs(self._work_s - self._work_s[cut])
        cuts = sorted(np.flatnonzero(is_allowed).tolist(), key=lambda c: (self._divided[c], distance_s[c]))[:_MAX_MOVES]
        moved = self._moved(candidate, numbers, border, cuts)
        return (changed for changed in moved if changed.time_per_minibatch_s <= limit_s)

    def _moved(self, candidate: Candidate, numbers: list[int], border: int, cuts: list[int]) -> Iterator[Candidate]:
        """Yield the plan, whose borders are at the cuts `numbers`, with one of them at each of `cuts`, if it fits."""
        evaluator, placement = self._search.evaluator, candidate.placement
        for cut in cuts:
            stages = [self._cuts.nodes(*pair) for pair in pairwise([*numbers[:border], cut, *numbers[border + 1 :]])]
            changed = evaluator.place(stages, placement.workers, placement.execution, in_flight=placement.in_flight)
            if evaluator.fits(changed):
                yield changed

    def _numbers(self, candidate: Candidate) -> list[int]:
        """The cuts before, between and after the stages; none if one is not in the space."""
        held: set[str] = set()
        numbers = [0]
        for nodes in candidate.placement.stages:
            held |= set(nodes)
            inside = np.array([all(name in held for name in block) for block in self._cuts.blocks])
            found = np.flatnonzero((self._cuts.inside == inside).all(axis=1))
            size = sum(len(block) for block, is_inside in zip(self._cuts.blocks, inside, strict=True) if is_inside)
            if not len(found) or size != len(held):
                return []
            numbers.append(int(found[0]))
        return numbers


def modules_divided(cuts: CutSpace) -> NDArray[np.int64]:
    """Return [cuts] how many modules, at any depth, have operators on both sides of each cut."""
    members = [names for names in cuts.profile.graph.members.values() if len(names) > 1]
    block_of = {name: b for b, block in enumerate(cuts.blocks) for name in block}
    held = np.zeros((len(cuts.blocks), len(members)), dtype=np.float32)
    for m, names in enumerate(members):
        held[[block_of[name] for name in names], m] = 1
    inside = cuts.inside.astype(np.float32)
    divided: NDArray[np.int64] = ((inside @ held > 0) & ((1 - inside) @ held > 0)).sum(axis=1)
    return divided
