"""The plans that everyone asks about: data parallelism, the straight pipeline, GPipe, model parallelism, one worker.

GPipe and model parallelism have the stages of the straight pipeline here, which takes no further search; the best of
their kind are in `strategies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdtool.artifacts.plan import Rival
from pdtool.partition.cost.formulas import TOLERANCE
from pdtool.partition.cost.plan_cost import Candidate
from pdtool.partition.placement import ExecutionConfig
from pdtool.partition.predictions import samples_per_update
from pdtool.partition.search.device_blocks import MAX_WORKERS_PER_COPY, Layout
from pdtool.partition.search.search import PlanSearch
from pdtool.schedule import STRATEGIES
from pdtool.units import format_bytes, format_seconds

_OTHER_RIVALS = 2  # that a plan lists, besides the baselines
Baseline = tuple[str, Candidate]  # with its label

DATA_PARALLEL = STRATEGIES["data-parallel"].label
ONE_WORKER = "one worker"


def baselines(search: PlanSearch, execution: ExecutionConfig) -> Iterator[Baseline]:
    """Yield each baseline, on the workers that may be used; the straight ones on as many as there are stages. An update
    of GPipe takes as many minibatches as one of data parallelism."""
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
    needed, limit = max(rival.cost.memory_bytes), search.cluster.memory_bytes
    if limit is not None and needed > limit:
        stage = rival.cost.memory_bytes.index(needed)
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
