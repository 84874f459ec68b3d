"""The best plans of each configuration: of every way to share workers among stages, as 2-1-1, 1-2-1 and 1-1-2.

The recurrence of `dynamic_programming` keeps one value for all plans with the same remaining stages. This module
follows each configuration from its last stage to its first, over the same stages, while its plans stay within the
bound. Among plans of one configuration that are about equally fast by the formulas, it takes the one that computes and
sends least in all: that one has most time to spare for what the formulas leave out.

Complexity: O(2^U) configurations of U workers, each O(c²) for c cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pdtool.planner.formulas import TOLERANCE
from pdtool.planner.search.dynamic_programming import CandidateStages, DynamicProgram, StageSpan
from pdtool.planner.stage_costs import Array

Slot = tuple[int, int]  # first worker and replicas of a stage
Slots = tuple[Slot, ...]


@dataclass
class Configurations:
    """The configurations that have a plan within the bound of a recurrence.

    Args:
        stage_counts: numbers of stages that a plan may have.

    Attributes:
        times_s: seconds per minibatch of each configuration's fastest plan, fill and drain included.
    """

    program: DynamicProgram
    stage_counts: Sequence[int]
    times_s: dict[Slots, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        program = self.program
        self._stages = self._by_slot()
        done = np.full(program.space.cut_count, np.inf)
        done[-1] = 0.0
        counts = self.stage_counts if program.space.has_counted_pins else [max(self.stage_counts, default=0)]
        for stages in counts:
            for last in range(program.workers - program.spare, program.workers + 1):
                for replicas in range(1, last + 1):
                    self._prepend((last - replicas, replicas), done, (), stages)

    def plan(self, slots: Slots, slack: float | None) -> tuple[StageSpan, ...] | None:
        """Return the plan of a configuration that computes and sends least, among those at most the fraction `slack`
        slower than its fastest; None: no plan is. With slack None, return the fastest; ties: the one whose stages end
        last."""
        program = self.program
        limit_s = self.times_s[slots] / program.model.flush_factor(len(slots)) * (1 + (slack or 0.0)) * TOLERANCE
        joined = program.combine if slack is None else np.add
        after = np.full(program.space.cut_count, np.inf)
        after[-1] = 0.0
        choices: list[Array] = []
        for s in reversed(range(len(slots))):
            stages = self._stages[slots[s]]
            border_s = self._border_s(slots[s], slots[s - 1][1]) if s else np.zeros(len(stages.end))
            may_begin = program.space.allowed_before(s, len(slots))[stages.begin]
            is_allowed = (stages.value <= limit_s) & (border_s <= limit_s) & may_begin
            total_s = joined(joined(stages.value, border_s), after[stages.end])
            total_s = np.where(is_allowed, total_s, np.inf)
            order = np.lexsort((-stages.end, total_s, stages.begin))
            begins, positions = np.unique(stages.begin[order], return_index=True)
            choice = np.full(len(after), -1)
            choice[begins] = order[positions]
            after = np.full(len(after), np.inf)
            after[begins] = total_s[choice[begins]]
            choices.append(choice)
        if not np.isfinite(after[0]):
            return None
        cut, spans = 0, []
        for slot, choice in zip(slots, reversed(choices), strict=True):
            end = int(self._stages[slot].end[choice[cut]])
            spans.append(StageSpan(cut, end, *slot))
            cut = end
        return tuple(spans)

    def _prepend(self, slot: Slot, after: Array, following: Slots, stages: int) -> None:
        """Put a stage before a configuration, and go on.

        Args:
            after: [cuts] the fastest that may follow the stage.
            stages: the most that the whole plan may have; exactly that many if a pin counts them.
        """
        if (held := self._stages.get(slot)) is None:
            return
        program, slots, first = self.program, (slot, *following), slot[0]
        values = program.combine(held.value, after[held.end])
        is_exact = program.space.has_counted_pins
        time_s = float(values[held.begin == 0].min(initial=np.inf))
        is_whole = len(slots) in self.stage_counts and (len(slots) == stages or not is_exact)
        if is_whole and time_s <= program.bound_s:
            self.times_s[slots] = time_s * program.model.flush_factor(len(slots))
        if len(slots) == stages:
            return
        is_open = (held.begin > 0) & (values <= program.bound_s)
        if is_exact:
            is_open &= program.space.allowed_before(stages - len(slots), stages)[held.begin]
        if not is_open.any():
            return
        begins, starts = np.unique(held.begin[is_open], return_index=True)
        for replicas in range(1, first + 1):
            with_border = program.combine(values, self._border_s(slot, replicas))[is_open]
            before = np.full(len(after), np.inf)
            before[begins] = np.minimum.reduceat(with_border, starts)
            self._prepend((first - replicas, replicas), before, slots, stages)

    def _border_s(self, slot: Slot, replicas_before: int) -> Array:
        """Seconds over the border before each of the stages on the same workers."""
        return self.program.border_before_s(self._stages[slot].border_bytes, *slot, replicas_before)

    def _by_slot(self) -> dict[Slot, CandidateStages]:
        """The stages on the same workers, ordered by the cut before them."""
        candidates = self.program.candidates
        columns = zip(*(vars(candidates[i]).values() for i in sorted(candidates)), strict=True)
        stages = CandidateStages(*map(np.concatenate, columns))
        slots = np.stack([stages.first, stages.replicas])
        order = np.lexsort((stages.begin, stages.replicas, stages.first))
        keys, starts = np.unique(slots[:, order], axis=1, return_index=True)
        groups = map(stages.select, np.split(order, starts[1:]))
        return dict(zip(map(tuple, keys.T.tolist()), groups, strict=False))  # without stages, one empty group
