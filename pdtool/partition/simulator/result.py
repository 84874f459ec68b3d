"""What a simulation says: how each worker spent its time, and how long a minibatch takes in steady state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdtool.artifacts.chrome_trace import TraceEvent


@dataclass(frozen=True, kw_only=True)
class WorkerUsage:
    """How one worker spent its time, which is all the time there was, and the most that it held.

    Attributes:
        busy_s: computing.
        communication_s: waiting for something that was on its way to it, an all-reduce included.
        idle_s: waiting for what another worker still computes, or for nothing.
        span_s: from its first action to its last.
        peak_stashed: minibatches; `delay`: updates between forward and backward of one; `versions`: of the weights.
    """

    stage: int
    worker: int
    busy_s: float
    communication_s: float
    idle_s: float
    span_s: float
    peak_stashed: int
    versions: int
    delay: int
    memory_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What a simulation says.

    Attributes:
        steady: minibatches in steady state, between the filling of the pipeline and its draining.
        time_per_minibatch_s: seconds per minibatch of those; of all where there are none.
        fill_s: until all workers have begun.
        drain_s: from when the first worker has nothing left to do.
        events: of each worker.
    """

    minibatches: int
    steady: int
    batch_size: int
    makespan_s: float
    time_per_minibatch_s: float
    fill_s: float
    drain_s: float
    workers: tuple[WorkerUsage, ...]
    events: tuple[tuple[TraceEvent, ...], ...]

    @property
    def throughput_samples_per_s(self) -> float:
        """Samples per second in steady state."""
        return self.batch_size / self.time_per_minibatch_s if self.time_per_minibatch_s else math.inf

    @property
    def named_events(self) -> dict[str, tuple[TraceEvent, ...]]:
        """Name of each worker -> its events, for artifacts.chrome_trace."""
        names = (f"worker {usage.worker}, stage {usage.stage}" for usage in self.workers)
        return dict(zip(names, self.events, strict=True))

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by all workers together, for one minibatch."""
        return sum(usage.sent_bytes for usage in self.workers) / self.minibatches


def time_per_minibatch_s(done_s: Sequence[float], steady: range) -> float:
    """Return the seconds per minibatch in steady state; over all minibatches where none is in steady state.

    Args:
        done_s: when each minibatch was done, in order.
        steady: which of them are in steady state.
    """
    if not steady:
        return done_s[-1] / len(done_s)
    return (done_s[steady[-1]] - done_s[steady[0] - 1]) / len(steady)
