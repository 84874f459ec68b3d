"""Move the borders of the chosen plan: to faster cuts if it flushes, then to where modules begin and end."""

from __future__ import annotations

import math
from dataclasses import replace

from pdtool.planner.choice.borders import Borders, with_moved_borders
from pdtool.planner.choice.in_flight import with_fewest_in_flight
from pdtool.planner.choice.local_search import LocalSearch
from pdtool.planner.choice.selection import Selected, SimulatedCandidate
from pdtool.planner.plan_cost import Candidate
from pdtool.planner.search.search import PlanSearch
from pdtool.planner.simulator.engine import steady_state_s
from pdtool.planner.simulator.job import simulation_effort

_MAX_TRIED_CUTS = 40  # for a plan that flushes
_MAX_SMALL = 2_000  # actions times workers, of a plan whose numbers in flight are searched for each of these


def move_to_faster_cuts(search: PlanSearch, selected: Selected) -> Selected:
    """Improve a flushing plan: move its borders to nearby cuts as long as simulations get faster, then choose the
    minibatches in flight that make it fastest.

    The time to fill and drain depends on which stage is the slowest. The formulas ignore that.
    """
    start, placement, simulated_s = selected.candidate, selected.candidate.placement, selected.simulated_s
    if simulated_s is None or not placement.execution.kind.flushes:
        return selected
    chosen, margin = {start: start}, search.options.simplest  # each moved plan with its minibatches in flight
    is_small = simulation_effort(placement) <= _MAX_SMALL

    def simulate(moved: Candidate, limit_s: float) -> float:
        if not is_small:  # with its present numbers in flight
            time_s = steady_state_s(moved.placement, search.profile, search.cluster, limit_s)
            if time_s is None or time_s >= limit_s:
                return math.inf
        chosen[moved], time_s = with_fewest_in_flight(search.evaluator, moved, margin, limit_s=limit_s)
        return time_s

    tried = LocalSearch(start, simulate, _MAX_TRIED_CUTS, times_s={start: simulated_s})
    tried.climb(lambda plan: with_moved_borders(search, chosen[plan]))
    selected = replace(selected, simulated_plans=selected.simulated_plans + tried.simulations)
    if tried.best is start:
        return selected
    moved = SimulatedCandidate(chosen[tried.best], tried.fastest_s)
    fastest = min([moved, *([selected.fastest] if selected.fastest else [])], key=lambda plan: plan.time_s)
    allowed_s = fastest.time_s * (1 + margin)
    return Selected(moved.candidate, moved.time_s, allowed_s, fastest, selected.simulated_plans)


def move_to_module_borders(search: PlanSearch, selected: Selected) -> Selected:
    """Return the plan with borders that divide the fewest modules while it stays within `limit_s`.

    The fastest border may lie inside an attention, and a slightly slower one between two layers. With the second one,
    the model's author can read and edit stages as parts of the model. A border moves to the nearest place where it
    divides the fewest modules.

    All borders that the formulas let move are moved at once and simulated. If that is too slow, one after the other.
    """
    borders, moved = Borders(search, selected.candidate), selected.candidate
    for border in borders.inner:
        moved = next(borders.dividing_fewer_modules(moved, border, selected.limit_s), moved)
    if moved is selected.candidate:
        return selected
    if (simulated := _simulated(search, selected, moved)) is not None:
        return simulated
    for border in borders.inner:
        nearest = next(borders.dividing_fewer_modules(selected.candidate, border, selected.limit_s), None)
        selected = (nearest and _simulated(search, selected, nearest)) or selected
    return selected


def _simulated(search: PlanSearch, selected: Selected, moved: Candidate) -> Selected | None:
    """Return the moved plan with its simulated time, if the selected one has one; None if that is above the limit."""
    if selected.simulated_s is None:
        return replace(selected, candidate=moved)
    placement, evaluator, limit_s = moved.placement, search.evaluator, selected.limit_s
    if placement.execution.kind.flushes:
        time_s = steady_state_s(placement, search.profile, search.cluster, limit_s)
    else:  # the numbers in flight are those that the plan needs now
        usual = evaluator.place(placement.stages, placement.workers, placement.execution)
        moved, time_s = with_fewest_in_flight(evaluator, usual, search.options.simplest, limit_s=limit_s)
    if time_s is None or not time_s <= limit_s or not moved.placement.is_executable:
        return None
    return replace(selected, candidate=moved, simulated_s=time_s)
