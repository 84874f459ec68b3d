"""Reports of runs: where each stage's time went, predicted beside measured. Emulations, and files of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from pdtool.artifacts.report import EmulatedPlan, Emulation, Report
from pdtool.artifacts.run_dir import CheckpointManifest
from pdtool.cli.console.table import Lines, table
from pdtool.cli.console.training_progress import validated
from pdtool.reports.figures import slowest_stage_sentence
from pdtool.reports.sentences import scaling_phrase
from pdtool.units import format_bits_rate, format_bytes, format_seconds

_DIGITS = 12  # of a digest that are shown
_MUCH_LOADING = 0.1  # of the first stage's time
_COMPILED = "one epoch: the time that torch.compile took is part of these figures; train two or more to leave it out"
_NOT_STEADY = "epochs of {minibatches} minibatches have no steady state: filling and draining are measured, too"


def report_view(report: Report) -> Lines:
    """Show where each stage's time went, and predicted beside measured."""
    yield _time_table(report)
    yield (
        "waits: until what other stages send has arrived; averaging: waits for "
        "gradients of other workers; data: loading, or waits for loader workers; rest: between actions"
    )
    yield from _loading_limit(report)
    yield _prediction_table(report)
    yield f"per minibatch: {_compared(report)}"
    if reason := slowest_stage_sentence(report):
        yield reason
    if not report.measured.is_steady:
        yield _NOT_STEADY.format(minibatches=report.minibatches)
    if report.includes_compilation:
        yield _COMPILED
    if report.is_crowded:
        yield _crowded(report.local_workers, report.cores)
    yield f"throughput: {report.throughput_samples_per_s:.4g} samples/s, pipeline fill and drain included"
    yield validated(report.metrics)
    if report.target:
        yield f"target {report.target}: {'reached' if report.target_reached else 'not reached'}"


def _time_table(report: Report) -> Table:
    """List each stage's shares of the whole time, and its times per minibatch."""
    rows = []
    for s, stage in enumerate(report.stages):
        parts = (stage.busy_s, stage.wait_s, stage.allreduce_s, stage.data_s, stage.rest_s)
        shares = (f"{part / (stage.time_s or 1.0):.0%}" for part in parts)
        times = map(format_seconds, (stage.forward_s, stage.backward_s, stage.update_s, stage.send_s))
        rows.append([s, stage.replicas, *shares, *times])
    columns = (
        "stage",
        "replicas",
        "busy",
        "waits",
        "averaging",
        "data",
        "rest",
        "forward",
        "backward",
        "update",
        "sending",
    )
    epochs = ", ".join(f"{n} epoch(s) of {minibatches or '?'}" for n, minibatches in report.epochs_by_length)
    title = (
        f"{report.plan}: {report.config}, schedule {report.schedule}, {epochs} minibatches of {report.batch_size}\n"
        "where the time went, and how long a minibatch took:"
    )
    return table(columns, rows, title=title, drop=("sending", "rest", "update", "backward", "forward", "replicas"))


def _loading_limit(report: Report) -> Iterator[str]:
    """Say that loading slows a run: the first stage would not be as slow as the slowest without it."""
    if not report.stages:
        return
    first, *others = report.stages
    share = first.data_s / (first.time_s or 1.0)
    if share >= _MUCH_LOADING and first.busy_s + first.data_s > max((other.busy_s for other in others), default=0.0):
        yield (
            f"loading slows this run: stage 0 spends {share:.0%} of its time on data; more --loader-workers load in "
            "the background, as long as there are cores for them"
        )


def _prediction_table(report: Report) -> Table:
    """List what each stage was predicted to need and what it needed; a worker's chunks (interleaved) share a row."""
    predicted, depth = report.predicted, len(report.stages)
    rows = []
    for s, stage in enumerate(report.stages):
        compute, memory = "?", "?"
        if predicted:
            compute = format_seconds(sum(predicted.compute_s[s::depth]))
            memory = format_bytes(sum(predicted.memory_bytes[s::depth]))
        peak = "?" if stage.peak_memory_bytes is None else format_bytes(stage.peak_memory_bytes)
        busy, sent = format_seconds(stage.busy_s), format_bytes(stage.sent_bytes)
        rows.append([s, compute, busy, memory, peak, stage.peak_versions, stage.peak_stashed, sent])
    columns = ("stage", "busy predicted", "measured", "memory predicted", "measured", "versions", "stashed", "sent")
    return table(
        columns, rows, title="busy for one minibatch, and memory at its peak:", drop=("sent", "stashed", "versions")
    )


def _compared(report: Report) -> str:
    """Compare measured seconds with those of the simulation, or of the formulas if the plan was not simulated.

    No error is given of workers that shared cores, or of epochs without a steady state: the prediction is for others.
    """
    predicted, measured_s = report.predicted, report.measured.bottleneck_s
    if not predicted:
        return f"measured {format_seconds(measured_s)}"
    is_comparable = report.measured.is_steady and not (report.is_crowded or report.includes_compilation)
    source, predicted_s = "simulated", predicted.simulated_s
    if predicted_s is None:
        source, predicted_s = "predicted", predicted.bottleneck_s
    ratio = f" ({measured_s / predicted_s - 1:+.0%})" if predicted_s and is_comparable else ""
    return f"{source} {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}{ratio}"


def checkpoint_view(manifest: CheckpointManifest) -> Lines:
    """List the metrics of the epoch, and the files."""
    title = f"epoch {manifest.epoch}, seed {manifest.seed}: {validated(manifest.metrics)}"
    rows = [[name, format_bytes(file.bytes), file.sha256[:_DIGITS]] for name, file in manifest.files.items()]
    yield table(("file", "bytes", "sha256"), rows, title=title)


def emulation_view(emulation: Emulation) -> Lines:
    """Show each plan's time per minibatch, emulated beside simulated, and the gain of the first over each."""
    own = emulation.plans[0]
    rows = []
    for plan in emulation.plans:
        error = f"{plan.error:+.1%}" if plan.is_steady and not _is_crowded(emulation, plan) else ""
        gain = "" if plan is own else f"{plan.bottleneck_s / own.bottleneck_s:.3g} ×"
        times, speed = (
            map(format_seconds, (plan.bottleneck_s, plan.simulated_s)),
            f"{plan.throughput_samples_per_s:.4g}",
        )
        rows.append([plan.name, plan.config, *times, error, speed, gain, format_bytes(plan.sent_bytes)])
    columns = ("emulated", "plan", "per minibatch", "simulated", "error", "samples/s", "gain", "sent")
    cluster = emulation.cluster.cluster()
    speeds = ", ".join(format_bits_rate(level.bandwidth_bytes_per_s) for level in cluster.levels)
    title, drop = f"{emulation.plan}: {cluster.topology} at {speeds}", ("sent", "samples/s", "simulated")
    yield table(columns, rows, names=2, title=title, drop=drop)
    if emulation.compute == "sleep":
        yield "workers slept the times of the profile"
        yield from _scalings(emulation)
    else:
        yield "workers trained the model on this machine"
    if any(level.latency_s for level in cluster.levels):
        yield "the links had no latency: the simulated times are those without it"
    for minibatches in {plan.minibatches for plan in emulation.plans if not plan.is_steady}:
        yield _NOT_STEADY.format(minibatches=minibatches)
    if emulation.target:
        yield from _target_lines(emulation)
    if any(_is_crowded(emulation, plan) for plan in emulation.plans):
        workers = max(plan.workers for plan in emulation.plans)
        yield _crowded(workers, emulation.cores)


def _scalings(emulation: Emulation) -> Lines:
    """What bytes and times were scaled with, and for which plans where that differs."""
    names: dict[str, list[str]] = {}
    for plan in emulation.plans:
        names.setdefault(scaling_phrase(emulation, plan), []).append(plan.name)
    for scaling, of_plans in names.items():
        yield scaling if len(names) == 1 else f"{', '.join(of_plans)}: {scaling}"


def _target_lines(emulation: Emulation) -> Lines:
    """How long each plan trained until it reached the target."""
    own = emulation.plans[0]
    for plan in emulation.plans:
        took = f"{plan.epochs} epoch(s), {format_seconds(plan.training_s)} of training"
        if not plan.target_reached:
            yield f"{plan.name}: {emulation.target} not reached in {took}"
        elif plan is own or not own.target_reached:
            yield f"{plan.name}: {emulation.target} after {took}"
        else:
            ratio = plan.training_s / own.training_s
            yield f"{plan.name}: {emulation.target} after {took}: {own.name} was {ratio:.3g} times as fast"


def _crowded(workers: int | None, cores: int | None) -> str:
    return f"{workers} workers shared {cores} core(s): on devices of their own they would be faster"


def _is_crowded(emulation: Emulation, plan: EmulatedPlan) -> bool:
    """Whether its workers computed on fewer cores than they are."""
    return emulation.compute == "real" and plan.workers > emulation.cores
