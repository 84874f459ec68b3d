"""How many loader workers suffice: the cost of loading a minibatch, compared with the pace of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdtool.artifacts.plan import Plan
from pdtool.host import usable_cores
from pdtool.runtime.config import RunConfig
from pdtool.units import counted, format_seconds

_SMALL_SHARE = 0.02  # the part of a replica's time that it may spend on loading by itself
_FETCH_S = 1e-3  # about the cost of taking a minibatch from a loader worker
_LOADER_MARGIN = 1.2  # for minibatches that take longer than the median, and for handing them over


@dataclass(frozen=True)
class LoadingCost:
    """The cost of loading, compared with the pace of a plan.

    Attributes:
        loading_s: seconds of loading one minibatch in one process.
        period_s: seconds between two minibatches of one replica of the first stage.
    """

    loading_s: float
    period_s: float

    @classmethod
    def of(cls, loading_s: float | None, plan: Plan) -> LoadingCost | None:
        """Return the cost from the profile's loading time; None if that or the plan's pace is unknown."""
        if loading_s is None or plan.predicted is None or not plan.predicted.bottleneck_s:
            return None
        return cls(loading_s, plan.predicted.bottleneck_s * plan.stages[0].replicas)

    @property
    def workers(self) -> int:
        """Loader workers that suffice for each replica; 0 if loading takes less than 1 ms, or 2 % of its time."""
        if self.loading_s < max(_FETCH_S, _SMALL_SHARE * self.period_s):
            return 0
        return math.ceil(self.loading_s / self.period_s * _LOADER_MARGIN)

    def sentence(self, workers: int, *, are_asked: bool = False) -> str:
        """Say what loading costs and how many loader workers suffice, given that `workers` are used; "" for none."""
        if not self.workers and not workers:
            return ""
        workers_suffice = "loader worker suffices" if self.workers == 1 else "loader workers suffice"
        need = f"{self.workers} {workers_suffice}" if self.workers else "none is needed"
        used = "" if workers == self.workers else f"; {workers} {'is' if workers == 1 else 'are'} used"
        if 0 < workers < self.workers and not are_asked:
            cores = counted(len(usable_cores()), "core")
            used += (
                f", because this machine has {cores}. If loading waits for a network, pass a larger --loader-workers"
            )
        return (
            f"loading takes {format_seconds(self.loading_s)} per minibatch in the profile, and each replica of the "
            f"first stage needs one every {format_seconds(self.period_s)}, so {need}{used}"
        )


def at_most_the_cores(workers: int, config: RunConfig) -> int:
    """Return a number of loader workers for each replica of the first stage, at most the share of the machine's cores.

    Args:
        workers: how many a replica could use.
    """
    replicas_here = math.ceil(config.plan.stages[0].replicas / config.machines.count)
    return min(workers, max(1, len(usable_cores()) // replicas_here))
