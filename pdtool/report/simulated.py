"""A plan on the simulator's clock, for drawings: its timeline, how its stages spend their time, and its rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.partition.comparison import Comparison, SweepPoint, bandwidth_grid, compare, sweep
from pdtool.partition.placement import Placement
from pdtool.partition.simulator.engine import simulate
from pdtool.partition.simulator.job import SimulationJob, action_count
from pdtool.partition.simulator.result import SimulationResult
from pdtool.report.drawings.timeline_drawing import TimelineGroup, WorkerRow
from pdtool.schedule import PipelineShape, is_asynchronous

_RIVALS = ("data-parallel", "straight", "gpipe", "model-parallel")
_RANGE, _POINTS = 20.0, 13  # bandwidths from a 20th of the plan's own to 20 times it; a point is its own
_MAX_SWEPT_ACTIONS = 20_000  # of a plan that is simulated at so many bandwidths: about ten seconds
_MAX_DRAWN_MINIBATCHES = 96


@dataclass(frozen=True)
class StageShares:
    """How the workers of one stage spend the time of a minibatch in steady state, as shares of it."""

    computing: float
    communicating: float
    idle: float
    memory_bytes: int


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan and all that simulations say of it.

    Attributes:
        points: gain over data parallelism against the bandwidth of the outermost level, which is the plan's own at
            the middle one; none on one worker.
    """

    result: SimulationResult
    shape: PipelineShape
    stages: tuple[StageShares, ...]
    comparison: Comparison
    points: tuple[SweepPoint, ...]

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> SimulatedPlan:
        """Simulate the plan, its rivals, and both over a range of bandwidths (seconds).

        Raises:
            UsageError, ScheduleError: the plan cannot be simulated.
        """
        cluster, placement = plan.cluster.cluster(), Placement.of(plan, profile)
        job = SimulationJob.of(placement, profile, cluster)
        result = simulate(job)
        is_swept = cluster.workers > 1 and action_count(placement) <= _MAX_SWEPT_ACTIONS
        depth = plan.pipeline_depth
        return cls(
            result=result,
            shape=job.shape,
            stages=tuple(_shares(result, stage) for stage in range(depth)),
            comparison=compare(profile, plan, _RIVALS, placement, result),
            points=_gain_points(plan, profile) if is_swept else (),
        )


def _gain_points(plan: Plan, profile: Profile) -> tuple[SweepPoint, ...]:
    """Return the gain around the plan's own bandwidth; none where data parallelism cannot be simulated."""
    own = plan.cluster.levels[0].bandwidth_bytes_per_s
    try:
        points = sweep(profile, plan, bandwidth_grid(own / _RANGE, own * _RANGE, _POINTS))
    except (NoPlanError, UsageError):
        return ()
    return tuple(points) if all(p.time_per_minibatch_s and p.data_parallel_s for p in points) else ()


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


def simulated_group(result: SimulationResult, shape: PipelineShape, schedule: str, title: str) -> TimelineGroup:
    """Return the part of a simulation that shows its schedule: the pipeline fills, then two steady rounds.

    A round is that after which the schedule repeats itself, or as many minibatches as are in flight if those are more;
    with a flush two whole updates, which fill and drain the pipeline, are drawn.
    """
    in_flight = sum(w * r for w, r in zip(shape.in_flight[:1], shape.replicas[:1], strict=False))
    round_minibatches = max(*shape.update_every, in_flight)
    drawn = min(2 * round_minibatches, max(_MAX_DRAWN_MINIBATCHES, 2 * shape.pipeline_depth))
    rows = worker_rows(result)
    steady_s = filled_s(rows) if is_asynchronous(schedule) else 0.0
    end_s = min(result.makespan_s, steady_s + drawn * result.time_per_minibatch_s)
    return TimelineGroup(title, rows, 0.0, end_s, min(steady_s, end_s))


def filled_s(rows: Sequence[WorkerRow], start_s: float = 0.0) -> float:
    """Return when the pipeline is full: all workers have begun their first backward after `start_s`."""
    backwards = ((e.start_s for e in row.events if "backward" in e.kind and e.start_s >= start_s) for row in rows)
    return max((min(starts, default=start_s) for starts in backwards), default=start_s)


def worker_rows(result: SimulationResult) -> Sequence[WorkerRow]:
    """Return the events of each worker, for a drawing."""
    pairs = zip(result.workers, result.events, strict=True)
    return [WorkerRow(usage.worker, usage.stage, events) for usage, events in pairs]
