"""A plan on the simulator's clock, for drawings: its timeline, how its stages spend their time, and its rivals."""

from __future__ import annotations

from collections.abc import Sequence

from pdtool.planner.simulator.result import SimulationResult
from pdtool.report.drawings.timeline_drawing import TimelineGroup, WorkerRow
from pdtool.schedule import PipelineShape, is_asynchronous

_MAX_DRAWN_MINIBATCHES = 96


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
