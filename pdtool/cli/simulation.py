"""Simulations as tables and lines for people, and as JSON for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pdtool.artifacts.plan import Plan
from pdtool.cli.render import Parts
from pdtool.cli.tables import table
from pdtool.partition.comparison import THIS_PLAN, ComparedPlan, Comparison, SweepPoint, crossings
from pdtool.partition.simulator.result import SimulationResult
from pdtool.units import format_bits_rate, format_bytes, format_seconds

_MOST_WORKERS = 64  # in a table
_WIDEST = 40  # bar of a plot, in characters


def simulation_view(plan: Plan, schedule: str, found: SimulationResult) -> Parts:
    """How each worker spent its time, and the pace beside what was predicted."""
    rows = [
        (
            usage.worker,
            usage.stage,
            *(
                f"{part / (found.makespan_s or 1.0):.0%}"
                for part in (usage.busy_s, usage.communication_s, usage.idle_s)
            ),
            usage.peak_stashed,
            usage.versions,
            format_bytes(usage.memory_bytes),
            format_bytes(usage.sent_bytes),
        )
        for usage in found.workers[:_MOST_WORKERS]
    ]
    columns = ("worker", "stage", "busy", "communicating", "idle", "stashed", "versions", "memory", "sent")
    title = f"{plan.name}: {plan.config}, schedule {schedule}, {found.minibatches} minibatches of {found.batch_size}"
    yield table(columns, rows, names=0, title=title)
    if len(found.workers) > _MOST_WORKERS:
        yield f"({len(found.workers) - _MOST_WORKERS} more workers; --json has them all)"
    pace = (
        f"{format_seconds(found.time_per_minibatch_s)} per minibatch ({found.throughput_samples_per_s:.4g} samples/s)"
    )
    if found.steady:
        yield f"steady state: {pace}{_beside(predicted_s(plan, schedule), found.time_per_minibatch_s)}"
    else:
        yield f"no steady state: too few minibatches; {pace}, filling and draining the pipeline included"
    whole, fill, drain = map(format_seconds, (found.makespan_s, found.fill_s, found.drain_s))
    yield f"all minibatches: {whole}; the last worker began after {fill} (fill), the first ended {drain} early (drain)"


def predicted_s(plan: Plan, schedule: str) -> float | None:
    """The pace that the plan predicts, where it predicts that of `schedule`."""
    return plan.predicted.bottleneck_s if plan.predicted and schedule == plan.schedule else None


def _beside(predicted: float | None, simulated: float) -> str:
    if not predicted:
        return ""
    return f"; predicted {format_seconds(predicted)}, simulated {simulated / predicted - 1:+.1%}"


def comparison_view(comparison: Comparison) -> Parts:
    """The plan and those that everyone asks about, whatever number of minibatches was asked for."""
    own = next(row for row in comparison.plans if row.label == THIS_PLAN)
    yield table(
        ("in steady state", "plan", "samples/s", "this plan's gain", "most memory", "sent per minibatch"),
        [
            (
                row.label,
                _short(row.config),
                f"{row.throughput_samples_per_s:.4g}",
                _gain(own, row),
                format_bytes(row.memory_bytes) + ("" if row.fits else ": does not fit"),
                format_bytes(row.sent_bytes),
            )
            for row in comparison.plans
        ],
        names=2,
    )

    for label in comparison.left_out:
        yield f"{label}: too large to simulate here"


def _gain(own: ComparedPlan, other: ComparedPlan) -> str:
    """By how much the plan is faster than another."""
    if other is own or not own.time_per_minibatch_s:
        return ""
    return f"{other.time_per_minibatch_s / own.time_per_minibatch_s:.3g} ×"


def _short(config: str) -> str:
    return config if len(config) <= 20 else f"{config[:8]}…{config[-8:]}"


def sweep_view(points: Sequence[SweepPoint]) -> Parts:
    """Gain over data parallelism at each bandwidth, as figures and as bars; `|` is where they are equal."""
    most = max(1.0, *(point.gain for point in points))
    rows = [
        (
            format_bits_rate(p.bandwidth_bytes_per_s),
            *map(format_seconds, (p.time_per_minibatch_s, p.data_parallel_s)),
            f"{p.gain:.3g} ×",
            _bar(p.gain / most, 1 / most),
        )
        for p in points
    ]
    yield table(("bandwidth", "this plan", "data parallelism", "gain", ""), rows, names=0)
    found = crossings(points)
    if found:
        yield f"as fast as data parallelism at {', '.join(map(format_bits_rate, found))} (interpolated)"
    else:
        yield f"{'' if points[0].gain > 1 else 'never '}faster than data parallelism at these bandwidths"


def _bar(share: float, mark: float) -> str:
    cells = ("█" * round(share * _WIDEST)).ljust(_WIDEST, "·")
    place = min(_WIDEST - 1, math.floor(mark * _WIDEST))
    return cells[:place] + "|" + cells[place + 1 :]


def as_data(
    plan: Plan, schedule: str, found: SimulationResult, comparison: Comparison, points: Sequence[SweepPoint]
) -> dict[str, Any]:
    """Everything but the events, as `--json` prints it."""
    made: dict[str, Any] = {
        "plan": plan.name,
        "config": plan.config,
        "schedule": schedule,
        "batch_size": found.batch_size,
        "minibatches": found.minibatches,
        "steady_minibatches": found.steady,
        "predicted_bottleneck_s": predicted_s(plan, schedule),
        "bottleneck_s": found.time_per_minibatch_s,
        "throughput_samples_per_s": found.throughput_samples_per_s,
        "makespan_s": found.makespan_s,
        "fill_s": found.fill_s,
        "drain_s": found.drain_s,
        "sent_bytes": found.sent_bytes,
        "workers": [asdict(usage) for usage in found.workers],
        "compared": [_with_pace(asdict(plan)) for plan in comparison.plans],
    }
    if points:
        made["sweep"] = [{**_with_pace(asdict(point)), "gain": point.gain} for point in points]
        made["crossings_bytes_per_s"] = crossings(points)
    return made


def _with_pace(figures: dict[str, Any]) -> dict[str, Any]:
    """Name the seconds per minibatch `pace_s`, as scripts know it."""
    return {"pace_s" if name == "time_per_minibatch_s" else name: value for name, value in figures.items()}
