"""Plans for schedules that the cost formulas do not cover: 2bw, zb-h1, interleaved and looped-bfs.

Such a plan begins with the stages of a plan that is searched for under another schedule. If each worker has several
stages, it begins with even pieces of the model. Then its borders are moved for as long as the simulation gets faster.
`reschedule` and `under_schedule` run the stages of any plan in another way.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan, PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, ScheduleError, UsageError
from pdtool.planner.choice.borders import with_moved_borders
from pdtool.planner.choice.in_flight import with_wanted_in_flight
from pdtool.planner.choice.local_search import LocalSearch
from pdtool.planner.choice.plan_figures import refresh, simulated_cost
from pdtool.planner.choice.strategies import best_candidates, choose_plan
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Evaluator, PlanCost
from pdtool.planner.search.cuts import unbroken_groups
from pdtool.planner.search.search import PlanSearch
from pdtool.planner.simulator.engine import steady_state_s
from pdtool.planner.simulator.job import simulation_effort
from pdtool.planner.stage_costs import Stages, tied_bytes
from pdtool.schedule import SCHEDULES, STRATEGIES, ExecutionConfig, check_executable
from pdtool.units import bytes_option, counted, format_bytes

_TIGHTENED = 6  # searches with less and less memory, for a plan that is run under another schedule
_MAX_EFFORT = 500_000  # actions times workers of the simulations of a plan with other cuts: about a second
_STEPS_OF_BORDER = (1, -1, 2, -2)  # operators, or groups that no border divides
_ROUNDING = 1e-9  # of all computing time: a smaller time is a rounding error
_MIN_GAIN = 0.0005  # of the time per minibatch: a smaller one rounds to 0.0%


def plan_without_formulas(profile: Profile, profile_path: str, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the best plan that was found for a schedule without formulas.

    Raises:
        UsageError, NoPlanError: see make_plan.
    """
    evaluator = Evaluator(profile, cluster, options)
    placement = _best(evaluator, options).placement
    plan = placement.to_plan(profile, profile_path, cluster)
    return refresh(plan.model_copy(update={"asked": options}), profile)


@dataclass(frozen=True, kw_only=True)
class _Simulated:
    """A placement, and what it takes in the simulation.

    Attributes:
        time_s: seconds per minibatch.
        lacking_bytes: what the fullest worker lacks; 0 if the placement fits.
    """

    placement: Placement
    cost: PlanCost
    time_s: float
    lacking_bytes: int

    @property
    def computing_workers(self) -> int:
        """How many workers, with one for each stage or for its chunks, compute anything."""
        depth, seconds = self.placement.pipeline_depth, self.cost.compute_s
        return sum(sum(seconds[s::depth]) > _ROUNDING * sum(seconds) for s in range(depth))


def _simulated(evaluator: Evaluator, before: Placement, execution: ExecutionConfig | None = None) -> _Simulated:
    """Simulate stages as `execution` runs them, None: as now, with the minibatches in flight that this needs. Raises
    ScheduleError."""
    placement = _settled(evaluator, before, execution or before.execution)
    cost, time_s = simulated_cost(evaluator, placement)
    limit = evaluator.cluster.memory_bytes
    lacking_bytes = max(0, max(cost.memory_bytes) - limit) if limit is not None else 0
    return _Simulated(placement=placement, cost=cost, time_s=time_s, lacking_bytes=lacking_bytes)


def _settled(evaluator: Evaluator, before: Placement, execution: ExecutionConfig) -> Placement:
    """Return stages as `execution` runs them, with the minibatches in flight that this needs. Raises ScheduleError."""
    if execution.has_formulas:
        placement = evaluator.place(before.stages, before.workers, execution).placement
    else:
        placement = replace(before, execution=execution).with_usual_in_flight()
    placement = replace(placement, recompute=_recomputing(evaluator, before, placement))
    placement = with_wanted_in_flight(evaluator, placement)
    check_executable(placement.execution.kind, placement.shape())
    return placement


def _recomputing(evaluator: Evaluator, before: Placement, after: Placement) -> tuple[bool, ...]:
    """Return which stages recompute: those that must, and those that did although they need not, because the plan's
    author wants that."""
    needed = [False] * len(before.stages)
    if before.execution.kind.has_formulas:
        needed = list(evaluator.place(before.stages, before.workers, before.execution).placement.recompute)
    stages = zip(after.recompute, before.recompute, needed, strict=True)
    return tuple(must or (did and not needed_before) for must, did, needed_before in stages)


def _best(evaluator: Evaluator, options: PlanOptions) -> _Simulated:
    """Return the best plan, on any number of workers unless the options fix it."""
    kind, chosen_workers = SCHEDULES[options.schedule], options.workers
    if kind.chunked:
        return _chunked(evaluator, options) if chosen_workers else _on_fastest_count(evaluator, options, _even_chunks)
    if kind.equal_replicas and not (options.straight or options.replicas or chosen_workers):
        return _on_fastest_count(evaluator, options, _first_searched)
    return _rescheduled(evaluator, options)


def _on_fastest_count(
    evaluator: Evaluator, options: PlanOptions, place: Callable[[Evaluator, PlanOptions], Placement]
) -> _Simulated:
    """Return the plan on all workers of the cluster or on fewer, whichever is faster. If a worker computes nothing,
    leave it out.

    Args:
        place: places the stages on the number of workers in the options. Where that is fastest, a plan is made.
    """
    fewer, fastest_s, workers = evaluator.cluster.workers, math.inf, evaluator.cluster.workers
    for count in range(2, workers):
        with suppress(NoPlanError, UsageError):  # too few operators, a pin, or a shared parameter
            placement = place(evaluator, replace(options, workers=count))
            time_s = steady_state_s(placement, evaluator.profile, evaluator.cluster, fastest_s)
            if time_s is not None and time_s < fastest_s:
                fewer, fastest_s = count, time_s

    def best_on(count: int) -> _Simulated:
        return _best(evaluator, replace(options, workers=count))

    plans: list[_Simulated] = []
    for count in sorted({workers, fewer}):
        with suppress(NoPlanError, UsageError):  # as above, or too little memory
            plans.append(best_on(count))
    plan = min(plans, key=lambda plan: plan.time_s) if plans else best_on(workers)
    while 1 < (busy := plan.computing_workers) < plan.placement.used_workers:
        try:
            other = best_on(busy)
        except (NoPlanError, UsageError):
            return plan
        if other.time_s > plan.time_s * (1 + options.simplest):
            return plan
        plan = other
    return plan


def _even_chunks(evaluator: Evaluator, options: PlanOptions) -> Placement:
    """Place even pieces of the model, several on each worker."""
    workers = options.workers or evaluator.cluster.workers
    execution = ExecutionConfig.of_schedule(options.schedule, options.microbatches, options.chunks)
    stages = even_pieces(evaluator.profile, workers * options.chunks)
    return _in_chunks(evaluator.profile, stages, _one_each(workers), execution, (False,) * len(stages))


def _chunked(evaluator: Evaluator, options: PlanOptions) -> _Simulated:
    """Return a plan with several stages on each worker, in the order of the model's operators.

    They begin as even pieces. All recompute if it does not fit otherwise.
    """
    profile, cluster, workers = evaluator.profile, evaluator.cluster, options.workers
    if workers and workers > cluster.workers:
        what = f"--workers is {workers}, but the cluster has {counted(cluster.workers, 'worker')}"
        raise UsageError(what, f"pass {cluster.workers} or fewer")
    even = _even_chunks(evaluator, options)

    def fastest(within: Evaluator, stages: Stages, *, recomputes: bool) -> _Simulated:
        def place(stages: Stages) -> Placement:
            workers = _one_each(even.used_workers)
            return _in_chunks(profile, stages, workers, even.execution, (recomputes,) * len(stages))

        try:
            plan = _simulated(within, place(stages))
        except ScheduleError as error:
            if options.in_flight is None:
                raise
            fault, asked = error.what.partition("\n")[0], f"--in-flight {options.in_flight}"
            what = f"{asked} is not enough for schedule {options.schedule}: {fault}"
            raise UsageError(what, "pass a larger number, or leave it out") from error
        moved = partial(_with_moved_border, profile)
        return plan if plan.lacking_bytes else _with_faster_cuts(within, plan, moved, place)

    for recomputes in (False, True)[: 1 + options.recompute]:
        plan = fastest(evaluator, even.stages, recomputes=recomputes)
        if plan.lacking_bytes:  # the pieces that are fastest without a limit may need less
            unlimited = replace(evaluator, cluster=replace(cluster, memory_bytes=None))
            free = fastest(unlimited, even.stages, recomputes=recomputes)
            others = fastest(evaluator, free.placement.stages, recomputes=recomputes)
            plan = min(plan, others, key=lambda plan: plan.lacking_bytes)
        if not plan.lacking_bytes:
            return plan
    raise _does_not_fit(evaluator, plan)


def _searched_options(options: PlanOptions) -> PlanOptions:
    """The options of the search for the plan whose stages are taken over."""
    kind = SCHEDULES[options.schedule]
    assert kind.planned_as
    straight = options.straight or (kind.equal_replicas and options.replicas is None)
    return replace(options, schedule=kind.planned_as.name, straight=straight)


def _own_execution(placement: Placement, options: PlanOptions) -> ExecutionConfig:
    """How a placement that was searched under another schedule is executed under its own."""
    kind = SCHEDULES[options.schedule]
    return replace(placement.execution, schedule=kind.name, weights=kind.policy_names[0])


def _first_searched(evaluator: Evaluator, options: PlanOptions) -> Placement:
    """Return the best plan by the formulas, under its own schedule."""
    search = PlanSearch(evaluator.profile, evaluator.cluster, _searched_options(options))
    placement = best_candidates(search)[0].placement
    return replace(placement, execution=_own_execution(placement, options)).with_usual_in_flight()


def _rescheduled(evaluator: Evaluator, options: PlanOptions) -> _Simulated:
    """Return a plan with the stages of one that was searched for under another schedule, with its borders moved."""
    searched = _searched_options(options)
    search = PlanSearch(evaluator.profile, evaluator.cluster, searched)

    def plan_within(memory_bytes: int | None) -> _Simulated:
        within = replace(evaluator.cluster, memory_bytes=memory_bytes)
        selected, *_ = choose_plan(PlanSearch(evaluator.profile, within, searched))
        found = selected.candidate.placement
        return _simulated(evaluator, found, _own_execution(found, options))

    try:
        plan = _fitting(plan_within, search)
    except ScheduleError:  # an update has fewer minibatches than are in flight: at most one for each worker
        minibatches = options.update_every
        if minibatches is None or minibatches >= (options.workers or evaluator.cluster.workers):
            raise
        if options.replicas:
            what = f"{options.replicas_text} has more minibatches in flight than an update has ({minibatches})"
            raise UsageError(what, "pass a larger --samples-per-update, or other --replicas") from None
        return _rescheduled(evaluator, replace(options, workers=minibatches))

    def moved(placement: Placement) -> Iterator[Stages]:
        [execution] = searched.executions
        candidate = evaluator.place(placement.stages, placement.workers, execution)
        return (other.placement.stages for other in with_moved_borders(search, candidate))

    return _with_faster_cuts(evaluator, plan, moved, lambda stages: replace(plan.placement, stages=stages))


def _fitting(plan_within: Callable[[int | None], _Simulated], search: PlanSearch) -> _Simulated:
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
            if memory_bytes is None or not plan.lacking_bytes:
                return plan
            memory_bytes = max(1, memory_bytes - plan.lacking_bytes)
    except NoPlanError:
        if memory_bytes is None or search.smallest_plan is None:
            raise
    assert search.smallest_plan
    plan = plan_within(max(search.smallest_plan.cost.searched_memory_bytes))
    if plan.lacking_bytes:
        raise _does_not_fit(search.evaluator, plan)
    return plan


def _with_faster_cuts(
    evaluator: Evaluator,
    plan: _Simulated,
    moved: Callable[[Placement], Iterator[Stages]],
    place: Callable[[Stages], Placement],
) -> _Simulated:
    """Return a plan that fits with its borders moved for as long as that makes it faster in the simulation.

    Args:
        moved: yields the stages of a placement with each of their borders moved to each of the nearest cuts.
        place: places other stages on the same workers.
    """
    plans = {plan.placement.stages: plan}

    def simulate(stages: Stages, limit_s: float) -> float:
        present = replace(plans[tried.best].placement, stages=stages)
        time_s = steady_state_s(present, evaluator.profile, evaluator.cluster, limit_s)
        if time_s is not None and time_s < limit_s:
            with suppress(UsageError):  # a pin, or a shared parameter
                other = plans[stages] = _simulated(evaluator, place(stages))
                return math.inf if other.lacking_bytes else other.time_s
        return math.inf

    start, max_tries = plan.placement.stages, _MAX_EFFORT // simulation_effort(plan.placement)
    tried = LocalSearch(start, simulate, max_tries, min_gain=_MIN_GAIN, times_s={start: plan.time_s})
    tried.climb(lambda stages: moved(plans[stages].placement))
    return plans[tried.best]


def _does_not_fit(evaluator: Evaluator, plan: _Simulated) -> NoPlanError:
    tensor_bytes = plan.lacking_bytes + (evaluator.cluster.memory_bytes or 0)
    needed = evaluator.profile.memory_for(tensor_bytes, evaluator.cluster.levels[-1].size)
    schedule, config = plan.placement.execution.schedule, plan.placement.config
    what = f"no plan with schedule {schedule} fits: the best, {config}, lacks {format_bytes(plan.lacking_bytes)}"
    return NoPlanError(what, f"give each worker at least --memory {bytes_option(needed)}, or use another --schedule")


def reschedule(plan: Plan, profile: Profile, changes: Mapping[str, Any]) -> Plan:
    """Return the same stages run in another way, with the minibatches in flight that this needs.

    Args:
        changes: of schedule, weights, microbatches, update_every, strategy, wire_dtype and asked.

    Raises:
        UsageError: the schedule cannot have these replicas, or a rule of the plan's strategy forbids it.
    """
    _check_strategy_allows(plan)
    changed = plan.model_copy(update={"strategy": "auto", **changes})
    placement = _settled(Evaluator.of(changed, profile), Placement.of(plan, profile), changed.execution)
    stages = tuple(
        stage.model_copy(update={"in_flight": in_flight, "recompute": recompute})
        for stage, in_flight, recompute in zip(plan.stages, placement.in_flight, placement.recompute, strict=True)
    )
    return refresh(changed.model_copy(update={"stages": stages}), profile)


def under_schedule(plan: Plan, profile: Profile, schedule: str, chunks: int) -> Placement:
    """Return a plan's stages under another schedule: as `run --schedule` executes them, if each worker has one.

    Args:
        chunks: stages on each worker of a chunked schedule, for which the model is cut anew (see `even_pieces`).

    Raises:
        UsageError: the schedule does not suit the stages, or a rule of the plan's strategy forbids it.
        ScheduleError: it deadlocks with the minibatches in flight that were asked for.
    """
    _check_strategy_allows(plan)
    placement, own = Placement.of(plan, profile), plan.execution
    if own.chunks > 1:
        what = f"schedule {schedule} cannot have {own.chunks} stages on each worker"
        raise UsageError(what, "simulate a plan with one stage on each")
    if SCHEDULES[schedule].chunked:
        stages = even_pieces(profile, len(placement.workers) * chunks)
        execution = own.under(schedule, chunks)
        return _in_chunks(profile, stages, placement.workers, execution, placement.recompute * chunks)
    return _settled(Evaluator.of(plan, profile), placement, replace(own.under(schedule), copies=own.copies))


def _check_strategy_allows(plan: Plan) -> None:
    if STRATEGIES[plan.strategy].rule:
        what = f"strategy {plan.strategy} fixes the --schedule and the --weights of its plans"
        raise UsageError(what, "for others, partition again")


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
