"""How the stages of a plan are executed; this and their replicas give the shape of the pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pdtool.schedule.kinds import ONE_F_ONE_B, SCHEDULES, ScheduleKind
from pdtool.schedule.policies import STASH, WEIGHT_POLICIES, ceil_div
from pdtool.schedule.shape import PipelineShape
from pdtool.schedule.strategies import STRATEGIES

DEFAULT_MICROBATCHES = 4  # in an update, if a flushing schedule is asked for by name only
_MAX_STAGES_SPELLED_OUT = 16


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a plan is executed, whatever its stages; the fields are those of artifacts.plan.Plan."""

    schedule: str = ONE_F_ONE_B.name
    weights: str = STASH.name
    microbatches: int = 1
    update_every: int | None = None
    chunks: int = 1
    copies: int = 1
    strategy: str = "auto"

    @classmethod
    def of_schedule(cls, schedule: str, microbatches: int = 1, chunks: int = 1, strategy: str = "auto") -> Self:
        """Return the execution of a schedule with its usual weight policy."""
        weights = SCHEDULES[schedule].policy_names[0]
        return cls(schedule=schedule, weights=weights, microbatches=microbatches, chunks=chunks, strategy=strategy)

    def under(self, schedule: str, chunks: int = 1) -> Self:
        """Return the execution under another schedule. An update keeps its minibatches if that schedule flushes."""
        minibatches = self.update_every
        if SCHEDULES[schedule].flushes:
            minibatches = self.minibatches_per_update or DEFAULT_MICROBATCHES
        return self.of_schedule(schedule, chunks=chunks).averaging(minibatches)

    @property
    def kind(self) -> ScheduleKind:
        """The schedule itself."""
        return SCHEDULES[self.schedule]

    @property
    def is_pipelined(self) -> bool:
        """Whether stages compute at the same time; otherwise they take turns."""
        return STRATEGIES[self.strategy].is_pipelined

    @property
    def has_formulas(self) -> bool:
        """Whether the cost formulas cover it; otherwise only the simulator does."""
        return self.kind.has_formulas and self.weights == self.kind.policy_names[0]

    @property
    def minibatches_per_update(self) -> int | None:
        """Minibatches in one update of every stage; None: it differs by stage, from its replicas or its weight
        policy."""
        return self.microbatches if self.kind.flushes else self.update_every

    def averaging(self, minibatches: int | None) -> Self:
        """Return the same with so many minibatches in one update of every stage; None changes nothing."""
        if minibatches is None:
            return self
        if self.kind.flushes:
            return replace(self, microbatches=minibatches)
        return replace(self, update_every=minibatches)

    def describe(self, replicas: Sequence[int]) -> str:
        """Return `15-1`, the replicas of stages on workers of their own, those of all copies together.

        `4 x 3-1` are four copies of a pipeline, `1-1 (2 chunks)` two stages on each of two workers. Many stages are
        only counted: `20 stages on 32 workers`.
        """
        of_copy = [number // self.copies for number in replicas]
        text = "-".join(map(str, of_copy))
        if len(of_copy) > _MAX_STAGES_SPELLED_OUT:
            text = f"{len(of_copy)} stages on {sum(of_copy)} workers"
        copies, chunks = f"{self.copies} x ", f" ({self.chunks} chunks)"
        return f"{copies if self.copies > 1 else ''}{text}{chunks if self.chunks > 1 else ''}"

    @property
    def has_choice_in_flight(self) -> bool:
        """Whether the minibatches in flight can be chosen freely."""
        return self.kind.deepening is not None and self.is_pipelined

    def shape(
        self, replicas: Sequence[int], in_flight: Sequence[int] | None = None, tied_stages: Iterable[Sequence[int]] = ()
    ) -> PipelineShape:
        """Return the shape of a pipeline, with the number of minibatches after which each stage updates.

        Args:
            replicas, in_flight: r[s] and w[s] of stages on workers of their own; None: the usual in flight.
            tied_stages: groups of stages that share a parameter, and so must update after the same number of
                minibatches.
        """
        policy = WEIGHT_POLICIES[self.weights]
        in_flight = in_flight or self.usual_in_flight(replicas)
        every = self.minibatches_per_update
        intervals = [every] * len(replicas) if every else [*policy.intervals(replicas, in_flight)]
        groups = [] if every else [*dict.fromkeys(map(tuple, tied_stages))]
        for stages in groups * len(groups):  # so often that groups with a stage in common agree
            common = math.lcm(*(intervals[s] for s in stages))
            for s in stages:
                intervals[s] = common
        return PipelineShape(
            replicas=tuple(replicas) * self.chunks,
            in_flight=tuple(in_flight),
            update_every=tuple(intervals) * self.chunks,
            chunks=self.chunks,
            weights=policy,
        )

    def usual_in_flight(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Return w[s] as the schedule wants it; with chunks for each worker, over all its chunks.

        Args:
            replicas: r[s] of stages on workers of their own.
        """
        return self.kind.usual_in_flight(replicas, self.microbatches, self.chunks)

    def deeper_in_flight(self, replicas: Sequence[int], more: int) -> tuple[int, ...]:
        """Return w[s] with `more` in flight at the first stage than usual.

        No stage gets more than an update of a flushing schedule has, or more than the stage before lets through: it
        would wait forever. Without a flush, a replica of the stage before also waits for the update, and so for the
        backwards of all its replicas.
        """
        p, most, kind = len(replicas), self.max_in_flight(replicas), self.kind
        deeper: list[int] = []
        for s, w in enumerate(self.usual_in_flight(replicas)):
            extra = math.ceil(more * kind.deepening(s, p)) if kind.deepening else 0
            if s:
                awaited = 1 if kind.flushes else replicas[s - 1]
                coming = 1 + (deeper[-1] * replicas[s - 1] - awaited) // replicas[s]
                extra = min(extra, max(0, coming - w))
            deeper.append(max(w, int(min(most[s], w + extra))))
        return tuple(deeper)

    def max_in_flight(self, replicas: Sequence[int]) -> tuple[float, ...]:
        """Return the most that can be in flight at each stage: all of an update, or infinity without a flush."""
        return tuple(self.chunks * ceil_div(self.microbatches, r) if self.kind.flushes else math.inf for r in replicas)

    def in_flight_from(self, replicas: Sequence[int], first: int) -> tuple[int, ...]:
        """Return w[s] with `first` in flight at the first stage, if the schedule leaves a choice. Later stages have the
        usual number but at most `first`, or more in proportion; with a flush at most an update's."""
        usual = self.usual_in_flight(replicas)
        if not self.has_choice_in_flight:
            return usual
        if first <= usual[0]:
            return tuple(min(first, w) for w in usual)
        return self.deeper_in_flight(replicas, first - usual[0])
