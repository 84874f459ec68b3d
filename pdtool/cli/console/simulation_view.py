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


def simulation_view(plan: Plan, schedule: str, found: Simulation) -> Lines:
    """Show how each worker spent its time, and the time per minibatch beside the predicted one."""
    rows = [
        (
            share.worker,
            share.stage,
            *(
                f"{part / (found.makespan_s or 1.0):.0%}"
                for part in (share.busy_s, share.communication_s, share.idle_s)
            ),
            share.peak_stashed,
            share.versions,
            format_bytes(share.memory_bytes),
            format_bytes(share.sent_bytes),
        )
        for share in found.shares[:_MAX_LISTED_WORKERS]
    ]
    columns = ("worker", "stage", "busy", "communicating", "idle", "stashed", "versions", "memory", "sent")
    title = f"{plan.name}: {plan.config}, schedule {schedule}, {found.minibatches} minibatches of {found.batch_size}"
    yield table(columns, rows, names=0, title=title)
    if len(found.shares) > _MAX_LISTED_WORKERS:
        yield f"({len(found.shares) - _MAX_LISTED_WORKERS} more workers; --json has them all)"
    pace = f"{format_seconds(found.pace_s)} per minibatch ({found.throughput_samples_per_s:.4g} samples/s)"
    if found.steady:
        yield f"steady state: {pace}{_beside(predicted_s(plan, schedule), found.pace_s)}"
    else:
        yield f"no steady state: too few minibatches; {pace}, filling and draining the pipeline included"
    whole, fill, drain = map(format_seconds, (found.makespan_s, found.fill_s, found.drain_s))
    yield f"all minibatches: {whole}; the last worker began after {fill} (fill), the first ended {drain} early (drain)"


def predicted_s(plan: Plan, schedule: str) -> float | None:
    """Return the seconds per minibatch that the plan predicts, if it predicts them for `schedule`."""
    return plan.predicted.bottleneck_s if plan.predicted and schedule == plan.schedule else None


def _beside(predicted: float | None, simulated: float) -> str:
    if not predicted:
        return ""
    return f"; predicted {format_seconds(predicted)}, simulated {simulated / predicted - 1:+.1%}"


def comparison_view(comparison: Comparison) -> Lines:
    """Compare the plan with the usual baselines in steady state, whatever number of minibatches was asked for."""
    own = next(row for row in comparison.rows if row.label == CHOSEN)
    yield table(
        ("in steady state", "plan", "samples/s", "this plan's gain", "most memory", "sent per minibatch"),
        [
            (
                row.label,
                _short(row.config),
                f"{row.throughput_samples_per_s:.4g}",
                f"{row.pace_s / own.pace_s:.3g} ×" if row is not own and own.pace_s else "",
                format_bytes(row.memory_bytes) + ("" if row.fits else ": does not fit"),
                format_bytes(row.sent_bytes),
            )
            for row in comparison.rows
        ],
        names=2,
    )

    for label in comparison.left_out:
        yield f"{label}: too large to simulate here"


def _short(config: str) -> str:
    return config if len(config) <= 20 else f"{config[:8]}…{config[-8:]}"


def sweep_view(points: Sequence[Point]) -> Lines:
    """Show the gain over data parallelism at each bandwidth, as figures and as bars; `|` is where they are equal."""
    most = max(1.0, *(point.gain for point in points))
    rows = [
        (
            format_bits_rate(p.bandwidth_bytes_per_s),
            *map(format_seconds, (p.pace_s, p.data_parallel_s)),
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
    cells = ("█" * round(share * _BAR_CHARACTERS)).ljust(_BAR_CHARACTERS, "·")
    place = min(_BAR_CHARACTERS - 1, math.floor(mark * _BAR_CHARACTERS))
    return cells[:place] + "|" + cells[place + 1 :]


def as_data(
    plan: Plan, schedule: str, found: Simulation, comparison: Comparison, points: Sequence[Point]
) -> dict[str, Any]:
    """Return all figures, without the events, as `--json` prints them."""
    made: dict[str, Any] = {
        "plan": plan.name,
        "config": plan.config,
        "schedule": schedule,
        "batch_size": found.batch_size,
        "minibatches": found.minibatches,
        "steady_minibatches": found.steady,
        "predicted_bottleneck_s": predicted_s(plan, schedule),
        "bottleneck_s": found.pace_s,
        "throughput_samples_per_s": found.throughput_samples_per_s,
        "makespan_s": found.makespan_s,
        "fill_s": found.fill_s,
        "drain_s": found.drain_s,
        "sent_bytes": found.sent_bytes,
        "workers": [asdict(share) for share in found.shares],
        "compared": [asdict(row) for row in comparison.rows],
    }
    if points:
        made["sweep"] = [{**asdict(point), "gain": point.gain} for point in points]
        made["crossings_bytes_per_s"] = crossings(points)
    return made
