"""The search over schedules, layouts and stages for the fastest plans by the cost formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, product

import numpy as np

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.errors import UsageError
from pdtool.planner.formulas import TOLERANCE
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Candidate, Evaluator
from pdtool.planner.search.cuts import CutSpace, find_cuts
from pdtool.planner.search.layouts import (
    MAX_WORKERS_PER_COPY,
    Layout,
    LayoutSearch,
    Solution,
    layouts,
    searches_all_blocks,
    workers_per_part,
)
from pdtool.schedule import SCHEDULES, STRATEGIES, ExecutionConfig, schedule_names
from pdtool.units import counted

_SEARCHED = [kind for kind in SCHEDULES.values() if kind.has_formulas]
_MAX_TIME_S = np.finfo(float).max
_STAGES_TIMES_WORKERS = 1024  # a plan with more is taken only if it is the fastest
MAX_WORKERS_WITH_CONFIGURATIONS = 8  # with more, looking at every configuration takes seconds
_CONFIGURED_CUTS = 200  # between which their stages lie
# For each: the fastest plan, and those that compute and send least within these fractions of its time.
_SLACKS = (None, 0.0, 0.1, 0.5)
_STAGE_COUNTS_LISTED = 5  # of each layout: the best plans of at most 1, 2, ... stages


@dataclass(frozen=True)
class PlanSearch:
    """The search for one profile on one cluster; raises UsageError for options that make no sense.

    Attributes:
        bound_s: plans that take longer per minibatch are not looked for.
    """

    profile: Profile
    cluster: Cluster
    options: PlanOptions
    _spaces: dict[int, CutSpace] = field(default_factory=dict)
    bound_s: float = np.inf

    def __post_init__(self) -> None:
        options = self.options
        searched = [*(kind.name for kind in _SEARCHED), "auto"]
        if options.schedule not in searched:
            raise UsageError(
                f"the search has no formulas for schedule {options.schedule!r}", f"choose one of {', '.join(searched)}"
            )
        has_microbatches = options.schedule == "auto" or SCHEDULES[options.schedule].flushes
        if options.microbatches > 1 and not has_microbatches:
            flushing = schedule_names(lambda kind: kind.has_formulas and kind.flushes)
            what = f"schedule {options.schedule} cannot be combined with --microbatches {options.microbatches}"
            raise UsageError(what, f"leave --microbatches out, or use --schedule {flushing}")
        if not 1 <= self.workers <= self.cluster.workers:
            what = f"--workers is {self.workers}, but the cluster has {counted(self.cluster.workers, 'worker')}"
            raise UsageError(what, f"pass {self.cluster.workers} or fewer")
        if options.straight and self.workers > MAX_WORKERS_PER_COPY:
            what = f"{self.workers} workers are too many for a straight pipeline"
            raise UsageError(what, f"pass at most {MAX_WORKERS_PER_COPY}")

    @cached_property
    def evaluator(self) -> Evaluator:
        """The cost of any plan under these options."""
        return Evaluator(self.profile, self.cluster, self.options)

    @property
    def workers(self) -> int:
        """Number of workers that may be used."""
        if self.options.replicas:
            return sum(self.options.replicas)
        return self.cluster.workers if self.options.workers is None else self.options.workers

    def allows(self, placement: Placement) -> bool:
        """Whether a plan has the number of stages, and the replicas, that were asked for."""
        options = self.options
        return options.min_stages <= len(placement.stages) and options.replicas in (None, placement.replicas)

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layouts to search, small blocks first."""
        if self.options.straight:
            depths = STRATEGIES[self.options.strategy].depths(self.workers, self.whole_space.max_stages)
            return [Layout.whole(self.cluster, depth) for depth in depths]
        if self.options.replicas:
            return [Layout.whole(self.cluster, self.workers)]
        found = layouts(self.cluster, self.workers, all_workers=self.options.cost_model != "ours")
        return [layout for layout in found if layout.workers <= MAX_WORKERS_PER_COPY]

    def space(self, workers: int) -> CutSpace:
        """Return the stages that are searched on so many workers: the more workers, the fewer cuts can be searched."""
        max_cuts = self.options.max_cuts * 16 // max(16, workers)
        if max_cuts not in self._spaces:
            space = next((space for limit, space in sorted(self._spaces.items()) if limit > max_cuts), None)
            if space is None or space.cut_count > max_cuts:
                space = find_cuts(self.profile, max_cuts, space)
            self._spaces[max_cuts] = space
        return self._spaces[max_cuts]

    @property
    def whole_space(self) -> CutSpace:
        """The stages that are searched on all the workers."""
        return self.space(min(self.workers, MAX_WORKERS_PER_COPY))

    @property
    def without_memory_limit(self) -> PlanSearch:
        """The search without a memory limit; itself if the limit cannot have lost a plan.

        With a limit, two kinds of plans are lost. Operators without cost are merged with a neighbour whatever they
        stash, but only a plan that separates them may fit. And on a large cluster, plans that leave the last workers
        idle are tried only without a limit. Without a limit none is lost, and the optimum bounds all plans.
        """
        is_complete = searches_all_blocks(self.cluster) and not self.whole_space.merged_free_blocks
        if is_complete or self.cluster.memory_bytes is None:
            return self
        return PlanSearch(self.profile, replace(self.cluster, memory_bytes=None), self.options, self._spaces)

    @cached_property
    def smallest_plan(self) -> Candidate | None:
        """The plan whose most loaded worker needs the least memory, with every stage recomputing where that is allowed.

        Links do not matter, so the largest block has the plans of all smaller ones.
        """
        executions = self.options.executions
        found: list[Candidate | None] = [self.data_parallel(execution) for execution in executions]
        if STRATEGIES[self.options.strategy].is_searched:
            layouts = self.layouts if self.options.straight else self.layouts[-1:]
            found = [self.search_layout(*pair).least_memory() for pair in product(layouts, executions)]
        placements = [plan.placement for plan in found if plan]
        plans = (
            self.evaluator.place(p.stages, p.workers, p.execution, recompute=[self.options.recompute] * len(p.stages))
            for p in placements
        )
        return min(plans, key=lambda plan: max(plan.cost.searched_memory_bytes), default=None)

    @property
    def may_fit(self) -> bool:
        """Whether some plan fits in memory, however slow it is."""
        return self.smallest_plan is not None and self.evaluator.fits(self.smallest_plan)

    def search_layout(self, layout: Layout, execution: ExecutionConfig, bound_s: float = np.inf) -> LayoutSearch:
        """Return the search of one layout under one schedule, for plans of at most `bound_s` per minibatch."""
        return LayoutSearch(
            evaluator=self.evaluator,
            space=self.space(layout.workers),
            layout=layout,
            execution=replace(execution, copies=layout.copies),
            bound_s=bound_s * TOLERANCE,
            replicas=(1,) * layout.workers if self.options.straight else self.options.replicas,
            min_stages=self.options.min_stages,
        )

    def fastest_plans(self) -> list[Candidate]:
        """Return the fastest plan of each layout and schedule that may be within the margin, fastest first.

        The first one is the optimum by the formulas. The list is empty if no plan fits.
        """
        searches = self._layout_searches
        plans = [*self._data_parallel_plans, *(search.candidate(search.fastest) for search in searches)]
        if self.options.in_flight:  # the searches take no more of these than usual
            plans = [plan for plan in plans if self.evaluator.fits(plan)]
        return sorted(plans, key=lambda plan: (plan.time_per_minibatch_s, _schedule_rank(plan.placement.execution)))

    def simplest_plan(self, bound_s: float) -> Candidate | None:
        """Return a plan of at most `bound_s` per minibatch with the fewest stages; ties: data parallelism, then one
        copy, then the fastest. None if only plans with many stages are so fast."""
        bound_s *= TOLERANCE
        fitting = [plan for plan in self._data_parallel_plans if plan.time_per_minibatch_s <= bound_s]
        if fitting:
            return fitting[0]
        searches = [search for search in self._layout_searches if search.fastest.time_per_minibatch_s <= bound_s]
        by_stages = [(search, search.solutions()) for search in searches]
        for _ in range(max(4, _STAGES_TIMES_WORKERS // self.workers)):
            solutions = [(search, solution) for search, rest in by_stages if (solution := next(rest, None))]
            fast = [entry for entry in solutions if entry[1].time_per_minibatch_s <= bound_s]
            if fast:
                search, solution = min(fast, key=_simplicity)
                return search.candidate(solution)
        return None

    def plans_by_stage_count(self, execution: ExecutionConfig, bound_s: float, slower: float) -> Iterator[Candidate]:
        """Yield, for each layout, the best plans of at most 1, 2, ... stages and of any number that take less than
        `bound_s` per minibatch. Fill and drain do not count, because the formulas overestimate them for uneven stages.
        The search uses few cuts, so these are only roughly the best.

        Args:
            slower: search as if links were slower by this factor, for plans that send less.
        """
        slow_cluster = self.cluster.slower(slower)
        searched = self.layouts
        if self.workers > MAX_WORKERS_WITH_CONFIGURATIONS and not self.options.straight:
            # with a memory limit, blocks whose last workers are idle are layouts of their own, with similar plans
            searched = list({(layout.sizes, layout.grid): layout for layout in searched}.values())
        for layout in searched:
            search = self.search_layout(replace(layout, cluster=slow_cluster), execution, bound_s)
            if self.workers <= MAX_WORKERS_WITH_CONFIGURATIONS:
                if slower == 1:
                    yield from search.over_cuts(_CONFIGURED_CUTS).configurations(_SLACKS)
                if slower == 1 or not execution.kind.flushes:
                    continue
            search = search.coarser
            if not search.fastest.tables:
                continue
            best_s = bound_s
            for solution in (*islice(search.solutions(), _STAGE_COUNTS_LISTED), search.fastest):
                if search.without_flush_s(solution) < best_s:
                    best_s = search.without_flush_s(solution)
                    yield from search.candidates(solution)

    def plans_on_whole_servers(self, execution: ExecutionConfig, bound_s: float) -> Iterator[Candidate]:
        """Yield, on more than eight workers, the best plan of each configuration whose stages take whole servers, or
        other equal parts of the cluster.

        By the formulas others may be as fast. In a simulation these are often faster: fewer stages share a
        link, and averaging stays inside the servers.
        """
        if self.workers <= MAX_WORKERS_WITH_CONFIGURATIONS or self.options.straight or self.options.replicas:
            return
        if unit := workers_per_part(self.cluster, self.workers):
            search = self.search_layout(Layout.whole(self.cluster, self.workers), execution, bound_s)
            yield from replace(search, unit=unit).configurations((0.0,))

    def data_parallel(self, execution: ExecutionConfig) -> Candidate:
        """Return data parallelism on as many usable workers as have a minibatch in every update."""
        return self.evaluator.data_parallel(min(self.workers, execution.update_every or self.workers), execution)

    @cached_property
    def _data_parallel_plans(self) -> Sequence[Candidate]:
        """Data parallelism under each schedule, if it fits and was not excluded."""
        if (self.options.straight and self.workers > 1) or self.options.min_stages > 1:
            return []
        plans = map(self.data_parallel, self.options.executions)
        return [plan for plan in plans if self.evaluator.fits(plan)]

    @cached_property
    def _layout_searches(self) -> list[LayoutSearch]:
        """The search of each layout and schedule that has a plan within the margin of the fastest one."""
        best_s = min([self.bound_s, *(plan.time_per_minibatch_s for plan in self._data_parallel_plans)])
        pairs = [(layout, execution) for layout in self.layouts for execution in self.options.executions]
        for layout, execution in pairs:  # the small ones first: their bounds spare most of the work on the large ones
            best_s = min(best_s, self.search_layout(layout, execution, best_s).rough_time_s())
        if best_s == np.inf and not self.options.in_flight and not self.may_fit:
            return []  # without a bound, all these searches would take long
        searches = []
        for layout, execution in reversed(pairs):
            search = self.search_layout(layout, execution, best_s * (1 + self.options.simplest))
            if search.fastest.time_per_minibatch_s <= min(search.bound_s, _MAX_TIME_S):
                searches.append(search)
                best_s = min(best_s, search.fastest.time_per_minibatch_s)
        return searches


def _schedule_rank(execution: ExecutionConfig) -> int:
    return _SEARCHED.index(execution.kind)


def _simplicity(entry: tuple[LayoutSearch, Solution]) -> tuple[int, float, int]:
    search, solution = entry
    return search.layout.copies, solution.time_per_minibatch_s, _schedule_rank(search.execution)
