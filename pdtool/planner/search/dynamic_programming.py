"""The fastest pipeline by dynamic programming over (cut, worker), from the last stage to the first.

PipeDream, SOSP'19, section 3.1: A(j, m) = min over i, m' of max(A(i, m - m'), 2 a_i / B, T(i+1..j, m')). Here it runs
on cuts of a DAG instead of prefixes of a chain, and from the back: then it knows the workers after a stage, and with
them the stage's minibatches in flight and memory. Stages take contiguous workers in order, so it knows which links each
stage's all-reduce and border cross. Contention for a link is left to plan_cost and the simulator.

                cut i                       cut j
      ... stage   |           stage           |   stages after it   |  end
      q workers   |  r workers  f .. f+r-1    |  f+r .. U-1         |
              (3) ^ border    (1) own time         (2) V[j, f+r, r]

    (1)  the stage computes and averages its gradients
    (2)  everything after it, found before
    (3)  traffic over the border before it, which depends on the q workers on the other side
    (4)  V[i, f, q] = min over (j, r) of max((1), (2), (3)); V[end, U, q] = 0
    (5)  the best whole plan is V[0, f, 0], which leaves the first f workers idle; its stages are traced from there
    V[end, u, q] = 0 for u >= U - spare, too: these workers may be idle

Without pipelining nothing overlaps, and the sum of (1), (2) and (3) replaces their maximum.

    i, j: cuts before and after a stage    f: its first worker    r: its replicas    q: those of the stage before it

Complexity: O(c² U²) stages for c cuts and U workers, less what the bound prunes, and U times that if a border may be
the slowest part. All but the loop over i is numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, combinations, pairwise

import numpy as np

from pdtool.planner.formulas import TOLERANCE, CostModel, fractions_on_members, members_between
from pdtool.planner.search.cuts import CutSpace
from pdtool.planner.stage_costs import Array, Number, StageLoad


@dataclass(frozen=True)
class StageSpan:
    """One stage: the cuts around it, its first worker, its replicas."""

    before: int
    after: int
    first_worker: int
    replicas: int


@dataclass(frozen=True)
class CandidateStages:
    """Stages that may be part of a plan: arrays of one element each.

    Attributes:
        begin, end: the cuts before and after the stage.
        first, replicas: its first worker, and how many it has.
        value: (1), what is minimised: seconds per minibatch, or bytes where memory is minimised.
        border_bytes: over the border before the stage; `CostModel.border_s` of them is (3).
    """

    begin: Array
    end: Array
    first: Array
    replicas: Array
    value: Array
    border_bytes: Array

    def select(self, index: Array) -> CandidateStages:
        """Return the stages at these positions."""
        return CandidateStages(*(column[index] for column in vars(self).values()))


@dataclass
class DynamicProgram:
    """The recurrence on workers 0 .. U-1 of one copy of the pipeline.

    Args:
        workers: U.
        replicas: of each stage, on all U workers, so that a stage's first worker says which it is; None: any.
        bound_s: plans that take longer per minibatch are not looked for; bytes where memory is minimised.
        minimize_memory: minimise the largest memory of a stage instead of the time, and ignore the limit.
        min_stages: 2 leaves out the plan of one stage.
        spare: number of last workers that may stay idle; 0 with a memory limit, because minibatches in flight are
            counted for a pipeline that ends at worker U.
        unit: stages begin at a multiple of so many workers, and have a multiple of so many replicas.

    Attributes:
        any_number_of_stages: V for any number of stages.
        candidates: for each cut but the last, from the last to the first, the stages that may begin there, by first
            worker.
        values_by_count: V for at most 0, 1, ... stages, as far as they were asked for.
    """

    space: CutSpace
    model: CostModel
    workers: int
    replicas: tuple[int, ...] | None = None
    bound_s: float = np.inf
    minimize_memory: bool = False
    min_stages: int = 1
    spare: int = 0
    unit: int = 1
    candidates: dict[int, CandidateStages] = field(default_factory=dict, init=False)
    values_by_count: list[Array] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.any_number_of_stages = self._solved()

    def _solved(self) -> Array:
        values = self._no_stage()
        is_continued = np.zeros(len(values), dtype=bool)  # cuts after which there is something within the bound
        is_continued[-1] = True
        for i in reversed(range(len(values) - 1)):
            self.candidates[i] = self._candidate_stages(i, values, is_continued)
            self._prepend_at(i, values, values)
            is_continued[i] = len(self.candidates[i].end) > 0
        self._drop_unreached()
        return values

    def _drop_unreached(self) -> None:
        """Drop stages that no stage within the bound can precede; this speeds up `at_most` and `exactly`."""
        is_reached = np.zeros((self.space.cut_count, self.workers + 1), dtype=bool)
        is_reached[0] = True
        for i in sorted(self.candidates):
            stages = self.candidates[i] = self.candidates[i].select(is_reached[i, self.candidates[i].first])
            is_reached[stages.end, stages.first + stages.replicas] = True

    def at_most(self, stages: int) -> list[Array]:
        """V for at most 0, 1, ... `stages` stages."""
        if not self.values_by_count:
            self.values_by_count.append(self._no_stage())
        while len(self.values_by_count) <= stages:
            values = self._no_stage()
            self._prepend_stages(self.values_by_count[-1], values)
            self.values_by_count.append(values)
        return self.values_by_count[: stages + 1]

    def exactly(self, stages: int) -> list[Array]:
        """V for exactly 0, 1, ... `stages` stages, each cut allowed where it would stand."""
        tables = [self._no_stage()]
        for remaining in range(1, stages + 1):
            values = np.full_like(tables[0], np.inf)
            stage = stages - remaining
            rows = self.space.allowed_before(stage, stages) if stage else np.arange(len(values)) == 0
            self._prepend_stages(tables[-1], values, rows)
            tables.append(values)
        return tables

    def first_worker(self, values: Array) -> int:
        """(5) The first worker of the best whole plan; ties: the fewest workers."""
        plans = values[0, : self.workers, 0]
        if self.model.requires_all_workers:
            return 0
        return int(np.flatnonzero(plans <= plans.min())[-1])

    def best(self, values: Array) -> float:
        """(5) The value of the best whole plan."""
        return float(values[0, self.first_worker(values), 0])

    def trace(self, tables: list[Array], first_worker: int | None = None) -> list[StageSpan]:
        """(5) Trace the best whole plan: tables[-1] came from tables[-2], and so on. A single table came from itself.

        Args:
            first_worker: where the plan begins; None: where the best one does.
        """
        spans: list[StageSpan] = []
        cut = replicas_before = 0
        first = self.first_worker(tables[-1]) if first_worker is None else first_worker
        while cut < self.space.cut_count - 1:
            stages = self.candidates[cut]
            values = self._with_following(stages, tables[max(0, len(tables) - 2 - len(spans))])
            if replicas_before:
                border_s = self.border_before_s(stages.border_bytes, stages.first, stages.replicas, replicas_before)
                values = self.combine(values, border_s)
            values = np.where(stages.first == first, values, np.inf)
            best = np.flatnonzero(values <= values.min())
            # ties: the stage that ends last, then the one with the most replicas
            chosen = max(best, key=lambda e: (stages.end[e], stages.replicas[e]))
            spans.append(StageSpan(cut, int(stages.end[chosen]), first, int(stages.replicas[chosen])))
            cut, replicas_before = spans[-1].after, spans[-1].replicas
            first += replicas_before
        return spans

    def border_before_s(self, border_bytes: Array, first: Number, replicas: Number, replicas_before: int) -> Array:
        """(3) Seconds to send bytes over the border before a stage whose first worker is `first`; takes arrays."""
        border = self._border[first % self._period, replicas, replicas_before]
        seconds: Array = self.model.border_s(border_bytes, border)
        return seconds

    def _no_stage(self) -> Array:
        """V for no stage: all cuts done and all workers used, but the spare ones."""
        values = np.full((self.space.cut_count, self.workers + 1, self.workers + 1), np.inf)
        values[-1, self.workers - self.spare :] = 0.0
        return values

    def _prepend_stages(self, source: Array, target: Array, rows: Array | None = None) -> None:
        """Put one stage before each of `source`, to begin at the cuts `rows`."""
        for i in self.candidates:
            if len(self.candidates[i].end) and (rows is None or rows[i]):
                self._prepend_at(i, source, target)

    def _prepend_at(self, i: int, source: Array, target: Array) -> None:
        """(4) for the stages that begin at cut i; source and target may be the same array.

        Few stages need a value for each q, because the border (3) is seldom the slowest part of a plan:

            replicas q before cut i     1   2   3  ...
            fast border                 v   v   v  ...     v: max((1), (2))
            slow border                 max(v, (3) for each q)
        """
        stages = self.candidates[i]
        values = self._with_following(stages, source)
        within = np.flatnonzero(values <= self.bound_s)
        values, first = values[within], stages.first[within]
        if i == 0:
            np.minimum.at(target[0, :, 0], first, values)
            return
        replicas, bytes_before = stages.replicas[within], stages.border_bytes[within]
        is_slow = bytes_before > 0
        if is_slow.any() and self._overlaps:
            is_slow = self.model.border_s(bytes_before, self._slowest_border[first % self._period, replicas]) > values
        np.minimum.at(target[i, :, 1], first[~is_slow], values[~is_slow])
        target[i, :, 2:] = target[i, :, 1:2]
        if is_slow.any():
            slots = first * (self.workers + 1) + replicas
            kept = _pareto_front(slots, values, bytes_before, np.flatnonzero(is_slow))  # ordered by first worker
            first, borders = first[kept], self._border[first[kept] % self._period, replicas[kept], 1:]
            with_border = self.combine(values[kept, None], self.model.border_s(bytes_before[kept, None], borders))
            starts = np.flatnonzero(np.diff(first, prepend=-1))
            best = np.minimum.reduceat(with_border, starts, axis=0)
            target[i, first[starts], 1:] = np.minimum(target[i, first[starts], 1:], best)

    def _with_following(self, stages: CandidateStages, source: Array) -> Array:
        """The larger of (1) and (2); their sum without pipelining."""
        following = source[stages.end, stages.first + stages.replicas, stages.replicas]
        values: Array = self.combine(stages.value, following)
        return values

    @property
    def _overlaps(self) -> bool:
        """Whether the largest of all parts is minimised; otherwise their sum."""
        return self.model.execution.is_pipelined or self.minimize_memory

    @property
    def combine(self) -> np.ufunc:
        """Joins the parts of a plan: the larger one of two; their sum without pipelining."""
        return np.maximum if self._overlaps else np.add

    def _candidate_stages(self, i: int, values: Array, is_continued: Array) -> CandidateStages:
        """The stages that may begin at cut i.

        Leaves out stages that no plan within the bound can have: because of their own time or memory, because the
        workers before them have too much work, or because of the `values` of all stages that may follow.
        """
        model = self.model
        ends, load = self.space.stages_from[i]
        first, replicas, end = self._possible(i, np.flatnonzero(is_continued[ends] & self._may_fit(load)))
        follows = values[ends[end], first + replicas, replicas] <= self.bound_s
        first, replicas, end = first[follows], replicas[follows], end[follows]
        load = load.select(end)
        in_flight = model.in_flight(replicas, self.workers - first)
        spans = np.full(len(end), i), ends[end], first, replicas
        if self.minimize_memory:
            memory = model.memory_bytes(load, replicas, in_flight, model.may_recompute)
            return CandidateStages(*spans, memory, np.zeros(len(end))).select(memory <= self.bound_s)
        recompute, fits = model.fit(load, replicas, in_flight)
        compute_s = model.compute_s(load, replicas, recompute)
        allreduce_s = model.allreduce_s(load, replicas, members_between(model.cluster, first, first + replicas))
        stage_s = model.stage_s(load, replicas, compute_s, allreduce_s)
        return CandidateStages(*spans, stage_s, model.border_bytes(load)).select(fits & (stage_s <= self.bound_s))

    def _may_fit(self, load: StageLoad) -> Array:
        """Whether stages fit in memory with a single minibatch in flight, recomputed if need be."""
        limit = self.bound_s if self.minimize_memory else self.model.cluster.memory_bytes
        if limit is None:
            return np.ones_like(load.forward_s, dtype=bool)
        least = [self.model.memory(load, recompute).peak_bytes(1, 1) for recompute in (False, self.model.may_recompute)]
        may_fit: Array = np.minimum(*least) <= limit
        return may_fit

    def _possible(self, i: int, ends: Array) -> tuple[Array, Array, Array]:
        """Return first worker, replicas and end of each stage that may begin at cut i within the bound.

        It fills a table with a row for each end and a column for each slot, which is a pair (first worker, replicas).

        Args:
            ends: where the stage may end, as positions in `stages_from[i]`; the result has these, too.
        """
        work_s, (cuts, load) = self.space.loads.forward_backward_s, self.space.stages_from[i]
        cuts = cuts[ends, None]
        is_last = cuts == len(work_s) - 1
        first, replicas = self._slots[bool(i)]
        after = self.workers - first - replicas
        is_possible = np.where(is_last, after <= self.spare, after > 0)
        if i == 0 and self.min_stages > 1:
            is_possible &= ~is_last
        if np.isfinite(self.bound_s) and not self.minimize_memory:
            per_worker_s = self.bound_s * self.model.execution.copies * TOLERANCE
            before_s, left_s = work_s[i], work_s[-1] - work_s[i]
            fits = (before_s <= first * per_worker_s) & (left_s <= (self.workers - first) * per_worker_s)
            first, replicas, after, is_possible = first[fits], replicas[fits], after[fits], is_possible[:, fits]
            is_possible &= work_s[-1] - work_s[cuts] <= after * per_worker_s
            is_possible &= (self._stage_lower_bound_s(load.select(ends[:, None])) <= self.bound_s)[:, replicas - 1]
        slot, end = np.nonzero(is_possible.T)
        return first[slot], replicas[slot], ends[end]

    def _stage_lower_bound_s(self, load: StageLoad) -> Array:
        """[end, replicas - 1] seconds of a stage on the first workers: nowhere does its ring cross fewer links."""
        replicas = np.arange(1, self.workers + 1)
        allreduce_s = self.model.allreduce_s(load, replicas, members_between(self.model.cluster, 0, replicas))
        stage_s: Array = self.model.stage_s(load, replicas, self.model.compute_s(load, replicas), allreduce_s)
        return stage_s

    @cached_property
    def _slots(self) -> tuple[Array, Array]:
        """[2, slots] first worker and replicas of every stage that may be the first, and of every other one; ordered by
        first worker."""
        stages: Iterable[tuple[int, int]] = combinations(range(0, self.workers + 1, self.unit), 2)
        if self.replicas:
            stages = pairwise(accumulate(self.replicas, initial=0))
        first, end = np.array([*stages], dtype=np.int64).T
        slots = np.stack([first, end - first])[:, end - first <= self.model.max_replicas]
        first = slots[0]
        is_first_stage = np.isin(slots[1], self.model.first_replicas or slots[1])
        if self.replicas:
            is_first_stage &= first == 0
        return slots[:, is_first_stage], slots[:, first > 0]

    @cached_property
    def _border(self) -> Array:
        """(3) [place, r, q] seconds per byte over the border before a worker, whose place is its number modulo
        `_period`."""
        size, cluster = self.workers, self.model.cluster
        reach = self._period * (size // self._period + 1)  # workers on each side of the border, in whole members
        worker = np.arange(2 * reach)
        s_per_byte = np.zeros((self._period, size + 1, size + 1))
        q, r = np.arange(1, size + 1)[None, :, None], np.arange(1, size + 1)[:, None, None]
        for place in range(self._period):
            a = reach + place
            before = fractions_on_members(cluster, (a - q <= worker) & (worker < a))
            after = fractions_on_members(cluster, (a <= worker) & (worker < a + r))
            for depth, below in enumerate(cluster.below):
                before[depth], after[depth] = _busiest_members(before[depth], after[depth], a // below)
            # `place` is the worker itself where it matters which stage is the first: the period is the whole cluster
            is_before_first = q[..., 0] == place
            replicas = q[..., 0], r[..., 0]
            s_per_byte[place, 1:, 1:] = self.model.border_s_per_byte(before, after, replicas, is_before_first)
        return s_per_byte

    @property
    def _period(self) -> int:
        """Workers after which borders repeat: those of one outermost member; all of them if the border after the first
        stage costs differently (PipeDream's formulas)."""
        cluster = self.model.cluster
        return cluster.workers if self.model.requires_all_workers else cluster.below[0]

    @cached_property
    def _slowest_border(self) -> Array:
        """[place, r] whatever stands before it."""
        slowest: Array = self._border.max(axis=2)
        return slowest


def _busiest_members(before: Array, after: Array, shared: int) -> tuple[Array, Array]:
    """Drop members that never have the busiest link from the fractions of two stages, [..., members].

    Only one member can have workers of both stages. Among members with workers of one stage, only the fullest matters.

    Args:
        shared: the member of the later stage's first worker; all members before it have workers of the earlier stage
            only.

    Returns:
        Both fractions on three members, [..., 3]: the busiest one of the stage before, the shared one, the busiest one
        of the stage after.
    """
    most_before = before[..., :shared].max(axis=-1, initial=0.0)
    most_after = after[..., shared + 1 :].max(axis=-1, initial=0.0)
    return (
        np.stack([most_before, before[..., shared], np.zeros_like(most_before)], axis=-1),
        np.stack([np.zeros_like(most_after), after[..., shared], most_after], axis=-1),
    )


def _pareto_front(slots: Array, values: Array, bytes_before: Array, candidates: Array) -> Array:
    """Return the Pareto-optimal `candidates` of each slot: no other is as good in both value and border bytes."""
    order = candidates[np.lexsort((bytes_before[candidates], values[candidates], slots[candidates]))]
    group = np.cumsum(np.diff(slots[order], prepend=-1) != 0)
    falling = bytes_before[order] - group * (bytes_before.max() + 1.0)  # each slot lies below all before it
    smallest = np.minimum.accumulate(falling)
    kept: Array = order[np.concatenate([[True], falling[1:] < smallest[:-1]])]
    return kept
