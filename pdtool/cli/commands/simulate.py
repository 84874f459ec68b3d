"""`simulate`: execute a plan on a simulated clock, and compare it with other plans."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pdtool.artifacts.plan import Plan
from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.table import Lines, table
from pdtool.cli.terminal import show, status, write_stdout
from pdtool.errors import UsageError, suggestion
from pdtool.options import SimulateOptions
from pdtool.planner.choice.comparison import THIS_PLAN, ComparedPlan, Comparison, SweepPoint, crossings
from pdtool.planner.simulator.result import SimulationResult
from pdtool.units import format_bits_rate, format_bytes, format_seconds

_SWEEP_POINTS = 13
_TIMELINE_WIDTH, _GAIN_WIDTH = 1200, 640  # pixels


@command(
    epilog="\b\nExamples:\n  pdtool simulate --trace trace.json\n"
    "  pdtool simulate plans/vgg16-4x4.yaml --sweep bandwidth=0.1..25Gbit/s --svg gain.svg"
)
@click.argument("plan", required=False)
@options.count(
    "--minibatches",
    of=SimulateOptions,
    help="Length of the simulation.",
    unset="enough to fill, run steadily and drain",
)
@options.choice(
    "--schedule",
    of=SimulateOptions,
    help="Another order of work; interleaved and zb-h1 are for plans with as many replicas of each stage.",
    unset=options.PLANNED,
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what happened when, for Perfetto or chrome://tracing; - is stdout.",
)
@click.option(
    "--svg",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the timeline (filling, then two rounds), or with --sweep the gain against bandwidth; - is stdout.",
)
@click.option(
    "--sweep",
    metavar="bandwidth=LOW..HIGH",
    help="Give the outermost level other bandwidths, as bandwidth=0.1..25Gbit/s, and compare with data parallelism.",
)
@options.against(SimulateOptions)
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON on stdout.")
def simulate(
    plan: str | None,
    minibatches: int | None,
    schedule: str | None,
    trace: Path | None,
    svg: Path | None,
    sweep: str | None,
    against: tuple[str, ...],
    as_json: bool,
) -> None:
    """Execute PLAN on a clock, beside data parallelism and others.

    An update of data parallelism takes a minibatch of every worker; one of GPipe as many samples, or what the plan
    takes if that flushes, too.
    """
    from pdtool.api.inputs import candidate, planned
    from pdtool.artifacts.chrome_trace import chrome_trace
    from pdtool.cli.terminal import write_text
    from pdtool.planner.choice.comparison import simulated
    from pdtool.reports.chart import gain_chart
    from pdtool.reports.figures import simulated_group
    from pdtool.reports.timeline_drawing import timeline_drawing
    from pdtool.units import format_seconds

    rates = _rates(sweep) if sweep else []
    piped = _is_piped(trace, svg, as_json)
    chosen, profile = planned(candidate("plan", plan))
    with status("simulating"):
        simulation = simulated(chosen, profile, schedule, minibatches, against, rates)
    name, result, points = simulation.schedule, simulation.result, simulation.sweep
    if trace:
        write_text(json.dumps(chrome_trace(result.named_events)), trace, "; open it in https://ui.perfetto.dev")
    if svg:
        title = f"{chosen.name} ({chosen.config}, {name})"
        if points:
            own = chosen.cluster.cluster().levels[0].bandwidth_bytes_per_s
            picture = gain_chart(points, _GAIN_WIDTH, own, f"gain of {title} over data parallelism")
        else:
            times = f"{title}, {format_seconds(result.time_per_minibatch_s)} per minibatch"
            picture = timeline_drawing([simulated_group(result, simulation.shape, name, times)], _TIMELINE_WIDTH)
        write_text(picture.standalone(), svg)
    if as_json:
        data = as_data(chosen, name, result, simulation.comparison, points)
        write_stdout(json.dumps(data, indent=1) + "\n")
    else:
        compared = comparison_view(simulation.comparison)
        show(*simulation_view(chosen, name, result), "", *compared, err=piped)
        show(*(["", *sweep_view(points)] if points else []), err=piped)


def _is_piped(trace: Path | None, svg: Path | None, as_json: bool) -> bool:
    """Tell whether a file goes to stdout, and thus the tables to stderr; raises UsageError when two files would."""
    files = [f"{option} -" for option, path in (("--trace", trace), ("--svg", svg)) if path == Path("-")]
    outputs = files + ["--json"] * as_json
    if len(outputs) > 1:
        raise UsageError(f"{' and '.join(outputs)} would all go to stdout", "name files for all but one")
    return bool(files)


def _rates(text: str) -> list[float]:
    """Read `bandwidth=0.1..25Gbit/s` as bandwidths in bytes per second; raises UsageError."""
    from pdtool.planner.choice.comparison import bandwidth_grid
    from pdtool.units import format_bits_rate, parse_bandwidth

    match = re.fullmatch(r"bandwidth=([0-9.]+?)([A-Za-z/]*)\.\.([0-9.]+)([A-Za-z/]+)", text)
    if not match:
        near = suggestion(text.partition("=")[0], ["bandwidth"]) if not text.startswith("bandwidth=") else ""
        raise UsageError(f"--sweep {text!r} is not a range of bandwidths", f"{near}write bandwidth=0.1..25Gbit/s")
    low, high = parse_bandwidth(match[1] + (match[2] or match[4])), parse_bandwidth(match[3] + match[4])
    if low >= high:
        falls = f"goes from {format_bits_rate(low)} down to {format_bits_rate(high)}"
        raise UsageError(f"--sweep {text!r} {falls}", "give the lower one first")
    return bandwidth_grid(low, high, _SWEEP_POINTS)


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
