"""The cost formulas of PipeDream's published optimizer (optimizer_graph_hierarchical.py), for comparison with it.

They differ from the paper and from `formulas.py`: communication is added to computing, a round of all-reduce costs
twice the bytes of a ring, a border is charged in both directions one after the other, once at each of its stages but
the first of all, and all workers must be used. Memory is as in `memory.py`: the original's check leaves out weights
and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdtool.partition.cost.formulas import CostModel, Fractions, Members
from pdtool.partition.stage_loads import Number, StageLoad


@dataclass(frozen=True, kw_only=True)
class PipeDreamCostModel(CostModel):
    """The original's `T` and `A`, with or without the traffic of activations.

    Attributes:
        charges_activations: whether tensors between stages cost anything (its --activation_compression_ratio 1);
            without, they are free, as by its default.
    """

    charges_activations: bool

    requires_all_workers = True

    def compute_s(self, load: StageLoad, replicas: Number, recompute: Number = False) -> Number:
        """Forward and backward over the replicas; the optimizer's step is not known to the original."""
        passes_s = load.forward_s * (1 + np.asarray(recompute)) + load.backward_s
        return passes_s / (replicas * self.execution.copies)

    def allreduce_s(self, load: StageLoad, replicas: Number, members: Members) -> Number:
        """4 (R-1) P / (B R) for a round of R minibatches; tied parameters are as any others."""
        ring_size = replicas * self.execution.copies
        return 2 * self.ring_s(load.parameter_bytes, ring_size, members) / ring_size

    def stage_s(self, load: StageLoad, replicas: Number, compute_s: Number, allreduce_s: Number) -> Number:
        """The sum: nothing overlaps."""
        return compute_s + allreduce_s

    def transfer_s(self, load: StageLoad, s_per_byte: Number) -> Number:
        """2 a / B for all that crosses the cut, also what only passes by the stage."""
        return 2 * load.entering_bytes * s_per_byte / self.execution.copies * self.charges_activations

    def border_s_per_byte(
        self,
        before: Fractions,
        after: Fractions,
        *,
        replicas_before: Number,
        replicas_after: Number,
        is_before_first: Number,
    ) -> Number:
        """1 / (B m') for m' replicas of the stage after, and again for those of the stage before unless it is first."""
        is_touched = [[np.greater(fraction, 0) for fraction in side] for side in (before, after)]
        slowest = super().border_s_per_byte(
            *is_touched, replicas_before=replicas_before, replicas_after=replicas_after, is_before_first=is_before_first
        )
        fewer = np.minimum(replicas_before, replicas_after)
        return slowest / np.where(is_before_first, replicas_after, fewer)
