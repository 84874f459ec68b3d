"""Move the borders of the chosen plan to where modules begin and end, as far as the margin allows.

The fastest border may lie in the middle of an attention, and one a little slower between two layers: the stages are
then read, and edited, as parts of the model that its author knows. A border is moved where it divides fewer modules,
the nearest such place first; the time per minibatch stays within what the choice of the plan allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdtool.graph import Graph
from pdtool.partition.cost.plan_cost import Candidate
from pdtool.partition.search.cuts import CutSpace
from pdtool.partition.search.search import PlanSearch
from pdtool.partition.selection import Selected
from pdtool.partition.simulator.steady_state import steady_state_s

_MAX_MOVES = 8  # places that are tried for a border


def move_to_module_borders(search: PlanSearch, selected: Selected) -> Selected:
    """Return the plan with the borders that divide the fewest modules, of those that keep it within `limit_s`.

    All borders that the formulas let move are moved at once and simulated; where that is too slow, one after the other.
    """
    borders = _Borders(search, selected)
    moved = selected
    for border in borders.inner:
        moved = next(borders.moves(moved, border), moved)
    if moved is selected:
        return selected
    if (simulated := borders.simulated(moved)) is not None:
        return simulated
    moved = selected
    for border in borders.inner:
        moves = (borders.simulated(move) for move in borders.moves(moved, border))
        moved = next(moves, None) or moved
    return moved


def modules_divided(graph: Graph, cuts: CutSpace) -> NDArray[np.int64]:
    """Return [cuts] how many modules, at any depth, have operators on both sides of each cut."""
    members = [names for names in graph.members.values() if len(names) > 1]
    block_of = {name: b for b, block in enumerate(cuts.blocks) for name in block}
    held = np.zeros((len(cuts.blocks), len(members)), dtype=np.float32)
    for m, names in enumerate(members):
        held[[block_of[name] for name in names], m] = 1
    inside = cuts.inside.astype(np.float32)
    divided: NDArray[np.int64] = ((inside @ held > 0) & ((1 - inside) @ held > 0)).sum(axis=1)
    return divided


class _Borders:
    """The borders of one plan, as cuts of the space that it was searched in.

    Attributes:
        inner: numbers of the stages that a border stands before and may be moved.
    """

    def __init__(self, search: PlanSearch, selected: Selected) -> None:
        placement = selected.candidate.placement
        self._search, self._limit_s, self._is_simulated = search, selected.limit_s, selected.simulated_s is not None
        space = search.space(placement.used_workers // placement.execution.copies)
        self._cuts, self._work_s = space.cuts, space.forward_backward_s
        self._divided = modules_divided(search.profile.graph, space.cuts)
        self._replicas = placement.replicas
        is_found = self._numbers(selected.candidate) is not None and placement.execution.chunks == 1
        self.inner = range(1, len(placement.stages)) if is_found else range(0)

    def moves(self, selected: Selected, border: int) -> Iterator[Selected]:
        """Yield the plan with one border moved, as far as it fits and the formulas say that it is fast enough."""
        candidate = selected.candidate
        numbers = self._numbers(candidate)
        assert numbers
        for cut in self._nearby(numbers, border, len(candidate.placement.stages)):
            changed = self._with_borders(candidate, [*numbers[:border], cut, *numbers[border + 1 :]])
            if changed.time_per_minibatch_s <= self._limit_s and self._search.evaluator.fits(changed):
                yield replace(selected, candidate=changed)

    def simulated(self, selected: Selected) -> Selected | None:
        """Return the plan with its simulated time; None if that is above the limit."""
        if not self._is_simulated:
            return selected
        placement = selected.candidate.placement
        time_s = steady_state_s(placement, self._search.profile, self._search.cluster, self._limit_s)
        if time_s is None or not time_s <= self._limit_s or not placement.is_executable:
            return None
        return replace(selected, simulated_s=time_s)

    def _nearby(self, numbers: Sequence[int], border: int, stages: int) -> Sequence[int]:
        """The cuts that divide fewer modules than a border, and leave neither stage beside it too slow."""
        before, cut, after = numbers[border - 1 : border + 2]
        fewest_s = self._work_s - self._work_s[before], self._work_s[after] - self._work_s
        shares_s = [work_s / self._replicas[border - 1 + side] for side, work_s in enumerate(fewest_s)]
        is_allowed = self._cuts.contains[before] & self._cuts.contains[:, after] & (self._divided < self._divided[cut])
        is_allowed &= self._cuts.allowed_before(border, stages) & (np.maximum(*shares_s) <= self._limit_s)
        distance_s = np.abs(self._work_s - self._work_s[cut])
        return sorted(np.flatnonzero(is_allowed).tolist(), key=lambda c: (self._divided[c], distance_s[c]))[:_MAX_MOVES]

    def _with_borders(self, candidate: Candidate, numbers: Sequence[int]) -> Candidate:
        placement = candidate.placement
        stages = [self._cuts.nodes(before, after) for before, after in pairwise(numbers)]
        return self._search.evaluator.place(
            stages, placement.workers, placement.execution, in_flight=placement.in_flight
        )

    def _numbers(self, candidate: Candidate) -> list[int] | None:
        """The cuts before, between and after the stages; None if one is not in the space."""
        held: set[str] = set()
        numbers = [0]
        for nodes in candidate.placement.stages:
            held |= set(nodes)
            inside = np.array([all(name in held for name in block) for block in self._cuts.blocks])
            found = np.flatnonzero((self._cuts.inside == inside).all(axis=1))
            size = sum(len(block) for block, is_inside in zip(self._cuts.blocks, inside, strict=True) if is_inside)
            if not len(found) or size != len(held):
                return None
            numbers.append(int(found[0]))
        return numbers
