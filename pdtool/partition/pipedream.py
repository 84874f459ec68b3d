"""The cost formulas of PipeDream's published optimizer (optimizer_graph_hierarchical.py), for comparison with it.

They differ from the paper and from `cost.py`: communication is added to computing, a round of all-reduce costs twice
the bytes of a ring, a border is charged in both directions one after the other, once at each of its stages but the
first of all, and all workers must be used. Memory is as in `cost.py`: the original's check leaves out weights and
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdtool.partition.cost import Load, Number, Rules, Units


@dataclass(frozen=True, kw_only=True)
class PipeDreamRules(Rules):
    """The original's `T` and `A`, with or without the traffic of activations.

    Attributes:
        charged: whether tensors between stages cost anything (its --activation_compression_ratio 1); without, they
            are free, as by its default.
    """

    charged: bool

    all_workers = True

    def compute_s(self, load: Load, replicas: Number, recompute: Number = False) -> Number:
        """Forward and backward over the replicas; the optimizer's step is not known to the original."""
        return (load.forward_s * (1 + np.asarray(recompute)) + load.backward_s) / (replicas * self.copies)

    def allreduce_s(self, load: Load, replicas: Number, units: Units) -> Number:
        """4 (R-1) P / (B R) for a round of R minibatches; tied parameters are as any others."""
        return 2 * self.ring_s(load.parameter_bytes, replicas * self.copies, units) / (replicas * self.copies)

    def stage_s(self, load: Load, replicas: Number, computing_s: Number, averaging_s: Number) -> Number:
        """The sum: nothing overlaps."""
        return computing_s + averaging_s

    def transfer_s(self, load: Load, pace: Number) -> Number:
        """2 a / B for all that crosses the cut, also what only passes by the stage."""
        return 2 * load.entering_bytes * pace / self.copies * self.charged

    def border_pace(self, before: Units, after: Units, sizes: tuple[Number, Number, Number]) -> Number:
        """1 / (B m') for m' replicas of the stage after, and again for those of the stage before unless it is first."""
        q, r, first = sizes
        touched = [[np.greater(share, 0) for share in side] for side in (before, after)]
        slowest = super().border_pace(touched[0], touched[1], sizes)
        return slowest / np.where(first, r, np.minimum(q, r))
