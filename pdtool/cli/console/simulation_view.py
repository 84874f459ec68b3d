"""Simulations as tables and lines for people and as JSON for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pdtool.artifacts.plan import Plan
from pdtool.cli.console.table import Lines, table
from pdtool.planner.choice.comparison import THIS_PLAN, ComparedPlan, Comparison, SweepPoint, crossings
from pdtool.planner.simulator.result import SimulationResult
from pdtool.units import format_bits_rate, format_bytes, format_seconds

_MAX_LISTED_WORKERS = 64
_BAR_CHARACTERS = 30  # the widest bar of a plot


def simulation_view(plan: Plan, schedule: str, result: SimulationResult) -> Lines:
    """Show how each worker spent its time, and the time per minibatch beside the predicted one."""
    rows = []
    for usage in result.workers[:_MAX_LISTED_WORKERS]:
        parts = (usage.busy_s, usage.communication_s, usage.idle_s)
        shares = (f"{part / (result.makespan_s or 1.0):.0%}" for part in parts)
        memory, sent = format_bytes(usage.memory_bytes), format_bytes(usage.sent_bytes)
        rows.append([usage.worker, usage.stage, *shares, usage.peak_stashed, usage.versions, memory, sent])
    columns = ("worker", "stage", "busy", "communicating", "idle", "stashed", "versions", "memory", "sent")
    title = f"{plan.name}: {plan.config}, schedule {schedule}, {result.minibatches} minibatches of {result.batch_size}"
    yield table(columns, rows, names=0, title=title)
    if len(result.workers) > _MAX_LISTED_WORKERS:
        yield f"({len(result.workers) - _MAX_LISTED_WORKERS} more workers; --json has them all)"
    time_s = result.time_per_minibatch_s
    time = f"{format_seconds(time_s)} per minibatch ({result.throughput_samples_per_s:.4g} samples/s)"
    if result.steady:
        yield f"steady state: {time}{_compared_with_prediction(predicted_s(plan, schedule), time_s)}"
    else:
        yield f"no steady state: too few minibatches; {time}, filling and draining the pipeline included"
    total, fill, drain = map(format_seconds, (result.makespan_s, result.fill_s, result.drain_s))
    yield f"all minibatches: {total}; the last worker began after {fill} (fill), the first ended {drain} early (drain)"


def predicted_s(plan: Plan, schedule: str) -> float | None:
    """Return the seconds per minibatch that the plan predicts, if it predicts them for `schedule`."""
    return plan.predicted.bottleneck_s if plan.predicted and schedule == plan.schedule else None


def _compared_with_prediction(predicted: float | None, simulated: float) -> str:
    if not predicted:
        return ""
    return f"; predicted {format_seconds(predicted)}, simulated {simulated / predicted - 1:+.1%}"


def comparison_view(comparison: Comparison) -> Lines:
    """Compare the plan with its rivals in steady state, whatever number of minibatches was asked for."""
    plan_row = next(row for row in comparison.plans if row.label == THIS_PLAN)
    rows = []
    for row in comparison.plans:
        speed, gain = f"{row.throughput_samples_per_s:.4g}", _gain(plan_row, row)
        memory = format_bytes(row.memory_bytes) + ("" if row.fits else ": does not fit")
        sent = format_bytes(row.sent_bytes)
        rows.append([row.label, _shortened(row.config), speed, gain, row.samples_per_update, memory, sent])
    columns = ("in steady state", "plan", "samples/s", "gain", "per update", "most memory", "sent")
    yield table(columns, rows, names=2, drop=("sent", "samples/s", "per update"))
    yield (
        "gain: of this plan over that one; per update: samples, at the stage that takes most; "
        "sent: by all workers for one minibatch"
    )
    yield from comparison.left_out


def _gain(plan: ComparedPlan, other: ComparedPlan) -> str:
    """Return by how much the plan is faster than another."""
    if other is plan or not plan.time_per_minibatch_s:
        return ""
    return f"{other.time_per_minibatch_s / plan.time_per_minibatch_s:.3g} ×"


def _shortened(config: str) -> str:
    return config if len(config) <= 20 else f"{config[:8]}…{config[-8:]}"


def sweep_view(points: Sequence[SweepPoint]) -> Lines:
    """Show the gain over data parallelism at each bandwidth, as figures and as bars; `|` is where they are equal."""
    max_gain = max(1.0, *(point.gain for point in points))
    rows = []
    for p in points:
        times = map(format_seconds, (p.time_per_minibatch_s, p.data_parallel_s))
        bar = _bar(p.gain / max_gain, 1 / max_gain)
        rows.append([format_bits_rate(p.bandwidth_bytes_per_s), *times, f"{p.gain:.3g} ×", bar])
    yield table(("bandwidth", "this plan", "data parallelism", "gain", ""), rows, names=0)
    equal = crossings(points)
    if equal:
        yield f"as fast as data parallelism at {', '.join(map(format_bits_rate, equal))} (interpolated)"
    else:
        yield f"{'' if points[0].gain > 1 else 'never '}faster than data parallelism at these bandwidths"


def _bar(share: float, mark: float) -> str:
    cells = ("█" * round(share * _BAR_CHARACTERS)).ljust(_BAR_CHARACTERS, "·")
    position = min(_BAR_CHARACTERS - 1, math.floor(mark * _BAR_CHARACTERS))
    return cells[:position] + "|" + cells[position + 1 :]


def as_data(
    plan: Plan, schedule: str, result: SimulationResult, comparison: Comparison, points: Sequence[SweepPoint]
) -> dict[str, Any]:
    """Return all figures, without the events, as `--json` prints them."""
    data: dict[str, Any] = {
        "plan": plan.name,
        "config": plan.config,
        "schedule": schedule,
        "batch_size": result.batch_size,
        "minibatches": result.minibatches,
        "steady_minibatches": result.steady,
        "predicted_bottleneck_s": predicted_s(plan, schedule),
        "bottleneck_s": result.time_per_minibatch_s,
        "throughput_samples_per_s": result.throughput_samples_per_s,
        "makespan_s": result.makespan_s,
        "fill_s": result.fill_s,
        "drain_s": result.drain_s,
        "sent_bytes": result.sent_bytes,
        "workers": [asdict(usage) for usage in result.workers],
        "compared": [_with_pace(asdict(compared)) for compared in comparison.plans],
    }
    if points:
        data["sweep"] = [{**_with_pace(asdict(point)), "gain": point.gain} for point in points]
        data["crossings_bytes_per_s"] = crossings(points)
    return data


def _with_pace(figures: dict[str, Any]) -> dict[str, Any]:
    """Name the seconds per minibatch `pace_s`, as scripts know it."""
    return {"pace_s" if name == "time_per_minibatch_s" else name: value for name, value in figures.items()}
