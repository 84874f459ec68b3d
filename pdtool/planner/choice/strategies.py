"""How each strategy's plan is found: PLANNERS has one object per strategy, by name.

pdtool.schedule.strategies defines the strategies. `make_plan` asks the planner of one for

    options      search options, from those that were asked for; it refuses those that do not suit the strategy
    candidates   its best plans by the formulas
    baselines    plans that everyone asks about: data parallelism, the straight pipeline, GPipe, model parallelism and
                 one worker
    choose       one of the candidates, by simulation
    rejected     the baselines and the next best candidates, and why each lost
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import MAX_IN_FLIGHT, ONE_WORKER, Plan, PlanOptions, Rival
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.options.plan_options import PartitionOptions
from pdtool.planner.choice.border_moves import move_to_faster_cuts, move_to_module_borders
from pdtool.planner.choice.infeasible import explain_infeasible
from pdtool.planner.choice.selection import Selected, select
from pdtool.planner.formulas import TOLERANCE
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Candidate, samples_per_update
from pdtool.planner.search.layouts import MAX_WORKERS_PER_COPY, Layout
from pdtool.planner.search.search import PlanSearch
from pdtool.planner.simulator.engine import steady_state_s
from pdtool.schedule import (
    BASELINES,
    DEFAULT_MICROBATCHES,
    ONE_F_ONE_B,
    SCHEDULES,
    STRATEGIES,
    ExecutionConfig,
    Strategy,
)
from pdtool.units import counted, format_bytes, format_seconds

Baseline = tuple[str, Candidate]  # with its label
# With a flush, try plans whose time by the formulas is at most this factor of the best one's: the formulas hide
# messages, but stages wait for them while the pipeline fills and drains.
_MAX_SLOWDOWN = 2.0
_MOVED_TIMES_WORKERS = 32  # plans whose borders are moved, the fastest of different configurations, times workers
_BISECTIONS = 12  # of the memory of a worker
_MAX_WORKERS_WITH_ALL_MINIBATCHES = 8  # hybrid parallelism is searched with any number of minibatches up to here
_NOT_IN_SIMULATION = ", but not in the simulation"
_OTHER_RIVALS = 2  # listed in a plan, besides the baselines
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planner:
    """Finds the plan of one strategy; this class is for strategies that others are compared with."""

    strategy: Strategy

    def options(self, asked: PartitionOptions, cluster_workers: int, batch_size: int = 1) -> PlanOptions:
        """Return the search options for the best plan of the strategy.

        Args:
            asked: the user's options; schedule and microbatches that are missing follow from the strategy.
            batch_size: of a minibatch, as profiled; a microbatch has the same.

        Raises:
            UsageError: the strategy excludes this schedule, these microbatches or replicas, or needs more workers; or
                the samples of an update are not whole minibatches.
        """
        strategy, schedule, microbatches = self.strategy, asked.schedule, asked.microbatches
        minibatches = None
        if asked.samples_per_update:
            schedule, minibatches = self._of_samples_per_update(asked, batch_size)
        workers = asked.workers or cluster_workers
        name = f"--strategy {strategy.name}"
        if workers < strategy.min_workers:
            what = f"{name} needs {strategy.min_workers} or more workers, not {workers}"
            raise UsageError(what, "pass a larger --workers or --topology, or another strategy")
        if strategy.schedule and schedule not in (None, strategy.schedule):
            what = f"{name} cannot be combined with --schedule {schedule}"
            raise UsageError(what, f"leave --schedule out: it uses {strategy.schedule}")
        if strategy.fixes_updates and microbatches not in (None, 1):
            what = f"{name} cannot be combined with --microbatches {microbatches}"
            raise UsageError(what, "leave --microbatches out")
        if _flushes(strategy.schedule) and asked.cost_model != "ours":
            raise UsageError(f"{name} cannot be combined with --cost {asked.cost_model}", "leave --cost out")
        schedule = schedule or strategy.schedule or ONE_F_ONE_B.name
        given: dict[str, Any] = {
            field.name: getattr(asked, field.name) for field in fields(PlanOptions) if hasattr(asked, field.name)
        }
        given |= {"strategy": strategy.name, "schedule": schedule, "straight": strategy.is_straight}
        given["microbatches"] = microbatches or self._default_microbatches(workers, schedule)
        options = PlanOptions(**given)
        options = self.averaging(options, minibatches)
        if options.replicas:
            self._check_replicas(options, cluster_workers)
        if options.in_flight:
            self._check_in_flight(options)
        return options

    def averaging(self, options: PlanOptions, minibatches: int | None) -> PlanOptions:
        """Return search options for so many minibatches in one update of every stage. For None, or if the strategy
        fixes its number, return them unchanged."""
        if minibatches is None or self._has_own_updates:
            return options
        always_flushes = _flushes(options.schedule)
        may_flush = always_flushes or options.schedule == "auto"
        return replace(
            options, microbatches=minibatches if may_flush else 1, update_every=None if always_flushes else minibatches
        )

    @property
    def _has_own_updates(self) -> bool:
        """Whether the strategy itself defines the number of minibatches in an update."""
        return self.strategy.fixes_updates and (_flushes(self.strategy.schedule) or not self.strategy.is_for_speed)

    def rival_options(self, profile: Profile, cluster: Cluster, plan: Plan) -> PlanOptions:
        """Return the search options for the strategy's best plan on a cluster, as a rival of `plan`. Its stages may
        recompute if those of `plan` may."""
        workers, recompute = None, plan.asked is None or plan.asked.recompute
        if self.strategy.is_straight:
            max_stages = PlanSearch(profile, cluster, PlanOptions()).whole_space.max_stages
            workers = min(cluster.workers, max(max_stages, self.strategy.min_workers), MAX_WORKERS_PER_COPY)
        options = self.options(PartitionOptions(workers=workers, recompute=recompute), cluster.workers)
        return self.averaging(options, self.rival_minibatches(plan.execution.minibatches_per_update, cluster.workers))

    def rival_minibatches(self, minibatches: int | None, workers: int) -> int | None:
        """Return the minibatches in an update of a rival of a plan with `minibatches` in each."""
        return minibatches

    def candidates(self, search: PlanSearch) -> list[Candidate]:
        """Return the best plans of the strategy by the formulas, the fastest first; empty if none fits.

        Raises:
            NoPlanError: the model cannot be cut into as many stages as the strategy has; or asynchronous data
                parallelism does not fit.
        """
        options, max_stages = search.options, search.whole_space.max_stages
        if max_stages < options.min_stages:
            asked, remedy = f"--strategy {options.strategy}", "use --strategy data-parallel"
            if options.replicas:
                asked, remedy = f"--replicas {options.replicas_text}", "pass fewer stages"
            if search.profile.pin:
                remedy += ", or change the pin in your model file's HINTS and profile it again"
            what = f"{asked} needs {options.min_stages} stages, but the model can be cut into at most {max_stages}"
            raise NoPlanError(what, remedy)
        return search.fastest_plans()

    def searches_all_updates(self, search: PlanSearch) -> bool:
        """Return whether the search covers every number of minibatches in an update that the strategy allows."""
        return True

    def baselines(self, search: PlanSearch, optimum: Candidate) -> list[Baseline]:
        """Return the baselines that go with the candidates, of which `optimum` is the fastest."""
        execution = optimum.placement.execution
        if not self.strategy.is_own:
            minibatches = None if self._has_own_updates else execution.minibatches_per_update
            execution = ExecutionConfig().averaging(minibatches)
        return list(baselines(search, execution)) if self.strategy.is_for_speed else []

    def choose(self, search: PlanSearch, candidates: Sequence[Candidate], named: Sequence[Baseline]) -> Selected:
        """Return the candidate with the fastest simulation; ties: the first. Return the first by the formulas if no
        margin is allowed, none can be simulated, or PipeDream's formulas were asked for.

        Args:
            named: the baselines.
        """
        chosen = Selected(candidates[0], None, candidates[0].time_per_minibatch_s)
        if search.options.cost_model == "ours":
            tried = candidates if search.options.simplest else candidates[:1]
            for candidate in tried:
                time_s = steady_state_s(candidate.placement, search.profile, search.cluster)
                if time_s is not None and (chosen.simulated_s is None or time_s < chosen.simulated_s):
                    chosen = Selected(candidate, time_s, time_s, simulated_plans=len(tried))
        return chosen

    def title(self, placement: Placement) -> str:
        """`data parallelism (16)`; `GPipe (6 stages, 16 microbatches)`."""
        stages = len(placement.stages)
        size = f"{stages} stages" if stages > 1 else str(placement.used_workers)
        return f"{self.strategy.label} ({size}{self._size_of_update(placement)})"

    def rejected(
        self, search: PlanSearch, selected: Selected, named: Sequence[Baseline], others: Sequence[Candidate]
    ) -> Iterator[Rival]:
        """Yield the baselines, then the two fastest of `others`, and why each lost; never the chosen plan."""
        chosen = selected.candidate
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
            yield Rival(
                plan=label + suffix,
                bottleneck_s=rival.time_per_minibatch_s,
                samples_per_update=samples_per_update(rival.placement, search.profile),
                why=self._why_rejected(search, rival, selected),
            )

    def _of_samples_per_update(self, asked: PartitionOptions, batch_size: int) -> tuple[str, int]:
        """Return the schedule, and how many minibatches make up the samples that an update should average."""
        samples = asked.samples_per_update or 0
        text = f"--samples-per-update {samples}"
        if asked.microbatches:
            raise UsageError(f"{text} and --microbatches {asked.microbatches} cannot be combined", "pass only one")
        if self._has_own_updates:
            what = f"--strategy {self.strategy.name} fixes the size of updates, so it cannot be combined with {text}"
            raise UsageError(what, "leave --samples-per-update out")
        schedule = asked.schedule or self.strategy.schedule or "1f1b-flush"
        count, rest = divmod(samples, batch_size)
        if rest or not count:
            near = " or ".join(str(batch_size * n) for n in (count, count + 1) if n)
            remedy = f"pass {near}, or profile with a --batch-size that divides {samples}"
            raise UsageError(f"{text} is not a multiple of the profiled minibatch of {batch_size}", remedy)
        if count > MAX_IN_FLIGHT:
            what = f"{text} is {count} minibatches of {batch_size}, too many for one update"
            raise UsageError(what, f"pass at most {MAX_IN_FLIGHT * batch_size}")
        return schedule, count

    def _default_microbatches(self, workers: int, schedule: str) -> int:
        return DEFAULT_MICROBATCHES if _flushes(schedule) else 1

    def _check_replicas(self, options: PlanOptions, cluster_workers: int) -> None:
        """Raise UsageError if these replicas clash with the other options or do not fit on the cluster."""
        asked, workers, strategy = f"--replicas {options.replicas_text:.80}", sum(options.replicas or ()), self.strategy
        if strategy.is_straight or not strategy.is_own:
            raise UsageError(f"{asked} and --strategy {strategy.name} cannot be combined", "pass only one")
        if options.workers is not None:
            raise UsageError(f"{asked} and --workers {options.workers} cannot be combined", "leave --workers out")
        kind = SCHEDULES.get(options.schedule)
        if kind and kind.chunked:
            is_uneven = len(set(options.replicas or ())) > 1
            others = {name for name, kind in SCHEDULES.items() if kind.chunked or (kind.equal_replicas and is_uneven)}
            allowed = ", ".join(name for name in SCHEDULES if name not in others)
            raise UsageError(f"--schedule {options.schedule} cannot be combined with {asked}", f"choose from {allowed}")
        if kind and kind.planned_as and kind.equal_replicas and len(set(options.replicas or ())) > 1:
            remedy = f"give every stage the same number, or pass --schedule {kind.planned_as.name}"
            raise UsageError(f"--schedule {kind.name} cannot be combined with {asked}", remedy)
        if options.min_stages < strategy.min_stages:
            what = f"{asked} is one stage, but --strategy {strategy.name} needs {strategy.min_stages} or more"
            raise UsageError(what, "name two stages or more, for example --replicas 1-1, or use --strategy auto")
        if max(options.replicas or ()) > (options.update_every or math.inf):
            what = f"{asked} has a stage with more replicas than an update has minibatches ({options.update_every})"
            remedy = "pass fewer replicas, a larger --samples-per-update, or --schedule 1f1b-flush"
            raise UsageError(what, remedy)
        if workers > cluster_workers:
            what = f"{asked} needs {workers} workers, but the cluster has {cluster_workers}"
            raise UsageError(what, "pass fewer replicas, or a larger --topology")
        if workers > MAX_WORKERS_PER_COPY:
            raise UsageError(
                f"{asked} needs {workers} workers", f"pass replicas that add up to {MAX_WORKERS_PER_COPY} or less"
            )

    def _check_in_flight(self, options: PlanOptions) -> None:
        """Raise UsageError if the schedule or the strategy fixes how many minibatches are in flight."""
        execution = ExecutionConfig(schedule=options.schedule, strategy=options.strategy)
        asked, strategy = f"--in-flight {options.in_flight}", self.strategy
        if strategy.fixes_updates:
            what = f"--strategy {strategy.name} sets the number of minibatches in flight itself"
            raise UsageError(what, f"leave {asked} out")
        if options.schedule in SCHEDULES and not execution.has_choice_in_flight:
            what = f"schedule {options.schedule} keeps all microbatches of an update in flight"
            raise UsageError(what, f"leave {asked} out, or use --schedule 1f1b-flush")

    def _size_of_update(self, placement: Placement) -> str:
        return ""

    def _is_asked_for(self, search: PlanSearch, rival: Candidate) -> bool:
        """Whether a rival has what was asked for, besides schedule, stages and replicas."""
        return rival.placement.execution.strategy == self.strategy.name

    def _why_rejected(self, search: PlanSearch, rival: Candidate, selected: Selected) -> str:
        chosen = selected.candidate
        needed, limit = max(rival.cost.searched_memory_bytes), search.cluster.memory_bytes
        if limit is not None and needed > limit:
            stage = rival.cost.searched_memory_bytes.index(needed)
            return f"does not fit: stage {stage} needs {format_bytes(needed)}, a worker has {format_bytes(limit)}"
        gain_s = chosen.time_per_minibatch_s - rival.time_per_minibatch_s
        if gain_s <= 0:
            return rival.cost.bottleneck
        reason = ", but excluded by the options"
        if (
            self._is_searched(search, rival.placement.execution)
            and self._is_asked_for(search, rival)
            and search.allows(rival.placement)
        ):
            reason = self._why_slower(search, rival, selected)
        elif not self._is_faster_in_simulation(search, rival, selected):
            reason = _NOT_IN_SIMULATION
        elif not STRATEGIES[strategy := rival.placement.execution.strategy].is_own and strategy != self.strategy.name:
            reason = f", but it needs --strategy {strategy}"
        return f"{format_seconds(gain_s)} faster by the formulas{reason}"

    @staticmethod
    def _is_searched(search: PlanSearch, execution: ExecutionConfig) -> bool:
        """Whether the search covers the schedule, with updates that average so many minibatches."""
        return any(
            each.schedule == execution.schedule
            and (each.minibatches_per_update or 1) >= (execution.minibatches_per_update or 1)
            for each in search.options.executions
        )

    @staticmethod
    def _is_faster_in_simulation(search: PlanSearch, rival: Candidate, selected: Selected) -> bool:
        """Whether a rival that is faster by the formulas is faster in the simulation, too, if there is one."""
        if selected.simulated_s is None:
            return True
        time_s = steady_state_s(rival.placement, search.profile, search.cluster, selected.simulated_s)
        return time_s is None or time_s < selected.simulated_s

    def _why_slower(self, search: PlanSearch, rival: Candidate, selected: Selected) -> str:
        """Why the chosen plan is slower than a rival by the formulas."""
        return _NOT_IN_SIMULATION


class _OwnPlanner(Planner):
    """PipeDream's own strategy: choose by simulation from a shortlist, with borders between modules."""

    def choose(self, search: PlanSearch, candidates: Sequence[Candidate], named: Sequence[Baseline]) -> Selected:
        options, execution = search.options, replace(candidates[0].placement.execution, copies=1)
        alike = [plan for _, plan in named if plan.placement.execution == execution]
        selected = select(search, candidates, alike)
        if options.simplest and options.cost_model == "ours":
            selected = move_to_faster_cuts(search, selected)
        if options.simplest and not options.straight and options.cost_model == "ours":
            selected = move_to_module_borders(search, selected)
        return selected

    def _is_asked_for(self, search: PlanSearch, rival: Candidate) -> bool:
        return not search.options.straight

    def _why_slower(self, search: PlanSearch, rival: Candidate, selected: Selected) -> str:
        """The margin, for a rival that is faster in the simulation, too."""
        time_s: float | None = rival.time_per_minibatch_s
        if selected.simulated_s is not None:
            time_s = steady_state_s(rival.placement, search.profile, search.cluster, selected.simulated_s)
        if time_s is not None and time_s < (selected.simulated_s or math.inf):
            return f", but at most {search.options.simplest:.1%} faster in the simulation, and less simple (--simplest)"
        return super()._why_slower(search, rival, selected)


class _DataParallelPlanner(Planner):
    def rival_minibatches(self, minibatches: int | None, workers: int) -> int | None:
        """Return at least as many, spread evenly: in the last round of four on three workers, two would be idle."""
        return -(-minibatches // workers) * workers if minibatches else None

    def candidates(self, search: PlanSearch) -> list[Candidate]:
        plan = search.data_parallel(search.options.executions[0])
        return [plan] if search.evaluator.fits(plan) else []


class _ModelParallelPlanner(Planner):
    def choose(self, search: PlanSearch, candidates: Sequence[Candidate], named: Sequence[Baseline]) -> Selected:
        """Of the splits within the margin of the fastest, choose the one whose fullest worker holds the least, to
        within a few thousandths.

        Stages that take turns are equally fast wherever the cuts are, apart from messages. The cheapest cuts may leave
        all of the model on one worker, but model parallelism is meant to share its memory.
        """
        least = fastest = candidates[0]
        limit_s = fastest.time_per_minibatch_s * (1 + search.options.simplest) * TOLERANCE
        too_little = 0
        for _ in range(0 if any(fastest.placement.recompute) else _BISECTIONS):  # a plan that recomputes only just fits
            memory_bytes = (too_little + max(least.cost.searched_memory_bytes)) // 2
            cluster = replace(search.cluster, memory_bytes=max(1, memory_bytes))
            tighter = replace(search, cluster=cluster, options=replace(search.options, recompute=False))
            found = tighter.search_layout(tighter.layouts[0], fastest.placement.execution, limit_s)
            if found.fastest.time_per_minibatch_s <= limit_s:
                least = found.candidate(found.fastest)
            else:
                too_little = memory_bytes
        return super().choose(search, [least], named)

    def _why_slower(self, search: PlanSearch, rival: Candidate, selected: Selected) -> str:
        return ", but its fullest worker holds more"


class _FlushingPlanner(Planner):
    """The formulas only guess how long pipelines fill and drain, so more plans are simulated, and borders moved."""

    def choose(self, search: PlanSearch, candidates: Sequence[Candidate], named: Sequence[Baseline]) -> Selected:
        """Return the fastest in the simulation of the candidates and of the best plans of each configuration, with the
        borders of the fastest ones moved."""
        choose = super().choose
        if not search.options.simplest:
            return choose(search, candidates, named)
        plans, others = defaultdict(list), []
        if not search.options.straight:  # then each number of stages is one configuration
            bound_s = candidates[0].time_per_minibatch_s * _MAX_SLOWDOWN
            executions = dict.fromkeys(replace(plan.placement.execution, copies=1) for plan in candidates)
            others = [search.plans_by_stage_count(execution, bound_s, slower=1.0) for execution in executions]
        for plan in chain(candidates, *others):
            plans[plan.placement.config].append(plan)
        of_each = [choose(search, alike, named) for alike in plans.values()]
        fastest = sorted(of_each, key=_simulated_s)[: max(1, _MOVED_TIMES_WORKERS // search.workers)]
        moved = [move_to_faster_cuts(search, plan) for plan in fastest]
        return replace(min(moved, key=_simulated_s), simulated_plans=sum(plan.simulated_plans for plan in of_each))


class _GPipePlanner(_FlushingPlanner):
    """An update takes as many microbatches as there are workers: the same samples as with data parallelism."""

    def rival_minibatches(self, minibatches: int | None, workers: int) -> int | None:
        return minibatches or workers

    def candidates(self, search: PlanSearch) -> list[Candidate]:
        """Return the best pipeline of each number of stages, unless it is much slower than the best."""
        candidates = []
        for optimum in super().candidates(search)[:1]:
            bound_s = optimum.time_per_minibatch_s * _MAX_SLOWDOWN
            for layout in search.layouts:
                found = search.search_layout(layout, optimum.placement.execution, bound_s)
                if found.fastest.time_per_minibatch_s <= found.bound_s:
                    candidates.append(found.candidate(found.fastest))
        return sorted(candidates, key=_time_s)

    def _default_microbatches(self, workers: int, schedule: str) -> int:
        return workers

    def _size_of_update(self, placement: Placement) -> str:
        return f", {counted(placement.execution.microbatches, 'microbatch')}"


class _HybridPlanner(_FlushingPlanner):
    """An update averages as many minibatches as the first stage has replicas."""

    def candidates(self, search: PlanSearch) -> list[Candidate]:
        """Return the best plan of each number of minibatches in an update, unless it is much slower than the best so
        far.

        On many workers, search only numbers that divide them, or that leave a divisor of them to the other stages.
        """
        workers, best_s = search.workers, math.inf
        slowdown = _MAX_SLOWDOWN if search.options.simplest else 1.0  # with which others are simulated, too
        candidates: list[Candidate] = []
        for microbatches in reversed(range(2, workers)):
            is_usual = workers % microbatches == 0 or workers % (workers - microbatches) == 0
            if is_usual or self.searches_all_updates(search):
                options = replace(search.options, microbatches=microbatches)
                found = super().candidates(replace(search, options=options, bound_s=best_s * slowdown))[:1]
                best_s = min([best_s, *map(_time_s, found)])
                candidates += found
        return sorted(candidates, key=_time_s)

    def searches_all_updates(self, search: PlanSearch) -> bool:
        return search.workers <= _MAX_WORKERS_WITH_ALL_MINIBATCHES

    def _default_microbatches(self, workers: int, schedule: str) -> int:
        return workers - 1  # the most that its first stage can have; all smaller numbers are searched, too


class _AsyncDataParallelPlanner(Planner):
    def candidates(self, search: PlanSearch) -> list[Candidate]:
        """One worker with as many minibatches in flight as there would be workers: each further one delays gradients by
        one update, as if workers updated in turns."""
        evaluator, names = search.evaluator, search.profile.graph.names
        plan = evaluator.place([names], [[0]], search.options.executions[0], in_flight=[search.workers])
        if not evaluator.fits(plan):
            needed = format_bytes(max(plan.cost.searched_memory_bytes))
            raise NoPlanError(
                f"one worker with {search.workers} minibatches in flight imitates the {search.workers} workers of "
                f"{self.strategy.label}. It needs {needed}, but has {format_bytes(search.cluster.memory_bytes or 0)}",
                "pass a smaller --workers, or profile with a smaller --batch-size",
            )
        return [plan]


PLANNERS = {
    name: planner(STRATEGIES[name])
    for name, planner in {
        "auto": _OwnPlanner,
        "pipeline": _OwnPlanner,
        "straight": _OwnPlanner,
        "data-parallel": _DataParallelPlanner,
        "model-parallel": _ModelParallelPlanner,
        "gpipe": _GPipePlanner,
        "hybrid": _HybridPlanner,
        "async-data-parallel": _AsyncDataParallelPlanner,
    }.items()
}


def planner_asked_for(asked: PartitionOptions) -> Planner:
    """Return the planner of the strategy that is asked for; raises UsageError for `--straight` with another one."""
    if not asked.straight:
        return PLANNERS[asked.strategy]
    if asked.strategy not in ("auto", "straight"):
        raise UsageError(f"--straight and --strategy {asked.strategy} cannot be combined", "pass only one")
    return PLANNERS["straight"]


def baselines(search: PlanSearch, execution: ExecutionConfig) -> Iterator[Baseline]:
    """Yield each baseline on the workers that may be used; straight ones on one worker per stage. All take the
    minibatches of an update from `execution`; data parallelism takes more if some of its workers would be idle.

    GPipe and model parallelism reuse the stages of the straight pipeline, which needs no further search. Their own
    planners find their best plans.
    """
    execution = replace(execution, copies=1)
    minibatches = execution.minibatches_per_update
    data_parallel, *on_straight_stages = map(PLANNERS.__getitem__, BASELINES)
    on_all_workers = execution.averaging(data_parallel.rival_minibatches(minibatches, search.workers))
    plan = search.evaluator.data_parallel(search.workers, on_all_workers)
    yield data_parallel.title(plan.placement), plan
    if straight := _straight_pipeline(search, execution):
        stages, workers = straight.placement.stages, straight.placement.workers
        for planner in on_straight_stages:
            own = planner.averaging(planner.options(PartitionOptions(), search.workers), minibatches).executions[0]
            plan = straight if planner.strategy.is_own else search.evaluator.place(stages, workers, own)
            yield planner.title(plan.placement), plan
    yield ONE_WORKER, search.evaluator.data_parallel(1, execution)


def _straight_pipeline(search: PlanSearch, execution: ExecutionConfig) -> Candidate | None:
    """Return the fastest pipeline of one worker a stage on as many workers as the model can be cut for; None: none
    fits, or the strategy has plans of one stage only."""
    if not STRATEGIES[search.options.strategy].is_searched:
        return None
    depth = min(search.workers, search.whole_space.max_stages, MAX_WORKERS_PER_COPY)
    any_replicas = search.search_layout(Layout.whole(search.cluster, depth), execution)
    layout_search = replace(any_replicas, replicas=(1,) * depth)
    fastest = layout_search.fastest
    is_possible = depth > 1 and fastest.time_per_minibatch_s < float("inf")
    return layout_search.candidate(fastest) if is_possible else None


def choose_plan(search: PlanSearch) -> tuple[Selected, list[Candidate], list[Baseline]]:
    """Return the plan that the strategy of a search chooses, and what it was chosen from: the best plans by the
    formulas, the fastest first, and plans that everyone asks about. Raises NoPlanError if no plan is possible."""
    planner, candidates = PLANNERS[search.options.strategy], best_candidates(search)
    named = planner.baselines(search, candidates[0])
    return planner.choose(search, candidates, named), candidates, named


def best_candidates(search: PlanSearch) -> list[Candidate]:
    """Return the best plans by the formulas, the fastest first; raises NoPlanError if no plan is possible."""
    if not (candidates := PLANNERS[search.options.strategy].candidates(search)):
        raise explain_infeasible(search)
    for candidate in candidates:
        seconds = format_seconds(candidate.time_per_minibatch_s)
        _LOG.debug("searched: %s takes %s by the formulas", candidate.placement.config, seconds)
    return candidates


def _flushes(schedule: str | None) -> bool:
    """Whether a schedule always flushes; `auto` may choose one that does not."""
    return schedule in SCHEDULES and SCHEDULES[schedule].flushes


def _simulated_s(plan: Selected) -> float:
    return math.inf if plan.simulated_s is None else plan.simulated_s


def _time_s(plan: Candidate) -> float:
    return plan.time_per_minibatch_s


def _identity(plan: Candidate) -> tuple[str, str, bool]:
    placement = plan.placement
    return placement.config, placement.execution.schedule, set(placement.in_flight) == {1}
