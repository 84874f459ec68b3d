"""From a profile and a cluster to a plan: the search, the choice by simulation, the figures and the certificate."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan, Why
from pdtool.artifacts.profile import Profile
from pdtool.errors import UsageError
from pdtool.partition.baselines import baselines, rivals
from pdtool.partition.cost.plan_cost import Candidate, Evaluator
from pdtool.partition.infeasible import explain_infeasible
from pdtool.partition.module_borders import move_to_module_borders
from pdtool.partition.placement import ExecutionConfig, Placement
from pdtool.partition.predictions import predict, with_formulas
from pdtool.partition.search.search import PlanSearch, SearchOptions
from pdtool.partition.selection import select
from pdtool.partition.simulated_schedules import SEARCHED_FOR, interleaved_placement
from pdtool.partition.simulator.steady_state import steady_state_s
from pdtool.partition.strategies.strategy_search import fastest_of_strategy, limits_of_strategy, with_least_memory
from pdtool.schedule import POLICIES, RIVALS, SEARCHED_SCHEDULES, STRATEGIES, default_shape
from pdtool.units import format_seconds

_LOG = logging.getLogger(__name__)


def make_plan(profile: Profile, profile_path: str, cluster: Cluster, options: SearchOptions | None = None) -> Plan:
    """Return the best plan for `profile` on `cluster`, with its figures, its certificate and its rivals.

    Raises:
        UsageError: the options make no sense together or on this cluster.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    options = options or SearchOptions()
    if options.schedule == "interleaved":
        placement = interleaved_placement(profile, cluster, options)
        plan = placement.to_plan(profile, profile_path, cluster)
        plan.check()
        return predict(plan, Evaluator(profile, cluster), placement)
    if options.schedule in SEARCHED_FOR:
        straight = options.straight or options.schedule == "zb-h1"
        searched = replace(options, schedule=SEARCHED_FOR[options.schedule], straight=straight)
        changes = {"schedule": options.schedule, "weights": POLICIES[options.schedule][0], "strategy": options.strategy}
        return reschedule(make_plan(profile, profile_path, cluster, searched), profile, changes)
    search = PlanSearch(profile, cluster, options)
    optima = fastest_of_strategy(search)
    if not optima:
        raise explain_infeasible(search)
    for candidate in optima:
        seconds = format_seconds(candidate.time_per_minibatch_s)
        _LOG.debug("searched: %s takes %s by the formulas", candidate.placement.config, seconds)
    if not STRATEGIES[options.strategy].is_selected:
        return _best_of_strategy(search, profile_path, optima)
    execution = replace(optima[0].placement.execution, copies=1)
    named = list(baselines(search, execution))
    alike = [plan for _, plan in named if plan.placement.execution == execution]
    selected = select(search, optima, alike)
    if options.simplest and not options.straight and options.cost_model == "ours":
        selected = move_to_module_borders(search, selected)
    return _finished(search, profile_path, selected.candidate, selected.simulated_s, optima, named)


def _best_of_strategy(search: PlanSearch, profile_path: str, optima: list[Candidate]) -> Plan:
    """The best plan of a strategy that others are compared with: the optimum by the formulas, or what is simulated
    faster among the `optima`, unless no margin is allowed."""
    options = search.options
    candidates = optima if options.simplest else optima[:1]
    if options.strategy == "model-parallel":
        candidates = [with_least_memory(search, optima[0])]
    chosen, simulated_s = _simulated_fastest(search, candidates)
    is_for_speed = options.strategy in RIVALS
    named = list(baselines(search, ExecutionConfig())) if is_for_speed else []
    return _finished(search, profile_path, chosen, simulated_s, optima, named)


def _simulated_fastest(search: PlanSearch, candidates: Sequence[Candidate]) -> tuple[Candidate, float | None]:
    """(the candidate that is simulated fastest, its seconds per minibatch); the first one and None where none can be
    simulated, or PipeDream's formulas are asked for."""
    chosen, chosen_s = candidates[0], None
    for candidate in candidates if search.options.cost_model == "ours" else ():
        time_s = steady_state_s(candidate.placement, search.profile, search.cluster)
        if time_s is not None and (chosen_s is None or time_s < chosen_s):
            chosen, chosen_s = candidate, time_s
    return chosen, chosen_s


def _finished(
    search: PlanSearch,
    profile_path: str,
    chosen: Candidate,
    simulated_s: float | None,
    optima: list[Candidate],
    named: Sequence[tuple[str, Candidate]],
) -> Plan:
    """The chosen plan as an artifact, with its figures and its certificate."""
    bound_s, proof = _lower_bound(search, optima[0]) if STRATEGIES[search.options.strategy].is_searched else (None, "")
    plan = chosen.placement.to_plan(search.profile, profile_path, search.cluster)
    why = Why(
        bottleneck=chosen.cost.bottleneck,
        lower_bound_s=bound_s,
        gap=_gap(chosen, bound_s),
        proof=proof,
        rivals=tuple(rivals(search, chosen, named, optima)),
    )
    figures = with_formulas(plan, search.evaluator, chosen.cost, chosen.placement.execution, simulated_s)
    return plan.model_copy(update={"why": why, "predicted": figures})


def _gap(chosen: Candidate, bound_s: float | None) -> float | None:
    """By which fraction the plan is slower than the bound."""
    if bound_s is None:
        return None
    return max(0.0, chosen.time_per_minibatch_s / bound_s - 1) if bound_s else 0.0


def _lower_bound(search: PlanSearch, optimum: Candidate) -> tuple[float, str]:
    """(seconds per minibatch that no plan can beat, why that is so)."""
    options, workers = search.options, search.workers
    on = "1 worker" if workers == 1 else f"{workers} workers"
    if limits := "; ".join(filter(None, [search.limits, limits_of_strategy(search)])):
        work_s = sum(node.forward_s + node.backward_s for node in search.profile.nodes)
        return work_s / workers, f"{limits}; even so no plan{options.with_replicas} beats {on} without a pause"
    kind = "plan" if options.strategy == "auto" else f"plan of strategy {options.strategy}"
    if options.straight and STRATEGIES[options.strategy].is_selected:
        kind = "straight pipeline"
    if options.max_stages:
        kind += f" of at most {options.max_stages} stages"
    proof = (
        f"every {kind}{options.with_replicas} on {on} was searched, over {search.whole_space.cut_count} cuts, with "
        "the minibatches in flight that its schedule wants"
    )
    unlimited = search.without_memory_limit
    if unlimited is search:
        return optimum.time_per_minibatch_s, proof
    return fastest_of_strategy(unlimited)[0].time_per_minibatch_s, f"{proof}, and without the limit of memory"


def refresh(plan: Plan, profile: Profile) -> Plan:
    """Return the same plan with figures for what it says now, after an edit by hand.

    Raises:
        ArtifactError: its stages do not fit the profile.
    """
    return predict(plan, _evaluator(plan, profile), Placement.of(plan, profile))


def reschedule(plan: Plan, profile: Profile, changes: Mapping[str, Any]) -> Plan:
    """Return the same stages run in another way, with the minibatches in flight that it wants.

    Args:
        changes: of schedule, weights, microbatches, update_every and strategy.

    Raises:
        UsageError: the schedule cannot have these replicas, or the plan's strategy has one schedule only.
    """
    if not STRATEGIES[plan.strategy].is_pipelined or plan.strategy == "async-data-parallel":
        raise UsageError(
            f"a plan of strategy {plan.strategy} is run as it is", "for another schedule or weights, partition again"
        )
    changed = plan.model_copy(update={"strategy": "auto", **changes})
    placement = Placement.of(changed, profile)
    execution, evaluator = placement.execution, _evaluator(changed, profile)
    if execution.schedule in SEARCHED_SCHEDULES:
        searched = ExecutionConfig.of_schedule(execution.schedule, execution.microbatches)
        searched = replace(searched, copies=execution.copies)
        default = evaluator.place(placement.stages, placement.workers, searched).placement
        placement = replace(placement, in_flight=default.in_flight, recompute=default.recompute)
    else:
        replicas = placement.replicas[: placement.pipeline_depth]
        shape = default_shape(execution.schedule, replicas, execution.microbatches, execution.chunks)
        placement = placement.with_in_flight(shape.in_flight * execution.chunks)
    stages = tuple(
        stage.model_copy(update={"in_flight": in_flight, "recompute": recompute})
        for stage, in_flight, recompute in zip(plan.stages, placement.in_flight, placement.recompute, strict=True)
    )
    changed = changed.model_copy(update={"stages": stages})
    changed.check_schedule()
    return predict(changed, evaluator, placement)


def _evaluator(plan: Plan, profile: Profile) -> Evaluator:
    """Whose formulas the figures of a plan are by."""
    return Evaluator(profile, plan.cluster.cluster(), plan.predicted.cost if plan.predicted else "ours")
