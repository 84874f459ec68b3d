"""A plan beside the plans that everyone asks about, all simulated; and over a range of bandwidths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.partition.baselines import DATA_PARALLEL, ONE_WORKER, baselines
from pdtool.partition.in_flight import with_fewest_in_flight
from pdtool.partition.placement import ExecutionConfig, Placement
from pdtool.partition.search.search import PlanSearch, SearchOptions
from pdtool.partition.simulator.engine import simulate, simulated_time_s
from pdtool.partition.simulator.job import MAX_ACTIONS, SimulationJob, action_count
from pdtool.partition.simulator.result import SimulationResult

THIS_PLAN = "this plan"


@dataclass(frozen=True, kw_only=True)
class ComparedPlan:
    """One plan, simulated in its steady state.

    Attributes:
        memory_bytes: on the worker that needs most.
        sent_bytes: by all workers together for one minibatch.
        fits: whether the memory of a device is enough.
    """

    label: str
    config: str
    time_per_minibatch_s: float
    throughput_samples_per_s: float
    memory_bytes: int
    sent_bytes: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plans beside each other; `left_out` names those that would take too long to simulate."""

    plans: tuple[ComparedPlan, ...]
    left_out: tuple[str, ...]


def compare(profile: Profile, cluster: Cluster, placement: Placement, result: SimulationResult) -> Comparison:
    """Compare a placement with data parallelism, the straight pipeline, GPipe and model parallelism, each where there
    is one.

    Args:
        result: the placement's own simulation, with as many minibatches as its steady state takes.
    """
    named = list(_baseline_placements(profile, cluster))
    small = {label: baseline for label, baseline in named if action_count(baseline) <= MAX_ACTIONS}
    compared = [_compared(THIS_PLAN, placement, cluster, result)]
    for label, baseline in small.items():
        simulated = simulate(SimulationJob.of(baseline, profile, cluster))
        compared.append(_compared(label, baseline, cluster, simulated))
    return Comparison(plans=tuple(compared), left_out=tuple(label for label, _ in named if label not in small))


def _baseline_placements(profile: Profile, cluster: Cluster) -> Iterator[tuple[str, Placement]]:
    """Yield label and placement of each baseline but one worker, with the minibatches in flight that it wants."""
    search = PlanSearch(profile, cluster, SearchOptions())
    for label, baseline in baselines(search, ExecutionConfig()):
        if set(baseline.placement.in_flight) != {1}:
            baseline, _ = with_fewest_in_flight(search.evaluator, baseline, search.options.simplest)
        if label != ONE_WORKER:
            yield label, baseline.placement


def _compared(label: str, placement: Placement, cluster: Cluster, result: SimulationResult) -> ComparedPlan:
    memory_bytes = max(usage.memory_bytes for usage in result.workers)
    return ComparedPlan(
        label=label,
        config=placement.config,
        time_per_minibatch_s=result.time_per_minibatch_s,
        throughput_samples_per_s=result.throughput_samples_per_s,
        memory_bytes=memory_bytes,
        sent_bytes=result.sent_bytes,
        fits=memory_bytes <= (cluster.memory_bytes or math.inf),
    )


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One bandwidth of a sweep; times are seconds per minibatch."""

    bandwidth_bytes_per_s: float
    time_per_minibatch_s: float
    data_parallel_s: float

    @property
    def gain(self) -> float:
        """Gain over data parallelism."""
        return self.data_parallel_s / self.time_per_minibatch_s


def sweep(profile: Profile, cluster: Cluster, placement: Placement, bandwidths: Sequence[float]) -> list[SweepPoint]:
    """Simulate the same placement, and data parallelism on all workers, at each bandwidth of the outermost level."""
    data_parallel = next(p for label, p in _baseline_placements(profile, cluster) if label.startswith(DATA_PARALLEL))
    points = []
    for bandwidth in bandwidths:
        outer = replace(cluster.levels[0], bandwidth_bytes_per_s=bandwidth)
        changed = replace(cluster, levels=(outer, *cluster.levels[1:]))
        own_s, other_s = (
            simulated_time_s(SimulationJob.of(each, profile, changed)) for each in (placement, data_parallel)
        )
        points.append(SweepPoint(bandwidth_bytes_per_s=bandwidth, time_per_minibatch_s=own_s, data_parallel_s=other_s))
    return points


def bandwidth_grid(low: float, high: float, points: int) -> list[float]:
    """Return bandwidths from low to high, evenly on a logarithmic scale."""
    step = math.log(high / low) / (points - 1)
    return [low * math.exp(step * i) for i in range(points - 1)] + [high]


def crossings(points: Sequence[SweepPoint]) -> list[float]:
    """Return the bandwidths at which the gain passes 1, interpolated where both scales are logarithmic."""
    bandwidths = []
    for a, b in pairwise(points):
        if (a.gain - 1) * (b.gain - 1) < 0:
            fraction = math.log(a.gain) / (math.log(a.gain) - math.log(b.gain))
            ratio = b.bandwidth_bytes_per_s / a.bandwidth_bytes_per_s
            bandwidths.append(a.bandwidth_bytes_per_s * ratio**fraction)
    return bandwidths
