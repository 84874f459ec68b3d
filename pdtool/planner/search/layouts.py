"""Layouts: where a pipeline may lie in a cluster, and the best pipelines of one layout under one schedule.

A pipeline lies on the whole cluster or on a smaller block. Several copies of it lie on equal blocks side by side:

    copies of 1x4 in 4x4   | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 |      each is one server's own pipeline
    copies of 1x2 in 2x4   | 0 0 1 1 | 2 2 3 3 |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pdtool.artifacts.cluster import Cluster
from pdtool.planner.formulas import TOLERANCE, CostModel, members_of
from pdtool.planner.plan_cost import Candidate, Evaluator
from pdtool.planner.search.configurations import Configurations
from pdtool.planner.search.cuts import CutSpace
from pdtool.planner.search.dynamic_programming import DynamicProgram, StageSpan
from pdtool.planner.stage_costs import Array
from pdtool.schedule import ExecutionConfig

MAX_WORKERS_PER_COPY = 256  # the search looks at every worker as the first one of every stage
# In larger clusters, blocks that leave out some of the devices of every server are not looked at.
_MAX_WORKERS_WITH_PARTIAL_BLOCKS = 64
_MIN_PARTS, _MAX_PARTS = 3, 8  # of a cluster, of which every way to share them among stages is looked at
_COARSE_CUTS = 160  # cuts of a first, rough search: this many over the square root of the workers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Blocks of a cluster, one for each copy of the pipeline.

    Attributes:
        sizes: members of each level in one block.
        grid: blocks side by side at each level.
        workers: how many of a block's workers may be used, the first ones.
        spare: how many of the last of these a pipeline may leave idle; it may leave any of the first ones idle, too.
    """

    cluster: Cluster
    sizes: tuple[int, ...]
    grid: tuple[int, ...]
    workers: int
    spare: int = 0

    @classmethod
    def whole(cls, cluster: Cluster, workers: int) -> Layout:
        """Return one copy on the first workers of a cluster."""
        sizes = tuple(level.size for level in cluster.levels)
        return cls(cluster=cluster, sizes=sizes, grid=(1,) * len(sizes), workers=workers)

    @property
    def copies(self) -> int:
        """Number of blocks."""
        return math.prod(self.grid)

    @property
    def period(self) -> int:
        """Workers after which the block repeats: those of a member of its outermost level that has several."""
        outermost = next((depth for depth, size in enumerate(self.sizes) if size > 1), len(self.sizes))
        return math.prod(self.sizes[outermost + 1 :])

    @cached_property
    def block(self) -> Cluster:
        """The first block as a cluster of its own."""
        levels = zip(self.cluster.levels, self.sizes, strict=True)
        return replace(self.cluster, levels=tuple(replace(level, size=size) for level, size in levels))

    def worker(self, copy: int, position: int) -> int:
        """Return the number in the cluster of the worker at a position in the block of a copy."""
        number = 0
        for size, blocks, below in reversed(list(zip(self.sizes, self.grid, self.cluster.below, strict=True))):
            number += (copy % blocks * size + position % size) * below
            copy, position = copy // blocks, position // size
        return number


def layouts(cluster: Cluster, workers: int, *, all_workers: bool = False) -> list[Layout]:
    """Return all blocks and numbers of copies worth searching with at most `workers` workers, small blocks first.

    One copy may begin and end anywhere, unless it must use `all_workers`. Shifted by one outermost member it is equally
    fast, so let it end on one of the last member's workers. Without a memory limit, these ends are one layout. With
    one, each end is a layout of its own, because minibatches in flight depend on the workers from a stage to the end.
    Larger clusters then have the last end only.

    Blocks for one copy: the whole, and for each level all smaller blocks below it, so that a larger cluster has all
    blocks of a smaller one. Blocks for several copies: for each size of block, as many as there is room for. If there
    are too many workers for one copy on all of them, only a half, a quarter, an eighth ... of each level.
    """
    whole = tuple(level.size for level in cluster.levels)
    one_block = (1,) * len(whole)
    shapes = {(whole, one_block)}
    for depth, size in enumerate(whole):
        one_member = one_block[: depth + 1]
        if depth and searches_all_blocks(cluster):
            shapes |= {((*whole[:depth], part, *whole[depth + 1 :]), one_block) for part in range(1, size)}
        shapes.add(((*one_member, *whole[depth + 1 :]), one_block))
        parts = range(1, size + 1) if workers <= MAX_WORKERS_PER_COPY else [2**n for n in range(size.bit_length())]
        for blocks in {size // (size // part) for part in parts}:
            grid = (*whole[:depth], blocks, *one_block[depth + 1 :])
            shapes.add(((*one_block[:depth], size // blocks, *whole[depth + 1 :]), grid))
    found = []
    for sizes, grid in shapes:
        used = min(math.prod(sizes), workers // math.prod(grid))
        if used and (used == math.prod(sizes) > 1 or grid == one_block):
            layout = Layout(cluster=cluster, sizes=sizes, grid=grid, workers=used)
            spare = 0 if all_workers or layout.copies > 1 else min(layout.period, used) - 1
            if cluster.memory_bytes is None:
                found.append(replace(layout, spare=spare))
            else:
                spare *= searches_all_blocks(cluster)
                found += [replace(layout, workers=used - idle) for idle in range(spare + 1)]
    return sorted(found, key=lambda layout: (layout.workers, layout.copies, layout.sizes))


def workers_per_part(cluster: Cluster, workers: int) -> int | None:
    """Return the size of equal parts of a cluster, three to eight: whole servers, else a divisor or multiple of a
    server's workers; None: there is none."""
    server = cluster.below[0]
    sizes = [n for n in range(1, workers // _MIN_PARTS + 1) if workers % n == 0 and workers // n <= _MAX_PARTS]
    if server in sizes:
        return server
    return max((n for n in sizes if server % n == 0 or n % server == 0 or server == 1), default=None)


def searches_all_blocks(cluster: Cluster) -> bool:
    """Whether a cluster is small enough to try blocks that leave out devices of every server, and, under a memory
    limit, every worker as the last one."""
    return cluster.workers <= _MAX_WORKERS_WITH_PARTIAL_BLOCKS


@dataclass(frozen=True)
class Solution:
    """The best plan of at most some number of stages: its time, fill and drain included, and the tables to trace it."""

    time_per_minibatch_s: float
    tables: list[Array]


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """The recurrence on one layout.

    Attributes:
        execution: how the plans are run; its copies are those of the layout.
        replicas: of each stage, on all workers of the layout; None: any.
        bound_s: plans that take longer per minibatch are not looked for.
        min_stages: that a plan must have.
        unit: workers; each stage has a multiple of it.
    """

    evaluator: Evaluator
    space: CutSpace
    layout: Layout
    execution: ExecutionConfig
    replicas: tuple[int, ...] | None = None
    bound_s: float = np.inf
    min_stages: int = 1
    unit: int = 1

    @cached_property
    def model(self) -> CostModel:
        """The formulas on this layout."""
        layout = self.layout
        copy_members = members_of(layout.cluster, [layout.worker(copy, 0) for copy in range(layout.copies)])
        return self.evaluator.model(layout.block, self.execution, copy_members)

    @cached_property
    def program(self) -> DynamicProgram:
        """The recurrence, solved as far as it was asked for."""
        return self._program(self.bound_s)

    def _program(self, bound: float, *, minimize_memory: bool = False) -> DynamicProgram:
        limits = bound, minimize_memory, self.min_stages, self.layout.spare, self.unit
        return DynamicProgram(self.space, self.model, self.layout.workers, self.replicas, *limits)

    @property
    def _stage_counts(self) -> Sequence[int]:
        if self.replicas:
            return [len(self.replicas)]
        return range(1, min(self.space.max_stages, self.layout.workers) + 1)

    @cached_property
    def fastest(self) -> Solution:
        """The best of all `solutions`. Skip the loop over numbers of stages if nothing depends on them, and everything
        if there are too few workers to compute within the bound."""
        work_s = float(self.space.loads.forward_backward_s[-1])
        if work_s / (self.layout.workers * self.layout.copies) > self.bound_s:
            return Solution(np.inf, [])
        program = self.program
        unlimited = program.any_number_of_stages
        if not self.model.drains and not self.space.has_counted_pins:
            return Solution(program.best(unlimited), [unlimited])
        best = Solution(np.inf, [])
        for stages, solution in zip(self._stage_counts, self.solutions(), strict=True):
            best = min(best, solution, key=lambda entry: entry.time_per_minibatch_s)
            if program.best(unlimited) * self.model.flush_factor(stages + 1) >= best.time_per_minibatch_s:
                break  # more stages cannot make up for their longer fill and drain
        return best

    def solutions(self) -> Iterator[Solution]:
        """Yield the best plans of at most 1, 2, ... stages; of exactly so many where a pin counts stages; the best one
        with the replicas that were given."""
        program = self.program
        for stages in self._stage_counts:
            tables = self._tables(program, stages)
            yield Solution(program.best(tables[-1]) * self.model.flush_factor(stages), tables)

    def without_flush_s(self, solution: Solution) -> float:
        """Return the seconds per minibatch of a solution while its pipeline is full."""
        return self.program.best(solution.tables[-1])

    def rough_time_s(self) -> float:
        """Return a feasible time per minibatch from a small part of the space, as a bound for the search."""
        coarser = self.coarser
        return self.bound_s if coarser.space is self.space else min(self.bound_s, coarser.fastest.time_per_minibatch_s)

    @property
    def coarser(self) -> LayoutSearch:
        """The same over few cuts."""
        return self.over_cuts(int(_COARSE_CUTS * self.layout.workers**-0.5))

    def over_cuts(self, max_cuts: int) -> LayoutSearch:
        """Return the same over at most so many cuts."""
        return replace(self, space=self.space.coarser(max_cuts))

    def candidate(self, solution: Solution) -> Candidate:
        """Return the plan behind a solution."""
        return self._traced(self.program.trace(solution.tables))

    def candidates(self, solution: Solution) -> Iterator[Candidate]:
        """Yield the plan behind a solution, then one of as many stages on all workers, if that is within the bound.

        Among plans that are equally fast by the formulas, the first has the fewest workers. In a simulation the second
        may be faster: its other stages have more time to spare, and less to send over each link.
        """
        yield self.candidate(solution)
        values = solution.tables[-1]
        if self.program.first_worker(values) and values[0, 0, 0] <= self.bound_s:
            yield self._traced(self.program.trace(solution.tables, first_worker=0))

    def configurations(self, slacks: Sequence[float | None]) -> Iterator[Candidate]:
        """Yield plans of each configuration within the bound, the fastest configuration first: its fastest plan, and
        for each slack the plan that computes and sends least among those at most that fraction slower."""
        stage_counts = [stages for stages in self._stage_counts if stages >= self.min_stages]
        found = Configurations(self.program, stage_counts)
        for slots in sorted(found.times_s, key=found.times_s.__getitem__):
            plans = (found.plan(slots, slack) for slack in slacks)
            yield from map(self._traced, dict.fromkeys(filter(None, plans)))

    def least_memory(self) -> Candidate | None:
        """Return the plan whose largest stage needs the least memory, whatever time it takes; None: there is none."""
        coarser, limit_bytes = self.coarser, np.inf
        if coarser.space is not self.space and not self.space.has_counted_pins:
            rough = coarser._program(np.inf, minimize_memory=True)
            limit_bytes = rough.best(rough.any_number_of_stages) * TOLERANCE
        program = self._program(limit_bytes, minimize_memory=True)
        tables = [program.any_number_of_stages]
        if self.space.has_counted_pins:
            tables = min(map(program.exactly, self._stage_counts), key=lambda tables: program.best(tables[-1]))
        return self._traced(program.trace(tables)) if np.isfinite(program.best(tables[-1])) else None

    def _tables(self, program: DynamicProgram, stages: int) -> list[Array]:
        if self.space.has_counted_pins:
            return program.exactly(stages)
        if self.replicas:  # whatever uses all workers has these stages
            return [program.any_number_of_stages]
        return program.at_most(stages)

    def _traced(self, spans: Sequence[StageSpan]) -> Candidate:
        layout, names = self.layout, self.evaluator.profile.graph.names
        stages = []
        for span in spans:
            nodes = set(self.space.nodes(span.before, span.after))
            stages.append([name for name in names if name in nodes])
        positions = [range(span.first_worker, span.first_worker + span.replicas) for span in spans]
        workers = [[layout.worker(c, p) for p in stage for c in range(layout.copies)] for stage in positions]
        if len(stages) == 1:  # copies of one stage are data parallelism
            execution = replace(self.execution, copies=1)
            return self.evaluator.place(stages, [sorted(workers[0])], execution)
        return self.evaluator.place(stages, workers, self.execution)
