"""A plan beside its rivals, all simulated; and beside data parallelism over a range of bandwidths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.partition.placement import Placement
from pdtool.partition.predictions import samples_per_update
from pdtool.partition.simulated_schedules import under_schedule
from pdtool.partition.simulator.engine import simulate, simulated_time_s
from pdtool.partition.simulator.job import MAX_ACTIONS, SimulationJob, action_count
from pdtool.partition.simulator.result import SimulationResult
from pdtool.partition.strategies.rival_plans import rival_plans
from pdtool.schedule import STRATEGIES, PipelineShape

THIS_PLAN = "this plan"


@dataclass(frozen=True, kw_only=True)
class ComparedPlan:
    """One plan, simulated in its steady state.

    Attributes:
        samples_per_update: whose gradients an update averages, at the stage where these are most.
        memory_bytes: on the worker that needs most.
        sent_bytes: by all workers together for one minibatch.
        fits: whether the memory of a device is enough.
    """

    label: str
    config: str
    time_per_minibatch_s: float
    throughput_samples_per_s: float
    samples_per_update: int
    memory_bytes: int
    sent_bytes: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plans beside each other; `left_out` says which rivals there are no figures of, and why."""

    plans: tuple[ComparedPlan, ...]
    left_out: tuple[str, ...]


def compare(
    profile: Profile, plan: Plan, strategies: Sequence[str], placement: Placement, result: SimulationResult
) -> Comparison:
    """Compare a plan with its rivals (strategies.rival_plans), at the samples per update that are said there.

    Args:
        strategies: names of the rivals.
        placement: how the plan is simulated, which may be under another schedule than its own.
        result: of that, with as many minibatches as its steady state takes.
    """
    cluster = plan.cluster.cluster()
    compared, left_out = [_compared(THIS_PLAN, placement, profile, cluster, result)], []
    executed = plan.model_copy(
        update={"schedule": placement.execution.schedule, "microbatches": placement.execution.microbatches}
    )
    for name in strategies:
        label = STRATEGIES[name].label
        try:
            rival = rival_plans(profile, cluster, executed, [name])[name]
        except (NoPlanError, UsageError) as error:
            left_out.append(f"{label}: {error}")
            continue
        label = f"{label} ({_size(rival)})"
        rival_placement = Placement.of(rival, profile)
        if action_count(rival_placement) > MAX_ACTIONS:
            left_out.append(f"{label}: too large to simulate here")
            continue
        simulated = simulate(SimulationJob.of(rival_placement, profile, cluster))
        compared.append(_compared(label, rival_placement, profile, cluster, simulated))
    return Comparison(plans=tuple(compared), left_out=tuple(left_out))


def _size(plan: Plan) -> str:
    """`16`, the workers of one stage; `6 stages, 16 microbatches`."""
    if len(plan.stages) == 1:
        return str(plan.workers)
    return f"{len(plan.stages)} stages" + f", {plan.microbatches} microbatches" * (plan.schedule == "gpipe")


def _compared(
    label: str, placement: Placement, profile: Profile, cluster: Cluster, result: SimulationResult
) -> ComparedPlan:
    memory_bytes = max(usage.memory_bytes for usage in result.workers)
    return ComparedPlan(
        label=label,
        config=placement.config,
        time_per_minibatch_s=result.time_per_minibatch_s,
        throughput_samples_per_s=result.throughput_samples_per_s,
        samples_per_update=samples_per_update(placement, profile),
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


def sweep(profile: Profile, plan: Plan, bandwidths: Sequence[float]) -> list[SweepPoint]:
    """Simulate the same stages, and data parallelism on all workers, at each bandwidth of the outermost level."""
    cluster = plan.cluster.cluster()
    data_parallel = rival_plans(profile, cluster, plan, ["data-parallel"])["data-parallel"]
    placements = [Placement.of(each, profile) for each in (plan, data_parallel)]
    points = []
    for bandwidth in bandwidths:
        outer = replace(cluster.levels[0], bandwidth_bytes_per_s=bandwidth)
        changed = replace(cluster, levels=(outer, *cluster.levels[1:]))
        own_s, other_s = (simulated_time_s(SimulationJob.of(each, profile, changed)) for each in placements)
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


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a simulation of a plan gives.

    Attributes:
        schedule: that was simulated.
        shape: of the pipeline under that schedule.
        result: what each worker does when, the seconds per minibatch and the samples per second of the steady state.
        comparison: the plan and its rivals, each in its steady state.
        sweep: the plan and data parallelism at each bandwidth of the outermost level, in bytes per second.
    """

    schedule: str
    shape: PipelineShape
    result: SimulationResult
    comparison: Comparison
    sweep: list[SweepPoint]


def simulated(
    plan: Plan,
    profile: Profile,
    schedule: str | None = None,
    minibatches: int | None = None,
    against: Sequence[str] = (),
    bandwidths: Sequence[float] = (),
) -> Simulation:
    """Simulate a plan as its workers would run it, its rivals, and both over bandwidths.

    Args:
        schedule: another than the plan's.
        minibatches: length of the simulation; None: enough to fill, run steadily and drain.
        against: names of the rivals.
        bandwidths: of the outermost level, in bytes per second.

    Raises:
        UsageError: the schedule goes with other stages, or there are too many minibatches to simulate.
    """
    name, cluster = schedule or plan.schedule, plan.cluster.cluster()
    placement = Placement.of(plan, profile)
    if name != plan.schedule:
        placement = under_schedule(placement, profile, name, chunks=2)
    job = SimulationJob.of(placement, profile, cluster, minibatches)
    result = simulate(job)
    steady = simulate(SimulationJob.of(placement, profile, cluster)) if minibatches else result
    return Simulation(
        schedule=name,
        shape=job.shape,
        result=result,
        comparison=compare(profile, plan, against, placement, steady),
        sweep=sweep(profile, plan, bandwidths) if bandwidths else [],
    )
