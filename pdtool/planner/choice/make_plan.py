"""From a profile and a cluster to a plan: the search, the choice by simulation, the figures and the certificate.

Only schedules that the cost formulas cover are searched. A plan for another schedule takes over the stages of a
searched plan, or begins with even pieces of the model if each worker has several stages. Then its borders are moved. A
plan's figures come from the formulas and a simulation. If no formulas cover its schedule, they come from the simulation
alone.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice, pairwise, product
from typing import Any

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import ONE_WORKER, Certificate, FasterPlan, Plan, PlanOptions, Predicted, Rival, Why
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, ScheduleError, UsageError
from pdtool.planner.choice.borders import with_moved_borders
from pdtool.planner.choice.in_flight import with_wanted_in_flight
from pdtool.planner.choice.infeasible import explain_infeasible
from pdtool.planner.choice.selection import Selected
from pdtool.planner.choice.strategies import PLANNERS
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Candidate, Evaluator, PlanCost, samples_per_update
from pdtool.planner.search.cuts import unbroken_groups
from pdtool.planner.search.layouts import MAX_WORKERS_PER_COPY
from pdtool.planner.search.search import PlanSearch
from pdtool.planner.simulator.engine import simulate, steady_state_s
from pdtool.planner.simulator.job import SimulationJob, action_count
from pdtool.planner.stage_costs import Stages, tied_bytes
from pdtool.schedule import SCHEDULES, STRATEGIES, ExecutionConfig
from pdtool.units import bytes_option, counted, format_bytes, format_number, format_seconds, format_throughput

_TIGHTENED = 6  # searches with less and less memory, for a plan that is run under another schedule
_MAX_ACTIONS = 500_000  # times workers, of the simulations of a plan with other cuts: about a second
_STEPS_OF_BORDER = (1, -1, 2, -2)  # operators, or groups that no border divides
_ROUNDING = 1e-9  # of all computing time: a smaller time is a rounding error
_MIN_GAIN = 0.0005  # of the time per minibatch: a smaller one rounds to 0.0%
_LOG = logging.getLogger(__name__)


def make_plan(profile: Profile, profile_path: str, cluster: Cluster, options: PlanOptions | None = None) -> Plan:
    """Return the best plan for `profile` on `cluster`, with its figures, its certificate and its rivals.

    Raises:
        UsageError: the options make no sense together or on this cluster.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    options = options or PlanOptions()
    kind = SCHEDULES.get(options.schedule)
    if kind and kind.chunked:
        return _chunked_plan(profile, profile_path, cluster, options)
    if kind and kind.planned_as:
        return _rescheduled_plan(profile, profile_path, cluster, options)
    search, planner = PlanSearch(profile, cluster, options), PLANNERS[options.strategy]
    candidates = planner.candidates(search)
    if not candidates:
        raise explain_infeasible(search)
    for candidate in candidates:
        seconds = format_seconds(candidate.time_per_minibatch_s)
        _LOG.debug("searched: %s takes %s by the formulas", candidate.placement.config, seconds)
    named = planner.baselines(search, candidates[0])
    selected = planner.choose(search, candidates, named)
    chosen = selected.candidate
    plan = chosen.placement.to_plan(profile, profile_path, cluster)
    is_searched = planner.strategy.is_searched and not options.in_flight  # the search uses the usual numbers
    why = Why(
        bottleneck=chosen.cost.bottleneck,
        certificate=_certificate(search, candidates[0], selected) if is_searched else None,
        rivals=tuple(planner.rejected(search, selected, named, candidates)),
        faster=_passed_over(selected),
    )
    figures = _predicted(plan, search.evaluator, chosen.cost, chosen.time_per_minibatch_s, selected.simulated_s)
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
        why, figures, size = plan.why or Why(bottleneck=""), plan.predicted, plan.batch_size
        assert figures
        own = {"data parallelism": figures.data_parallel_s, ONE_WORKER: why.one_worker_s}
        rates = [f"{name} {format_number(size / time_s)}" for name, time_s in own.items() if time_s]
        rivals.append(
            Rival(
                plan=f"{plan.config} with minibatches of {size}",
                bottleneck_s=figures.time_s,
                samples_per_update=figures.samples_per_update,
                why=", ".join([format_throughput(figures.throughput_samples_per_s), *rates]),
            )
        )
    return best.model_copy(update={"why": best_why.model_copy(update={"rivals": (*best_why.rivals, *rivals)})})


def _chunked_plan(profile: Profile, profile_path: str, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return a plan with several stages on each worker, in the order of the model's operators.

    They begin as even pieces. All recompute if it does not fit otherwise.
    """
    workers = options.workers or cluster.workers
    if workers > cluster.workers:
        what = f"--workers is {workers}, but the cluster has {counted(cluster.workers, 'worker')}"
        raise UsageError(what, f"pass {cluster.workers} or fewer")
    execution = ExecutionConfig.of_schedule(options.schedule, options.microbatches, options.chunks)

    def even_pieces_on(count: int) -> Placement:
        stages = even_pieces(profile, count * options.chunks)
        return _in_chunks(profile, stages, _one_each(count), execution, (False,) * len(stages))

    if options.workers is None:
        return _on_fastest_count(_chunked_plan, even_pieces_on, profile, profile_path, cluster, options)

    def plan_of(stages: Stages, within: Cluster, *, recomputes: bool) -> Plan:
        chunks = _in_chunks(profile, stages, _one_each(workers), execution, (recomputes,) * len(stages))
        try:
            return reschedule(chunks.to_plan(profile, profile_path, within), profile, {"asked": options})
        except ScheduleError as error:
            if options.in_flight is None:
                raise
            fault, asked = error.what.partition("\n")[0], f"--in-flight {options.in_flight}"
            what = f"{asked} is not enough for schedule {options.schedule}: {fault}"
            raise UsageError(what, "pass a larger number, or leave it out") from error

    def fastest(stages: Stages, within: Cluster, *, recomputes: bool) -> Plan:
        plan_within = partial(plan_of, within=within, recomputes=recomputes)
        plan = plan_within(stages)
        moved = partial(_with_moved_border, profile)
        return plan if _lacking_bytes(plan) else _with_faster_cuts(plan, profile, moved, plan_within)

    even = even_pieces(profile, workers * options.chunks)
    for recomputes in (False, True)[: 1 + options.recompute]:
        plan = fastest(even, cluster, recomputes=recomputes)
        if _lacking_bytes(plan):  # the pieces that are fastest without a limit may need less
            free = fastest(even, replace(cluster, memory_bytes=None), recomputes=recomputes)
            others = fastest(Placement.of(free, profile).stages, cluster, recomputes=recomputes)
            plan = min(plan, others, key=_lacking_bytes)
        if not _lacking_bytes(plan):
            return plan
    raise _does_not_fit(plan, profile)


def _on_fastest_count(
    make: Callable[[Profile, str, Cluster, PlanOptions], Plan],
    place_on: Callable[[int], Placement],
    profile: Profile,
    profile_path: str,
    cluster: Cluster,
    options: PlanOptions,
) -> Plan:
    """Return the plan on all workers of the cluster or on fewer, whichever is faster. If a worker computes nothing,
    leave it out.

    Args:
        make: plans for the number of workers in its options.
        place_on: places the stages on so many workers. Where that is fastest, a plan is made.
    """
    fewer, fastest_s, workers = cluster.workers, math.inf, cluster.workers
    for count in range(2, workers):
        with suppress(NoPlanError, UsageError):  # too few operators, a pin, or a shared parameter
            time_s = steady_state_s(place_on(count), profile, cluster, fastest_s)
            if time_s is not None and time_s < fastest_s:
                fewer, fastest_s = count, time_s

    def plan_on(count: int) -> Plan:
        plan = make(profile, profile_path, cluster, replace(options, workers=count))
        return plan.model_copy(update={"asked": options})

    plans: list[Plan] = []
    for count in sorted({workers, fewer}):
        with suppress(NoPlanError, UsageError):  # as above, or too little memory
            plans.append(plan_on(count))
    plan = min(plans, key=_time_s) if plans else plan_on(workers)
    while 1 < (busy := _computing_workers(plan)) < plan.workers:
        try:
            other = plan_on(busy)
        except (NoPlanError, UsageError):
            return plan
        if _time_s(other) > _time_s(plan) * (1 + options.simplest):
            return plan
        plan = other
    return plan


def _computing_workers(plan: Plan) -> int:
    """Return how many workers of a plan with one worker for each stage, or for its chunks, compute anything."""
    assert plan.predicted
    depth, seconds = plan.pipeline_depth, plan.predicted.compute_s
    return sum(sum(seconds[s::depth]) > _ROUNDING * sum(seconds) for s in range(depth))


def _rescheduled_plan(profile: Profile, profile_path: str, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the plan of a schedule without formulas. It takes over the stages of a plan that was searched for under
    another schedule, and then moves their borders."""
    kind = SCHEDULES[options.schedule]
    assert kind.planned_as
    straight = options.straight or (kind.equal_replicas and options.replicas is None)
    searched = replace(options, schedule=kind.planned_as.name, straight=straight)

    def searched_on(count: int) -> Placement:
        search = PlanSearch(profile, cluster, replace(searched, workers=count))
        if not (candidates := PLANNERS[options.strategy].candidates(search)):
            raise explain_infeasible(search)
        placement = candidates[0].placement
        return replace(placement, execution=placement.execution.under(kind.name)).with_usual_in_flight()

    if straight and not options.straight and options.workers is None:
        return _on_fastest_count(_rescheduled_plan, searched_on, profile, profile_path, cluster, options)
    changes: dict[str, Any] = {"schedule": kind.name, "weights": kind.policy_names[0], "strategy": options.strategy}
    changes["asked"] = options

    def plan_within(memory_bytes: int | None) -> Plan:
        found = make_plan(profile, profile_path, replace(cluster, memory_bytes=memory_bytes), searched)
        return reschedule(found.model_copy(update={"cluster": cluster}), profile, changes)

    search = PlanSearch(profile, cluster, searched)
    try:
        plan = _fitting(plan_within, search)
    except ScheduleError:  # an update has fewer minibatches than are in flight: at most one for each worker
        minibatches = options.update_every
        if minibatches is None or minibatches >= (options.workers or cluster.workers):
            raise
        if options.replicas:
            what = f"{options.replicas_text} has more minibatches in flight than an update has ({minibatches})"
            raise UsageError(what, "pass a larger --samples-per-update, or other --replicas") from None
        plan = _rescheduled_plan(profile, profile_path, cluster, replace(options, workers=minibatches))
        return plan.model_copy(update={"asked": options})

    def moved(placement: Placement) -> Iterator[Stages]:
        [execution] = searched.executions
        candidate = search.evaluator.place(placement.stages, placement.workers, execution)
        return (other.placement.stages for other in with_moved_borders(search, candidate))

    def plan_of(stages: Stages) -> Plan:
        placement = replace(Placement.of(plan, profile), stages=stages)
        return reschedule(placement.to_plan(profile, profile_path, cluster), profile, changes)

    return _with_faster_cuts(plan, profile, moved, plan_of)


def _fitting(plan_within: Callable[[int | None], Plan], search: PlanSearch) -> Plan:
    """Search with less and less memory until the plan fits under its own schedule, which may need more than the one
    that was searched under. Last, search with the least that any plan needs, so that what a refusal asks for is enough.
    Raises NoPlanError.

    Args:
        plan_within: returns the plan from a search with so many bytes on each worker; None: without a limit.
        search: under the other schedule.
    """
    memory_bytes = search.cluster.memory_bytes
    try:
        for _ in range(_TIGHTENED):
            plan = plan_within(memory_bytes)
            if memory_bytes is None or not (lacking_bytes := _lacking_bytes(plan)):
                return plan
            memory_bytes = max(1, memory_bytes - lacking_bytes)
    except NoPlanError:
        if memory_bytes is None or search.smallest_plan is None:
            raise
    assert search.smallest_plan
    plan = plan_within(max(search.smallest_plan.cost.searched_memory_bytes))
    if _lacking_bytes(plan):
        raise _does_not_fit(plan, search.profile)
    return plan


def _with_faster_cuts(
    plan: Plan, profile: Profile, moved: Callable[[Placement], Iterator[Stages]], plan_of: Callable[[Stages], Plan]
) -> Plan:
    """Return a plan of a schedule without formulas, which fits, with its borders moved for as long as that makes it
    faster in the simulation.

    Args:
        moved: yields the stages of a placement with each of their borders moved to each of the nearest cuts.
        plan_of: returns the plan with other stages, and the minibatches in flight that they need.
    """
    placement, is_faster = Placement.of(plan, profile), True
    tries = _MAX_ACTIONS // (action_count(placement) * placement.used_workers)
    while is_faster:
        placement, limit_s, is_faster = Placement.of(plan, profile), _time_s(plan) * (1 - _MIN_GAIN), False
        for stages in islice(moved(placement), tries):
            tries -= 1
            time_s = steady_state_s(replace(placement, stages=stages), profile, plan.cluster, limit_s)
            if time_s is not None and time_s < limit_s:
                with suppress(UsageError):  # a pin, or a shared parameter
                    other = plan_of(stages)
                    if not _lacking_bytes(other) and _time_s(other) < limit_s:
                        plan, is_faster = other, True
                        break
    return plan


def _time_s(plan: Plan) -> float:
    return plan.predicted.time_s if plan.predicted else math.inf


def _lacking_bytes(plan: Plan) -> int:
    """Return how many bytes the fullest worker of a plan lacks; 0 if it fits."""
    limit, needed = plan.cluster.memory_bytes, plan.predicted.memory_bytes if plan.predicted else ()
    return max(0, max(needed, default=0) - limit) if limit is not None else 0


def _does_not_fit(plan: Plan, profile: Profile) -> NoPlanError:
    lacking_bytes = _lacking_bytes(plan)
    tensor_bytes = lacking_bytes + (plan.cluster.memory_bytes or 0)
    needed = profile.memory_for(tensor_bytes, plan.cluster.levels[-1].size)
    what = f"no plan with schedule {plan.schedule} fits: the best, {plan.config}, lacks {format_bytes(lacking_bytes)}"
    return NoPlanError(what, f"give each worker at least --memory {bytes_option(needed)}, or use another --schedule")


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


def reschedule(plan: Plan, profile: Profile, changes: Mapping[str, Any]) -> Plan:
    """Return the same stages run in another way, with the minibatches in flight that this needs.

    Args:
        changes: of schedule, weights, microbatches, update_every, strategy, wire_dtype and asked.

    Raises:
        UsageError: the schedule cannot have these replicas, or a rule of the plan's strategy forbids it.
    """
    if STRATEGIES[plan.strategy].rule:
        what = f"strategy {plan.strategy} fixes the --schedule and the --weights of its plans"
        raise UsageError(what, "for others, partition again")
    changed = plan.model_copy(update={"strategy": "auto", **changes})
    placement = Placement.of(changed, profile)
    evaluator = Evaluator.of(changed, profile)
    if changed.kind.has_formulas:
        placement = evaluator.place(placement.stages, placement.workers, placement.execution).placement
    else:
        placement = placement.with_usual_in_flight()
    placement = replace(placement, recompute=_recomputing(plan, profile, placement))
    placement = with_wanted_in_flight(evaluator, placement)
    stages = tuple(
        stage.model_copy(update={"in_flight": in_flight, "recompute": recompute})
        for stage, in_flight, recompute in zip(plan.stages, placement.in_flight, placement.recompute, strict=True)
    )
    changed = changed.model_copy(update={"stages": stages})
    changed.check_schedule()
    return refresh(changed, profile)


def _recomputing(plan: Plan, profile: Profile, placement: Placement) -> tuple[bool, ...]:
    """Return which stages of a rescheduled plan recompute: those that must, and those that did although they need not,
    because the plan's author wants that."""
    before = Placement.of(plan, profile)
    needed = [False] * len(plan.stages)
    if plan.kind.has_formulas:
        placed = Evaluator.of(plan, profile).place(before.stages, before.workers, before.execution)
        needed = list(placed.placement.recompute)
    stages = zip(placement.recompute, plan.stages, needed, strict=True)
    return tuple(must or (stage.recompute and not needed_before) for must, stage, needed_before in stages)


def under_schedule(placement: Placement, profile: Profile, schedule: str, chunks: int) -> Placement:
    """Return the placement under another schedule, with that schedule's own minibatches in flight.

    Args:
        chunks: stages on each worker of a chunked schedule, for which the model is cut anew (see `even_pieces`).

    Raises:
        UsageError: the schedule does not suit the placement.
    """
    before = placement.execution
    if before.chunks > 1:
        what = f"schedule {schedule} cannot have {before.chunks} stages on each worker"
        raise UsageError(what, "simulate a plan with one stage on each")
    if SCHEDULES[schedule].chunked:
        execution = before.under(schedule, chunks)
        stages = even_pieces(profile, len(placement.workers) * chunks)
        return _in_chunks(profile, stages, placement.workers, execution, placement.recompute * chunks)
    return replace(placement, execution=before.under(schedule)).with_usual_in_flight()


def even_pieces(profile: Profile, count: int) -> Stages:
    """Divide the operators, in execution order, into `count` pieces of about the same time.

    Raises:
        NoPlanError: there are fewer operators than pieces.
    """
    blocks = _blocks(profile)
    if len(blocks) < count:
        raise NoPlanError(
            f"the model can be cut into at most {len(blocks)} stages, too few for {count} (workers times --chunks)",
            "pass a smaller --workers or --chunks",
        )
    nodes = profile.by_name
    seconds = [sum(nodes[name].forward_s + nodes[name].backward_s for name in block) for block in blocks]
    cumulative = [0.0, *accumulate(seconds)]
    cuts = [0]
    for piece in range(1, count):
        even = bisect_left(cumulative, cumulative[-1] * piece / count)
        cuts.append(min(max(even, cuts[-1] + 1), len(blocks) - count + piece))
    return _pieces(blocks, [*cuts, len(blocks)])


def _with_moved_border(profile: Profile, placement: Placement) -> Iterator[Stages]:
    """Yield such pieces with each of their borders moved to each of the nearest places."""
    blocks, stages = _blocks(profile), placement.stages
    first_operators = {block[0]: number for number, block in enumerate(blocks)}
    cuts = [*(min(first_operators[name] for name in stage if name in first_operators) for stage in stages), len(blocks)]
    for border, step in product(range(1, len(stages)), _STEPS_OF_BORDER):
        if cuts[border - 1] < cuts[border] + step < cuts[border + 1]:
            yield _pieces(blocks, [*cuts[:border], cuts[border] + step, *cuts[border + 1 :]])


def _blocks(profile: Profile) -> list[list[str]]:
    """The operators in execution order, with those that no border may divide in one block."""
    inputs = [node.name for node in profile.nodes if node.op == "input"]
    return profile.graph.contracted([*unbroken_groups(profile), *([inputs] if inputs else [])])


def _pieces(blocks: Sequence[Sequence[str]], cuts: Sequence[int]) -> Stages:
    """The operators between each two cuts."""
    return tuple(tuple(name for block in blocks[begin:end] for name in block) for begin, end in pairwise(cuts))


def _one_each(workers: int) -> tuple[tuple[int, ...], ...]:
    """A worker for each stage, in order."""
    return tuple((number,) for number in range(workers))


def _in_chunks(
    profile: Profile,
    stages: Stages,
    workers: tuple[tuple[int, ...], ...],
    execution: ExecutionConfig,
    recompute: tuple[bool, ...],
) -> Placement:
    """Place stages, `execution.chunks` on each of the `workers`; replicas of a stage are neighbours.

    Raises:
        UsageError: an operator is pinned to another stage, or two stages of a worker share a parameter.
    """
    for name, stage in profile.pin.items():
        if name not in stages[stage % len(stages)]:
            parts = f"{execution.schedule} divides the model into {len(stages)} even parts"
            what = (
                f"HINTS pins {name} to stage {stage}, but {parts}, and part {stage % len(stages)} does not contain it"
            )
            raise UsageError(what, "use another schedule, or remove the pin and profile again")
    for holders in tied_bytes(profile, stages):
        if len({s % len(workers) for s in holders}) < len(holders):
            numbers = ", ".join(map(str, holders))
            what = f"{execution.schedule} stages {numbers} share a parameter, and two of them are on one worker"
            raise UsageError(what, "use another number of --chunks or --workers, or another schedule")
    placed = workers * execution.chunks
    placement = Placement(stages=stages, workers=placed, in_flight=(), recompute=recompute, execution=execution)
    return placement.with_usual_in_flight()


def refresh(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with figures for its stages as they are, which a person may have edited.

    Raises:
        ArtifactError: its stages do not fit the profile.
        ScheduleError: no formulas cover it, and its numbers in flight make it deadlock.
    """
    evaluator, placement = Evaluator.of(plan, profile), Placement.of(plan, profile)
    if not placement.execution.has_formulas:
        return _with_simulated_figures(plan, evaluator, placement)
    is_ours = evaluator.cost_model == "ours"
    simulated_s = steady_state_s(placement, evaluator.profile, evaluator.cluster) if is_ours else None
    cost = evaluator.cost(placement)
    figures = _predicted(plan, evaluator, cost, cost.time_per_minibatch_s, simulated_s)
    return plan.model_copy(update={"why": Why(bottleneck=cost.bottleneck), "predicted": figures})


def _with_simulated_figures(plan: Plan, evaluator: Evaluator, placement: Placement) -> Plan:
    """Return the plan with the simulation's time, memory and traffic. What a stage, its average or a border takes by
    itself does not depend on the schedule, so that comes from the formulas."""
    result = simulate(SimulationJob.of(placement, evaluator.profile, evaluator.cluster))
    depth, stages = placement.pipeline_depth, range(len(placement.stages))
    needed = [max(usage.memory_bytes for usage in result.workers if usage.stage == s) for s in range(depth)]
    memory_bytes = tuple(needed[s % depth] for s in stages)
    cost = replace(
        evaluator.cost(placement),
        memory_bytes=memory_bytes,
        searched_memory_bytes=memory_bytes,
        traffic_bytes=round(result.sent_bytes),
    )
    time_s = result.time_per_minibatch_s
    slowest = max(range(depth), key=lambda s: sum(cost.compute_s[s::depth]))
    busiest = list(map(str, stages[slowest::depth]))  # of one worker
    most = f"stage {slowest} computes" if len(busiest) == 1 else f"stages {' and '.join(busiest)} together compute"
    why = f"{most} most; {placement.execution.schedule} has no formula, so it is simulated"
    figures = _predicted(plan, evaluator, cost, time_s, time_s)
    return plan.model_copy(update={"why": Why(bottleneck=why), "predicted": figures})


def _predicted(
    plan: Plan, evaluator: Evaluator, cost: PlanCost, bottleneck_s: float, simulated_s: float | None
) -> Predicted:
    """Return the figures. The gain is over data parallelism on all workers of the cluster, even if that does not fit in
    memory. Both are simulated, or both computed by the same formulas.

    Args:
        bottleneck_s: seconds per minibatch by the formulas, or simulated if no formulas cover the plan.
        simulated_s: seconds per minibatch in a simulation; None: it was not simulated.
    """
    workers = evaluator.cluster.workers
    minibatches = PLANNERS["data-parallel"].rival_minibatches(plan.execution.minibatches_per_update, workers)
    execution = ExecutionConfig().averaging(minibatches)  # as the rival in `simulate`
    data_parallel = evaluator.data_parallel(workers, execution)
    data_parallel_s = None
    if simulated_s is not None:
        data_parallel_s = steady_state_s(data_parallel.placement, evaluator.profile, evaluator.cluster)
    time_s = bottleneck_s if simulated_s is None else simulated_s
    own_s, other_s = time_s, data_parallel_s
    if other_s is None:
        own_s, other_s = bottleneck_s, data_parallel.time_per_minibatch_s
    return Predicted(
        bottleneck_s=bottleneck_s,
        simulated_s=simulated_s,
        data_parallel_s=data_parallel_s,
        throughput_samples_per_s=plan.batch_size / time_s if time_s else 0.0,
        gain_over_data_parallel=other_s / own_s if own_s else 1.0,
        samples_per_update=samples_per_update(Placement.of(plan, evaluator.profile), evaluator.profile),
        data_parallel_samples_per_update=samples_per_update(data_parallel.placement, evaluator.profile),
        compute_s=cost.compute_s,
        allreduce_s=cost.allreduce_s,
        transfer_s=cost.transfer_s,
        memory_bytes=cost.memory_bytes,
        traffic_bytes=cost.traffic_bytes,
        cost=evaluator.cost_model,
        plan_sha256=plan.plan_sha256,
    )
