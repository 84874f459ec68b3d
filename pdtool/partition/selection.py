"""Choose a plan by simulation: the formulas assume that communication overlaps perfectly, the simulator does not.

shortlist   the fastest plans by the formulas, the baselines, and the best of each layout and number of stages
drop        those that a lower bound shows to be slower than what was simulated
simulate    the rest, each with few and with more minibatches in flight
take        the fastest; within the margin the fewest stages, and the fewest minibatches in flight
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdtool.partition.cost.contention import lower_bound_s
from pdtool.partition.cost.plan_cost import Candidate
from pdtool.partition.in_flight import in_flight_choices, wanted_in_flight
from pdtool.partition.placement import Placement
from pdtool.partition.search.search import PlanSearch
from pdtool.partition.simulator.steady_state import is_too_large, steady_state_s

IN_FLIGHT_MARGIN = 0.1  # of the time per minibatch: what more minibatches in flight must bring, for they cost delay
_SLOWER_LINKS = (1.0, 2.0)  # than there are: what is planned for those sends less
_MAX_SHORTLIST = 8  # plans that are simulated, besides the first ones


@dataclass(frozen=True)
class Selected:
    """A plan, and its simulated seconds per minibatch; None: it is too large to simulate."""

    candidate: Candidate
    simulated_s: float | None


def select(search: PlanSearch, optima: Sequence[Candidate], baselines: Sequence[Candidate]) -> Selected:
    """Choose a plan.

    Args:
        optima: PlanSearch.fastest_plans, the first of them the optimum by the formulas.
        baselines: plans that the choice must not be slower than; those that do not fit are left out.
    """
    margin = search.options.simplest
    optimum_s = optima[0].time_per_minibatch_s
    simplest = optima[0] if search.options.straight else search.simplest_plan(optimum_s * (1 + margin)) or optima[0]
    if search.evaluator.cost_model != "ours" or is_too_large(simplest.placement):
        return Selected(wanted_in_flight(search.evaluator, simplest, margin), None)
    selection = _Selection(search)
    if search.options.straight or not margin:  # then the optimum by the formulas was asked for
        selection.simulate_promising([simplest])
    else:
        selection.simulate_promising([simplest, *optima, *baselines])
        for slower in _SLOWER_LINKS:
            if selection.fastest_s > optimum_s * (1 + margin):  # or else nothing is faster by more than the margin
                bound_s = selection.fastest_s * slower
                more = search.plans_by_stage_count(simplest.placement.execution, bound_s, slower)
                selection.simulate_promising(more, _MAX_SHORTLIST)
    return selection.selected() or Selected(simplest, None)


@dataclass
class _Simulated:
    """One plan of the shortlist.

    Attributes:
        choices: the plan with more and more minibatches in flight (in_flight_choices).
        times_s: simulated seconds per minibatch of the first choices; infinite where these are too slow to win.
    """

    choices: Sequence[Candidate]
    times_s: list[float] = field(default_factory=list)

    @property
    def fastest_s(self) -> float:
        """Seconds per minibatch of the fastest choice."""
        return min(self.times_s)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.choices[0].placement.stages)


class _Selection:
    """The plans that were simulated so far.

    Attributes:
        fastest_s: seconds per minibatch of the fastest of them.
    """

    def __init__(self, search: PlanSearch) -> None:
        self.search, self.margin = search, search.options.simplest
        self.fastest_s = math.inf
        self._plans: list[_Simulated] = []
        self._seen: set[Placement] = set()

    def simulate_promising(self, candidates: Iterable[Candidate], limit: int | None = None) -> None:
        """Simulate the candidates that may be chosen, in order of their lower bounds, at most `limit` of them."""
        for bound_s, candidate in self._by_lower_bound(candidates)[:limit]:
            if self._may_win(bound_s, candidate):
                self._simulate(bound_s, candidate)

    def selected(self) -> Selected | None:
        """Return the fastest plan; within the margin of it the one with the fewest stages; of that one the fewest
        minibatches in flight with which it still wins, and loses no more than IN_FLIGHT_MARGIN."""
        near = [plan for plan in self._plans if plan.fastest_s <= self.fastest_s * (1 + self.margin)]
        if not near:
            return None
        chosen = min(near, key=lambda plan: (plan.stages, plan.fastest_s))
        limits_s = [self._limit_s(chosen, other) for other in self._plans if other is not chosen]
        limit_s = max(chosen.fastest_s, min([chosen.fastest_s * self._worth, *limits_s]))
        simulated = zip(chosen.choices, chosen.times_s, strict=False)
        return next(Selected(choice, time_s) for choice, time_s in simulated if time_s <= limit_s)

    def _limit_s(self, chosen: _Simulated, other: _Simulated) -> float:
        """Seconds per minibatch up to which the chosen plan wins over another."""
        if other.stages == chosen.stages:
            return other.fastest_s
        return (
            other.fastest_s * (1 + self.margin) if other.stages > chosen.stages else other.fastest_s / (1 + self.margin)
        )

    @property
    def _worth(self) -> float:
        """What fewer minibatches in flight may cost."""
        return 1 + IN_FLIGHT_MARGIN if self.margin else 1.0

    def _by_lower_bound(self, candidates: Iterable[Candidate]) -> list[tuple[float, Candidate]]:
        """Those that fit, each once, with their lower bounds, the smallest first."""
        evaluator, max_stages = self.search.evaluator, self.search.options.max_stages or math.inf
        bounds = []
        for candidate in candidates:
            placement = candidate.placement
            if placement not in self._seen and evaluator.fits(candidate) and len(placement.stages) <= max_stages:
                bounds.append((lower_bound_s(evaluator, candidate), candidate))
            self._seen.add(placement)
        return sorted(bounds, key=lambda entry: (entry[0], len(entry[1].placement.stages)))

    def _may_win(self, bound_s: float, candidate: Candidate) -> bool:
        """Whether it may be the fastest, or within the margin of the fastest and of fewer stages than all there."""
        near = [plan.stages for plan in self._plans if plan.fastest_s <= self.fastest_s * (1 + self.margin)]
        has_fewer_stages = len(candidate.placement.stages) < min(near, default=math.inf)
        return bound_s < self.fastest_s * ((1 + self.margin) if has_fewer_stages else 1.0)

    def _simulate(self, bound_s: float, candidate: Candidate) -> None:
        """Simulate a plan with more and more minibatches in flight, as long as these may make it much faster."""
        limit_s = self.fastest_s * (1 + self.margin)
        plan = _Simulated(in_flight_choices(self.search.evaluator, candidate, self.margin))
        for choice in plan.choices:
            time_s = self._time_s(choice, limit_s)
            is_slower = any(time_s >= earlier_s for earlier_s in plan.times_s)
            plan.times_s.append(time_s)
            if time_s <= bound_s * (1 + self.margin) or is_slower:
                break  # more in flight bring nothing
        if plan.fastest_s < math.inf:
            self._plans.append(plan)
            self.fastest_s = min(self.fastest_s, plan.fastest_s)

    def _time_s(self, candidate: Candidate, limit_s: float) -> float:
        """Simulated seconds per minibatch; infinite above the limit, and where the plan cannot be executed."""
        if not candidate.placement.is_executable:
            return math.inf
        time_s = steady_state_s(candidate.placement, self.search.profile, self.search.cluster, limit_s)
        return math.inf if time_s is None else time_s
