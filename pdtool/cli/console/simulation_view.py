"""Simulations as tables and lines for people and as JSON for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pdtool.artifacts.plan import Plan
from pdtool.cli.console.table import Lines, table
from pdtool.partition.simulator.compare import CHOSEN, Comparison, Point, crossings
from pdtool.partition.simulator.simulation import Simulation
from pdtool.units import format_bits_rate, format_bytes, format_seconds

_MAX_LISTED_WORKERS = 64
_BAR_CHARACTERS = 40  # the widest bar of a plot


def simulation_view(plan: Plan, schedule: str, result: Simulation) -> Lines:
    """Show how each worker spent its time, and the time per minibatch beside the predicted one."""
    rows = [
        (
            share.worker,
            share.stage,
            *(
                f"{part / (result.makespan_s or 1.0):.0%}"
                for part in (share.busy_s, share.communication_s, share.idle_s)
            ),
            share.peak_stashed,
            share.versions,
            format_bytes(share.memory_bytes),
            format_bytes(share.sent_bytes),
        )
        for share in result.shares[:_MAX_LISTED_WORKERS]
    ]
    columns = ("worker", "stage", "busy", "communicating", "idle", "stashed", "versions", "memory", "sent")
    title = f"{plan.name}: {plan.config}, schedule {schedule}, {result.minibatches} minibatches of {result.batch_size}"
    yield table(columns, rows, names=0, title=title)
    if len(result.shares) > _MAX_LISTED_WORKERS:
        yield f"({len(result.shares) - _MAX_LISTED_WORKERS} more workers; --json has them all)"
    time = f"{format_seconds(result.pace_s)} per minibatch ({result.throughput_samples_per_s:.4g} samples/s)"
    if result.steady:
        yield f"steady state: {time}{_compared_with_prediction(predicted_s(plan, schedule), result.pace_s)}"
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
    """Compare the plan with the usual baselines in steady state, whatever number of minibatches was asked for."""
    plan_row = next(row for row in comparison.rows if row.label == CHOSEN)
    yield table(
        ("in steady state", "plan", "samples/s", "this plan's gain", "most memory", "sent per minibatch"),
        [
            (
                row.label,
                _shortened(row.config),
                f"{row.throughput_samples_per_s:.4g}",
                f"{row.pace_s / plan_row.pace_s:.3g} ×" if row is not plan_row and plan_row.pace_s else "",
                format_bytes(row.memory_bytes) + ("" if row.fits else ": does not fit"),
                format_bytes(row.sent_bytes),
            )
            for row in comparison.rows
        ],
        names=2,
    )

    for label in comparison.left_out:
        yield f"{label}: too large to simulate here"


def _shortened(config: str) -> str:
    return config if len(config) <= 20 else f"{config[:8]}…{config[-8:]}"


def sweep_view(points: Sequence[Point]) -> Lines:
    """Show the gain over data parallelism at each bandwidth, as figures and as bars; `|` is where they are equal."""
    max_gain = max(1.0, *(point.gain for point in points))
    rows = [
        (
            format_bits_rate(p.bandwidth_bytes_per_s),
            *map(format_seconds, (p.pace_s, p.data_parallel_s)),
            f"{p.gain:.3g} ×",
            _bar(p.gain / max_gain, 1 / max_gain),
        )
        for p in points
    ]
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
    plan: Plan, schedule: str, result: Simulation, comparison: Comparison, points: Sequence[Point]
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
        "bottleneck_s": result.pace_s,
        "throughput_samples_per_s": result.throughput_samples_per_s,
        "makespan_s": result.makespan_s,
        "fill_s": result.fill_s,
        "drain_s": result.drain_s,
        "sent_bytes": result.sent_bytes,
        "workers": [asdict(share) for share in result.shares],
        "compared": [asdict(row) for row in comparison.rows],
    }
    if points:
        data["sweep"] = [{**asdict(point), "gain": point.gain} for point in points]
        data["crossings_bytes_per_s"] = crossings(points)
    return data
