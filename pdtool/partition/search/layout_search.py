"""The best pipelines of one layout under one schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pdtool.partition.cost.formulas import CostModel, members_between
from pdtool.partition.cost.plan_cost import Candidate, Evaluator
from pdtool.partition.placement import ExecutionConfig
from pdtool.partition.search.device_blocks import Layout
from pdtool.partition.search.dynamic_programming import DynamicProgram, StageSpan
from pdtool.partition.search.search_space import SearchSpace
from pdtool.partition.stage_loads import Array

_COARSE_CUTS = 160  # of a first, rough search: this many over the square root of the workers


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
        max_stages, min_stages: that a plan may have.
    """

    evaluator: Evaluator
    space: SearchSpace
    layout: Layout
    execution: ExecutionConfig
    replicas: tuple[int, ...] | None = None
    bound_s: float = np.inf
    max_stages: int
    min_stages: int = 1

    @cached_property
    def model(self) -> CostModel:
        """The formulas on this layout."""
        pipeline_members = members_between(self.layout.block, 0, self.layout.workers)
        return self.evaluator.model(self.layout.block, self.execution, pipeline_members, self.layout.copy_members)

    @cached_property
    def program(self) -> DynamicProgram:
        """The recurrence, solved as far as it was asked for."""
        return self._program()

    def _program(self, *, minimize_memory: bool = False) -> DynamicProgram:
        return DynamicProgram(
            self.space,
            self.model,
            self.layout.workers,
            self.replicas,
            self.bound_s,
            minimize_memory=minimize_memory,
            min_stages=self.min_stages,
        )

    @property
    def is_promising(self) -> bool:
        """Whether there are workers enough to compute within the bound."""
        work_s = float(self.space.forward_backward_s[-1])
        return work_s / (self.layout.workers * self.layout.copies) <= self.bound_s

    @property
    def _counts_stages(self) -> bool:
        """Whether it matters how many stages a plan has."""
        is_limited = self.max_stages < min(self.layout.workers, self.space.cuts.max_stages)
        return is_limited or self.space.cuts.has_counted_pins

    @property
    def _stage_counts(self) -> Sequence[int]:
        return [len(self.replicas)] if self.replicas else range(1, min(self.max_stages, self.layout.workers) + 1)

    @cached_property
    def fastest(self) -> Solution:
        """The best of all `solutions`; without looking at each number of stages where nothing depends on it."""
        program = self.program
        unlimited = program.any_number_of_stages
        if not self.model.drains and not self._counts_stages:
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

    def rough_time_s(self) -> float:
        """Return a time per minibatch that can be had, found in a small part of the space: a bound for the search."""
        coarser = self.coarser
        return self.bound_s if coarser.space is self.space else min(self.bound_s, coarser.fastest.time_per_minibatch_s)

    @property
    def coarser(self) -> LayoutSearch:
        """The same over few cuts."""
        return replace(self, space=self.space.coarser(int(_COARSE_CUTS * self.layout.workers**-0.5)))

    def candidate(self, solution: Solution) -> Candidate:
        """Return the plan behind a solution."""
        return self._traced(self.program.trace(solution.tables))

    def candidates(self, solution: Solution) -> Iterator[Candidate]:
        """Yield the plan behind a solution, then one of as many stages on all workers, if that is within the bound.

        Of plans that are equally fast by the formulas, the first has the fewest workers. A simulation may show the
        second to be faster: its other stages have more time to spare, and less to send over each link.
        """
        yield self.candidate(solution)
        values = solution.tables[-1]
        if self.program.first_worker(values) and values[0, 0, 0] <= self.bound_s:
            yield self._traced(self.program.trace(solution.tables, first_worker=0))

    def least_memory(self) -> Candidate | None:
        """Return the plan whose largest stage needs the least memory, whatever time it takes; None: there is none."""
        program = self._program(minimize_memory=True)
        if self._counts_stages:
            tables_by_count = (self._tables(program, stages) for stages in self._stage_counts)
            tables = min(tables_by_count, key=lambda tables: program.best(tables[-1]))
        else:
            tables = [program.any_number_of_stages]
        return self._traced(program.trace(tables)) if np.isfinite(program.best(tables[-1])) else None

    def _tables(self, program: DynamicProgram, stages: int) -> list[Array]:
        if self.space.cuts.has_counted_pins:
            return program.exactly(stages)
        if self.replicas:  # whatever uses all workers has these stages
            return [program.any_number_of_stages]
        program.at_most(stages)
        return program.values_by_count[: stages + 1]

    def _traced(self, spans: Sequence[StageSpan]) -> Candidate:
        layout, names = self.layout, self.evaluator.profile.graph.names
        stages = []
        for span in spans:
            nodes = set(self.space.cuts.nodes(span.before, span.after))
            stages.append([name for name in names if name in nodes])
        positions = [range(span.first_worker, span.first_worker + span.replicas) for span in spans]
        workers = [[layout.worker(c, p) for p in stage for c in range(layout.copies)] for stage in positions]
        if len(stages) == 1:  # copies of one stage are data parallelism
            execution = replace(self.execution, copies=1)
            return self.evaluator.place(stages, [sorted(workers[0])], execution)
        return self.evaluator.place(stages, workers, self.execution)
