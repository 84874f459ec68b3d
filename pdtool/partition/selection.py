"""Choose a plan by simulation: the formulas assume that communication overlaps perfectly, the simulator does not.

shortlist   the fastest plans by the formulas, the baselines, and the best of each layout and number of stages
drop        those that a lower bound shows to be slower than what was simulated
simulate    the rest, each with few and with more minibatches in flight
take        the fastest, each with the fewest minibatches in flight (in_flight.py); within the margin the fewest stages
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from pdtool.partition.cost.contention import lower_bound_s
from pdtool.partition.cost.plan_cost import Candidate
from pdtool.partition.in_flight import with_fewest_in_flight
from pdtool.partition.placement import Placement
from pdtool.partition.search.search import PlanSearch
from pdtool.partition.simulator.steady_state import PATIENT, is_too_large

# Where the fastest plan of the shortlist is slower than its formulas say, also search as if links were twice as slow:
# such plans communicate less.
_LINK_SLOWDOWNS = (1.0, 2.0)
_MAX_PLANS_PER_SEARCH = 8  # those with the smallest lower bounds, for each slowdown


@dataclass(frozen=True)
class Selected:
    """The chosen plan.

    Attributes:
        simulated_s: its simulated seconds per minibatch; None: it was not simulated, because it is too large, because
            PipeDream's formulas are asked for, or because no plan of the shortlist can be simulated.
        limit_s: seconds per minibatch that were allowed; simulated, or by the formulas where it was not simulated.
    """

    candidate: Candidate
    simulated_s: float | None
    limit_s: float


def select(search: PlanSearch, optima: Sequence[Candidate], baselines: Sequence[Candidate]) -> Selected:
    """Choose a plan.

    Args:
        optima: PlanSearch.fastest_plans, the first of them the optimum by the formulas.
        baselines: plans that the choice must not be slower than by more than the margin; those that do not fit, or
            have other stages or replicas than were asked for, are left out.
    """
    margin = search.options.simplest
    optimum_s = optima[0].time_per_minibatch_s
    simplest_plan = optima[0]
    if not search.options.straight:
        simplest_plan = search.simplest_plan(optimum_s * (1 + margin)) or simplest_plan
    if search.evaluator.cost_model != "ours" or is_too_large(simplest_plan.placement, PATIENT):
        return Selected(simplest_plan, None, optimum_s * (1 + margin))
    goal_s = optimum_s * (1 + margin)  # nothing is faster by more than the margin
    has_no_alternatives = search.options.straight or not margin  # the optimum by the formulas was asked for
    shortlist = [simplest_plan] if has_no_alternatives else [simplest_plan, *optima, *baselines]
    selection = _Selection(search, shortlist)
    if not margin:
        selection.simulate()
        return selection.selected() or Selected(simplest_plan, None, goal_s)
    if is_too_large(simplest_plan.placement):
        selection.simulate_patiently(simplest_plan)
    if selection.lowest_bound_s > goal_s:
        selection.add_plans_by_stage_count(selection.lowest_bound_s, slowdowns=(1.0,))
    selection.simulate()
    if selection.fastest_s > goal_s:
        selection.add_plans_by_stage_count(selection.fastest_s)
        selection.simulate()
    return selection.selected() or Selected(simplest_plan, None, goal_s)


@dataclass(frozen=True)
class _Simulated:
    """A plan of the shortlist with the minibatches in flight that it gets, and its simulated seconds per minibatch."""

    candidate: Candidate
    time_s: float

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.candidate.placement.stages)


class _Selection:
    """The shortlist, and the plans of it that were simulated.

    Attributes:
        fastest_s: seconds per minibatch of the fastest of these.
    """

    def __init__(self, search: PlanSearch, candidates: Iterable[Candidate]) -> None:
        self.search, self.margin = search, search.options.simplest
        self.fastest_s = math.inf
        self._plans: list[_Simulated] = []
        self._seen: set[Placement] = set()
        self._shortlist = self._with_lower_bounds(candidates)

    @property
    def lowest_bound_s(self) -> float:
        """Seconds per minibatch that no plan of the shortlist beats."""
        return min((bound_s for bound_s, _ in self._shortlist), default=math.inf)

    def add_plans_by_stage_count(self, bound_s: float, slowdowns: Sequence[float] = _LINK_SLOWDOWNS) -> None:
        """Add the best plans of each schedule, layout and number of stages, as far as they may take less than
        `bound_s`.

        Args:
            slowdowns: search as if links were slower by each of these factors.
        """
        for execution, slower in product(self.search.options.executions, slowdowns):
            plans = self.search.plans_by_stage_count(execution, bound_s * slower, slower)
            self._shortlist += sorted(self._with_lower_bounds(plans), key=_by_bound)[:_MAX_PLANS_PER_SEARCH]

    def simulate(self) -> None:
        """Simulate the plans of the shortlist that may be chosen, in order of their lower bounds."""
        for bound_s, candidate in sorted(self._shortlist, key=_by_bound):
            if self._may_win(bound_s, candidate):
                self._simulate(bound_s, candidate)
        self._shortlist = []

    def simulate_patiently(self, candidate: Candidate) -> None:
        """Simulate a plan that is too large for the shortlist."""
        evaluator, enough_s = self.search.evaluator, candidate.time_per_minibatch_s
        self._keep(*with_fewest_in_flight(evaluator, candidate, self.margin, enough_s=enough_s, patience=PATIENT))

    def selected(self) -> Selected | None:
        """Return the fastest plan; within the margin of it the one with the fewest stages."""
        near = self._near
        if not near:
            return None
        chosen = min(near, key=lambda plan: (plan.stages, plan.time_s))
        if is_too_large(chosen.candidate.placement):  # whoever checks or changes it has the formulas only
            return Selected(chosen.candidate, None, chosen.candidate.time_per_minibatch_s * (1 + self.margin))
        return Selected(chosen.candidate, chosen.time_s, self.fastest_s * (1 + self.margin))

    @property
    def _near(self) -> list[_Simulated]:
        """The plans within the margin of the fastest."""
        return [plan for plan in self._plans if plan.time_s <= self.fastest_s * (1 + self.margin)]

    def _with_lower_bounds(self, candidates: Iterable[Candidate]) -> list[tuple[float, Candidate]]:
        """Those that fit, each once, with their lower bounds."""
        evaluator, options = self.search.evaluator, self.search.options
        shortlist = []
        for candidate in candidates:
            placement = candidate.placement
            if placement not in self._seen and evaluator.fits(candidate) and options.allows(placement):
                shortlist.append((lower_bound_s(evaluator, candidate), candidate))
            self._seen.add(placement)
        return shortlist

    def _may_win(self, bound_s: float, candidate: Candidate) -> bool:
        """Whether it may be the fastest, or within the margin of the fastest and of fewer stages than all there."""
        fewest_stages = min((plan.stages for plan in self._near), default=math.inf)
        has_fewer_stages = len(candidate.placement.stages) < fewest_stages
        return bound_s < self.fastest_s * ((1 + self.margin) if has_fewer_stages else 1.0)

    def _simulate(self, bound_s: float, candidate: Candidate) -> None:
        """Simulate a plan, and keep it if it may be chosen."""
        evaluator, limit_s = self.search.evaluator, self.fastest_s * (1 + self.margin)
        self._keep(*with_fewest_in_flight(evaluator, candidate, self.margin, enough_s=bound_s, limit_s=limit_s))

    def _keep(self, candidate: Candidate, time_s: float) -> None:
        if time_s < math.inf:
            self._plans.append(_Simulated(candidate, time_s))
            self.fastest_s = min(self.fastest_s, time_s)


def _by_bound(entry: tuple[float, Candidate]) -> tuple[float, int]:
    bound_s, candidate = entry
    return bound_s, len(candidate.placement.stages)
