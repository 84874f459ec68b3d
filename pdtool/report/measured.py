"""What a run measured, for drawings: the timeline of its last epoch, its curves, and why it was slower than planned."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.artifacts.report import Report
from pdtool.planner.choice.comparison import StageShares
from pdtool.report.drawings.chart import Curve
from pdtool.report.drawings.timeline_drawing import TimelineGroup, WorkerRow
from pdtool.report.simulated import filled_s
from pdtool.report.slow_stages import is_much_slower, slow_stage_sentence
from pdtool.schedule import is_asynchronous
from pdtool.units import format_seconds

_WORKER = re.compile(r"rank ([0-9]+) \(stage ([0-9]+), replica [0-9]+\)")
_NO_METRICS = {"split", "epoch", "step", "loss", "time", "lr", "samples_per_s"}  # of a line of metrics.jsonl
_MAX_POINTS, _MAX_THIN_POINTS = 160, 500  # of a curve
_MAX_VALUE = 1e30  # what is larger, or not finite, is not drawn
_MAX_METRICS = 4  # charts of metrics besides the loss
_NOTABLE = 0.05  # of the time per minibatch: smaller differences are not explained


def measured_group(
    events: dict[str, list[TraceEvent]], schedule: str, length_s: float, title: str
) -> TimelineGroup | None:
    """Return the beginning of the last epoch of a trace, `length_s` seconds of it; None where there is none."""
    rows = []
    for name, own in events.items():
        if match := _WORKER.match(name):
            rows.append(WorkerRow(int(match[1]), int(match[2]), own))
    firsts = [e.start_s for row in rows for e in row.events if e.name == "0F0"]
    if not firsts or not length_s:
        return None
    start_s = max(firsts)
    steady_s = filled_s(rows, start_s) if is_asynchronous(schedule) else start_s
    return TimelineGroup(title, rows, start_s, start_s + length_s, min(steady_s, start_s + length_s))


@dataclass(frozen=True)
class ChartCurves:
    """The curves of one chart, and what it is called."""

    title: str
    curves: list[Curve]


def metric_charts(runs: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> list[ChartCurves]:
    """Return charts of the loss, the metrics, the learning rate and the speed, over updates.

    Args:
        runs: name and lines of metrics.jsonl of each; with several, all curves of a run have its colour.
    """
    keys = {key: None for _, lines in runs for line in lines if line.get("split") == "valid" for key in line}
    metrics = [key for key in keys if key not in _NO_METRICS][:_MAX_METRICS]
    charts = [ChartCurves("loss", [curve for i, run in enumerate(runs) for curve in _loss(run, i, len(runs) > 1)])]
    for key in metrics:
        curves = [_curve(name, lines, "valid", key, i, dotted=True) for i, (name, lines) in enumerate(runs)]
        charts.append(ChartCurves(f"{key}, validation", curves))
    for key, title in (("lr", "learning rate"), ("samples_per_s", "samples per second")):
        charts.append(
            ChartCurves(title, [_curve(name, lines, "train", key, i) for i, (name, lines) in enumerate(runs)])
        )
    drawn = [ChartCurves(chart.title, [curve for curve in chart.curves if curve.points]) for chart in charts]
    is_single = len(runs) == 1
    return [
        ChartCurves(c.title, [_unnamed(curve) for curve in c.curves] if is_single and c.title != "loss" else c.curves)
        for c in drawn
        if c.curves
    ]


def _unnamed(curve: Curve) -> Curve:
    return Curve("", curve.points, curve.colour, curve.is_thin, curve.is_dotted)


def _loss(run: tuple[str, Sequence[dict[str, Any]]], index: int, is_one_of_several: bool) -> list[Curve]:
    """The loss of each update as a background, its mean over neighbours, and that of each validation."""
    name, lines = run
    prefix = f"{name}, " if is_one_of_several else ""
    training = _points(lines, "train", "loss")
    mean = _thinned(training, min(_MAX_POINTS, max(2, len(training) // 4)))
    valid = Curve(
        f"{prefix}validation", _points(lines, "valid", "loss"), index if is_one_of_several else 2, is_dotted=True
    )
    if is_one_of_several:
        return [Curve(f"{prefix}training", mean, index, is_thin=True), valid]
    return [Curve("training", mean), valid, Curve("", _thinned(training, _MAX_THIN_POINTS), is_thin=True)]


def _curve(
    name: str, lines: Sequence[dict[str, Any]], split: str, key: str, index: int, *, dotted: bool = False
) -> Curve:
    points = _thinned(_points(lines, split, key), _MAX_POINTS)
    return Curve(name, points, index, is_dotted=dotted and len(points) <= 60)


def _points(lines: Iterable[dict[str, Any]], split: str, key: str) -> list[tuple[float, float]]:
    """Return (update, value) of the lines that have a finite number; of several learning rates the first counts."""
    points = []
    for line in lines:
        value = line.get(key)
        value = value[0] if isinstance(value, list) and value else value
        step = line.get("step")
        if line.get("split") == split and _is_finite(value) and _is_finite(step):
            points.append((float(step), float(value)))  # type: ignore[arg-type]
    return points


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MAX_VALUE


def _thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return means over neighbours, at most `most` of them, or all points if those are not more."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


@dataclass(frozen=True)
class ExtraTime:
    """One part of what the busiest stage needs more per minibatch than predicted, in seconds, and its likely cause."""

    what: str
    more_s: float
    cause: str


def differences(report: Report, predicted: Sequence[StageShares], predicted_s: float) -> list[ExtraTime]:
    """Divide the difference between measured and predicted time per minibatch, at the stage that computes longest.

    The parts add up to the whole difference; the largest comes first.
    """
    if not report.stages or len(predicted) != len(report.stages):
        return []
    number = max(range(len(report.stages)), key=lambda s: report.stages[s].busy_s + report.stages[s].data_s)
    stage, share = report.stages[number], predicted[number]
    waiting_s = stage.wait_s - (share.communicating + share.idle) * predicted_s
    profiled_s = share.computing * predicted_s
    parts = [
        ExtraTime("computing", stage.busy_s - profiled_s, _computing_cause(report, number, profiled_s)),
        ExtraTime("waiting for other stages", waiting_s, "another stage, or the link to it, is slower"),
        ExtraTime("averaging gradients", stage.allreduce_s, "waits for replicas, which prediction counts as waiting"),
        ExtraTime("loading", stage.data_s, "prediction leaves loading out; --loader-workers load in the background"),
        ExtraTime("between actions", stage.rest_s, "Python, and the system giving the core to others"),
    ]
    notable = [part for part in parts if abs(part.more_s) >= _NOTABLE * max(predicted_s, 1e-12) * 0.2]
    return sorted(notable, key=lambda part: -abs(part.more_s))


def _computing_cause(report: Report, number: int, profiled_s: float) -> str:
    stage = report.stages[number]
    if report.is_crowded:
        return f"{report.local_workers} workers share {report.cores} cores, of which the profile had one to itself"
    if is_much_slower(stage, profiled_s):
        return slow_stage_sentence(report, number, profiled_s)
    sending = f"; handing over messages is {format_seconds(stage.send_s)} of it" if stage.send_s else ""
    return f"operators are slower than in the profile: other threads, memory bandwidth, temperature{sending}"


def busiest_stage(report: Report) -> int:
    """Return the stage that computes and loads longest."""
    return max(range(len(report.stages)), key=lambda s: report.stages[s].busy_s + report.stages[s].data_s)
