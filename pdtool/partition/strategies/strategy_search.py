"""The best plans of a strategy by the cost formulas, among which the simulation then chooses (`planner`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pdtool.errors import NoPlanError
from pdtool.partition.cost.formulas import TOLERANCE
from pdtool.partition.cost.plan_cost import Candidate
from pdtool.partition.search.search import PlanSearch
from pdtool.schedule import STRATEGIES
from pdtool.units import format_bytes

# The best GPipe of another number of stages is looked at when its formulas say at most this factor of the best one's
# time: they hide messages, which all stages of a pipeline that fills and drains wait for.
_MAX_SLOWDOWN = 2.0
_BISECTIONS = 12  # of the memory of a worker
_MAX_WORKERS_WITH_ALL_MINIBATCHES = 8  # hybrid parallelism is searched with any number of minibatches up to here


def fastest_of_strategy(search: PlanSearch) -> list[Candidate]:
    """Return plans of the strategy that was asked for, the fastest by the formulas first; none where none fits.

    Of GPipe the best of each number of stages, of hybrid parallelism of each number of minibatches in an update, as far
    as they may be the fastest.

    Raises:
        NoPlanError: the model cannot be cut into as many stages as the strategy has; or asynchronous data parallelism
            does not fit.
    """
    options, max_stages = search.options, search.whole_space.cuts.max_stages
    if max_stages < options.min_stages:
        asked, remedy = f"--strategy {options.strategy}", "use --strategy data-parallel"
        if options.replicas:
            asked, remedy = f"--replicas {options.replicas_text}", "give fewer stages"
        raise NoPlanError(
            f"{asked} needs {options.min_stages} stages, but the model can be cut into {max_stages} at most", remedy
        )
    match options.strategy:
        case "data-parallel":
            plan = search.data_parallel(options.executions[0])
            return [plan] if search.evaluator.fits(plan) else []
        case "async-data-parallel":
            return [_asynchronous(search)]
        case "hybrid":
            return sorted(_of_each_update(search), key=_time_s)
        case "gpipe":
            return sorted(_of_each_depth(search), key=_time_s)
    return search.fastest_plans()


def limits_of_strategy(search: PlanSearch) -> str:
    """Return what was left out of the search for the strategy's sake, in words; empty when nothing was."""
    if search.options.strategy != "hybrid" or _searches_all_updates(search):
        return ""
    return "not every number of minibatches in an update was searched"


def _time_s(plan: Candidate) -> float:
    return plan.time_per_minibatch_s


def _of_each_depth(search: PlanSearch) -> Iterator[Candidate]:
    """Yield the best pipeline without replicas of each number of stages, as far as it is not much slower than the
    best."""
    for optimum in search.fastest_plans()[:1]:
        bound_s = optimum.time_per_minibatch_s * _MAX_SLOWDOWN
        for layout in search.layouts:
            found = search.search_layout(layout, optimum.placement.execution, bound_s)
            if found.is_promising and found.fastest.time_per_minibatch_s <= found.bound_s:
                yield found.candidate(found.fastest)


def with_least_memory(search: PlanSearch, fastest: Candidate) -> Candidate:
    """Return the split of model parallelism that is at most the margin slower than the fastest and whose fullest worker
    holds the least, to within a few thousandths.

    Stages that take turns are as fast together wherever the cuts are, but for the messages: cuts that cost as little
    can leave all of the model on one worker, and to share its memory is what model parallelism is for.
    """
    if any(fastest.placement.recompute):
        return fastest  # it only just fits
    limit_s = fastest.time_per_minibatch_s * (1 + search.options.simplest) * TOLERANCE
    least, too_little = fastest, 0
    for _ in range(_BISECTIONS):
        memory_bytes = (too_little + max(least.cost.memory_bytes)) // 2
        cluster = replace(search.cluster, memory_bytes=max(1, memory_bytes))
        tighter = replace(search, cluster=cluster, options=replace(search.options, recompute=False))
        found = tighter.search_layout(tighter.layouts[0], fastest.placement.execution, limit_s)
        if found.fastest.time_per_minibatch_s <= limit_s:
            least = found.candidate(found.fastest)
        else:
            too_little = memory_bytes
    return least


def _of_each_update(search: PlanSearch) -> Iterator[Candidate]:
    """Yield the best hybrid plan of each number of minibatches that an update may average, the replicas of the first
    stage, as far as it is within the margin of the best so far.

    On many workers not every number is searched, but those that divide them, and those that leave a divisor of them to
    the other stages.
    """
    workers, best_s = search.workers, math.inf
    for microbatches in reversed(range(2, workers)):
        is_usual = workers % microbatches == 0 or workers % (workers - microbatches) == 0
        if is_usual or _searches_all_updates(search):
            options = replace(search.options, microbatches=microbatches)
            for plan in replace(search, options=options, bound_s=best_s).fastest_plans()[:1]:
                best_s = min(best_s, plan.time_per_minibatch_s)
                yield plan


def _searches_all_updates(search: PlanSearch) -> bool:
    return search.workers <= _MAX_WORKERS_WITH_ALL_MINIBATCHES


def _asynchronous(search: PlanSearch) -> Candidate:
    """One worker with as many minibatches in flight as there would be workers: their gradients come one update later
    for each further one, which is the delay of workers that update in turns."""
    evaluator, names = search.evaluator, search.profile.graph.names
    plan = evaluator.place([names], [[0]], search.options.executions[0], in_flight=[search.workers])
    if not evaluator.fits(plan):
        needed = format_bytes(max(plan.cost.memory_bytes))
        raise NoPlanError(
            f"{STRATEGIES['async-data-parallel'].label} of {search.workers} workers does not fit: one worker computes "
            f"for all of them and needs {needed}, it has {format_bytes(search.cluster.memory_bytes or 0)}",
            "give fewer --workers, or smaller minibatches",
        )
    return plan
