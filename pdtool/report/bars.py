"""Bars of the page: what a stage takes in time and in memory, and how fast plans are beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdtool.artifacts.report import Emulation, StageReport
from pdtool.planner.choice.comparison import THIS_PLAN, ComparedPlan, SimulatedPlan, StageShares
from pdtool.units import format_bytes, format_seconds


@dataclass(frozen=True)
class BarPart:
    """A part of a bar: a class of page.css, its share of the whole bar, and what it says."""

    style: str
    share: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A named bar, with a figure at its end; `is_own`: of the plan that the page is about."""

    name: str
    parts: list[BarPart]
    figure: str
    note: str = ""
    is_own: bool = False


def predicted_bar(name: str, shares: StageShares, time_s: float, longest_s: float) -> Bar:
    """The time per minibatch that is predicted for a stage, beside the longest of all stages."""
    parts = (("computing", shares.computing), ("communicating", shares.communicating), ("idle", shares.idle))
    scale = time_s / longest_s
    return Bar(name, [_part(style, share * scale, share * time_s) for style, share in parts], format_seconds(time_s))


def measured_bar(stage: StageReport, longest_s: float) -> Bar:
    """The time per minibatch that a stage was measured to take, beside the longest of all stages."""
    parts = (
        ("computing", stage.busy_s),
        ("waiting", stage.wait_s),
        ("averaging", stage.allreduce_s),
        ("loading", stage.data_s),
        ("rest", stage.rest_s),
    )
    drawn = [_part(style, seconds / longest_s, seconds) for style, seconds in parts if seconds]
    return Bar("measured", drawn, format_seconds(stage.time_s))


def _part(style: str, share: float, seconds: float) -> BarPart:
    return BarPart(style, share, format_seconds(seconds))


def rival_bars(simulated: SimulatedPlan) -> list[Bar]:
    """Samples per second of the plan and its rivals, the fastest first."""
    own = next(plan for plan in simulated.comparison.plans if plan.label == THIS_PLAN)
    rivals = [plan for plan in simulated.comparison.plans if plan is own or not _is_same(plan, own)]
    plans = sorted(rivals, key=lambda plan: -plan.throughput_samples_per_s)
    fastest = plans[0].throughput_samples_per_s or 1.0
    bars = []
    for plan in plans:
        ratio = own.throughput_samples_per_s / (plan.throughput_samples_per_s or 1.0)
        note = f"{plan.samples_per_update:,} samples per update, {format_bytes(plan.memory_bytes)} at most"
        note += "" if plan.fits else ", does not fit"
        label = plan.label if plan.label != THIS_PLAN else f"{THIS_PLAN}, {plan.config}"
        figure = f"{plan.throughput_samples_per_s:,.0f} samples/s" + ("" if plan is own else f", {ratio:.3g} ×")
        parts = [BarPart("speed", plan.throughput_samples_per_s / fastest, "")]
        bars.append(Bar(label, parts, figure, note, is_own=plan is own))
    return bars


def _is_same(plan: ComparedPlan, own: ComparedPlan) -> bool:
    """Whether a rival is the plan itself, as when a straight pipeline was asked for."""
    return (plan.config, plan.time_per_minibatch_s) == (own.config, own.time_per_minibatch_s)


def memory_bars(limit: int | None, simulated: StageShares | None, measured: StageReport | None) -> Iterator[Bar]:
    """The memory that a stage takes, simulated and measured, beside that of a device.

    Args:
        limit: bytes of a device; None where the plan names none.
    """
    peaks = [
        ("memory", simulated.memory_bytes if simulated else None),
        ("memory, measured", measured.peak_memory_bytes if measured else None),
    ]
    whole = limit or max((peak for _, peak in peaks if peak), default=0) or 1
    for name, peak in peaks:
        if peak is not None:
            share = min(1.0, peak / whole)
            of = f" of {format_bytes(limit)}" if limit else ""
            label = f"{share:.0%}" if limit else ""
            yield Bar(name, [BarPart("memory", share, label)], format_bytes(peak) + of)


def emulation_bars(emulation: Emulation) -> list[Bar]:
    """The time per minibatch of each plan, emulated and simulated."""
    bars = []
    slowest_s = max(plan.bottleneck_s for plan in emulation.plans) or 1.0
    for number, plan in enumerate(emulation.plans):
        for name, seconds in (("emulated", plan.bottleneck_s), ("simulated", plan.simulated_s)):
            label = f"{plan.name} ({plan.config}), {name}"
            parts = [BarPart("speed" if name == "emulated" else "idle", min(1.0, seconds / slowest_s), "")]
            bars.append(Bar(label, parts, format_seconds(seconds), is_own=number == 0))
    return bars
