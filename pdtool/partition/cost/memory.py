"""The memory of a worker: one formula, for the search, for the figures of a plan and for the simulator.

    fixed      gradients, optimizer state, the working set of the largest operator
    version    one set of weights, for each version that a minibatch in flight still needs (PipeDream, section 3.3)
    minibatch  what is kept of a minibatch between its forward and its backward, and what the stage received for it

A stage that recomputes keeps only what it received, and one whole stash while it works (Chen et al., 2016, "Training
Deep Nets with Sublinear Memory Cost").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdtool.partition.stage_loads import Number, StageLoad


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one worker of a stage, or arrays of these."""

    fixed_bytes: Number
    version_bytes: Number
    minibatch_bytes: Number

    @classmethod
    def of(cls, load: StageLoad, optimizer_state_ratio: float, recompute: Number) -> StageMemory:
        """Split the memory of a stage.

        Args:
            optimizer_state_ratio: bytes of optimizer state for each byte of parameters.
            recompute: whether the stage runs its forward twice.
        """
        gradients_and_state = np.ceil(load.parameter_bytes * (1 + optimizer_state_ratio))
        return cls(
            fixed_bytes=gradients_and_state + load.working_bytes + load.stash_bytes * np.asarray(recompute),
            version_bytes=load.parameter_bytes,
            minibatch_bytes=load.received_bytes + load.stash_bytes * np.logical_not(recompute),
        )

    def peak_bytes(self, versions: Number, in_flight: Number) -> Number:
        """Return the bytes with so many weight versions and minibatches in flight."""
        return self.fixed_bytes + self.version_bytes * versions + self.minibatch_bytes * in_flight
