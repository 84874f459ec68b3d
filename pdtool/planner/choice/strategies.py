"""Strategies: the search options of each, its best plans by the formulas, and the baselines of every plan.

`strategy_options` turns a strategy into options of the search. `fastest_of_strategy` returns its best plans, and
`make_plan` chooses among them by simulation. `baselines` are the plans that everyone asks about: data parallelism, the
straight pipeline, GPipe, model parallelism and one worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import MAX_IN_FLIGHT, Rival
from pdtool.errors import NoPlanError, UsageError
from pdtool.planner.formulas import TOLERANCE
from pdtool.planner.plan_cost import Candidate, samples_per_update
from pdtool.planner.search.layouts import MAX_WORKERS_PER_COPY, Layout
from pdtool.planner.search.search import PlanSearch, SearchOptions
from pdtool.schedule import SCHEDULES, STRATEGIES, ExecutionConfig, is_asynchronous
from pdtool.units import format_bytes, format_seconds

DATA_PARALLEL = STRATEGIES["data-parallel"].label
ONE_WORKER = "one worker"
Baseline = tuple[str, Candidate]  # with its label
_DEFAULT_MICROBATCHES = 4  # of a flushing schedule that was asked for by name
# The best GPipe of another number of stages is looked at when its formulas say at most this factor of the best one's
# time: they hide messages, which all stages of a pipeline that fills and drains wait for.
_MAX_SLOWDOWN = 2.0
_BISECTIONS = 12  # of the memory of a worker
_MAX_WORKERS_WITH_ALL_MINIBATCHES = 8  # hybrid parallelism is searched with any number of minibatches up to here
_OTHER_RIVALS = 2  # that a plan lists, besides the baselines


def strategy_options(
    name: str, cluster: Cluster, *, schedule: str | None = None, microbatches: int | None = None, **others: Any
) -> SearchOptions:
    """Return the search options for the best plan of a strategy.

    GPipe has as many microbatches as there are workers, so that an update takes the samples that one of data
    parallelism takes.

    Args:
        name: one of STRATEGIES.
        schedule, microbatches: None: what goes with the strategy.
        others: further fields of SearchOptions.

    Raises:
        UsageError: the strategy has no such schedule, microbatches or replicas, or needs more workers.
    """
    strategy = STRATEGIES[name]
    workers = others.get("workers") or cluster.workers
    if workers < strategy.min_workers:
        raise UsageError(
            f"--strategy {name} on {workers} worker(s)", f"give {strategy.min_workers} or more, or another strategy"
        )
    if strategy.schedule and schedule not in (None, strategy.schedule):
        raise UsageError(
            f"--strategy {name} with --schedule {schedule}", f"leave --schedule out: it has {strategy.schedule}"
        )
    if strategy.schedule not in (None, "gpipe") and microbatches not in (None, 1):
        raise UsageError(f"--strategy {name} with --microbatches {microbatches}", "leave --microbatches out")
    if strategy.schedule not in (None, "1f1b") and others.get("cost_model", "ours") != "ours":
        raise UsageError(f"--strategy {name} with --cost {others['cost_model']}", "leave --cost out")
    chosen = schedule or strategy.schedule or "1f1b"
    match name:
        case "gpipe":
            default = workers
        case "hybrid":
            default = workers - 1  # the most that its first stage can have; all below are searched, too
        case _:
            default = 1 if chosen == "auto" or is_asynchronous(chosen) else _DEFAULT_MICROBATCHES
    straight = others.pop("straight", False) or strategy.is_straight
    if not strategy.is_searched:
        others["max_stages"] = 1
    options = SearchOptions(
        strategy=name, schedule=chosen, microbatches=microbatches or default, straight=straight, **others
    )
    if options.replicas:
        _check_replicas(options, cluster)
    return options


def of_global_batch_size(
    samples: int,
    batch_size: int,
    strategy: str,
    *,
    schedule: str | None = None,
    microbatches: int | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the schedule and the microbatches with which an update averages so many samples.

    Args:
        samples: in one update.
        batch_size: of a minibatch, as profiled; a microbatch has the same.
        strategy, schedule, microbatches: what is asked for besides.

    Raises:
        UsageError: minibatches do not make up that number, or what is asked for does not flush.
    """
    asked = f"--global-batch-size {samples}"
    if microbatches:
        raise UsageError(f"{asked} together with --microbatches {microbatches}", "give one of them")
    if STRATEGIES[strategy].schedule not in (None, "gpipe"):
        raise UsageError(f"{asked} with --strategy {strategy}, whose updates have a size of their own", "leave it out")
    schedule = schedule or STRATEGIES[strategy].schedule or "1f1b-flush"
    if schedule == "auto" or is_asynchronous(schedule):
        flushing = ", ".join(name for name in SCHEDULES if not is_asynchronous(name))
        raise UsageError(f"{asked} with --schedule {schedule}, which does not flush", f"choose of {flushing}")
    count, rest = divmod(samples, batch_size)
    if rest or not count:
        near = " or ".join(str(batch_size * n) for n in (count, count + 1) if n)
        remedy = f"give {near}, or profile with a --batch-size that divides {samples}"
        raise UsageError(f"{asked} is no multiple of the minibatch of {batch_size} that was profiled", remedy)
    if count > MAX_IN_FLIGHT:
        raise UsageError(
            f"{asked} is {count} minibatches of {batch_size}", f"give at most {MAX_IN_FLIGHT * batch_size}"
        )
    return {"schedule": schedule, "microbatches": count}


def _check_replicas(options: SearchOptions, cluster: Cluster) -> None:
    """Raise UsageError where no plan with these replicas goes with the other options, or lies on the cluster."""
    asked, workers = f"--replicas {options.replicas_text:.80}", sum(options.replicas or ())
    strategy = STRATEGIES[options.strategy]
    if options.straight or not strategy.is_selected:
        raise UsageError(f"{asked} together with --strategy {options.strategy}", "give one of them")
    if options.workers is not None:
        raise UsageError(f"{asked} together with --workers {options.workers}", "leave --workers out")
    if options.schedule == "interleaved":
        allowed = ", ".join(name for name in SCHEDULES if name != options.schedule)
        raise UsageError(f"{asked} together with --schedule {options.schedule}", f"choose of {allowed}")
    if options.schedule == "zb-h1" and len(set(options.replicas or ())) > 1:
        raise UsageError(f"{asked} together with --schedule zb-h1", "give each stage as many, or take 1f1b-flush")
    if options.min_stages < strategy.min_stages:
        raise UsageError(f"{asked} is one stage", f"--strategy {options.strategy} has {strategy.min_stages} or more")
    if workers > cluster.workers:
        raise UsageError(
            f"{asked} is on {workers} workers: the cluster has {cluster.workers}",
            "give fewer replicas, or a larger --topology",
        )
    if workers > MAX_WORKERS_PER_COPY:
        raise UsageError(f"{asked} is on {workers} workers", f"give at most {MAX_WORKERS_PER_COPY}")


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
        memory_bytes = (too_little + max(least.cost.searched_memory_bytes)) // 2
        cluster = replace(search.cluster, memory_bytes=max(1, memory_bytes))
        tighter = replace(search, cluster=cluster, options=replace(search.options, recompute=False))
        found = tighter.search_layout(tighter.layouts[0], fastest.placement.execution, limit_s)
        if found.fastest.time_per_minibatch_s <= limit_s:
            least = found.candidate(found.fastest)
        else:
            too_little = memory_bytes
    return least


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
        needed = format_bytes(max(plan.cost.searched_memory_bytes))
        raise NoPlanError(
            f"{STRATEGIES['async-data-parallel'].label} of {search.workers} workers does not fit: one worker computes "
            f"for all of them and needs {needed}, it has {format_bytes(search.cluster.memory_bytes or 0)}",
            "give fewer --workers, or smaller minibatches",
        )
    return plan


def baselines(search: PlanSearch, execution: ExecutionConfig) -> Iterator[Baseline]:
    """Yield each baseline, on the workers that may be used; the straight ones on as many as there are stages. An update
    of GPipe takes as many minibatches as one of data parallelism.

    GPipe and model parallelism have the stages of the straight pipeline here, which takes no further search. The best
    plans of their kind come from `fastest_of_strategy`.
    """
    evaluator, execution = search.evaluator, replace(execution, copies=1)
    yield f"{DATA_PARALLEL} ({search.workers})", search.data_parallel(execution)
    pipeline = straight_pipeline(search, execution)
    if pipeline:
        stages, workers = pipeline.placement.stages, pipeline.placement.workers
        depth = len(stages)
        gpipe = ExecutionConfig.of_schedule("gpipe", search.workers, strategy="gpipe")
        in_turns = ExecutionConfig(strategy="model-parallel")
        yield f"straight pipeline ({depth} stages)", pipeline
        label = f"GPipe ({depth} stages, {gpipe.microbatches} microbatches)"
        yield label, evaluator.place(stages, workers, gpipe)
        yield f"model parallelism ({depth} stages)", evaluator.place(stages, workers, in_turns)
    yield ONE_WORKER, evaluator.data_parallel(1, execution)


def straight_pipeline(search: PlanSearch, execution: ExecutionConfig) -> Candidate | None:
    """Return the fastest pipeline of one worker a stage on as many workers as the model can be cut for; None: none
    fits."""
    max_stages = search.options.max_stages or search.workers
    depth = min(search.workers, search.whole_space.cuts.max_stages, max_stages, MAX_WORKERS_PER_COPY)
    layout_search = search.search_layout(Layout.whole(search.cluster, depth), execution, straight=True)
    fastest = layout_search.fastest
    is_possible = depth > 1 and fastest.time_per_minibatch_s < float("inf")
    return layout_search.candidate(fastest) if is_possible else None


def rivals(
    search: PlanSearch, chosen: Candidate, named: Sequence[Baseline], others: Sequence[Candidate]
) -> Iterator[Rival]:
    """Yield the baselines, then the two fastest of `others`, and why they lost; each once, never the chosen plan."""
    seen = {_identity(chosen)}
    remaining = _OTHER_RIVALS
    for label, rival in [*named, *((plan.placement.config, plan) for plan in others)]:
        is_named = label != rival.placement.config
        if _identity(rival) in seen or not (is_named or remaining):
            continue
        seen.add(_identity(rival))
        remaining -= not is_named
        schedule = rival.placement.execution.schedule
        suffix = f", {schedule}" if schedule != chosen.placement.execution.schedule and not is_named else ""
        why = _why_rejected(search, rival, chosen)
        yield Rival(
            plan=label + suffix,
            bottleneck_s=rival.time_per_minibatch_s,
            samples_per_update=samples_per_update(rival.placement, search.profile),
            why=why,
        )


def _identity(plan: Candidate) -> tuple[str, str, bool]:
    placement = plan.placement
    return placement.config, placement.execution.schedule, set(placement.in_flight) == {1}


def _complexity(plan: Candidate) -> tuple[int, int]:
    """Return the stages and the minibatches in flight."""
    return len(plan.placement.stages), sum(plan.placement.in_flight)


def _why_rejected(search: PlanSearch, rival: Candidate, chosen: Candidate) -> str:
    needed, limit = max(rival.cost.searched_memory_bytes), search.cluster.memory_bytes
    if limit is not None and needed > limit:
        stage = rival.cost.searched_memory_bytes.index(needed)
        return f"does not fit: stage {stage} needs {format_bytes(needed)}, a worker has {format_bytes(limit)}"
    gain_s = chosen.time_per_minibatch_s - rival.time_per_minibatch_s
    if gain_s <= 0:
        return rival.cost.bottleneck
    options, faster = search.options, f"{format_seconds(gain_s)} faster"
    is_other_schedule = rival.placement.execution.schedule != chosen.placement.execution.schedule
    is_other_strategy = options.straight
    if not STRATEGIES[options.strategy].is_selected:
        is_other_strategy = rival.placement.execution.strategy != options.strategy
    if is_other_strategy or is_other_schedule or not options.allows(rival.placement):
        return f"{faster}, but not what was asked for"
    if options.strategy == "model-parallel":
        return f"{faster}, but its fullest worker holds more"
    is_close = gain_s <= options.simplest * rival.time_per_minibatch_s * TOLERANCE
    is_simpler = _complexity(chosen) < _complexity(rival)
    if is_close and is_simpler and STRATEGIES[options.strategy].is_selected:
        return f"{faster}, but not as simple, which may cost {options.simplest:.1%} (--simplest)"
    return f"{faster} by the formulas, but not in the simulation"
