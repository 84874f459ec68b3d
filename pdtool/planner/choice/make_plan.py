"""From a profile and a cluster to a plan: the search, the choice by simulation, the figures and the certificate.

Only schedules that the cost formulas cover are searched; `without_formulas` has the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import ONE_WORKER, Certificate, FasterPlan, Plan, PlanOptions, Rival, Why
from pdtool.artifacts.profile import Profile
from pdtool.planner.choice.plan_figures import predicted_figures
from pdtool.planner.choice.selection import Selected
from pdtool.planner.choice.strategies import PLANNERS, choose_plan
from pdtool.planner.choice.without_formulas import plan_without_formulas
from pdtool.planner.plan_cost import Candidate
from pdtool.planner.search.layouts import MAX_WORKERS_PER_COPY
from pdtool.planner.search.search import PlanSearch
from pdtool.schedule import SCHEDULES
from pdtool.units import format_number, format_throughput

_MIN_GAIN = 0.0005  # of the time per minibatch: a smaller one rounds to 0.0%


def make_plan(profile: Profile, profile_path: str, cluster: Cluster, options: PlanOptions | None = None) -> Plan:
    """Return the best plan for `profile` on `cluster`, with its figures, its certificate and its rivals.

    Raises:
        UsageError: the options make no sense together or on this cluster.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    options = options or PlanOptions()
    if (kind := SCHEDULES.get(options.schedule)) and not kind.has_formulas:
        return plan_without_formulas(profile, profile_path, cluster, options)
    search, planner = PlanSearch(profile, cluster, options), PLANNERS[options.strategy]
    selected, candidates, named = choose_plan(search)
    chosen = selected.candidate
    plan = chosen.placement.to_plan(profile, profile_path, cluster)
    is_searched = planner.strategy.is_searched and not options.in_flight  # the search uses the usual numbers
    why = Why(
        bottleneck=chosen.cost.bottleneck,
        certificate=_certificate(search, candidates[0], selected) if is_searched else None,
        rivals=tuple(planner.rejected(search, selected, named, candidates)),
        faster=_passed_over(selected),
    )
    figures = predicted_figures(plan, search.evaluator, chosen.cost, chosen.time_per_minibatch_s, selected.simulated_s)
    return plan.model_copy(update={"asked": options, "why": why, "predicted": figures})


def with_fastest_size(plans: Sequence[Plan]) -> Plan:
    """Return the plan that computes the most samples per second. The plans for other batch sizes become its rivals,
    each with the samples per second of its data parallelism and of one worker.

    Args:
        plans: plans for profiles of different batch sizes, all with the same samples per update.
    """
    best, *others = sorted(plans, key=lambda plan: -plan.predicted.throughput_samples_per_s if plan.predicted else 0.0)
    best_why, rivals = best.why or Why(bottleneck=""), []
    for plan in others:
        figures, size = plan.predicted, plan.batch_size
        assert figures
        own = {"data parallelism": figures.data_parallel_s, ONE_WORKER: figures.one_worker_s}
        rates = [f"{name} {format_number(size / time_s)}" for name, time_s in own.items() if time_s]
        rivals.append(
            Rival(
                plan=f"{plan.config} with minibatches of {size}{', simulated' if figures.simulated_s else ''}",
                bottleneck_s=figures.time_s,
                samples_per_update=figures.samples_per_update,
                why=", ".join([format_throughput(figures.throughput_samples_per_s), *rates]),
            )
        )
    return best.model_copy(update={"why": best_why.model_copy(update={"rivals": (*best_why.rivals, *rivals)})})


def _passed_over(selected: Selected) -> FasterPlan | None:
    """Return the faster plan that lost to the chosen one because that has fewer stages or divides fewer modules."""
    if selected.fastest is None or selected.simulated_s is None:
        return None
    placement, time_s = selected.fastest.candidate.placement, selected.fastest.time_s
    if selected.simulated_s < time_s * (1 + _MIN_GAIN):
        return None
    later = [nodes[0] for nodes in placement.stages[1:]]
    return FasterPlan(config=placement.config, begins=tuple(later), simulated_s=time_s)


def gap_to_bound(time_s: float, bound_s: float) -> float:
    """Return by which fraction a time is above the bound."""
    return max(0.0, time_s / bound_s - 1) if bound_s else 0.0


def _certificate(search: PlanSearch, optimum: Candidate, selected: Selected) -> Certificate:
    """Return the optimum's time; if the search left out plans, the time of all workers computing without a pause."""
    options, workers, space = search.options, search.workers, search.whole_space
    planner = PLANNERS[options.strategy]
    is_one_copy, all_updates = workers <= MAX_WORKERS_PER_COPY, planner.searches_all_updates(search)
    is_complete = is_one_copy and all_updates and space.merged_operators is None
    unlimited = search.without_memory_limit if is_complete else search
    bound_s = optimum.time_per_minibatch_s
    if not is_complete:
        bound_s = sum(node.forward_s + node.backward_s for node in search.profile.nodes) / workers
    elif unlimited is not search:
        bound_s = planner.candidates(unlimited)[0].time_per_minibatch_s
    is_straight = options.straight and planner.strategy.is_own
    return Certificate(
        bound_s=bound_s,
        gap=gap_to_bound(selected.candidate.time_per_minibatch_s, bound_s),
        kind="straight" if is_straight else options.strategy,
        replicas=options.replicas,
        workers=workers,
        cuts=space.cut_count,
        max_workers_per_copy=None if is_one_copy else MAX_WORKERS_PER_COPY,
        merged_operators=space.merged_operators,
        all_updates=all_updates,
        without_memory_limit=unlimited is not search,
        simulated_plans=selected.simulated_plans or None,
    )
