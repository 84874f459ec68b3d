"""Choose a plan by simulation.

The formulas assume that messages always overlap with computing, the simulator does not.

    (1) shortlist   the fastest plans by the formulas, baselines, the best of each number of stages, on whole servers
    (2) drop        plans that a lower bound shows to be slower than a plan that was simulated
    (3) simulate    the rest, each with few and with more minibatches in flight
    (4) vary        without a flush and on few workers: move the borders of a few plans of each configuration
    (5) take        the fastest, each with the fewest minibatches in flight; within the margin the fewest stages
    (6) simplify    take fewer stages or workers, if these are as fast with as many minibatches in flight

`border_moves` then moves its borders.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby

from pdtool.artifacts.cluster import Cluster
from pdtool.planner.choice.borders import with_moved_borders
from pdtool.planner.choice.in_flight import IN_FLIGHT_MARGIN, with_fewest_below, with_fewest_in_flight
from pdtool.planner.choice.local_search import LocalSearch
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Candidate, lower_bound_s
from pdtool.planner.search.search import MAX_WORKERS_WITH_CONFIGURATIONS, PlanSearch
from pdtool.planner.simulator.engine import PATIENT, is_too_large
from pdtool.planner.simulator.job import simulation_effort
from pdtool.planner.stage_costs import stage_loads

# Factors between formulas and simulation
_SIMULATION_ERROR = 1.01  # it sees some 32 minibatches of the steady state; the first and the last may be early or late
_EXCESS_OF_SKIPS = 1.6  # about, of the formulas, which count a tensor at each border that it crosses
# (1) If the fastest plan of the shortlist is slower than its formulas say, also search as if links were slower: such
# plans communicate less. With a flush, workers wait for all messages while the pipeline fills and drains.
_LINK_SLOWDOWNS, _LINK_SLOWDOWNS_OF_FLUSH = (1.0, 2.0), (1.0, 2.0, 4.0, 8.0)
# Plans for each slowdown, those with the smallest lower bounds: more on few workers, where a simulation takes
# milliseconds.
_MIN_PLANS_PER_SEARCH, _PLANS_TIMES_WORKERS = 8, 120
# (4) How borders are moved
_MAX_WORKERS_BY_CONFIGURATION = 6  # with more, a simulation takes longer and finds little
_PLANS_PER_CONFIGURATION = 4  # to begin with
_MAX_SLOWDOWN_OF_CONFIGURATION = 2.0  # times the fastest plan so far: moved borders do not make up for more
_STEPS_WITHOUT_GAIN = 6  # until the next configuration has its turn
# Limits of effort (`simulation_effort`) in all simulations of a step
_MAX_EFFORT_LISTED = 180_000  # (3) of the plans of one schedule and slowdown
_MAX_EFFORT_MOVED, _MAX_EFFORT_OF_CONFIGURATIONS = 120_000, 240_000  # (4) on many workers, and on few


@dataclass(frozen=True)
class Selected:
    """The chosen plan.

    Attributes:
        simulated_s: its simulated seconds per minibatch; None: not simulated, because it is too large, PipeDream's
            formulas were asked for, or no plan of the shortlist can be simulated.
        limit_s: seconds per minibatch that were allowed: simulated, or by the formulas if it was not simulated.
        fastest: the fastest simulated plan, with its seconds per minibatch. If it was not chosen, it has more stages,
            or borders inside modules.
        simulated_plans: number of simulated plans, each with one or more numbers of minibatches in flight.
    """

    candidate: Candidate
    simulated_s: float | None
    limit_s: float
    fastest: SimulatedCandidate | None = None
    simulated_plans: int = 0


def select(search: PlanSearch, optima: Sequence[Candidate], baselines: Sequence[Candidate]) -> Selected:
    """Choose a plan.

    Args:
        optima: PlanSearch.fastest_plans; the first is the optimum by the formulas.
        baselines: the choice may be slower than these by the margin at most. Those that do not fit, or lack the stages
            or replicas that were asked for, are left out.
    """
    options, optimum_s = search.options, optima[0].time_per_minibatch_s
    goal_s = optimum_s * (1 + options.simplest)  # nothing is faster by more than the margin
    simplest_plan = optima[0] if options.straight else search.simplest_plan(goal_s) or optima[0]
    by_formulas = Selected(simplest_plan, None, goal_s)
    if options.cost_model != "ours" or is_too_large(simplest_plan.placement, PATIENT):
        return by_formulas
    has_no_alternatives = options.straight or not options.simplest  # the optimum by the formulas was asked for
    shortlist = [simplest_plan] if has_no_alternatives else [simplest_plan, *optima, *baselines]
    selection = _Selection(search, shortlist)  # (1)
    if not options.simplest:
        selection.simulate()
        return selection.selected() or by_formulas
    if is_too_large(simplest_plan.placement):
        selection.simulate_plan(simplest_plan, enough_s=simplest_plan.time_per_minibatch_s, patience=PATIENT)
    if selection.lowest_bound_s > goal_s:
        selection.add_plans_by_stage_count(selection.lowest_bound_s, with_slower_links=False)
    selection.simulate()  # (2) and (3)
    flushes = {execution.kind.flushes for execution in options.executions}
    excess = _excess_of_formulas(search)
    error = _SIMULATION_ERROR if search.workers <= MAX_WORKERS_WITH_CONFIGURATIONS else 1.0  # time for more simulations
    # the formulas only guess for how long a flush drains the pipeline
    if True in flushes or selection.fastest_s > goal_s / (error * excess):
        selection.add_plans_by_stage_count(selection.fastest_s * excess)  # (1) again
        selection.simulate()
        if False in flushes and search.workers <= MAX_WORKERS_WITH_CONFIGURATIONS:
            selection.move_borders()  # (4)
    return selection.selected() or by_formulas  # (5) and (6)


def _excess_of_formulas(search: PlanSearch) -> float:
    """Return roughly by how much the formulas overestimate a simulated time: by them, a tensor that skips a stage
    passes through it."""
    has_skips = any(len(node.inputs) > 1 for node in search.profile.nodes)
    return _EXCESS_OF_SKIPS if has_skips and search.workers <= MAX_WORKERS_WITH_CONFIGURATIONS else 1.0


@dataclass(frozen=True)
class SimulatedCandidate:
    """A plan with its minibatches in flight and its simulated seconds per minibatch."""

    candidate: Candidate
    time_s: float

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.candidate.placement.stages)

    @property
    def size(self) -> tuple[int, int]:
        """Number of stages, and of workers."""
        return self.stages, self.candidate.placement.used_workers

    @property
    def first_in_flight(self) -> int:
        """Minibatches in flight at all replicas of the first stage of a copy."""
        placement = self.candidate.placement
        return placement.in_flight[0] * placement.replicas_per_copy[0]


@dataclass(frozen=True)
class _BoundedCandidate:
    """A plan and seconds per minibatch that no simulation of it beats."""

    candidate: Candidate
    bound_s: float

    @property
    def order(self) -> tuple[float, int]:
        """By bound; ties: the fewest stages first."""
        return self.bound_s, len(self.candidate.placement.stages)


class _Selection:
    """The shortlist, and which of its plans were simulated.

    Attributes:
        fastest_s: seconds per minibatch of the fastest simulated plan.
        simulated_plans: number of simulated plans, including those too slow to keep.
    """

    def __init__(self, search: PlanSearch, candidates: Iterable[Candidate]) -> None:
        self.search, self.margin = search, search.options.simplest
        self.fastest_s, self.simulated_plans, self._simulation_effort = math.inf, 0, 0
        self._most = max(_MIN_PLANS_PER_SEARCH, _PLANS_TIMES_WORKERS // search.workers)
        self._plans: list[SimulatedCandidate] = []
        self._passed_over: list[_BoundedCandidate] = []
        self._seen: set[Placement] = set()
        self._shortlist = self._with_lower_bounds(candidates)

    @property
    def lowest_bound_s(self) -> float:
        """Seconds per minibatch that no plan of the shortlist beats."""
        return min((plan.bound_s for plan in self._shortlist), default=math.inf)

    def add_plans_by_stage_count(self, bound_s: float, *, with_slower_links: bool = True) -> None:
        """Add the best plans of each schedule, layout and number of stages, and of each configuration of whole servers,
        that may take less than `bound_s`.

        Args:
            with_slower_links: search also as if links were slower.
        """
        for execution in self.search.options.executions:
            slowdowns = _LINK_SLOWDOWNS_OF_FLUSH if execution.kind.flushes else _LINK_SLOWDOWNS
            for slower in slowdowns if with_slower_links else slowdowns[:1]:
                plans = self.search.plans_by_stage_count(execution, bound_s * slower, slower)
                self._shortlist += self._first(plans, more_if_short=execution.kind.flushes)
            plans = self.search.plans_on_whole_servers(execution, bound_s)
            self._shortlist += self._first(plans, more_if_short=True)

    def _first(self, candidates: Iterable[Candidate], *, more_if_short: bool) -> list[_BoundedCandidate]:
        """Return the plans with the smallest lower bounds.

        Args:
            more_if_short: return more if simulations are short, because the formulas only guess the times.
        """
        plans = _in_order(self._with_lower_bounds(candidates))
        efforts = accumulate(simulation_effort(plan.candidate.placement) for plan in plans if more_if_short)
        return plans[: max(self._most, sum(effort <= _MAX_EFFORT_LISTED for effort in efforts))]

    def simulate(self) -> None:
        """Simulate the plans of the shortlist that may be chosen, in order of their lower bounds."""
        for plan in _in_order(self._shortlist):
            if self._may_win(plan):
                self.simulate_plan(plan.candidate, enough_s=plan.bound_s, limit_s=self.fastest_s * (1 + self.margin))
            else:
                self._passed_over.append(plan)
        self._shortlist = []

    def move_borders(self) -> None:
        """Move borders of plans without a flush, in one configuration after the other: first in those whose plans are
        fast. `move_to_faster_cuts` does it for a plan that flushes.

        Several borders may have to move before such a plan is the fastest, so plans are compared only with those of
        their own configuration. By the formulas, which count each stage's traffic alone, many are too fast.
        """
        is_small = self.search.workers <= _MAX_WORKERS_BY_CONFIGURATION
        limit = self._simulation_effort + (_MAX_EFFORT_OF_CONFIGURATIONS if is_small else _MAX_EFFORT_MOVED)
        simulated = [plan.candidate for plan in sorted(self._plans, key=lambda plan: plan.time_s)]
        plans = [*simulated, *(plan.candidate for plan in _in_order(self._passed_over))]
        plans = [plan for plan in plans if plan.time_per_minibatch_s < self.fastest_s or plan is plans[0]]
        plans += [plan for plan in simulated if plan not in plans]
        of_each_configuration = defaultdict(list)
        for plan in plans:
            if len(plan.placement.stages) > 1 and not plan.placement.execution.kind.flushes:
                of_each_configuration[plan.placement.workers].append(plan)
        searches = []
        for alike in of_each_configuration.values():
            if self._simulation_effort < limit:
                search = self._local_search(alike[0])
                if search.add(search.best):
                    searches.append((search, alike))
        for search, alike in sorted(searches, key=lambda each: each[0].fastest_s):
            left = limit - self._simulation_effort
            search.max_simulations = search.simulations + max(0, -(-left // simulation_effort(alike[0].placement)))
            for plan in alike[1:_PLANS_PER_CONFIGURATION]:
                search.add(self._placed(plan))
            if search.fastest_s < self.fastest_s * _MAX_SLOWDOWN_OF_CONFIGURATION:
                search.climb(partial(with_moved_borders, self.search), steps_without_gain=_STEPS_WITHOUT_GAIN)

    def _local_search(self, start: Candidate) -> LocalSearch[Candidate]:
        """Return a search among plans of one configuration."""
        bound_s = partial(lower_bound_s, self.search.evaluator)

        def simulate(plan: Candidate, to_beat_s: float) -> float:
            return self.simulate_plan(plan, enough_s=bound_s(plan), limit_s=to_beat_s * (1 + self.margin))

        return LocalSearch(self._placed(start), simulate, 1, bound_s=bound_s)

    def _placed(self, plan: Candidate) -> Candidate:
        """Return a plan with the schedule's own minibatches in flight."""
        placement = plan.placement
        return self.search.evaluator.place(placement.stages, placement.workers, placement.execution)

    def selected(self) -> Selected | None:
        """Return the plan with the fewest stages within the margin of the fastest one."""
        near = self._near
        if not near:
            return None
        chosen = min(near, key=lambda plan: (plan.stages, plan.time_s))
        if is_too_large(chosen.candidate.placement):  # `check` and `reschedule` have only the formulas
            limit_s = chosen.candidate.time_per_minibatch_s * (1 + self.margin)
            return Selected(chosen.candidate, None, limit_s, simulated_plans=self.simulated_plans)
        fastest = min(near, key=lambda plan: plan.time_s)
        limit_s = self.fastest_s * (1 + self.margin)
        if not self.search.options.straight:
            starts = [chosen, fastest] if fastest.first_in_flight > chosen.first_in_flight else [chosen]
            simplified = [self._simplified(start, limit_s) for start in starts]  # (6)
            chosen = min(simplified, key=lambda plan: (plan.stages, plan.time_s))
        return Selected(chosen.candidate, chosen.time_s, limit_s, fastest, self.simulated_plans)

    def _simplified(self, plan: SimulatedCandidate, limit_s: float) -> SimulatedCandidate:
        """Return the last of the plans that are each simpler than the one before it, beginning with `plan`."""
        while (simpler := self._simpler(plan, limit_s)) is not None:
            plan = simpler
        return plan

    def _simpler(self, chosen: SimulatedCandidate, limit_s: float) -> SimulatedCandidate | None:
        """Return a plan with fewer stages, or as many and fewer workers, that is fast enough with at most as many
        minibatches in flight as the chosen one has; None if there is none.

        A stage that computes next to nothing lets more minibatches be in flight before it, and these may hide messages.
        """
        evaluator = self.search.evaluator
        for candidate in self._without_small_stage(chosen.candidate, limit_s * self.margin):
            self.simulate_plan(candidate, limit_s=limit_s)
        slowest_s = limit_s * (1 + IN_FLIGHT_MARGIN)
        simpler = [plan for plan in self._plans if plan.size < chosen.size and plan.time_s <= slowest_s]
        for _, plans in groupby(sorted(simpler, key=lambda plan: plan.size), key=lambda plan: plan.size):
            found = []
            for plan in plans:
                if plan.stages < chosen.stages and plan.time_s <= limit_s:
                    found.append(plan)
                elif deeper := with_fewest_below(evaluator, plan.candidate, limit_s, chosen.first_in_flight):
                    found.append(SimulatedCandidate(*deeper))
            if found:
                return min(found, key=lambda plan: plan.time_s)
        return None

    def _without_small_stage(self, plan: Candidate, small_s: float) -> Iterable[Candidate]:
        """Return the plan with each stage that computes for less than `small_s` joined to the stage before or after it,
        whose workers it gets."""
        placement, search = plan.placement, self.search
        if placement.execution.chunks > 1 or search.whole_space.has_counted_pins:
            return
        loads = stage_loads(search.profile, placement.stages)
        for s, load in enumerate(loads):
            if load.forward_s + load.backward_s <= small_s:
                for first in range(max(0, s - 1), min(s + 1, len(loads) - 1)):
                    stages, workers = list(placement.stages), list(placement.workers)
                    stages[first : first + 2] = [(*stages[first], *stages[first + 1])]
                    del workers[s]
                    candidate = search.evaluator.place(stages, workers, placement.execution)
                    if search.evaluator.fits(candidate) and search.allows(candidate.placement):
                        yield candidate

    @property
    def _near(self) -> list[SimulatedCandidate]:
        """The plans within the margin of the fastest."""
        return [plan for plan in self._plans if plan.time_s <= self.fastest_s * (1 + self.margin)]

    def _with_lower_bounds(self, candidates: Iterable[Candidate]) -> list[_BoundedCandidate]:
        """Return the plans that fit, each once, with their lower bounds."""
        evaluator, shortlist = self.search.evaluator, []
        for candidate in candidates:
            placement = candidate.placement
            alike = _renumbered(placement, self.search.cluster)
            if alike not in self._seen and evaluator.fits(candidate) and self.search.allows(placement):
                shortlist.append(_BoundedCandidate(candidate, lower_bound_s(evaluator, candidate)))
            self._seen.add(alike)
        return shortlist

    def _may_win(self, plan: _BoundedCandidate) -> bool:
        """Whether it may be the fastest, or be within the margin and have fewer stages than all others there."""
        fewest_stages = min((near.stages for near in self._near), default=math.inf)
        has_fewer_stages = len(plan.candidate.placement.stages) < fewest_stages
        return plan.bound_s < self.fastest_s * ((1 + self.margin) if has_fewer_stages else 1.0)

    def simulate_plan(self, candidate: Candidate, **limits: float) -> float:
        """Simulate a plan, keep it if it may be chosen, and return its seconds per minibatch."""
        self.simulated_plans += 1
        self._simulation_effort += simulation_effort(candidate.placement)
        chosen, time_s = with_fewest_in_flight(self.search.evaluator, candidate, self.margin, **limits)
        self.fastest_s = min(self.fastest_s, time_s)
        if time_s < math.inf:
            self._plans.append(SimulatedCandidate(chosen, time_s))
        else:
            self._passed_over.append(_BoundedCandidate(candidate, lower_bound_s(self.search.evaluator, candidate)))
        return time_s


def _in_order(plans: Iterable[_BoundedCandidate]) -> list[_BoundedCandidate]:
    return sorted(plans, key=lambda plan: plan.order)


def _renumbered(placement: Placement, cluster: Cluster) -> Placement:
    """Return the placement with each level's members numbered in order of use, so that equivalent placements are
    equal."""
    numbers: list[dict[int, int]] = [{} for _ in cluster.below]
    workers = tuple(
        tuple(
            sum(
                seen.setdefault(w // below, len(seen)) * below
                for seen, below in zip(numbers, cluster.below, strict=True)
            )
            for w in stage
        )
        for stage in placement.workers
    )
    return replace(placement, workers=workers, execution=replace(placement.execution, copies=1))
