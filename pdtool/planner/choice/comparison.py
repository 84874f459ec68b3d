"""Simulations of a plan: alone, beside its rivals, and beside data parallelism over a range of bandwidths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import numpy as np

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan, PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.plan_figures import refresh
from pdtool.planner.choice.strategies import PLANNERS
from pdtool.planner.choice.without_formulas import under_schedule
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import samples_per_update
from pdtool.planner.simulator.engine import simulate, simulated_time_s
from pdtool.planner.simulator.job import MAX_ACTIONS, SimulationJob, action_count
from pdtool.planner.simulator.result import SimulationResult
from pdtool.schedule import BASELINES, PipelineShape

_RANGE, _POINTS = 20.0, 13  # bandwidths from a 20th of the plan's own to 20 times it; a point is its own
_MAX_SWEPT_ACTIONS = 20_000  # of one plan, over all bandwidths: about ten seconds


def rival_plans(profile: Profile, cluster: Cluster, plan: Plan, names: Iterable[str]) -> dict[str, Plan]:
    """Return the best plan of each strategy on all workers of the cluster, by name, in the order of `names`.

    If the plan flushes, or was planned for some number of samples per update, its rivals average as many minibatches in
    an update, except hybrid parallelism, and data parallelism, which rounds it up to a multiple of the workers. For any
    other plan, an update takes

        data-parallel       a minibatch of every worker: U minibatches for U workers
        gpipe               U minibatches, each a microbatch
        hybrid              a minibatch of every replica of the first stage: fewer than U, whatever is fastest
        model-parallel      one minibatch: more would make updates rarer, and nothing faster
        straight, pipeline  one minibatch per replica of its most replicated stage, without a flush: 15 for 15-1

    Data parallelism and GPipe have the same samples per update; the others have no more. Minibatches keep their
    profiled size, because the profile does not tell the time of smaller ones. PipeDream (SOSP'19, section 5.4) gives
    GPipe as many microbatches as PipeDream has minibatches in flight. For a straight pipeline that is U.

    A rival that does not fit into a device's memory is planned as if it did. Its figures say so.

    Args:
        plan: the plan to compare with; it decides how many minibatches an update takes.
        names: of RIVALS.

    Raises:
        UsageError: a strategy needs more workers.
        NoPlanError: a strategy has no plan, even with unlimited memory.
    """
    return {name: _rival_plan(profile.sent_as(plan.wire_dtype), cluster, plan, name) for name in names}


def _rival_plan(profile: Profile, cluster: Cluster, plan: Plan, name: str) -> Plan:
    options = PLANNERS[name].rival_options(profile, cluster, plan)
    try:
        return make_plan(profile, plan.profile, cluster, options)
    except NoPlanError:
        if cluster.memory_bytes is None:
            raise
    unlimited = make_plan(profile, plan.profile, replace(cluster, memory_bytes=None), options)
    return refresh(unlimited.model_copy(update={"cluster": cluster}), profile)


@dataclass(frozen=True, kw_only=True)
class ComparedPlan:
    """One plan, simulated in its steady state.

    Attributes:
        samples_per_update: samples whose gradients one update averages, at the stage with the most.
        memory_bytes: memory of the fullest worker.
        sent_bytes: sent by all workers together for one minibatch.
        fits: whether it fits into a device's memory.
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
    """Plans side by side; `left_out` says which rivals have no figures, and why."""

    plans: tuple[ComparedPlan, ...]
    left_out: tuple[str, ...]


def compare(
    profile: Profile, plan: Plan, strategies: Sequence[str], placement: Placement, result: SimulationResult
) -> Comparison:
    """Compare a plan with its rivals at the samples per update that `rival_plans` states.

    Args:
        strategies: names of the rivals.
        placement: how the plan is simulated, possibly under another schedule.
        result: its simulation, long enough to reach the steady state.
    """
    cluster, executed = plan.cluster, _as_executed(plan, placement)
    compared, left_out = [_compared("this plan", placement, profile, cluster, result)], []
    for name in strategies:
        planner = PLANNERS[name]
        try:
            rival = Placement.of(_rival_plan(profile, cluster, executed, name), profile)
        except (NoPlanError, UsageError) as error:
            left_out.append(f"{planner.strategy.label}: {error.what}")  # the remedy is an option of `partition`
            continue
        title = planner.title(rival)
        if not planner.strategy.schedule and placement.execution.kind.flushes:  # the rival never flushes
            title += f", {rival.execution.schedule}"
        if action_count(rival) > MAX_ACTIONS:
            left_out.append(f"{title}: too large to simulate here")
            continue
        simulated = simulate(SimulationJob.of(rival, profile, cluster))
        compared.append(_compared(title, rival, profile, cluster, simulated))
    return Comparison(plans=tuple(compared), left_out=tuple(left_out))


def _as_executed(plan: Plan, placement: Placement) -> Plan:
    """Return the plan with the execution of a placement, which decides the updates of its rivals."""
    return plan.model_copy(update=vars(placement.execution))


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


def sweep(profile: Profile, plan: Plan, placement: Placement, bandwidths: Sequence[float]) -> list[SweepPoint]:
    """Simulate the stages of a plan, and data parallelism on all workers, at each bandwidth of the outermost level.

    Args:
        placement: how the plan is simulated, possibly under another schedule.
    """
    cluster, profile = plan.cluster, profile.sent_as(plan.wire_dtype)
    data_parallel = _rival_plan(profile, cluster, _as_executed(plan, placement), "data-parallel")
    placements = [placement, Placement.of(data_parallel, profile)]
    points = []
    for bandwidth in bandwidths:
        outer = replace(cluster.levels[0], bandwidth_bytes_per_s=bandwidth)
        changed = replace(cluster, levels=(outer, *cluster.levels[1:]))
        own_s, other_s = (simulated_time_s(SimulationJob.of(each, profile, changed)) for each in placements)
        points.append(SweepPoint(bandwidth_bytes_per_s=bandwidth, time_per_minibatch_s=own_s, data_parallel_s=other_s))
    return points


def bandwidth_grid(low: float, high: float) -> list[float]:
    """Return the bandwidths of a sweep from low to high, evenly on a logarithmic scale."""
    grid: list[float] = np.geomspace(low, high, _POINTS).tolist()
    return grid


def crossings(points: Sequence[SweepPoint]) -> list[float]:
    """Return the bandwidths at which the gain passes 1, interpolated on logarithmic scales."""
    bandwidths = []
    for a, b in pairwise(points):
        if (a.gain - 1) * (b.gain - 1) < 0:
            fraction = math.log(a.gain) / (math.log(a.gain) - math.log(b.gain))
            ratio = b.bandwidth_bytes_per_s / a.bandwidth_bytes_per_s
            bandwidths.append(a.bandwidth_bytes_per_s * ratio**fraction)
    return bandwidths


@dataclass(frozen=True)
class StageShares:
    """How the workers of one stage spend the time of a minibatch in steady state, as shares of it."""

    computing: float
    communicating: float
    idle: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """What simulations say of a plan.

    Attributes:
        schedule: the schedule that was simulated.
        shape: the pipeline's shape under that schedule.
        result: what each worker does when, the seconds per minibatch and the samples per second of the steady state.
        comparison: the plan and its rivals, each in its steady state.
        sweep: the plan and data parallelism at each bandwidth of the outermost level, in bytes per second.
    """

    schedule: str
    shape: PipelineShape
    result: SimulationResult
    comparison: Comparison
    sweep: list[SweepPoint]

    @cached_property
    def stages(self) -> list[StageShares]:
        """Where the time of each stage goes."""
        return [_shares(self.result, stage) for stage in range(self.shape.pipeline_depth)]


def simulated(
    plan: Plan,
    profile: Profile,
    schedule: str | None = None,
    minibatches: int | None = None,
    against: Sequence[str] = (),
    bandwidths: Sequence[float] = (),
) -> SimulatedPlan:
    """Simulate a plan as its workers would run it, its rivals, and both over bandwidths.

    Args:
        schedule: a schedule other than the plan's; None: the plan's own.
        minibatches: length of the simulation; None: enough to fill, run steadily and drain.
        against: names of the rivals.
        bandwidths: of the outermost level, in bytes per second.

    Raises:
        UsageError: the schedule does not suit the stages, or there are too many minibatches to simulate.
        ScheduleError: it deadlocks with the minibatches in flight that were asked for.
    """
    name, cluster, profile = schedule or plan.schedule, plan.cluster, profile.sent_as(plan.wire_dtype)
    is_own = name == plan.schedule
    placement = Placement.of(plan, profile) if is_own else under_schedule(plan, profile, name, PlanOptions.chunks)
    job = SimulationJob.of(placement, profile, cluster, minibatches)
    result = simulate(job)
    steady = simulate(SimulationJob.of(placement, profile, cluster)) if minibatches else result
    return SimulatedPlan(
        schedule=name,
        shape=job.shape,
        result=result,
        comparison=compare(profile, plan, against, placement, steady),
        sweep=sweep(profile, plan, placement, bandwidths) if bandwidths else [],
    )


def simulated_for_report(plan: Plan, profile: Profile) -> SimulatedPlan:
    """Simulate a plan, the baselines, and the plan at bandwidths around its own, as far as that takes seconds.

    Raises:
        UsageError, ScheduleError: the plan cannot be simulated.
    """
    simulation = simulated(plan, profile, against=BASELINES)
    own = plan.cluster.levels[0].bandwidth_bytes_per_s
    placement = Placement.of(plan, profile)
    if plan.cluster.workers == 1 or action_count(placement) > _MAX_SWEPT_ACTIONS:
        return simulation
    with suppress(NoPlanError, UsageError):  # data parallelism cannot be simulated
        points = sweep(profile, plan, placement, bandwidth_grid(own / _RANGE, own * _RANGE))
        if all(point.time_per_minibatch_s and point.data_parallel_s for point in points):
            return replace(simulation, sweep=points)
    return simulation


def _shares(result: SimulationResult, stage: int) -> StageShares:
    workers = [usage for usage in result.workers if usage.stage == stage]
    whole_s = result.minibatches * result.time_per_minibatch_s or 1.0
    computing = min(1.0, fmean(usage.busy_s for usage in workers) / whole_s)
    communicating = min(1 - computing, fmean(usage.communication_s for usage in workers) / whole_s)
    return StageShares(
        computing=computing,
        communicating=communicating,
        idle=max(0.0, 1 - computing - communicating),
        memory_bytes=max(usage.memory_bytes for usage in workers),
    )
