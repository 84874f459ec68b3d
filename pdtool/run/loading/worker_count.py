"""How many loader workers keep a replica of the first stage supplied."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from pdtool.artifacts.plan import Plan
from pdtool.host import usable_cores
from pdtool.run.config import RunConfig
from pdtool.run.loading.minibatch_loader import MinibatchLoader
from pdtool.units import format_seconds

_SMALL = 0.02  # the part of a replica's time that it may load by itself
_FETCH_S = 1e-3  # about what taking a minibatch from a loader worker costs
_MARGIN = 1.2  # for minibatches that take longer than the median, and for handing them over


@dataclass(frozen=True)
class LoadingCost:
    """What loading costs, beside the pace of a plan.

    Attributes:
        loading_s: seconds of loading one minibatch in one process.
        period_s: seconds from one minibatch of a replica of the first stage to its next.
    """

    loading_s: float
    period_s: float

    @classmethod
    def of(cls, loading_s: float | None, plan: Plan) -> LoadingCost | None:
        """Return the cost by the profile's loading time; None where that, or the pace of the plan, is not known."""
        if loading_s is None or plan.predicted is None or not plan.predicted.bottleneck_s:
            return None
        return cls(loading_s, plan.predicted.bottleneck_s * plan.stages[0].replicas)

    @property
    def workers(self) -> int:
        """Loader workers that suffice for each replica; 0 where loading takes less than 1 ms, or 2 % of its time."""
        if self.loading_s < max(_FETCH_S, _SMALL * self.period_s):
            return 0
        return math.ceil(self.loading_s / self.period_s * _MARGIN)

    def sentence(self, workers: int) -> str:
        """Say what loading costs and how many loader workers suffice, where `workers` are used; "" where none is."""
        if not self.workers and not workers:
            return ""
        need = "none is needed" if not self.workers else f"{_loader_workers(self.workers)} {_suffice(self.workers)}"
        used = "" if workers == self.workers else f"; {workers} {'is' if workers == 1 else 'are'} used"
        if 0 < workers < self.workers:
            used += (
                f", of {len(usable_cores())} cores here: more --loader-workers help where loading waits for a network"
            )
        return (
            f"loading takes {format_seconds(self.loading_s)} a minibatch, and each replica of the first stage takes "
            f"one every {format_seconds(self.period_s)}: {need}{used}"
        )


def at_most_the_cores(workers: int, config: RunConfig) -> int:
    """Return a number of loader workers for each replica of the first stage, at most the share of the machine's cores.

    Args:
        workers: that the replica could use.
    """
    replicas_here = math.ceil(config.plan.stages[0].replicas / config.machines.count)
    return min(workers, max(1, len(usable_cores()) // replicas_here))


def usable_workers(asked: int, loaders: Collection[MinibatchLoader]) -> tuple[int, str]:
    """Return how many of the loader workers that are asked for can read the dataset, and why where that is fewer."""
    opened = next((path for loader in loaders for path in loader.open_files), "")
    if asked and opened:
        return 0, (
            f"dataset() keeps {opened} open, and loader workers would share the place where it is read: minibatches "
            "are loaded in the training process; open files when a sample is asked for"
        )
    if asked > 1 and any(loader.is_stream for loader in loaders):
        return 1, (
            f"an IterableDataset is read by one process, in order: one loader worker of {asked} is used; one with "
            "__getitem__ would be loaded by all"
        )
    return asked, ""


def _loader_workers(count: int) -> str:
    return f"{count} loader worker{'s' if count > 1 else ''}"


def _suffice(count: int) -> str:
    return "suffice" if count > 1 else "suffices"
