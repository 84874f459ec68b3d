"""The essence of a plan or a run, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import EmulatedPlan, Emulation, Report
from pdtool.artifacts.run_dir import RunRecord
from pdtool.reports.slowness import busiest_stage
from pdtool.units import counted, format_bits_rate, format_seconds, format_speedup

_COMPILED = "one epoch: these figures include the time of torch.compile. Train two epochs or more to leave it out"
_SAME = 0.02  # speeds that differ by less are called the same


def plan_sentence(plan: Plan, profile: Profile) -> str:
    """Return `15-1 on 16 V100: 2.2 times as fast as data parallelism at 10 Gbit/s; stage 0 computes longest`."""
    device = device_name(profile)
    on_cpu = f"{counted(plan.workers, 'worker')} ({device} each)"  # workers share the processor, not its threads
    where = f"{plan.config} on {on_cpu if profile.is_measured_on_cpu else f'{plan.workers} {device}'}"
    if plan.workers == 1:
        return f"{where}: everything on one worker"
    outermost = next(level for level in plan.cluster.levels if level.size > 1)
    rate = format_bits_rate(outermost.bandwidth_bytes_per_s)
    if len(plan.stages) == 1:
        return f"{where}: data parallelism, at {rate}"
    if not plan.predicted:
        return f"{where}, at {rate}"
    gain, slowest = plan.predicted.gain_over_data_parallel, plan.predicted.slowest_part(plan.pipeline_depth)
    return f"{where}: {gain_in_words(gain)} at {rate}; {slowest}"


def gain_in_words(gain: float) -> str:
    """Compare with data parallelism: `2.2 times as fast as data parallelism`, `15% slower than data parallelism`."""
    if abs(gain - 1) < _SAME:
        return "as fast as data parallelism"
    if 0.5 <= gain < 1:
        return f"{1 - gain:.0%} slower than data parallelism"
    return f"{format_speedup(gain)} times as fast as data parallelism"


def run_sentence(run: RunRecord, plan: Plan | None) -> str:
    """Return `1-1-1 reached accuracy 0.989 after 6 epochs: 20.1 ms per minibatch, 6.05 ms simulated; ...`."""
    if run.report:
        return _finished_sentence(run.report)
    epoch = max((line.epoch for line in run.metrics), default=0)
    what = f"{plan.config} on {counted(plan.workers, 'worker')}" if plan else "this run"
    loss = f", loss {run.metrics[-1].loss:.4g}" if run.metrics else ""
    if run.is_running:
        return f"{what} is training: epoch {epoch}{loss}" if run.metrics else f"{what} is starting"
    return f"{what} stopped in or after epoch {epoch}{loss}"


def _finished_sentence(report: Report) -> str:
    metrics = {name: value for name, value in report.metrics.items() if name != "loss"} or report.metrics
    reached = ", ".join(f"{name} {value:.3g}" for name, value in list(metrics.items())[:2])
    head = f"{report.config}: {reached} after {counted(report.epochs, 'epoch')}"
    times = f"{format_seconds(report.measured.bottleneck_s)} per minibatch"
    if (predicted := report.predicted) and predicted.time_s:
        times += f", {format_seconds(predicted.time_s)} {'simulated' if predicted.simulated_s else 'predicted'}"
    why = f"{report.local_workers} workers shared {counted(report.cores or 1, 'core')}" if report.is_crowded else ""
    why = why or (f"stage {busiest_stage(report)} is busiest" if report.stages else "")
    return "; ".join(filter(None, [f"{head}, {times}", why]))


def emulation_sentence(emulation: Emulation) -> str:
    """Return `15-1: 32 ms per minibatch emulated, 30.8 ms simulated; 3.9 times as fast as data-parallel`."""
    own, *others = emulation.plans
    times = f"{format_seconds(own.bottleneck_s)} per minibatch emulated, {format_seconds(own.simulated_s)} simulated"
    gains = [
        f"{format_speedup(o.bottleneck_s / own.bottleneck_s)} times as fast as {o.name}"
        for o in others[:1]
        if own.bottleneck_s
    ]
    return "; ".join([f"{own.config}: {times}", *gains])


def caveats(report: Report) -> Iterator[str]:
    """Say what a reader has to know of a run's figures."""
    if report.resumed_after:
        yield f"resumed after epoch {report.resumed_after}: only the epochs since then are measured"
    if not report.measured.is_steady:
        yield not_steady(report.minibatches)
    if report.includes_compilation:
        yield _COMPILED
    if report.is_crowded:
        yield crowded(report.local_workers, report.cores)


def not_steady(minibatches: int) -> str:
    """Say of epochs of so many minibatches what their measurement includes."""
    epochs = f"epochs of {counted(minibatches, 'minibatch')}"
    return f"{epochs} have no steady state, so the measurement includes fill and drain"


def crowded(workers: int | None, cores: int | None) -> str:
    """Say of workers that computed on fewer cores what they would be otherwise."""
    return f"{workers} workers shared {counted(cores or 1, 'core')}. With one device each they would be faster"


def scaling_phrase(emulation: Emulation, plan: EmulatedPlan) -> str:
    """Return `bytes and bandwidths / 30, times x 4.8`, of one of the emulation's plans."""
    scale, slowdown = emulation.factors(plan)
    return f"bytes and bandwidths / {scale:g}, times x {slowdown:g}"


def device_name(profile: Profile) -> str:
    """Return the device's name without maker and memory: `V100 SXM2`."""
    return re.sub(r"^NVIDIA | [0-9]+ ?GB$", "", profile.device.name)
