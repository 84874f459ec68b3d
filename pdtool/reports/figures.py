"""The data of the page's figures: bars, timelines and curves.

Bars show a stage's time and memory, and compare the speed of plans. Timelines show a plan on the simulator's clock, and
the last epoch of a run. Curves show the metrics of runs over updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pdtool.artifacts.chrome_trace import WorkerTrace
from pdtool.artifacts.metrics import MetricsLine, UpdateLine, ValidationLine
from pdtool.artifacts.report import Emulation, StageReport
from pdtool.planner.choice.comparison import SimulatedPlan, StageShares
from pdtool.planner.simulator.result import SimulationResult
from pdtool.reports.chart import Curve
from pdtool.reports.timeline_drawing import TimelineGroup
from pdtool.schedule import SCHEDULES, PipelineShape
from pdtool.units import format_bytes, format_ratio, format_seconds, format_throughput

_MAX_DRAWN_MINIBATCHES = 96
_MAX_POINTS, _MAX_THIN_POINTS = 160, 500  # of a curve
_MAX_VALUE = 1e30  # larger or infinite values are not drawn
_MAX_METRICS = 4  # charts of metrics besides the loss
Values = Iterable[tuple[int, float | None]]  # by the number of the update


@dataclass(frozen=True)
class BarPart:
    """A part of a bar: a class of page.css, its share of the whole bar, and its text."""

    style: str
    share: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A named bar, with a figure at its end; `is_own`: it belongs to the page's own plan."""

    name: str
    parts: list[BarPart]
    figure: str
    note: str = ""
    is_own: bool = False


def predicted_bar(name: str, shares: StageShares, time_s: float, longest_s: float) -> Bar:
    """A stage's predicted time per minibatch, compared with the longest of all stages."""
    shares_of = {"computing": shares.computing, "communicating": shares.communicating, "idle": shares.idle}
    return _time_bar(name, {style: share * time_s for style, share in shares_of.items()}, time_s, longest_s)


def measured_bar(stage: StageReport, longest_s: float) -> Bar:
    """A stage's measured time per minibatch, compared with the longest of all stages."""
    seconds_of = {
        "computing": stage.busy_s,
        "waiting": stage.wait_s,
        "averaging": stage.allreduce_s,
        "loading": stage.data_s,
        "rest": stage.rest_s,
    }
    drawn = {style: seconds for style, seconds in seconds_of.items() if seconds}
    return _time_bar("measured", drawn, stage.time_s, longest_s)


def _time_bar(name: str, seconds_of: Mapping[str, float], time_s: float, longest_s: float) -> Bar:
    parts = [BarPart(style, seconds / longest_s, format_seconds(seconds)) for style, seconds in seconds_of.items()]
    return Bar(name, parts, format_seconds(time_s))


def rival_bars(simulated: SimulatedPlan) -> list[Bar]:
    """Samples per second of the plan and its rivals, the fastest first."""
    own, *rivals = simulated.comparison.plans
    same = own.config, own.time_per_minibatch_s  # as of a rival that is the plan itself
    others = [plan for plan in rivals if (plan.config, plan.time_per_minibatch_s) != same]
    plans = sorted([own, *others], key=lambda plan: -plan.throughput_samples_per_s)
    fastest = plans[0].throughput_samples_per_s or 1.0
    bars = []
    for plan in plans:
        ratio = own.throughput_samples_per_s / (plan.throughput_samples_per_s or 1.0)
        samples = "1 sample" if plan.samples_per_update == 1 else f"{plan.samples_per_update:,} samples"
        note = f"{samples} per update, {format_bytes(plan.memory_bytes)} at most"
        note += "" if plan.fits else ", does not fit"
        label = f"{own.label}, {own.config}" if plan is own else plan.label
        figure = format_throughput(plan.throughput_samples_per_s) + (
            "" if plan is own else f", {format_ratio(ratio)} ×"
        )
        parts = [BarPart("speed", plan.throughput_samples_per_s / fastest, "")]
        bars.append(Bar(label, parts, figure, note, is_own=plan is own))
    return bars


def memory_bars(limit: int | None, simulated: StageShares | None, measured: StageReport | None) -> Iterator[Bar]:
    """A stage's memory, simulated and measured, compared with a device's.

    Args:
        limit: bytes of a device; None if the plan has no limit.
    """
    peaks = {}
    if simulated:
        peaks["memory"] = simulated.memory_bytes
    if measured and measured.peak_memory_bytes is not None:
        peaks["memory, measured"] = measured.peak_memory_bytes
    whole = limit or max(peaks.values(), default=0) or 1
    for name, peak in peaks.items():
        label, of = (f"{peak / whole:.0%}", f" of {format_bytes(limit)}") if limit else ("", "")
        yield Bar(name, [BarPart("memory", min(1.0, peak / whole), label)], format_bytes(peak) + of)


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


def simulated_group(result: SimulationResult, shape: PipelineShape, schedule: str, title: str) -> TimelineGroup:
    """Return the part of a simulation that shows its schedule: the pipeline fills, then two steady rounds.

    A round is the schedule's period, or the minibatches in flight if those are more. With a flush, draw two whole
    updates, which fill and drain the pipeline.
    """
    round_minibatches = max(*shape.update_every, shape.in_flight[0] * shape.replicas[0])
    drawn = min(2 * round_minibatches, max(_MAX_DRAWN_MINIBATCHES, 2 * shape.pipeline_depth))
    pairs = zip(result.workers, result.events, strict=True)
    rows = [WorkerTrace(usage.worker, usage.stage, events) for usage, events in pairs]
    steady_s = 0.0 if SCHEDULES[schedule].flushes else filled_s(rows)
    end_s = min(result.makespan_s, steady_s + drawn * result.time_per_minibatch_s)
    return TimelineGroup(title, rows, 0.0, end_s, min(steady_s, end_s))


def measured_group(workers: Sequence[WorkerTrace], schedule: str, length_s: float, title: str) -> TimelineGroup | None:
    """Return the first `length_s` seconds of the last epoch of a trace; None if there is none."""
    firsts = [e.start_s for worker in workers for e in worker.events if e.name == "0F0"]
    if not firsts or not length_s:
        return None
    start_s = max(firsts)
    steady_s = start_s if SCHEDULES[schedule].flushes else filled_s(workers, start_s)
    end_s = start_s + length_s  # where a minibatch takes much longer than predicted, the pipeline may still be filling
    return TimelineGroup(title, workers, start_s, end_s, steady_s if steady_s < end_s else start_s)


def filled_s(rows: Sequence[WorkerTrace], start_s: float = 0.0) -> float:
    """Return when the pipeline is full: all workers have begun their first backward after `start_s`."""
    backwards = ((e.start_s for e in row.events if "backward" in e.kind and e.start_s >= start_s) for row in rows)
    return max((min(starts, default=start_s) for starts in backwards), default=start_s)


def metric_curves(runs: Sequence[tuple[str, Sequence[MetricsLine]]]) -> dict[str, list[Curve]]:
    """Return the curves of the loss, the metrics, the learning rate and the speed over updates, by the chart's title.

    Args:
        runs: name and metrics lines of each; with several, all curves of a run have its colour.
    """
    names = [name if len(runs) > 1 else "" for name, _ in runs]
    updates = [[line for line in lines if isinstance(line, UpdateLine)] for _, lines in runs]
    validations = [[line for line in lines if isinstance(line, ValidationLine)] for _, lines in runs]
    metrics = dict.fromkeys(metric for lines in validations for line in lines for metric in line.metrics)
    losses = [_losses(names[i], i, updates[i], validations[i]) for i in range(len(runs))]
    charts = {"loss": [curve for curves in losses for curve in curves]}
    for metric in [*metrics][:_MAX_METRICS]:
        values = [[(line.step, line.metrics.get(metric)) for line in lines] for lines in validations]
        charts[f"{metric}, validation"] = _curves(names, values, dotted=True)
    rates = [[(line.step, line.lr) for line in lines] for lines in updates]
    speeds = [[(line.step, line.samples_per_s) for line in lines] for lines in updates]
    charts |= {"learning rate": _curves(names, rates), "samples per second": _curves(names, speeds)}
    drawn = {title: [curve for curve in curves if curve.points] for title, curves in charts.items()}
    return {title: curves for title, curves in drawn.items() if curves}


def _losses(name: str, index: int, updates: Sequence[UpdateLine], validations: Sequence[ValidationLine]) -> list[Curve]:
    """The loss of each update as a background, its mean over neighbours, and that of each validation."""
    training = _points((line.step, line.loss) for line in updates)
    validation = _points((line.step, line.loss) for line in validations)
    mean = _thinned(training, min(_MAX_POINTS, max(2, len(training) // 4)))
    if name:  # of several runs
        thin = Curve(f"{name}, training", mean, index, is_thin=True)
        return [thin, Curve(f"{name}, validation", validation, index, is_dotted=True)]
    background = Curve("", _thinned(training, _MAX_THIN_POINTS), is_thin=True)
    return [Curve("training", mean), Curve("validation", validation, 2, is_dotted=True), background]


def _curves(names: Sequence[str], runs: Sequence[Values], *, dotted: bool = False) -> list[Curve]:
    """Return a curve of each run; only few points get a dot."""
    points = [_thinned(_points(values), _MAX_POINTS) for values in runs]
    return [Curve(names[i], own, i, is_dotted=dotted and len(own) <= 60) for i, own in enumerate(points)]


def _points(values: Values) -> list[tuple[float, float]]:
    """Return (update, value) for known, finite values."""
    return [(float(step), value) for step, value in values if value is not None and abs(value) < _MAX_VALUE]


def _thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` means over neighbours, or all points if there are no more."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
